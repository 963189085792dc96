"""`eviction_loss`: L1 change of a layer's attention output by evicted rows, and Ada-KV's bound (theorem 3.1)."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxkv import _checks
from jaxkv._drawing import PAGE, paper, style, whole_numbers
from jaxkv._errors import require
from jaxkv.analysis.choosing import Budget, Grid, Policies, PolicyLike, grid
from jaxkv.analysis.figures import PolicyFigure
from jaxkv.analysis.measuring import Arrays, Layer, PolicyMeasure, Text, by_head, measured
from jaxkv.attention import probabilities
from jaxkv.attention.xla import exact_einsum
from jaxkv.loading import LanguageModel
from jaxkv.models.decoder import Graphs, Leaves
from jaxkv.models.layers import float_weight
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvictionLoss(PolicyFigure):
    """Result of `eviction_loss`: L1 change of each layer's attention output (`loss`), and its upper bound (`bound`).

    Attributes:
        loss: `f32[P, N, T, L, w]` for each text, layer and query.
        bound: `f32[P, N, T, L, w]` theorem 3.1's: 2 h C - 2 C times the attention on rows that are seen, over the h
            query heads; C is the largest L1 norm of a value at the layer's output.
        rows: `i64[P, N, T]` rows kept, over layers and kv heads.
        policies: names of the P policies.
        budgets: the N budgets, in rows per kv head and layer on average, or as shares of the prompt.
        lengths: number of tokens of each of the T prompts.
    """

    loss: Float[np.ndarray, "P N T L w"]
    bound: Float[np.ndarray, "P N T L w"]
    rows: Int[np.ndarray, "P N T"]
    policies: tuple[str, ...]
    budgets: tuple[Budget, ...]
    lengths: tuple[int, ...]

    def at_most(
        self, policy: str, other: str
    ) -> tuple[Float[np.ndarray, " N"], Float[np.ndarray, " N"]]:
        """Two arrays `[N]` by budget: shares of queries and of layers where one policy's loss is <= another's.

        Args:
            policy: name of the one.
            other: name of the other.

        Returns:
            By budget: the share of all texts, layers and queries; and of texts and layers, their queries averaged.

        Raises:
            ValueError: for a policy that was not measured.
        """
        one, two = (self.loss[self.index_of(name)] for name in (policy, other))
        together = one.mean(axis=-1) <= two.mean(axis=-1)
        return (one <= two).mean(axis=(1, 2, 3)), together.mean(axis=(1, 2))

    def picture(self, path: str | Path, budget: int = 0) -> None:
        """Writes a picture file: eviction loss and upper bound by layer; the last policy's loss against the first's.

        Args:
            path: the file; its suffix names the format, such as .png or .svg.
            budget: index of the budget that is drawn.

        Raises:
            ImportError: without matplotlib, naming the extra that brings it.
        """
        budget = _checks.index("budget", budget, len(self.budgets))
        losses, bounds = self.loss[:, budget].mean(axis=-1), self.bound[:, budget].mean(axis=-1)
        with paper(path, width=PAGE, height=2.5 + 0.17 * (len(self.policies) // 2 + 1)) as figure:
            left, right = figure.subplots(1, 2, width_ratios=(1.5, 1))
            for at, name in enumerate(self.policies):
                look = style(at)
                left.plot(losses[at].mean(axis=0), label=name, **look)
                left.plot(
                    bounds[at].mean(axis=0), color=look["color"], linestyle=":", linewidth=0.9
                )
            left.plot(
                [], [], color="black", linestyle=":", linewidth=0.9, label="its bound (theorem 3.1)"
            )
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

    def _record(self, policy: int, budget: int) -> dict[str, float]:
        """Makes a table row's dict: mean rows, loss, its upper bound; % of queries, layers no worse than the first."""
        first = self.policies[0]
        queries, layers = self.at_most(self.policies[policy], first)
        return {
            "rows": float(self.rows[policy, budget].mean()),
            "loss": float(self.loss[policy, budget].mean()),
            "bound": float(self.bound[policy, budget].mean()),
            f"queries <= {first} %": 100 * float(queries[budget]),
            f"layers <= {first} %": 100 * float(layers[budget]),
        }


def eviction_loss(
    params: LanguageModel,
    texts: Sequence[Prompt],
    *,
    budgets: Sequence[Budget],
    policies: Policies = ALLOCATIONS,
    following: int = 16,
    key: int | Array | None = 0,
) -> EvictionLoss:
    """Measures the L1 change of each layer's attention output that evicted rows cause, as an `EvictionLoss`.

    Each layer gets its input under full attention, so that the loss of lower layers is not counted again. Eviction
    during decoding is not applied: the rows chosen at the prompt's end stay.

    Args:
        params: from `jaxkv.load`.
        texts: long texts, or their ids; each is run through the model once, and its prompt once for all policies.
        budgets: rows per kv head and layer on average, or shares of a prompt.
        policies: names, classes or values, or a dictionary of them by names of your own; by default uniform,
            safeguarded and adaptive budgets of heads.
        following: number of tokens of each text behind its prompt.
        key: random key or seed, for policies that draw.

    Returns:
        The figure.

    Raises:
        ValueError: for texts that are empty or too long for the model, budgets that cannot be honoured, and policies
            that merge rows, renumber positions or choose for each token which rows they read.

    References:
        Ada-KV, arXiv:2407.11550, equations 2 to 6, theorem 3.1, figure 2. Rows are dropped by kv head, and h counts
        query heads.
    """
    return measured(
        params, texts, [LossMeasure(grid(params, policies, budgets))], following=following, key=key
    )[0]


