"""Estimates of speed, by arithmetic alone: nothing here has run on a GPU, or been calibrated on one.

A decode step is the sum of what it must read, at the bandwidth that copies reach; of its launches; of what its small
kernels and its attention take beside that; and of what GPUs send one another. A mixture's experts are read as far as
tokens choose them; what sorting tokens by expert launches is not counted. The constants are those of the performance
model in `benchmarks/perf_gpu.py` and what it reads off compiled programs, in
`benchmarks/results/gpu_model.md`; a test holds the two together.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np

from jaxkv.engine.plan import bucket, plan_prefill
from jaxkv.planning.setting import Setting
from jaxkv.policies.reading import WHOLE

_MICRO = 1e-6
# Of the data sheet's bandwidth, what copies of hundreds of MiB reach on Hopper.
COPY = 0.9
# Of the data sheet's matrix products, what large ones reach: 600 of 989 TFLOP/s in the performance model.
PRODUCTS = 0.6
# Likewise for prefill's attention: 35% of the sheet's is what well-tuned Triton kernels reach on Hopper.
ATTENTION = 0.35
# Between dependent nodes of a CUDA graph, end to begin, by published microbenchmarks of Hopper.
LAUNCH = 1.3 * _MICRO
# What a kernel of a few CTAs takes beside that: one or two trips to memory.
SMALL = 0.7 * _MICRO
# A pass over rows waits for what it must know, and ends, beside streaming them; a second kernel merges its chunks.
PASS = 1.9 * _MICRO
MERGE = 1.2 * _MICRO
# Launches of a layer that are matrix products, and of a layer's attention: these are counted by what they read.
_PRODUCTS_OF_LAYER, _ATTENTION_OF_LAYER = 4, 2
# An all-reduce of NCCL's ring, low-latency protocol: to begin with, and for each of 2 (n - 1) hops between GPUs of a
# host, by NVLink or PCIe, or of two hosts; the constants of its own tuning model (src/graph/tuning.cc).
REDUCE, HOP_NVLINK, HOP_PCIE, HOP_NETWORK = 6.6 * _MICRO, 0.6 * _MICRO, 1.0 * _MICRO, 5.0 * _MICRO
# That protocol sends a flag with every four bytes.
FLAGS = 2
# Slower than any NVLink, faster than any PCIe.
_NVLINK_FROM = 100e9


@dataclasses.dataclass(frozen=True, kw_only=True)
class Launches:
    """What a decode step launches.

    Attributes:
        layer: for each layer.
        step: besides.
    """

    layer: float
    step: float

    def of(self, layers: int) -> float:
        """All of a step's."""
        return layers * self.layer + self.step


