"""`Scheduler`: decides in each step whether to compute the next layer of a prompt or the next tokens of all slots."""

import collections
import time
from collections.abc import Iterator

import numpy as np

from jaxkv.cache import KVCache
from jaxkv.engine.lengths import LOOK
from jaxkv.engine.progress import Walk
from jaxkv.engine.slots import Slots
from jaxkv.serving.document_store import DocumentStore
from jaxkv.serving.requests import claimed
from jaxkv.serving.work import PrefillWork, RequestWork

# Errors that reject one prompt or document; any other error is the engine's own.
_REFUSALS = (ValueError, TypeError, MemoryError, OSError)


class Scheduler:
    """Answers requests over slots, first come, first served; prefills prompts ahead while all slots are taken.

    `step` runs on one thread; other threads may append to `waiting`.

    Attributes:
        slots: the running batch.
        documents: the documents of the engine.
        ahead: maximum number of prompts prefilled while no slot is free.
        waiting: requests that wait for prefill, in order of arrival.
        answered: number of answered requests.
        tokens: number of sampled tokens.
        longest_pause: longest time in seconds between two tokens of one request, or two blocks of up to 8 tokens.
    """

    def __init__(self, slots: Slots, documents: DocumentStore, *, ahead: int):
        """Create the scheduler of free slots."""
        self.slots, self.documents, self.ahead = slots, documents, ahead
        self.waiting: collections.deque[PrefillWork] = collections.deque()
        self.answered, self.tokens, self.longest_pause = 0, 0, 0.0
        # The answers to one prompt, or a document, with its prefill.
        self._reading: tuple[list[PrefillWork], Walk[KVCache]] | None = None
        self._ready: collections.deque[RequestWork] = collections.deque()
        self._running: dict[int, RequestWork] = {}
        # Seconds of a decode step, and the end of the last one.
        self._step_seconds, self._stepped = 0.0, time.monotonic()

    @property
    def running(self) -> int:
        """Number of slots with a request."""
        return len(self._running)

    @property
    def prefilling(self) -> int:
        """1 during the prefill of a prompt or a document, else 0."""
        return int(self._reading is not None)

    @property
    def ready(self) -> int:
        """Number of prefilled requests that wait for a slot."""
        return len(self._ready)

    @property
    def idle(self) -> bool:
        """True if nothing is to be done until another request arrives."""
        return not (self.waiting or self._reading or self._ready or self._running)

    @property
    def missed(self) -> tuple[bool, int] | None:
        """Padded length of the first request that waits for its programs to compile; None without one."""
        lengths = [each.length for each in list(self.waiting)]
        return next((each for each in lengths if each in self.slots.uncompiled), None)

    def step(self) -> bool:
        """Compute a layer of a prompt, or a block of tokens, or both; return False if nothing was to be done."""
        self._leave()
        self._enter()
        self._begin()
        if self._reading is not None:
            self._advance()
            # Layers alternate with decode steps, so that no request waits for a whole prefill; each gets half the time.
            # If nobody waits for tokens, slots are filled first: a step costs the same for few of them as for all.
            waited_for = any(not work.offline for work in self._running.values())
            if waited_for and time.monotonic() - self._stepped >= self._step_seconds:
                self._decode(1)
            return True
        if self._running:
            streamed = any(work.request.read for work in self._running.values())
            self._decode(1 if streamed else LOOK)
            return True
        return False

    def fail(self, error: BaseException) -> None:
        """End every request with an error, waiting or running, without using the device."""
        for work in self._all():
            work.fail(error)
        self.waiting.clear()
        self._ready.clear()
        self._running.clear()
        self._reading = None

    def _all(self) -> Iterator[PrefillWork]:
        """Yield every request that has not ended."""
        yield from list(self.waiting)
        if self._reading is not None:
            yield from self._reading[0]
        yield from list(self._ready)
        yield from list(self._running.values())

    def _leave(self) -> None:
        """End requests that were cancelled or have passed their deadline; free their slots."""
        gone = [work for work in self._all() if work.gone]
        if not gone:
            return
        for work in gone:
            work.fail(TimeoutError("the deadline passed before the answer was complete"))
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
        self.slots.release(free)
        for slot in free:
            del self._running[slot]

    def _enter(self) -> None:
        """Copy prefilled sequences into free slots, in order of arrival."""
        for slot in range(self.slots.count):
            if not self._ready:
                return
            if slot not in self._running:
                # The request leaves the queue only with its slot, so that an error finds it in one of them.
                work = self._ready[0]
                assert work.ready is not None
                self.slots.insert(work.ready, slot)
                self._running[slot], work.ready = self._ready.popleft(), None

    def _begin(self) -> None:
        """Start the prefill of the request that has waited longest, for a free slot or ahead.

        Requests whose programs are not compiled yet are skipped. Further answers to the same prompt share the cache,
        which is copied into the slot of each.
        """
        free = self.slots.count - len(self._running) + self.ahead
        if self._reading is not None or len(self._ready) >= free:
            return
        ready = [each for each in list(self.waiting) if each.length not in self.slots.uncompiled]
        if not ready:
            return
        # A policy with random numbers compresses the prompt with the key of each answer.
        if self.slots.session.policy.parts().uses_key:
            works = ready[:1]
        else:
            works = [each for each in ready if each.encoded is ready[0].encoded]
        for work in works:
            self.waiting.remove(work)
            work.begun = time.monotonic()
        self._reading = works, works[0].walk(self.slots, self.documents)

    def _advance(self) -> None:
        """Compute the next layer of the current prefill; a rejected prompt fails alone."""
        assert self._reading is not None
        (works, walk), begun = self._reading, time.monotonic()
        try:
            next(walk)
        except StopIteration as end:
            for work in works:
                self._prefilled(work, end.value)
            self._reading = None
        except _REFUSALS as error:
            self._reading = None
            for work in works:
                work.fail(error)
        for work in works:
            work.prefill_seconds += time.monotonic() - begun

    def _prefilled(self, work: PrefillWork, cache: KVCache) -> None:
        """Prepare a prefilled request for a slot, and sample its first token if none is free; or add a document."""
        if not isinstance(work, RequestWork):
            if claimed(work.future):
                try:
                    work.future.set_result(self.documents.add(cache, work.encoded.ids[0]))
                except _REFUSALS as error:
                    work.fail(error)
            return
        try:
            work.ready = self.slots.begin(
                cache, max_new_tokens=work.new, sampling=work.sampling, eos=work.eos, key=work.key
            )
        except _REFUSALS as error:
            work.fail(error)
            return
        work.kept = float(np.mean(cache.kept))
        if len(self._running) + len(self._ready) >= self.slots.count:
            # The slot samples the same token again.
            token = self.slots.peek(work.ready)
            work.take([token], time.monotonic())
            self.tokens, work.told = self.tokens + 1, True
            if work.ends_with(token):
                self._finish(work)
                return
        self._ready.append(work)

    def _decode(self, steps: int) -> None:
        """Sample up to `steps` tokens in every slot; complete requests and free their slots."""
        begun = time.monotonic()
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
                self.longest_pause = max(self.longest_pause, work.take(sampled, now))
                self.tokens += len(sampled)
            if self.slots.done[slot] or work.stopped:
                left.append(slot)
        if left:
            self.slots.release(left)
        # After the slots are freed: the reader of an answer may inspect the engine immediately.
        for work in [self._running.pop(slot) for slot in left]:
            self._finish(work)

    def _finish(self, work: RequestWork) -> None:
        """Count a request as answered and deliver its answer; an error in doing so fails this request alone."""
        self.answered += 1
        try:
            work.finish()
        except Exception as error:  # noqa: BLE001 - an error of one answer does not end the others
            work.fail(error)
