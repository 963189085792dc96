"""KVzip: keep the entries that the model needs to repeat the prompt, measured by a second pass over it."""

import jax.numpy as jnp

from jaxkv._dataclasses import frozen_dataclass
from jaxkv._errors import require
from jaxkv.policies.head_budgets import AdaptiveHeads, HeadBudgets, UniformHeads
from jaxkv.policies.layer_budgets import GlobalLayers, UniformLayers
from jaxkv.policies.parts import Parts
from jaxkv.policies.policy import BudgetMethod
from jaxkv.policies.registry import register
from jaxkv.policies.scorer import GroupReduce, Needs, PromptReplay, Scorer, ScorerInputs, Scores


@frozen_dataclass
class ReplayAttentionScorer(Scorer):
    """KVzip's scorer: the largest attention that an entry receives while the model repeats the prompt.

    Attributes:
        replay: settings of the second pass.
    """

    group = GroupReduce.MAX

    replay: PromptReplay = PromptReplay()

    @property
    def needs(self) -> Needs:
        """`Needs` of the scorer: the largest attention that each entry receives in a second pass over the prompt."""
        return Needs(replay=self.replay)

    def score_entries(self, seen: ScorerInputs) -> Scores:
        """Return scores `[B, K, S]`: largest attention received in the second pass over the prompt; 1 for sinks."""
        sink = seen.entry_positions < self.replay.sinks
        return jnp.where(sink, jnp.float32(1.0), seen.replay)


@register
@frozen_dataclass
class KVzip(BudgetMethod):
    """Keep entries most attended to when the model repeats the prompt; by default all layers' kv heads compete.

    The question need not be known. A second pass runs over the prompt in chunks, each after an instruction to repeat
    it, on top of the full cache. Prefill takes two to four times as long, and the memory of the full cache. The second
    pass uses positions after the prompt. If the model's context is too short for prompt, instructions and a chunk,
    scores come from positions beyond it; a smaller chunk helps.

    Attributes:
        over: entries that compete for one budget: those of the whole "model", of each "layer", or of each kv "head".
        sinks: number of first tokens, always kept.
        chunk: tokens of the prompt repeated at a time.
        tail: number of last tokens of the previous chunk, repeated after `following`.
        first: text, or token ids, before the first chunk.
        following: text, or token ids, before each later chunk.
        closing: text, or token ids, right before a chunk; None for the end of the user's turn in the chat template.
        weighted: KVzip+: times the norm of the value at the layer's output, over the norm of the query's hidden state.
        capacity: on a mesh, most entries in the heads of one device, over their even share.

    References:
        Kim et al., KVzip: Query-Agnostic KV Cache Compression with Context Reconstruction, arXiv:2505.23416.
    """

    over: str = "model"
    sinks: int = 4
    chunk: int = 2048
    tail: int = 8
    first: str | tuple[int, ...] = PromptReplay.first
    following: str | tuple[int, ...] = PromptReplay.following
    closing: str | tuple[int, ...] | None = None
    weighted: bool = False
    capacity: float = 1.5

    paper = "KVzip, arXiv:2505.23416"

    def _check_fields(self) -> None:
        require(
            self.over in ("model", "layer", "head"),
            "over",
            self.over,
            "no such scope: give 'model', 'layer' or 'head'",
        )

    def build_policy_parts(self) -> Parts:
        """Return KVzip's `Parts`: second-pass scores; entries compete by model, layer or kv head (`over`)."""
        heads: HeadBudgets = self.create_part(AdaptiveHeads, alpha=0.0)
        heads = UniformHeads() if self.over == "head" else heads
        layers = GlobalLayers() if self.over == "model" else UniformLayers()
        scorer = ReplayAttentionScorer(replay=self.create_part(PromptReplay))
        return self.compose(
            scorer=scorer, keep=self.always_kept_entries, heads=heads, layers=layers
        )
