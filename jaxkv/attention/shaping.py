"""`LogitShaping`: changes of a layer's attention logits other than scaling."""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxkv._dataclasses import frozen_dataclass


@partial(jax.tree_util.register_dataclass, data_fields=["sink_logits"], meta_fields=["softcap"])
@frozen_dataclass
class LogitShaping:
    """Softcap of a layer's attention logits, and sink logits that join its softmax without a value; both optional.

    Attributes:
        softcap: c, which maps scaled logits to c * tanh(logit / c); None for none.
        sink_logits: one logit per query head; None for none.
    """

    softcap: float | None = None
    sink_logits: Float[Array, "*B G"] | None = None

    @property
    def without_sink_logits(self) -> "LogitShaping":
        """Copy of the `LogitShaping` with the softcap alone, for all but one of the disjoint key sets to be merged."""
        return LogitShaping(softcap=self.softcap)

    def include_sink_logits(
        self, out: Float[Array, "B K *R D"], lse: Float[Array, "B K *R"]
    ) -> tuple[Float[Array, "B K *R D"], Float[Array, "B K *R"]]:
        """Return attention output and log-sum-exp with the sink logits, if any, included in the softmax over keys."""
        if self.sink_logits is None:
            return out, lse
        sinks = self.sink_logits.astype(jnp.float32)
        spread = jnp.repeat(sinks, lse[0].size // sinks.size, axis=1).reshape(lse.shape[1:])
        both = jnp.logaddexp(lse, spread)
        return (out.astype(jnp.float32) * jnp.exp(lse - both)[..., None]).astype(out.dtype), both


PLAIN = LogitShaping()
