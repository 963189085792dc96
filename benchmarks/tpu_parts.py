"""What is measured on a TPU, in the order of its worth: parts, and the cases of each as plain data.

Cases of whole models are those of the table of estimates (`results/tpu_model.md`), so that both can stand side by side.
"""

import dataclasses

from benchmarks import gpu_parts
from benchmarks.gpu_parts import Part, prompt, run, segments, stored

_KERNELS = ("pallas_kernels/tpu/*.py",)
_TIMES = (
    *_KERNELS,
    "benchmarks/gpu_timing.py",
    "benchmarks/gpu_kernels.py",
    "benchmarks/tpu_kernels.py",
)
_CHECKS = (*_KERNELS, "benchmarks/gpu_checks.py", "benchmarks/tpu_checks.py")
# Bytes of memory that Llama 3 8B in bfloat16 takes with its caches and a prompt's layer.
_WHOLE = 30e9
_XLA = {"prefill": "xla", "decode": "xla"}
_END = {"function": "gpu_end:end_to_end", "limit": 420.0, "sources": gpu_parts.MODEL, "alone": True}
_TIMED = {"limit": 60.0, "sources": _TIMES, "uses_tuning": False}
TINY = segments("lanes", 2, 48)


def _check(dtype, dim, **sizes):
    """A case of `checks`: sequences of three heads, pools of several blocks, prompts of three."""
    sizes = {"kv_heads": 3, "group": 4, "rows": 700, "slots": 384} | sizes
    return {"name": f"{dtype} {dim}", "dtype": dtype, "dim": dim, **sizes}


def _few(policy, **more):
    """A case that 16 GB hold: 8 layers."""
    return run(policy, 2, 32768, layers=8, **more)


def _tiny(policy, **more):
    """A whole model's case for --quick."""
    return run(policy, 2, 128, budget=32, model="tiny", **more) | {"prefills": 1}


def _shared(name, **more):
    """A part of GPUs whose programs are plain XLA."""
    return dataclasses.replace(gpu_parts.BY_NAME[name], **more)


PARTS = (
    # Smaller arrays would stay in VMEM.
    _shared("copy", cases=gpu_parts.BY_NAME["copy"].cases[:2]),
    # One vector's products with bfloat16 results are no matrix products to XLA, as a model's are.
    _shared(
        "products",
        cases=tuple(case for case in gpu_parts.BY_NAME["products"].cases if case["tokens"] > 1),
    ),
    Part(
        name="checks",
        what="every kernel against numpy, by dtype and head dim",
        function="tpu_checks:check",
        cases=(
            *(_check(dtype, dim) for dim in (128, 256) for dtype in ("bfloat16", "float32")),
            *(_check("bfloat16", dim) for dim in (64, 80, 96)),
        ),
        quick=(_check("bfloat16", 128, kv_heads=2, group=2, rows=40, slots=128),),
        limit=120,
        sources=_CHECKS,
        uses_tuning=False,
    ),
    Part(
        name="decode",
        what="decode attention over equal and ragged segments",
        function="tpu_kernels:decode",
        cases=gpu_parts.DECODE,
        quick=(TINY,),
        **_TIMED,
    ),
    Part(
        name="token",
        what="the same with the new token's row, which joins the pool",
        function="tpu_kernels:token",
        cases=gpu_parts.DECODE,
        quick=(TINY,),
        **_TIMED,
    ),
    Part(
        name="codes",
        what="the same over rows in 8 bits",
        function="tpu_kernels:token",
        # Scales of one sequence's whole pool lie in VMEM, so that no rows can be spare: these are large as they are.
        cases=tuple(
            case
            for case in gpu_parts.BY_NAME["codes"].cases
            if case["store"] == "int8" and case["batch"] >= 8
        ),
        quick=(stored(TINY, "int8"),),
        **_TIMED,
    ),
    Part(
        name="prefill",
        what="causal attention of a prompt, by splash attention and by XLA",
        function="gpu_kernels:prefill",
        cases=tuple(
            prompt("8B", tokens, by=by, name=f"8B {tokens} by {by}")
            for tokens, by in ((32768, "tpu"), (8192, "tpu"), (8192, "xla"))
        ),
        quick=(prompt("lanes", 128, by="tpu", name="lanes 128 by tpu"),),
        limit=120,
        sources=(*_TIMES, "jaxkv/attention/*.py"),
        uses_tuning=False,
    ),
    Part(
        name="end",
        what="prefill and decode step of Llama 3 8B's shape, by policy",
        cases=(
            run("SnapKV", 8, 32768),
            run("FullKV", 8, 1024),
            # A step's time is that of longer prompts, whose prefill would all but fill a v6e.
            run("H2O", 8, 8192),
            run("AdaKV", 8, 32768),
            run("D2O", 8, 8192),
            # Reads 1,024 tokens: `run` doubles its budget.
            run("OmniKV", 8, 4096, budget=512),
            run("FullKV", 1, 32768),
            run("SnapKV", 1, 32768),
            run("FullKV", 4, 32768, layers=24),
        ),
        quick=(_tiny("SnapKV", prefill="tpu", decode="tpu"),),
        least=_WHOLE,
        uses_tuning=False,
        **_END,
    ),
    Part(
        name="ways",
        what="the same by XLA",
        cases=(
            run("SnapKV", 8, 32768, decode="xla"),
            run("SnapKV", 1, 32768, **_XLA),
            run("H2O", 8, 8192, **_XLA),
        ),
        quick=(),
        least=_WHOLE,
        uses_tuning=False,
        **_END,
    ),
    Part(
        name="small",
        what="the same of 8 layers, and of all with weights in 8 bits, which 16 GB hold",
        cases=(
            *(_few(policy) for policy in ("SnapKV", "FullKV", "AdaKV", "H2O", "D2O", "OmniKV")),
            run("SnapKV", 1, 32768, bits={"weights": "int8"}),
            *(_few(policy, **_XLA) for policy in ("SnapKV", "FullKV", "H2O")),
        ),
        quick=(),
        uses_tuning=False,
        **_END,
    ),
)
BY_NAME = {part.name: part for part in PARTS}
