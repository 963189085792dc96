"""Fast KVzip: score entries by a gate of learned queries and keys, trained to predict KVzip's scores."""

import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxkv._checks import (
    compute_floor_share,
    validate_field,
    validate_float,
    validate_optional_field,
)
from jaxkv._dataclasses import frozen_dataclass
from jaxkv.policies.head_budgets import AdaptiveHeads, add_score_threshold, check_threshold_field
from jaxkv.policies.layer_budgets import GlobalLayers
from jaxkv.policies.parts import Parts
from jaxkv.policies.policy import BudgetMethod
from jaxkv.policies.registry import register
from jaxkv.policies.scorer import Scores
from jaxkv.policies.trained import FastKVzipGate
from jaxkv.policies.unseen import GateScores


@frozen_dataclass
class RecentGateScorer(GateScores):
    """Scorer by a trained gate; the last tokens of each text, the share `recent`, score higher than all others.

    Attributes:
        recent: share of each text's tokens, from its end.
    """

    recent: float = 0.02

    def finalise_scores(self, observed: Scores, length: Int[Array, " B"]) -> Scores:
        """Return scores `[B, K, S]`: the gate's, 0 to 1; 1 + position / length for the share `recent` at the end."""
        rows = jnp.arange(observed.shape[-1], dtype=jnp.int32)
        end = length[:, None, None]
        ours = rows >= end - compute_floor_share(end, self.recent)
        return jnp.where(ours, 1 + rows.astype(jnp.float32) / end.astype(jnp.float32), observed)


@register
@frozen_dataclass
class FastKVzip(BudgetMethod):
    """Keep entries by a gate trained to predict KVzip's scores; kv heads of all layers compete for one budget.

    The kv heads of all layers compete for one budget.

    Attributes:
        gate: the model's gate: a safetensors file, or a result of `FastKVzipGate.load_from_file`.
        threshold: lowest score, between 0 and 1, of a kept entry, as in `KVzap`; entries of `recent` score more. None
            keeps as many entries as the budget allows.
        sinks: number of first tokens, always kept.
        recent: share of a prompt, from its end, that is kept before all others; 0.02 is published for prompts below
            32,000 tokens.
        window: number of last tokens, always kept; for longer prompts 4,096 is published, with `recent=0`.
        capacity: on a mesh, most entries in the heads of one device, over their even share.

    References:
        Kim et al., Fast KVzip: Efficient and Accurate LLM Inference with Gated KV Eviction, arXiv:2601.17668.
    """

    gate: str | FastKVzipGate | None = None
    threshold: float | None = None
    sinks: int = 4
    recent: float = 0.02
    window: int = 0
    capacity: float = 1.5

    paper = "Fast KVzip, arXiv:2601.17668"

    scored_by = RecentGateScorer

    def _check_fields(self) -> None:
        validate_optional_field(self, "gate", FastKVzipGate.load_from_file)
        check_threshold_field(self, 0.0, 1.0)
        validate_field(self, "recent", validate_float, "give a share between 0 and 1", high=1.0)

    def build_policy_parts(self) -> Parts:
        """Return Fast KVzip's `Parts`: gate scores, at least any `threshold`; all layers' kv heads compete."""
        heads = add_score_threshold(self.create_part(AdaptiveHeads, alpha=0.0), self.threshold)
        return self.compose_with_scorer(heads=heads, layers=GlobalLayers())
