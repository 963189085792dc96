"""Peak memory of a process that loads a model and generates on this machine's CPU, from measured constants."""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np

from jaxkv.cache.stores import held_dtype
from jaxkv.engine.growth import first_room
from jaxkv.engine.plan import plan_prefill
from jaxkv.planning.setting import Request
from jaxkv.planning.sizes import CacheParts, cache_parts, parameters_of, widened_matrices

# Resident bytes of fresh processes on Linux with JAX 0.10.2, measured at 482f446. Constants, not a
# reading of this process, which may hold anything: a notebook's arrays, other programs.
# Python with jax, flax and jaxkv imported, and JAX's backend started.
STARTED = 211_000_000
# A tokenizer of some 50,000 tokens, and its chat template.
TOKENIZER = 35_000_000
# Memory that malloc keeps after loading, and code that loading imports.
LEFT = 130_000_000
# Programs of a whole run per layer, read from the compilation cache: for decode steps that append or select rows, and
# for steps that evict or merge rows. SmolLM2 has 30 layers.
_APPEND, _DROP = 3_400_000, 8_800_000
# XLA computes in float32 on a CPU: 16-bit programs convert, which makes them larger.
_NARROW = 1_700_000
# Memory of the compiler on top of that per layer, where nothing was cached.
_COMPILE_APPEND, _COMPILE_DROP = 3_600_000, 11_500_000


@dataclasses.dataclass(frozen=True, kw_only=True)
class Process:
    """Bytes of a process that loads a model and generates on a CPU: weights, cache, activations, compiled programs.

    Attributes:
        started: Python, JAX and the tokenizer, before any weights.
        weights: the parameters.
        loading: on top of the weights while they are loaded.
        left: left behind by loading.
        cache: pools with room for new tokens, and tables.
        activations: prefill's, beside the cache.
        programs: compiled programs, read from the compilation cache.
        compiling: on top of that in a first run, which compiles them.
        waiting: rows offloaded to host memory, which is this machine's.
        parts: what the cache is made of.
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
    parts: CacheParts

    @property
    def peak(self) -> int:
        """Peak bytes of a process that reads its programs from the compilation cache."""
        running = self.left + self.cache + self.activations + self.programs + self.waiting
        return self.started + self.weights + max(self.loading, running)

    @property
    def first_peak(self) -> int:
        """Peak bytes of a process in its first run, in which it compiles its programs."""
        return self.peak + self.compiling


def host_weights(request: Request) -> int:
    """Bytes of all parameters of a request's model, unsplit, in its dtype or narrow weights."""
    parameters = parameters_of(request.config, request.dtype, request.weights)
    return sum(each.copies * math.prod(each.shape) * each.itemsize for each in parameters)


def process_of(request: Request) -> Process:
    """`Process` (bytes by part) estimated for a request on a CPU; ValueError if the policy's budget cannot be kept."""
    config, policy, dtype = request.config, request.policy, request.dtype
    parts, lengths, item = (
        policy.parts(),
        np.full(request.batch, request.context),
        jnp.dtype(dtype).itemsize,
    )
    room = first_room(parts, config.windows, lengths, request.new) if request.new else 0
    held = held_dtype(dtype, "cpu")
    planned = plan_prefill(config, policy, lengths.tolist(), dtype=held, room=room)
    evicts = parts.ongoing is not None and parts.ongoing.evicts
    parameters = parameters_of(config, dtype, request.weights)
    largest = max(math.prod(each.shape) for each in parameters)
    # A CPU converts codes to the dtype, a matrix at a time.
    converted = item * max(widened_matrices(request))
    return Process(
        started=STARTED + TOKENIZER,
        weights=host_weights(request),
        # The largest tensor once in float32, as it is read, and once in the dtype in which it is kept.
        loading=(4 + item) * largest,
        left=LEFT,
        cache=planned.cache_bytes,
        activations=planned.peak_bytes - planned.cache_bytes + converted,
        programs=config.layers * ((_DROP if evicts else _APPEND) + (_NARROW if item < 4 else 0)),
        compiling=config.layers * (_COMPILE_DROP if evicts else _COMPILE_APPEND),
        waiting=planned.host_bytes,
        parts=cache_parts(request, planned),
    )
