"""Measurements of a request, and the state of an engine."""

from jaxkv._dataclasses import frozen_dataclass


@frozen_dataclass
class RequestStats:
    """Measurements of one answered request: token counts, kept entries, seconds.

    Attributes:
        prompt_tokens: tokens of the prompt, or of the question on a document.
        cached_tokens: those of them whose entries were reused from an earlier conversation.
        new_tokens: sampled tokens, including the one that ended the answer.
        kept: entries per kv head and layer after prefill, on average.
        waited_seconds: from submission to the start of prefill.
        prefill_seconds: prefill of the prompt, without the decode steps of other requests in between; several answers
            share it.
        first_token_seconds: from submission to the first sampled token.
        seconds: from submission to the complete answer.
    """

    prompt_tokens: int
    cached_tokens: int
    new_tokens: int
    kept: float
    waited_seconds: float
    prefill_seconds: float
    first_token_seconds: float
    seconds: float


@frozen_dataclass
class EngineStats:
    """Snapshot of an engine: requests, slots, bytes now; answers, rejections, tokens so far; longest pause.

    Attributes:
        waiting: requests that wait for prefill.
        prefilling: 1 during the prefill of a prompt or a document, else 0.
        ready: prefilled requests that wait for a slot.
        running: slots with a request.
        slots: number of slots.
        answered: number of answered requests.
        rejected: number of requests rejected because the queue was full.
        new_tokens: number of sampled tokens.
        nbytes: size of all slots in bytes.
        document_bytes: size of the documents on the device in bytes.
        prefix_bytes: size of the caches of answered conversations in host memory, in bytes.
        reused_tokens: number of prompt tokens that were not read because such a cache held them.
        longest_pause_seconds: longest time between two tokens of one request, or between two blocks of up to 8 tokens
            if nobody reads its text.
    """

    waiting: int
    prefilling: int
    ready: int
    running: int
    slots: int
    answered: int
    rejected: int
    new_tokens: int
    nbytes: int
    document_bytes: int
    prefix_bytes: int
    reused_tokens: int
    longest_pause_seconds: float
