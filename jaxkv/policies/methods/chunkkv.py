"""ChunkKV: keep whole chunks of neighbouring rows, the same ones in all kv heads, by any policy's scores."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxkv._checks import field, whole
from jaxkv._errors import require
from jaxkv.policies.heads import SharedHeads, UniformHeads
from jaxkv.policies.parts import Parts
from jaxkv.policies.policy import Method
from jaxkv.policies.registry import register
from jaxkv.policies.topk import sortable, top
from jaxkv.policies.wrapper import Wrapper


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChunkedHeads(SharedHeads):
    """Head budgets under which a layer's kv heads keep the same whole chunks: those of the highest mean scores.

    Chunks with rows that stay anyway are completed first, lowest position first; the others follow by the mean score of
    their rows, over heads and rows. Of the first chunk that does not fit, its best rows fill the budget.

    Attributes:
        chunk: rows of a chunk; the last one of a prompt may have fewer.
    """

    chunk: int = 20

    def __post_init__(self) -> None:
        field(self, "chunk", whole, "give 1 row or more")

    def choose(
        self,
        scores: Float[Array, "B K S"],
        candidates: Bool[Array, "B #K S"],
        base: Int[Array, " B"],
        forced: Int[Array, " B"],
        norms: Float[Array, "B K S"] | None = None,
    ) -> Bool[Array, "B K S"]:
        """Mask `[B, K, S]` of `base` candidates, the same in every head: whole chunks, and the best rows of one."""
        batch, _, slots = scores.shape

        def chunks(rows: Array) -> Array:
            """Reshapes `[B, S]` to `[B, C, chunk]`; zeros behind the last row."""
            return jnp.pad(rows, ((0, 0), (0, -slots % self.chunk))).reshape(batch, -1, self.chunk)

        # Heads that share positions have the same candidates, which with the forced rows are all rows of the text.
        free = candidates[:, 0]
        length = free.sum(axis=-1, dtype=jnp.int32) + forced
        stays = (jnp.arange(slots, dtype=jnp.int32) < length[:, None]) & ~free
        mean = jnp.where(free, scores.mean(axis=1), 0.0)
        count = chunks(free).sum(axis=-1, dtype=jnp.int32)
        of_chunk = sortable(chunks(mean).sum(axis=-1) / jnp.maximum(count, 1).astype(jnp.float32))
        order = jnp.argsort(jnp.where(chunks(stays).any(axis=-1), jnp.uint32(0), ~of_chunk), axis=-1, stable=True)
        sizes = jnp.take_along_axis(count, order, axis=-1)
        taken = jnp.clip(base[:, None] - (jnp.cumsum(sizes, axis=-1, dtype=jnp.int32) - sizes), 0, sizes)
        taken = jnp.take_along_axis(taken, jnp.argsort(order, axis=-1), axis=-1)
        chosen = top(chunks(jnp.where(free, sortable(mean), jnp.uint32(0))), taken)
        return jnp.broadcast_to(chosen.reshape(batch, 1, -1)[..., :slots], scores.shape)


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class ChunkKV(Wrapper):
    """Keeps whole chunks of neighbouring rows, the same in all kv heads, by the mean of the base policy's scores.

    The sum of rows is the budget's: of the first chunk that does not fit, its best rows stay. Chunks that have rows of
    the window, sinks or protected spans are completed before others.

    Attributes:
        base: the policy whose scores, kept rows and layer budgets are used.
        chunk: rows of a chunk.

    References:
        Liu et al., ChunkKV: Semantic-Preserving KV Cache Compression for Efficient Long-Context LLM Inference,
        arXiv:2502.00299.
    """

    chunk: int = 20

    paper: ClassVar[str] = "ChunkKV, arXiv:2502.00299"

    usual: ClassVar[str] = "snapkv"

    def _check(self) -> None:
        self._adopt(ChunkedHeads(chunk=self.chunk), "chunk")
        super()._check()

    def check_base(self, base: Method, parts: Parts) -> None:
        """Raises ValueError for bases with head budgets of their own, nested layers, or rows evicted one by one."""
        plain = type(parts.heads) in (UniformHeads, SharedHeads)
        require(plain, "base", base, "its heads choose in a way of their own: give SnapKV(), say")
        require(
            not parts.nested, "base", base, "its layers choose among the rows of the layer below: give SnapKV(), say"
        )
        require(not parts.evicts, "base", base, "rows that go one by one are in no chunk: give mode='prefill'")

    def wrap(self, base: Parts) -> Parts:
        """Returns the base's parts with kv heads that keep the same whole chunks."""
        return dataclasses.replace(base, heads=ChunkedHeads(chunk=self.chunk))
