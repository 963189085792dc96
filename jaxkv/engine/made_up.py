"""`made_up`: prefills a prompt that only compiles programs."""

import copy

import numpy as np

from jaxkv.cache import KVCache
from jaxkv.engine.compress import Walk
from jaxkv.engine.session import Session
from jaxkv.engine.slot_shape import FEW, SlotShape
from jaxkv.machine.compilation import Clocks


def made_up(session: Session, shape: SlotShape, size: int) -> Walk[KVCache]:
    """Generator: prefills a made-up prompt of padded length `size`, few tokens unless the policy refuses that.

    Returns its cache in pools of a slot; ValueError if the policy refuses all prompts of this length.
    """
    # Clocks belong to one thread.
    session = copy.copy(session)
    session.clocks = Clocks()
    longest = min(size, shape.prompt)
    planned = session.planned(np.asarray([longest]), 0).in_pools(shape.rows)
    try:
        few = min(longest, FEW)
        session.planned(np.asarray([few]), 0)
    except ValueError:
        few = longest
    return (yield from session.prefilling([0] * few, needed=planned))
