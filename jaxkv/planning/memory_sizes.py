"""Memory of one device by arithmetic: weights from parameter shapes, the rest from the engine's prefill plan."""

import dataclasses
import functools
import math
from collections import Counter
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AbstractMesh

from jaxkv._dataclasses import frozen_dataclass
from jaxkv.cache.stores import choose_cache_dtype
from jaxkv.engine.headroom import MOST_AHEAD, compute_prefill_headroom
from jaxkv.engine.lengths import round_up_to_bucket
from jaxkv.engine.plan import PrefillPlan, plan_prefill
from jaxkv.models.config import ModelConfig
from jaxkv.models.decoder import Decoder
from jaxkv.models.values import Rope
from jaxkv.planning.setting import Workload
from jaxkv.sharding.parameters import compute_shard_shape

# Copies of a batch's hidden states on devices that retile them: one for each loop of a layer over them.
_HIDDEN_COPIES = 3
# Resident bytes of a CPU process besides arrays: Python, JAX, a tokenizer and leftovers of loading; then per layer its
# programs and their compiler, for steps that append entries and steps that also evict. Measured on Linux with SmolLM2
# and JAX 0.10.2 (commit fcfce720).
_PROCESS = 376_000_000
_APPENDS = 8_700_000
_EVICTS = 22_000_000


@frozen_dataclass
class MemorySizes:
    """Bytes of one device's weights, cache, activations, offloaded entries, full cache; mean kept entries per kv head.

    Attributes:
        weights: the device's shard of the parameters.
        read: bytes of parameters that a decode step reads: of experts only the chosen ones.
        cache: pools, tables and policy state, with the headroom that prefill leaves for new tokens.
        grown: the cache at the end of the answer.
        prefill: peak activations of prefill, in addition to the cache.
        decode: activations of a decode step, in addition to the cache.
        host: entries offloaded to host memory.
        kept: entries kept per kv head of each prompt, averaged over layers (a number, not bytes).
        full: the uncompressed cache.
        process: on a CPU: Python, JAX and compiled programs, which share the machine's memory; 0 on other devices.
    """

    weights: int
    read: int
    cache: int
    grown: int
    prefill: int
    decode: int
    host: int
    kept: float
    full: int
    process: int = 0

    @property
    def prefill_peak(self) -> int:
        """Peak bytes of one device during prefill: weights, cache, activations, and on a CPU the process."""
        return self.weights + self.process + self.cache + self.prefill

    @property
    def decode_peak(self) -> int:
        """Peak bytes of one device during decoding: weights, largest cache, activations, and on a CPU the process."""
        return self.weights + self.process + self.grown + self.decode

    @property
    def peak_device_bytes(self) -> int:
        """Peak bytes of one device: the larger of the peaks of prefill and decoding."""
        return max(self.prefill_peak, self.decode_peak)


def compute_memory_sizes(setting: Workload) -> MemorySizes:
    """Return the `MemorySizes` (bytes of one device) of a workload; ValueError if its policy's budget is too small."""
    parts = setting.policy.composed
    config = setting.config
    item = jnp.dtype(setting.dtype).itemsize
    lengths = np.array([setting.context])
    headroom = (
        compute_prefill_headroom(parts, config.sliding_windows, lengths, setting.new)
        if setting.new
        else 0
    )
    planned = last = plan_workload_prefill(setting, headroom)
    if setting.new > MOST_AHEAD and not parts.decoding_compression.compresses:
        last = plan_workload_prefill(setting, round_up_to_bucket(setting.new))
    elif parts.growing_budget is not None:
        # Prompt and answer are recompressed to the entries of a prompt of their length.
        longest = setting.context + setting.new
        last = plan_workload_prefill(dataclasses.replace(setting, context=longest), headroom)
    prefill = planned.peak_bytes - planned.cache_bytes
    stepping = 0
    here = setting.gpu.platform == "cpu"
    process = 0
    several = setting.prompts_per_group > 1 or config.experts is not None
    if setting.weights == "int4" or (here and setting.weights == "int8"):
        # Products widen one matrix at a time; a GPU reads the codes directly for one vector.
        matrix = item * _count_widened_elements(setting)
        prefill = prefill + matrix
        stepping = matrix * (here or several)
    if setting.gpu.retiles and item == 2:
        prefill += (
            _HIDDEN_COPIES
            * 2
            * setting.prompts_per_group
            * planned.padded_len
            * setting.local_config.embed
        )
        stepping += compute_weight_bytes(
            config, setting.dtype, setting.mesh, setting.weights, itemsize=2
        )
    kept = (planned.budget if planned.rows is None else planned.rows).mean()
    if not (parts.read.reads_all_entries or parts.compresses_prompts):
        kept = setting.context
    if here:
        # The largest tensor is read in float32 before it is cast to the dtype.
        parameters = list_parameters(config, setting.dtype)
        loading = (4 + item) * max(math.prod(each.shape) for each in parameters)
        prefill = max(prefill, loading - planned.cache_bytes)
        process = (
            planned.host_bytes
            + _PROCESS
            + config.layers * (_EVICTS if parts.evicts_while_decoding else _APPENDS)
        )
    return MemorySizes(
        weights=compute_weight_bytes(config, setting.dtype, setting.mesh, setting.weights),
        read=compute_weight_reads(setting, setting.weights)[0],
        cache=planned.cache_bytes,
        grown=last.cache_bytes,
        prefill=prefill,
        decode=_compute_decode_bytes(setting, planned) + stepping,
        host=planned.host_bytes,
        kept=float(kept),
        full=planned.full_bytes,
        process=process,
    )


