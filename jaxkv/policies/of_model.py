"""Values of one model: `ModelSpecificValue` rejects models of other sizes, `FileArrays` come from a file."""

import abc
import dataclasses
import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from jaxkv._dataclasses import frozen_dataclass
from jaxkv._errors import build_value_error, require
from jaxkv.checkpoints import StoredTensor
from jaxkv.checkpoints.safetensors_files import read_folder_headers, read_safetensors_header
from jaxkv.models.config import ModelConfig

Kind = TypeVar("Kind", bound="FileArrays")


class ModelSpecificValue:
    """Base of values that fit one model only, checked by its sizes (`layers`, `heads`, `embed`, `dim`).

    Subclasses set `of_field`, the policy's field that holds the value, and `wanted`, the value to give.
    """

    of_field: ClassVar[str]
    wanted: ClassVar[str]

    def accepts_model_size(self, name: str, size: int) -> bool:
        """Return True if the value's size of this name fits a model's `size`: by default, if both are equal."""
        return getattr(self, name) == size

    def require_model_sizes(self, **of_model: int) -> None:
        """Raise ValueError unless the value fits the named model sizes (`layers=32`); sizes it lacks are ignored."""
        for name, size in of_model.items():
            if hasattr(self, name):
                own = getattr(self, name)
                remedy = f"the model has {size}: give {self.wanted}"
                require(self.accepts_model_size(name, size), self.of_field, f"{name}={own}", remedy)

    def require_fits_model(self, config: ModelConfig) -> None:
        """Raise ValueError unless the value fits a model's layers, kv heads, hidden and head dimensions."""
        self.require_model_sizes(
            layers=config.layers, heads=config.kv_heads, embed=config.embed, dim=config.head_dim
        )


@frozen_dataclass
class FileArrays(ModelSpecificValue, abc.ABC):
    """Base of one model's arrays from safetensors files; equal if layers, kv heads and the arrays' digest are.

    The arrays are not a field: compiled programs are cached by a policy's fields, and saved caches hold the digest.

    Attributes:
        digest: SHA-256 of the arrays, in hexadecimal.
        layers: L.
        heads: K.
    """

    digest: str
    layers: int
    heads: int
    # Not a field, but `dataclasses.replace` passes it to copies.
    held: dataclasses.InitVar[Any] = None

    def __post_init__(self, held: Any) -> None:
        object.__setattr__(self, "held", held)

    @classmethod
    def load_from_file(cls: type[Kind], name: str, given: Any) -> Kind:
        """Return this class's gate or filters, read from a safetensors file or folder; an instance unchanged.

        Args:
            name: the field, for error messages.
            given: the path, or an instance.

        Returns:
            The instance.

        Raises:
            TypeError: for anything else.
            ValueError: for a file that cannot be read or holds other tensors, which are named.
        """
        if isinstance(given, cls):
            return given
        if not isinstance(given, (str, os.PathLike)):
            raise TypeError(f"{name}={given!r}: give {cls.wanted}")
        path = Path(os.path.expanduser(given))
        try:
            return cls.create_from_tensors(
                read_folder_headers(path) if path.is_dir() else read_safetensors_header(path)
            )
        except (OSError, ValueError) as error:
            raise build_value_error(
                name, os.fspath(given), f"no {cls.__name__} in it: {error}: give {cls.wanted}"
            ) from None

    @classmethod
    @abc.abstractmethod
    def create_from_tensors(cls: type[Kind], stored: Mapping[str, StoredTensor]) -> Kind:
        """Create gate or filters from stored tensors by name; ValueError if unfit; subclasses implement it."""

    @classmethod
    def create_from_arrays(cls: type[Kind], arrays: Any, heading: str, **sizes: int) -> Kind:
        """Create gate or filters from a pytree of arrays, whose SHA-256, with `heading`, is the digest."""
        sha = hashlib.sha256(heading.encode())
        for leaf in jax.tree.leaves(arrays):
            sha.update(np.ascontiguousarray(leaf, np.float32).tobytes())
        return cls(digest=sha.hexdigest(), held=arrays, **sizes)

    @property
    def host_arrays(self) -> Any:
        """Pytree of a gate's or filters' host arrays; ValueError if a loaded cache has only the digest."""
        held = vars(self)["held"]
        remedy = "a digest without arrays, as in a saved cache: load it with policy=..., created from their file"
        require(held is not None, self.of_field, self, remedy)
        return held


def require_value(value: Kind | None, kind: type[Any]) -> Kind:
    """Return a gate or filters unchanged; ValueError, which says what file to give, if the value is None."""
    require(value is not None, kind.of_field, None, f"give {kind.wanted}")
    assert value is not None
    return value


@dataclasses.dataclass(frozen=True)
class NamedTensors:
    """Stored tensors, not read yet, in a dict by name without the common prefix; and that prefix.

    Attributes:
        beginning: the common prefix.
        stored: the tensors that have not been read yet.
    """

    beginning: str
    stored: dict[str, StoredTensor]

    def pop_tensor(self, name: str, *shape: int | None) -> Float[np.ndarray, "..."]:
        """Read a tensor as float32 and remove it; ValueError if it is missing, misshapen, or not finite floats.

        Args:
            name: the suffix of the tensor's name.
            *shape: the size of each axis, None for any.

        Returns:
            The tensor.
        """
        whole = self.beginning + name
        stored = self.stored.pop(name, None)
        if stored is None:
            raise ValueError(f"tensor {whole} is missing")
        fits = len(stored.shape) == len(shape) and all(
            size and want in (None, size) for size, want in zip(stored.shape, shape, strict=True)
        )
        wanted = ", ".join("any" if each is None else str(each) for each in shape)
        if not fits:
            raise ValueError(f"tensor {whole} has the shape {list(stored.shape)}, not [{wanted}]")
        read = stored.read(())
        if not jnp.issubdtype(read.dtype, np.floating):
            raise ValueError(f"tensor {whole} is of {read.dtype}, not of floating-point numbers")
        # Numbers beyond float32 become infinite, and are rejected below.
        with np.errstate(over="ignore"):
            array = np.asarray(read, np.float32)
        if not np.isfinite(array).all():
            raise ValueError(f"tensor {whole} holds numbers that are not finite")
        return array

    def require_none_left(self) -> None:
        """Raise ValueError, which names one, if stored tensors are left that `pop_tensor` has not read."""
        if self.stored:
            raise ValueError(f"tensor {self.beginning}{min(self.stored)} belongs to no such gate")
