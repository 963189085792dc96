"""Compiles an engine's decode loop for GPUs that are not there, beside the loop of one batch of as many sequences.

    make aot-slots

Llama 3.1 8B on one H200 and 70B on eight H100s, 256 slots, bfloat16, budgets of 1024 rows a head after 32,768 tokens,
room for 256 new ones. In slots every sequence has its own sampler, key, end ids and number of tokens; a batch is drawn
greedily. It fails where the loop in slots copies a pool, leaves its one command buffer, launches more in a layer or has
more temporaries than its samplers' sorted logits explain. Times are the performance model's, measured on no GPU.
"""

import argparse
import concurrent.futures
import multiprocessing
import sys
import tempfile
from pathlib import Path

import aot_sharded
import perf_decode
import perf_gpu
import perf_steps

RESULTS = Path(__file__).parent / "results" / "aot_slots.md"
SLOTS, TOKENS, DEVICE = 256, 32768, "h200"
POLICIES = ("SnapKV", "AdaKV", "H2O")
COLUMNS = (
    "program",
    "policy",
    "launches a step",
    "command buffers, launches outside",
    "temporaries",
    "copies of pools",
)
COLUMNS += ("a step, estimated", "tokens/s, estimated")
HEAD = """# The loop of an engine's slots, compiled for GPUs that are not there

`make aot-slots` writes this. Llama 3.1 8B on one H200 and 70B on eight H100s, 256 sequences, bfloat16, budgets of 1024
rows a head after 32,768 tokens, room for 256 new ones. "batch" is `generate`'s loop, which draws greedily; in "slots"
every sequence has its own sampler, key, end ids and number of tokens. Temporaries are one GPU's. Times are the
performance model's (8B) and the plan's arithmetic (70B), which knows no slots; nothing has run on a GPU.
"""


def begin(folder):
    """Prepares a process: where XLA writes to."""
    perf_decode.begin(folder)


def step_of(policy, slots):
    """The 8B loop's `perf_steps.Step`."""
    return perf_steps.run(
        perf_steps.Setting(policy, SLOTS, TOKENS, slots=slots), perf_gpu.DEVICES[DEVICE]
    )


def sharded_of(policy, slots):
    """The 70B loop's figures, as `aot_sharded.measure` has them."""
    import jax

    from benchmarks import hlo
    from jaxkv.planning.planner import known_model, setting_of
    from jaxkv.planning.programs import traced_loop
    from jaxkv.planning.setting import Asked
    from jaxkv.planning.sizes import weights_of
    from jaxkv.planning.speed import estimate
    from jaxkv.planning.worker import compiled_program, on_devices

    known = known_model("llama-3.1-70b")
    made = {
        "policy": perf_steps.policy_of(perf_steps.Setting(policy, SLOTS, TOKENS)),
        "batch": SLOTS,
        "dtype": "bfloat16",
        "weights": None,
    }
    setting, _ = setting_of(
        known, "h100x8", None, Asked(context=TOKENS, new=aot_sharded.NEW, **made)
    )
    with on_devices(setting) as work:
        traced, pools = traced_loop(perf_steps.in_slots(work, slots))
        compiled, text = compiled_program("decode", traced)
        local = {
            aot_sharded.on_one(leaf, "B P D", work.flat.axes) for leaf in jax.tree.leaves(pools)
        }
    speed = estimate(setting, weights_of(setting.config, setting.dtype, setting.mesh))
    return {
        "temporaries": compiled.temporaries,
        "copies": hlo.copies(text, local),
        "pools": sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(pools))
        // setting.gpus,
        "aliased": compiled.aliased,
        "sums": sum(each.count for each in compiled.sent if each.kind == "all-reduce"),
        "step": speed.step,
    }


def row_of(model, policy, slots):
    """Figures of one loop, as a dict: of 8B by the performance model, of 70B by shapes and the plan's arithmetic."""
    if model == "70B":
        return sharded_of(policy, slots)
    step = step_of(policy, slots)
    return {
        "launches": step.launches,
        "buffers": step.buffers,
        "outside": step.outside,
        "conditions": step.conditions,
        "temporaries": step.temporaries,
        "copies": step.copies,
        "pools": step.pools,
        "step": step.time,
    }


def line_of(model, policy, slots, found):
    """A row of the table."""
    launches = str(found.get("launches", "-"))
    if found.get("conditions"):
        launches += f" and {found['conditions']} conditions"
    buffers = f"{found['buffers']}, {found['outside']}" if "buffers" in found else "-"
    share = found["temporaries"] / found["pools"]
    cells = [f"{model}, {'slots' if slots else 'batch'}", policy, launches, buffers]
    cells += [f"{found['temporaries'] / 1e6:,.1f} MB ({share:.2%} of pools)", str(found["copies"])]
    cells += [f"{found['step'] * 1e3:.1f} ms", f"{SLOTS / found['step']:,.0f}"]
    return f"| {' | '.join(cells)} |"


def faults(name, batch, slots, vocab=128256):
    """What slots add to the loop of a batch that they may not."""
    wrong = [f"{name}: pools are copied {slots['copies']} times"] if slots["copies"] else []
    if slots.get("buffers", 1) != 1 or slots.get("outside"):
        wrong.append(
            f"{name}: {slots['buffers']} command buffers, {slots['outside']} launches outside"
        )
    # Samplers sort logits and their indices, and keep the sorted ones and their sums.
    more = slots["temporaries"] - batch["temporaries"]
    if more > 8 * 4 * SLOTS * vocab:
        wrong.append(f"{name}: {more:,} bytes of temporaries more")
    return wrong


def main():
    """Compiles all loops, prints and writes the table; exits with 1 where a rule is broken."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, default=RESULTS, help="the table's file (default: %(default)s)"
    )
    options = parser.parse_args()
    wanted = [
        (model, policy, slots)
        for model in ("8B", "70B")
        for policy in POLICIES
        for slots in (False, True)
    ]
    lines = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("spawn")
        given = {
            "max_workers": 1,
            "mp_context": context,
            "initializer": begin,
            "initargs": (folder,),
        }
        with concurrent.futures.ProcessPoolExecutor(**given) as pool:
            found = {}
            for each in wanted:
                found[each] = pool.submit(row_of, *each).result()
                lines.append(line_of(*each, found[each]))
                print(lines[-1], flush=True)
    options.out.write_text("\n".join([HEAD, *lines, ""]))
    wrong = [
        fault
        for model, policy, slots in wanted
        if slots
        for fault in faults(
            f"{model}, {policy}", found[model, policy, False], found[model, policy, True]
        )
    ]
    for each in wrong:
        print(f"FAULT {each}", file=sys.stderr)
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