def plan_workload_prefill(setting: Workload, headroom: int | tuple[int, ...]) -> PrefillPlan:
    """Return a workload's `PrefillPlan`: bytes on one device for all prompts; entries and budget of one prompt.

    `headroom` is the number of free places behind every segment, one for all layers or one per layer.
    """
    return plan_prefill(
        setting.config,
        setting.policy,
        # One prompt stands for all, which have the same length.
        [setting.context],
        times=setting.batch,
        dtype=choose_cache_dtype(setting.dtype, setting.gpu.platform),
        headroom=headroom,
        implementation=setting.prefill_implementation,
        mesh=setting.mesh,
    )


class ParameterInfo(NamedTuple):
    """A parameter array: name, shape, number of blocks that have it (1 outside of blocks), bytes per element."""

    name: str
    shape: tuple[int, ...]
    copies: int
    itemsize: int


@functools.lru_cache(maxsize=64)
def list_parameters(
    config: ModelConfig, dtype: str, weights: str | None = None
) -> tuple[ParameterInfo, ...]:
    """Return a tuple with the `ParameterInfo` of each array of each kind of block, embedding, head, norm; cached.

    `weights` is the quantisation of linear maps, as in `jaxkv.load`.
    """
    # One layer of each kind stands for all of them.
    counts = Counter(map(config.get_layer_spec, range(config.layers)))
    few = dataclasses.replace(config, layers=len(counts), rope=Rope(), kinds=tuple(counts))
    decoder = Decoder(few, dtype=dtype, weights=weights)
    found = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(nnx.state(decoder, nnx.Param)):
        names = [str(each.key) for each in path if hasattr(each, "key")]
        copies = tuple(counts.values())[int(names[1])] if names[0] == "blocks" else 1
        found.append(ParameterInfo(names[-1], leaf.shape, copies, leaf.dtype.itemsize))
    return tuple(found)


def count_parameters(config: ModelConfig, dtype: str) -> int:
    """Return the number of a model's parameters, biases that correct routers' choices included."""
    return sum(each.copies * math.prod(each.shape) for each in list_parameters(config, dtype))


def compute_weight_bytes(
    config: ModelConfig,
    dtype: str,
    mesh: AbstractMesh,
    weights: str | None = None,
    *,
    itemsize: int | None = None,
) -> int:
    """Return one device's bytes of parameters, linear maps in format `weights`; with `itemsize`, of that width only.

    With `itemsize`, count only parameters with so many bytes per element.
    """
    return sum(
        each.copies * math.prod(compute_shard_shape(each.name, each.shape, mesh)) * each.itemsize
        for each in list_parameters(config, dtype, weights)
        if itemsize in (None, each.itemsize)
    )


def compute_weight_reads(setting: Workload, weights: str | None = None) -> tuple[int, int]:
    """Return how many bytes of a device's parameters a decode step reads, and how many multiply each token.

    Of experts only those that tokens choose are read; tokens are assumed to choose different ones until all are chosen.
    `weights` is the format of linear maps.
    """
    config = setting.config
    read = used = 0
    for each in list_parameters(config, setting.dtype, weights):
        if each.name == "embedding" and not config.tied:
            continue  # One row per token.
        shape = compute_shard_shape(each.name, each.shape, setting.mesh)
        size = each.copies * math.prod(shape) * each.itemsize
        chosen = count = 1
        if config.experts is not None and each.name.startswith("experts_"):
            chosen, count = config.experts.chosen, config.experts.count
        read += size * min(count, chosen * setting.prompts_per_group) // count
        used += size * chosen // count
    return read, used


def _count_widened_elements(setting: Workload) -> int:
    """Return how many elements a device's shard of the largest quantised matrix has, to widen for products."""
    held = list_parameters(setting.config, setting.dtype, setting.weights)
    codes = {each.name for each in held if each.itemsize == 1}
    wide = [
        each for each in list_parameters(setting.local_config, setting.dtype) if each.name in codes
    ]
    return max(math.prod(each.shape) for each in wide)


def _compute_decode_bytes(setting: Workload, planned: PrefillPlan) -> int:
    """Return the bytes of a decode step's activations on one device, including entries loaded from host memory."""
    parts = setting.policy.composed
    local = setting.local_config
    batch = setting.prompts_per_group
    item = jnp.dtype(setting.dtype).itemsize
    pools = planned.pools
    # Last and next logits of the device's shard of the vocabulary, all logits for sampling, and hidden states.
    found = 4 * (setting.config.vocab + 2 * local.vocab)
    found += (local.embed + max(local.mlp_widths)) * (4 + item)
    if not parts.kernels_read_as_stored(max(local.entry_dims)):
        # Entries of a layer are decoded before attention.
        sizes = local.entry_elements[: len(pools)]
        found += item * max(rows * each for rows, each in zip(pools, sizes, strict=True))
    if parts.decoding_compression.updates_scores:
        # Attention mass per entry; once more if it is summed over devices that share a kv head.
        found += 4 * sum(pools) * (1 + (setting.mesh.shape["rep"] > 1))
    reading = parts.build_read_config(local.sliding_windows, planned.padded_len)
    loaded = planned.loaded_bytes
    if reading.filters:
        # Logits of every query head of a filter layer, and the scores computed from them.
        found += 4 * pools[reading.filters[0]] * (local.group_size + 1)
    if loaded:
        # Attention transposes the entries of one layer.
        loaded += (
            loaded
            // reading.max_loaded_entries
            * (reading.width if reading.filters else planned.padded_len)
        )
    return batch * found + loaded
