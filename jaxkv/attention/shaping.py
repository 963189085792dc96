"""`Shaping`: changes of a layer's attention logits other than scaling."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


@partial(jax.tree_util.register_dataclass, data_fields=["sink_logits"], meta_fields=["softcap"])
@dataclasses.dataclass(frozen=True, kw_only=True)
class Shaping:
    """Softcap of a layer's logits, and sink logits in its softmax without a value; by default neither.

    Attributes:
        softcap: c, which maps scaled logits to c * tanh(logit / c); None for none.
        sink_logits: one logit per query head; None for none.
    """

    softcap: float | None = None
    sink_logits: Float[Array, "*B G"] | None = None

    @property
    def without_sinks(self) -> "Shaping":
        """`Shaping` with the softcap alone: of disjoint sets of keys, only one is given the sink logits."""
        return Shaping(softcap=self.softcap)

    def joined(
        self, out: Float[Array, "B K *R D"], lse: Float[Array, "B K *R"]
    ) -> tuple[Float[Array, "B K *R D"], Float[Array, "B K *R"]]:
        """Include the sink logits in attention output and log-sum-exp over keys; R begins with the group."""
        if self.sink_logits is None:
            return out, lse
        sinks = self.sink_logits.astype(jnp.float32)
        spread = jnp.repeat(sinks, lse[0].size // sinks.size, axis=1).reshape(lse.shape[1:])
        both = jnp.logaddexp(lse, spread)
        return (out.astype(jnp.float32) * jnp.exp(lse - both)[..., None]).astype(out.dtype), both


PLAIN = Shaping()
