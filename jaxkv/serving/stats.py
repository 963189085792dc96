"""Measurements of a request, and the state of an engine."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class RequestStats:
    """Measurements of one answered request: numbers of tokens, entries kept, seconds.

    Attributes:
        prompt_tokens: tokens of the prompt, or of the question if it was asked on a document.
        new_tokens: tokens sampled, the one that ended the answer included.
        kept: entries per kv head and layer after prefill, averaged.
        waited_seconds: from submission until prefill began.
        prefill_seconds: of the prompt's prefill, without the decode steps of other requests in between; several answers
            share it.
        first_token_seconds: from submission until the first token was sampled.
        seconds: from submission until the answer was complete.
    """

    prompt_tokens: int
    new_tokens: int
    kept: float
    waited_seconds: float
    prefill_seconds: float
    first_token_seconds: float
    seconds: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineStats:
    """State of an engine at one moment: numbers of requests, slots and tokens, bytes, and the longest pause.

    Attributes:
        waiting: requests that are not prefilled yet.
        prefilling: 1 while a prompt or a document is prefilled, else 0.
        ready: prefilled requests that wait for a slot.
        running: slots with a request.
        slots: number of slots.
        answered: requests answered so far.
        refused: requests rejected because the queue was full.
        new_tokens: tokens sampled so far.
        nbytes: bytes of all slots.
        document_bytes: bytes of documents on the device.
        longest_pause_seconds: longest time between two tokens of one request, or between two blocks of up to 8 of them
            where nobody reads its text.
    """

    waiting: int
    prefilling: int
    ready: int
    running: int
    slots: int
    answered: int
    refused: int
    new_tokens: int
    nbytes: int
    document_bytes: int
    longest_pause_seconds: float
