"""Rotary position embeddings: default, linear, llama3 and yarn, in float32."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxkv.config import LinearRope, Llama3Rope, Rope, YarnRope


def inverse_frequencies(rope: Rope, head_dim: int) -> tuple[np.ndarray, float]:
    """Angles per position of each pair of channels, and the factor on cosine and sine.

    Args:
        rope: the embedding.
        head_dim: D.

    Returns:
        `[D/2]` float64 radians per position, and the attention factor (1.0 but for YaRN).

    References:
        RoFormer, arXiv:2104.09864, eq. 15; YaRN, arXiv:2309.00071, section 3.
    """
    plain = rope.theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    match rope:
        case LinearRope():
            return plain / rope.factor, 1.0
        case Llama3Rope():
            return _llama3(plain, rope), 1.0
        case YarnRope():
            return _yarn(plain, rope, head_dim)
        case _:
            return plain, 1.0


def _llama3(plain: np.ndarray, rope: Llama3Rope) -> np.ndarray:
    turns = rope.original_max_position * plain / (2 * math.pi)
    smooth = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    smooth = np.clip(smooth, 0.0, 1.0)
    return (1 - smooth) * plain / rope.factor + smooth * plain


def _yarn(plain: np.ndarray, rope: YarnRope, head_dim: int) -> tuple[np.ndarray, float]:
    def channel(turns: float) -> float:
        # The (fractional) pair of channels that makes `turns` turns within the original context.
        wavelength = rope.original_max_position / (turns * 2 * math.pi)
        return head_dim * math.log(wavelength) / (2 * math.log(rope.theta))

    low, high = channel(rope.beta_fast), channel(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = (np.arange(head_dim // 2) - low) / max(high - low, 1e-3)
    interpolated = np.clip(ramp, 0.0, 1.0)
    factor = rope.attention_factor
    if factor is None:
        factor = 0.1 * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0
    return plain / rope.factor * interpolated + plain * (1 - interpolated), factor


def rotate(x: Float[Array, "*heads n D"], positions: Int[Array, "*#heads n"], rope: Rope) -> Float[Array, "*heads n D"]:
    """Turns each pair of channels (i, i + D/2) by its position's angle.

    Args:
        x: queries or keys, any float dtype.
        positions: absolute positions of the rows, broadcast over leading axes.
        rope: the embedding.

    Returns:
        Rotated rows in x's dtype; the arithmetic is float32.
    """
    frequencies, factor = inverse_frequencies(rope, x.shape[-1])
    angles = positions[..., None].astype(jnp.float32) * jnp.asarray(frequencies, jnp.float32)
    cos, sin = jnp.cos(angles) * jnp.float32(factor), jnp.sin(angles) * jnp.float32(factor)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return jax.lax.convert_element_type(turned, x.dtype)
