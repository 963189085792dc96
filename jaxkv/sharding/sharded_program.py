"""`sharded_jit`, which all compiled programs use: `jax.jit`, and on a mesh `jax.shard_map` by logical axes.

Inside a program on a mesh every array is one device's shard, and the code is that of one device.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from jaxkv.sharding.logical_axes import find_logical_axes, require_logical_axes, resolve_annotations
from jaxkv.sharding.mesh import (
    ShardingMesh,
    build_partition_spec,
    is_inside_shard_map,
    place_leaf_on_mesh,
    place_tree_on_mesh,
)
from jaxkv.sharding.record import get_active_recorder


class ShardedProgram:
    """Compiled function: `jax.jit`, on a mesh with `jax.shard_map`; arrays are sharded by annotated logical axes.

    Placement follows from the logical axes in the annotations of the function and of its dataclass arguments and
    results. Arrays annotated "...", such as parameters, keep their placement.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        static: tuple[str, ...],
        donate: tuple[str, ...],
        on: str,
        compiler: dict[str, str],
    ):
        self._fn = fn
        self._static = static
        self._given = donate
        self._on = on
        self._signature = inspect.signature(fn)
        self._nested: Any = jax.jit(fn, static_argnames=static) if compiler else None
        self._plain: Any = jax.jit(
            fn, static_argnames=static, donate_argnames=donate, compiler_options=compiler
        )
        run = functools.wraps(self._run_on_mesh)(
            lambda *args, **options: self._run_on_mesh(*args, **options)
        )
        # Profiles show the same name as without a mesh.
        run.__name__ = fn.__name__
        statics = ("axes", "ins", "statics")
        self._split: Any = jax.jit(
            run, static_argnames=statics, donate_argnames=("given",), compiler_options=compiler
        )
        functools.update_wrapper(self, fn)

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Run the program and return its results; while a recorder is active, record the call and run nothing."""
        noting = get_active_recorder()
        if noting is not None:
            return noting.record_program_call(self, args, options)
        axes = self._get_call_mesh(options)
        if axes is None or is_inside_shard_map():
            traced = self._nested and any(
                isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(args)
            )
            return (self._nested if traced else self._plain)(*args, **options)
        given, rest, static = self._bind_arguments(axes, args, options)
        return self._split(given, rest, **static)

    def flatten_call_for_export(
        self, *args: Any, **options: Any
    ) -> tuple[Callable[..., Any], list[tuple[Any, str | None, Any]], int]:
        """Return a call for export: function of flat arrays, list (path, logical axes, array), donated array count."""
        axes = self._get_call_mesh(options)
        hints = resolve_annotations(self._fn)
        *sides, static = self._bind_arguments(None, args, options)
        paths, tree = jax.tree_util.tree_flatten_with_path(sides)
        arrays = []
        for (side, name, *rest), leaf in paths:
            value = sides[side.idx][name.key]
            logical_axes = find_logical_axes(value, hints.get(name.key), tuple(rest))
            placed = leaf if axes is None else place_leaf_on_mesh(leaf, logical_axes, axes)
            arrays.append(((name, *rest), logical_axes, placed))
        static |= {"axes": axes, "ins": tuple(leaf.sharding.spec for *_, leaf in arrays if axes)}

        def run(*flat):
            given, rest = jax.tree.unflatten(tree, flat)
            if axes is None:
                return self._fn(**given, **rest, **dict(static["statics"]))
            return self._run_on_mesh(given, rest, **static)

        return run, arrays, len(jax.tree.leaves(sides[0]))

    def shard_abstract_arguments(
        self, args: tuple[Any, ...], options: dict[str, Any], sharding: Any
    ) -> tuple[Any, ...]:
        """Return a tuple of abstract arguments with shardings by logical axes; without a mesh, with `sharding`."""
        axes = self._get_call_mesh(options)
        hints = resolve_annotations(self._fn)
        if axes is None:
            return jax.tree.map(
                lambda leaf: leaf if sharding is None else leaf.update(sharding=sharding), args
            )
        named = self._signature.bind_partial(*args).arguments
        return tuple(
            place_tree_on_mesh(value, hints.get(name), axes) for name, value in named.items()
        )

    def shard_abstract_results(self, out: Any, options: dict[str, Any]) -> Any:
        """Return a trace's results as abstract arrays, on a mesh with shardings by their logical axes."""
        axes = self._get_call_mesh(options)
        out = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), out)
        return (
            out
            if axes is None
            else place_tree_on_mesh(out, resolve_annotations(self._fn)["return"], axes)
        )

    def trace(self, *args: Any, **options: Any) -> Any:
        """Trace the program for concrete or abstract arrays, also for absent devices; return `jax.stages.Traced`."""
        axes = self._get_call_mesh(options)
        if axes is None:
            return self._plain.trace(*args, **options)
        given, rest, static = self._bind_arguments(axes, args, options)
        return self._split.trace(given, rest, **static)

    def clear_cache(self) -> None:
        """Delete the program's compiled executables, so that the next call compiles again."""
        self._plain.clear_cache()
        self._split.clear_cache()

    def _get_call_mesh(self, options: dict[str, Any]) -> ShardingMesh | None:
        """Return a call's `ShardingMesh`, `axes` of the static argument that `on` names; None without a mesh."""
        carrier = options.get(self._on)
        return None if carrier is None else carrier.axes

    def _bind_arguments(
        self, axes: ShardingMesh | None, args: Any, options: Any
    ) -> tuple[dict[str, Any], ...]:
        """Return three dicts: donated arrays and other arrays, both placed on `axes`; mesh, specs, statics."""
        bound = self._signature.bind(*args, **options)
        bound.apply_defaults()
        hints = resolve_annotations(self._fn)
        statics = []
        given = dict[str, Any]()
        rest = dict[str, Any]()
        for name, value in bound.arguments.items():
            if name in self._static:
                statics.append((name, value))
                continue
            side = given if name in self._given else rest
            side[name] = value if axes is None else place_tree_on_mesh(value, hints.get(name), axes)
        ins = tuple(leaf.sharding.spec for leaf in jax.tree.leaves((given, rest)) if axes)
        return given, rest, {"axes": axes, "ins": ins, "statics": tuple(statics)}

    def _run_on_mesh(
        self,
        given: dict[str, Any],
        rest: dict[str, Any],
        *,
        axes: ShardingMesh,
        ins: tuple[P, ...],
        statics: tuple[Any, ...],
    ) -> Any:
        """Run the function over a mesh by `jax.shard_map`; return its results as global arrays."""
        leaves, tree = jax.tree.flatten((given, rest))
        found: dict[str, Any] = {}

        def run_on_local_shards(*mine: Array) -> list[Array]:
            """Run the function on one device's shards; return flat results, and record their tree and specs."""
            donated, others = jax.tree.unflatten(tree, mine)
            out = self._fn(**donated, **others, **dict(statics))
            flat, found["tree"] = jax.tree_util.tree_flatten_with_path(out)
            hint = resolve_annotations(self._fn)["return"]
            found["outs"] = [
                build_partition_spec(
                    require_logical_axes(find_logical_axes(out, hint, path), leaf), axes.mesh
                )
                for path, leaf in flat
            ]
            return [leaf for _, leaf in flat]

        split = functools.partial(
            jax.shard_map, run_on_local_shards, mesh=axes.mesh, in_specs=ins, check_vma=False
        )
        # The output specs are known only after the function is traced.
        jax.eval_shape(split(out_specs=P()), *leaves)
        return jax.tree.unflatten(found["tree"], split(out_specs=found["outs"])(*leaves))


def sharded_jit(
    *,
    static: tuple[str, ...] = (),
    donate: tuple[str, ...] = (),
    on: str = "axes",
    compiler: dict[str, str] | None = None,
) -> Callable[[Callable[..., Any]], ShardedProgram]:
    """Return a decorator that makes a function a `ShardedProgram`, compiled for one device or for a mesh.

    `static` and `donate` name arguments. `on` names the static keyword argument that carries the `ShardingMesh` to run
    on, or None. `compiler` holds XLA options for all devices.
    """
    return lambda fn: ShardedProgram(fn, static, donate, on, compiler or {})
