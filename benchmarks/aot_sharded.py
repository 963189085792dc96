"""Compiles the decode loop and a prefill layer of large models for eight and sixteen H100s that are not there.

    make aot-sharded                                            every row that is not yet in the results
    .venv-aot/bin/python benchmarks/aot_sharded.py --quick      eight layers and one policy: what CI runs

The programs are the library's own, `jaxkv.engine.loop` and `jaxkv.engine.prefill`, traced for shapes: 128K tokens in
each of four sequences, 2048 rows a head after them (all of them for policies that drop none), room for 256 new ones,
attention by the Pallas kernels. Read off is what one GPU holds, and what travels between them.

It fails where a row breaks a bound: a pool is copied, or not written in place; temporaries pass 2% of the pools; other
than two sums of hidden states a layer and one for the embedding travel; anything with head dims travels. A row is a
process of its own, and is kept as soon as it is done: a run that was ended goes on where it stood. Rows of other
sources are compiled anew. Needs .venv-aot.
"""

import argparse
import dataclasses
import hashlib
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import aot

from benchmarks import hlo

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "aot_sharded.json"
TOKENS, NEW = 131072, 256
BATCH = 4
# What an H100 has, as its data sheet says it.
MEMORY = 80e9
# A prefill layer's temporaries, as a share of the hidden states.
PREFILL_SHARE = 0.5


@dataclasses.dataclass(frozen=True)
class Row:
    """What is compiled: a model's program, on so many hosts of eight GPUs, for a policy."""

    model: str
    hosts: int
    program: str
    policy: str
    layers: int | None = None
    # It is known not to fit, which is what the row is there to say.
    too_large: bool = False

    @property
    def name(self):
        """What the row is called."""
        return f"{self.model}-{self.program}-{self.policy}"


DECODE = ("FullKV", "SnapKV", "AdaKV", "H2O", "D2O", "OmniKV")
ROWS = (
    *(Row("70B", 1, "decode", policy) for policy in DECODE),
    Row("405B", 2, "decode", "FullKV", too_large=True),
    *(Row("405B", 2, "decode", policy) for policy in ("SnapKV", "AdaKV", "H2O", "D2O")),
    *(Row("70B", 1, "prefill", policy) for policy in ("FullKV", "SnapKV", "D2O")),
)
QUICK = Row("70B", 1, "decode", "D2O", layers=8)


def policy_of(name):
    """The policy of a row."""
    import jaxkv

    options = {} if name == "FullKV" else {"budget": 2048}
    if name == "OmniKV":
        # At the heights of Llama 3 8B's, 2, 8 and 18 of 32.
        options["filter_layers"] = (5, 20, 45)
    return getattr(jaxkv, name)(**options)


def setting_of(row):
    """What is planned for; of a prefill a single prompt."""
    import shapes

    from jaxkv.planning.gpus import gpus
    from jaxkv.planning.setting import Setting

    make = {"70B": shapes.llama_3_70b, "405B": shapes.llama_3_405b}[row.model]
    config = make() if row.layers is None else make(row.layers)
    batch = BATCH if row.program == "decode" else 1
    given = {"gpus": 8 * row.hosts, "batch": batch, "context": TOKENS, "new": NEW}
    return Setting(
        model=row.model, config=config, policy=policy_of(row.policy), gpu=gpus()["h100"], **given
    )


def traced(work, program):
    """The loop over tokens or a layer of a prefill, traced, and what it writes in place."""
    import jax

    from jaxkv.planning.programs import prefill_calls, traced_loop

    if program == "decode":
        return traced_loop(work)
    hidden = jax.ShapeDtypeStruct((work.batch, TOKENS, work.flat.config.embed), work.dtype)
    return next(call.traced for call in prefill_calls(work) if call.name == "layer"), (hidden,)


def on_one(leaf, letters, axes):
    """What one GPU has of an array, as HLO names it."""
    import jax

    spec = axes.spec(" ".join(letters.split()[: leaf.ndim]), leaf.shape)
    shape = jax.sharding.NamedSharding(axes.mesh, spec).shard_shape(leaf.shape)
    return hlo.NAMES[leaf.dtype.name], tuple(shape)


