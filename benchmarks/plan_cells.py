"""A plan's arithmetic beside what the compiler says, cell by cell.

    make plan-cells                                             every cell that is not yet in the results
    .venv-aot/bin/python -m benchmarks.plan_cells --only 8b     of those the ones whose names hold this

A cell is a model on GPUs that are not there, a policy with a budget of 2048 rows a head, and prompts in bfloat16. The
compiler's figures are kept as soon as they are there, so that a run which was ended goes on where it stood; the
arithmetic is done anew each time the table is written. It fails where a peak is more than 10% off. Needs .venv-aot.
"""

import argparse
import dataclasses
import json
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


def setting_of(cell):
    """A cell as a plan's setting."""
    import jaxkv
    from jaxkv.models.config import ModelConfig
    from jaxkv.planning.gpus import gpus_named
    from jaxkv.planning.setting import Setting

    text = json.loads((record.ROOT / "jaxkv/planning/data/models" / f"{cell.model}.json").read_text())
    config = ModelConfig.from_hf(text["config"])
    gpu, count = gpus_named(cell.gpus)
    options = {} if cell.policy == "FullKV" else {"budget": 2048}
    if cell.policy == "OmniKV":
        options["filter_layers"] = FILTERS[config.layers]
    policy = getattr(jaxkv, cell.policy)(**options)
    where = {"gpu": gpu, "gpus": count, "data": cell.data}
    return Setting(model=cell.model, config=config, policy=policy, batch=cell.batch, context=cell.context, **where)


def measure(cell):
    """The compiler's figures."""
    from jaxkv.planning.compiled import compile_plan

    began = time.perf_counter()
    made = compile_plan(setting_of(cell))
    figures = dataclasses.asdict(made)
    return figures | {"peaks": [made.prefill.peak, made.decode.peak], "seconds": round(time.perf_counter() - began, 1)}


def main():
    """Compiles what is missing, writes each cell, exits with 1 where arithmetic is off."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cells whose names hold this")
    options = parser.parse_args()
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for cell in CELLS:
        if cell.name not in results and options.only in cell.name:
            results[cell.name] = measure(cell)
            record.save(RESULTS, results)
            found = results[cell.name]
            print(
                cell.name,
                found["prefill"]["name"],
                [f"{each / 1e9:.2f}" for each in found["peaks"]],
                found["seconds"],
                flush=True,
            )


if __name__ == "__main__":
    main()
