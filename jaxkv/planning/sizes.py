"""Memory of one GPU of a setting by arithmetic: weights by parameter shapes, the rest by the engine's prefill plan."""

import dataclasses
import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AbstractMesh

from jaxkv.engine.growth import MOST_AHEAD, first_room
from jaxkv.engine.lengths import bucket
from jaxkv.engine.plan import PrefillPlan, plan_prefill
from jaxkv.models.config import ModelConfig
from jaxkv.models.decoder import Decoder
from jaxkv.planning.setting import Request, Setting
from jaxkv.policies.checks import Tokens
from jaxkv.sharding.parameters import part_shape

# Copies of a batch's hidden states on devices that read them in other tiles: one for each loop of a layer over them.
_HIDDEN_COPIES = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheParts:
    """Bytes of the cache by what they are for: the budget's `rows`, `room`, `spare` rows, and the policy's `state`.

    Attributes:
        rows: rows that the budget keeps: keys, values, positions, and scores of policies that score while decoding.
        room: free rows behind them, for new tokens.
        spare: rows of the pools that no promised row fills.
        why: what the spare rows are for, as text; empty if there are none.
        state: tables of segments, remembered queries, and other arrays beside the pools.
    """

    rows: int
    room: int
    spare: int
    why: str
    state: int

    @property
    def beyond(self) -> tuple[tuple[str, int], ...]:
        """Tuple of (name, bytes) of room for new tokens, spare rows and tables, each of 1% of the cache or more."""
        total = self.rows + self.room + self.spare + self.state
        named = (("room", self.room), (self.why, self.spare), ("tables and state", self.state))
        return tuple((name, size) for name, size in named if size >= total / 100 and size > 0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """Bytes of weights, cache, activations (one GPU), host rows and the full cache; and rows kept per head, a count.

    Attributes:
        weights: its part of the parameters.
        cache: pools, tables and policy state, with the room for new tokens that prefill leaves.
        grown: the same at the end of the answer.
        prefill: activations of prefill beside the cache, at their peak.
        decode: activations of a decode step beside the cache.
        host: rows offloaded to host memory.
        kept: rows per kv head kept of each prompt, averaged over layers (no bytes).
        full: the uncompressed cache.
        parts: what the cache is made of at the end of the answer.
        waiting: uncompressed rows of all layers that prefill holds until the last one; 0 where it holds a few layers'.
    """

    weights: int
    cache: int
    grown: int
    prefill: int
    decode: int
    host: int
    kept: float
    full: int
    parts: CacheParts
    waiting: int = 0

    @property
    def prefill_peak(self) -> int:
        """Peak bytes of one GPU during prefill: weights, cache and activations."""
        return self.weights + self.cache + self.prefill

    @property
    def decode_peak(self) -> int:
        """Peak bytes of one GPU during decoding: weights, cache and activations."""
        return self.weights + self.grown + self.decode

    @property
    def peak(self) -> int:
        """Peak bytes of one GPU, the larger of prefill and decoding."""
        return max(self.prefill_peak, self.decode_peak)


def sizes_of(setting: Setting) -> Sizes:
    """Computes the `Sizes` (bytes of one GPU) of a setting by arithmetic; ValueError if the budget cannot be kept."""
    parts, config = setting.policy.parts(), setting.config
    room = (
        first_room(parts, config.windows, np.array([setting.context]), setting.new)
        if setting.new
        else 0
    )
    planned = prefill_of(setting, room)
    last = planned
    if setting.new > MOST_AHEAD and parts.ongoing is None:
        last = prefill_of(setting, bucket(setting.new))
    holds_all = parts.layers.from_scores or parts.needs.replay is not None
    activations, block, head, stepping = planned.peak_bytes - planned.cache_bytes, 0, 0, 0
    if setting.weights == "int4":
        # Products widen a matrix at a time, of one vector only the experts'; the head's is of a vector a sequence.
        block, head = (
            jnp.dtype(setting.dtype).itemsize * each for each in widened_matrices(setting)
        )
        as_stored = setting.sequences == 1 and config.experts is None
        stepping = 0 if as_stored else max(block, head)
        head = min(head, stepping)
    if setting.gpu.retiles and jnp.dtype(setting.dtype).itemsize == 2:
        activations += _HIDDEN_COPIES * 2 * setting.sequences * planned.slots * setting.local.embed
        stepping += weights_of(config, setting.dtype, setting.mesh, setting.weights, itemsize=2)
    budget = planned.budget.mean()
    by_layer = [
        budget if width is None else min(width, setting.context) for width in config.windows
    ]
    kept = np.mean(by_layer if planned.rows is None else planned.rows)
    if parts.read is not None and parts.scorer is None:
        kept = float(setting.context)
    return Sizes(
        weights=weights_of(config, setting.dtype, setting.mesh, setting.weights),
        cache=planned.cache_bytes,
        grown=last.cache_bytes,
        prefill=max(activations + block, head),
        decode=_decode(setting, planned) + stepping,
        host=planned.host_bytes,
        kept=float(kept),
        full=planned.full_bytes,
        parts=cache_parts(setting, last, setting.mesh.shape["kv"]),
        # With one budget over all layers, prefill may hold only a buffer of the rows that can still be chosen.
        waiting=planned.full_bytes if holds_all and activations >= planned.full_bytes else 0,
    )


def cache_parts(request: Request, planned: PrefillPlan, kv: int = 1) -> CacheParts:
    """`CacheParts` (bytes by purpose) of a prefill's plan, on one of `kv` devices that share a prompt's kv heads."""
    config, parts = request.config, request.policy.parts()
    row = parts.row_bytes(config.head_dim, planned.dtype.itemsize)
    pools = row * request.sequences * sum(planned.pool_rows(config.kv_heads, kv))
    room = row * request.sequences * request.local.kv_heads * sum(planned.room)
    spare, reasons = planned.slack_bytes, list[str]()
    if spare:
        if planned.share > 1 and kv > 1:
            reasons.append(f"capacity ({planned.share:g} times a device's even share)")
        if planned.layout.one_pool:
            reasons.append("a pool that layers share")
        if request.context < planned.slots and not isinstance(parts.budget, Tokens):
            reasons.append(f"prompts of up to {planned.slots:,} tokens")
    return CacheParts(
        rows=pools - room - spare,
        room=room,
        spare=spare,
        why=(", ".join(reasons) or "spare rows") if spare else "",
        state=planned.cache_bytes - pools,
    )


def prefill_of(setting: Setting, room: int | tuple[int, ...]) -> PrefillPlan:
    """The engine's `PrefillPlan` of a setting: bytes on one GPU for all its prompts; rows and budget of one.

    `room` is the number of free rows behind every segment, one number or one per layer.
    """
    return plan_prefill(
        setting.config,
        setting.policy,
        # One prompt stands for all: they are equally long.
        [setting.context],
        times=setting.batch,
        dtype=setting.dtype,
        room=room,
        implementation=setting.implementation,
        mesh=setting.mesh,
    )


class Parameter(NamedTuple):
    """Named tuple of a parameter array of the model: name, shape, number of blocks with one, bytes of an element.

    Attributes:
        name: last part of its name.
        shape: shape of the array.
        copies: number of blocks with such an array; 1 outside of them.
        itemsize: bytes of an element.
    """

    name: str
    shape: tuple[int, ...]
    copies: int
    itemsize: int


@functools.lru_cache(maxsize=64)
def parameters_of(
    config: ModelConfig, dtype: str, weights: str | None = None
) -> tuple[Parameter, ...]:
    """Tuple of `Parameter` (name, shape, copies, itemsize) of a block, embedding, head and norm; cached.

    `weights` says how linear maps are held, as `jaxkv.load` takes it.
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
    """Bytes of the parameters that one device of a mesh holds; `weights` says how linear maps are held.

    With `itemsize` only of those whose elements have so many bytes.
    """
    total = 0
    for name, shape, copies, size in parameters_of(config, dtype, weights):
        if itemsize in (None, size):
            total += copies * math.prod(part_shape(name, shape, mesh)) * size
    return total


def widened_matrices(request: Request) -> tuple[int, int]:
    """Pair of counts: elements of the largest matrix stored as codes on a device, in a block and of the head; or 0."""
    codes = {
        each.name
        for each in parameters_of(request.config, request.dtype, request.weights)
        if each.itemsize == 1
    }
    wide = [each for each in parameters_of(request.local, request.dtype) if each.name in codes]
    block, head = (
        max((math.prod(each.shape) for each in wide if (each.name == "head") is of), default=0)
        for of in (False, True)
    )
    return block, head


def _decode(setting: Setting, planned: PrefillPlan) -> int:
    """Bytes of a decode step's activations on one GPU, rows loaded from host memory included."""
    parts, local, batch = setting.policy.parts(), setting.local, setting.sequences
    # Last and next logits of the device's part of the vocabulary, and all logits gathered for sampling.
    logits = 4 * batch * (setting.config.vocab + 2 * local.vocab)
    rows = sum(planned.pool_rows(setting.config.kv_heads, setting.mesh.shape["kv"])) * batch
    received = widened = 0
    if not parts.read_as_stored(setting.config.head_dim):
        # A layer's keys and values are decoded where attention reads them.
        widest = max(planned.pool_rows(setting.config.kv_heads, setting.mesh.shape["kv"]))
        widened = 2 * widest * batch * setting.config.head_dim * jnp.dtype(setting.dtype).itemsize
    if parts.ongoing is not None and parts.ongoing.attends:
        # Attention mass of each row; twice where it is summed over devices that share a kv head.
        received = 4 * rows * (2 if setting.mesh.shape["rep"] > 1 else 1)
    hidden = widened + batch * (local.embed + local.hidden) * (
        4 + jnp.dtype(setting.dtype).itemsize
    )
    reading = parts.reading(local.windows, planned.slots)
    if reading is None:
        return logits + received + hidden
    chosen, loaded = 0, planned.loaded_bytes
    if reading.page is not None:
        pools = planned.pool_rows(setting.config.kv_heads, setting.mesh.shape["kv"])
        # For one layer: upper bounds of q.k per page, as sums of two terms, and indices of the chosen rows.
        scores = 8 * local.group * max(pools) // reading.page + 4 * local.kv_heads * min(
            reading.width, max(pools)
        )
        chosen = batch * scores
    if reading.filters:
        # Logits of every query head of a filter layer, and the scores made of them.
        each = planned.pool_rows(setting.config.kv_heads, setting.mesh.shape["kv"])[
            reading.filters[0]
        ]
        chosen = 4 * batch * each * (local.group + 1)
    if loaded:
        # Attention transposes the rows of one layer.
        loaded += loaded // reading.loaded * (reading.width if reading.filters else planned.slots)
    return logits + chosen + loaded + hidden
