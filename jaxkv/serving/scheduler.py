"""`Scheduler`: decides in each step whether to compute the next layer of a prompt or the next tokens of all slots."""

import collections
import contextlib
import dataclasses
import itertools
import time
from collections.abc import Iterator

import numpy as np

from jaxkv.cache import KVCache
from jaxkv.engine.lengths import LOOK, round_up_to_question
from jaxkv.engine.progress import Walk
from jaxkv.engine.slot_shape import BATCHES, SlotPrograms
from jaxkv.engine.slots import MEMORY_ERRORS, Slots
from jaxkv.serving.constraints import compute_token_masks
from jaxkv.serving.document_store import DocumentCacheStore
from jaxkv.serving.prefix_cache import MatchedPrefix, PrefixCache, PrefixOwner
from jaxkv.serving.requests import mark_future_running
from jaxkv.serving.work import PrefillWork, RequestWork

# Errors that reject one prompt or document; any other error is the engine's own.
_REJECTIONS = (ValueError, TypeError, MemoryError, OSError)


class Scheduler:
    """Scheduler of an engine's requests in order of arrival: a step computes a prefill layer, new tokens, or both.

    `run_scheduler_step` runs on one thread; other threads may append to `waiting`.

    Attributes:
        slots: the running batch.
        documents: the documents of the engine.
        ahead: maximum number of prompts prefilled while no slot is free.
        prefixes: caches of answered conversations; None if prompts are always read whole.
        waiting: requests that wait for prefill, in order of arrival.
        answered: number of answered requests.
        tokens: number of sampled tokens.
        reused_tokens: number of prompt tokens that stored caches held.
        stores_answers: False to store no more answered conversations in `prefixes`.
        longest_pause: longest time in seconds between two tokens of one request, or two blocks of up to 8 tokens.
    """

    def __init__(
        self,
        slots: Slots,
        documents: DocumentCacheStore,
        *,
        ahead: int,
        prefixes: PrefixCache | None,
    ):
        """Create a scheduler without requests; all slots are free."""
        self.slots, self.documents, self.ahead = slots, documents, ahead
        self.prefixes = prefixes
        self.waiting: collections.deque[PrefillWork] = collections.deque()
        self.answered, self.tokens, self.longest_pause = 0, 0, 0.0
        self.reused_tokens, self.stores_answers = 0, True
        # Programs for which nobody waits, though a stored prefix or a batch of prompts was not used without them.
        self._missed = set[SlotPrograms]()
        # The answers to the prompts of one batch, or a document, with its prefill.
        self._reading: tuple[list[PrefillWork], Walk[KVCache]] | None = None
        self._ready: collections.deque[RequestWork] = collections.deque()
        self._running: dict[int, RequestWork] = {}
        # Seconds of a decode step, and the end of the last one.
        self._step_seconds, self._stepped = 0.0, time.monotonic()

    @property
    def running_count(self) -> int:
        """Number of slots that decode a request."""
        return len(self._running)

    @property
    def active_prefills(self) -> int:
        """Number of prefills in progress: 1 during the prefill of prompts or a document, else 0."""
        return int(self._reading is not None)

    @property
    def ready_count(self) -> int:
        """Number of prefilled requests that wait for a slot."""
        return len(self._ready)

    @property
    def is_idle(self) -> bool:
        """True if no request or document waits, is in prefill, ready or running: a step has nothing to do."""
        return not (self.waiting or self._reading or self._ready or self._running)

    @property
    def first_wanted_programs(self) -> SlotPrograms | None:
        """Programs to compile for the first waiting request, else for a missed prefix or batch; None without."""
        waiting = (each for work in list(self.waiting) for each in work.needed_programs)
        left = self.slots.uncompiled
        # An attempt that had an error is repeated only once its requests have got the error.
        wanted = (each for each in (*waiting, *self._missed) if left.get(each, each) is None)
        return next(wanted, None)

    def run_scheduler_step(self) -> bool:
        """End expired requests, fill slots, then compute a prefill layer, tokens or both; return False if neither."""
        self._end_cancelled_or_expired()
        self._fail_uncompilable_requests()
        self._fill_free_slots()
        self._start_next_prefill()
        if self._reading is not None:
            self._advance_prefill()
            # Layers alternate with decode steps, so that no request waits for a whole prefill; each gets half the time.
            # If nobody waits for tokens, slots are filled first: a step costs the same for few of them as for all.
            waited_for = any(not work.offline for work in self._running.values())
            if waited_for and time.monotonic() - self._stepped >= self._step_seconds:
                self._decode_running_slots(1)
            return True
        if self._running:
            streamed = any(work.request.has_readers for work in self._running.values())
            self._decode_running_slots(1 if streamed else LOOK)
            return True
        return False

    def fail_all_requests(self, error: BaseException) -> None:
        """End every waiting, prefilling, ready or running request and document with an error, without device work."""
        for work in self._iterate_requests():
            work.fail_with_error(error)
        self.waiting.clear()
        self._ready.clear()
        self._running.clear()
        self._reading = None

    def _iterate_requests(self) -> Iterator[PrefillWork]:
        """Yield the work of every request and document that has not ended: waiting, in prefill, ready, running."""
        yield from list(self.waiting)
        if self._reading is not None:
            yield from self._reading[0]
        yield from list(self._ready)
        yield from list(self._running.values())

    def _end_cancelled_or_expired(self) -> None:
        """End cancelled or expired requests and documents; free their slots; close a prefill that none needs."""
        gone = [work for work in self._iterate_requests() if work.is_cancelled_or_expired]
        if not gone:
            return
        for work in gone:
            work.fail_with_error(TimeoutError("the deadline passed before the answer was complete"))
        if self._reading is not None:
            works, walk = self._reading
            left = [work for work in works if work not in gone]
            if not left:
                walk.close()
            self._reading = (left, walk) if left else None
        for work in gone:
            if work in self.waiting:
                self.waiting.remove(work)
        self._ready = collections.deque(work for work in self._ready if work not in gone)
        free = [slot for slot, work in self._running.items() if work in gone]
        self.slots.release_slots(free)
        for slot in free:
            del self._running[slot]

    def _fail_uncompilable_requests(self) -> None:
        """End waiting requests whose programs failed to compile with the error; the next such request tries again."""
        for programs, error in list(self.slots.uncompiled.items()):
            for work in list(self.waiting):
                if error and programs in work.needed_programs:
                    self.waiting.remove(work)
                    work.fail_with_error(error)
                    self.slots.uncompiled[programs] = None

    def _fill_free_slots(self) -> None:
        """Copy prefilled sequences into free slots, in order of arrival, until either runs out."""
        for slot in range(self.slots.count):
            if not self._ready:
                return
            if slot not in self._running:
                # The request leaves the queue only with its slot, so that an error finds it in one of them.
                work = self._ready[0]
                assert work.ready is not None
                self.slots.insert_sequence(work.ready, slot)
                self._running[slot], work.ready = self._ready.popleft(), None

    def _start_next_prefill(self) -> None:
        """Start the first waiting prefill of compiled length, unless one is in progress or enough prefilled ones wait.

        Requests whose programs are not compiled yet are skipped, as are those that continue a conversation that is just
        being stored. Further answers to the same prompt share the cache, which is copied into the slot of each.
        """
        free = self.slots.count - len(self._running) + self.ahead - len(self._ready)
        if self._reading is not None or free <= 0:
            return
        # A list, as another thread removes programs meanwhile.
        uncompiled = [*self.slots.uncompiled]
        ready = [
            each
            for each in list(self.waiting)
            if each.needed_programs.isdisjoint(uncompiled)
            and not (self.prefixes and self.prefixes.is_storing_for(*self._get_prefix_key(each)))
        ]
        if not ready:
            return
        # A policy with random numbers compresses the prompt with the key of each answer.
        is_random = self.slots.session.policy.build_policy_parts().uses_random_key
        prefix: MatchedPrefix | None = None
        prompts = ready[:1]
        with contextlib.suppress(*MEMORY_ERRORS):
            prefix = self._match_prefix(ready[0])
            if not (is_random or prefix):
                prompts = self._choose_prompts(ready, free)
        rows = {id(each.encoded): row for row, each in enumerate(prompts)}
        works = prompts if is_random else [each for each in ready if id(each.encoded) in rows]
        # They leave the queue only now, so that an error finds them in it.
        for work in works:
            self.waiting.remove(work)
            work.begun, work.row = time.monotonic(), rows[id(work.encoded)]
            work.alone = len(prompts) == 1
            if isinstance(work, RequestWork):
                work.prefix = prefix
        encoded = dataclasses.replace(
            works[0].encoded, ids=[each.encoded.ids[0] for each in prompts]
        )
        self._reading = works, works[0].prefill_layers(self.slots, self.documents, encoded)

    def _choose_prompts(self, ready: list[PrefillWork], free: int) -> list[PrefillWork]:
        """Return which prompts to read together, in order, with the first: the largest compiled batch of its bucket.

        Its prompts have one policy, and none begins with a stored prefix. A batch that is not compiled yet is not
        waited for.
        """
        first, programs = ready[0], self.slots.programs
        others = (
            each
            for each in ready[1:]
            if not (first.alone or each.alone)
            and (each.programs, each.policy) == (first.programs, first.policy)
            and not (
                self.prefixes and any(self.prefixes.find_prefixes(*self._get_prefix_key(each)))
            )
        )
        found = [first, *itertools.islice(others, min(free, max(BATCHES)) - 1)]
        fitting = [dataclasses.replace(first.programs, batch=each) for each in BATCHES]
        fitting = [each for each in fitting if each.batch <= len(found) and each in programs]
        self._missed.add(fitting[-1])
        return found[: max(each.batch for each in fitting if each not in self.slots.uncompiled)]

    def _match_prefix(self, work: PrefillWork) -> MatchedPrefix | None:
        """Return the stored cache that a prompt begins with, in a slot's shape; None if it must be read whole.

        A document, a question on one, and a scored prompt are never matched. Programs that are not compiled yet are
        not waited for.
        """
        if self.prefixes is None or not isinstance(work, RequestWork) or work.document is not None:
            return None
        if work.scorer.is_active:
            return None
        ids, owner = self._get_prefix_key(work)
        for found in self.prefixes.find_prefixes(ids, owner):
            left, chunk = len(ids) - found.tokens, self.slots.question_chunk
            sizes = {min(left, chunk), left % chunk or chunk}
            needed = {
                SlotPrograms(kind="question", length=round_up_to_question(size)) for size in sizes
            }
            if not needed.isdisjoint([*self.slots.uncompiled]):
                self._missed |= needed
                continue
            placed = self.slots.place_stored_cache(found.cache, left, work.new)
            if placed is not None:
                self.reused_tokens += found.tokens
                return dataclasses.replace(found, cache=placed)
        return None

    def _store_conversation(self, slot: int, work: RequestWork) -> None:
        """Store the cache of an answered request, which its slot still holds, for prompts that continue the text."""
        if not (self.prefixes and self.prefixes.accepts_more and self.stores_answers):
            return
        if work.document is None and not (work.offline or work.further):
            prompt, owner = self._get_prefix_key(work)
            cache = self.slots.copy_cache(slot)
            self.prefixes.store_in_background(cache, prompt + work.sampled, owner)

    def _get_prefix_key(self, work: PrefillWork) -> tuple[list[int], PrefixOwner]:
        """Return a prompt's ids, and whose stored prefixes it shares: its client's, under its policy."""
        return work.encoded.ids[0], PrefixOwner(policy=work.policy, client=work.owner)

    def _advance_prefill(self) -> None:
        """Compute the current prefill's next layer, or finish it; an error of its prompt ends only its requests."""
        assert self._reading is not None
        (works, walk), begun = self._reading, time.monotonic()
        try:
            next(walk)
        except StopIteration as end:
            for work in works:
                self._finish_prefill(work, end.value)
                # A sequence of a batch is copied once more until it has a slot.
                self._fill_free_slots()
            self._reading = None
        except (*_REJECTIONS, *MEMORY_ERRORS) as error:
            for work in reversed(works):
                self._reject_work(work, error)
            self._reading = None
        for work in works:
            work.prefill_seconds += time.monotonic() - begun

    def _reject_work(self, work: PrefillWork, error: Exception) -> None:
        """End a request or document with its prompt's error; one that was read with others waits, to be read alone."""
        if not work.alone:
            work.alone = True
            self.waiting.appendleft(work)
        elif isinstance(error, _REJECTIONS):
            work.fail_with_error(error)
        else:
            raise error

    def _finish_prefill(self, work: PrefillWork, cache: KVCache) -> None:
        """Queue a prefilled request for a slot (if none is free, sample its first token now), or store a document."""
        if not isinstance(work, RequestWork):
            if mark_future_running(work.future):
                try:
                    made = self.documents.add_document(cache, work.encoded.ids[0], work.owner)
                    work.future.set_result(made)
                except _REJECTIONS as error:
                    work.fail_with_error(error)
            return
        if work.new == 0:
            self._deliver_answer(work)
            return
        try:
            work.ready = self.slots.begin_sequence(
                cache,
                max_new_tokens=work.new,
                sampling=work.sampling,
                eos=work.eos,
                key=work.key,
                prompt=work.encoded.ids[0],
                extras=work.needs_extras,
                row=work.row,
            )
        except (*_REJECTIONS, *MEMORY_ERRORS) as error:
            # A sequence of a batch is copied, for which there may be no memory.
            self._reject_work(work, error)
            return
        work.kept = float(np.mean(cache.kept[:, work.row]))
        full = len(self._running) + len(self._ready) >= self.slots.count
        if full and not work.needs_extras:
            # The slot samples the same token again.
            token = self.slots.peek_first_token(work.ready)
            work.add_sampled_tokens([token], time.monotonic())
            self.tokens, work.told = self.tokens + 1, True
            if work.is_complete_after(token):
                self._deliver_answer(work)
                return
        self._ready.append(work)

    def _decode_running_slots(self, steps: int) -> None:
        """Sample up to `steps` tokens in every running slot; deliver complete answers and free their slots."""
        begun = time.monotonic()
        steps = 1 if self._constrain_next_tokens() else steps
        tokens = self.slots.decode(
            steps, until="any" if self._ready or self._reading or self.waiting else "all"
        )
        now = time.monotonic()
        self._step_seconds, self._stepped = (now - begun) / max(1, tokens.shape[1]), now
        left = []
        for slot, work in list(self._running.items()):
            sampled = [token for token in tokens[slot].tolist() if token >= 0]
            if sampled and work.told:
                sampled, work.told = sampled[1:], False
            if sampled:
                pause = work.add_sampled_tokens(sampled, now, self.slots.logprobs, slot)
                self.longest_pause = max(self.longest_pause, pause)
                self.tokens += len(sampled)
            if self.slots.done[slot] or work.ends_by_text:
                left.append(slot)
        if left:
            self.slots.release_slots(left)
        # After the slots are freed: the reader of an answer may inspect the engine immediately.
        ended = [(slot, self._running.pop(slot)) for slot in left]
        for _, work in ended:
            self._deliver_answer(work)
        for slot, work in ended:
            with contextlib.suppress(*MEMORY_ERRORS):
                self._store_conversation(slot, work)

    def _constrain_next_tokens(self) -> bool:
        """Mask tokens of slots under a grammar, end answers without an allowed token; return if slots have grammars."""
        matchers = {slot: work.matcher for slot, work in self._running.items() if work.matcher}
        if matchers:
            extras = self.slots.extras
            masks, errors = compute_token_masks(matchers, extras.count, extras.vocab)
            extras.set_token_masks(masks)
            for slot, error in errors.items():
                self.slots.release_slots([slot])
                self._running.pop(slot).fail_with_error(error)
        return bool(matchers)

    def _deliver_answer(self, work: RequestWork) -> None:
        """Count a request as answered and deliver its answer; an error in doing so fails this request alone."""
        self.answered += 1
        try:
            work.complete_request()
        except Exception as error:  # noqa: BLE001 - an error of one answer does not end the others
            work.fail_with_error(error)
