"""Log-probabilities of an answer's tokens in OpenAI's forms, for /v1/completions and /v1/chat/completions."""

import itertools
from typing import Any

from jaxkv.serving.requests import Request

# JSON has no minus infinity; vLLM's number in its place.
_LEAST = -9999.0


class LogprobsWriter:
    """Writer of one answer's log-probabilities as JSON values, all at once or as tokens are sampled."""

    def __init__(self, request: Request, *, chat: bool, echo: bool = False):
        """Begin with the request's first token, or with `echo` its prompt's; `chat` selects the form."""
        self._request, self._chat, self._written, self._offset = request, chat, 0, 0
        self._echoed = request.scorer.scored[0] if echo else []

    def write_new(self) -> dict[str, Any] | None:
        """Return the field `logprobs` of the tokens sampled since the last call; None if there are none."""
        fresh = (self._echoed + self._request.scored_tokens)[self._written :]
        self._written += len(fresh)
        # Per token pairs of text and log-probability: its own, then those of the likeliest tokens.
        scored = [
            [
                (self._spell(token), value and max(value, _LEAST))
                for token, value in zip(*each, strict=True)
            ]
            for each in fresh
        ]
        if not scored:
            return None
        if self._chat:
            listed = [list(map(_describe, each)) for each in scored]
            return {"content": [own | {"top_logprobs": top} for own, *top in listed]}
        texts, values = zip(*(own for own, *_ in scored), strict=True)
        *begins, self._offset = itertools.accumulate(map(len, texts), initial=self._offset)
        return {
            "tokens": texts,
            "token_logprobs": values,
            # The sampled token is among them, as in OpenAI's answers.
            "top_logprobs": list(map(dict, scored)),
            "text_offset": begins,
        }

    def list_prompt_logprobs(self) -> list[Any]:
        """Return vLLM's list of the prompt's tokens: None for the first, then dicts by token id."""
        _, *scored = self._request.scorer.scored[0]
        return [None] + [
            {
                str(token): {
                    "logprob": max(value, _LEAST),
                    # A token that is not among the likeliest has no rank.
                    "rank": rank or None,
                    "decoded_token": self._spell(token),
                }
                for rank, (token, value) in enumerate(zip(*each, strict=True))
            }
            for each in scored
        ]

    def _spell(self, token: int) -> str:
        """Return the text of a token id; without a tokenizer the id, as vLLM spells it."""
        text = self._request.tokenizer
        return f"token_id:{token}" if text is None else text.spell_token(token)


def _describe(scored: tuple[str, float | None]) -> dict[str, Any]:
    """Return a chat's JSON value of a token: its text, log-probability, and the text's bytes."""
    text, value = scored
    return {"token": text, "logprob": value, "bytes": list(text.encode("utf-8", "replace"))}
