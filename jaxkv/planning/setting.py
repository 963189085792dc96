"""What is planned for: a model, a policy, prompts, and the GPUs that are to take them."""

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
from jax.sharding import AbstractMesh

from jaxkv._errors import require
from jaxkv._values import count, plain
from jaxkv.models.config import ModelConfig
from jaxkv.planning.gpus import GPU
from jaxkv.policies.policy import Method
from jaxkv.sharding.parameters import abstract_mesh

_DTYPES = ("bfloat16", "float16", "float32")


def _dtype_name(given: Any) -> str | None:
    """What a dtype is called, of whatever was given for it; None for what is none."""
    given = plain(given)
    try:
        return given if isinstance(given, str) else jnp.dtype(given).name
    except TypeError:  # no dtype at all
        return None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Asked:
    """What is to be done, wherever.

    Attributes:
        model: the model's name.
        config: its shape.
        policy: the compression, with all that it takes from the model.
        batch: prompts.
        context: tokens of each.
        new: tokens that are drawn after each.
        dtype: of weights, activations and cache.
    """

    model: str
    config: ModelConfig
    policy: Method
    batch: int = 1
    context: int
    new: int = 256
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        require(isinstance(self.policy, Method), "policy", self.policy, "give a policy such as SnapKV(budget=256)")
        require(isinstance(self.config, ModelConfig), "config", self.config, "give a ModelConfig")
        count(self, "batch", 1, "give 1 prompt or more")
        count(self, "context", 1, "every prompt needs at least one token")
        count(self, "new", 0, "give 0 tokens or more")
        name = _dtype_name(self.dtype)
        require(name in _DTYPES, "dtype", self.dtype, f"give one of {', '.join(_DTYPES)}")
        object.__setattr__(self, "dtype", name)
        limit = self.config.max_positions
        remedy = f"{self.model} was made for {limit} positions: give at most that many"
        require(self.context <= limit, "context", self.context, remedy)

    @property
    def beyond(self) -> str | None:
        """What is to be said of new tokens that the model has no positions for; None if there are none."""
        limit = self.config.max_positions
        if self.context + self.new <= limit or self.policy.parts().rolling:
            return None
        left = limit - self.context
        return f"the model was made for {limit:,} positions: of {self.new:,} new tokens, {left:,} have one"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting(Asked):
    """A question to plan: what is to be done, on which GPUs.

    Attributes:
        gpu: the kind of GPU.
        gpus: how many, all hosts together.
        data: groups that they form, each with the whole model and a part of the prompts.
    """

    gpu: GPU
    gpus: int = 1
    data: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        remedy = "give a GPU, of planning.gpus.gpu_named('h100') say"
        require(isinstance(self.gpu, GPU), "gpu", self.gpu, remedy)
        count(self, "gpus", 1, "give 1 GPU or more")
        count(self, "data", 1, "give 1 group or more")
        remedy = f"{self.gpus} GPUs are no such groups of equal size: give a divisor of {self.gpus}"
        require(self.gpus % self.data == 0, "mesh.data", self.data, remedy)
        # Refuses what does not divide the model.
        _ = self.mesh

    @property
    def hosts(self) -> int:
        """Machines that the GPUs are in."""
        return -(-self.gpus // self.gpu.per_host)

    @property
    def split(self) -> int:
        """GPUs of a group, over which the model is split."""
        return self.gpus // self.data

    @functools.cached_property
    def mesh(self) -> AbstractMesh:
        """As `sharding.model_mesh` would make it: "data", "kv" and "rep"."""
        return abstract_mesh(self.data, self.split, self.config)

    @property
    def local(self) -> ModelConfig:
        """What a GPU has of the model's shape."""
        return self.config.on_one_of(self.mesh.shape["kv"], self.split)

    @property
    def sequences(self) -> int:
        """Prompts of a group: copies of the last one fill those that are short of one."""
        return -(-self.batch // self.data)
