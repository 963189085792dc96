"""Inputs of a plan: model, policy and prompts (`Request`) on GPUs (`Setting`) or here (`HostSetting`)."""

import dataclasses
import functools
import re
from typing import Any

import jax.numpy as jnp
from jax.sharding import AbstractMesh

from jaxkv._checks import field, whole
from jaxkv._errors import require
from jaxkv._values import plain
from jaxkv.attention import Implementation, choose
from jaxkv.models.config import ModelConfig
from jaxkv.models.values import as_weights
from jaxkv.planning.accelerators import Accelerator
from jaxkv.policies.policy import Method
from jaxkv.sharding.parameters import abstract_mesh

_DTYPES = ("bfloat16", "float16", "float32")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Asked:
    """Arguments of `jaxkv.plan` on policy, prompts and dtypes, as users give them."""

    policy: Any
    context: int | str
    batch: int
    new: int
    dtype: Any
    weights: Any
    questions: int = 1


_TOKENS = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([km])?", re.IGNORECASE)
_MANY = {"k": 1 << 10, "m": 1 << 20}


def tokens_of(given: Any, name: str = "context") -> Any:
    """Number of tokens of text such as `131072`, `128K` (times 1024) or `1M`, else ValueError; non-text unchanged."""
    if not isinstance(given, str):
        return given
    read = (
        _TOKENS.fullmatch(given.strip().replace("_", "").replace(",", ""))
        if len(given) < 20
        else None
    )
    remedy = "give a number of tokens, such as 131072 or 128K (K is 1024)"
    require(read is not None, name, given, remedy)
    assert read is not None
    count = float(read[1]) * _MANY.get((read[2] or "").lower(), 1)
    require(count == int(count), name, given, remedy)
    return int(count)


def as_dtype(given: Any) -> str:
    """Validates a dtype that a model may have, and returns its name; ValueError for others."""
    name = _dtype_name(given)
    require(name in _DTYPES, "dtype", given, f"give one of {', '.join(_DTYPES)}")
    return str(name)


def _dtype_name(given: Any) -> str | None:
    """Name of a dtype given as numpy or JAX type; text is returned unchanged, None for anything else."""
    given = plain(given)
    try:
        return given if isinstance(given, str) else jnp.dtype(given).name
    except TypeError:
        return None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """Generation to plan for: a model, a policy, `batch` prompts of `context` tokens, and `new` tokens of an answer.

    Each prompt is compressed once and answers `questions` requests, one after the other.
    """

    model: str
    config: ModelConfig
    policy: Method
    batch: int = 1
    context: int
    new: int = 256
    dtype: str = "bfloat16"
    weights: str | None = None
    questions: int = 1

    def __post_init__(self) -> None:
        require(
            isinstance(self.policy, Method),
            "policy",
            self.policy,
            "give a policy such as SnapKV(budget=256)",
        )
        require(isinstance(self.config, ModelConfig), "config", self.config, "give a ModelConfig")
        field(self, "batch", whole, "give 1 prompt or more")
        field(self, "context", whole, "every prompt needs at least one token")
        field(self, "new", whole, "give 0 tokens or more", least=0)
        field(self, "questions", whole, "give how many a prompt answers, 1 or more")
        object.__setattr__(self, "dtype", as_dtype(self.dtype))
        object.__setattr__(self, "weights", as_weights(self.weights))
        limit = self.config.max_positions
        times = -(-self.context // limit)
        remedy = f"{self.model} was made for {limit} positions: give at most that many, or --rope-scaling yarn:{times}"
        require(self.context <= limit, "context", self.context, remedy)

    @property
    def local(self) -> ModelConfig:
        """`ModelConfig` of the part of the model that one device holds: here all of it."""
        return self.config

    @property
    def sequences(self) -> int:
        """Number of prompts that one device computes: here all of them."""
        return self.batch

    @property
    def beyond(self) -> str | None:
        """Text that warns that some new tokens exceed the model's positions; None if all fit."""
        limit = self.config.max_positions
        if self.context + self.new <= limit or self.policy.parts().rolling:
            return None
        left, most = limit - self.context, limit - self.new
        remedy = f"all have one behind a context of at most {most:,}"
        remedy = remedy if most > 0 else f"no context leaves room for more than {limit - 1:,}"
        return f"the model was made for {limit:,} positions: {left:,} of {self.new:,} new tokens have one; {remedy}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostSetting(Request):
    """A `Request` on this machine's CPU; `memory` is the machine's free bytes, None if unknown."""

    memory: int | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting(Request):
    """A `Request` on `gpus` GPUs or TPUs of a kind in `data` groups; each has the whole model and some prompts."""

    gpu: Accelerator
    gpus: int = 1
    data: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        remedy = "give a GPU or TPU, of planning.named.accelerator_named('h100') say"
        require(isinstance(self.gpu, Accelerator), "gpu", self.gpu, remedy)
        field(self, "gpus", whole, "give 1 GPU or more")
        field(self, "data", whole, "give 1 group or more")
        remedy = f"{self.gpus} GPUs are no such groups of equal size: give a divisor of {self.gpus}"
        require(self.gpus % self.data == 0, "mesh.data", self.data, remedy)
        # Refuses a split that does not divide the model.
        _ = self.mesh

    @property
    def memory(self) -> int:
        """Bytes of memory of one GPU, by its data sheet."""
        return self.gpu.memory

    @property
    def implementation(self) -> Implementation:
        """`Implementation` of attention in prefill that is planned for: jaxkv's kernels on GPUs, AUTO's on TPUs."""
        if self.gpu.platform == "cuda":
            return Implementation.PALLAS
        dtype, dim = jnp.dtype(self.dtype), self.config.head_dim
        return choose(
            Implementation.AUTO, platform=self.gpu.platform, dtype=dtype, head_dim=dim
        ).prefill

    @property
    def hosts(self) -> int:
        """Number of machines that hold the GPUs, rounded up."""
        return -(-self.gpus // self.gpu.per_host)

    @property
    def split(self) -> int:
        """Number of GPUs in a data-parallel group, over which the model is split."""
        return self.gpus // self.data

    @functools.cached_property
    def mesh(self) -> AbstractMesh:
        """`AbstractMesh` of the GPUs: axes "data" (prompts), "kv" (kv heads) and "rep" (a kv head's query heads)."""
        return abstract_mesh(self.data, self.split, self.config)

    @property
    def local(self) -> ModelConfig:
        """`ModelConfig` of the part of the model that one GPU holds."""
        return self.config.on_one_of(self.mesh.shape["kv"], self.split)

    @property
    def sequences(self) -> int:
        """Number of prompts per data-parallel group, rounded up; groups with one less get a copy of the last."""
        return -(-self.batch // self.data)
