"""Thread that compiles programs while the engine runs: of further padded lengths, batches, sampling with extras."""

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


def compile_remaining_programs(
    slots: Slots, scheduler: Scheduler, ended: Callable[[], bool]
) -> None:
    """Thread body: compile programs that are wanted, or, while no engine computes, those of other prompts.

    Ends when none is left, or between two programs once `ended` returns True. An error is left in `uncompiled`: the
    requests that need these programs get it.
    """
    # Without stored conversations, programs of questions compile only for a waiting request.
    kinds = {"prompt"} if scheduler.prefixes is None else {"prompt", "question"}
    while slots.uncompiled and not ended():
        idle = (
            each
            for each, error in list(slots.uncompiled.items())
            if error is None and each.kind in kinds
        )
        programs = scheduler.first_wanted_programs or next(idle, None)
        if programs is None:
            time.sleep(PATIENCE)
            continue
        try:
            for _ in slots.compile_further_programs(programs):
                while COMPUTING and not (scheduler.first_wanted_programs or ended()):
                    time.sleep(PATIENCE)
                if ended() or scheduler.first_wanted_programs not in (None, programs):
                    # Programs compiled so far remain cached.
                    break
            else:
                memory.release_freed_memory()
        except Exception as error:  # noqa: BLE001 - only the requests that need these programs fail
            slots.uncompiled[programs] = error