class LossMeasure(PolicyMeasure):
    """`Measure` class behind `eviction_loss`: loss, bound; refuses policies that merge rows or renumber positions."""

    least_following = 1

    def __init__(self, grid: Grid):
        super().__init__(grid)
        for name, (cell, *_) in zip(grid.names, grid.cells, strict=True):
            parts = cell.parts()
            remedy = "it merges rows instead of dropping them: give merge=None"
            require(parts.merge is None, "policies", name, remedy)
            require(
                not parts.rolling,
                "policies",
                name,
                "it numbers positions by place in the cache: give rolling_positions=False",
            )

    def needs(self, text: Text) -> Needs:
        """`Needs` (prefill outputs to request): each layer's queries of the tokens after the prompt."""
        return Needs(queries=text.following)

    def of_layer(self, text: Text, layer: Layer) -> Arrays:
        """Tuple of one array `[2, C, w]`: losses and bounds of one layer, by cell (policy and budget) and query."""
        q, positions = layer.last(text.following)
        rows, prompt = text.masks(self.policies, layer.index), text.repeated(text.prompt)
        loss, bound = _loss(
            layer.leaves, q, layer.out.k, layer.out.v, positions, rows, prompt, graphs=layer.graphs
        )
        return (np.stack([host(loss)[0, :-1], host(bound)[0, :-1]]),)

    def of_text(self, text: Text, layers: list[Arrays]) -> Arrays:
        """Tuple of one text's losses and bounds (both `[C, L, w]`) and total rows kept `[C]`, from layers' arrays."""
        loss, bound = np.moveaxis(np.stack([each for (each,) in layers]), 0, 2)
        return loss, bound, self.counts(text).sum(axis=(1, 2))

    def figure(self, texts: list[Text], found: list[Arrays]) -> EvictionLoss:
        """`EvictionLoss` from the arrays of all texts, arranged by policy and budget."""
        loss, bound, rows = (self.by_policy(each) for each in zip(*found, strict=True))
        return EvictionLoss(
            loss=loss,
            bound=bound,
            rows=rows,
            policies=self.grid.names,
            budgets=self.grid.budgets,
            lengths=tuple(text.prompt for text in texts),
        )


@program(static=("graphs",), on="graphs")
def _loss(
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
    """Two arrays `[B, n, w]`: L1 change of queries' attention output under n masks of kept rows; its upper bound."""
    block, (_, heads, group, _, dim) = graphs.block(leaves), q.shape
    weight = float_weight(block.attention, "out").reshape(-1, heads, group, dim)
    since = jnp.arange(k.shape[2], dtype=jnp.int32) >= prompt[:, None]

    def head(
        mine: Array, keys: Array, values: Array, sets: Array, position: Array, behind: Array
    ) -> tuple[Array, Array]:
        paid, values = probabilities(mine, keys, position), values.astype(jnp.float32)
        whole = exact_einsum("gws,sd->gwd", paid, values)

        def one(kept: Array) -> tuple[Array, Array]:
            seen = jnp.where(kept | behind, paid, 0.0)
            share = seen.sum(axis=-1)
            left = exact_einsum("gws,sd->gwd", seen, values) / jnp.maximum(share, 1e-30)[..., None]
            return whole - left, share.sum(axis=0)

        return lax.map(one, sets.T)

    apart, share = by_head(head, (q, k, v, rows), (positions, since))
    loss = jnp.abs(total(exact_einsum("bkngwd,ekgd->bnwe", apart, weight), graphs.axes)).sum(
        axis=-1
    )
    norms = lax.cummax(most_of_devices(_norms(v, weight), "H", graphs.axes), axis=1)
    largest = jnp.take_along_axis(norms, positions, axis=1)[:, None]
    retained = total(share.sum(axis=1), graphs.axes)
    count = total(jnp.full((), heads * group, jnp.float32), graphs.axes)
    # If every row is kept, rounding could make the difference negative.
    return loss, 2 * largest * jnp.maximum(count - retained, 0)


def _norms(v: Float[Array, "B K S D"], weight: Float[Array, "E K G D"]) -> Float[Array, "B S"]:
    """L1 norm of each position's value after the output projection, `[B, S]`: the largest over query heads."""
    batch, heads, slots, dim = v.shape
    size = min(256, slots)

    def norms(part: Array) -> Array:
        seen = exact_einsum("bksd,ekgd->bkgse", part.astype(jnp.float32), weight)
        return jnp.abs(seen).sum(axis=-1).max(axis=(1, 2))

    parts = jnp.moveaxis(v.reshape(batch, heads, slots // size, size, dim), 2, 0)
    return jnp.moveaxis(lax.map(norms, parts), 0, 1).reshape(batch, slots)
