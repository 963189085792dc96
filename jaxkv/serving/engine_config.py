"""`EngineConfig`: configuration of an engine, in values that can be sent to another process or machine."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from jaxkv._dataclasses import frozen_dataclass
from jaxkv.loading import load
from jaxkv.machine.compilation import enable_compilation_cache
from jaxkv.serving.engine import Engine
from jaxkv.sharding.mesh_argument import make_mesh_from_text, parse_mesh_sizes


@frozen_dataclass
class EngineConfig:
    """Model name, dtype, weights, mesh as text and other arguments of an `Engine`, to be sent to another process.

    Attributes:
        model: name or folder of the model, as in `jaxkv.load`.
        dtype: dtype of activations, caches and, without `weights`, of weights; None for the device's default.
        weights: "int8" or "int4" to quantise the linear maps, as in `jaxkv.load`.
        mesh: devices by data and model, such as "1x8"; None for one device.
        options: other arguments of `Engine`.
    """

    model: str
    dtype: str | None = None
    weights: str | None = None
    mesh: str | None = None
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def device_count(self) -> int:
        """Number of devices that the engine runs on: product of the sizes in `mesh`, text such as 1x8; 1 for None."""
        return 1 if self.mesh is None else math.prod(parse_mesh_sizes(self.mesh, "mesh"))

    def create_engine(self) -> Engine:
        """Enable the compile cache, load the model, return its started `Engine`; ValueError without a tokenizer."""
        mesh = make_mesh_from_text(self.mesh, name="mesh")
        enable_compilation_cache()
        params = load(self.model, dtype=self.dtype, weights=self.weights)
        _ = params.tokenizer  # answers are texts
        return Engine(params, mesh=mesh, **self.options)
