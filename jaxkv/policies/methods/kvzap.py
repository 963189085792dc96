"""KVzap: entries by a gate that was trained to predict KVzip+'s scores from hidden states."""

import dataclasses

from jaxkv._checks import optional
from jaxkv.policies.head_budgets import UniformHeads, as_threshold, with_threshold
from jaxkv.policies.parts import Parts
from jaxkv.policies.policy import BudgetMethod
from jaxkv.policies.registry import register
from jaxkv.policies.trained import KVzapGate
from jaxkv.policies.unseen import GateScores


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class KVzap(BudgetMethod):
    """Keeps the entries that a trained gate expects to be needed to repeat the prompt; no question has to be known.

    The published policy keeps all entries whose score reaches a `threshold`, the same for all layers and heads. Memory is
    allocated before scores are known, so the budget bounds the number of these entries; `stats.evicted_above_threshold` counts those that
    it had no room for. `GlobalBudget(base=KVzap(...))` has one bound for all layers and heads together.

    Attributes:
        gate: the model's gate: a safetensors file with the published names of tensors, or a folder with
            model.safetensors, or what `KVzapGate.read` returned.
        threshold: the least score, a logarithm, of an entry that stays; -3 to -9 are published. Entries below it are dropped
            even if the budget has room for them, while tokens are sampled as well if there is an `every`. None keeps as
            many entries as the budget says.
        sinks: first tokens that always stay.
        window: last tokens that always stay.

    References:
        Jegou and Jeblick, KVzap: Fast, Adaptive, and Faithful KV Cache Pruning, arXiv:2601.07891.
    """

    gate: str | KVzapGate | None = None
    threshold: float | None = None
    sinks: int = 0
    window: int = 128

    paper = "KVzap, arXiv:2601.07891"

    scored_by = GateScores

    def _check(self) -> None:
        optional(self, "gate", KVzapGate.read)
        as_threshold(self)

    def parts(self) -> Parts:
        """Returns `Parts` that score entries by a trained gate, drop those below `threshold`, keep sinks and window."""
        heads = with_threshold(UniformHeads(), self.threshold)
        return self.observed(heads=heads)
