"""`answer_prompts`: answers any number of prompts, several at a time."""

import collections
import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
from jaxtyping import PRNGKeyArray

from jaxkv.engine.generation_results import Completion
from jaxkv.serving.compiling import PATIENCE
from jaxkv.serving.requests import QueueFull, Request
from jaxkv.text.prompts import Prompt


def answer_prompts(
    submit: Callable[..., Request],
    prompts: Iterable[Prompt],
    most: int,
    *,
    key: PRNGKeyArray | None,
    **options: Any,
) -> Iterator[Completion]:
    """Submit prompts, at most `most` in flight; yield each `Completion` in order; if stopped early, cancel the rest."""
    under_way: collections.deque[Request] = collections.deque()
    left = enumerate(prompts)
    try:
        while True:
            while len(under_way) < most and (item := next(left, None)) is not None:
                own = None if key is None else jax.random.fold_in(key, item[0])
                under_way.append(submit(item[1], **{"key": own, "offline": True, **options}))
            if not under_way:
                return
            yield under_way[0].result()
            under_way.popleft()
    finally:
        for request in under_way:
            request.cancel()


def make_waiting_submit(
    submit: Callable[..., Request], full: Callable[[], bool]
) -> Callable[..., Request]:
    """Return a function like `submit` that waits while the queue is full, instead of raising `QueueFull`."""

    def patiently(prompt: Prompt, **options: Any) -> Request:
        while True:
            while full():
                time.sleep(PATIENCE)
            # Another thread may have filled the queue.
            with contextlib.suppress(QueueFull):
                return submit(prompt, **options)

    return patiently
