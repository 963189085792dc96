"""Compiles the TPU kernels and an 8B model's programs for TPUs that are not there; writes what libtpu says of them.

    make aot-tpu                                                        all parts
    .venv-aot-tpu/bin/python benchmarks/aot_tpu.py --only loops --rows OmniKV --out PAGE.md     of one part these rows

It needs libtpu and no TPU, and nothing runs on one: bytes are the compiler's, times are estimates by `perf_tpu`. With
`--out` each row is kept as soon as it is compiled, in a JSON file beside the page, from which the page is written anew:
rows that are not compiled this time stay as they were. It ends with 1 if a pool is not updated in place, is copied
where kernels alone read and write it, if a kernel of jaxkv's spills vector registers, if keys or values travel between
devices, or a plan's arithmetic is more than 10% off.
"""

import argparse
import functools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
# Plans are compiled by processes of their own, while this one has libtpu open.
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import aot_sharded
import jax
import perf_tpu
import shapes
from aot_tpu_kernels import Mesh, Row, compiled, kernel_rows, mesh_of, with_spills

import jaxkv
from benchmarks import hlo, plan_cells, record
from jaxkv.attention import Implementation
from jaxkv.cache.quantised import STORES
from jaxkv.planning.programs import Work, abstract_model, prefill_calls, traced_loop
from jaxkv.planning.setting import Setting
from jaxkv.planning.tpus import tpus
from jaxkv.planning.worker import compiled_program, on_devices

FEW = 4


class Loop(NamedTuple):
    """A decode loop to compile: policy, sequences, tokens of each prompt, layers, implementation, device, options."""

    policy: Any
    batch: int = 8
    tokens: int = 32768
    layers: int = 32
    implementation: Implementation = Implementation.TPU
    device: str = perf_tpu.DEVICE
    options: dict[str, str] | None = None


# The compiler brings weights to VMEM in slices beside products, each by a copy with a tuple of pointers; or at once.
WHOLE = {"xla_tpu_sliced_prefetch_max_slices": "1"}
LOOPS = {
    "FullKV, prompts of 1,024": Loop(jaxkv.FullKV(), tokens=1024),
    "SnapKV, by XLA": Loop(jaxkv.SnapKV(budget=1024), implementation=Implementation.XLA),
    "SnapKV": Loop(jaxkv.SnapKV(budget=1024)),
    "SnapKV, rows in 8 bits": Loop(jaxkv.SnapKV(budget=1024, store="int8")),
    "FullKV, rows in 8 bits, 4 sequences, 24 layers": Loop(
        jaxkv.FullKV(store="int8"), batch=4, layers=24
    ),
    "AdaKV": Loop(jaxkv.AdaKV(budget=1024)),
    "H2O": Loop(jaxkv.H2O(budget=1024)),
    "OmniKV, prompts of 4,096": Loop(
        jaxkv.OmniKV(budget=1024, filter_layers=(2, 8, 18)), tokens=4096
    ),
    "D2O": Loop(jaxkv.D2O(budget=1024)),
    "SnapKV, weights brought whole": Loop(jaxkv.SnapKV(budget=1024), options=WHOLE),
    "H2O, weights brought whole": Loop(jaxkv.H2O(budget=1024), options=WHOLE),
    "D2O, weights brought whole": Loop(jaxkv.D2O(budget=1024), options=WHOLE),
    "D2O, 4 layers": Loop(jaxkv.D2O(budget=1024), layers=FEW),
    "FullKV, 4 sequences, 24 layers": Loop(jaxkv.FullKV(), batch=4, layers=24),
    "FullKV, 4 sequences, a v5p": Loop(jaxkv.FullKV(), batch=4, device="v5p"),
}
# Eight v5e: policies that keep 1,024 rows a head of eight prompts.
SHARDED = {"SnapKV": jaxkv.SnapKV(budget=1024)}
CELLS = (
    plan_cells.Cell("llama-3.1-8b", "v6e", "SnapKV", 8, 32768),
    plan_cells.Cell("llama-3.1-8b", "v6e", "H2O", 8, 32768),
    plan_cells.Cell("llama-3.1-8b", "v6e", "D2O", 8, 32768),
    plan_cells.Cell("llama-3.1-8b", "v5p", "FullKV", 4, 32768),
    plan_cells.Cell("llama-3.1-8b", "v5ex8", "AdaKV", 4, 32768),
    plan_cells.Cell("llama-3.1-70b", "v5px8", "SnapKV", 4, 32768),
    plan_cells.Cell("llama-3.1-70b", "tpu7xx8", "FullKV", 4, 32768),
    plan_cells.Cell("llama-3.1-70b", "v6ex8", "H2O", 1, 32768),
)
LAYERS = {"by XLA": Implementation.XLA, "tpu": Implementation.TPU}


