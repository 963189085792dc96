"""Compilation of the token loop in a thread while the prompt is read.

The loop is the largest program of an answer, and its shapes follow from the plan of the prefill. JAX finds the compiled
program when the loop is first called, because both calls have equal arguments.
"""

import contextlib
import threading
import time

import jax

from jaxkv._checks import use_package_jax_settings
from jaxkv.engine.lengths import tokens_per_call
from jaxkv.engine.plan import PrefillPlan
from jaxkv.engine.sampling import Sampler, convert_sampler_to_pytree, needs_extras
from jaxkv.engine.session import Session
from jaxkv.engine.spec import runs_in_layer_groups
from jaxkv.engine.traced import trace_prefill, trace_token_loop
from jaxkv.machine.compilation import StageClock


class LoopCompilation:
    """Compilation of the token loop for a planned prefill, in a thread that the constructor starts."""

    def __init__(
        self, session: Session, needed: PrefillPlan, *, new: int, sampling: Sampler, ends: int
    ):
        """Start a thread that compiles the token loop for `new` tokens and a number `ends` of end ids."""
        self._session = session
        self._needed = needed
        self._sampling = sampling
        self._new = new
        self._ends = ends
        self._clock = StageClock()
        self._thread = threading.Thread(target=self._compile, name="jaxkv-compile")
        self._thread.start()

    def _compile(self) -> None:
        """Trace the prefill and the loop on abstract arrays, and compile the loop; the thread's target."""
        session = self._session
        flat = session.params.flat_decoder
        chosen = session.implementations
        with use_package_jax_settings(), self._clock, contextlib.suppress(Exception):
            # The first call of the loop raises what fails here, in the caller's thread.
            planned = trace_prefill(
                flat, session.policy, self._needed, implementation=chosen.prefill
            )
            traced = trace_token_loop(
                flat,
                planned.cache,
                implementation=chosen.decode,
                sampling=self._sampling,
                ends=self._ends,
                size=tokens_per_call(self._new),
            )
            traced.lower().compile()

    def wait(self) -> None:
        """Wait until the loop is compiled; count its programs, and the wait as compile seconds, in the decode clock."""
        begun = time.perf_counter()
        clock = self._session.clocks.decode
        with clock:
            self._thread.join()
            clock.add_waiting(time.perf_counter() - begun, self._clock.programs)


def start_loop_compilation(
    session: Session, needed: PrefillPlan, *, new: int, sampling: Sampler, ends: int
) -> LoopCompilation | None:
    """Start and return a planned prefill's `LoopCompilation`; None if no loop runs or its shapes are unknown.

    The plan says all shapes on one device, unless scores set the sizes of pools or entries are offloaded. Short answers
    that run in groups of layers have no loop; an earlier call may have compiled it.
    The loop with extras is compiled later.
    """
    flat = session.params.flat_decoder
    parts = session.policy.composed
    grouped = runs_in_layer_groups(flat, parts, session.implementations.decode, new)
    plain = flat.axes is None and not needs_extras(sampling)
    if not plain or not needed.has_fixed_shapes or grouped:
        return None
    shapes = needed.padded_len, needed.pools, needed.headroom, len(needed.budget)
    numbers = jax.tree.structure(convert_sampler_to_pytree(sampling))
    key = session.policy, session.implementations, shapes, numbers, ends, tokens_per_call(new)
    if key in flat.compiled_loops:
        return None
    flat.compiled_loops.add(key)
    return LoopCompilation(session, needed, new=new, sampling=sampling, ends=ends)
