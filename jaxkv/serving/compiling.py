"""Threads that compile programs while the engine runs: of further padded lengths, and of sampling with extras."""

import time
import weakref
from collections.abc import Callable

from jaxkv.engine.slots import Slots
from jaxkv.machine import memory
from jaxkv.serving.scheduler import Scheduler

# Seconds between two polls: of a full queue, a length that compiles, engines that compute.
PATIENCE = 0.02
# Schedulers of the process that compute, or whose first programs compile.
COMPUTING = weakref.WeakSet[Scheduler]()


def compile_remaining_lengths(
    slots: Slots, scheduler: Scheduler, ended: Callable[[], bool]
) -> None:
    """Thread body: compile programs of lengths requested, or, while no engine computes, other prompt lengths.

    Ends when no length is left, or between two programs once `ended` returns True.
    """
    left = slots.uncompiled
    try:
        while left and not ended():
            length = scheduler.first_uncompiled_length or left[0]
            if (
                scheduler.first_uncompiled_length is None
                and length[0]
                and scheduler.prefixes is None
            ):
                # Without stored conversations, programs of questions compile only for a waiting request.
                time.sleep(PATIENCE)
                continue
            for _ in slots.compile_padded_length(*length):
                while COMPUTING and not (scheduler.first_uncompiled_length or ended()):
                    time.sleep(PATIENCE)
                if ended() or scheduler.first_uncompiled_length not in (None, length):
                    # Programs compiled so far remain cached.
                    break
            else:
                left.remove(length)
                memory.release_freed_memory()
    finally:
        # After an error, a request of such a length compiles its own programs and gets the error.
        left.clear()


def compile_slot_extras(slots: Slots) -> None:
    """Thread body: compile the programs of the first request with penalties, biases or log-probabilities."""
    try:
        slots.compile_extras()
    finally:
        # After an error, the request compiles its own programs and gets the error.
        slots.extras_compiled = True
