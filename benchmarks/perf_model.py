"""A performance model of decoding on a GPU that is not there: from SASS, XLA's thunks, and stated constants.

    .venv-aot/bin/python benchmarks/perf_model.py --out benchmarks/results/gpu_model.md      all of it: `make aot`
    .venv-aot/bin/python benchmarks/perf_model.py --quick                                    what CI runs
    .venv-aot/bin/python benchmarks/perf_model.py --repo CHECKOUT                            another checkout's kernels

Decode attention is compiled for cases of lengths, and decode loops of Llama 3 8B for policies; times come from the
model in `perf_gpu`, and have not been calibrated on a device. It ends with 1 where a rule is broken: a kernel spills;
loads less than 16 bytes a thread in its hot loop; has fewer bytes in flight than 1.5 times what latency asks for; lets
SMs idle that rows are enough for; merges for more than 10% of the pass over rows; takes 5% more for ragged segments
than for equal ones; reaches less than 80% of copy bandwidth where rows fill the device; prefill's kernel asks for less
than two groups of loads ahead; a step launches more than its policy may; is not one command buffer; copies a pool; or
has temporaries of 1% of the pools.
"""

import argparse
import concurrent.futures
import dataclasses
import multiprocessing
import os
import sys
import tempfile
from pathlib import Path

import aot
import perf_decode
import perf_gpu
import perf_steps

ROOT = Path(__file__).parents[1]
PLACES = ((1, 32768), (8, 32768), (1, 131072))
ESTIMATED = ("FullKV", "SnapKV", "AdaKV", "OmniKV", "H2O")
# Of more sequences than these, its filters score in a loop, which the model does not follow.
UNLOOPED = {"OmniKV": 15}
COUNTED = (1, 8)


@dataclasses.dataclass(frozen=True)
class Prefill:
    """The kernel of prefill attention, as compiled."""

    instructions: int
    ahead: int
    products: int
    registers: int
    wrong: tuple[str, ...]


def begin(folder, repo):
    """Prepares a worker: where XLA writes to, and whose kernels are imported."""
    perf_decode.begin(folder)
    sys.path.insert(0, str(repo))


def run_case(case, device):
    """An estimate of decode attention."""
    import pallas_kernels

    return perf_decode.run(pallas_kernels, case, device)


def run_step(setting, device):
    """An estimate of a decode step."""
    return perf_steps.run(setting, device)


def run_prefill(device):
    """Prefill's kernel, compiled and read; None where that is not a kernel of Pallas' Triton backend."""
    dump = perf_decode.emptied()
    function, shapes = aot.arguments(aot.Case("flash", "Llama-3-8B", "bfloat16", device.name))
    aot.compile_for(device.name, function, *shapes)
    found = next(iter(perf_decode.found_in(dump, ("flash_prefill",)).values()))
    body = found.code.body(found.code.hot) if found.code.hot else found.code.operations
    return Prefill(
        instructions=len(body),
        ahead=perf_decode.perf_sass.left_in_flight(body),
        products=sum("GMMA" in each for each in body),
        registers=found.registers,
        wrong=tuple(perf_decode.prefill_faults(found)),
    )


def settings(quick):
    """The loops that are compiled."""
    of = perf_steps.Setting
    if quick:
        # Launches by one sequence, whose products XLA pads, and by eight; temporaries by eight.
        places = (("FullKV", 1), ("AdaKV", 8), ("H2O", 8), ("D2O", 8), ("OmniKV", 1))
        layers = (perf_steps.SMALL, perf_steps.LESS)
        return [of(policy, batch, 32768, count) for policy, batch in places for count in layers]
    found = [of(policy, *place) for policy in ESTIMATED for place in PLACES]
    found += [of(policy, batch, 32768) for policy in perf_steps.LAUNCHES for batch in COUNTED]
    found += [
        of(policy, batch, 32768, perf_steps.LESS)
        for policy in perf_steps.LAUNCHES
        for batch in COUNTED
    ]
    return list(dict.fromkeys(found))


def line(*cells):
    """A row of a table."""
    return f"| {' | '.join(map(str, cells))} |"


def head(*names):
    """The first two rows of a table."""
    return [line(*names), "|---" * len(names) + "|"]