def work_of(loop: Loop, where: Mesh) -> Work:
    """`Work` of Llama 3 8B in bfloat16 for a loop."""
    flat = abstract_model(shapes.llama_3_8b(loop.layers), "bfloat16")
    given = {
        "batch": loop.batch,
        "tokens": loop.tokens,
        "new": 256,
        "implementation": loop.implementation,
    }
    return Work(flat=flat, policy=loop.policy, sharding=where.sharding, **given)


def loop_row(name: str, loop: Loop) -> Row:
    """Row of the decode loops' table."""
    where, sheet = mesh_of(loop.device), tpus()[loop.device]
    with jax.sharding.use_abstract_mesh(where.mesh.abstract_mesh):
        work = work_of(loop, where)
        traced, pools = traced_loop(work)
        memory, text, seconds = compiled(traced, loop.options)
    leaves = jax.tree.leaves(pools)
    arrays = [(hlo.NAMES[leaf.dtype.name], tuple(leaf.shape)) for leaf in leaves]
    size = sum(hlo.size_of(*each) for each in arrays)
    rows = {each for each in arrays if len(each[1]) == 3}
    copies, kernels = hlo.copies(text, rows), perf_tpu.kernels(text)
    budget = getattr(loop.policy, "budget", None) or loop.tokens
    found, inner = perf_tpu.step(text, budget)
    config = work.flat.config
    store = loop.policy.parts().store
    row_bytes, segments = store.row_bytes(config.head_dim, 2), loop.batch * config.kv_heads
    held = sum(pool.rows for pool in pools) // (config.kv_heads * config.layers)
    # Sparse layers read chosen rows by one kernel; another appends, and reads those since the prompt.
    sparse, chosen, rest = kernels["tpu_attend"], budget, held - loop.tokens
    dense, shared = kernels["tpu_decode"] - sparse, bool(kernels["tpu_add"])
    scoring = {
        "scores": shared or bool(kernels["tpu_rank"]),
        "windows": shared,
        "coded": store is STORES["int8"],
    }
    times = perf_tpu.decode_kernel(segments, held, row_bytes, **scoring) * dense
    times += perf_tpu.shared_pool(segments * config.layers, held, row_bytes // 2, kernels)
    times += (
        sum(perf_tpu.decode_kernel(segments, some, row_bytes) for some in (chosen, rest)) * sparse
    )
    times += (
        perf_tpu.eviction(loop.batch, config.kv_heads, held * config.kv_heads) * kernels["tpu_rank"]
    )
    moved = copies * max(hlo.size_of(*one) for one in rows) + 2 * perf_tpu.gathered(text)
    weights = memory.argument_size_in_bytes - size - 2 * config.vocab * config.embed
    read = segments * row_bytes * ((config.layers - sparse) * held + sparse * (chosen + rest))
    xla, ideal = (
        found / perf_tpu.CLOCK + moved / sheet.bandwidth,
        (weights + read) / sheet.bandwidth,
    )
    share = hlo.aliased(text) / size
    known = loop.device == perf_tpu.DEVICE
    cells = [
        name,
        f"{seconds:.0f}",
        f"{size / 1e9:.3f}",
        f"{share:.0%}",
        f"{memory.temp_size_in_bytes / 1e6:.0f}",
        f"{memory.temp_size_in_bytes / size:.1%}",
        str(copies),
        f"{len(inner)}",
        f"{found / 1e6:.2f}",
        str(kernels.total()),
        f"{1e3 * (xla + times):.2f}" if known else "-",
        f"{1e3 * ideal:.2f}",
    ]
    wrong = None
    if share < 1:
        wrong = f"{share:.0%} of the pools are updated in place"
    elif kernels["tpu_decode"] == config.layers and not sparse and copies:
        wrong = f"{copies} copies of pools that kernels alone read and write"
    return Row(cells, wrong)


def layer_row(name: str, implementation: Implementation, tokens: int = 32768) -> Row:
    """Row of the prefill's table: one of Llama 3 8B's layers over a prompt under SnapKV."""
    where = mesh_of(perf_tpu.DEVICE)
    with jax.sharding.use_abstract_mesh(where.mesh.abstract_mesh):
        asked = Loop(
            jaxkv.SnapKV(budget=1024),
            batch=1,
            tokens=tokens,
            layers=3,
            implementation=implementation,
        )
        work = work_of(asked, where)
        call = next(each for each in prefill_calls(work) if each.name == "layer")
        memory, text, seconds = compiled(call.traced)
    found, config = perf_tpu.cycles(text), work.flat.config
    kernels = text.count('custom_call_target="tpu_custom_call"')
    total = found / perf_tpu.CLOCK + kernels * perf_tpu.splash(1, config.heads, tokens)
    matrices = (
        2 * config.heads * config.head_dim
        + 2 * config.kv_heads * config.head_dim
        + 3 * config.hidden
    )
    flops = 2 * tokens * config.embed * matrices + 2 * config.heads * config.head_dim * tokens**2
    share = flops / total / tpus()[perf_tpu.DEVICE].products
    # By XLA blocks are as many as a prompt fills: an estimate has to know their number.
    times = [f"{1e3 * total:.0f}", f"{32 * total:.1f}", f"{share:.0%}"]
    cells = [
        name,
        f"{seconds:.0f}",
        f"{memory.temp_size_in_bytes / 1e9:.3f}",
        f"{found / 1e6:.0f}",
        str(kernels),
    ]
    return Row(cells + (times if perf_tpu.countable(text) else ["-"] * len(times)))


def sharded_row(name: str, policy: Any) -> Row:
    """Row of the table of sharded loops: Llama 3 8B's over eight v5e, and what one of them holds and sends."""
    began, config = time.perf_counter(), shapes.llama_3_8b()
    given = {"gpus": 8, "batch": 8, "context": 32768, "new": 256}
    with on_devices(
        Setting(model="8B", config=config, policy=policy, gpu=tpus()["v5e"], **given)
    ) as work:
        axes = work.flat.axes
        assert axes is not None
        traced, pools = traced_loop(work)
        made, text = compiled_program("decode", traced, platform="tpu")
    local = [aot_sharded.on_one(leaf, "B P D", axes) for leaf in jax.tree.leaves(pools)]
    size, copies = (
        sum(hlo.size_of(*each) for each in local),
        hlo.copies(text, {each for each in local if each[1][2:]}),
    )
    share, sent = (
        hlo.aliased(text) / size,
        [(each.kind, each.arrays, each.count) for each in made.sent],
    )
    sums = [each for each in sent if aot_sharded.is_sum({"embed": config.embed}, each)]

    def shown(some):
        return ", ".join(f"{count} x {kind} {arrays}" for kind, arrays, count in some) or "nothing"  # noqa: E731

    cells = [
        name,
        " x ".join(f"{count} {axis}" for axis, count in axes.mesh.shape.items()),
        f"{time.perf_counter() - began:.0f}",
        f"{made.arguments / 1e9:.2f}",
        f"{size / 1e9:.3f}",
        f"{share:.0%}",
        f"{made.temporaries / 1e6:.0f}",
        str(copies),
        shown(sums),
        shown([each for each in sent if each not in sums]),
    ]
    wrong = (
        f"{copies} copies of pools, {share:.0%} of them updated in place"
        if copies or share < 1
        else None
    )
    if any(config.head_dim in sizes for _, arrays, _ in sent for _, sizes in hlo.arrays_in(arrays)):
        wrong = "keys or values travel"
    return Row(cells, wrong)


def cell_row(cell: plan_cells.Cell) -> Row:
    """Row of the plan's table: peaks by its arithmetic and by `jaxkv plan --compile`."""
    found, cells, wrong = plan_cells.measure(cell), [cell.name], list[str]()
    for name, (mine, theirs, _) in plan_cells.compared(cell, found).items():
        error = plan_cells.off(mine, theirs)
        cells += [f"{mine / 1e9:.2f}", f"{theirs / 1e9:.2f}", f"{error:+.1%}"]
        cells += [found["prefill"]["name"]] if name == "prefill" else []
        wrong += [f"{name} is {error:+.1%} off"] if abs(error) > plan_cells.MOST else []
    return Row([*cells, f"{found['seconds']:.0f}"], ", ".join(wrong) or None)


class Part(NamedTuple):
    """A table: its title, the lines above it, its columns, and its rows by name, each a call that compiles it."""

    title: str
    lines: list[str]
    head: list[str]
    rows: dict[str, Callable[[], Row]]


def parts() -> dict[str, Part]:
    """Dict of the tables by the words that `--only` takes."""
    device = perf_tpu.DEVICE
    return {
        "kernels": Part(
            "Kernels",
            [
                "Shapes: batch, kv heads, group, head dim, rows of the pool or tokens of the prompt; bfloat16. Spilled",
                "are instructions that write or read vector registers in VMEM because there are too few. JAX's splash",
                "kernel holds logits of a block there so.",
            ],
            [
                "kernel",
                "device",
                "shape",
                "compiled, s",
                "pools in place",
                "temporaries, MB",
                "vectors spilled",
            ],
            kernel_rows(),
        ),
        "layers": Part(
            "A layer of a prompt of 32,768 tokens",
            [f"Llama 3 8B, bfloat16, one {device}."],
            [
                "implementation",
                "compiled, s",
                "temporaries, GB",
                "million cycles of XLA's",
                "kernels",
                "ms, estimate",
            ]
            + ["s of 32 layers, estimate", "of peak FLOP/s, estimate"],
            {name: functools.partial(layer_row, name, each) for name, each in LAYERS.items()},
        ),
        "loops": Part(
            "Decode loops",
            [
                f"Llama 3 8B, bfloat16, one {device}; 8 sequences, 32 layers, a budget of 1,024 and prompts of 32,768",
                "tokens if nothing else is said. The ideal reads weights and rows once, at the data sheet's bandwidth.",
                "OmniKV's sparse layers read chosen rows and those since the prompt. There is no estimate (-) on other",
                "devices. Of FullKV's 4 x 32,768 rows 24 layers fit a v6e. Brought whole are weights by an option of",
                "the compiler's (xla_tpu_sliced_prefetch_max_slices=1): else in slices, each with a tuple of pointers.",
            ],
            [
                "policy",
                "compiled, s",
                "pools, GB",
                "in place",
                "temporaries, MB",
                "of the pools",
                "copies of rows",
            ]
            + [
                "loops in a step",
                "million cycles of XLA's",
                "kernels",
                "ms a step, estimate",
                "ideal, ms",
            ]
            + ["vectors spilled by kernels"],
            {
                name: functools.partial(with_spills, functools.partial(loop_row, name, each))
                for name, each in LOOPS.items()
            },
        ),
        "sharded": Part(
            "A decode loop over eight v5e",
            [
                "Llama 3 8B, bfloat16, 8 prompts of 32,768 tokens, a budget of 1,024, tensor parallel: what one of the",
                "devices holds, and what travels between them in a step. Sums are those of hidden states.",
            ],
            [
                "policy",
                "mesh",
                "traced and compiled, s",
                "arguments, GB",
                "pools, GB",
                "in place",
                "temporaries, MB",
            ]
            + ["copies of rows", "sums", "what else travels"],
            {
                name: functools.partial(sharded_row, name, policy)
                for name, policy in SHARDED.items()
            },
        ),
        "cells": Part(
            "The arithmetic of a plan, and the compiler",
            [
                "Peaks of one device by arithmetic (`jaxkv plan`) and by libtpu (`jaxkv plan --compile`), bfloat16,",
                "budgets of 2,048 rows a head, 256 new tokens; `make plan-cells` has the same of GPUs.",
            ],
            [
                "model, TPUs, policy, prompts",
                "prefill by arithmetic, GB",
                "compiled, GB",
                "error",
                "largest program",
            ]
            + ["decode by arithmetic, GB", "compiled, GB", "error", "seconds"],
            {cell.name: functools.partial(cell_row, cell) for cell in CELLS},
        ),
    }


def commit() -> str:
    """This checkout's commit, with -dirty if files other than results have changed since."""
    git = ["git", "-C", str(record.ROOT)]
    named = subprocess.run(
        [*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
    )
    clean = (
        subprocess.run(
            [*git, "diff", "--quiet", "HEAD", "--", ".", ":!benchmarks/results"]
        ).returncode
        == 0
    )
    return named.stdout.strip() + ("" if clean else "-dirty")


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    """Lines of a Markdown table."""
    return ["| " + " | ".join(each) + " |" for each in (head, ["---"] * len(head), *rows)]


def report(kept: dict[str, Any]) -> str:
    """The Markdown page of the rows that were kept, by part and name: how it was made, and the tables."""
    rules = (perf_tpu.__doc__ or "").split("Rules:\n", 1)[1].rstrip()
    made = [{each["jax"]: each["commit"]} for each in kept.values()]
    versions = " and ".join(dict.fromkeys(version for each in made for version in each))
    commits = ", ".join(dict.fromkeys(one for each in made for one in each.values()))
    lines = [
        "# TPUs, by their compiler and a model",
        "",
        f"Compiled by libtpu of jax {versions} at {commits} (`benchmarks/aot_tpu.py`), on a machine without a TPU.",
        "**Nothing here ran on a TPU**: bytes are the compiler's, times are estimates, by these rules",
        "(`benchmarks/perf_tpu.py`):",
        "",
        rules,
    ]
    for name, part in parts().items():
        rows = [
            found["cells"] for row in part.rows if (found := kept.get(f"{name}: {row}")) is not None
        ]
        if rows:
            lines += ["", f"## {part.title}", "", *part.lines, "", *table(part.head, rows)]
    return "\n".join([*lines, ""])


def main() -> int:
    """Compiles everything, prints or writes the tables; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out",
        type=Path,
        help="write the tables there, as Markdown, and their rows beside, as JSON",
    )
    parser.add_argument("--only", choices=parts(), help="one part")
    parser.add_argument("--rows", default="", help="the rows whose names hold this")
    parser.add_argument(
        "--quick", action="store_true", help="the kernels, and three loops of few layers"
    )
    asked = parser.parse_args()
    chosen = {name: part.rows for name, part in parts().items() if asked.only in (None, name)}
    if asked.quick:
        few = {
            f"{name}, {FEW} layers": LOOPS[name]._replace(layers=FEW)
            for name in ("SnapKV", "H2O", "D2O")
        }
        loops = {
            name: functools.partial(with_spills, functools.partial(loop_row, name, few[name]))
            for name in few
        }
        chosen = {"kernels": kernel_rows(), "loops": loops}
    made, wrong = {"jax": jax.__version__, "commit": commit()}, list[str]()
    for part, rows in chosen.items():
        for name in (each for each in rows if asked.rows in each):
            row = rows[name]()
            print("\t".join(row.cells), flush=True)
            wrong += [f"{name}: {row.wrong}"] if row.wrong else []
            if asked.out is not None:
                kept = asked.out.with_suffix(".json")
                record.add(kept, f"{part}: {name}", {**made, "cells": row.cells})
                asked.out.write_text(report(json.loads(kept.read_text())), "utf-8")
    print(*wrong, sep="\n", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
