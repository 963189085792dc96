"""Mixture-of-experts MLPs: each token runs through the experts that its router selects; none is dropped.

`lax.ragged_dot` would be shorter, but on CPUs and GPUs XLA turns it into a masked product of every token with every
expert. Here tokens are sorted by expert and multiplied in blocks of one expert each.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int

from jaxkv.models.config import ModelConfig
from jaxkv.models.layers import (
    ACTIVATION_FUNCTIONS,
    DenseMLP,
    RMSNorm,
    Vectors,
    add_linear_weight,
    apply_linear,
    get_parameter_array,
    get_stored_weight,
    make_empty_parameter,
    multiply_by_weight,
    supports_kernels_on_device,
)
from jaxkv.models.stored import StoredWeight
from jaxkv.models.values import ExpertsConfig
from jaxkv.sharding.collectives import sum_over_devices
from jaxkv.sharding.mesh import ShardingMesh

# Token vectors; scores of all experts; ids of each token's experts, and their weights in the sum.
Tokens = Float[Array, "T E"]
Scores = Float[Array, "T X"]
Chosen = Int[Array, "T k"]
Shares = Float[Array, "T k"]
# Gates, ups or activations of experts, float32; and how the last follow from the others.
Hidden = Float[Array, "*n F"]
GatedActivation = Callable[[Hidden, Hidden], Hidden]
# Rows per block. Smaller blocks cost as much, because an expert's weights are read in any case; larger ones exceed a
# GPU's tile.
_LEAST_ROWS, _MOST_ROWS = 8, 256
# Rows per block of the kernel for tensor cores, which has not run on a GPU.
_KERNEL_ROWS = 16
# Factor within gpt-oss' sigmoid, with which gate * sigmoid(factor * gate) approximates GELU.
_SLOPE = 1.702
# Added to sums of scores, so that no sum divides by 0.
_LEAST_SUM = 1e-20


class MixtureMLP(nnx.Module):
    """Mixture-of-experts MLP: X gated MLPs (experts), a router that selects k of them for each token, shared experts.

    Parameters: router `[X, E]`; experts_gate_up `[X, 2, F, E]`; experts_down `[X, E, F]`. With biases also router_bias
    `[X]`, experts_gate_up_bias `[X, 2, F]` and experts_down_bias `[X, E]`. Corrected scores have a float32 correction
    `[X]`; shared experts are one dense MLP `shared`, and may have a shared_gate `[1, E]`.
    """

    def __init__(self, config: ModelConfig, *, dtype: jnp.dtype, weights: jnp.dtype):
        experts = config.experts
        assert experts is not None
        self.experts, count, width, hidden = experts, experts.count, config.embed, config.hidden
        self.activation = config.activation
        wide = jnp.dtype(jnp.float32)
        self.router = make_empty_parameter(
            count, width, dtype=wide if experts.wide_router else dtype
        )
        self.correction = make_empty_parameter(count, dtype=wide) if experts.corrected else None
        add_linear_weight(self, "experts_gate_up", count, 2, hidden, width, dtype=weights)
        add_linear_weight(self, "experts_down", count, width, hidden, dtype=weights)
        self.router_bias = make_empty_parameter(count, dtype=dtype) if experts.bias else None
        self.experts_gate_up_bias = (
            make_empty_parameter(count, 2, hidden, dtype=dtype) if experts.bias else None
        )
        self.experts_down_bias = (
            make_empty_parameter(count, width, dtype=dtype) if experts.bias else None
        )
        self.shared = (
            None
            if experts.shared is None
            else DenseMLP(config, experts.shared, dtype=dtype, weights=weights)
        )
        self.shared_gate = (
            make_empty_parameter(1, width, dtype=dtype) if experts.shared_gate else None
        )

    def __call__(self, x: Vectors, over: ShardingMesh | None = None) -> Vectors:
        """Return the weighted sum of each token's experts, float32 `[*rows, E]`, summed over the devices of `over`."""
        flat = x.reshape(-1, x.shape[-1])
        ids, shares = self.select_experts(flat)
        out = sum_over_devices(self._compute_shard(flat, ids, shares).reshape(x.shape), over)
        if self.experts_down_bias is None:
            return out
        # Replicated on every device of a mesh, and added once.
        return out + sum_expert_biases(ids, shares, self.experts_down_bias[...]).reshape(x.shape)

    def compute_shard_output(self, x: Vectors) -> Vectors:
        """Return this device's summand of the mixture's float32 output: its shard of F, without down's bias."""
        flat = x.reshape(-1, x.shape[-1])
        return self._compute_shard(flat, *self.select_experts(flat)).reshape(x.shape)

    def _compute_shard(self, x: Tokens, ids: Chosen, shares: Shares) -> Tokens:
        """Return the sum of selected and shared experts, for this device's shard of F, float32, without down's bias."""
        out = self._compute_expert_outputs(x, ids, shares)
        if self.shared is None:
            return out
        beside = self.shared.compute_shard_output(x)
        if self.shared_gate is not None:
            gate = apply_linear(self, "shared_gate", x, wide=True)
            beside = beside * jax.nn.sigmoid(gate)
        return out + beside

    def _compute_expert_outputs(self, x: Tokens, ids: Chosen, shares: Shares) -> Tokens:
        """Return the weighted sum of selected experts, for this device's shard of F, float32, without down's bias."""
        given = ExpertInputs(
            x=x,
            ids=ids,
            shares=shares,
            gate_up=get_stored_weight(self, "experts_gate_up"),
            down=get_stored_weight(self, "experts_down"),
            bias=get_parameter_array(self.experts_gate_up_bias),
        )
        ways = apply_experts_in_blocks, apply_experts_by_token, apply_experts_on_tensor_cores
        activate = functools.partial(multiply_gated, activation=self.activation)
        if self.experts.limit is not None:
            activate = functools.partial(multiply_clipped, limit=self.experts.limit)
        by_blocks, singly, at_once = (functools.partial(way, activate=activate) for way in ways)
        if ids.size > self.experts.count:
            tokens, chosen = ids.shape
            few = choose_block_rows(tokens, chosen, self.experts.count) <= _KERNEL_ROWS
            weights = given.gate_up, given.down
            supported = x.dtype.itemsize == 2 and all(map(supports_kernels_on_device, weights))
            if not (few and supported):
                return by_blocks(given)
            return lax.platform_dependent(given, cuda=at_once, default=by_blocks)
        # With so few tokens hardly any expert is selected twice. A GPU gathers the selected weights while it
        # multiplies, all experts in one product; a CPU would copy them first.
        return lax.platform_dependent(given, cpu=by_blocks, default=singly)

    def select_experts(self, x: Tokens) -> tuple[Chosen, Shares]:
        """Return each token's k expert ids `[T, k]`, highest score first, and their float32 weights in the sum."""
        experts = self.experts
        with jax.default_matmul_precision("float32"):
            logits = apply_linear(self, "router", x.astype(self.router[...].dtype), wide=True)
        if experts.jitter is not None:
            return _select_by_sparse_mixer(logits, 2 * experts.jitter)
        scores = jax.nn.sigmoid(logits) if experts.sigmoid else jax.nn.softmax(logits, axis=-1)
        ranked = scores if self.correction is None else scores + self.correction[...]
        if experts.groups > 1:
            ranked = _mask_other_groups(ranked, experts)
        _, ids = lax.top_k(ranked, experts.chosen)
        shares = jnp.take_along_axis(scores, ids, axis=-1)
        if experts.normalised:
            shares = shares / (shares.sum(axis=-1, keepdims=True) + _LEAST_SUM)
        return ids, shares * experts.scale


