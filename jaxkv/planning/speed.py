"""Seconds of prefill and of a decode step: arithmetic work divided by rates measured on a device.

The rates are shares of the data sheet that one H200 reaches (`benchmarks/results/nvidia-h200.md`); other GPUs and TPUs
are assumed to reach the same shares. Tests compare the estimates with measurements.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxkv._checks import format_number
from jaxkv._dataclasses import frozen_dataclass
from jaxkv.cache import DenseStore
from jaxkv.engine.lengths import round_up_to_bucket
from jaxkv.engine.plan import plan_prefill
from jaxkv.planning.accelerators import Accelerator
from jaxkv.planning.memory_sizes import compute_weight_reads
from jaxkv.planning.setting import Workload
from jaxkv.policies.reads import WHOLE

# Shares of the data sheet's FLOP/s that prefill reaches in matrix products, attention, and column sums of attention.
PRODUCTS = 0.6
ATTENTION = 0.55
SCORES = 0.32
# Shares of the bandwidth at which a decode step reads weights, by bits (None: floats), and entries of 16 and 8 bits.
WEIGHTS = {None: 0.8, "int8": 0.55, "int4": 0.33}
ROWS = 0.9
CODES = 0.54
# Seconds of a decode step besides reads, per layer and once: launches, small kernels, starts of attention.
APPENDS = (18.9e-6, 50e-6)
EVICTS = (27.9e-6, 54e-6)
MERGES = (20.9e-6, 126e-6)
CHOOSES = (22.7e-6, 90e-6)
# A ring all-reduce: seconds to start, and per hop by NVLink, PCIe and network, in NCCL's model.
START = 6.6e-6
NVLINK = 0.6e-6
PCIE = 1e-6
NETWORK = 5e-6
# Bytes/s: slower than any NVLink, faster than any PCIe.
_NVLINK_FROM = 100e9
ASSUMED = (
    f"prefill at {PRODUCTS:.0%} of the data sheet's FLOP/s in products and {ATTENTION:.0%} in attention, decode at "
    f"{WEIGHTS[None]:.0%} of its bandwidth for weights and {ROWS:.0%} for entries, as measured on one H200"
)


@frozen_dataclass
class Speed:
    """Estimated seconds of a batch: prefill, and one decode step with its reads of weights and of entries (`rows`).

    Each of the `batch` prompts answers `questions` requests of `new` tokens, which share its prefill.
    """

    prefill: float
    step: float
    weights: float
    rows: float
    batch: int
    new: int
    questions: int

    @property
    def tokens_per_second(self) -> float:
        """Estimated new tokens per second of all prompts together while decoding."""
        return self.batch / self.step

    @property
    def batch_seconds(self) -> float:
        """Estimated seconds of a batch per question: prefill divided by `questions`, plus `new` decode steps."""
        return self.prefill / self.questions + self.new * self.step

    @property
    def requests(self) -> float:
        """Estimated requests per hour if batches run one after the other."""
        return 3600 * self.batch / self.batch_seconds

    def __str__(self) -> str:
        """Estimated speed in one line: seconds of prefill, tokens/s, ms per step, requests per hour."""
        step = f"{self.tokens_per_second:,.0f} tokens/s ({self.step * 1e3:.1f} ms per step)"
        return f"prefill {self.prefill:,.1f} s, {step}, {format_number(self.requests)} requests per hour"

    def as_dict(self) -> dict[str, Any]:
        """Return a `Speed` as a dict: fields, new tokens per second, requests per hour, seconds of a batch."""
        found = {"tokens_per_second": self.tokens_per_second, "request_seconds": self.batch_seconds}
        return dataclasses.asdict(self) | found | {"requests_per_hour": self.requests}


def explain_missing_rate(setting: Workload) -> str:
    """Return as text why a workload's speed cannot be estimated from measured rates; empty if it can be."""
    parts = setting.policy.composed
    config = setting.config
    reading = parts.build_read_config(config.sliding_windows, round_up_to_bucket(setting.context))
    several = setting.prompts_per_group > 1 or config.experts is not None
    reasons = {
        "no rates were measured on a CPU": not isinstance(setting.gpu, Accelerator),
        "attention within sliding windows has not been measured": any(config.sliding_windows),
        "attention to latents has not been measured": config.latent is not None,
        "layers with a state have not been measured": bool(config.state_bytes),
        "entries are loaded from host memory": bool(reading.offloaded),
        "each step converts weights in 4 bits": setting.weights == "int4" and several,
        "each step decodes these entries": not parts.kernels_read_as_stored(config.head_dim),
        "attention over entries in 4 bits has not been measured": "nibbles" in parts.store.kernels,
    }
    return next((why for why, found in reasons.items() if found), "")


