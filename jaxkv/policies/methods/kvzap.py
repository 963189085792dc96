"""KVzap: score entries by a gate that is trained to predict KVzip+'s scores from hidden states."""

from jaxkv._checks import validate_optional_field
from jaxkv._dataclasses import frozen_dataclass
from jaxkv.policies.head_budgets import UniformHeads, add_score_threshold, check_threshold_field
from jaxkv.policies.parts import Parts
from jaxkv.policies.policy import BudgetMethod
from jaxkv.policies.registry import register
from jaxkv.policies.trained import KVzapGate
from jaxkv.policies.unseen import GateScores


@register
@frozen_dataclass
class KVzap(BudgetMethod):
    """Keep entries by a gate trained to predict KVzip+'s scores; with a `threshold`, only those that reach it.

    Scores estimate the need for an entry when the model repeats the prompt: the question need not be known. The
    published policy keeps all entries whose score reaches a `threshold`, the same for all layers and heads. Memory is
    allocated before scores are known: the budget limits the number of these entries, and
    `stats.evicted_above_threshold` counts those that it has to evict. `GlobalBudget(base=KVzap(...))` has one limit for
    all layers and heads together.

    Attributes:
        gate: the model's gate: a safetensors file with the published tensor names, or a folder with model.safetensors,
            or a result of `KVzapGate.load_from_file`.
        threshold: lowest score, a logarithm, of a kept entry; -3 to -9 are published. Entries below it are evicted even
            if the budget has room for them, also while decoding with `every`. None keeps as many entries as the budget
            allows.
        sinks: number of first tokens, always kept.
        window: number of last tokens, always kept.

    References:
        Jegou and Jeblick, KVzap: Fast, Adaptive, and Faithful KV Cache Pruning, arXiv:2601.07891.
    """

    gate: str | KVzapGate | None = None
    threshold: float | None = None
    sinks: int = 0
    window: int = 128

    paper = "KVzap, arXiv:2601.07891"

    scored_by = GateScores

    def _check_fields(self) -> None:
        validate_optional_field(self, "gate", KVzapGate.load_from_file)
        check_threshold_field(self)

    def build_policy_parts(self) -> Parts:
        """Return KVzap's `Parts`: gate scores, from any `threshold` up; sinks and window always kept."""
        heads = add_score_threshold(UniformHeads(), self.threshold)
        return self.compose_with_scorer(heads=heads)
