"""`Engine`: answers many requests concurrently over the slots of one running batch (continuous batching)."""

import atexit
import functools
import operator
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from pathlib import Path
from typing import Any

import numpy as np
from jax.sharding import Mesh
from jaxtyping import PRNGKeyArray

from jaxkv import _checks, arguments
from jaxkv._checks import settled, use_package_jax_settings
from jaxkv._errors import require
from jaxkv.attention import Implementation
from jaxkv.cache import ConversationState
from jaxkv.engine.generation_results import Completion
from jaxkv.engine.prompt_scores import PromptScorer
from jaxkv.engine.sampling import (
    MOST_STOP_IDS,
    Sampler,
    collect_end_ids,
    combine_samplers,
    get_settings,
    needs_extras,
)
from jaxkv.engine.session import Session
from jaxkv.engine.slot_shape import compute_slot_shape
from jaxkv.engine.slots import Slots
from jaxkv.loading import LanguageModel
from jaxkv.machine import hosts, memory
from jaxkv.policies.model_policy import resolve_policy_for_model
from jaxkv.policies.policy import Policy
from jaxkv.policies.registry import resolve_policy
from jaxkv.serving.compiling import COMPUTING, PATIENCE, compile_remaining_programs
from jaxkv.serving.constraints import GrammarCompiler
from jaxkv.serving.document_store import Document, DocumentCacheStore
from jaxkv.serving.given import apply_request_budget, compute_deadline, resolve_random_key
from jaxkv.serving.mapping import answer_prompts, make_waiting_submit
from jaxkv.serving.prefix_cache import (
    AUTO_PREFIXES,
    MOST_USUAL_BYTES,
    USUAL_SHARE,
    PrefixCache,
    PrefixCacheConfig,
)
from jaxkv.serving.requests import EngineClosed, PromptTooLong, QueueFull, Request
from jaxkv.serving.scheduler import Scheduler
from jaxkv.serving.slot_memory import (
    count_fitting_slots,
    get_max_prefills_ahead,
    get_model_device,
    resolve_token_limits,
)
from jaxkv.serving.stats import EngineStats
from jaxkv.serving.work import PrefillWork, RequestWork
from jaxkv.text.grammar import Grammar
from jaxkv.text.prompts import LONGEST_QUESTION, Prompt, choose_question_window, encode_prompts

# Default maximum tokens of an answer.
_USUAL_NEW = 128
# Share for documents of the memory that the slots leave free.
_DOCUMENT_SHARE = 0.5
# Engines that are possibly open when the process ends.
_OPEN = weakref.WeakSet["Engine"]()


