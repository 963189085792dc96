"""What dropping rows changes in a layer's attention, and Ada-KV's bound on it (figure 2, theorem 3.1)."""

import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxkv._drawing import PAGE, paper, style, whole_numbers
from jaxkv._errors import require
from jaxkv.analysis.choosing import Budget, Grid, Policies, PolicyLike, grid
from jaxkv.analysis.figures import Figure
from jaxkv.analysis.given import place_of
from jaxkv.analysis.watching import Layer, Text, Watcher, watch
from jaxkv.attention import probabilities
from jaxkv.loading import LanguageModel
from jaxkv.models.decoder import Graphs, Leaves
from jaxkv.policies import AdaKV, SnapKV
from jaxkv.policies.scorer import Needs
from jaxkv.sharding.collectives import most_of_devices, total
from jaxkv.sharding.door import program
from jaxkv.sharding.mesh import host
from jaxkv.text.prompts import Prompt

# Uniform, safeguarded and adaptive budgets of heads: the same scores and totals.
ALLOCATIONS: Mapping[str, PolicyLike] = MappingProxyType(
    {"uniform": SnapKV(), "safeguarded": AdaKV(), "adaptive": AdaKV(alpha=0.0)}
)


# A GPU would round float32 to ten bits, and a bound made of rounded numbers need not hold.
_exact = partial(jnp.einsum, precision=lax.Precision.HIGHEST)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvictionLoss(Figure):
    """The L1 distance between a layer's attention output with all rows and with those that a policy keeps.

    Attributes:
        loss: `f32[P, N, T, L, w]` for each text, layer and query.
        bound: `f32[P, N, T, L, w]` theorem 3.1's: 2 h C - 2 C times the attention on rows that are seen, over the h
            query heads; C is the largest L1 norm of a value at the layer's output.
        rows: `i64[P, N, T]` rows kept, over layers and kv heads.
        policies: P of them.
        budgets: N of them, rows per kv head and layer on average, or shares.
        lengths: tokens of each of the T prompts.
    """

    loss: Float[np.ndarray, "P N T L w"]
    bound: Float[np.ndarray, "P N T L w"]
    rows: Int[np.ndarray, "P N T"]
    policies: tuple[str, ...]
    budgets: tuple[Budget, ...]
    lengths: tuple[int, ...]

    def at_most(self, policy: str, other: str) -> tuple[Float[np.ndarray, " N"], Float[np.ndarray, " N"]]:
        """How often one policy's loss is no larger than another's.

        Args:
            policy: one.
            other: another.

        Returns:
            By budget: the share of all texts, layers and queries; and of texts and layers, their queries averaged.

        Raises:
            ValueError: for a policy that was not measured.
        """
        for name in (policy, other):
            require(name in self.policies, "policy", name, f"give one of {', '.join(self.policies)}")
        one, two = (self.loss[self.policies.index(name)] for name in (policy, other))
        together = one.mean(axis=-1) <= two.mean(axis=-1)
        return (one <= two).mean(axis=(1, 2, 3)), together.mean(axis=(1, 2))

    def picture(self, path: str | Path, budget: int = 0) -> None:
        """Draws loss and bound by layer, and the last policy's loss against the first one's, text by text.

        Args:
            path: where to; the suffix says how, such as .png or .svg.
            budget: which of the budgets, by its place.

        Raises:
            ImportError: without matplotlib, naming the extra that brings it.
        """
        budget = place_of("budget", budget, len(self.budgets))
        losses, bounds = self.loss[:, budget].mean(axis=-1), self.bound[:, budget].mean(axis=-1)
        with paper(path, width=PAGE, height=2.5 + 0.17 * (len(self.policies) // 2 + 1)) as figure:
            left, right = figure.subplots(1, 2, width_ratios=(1.5, 1))
            for at, name in enumerate(self.policies):
                look = style(at)
                left.plot(losses[at].mean(axis=0), label=name, **look)
                left.plot(bounds[at].mean(axis=0), color=look["color"], linestyle=":", linewidth=0.9)
            left.plot([], [], color="black", linestyle=":", linewidth=0.9, label="its bound (theorem 3.1)")
            left.set(xlabel="layer", ylabel="eviction loss, L1", yscale="log")
            whole_numbers(left.xaxis)
            left.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, frameon=False)
            first, last = losses[0].ravel(), losses[-1].ravel()
            right.scatter(first, last, s=6, color=style(0)["color"], alpha=0.5, linewidths=0)
            ends = [min(first.min(), last.min()), max(first.max(), last.max())]
            right.plot(ends, ends, color="black", linewidth=0.8)
            share = self.at_most(self.policies[-1], self.policies[0])[1][budget]
            right.set(xscale="log", yscale="log", xlabel=f"loss, {self.policies[0]}")
            right.set_ylabel(f"loss, {self.policies[-1]}")
            right.set_title(f"layers of texts: {share:.0%}\non or below the line")

    def records(self) -> list[dict[str, Any]]:
        """By policy and budget; shares are held against the first policy."""
        out = []
        for at, column in np.ndindex(*self.rows.shape[:2]):
            queries, layers = self.at_most(self.policies[at], self.policies[0])
            out.append(
                {
                    "policy": self.policies[at],
                    "budget": self.budgets[column],
                    "rows": float(self.rows[at, column].mean()),
                    "loss": float(self.loss[at, column].mean()),
                    "bound": float(self.bound[at, column].mean()),
                    f"queries <= {self.policies[0]} %": 100 * float(queries[column]),
                    f"layers <= {self.policies[0]} %": 100 * float(layers[column]),
                }
            )
        return out


def eviction_loss(
    params: LanguageModel,
    texts: Sequence[Prompt],
    *,
    budgets: Sequence[Budget],
    policies: Policies = ALLOCATIONS,
    following: int = 16,
    key: int | Array | None = 0,
) -> EvictionLoss:
    """Measures what dropping rows changes in each layer's attention, for the tokens that follow a prompt.

    Each layer is given what it is given under full attention, so that what lower layers lost is not counted again. What
    a policy drops while tokens are drawn is not dropped: its rows are those behind the prompt.

    Args:
        params: from `jaxkv.load`.
        texts: long ones, or ids; each is run through the model once, and its prompt once for all policies.
        budgets: rows per kv head and layer on average, or shares of a prompt.
        policies: by name, class or value, or in a dictionary under names of their own; by default uniform, safeguarded
            and adaptive budgets of heads.
        following: tokens of each text behind its prompt.
        key: of policies that draw, or its seed.

    Returns:
        The figure.

    Raises:
        ValueError: for texts that are empty or too long for the model, budgets that cannot be honoured, and policies
            that merge rows, renumber positions or choose what they read for each token.

    References:
        Ada-KV, arXiv:2407.11550, equations 2 to 6, theorem 3.1, figure 2. Rows are dropped by kv head, and h counts
        query heads.
    """
    watcher = LossWatcher(grid(params, policies, budgets))
    return watch(params, texts, [watcher], following=following, key=key)[0]


class LossWatcher(Watcher):
    """Looks at the queries behind prompts, and at values."""

    least_following = 1

    def __init__(self, given: Grid):
        """Takes the policies."""
        for name, (cell, *_) in zip(given.names, given.cells, strict=True):
            parts = cell.parts()
            require(
                parts.merge is None, "policies", name, "it merges rows, of which nothing is dropped: give merge=None"
            )
            require(not parts.rolling, "policies", name, "its positions are those within the cache: leave that out")
        self.grid, self.policies = given, given.flat
        self.layers, self.texts, self.lengths = list[np.ndarray](), list[tuple[np.ndarray, ...]](), list[int]()

    def needs(self, text: Text) -> Needs:
        """The queries behind the prompt."""
        return Needs(queries=text.following)

    def look(self, text: Text, layer: Layer) -> None:
        """A layer's losses and bounds."""
        q, positions = layer.last(text.following)
        rows, prompt = text.masks(self.policies, layer.index), text.numbers(text.prompt)
        given = (layer.leaves, q, layer.out.k, layer.out.v, positions, rows, prompt)
        self.layers.append(np.stack([host(each)[0, :-1] for each in _lost(*given, graphs=layer.graphs)]))

    def done(self, text: Text) -> None:
        """A text's layers: `[P * N, L, w]` of each."""
        loss, bound = np.moveaxis(np.stack(self.layers), 0, 2)
        rows = np.asarray([text.rows[cell].sum() for cell in self.policies], np.int64)
        self.texts.append((loss, bound, rows))
        self.lengths.append(text.prompt)
        self.layers = []

    def found(self) -> EvictionLoss:
        """Figures of all texts."""
        given = self.grid
        shape = (len(given.names), len(given.budgets), len(self.texts))
        loss, bound, rows = (np.stack(each, axis=1) for each in zip(*self.texts, strict=True))
        return EvictionLoss(
            loss=loss.reshape(*shape, *loss.shape[2:]),
            bound=bound.reshape(*shape, *bound.shape[2:]),
            rows=rows.reshape(shape),
            policies=given.names,
            budgets=given.budgets,
            lengths=tuple(self.lengths),
        )


@program(static=("graphs",), on="graphs")
def _lost(
    leaves: Leaves,
    q: Float[Array, "B K G w D"],
    k: Float[Array, "B K S D"],
    v: Float[Array, "B K S D"],
    positions: Int[Array, "B w"],
    rows: Bool[Array, "B K S n"],
    prompt: Int[Array, " B"],
    *,
    graphs: Graphs,
) -> tuple[Float[Array, "B n w"], Float[Array, "B n w"]]:
    """The losses of n sets of rows, and their bounds."""
    block, (batch, heads, group, _, dim) = graphs.block(leaves), q.shape
    weight = block.attention.out[...].astype(jnp.float32).reshape(-1, heads, group, dim)
    since = jnp.arange(k.shape[2], dtype=jnp.int32) >= prompt[:, None]

    def head(inputs: tuple[Array, ...]) -> tuple[Array, Array]:
        mine, keys, values, position, sets, behind = inputs
        paid, values = probabilities(mine, keys, position), values.astype(jnp.float32)
        whole = _exact("gws,sd->gwd", paid, values)

        def one(kept: Array) -> tuple[Array, Array]:
            seen = jnp.where(kept | behind, paid, 0.0)
            share = seen.sum(axis=-1)
            left = _exact("gws,sd->gwd", seen, values) / jnp.maximum(share, 1e-30)[..., None]
            return whole - left, share.sum(axis=0)

        return lax.map(one, sets.T)

    flat = lambda a: a.reshape(batch * heads, *a.shape[2:])  # noqa: E731
    spread = lambda a: flat(jnp.broadcast_to(a[:, None], (batch, heads, *a.shape[1:])))  # noqa: E731
    apart, share = lax.map(head, (flat(q), flat(k), flat(v), spread(positions), flat(rows), spread(since)))
    apart, share = (a.reshape(batch, heads, *a.shape[1:]) for a in (apart, share))
    loss = jnp.abs(total(_exact("bkngwd,ekgd->bnwe", apart, weight), graphs.axes)).sum(axis=-1)
    norms = lax.cummax(most_of_devices(_norms(v, weight), "H", graphs.axes), axis=1)
    largest = jnp.take_along_axis(norms, positions, axis=1)[:, None]
    retained = total(share.sum(axis=1), graphs.axes)
    count = total(jnp.full((), heads * group, jnp.float32), graphs.axes)
    # Where everything is kept rounding could leave less than nothing.
    return loss, 2 * largest * jnp.maximum(count - retained, 0)


def _norms(v: Float[Array, "B K S D"], weight: Float[Array, "E K G D"]) -> Float[Array, "B S"]:
    """The largest L1 norm of each position's values at the layer's output, over heads."""
    batch, heads, slots, dim = v.shape
    size = min(256, slots)

    def norms(part: Array) -> Array:
        seen = _exact("bksd,ekgd->bkgse", part.astype(jnp.float32), weight)
        return jnp.abs(seen).sum(axis=-1).max(axis=(1, 2))

    parts = jnp.moveaxis(v.reshape(batch, heads, slots // size, size, dim), 2, 0)
    return jnp.moveaxis(lax.map(norms, parts), 0, 1).reshape(batch, slots)
