"""`PrefillWork` and `RequestWork`: the scheduler's state of a document or a request, from prompt to answer."""

import dataclasses
import time
from concurrent.futures import Future
from typing import Any

import jax
import numpy as np
from jaxtyping import PRNGKeyArray

from jaxkv.cache import KVCache
from jaxkv.engine.generation_results import AnswerCollector
from jaxkv.engine.lengths import round_up_to_bucket, round_up_to_question
from jaxkv.engine.progress import Walk
from jaxkv.engine.prompt_scores import UNSCORED, PromptScorer
from jaxkv.engine.sampling import Sampler, get_settings
from jaxkv.engine.sequences import PausedSequence
from jaxkv.engine.slot_shape import EXTRAS, SlotPrograms
from jaxkv.engine.slots import Slots
from jaxkv.policies.policy import Policy
from jaxkv.serving.document_store import Document, DocumentCacheStore
from jaxkv.serving.prefix_cache import MatchedPrefix
from jaxkv.serving.requests import Request, mark_future_running
from jaxkv.serving.stats import RequestStats
from jaxkv.text.prompts import EncodedPrompts
from jaxkv.text.tokenizer import ChatTokenizer


@dataclasses.dataclass(kw_only=True, eq=False)
class PrefillWork:
    """Scheduler's state of a prompt or document until it is compressed; the base class alone is for documents.

    Attributes:
        encoded: the prompt, or the question on `document`; several answers to one prompt share the object.
        key: random key; None for the engine's.
        policy: the engine's policy, possibly with a budget or window of its own.
        deadline: latest time of completion on the clock `time.monotonic`; None for no limit.
        document: the document of a question; None for a prompt.
        owner: name of the server's client that posts a document, or whose conversations a request shares; empty for
            none.
        needs_extras: True if it runs the decode loop with penalties, biases, log-probabilities or a grammar.
        scorer: scores the prompt's tokens, if a request asks for that.
        alone: True if its prompt is read by itself: a document, a question, a scored prompt, one with several answers,
            or one whose batch had an error.
        row: index of its prompt in the batch of prompts that was read.
        future: future of the result, here the compressed `Document`.
        submitted: time of submission.
        begun: start time of its prefill.
        prefill_seconds: time spent on its own prefill so far, in seconds.
    """

    encoded: EncodedPrompts
    key: PRNGKeyArray | None
    policy: Policy
    deadline: float | None
    document: Document | None = None
    owner: str = ""
    needs_extras: bool = False
    scorer: PromptScorer = UNSCORED
    alone: bool = False
    row: int = 0
    future: Future[Any] = dataclasses.field(default_factory=Future)
    submitted: float = dataclasses.field(default_factory=time.monotonic)
    begun: float = 0.0
    prefill_seconds: float = 0.0

    @property
    def programs(self) -> SlotPrograms:
        """Programs that read it alone."""
        length = len(self.encoded.ids[0])
        if self.document is None:
            return SlotPrograms(kind="prompt", length=round_up_to_bucket(length))
        return SlotPrograms(kind="question", length=round_up_to_question(length))

    @property
    def needed_programs(self) -> set[SlotPrograms]:
        """All programs without which it is not answered."""
        return {self.programs, EXTRAS} if self.needs_extras else {self.programs}

    @property
    def is_cancelled_or_expired(self) -> bool:
        """True if the request or document was cancelled, or its deadline has passed."""
        late = self.deadline is not None and time.monotonic() > self.deadline
        return self.future.cancelled() or late

    def prefill_layers(
        self, slots: Slots, documents: DocumentCacheStore, encoded: EncodedPrompts
    ) -> Walk[KVCache]:
        """Generator: prefill prompts, its own first, or add a question to a document; yield layers; return a cache."""
        if self.document is None:
            return (
                yield from slots.iterate_prefill(
                    encoded, key=self.key, policy=self.policy, scorer=self.scorer
                )
            )
        yield 0.0
        # The document store returns a copy, so it can be donated.
        cache = documents.get_document_cache(self.document.id)
        return slots.extend(cache, encoded, key=self.key, donate=True)

    def fail_with_error(self, error: BaseException) -> None:
        """End the request or document with an error, unless it has ended."""
        if self.future.running() or mark_future_running(self.future):
            self.future.set_exception(error)


