"""Refit: a base policy chooses entries; their values are fitted so that attention outputs change least."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from jaxkv import attention
from jaxkv._checks import validate_field, validate_float, validate_int
from jaxkv._dataclasses import frozen_dataclass
from jaxkv._errors import require
from jaxkv.attention.shaping import LogitShaping
from jaxkv.attention.xla import exact_einsum
from jaxkv.policies.merger import Merged, Merger
from jaxkv.policies.parts import Parts
from jaxkv.policies.policy import Policy
from jaxkv.policies.registry import register
from jaxkv.policies.scorer import ScorerInputs, compute_reference_positions
from jaxkv.policies.wrapper import PolicyWrapper
from jaxkv.sharding.collectives import all_gather_shards


@frozen_dataclass
class ValueRefit(Merger):
    """Refit's merger: values of kept entries for which attention outputs of reference queries change least.

    With x the attention of a query to kept entries alone, y its output over all entries, s the share of its attention
    that kept entries have, and V their values, the new values C minimise the sum of |s (x C - y)|^2 over queries, plus
    `ridge` * |C - V|^2, for each kv head with its group's queries. Each query attends to the entries up to its own.

    Attributes:
        references: number of reference queries, of tokens spread evenly over the prompt.
        ridge: weight of the values' change: the number of queries that would attend to an entry alone.
        repeats: the queries are those of tokens that repeat the prompt, and attend to all of it.
    """

    references: int = 128
    ridge: float = 1.0
    repeats: bool = False

    def __post_init__(self) -> None:
        validate_field(self, "references", validate_int, "give at least 1 query")
        least = self.references / 1000
        remedy = f"give a weight from {least} on, references / 1000: float32 solves no smaller one"
        validate_field(self, "ridge", validate_float, remedy, low=least, high=1e30)

    @property
    def reference_count(self) -> int:
        """Number of reference queries of each prompt: `references`."""
        return self.references

    def merge_evicted_entries(
        self,
        k: Float[Array, "B K S D"],
        v: Float[Array, "B K S D"],
        kept: Bool[Array, "B K S"],
        inside: Bool[Array, "B K S"],
        mass: Float[Array, "B K S"],
        tau: Float[Array, "B K n"] | None,
        key: PRNGKeyArray,
        seen: ScorerInputs | None = None,
    ) -> Merged:
        """Return `Merged` with the keys as they are, and the kept entries' fitted values."""
        assert seen is not None
        given = seen.references, seen.sink_logits
        q, sinks = jax.tree.map(
            lambda each: all_gather_shards(each, "G", 2, seen.group_axes), given
        )
        # The pool's keys and values may be transformed, which changes no sum of values; `seen` has the model's keys.
        last = (seen.length - 1)[:, None]
        own = compute_reference_positions(seen.length, q.shape[3])
        change = attention.reduce_window_attention(
            q,
            seen.k,
            jnp.broadcast_to(last, own.shape) if self.repeats else own,
            self._compute_value_changes,
            v,
            kept,
            shaping=LogitShaping(softcap=seen.softcap, sink_logits=sinks),
        )
        return Merged(k, (v.astype(jnp.float32) + change).astype(v.dtype), tau)

    def _compute_value_changes(
        self,
        p: Float[Array, "G r S"],
        position: Int[Array, " r"],
        v: Float[Array, "S D"],
        kept: Bool[Array, " S"],
    ) -> Float[Array, "S D"]:
        """Return a kv head's changes of values, from its reference queries' attention to all entries."""
        p = p.reshape(-1, p.shape[-1])
        lost = jnp.where(kept, 0.0, p)
        x = p - lost
        # What is not lost includes the share of a sink logit.
        share = 1.0 - lost.sum(axis=-1, keepdims=True)
        error = exact_einsum("rs,sd->rd", share * p - x, v.astype(jnp.float32))
        gram = exact_einsum("rs,qs->rq", x, x) + self.ridge * jnp.eye(len(x), dtype=jnp.float32)
        # As many equations as queries, not as entries: C - V = X' (X X' + ridge)^-1 (Y - X V).
        return exact_einsum("rs,rd->sd", x, jax.scipy.linalg.solve(gram, error, assume_a="pos"))


@register
@frozen_dataclass
class Refit(PolicyWrapper):
    """Keep the base policy's entries, with values fitted so that the prompt's attention outputs change least.

    Kept entries stand for evicted ones. Values are fitted once, after the prompt. Over bases that repeat the prompt,
    such as `Refit(base=KVzip(budget=0.05, weighted=True))`, the queries are those of the repeating tokens, over others
    the prompt's own.

    Attributes:
        references: number of queries whose outputs are fitted, of tokens spread evenly over the prompt.
        ridge: weight of the values' change: the number of queries that would attend to an entry alone.

    References:
        Zweiger et al., Fast KV Compaction via Attention Matching, arXiv:2602.16284, without its biases of entries.
    """

    references: int = 128
    ridge: float = 1.0

    paper = "Attention Matching, arXiv:2602.16284"

    usual = "snapkv"
    once = True

    def check_base_policy(self, base: Policy, parts: Parts) -> None:
        """Raise ValueError if the base policy merges entries."""
        remedy = "it merges entries itself: give a policy that discards them, such as SnapKV()"
        require(parts.merge is None, "base", base, remedy)

    def replace_base_parts(self, base: Parts) -> Parts:
        """Return the base's `Parts` with the merger `ValueRefit`."""
        repeats = base.needs.replay is not None
        return base.replace(merge=self.create_part(ValueRefit, repeats=repeats))
