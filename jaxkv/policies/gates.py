"""`Gate`, a trained model's scores of rows from hidden states: read from safetensors files, compared by content."""

import abc
import dataclasses
import hashlib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxkv._errors import refusal, require
from jaxkv._values import Value
from jaxkv.checkpoints import StoredTensor
from jaxkv.checkpoints.safetensors_files import read_header, tensors
from jaxkv.models.config import ModelConfig
from jaxkv.sharding.mesh import Axes, tree_placed
from jaxkv.sharding.record import recorder

Kind = TypeVar("Kind", bound="Gate")
# Name of the attribute that holds a gate's weights: no field, as programs are kept by a gate's fields.
_WEIGHTS = "_weights"


@dataclasses.dataclass(frozen=True)
class LayerTensors:
    """Stored tensors of one layer of a gate, by the ends of their names, and the beginning that these share.

    Attributes:
        beginning: what the tensors' names begin with.
        stored: the tensors.
        taken: ends of the names of those that were read.
    """

    beginning: str
    stored: Mapping[str, StoredTensor]
    taken: set[str] = dataclasses.field(default_factory=set)

    def take(self, name: str, *shape: int | None) -> Float[np.ndarray, "..."]:
        """Reads a tensor as float32; ValueError for a missing one, another shape (None: any size), numbers not finite.

        Args:
            name: the end of the tensor's name.
            *shape: the size of each axis, None for any.

        Returns:
            The tensor.
        """
        whole = self.beginning + name
        if name not in self.stored:
            raise ValueError(f"tensor {whole} is missing")
        self.taken.add(name)
        stored = self.stored[name]
        fits = len(stored.shape) == len(shape) and all(
            size and want in (None, size) for size, want in zip(stored.shape, shape, strict=True)
        )
        wanted = ", ".join("any" if each is None else str(each) for each in shape)
        if not fits:
            raise ValueError(f"tensor {whole} has the shape {list(stored.shape)}, not [{wanted}]")
        read = stored.read(())
        if not jnp.issubdtype(read.dtype, np.floating):
            raise ValueError(f"tensor {whole} is of {read.dtype}, not of floating-point numbers")
        # A number that float32 does not have becomes infinite, and is refused below.
        with np.errstate(over="ignore"):
            array = np.asarray(read, np.float32)
        if not np.isfinite(array).all():
            raise ValueError(f"tensor {whole} holds numbers that are not finite")
        return array

    def require_all_taken(self) -> None:
        """ValueError for a tensor that was not read: a gate without it would give other scores."""
        if left := sorted(set(self.stored) - self.taken):
            raise ValueError(f"tensor {self.beginning}{left[0]} belongs to no such gate")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gate(Value, abc.ABC):
    """Trained gate of one model: its sizes, and a digest of its weights, by which gates are compared.

    Weights are no fields: programs take them as arrays, and a saved cache has their digest alone.

    Attributes:
        digest: SHA-256 of the weights, in hexadecimal.
        layers: L.
        heads: K.
        embed: E.
    """

    # Pattern of the beginning of each tensor's name, with the layer's number.
    beginning: ClassVar[str]

    digest: str
    layers: int
    heads: int
    embed: int

    @classmethod
    def read(cls: type[Kind], name: str, given: Any) -> Kind:
        """Reads a gate from a safetensors file, or from a folder with `model.safetensors`; a gate is returned as it is.

        Args:
            name: the field, for error messages.
            given: the path, or a gate.

        Returns:
            The gate.

        Raises:
            TypeError: for anything else.
            ValueError: for a file that cannot be read or holds no such gate; tensors are named.
        """
        if isinstance(given, cls):
            return given
        if not isinstance(given, (str, os.PathLike)):
            raise TypeError(f"{name}={given!r}: give a safetensors file, or a {cls.__name__}")
        path = Path(given).expanduser()
        try:
            stored = tensors(path) if path.is_dir() else read_header(path)
            layers = cls._by_layer(stored)
            weights = tuple(cls.of_layer(each) for each in layers)
            for each in layers:
                each.require_all_taken()
            return cls.of_weights(weights)
        except (OSError, ValueError) as error:
            raise refusal(name, os.fspath(given), f"no gate of {cls.__name__} in it: {error}") from None

    @classmethod
    def of_weights(cls: type[Kind], weights: tuple[Any, ...]) -> Kind:
        """Makes a gate of each layer's weights, numpy arrays; ValueError if layers differ in shapes."""
        shapes = [[each.shape for each in jax.tree.leaves(layer)] for layer in weights]
        for layer, each in enumerate(shapes):
            require(each == shapes[0], f"layer {layer}", each, f"shapes of tensors differ from layer 0's, {shapes[0]}")
        told = hashlib.sha256(repr((cls.__name__, jax.tree.structure(weights), shapes)).encode())
        for leaf in jax.tree.leaves(weights):
            told.update(np.ascontiguousarray(leaf, np.float32).tobytes())
        heads, embed = cls.sizes(weights[0])
        gate = cls(digest=told.hexdigest(), layers=len(weights), heads=heads, embed=embed)
        object.__setattr__(gate, _WEIGHTS, weights)
        return gate

    @classmethod
    @abc.abstractmethod
    def of_layer(cls, found: LayerTensors) -> Any:
        """Weights of one layer: a registered dataclass of numpy arrays, annotated by axis letters."""

    @classmethod
    @abc.abstractmethod
    def sizes(cls, weights: Any) -> tuple[int, int]:
        """Number of kv heads and width of hidden states, K and E, of one layer's weights."""

    @abc.abstractmethod
    def scores(self, weights: Any, hidden: Float[Array, "B S E"]) -> Float[Array, "B K S"]:
        """Float32 scores of rows from one layer's weights and its normed hidden states; on a mesh of a device's heads.

        Args:
            weights: of the layer.
            hidden: hidden states that enter the layer's attention.

        Returns:
            The scores.
        """

    @classmethod
    def _by_layer(cls, stored: Mapping[str, StoredTensor]) -> list[LayerTensors]:
        """Stored tensors by layer; ValueError for names of another kind, and for layers left out."""
        layers: dict[int, dict[str, StoredTensor]] = {}
        for name, tensor in stored.items():
            match = re.match(cls.beginning, name)
            if match is None or match[1] != str(int(match[1])):
                raise ValueError(f"tensor {name} belongs to no such gate")
            layers.setdefault(int(match[1]), {})[name[match.end() :]] = tensor
        if sorted(layers) != list(range(len(layers))) or not layers:
            raise ValueError(f"tensors of the layers {sorted(layers)}, not of 0 and all that follow")
        begins = {int(match[1]): match[0] for match in (re.match(cls.beginning, name) for name in stored) if match}
        return [LayerTensors(begins[layer], layers[layer]) for layer in range(len(layers))]

    @property
    def weights(self) -> tuple[Any, ...]:
        """Weights of all layers, on the host; ValueError for a gate of a saved cache, which has its digest alone."""
        found = vars(self).get(_WEIGHTS)
        remedy = "its weights are in no saved cache: load the cache with policy=..., whose gate was read from its file"
        require(found is not None, "gate", self, remedy)
        assert found is not None
        return found

    def require_layers(self, layers: int) -> None:
        """ValueError unless the gate is of a model of so many layers."""
        self._require("layers", self.layers, layers)

    def require_fits(self, config: ModelConfig) -> None:
        """ValueError unless the gate is of a model of so many layers, kv heads and numbers in a hidden state."""
        self.require_layers(config.layers)
        self._require("kv heads", self.heads, config.kv_heads)
        self._require("numbers in a hidden state", self.embed, config.embed)

    def _require(self, what: str, own: int, of_model: int) -> None:
        """ValueError, naming both numbers, unless the gate's number of something is the model's."""
        remedy = f"the model has {of_model}: give a gate that was trained for this model"
        require(own == of_model, "gate", f"{type(self).__name__} of {own} {what}", remedy)

    @property
    def tree(self) -> Any:
        """Tree structure (`PyTreeDef`) of one layer's weights."""
        return jax.tree.structure(self.weights[0])

    def placed(self, layer: int, config: ModelConfig, axes: Axes | None, *, abstract: bool = False) -> Any:
        """One layer's weights as arrays on the default device, or on a mesh by their letters; kept for the next call.

        Abstract arrays while programs are recorded, or if asked for. ValueError for a gate of another model.
        """
        self.require_fits(config)
        weights = self.weights[layer]
        if abstract or recorder() is not None:
            weights = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.float32), weights)
            return weights if axes is None else tree_placed(weights, type(weights), axes)
        kept = vars(self).setdefault("_placed", {})
        if (layer, axes) not in kept:
            arrays = jax.tree.map(jnp.asarray, weights)
            kept[layer, axes] = arrays if axes is None else tree_placed(arrays, type(arrays), axes)
        return kept[layer, axes]

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_placed"}
