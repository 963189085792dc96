"""`PromptScorer`: log-probabilities of prompts' tokens, from the hidden states that prefill computes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxkv.engine.embedding import compute_logits
from jaxkv.engine.progress import Walk
from jaxkv.engine.sampling_extras import ScoredToken, score_tokens
from jaxkv.models.split_decoder import SplitDecoder
from jaxkv.sharding.mesh import copy_to_host

# Tokens whose logits exist at the same time; padded lengths above it are multiples of it.
_CHUNK = 128
_score_tokens = jax.jit(score_tokens)


@dataclasses.dataclass(kw_only=True, eq=False)
class PromptScorer:
    """Scorer of the prompts of one prefill, before compression: each token's log-probability after those before it.

    Attributes:
        top: number of likeliest tokens to list in place of each token; None scores nothing.
        scored: tokens of each prompt, once it is prefilled; None for the first one, which nothing precedes.
    """

    top: int | None = None
    scored: list[list[ScoredToken]] = dataclasses.field(default_factory=list)

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
        scored: list[list[ScoredToken]] = [[([ids[0]], [None])] for ids in tokens.tolist()]
        parts = max(1, x.shape[1] // _CHUNK)
        after = np.split(np.roll(tokens, -1, axis=1), parts, axis=1)
        for row, length in enumerate(lengths.tolist()):
            used = -(-length // _CHUNK)
            for at, hidden in enumerate(jnp.split(x[row], parts)[:used]):
                logits = compute_logits(flat.ends, hidden, graphs=flat.graphs)
                found = _score_tokens(logits, jnp.asarray(after[at][row]))
                ids, values = (
                    copy_to_host(each)[:, 0, : 1 + self.top].tolist()
                    for each in (found.ids, found.values)
                )
                scored[row] += zip(ids, values, strict=True)
                yield 0.0
            del scored[row][length:]
        # At once: answers that share the scorer may be complete before the prompt is read for the next one.
        self.scored = scored
        return jnp.take_along_axis(x, jnp.asarray(lengths - 1)[:, None, None], axis=1)[:, 0]


# Scores nothing.
UNSCORED = PromptScorer()