# By what a step does with a new token's row, as counted in compiled loops ("Launches of a step" in gpu_model.md).
APPENDS = Launches(layer=10.0, step=25.0)
EVICTS = Launches(layer=14.5, step=27.0)
MERGES = Launches(layer=11.0, step=63.0)
CHOOSES = Launches(layer=11.9, step=45.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Speed:
    """An estimate; seconds.

    Attributes:
        step: of a decode step, in the middle of the answer.
        tokens: drawn in a second, by all sequences.
        prefill: of all prompts; roughly.
        weights: of a step, for reading them, or for multiplying by them where that takes longer.
        rows: of a step, for reading keys and values.
        launches: of a step, for launches and for kernels that move next to nothing.
        sent: of a step, for all-reduces.
    """

    step: float
    tokens: float
    prefill: float
    weights: float
    rows: float
    launches: float
    sent: float


def estimate(setting: Setting, weights: int) -> Speed | None:
    """Estimates how fast a setting would be.

    Args:
        setting: what is planned for.
        weights: bytes of the parameters that a GPU has.

    Returns:
        The estimate; None for policies that fetch rows from host memory, whose speed is that of another machine's part.
    """
    parts, local, gpu = setting.policy.parts(), setting.local, setting.gpu
    reading = parts.reading(setting.config.layers, bucket(setting.context))
    if reading is not None and reading.offloaded:
        return None
    copy, item, layers = COPY * gpu.bandwidth, jnp.dtype(setting.dtype).itemsize, setting.config.layers
    read, used = _weights(setting, weights, item)
    flops = _products(setting) * PRODUCTS
    product = max(read / copy, 2 * used / item * setting.sequences / flops)
    held, filters = _rows(setting)
    row = local.head_dim * item * local.kv_heads * setting.sequences
    moved = 2 * row * float(held.sum())
    if filters:
        # A filter reads its keys once more for its scores.
        moved += row * float(held[list(filters)].sum())
    ongoing = parts.ongoing
    if ongoing is not None and ongoing.attends:
        # A logit of each query head and row, and the sum that it is added to.
        moved += setting.sequences * local.kv_heads * float(held.sum()) * (4 * local.group + 8)
    launched = _launches(setting).of(layers)
    small = launched - layers * (_PRODUCTS_OF_LAYER + _ATTENTION_OF_LAYER)
    launches = launched * LAUNCH + small * SMALL + layers * (PASS + MERGE)
    # Two sums of hidden states a layer and one for the embedding, float32.
    sent = (2 * layers + 1) * all_reduce(setting, 4 * setting.sequences * setting.config.embed, FLAGS)
    step = product + moved / copy + launches + sent
    return Speed(
        step=step,
        tokens=setting.batch / step,
        prefill=_prefill(setting, weights, item),
        weights=product,
        rows=moved / copy,
        launches=launches,
        sent=sent,
    )


def all_reduce(setting: Setting, size: int, flags: int = 1) -> float:
    """Seconds of an all-reduce over the GPUs that a model is split over.

    Args:
        setting: what is planned for.
        size: bytes that each has.
        flags: by how much the protocol sends more than that.

    Returns:
        The time of a ring; 0 where nothing is split.
    """
    count, gpu = setting.split, setting.gpu
    if count == 1:
        return 0.0
    hosts = -(-count // gpu.per_host)
    inside = HOP_NVLINK if gpu.link > _NVLINK_FROM else HOP_PCIE
    slowest = gpu.link if hosts == 1 else min(gpu.link, gpu.network * gpu.per_host)
    hops = 2 * (count - hosts) * inside + 2 * (hosts - 1) * (HOP_NETWORK if hosts > 1 else inside)
    return REDUCE + hops + flags * 2 * (count - 1) / count * size / slowest


def _launches(setting: Setting) -> Launches:
    parts = setting.policy.parts()
    if parts.read is not None:
        return CHOOSES
    if parts.ongoing is None or not parts.ongoing.evicts:
        return APPENDS
    return EVICTS if parts.ongoing.merge is None else MERGES


def _rows(setting: Setting) -> tuple[np.ndarray, tuple[int, ...]]:
    """Rows of a kv head that each layer reads in the middle of the answer, and the layers that choose."""
    parts, layers, behind = setting.policy.parts(), setting.config.layers, setting.new // 2
    planned = plan_prefill(setting.config, setting.policy, [setting.context], dtype=setting.dtype)
    # Where prompts say how layers share, they share what all have on average.
    kept = np.full(layers, float(planned.budget.mean())) if planned.rows is None else planned.rows.mean(axis=1)
    reading = parts.reading(layers, planned.slots)
    if reading is not None:
        whole = np.asarray([source == WHOLE for source in reading.sources])
        return np.where(whole, kept, np.minimum(reading.width, kept)) + behind, tuple(reading.filters)
    grows = parts.ongoing is None or not parts.evicts
    period = parts.every or 2 * behind
    # What is compressed again every so often has half of that behind it; what evicts has none, once it is full.
    return kept + (min(behind, period // 2) if grows or parts.every else 0), ()


def _weights(setting: Setting, weights: int, item: int) -> tuple[float, float]:
    """Bytes of the parameters that a step reads, and of those that each token is multiplied by."""
    local, experts = setting.local, setting.config.experts
    # A table that tokens are looked up in, and nothing else, is read a row at a time.
    held = float(weights - (0 if local.tied else local.vocab * local.embed * item))
    if experts is None:
        return held, held
    each = 3 * local.embed * local.hidden * local.layers * item
    others = held - experts.count * each
    # Hardly two tokens choose the same, until all are chosen.
    return others + min(experts.count, experts.chosen * setting.sequences) * each, others + experts.chosen * each


def _products(setting: Setting) -> float:
    """The data sheet's products of this dtype: float32 ones run as TF32, at half the speed of 16 bits."""
    return setting.gpu.products * (0.5 if setting.dtype == "float32" else 1.0)


def _prefill(setting: Setting, weights: int, item: int) -> float:
    """Seconds of all prompts of a group: products, attention of the lower triangle, all-reduces."""
    local, tokens, flops = setting.local, setting.sequences * setting.context, _products(setting)
    # The vocabulary's matrix is for the last tokens alone.
    used = _weights(setting, weights, item)[1] / item - local.vocab * local.embed
    products = 2 * used * tokens / (PRODUCTS * flops)
    # Two products of two operations for each pair of tokens, half of the pairs; once more where all queries score keys.
    passes = 1.5 if setting.policy.parts().needs.sums else 1.0
    pairs = setting.sequences * setting.context**2 / 2
    attention = passes * 4 * pairs * local.layers * local.heads * local.head_dim / (ATTENTION * flops)
    sent = 2 * local.layers * all_reduce(setting, 4 * tokens * local.embed) if setting.split > 1 else 0.0
    return products + attention + sent
