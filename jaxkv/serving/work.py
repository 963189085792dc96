"""`Work` and `Reading`: what the scheduler knows of a request or a document, from its prompt to its answer or cache."""

import dataclasses
import time
from collections.abc import Container
from concurrent.futures import Future

import numpy as np
from jaxtyping import PRNGKeyArray

from jaxkv.cache import KVCache
from jaxkv.engine.compress import Walk
from jaxkv.engine.lengths import SHORT, bucket
from jaxkv.engine.results import Answers
from jaxkv.engine.sampling import Sampler
from jaxkv.engine.sequences import Paused
from jaxkv.engine.slots import Slots
from jaxkv.policies.policy import Method
from jaxkv.serving.documents import Document, Documents
from jaxkv.serving.requests import Request, claimed
from jaxkv.serving.stats import RequestStats
from jaxkv.text.prompts import Encoded
from jaxkv.text.tokenizer import Text


@dataclasses.dataclass(frozen=True, kw_only=True)
class Order:
    """Validated arguments of `Engine.submit`: encoded prompt, tokens to draw, sampler, key, ends, deadline.

    Attributes:
        encoded: the prompt, or the question if `document` is given.
        new: the most tokens to draw.
        sampling: how to draw.
        key: random key of the request; None for the engine's.
        stops: strings that end the answer.
        eos: ids that end the answer.
        policy: the engine's policy with the request's own budget; None for the engine's.
        deadline: time on the clock `time.monotonic` by which the answer must be complete; None for none.
        offline: True if nobody waits for single tokens, so that the prompts of others may go first.
        document: the document that is asked; None for a prompt of its own.
    """

    encoded: Encoded
    new: int
    sampling: Sampler
    key: PRNGKeyArray | None
    stops: tuple[str, ...]
    eos: tuple[int, ...]
    policy: Method | None
    deadline: float | None
    offline: bool
    document: Document | None = None


class Work:
    """A request on its way through the scheduler: its handle, its text so far, and times of what happened to it.

    Attributes:
        order: what was asked.
        encoded: the prompt; several answers to it have the same object.
        request: the handle that the user holds.
        answers: ids and text drawn so far.
        ready: the compressed sequence, while it waits for a slot; else None.
        told: True if its first token was drawn, and its text given to readers, before it had a slot.
        kept: rows per kv head and layer after prefill, averaged.
        length: whether it is a question on a document, and its padded length.
        prefill_seconds: time of its own prefill so far.
        last: time at which its last token was drawn; None before the first.
    """

    def __init__(self, order: Order, request: Request, text: Text | None):
        """Makes the record of a request that is submitted now."""
        self.order, self.encoded, self.request = order, order.encoded, request
        self.answers = Answers(text, 1, order.stops)
        self.ready: Paused | None = None
        self.told, self.kept, self.prefill_seconds = False, 0.0, 0.0
        self.last: float | None = None
        size = bucket(len(order.encoded.ids[0]))
        self.length = (False, size) if order.document is None else (True, max(SHORT, size))
        self._submitted = time.monotonic()
        self._begun = self._first = self._submitted

    def begin(self) -> None:
        """Notes that the prefill begins now."""
        self._begun = time.monotonic()

    def take(self, tokens: list[int], now: float) -> float:
        """Adds drawn ids and gives their text to readers; returns seconds since the token before, 0 for the first."""
        pause = 0.0 if self.last is None else now - self.last
        if self.last is None:
            self._first = now
        self.last = now
        self.answers.take(np.asarray([tokens], np.int32))
        self.request.add(self.answers.fresh()[0])
        return pause

    @property
    def stopped(self) -> bool:
        """True if the text has met a stop string."""
        return bool(self.answers.stopped[0])

    @property
    def gone(self) -> bool:
        """True if the request was cancelled or its deadline has passed."""
        late = self.order.deadline is not None and time.monotonic() > self.order.deadline
        return self.request.cancelled or late

    def walk(self, slots: Slots, documents: Documents) -> Walk[KVCache]:
        """Generator: prefills the prompt layer by layer, or reads the question on its document; returns the cache."""
        order = self.order
        if order.document is None:
            return (yield from slots.prefilling(order.encoded, key=order.key, policy=order.policy))
        yield 0.0
        # What the documents return is a copy.
        return slots.extend(
            documents.cache_of(order.document.id), order.encoded, key=order.key, donate=True
        )

    def fail(self, error: BaseException) -> None:
        """Ends the request with an error."""
        self.request.fail(error)

    def ends_with(self, token: int, eos: Container[int]) -> bool:
        """True if the answer is complete once `token` has been drawn: an end id, a stop string, or enough tokens."""
        return self.stopped or token in eos or len(self.answers.tokens[0]) >= self.order.new

    def finish(self) -> None:
        """Ends the request with its answer."""
        self.request.add(self.answers.flush()[0])
        now, submitted = time.monotonic(), self._submitted
        stats = RequestStats(
            prompt_tokens=len(self.order.encoded.ids[0]),
            new_tokens=len(self.answers.tokens[0]),
            kept=self.kept,
            waited_seconds=self._begun - submitted,
            prefill_seconds=self.prefill_seconds,
            first_token_seconds=self._first - submitted,
            seconds=now - submitted,
        )
        self.request.finish(self.answers.completions(self.order.eos)[0], stats)


class Reading:
    """A document on its way through the scheduler: its encoded text, and the future of its handle.

    Attributes:
        encoded: the document.
        key: random key for policies that draw; None for the engine's.
        policy: the engine's policy with the document's own budget; None for the engine's.
        future: the `Document`, once it is compressed.
        deadline: time on the clock `time.monotonic` by which it must be compressed; None for none.
        length: False, as it is no question, and its padded length.
        prefill_seconds: time of its prefill so far.
    """

    def __init__(
        self,
        encoded: Encoded,
        key: PRNGKeyArray | None,
        policy: Method | None,
        deadline: float | None,
    ):
        """Makes the record of a document that is submitted now."""
        self.encoded, self.key, self.policy, self.deadline = encoded, key, policy, deadline
        self.prefill_seconds, self.length = 0.0, (False, bucket(len(encoded.ids[0])))
        self.future: Future[Document] = Future()

    @property
    def gone(self) -> bool:
        """True if its future was cancelled or the deadline has passed."""
        return self.future.cancelled() or (
            self.deadline is not None and time.monotonic() > self.deadline
        )

    def begin(self) -> None:
        """Does nothing: only requests count the time that they waited."""

    def walk(self, slots: Slots, documents: Documents) -> Walk[KVCache]:
        """Generator: prefills the document layer by layer; returns its cache."""
        return slots.prefilling(self.encoded, key=self.key, policy=self.policy)

    def fail(self, error: BaseException) -> None:
        """Ends the document's prefill with an error."""
        if self.future.running() or claimed(self.future):
            self.future.set_exception(error)
