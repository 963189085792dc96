"""Recording of program calls on abstract arrays, with the other bytes live during each call; nothing runs.

The caller's function is traced as one outer program. Each `ShardedProgram` that it calls traces its own program for the
abstract arrays and becomes one equation of the outer program. The last use of each array shows when it is live.
"""

import dataclasses
import math
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr, Primitive, Var

from jaxkv._dataclasses import frozen_dataclass


@frozen_dataclass
class RecordedCall:
    """Recorded call of a compiled program: abstract arguments and results, the traced program, and other live bytes.

    Attributes:
        name: name of the program's function.
        options: static arguments.
        arguments: abstract arrays with shardings.
        results: abstract results with shardings.
        traced: the traced program, shared by equal calls.
        beside: bytes of live arrays on one device that are not arguments.
    """

    name: str
    options: dict[str, Any]
    arguments: Any
    results: Any
    traced: Any
    beside: int = 0


# Recorder of this thread's current recording.
_RECORDER: ContextVar["ProgramRecorder | None"] = ContextVar("recorder", default=None)
_called = Primitive("called")
_called.multiple_results = True
_called.def_abstract_eval(lambda *given, gives, sizes: list(gives))


def get_active_recorder() -> "ProgramRecorder | None":
    """Return the `ProgramRecorder` that is active in this thread; None while programs run normally."""
    return _RECORDER.get()


class ProgramRecorder:
    """Recorder of program calls, in order, which are traced but not run; equal calls are traced once."""

    def __init__(self, sharding: Any):
        """Create an empty recorder; `sharding` is given to the arrays of programs that run without a mesh."""
        self.calls = list[RecordedCall]()
        self.resident = list[set[int]]()
        self._sharding = sharding
        self._known = dict[Any, RecordedCall]()
        # References keep equations with unused results from being dropped.
        self._results = list[list[Any]]()

    def record_program_call(
        self, program: Any, args: tuple[Any, ...], options: dict[str, Any]
    ) -> Any:
        """Trace and record a program call without running it; return tracers with the shapes of its results."""
        given, tree = jax.tree.flatten(args)
        shapes = [_make_abstract_array(leaf) for leaf in given]
        known = program, tree, *shapes, *sorted(options.items(), key=lambda option: option[0])
        if known not in self._known:
            self._known[known] = self._trace_program(
                program, jax.tree.unflatten(tree, shapes), options
            )
        call = self._known[known]
        placed = jax.tree.leaves(call.arguments)
        leaves, result = jax.tree.flatten(call.results)
        # Abstract arrays among the arguments are resident arrays.
        flags = [isinstance(leaf, jax.ShapeDtypeStruct) for leaf in given]
        arrays = [leaf for leaf, fixed in zip(given, flags, strict=True) if not fixed]
        bound = [leaf for leaf, fixed in zip(placed, flags, strict=True) if not fixed]
        self._results.append(
            _called.bind(
                *arrays,
                gives=tuple(jax.core.ShapedArray(leaf.shape, leaf.dtype) for leaf in leaves),
                sizes=tuple(count_device_bytes(leaf) for leaf in (*bound, *leaves)),
            )
        )
        self.calls.append(call)
        self.resident.append({id(leaf) for leaf, fixed in zip(given, flags, strict=True) if fixed})
        return jax.tree.unflatten(result, self._results[-1])

    def _trace_program(
        self, program: Any, args: tuple[Any, ...], options: dict[str, Any]
    ) -> RecordedCall:
        """Trace a program, with those called inside, for abstract arguments; return its `RecordedCall`."""
        token = _RECORDER.set(None)
        try:
            placed = program.shard_abstract_arguments(args, options, self._sharding)
            traced = program.trace(*placed, **options)
            results = program.shard_abstract_results(traced.out_info, options)
        finally:
            _RECORDER.reset(token)
        return RecordedCall(
            name=program.__name__,
            options=options,
            arguments=placed,
            results=results,
            traced=traced,
        )


def record_program_calls(
    walk: Callable[..., Any], *args: Any, resident: Any = (), sharding: Any = None
) -> tuple[list[RecordedCall], Any]:
    """Trace a function that calls programs; return its `RecordedCall` list with other live bytes, and abstract results.

    `args` are its abstract arrays; its results are live to its end. `resident` are abstract arrays that are always
    live; the function must pass these very objects. `sharding` is that of arrays without a mesh, None for the default
    device.
    """
    taking = ProgramRecorder(sharding)
    token = _RECORDER.set(taking)
    try:
        outer, out = jax.make_jaxpr(walk, return_shape=True)(*args)
    finally:
        _RECORDER.reset(token)
    always = {id(leaf): count_device_bytes(leaf) for leaf in jax.tree.leaves(resident)}
    calls = list[RecordedCall]()
    for call, given, more in zip(
        taking.calls, taking.resident, _list_other_live_bytes(outer.jaxpr), strict=True
    ):
        more += sum(size for leaf, size in always.items() if leaf not in given)
        calls.append(dataclasses.replace(call, beside=more))
    return calls, out


def count_device_bytes(tree: Any) -> int:
    """Return bytes of a tree's arrays: abstract ones with a sharding by one device's shard, others whole."""
    return sum(_count_array_bytes(leaf) for leaf in jax.tree.leaves(tree))


def _count_array_bytes(leaf: Any) -> int:
    """Return the bytes of an array; for an abstract array with a sharding, those of one device's shard."""
    sharding = getattr(leaf, "sharding", None)
    shape = tuple(leaf.shape)
    shape = (
        sharding.shard_shape(shape)
        if isinstance(leaf, jax.ShapeDtypeStruct) and sharding is not None
        else shape
    )
    item = 8 if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf.dtype.itemsize
    return math.prod(shape) * item


def _make_abstract_array(leaf: Any) -> jax.ShapeDtypeStruct:
    """Return an array's or tracer's `ShapeDtypeStruct`, without sharding; abstract arrays unchanged."""
    return (
        leaf
        if isinstance(leaf, jax.ShapeDtypeStruct)
        else jax.ShapeDtypeStruct(np.shape(leaf), leaf.dtype)
    )


def _list_other_live_bytes(outer: Jaxpr) -> list[int]:
    """Return, per recorded call of a traced function, bytes on a device of live arrays not passed to it."""
    steps = list(outer.eqns)
    last = dict[Any, int]()
    sizes = dict[Any, int]()
    for at, step in enumerate(steps):
        last |= {var: at for var in step.invars if isinstance(var, Var)}
        if step.primitive is _called:
            # An array that no program returns has the size that the first program reading it sees.
            for var, size in zip((*step.invars, *step.outvars), step.params["sizes"], strict=True):
                if isinstance(var, Var):
                    sizes.setdefault(var, size)
    last |= {var: len(steps) for var in outer.outvars if isinstance(var, Var)}
    live = {var for var in outer.invars if var in last}
    found = list[int]()
    for at, step in enumerate(steps):
        if step.primitive is _called:
            found.append(
                sum(
                    sizes.get(var) or _count_array_bytes(var.aval)
                    for var in live
                    if var not in step.invars
                )
            )
        live |= {var for var in step.outvars if var in last}
        live -= {var for var in step.invars if isinstance(var, Var) and last[var] == at}
    return found
