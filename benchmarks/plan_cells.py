"""A plan's arithmetic beside what the compiler says, cell by cell.

    make plan-cells                                             every cell that is not yet in the results
    .venv-aot/bin/python -m benchmarks.plan_cells --only 8b     of those the ones whose names hold this
    .venv-aot/bin/python -m benchmarks.plan_cells --quick       one of two layers: what CI runs

A cell is a model on GPUs that are not there, a policy with a budget of 2048 rows a head, and prompts in bfloat16. The
compiler's figures are kept as soon as they are there, so that a run which was ended goes on where it stood; the
arithmetic is done anew each time the table is written. It fails where a peak is more than 10% off. Needs .venv-aot.
"""

import argparse
import dataclasses
import json
import sys
import time

from benchmarks import record

RESULTS = record.RESULTS / "plan_cells.json"
MOST = 0.10
# Filter layers as of Llama 3 8B, at their heights in deeper models.
FILTERS = {32: (2, 8, 18), 80: (5, 20, 45)}
HEAD = """# The arithmetic of a plan, and the compiler

`make plan-cells` writes this: peaks of one GPU by arithmetic (`jaxkv plan`) and by XLA, compiled for GPUs that are not
there (`jaxkv plan --compile`); nothing has run on a GPU. All layers, bfloat16, budgets of 2048 rows a head, 256 new
tokens. A peak is arguments + temporaries + outputs that are not written in place; a prefill's also counts what lies
beside its largest program, which is named. "Of the rest" is the error without the weights, which both know exactly.
"""


@dataclasses.dataclass(frozen=True)
class Cell:
    """What is compiled."""

    model: str
    gpus: str
    policy: str
    batch: int
    context: int
    data: int = 1

    @property
    def name(self):
        """What the cell is called."""
        groups = f" in {self.data} groups" if self.data > 1 else ""
        return f"{self.model} on {self.gpus}{groups}, {self.policy}, {self.batch} x {self.context}"


CELLS = (
    Cell("llama-3.1-8b", "h100", "FullKV", 1, 8192),
    Cell("llama-3.1-8b", "h100", "SnapKV", 8, 32768),
    Cell("llama-3.1-8b", "a100x2", "AdaKV", 4, 32768),
    Cell("mistral-7b-v0.3", "h100", "H2O", 4, 32768),
    Cell("qwen2.5-7b", "a100", "D2O", 1, 32768),
    Cell("llama-3.1-8b", "l4", "PyramidKV", 1, 8192),
    Cell("llama-3.1-70b", "h100x8", "FullKV", 4, 131072),
    Cell("llama-3.1-70b", "h100x8", "AdaKV", 4, 131072),
    Cell("llama-3.1-70b", "h100x8", "OmniKV", 4, 131072),
    Cell("llama-3.1-70b", "h200x8", "D2O", 4, 131072),
    Cell("llama-3.1-70b", "h100x8", "H2O", 1, 65536),
    Cell("llama-3.1-8b", "h100x8", "SnapKV", 8, 65536, data=2),
    Cell("qwen2.5-72b", "h200x8", "SnapKV", 4, 32768),
    Cell("llama-3.1-405b", "h100x16", "AdaKV", 4, 131072),
)


# What CI compiles: two layers, and GPUs that send one another something.
QUICK, LAYERS = Cell("llama-3.1-8b", "h100x2", "AdaKV", 2, 8192), 2


def setting_of(cell):
    """A cell as a plan's setting."""
    import jaxkv
    from jaxkv.planning.catalog import model_named
    from jaxkv.planning.named import accelerators_named
    from jaxkv.planning.setting import Setting

    config = model_named(cell.model).config
    config = dataclasses.replace(config, layers=LAYERS) if cell is QUICK else config
    gpu, count = accelerators_named(cell.gpus)
    options = {} if cell.policy == "FullKV" else {"budget": 2048}
    if cell.policy == "OmniKV":
        options["filter_layers"] = FILTERS[config.layers]
    policy = getattr(jaxkv, cell.policy)(**options)
    where = {"gpu": gpu, "gpus": count, "data": cell.data}
    return Setting(
        model=cell.model,
        config=config,
        policy=policy,
        batch=cell.batch,
        context=cell.context,
        **where,
    )


def measure(cell):
    """The compiler's figures."""
    from jaxkv.planning.compiled import compile_plan

    began = time.perf_counter()
    made = compile_plan(setting_of(cell))
    figures = dataclasses.asdict(made) | {
        "peaks": {"prefill": made.prefill.peak, "decode": made.decode.peak}
    }
    return figures | {"seconds": round(time.perf_counter() - began, 1)}


def compared(cell, found):
    """For prefill and decode the peak by arithmetic and by the compiler, and both without weights."""
    from jaxkv.planning.sizes import sizes_of

    sizes = sizes_of(setting_of(cell))
    peaks = {"prefill": sizes.prefill_peak, "decode": sizes.decode_peak}
    return {name: (mine, found["peaks"][name], found["weights"]) for name, mine in peaks.items()}


def off(mine, theirs, weights=0):
    """By how much the arithmetic is off, as a share of the compiler's figure."""
    return (mine - weights) / (theirs - weights) - 1


def line_of(cell, found):
    """A row of the table."""
    cells = [cell.name]
    for name, (mine, theirs, weights) in compared(cell, found).items():
        error, rest = off(mine, theirs), off(mine, theirs, weights)
        cells += [f"{mine / 1e9:.2f}", f"{theirs / 1e9:.2f}", f"{error:+.1%}", f"{rest:+.1%}"]
        cells += [found["prefill"]["name"]] if name == "prefill" else []
    sent = sum(each["count"] for each in found["decode"]["sent"])
    cells += [str(sent), f"{len(found['spills'])} of {found['kernels']}", f"{found['seconds']:.0f}"]
    return "| " + " | ".join(cells) + " |"


def faults(cell, found):
    """Where the arithmetic is too far off."""
    errors = {name: off(mine, theirs) for name, (mine, theirs, _) in compared(cell, found).items()}
    return [
        f"{cell.name}: {name} is {error:+.1%} off"
        for name, error in errors.items()
        if abs(error) > MOST
    ]


def write(results):
    """Both files, each whole at any time."""
    record.save(RESULTS, results)
    columns = ["model, GPUs, policy, prompts"]
    for name in ("prefill", "decode"):
        columns += [f"{name} by arithmetic, GB", "compiled, GB", "error", "of the rest"]
        columns += ["largest program"] if name == "prefill" else []
    columns += ["transfers a step", "kernels that spill", "seconds"]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    lines += [line_of(cell, results[cell.name]) for cell in CELLS if cell.name in results]
    RESULTS.with_suffix(".md").write_text("\n".join([HEAD, *lines, ""]))


def main():
    """Compiles what is missing, writes each cell, exits with 1 where the arithmetic is off."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", default="", help="of the missing cells those whose names hold this"
    )
    parser.add_argument(
        "--quick", action="store_true", help="one cell of two layers, of which nothing is written"
    )
    options = parser.parse_args()
    if options.quick:
        found = measure(QUICK)
        print(line_of(QUICK, found))
        wrong = faults(QUICK, found)
        sys.exit("\n".join(f"FAULT {each}" for each in wrong) or 0)
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    wrong = []
    for cell in CELLS:
        if cell.name not in results and options.only in cell.name:
            results[cell.name] = measure(cell)
            write(results)
        if cell.name in results:
            print(line_of(cell, results[cell.name]), flush=True)
            wrong += faults(cell, results[cell.name])
    write(results)
    print("\n".join(f"FAULT {each}" for each in wrong), file=sys.stderr)
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
