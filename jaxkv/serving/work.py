"""`PrefillWork` and `RequestWork`: the scheduler's state of a document or a request, from prompt to answer."""

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
    """A prompt in the scheduler until it is compressed; this base class alone is a document.

    Attributes:
        encoded: the prompt, or the question on `document`; several answers to one prompt share the object.
        key: random key; None for the engine's.
        policy: the engine's policy with a budget of its own; None for the engine's.
        deadline: latest time of completion on the clock `time.monotonic`; None for no limit.
        document: the document of a question; None for a prompt.
        future: future of the result, here the compressed `Document`.
        submitted: time of submission.
        begun: start time of its prefill.
        prefill_seconds: time spent on its own prefill so far, in seconds.
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
        """Prefill the prompt layer by layer, or extend its document by the question; return the cache (generator)."""
        if self.document is None:
            return (yield from slots.prefilling(self.encoded, key=self.key, policy=self.policy))
        yield 0.0
        # The document store returns a copy, so it can be donated.
        cache = documents.cache_of(self.document.id)
        return slots.extend(cache, self.encoded, key=self.key, donate=True)

    def fail(self, error: BaseException) -> None:
        """End the work with an error."""
        if self.future.running() or claimed(self.future):
            self.future.set_exception(error)


@dataclasses.dataclass(kw_only=True, eq=False)
class RequestWork(PrefillWork):
    """A request in the scheduler: its handle, its text so far, and its times.

    Attributes:
        new: maximum number of tokens to sample.
        sampling: how to sample.
        stops: strings that end the answer.
        eos: token ids that end the answer.
        offline: True if nobody waits for single tokens, so that prefills of others may go first.
        text: tokenizer of the model.
        request: the user's handle.
        ready: the compressed sequence while it waits for a slot, else None.
        told: True if its first token was sampled, and its text passed to readers, before it had a slot.
        kept: entries per kv head and layer after prefill, on average.
        first: time of its first sampled token; None before.
        last: time of its last sampled token.
        answers: sampled ids and text so far.
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
        """Start an empty answer."""
        self.future = self.request.future
        self.answers = Answers(self.text, 1, self.stops)

    def take(self, tokens: list[int], now: float) -> float:
        """Add sampled ids and pass their text to readers; return seconds since the previous token, 0 for the first."""
        pause = 0.0 if self.first is None else now - self.last
        self.first, self.last = now if self.first is None else self.first, now
        self.answers.take(np.asarray([tokens], np.int32))
        self.request.add(self.answers.fresh()[0])
        return pause

    @property
    def stopped(self) -> bool:
        """True if the text contains a stop string."""
        return bool(self.answers.stopped[0])

    def ends_with(self, token: int) -> bool:
        """True if the answer is complete with `token`: an end id, a stop string, or enough tokens."""
        return self.stopped or token in self.eos or len(self.answers.tokens[0]) >= self.new

    def finish(self) -> None:
        """Complete the request with its answer."""
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
