"""Files of `torch.save` with containers and float32 vectors, read without torch; nothing else is made or run."""

import pickle
import zipfile
from typing import Any

import numpy as np


def _make_vector(numbers: Any, start: int, size: Any, stride: Any, *_: Any) -> np.ndarray:
    """Return a vector of the numbers of a file's storage; ValueError for tensors of other ranks."""
    (count,) = size
    (step,) = stride
    return numbers[start : start + count * step : step]


# What the names in a pickle stand for here. Other names are rejected.
_KNOWN = {"_rebuild_tensor_v2": _make_vector, "OrderedDict": dict, "FloatStorage": "<f4"}


class _VectorUnpickler(pickle.Unpickler):
    """Unpickler of containers, text, numbers, and vectors whose numbers are members of an archive."""

    archive: zipfile.ZipFile
    folder: str

    def find_class(self, module: str, name: str) -> Any:
        """Return what stands for a name of the pickle; KeyError for unknown names."""
        return _KNOWN[name]

    def persistent_load(self, pid: Any) -> Any:
        """Return the numbers that the pickle names by `("storage", dtype, key, device, count)`."""
        return np.frombuffer(self.archive.read(f"{self.folder}/{pid[2]}"), pid[1])


def read_torch_file(path: str) -> Any:
    """Return the dicts, lists, text, numbers and vectors of a file of `torch.save`; any exception for other files."""
    with zipfile.ZipFile(path) as archive:
        name = archive.namelist()[0]
        reader = _VectorUnpickler(archive.open(name))
        reader.archive = archive
        reader.folder = name.removesuffix(".pkl")
        return reader.load()