def measure(row):
    """Compiles a row; returns its figures."""
    import jax

    from jaxkv.planning.worker import compiled_program, on_devices

    began = time.perf_counter()
    setting = setting_of(row)
    config = setting.config
    with on_devices(setting) as work:
        axes = work.flat.axes
        program, written = traced(work, row.program)
        made, text = compiled_program(row.program, program, seconds=time.perf_counter() - began)
    letters = "B S E" if row.program == "prefill" else "B P D"
    local = [on_one(leaf, letters, axes) for leaf in jax.tree.leaves(written)]
    return {
        "gpus": axes.mesh.size,
        "mesh": dict(axes.mesh.shape),
        "layers": config.layers,
        "layers_of_model": setting_of(dataclasses.replace(row, layers=None)).config.layers,
        "embed": config.embed,
        "head_dim": config.head_dim,
        "batch": setting.batch,
        "rows": sorted({sizes[1] for _, sizes in local}),
        "written": sum(hlo.size_of(*each) for each in local),
        "arguments": made.arguments,
        "outputs": made.outputs,
        "temporaries": made.temporaries,
        "peak": made.peak,
        "aliased": hlo.aliased(text),
        "copies": hlo.copies(text, set(local)),
        "sent": [
            [kind, hlo.shown(arrays), count]
            for (kind, arrays), count in sorted(hlo.collectives(text).items())
        ],
        "trace_seconds": round(made.trace_seconds, 1),
        "compile_seconds": round(made.compile_seconds, 1),
    }


def faults(row, found):
    """Which bounds a row breaks."""
    wrong, temporaries = [], found["temporaries"]
    if found["copies"]:
        wrong.append(f"what is written is copied {found['copies']} times")
    if found["aliased"] < found["written"]:
        wrong.append(f"{found['written'] - found['aliased']:,} bytes are not written in place")
    share = PREFILL_SHARE
    if row.program == "decode":
        share = aot.TEMP_SHARE * found["layers_of_model"] / found["layers"]
        sums = sum(each[-1] for each in found["sent"] if is_sum(found, each))
        if sums != 2 * found["layers"] + 1:
            wrong.append(f"{sums} sums of hidden states travel")
    if temporaries > share * found["written"]:
        wrong.append(
            f"temporaries are {temporaries:,} bytes, more than {share * found['written']:,.0f}"
        )
    if (found["peak"] > MEMORY) != row.too_large:
        wrong.append(f"the peak is {found['peak'] / 1e9:.1f} GB")
    for kind, arrays, _ in found["sent"]:
        if any(found["head_dim"] in sizes for _, sizes in hlo.arrays_in(arrays)):
            wrong.append(f"keys or values travel: {kind} of {arrays}")
    return wrong


def is_sum(found, sent):
    """Whether hidden states are what is summed."""
    kind, arrays, _ = sent
    sizes = [sizes for _, sizes in hlo.arrays_in(arrays)]
    return kind == "all-reduce" and len(sizes) == 1 and sizes[0][-1:] == (found["embed"],)


def line_of(row, found):
    """A row of the table."""
    cells = [f"{row.model}, {row.program}", row.policy]
    sums = {}
    for each in filter(lambda each: is_sum(found, each), found["sent"]):
        sums[each[1]] = each[2]
    others = [each for each in found["sent"] if not is_sum(found, each)]
    times = lambda what, count: f"{what} x {count}" if count > 1 else what  # noqa: E731
    share = found["temporaries"] / found["written"]
    rows = sorted({f"{each:,}" for each in found["rows"]}, key=len)
    cells += [
        str(found["gpus"]),
        " to ".join(dict.fromkeys((rows[0], rows[-1]))),
        f"{found['arguments'] / 1e9:.2f} GB",
        f"{found['written'] / 1e9:.3f} GB",
        f"{found['temporaries'] / 1e6:.1f} MB ({share:.2%})",
        f"{found['peak'] / 1e9:.2f} GB{'' if found['peak'] <= MEMORY else ': **does not fit**'}",
        f"{found['aliased'] / found['written']:.0%}",
        str(found["copies"]),
        f"{sum(sums.values())}: " + ", ".join(times(*each) for each in sums.items()),
        ", ".join(times(f"{kind} {arrays}", count) for kind, arrays, count in others) or "nothing",
        f"{found['trace_seconds']:.0f} + {found['compile_seconds']:.0f} s",
    ]
    return "| " + " | ".join(cells) + " |"


