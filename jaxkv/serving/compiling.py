"""`compile_rest`: compiles programs of further lengths beside a running engine."""

import time
import weakref
from collections.abc import Callable

from jaxkv.engine.slots import Slots
from jaxkv.machine import memory
from jaxkv.serving.scheduler import Scheduler

# Seconds between two looks: whether a queue has a place, a length is compiled, all engines rest.
PATIENCE = 0.02
# Schedulers of the process that compute, or whose first programs are compiled.
COMPUTING = weakref.WeakSet[Scheduler]()


def compile_rest(slots: Slots, scheduler: Scheduler, ended: Callable[[], bool]) -> None:
    """Body of a thread: compiles the lengths that requests wait for, and other prompts' while no engine computes.

    It ends when none is left, or between two programs once `ended`.
    """
    left = slots.uncompiled
    try:
        while left and not ended():
            length = scheduler.missed or left[0]
            if scheduler.missed is None and length[0]:
                # Programs of questions, which are the largest, wait for those who asks one.
                time.sleep(PATIENCE)
                continue
            for _ in slots.compiling(*length):
                while COMPUTING and not (scheduler.missed or ended()):
                    time.sleep(PATIENCE)
                if ended() or scheduler.missed not in (None, length):
                    # What is compiled of it stays compiled.
                    break
            else:
                left.remove(length)
                memory.trim()
    finally:
        # After an error those who has one of these lengths compiles it, and is told the error.
        left.clear()