class NormedMixtureMLP(MixtureMLP):
    """Mixture whose experts, shared MLP and router read hidden states without a norm through their own (Gemma 4).

    Parameters: those of `MixtureMLP`, norms before and behind experts and shared MLP, the router's norm, and `factors`
    `[X]` of experts' weights in the sum.
    """

    def __init__(self, config: ModelConfig, *, dtype: jnp.dtype, weights: jnp.dtype):
        super().__init__(config, dtype=dtype, weights=weights)
        norm = functools.partial(RMSNorm, config.embed, eps=config.norm_eps, dtype=dtype)
        self.router_norm, self.shared_norm, self.mixed_norm = norm(), norm(), norm()
        self.shared_out_norm, self.mixed_out_norm = norm(), norm()
        self.factors = make_empty_parameter(self.experts.count, dtype=dtype)

    def __call__(self, x: Vectors, over: ShardingMesh | None = None) -> Vectors:
        """Return the sum of normed outputs of experts and shared MLP, float32 `[*rows, E]`, over devices of `over`."""
        flat = x.reshape(-1, x.shape[-1])
        assert self.shared is not None
        shared = self.shared_out_norm(self.shared(self.shared_norm(flat), over))
        of = self.mixed_norm(flat), *self.select_experts(flat)
        mixed = self.mixed_out_norm(sum_over_devices(self._compute_expert_outputs(*of), over))
        return (shared.astype(jnp.float32) + mixed.astype(jnp.float32)).reshape(x.shape)

    def select_experts(self, x: Tokens) -> tuple[Chosen, Shares]:
        """Return each token's k expert ids, and their weights in the sum times the experts' factors."""
        normed = self.router_norm(x)
        ids, shares = super().select_experts(normed * normed.shape[-1] ** -0.5)
        return ids, shares * self.factors[...].astype(jnp.float32)[ids]


