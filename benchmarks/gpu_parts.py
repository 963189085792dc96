"""What is measured on a GPU, in the order of its worth: parts, and the cases of each as plain data."""

import dataclasses

KERNELS = ("pallas_kernels/*.py",)
_DEVICE = ("benchmarks/gpu_timing.py", "benchmarks/gpu_kernels.py")
_KERNELS = (*KERNELS, "jaxkv/attention/*.py", *_DEVICE)
_CHECKS = (*KERNELS, "benchmarks/gpu_checks.py")
MODEL = (*KERNELS, "jaxkv/**/*.py", "benchmarks/gpu_end.py", "benchmarks/shapes.py")
MIB = 2**20
DTYPES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """Rows that belong together.

    Attributes:
        name: for --only.
        what: it measures, in a line.
        function: that measures a case, as module:name in `benchmarks`.
        cases: all of them.
        quick: those of --quick, where kernels are interpreted.
        limit: seconds a row may take.
        sources: files whose change makes rows out of date.
        alone: whether each row gets a process of its own, so that peak bytes are its own.
    """

    name: str
    what: str
    function: str
    cases: tuple[dict, ...]
    quick: tuple[dict, ...]
    limit: float
    sources: tuple[str, ...]
    alone: bool = False

    def of(self, quick):
        """The cases to measure."""
        return self.quick if quick else self.cases


def _heads(model):
    """Kv heads of one device, queries of each, head dim."""
    kv_heads, group, dim = {
        "8B": (8, 4, 128),
        "70B/8": (1, 8, 128),
        "tiny": (2, 2, 64),
        "lanes": (2, 2, 128),
    }[model]
    return {"kv_heads": kv_heads, "group": group, "dim": dim}


def segments(model, batch, rows, lengths="equal", dtype="bfloat16"):
    """A decode case."""
    name = f"{model} {batch} x {rows}" + (f", {lengths}" if lengths != "equal" else "")
    name += f", {dtype}" if dtype != "bfloat16" else ""
    return {
        "name": name,
        **_heads(model),
        "batch": batch,
        "rows": rows,
        "lengths": lengths,
        "dtype": dtype,
    }


DECODE = (
    segments("8B", 1, 131072),
    segments("8B", 1, 32768),
    segments("8B", 8, 8192),
    segments("8B", 1, 1024),
    segments("8B", 64, 1024),
    segments("8B", 1, 1024, "one head 10x"),
    segments("8B", 1, 131072, "one head 10x"),
    segments("70B/8", 4, 8192),
    segments("8B", 8, 8192, "unequal"),
    segments("8B", 64, 1024, "unequal"),
    segments("8B", 1, 32768, "one head 10x"),
)
STORES = ("int8", "int4", "mixed")
TINY = segments("tiny", 2, 48, "unequal")


def stored(case, store):
    """The same case over rows as a store holds them."""
    return case | {"store": store, "name": f"{case['name']}, {store}"}


def prompt(model, tokens, **more):
    """A case of a prompt's attention."""
    return {**_heads(model), "tokens": tokens, "dtype": "bfloat16", **more}


def _products(name, tokens, embed, qkv=0, hidden=0):
    return {"name": name, "tokens": tokens, "embed": embed, "qkv": qkv, "hidden": hidden}


PREFILL = tuple(
    prompt("8B", tokens, by=by, name=f"8B {tokens} by {by}")
    for tokens in (32768, 8192)
    for by in ("cudnn", "pallas", "mosaic")
) + (prompt("8B", 32768, by="pallas", window=4096, name="8B 32768 by pallas, window 4096"),)
FILTERS = [2, 8, 18]


def run(
    policy,
    batch,
    tokens,
    *,
    budget=1024,
    model="llama-3-8b",
    layers=None,
    bits=None,
    **ways,
):
    """An end-to-end case: `bits` are the `store` of rows and the `weights`, `ways` who prefills and who decodes.

    With `layers` the model has only so many.
    """
    ways = {"prefill": "auto", "decode": "auto"} | ways
    name = f"{policy} {batch} x {tokens}" + (f", {layers} layers" if layers else "")
    name += "".join(f", {which} {kind}" for which, kind in (bits or {}).items())
    name += "".join(f", {which} {way}" for which, way in ways.items() if way != "auto")
    case = {
        "name": name,
        "policy": policy,
        "batch": batch,
        "tokens": tokens,
        "model": model,
        **ways,
    }
    case |= (bits or {}) | ({"layers": layers} if layers else {})
    # Long prefills are timed once: the next row is worth more.
    case |= {
        "budget": 2 * budget if policy == "OmniKV" else budget,
        "prefills": 2 if batch * tokens <= 32768 else 1,
    }
    filters = [layer for layer in FILTERS if layers is None or layer < layers]
    return case | ({"filter_layers": filters} if policy == "OmniKV" else {})


