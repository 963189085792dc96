"""A decoder as jitted code takes it: flat tuples of parameter arrays, and static graphs that rebuild its modules."""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Shaped

from jaxkv.models.decoder import Decoder, EmbeddingAndHead
from jaxkv.models.decoder_blocks import DecoderBlock
from jaxkv.models.values import LayerSpec
from jaxkv.sharding.mesh import ShardingMesh

# Parameters of a block, or of the ends, as a flat tuple, which is 8x cheaper to pass to jitted functions than a module.
Leaves = tuple[Shaped[Array, "..."], ...]


def walk_module_parts(
    module: nnx.Module,
) -> Iterator[tuple[dict[str, Any], str, nnx.Module | nnx.Param]]:
    """Yield (owner's attributes, name, part) of each nested module and parameter, a module before its parts."""
    held = vars(module)
    for name, part in held.items():
        if isinstance(part, (nnx.Param, nnx.Module)):
            yield held, name, part
        if isinstance(part, nnx.Module):
            yield from walk_module_parts(part)


class SplitDecoder:
    """Decoder split for jitted code: parameter arrays as flat tuples, and static graphs to rebuild its modules.

    Attributes:
        ends: parameters of embedding, final norm and output matrix.
        blocks: one tuple of parameters per block; those of layers with equal specs have the same structure.
        graphs: graph definitions of the ends and of the blocks, passed as static arguments.
        config: the decoder's config.
        axes: axes of the parameters' mesh, or None.
        on_mesh: the language model with these parameters on a mesh, by the mesh's axes.
        gates: gate weights of policies on the parameters' devices, by gate and layer, in order of last use.
        compiled_loops: keys of the token loops that `start_loop_compilation` has compiled.
    """

    def __init__(self, decoder: Decoder):
        self.config = decoder.config
        self.on_mesh: dict[ShardingMesh, Any] = {}
        self.gates: dict[Any, dict[int, Any]] = {}
        self.compiled_loops: set[Any] = set()
        self._decoder = decoder
        self._parts = tuple(walk_module_parts(decoder))
        self._source = tuple(
            (part, part.get_raw_value()) for *_, part in self._parts if isinstance(part, nnx.Param)
        )
        ends_graph, ends = nnx.split(EmbeddingAndHead(decoder))
        self.ends: Leaves = tuple(jax.tree.leaves(ends))
        parts = [nnx.split(block) for block in decoder.blocks]
        self.blocks: tuple[Leaves, ...] = tuple(tuple(jax.tree.leaves(state)) for _, state in parts)
        self.axes = ShardingMesh.get_array_mesh(self.ends[0])
        of_blocks = {
            block.spec: ModuleGraph(graph, jax.tree.structure(state))
            for block, (graph, state) in zip(decoder.blocks, parts, strict=True)
        }
        self.graphs = DecoderGraphs(
            of_ends=ModuleGraph(ends_graph, jax.tree.structure(ends)),
            of_blocks=tuple(of_blocks.items()),
            axes=self.axes,
            spec=self.config.get_layer_spec(0),
        )

    @property
    def mesh(self) -> Mesh | None:
        """Mesh on which the decoder's parameters are sharded; None on one device."""
        return None if self.axes is None else self.axes.mesh

    def get_layer_graphs(self, layer: int) -> "DecoderGraphs":
        """Return the `DecoderGraphs` with a layer's spec, static for compiled functions; equal for equal specs."""
        return self.graphs.replace_layer_spec(self.config.get_layer_spec(layer))

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """Pickle and copy a `SplitDecoder` as None, so that a copied model splits its own arrays."""
        return type(None), ()

    def replace_arrays(self, ends: Leaves, blocks: tuple[Leaves, ...]) -> "SplitDecoder":
        """Return a copy of the `SplitDecoder` with other arrays `ends` and `blocks`, such as traced ones."""
        other = object.__new__(SplitDecoder)
        vars(other).update(vars(self), ends=ends, blocks=blocks)
        return other

    def is_split_of(self, decoder: Decoder) -> bool:
        """True if `decoder` still has the modules and arrays of this split; False after any was replaced."""
        # A server calls this at every step: it only does lookups, and does not walk through the modules.
        same = decoder is self._decoder and all(
            held.get(name) is part for held, name, part in self._parts
        )
        return same and all(parameter.get_raw_value() is array for parameter, array in self._source)


@dataclasses.dataclass(frozen=True, repr=False)
class ModuleGraph:
    """Static, hashable part of a split `nnx` module: its graph definition and its parameters' tree structure."""

    definition: Any
    structure: Any

    def __hash__(self) -> int:
        """Return the hash, computed once: programs are looked up by it at every call."""
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        """Hash of the fields."""
        return hash((self.definition, self.structure))

    def rebuild_module(self, leaves: Leaves) -> Any:
        """Rebuild the `nnx` module from this graph, with the arrays `leaves` as its parameters."""
        return nnx.merge(self.definition, jax.tree.unflatten(self.structure, leaves))


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class DecoderGraphs:
    """Static graphs of a decoder's ends and blocks, with mesh axes and one layer's `LayerSpec`.

    Attributes:
        of_ends: graph of the ends.
        of_blocks: pairs of each distinct `LayerSpec` and the graph of its blocks.
        axes: mesh axes of the parameters; None on one device.
        spec: `LayerSpec` of the layer whose block is rebuilt.
    """

    of_ends: ModuleGraph
    of_blocks: tuple[tuple[LayerSpec, ModuleGraph], ...]
    axes: ShardingMesh | None
    spec: LayerSpec

    def replace_layer_spec(self, spec: LayerSpec) -> "DecoderGraphs":
        """Return a copy of the `DecoderGraphs` for a layer with another `LayerSpec`."""
        return dataclasses.replace(self, spec=spec)

    def rebuild_embedding_and_head(self, leaves: Leaves) -> EmbeddingAndHead:
        """Rebuild the module of embedding, final norm and output matrix, with the arrays `leaves` as its parameters."""
        bound = self.of_ends.rebuild_module(leaves)
        bound.axes = self.axes
        return bound

    def rebuild_block(self, leaves: Leaves) -> DecoderBlock:
        """Rebuild a `DecoderBlock` with the arrays `leaves` as its parameters; on a mesh, with one device's config."""
        bound = dict(self.of_blocks)[self.spec].rebuild_module(leaves)
        if self.axes is not None:
            local = bound.config.get_device_config(self.axes)
            for block in (bound, *bound.below):
                block.axes, block.config = self.axes, local
        return bound