def _mask_other_groups(ranked: Scores, experts: ExpertsConfig) -> Scores:
    """Return scores, -inf for experts outside of the groups whose `leaders` best scores have the highest sums."""
    grouped = ranked.reshape(len(ranked), experts.groups, -1)
    best, _ = lax.top_k(grouped, experts.leaders)
    _, groups = lax.top_k(best.sum(axis=-1), experts.chosen_groups)
    inside = jax.nn.one_hot(groups, experts.groups, dtype=jnp.bool).any(axis=1)
    return jnp.where(inside[..., None], grouped, -jnp.inf).reshape(ranked.shape)


def _select_by_sparse_mixer(logits: Scores, most: float) -> tuple[Chosen, Shares]:
    """Return two expert ids a token, the highest logit first, and weights: softmaxes of logits at most `most` below."""
    ids, shares, left = [], [], logits
    for _ in range(2):
        best = left.max(axis=-1, keepdims=True)
        # Equal logits of 0 are close: their quotient is NaN.
        close = ~((best - logits) / jnp.maximum(jnp.abs(logits), best) > most)
        shares.append(1 / jnp.where(close, jnp.exp(left - best), 0).sum(axis=-1))
        ids.append(left.argmax(axis=-1).astype(jnp.int32))
        left = jnp.where(jax.nn.one_hot(ids[-1], left.shape[-1], dtype=jnp.bool), -jnp.inf, left)
    return jnp.stack(ids, axis=-1), jnp.stack(shares, axis=-1)


class ExpertInputs(NamedTuple):
    """Tokens, their selected experts, and all experts' weights: what each way to compute a mixture takes, a pytree.

    Attributes:
        x: `[T, E]` the tokens' vectors.
        ids: `i32[T, k]` each token's experts.
        shares: `f32[T, k]` the experts' weights in the sum.
        gate_up: weight `[X, 2, F, E]` of gates and ups.
        down: weight `[X, E, F]`.
        bias: `[X, 2, F]` bias of gates and ups, or None.
    """

    x: Tokens
    ids: Chosen
    shares: Shares
    gate_up: StoredWeight
    down: StoredWeight
    bias: Float[Array, "X 2 F"] | None = None