def _tiny(policy, **more):
    return run(policy, 2, 64, budget=32, model="tiny", **more) | {"prefills": 1}


def _torch(batch, rows, causal=False):
    name = f"torch {'prefill' if causal else 'decode'} 8B {batch} x {rows}"
    return {"name": name, **_heads("8B"), "batch": batch, "rows": rows, "causal": causal}


def _experts(name, count, chosen, embed, hidden, tokens, bits):
    sizes = {"count": count, "chosen": chosen, "embed": embed, "hidden": hidden}
    return {
        "name": f"{name}, {bits} bits, {tokens} tokens",
        "tokens": tokens,
        "bits": bits,
        **sizes,
    }


_END = {"function": "gpu_end:end_to_end", "limit": 240.0, "sources": MODEL, "alone": True}
_TORCH = {
    "function": "gpu_end:torch_attention",
    "limit": 90.0,
    "sources": ("benchmarks/gpu_end.py",),
    "alone": True,
}

PARTS = (
    Part(
        name="copy",
        what="bytes per second of copies and of reading, by size",
        function="gpu_kernels:copy",
        cases=tuple(
            {"name": f"{size} MiB", "bytes": size * MIB} for size in (2048, 512, 128, 32, 4)
        ),
        quick=({"name": "1 MiB", "bytes": MIB},),
        limit=60,
        sources=_DEVICE,
    ),
    Part(
        name="products",
        what="operations and bytes per second of matrix products",
        function="gpu_kernels:products",
        cases=(
            _products("square 8192", 8192, 8192),
            *(
                _products(f"8B layer, {tokens} tokens", tokens, 4096, 6144, 14336)
                for tokens in (1, 8, 64, 8192)
            ),
        ),
        quick=(_products("tiny layer", 2, 64, 128, 128),),
        limit=60,
        sources=_DEVICE,
    ),
    Part(
        name="linear",
        what="a layer's products with weights in 8 and 4 bits, by their kernel",
        function="gpu_kernels:linear",
        cases=tuple(
            _products(f"8B layer, {bits} bits, {tokens} tokens", tokens, 4096, 6144, 14336)
            | {"bits": bits}
            for bits in (8, 4)
            for tokens in (1, 2, 4, 8, 16)
        ),
        quick=(_products("tiny layer, 4 bits", 1, 64, 128, 128) | {"bits": 4},),
        limit=60,
        sources=_KERNELS,
    ),
    Part(
        name="experts",
        what="a mixture's experts for few tokens, by the kernel and by XLA",
        function="gpu_kernels:experts",
        cases=tuple(
            _experts(*mixture, tokens, bits)
            for mixture in (("gpt-oss-20b", 32, 4, 2880, 2880), ("30B-A3B", 128, 8, 2048, 768))
            for bits in (16, 4)
            for tokens in (1, 4, 16, 64)
        ),
        quick=(_experts("tiny", 4, 2, 64, 64, 4, 8),),
        limit=90,
        sources=(*_KERNELS, "jaxkv/models/mixture.py"),
    ),
    Part(
        name="checks",
        what="every kernel against numpy, by dtype and head dim",
        function="gpu_checks:check",
        cases=tuple(
            {
                "name": f"{dtype} {dim}",
                "dtype": dtype,
                "dim": dim,
                "kv_heads": 3,
                "group": 4,
                "rows": 700,
                "slots": 384,
            }
            for dim in (128, 64, 80, 96, 256)
            for dtype in ("bfloat16", "float16", "float32")
        ),
        quick=(
            {
                "name": "bfloat16 64",
                "dtype": "bfloat16",
                "dim": 64,
                "kv_heads": 3,
                "group": 2,
                "rows": 40,
                "slots": 48,
            },
        ),
        limit=90,
        sources=_CHECKS,
    ),
    Part(
        name="decode",
        what="decode attention over equal and ragged segments",
        function="gpu_kernels:decode",
        cases=DECODE,
        quick=(TINY,),
        limit=60,
        sources=_KERNELS,
    ),
    Part(
        name="token",
        what="a layer's new token: rotated, appended, attended to what is there, in one",
        function="gpu_kernels:token",
        cases=DECODE,
        quick=(TINY,),
        limit=60,
        sources=_KERNELS,
    ),
    Part(
        name="codes",
        what="the same over rows in 8 and 4 bits",
        function="gpu_kernels:token",
        cases=tuple(
            stored(case, store)
            for store in STORES
            for case in DECODE
            if case["rows"] * case["batch"] >= 8192
        ),
        quick=(stored(TINY, "mixed"),),
        limit=60,
        sources=_KERNELS,
    ),
    Part(
        name="mass",
        what="decode attention that adds to rows' scores",
        function="gpu_kernels:mass",
        cases=(segments("8B", 1, 32768), segments("8B", 64, 1024)),
        quick=(TINY,),
        limit=60,
        sources=_KERNELS,
    ),
    Part(
        name="prefill",
        what="causal attention of a prompt, by implementation",
        function="gpu_kernels:prefill",
        cases=PREFILL,
        quick=(prompt("tiny", 64, by="pallas", window=32, name="tiny 64 by pallas, window 32"),),
        limit=60,
        sources=_KERNELS,
    ),
    Part(
        name="scores",
        what="a window's scores and the sums of all queries, on top of a prompt's attention",
        function="gpu_kernels:scores",
        cases=tuple(
            prompt("8B", tokens, window=32, name=f"8B {tokens}") for tokens in (32768, 8192)
        ),
        quick=(prompt("tiny", 64, window=8, name="tiny 64"),),
        limit=60,
        sources=_KERNELS,
    ),
    Part(
        name="gather",
        what="rows of a layer's prefill moved into a pool",
        function="gpu_kernels:gather",
        cases=tuple(
            prompt("8B", 32768, batch=2, kept=kept, name=f"8B 2 x {kept} of 32768")
            for kept in (8192, 1024)
        ),
        quick=(prompt("tiny", 64, batch=2, kept=16, name="tiny 2 x 16 of 64"),),
        limit=60,
        sources=_KERNELS,
    ),
    Part(
        name="end",
        what="prefill and decode step of Llama 3 8B's shape, by policy",
        cases=(
            run("FullKV", 1, 131072),
            run("SnapKV", 1, 131072),
            run("D2O", 1, 32768),
            run("SnapKV", 1, 32768),
            run("FullKV", 1, 32768),
            run("AdaKV", 1, 32768),
            run("FullKV", 8, 32768),
            run("SnapKV", 8, 32768),
            run("OmniKV", 1, 32768),
            run("H2O", 1, 32768),
        ),
        quick=(_tiny("SnapKV", prefill="pallas", decode="pallas"),),
        **_END,
    ),
    Part(
        name="slots",
        what="requests a second of the engine, and what the plan promised",
        function="gpu_end:serve_requests",
        cases=tuple(
            {
                "name": f"{policy} {slots} slots, {tokens} + {new}",
                "model": "llama-3-8b",
                "policy": policy,
                "budget": 1024,
                "slots": slots,
                "requests": 2 * slots,
                "tokens": tokens,
                "new": new,
            }
            for policy, slots, tokens, new in (
                ("SnapKV", 64, 2048, 128),
                ("FullKV", 64, 2048, 128),
                ("SnapKV", 64, 8192, 128),
            )
        ),
        quick=(
            {
                "name": "tiny",
                "model": "tiny",
                "policy": "SnapKV",
                "budget": 40,
                "slots": 2,
                "requests": 3,
                "tokens": 64,
                "new": 4,
            },
        ),
        limit=240.0,
        sources=MODEL,
        alone=True,
    ),
    Part(
        name="ways",
        what="the same by other implementations",
        cases=(
            *(run(policy, 1, 32768, prefill="cudnn") for policy in ("SnapKV", "FullKV")),
            *(run(policy, 1, 32768, prefill="pallas") for policy in ("SnapKV", "FullKV")),
            *(run(policy, 1, 32768, prefill="mosaic") for policy in ("SnapKV", "FullKV")),
            *(run(policy, 1, 32768, decode="xla") for policy in ("SnapKV", "FullKV")),
        ),
        quick=(),
        **_END,
    ),
    Part(
        name="bits",
        what="the same with rows or weights in fewer bits",
        cases=(
            run("FullKV", 8, 32768, bits={"store": "int8"}),
            run("SnapKV", 1, 32768, bits={"weights": "int8"}),
            run("SnapKV", 1, 32768, bits={"weights": "int4"}),
        ),
        quick=(_tiny("SnapKV", bits={"store": "int8", "weights": "int4"}),),
        **_END,
    ),
    Part(
        name="torch",
        what="torch's scaled_dot_product_attention at the same shapes, where torch is there",
        cases=(_torch(1, 32768), _torch(8, 8192), _torch(1, 32768, causal=True)),
        quick=(),
        **_TORCH,
    ),
)
BY_NAME = {part.name: part for part in PARTS}
