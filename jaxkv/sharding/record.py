"""The programs that a walk over programs calls, and the bytes that lie beside each: from shapes, without running one.

The walk is traced as one outer program. A `Door` that is called meanwhile traces its program for the shapes it is
given, and stands in the outer program as one equation: which arrays lie on the device beside it follows from where
each is used last.
"""

import dataclasses
import math
import time
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr, Primitive, Var


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
    """One call of a program.

    Attributes:
        name: of the program's function.
        options: its arguments by name, which are static.
        arguments: shapes of its arrays, placed as the program takes them.
        results: shapes of what comes out of it, placed likewise.
        traced: the program, traced for these shapes; equal calls share it.
        seconds: that tracing it took.
        beside: bytes on one device that lie there while it runs and that it is not given.
    """

    name: str
    options: dict[str, Any]
    arguments: Any
    results: Any
    traced: Any
    seconds: float
    beside: int = 0


# What takes the calls of the walk that is being recorded in this thread.
_RECORDER: ContextVar["Recorder | None"] = ContextVar("recorder", default=None)
_called = Primitive("called")
_called.multiple_results = True
_called.def_abstract_eval(lambda *given, gives, sizes: list(gives))


def recorder() -> "Recorder | None":
    """The recorder that takes calls of programs now; None where programs are run."""
    return _RECORDER.get()


class Recorder:
    """Takes the calls of programs in place of a device, in order; equal calls are traced once."""

    def __init__(self, sharding: Any):
        """Begins with no calls; arrays of programs that run on no mesh lie where `sharding` says."""
        self.calls, self.resident = list[Call](), list[set[int]]()
        self._sharding, self._known = sharding, dict[Any, Call]()
        # Without them an equation whose results nothing uses would be left out.
        self._results = list[list[Any]]()

    def call(self, door: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Notes a call; gives traced arrays of the shapes that come out of it."""
        given, tree = jax.tree.flatten(args)
        shapes = [_shape(leaf) for leaf in given]
        known = door, tree, *shapes, *sorted(options.items(), key=lambda option: option[0])
        if known not in self._known:
            self._known[known] = self._traced(door, jax.tree.unflatten(tree, shapes), options)
        call = self._known[known]
        placed, (leaves, result) = jax.tree.leaves(call.arguments), jax.tree.flatten(call.results)
        # Shapes among the arguments are resident arrays.
        stays = [isinstance(leaf, jax.ShapeDtypeStruct) for leaf in given]
        arrays = [leaf for leaf, still in zip(given, stays, strict=True) if not still]
        lying = [leaf for leaf, still in zip(placed, stays, strict=True) if not still]
        self._results.append(
            _called.bind(
                *arrays,
                gives=tuple(jax.core.ShapedArray(leaf.shape, leaf.dtype) for leaf in leaves),
                sizes=tuple(weigh(leaf) for leaf in (*lying, *leaves)),
            )
        )
        self.calls.append(call)
        self.resident.append({id(leaf) for leaf, still in zip(given, stays, strict=True) if still})
        return jax.tree.unflatten(result, self._results[-1])

    def _traced(self, door: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Call:
        """A program traced for shapes; the programs within it are a part of it, and no calls."""
        token, began = _RECORDER.set(None), time.perf_counter()
        try:
            placed = door.arguments_placed(args, options, self._sharding)
            traced = door.trace(*placed, **options)
            results = door.results_placed(traced.out_info, options)
        finally:
            _RECORDER.reset(token)
        return Call(
            name=door.__name__,
            options=options,
            arguments=placed,
            results=results,
            traced=traced,
            seconds=time.perf_counter() - began,
        )


def record(walk: Callable[..., Any], *args: Any, resident: Any = (), sharding: Any = None) -> tuple[list[Call], Any]:
    """Traces a walk that calls programs, and notes each call.

    Args:
        walk: the function; what it returns lies on the device to its end.
        args: its arrays, as shapes.
        resident: arrays that lie there all the while, as shapes; the walk gives programs these very objects.
        sharding: where arrays lie if the programs run on no mesh; None for the default device.

    Returns:
        The calls in order, and the shapes of what the walk returns.
    """
    taking = Recorder(sharding)
    token = _RECORDER.set(taking)
    try:
        outer, out = jax.make_jaxpr(walk, return_shape=True)(*args)
    finally:
        _RECORDER.reset(token)
    always = {id(leaf): weigh(leaf) for leaf in jax.tree.leaves(resident)}
    calls = list[Call]()
    for call, given, more in zip(taking.calls, taking.resident, _beside(outer.jaxpr), strict=True):
        more += sum(size for leaf, size in always.items() if leaf not in given)
        calls.append(dataclasses.replace(call, beside=more))
    return calls, out


def weigh(tree: Any) -> int:
    """Bytes that one device has of arrays, or of shapes."""
    return sum(_bytes(leaf) for leaf in jax.tree.leaves(tree))


def _bytes(leaf: Any) -> int:
    """Bytes that one device has of an array, shape or abstract value."""
    sharding, shape = getattr(leaf, "sharding", None), tuple(leaf.shape)
    shape = sharding.shard_shape(shape) if isinstance(leaf, jax.ShapeDtypeStruct) and sharding is not None else shape
    item = 8 if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf.dtype.itemsize
    return math.prod(shape) * item


def _shape(leaf: Any) -> jax.ShapeDtypeStruct:
    """An argument of a program as a shape; resident ones are shapes, and say where they lie."""
    return leaf if isinstance(leaf, jax.ShapeDtypeStruct) else jax.ShapeDtypeStruct(np.shape(leaf), leaf.dtype)


def _beside(outer: Jaxpr) -> list[int]:
    """Bytes that lie on one device during each call: arrays made before and used later, its arguments left out."""
    steps, last, sizes = list(outer.eqns), dict[Any, int](), dict[Any, int]()
    for at, step in enumerate(steps):
        last |= {var: at for var in step.invars if isinstance(var, Var)}
        if step.primitive is _called:
            # What no program gives lies as the first program that takes it has it.
            for var, size in zip((*step.invars, *step.outvars), step.params["sizes"], strict=True):
                if isinstance(var, Var):
                    sizes.setdefault(var, size)
    last |= {var: len(steps) for var in outer.outvars if isinstance(var, Var)}
    there, found = {var for var in outer.invars if var in last}, list[int]()
    for at, step in enumerate(steps):
        if step.primitive is _called:
            found.append(sum(sizes.get(var) or _bytes(var.aval) for var in there if var not in step.invars))
        there |= {var for var in step.outvars if var in last}
        there -= {var for var in step.invars if isinstance(var, Var) and last[var] == at}
    return found
