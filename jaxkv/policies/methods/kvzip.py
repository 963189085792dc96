"""KVzip, KVgrad: keep the entries that the model needs to repeat the prompt, measured by a second pass over it."""

import jax.numpy as jnp

from jaxkv._checks import validate_bool, validate_field
from jaxkv._dataclasses import frozen_dataclass
from jaxkv._errors import require
from jaxkv.models.config import ModelConfig
from jaxkv.policies.head_budgets import AdaptiveHeads, HeadBudgets, UniformHeads
from jaxkv.policies.layer_budgets import GlobalLayers, UniformLayers
from jaxkv.policies.parts import Parts
from jaxkv.policies.policy import BudgetMethod
from jaxkv.policies.registry import register
from jaxkv.policies.scorer import (
    GroupReduce,
    Needs,
    PromptReplay,
    ReplayWeighting,
    Scorer,
    ScorerInputs,
    Scores,
)


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

    def require_fits_model(self, config: ModelConfig) -> None:
        """Raise ValueError for gradients through experts, states, or attention gates, and with parallel MLPs."""
        special = (config.experts, config.state_bytes, config.attention_gate, config.parallel)
        remedy = "no gradients through experts, states, gates or parallel MLPs: use KVzip"
        require(not (self.replay.runs_backwards and any(special)), "policy", "KVGrad", remedy)

    def score_entries(self, seen: ScorerInputs) -> Scores:
        """Return scores `[B, K, S]`: largest attention received in the second pass over the prompt; 1 for sinks."""
        sink = seen.entry_positions < self.replay.sinks
        return jnp.where(sink, jnp.float32(1.0), seen.replay)


@frozen_dataclass
class ReplayPolicy(BudgetMethod):
    """Base of KVzip and KVgrad: entries are scored while the model repeats the prompt, in chunks.

    Attributes:
        over: entries that compete for one budget: those of the whole "model", of each "layer", or of each kv "head".
        sinks: number of first tokens, always kept.
        chunk: tokens of the prompt repeated at a time.
        tail: number of last tokens of the previous chunk, repeated after `following`.
        first: text, or token ids, before the first chunk.
        following: text, or token ids, before each later chunk.
        closing: text, or token ids, right before a chunk; None for the end of the user's turn in the chat template.
        capacity: on a mesh, most entries in the heads of one device, over their even share.
    """

    over: str = "model"
    sinks: int = 4
    chunk: int = 2048
    tail: int = 8
    first: str | tuple[int, ...] = PromptReplay.first
    following: str | tuple[int, ...] = PromptReplay.following
    closing: str | tuple[int, ...] | None = None
    capacity: float = 1.5

    def _check_fields(self) -> None:
        require(
            self.over in ("model", "layer", "head"),
            "over",
            self.over,
            "no such scope: give 'model', 'layer' or 'head'",
        )

    def _compose_replay(self, weighting: ReplayWeighting) -> Parts:
        """Return `Parts`: second-pass scores; entries compete by model, layer or kv head (`over`)."""
        heads: HeadBudgets = self.create_part(AdaptiveHeads, alpha=0.0)
        heads = UniformHeads() if self.over == "head" else heads
        layers = GlobalLayers() if self.over == "model" else UniformLayers()
        scorer = ReplayAttentionScorer(replay=self.create_part(PromptReplay, weighting=weighting))
        return self.compose(
            scorer=scorer, keep=self.always_kept_entries, heads=heads, layers=layers
        )


@register
@frozen_dataclass
class KVzip(ReplayPolicy):
    """Keep entries most attended to when the model repeats the prompt; by default all layers' kv heads compete.

    The question need not be known. A second pass runs over the prompt in chunks, each after an instruction to repeat
    it, on top of the full cache. Prefill takes two to four times as long, and the memory of the full cache. The second
    pass uses positions after the prompt. If the model's context is too short for prompt, instructions and a chunk,
    scores come from positions beyond it; a smaller chunk helps.

    Attributes:
        weighted: KVzip+: times the norm of the value at the layer's output, over the norm of the query's hidden state.

    References:
        Kim et al., KVzip: Query-Agnostic KV Cache Compression with Context Reconstruction, arXiv:2505.23416.
    """

    weighted: bool = False

    paper = "KVzip, arXiv:2505.23416"

    def build_policy_parts(self) -> Parts:
        """Return `Parts`: second-pass scores; entries compete by model, layer or kv head (`over`)."""
        validate_field(self, "weighted", validate_bool)
        return self._compose_replay(
            ReplayWeighting.VALUES if self.weighted else ReplayWeighting.NONE
        )


@register
@frozen_dataclass
class KVGrad(ReplayPolicy):
    """Keep entries that change the model's last hidden states most when it repeats the prompt: KVzip's, by gradients.

    The attention of a repeating token to an entry is multiplied by the norm of the entry's value at the layer's output,
    and by that of the gradient of the summed squares of the top layer's output by the token's hidden state after
    attention. Each chunk also runs backwards through the layers; prefill takes about three times as long as KVzip's.
    Models with experts, states, attention gates or parallel MLPs are rejected.

    Attributes:
        chunk: tokens of the prompt repeated at a time; their hidden states in all layers wait for the gradients.

    References:
        KVgrad, https://openreview.net/forum?id=cg1wTCJjjk; defaults of kvpress 0.5.5.
    """

    chunk: int = 512

    paper = "KVgrad, https://openreview.net/forum?id=cg1wTCJjjk"

    def build_policy_parts(self) -> Parts:
        """Return `Parts`: second-pass scores, by gradients; entries compete by model, layer or kv head (`over`)."""
        return self._compose_replay(ReplayWeighting.GRADIENTS)