class Engine:
    """Answer many requests over the slots of one running batch: prefill each, compress it, decode it in a free slot.

    The tokens of a request equal those of `jaxkv.generate` with its key (in float32), independent of other requests;
    under policies that evict, those of a prompt that continues an answered one equal a `Session`'s (`prefix_cache`).
    Decode steps of running requests alternate with the layers of a prefill.

    ```python
    with jaxkv.Engine(params, policy=jaxkv.AdaKV(budget=1024), slots=16) as engine:
        requests = [engine.submit(prompt, max_new_tokens=200) for prompt in prompts]
        for request in requests:
            print(request.result().text)
    ```

    Attributes:
        session: model, policy and attention.
        policy: the policy, with window="question" if that was given: the session's has the largest window.
        limits: maximum tokens of a prompt, question and answer (`prompt`, `question`, `new`), and entries per slot.
        documents: the documents of the engine: `all()`, `of(id)`, `remove(id)`.
        error: error that ended the engine; None while it runs.
    """

    @settled
    def __init__(
        self,
        params: LanguageModel,
        *,
        policy: Policy | type[Policy] | str | None = None,
        slots: int | np.integer | str = "auto",
        max_prompt_tokens: int | np.integer | None = None,
        max_new_tokens: int | np.integer = 512,
        max_question_tokens: int | np.integer = 0,
        prefill_tokens: int | np.integer = 4096,
        queue: int | np.integer = 256,
        documents: str | os.PathLike[str] | None = None,
        document_bytes: int | np.integer | None = None,
        memory_share: float | np.floating = 1.0,
        mesh: Mesh | None = None,
        implementation: Implementation | str | None = Implementation.AUTO,
        precompile: bool = True,
        prefix_cache: PrefixCacheConfig = AUTO_PREFIXES,
        start: bool = True,
    ):
        """Validate the arguments; with `start`, allocate the slots, compile programs and start the engine's threads.

        Args:
            params: from `jaxkv.load`.
            policy: compression policy, or its name or class for the defaults; FullKV(), the default, keeps every entry.
            slots: number of sequences that decode at the same time; on a mesh a multiple of its groups. "auto" fills
                nine tenths of the free memory, with at most 64 slots on a CPU and 1024 elsewhere.
            max_prompt_tokens: maximum tokens of a prompt; with the new tokens it sets the entries per slot, unless the
                policy's budget does. By default the model's positions less the other limits, at most 4096.
            max_new_tokens: maximum tokens of an answer.
            max_question_tokens: maximum tokens of a question on a document; 0 for no questions.
            prefill_tokens: maximum padded tokens of waiting prompts that are prefilled together: 2, 4 or 8 of equal
                padded length and policy. Between two tokens of a running request their prefill takes a layer's time.
                Others, and on a mesh or with random numbers all, are prefilled one by one.
            queue: maximum number of waiting requests; further ones are rejected.
            documents: folder that keeps documents for the next engine of the same model and policy; None keeps them
                only as long as this engine runs.
            document_bytes: maximum bytes of documents on the device; the least recently used others are on disk. By
                default half of the memory that the slots leave free.
            memory_share: share of the free memory for "auto" slots and documents; lower it for several engines.
            mesh: devices to run on, with the axes "data" and "model"; slots are sharded over "data".
            implementation: implementation of attention; by default the fastest one for these devices.
            precompile: False to compile other lengths than a short chat's while the engine runs: lengths of requests
                immediately, other prompt lengths while no engine of the process computes.
            prefix_cache: whether prompts that continue an earlier conversation reuse its cache. The rest is read as a
                question, so only engines with `max_question_tokens` and without a mesh do.
            start: False to only validate the arguments; call `start` later.

        Raises:
            ValueError: for a policy that keeps entries in host memory or prefills in chunks, for limits beyond the
                model's positions, for a mesh of several processes.
            TypeError: for an argument of the wrong type, with the type to use.
            MemoryError: if the slots do not fit, with their bytes.
        """
        params = arguments.validate_model(params, mesh)
        spread = params.axes is not None and hosts.has_several_processes(params.axes.mesh)
        require(
            not spread,
            "mesh",
            "devices of several processes",
            "an engine runs in one process: use only the devices of this one",
        )
        self._limit = _checks.validate_int("queue", queue, "allow at least 1 waiting request")
        # Slots are made for the longest question.
        given = policy if isinstance(policy, Policy) else resolve_policy(policy)
        largest = given.set_question_window(LONGEST_QUESTION)
        self.session = Session(
            params, largest, implementation=arguments.validate_implementation(implementation)
        )
        self.policy = self.session.policy if largest is given else given
        self._grammars = GrammarCompiler(params)
        limits = resolve_token_limits(
            params.config,
            prompt=max_prompt_tokens,
            new=max_new_tokens,
            question=max_question_tokens,
            together=prefill_tokens,
        )
        share = _checks.validate_float("memory_share", memory_share, high=1, open_low=True)
        wanted = (
            count_fitting_slots(self.session, **limits, share=share) if slots == "auto" else slots
        )
        count = _checks.validate_int("slots", wanted, 'use at least 1 slot, or "auto"')
        ends = len(params.end_token_ids) + MOST_STOP_IDS
        self._slots = Slots(self.session, count=count, ends=ends, start=False, **limits)
        self.limits = self._slots.shape
        if self._asks_for_window:
            self._require_any_window_fits()
        folder = None if documents is None else Path(os.path.expanduser(documents)).absolute()
        if document_bytes is None:
            left = memory.available_bytes(get_model_device(params)) - self._slots.needed
            document_bytes = int(_DOCUMENT_SHARE * share * max(0, left))
        most = _checks.validate_int(
            "document_bytes", document_bytes, "use a number of bytes", least=0, most=2**62
        )
        self.documents = DocumentCacheStore(
            params, self.session.policy, shape=self.limits, most_bytes=most, folder=folder
        )
        self._scheduler = Scheduler(
            self._slots,
            self.documents,
            ahead=get_max_prefills_ahead(count),
            prefixes=self._create_prefix_cache(prefix_cache, share),
        )
        self._changed = threading.Condition()
        self._rejected, self._closing, self._dropping = 0, False, False
        self.error: BaseException | None = None
        self._precompile = _checks.validate_bool("precompile", precompile)
        # Daemon threads: an open engine does not keep the process from ending.
        self._thread = threading.Thread(
            target=self._run_engine_loop, name="jaxkv.Engine", daemon=True
        )
        # Requests that are answered while the engine closes may need programs.
        rest = self._slots, self._scheduler, lambda: not self._thread.is_alive()
        self._compiler = threading.Thread(
            target=compile_remaining_programs, name="jaxkv-compile", args=rest, daemon=True
        )
        _OPEN.add(self)
        if _checks.validate_bool("start", start):
            self.start()

    @settled
    def start(
        self, tick: Callable[[str], object] = lambda what: None, name: str = "engine"
    ) -> None:
        """Allocate slots, compile programs (`tick` gets a text for each), start threads; only after `start=False`."""
        COMPUTING.add(self._scheduler)
        self._slots.compile_programs(
            lambda part: tick(f"compiling {part} of {name}"), lengths=self._precompile
        )
        self._thread.start()
        self._compiler.start()

    @settled
    def submit(
        self,
        prompt: Prompt,
        *,
        max_new_tokens: int | np.integer | None = None,
        sampling: Sampler | None = None,
        stop: str | Iterable[str] | None = (),
        stop_at_eos: bool = True,
        key: PRNGKeyArray | int | Sequence[PRNGKeyArray | int | None] | None = None,
        raw: bool = False,
        budget: int | float | np.integer | np.floating | None = None,
        deadline: float | np.floating | np.integer | None = None,
        offline: bool = False,
        document: Document | None = None,
        owner: str = "",
        grammar: Grammar | None = None,
    ) -> Request:
        """Queue a prompt, or a question on a document, once per given key; return the first `Request` without waiting.

        Args:
            prompt: text, chat messages, a `Chat` or token ids; a question if `document` is given.
            max_new_tokens: maximum number of tokens to sample; by default 128, or the engine's limit if lower. 0 only
                with a `Sampling` that has `prompt_logprobs`.
            sampling: how to sample, a `Sampling`; None for greedy decoding.
            stop: strings that end the answer and are left out of its text.
            stop_at_eos: True to end at the model's end-of-answer tokens.
            key: random key or seed, for sampling and policies that use random numbers; a list for several answers,
                which are in `Request.others`.
            raw: True if the text is plain text, not a user's message.
            budget: entries per kv head to keep, or share of the prompt; at most the policy's, which is the default.
            deadline: seconds from now after which the request ends with a TimeoutError; None for none.
            offline: True if nobody reads the text early: prefills of other requests go first, for higher throughput.
            document: from this engine's `document`; the question does not change it.
            owner: name of who asks; only requests of the same name reuse each other's conversations.
            grammar: texts that the answer may be, by llguidance (extra `serve`). Meanwhile all slots sample one token
                at a time.

        Returns:
            The request: iterate over its text, or wait for its `result()`.

        Raises:
            QueueFull: if the queue is full.
            ValueError: for an empty or over-long prompt, too many tokens, a document of another engine, or an invalid
                grammar.
            TypeError: for an argument of the wrong type, with the type to use.
            RuntimeError: if the engine has failed, or, an `EngineClosed`, is closed.
        """
        params, most = self.session.params, self.limits.new
        new = min(_USUAL_NEW, most) if max_new_tokens is None else max_new_tokens
        sampling, stops = (
            arguments.validate_sampler(sampling),
            arguments.validate_stop_strings(stop),
        )
        scorer = PromptScorer(top=get_settings(sampling).prompt_logprobs)
        least, remedy = int(not scorer.is_active), "sample at least 1 token, or score the prompt"
        new = _checks.validate_int("max_new_tokens", new, remedy, least=least, most=most)
        keys = [
            resolve_random_key(each, self.session.key)
            for each in (key if isinstance(key, Sequence) else [key])
        ]
        require(
            0 < len(keys) <= self._limit,
            "key",
            f"{len(keys)} keys",
            f"not a valid number of answers: use 1 to {self._limit}, the length of the queue",
        )
        stop_at_eos, raw = (
            _checks.validate_bool("stop_at_eos", stop_at_eos),
            _checks.validate_bool("raw", raw),
        )
        offline = _checks.validate_bool("offline", offline)
        # Rejects custom samplers, which would have to be compiled into the programs.
        combine_samplers([sampling])
        for each in keys:
            arguments.check_sampling_options(
                params, sampling, each, stops, continues=document is not None
            )
        if document is not None and not isinstance(document, Document):
            raise TypeError(
                f"document={type(document).__name__}: pass what this engine's document returned"
            )
        turn = (
            ConversationState.START
            if document is None
            else self.documents.get_document(document.id).turn
        )
        encoded = encode_prompts(prompt, params.text, params.config, turn=turn, raw=raw, close=True)
        require(
            encoded.single,
            "prompt",
            f"{len(encoded.ids)} prompts",
            "submit takes one prompt: call map for several",
        )
        self._require_prompt_fits(int(encoded.prompt_lengths[0]), document)
        matcher = grammar and self._grammars.compile(grammar)
        answer = functools.partial(
            RequestWork,
            encoded=encoded,
            new=new,
            sampling=sampling,
            stops=stops,
            eos=collect_end_ids(sampling, params.end_token_ids if stop_at_eos else ()),
            policy=apply_request_budget(
                budget, self._choose_policy(prompt, raw, document), document
            ),
            deadline=compute_deadline(deadline),
            offline=offline,
            owner=owner,
            document=document,
            scorer=scorer,
            text=params.text,
            needs_extras=needs_extras(sampling) or grammar is not None,
            # Answers to one prompt of several would each copy its cache.
            alone=document is not None or scorer.is_active or len(keys) > 1,
        )
        works = [
            answer(key=each, further=at > 0, matcher=matcher and matcher.deep_copy())
            for at, each in enumerate(keys)
        ]
        works[0].request.others = tuple(work.request for work in works[1:])
        self._enqueue_work(works)
        return works[0].request

    def document(
        self,
        prompt: Prompt,
        *,
        raw: bool = False,
        key: PRNGKeyArray | int | None = None,
        budget: int | float | np.integer | np.floating | None = None,
        deadline: float | np.floating | np.integer | None = None,
    ) -> Document:
        """Prefill and compress a document; wait for it and return its `Document`, for any number of `submit` calls.

        Args:
            prompt: text, chat messages or token ids; a text leaves the user's turn open for the question.
            raw: True if the text is plain text, not a user's message.
            key: random key or seed, for policies that use random numbers.
            budget: entries per kv head to keep, or share of the document; at most the policy's, which is the default.
            deadline: seconds from now after which it ends with a TimeoutError; None for none.

        Returns:
            The document: its id, tokens, entries, bytes. Documents beyond `document_bytes` are on disk.

        Raises:
            QueueFull: if the queue is full.
            TimeoutError: if the document is not compressed by its deadline.
            ValueError: for an empty or over-long document, or an engine without `max_question_tokens`.
            TypeError: for an argument of the wrong type, with the type to use.
            RuntimeError: if the engine is closed or has failed.
        """
        future = self.submit_document(prompt, raw=raw, key=key, budget=budget, deadline=deadline)
        try:
            return future.result()
        finally:
            future.cancel()  # An interrupted caller has no handle to cancel.

    @settled
    def submit_document(
        self,
        prompt: Prompt,
        *,
        raw: bool = False,
        key: Any = None,
        budget: Any = None,
        deadline: Any = None,
        owner: str = "",
    ) -> Future[Document]:
        """Queue a document of `owner` to compress, with `document`'s arguments; return a future of its `Document`."""
        params, key, raw = (
            self.session.params,
            resolve_random_key(key, self.session.key),
            _checks.validate_bool("raw", raw),
        )
        remedy = (
            "this engine accepts no questions: create it with Engine(..., max_question_tokens=256)"
        )
        require(self.limits.question > 0, "document", "not supported", remedy)
        remedy = "a document has none: give the engine's policy a number of tokens, such as 64"
        require(not self._asks_for_window, "window", "question", remedy)
        encoded = encode_prompts(prompt, params.text, params.config, raw=raw, close=False)
        require(encoded.single, "prompt", f"{len(encoded.ids)} prompts", "pass one document")
        self._require_prompt_fits(int(encoded.prompt_lengths[0]), None)
        arguments.warn_unseen_question(
            self.session.policy,
            encoded,
            self.session.plan_without_memory_check(encoded.prompt_lengths, 0).budget,
        )
        reading = PrefillWork(
            encoded=encoded,
            key=key,
            policy=apply_request_budget(budget, self.session.policy, None),
            deadline=compute_deadline(deadline),
            owner=owner,
            alone=True,
        )
        self._enqueue_work([reading])
        return reading.future

    def map(
        self,
        prompts: Iterable[Prompt],
        *,
        key: PRNGKeyArray | int | None = None,
        **options: Any,
    ) -> Iterator[Completion]:
        """Return an iterator that answers any number of prompts, and yields the `Completion` of each in their order.

        Twice as many requests as slots are in flight.

        Args:
            prompts: prompts as for `submit`; an iterable is consumed as answers are read.
            key: random key or seed; prompt i samples with `jax.random.fold_in(key, i)`.
            options: other arguments of `submit`, the same for all prompts; `offline` is True by default.

        Returns:
            An iterator over the answers. At a rejected prompt, it raises ValueError and cancels the requests in flight.
        """
        waiting, most = self._scheduler.waiting, self._limit
        submit = make_waiting_submit(
            self.submit, lambda: len(waiting) >= most and self._thread.is_alive()
        )
        given, at_once = arguments.validate_random_key(key), min(most, 2 * self._slots.count)
        return answer_prompts(submit, prompts, at_once, key=given, **options)

    @property
    def stats(self) -> EngineStats:
        """Current numbers of requests, slots, tokens and bytes of the engine, as `EngineStats`."""
        at = self._scheduler
        return EngineStats(
            waiting=len(at.waiting),
            prefilling=at.active_prefills,
            ready=at.ready_count,
            running=at.running_count,
            slots=self._slots.count,
            answered=at.answered,
            rejected=self._rejected,
            new_tokens=at.tokens,
            nbytes=self._slots.nbytes,
            document_bytes=self.documents.device_bytes,
            prefix_bytes=0 if at.prefixes is None else at.prefixes.nbytes,
            reused_tokens=at.reused_tokens,
            longest_pause_seconds=at.longest_pause,
        )

    def close(self, *, drain: bool = True) -> None:
        """Close the engine: reject new requests, answer others (`drain=False`: cancel); drop unsaved documents.

        Args:
            drain: True to answer all requests first, False to cancel them.
        """
        with self._changed:
            self._closing = True
            self._scheduler.stores_answers = False
            self._dropping = self._dropping or not drain
            self._changed.notify_all()
        if threading.current_thread() is not self._thread:
            for thread in filter(threading.Thread.is_alive, (self._thread, self._compiler)):
                thread.join()
            self.documents.close_document_store()
            if self._scheduler.prefixes is not None:
                self._scheduler.prefixes.drop_all_prefixes()

    def __enter__(self) -> "Engine":
        """Return the engine itself."""
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        """Close the engine: answer its requests, or cancel them if the block raised."""
        self.close(drain=error is None)

    def __repr__(self) -> str:
        """One-line text: policy, numbers of slots with a request, of all slots and of waiting requests."""
        at = self.stats
        return f"Engine({self.policy}; {at.running} of {at.slots} slots taken, {at.waiting + at.ready} wait)"

    def _create_prefix_cache(self, config: PrefixCacheConfig, share: float) -> PrefixCache | None:
        """Return an empty `PrefixCache`; None if the engine cannot reuse prefixes or its policy should not.

        Raises ValueError if prefixes of all policies are requested from an engine that cannot reuse them.
        """
        params = self.session.params
        able = self.limits.question > 0 and params.axes is None
        remedy = "not supported: create the engine with max_question_tokens and without a mesh"
        require(able or config.policies != "all", "prefix_cache", config, remedy)
        if not able or not config.includes_policy(self.session.policy):
            return None
        most = config.max_bytes
        if most is None:
            # On a CPU the slots take the same memory.
            taken = self._slots.needed if get_model_device(params).platform == "cpu" else 0
            left = max(0, memory.get_machine_bytes() - taken)
            most = min(MOST_USUAL_BYTES, int(USUAL_SHARE * share * left))
        return PrefixCache(most_bytes=most)

    @property
    def _asks_for_window(self) -> bool:
        """True if the policy observes the question of each prompt."""
        return self.policy is not self.session.policy

    def _choose_policy(self, prompt: Prompt, raw: bool, document: Document | None) -> Policy:
        """Return the session's policy, or that with the window of the prompt's question."""
        if document is not None or not self._asks_for_window:
            return self.session.policy
        return self._fit_window(choose_question_window(prompt, self.session.params.text, raw=raw))

    def _fit_window(self, size: int) -> Policy:
        """Return the policy with a window of `size` tokens, fitted to the model."""
        params = self.session.params
        return resolve_policy_for_model(
            self.policy.set_question_window(size),
            params.config,
            params.filter_layers,
            dtype=params.cache_dtype,
        )

    def _require_any_window_fits(self) -> None:
        """Raise ValueError if slots store a window's queries, or shorter windows need more places than the longest."""
        remedy = "slots store queries for every=n: give a number of tokens, such as 64"
        interval = self.session.policy.composed.recompression_interval
        require(interval is None, "window", "question", remedy)
        params, at = self.session.params, self.limits
        remedy = (
            "layers' budgets depend on it, slots have one size: give a number of tokens, such as 64"
        )
        for size in (8, 16, 32, 64):
            shape = compute_slot_shape(
                self._fit_window(size).composed,
                params.config,
                prompt=at.prompt,
                question=at.question,
                new=at.new,
                kv_shards=1 if params.axes is None else params.axes.count_axis_shards("K"),
            )
            fits = all(map(operator.le, shape.rows, at.rows))
            require(fits, "window", "question", remedy)

    def _require_prompt_fits(self, tokens: int, document: Document | None) -> None:
        """Raise `PromptTooLong` if a prompt, or a question on a document, has more tokens than the engine accepts."""
        kind, most = (
            ("prompt", self.limits.prompt)
            if document is None
            else ("question", self.limits.question)
        )
        if tokens > most:
            told = f"too long: this engine accepts at most max_{kind}_tokens={most}"
            raise PromptTooLong(f"prompt={tokens} tokens: {told}")

    def _enqueue_work(self, works: Sequence[PrefillWork]) -> None:
        """Queue all given requests or none, or a document; raise if the queue is full, the engine closed or failed."""
        with self._changed:
            if self.error is not None:
                raise RuntimeError(f"the engine has failed: {self.error}") from self.error
            if self._closing or not self._thread.is_alive():
                raise EngineClosed(
                    "the engine is closed, or its thread is in another process: create a new one"
                )
            waiting = self._scheduler.waiting
            if len(waiting) + len(works) > self._limit:
                self._rejected += len(works)
                raise QueueFull(
                    f"the queue is full: {len(waiting)} requests wait: try again later, or raise queue"
                )
            waiting.extend(works)
            self._changed.notify_all()

    def _run_engine_loop(self) -> None:
        """Thread body: run scheduler steps until the engine is closed; on an error, or without drain, end requests."""
        try:
            while True:
                with self._changed:
                    if self._scheduler.is_idle:
                        COMPUTING.discard(self._scheduler)
                    self._changed.wait_for(lambda: self._closing or not self._scheduler.is_idle)
                    COMPUTING.add(self._scheduler)
                    if self._dropping:
                        break
                    if self._closing and self._scheduler.is_idle:
                        return
                with use_package_jax_settings():
                    if not self._scheduler.run_scheduler_step():
                        time.sleep(PATIENCE)
            self._scheduler.fail_all_requests(CancelledError("the engine was closed"))
        except BaseException as error:  # noqa: BLE001 - no caller may wait for ever for an answer
            with self._changed:
                self.error = error
            failed = RuntimeError(f"the engine failed: {type(error).__name__}: {error}")
            failed.__cause__ = error
            self._scheduler.fail_all_requests(failed)
        finally:
            COMPUTING.discard(self._scheduler)


@atexit.register
def _close_all_engines() -> None:
    """Close all open engines, automatically at exit (`atexit`); cancel requests without an answer."""
    for engine in list(_OPEN):
        engine.close(drain=False)


def remove_temporary_files() -> None:
    """Remove open engines' temporary document folders; call it before ending a process that does not close them."""
    for engine in list(_OPEN):
        engine.documents.close_document_store()