def cases_table(cases, estimates, device):
    """The table of decode attention, and its faults."""
    names = (
        "case",
        "programs",
        "rows, us",
        "merge, us",
        "launches",
        "share of copy",
        "in flight per SM, KiB",
    )
    lines = head(*names, "kernel", "against equal segments")
    wrong = []
    for case in cases:
        found, like = estimates[case.name], estimates.get(case.like)
        kernel = f"{found.found.registers} registers, {found.found.thunk.shared} B shared, {found.resident} CTAs an SM"
        ratio = f"{(found.rows + found.merge) / (like.rows + like.merge):.2f}" if like else "-"
        share = f"{found.share(device):.0%}" + ("" if found.filled else " (not filled)")
        times = (f"{found.rows * 1e6:.1f}", f"{found.merge * 1e6:.1f}")
        flight = f"{found.flight / 1024:.0f}"
        lines.append(
            line(case.name, found.ctas, *times, found.launches, share, flight, kernel, ratio)
        )
        wrong += [f"{case.name}: {each}" for each in perf_decode.faults(found, device, like)]
    return lines, wrong


def counts_table(steps):
    """The table of launches a layer, and its faults."""
    lines = head(
        "policy",
        "sequences",
        "launches a layer",
        "at most",
        "a step",
        "inner loops",
        "command buffers",
    )
    wrong = []
    for policy, most in perf_steps.LAUNCHES.items():
        for batch in COUNTED:
            mine = [
                step
                for at, step in steps.items()
                if (at.policy, at.batch, at.tokens) == (policy, batch, 32768)
            ]
            if len(mine) < 2:
                continue
            each, whole = (
                perf_steps.per_layer(mine),
                max(mine, key=lambda step: step.setting.layers),
            )
            buffers = f"{whole.buffers}, {whole.outside} launches outside"
            shown = f"{whole.launches} ({whole.setting.layers} layers)"
            lines.append(line(policy, batch, f"{each:.1f}", most, shown, whole.inner, buffers))
            wrong += [
                f"{policy}, {batch} sequences: {each}" for each in perf_steps.too_many(policy, each)
            ]
    return lines, wrong


def steps_table(steps):
    """The tables of estimated steps, and of the largest batches."""
    lines = head(
        "sequences x tokens",
        "policy",
        "ideal, ms",
        "estimate, ms",
        "tokens/s",
        "gain, ideal",
        "gain",
        "attention, ms",
    )
    for batch, tokens in PLACES:
        found = {policy: steps[perf_steps.Setting(policy, batch, tokens)] for policy in ESTIMATED}
        full = found["FullKV"]
        for policy, step in found.items():
            gains = (f"{full.ideal / step.ideal:.2f}", f"{full.time / step.time:.2f}")
            times = (
                f"{step.ideal * 1e3:.2f}",
                f"{step.time * 1e3:.2f}",
                f"{batch / step.time:.0f}",
            )
            lines.append(
                line(f"{batch} x {tokens}", policy, *times, *gains, f"{step.attention * 1e3:.2f}")
            )
    lines += [
        "",
        *head("policy", "bytes of a sequence, MB", "largest batch", "ms a step", "tokens/s"),
    ]
    for policy in ESTIMATED:
        step = steps[perf_steps.Setting(policy, 8, 32768)]
        times = (f"{step.largest_time * 1e3:.1f}", f"{step.largest / step.largest_time:.0f}")
        if step.largest > UNLOOPED.get(policy, step.largest):
            times = ("-", "-")
        lines.append(
            line(policy, f"{step.pools / step.setting.batch / 1e6:.0f}", step.largest, *times)
        )
    return lines


def memory_table(steps):
    """What steps hold beside their pools."""
    lines = head(
        "sequences x tokens",
        "layers",
        "policy",
        "pools, MB",
        "temporaries, MB",
        "share",
        "copies of a pool",
    )
    for at, step in steps.items():
        sizes = (
            f"{step.pools / 1e6:.0f}",
            f"{step.temporaries / 1e6:.1f}",
            f"{step.temporaries / step.pools:.2%}",
        )
        lines.append(line(f"{at.batch} x {at.tokens}", at.layers, at.policy, *sizes, step.copies))
    return lines


def text_of(device, tables):
    """The report, with what it rests on."""
    title = f"# Decoding on an {device.name.upper()} that is not there"
    constants = (
        f"{device.sms} SMs, copies at {device.copy / 1e12:.2f} TB/s, {perf_gpu.LAUNCH * 1e6:.1f} us between the nodes "
        f"of a graph and {perf_gpu.SMALL * 1e6:.1f} us for a small kernel, {perf_gpu.L2_LATENCY * 1e6:.2f} us for a "
        f"dependent load from L2, {perf_gpu.MEMORY_LATENCY * 1e6:.1f} us from memory"
    )
    return "\n".join(
        [
            title,
            "",
            "`make aot` writes this. **Every time and every speed here is an estimate of a model; nothing has run on a",
            "GPU.** Registers, shared memory, loads in flight, launches, copies and temporaries are read from programs",
            f"that XLA compiled. The model (`benchmarks/perf_gpu.py`): {constants}.",
            *tables,
            "",
        ]
    )


