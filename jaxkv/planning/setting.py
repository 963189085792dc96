"""Input of a plan (`Workload`): model, policy, prompts, and devices."""

import functools
import re
from typing import Any

import jax.numpy as jnp
from jax.sharding import AbstractMesh

from jaxkv._checks import validate_field, validate_int
from jaxkv._dataclasses import frozen_dataclass
from jaxkv._errors import require
from jaxkv.attention import Implementation, choose_attention_implementations
from jaxkv.loading import validate_dtype
from jaxkv.models.config import ModelConfig
from jaxkv.models.values import check_weight_format
from jaxkv.planning.accelerators import Device
from jaxkv.policies.policy import Policy
from jaxkv.sharding.parameters import make_abstract_mesh

_TOKENS = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([km]?)", re.IGNORECASE)
_MANY = {"": 1, "k": 1 << 10, "m": 1 << 20}


def parse_token_count(given: Any, name: str = "context") -> Any:
    """Parse a number of tokens such as `131072`, `128K` (times 1024) or `1M`; return non-text unchanged."""
    if not isinstance(given, str):
        return given
    read = _TOKENS.fullmatch(re.sub("[_, ]", "", given[:20]))
    count = float(read[1]) * _MANY[read[2].lower()] if read else 0.5
    require(
        count.is_integer(), name, given, "not a number of tokens: use 131072 or 128K (K is 1024)"
    )
    return int(count)


@frozen_dataclass
class Workload:
    """Workload to plan: a model, a policy, devices, and `batch` prompts of `context` tokens with `new` tokens each.

    Each prompt is compressed once and answers `questions` requests, one after the other. The `gpus` devices of kind
    `gpu` form `data` groups; each group has the whole model and a share of the prompts.
    """

    model: str
    config: ModelConfig
    policy: Policy
    batch: int = 1
    context: int
    new: int = 256
    dtype: str = "bfloat16"
    weights: str | None = None
    questions: int = 1
    gpu: Device
    gpus: int = 1
    data: int = 1

    def __post_init__(self) -> None:
        for name in ("batch", "context", "questions", "gpus", "data"):
            validate_field(self, name, validate_int, "use 1 or more")
        validate_field(self, "new", validate_int, "use 0 tokens or more", least=0)
        object.__setattr__(self, "dtype", validate_dtype(self.dtype).name)
        object.__setattr__(self, "weights", check_weight_format(self.weights))
        limit = self.config.max_positions
        times = -(-self.context // limit)
        remedy = f"{self.model} has {limit} positions: use at most that many, or --rope-scaling yarn:{times}"
        require(self.context <= limit, "context", self.context, remedy)
        remedy = (
            f"it does not divide {self.gpus} GPUs into equal groups: use a divisor of {self.gpus}"
        )
        require(self.gpus % self.data == 0, "mesh.data", self.data, remedy)
        # Rejects a mesh that does not divide the model.
        _ = self.mesh

    @property
    def position_warning(self) -> str | None:
        """Warning text that some new tokens exceed the model's positions; None if all fit or positions roll."""
        limit = self.config.max_positions
        if self.context + self.new <= limit or self.policy.composed.rolling:
            return None
        beyond = min(self.new, self.context + self.new - limit)
        return f"the model has {limit:,} positions: {beyond:,} of {self.new:,} new tokens have none"

    @property
    def prefill_implementation(self) -> Implementation:
        """`Implementation` of attention in prefill: Pallas kernels on GPUs, elsewhere what AUTO chooses."""
        platform = self.gpu.platform
        dtype = jnp.dtype(self.dtype)
        if platform == "cuda":
            return Implementation.PALLAS
        dim = self.config.prompt_head_dim
        return choose_attention_implementations(
            Implementation.AUTO, platform=platform, dtype=dtype, head_dim=dim
        ).prefill

    @property
    def gpus_per_group(self) -> int:
        """Number of devices in a data-parallel group, over which the model is sharded."""
        return self.gpus // self.data

    @functools.cached_property
    def mesh(self) -> AbstractMesh:
        """`AbstractMesh` of all devices: axes "data" (prompts), "kv" (kv heads), "rep" (query heads of one kv head)."""
        return make_abstract_mesh(self.data, self.gpus_per_group, self.config)

    @property
    def local_config(self) -> ModelConfig:
        """`ModelConfig` of one device's shard of the model."""
        return self.config.shard_config(self.mesh.shape["kv"], self.gpus_per_group)

    @property
    def prompts_per_group(self) -> int:
        """Number of prompts per data-parallel group, rounded up; groups with one less get a copy of the last prompt."""
        return -(-self.batch // self.data)
