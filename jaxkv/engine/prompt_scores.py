"""`PromptScorer`: log-probabilities of prompts' tokens, from the hidden states that prefill computes."""

import dataclasses
from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from jaxkv.engine.embedding import compute_logits
from jaxkv.engine.generation_results import Completion, ScoredToken, TokenLogprobs
from jaxkv.engine.progress import Walk
from jaxkv.engine.sampling import Sampler, get_settings
from jaxkv.engine.sampling_extras import score_tokens
from jaxkv.models.decoder import SplitDecoder
from jaxkv.sharding.mesh import copy_to_host

# Tokens whose logits exist at the same time.
_CHUNK = 128
_score_tokens = jax.jit(score_tokens)
_take_chunk = jax.jit(
    lambda x, row, first, size: lax.dynamic_slice(x, (row, first, 0), (1, size, x.shape[2]))[0],
    static_argnums=3,
)


@dataclasses.dataclass(kw_only=True, eq=False)
class PromptScorer:
    """Scorer of the prompts of one prefill, before compression: each token's log-probability after those before it.

    Attributes:
        top: number of likeliest tokens to list in place of each token; None scores nothing.
        scored: tokens of each prompt, once it is prefilled; None for the first one, which nothing precedes.
    """

    top: int | None = None
    scored: list[list[ScoredToken]] = dataclasses.field(default_factory=list)

    @classmethod
    def create_for_sampler(cls, sampling: Sampler) -> "PromptScorer":
        """Create the scorer that a sampler's `prompt_logprobs` asks for."""
        return cls(top=get_settings(sampling).prompt_logprobs)

    @property
    def is_active(self) -> bool:
        """True if prompts are scored, for which prefill computes the hidden states of all tokens."""
        return self.top is not None

    def score_prompts(
        self,
        flat: SplitDecoder,
        tokens: Int[np.ndarray, "B S"],
        lengths: Int[np.ndarray, " B"],
        x: Float[Array, "B S E"],
    ) -> Walk[Float[Array, "B E"]]:
        """Generator: score right-padded prompts in chunks, with yields between; return last tokens' hidden states."""
        assert self.top is not None
        size, scored = min(_CHUNK, x.shape[1]), list[list[ScoredToken]]()
        after = np.pad(tokens[:, 1:], ((0, 0), (0, size)))
        for row, length in enumerate(lengths.tolist()):
            scored.append([([int(tokens[row, 0])], [None])])
            for first in range(0, length - 1, size):
                logits = compute_logits(
                    flat.ends, _take_chunk(x, row, first, size), graphs=flat.graphs
                )
                found = _score_tokens(logits, jnp.asarray(after[row, first : first + size]))
                ids, values = (
                    copy_to_host(each)[: length - 1 - first, 0, : 1 + self.top].tolist()
                    for each in (found.ids, found.values)
                )
                scored[row] += zip(ids, values, strict=True)
                yield 0.0
        self.scored = scored
        return jnp.take_along_axis(x, jnp.asarray(lengths - 1)[:, None, None], axis=1)[:, 0]

    def add_to_completions(self, completions: Iterable[Completion]) -> list[Completion]:
        """Return the prompts' completions with their prompts' log-probabilities, if these were scored."""
        if not self.is_active:
            return list(completions)
        return [
            dataclasses.replace(each, prompt_logprobs=TokenLogprobs.from_tokens(after))
            if after
            else each
            for each, (_, *after) in zip(completions, self.scored, strict=False)
        ]


# Scores nothing.
UNSCORED = PromptScorer()
