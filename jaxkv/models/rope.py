"""Rotary position embeddings (RoPE): frequencies of each kind, and the rotation."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from jaxkv._dataclasses import frozen_dataclass
from jaxkv.models.values import (
    LinearRope,
    Llama3Rope,
    LongRope,
    Ministral3Rope,
    NoRope,
    ProportionalRope,
    Rope,
    YarnRope,
    compute_yarn_magnitude,
    count_rotated_channels,
)


def compute_rope_frequencies(rope: Rope, head_dim: int) -> tuple[np.ndarray, np.ndarray]:
    """Return float64 RoPE frequencies `[D/2]`, radians per position (0: unrotated), and factors on cosine and sine.

    The factors are 1 except for YaRN and LongRoPE.

    References:
        RoFormer, arXiv:2104.09864, eq. 15; YaRN, arXiv:2309.00071, section 3; LongRoPE, arXiv:2402.13753.
    """
    dim = count_rotated_channels(rope, head_dim)
    plain = rope.theta ** (-np.arange(0, dim, 2, dtype=np.float64) / dim)
    factor = 1.0
    match rope:
        case NoRope():
            plain = np.zeros_like(plain)
        case LinearRope():
            plain = plain / rope.factor
        case ProportionalRope():
            rotated = np.arange(dim // 2) < int(rope.rotated * dim // 2)
            plain = np.where(rotated, plain / rope.factor, 0)
        case Llama3Rope():
            plain = _scale_llama3_frequencies(plain, rope)
        case YarnRope():
            plain, factor = _scale_yarn_frequencies(plain, rope, dim)
        case LongRope():
            plain, factor = _scale_longrope_frequencies(plain, rope)
    # Pairs of channels without rotation come last: their angles are 0.
    beyond = (0, (head_dim - dim) // 2)
    return np.pad(plain, beyond), np.pad(np.full(dim // 2, factor), beyond, constant_values=1.0)


def _scale_llama3_frequencies(plain: np.ndarray, rope: Llama3Rope) -> np.ndarray:
    """Return Llama 3.1's RoPE frequencies `[D/2]`: low ones divided by the factor, high ones kept, others between."""
    turns = rope.original_max_position * plain / (2 * math.pi)
    smooth = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    smooth = np.clip(smooth, 0.0, 1.0)
    return (1 - smooth) * plain / rope.factor + smooth * plain