@dataclasses.dataclass(kw_only=True, eq=False)
class RequestWork(PrefillWork):
    """Scheduler's state of a request from prompt to answer: its handle, its text so far, and its times.

    Attributes:
        new: maximum number of tokens to sample.
        sampling: how to sample.
        stops: strings that end the answer.
        eos: token ids that end the answer.
        offline: True if nobody waits for single tokens, so that prefills of others may go first.
        text: tokenizer of the model.
        matcher: `LLMatcher` of its grammar; None without one.
        further: True for a further answer to the prompt of another request.
        request: the user's handle.
        ready: the compressed sequence while it waits for a slot, else None.
        told: True if its first token was sampled, and its text passed to readers, before it had a slot.
        prefix: stored cache that the prompt begins with, once its prefill has started; None if it is read whole.
        sampled: ids that its slot has sampled, those after a stop string included.
        complete: True once nothing can follow by its grammar.
        kept: entries per kv head and layer after prefill, on average.
        first: time of its first sampled token; 0 before.
        last: time of its last sampled token.
        answers: sampled ids and text so far.
    """

    new: int
    sampling: Sampler
    stops: tuple[str, ...]
    eos: tuple[int, ...]
    offline: bool
    text: ChatTokenizer | None
    matcher: Any = None
    further: bool = False
    request: Request = dataclasses.field(default_factory=Request)
    ready: PausedSequence | None = None
    told: bool = False
    prefix: MatchedPrefix | None = None
    sampled: list[int] = dataclasses.field(default_factory=list)
    complete: bool = False
    kept: float = 0.0
    first: float = 0.0
    last: float = 0.0

    def prefill_layers(
        self, slots: Slots, documents: DocumentCacheStore, encoded: EncodedPrompts
    ) -> Walk[KVCache]:
        """Generator: add the rest of a prompt to its `prefix`, or prefill all; yield layers run; return `KVCache`."""
        if self.prefix is None:
            return (yield from super().prefill_layers(slots, documents, encoded))
        rest = dataclasses.replace(encoded, ids=[encoded.ids[0][self.prefix.tokens :]])
        return (
            yield from slots.iterate_extend(self.prefix.cache, rest, key=self.key, new=self.new)
        )

    def __post_init__(self) -> None:
        """Set the future of a request's work to that of its handle, and start an empty answer."""
        self.future, self.request.tokenizer = self.request.future, self.text
        top = get_settings(self.sampling).logprobs
        self.answers = AnswerCollector(self.text, 1, self.stops, self.encoded.kept, top)
        self.request.scored_tokens, self.request.scorer = self.answers.scored[0], self.scorer

    def add_sampled_tokens(
        self, tokens: list[int], now: float, logprobs: Any = None, row: int = 0
    ) -> float:
        """Add sampled ids and pass their text to readers; return seconds since the previous token, 0 for the first.

        `logprobs` are `SampledLogprobs`, theirs in the row `row`, or None.
        """
        pause = now - self.last if self.first else 0.0
        self.first, self.last = self.first or now, now
        self.sampled += tokens
        if self.matcher:
            self.complete = self.matcher.consume_tokens(tokens) and self.matcher.is_stopped()
        mine = jax.tree.map(lambda each: each[[row]], logprobs)
        self.answers.append_token_ids(np.asarray([tokens], np.int32), mine)
        self.request.append_text(self.answers.take_new_text()[0])
        return pause

    @property
    def ends_by_text(self) -> bool:
        """True if the request's answer so far contains a stop string, or is a complete text of its grammar."""
        return self.complete or bool(self.answers.stopped_sequences[0])

    def is_complete_after(self, token: int) -> bool:
        """True if the answer, with last id `token`, is complete: by an end id, a stop string, or the token limit."""
        return self.ends_by_text or token in self.eos or len(self.answers.tokens[0]) >= self.new

    def complete_request(self) -> None:
        """Pass the rest of the text to readers, and complete the request with its `Completion` and `RequestStats`."""
        self.request.append_text(self.answers.flush_text()[0])
        first = self.first or self.submitted
        (completion,) = self.answers.build_completions(self.eos, self.scorer.scored)
        if self.ends_by_text:
            completion = dataclasses.replace(completion, finish_reason="stop")
        stats = RequestStats(
            prompt_tokens=len(self.encoded.ids[0]),
            cached_tokens=0 if self.prefix is None else self.prefix.tokens,
            new_tokens=len(self.answers.tokens[0]),
            kept=self.kept,
            waited_seconds=self.begun - self.submitted,
            prefill_seconds=self.prefill_seconds,
            first_token_seconds=first - self.submitted,
            seconds=time.monotonic() - self.submitted,
        )
        self.request.set_completion(completion, stats)
