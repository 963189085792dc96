"""What `aot.py` compiles: GPU kernels as functions of abstract arrays, and programs of Llama 3's shapes for devices."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp

import jaxkv
import pallas_kernels
from benchmarks import shapes
from jaxkv.cache.named_stores import STORES
from jaxkv.planning.named import find_accelerator
from jaxkv.planning.setting import Workload
from pallas_kernels import mosaic
from pallas_kernels.codes import compute_mean_itemsize

KERNELS = (
    "decode_token",
    "decode_token_scored",
    "decode_token_picked",
    "decode_token_int8",
    "decode_token_int4",
    "decode_token_mixed",
    "attend",
    "attend_question",
    "compact",
    "add_norm",
    "multiply_codes_8",
    "multiply_codes_4",
    "multiply_blocks_16",
    "multiply_blocks_8",
    "multiply_blocks_4",
    "replace_rows",
    "evict_rows",
    "flash",
    "flash_window",
    "flash_mosaic",
    "column_sums",
    "window_sums",
)
# Stores whose codes kernels read without decoding them first.
CODED = ("int8", "int4", "mixed")
DTYPES = ("bfloat16", "float16", "float32")
TPUS = ("v5e", "v5p", "v6e", "tpu7x")
# Models whose heads a TPU's kernels read otherwise: one query each, and a head dim of 256.
HEADS = {
    "7B of 32 kv heads": partial(shapes.llama, embed=4096, hidden=11008, heads=32, kv_heads=32),
    "9B of head dim 256": partial(shapes.llama, embed=4096, hidden=14336, heads=16),
}
MODELS = {"8B": shapes.llama_3_8b, "70B": shapes.llama_3_70b, **HEADS}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kernel:
    """A kernel at a model's shape, for a GPU."""

    kernel: str
    model: str = "Llama-3-8B"
    dtype: str = "bfloat16"
    device: str = "h100"

    @property
    def name(self):
        """What it is called."""
        return f"{self.kernel}, {self.model}, {self.dtype}, {self.device}"

    @property
    def taken(self):
        """False of kernels that do not take the head dim, the dtype or the device."""
        if self.kernel == "flash_mosaic":
            dims = ("Llama-3-8B", "SmolLM2-135M")
            return self.model in dims and self.dtype != "float32" and self.device == "h100"
        if self.kernel == "multiply_blocks_16":
            return self.dtype != "float32"
        dim = next(heads.dim for heads in shapes.MODELS if heads.name == self.model)
        store = STORES.get(self.kernel.removeprefix("decode_token_"))
        return store is None or store.supports_kernels(set(store.kernels), dim)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """A decode loop of a Llama 3 under a policy, or a layer of its prefill, for so many devices of a kind."""

    policy: jaxkv.policies.CustomPolicy
    device: str
    model: str = "8B"
    gpus: int = 1
    layers: int = 4
    batch: int = 8
    tokens: int = 32768
    prefill: bool = False

    @property
    def name(self):
        """What it is called."""
        kind = "prefill" if self.prefill else "loop"
        return f"{kind} of {self.model}, {self.layers} layers, {self.policy}, {self.gpus} {self.device}"

    @property
    def setting(self):
        """What is planned for."""
        return Workload(
            model=self.model,
            config=MODELS[self.model](layers=self.layers),
            policy=self.policy,
            gpu=find_accelerator(self.device),
            gpus=self.gpus,
            batch=self.batch,
            context=self.tokens,
        )

    @property
    def loops(self):
        """Most loops that a step may have: D2O walks a pool that layers share; how a TPU evicts is XLA's."""
        evicts = self.policy.build_policy_parts().evicts_while_decoding
        return (self.device in TPUS) * evicts * 1000 + 2 * (
            self.policy.build_policy_parts().merge is not None
        )


def cases(devices, quick):
    """List of what is compiled for devices of these kinds: of kernels, loops, prefills and steps of 70B."""
    found = []
    for device in devices:
        found += tpu_programs(quick) if device == "tpu" else gpu_cases(device, quick)
    return found


def gpu_cases(device, quick):
    """Cases for a kind of GPU; `quick` ones are kernels of one shape, two loops, and a step of 70B of few layers."""
    of, eight = jaxkv, {"device": device, "model": "70B", "gpus": 8, "batch": 4, "tokens": 131072}
    if quick:
        loops = [Program(policy=each(budget=1024), device=device) for each in (of.AdaKV, of.D2O)]
        return [
            *(Kernel(kernel=each, device=device) for each in KERNELS),
            *loops,
            Program(policy=of.D2O(budget=2048), **eight, layers=8),
        ]
    kernels = [
        Kernel(kernel=kernel, model=model.name, dtype=dtype, device=device)
        for kernel in KERNELS
        for model in shapes.MODELS
        for dtype in DTYPES
    ]
    loops = [of.FullKV(), of.SnapKV(budget=1024), of.AdaKV(budget=1024), of.H2O(budget=1024)]
    loops += [of.D2O(budget=1024), of.OmniKV(budget=1024, filter_layers=(2, 8, 18))]
    steps = [of.FullKV(), of.AdaKV(budget=2048), of.H2O(budget=2048), of.D2O(budget=2048)]
    return [
        *(each for each in kernels if each.taken),
        *(Program(policy=each, device=device, layers=32) for each in loops),
        Program(policy=of.SnapKV(budget=1024), device=device, batch=1, prefill=True),
        *(Program(policy=each, **eight, layers=80) for each in steps),
        Program(policy=of.SnapKV(budget=2048), **eight | {"batch": 1}, layers=80, prefill=True),
    ]


