"""`Shaping`: what a layer does to the logits of its attention beside scaling them."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


@partial(jax.tree_util.register_dataclass, data_fields=["sink_logits"], meta_fields=["softcap"])
@dataclasses.dataclass(frozen=True, kw_only=True)
class Shaping:
    """Cap of a layer's logits, and learned logits that take part in its softmax without a value; by default neither.

    Attributes:
        softcap: c, of scaled logits that become c * tanh(logit / c); None for none.
        sink_logits: one logit of each query head; None for none.
    """

    softcap: float | None = None
    sink_logits: Float[Array, "*B G"] | None = None

    @property
    def without_sinks(self) -> "Shaping":
        """The cap alone: of several disjoint sets of keys exactly one is given the sink logits."""
        return Shaping(softcap=self.softcap)

    def joined(
        self, out: Float[Array, "B K *R D"], lse: Float[Array, "B K *R"]
    ) -> tuple[Float[Array, "B K *R D"], Float[Array, "B K *R"]]:
        """Attention output and log-sum-exp over keys, with the sink logits in the softmax; R begins with the group."""
        if self.sink_logits is None:
            return out, lse
        sinks = self.sink_logits.astype(jnp.float32)
        spread = jnp.repeat(sinks, lse[0].size // sinks.size, axis=1).reshape(lse.shape[1:])
        both = jnp.logaddexp(lse, spread)
        return (out.astype(jnp.float32) * jnp.exp(lse - both)[..., None]).astype(out.dtype), both


PLAIN = Shaping()
