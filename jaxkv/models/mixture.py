"""Mixtures of experts: every token through the few MLPs that its router chooses, none dropped, none for nothing.

`lax.ragged_dot` would be the short way, and XLA makes of it on CPUs and GPUs alike a product of every token with every
expert, behind a mask. Here tokens are sorted by expert and taken through in blocks of one expert's.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int

from jaxkv.models.layers import empty, project
from jaxkv.models.values import Experts
from jaxkv.sharding.collectives import total
from jaxkv.sharding.mesh import Axes

# Rows that an expert takes at once: at least what it costs to read its weights anyway, at most what a GPU's tiles like.
_LEAST_ROWS, _MOST_ROWS = 8, 256


class MixtureMLP(nnx.Module):
    """X gated MLPs, of which a router chooses some for each token.

    Parameters: router `[X, E]`; experts_gate_up `[X, 2, F, E]`; experts_down `[X, E, F]`.
    """

    def __init__(self, width: int, hidden: int, experts: Experts, *, dtype: jnp.dtype):
        self.experts = experts
        self.router = empty(experts.count, width, dtype=dtype)
        self.experts_gate_up = empty(experts.count, 2, hidden, width, dtype=dtype)
        self.experts_down = empty(experts.count, width, hidden, dtype=dtype)

    def __call__(self, x: Float[Array, "*rows E"], over: Axes | None = None) -> Float[Array, "*rows E"]:
        """Takes each row through its experts; the result is float32, for the residual stream to be added to."""
        return total(self.part(x), over)

    def part(self, x: Float[Array, "*rows E"]) -> Float[Array, "*rows E"]:
        """What this device's part of F makes of the result."""
        flat = x.reshape(-1, x.shape[-1])
        ids, shares = self.chosen(flat)
        of = (flat, ids, shares, self.experts_gate_up[...], self.experts_down[...])
        if ids.size > self.experts.count:
            return in_blocks(*of).reshape(x.shape)
        # So few that hardly an expert is chosen twice. A GPU reads the chosen weights from where they lie while it
        # multiplies, all experts at once; a CPU would copy them first.
        return lax.platform_dependent(*of, cpu=in_blocks, default=one_by_one).reshape(x.shape)

    def chosen(self, x: Float[Array, "T E"]) -> tuple[Int[Array, "T k"], Float[Array, "T k"]]:
        """Each row's experts, the likeliest first and of equals the lowest, and their shares of the result, float32."""
        likely = jax.nn.softmax(project(x, self.router[...], wide=True), axis=-1)
        shares, ids = lax.top_k(likely, self.experts.chosen)
        return ids, shares / shares.sum(axis=-1, keepdims=True) if self.experts.normalised else shares


def one_by_one(
    x: Float[Array, "T E"],
    ids: Int[Array, "T k"],
    shares: Float[Array, "T k"],
    gate_up: Float[Array, "X two F E"],
    down: Float[Array, "X E F"],
) -> Float[Array, "T E"]:
    """Each token through each of its experts, as sums that are fused with the reading of the experts' weights.

    Args:
        x: rows of any float dtype.
        ids: which experts each row is taken through.
        shares: of each in the row's result.
        gate_up: weights of all experts.
        down: likewise.

    Returns:
        The rows' results, float32.
    """
    wide = lambda a: a.astype(jnp.float32)  # noqa: E731
    chosen = lambda a: wide(a.at[ids].get(mode="promise_in_bounds"))  # noqa: E731
    both = (wide(x)[:, None, None, None] * chosen(gate_up)).sum(axis=-1)
    hidden = _hidden(both[:, :, 0], both[:, :, 1], shares[..., None], x.dtype)
    return (wide(hidden)[:, :, None] * chosen(down)).sum(axis=(1, 3))


def in_blocks(
    x: Float[Array, "T E"],
    ids: Int[Array, "T k"],
    shares: Float[Array, "T k"],
    gate_up: Float[Array, "X two F E"],
    down: Float[Array, "X E F"],
) -> Float[Array, "T E"]:
    """Rows sorted by expert, each expert's in blocks, a block after the other: as many as there are.

    Args:
        x: rows of any float dtype.
        ids: which experts each row is taken through, none of them twice.
        shares: of each in the row's result.
        gate_up: weights of all experts.
        down: likewise.

    Returns:
        The rows' results, float32.
    """
    (tokens, chosen), count = ids.shape, gate_up.shape[0]
    size = block_rows(tokens, chosen, count)
    order = jnp.argsort(ids.reshape(-1), stable=True)
    row, share = order // chosen, shares.reshape(-1)[order]
    held = jnp.zeros(count, jnp.int32).at[ids.reshape(-1)].add(1)
    blocks = (held + size - 1) // size
    ends, after = jnp.cumsum(held), jnp.cumsum(blocks)

    def block(index: Int[Array, ""], out: Float[Array, "T E"]) -> Float[Array, "T E"]:
        expert = (after <= index).sum(dtype=jnp.int32)
        end, before = ends[expert], after[expert] - blocks[expert]
        at = end - held[expert] + (index - before) * size + jnp.arange(size, dtype=jnp.int32)
        mine, at = at < end, jnp.minimum(at, order.size - 1)
        # Without the barrier a CPU's conversion of 16-bit weights is taken out of the loop: that of all experts.
        whole = lax.optimization_barrier((gate_up, down, expert))
        gate_ups, downs = (lax.dynamic_index_in_dim(each, whole[2], keepdims=False) for each in whole[:2])
        both = project(x[row[at]], gate_ups, wide=True)
        hidden = _hidden(both[:, 0], both[:, 1], share[at, None], x.dtype)
        # Rows behind the expert's last one go nowhere, each to a place of its own.
        to = jnp.where(mine, row[at], tokens + jnp.arange(size, dtype=jnp.int32))
        return out.at[to].add(project(hidden, downs, wide=True), mode="drop", unique_indices=True)

    return lax.fori_loop(0, after[-1], block, jnp.zeros(x.shape, jnp.float32))


def block_rows(tokens: int, chosen: int, count: int) -> int:
    """Rows of one block: about what falls to an expert; all of few tokens, so that no expert is read twice.

    Args:
        tokens: T.
        chosen: experts of each.
        count: experts, X.

    Returns:
        A power of two, or T where that is less.
    """
    share = -(-tokens * chosen // count)
    return min(tokens, max(_LEAST_ROWS, min(_MOST_ROWS, 1 << (share - 1).bit_length())))


def _hidden(gate: Array, up: Array, share: Array, dtype: jnp.dtype) -> Array:
    # The share is a factor of what is projected down: here it costs least.
    return (jax.nn.silu(gate) * up * share).astype(dtype)