def multiply_gated(gate: Hidden, up: Hidden, activation: str = "silu") -> Hidden:
    """Return an expert's activations, float32: those of its gates times its ups."""
    return ACTIVATION_FUNCTIONS[activation](gate) * up


def multiply_clipped(gate: Hidden, up: Hidden, limit: float) -> Hidden:
    """Return the activations of gpt-oss' experts, float32, with gates and ups clipped by `limit`."""
    gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
    return (up + 1) * gate * jax.nn.sigmoid(_SLOPE * gate)


def apply_experts_by_token(
    given: ExpertInputs,
    *,
    activate: GatedActivation = multiply_gated,
) -> Tokens:
    """Compute mixture outputs without down's biases, float32 `[T, E]`, gathering experts' weights; for few tokens.

    `activate` computes activations from gates and ups.
    """
    x, ids, shares, gate_up, down, bias = given

    def chosen(weights: StoredWeight) -> Float[Array, "T k *rest"]:
        return jax.tree.map(
            lambda each: each.at[ids].get(mode="promise_in_bounds"), weights
        ).dequantise_to_float32()

    both = (x.astype(jnp.float32)[:, None, None, None] * chosen(gate_up)).sum(axis=-1)
    both = (
        both
        if bias is None
        else both + bias.at[ids].get(mode="promise_in_bounds").astype(jnp.float32)
    )
    # The expert's weight in the sum is applied before the down projection, where it costs least.
    hidden = (activate(both[:, :, 0], both[:, :, 1]) * shares[..., None]).astype(x.dtype)
    return (hidden.astype(jnp.float32)[:, :, None] * chosen(down)).sum(axis=(1, 3))


def apply_experts_in_blocks(
    given: ExpertInputs,
    *,
    activate: GatedActivation = multiply_gated,
) -> Tokens:
    """Compute mixture outputs without down's biases, float32 `[T, E]`, in blocks of one expert's tokens, after a sort.

    `activate` computes activations from gates and ups.
    """
    x, ids, shares, gate_up, down, bias = given
    (tokens, chosen), count = ids.shape, gate_up.codes.shape[0]
    size = choose_block_rows(tokens, chosen, count)
    blocks, share = _sort_into_blocks(ids, count, size), shares.reshape(-1)

    def block(index: Int[Array, ""], out: Tokens) -> Tokens:
        expert, at, mine = blocks.locate(index)
        row = at // chosen
        # The barrier keeps XLA from hoisting a CPU's conversion of all experts' 16-bit weights out of the loop.
        *whole, expert = lax.optimization_barrier((gate_up, down, bias, expert))
        ups, downs, added = jax.tree.map(
            lambda each: lax.dynamic_index_in_dim(each, expert, keepdims=False), whole
        )
        both = multiply_by_weight(x[row], ups, added, wide=True)
        hidden = (activate(both[:, 0], both[:, 1]) * share[at, None]).astype(x.dtype)
        # Rows after the expert's last one are dropped; their indices are unique.
        to = jnp.where(mine, row, tokens + jnp.arange(size, dtype=jnp.int32))
        return out.at[to].add(
            multiply_by_weight(hidden, downs, wide=True), mode="drop", unique_indices=True
        )

    return lax.fori_loop(0, blocks.after[-1], block, jnp.zeros(x.shape, jnp.float32))


