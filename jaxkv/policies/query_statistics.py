"""`QueryStatistics`: means and mean norms of a model's queries before RoPE, by channel pair; their files."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
from jaxtyping import Float

from jaxkv._dataclasses import frozen_dataclass
from jaxkv._errors import build_value_error
from jaxkv.checkpoints import StoredTensor
from jaxkv.checkpoints.named_models import find_data_folder
from jaxkv.checkpoints.torch_files import read_torch_file
from jaxkv.models.config import ModelConfig
from jaxkv.policies.of_model import FileArrays, NamedTensors

_NAMES = ("q_mean_real", "q_mean_imag", "q_abs_mean")


@frozen_dataclass
class QueryStatistics(FileArrays):
    """Statistics of one model's queries before RoPE (TriAttention): arrays, sizes, and a digest for equality.

    A file has three tensors `[L, H, D/2]`: `q_mean_real` and `q_mean_imag`, the mean queries as complex numbers of
    channel pairs, in the order of RoPE's frequencies, and `q_abs_mean`, the mean norms of these pairs.

    Attributes:
        heads: H query heads.
        dim: D.
    """

    of_field = "statistics"
    wanted = "the statistics of your model, a safetensors file: jaxkv fit-tri makes one"

    dim: int

    @classmethod
    def load_from_file(cls, name: str, given: Any) -> "QueryStatistics":
        """Return statistics from a safetensors file, a published .pt file, or those shipped for a named model.

        Args:
            name: the field, for error messages.
            given: the path, the model's name, or an instance, which is returned.

        Returns:
            The statistics.

        Raises:
            TypeError: for anything else.
            ValueError: for a file that cannot be read or holds something else.
        """
        if isinstance(given, (str, Path)):
            given = str(given)
            if given.endswith(".pt"):
                return cls._read_published_file(name, given)
            shipped = find_data_folder() / "query_statistics" / f"{given}.safetensors"
            given = shipped if shipped.is_file() else given
        return super().load_from_file(name, given)

    @classmethod
    def create_from_tensors(cls, stored: Mapping[str, StoredTensor]) -> "QueryStatistics":
        """Create `QueryStatistics` from stored tensors by name; ValueError if one is missing or malformed."""
        tensors = NamedTensors("", dict(stored))
        # Stacked first: arrays of different shapes are rejected.
        parts = np.stack([tensors.pop_tensor(name, None, None, None) for name in _NAMES])
        return cls.create_from_array(np.concatenate(parts, axis=-1))

    @classmethod
    def create_from_array(cls, array: Float[np.ndarray, "L H W"]) -> "QueryStatistics":
        """Create `QueryStatistics` from the three tensors of a file, joined along the last axis."""
        layers, heads, width = array.shape
        return cls.create_from_arrays(
            array, repr(array.shape), layers=layers, heads=heads, dim=width // 3 * 2
        )

    @classmethod
    def _read_published_file(cls, name: str, path: str) -> "QueryStatistics":
        """Read a published .pt file; ValueError if it is another one, or damaged."""
        try:
            saved = read_torch_file(os.path.expanduser(path))["stats"]
            layers = len({key.split("_")[0] for key in saved})
            heads = len(saved) // layers
            keys = [f"layer{at // heads:02d}_head{at % heads:02d}" for at in range(len(saved))]
            rows = [np.concatenate([saved[key][of] for of in _NAMES]) for key in keys]
            return cls.create_from_array(np.asarray_chkfinite(rows).reshape(layers, heads, -1))
        except Exception as error:  # A damaged file fails in any way.
            remedy = f"no statistics of all heads in it ({error!r}): give {cls.wanted}"
            raise build_value_error(name, path, remedy) from None

    def encode_safetensors(self) -> bytes:
        """Return the bytes of a safetensors file of these statistics, which `load_from_file` reads."""
        parts = map(np.ascontiguousarray, np.split(self.host_arrays, 3, axis=-1))
        return safetensors.numpy.save(dict(zip(_NAMES, parts, strict=True)))

    def require_fits_model(self, config: ModelConfig) -> None:
        """Raise ValueError unless the statistics fit a model's layers, query heads and head dim, and have arrays."""
        assert len(self.host_arrays) == self.layers
        self.require_model_sizes(layers=config.layers, heads=config.heads, dim=config.head_dim)
