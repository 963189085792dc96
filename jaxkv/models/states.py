"""States of layers that have no entries: pytrees whose size does not depend on the length of the text."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxkv._dataclasses import frozen_dataclass
from jaxkv.models.values import DeltaNetSpec


@jax.tree_util.register_dataclass
@frozen_dataclass
class DeltaState:
    """Pytree of one gated delta net's state: last inputs of its convolution, and its heads' matrices; zeros at first.

    Attributes:
        window: `f32[B, w, H, C]` inputs of the convolution, the oldest first: query, key and values of each key head.
        memory: `f32[B, H, R, Dk, Dv]` matrix of each value head, from keys to values.
    """

    window: Float[Array, "B w H C"]
    memory: Float[Array, "B H R Dk Dv"]

    @classmethod
    def make_empty(cls, spec: DeltaNetSpec, batch: int, heads: int) -> "DeltaState":
        """Return the state of `batch` sequences before their first token, for `heads` of the layer's key heads."""
        return cls(
            window=jnp.zeros((batch, spec.window, heads, spec.convolved_channels)),
            memory=jnp.zeros((batch, heads, spec.group_size, spec.key_dim, spec.value_dim)),
        )
