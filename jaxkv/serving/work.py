"""`PrefillWork` and `RequestWork`: what the scheduler knows of a document or a request, from its prompt to its cache or answer."""

import dataclasses
import time
from concurrent.futures import Future
from typing import Any

import numpy as np
from jaxtyping import PRNGKeyArray

from jaxkv.cache import KVCache
from jaxkv.engine.generation_results import Answers
from jaxkv.engine.lengths import SHORT, bucket
from jaxkv.engine.progress import Walk
from jaxkv.engine.sampling import Sampler
from jaxkv.engine.sequences import Paused
from jaxkv.engine.slots import Slots
from jaxkv.policies.policy import Policy
from jaxkv.serving.document_store import Document, DocumentStore
from jaxkv.serving.requests import Request, claimed
from jaxkv.serving.stats import RequestStats
from jaxkv.text.prompts import Encoded
from jaxkv.text.tokenizer import Text


@dataclasses.dataclass(kw_only=True, eq=False)
class PrefillWork:
    """A prompt on its way through the scheduler until it is compressed; by itself that of a document.

    Attributes:
        encoded: the prompt, or the question if `document` is given; several answers to it have the same object.
        key: random key; None for the engine's.
        policy: the engine's policy with a budget of its own; None for the engine's.
        deadline: time on the clock `time.monotonic` by which it must be complete; None for none.
        document: the document that is asked; None for a prompt of its own.
        future: what it becomes: the `Document`, once it is compressed.
        submitted: time at which it was submitted.
        begun: time at which its prefill began.
        prefill_seconds: time of its own prefill so far.
    """

    encoded: Encoded
    key: PRNGKeyArray | None
    policy: Policy | None
    deadline: float | None
    document: Document | None = None
    future: Future[Any] = dataclasses.field(default_factory=Future)
    submitted: float = dataclasses.field(default_factory=time.monotonic)
    begun: float = 0.0
    prefill_seconds: float = 0.0

    @property
    def length(self) -> tuple[bool, int]:
        """Whether it is a question on a document, and its padded length."""
        size = bucket(len(self.encoded.ids[0]))
        return (False, size) if self.document is None else (True, max(SHORT, size))

    @property
    def gone(self) -> bool:
        """True if it was cancelled or its deadline has passed."""
        late = self.deadline is not None and time.monotonic() > self.deadline
        return self.future.cancelled() or late

    def walk(self, slots: Slots, documents: DocumentStore) -> Walk[KVCache]:
        """Generator: prefills the prompt layer by layer, or reads the question on its document; returns the cache."""
        if self.document is None:
            return (yield from slots.prefilling(self.encoded, key=self.key, policy=self.policy))
        yield 0.0
        # What the documents return is a copy.
        cache = documents.cache_of(self.document.id)
        return slots.extend(cache, self.encoded, key=self.key, donate=True)

    def fail(self, error: BaseException) -> None:
        """Ends it with an error."""
        if self.future.running() or claimed(self.future):
            self.future.set_exception(error)


@dataclasses.dataclass(kw_only=True, eq=False)
class RequestWork(PrefillWork):
    """A request on its way through the scheduler: its handle, its text so far, and times of what happened to it.

    Attributes:
        new: the most tokens to sample.
        sampling: how to sample.
        stops: strings that end the answer.
        eos: ids that end the answer.
        offline: True if nobody waits for single tokens, so that the prompts of others may go first.
        text: the model's tokenizer.
        request: the handle that the user holds.
        ready: the compressed sequence, while it waits for a slot; else None.
        told: True if its first token was sampled, and its text given to readers, before it had a slot.
        kept: entries per kv head and layer after prefill, averaged.
        first: time at which its first token was sampled; None before.
        last: time at which its last token was sampled.
        answers: ids and text sampled so far.
    """

    new: int
    sampling: Sampler
    stops: tuple[str, ...]
    eos: tuple[int, ...]
    offline: bool
    text: Text | None
    request: Request = dataclasses.field(default_factory=Request)
    ready: Paused | None = None
    told: bool = False
    kept: float = 0.0
    first: float | None = None
    last: float = 0.0

    def __post_init__(self) -> None:
        """Begins an empty answer."""
        self.future = self.request.future
        self.answers = Answers(self.text, 1, self.stops)

    def take(self, tokens: list[int], now: float) -> float:
        """Adds sampled ids and gives their text to readers; returns seconds since the token before, 0 for the first."""
        pause = 0.0 if self.first is None else now - self.last
        self.first, self.last = now if self.first is None else self.first, now
        self.answers.take(np.asarray([tokens], np.int32))
        self.request.add(self.answers.fresh()[0])
        return pause

    @property
    def stopped(self) -> bool:
        """True if the text has met a stop string."""
        return bool(self.answers.stopped[0])

    def ends_with(self, token: int) -> bool:
        """True if the answer is complete once `token` has been sampled: an end id, a stop string, or enough tokens."""
        return self.stopped or token in self.eos or len(self.answers.tokens[0]) >= self.new

    def finish(self) -> None:
        """Ends the request with its answer."""
        self.request.add(self.answers.flush()[0])
        first = self.submitted if self.first is None else self.first
        stats = RequestStats(
            prompt_tokens=len(self.encoded.ids[0]),
            new_tokens=len(self.answers.tokens[0]),
            kept=self.kept,
            waited_seconds=self.begun - self.submitted,
            prefill_seconds=self.prefill_seconds,
            first_token_seconds=first - self.submitted,
            seconds=time.monotonic() - self.submitted,
        )
        self.request.finish(self.answers.completions(self.eos)[0], stats)
