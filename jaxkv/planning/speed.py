"""Estimates of speed by arithmetic, with rates that one H200 has reached.

The time of a decode step is the sum of: bytes that it reads; kernel launches; overheads of small kernels and of
attention; all-reduces. Of a mixture, the experts that tokens choose are read; the launches that sort tokens by expert
are not counted. Rates of products, attention and codes were measured on an H200 (`benchmarks/results/nvidia-h200.md`);
other GPUs, and TPUs, are taken to reach the same shares of their data sheets. Launches were counted in compiled
programs, and all-reduces are NCCL's own model. Tests hold the estimates to that file.
"""

import dataclasses
from collections.abc import Mapping

import jax.numpy as jnp

from jaxkv.cache import Dense
from jaxkv.engine.lengths import bucket
from jaxkv.planning.setting import Setting
from jaxkv.planning.work import prefill_work, rows_read, step_scores, weights_read

_MICRO = 1e-6
# Share of the data sheet's bandwidth at which attention is taken to read rows: copies of 2 GiB reach 0.88 of it,
# attention over 131,072 rows likewise, over fewer less; what they lack is counted with launches.
COPY = 0.9
# Likewise at which products of a few tokens read weights, by the bits that these are held in (None: as floats).
WEIGHTS = {None: 0.8, "int8": 0.55, "int4": 0.33}
# Share of the data sheet's FLOP/s that large products, attention in prefill, and the sums of its columns reach.
PRODUCTS, ATTENTION, SCORES = 0.6, 0.55, 0.32
# Share of 16-bit rows' bytes per second at which 8-bit rows are read: they are converted on the way.
OF_CODES = 0.6
# Seconds from the end of a CUDA graph node to the start of its successor, by published microbenchmarks of Hopper.
LAUNCH = 1.3 * _MICRO
# Seconds of a kernel of a few CTAs: one or two round trips to memory.
SMALL = 0.7 * _MICRO
# Seconds that a pass over rows takes besides streaming them, to load its tables and to finish (PASS); and seconds of
# the kernel that merges its chunks (MERGE).
PASS = 1.9 * _MICRO
MERGE = 1.2 * _MICRO
# Launches of a layer that are matrix products, and those of its attention: their time follows from bytes read.
_PRODUCTS_OF_LAYER, _ATTENTION_OF_LAYER = 4, 2
# An all-reduce by NCCL's ring with the low-latency protocol: seconds to start, and for each of 2 (n - 1) hops between
# GPUs of a host, by NVLink or PCIe, or of two hosts; constants of NCCL's own tuning model (src/graph/tuning.cc).
REDUCE, HOP_NVLINK, HOP_PCIE, HOP_NETWORK = 6.6 * _MICRO, 0.6 * _MICRO, 1.0 * _MICRO, 5.0 * _MICRO
# The low-latency protocol sends a flag of four bytes with every four bytes.
FLAGS = 2
# Bytes/s: slower than any NVLink, faster than any PCIe.
_NVLINK_FROM = 100e9
# Seconds from a TPU to its neighbour (https://jax-ml.github.io/scaling-book/sharding).
HOP_ICI = 1.0 * _MICRO


@dataclasses.dataclass(frozen=True, kw_only=True)
class Launches:
    """Numbers of kernel launches in a decode step: `layer` for each layer, and `step` once."""

    layer: float
    step: float

    def of(self, layers: int) -> float:
        """Estimated number (float) of kernel launches in a decode step of a model with `layers` layers."""
        return layers * self.layer + self.step