HEAD = """# 70B and 405B, compiled for H100s that are not there

`make aot-sharded` writes this. Llama 3.1's shapes in bfloat16, tensor parallel over 8 H100s (one host) and over 16 (two
hosts; two GPUs share a kv head): the decode loop with 4 sequences after 131,072 tokens each, budgets of 2048 rows a
head and room for 256 tokens; one prefill layer over 1 sequence of 131,072. Programs are the library's own with its
Pallas kernels, compiled by XLA; nothing has run. All figures are those of one GPU, which has 80 GB.

"Written" are pools, or the hidden states of a prefill; temporaries are also given as a share of them, "in place" is
their share that is. "Sums" are all-reduces of hidden states. What is in a loop counts once: a step of the decode loop,
a block of a prefill's tokens.
"""
COLUMNS = (
    "program",
    "policy",
    "GPUs",
    "rows of a pool",
    "arguments",
    "written",
    "temporaries",
    "peak",
    "in place",
)
COLUMNS += ("copies", "sums", "what else travels", "trace + compile")


def write(results):
    """Both files, each whole at any time."""
    import record

    record.save(RESULTS, results)
    lines = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    lines += [
        line_of(row, results["rows"][row.name]) for row in ROWS if row.name in results["rows"]
    ]
    path = RESULTS.with_suffix(".md")
    part = path.with_name(path.name + ".part")
    part.write_text("\n".join([HEAD, *lines, ""]))
    part.replace(path)


def sources():
    """A hash of what is compiled, and by what."""
    from importlib import metadata

    files = [*ROOT.glob("jaxkv/**/*.py"), *ROOT.glob("pallas_kernels/**/*.py")]
    files += [ROOT / "benchmarks" / name for name in ("aot.py", "aot_sharded.py", "shapes.py")]
    content = hashlib.sha256(metadata.version("jaxlib").encode())
    for path in sorted(files):
        content.update(path.read_bytes())
    return content.hexdigest()[:12]


def in_its_own_process(row):
    """The figures of a row, compiled by a process that ends then."""
    command = [sys.executable, __file__, "--row", row.name]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(
            f"FAULT {row.name}: the process that compiles it ended with {done.returncode}"
        )
    return json.loads(done.stdout.splitlines()[-1])


def run(row):
    """Compiles a row here."""
    with tempfile.TemporaryDirectory() as folder:
        aot._start(folder)
        return measure(row)


def told(row, found):
    """Prints a row and its faults; whether there are none."""
    print(line_of(row, found), flush=True)
    wrong = faults(row, found)
    for each in wrong:
        print(f"FAULT {row.name}: {each}", file=sys.stderr, flush=True)
    return not wrong


def main():
    """Compiles what is missing, tells and writes each row, exits with 1 where a bound is broken."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="one policy, eight layers; nothing is written"
    )
    parser.add_argument("--row", choices=[row.name for row in ROWS], help=argparse.SUPPRESS)
    options = parser.parse_args()
    by_name = {row.name: row for row in ROWS}
    if options.row:
        print(json.dumps(run(by_name[options.row])))
        return
    if options.quick:
        sys.exit(not told(QUICK, run(QUICK)))
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    now = sources()
    results = results if results.get("sources") == now else {"sources": now, "rows": {}}
    good = True
    for row in ROWS:
        if row.name not in results["rows"]:
            results["rows"][row.name] = in_its_own_process(row)
            write(results)
        good &= told(row, results["rows"][row.name])
    sys.exit(not good)


if __name__ == "__main__":
    main()
