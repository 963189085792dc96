"""Memory of one device by arithmetic: weights from parameter shapes, the rest from the engine's prefill plan."""

import dataclasses
import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AbstractMesh

from jaxkv.cache.stores import held_dtype
from jaxkv.engine.headroom import MOST_AHEAD, first_headroom
from jaxkv.engine.lengths import bucket
from jaxkv.engine.plan import PrefillPlan, plan_prefill
from jaxkv.models.config import ModelConfig
from jaxkv.models.decoder import Decoder
from jaxkv.planning.setting import Workload
from jaxkv.sharding.parameters import part_shape

# Copies of a batch's hidden states on devices that retile them: one for each loop of a layer over them.
_HIDDEN_COPIES = 3
# Resident bytes of a CPU process besides arrays: Python, JAX, a tokenizer and leftovers of loading; then per layer its
# programs and their compiler, for steps that append entries and steps that also evict. Measured on Linux with SmolLM2
# and JAX 0.10.2 (commit fcfce720).
_PROCESS, _APPENDS, _EVICTS = 376_000_000, 8_700_000, 22_000_000


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """Bytes of weights, cache and activations (one device), of host entries and the full cache; and kept entries.

    Attributes:
        weights: the device's shard of the parameters.
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
        """Peak bytes of one device during prefill: weights, cache and activations."""
        return self.weights + self.process + self.cache + self.prefill

    @property
    def decode_peak(self) -> int:
        """Peak bytes of one device during decoding: weights, cache and activations."""
        return self.weights + self.process + self.grown + self.decode

    @property
    def peak(self) -> int:
        """Peak bytes of one device: the larger of prefill and decoding."""
        return max(self.prefill_peak, self.decode_peak)


def sizes_of(setting: Workload) -> Sizes:
    """Compute the `Sizes` (bytes of one device) of a setting; ValueError if the budget cannot be kept."""
    parts, config, item = setting.policy.composed, setting.config, jnp.dtype(setting.dtype).itemsize
    lengths = np.array([setting.context])
    headroom = (
        first_headroom(parts, config.sliding_windows, lengths, setting.new) if setting.new else 0
    )
    planned = last = prefill_of(setting, headroom)
    if setting.new > MOST_AHEAD and not parts.ongoing.compresses:
        last = prefill_of(setting, bucket(setting.new))
    prefill, stepping = planned.peak_bytes - planned.cache_bytes, 0
    here, process = setting.gpu.platform == "cpu", 0
    several = setting.sequences > 1 or config.experts is not None
    if setting.weights == "int4" or (here and setting.weights == "int8"):
        # Products widen one matrix at a time; a GPU reads the codes directly for one vector.
        matrix = item * _widened_matrix(setting)
        prefill, stepping = prefill + matrix, matrix * (here or several)
    if setting.gpu.retiles and item == 2:
        prefill += _HIDDEN_COPIES * 2 * setting.sequences * planned.padded_len * setting.local.embed
        stepping += weights_of(config, setting.dtype, setting.mesh, setting.weights, itemsize=2)
    kept = (planned.budget if planned.rows is None else planned.rows).mean()
    if not (parts.read.everything or parts.drops):
        kept = setting.context
    if here:
        # The largest tensor is read in float32 before it is cast to the dtype.
        parameters = parameters_of(config, setting.dtype)
        loading = (4 + item) * max(math.prod(each.shape) for each in parameters)
        prefill = max(prefill, loading - planned.cache_bytes)
        process = (
            planned.host_bytes + _PROCESS + config.layers * (_EVICTS if parts.evicts else _APPENDS)
        )
    return Sizes(
        weights=weights_of(config, setting.dtype, setting.mesh, setting.weights),
        cache=planned.cache_bytes,
        grown=last.cache_bytes,
        prefill=prefill,
        decode=_decode(setting, planned) + stepping,
        host=planned.host_bytes,
        kept=float(kept),
        full=planned.full_bytes,
        process=process,
    )


def prefill_of(setting: Workload, headroom: int | tuple[int, ...]) -> PrefillPlan:
    """The engine's `PrefillPlan` of a setting: bytes on one device for all its prompts; entries and budget of one.

    `headroom` is the number of free places behind every segment, one for all layers or one per layer.
    """
    return plan_prefill(
        setting.config,
        setting.policy,
        # One prompt stands for all, which have the same length.
        [setting.context],
        times=setting.batch,
        dtype=held_dtype(setting.dtype, setting.gpu.platform),
        headroom=headroom,
        implementation=setting.implementation,
        mesh=setting.mesh,
    )


class Parameter(NamedTuple):
    """A parameter array: name, shape, number of blocks that have it (1 outside of blocks), bytes per element."""

    name: str
    shape: tuple[int, ...]
    copies: int
    itemsize: int


@functools.lru_cache(maxsize=64)
def parameters_of(
    config: ModelConfig, dtype: str, weights: str | None = None
) -> tuple[Parameter, ...]:
    """Return the `Parameter` of each array of a block, embedding, head and norm; cached.

    `weights` is the quantisation of linear maps, as in `jaxkv.load`.
    """
    decoder = Decoder(dataclasses.replace(config, layers=1, kinds=()), dtype=dtype, weights=weights)
    found = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(nnx.state(decoder, nnx.Param)):
        names = [str(each.key) for each in path if hasattr(each, "key")]
        copies = config.layers if names[0] == "blocks" else 1
        found.append(Parameter(names[-1], leaf.shape, copies, leaf.dtype.itemsize))
    return tuple(found)


def weights_of(
    config: ModelConfig,
    dtype: str,
    mesh: AbstractMesh,
    weights: str | None = None,
    *,
    itemsize: int | None = None,
) -> int:
    """Bytes of the parameters on one device of a mesh; `weights` is the quantisation of linear maps.

    With `itemsize`, count only parameters with so many bytes per element.
    """
    return sum(
        each.copies * math.prod(part_shape(each.name, each.shape, mesh)) * each.itemsize
        for each in parameters_of(config, dtype, weights)
        if itemsize in (None, each.itemsize)
    )


def _widened_matrix(setting: Workload) -> int:
    """Number of elements of the largest matrix stored as codes on a device."""
    held = parameters_of(setting.config, setting.dtype, setting.weights)
    codes = {each.name for each in held if each.itemsize == 1}
    wide = [each for each in parameters_of(setting.local, setting.dtype) if each.name in codes]
    return max(math.prod(each.shape) for each in wide)


def _decode(setting: Workload, planned: PrefillPlan) -> int:
    """Bytes of a decode step's activations on one device, with the entries loaded from host memory."""
    parts, local, batch = setting.policy.composed, setting.local, setting.sequences
    item, pools = jnp.dtype(setting.dtype).itemsize, planned.pools
    # Last and next logits of the device's shard of the vocabulary, all logits for sampling, and hidden states.
    found = 4 * (setting.config.vocab + 2 * local.vocab)
    found += (local.embed + local.hidden) * (4 + item)
    if not parts.read_as_stored(setting.config.head_dim):
        # Keys and values of a layer are decoded before attention.
        found += 2 * max(pools) * setting.config.head_dim * item
    if parts.ongoing.attends:
        # Attention mass per entry; once more if it is summed over devices that share a kv head.
        found += 4 * sum(pools) * (1 + (setting.mesh.shape["rep"] > 1))
    reading, loaded = parts.reading(local.sliding_windows, planned.padded_len), planned.loaded_bytes
    if reading.filters:
        # Logits of every query head of a filter layer, and the scores computed from them.
        found += 4 * pools[reading.filters[0]] * (local.group + 1)
    if loaded:
        # Attention transposes the entries of one layer.
        loaded += (
            loaded // reading.loaded * (reading.width if reading.filters else planned.padded_len)
        )
    return batch * found + loaded
