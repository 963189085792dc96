"""`Request`: the handle of one prompt submitted to an `Engine`, for threads and event loops."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from concurrent.futures import Future
from typing import Any, TypeVar

from jaxkv.engine.generation_results import Completion
from jaxkv.engine.prompt_scores import UNSCORED
from jaxkv.engine.sampling_extras import ScoredToken
from jaxkv.serving.stats import RequestStats
from jaxkv.text.answer_parsing import PLAIN, AnswerFormat
from jaxkv.text.tokenizer import ChatTokenizer

T = TypeVar("T")


async def await_future(future: Future[T]) -> T:
    """Await a future that another thread sets; return its result or raise its error, including its cancellation."""
    loop, ended = asyncio.get_running_loop(), asyncio.Event()

    def tell(_: object) -> None:
        # The loop may be closed already.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(ended.set)

    future.add_done_callback(tell)
    await ended.wait()
    return future.result()


def mark_future_running(future: Future[Any]) -> bool:
    """Mark a future as running and return True; return False if it was cancelled or has ended."""
    if future.done() and not future.cancelled():
        return False
    # Python 3.11 raises RuntimeError for a future whose cancellation was notified before.
    with contextlib.suppress(RuntimeError):
        return future.set_running_or_notify_cancel()
    return False


class QueueFull(RuntimeError):
    """Error of a request to an engine whose queue of waiting requests is full."""


class PromptTooLong(ValueError):
    """Error for a prompt, question or document that has more tokens than the engine accepts."""


class EngineClosed(RuntimeError):
    """Error of `Engine.submit` and `document` on a closed engine, or in a process forked from the engine's."""


class Request:
    """Handle of one submitted prompt: iterate over its text, or wait for its `Completion` with `result()`.

    Any number of threads may read it, each from the first piece on; `await request` and `async for` work too.

    ```python
    request = engine.submit("Why is the sky blue?", max_new_tokens=200)
    for piece in request:
        print(piece, end="")
    print(request.result().finish_reason, request.stats)
    ```

    Attributes:
        others: requests of the further answers to the same prompt.
        future: future of the `Completion`, for `concurrent.futures.wait` and `as_completed`; its `cancel` cancels it.
        format: markers of reasoning and tool calls in the text.
        stats: token counts and seconds of an answered request; None before, and if it failed or was cancelled.
        scored_tokens: the tokens so far with their log-probabilities; empty unless asked for.
        scorer: has the scored tokens of the prompt, once the request has ended.
        tokenizer: the model's tokenizer; None without one.
    """

    others: tuple["Request", ...] = ()
    format: AnswerFormat = PLAIN

    def __init__(self) -> None:
        """Create the handle of a waiting request."""
        self._pieces: list[str] = []
        self._changed = threading.Condition()
        self._listeners: list[Callable[[], object]] = []
        self._readers = 0
        self.stats: RequestStats | None = None
        self.scored_tokens: list[ScoredToken] = []
        self.scorer = UNSCORED
        self.tokenizer: ChatTokenizer | None = None
        self.future: Future[Completion] = Future()
        self.future.add_done_callback(lambda _: self._wake_readers())

    @property
    def done(self) -> bool:
        """True if the request has ended: it was answered, failed, or was cancelled."""
        return self.future.done()

    @property
    def cancelled(self) -> bool:
        """True if `cancel` was called before the request ended."""
        return self.future.cancelled()

    def result(self, timeout: float | int | None = None) -> Completion:
        """Wait for the answer and return its `Completion`; raise the request's error, or TimeoutError after `timeout`.

        Args:
            timeout: maximum time to wait in seconds; None for no limit.

        Returns:
            The text, token ids and finish reason of the answer.

        Raises:
            TimeoutError: if the answer is not complete after `timeout` seconds, or its `deadline` has passed.
            concurrent.futures.CancelledError: if the request was cancelled.
            ValueError: if the policy rejected the prompt, as `jaxkv.generate` would.
            RuntimeError: if the engine failed or was closed before the answer was complete.
        """
        return self.future.result(timeout)

    def cancel(self) -> None:
        """Cancel the request, unless it has ended: it leaves the queue, or its slot, at the engine's next step."""
        self.future.cancel()

    def __iter__(self) -> Iterator[str]:
        """Yield the text of the answer in pieces as they are sampled; raise what `result` raises."""
        at = 0
        with self._count_reader():
            while True:
                with self._changed:
                    while len(self._pieces) == at and not self.done:
                        self._changed.wait()
                    fresh, ended = self._pieces[at:], self.done
                yield from fresh
                at += len(fresh)
                if ended:
                    self.future.result()
                    return

    def __await__(self) -> Generator[Any, None, Completion]:
        """Await the answer in an event loop and return its `Completion`; raise what `result` raises."""
        return await_future(self.future).__await__()

    async def __aiter__(self) -> AsyncIterator[str]:
        """Yield the text of the answer in pieces in an event loop; raise what `result` raises."""
        loop, changed, at = asyncio.get_running_loop(), asyncio.Event(), 0

        def tell() -> None:
            # The loop may be closed already.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(changed.set)

        with self._count_reader():
            with self._changed:
                self._listeners.append(tell)
            try:
                while True:
                    with self._changed:
                        changed.clear()
                        fresh, ended = self._pieces[at:], self.done
                    for piece in fresh:
                        yield piece
                    at += len(fresh)
                    if ended:
                        self.future.result()
                        return
                    if not fresh:
                        await changed.wait()
            finally:
                with self._changed:
                    self._listeners.remove(tell)

    def __repr__(self) -> str:
        """One-line text: state of the request, and the length of its text in characters."""
        state = "under way"
        if self.cancelled:
            state = "cancelled"
        elif self.done:
            error = self.future.exception()
            state = "answered" if error is None else f"ended by {type(error).__name__}"
        return f"Request({state}, {sum(map(len, self._pieces))} characters)"

    @contextlib.contextmanager
    def _count_reader(self) -> Iterator[None]:
        """Context manager that counts one more reader of the answer's text, for `has_readers`, until its exit."""
        with self._changed:
            self._readers += 1
        try:
            yield
        finally:
            with self._changed:
                self._readers -= 1

    @property
    def has_readers(self) -> bool:
        """True while a thread or event loop iterates over the answer's text."""
        return self._readers > 0

    def append_text(self, piece: str) -> None:
        """Append a piece of text to the answer and wake all readers; for the engine only."""
        if piece:
            with self._changed:
                self._pieces.append(piece)
            self._wake_readers()

    def set_completion(self, completion: Completion, stats: RequestStats) -> None:
        """Complete the request, unless it has ended, with its answer and stats; wake readers. For the engine only."""
        if mark_future_running(self.future):
            self.stats = stats
            self.future.set_result(completion)

    def fail_with_error(self, error: BaseException) -> None:
        """End the request, unless it has ended, with an error that `result` and readers raise; for the engine only."""
        if mark_future_running(self.future):
            self.future.set_exception(error)

    def _wake_readers(self) -> None:
        """Wake all threads and event loops that wait for text or the end of the answer."""
        with self._changed:
            self._changed.notify_all()
            for listener in self._listeners:
                listener()