# By how a decode step treats cache rows, counted in compiled loops of an 8B model at 559aeca.
APPENDS = Launches(layer=10.0, step=25.0)
EVICTS = Launches(layer=14.5, step=27.0)
MERGES = Launches(layer=11.0, step=63.0)
CHOOSES = Launches(layer=11.9, step=45.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Speed:
    """Estimated seconds of a decode step, in total (`step`) and by part, seconds of `prefill`, and tokens/s (`tokens`).

    `weights` is reading weights, or multiplying by them where that takes longer; `rows` is reading keys and values;
    `launches` includes small kernels; `sent` is all-reduces; `scores` is scoring the cache again every few tokens.
    `tokens` is tokens/s of all sequences. `rates` are the FLOP/s and bytes/s that were divided by, and `assumed` says
    where they come from.
    """

    step: float
    tokens: float
    prefill: float
    weights: float
    rows: float
    launches: float
    sent: float
    scores: float
    rates: Mapping[str, float]
    assumed: str


def estimate(setting: Setting, weights: int, stored: int | None = None) -> Speed | None:
    """Estimates a setting's `Speed` by arithmetic; None if rows are offloaded.

    `weights` is bytes of one GPU's parameters if all have the dtype, `stored` as they are stored (None: likewise).
    """
    parts, local, gpu = setting.policy.parts(), setting.local, setting.gpu
    reading = parts.reading(setting.config.windows, bucket(setting.context))
    if reading is not None and reading.offloaded:
        return None
    copy, item, layers = (
        COPY * gpu.bandwidth,
        jnp.dtype(setting.dtype).itemsize,
        setting.config.layers,
    )
    read, used = weights_read(setting, weights)
    # An embedding table beside a head is never narrow, and not read.
    beside = 0 if local.tied else local.vocab * local.embed * item
    narrow = 1.0 if stored is None else (stored - beside) / (weights - beside)
    flops = _products(setting) * PRODUCTS
    product = max(
        narrow * read / (WEIGHTS[setting.weights] * gpu.bandwidth),
        2 * used / item * setting.sequences / flops,
    )
    held, filters = rows_read(setting)
    row = local.head_dim * item * local.kv_heads * setting.sequences
    rows = (
        parts.store.row_bytes(local.head_dim, item)
        * local.kv_heads
        * setting.sequences
        * float(held.sum())
    )
    if filters:
        # A filter layer reads its keys once more to score them.
        rows += row * float(held[list(filters)].sum())
    ongoing = parts.ongoing
    if ongoing is not None and ongoing.attends:
        # A logit of each query head and row, and the accumulated attention mass.
        rows += setting.sequences * local.kv_heads * float(held.sum()) * (4 * local.group + 8)
    launched = _launches(setting).of(layers)
    small = launched - layers * (_PRODUCTS_OF_LAYER + _ATTENTION_OF_LAYER)
    launches = launched * LAUNCH + small * SMALL + layers * (PASS + MERGE)
    if gpu.platform == "tpu":
        # The whole step is one program, which a TPU runs without launches.
        launches = 0.0
    # Two all-reduces of float32 hidden states per layer and one for the embedding.
    sent = (2 * layers + 1) * all_reduce(
        setting, 4 * setting.sequences * setting.config.embed, FLAGS
    )
    scores = step_scores(setting) / (SCORES * _products(setting))
    # Codes are converted on the way into products.
    rate = copy * (1.0 if parts.store is Dense else OF_CODES)
    step = product + rows / rate + launches + sent + scores
    return Speed(
        step=step,
        tokens=setting.batch / step,
        prefill=_prefill(setting, weights),
        weights=product,
        rows=rows / rate,
        launches=launches,
        sent=sent,
        scores=scores,
        assumed=_assumed(setting),
        rates={
            "prefill_products_flops": PRODUCTS * _products(setting),
            "prefill_attention_flops": ATTENTION * _products(setting),
            "prefill_scores_flops": SCORES * _products(setting),
            "decode_weights_bytes_per_second": WEIGHTS[setting.weights] * gpu.bandwidth,
            "decode_rows_bytes_per_second": rate,
        },
    )


def all_reduce(setting: Setting, size: int, flags: int = 1) -> float:
    """Seconds of a ring all-reduce of `size` bytes in a group (0 for one GPU); `flags`: bytes sent per payload byte.

    TPUs of a pod send both ways around the ring, and no flags.
    """
    count, gpu = setting.split, setting.gpu
    if count == 1:
        return 0.0
    if gpu.platform == "tpu" and count <= gpu.per_host:
        return count * HOP_ICI + 2 * (count - 1) / count * size / gpu.link
    hosts = -(-count // gpu.per_host)
    inside = HOP_NVLINK if gpu.link > _NVLINK_FROM else HOP_PCIE
    slowest = gpu.link if hosts == 1 else min(gpu.link, gpu.network * gpu.per_host)
    hops = 2 * (count - hosts) * inside + 2 * (hosts - 1) * (HOP_NETWORK if hosts > 1 else inside)
    return REDUCE + hops + flags * 2 * (count - 1) / count * size / slowest


def _assumed(setting: Setting) -> str:
    """Text of the shares of a data sheet's rates that an estimate assumes, and where they were measured."""
    also = "; no TPU was measured" if setting.gpu.platform == "tpu" else ""
    return (
        f"prefill's matrix products at {PRODUCTS:.0%} and its attention at {ATTENTION:.0%} of the data sheet's FLOP/s, "
        f"decode's weights at {WEIGHTS[setting.weights]:.0%} and its rows at {COPY:.0%} of its bandwidth, as on one "
        f"H200: benchmarks/results/nvidia-h200.md{also}"
    )


def _launches(setting: Setting) -> Launches:
    """`Launches` (kernel launches of a layer and of a step, constants) for the setting's policy."""
    parts = setting.policy.parts()
    if parts.read is not None:
        return CHOOSES
    if parts.ongoing is None or not parts.ongoing.evicts:
        return APPENDS
    return EVICTS if parts.ongoing.merge is None else MERGES


def _products(setting: Setting) -> float:
    """Data sheet's FLOP/s of matrix products for the setting's dtype; half for float32, which runs as TF32."""
    return setting.gpu.products * (0.5 if setting.dtype == "float32" else 1.0)


def _prefill(setting: Setting, weights: int) -> float:
    """Seconds to prefill one group's prompts: matrix products, attention and scores, all-reduces."""
    work, flops = prefill_work(setting, weights), _products(setting)
    hidden = 4 * setting.sequences * setting.context * setting.local.embed
    sent = 2 * setting.local.layers * all_reduce(setting, hidden)
    return (
        work.products / (PRODUCTS * flops)
        + work.attention / (ATTENTION * flops)
        + work.scores / (SCORES * flops)
        + sent
    )
