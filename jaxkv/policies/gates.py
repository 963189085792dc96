"""`Gate`, a trained model that scores entries from hidden states; read from safetensors files, compared by content."""

import abc
import re
from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar

import jax
from jaxtyping import Array, Float

from jaxkv._dataclasses import frozen_dataclass
from jaxkv._errors import require
from jaxkv.checkpoints import StoredTensor
from jaxkv.policies.of_model import FileArrays, NamedTensors

Kind = TypeVar("Kind", bound="Gate")


@frozen_dataclass
class Gate(FileArrays):
    """Base of trained gates, which score entries from hidden states: sizes L, K, E, each layer's weights, and a digest.

    Compiled programs receive the weights as arguments.

    Attributes:
        embed: E.
    """

    of_field = "gate"
    wanted = "the gate of your model, a safetensors file or its folder: jaxkv fit-gate trains one"
    # Pattern of the prefix of tensor names, with the layer's number.
    beginning: ClassVar[str]

    embed: int

    @classmethod
    def create_from_tensors(cls: type[Kind], stored: Mapping[str, StoredTensor]) -> Kind:
        """Create a gate from stored tensors by name; ValueError for tensors that are missing, left over or unfit."""
        layers = cls._group_tensors_by_layer(stored)
        weights = tuple(cls.read_layer_weights(each) for each in layers)
        for each in layers:
            each.require_none_left()
        return cls.create_from_weights(weights)

    @classmethod
    def create_from_weights(cls: type[Kind], weights: tuple[Any, ...]) -> Kind:
        """Create a gate from layers' weights, dataclasses of numpy arrays; ValueError if layers differ in shape."""
        shapes = [[each.shape for each in jax.tree.leaves(layer)] for layer in weights]
        for layer, each in enumerate(shapes):
            require(
                each == shapes[0],
                f"layer {layer}",
                each,
                f"shapes of tensors differ from layer 0's, {shapes[0]}",
            )
        heads, embed = cls.infer_gate_sizes(weights[0])
        heading = repr((cls.__name__, jax.tree.structure(weights), shapes))
        return cls.create_from_arrays(
            weights, heading, layers=len(weights), heads=heads, embed=embed
        )

    @classmethod
    @abc.abstractmethod
    def read_layer_weights(cls, found: NamedTensors) -> Any:
        """Pop a layer's gate weights, a dataclass of arrays, from `NamedTensors`; subclasses implement it."""

    @classmethod
    @abc.abstractmethod
    def infer_gate_sizes(cls, weights: Any) -> tuple[int, int]:
        """Return the pair of kv heads K and hidden-state width E of one layer's weights; subclasses implement it."""

    @abc.abstractmethod
    def score_hidden_states(
        self, weights: Any, hidden: Float[Array, "B S E"]
    ) -> Float[Array, "B K S"]:
        """Score entries, float32 `[B, K, S]`, by a layer's gate and hidden states; subclasses implement it.

        Args:
            weights: the layer's weights.
            hidden: `[B, S, E]` hidden states that enter the layer's attention.

        Returns:
            The scores; on a mesh, those of the device's kv heads.
        """

    @classmethod
    def _group_tensors_by_layer(cls, stored: Mapping[str, StoredTensor]) -> list[NamedTensors]:
        """Return a list of each layer's `NamedTensors`, bottom first; ValueError for other names or missing layers."""
        layers: dict[int, NamedTensors] = {}
        for name, tensor in stored.items():
            match = re.match(cls.beginning, name)
            if match is None or match[1] != str(int(match[1])):
                raise ValueError(f"tensor {name} belongs to no such gate")
            layers.setdefault(int(match[1]), NamedTensors(match[0], {})).stored[
                name[match.end() :]
            ] = tensor
        if sorted(layers) != list(range(len(layers))) or not layers:
            raise ValueError(
                f"tensors of the layers {sorted(layers)}, not of 0 and all that follow"
            )
        return [layers[layer] for layer in range(len(layers))]

    @property
    def host_weights(self) -> tuple[Any, ...]:
        """Tuple of each layer's weights, on the host; ValueError if the gate of a loaded cache has only its digest."""
        return self.host_arrays

    @property
    def weights_treedef(self) -> Any:
        """Tree structure (`PyTreeDef`) of the gate's weights for one layer."""
        return jax.tree.structure(self.host_weights[0])
