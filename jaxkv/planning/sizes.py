"""Bytes of a setting, by arithmetic: what one GPU holds while prompts are prefilled, and while tokens are drawn.

Weights follow from the shapes of the model's parameters and the specs that they are split by, pools and everything else
from the engine's own plan of one prefill on such a mesh.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AbstractMesh, NamedSharding

from jaxkv.attention import Implementation
from jaxkv.engine.growth import MOST_AHEAD, first_room
from jaxkv.engine.plan import PrefillPlan, bucket, plan_prefill
from jaxkv.models.config import ModelConfig
from jaxkv.models.decoder import Decoder
from jaxkv.planning.setting import Setting
from jaxkv.sharding.parameters import spec_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """What one GPU of a setting holds, in bytes.

    Attributes:
        weights: its part of the parameters.
        cache: pools, tables and what the policy remembers, with the room for new tokens that prefill leaves.
        grown: the same at the end of the answer.
        prefill: what prefill computes with beside the cache, where most lies there.
        decode: what the loop over tokens computes with beside the cache.
        host: what waits in host memory on the GPU's behalf.
        kept: rows that a kv head keeps of each prompt, averaged over layers.
        full: what the cache would weigh uncompressed.
    """

    weights: int
    cache: int
    grown: int
    prefill: int
    decode: int
    host: int
    kept: float
    full: int

    @property
    def prefill_peak(self) -> int:
        """The most that lies there until the last prompt's last layer is packed."""
        return self.weights + self.cache + self.prefill

    @property
    def decode_peak(self) -> int:
        """The most that lies there while tokens are drawn."""
        return self.weights + self.grown + self.decode

    @property
    def peak(self) -> int:
        """The larger of both."""
        return max(self.prefill_peak, self.decode_peak)


def sizes_of(setting: Setting) -> Sizes:
    """What one GPU of a setting holds.

    Args:
        setting: the question.

    Returns:
        Its bytes.

    Raises:
        ValueError: if the budget cannot be honoured for such prompts.
    """
    parts, config = setting.policy.parts(), setting.config
    room = first_room(parts, config.layers, np.array([setting.context]), setting.new) if setting.new else 0
    planned = prefill_of(setting, room)
    grown = planned.cache_bytes
    if setting.new > MOST_AHEAD and parts.ongoing is None:
        grown = prefill_of(setting, bucket(setting.new)).cache_bytes
    kept = planned.budget.mean() if planned.rows is None else planned.rows.mean()
    if parts.read is not None and parts.scorer is None:
        kept = float(setting.context)
    return Sizes(
        weights=weights_of(config, setting.dtype, setting.mesh),
        cache=planned.cache_bytes,
        grown=grown,
        prefill=planned.peak_bytes - planned.cache_bytes,
        decode=_decode(setting, planned),
        host=planned.host_bytes,
        kept=float(kept),
        full=planned.full_bytes,
    )


def prefill_of(setting: Setting, room: int | tuple[int, ...]) -> PrefillPlan:
    """The engine's own plan of the prefill, bytes of one GPU.

    Args:
        setting: the question.
        room: rows to leave behind every segment; one number, or one for each layer.

    Returns:
        The plan, attention by the library's kernels; rows and budgets are those of one prompt.
    """
    options = {"dtype": setting.dtype, "implementation": Implementation.PALLAS, "mesh": setting.mesh}
    # One prompt stands for all: they are alike.
    options |= {"room": room, "times": setting.batch}
    return plan_prefill(setting.config, setting.policy, [setting.context], **options)  # type: ignore[arg-type]


@functools.lru_cache(maxsize=64)
def weights_of(config: ModelConfig, dtype: str, mesh: AbstractMesh) -> int:
    """Bytes of the parameters that one device has.

    Args:
        config: the model's shape.
        dtype: of the parameters.
        mesh: from `sharding.abstract_mesh`.

    Returns:
        The bytes; every block has as many.
    """
    decoder = Decoder(dataclasses.replace(config, layers=1), dtype=dtype)
    block, others = 0, 0
    for path, leaf in jax.tree_util.tree_leaves_with_path(nnx.state(decoder, nnx.Param)):
        names = [str(each.key) for each in path if hasattr(each, "key")]
        part = NamedSharding(mesh, spec_of(names[-1])).shard_shape(leaf.shape)
        size = math.prod(part) * leaf.dtype.itemsize
        block, others = (block + size, others) if names[0] == "blocks" else (block, others + size)
    return block * config.layers + others


def _decode(setting: Setting, planned: PrefillPlan) -> int:
    """What the loop over tokens takes beside weights and cache, and rows that come from host memory."""
    parts, local, batch = setting.policy.parts(), setting.local, setting.sequences
    # Logits of each device's part of the vocabulary, the last ones and the next, and gathered for the draw.
    wide = 4 * batch * (setting.config.vocab + 2 * local.vocab)
    rows = sum(planned.pool_rows(setting.config.kv_heads, setting.mesh.shape["kv"])) * batch
    received = 0
    if parts.ongoing is not None and parts.ongoing.attends:
        # Attention that each row receives; summed over the devices that have query heads of the same kv head.
        received = 4 * rows * (2 if setting.mesh.shape["rep"] > 1 else 1)
    hidden = batch * (local.embed + local.hidden) * (4 + jnp.dtype(setting.dtype).itemsize)
    reading = parts.reading(local.layers, planned.slots)
    if reading is None:
        return wide + received + hidden
    chosen, loaded = 0, planned.loaded_bytes
    if reading.filters:
        # A filter's logits of every query head, and the scores that are made of them.
        each = planned.pool_rows(setting.config.kv_heads, setting.mesh.shape["kv"])[reading.filters[0]]
        chosen = 4 * batch * each * (local.group + 1)
    if loaded:
        # Attention wants one layer's of them in another order.
        loaded += loaded // reading.loaded * (reading.width if reading.filters else planned.slots)
    return wide + chosen + loaded + hidden