def written(device, cases, estimates, prefill, steps, quick):
    """The report and the faults."""
    table, wrong = cases_table(cases, estimates, device)
    tables = [
        "",
        "## Decode attention",
        "",
        "bfloat16 rows or codes, Llama 3 8B's heads: 8 of keys, 4 queries each, 128 wide.",
        "",
    ]
    tables += table
    if prefill:
        said = (
            f"{prefill.instructions} instructions, {prefill.products} "
            f"warpgroup products, {prefill.registers} registers"
        )
        tables += [
            "",
            "## Prefill attention",
            "",
            f"`flash`, the hot loop: {said}, {prefill.ahead} groups of loads ahead.",
        ]
        wrong += [f"flash: {each}" for each in prefill.wrong]
    if steps:
        counted, faults = counts_table(steps)
        tables += [
            "",
            "## Launches of a step",
            "",
            "The loop over tokens of Llama 3 8B after 32768 tokens. [An engine's slots](aot_slots.md) have a table of "
            "their own.",
            "",
            *counted,
        ]
        wrong += faults
        for place in dict.fromkeys((at.policy, at.batch, at.tokens) for at in steps):
            mine = [step for at, step in steps.items() if (at.policy, at.batch, at.tokens) == place]
            wrong += ["{}, {} x {}: {}".format(*place, each) for each in perf_steps.faults(mine)]
        tables += ["", "## Memory of a step", "", *memory_table(steps)]
    if steps and not quick:
        tables += ["", "## Steps of Llama 3 8B, estimated", "", STEPS, "", *steps_table(steps)]
    return text_of(device, tables), wrong


STEPS = """Budgets of 1024 rows a head; AdaKV's heads differ tenfold. Ideal is the bytes of weights and rows at copy
bandwidth. Matrix products are taken as their weights' bytes at copy bandwidth, or as their operations at 600 TFLOP/s
where that is longer, for deviceless compilation does not tune them. The second table is of 32768 tokens: the largest
batch whose weights, pools and temporaries take all of the device; what prefill needs at its height is not counted.
OmniKV's filters are layers 2, 8 and 18: these, the layers behind them and the two below the first read all tokens, the
others 1024 picked ones, taken to come as fast as neighbours. For scores a filter reads its keys once more, which the
ideal leaves out, and its logits travel; passes of its sorts beyond the first are taken to stay in L2. From 16 sequences
on it scores in a loop, which the model does not follow: so the largest batch has no speed. Steps are the first after
the prompt."""


def main():
    """Compiles, prints and writes the tables; exits with 1 where a rule is broken."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--repo", type=Path, help="the kernels of this checkout, decode attention alone"
    )
    parser.add_argument("--decode", action="store_true", help="decode attention alone")
    parser.add_argument(
        "--quick", action="store_true", help="launches by short models, no estimates of steps"
    )
    parser.add_argument("--device", choices=perf_gpu.DEVICES, default="h200")
    parser.add_argument("--out", type=Path, help="write the tables here as well")
    args = parser.parse_args()
    device, alone = perf_gpu.DEVICES[args.device], args.repo is not None or args.decode
    repo, cases = (args.repo or ROOT).resolve(), perf_decode.CASES
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("spawn")
        with concurrent.futures.ProcessPoolExecutor(
            max_workers=os.cpu_count(),
            mp_context=context,
            initializer=begin,
            initargs=(folder, repo),
        ) as pool:
            wanted = [] if alone else settings(args.quick)
            steps = {each: pool.submit(run_step, each, device) for each in wanted}
            prefill = None if alone else pool.submit(run_prefill, device)
            estimates = {case.name: pool.submit(run_case, case, device) for case in cases}
            estimates = {name: each.result() for name, each in estimates.items()}
            steps = {each: found.result() for each, found in steps.items()}
            prefill = prefill and prefill.result()
    text, wrong = written(device, cases, estimates, prefill, steps, args.quick)
    print(text)
    if args.out:
        args.out.write_text(text)
    for each in wrong:
        print(f"FAULT {each}", file=sys.stderr)
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
