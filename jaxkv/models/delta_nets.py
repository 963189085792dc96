"""Gated delta nets: layers with a state instead of entries (Qwen3-Next, Qwen3.5).

A head's state is a matrix S from keys to values. A token with key k, value v, decay a and rate b makes it
a S + b k (v - a S^T k)^T, and reads it by its query (arXiv:2412.06464, equation 10).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int

from jaxkv.attention.xla import exact_einsum
from jaxkv.models.layers import (
    RMSNorm,
    add_linear_weight,
    apply_linear,
    make_empty_parameter,
)
from jaxkv.models.states import DeltaState
from jaxkv.models.values import DeltaNetSpec

# Tokens per chunk, whose deltas one triangular system gives together.
_CHUNK = 64
# Added to the squares of queries and keys before their norm.
_EPSILON = 1e-6

Memory = Float[Array, "B H R Dk Dv"]
Mixed = Float[Array, "B H R N Dv"]


class DeltaInputs(NamedTuple):
    """N tokens of a delta net, float32; one with `log_decay` 0 and `rate` 0 leaves the state unchanged.

    Attributes:
        q: queries of key heads.
        k: keys.
        v: values of each key head's R value heads.
        log_decay: logarithms of the factors on the heads' matrices.
        rate: shares of the deltas that are written.
    """

    q: Float[Array, "B H N Dk"]
    k: Float[Array, "B H N Dk"]
    v: Mixed
    log_decay: Float[Array, "B H R N"]
    rate: Float[Array, "B H R N"]


class GatedDeltaNet(nnx.Module):
    """Gated delta net up to its output projection: projections, causal convolution, delta rule, gated norm.

    Parameters: qk `[2, H, Dk, E]`; values and gates vz `[2, H, R*Dv, E]`; rates and decays rd `[2, H, R, E]`; out
    `[E, H*R*Dv]`; taps_qk `[2, H, Dk, w+1]` and taps_v `[H, R*Dv, w+1]` of the convolution, the newest token's last;
    log_speed and speed_offset `[H, R]` of the decays. A key head H has R value heads.
    """

    # Gates act here, on normed values.
    out_gate = None

    def __init__(
        self, width: int, spec: DeltaNetSpec, *, eps: float, dtype: jnp.dtype, weights: jnp.dtype
    ):
        heads, group = spec.key_heads, spec.group_size
        values, taps = group * spec.value_dim, spec.window + 1
        add_linear_weight(self, "qk", 2, heads, spec.key_dim, width, dtype=weights)
        add_linear_weight(self, "vz", 2, heads, values, width, dtype=weights)
        add_linear_weight(self, "out", width, heads * values, dtype=weights)
        self.rd = make_empty_parameter(2, heads, group, width, dtype=dtype)
        self.taps_qk = make_empty_parameter(2, heads, spec.key_dim, taps, dtype=dtype)
        self.taps_v = make_empty_parameter(heads, values, taps, dtype=dtype)
        self.log_speed = make_empty_parameter(heads, group, dtype=dtype)
        self.speed_offset = make_empty_parameter(heads, group, dtype=dtype)
        self.norm = RMSNorm(spec.value_dim, eps=eps, dtype=dtype)

    def mix_tokens(
        self, x: Float[Array, "B N E"], state: DeltaState, count: Int[Array, " B"]
    ) -> tuple[Mixed, DeltaState]:
        """Return N tokens' normed and gated values, and the state after the first `count` of them, at least 0."""
        batch, tokens, _ = x.shape
        valid = jnp.arange(tokens, dtype=jnp.int32) < count[:, None]
        # Padding may hold anything, also NaN.
        x = jnp.where(valid[..., None], x, jnp.zeros_like(x))
        # Barriers keep XLA from joining the matrices, which it would copy, into one.
        again = lax.optimization_barrier(x)
        once_more = lax.optimization_barrier(again)
        qk, vz = apply_linear(self, "qk", x), apply_linear(self, "vz", again)
        rate, decay = jnp.moveaxis(apply_linear(self, "rd", once_more, wide=True), 2, 0)
        log_speed, offset = (
            each[...].astype(jnp.float32) for each in (self.log_speed, self.speed_offset)
        )
        speed = jnp.exp(log_speed) * jax.nn.softplus(decay + offset)
        joined = jnp.concatenate([qk[:, :, 0], qk[:, :, 1], vz[:, :, 0]], axis=-1)
        mixed, window = self._convolve(joined.astype(jnp.float32), state.window, count)
        _, heads, group, key_dim, _ = state.memory.shape
        q, k, v = jnp.split(mixed, [key_dim, 2 * key_dim], axis=-1)
        masked = valid[..., None, None]
        given = DeltaInputs(
            q=jnp.moveaxis(_normalise(q) * key_dim**-0.5, 1, 2),
            k=jnp.moveaxis(_normalise(k), 1, 2),
            v=jnp.moveaxis(v.reshape(batch, tokens, heads, group, -1), 1, 3),
            log_decay=jnp.moveaxis(jnp.where(masked, -speed, 0.0), 1, 3),
            rate=jnp.moveaxis(jnp.where(masked, jax.nn.sigmoid(rate), 0.0), 1, 3),
        )
        apply = apply_delta_rule_once if tokens == 1 else apply_delta_rule_in_chunks
        out, memory = apply(given, state.memory)
        gate = jnp.moveaxis(vz[:, :, 1].reshape(batch, tokens, heads, group, -1), 1, 3)
        normed = self.norm(out).astype(jnp.float32) * jax.nn.silu(gate.astype(jnp.float32))
        return normed.astype(x.dtype), DeltaState(window=window, memory=memory)

    def _convolve(
        self,
        new: Float[Array, "B N H C"],
        window: Float[Array, "B w H C"],
        count: Int[Array, " B"],
    ) -> tuple[Float[Array, "B N H C"], Float[Array, "B w H C"]]:
        """Return SiLU of the causal convolution of new inputs, and the last inputs of each sequence."""
        tokens, before = new.shape[1], window.shape[1]
        held = jnp.concatenate([window, new], axis=1)
        taps = jnp.concatenate([*self.taps_qk[...], self.taps_v[...]], axis=1).astype(jnp.float32)
        mixed = sum(held[:, at : at + tokens] * taps[..., at] for at in range(before + 1))
        last = jnp.clip(count, 0, tokens)[:, None] + jnp.arange(before, dtype=jnp.int32)
        # Queries, keys and values would each be fused with it: XLA 0.10.2 cannot compile that for GPUs.
        mixed = lax.optimization_barrier(jax.nn.silu(mixed))
        return mixed, jnp.take_along_axis(held, last[..., None, None], axis=1)


