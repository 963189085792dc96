"""Number of slots that fit into free memory, and of prompts that are prefilled ahead of them."""

import jax
import numpy as np

from jaxkv import memory
from jaxkv._settings import settled
from jaxkv.engine.prefill_bytes import row_bytes
from jaxkv.engine.session import Session
from jaxkv.engine.slot_shape import slot_shape
from jaxkv.loading import LanguageModel

# Share of the free memory that slots may take; the rest is for documents and what XLA allocates.
_SHARE = 0.9
# Beyond this many, a decode step costs more than its batch gains on the devices that were modelled.
_MOST = 64


def ahead_of(slots: int) -> int:
    """Most prompts that are prefilled while all of `slots` slots are taken: a quarter of their number, at least 2."""
    return max(2, slots // 4)


@settled
def slots_that_fit(session: Session, *, max_prompt: int, max_new_tokens: int, max_question: int) -> int:
    """Number of slots that fit into nine tenths of the free memory beside one prefill; 64 at most.

    On a mesh a multiple of its groups. Raises MemoryError, naming the bytes, if not even one slot of each group fits.
    """
    params, parts = session.params, session.policy.parts()
    config, axes = params.config, params.axes
    groups, stretches = (1, 1) if axes is None else (axes.size("B"), axes.size("K"))
    shape = slot_shape(parts, config, prompt=max_prompt, question=max_question, new=max_new_tokens, stretches=stretches)
    device = device_of(params)
    # Devices of a CPU mesh share the machine's memory.
    together = 1 if axes is None else axes.in_one_memory
    each = sum(shape.rows) * row_bytes(config, parts, params.dtype.itemsize) * together
    prompt = session.planned(np.asarray([max_prompt]), 0)
    # A prompt that is prefilled ahead waits in the shape of a slot.
    beside = prompt.peak_bytes * together
    memory.check_bytes(beside + each * (1 + ahead_of(1)), "one slot, its queue and a prefill", device)
    fit = (int(_SHARE * memory.available_bytes(device)) - beside) // each
    most = max((count for count in range(1, _MOST // groups + 1) if count + ahead_of(count) <= fit), default=1)
    return most * groups


def device_of(params: LanguageModel) -> jax.Device:
    """A device that the model lies on."""
    return memory.default_device() if params.axes is None else params.axes.mesh.local_devices[0]