def _scale_yarn_frequencies(
    plain: np.ndarray, rope: YarnRope, head_dim: int
) -> tuple[np.ndarray, float]:
    """Return YaRN's RoPE frequencies `[D/2]`, interpolated by wavelength, and its factor on cosine and sine."""

    def channel(turns: float) -> float:
        # Return the (fractional) index of the channel pair with `turns` rotations within the original context.
        wavelength = rope.original_max_position / (turns * 2 * math.pi)
        return head_dim * math.log(wavelength) / (2 * math.log(rope.theta))

    low = channel(rope.beta_fast)
    high = channel(rope.beta_slow)
    if rope.truncate:
        low = math.floor(low)
        high = math.ceil(high)
    low = max(low, 0)
    high = min(high, head_dim - 1)
    ramp = (np.arange(head_dim // 2) - low) / max(high - low, 1e-3)
    interpolated = np.clip(ramp, 0.0, 1.0)
    factor = rope.attention_factor
    if factor is None:
        factor = compute_yarn_magnitude(rope.factor)
    return plain / rope.factor * interpolated + plain * (1 - interpolated), factor


def _scale_longrope_frequencies(plain: np.ndarray, rope: LongRope) -> tuple[np.ndarray, float]:
    """Return RoPE frequencies `[D/2]` divided by LongRoPE's short or long list, and its factor on cosine and sine."""
    factor = rope.attention_factor
    if factor is None:
        factor = math.sqrt(1 + math.log(rope.factor) / math.log(rope.original_max_position))
    return plain / np.asarray(rope.long_factor if rope.long else rope.short_factor), factor


@jax.tree_util.register_dataclass
@frozen_dataclass
class RopeTables:
    """RoPE tables of positions: cosine and sine of every channel pair, times the attention factor.

    Computed once for a prompt, a chunk or a step, and read by every layer and head, because sines cost more than the
    rotations.

    Attributes:
        cos: `f32[B, N, D/2]`, or `[1, N, D/2]` if all sequences have the same positions.
        sin: of the same shape.
        query_scale: factor on queries, `f32[B, N, 1]` or `[1, N, 1]`; None for 1.
    """

    cos: Float[Array, "#B N half"]
    sin: Float[Array, "#B N half"]
    query_scale: Float[Array, "#B N 1"] | None = None

    def scale_for_queries(self) -> "RopeTables":
        """Return the `RopeTables` that rotate queries, times their factors; unchanged if they have none."""
        if self.query_scale is None:
            return self
        return RopeTables(cos=self.cos * self.query_scale, sin=self.sin * self.query_scale)

    def scale_partial_queries(self, q: Float[Array, "n M K G D"]) -> Float[Array, "n M K G D"]:
        """Return partial sums of one query per sequence times their factors; 0 for the M - B rows of padding."""
        if self.query_scale is None:
            return q
        more = q.shape[1] - self.query_scale.shape[0]
        return q * jnp.pad(self.query_scale[..., None], ((0, more), *((0, 0),) * 3))

    def keep_first_channels(self, channels: int) -> "RopeTables":
        """Return the `RopeTables` of heads of `channels`, at most these tables' D and more than the rotated ones."""
        cos, sin = (each[..., : channels // 2] for each in (self.cos, self.sin))
        return RopeTables(cos=cos, sin=sin, query_scale=self.query_scale)

    def slice_positions(self, first: Int[Array, ""], size: int) -> "RopeTables":
        """Return the `RopeTables` of `size` consecutive positions, from index `first` of these tables on."""
        return jax.tree.map(lambda a: lax.dynamic_slice_in_dim(a, first, size, axis=1), self)

    def gather_positions(self, rows: Int[Array, "B N"]) -> "RopeTables":
        """Gather `RopeTables` `[B, N, D/2]` at indices `rows` `[B, N]` of one table `[1, positions, D/2]`."""
        return jax.tree.map(lambda a: a[0, rows], self)


def compute_rope_tables(positions: Int[Array, "B N"], rope: Rope, head_dim: int) -> RopeTables:
    """Return float32 `RopeTables` (cosines and sines) of absolute positions `[B, N]`, or `[1, N]` for all sequences."""
    frequencies, factors = (
        jnp.asarray(each, jnp.float32) for each in compute_rope_frequencies(rope, head_dim)
    )
    turned = positions[..., None].astype(jnp.float32) * frequencies
    scale = None
    if isinstance(rope, Ministral3Rope):
        lengths = (positions[..., None] // rope.original_max_position).astype(jnp.float32)
        scale = 1 + rope.llama_4_scaling_beta * jnp.log1p(lengths)
    made = RopeTables(
        cos=jnp.cos(turned) * factors, sin=jnp.sin(turned) * factors, query_scale=scale
    )
    # The barrier keeps XLA from fusing the tables into every rotation and recomputing them for every head.
    return lax.optimization_barrier(made)


def apply_rope(
    x: Float[Array, "B *heads N D"], by: RopeTables, dtype: jnp.dtype | None = None
) -> Float[Array, "B *heads N D"]:
    """Rotate channel pairs (i, i + D/2) of queries or keys by RoPE in float32; return x's dtype, or `dtype`."""
    heads = tuple(range(1, x.ndim - 2))
    cos = jnp.expand_dims(by.cos, heads)
    sin = jnp.expand_dims(by.sin, heads)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return lax.convert_element_type(turned, x.dtype if dtype is None else dtype)


def compute_pair_norms(x: Float[Array, "*n D"]) -> Float[Array, "*n half"]:
    """Return float32 norms of channel pairs (i, i + D/2) of queries or keys, which RoPE leaves unchanged."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.sqrt(first**2 + second**2)


def join_rotated_channels(
    rotated: Float[Array, "*n r"], others: Float[Array, "*n u"]
) -> Float[Array, "*n D"]:
    """Concatenate rotated and other channels in `apply_rope`'s order: pairs (i, i + D/2), the rotated ones first."""
    halves = zip(jnp.split(rotated, 2, axis=-1), jnp.split(others, 2, axis=-1), strict=True)
    return jnp.concatenate([part for half in halves for part in half], axis=-1)


def split_rotated_channels(
    x: Float[Array, "*n D"], rotated: int
) -> tuple[Float[Array, "*n r"], Float[Array, "*n u"]]:
    """Return the `rotated` channels, and the other ones, of vectors in the order of `apply_rope`."""
    halves = [jnp.split(half, [rotated // 2], axis=-1) for half in jnp.split(x, 2, axis=-1)]
    first, others = (jnp.concatenate(parts, axis=-1) for parts in zip(*halves, strict=True))
    return first, others


def zero_rotated_channels(x: Float[Array, "*n D"], rope: Rope) -> Float[Array, "*n D"]:
    """Return vectors with the channels that `rope` rotates set to 0: the value of an entry that is a latent."""
    half = x.shape[-1] // 2
    rotated = (
        jnp.arange(x.shape[-1], dtype=jnp.int32) % half
        < count_rotated_channels(rope, x.shape[-1]) // 2
    )
    return jnp.where(rotated, jnp.zeros((), x.dtype), x)
