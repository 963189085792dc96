"""Models on disk that are converted, and what is the same of two."""

from pathlib import Path

import numpy as np
from flax import nnx

ROOT = Path(__file__).parent.parent
MODELS = ROOT / "tests" / "golden" / "models"
SOURCE = MODELS / "llama_gqa"
NORM = "model.norm.weight"


def leaves(model):
    """Every parameter by its place."""
    flat = nnx.to_flat_state(nnx.state(model.decoder, nnx.Param))
    return {path: np.asarray(parameter.get_value()) for path, parameter in flat}


def assert_same(model, other):
    assert model.fingerprint == other.fingerprint and model.config == other.config
    mine, theirs = leaves(model), leaves(other)
    assert mine.keys() == theirs.keys()
    for path, value in mine.items():
        assert value.dtype == theirs[path].dtype
        np.testing.assert_array_equal(value, theirs[path], err_msg=str(path))
