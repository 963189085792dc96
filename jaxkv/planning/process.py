"""The most memory that a process takes on this machine: what a CPU has no allocator of its own to say."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxkv.engine.growth import first_room
from jaxkv.engine.plan import plan_prefill
from jaxkv.models.config import ModelConfig
from jaxkv.models.decoder import Decoder
from jaxkv.policies.parts import Parts
from jaxkv.policies.policy import Method

# All of these are of `benchmarks/plan_memory.py`: resident bytes of fresh processes on Linux with JAX 0.10.2. They are
# constants, and not what the process at hand has, because that may hold anything: a notebook's arrays, other programs.
# Python with jax, flax and jaxkv imported, and JAX's backend started.
STARTED = 211_000_000
# A tokenizer of some 50,000 tokens, and its chat template.
TOKENIZER = 35_000_000
# What loading leaves with malloc, and code that it has brought in.
LEFT = 130_000_000
# Programs of a whole run, for each layer, read from the compilation cache: of policies whose steps append or choose
# what is read, and of those whose steps drop and merge rows. SmolLM2 has 30 layers.
_APPEND, _DROP = 3_400_000, 8_800_000
# XLA computes in float32 on a CPU: programs of 16 bits convert on the way, which makes them larger.
_NARROW = 1_700_000
# What the compiler takes on top of that where nothing was cached, for each layer likewise.
_COMPILE_APPEND, _COMPILE_DROP = 3_600_000, 11_500_000


@dataclasses.dataclass(frozen=True, kw_only=True)
class Process:
    """What a process takes that loads a model and generates with it, in bytes.

    Attributes:
        started: Python, JAX and the tokenizer, before any weights.
        weights: of the model.
        loading: what loading takes on top, while it goes on.
        left: what it leaves behind.
        cache: pools, with the room for new tokens, and tables.
        activations: what prefill computes with beside them.
        programs: compiled programs, read from the compilation cache.
        compiling: what the compiler takes in a first run, without one.
        waiting: rows that wait in host memory, which is this machine's.
    """

    started: int
    weights: int
    loading: int
    left: int
    cache: int
    activations: int
    programs: int
    compiling: int
    waiting: int

    @property
    def peak(self) -> int:
        """The most at once, of a run whose programs are in the compilation cache, as `jaxkv generate` keeps them."""
        running = self.left + self.cache + self.activations + self.programs + self.waiting
        return self.started + self.weights + max(self.loading, running)

    @property
    def first_peak(self) -> int:
        """The same of a run that compiles them."""
        return self.peak + self.compiling


def process_of(
    config: ModelConfig, policy: Method, *, batch: int = 1, context: int, new: int = 256, dtype: str = "float32"
) -> Process:
    """Predicts what a process of its own takes on a CPU.

    Args:
        config: the model's shape.
        policy: the compression, with all that it takes from the model.
        batch: prompts.
        context: tokens of each.
        new: tokens that are drawn after each.
        dtype: of weights, activations and cache.

    Returns:
        Its bytes.

    Raises:
        ValueError: if the budget cannot be honoured for such prompts.
    """
    parts, lengths = policy.parts(), np.full(batch, context)
    room = first_room(parts, config.layers, lengths, new) if new else 0
    planned = plan_prefill(config, policy, lengths.tolist(), dtype=dtype, room=room)
    narrow = jnp.dtype(dtype).itemsize < 4
    drops = _drops(parts)
    each = (_DROP if drops else _APPEND) + (_NARROW if narrow else 0)
    weights, largest = _weights(config, dtype)
    return Process(
        started=STARTED + TOKENIZER,
        weights=weights,
        # The largest tensor once as float32, as it is read, and once more as it is kept.
        loading=largest + largest * jnp.dtype(dtype).itemsize // 4,
        left=LEFT,
        cache=planned.cache_bytes,
        activations=planned.peak_bytes - planned.cache_bytes,
        programs=config.layers * each,
        compiling=config.layers * (_COMPILE_DROP if drops else _COMPILE_APPEND),
        waiting=planned.host_bytes,
    )


def _drops(parts: Parts) -> bool:
    return parts.ongoing is not None and parts.ongoing.evicts


def _weights(config: ModelConfig, dtype: str) -> tuple[int, int]:
    """Bytes of all parameters, and of the largest of them as float32."""
    decoder = Decoder(dataclasses.replace(config, layers=1), dtype=dtype)
    total, largest = 0, 0
    for path, leaf in jax.tree_util.tree_leaves_with_path(nnx.state(decoder, nnx.Param)):
        size = math.prod(leaf.shape)
        in_block = any(str(getattr(key, "key", "")) == "blocks" for key in path)
        total += size * (config.layers if in_block else 1)
        largest = max(largest, 4 * size)
    return total * jnp.dtype(dtype).itemsize, largest