def apply_experts_on_tensor_cores(
    given: ExpertInputs,
    *,
    activate: GatedActivation = multiply_gated,
    interpret: bool = False,
) -> Tokens:
    """Compute mixture outputs without down's biases, float32 `[T, E]`, in two kernels for all experts' tokens.

    `activate` computes activations from gates and ups; `interpret` runs the kernels on any device. A selected expert is
    read once for 16 of its tokens.
    """
    # Imported late because other models need no kernels.
    from pallas_kernels import multiply_blocks_by_tensor_cores

    x, ids, shares, gate_up, down, bias = given
    multiply = functools.partial(multiply_blocks_by_tensor_cores, interpret=interpret)
    (tokens, chosen), count = ids.shape, gate_up.codes.shape[0]
    # No selection of experts has more blocks.
    most = (ids.size + (_KERNEL_ROWS - 1) * min(ids.size, count)) // _KERNEL_ROWS
    blocks, index = _sort_into_blocks(ids, count, _KERNEL_ROWS), jnp.arange(most, dtype=jnp.int32)
    expert, at, mine = jax.vmap(blocks.locate)(index)
    # The kernel skips blocks without tokens.
    of = jnp.where(index < blocks.after[-1], expert, -1)
    both = multiply(x[at // chosen], of, *gate_up.flatten_outputs(1)).sum(axis=0)
    both = both.reshape(*at.shape, 2, -1)
    if bias is not None:
        both += bias.at[expert].get(mode="clip")[:, None].astype(jnp.float32)
    hidden = activate(both[..., 0, :], both[..., 1, :]) * shares.reshape(-1)[at, None]
    hidden = hidden.astype(x.dtype)
    out = multiply(hidden, of, *down).sum(axis=0).reshape(-1, x.shape[-1])
    # A gather of each token's rows: a scatter's sums would depend on the order of additions.
    place = jnp.arange(at.size, dtype=jnp.int32).reshape(at.shape)
    places = jnp.zeros(ids.size, jnp.int32)
    places = places.at[jnp.where(mine, at, ids.size)].set(place, mode="drop")
    return out[places].reshape(tokens, chosen, -1).sum(axis=1)


class _ExpertBlocks(NamedTuple):
    """Elements of `Chosen`, flat, sorted by expert, in blocks of `size` elements of one expert.

    Attributes:
        order: `i32[T * k]` the elements in order.
        ends: `i32[X]` ends of the experts' elements in `order`.
        taken: `i32[X]` numbers of the experts' elements.
        after: `i32[X]` ends of the experts' blocks.
        size: maximum elements per block.
    """

    order: Int[Array, " n"]
    ends: Int[Array, " X"]
    taken: Int[Array, " X"]
    after: Int[Array, " X"]
    size: int

    def locate(self, index: Int[Array, ""]) -> tuple[Array, Array, Array]:
        """Return block `index`'s expert, its elements `[size]`, and which of these are its own, not another's."""
        expert = (self.after <= index).sum(dtype=jnp.int32)
        end, taken = self.ends[expert], self.taken[expert]
        before = self.after[expert] - (taken + self.size - 1) // self.size
        at = end - taken + (index - before) * self.size + jnp.arange(self.size, dtype=jnp.int32)
        return expert, self.order[jnp.minimum(at, self.order.size - 1)], at < end


def _sort_into_blocks(ids: Chosen, count: int, size: int) -> _ExpertBlocks:
    """Sort the tokens' selected experts, of `count` ones, stably into blocks of `size`."""
    order = jnp.argsort(ids.reshape(-1), stable=True)
    taken = jnp.zeros(count, jnp.int32).at[ids.reshape(-1)].add(1)
    after = jnp.cumsum((taken + size - 1) // size)
    return _ExpertBlocks(order, jnp.cumsum(taken), taken, after, size)


def sum_expert_biases(ids: Chosen, shares: Shares, bias: Float[Array, "X E"]) -> Tokens:
    """Return each token's sum of its experts' biases, times their routing weights, float32 `[T, E]`."""
    spread = (jax.nn.one_hot(ids, bias.shape[0], dtype=jnp.float32) * shares[..., None]).sum(axis=1)
    return lax.dot(spread, bias.astype(jnp.float32), precision=lax.Precision.HIGHEST)


def choose_block_rows(tokens: int, chosen: int, count: int) -> int:
    """Return the rows per block: mean tokens of an expert, rounded up to a power of two, 8 to 256, at most `tokens`."""
    share = -(-tokens * chosen // count)
    return min(tokens, max(_LEAST_ROWS, min(_MOST_ROWS, 1 << (share - 1).bit_length())))
