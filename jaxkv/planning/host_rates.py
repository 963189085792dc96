"""Rates of this machine's CPU, measured in some seconds: FLOP/s of products and attention, bytes/s of reading."""

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxkv.attention import Implementation, backend_of, causal, column_sums
from jaxkv.attention.xla import Walk
from jaxkv.models.config import ModelConfig
from jaxkv.models.layers import project
from jaxkv.models.stored import Stored

# Tokens that a CPU's prefill takes through a layer at a time, and keys that attention is measured with.
_BLOCK, _KEYS = 256, 1024
# Repetitions of each measurement, of which the median counts; and seconds that one repetition should take.
_REPEATS, _SECONDS = 7, 0.02
# Bytes of the arrays that are read: more than the caches of a CPU hold.
_READ = 1 << 27
# Widths beyond these change no rate, only the memory that measuring takes.
_MOST_EMBED, _MOST_HIDDEN, _MOST_BATCH = 2048, 8192, 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostRates:
    """Measured rates of this machine's CPU: FLOP/s of products, attention and its sums; bytes/s of weights and rows.

    Attributes:
        products: matrix products of prefill, FLOP/s.
        attention: causal attention of prefill, FLOP/s.
        sums: sums of the attention that keys receive, FLOP/s.
        weights: bytes/s of weights that a decode step multiplies by.
        rows: bytes/s of cache rows that a decode step attends to.
    """

    products: float
    attention: float
    sums: float
    weights: float
    rows: float


def host_rates(config: ModelConfig, dtype: str, batch: int) -> HostRates:
    """Measures this machine's `HostRates` for a model's shape, dtype and batch; each rate cached in this process."""
    embed, hidden = min(_MOST_EMBED, config.embed), min(_MOST_HIDDEN, config.hidden)
    heads, batch = (
        (config.kv_heads, config.group, config.head_dim),
        min(_MOST_BATCH, 1 << (batch - 1).bit_length()),
    )
    return HostRates(
        products=_products(embed, hidden, dtype),
        attention=_attention(*heads, dtype),
        sums=_sums(*heads, dtype),
        weights=_weights(embed, hidden, batch, dtype),
        rows=_rows(*heads, batch, dtype),
    )


def forget() -> None:
    """Clears the caches of measured rates, so that the next plan measures this machine again; returns None."""
    for each in (_products, _attention, _sums, _weights, _rows):
        each.cache_clear()


def _filled(dtype: str, *shape: int) -> jax.Array:
    """Array of a dtype and a shape, every element 0.01."""
    return jnp.full(shape, 0.01, dtype)


@functools.cache
def _products(embed: int, hidden: int, dtype: str) -> float:
    """Measures FLOP/s of the MLP of 256 tokens (two products to `hidden`, one back); cached."""

    def once(x: Any, up: Any, down: Any) -> Any:
        """Timed step: one MLP's output added to its input, which is then the next step's input."""
        gate, wide = jnp.moveaxis(project(x, Stored(up)), 1, 0)
        return x + project(jax.nn.silu(gate) * wide, Stored(down))

    weights = _filled(dtype, 2, hidden, embed), _filled(dtype, embed, hidden)
    return 6 * _BLOCK * embed * hidden / _seconds(once, _filled(dtype, _BLOCK, embed), *weights)


@functools.cache
def _attention(heads: int, group: int, dim: int, dtype: str) -> float:
    """Measures FLOP/s of causal attention of the last 256 tokens of a text of 1,024; cached."""

    def once(q: Any, k: Any) -> Any:
        """Timed step: causal attention's output, the next step's queries."""
        return causal(q, k, k, jnp.int32(_KEYS - _BLOCK))[0]

    arrays = _filled(dtype, heads, group, _BLOCK, dim), _filled(dtype, heads, _KEYS, dim)
    return 4 * _pairs() * heads * group * dim / _seconds(once, *arrays)


@functools.cache
def _sums(heads: int, group: int, dim: int, dtype: str) -> float:
    """Measures FLOP/s of summing the attention that 1,024 keys receive from the last 256 tokens; cached."""

    def once(q: Any, k: Any, lse: Any) -> Any:
        """Timed step: queries plus a tiny share of the attention sums, so that the compiler keeps the sums."""
        return q + (1e-9 * column_sums(q, k, lse, jnp.int32(_KEYS - _BLOCK)).sum()).astype(q.dtype)

    arrays = _filled(dtype, heads, group, _BLOCK, dim), _filled(dtype, heads, _KEYS, dim)
    lse = jnp.zeros((heads, group, _BLOCK), jnp.float32)
    return 2 * _pairs() * heads * group * dim / _seconds(once, *arrays, lse)


@functools.cache
def _weights(embed: int, hidden: int, batch: int, dtype: str) -> float:
    """Measures bytes/s of reading MLP weights, larger than CPU caches, to multiply one token per sequence; cached."""

    def once(x: Any, weights: Any) -> Any:
        """Timed step: tokens passed through all MLPs in turn, each MLP's output added to its input."""
        for up, down in weights:
            gate, wide = jnp.moveaxis(project(x, Stored(up)), 1, 0)
            x = x + project(jax.nn.silu(gate) * wide, Stored(down))
        return x

    each = 3 * embed * hidden * jnp.dtype(dtype).itemsize
    count = max(1, _READ // each)
    weights = [
        (_filled(dtype, 2, hidden, embed), _filled(dtype, embed, hidden)) for _ in range(count)
    ]
    return count * each / _seconds(once, _filled(dtype, batch, embed), weights)


@functools.cache
def _rows(heads: int, group: int, dim: int, batch: int, dtype: str) -> float:
    """Measures bytes/s of reading cache rows, larger than CPU caches, to attend from one token per sequence; cached."""
    begin = jnp.arange(heads, dtype=jnp.int32) * _KEYS
    start, length = jnp.tile(begin, (batch, 1)), jnp.full((batch, heads), _KEYS, jnp.int32)

    def once(q: Any, pools: Any) -> Any:
        """Timed step: attention over the pool of each layer in turn, each output the next layer's queries."""
        for k, v in pools:
            q = backend_of(Implementation.XLA).attend(q, k, v, start, length, walk=Walk.STRIDES)[0]
        return q

    each = 2 * batch * heads * _KEYS * dim * jnp.dtype(dtype).itemsize
    shape, count = (batch, heads * _KEYS, dim), max(1, min(32, _READ // each))
    pools = [(_filled(dtype, *shape), _filled(dtype, *shape)) for _ in range(count)]
    return count * each / _seconds(once, _filled(dtype, batch, heads, group, dim), pools)


def _pairs() -> int:
    """Number of causal (query, key) pairs of one query head in a measurement: 256 last queries of 1,024 tokens."""
    return _BLOCK * _KEYS - _BLOCK * (_BLOCK - 1) // 2


def _seconds(once: Callable[..., Any], x: Any, *others: Any) -> float:
    """Median seconds of one call `x = once(x, *others)` under jit, from 7 timed loops of about 20 ms each."""

    @jax.jit
    def often(x: Any, count: Any, *others: Any) -> Any:
        """Jitted loop that applies `once` to `x` `count` times; returns the last result."""
        return lax.fori_loop(0, count, lambda _, x: once(x, *others), x)

    def took(count: int) -> float:
        """Seconds that one call of `often` takes, which applies `once` `count` times."""
        began = time.perf_counter()
        jax.block_until_ready(often(x, jnp.int32(count), *others))
        return time.perf_counter() - began

    took(1)
    count = max(1, min(1000, round(_SECONDS / took(1))))
    return statistics.median(took(count) for _ in range(_REPEATS)) / count
