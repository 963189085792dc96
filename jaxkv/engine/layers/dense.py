"""`DenseLayer`: new tokens attend to every entry of each segment; base of all other layer views."""

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
    """One layer's entries, all attended to by new tokens; new entries are appended to their segments.

    Attributes:
        terms: static config.
        pool: entries, with free places behind every segment for new ones.
        start: first pool row of each segment.
        length: number of entries per segment before the step.
        shaping: sink logits and soft cap of the layer's logits.
        index: index of the layer in the step's work table.
        rotated: function that rotates keys before attention; None if the pool holds rotated keys.
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
        """Return the entries attended to without a selection, in segments of `length` entries."""
        return self.reaching(self.start, length, self.terms.layout.walk)

    def reaching(self, start: Int[Array, "B K"], length: Int[Array, "B K"], walk: Walk) -> Reach:
        """Return the `Reach` of segments of `length` entries from pool row `start`, traversed as `walk` says."""
        return Reach(
            start=start,
            length=length,
            walk=walk,
            widest=self.terms.widest,
            shared=self.terms.layout.one_pool,
            rotated=self.rotated,
        )

    def attended(self, token: Token, step: Step) -> Attended:
        """Append new tokens' entries and attend.

        Args:
            token: queries, keys and values, in the pool's dtype.
            step: state shared by the step's layers.

        Returns:
            Attention output, and the pool with the new entries.
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
        """Append a single token's entry and attend to all entries, including this one."""
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
        """Attend to older entries and causally to one another, merge by log-sum-exp, then append the entries."""
        older = self.older(token.q, step)
        causal = partial(attention.causal, softcap=self.shaping.softcap)
        own = lax.map(lambda a: causal(a[0], a[1], a[2], jnp.int32(0)), (token.q, token.k, token.v))
        own = self.shaping.joined(*own)
        pool, new = self.with_scores(token, new, older, own)
        return Attended(attention.merge(*older, *own), pool.appended(new))

    def older(self, q: Float[Array, "B K G N D"], step: Step) -> Read:
        """Return attention of several tokens to the entries from before the step."""
        return self.read(q, self.pool.store, self.reach(self.length))

    def read(self, q: Float[Array, "B K G N D"], store: Any, reach: Reach) -> Read:
        """Return attention to the reached entries of a store or of gathered arrays, without sink logits."""
        attend = partial(self.terms.backend.attend, shaping=self.shaping.without_sinks)
        return in_blocks(lambda part: attend(part, store, reach), q)

    def with_scores(
        self, token: Token, new: NewEntries, older: Read, own: Read
    ) -> tuple[Pool, NewEntries]:
        """Return the pool and several new entries, with scores that include attention to older and new entries."""
        return self.pool, new

    def work(self, step: Step, work: WorkTable) -> WorkTable:
        """Return the work table of a single token's step, with the entries that the layer selects."""
        return work

    def over(
        self,
        q: Float[Array, "B K G N D"],
        k: Float[Array, "B n D"],
        v: Float[Array, "B n D"],
        count: Int[Array, "B K"],
    ) -> Read:
        """Return attention to the first `count` of each head's gathered entries."""
        reach = Reach.of_heads(count, k.shape[1] // count.shape[1])
        return self.read(q, Gathered(k, v), reach)