def tpu_programs(quick):
    """Programs for TPUs; `quick` ones are a layer of a prefill and a loop on a v6e. What evicts is XLA's there."""
    of, few = jaxkv, {"device": "v6e", "layers": 4}
    prefill = {"policy": of.SnapKV(budget=1024), "batch": 1, "tokens": 4096, "prefill": True}
    found = [
        Program(**prefill, **few),
        Program(policy=of.SnapKV(budget=1024), **few),
    ]
    if quick:
        return found
    store = of.SnapKV(budget=1024, store="int8")
    found += [Program(policy=of.SnapKV(budget=1024), device=each) for each in TPUS if each != "v6e"]
    found += [Program(policy=store, device=each) for each in TPUS]
    found += [Program(policy=of.SnapKV(budget=1024), model=each, **few) for each in HEADS]
    found += [Program(policy=store, model=each, **few) for each in HEADS]
    found += [Program(**prefill, model=each, **few) for each in HEADS]
    return [*found, Program(policy=of.AdaKV(budget=1024), device="v6e", layers=32)]


def arguments(case):
    """The kernel as a function, and the shapes it is compiled for."""
    heads = next(each for each in shapes.MODELS if each.name == case.model)
    k_heads, group, dim, dtype = heads.kv_heads, heads.group, heads.dim, jnp.dtype(case.dtype)
    of, i32 = jax.ShapeDtypeStruct, jnp.int32
    batch, slots, pool = 2, 8192, heads.kv_heads * 2304
    rows, table = of((batch, pool, dim), dtype), of((batch, k_heads), i32)
    whole, one = of((batch, k_heads, slots, dim), dtype), of((batch,), i32)
    queries = of((batch, k_heads, group, slots, dim), dtype)
    match case.kernel:
        case name if name.startswith("decode_token"):
            return token_arguments(
                heads, dtype, batch=batch, pool=pool, kind=name.removeprefix("decode_token")
            )
        case "attend":

            def attend(*given):
                scores = pallas_kernels.EntryScores(score=given[-1])
                return pallas_kernels.attend(*given[:-1], scores=scores)

            score = of((batch, pool), jnp.float32)
            return attend, (
                of((batch, k_heads, group, dim), dtype),
                rows,
                rows,
                table,
                table,
                score,
            )
        case "attend_question":
            return pallas_kernels.attend, (
                of((batch, k_heads, group * 32, dim), dtype),
                rows,
                rows,
                table,
                table,
            )
        case "compact":
            return pallas_kernels.gather_kept_entries, (whole, whole, of((batch, pool), i32))
        case "multiply_codes_8" | "multiply_codes_4":
            return linear_arguments(heads, dtype, bits=int(case.kernel[-1]))
        case "multiply_blocks_16" | "multiply_blocks_8" | "multiply_blocks_4":
            return experts_arguments(heads, dtype, bits=int(case.kernel.rpartition("_")[-1]))
        case "add_norm" | "replace_rows" | "evict_rows":
            return step_arguments(case.kernel, heads, dtype, batch=batch, pool=pool)
        case "flash":
            return pallas_kernels.flash, (queries, whole, whole, one, one)
        case "flash_window":
            return partial(pallas_kernels.flash, window=1024), (queries, whole, whole, one, one)
        case "flash_mosaic":
            return mosaic.flash, (queries, whole, whole, one, one)
        case "column_sums":
            lse = of((batch, k_heads, group, slots), jnp.float32)
            return pallas_kernels.sum_attention_per_key, (queries, whole, lse, one, one)
        case "window_sums":
            return pallas_kernels.sum_window_attention, (
                of((batch, k_heads, group, 32, dim), dtype),
                whole,
                one,
                one,
            )
    raise ValueError(case.kernel)


def linear_arguments(heads, dtype, *, bits):
    """The output map of a model, of one vector, in 8 or 4 bits."""
    of, width = jax.ShapeDtypeStruct, output_width(heads)
    codes = coded(dtype, bits, width, width)
    return pallas_kernels.multiply_codes, (of((1, width), dtype), *codes)


