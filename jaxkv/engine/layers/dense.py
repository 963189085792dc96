"""`DenseLayer`: new tokens read every entry of each segment; base of the layers that read or score otherwise."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxkv import attention
from jaxkv.attention.shaping import PLAIN, Shaping
from jaxkv.attention.steps import Gathered, NewEntries, WorkTable
from jaxkv.attention.xla import Reach, Walk
from jaxkv.cache.pools import Pool
from jaxkv.engine.layers.step import Attended, Step
from jaxkv.engine.layers.terms import Terms
from jaxkv.engine.tokens import Token, first_scores, in_blocks

# Attention output and its log-sum-exp.
Read = tuple[Float[Array, "B K G N D"], Float[Array, "B K G N"]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DenseLayer:
    """Entries of one layer, all of which new tokens read; new entries go behind their segments.

    Attributes:
        terms: static config.
        pool: entries, with room behind every segment for the new ones.
        start: first pool row of each segment.
        length: entries of each segment before the step.
        shaping: of the layer's logits.
        index: of the layer in the step's work table.
        rotated: what turns keys as they are read; None if the pool holds them rotated.
    """

    scored: ClassVar[bool] = False

    terms: Terms
    pool: Pool
    start: Int[Array, "B K"]
    length: Int[Array, "B K"]
    shaping: Shaping = PLAIN
    index: int = 0
    rotated: Callable[[Array], Array] | None = None

    def reach(self, length: Int[Array, "B K"]) -> Reach:
        """The entries that are read without a choice, of segments of `length` entries."""
        return self.reaching(self.start, length, self.terms.layout.walk)

    def reaching(self, start: Int[Array, "B K"], length: Int[Array, "B K"], walk: Walk) -> Reach:
        """`Reach` of segments from pool row `start` on, `length` entries each, read as `walk` says."""
        return Reach(
            start=start,
            length=length,
            walk=walk,
            widest=self.terms.widest,
            shared=self.terms.layout.one_pool,
            rotated=self.rotated,
        )

    def attended(self, token: Token, step: Step) -> Attended:
        """Appends new tokens' entries and attends.

        Args:
            token: queries, keys and values, in the pool's dtype.
            step: what the step's layers share.
        """
        new = NewEntries(
            k=token.stored,
            v=token.v,
            positions=step.new.positions,
            count=step.new.count,
            end=self.start + self.length,
            score=first_scores(token, self.terms.ongoing),
        )
        if step.several:
            return self.several(token, new, step)
        return self.one(token, new, step)

    def one(self, token: Token, new: NewEntries, step: Step) -> Attended:
        """One token: its entry is appended; attention reads it like the others."""
        table = step.work or WorkTable(None, self.start[None])
        out, pool = self.terms.backend.decode_token(
            token.q[..., 0, :],
            token.split,
            new,
            self.pool,
            self.reach(self.length + new.count[:, None]),
            self.work(step, table._replace(layer=self.index if step.work else 0)),
            scored=self.scored,
            shaping=self.shaping,
        )
        return Attended(out[..., None, :], pool)

    def several(self, token: Token, new: NewEntries, step: Step) -> Attended:
        """Several tokens: attention to older entries and to one another, merged by log-sum-exp, then their entries."""
        older = self.older(token.q, step)
        causal = partial(attention.causal, softcap=self.shaping.softcap)
        own = lax.map(lambda a: causal(a[0], a[1], a[2], jnp.int32(0)), (token.q, token.k, token.v))
        own = self.shaping.joined(*own)
        pool, new = self.with_scores(token, new, older, own)
        return Attended(attention.merge(*older, *own), pool.appended(new))

    def older(self, q: Float[Array, "B K G N D"], step: Step) -> Read:
        """Attention of several tokens to the entries from before the step."""
        return self.read(q, self.pool.store, self.reach(self.length))

    def read(self, q: Float[Array, "B K G N D"], store: Any, reach: Reach) -> Read:
        """Attention to what is reached of a store's entries, or of gathered ones; sink logits take no part yet."""
        attend = partial(self.terms.backend.attend, shaping=self.shaping.without_sinks)
        return in_blocks(lambda part: attend(part, store, reach), q)

    def with_scores(
        self, token: Token, new: NewEntries, older: Read, own: Read
    ) -> tuple[Pool, NewEntries]:
        """Pool and several new entries, whose scores have taken in attention to older entries and their own."""
        return self.pool, new

    def work(self, step: Step, work: WorkTable) -> WorkTable:
        """The work of one token's step, with the entries that the layer chooses."""
        return work

    def over(
        self,
        q: Float[Array, "B K G N D"],
        k: Float[Array, "B n D"],
        v: Float[Array, "B n D"],
        count: Int[Array, "B K"],
    ) -> Read:
        """Attention to the first `count` of each head's gathered entries."""
        reach = Reach.of_heads(count, k.shape[1] // count.shape[1])
        return self.read(q, Gathered(k, v), reach)