def _normalise(x: Float[Array, "*n D"]) -> Float[Array, "*n D"]:
    """Return vectors of length 1, but for an epsilon."""
    return x * lax.rsqrt((x * x).sum(axis=-1, keepdims=True) + _EPSILON)


def apply_delta_rule_once(given: DeltaInputs, memory: Memory) -> tuple[Mixed, Memory]:
    """Apply the gated delta rule to a single token; return what its query reads, and the matrices after it."""
    q, k, v, log_decay, rate = given
    both = jnp.concatenate([k, q], axis=2)
    decayed = jnp.exp(log_decay)[..., None]
    # One read for key and query: the query reads the matrix after the token, which is the matrix before it and k delta.
    read = decayed * exact_einsum("bhrkv,bhnk->bhrnv", memory, both)
    delta = (v - read[..., :1, :]) * rate[..., None]
    out = read[..., 1:, :] + (q * k).sum(axis=-1)[:, :, None, :, None] * delta
    return out, memory * decayed + k[:, :, None, 0, :, None] * delta


def apply_delta_rule_in_chunks(given: DeltaInputs, memory: Memory) -> tuple[Mixed, Memory]:
    """Apply the gated delta rule to N tokens, chunk by chunk; return what queries read, and the matrices at the end.

    Within a chunk of C tokens the deltas solve a unit lower triangular system (the WY form, arXiv:2412.06464, section
    3.3): all chunks' systems are solved at once, then the matrices pass from chunk to chunk.
    """
    tokens = given.q.shape[2]
    size = min(_CHUNK, tokens)
    q, k, v, log_decay, rate = (
        _split_into_chunks(each, axis, size)
        for each, axis in zip(given, (2, 2, 3, 3, 3), strict=True)
    )
    total = jnp.cumsum(log_decay, axis=-1)
    later = jnp.tril(jnp.ones((size, size), bool))
    # Masked before the exponential, which would overflow for earlier queries.
    decay = jnp.exp(jnp.where(later, total[..., :, None] - total[..., None, :], -jnp.inf))
    keys, queries = (
        exact_einsum("cbhik,cbhjk->cbhij", each, k)[:, :, :, None] * decay for each in (k, q)
    )
    wide_k, wide_q = k[:, :, :, None], q[:, :, :, None]
    decayed = jnp.exp(total)[..., None]
    solved = lax.linalg.triangular_solve(
        rate[..., None] * keys,
        rate[..., None] * jnp.concatenate([v, wide_k * decayed], axis=-1),
        left_side=True,
        lower=True,
        unit_diagonal=True,
    )
    alone, known = jnp.split(solved, [v.shape[-1]], axis=-1)
    left = wide_k * jnp.exp(total[..., -1:] - total)[..., None]
    whole = jnp.exp(total[..., -1:])[..., None]

    def pass_chunk(memory: Memory, chunk: tuple[Array, ...]) -> tuple[Memory, Array]:
        """Return the matrices after a chunk, and what its queries read."""
        alone, known, queries, asked, left, whole = chunk
        delta = alone - exact_einsum("bhrik,bhrkv->bhriv", known, memory)
        out = exact_einsum("bhrik,bhrkv->bhriv", asked, memory)
        out += exact_einsum("bhrij,bhrjv->bhriv", queries, delta)
        return memory * whole + exact_einsum("bhrik,bhriv->bhrkv", left, delta), out

    chunks = (alone, known, queries, wide_q * decayed, left, whole)
    memory, out = lax.scan(pass_chunk, memory, chunks)
    out = jnp.moveaxis(out, 0, 3)
    return out.reshape(*out.shape[:3], -1, out.shape[-1])[..., :tokens, :], memory


def _split_into_chunks(x: Array, axis: int, size: int) -> Array:
    """Return an array `[C, ...]` of chunks of `size` tokens along `axis`, the last one padded with zeros."""
    tokens = x.shape[axis]
    wide = jnp.pad(x, [(0, -tokens % size * (at == axis)) for at in range(x.ndim)])
    split = wide.reshape(*x.shape[:axis], -1, size, *x.shape[axis + 1 :])
    return jnp.moveaxis(split, axis, 0)