def experts_arguments(heads, dtype, *, bits):
    """Sixteen vectors for each of eight experts, and for one more block that is not there, in 16, 8 or 4 bits."""
    of, width = jax.ShapeDtypeStruct, output_width(heads)
    given = (of((9, 16, width), dtype), of((9,), jnp.int32))
    return pallas_kernels.multiply_blocks_by_tensor_cores, (
        *given,
        *coded(dtype, bits, 8, width, width),
    )


def output_width(heads):
    """Outputs of a model's output map, in whole groups of 4-bit codes."""
    return -(-heads.kv_heads * heads.group * heads.dim // 32) * 32


def coded(dtype, bits, *shape):
    """A weight of that shape as `StoredWeight` holds it: in the dtype, or codes with what belongs to them."""
    of, (*lead, width) = jax.ShapeDtypeStruct, shape
    if bits == 16:
        return of(shape, dtype), None, None, None
    if bits == 8:
        return of(shape, jnp.int8), of(tuple(lead), jnp.float32), None, None
    group = of((*lead, width // 32), jnp.float16)
    return of((*lead, width // 2), jnp.uint8), None, group, group


def stored(store, batch, pool, dim):
    """Abstract keys and values of a pool as a store holds them."""
    of, group = jax.ShapeDtypeStruct, (batch, pool, dim // 32)
    eight = pallas_kernels.Int8Pool(
        of((batch, pool, dim), jnp.int8), of((batch, pool), jnp.float16)
    )
    codes = (
        of((batch, pool, dim // 2), jnp.uint8)
        if dim % 128
        else of((batch, pool, dim // 4), jnp.uint16)
    )
    four = pallas_kernels.Int4Pool(codes, of(group, jnp.float16), of(group, jnp.float16))
    return {"int8": (eight, eight), "int4": (four, four), "mixed": (eight, four)}[store]


def step_arguments(kernel, heads, dtype, *, batch, pool):
    """What a decode step launches beside attention."""
    of, i32, f32 = jax.ShapeDtypeStruct, jnp.int32, jnp.float32
    if kernel == "add_norm":
        width = heads.kv_heads * heads.group * heads.dim
        shapes = (of((8, 1, width), dtype), of((8, 8, 1, width), f32), of((width,), dtype))
        return lambda *a: pallas_kernels.add_norm(*a, eps=1e-5), shapes
    rows, table, one = (
        of((batch, pool, heads.dim), dtype),
        of((batch, heads.kv_heads), i32),
        of((batch,), i32),
    )
    pools = (rows, rows, of((batch, pool), i32), of((batch, pool), f32))
    if kernel == "replace_rows":
        return pallas_kernels.overwrite_evicted_rows, (*pools, table, table, of(table.shape, bool))
    weigh = lambda score, pos, seen, prompt: (score, pos >= prompt)  # noqa: E731
    return lambda *a: pallas_kernels.evict_lowest_entries(*a, weigh=weigh), (
        *pools,
        *[table] * 4,
        one,
        one,
    )


def token_arguments(heads, dtype, *, batch, pool, kind):
    """A new token's attention, for one of four layers whose chunks are dealt together."""
    of, i32, f32 = jax.ShapeDtypeStruct, jnp.int32, jnp.float32
    store = kind[1:] if kind[1:] in CODED else None
    rows = (of((batch, pool, heads.dim), dtype),) * 2
    if store:
        rows = stored(store, batch, pool, heads.dim)
    programs = pallas_kernels.count_concurrent_programs(
        dim=heads.dim, itemsize=compute_mean_itemsize(*rows, dtype)
    )

    def token(q, kv, cos, sin, positions, counts, k, v, pos, start, length, *more):
        chunks = pallas_kernels.build_work_table(start, length, programs=programs)
        if kind == "_picked":
            options = {"picks": pallas_kernels.SelectedEntries(*more, start)}
        elif store:
            options = {}
        else:
            scores = dict(zip(("score", "begin"), more, strict=False))
            options = {"scores": pallas_kernels.EntryScores(**scores, start=start)} if more else {}
        new = pallas_kernels.NewTokenInputs(kv, cos, sin, positions, counts, pos)
        return pallas_kernels.append_and_attend(
            q, new, (k, v), chunks, layer=1, dtype=dtype, **options
        )

    # Queries, keys and values come in two parts that are to be added up.
    per_head, tables = (batch, heads.kv_heads), of((4, batch, heads.kv_heads), i32)
    angle, one = of((batch, heads.dim // 2), f32), of((batch,), i32)
    # Products come in parts, of eight sequences at least.
    new = (4, 8)
    shapes = (
        of((*new, heads.kv_heads, heads.group, heads.dim), f32),
        of((*new, 2, heads.kv_heads, heads.dim), f32),
    )
    shapes += (angle, angle, one, one, *rows, of((batch, pool), i32), tables, tables)
    more = {"_scored": (of((batch, pool), f32), of(per_head, f32))}
    more |= {"_picked": (of((batch, 1, 1024), i32), one, of((batch, 1), i32), tables)}
    return token, (*shapes, *more.get(kind, ()))