def estimate_speed(setting: Workload) -> Speed | None:
    """Estimate the `Speed` of a workload from data sheets and measured rates; None if no rate was measured."""
    gpu = setting.gpu
    if explain_missing_rate(setting) or not isinstance(gpu, Accelerator):
        return None
    parts = setting.policy.composed
    local = setting.local_config
    item = jnp.dtype(setting.dtype).itemsize
    layers = setting.config.layers
    prompts = setting.prompts_per_group
    read, _ = compute_weight_reads(setting, setting.weights)
    _, used = compute_weight_reads(setting)
    # TensorFloat-32 runs at half of bfloat16's rate.
    flops = gpu.products * (0.5 if setting.dtype == "float32" else 1.0)
    weights = max(
        read / (WEIGHTS[setting.weights] * gpu.bandwidth),
        2 * used / item * prompts / (PRODUCTS * flops),
    )
    kept, filters = count_entries_read(setting)
    each = parts.store.compute_entry_bytes(local.head_dim, item)
    if parts.decoding_compression.updates_scores:
        # A logit per query head and entry, and the accumulated attention mass.
        each += 4 * local.group_size + 8
    # A filter layer reads its keys twice, to score them.
    rows = each * float(kept.sum()) + local.head_dim * item * float(kept[list(filters)].sum())
    rows *= local.kv_heads * prompts
    rows /= gpu.bandwidth * (ROWS if parts.store.kernels == DenseStore.kernels else CODES)
    launched = APPENDS
    if not parts.read.reads_all_entries:
        launched = CHOOSES
    elif parts.evicts_while_decoding:
        launched = EVICTS if parts.decoding_compression.merge is None else MERGES
    # A step is one program, which a TPU runs without launches.
    launches = (launched[0] * layers + launched[1]) * (gpu.platform == "cuda")
    # Two sums of hidden states in float32 per layer and one for the embedding; NCCL sends a flag with every 4 bytes.
    sent = (2 * layers + 1) * estimate_all_reduce(setting, 2 * 4 * prompts * local.embed)
    products, attention, scores = count_prefill_flops(
        setting, used / item - local.vocab * local.embed
    )
    hidden = 2 * layers * estimate_all_reduce(setting, 4 * prompts * setting.context * local.embed)
    prefill = products / PRODUCTS + attention / ATTENTION + scores / SCORES
    return Speed(
        prefill=prefill / flops + hidden,
        step=weights + rows + launches + sent,
        weights=weights,
        rows=rows,
        batch=setting.batch,
        new=setting.new,
        questions=setting.questions,
    )


def estimate_all_reduce(setting: Workload, size: int) -> float:
    """Return the seconds of a ring all-reduce of `size` bytes among a group's devices; 0 for one device."""
    count = setting.gpus_per_group
    gpu = setting.gpu
    if count == 1 or not isinstance(gpu, Accelerator):
        return 0.0
    link = gpu.link
    hop = NVLINK if gpu.link > _NVLINK_FROM else PCIE
    if count > gpu.per_host:
        link = min(link, gpu.network * gpu.per_host)
        hop = NETWORK
    return START + 2 * (count - 1) * (hop + size / count / link)


def count_entries_read(setting: Workload) -> tuple[np.ndarray, tuple[int, ...]]:
    """Return entries per kv head, `[L]`, that a step reads midway in an answer; and filter layers' indices."""
    parts = setting.policy.composed
    layers = setting.config.layers
    behind = setting.new // 2
    planned = plan_prefill(setting.config, setting.policy, [setting.context], dtype=setting.dtype)
    # Layer budgets that depend on the prompt are assumed uniform.
    kept = np.full(layers, float(planned.budget.mean()))
    if planned.rows is not None:
        kept = planned.rows.mean(axis=1)
    reading = parts.build_read_config(setting.config.sliding_windows, planned.padded_len)
    if parts.read.reads_all_entries:
        grows = not parts.evicts_while_decoding
        if parts.growing_budget is not None:
            kept = kept * (1 + behind / setting.context)
        period = parts.recompression_interval or 2 * behind
        # Recompressed caches hold half a period of new entries on average; evicting caches hold none once full.
        return kept + (min(behind, period // 2) if grows or parts.recompression_interval else 0), ()
    whole = np.asarray([source == WHOLE for source in reading.sources])
    if reading.page:
        # The bounds of a page are read like one entry: a minimum and a maximum instead of a key and a value.
        held = kept + behind
        return np.where(whole, held, np.minimum(reading.width, held) + held / reading.page), ()
    read = np.where(whole, kept, np.minimum(reading.width, kept))
    return read + behind, tuple(reading.filters)


def count_prefill_flops(setting: Workload, weights: float) -> tuple[float, float, float]:
    """Return FLOP counts of one device's prefill: products with `weights` parameters, attention, policy scores."""
    local = setting.local_config
    parts = setting.policy.composed
    tokens = setting.context
    needs = parts.needs
    again = 0.0
    # 4 FLOP per query, key and channel, and half of the pairs.
    pairs = tokens**2 / 2
    channels = local.layers * local.heads * local.prompt_head_dim
    scores = 2 * pairs * channels if needs.sums else 0.0
    if needs.replay is not None:
        # A second pass: each chunk, and the tokens between chunks, attend to the whole prompt, and logits are read.
        again = 1 + needs.replay.tail / min(needs.replay.chunk, tokens)
        scores += 4 * pairs * again * channels
        # A gradient: each layer once more, and backwards.
        again *= 1 + 3 * needs.replay.runs_backwards
    # The last queries, and comparisons of keys, for policies that use them.
    scores += 2.0 * needs.queries * tokens * channels
    if parts.scorer.compares_keys:
        scores += 2.0 * tokens**2 * channels / local.group_size
    prompts = setting.prompts_per_group
    products = 2 * weights * tokens * (1 + again)
    attention = 4 * pairs * channels * (1 + 2 * again)
    return prompts * products, prompts * attention, prompts * scores
