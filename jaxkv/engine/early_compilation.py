"""Compilation of the token loop in a thread while the prompt is read.

The loop is the largest program of an answer, and its shapes follow from the plan of the prefill. JAX finds the compiled
program when the loop is first called, because both calls have equal arguments.
"""

import threading
import time

import jax

from jaxkv._checks import use_package_jax_settings
from jaxkv.engine.lengths import tokens_per_call
from jaxkv.engine.plan import PrefillPlan
from jaxkv.engine.sampling import Sampler, convert_sampler_to_pytree
from jaxkv.engine.session import Session
from jaxkv.engine.traced import trace_prefill, trace_token_loop
from jaxkv.machine.compilation import BACKEND_COMPILE


class LoopCompilation:
    """Compilation of the token loop for a planned prefill, in a thread of its own."""

    def __init__(
        self, session: Session, needed: PrefillPlan, *, new: int, sampling: Sampler, ends: int
    ):
        """Trace the loop for `new` tokens and `ends` end ids, and start to compile it."""
        flat, chosen = session.params.flat_decoder, session.implementations
        with use_package_jax_settings(), session.clocks.prefill:
            planned = trace_prefill(flat, session.policy, needed, implementation=chosen.prefill)
            traced = trace_token_loop(
                flat,
                planned.cache,
                implementation=chosen.decode,
                sampling=sampling,
                ends=ends,
                size=tokens_per_call(new),
            )
            # A failure to compile is raised again by the first call of the loop, in the caller's thread.
            self._thread = threading.Thread(
                target=traced.lower().compile, name="jaxkv-compile", daemon=True
            )
            self._thread.start()
        self._clock = session.clocks.decode

    def wait(self) -> None:
        """Wait until the loop is compiled; count the wait as compilation while decoding."""
        begun = time.perf_counter()
        with self._clock:
            self._thread.join()
            self._clock.add_compile_event(BACKEND_COMPILE, time.perf_counter() - begun)


def start_loop_compilation(
    session: Session, needed: PrefillPlan, *, new: int, sampling: Sampler, ends: int
) -> LoopCompilation | None:
    """Start to compile the token loop of a planned prefill; return None if shapes are unknown or the loop is known.

    The plan says all shapes on one device, unless scores set the sizes of pools or entries are offloaded.
    """
    flat = session.params.flat_decoder
    on_one_device = flat.axes is None
    if not (on_one_device and needed.has_fixed_shapes):
        return None
    shapes = needed.padded_len, needed.pools, needed.headroom, len(needed.budget)
    numbers = jax.tree.structure(convert_sampler_to_pytree(sampling))
    key = session.policy, session.implementations, shapes, numbers, ends, tokens_per_call(new)
    if key in flat.compiled_loops:
        return None
    flat.compiled_loops.add(key)
    return LoopCompilation(session, needed, new=new, sampling=sampling, ends=ends)
