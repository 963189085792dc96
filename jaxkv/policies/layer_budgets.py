"""Budgets of layers: exact integer entries per kv head of each layer, by schedules or by what each layer's scores claim.

Computed on the host by numpy; or, where claims are traced, by JAX with 64 bits switched on.
"""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxkv._checks import field, halved, is_traced, namespace, real
from jaxkv._errors import require
from jaxkv.models.config import ModelConfig, SlidingWindows
from jaxkv.policies.scorer import Observed, Scores

# numpy arrays on the host, or traced JAX arrays: int64[N] of N prompts; int64[L, N] and float64[L, N] of L layers.
Counts = Any
Table = Any
Reals = Any


class Division(NamedTuple):
    """Entries of N prompts that are divided among layers.

    Attributes:
        budget: `[N]` entries per kv head and layer on average, forced ones included.
        length: `[N]` tokens of each prompt.
        always_kept: `[N]` entries that stay anyway, in every layer.
        layers: L.
        window: the observation window, for schedules that exclude it.
        weights: `[L, N]` from `LayerBudgets.weight`, where `from_scores`; of fewer layers where these alone have run.
    """

    budget: Counts
    length: Counts
    always_kept: Counts
    layers: int
    window: int = 0
    weights: Any = None

    @property
    def xp(self) -> Any:
        """`numpy`, or `jax.numpy` where the numbers are traced."""
        return namespace(self.budget, self.weights)

    @property
    def base(self) -> Counts:
        """Entries `[N]` per kv head and layer on average that are not forced."""
        return self.budget - self.always_kept

    def divided(self, shares: Reals) -> Table:
        """Entries per kv head `[L, N]`: forced entries, and L times `base` in proportion to `shares` `[L, N]`, of sum 1."""
        total = self.layers * self.base
        wanted = shares * total.astype(self.xp.float64)
        return self.always_kept + round_to_sum(wanted, total, self.length - self.always_kept)


class LayerBudgets:
    """Base of what divides a policy's row budget among layers: `rows` returns the entries per kv head of each layer."""

    @property
    def from_scores(self) -> bool:
        """True if entries per layer depend on all layers' scores: one pool of all layers is packed after the last one."""
        return False

    @property
    def exact(self) -> bool:
        """True if entries per kv head sum over layers to L times the budget; False for published code that may miss it."""
        return True

    @property
    def joint(self) -> bool:
        """True if the kv heads of all layers compete for one budget; `of_heads` and `weight` are then not called."""
        return False

    @property
    def needs_sums(self) -> bool:
        """True if `of_heads` reads `seen.sums`, the attention that entries receive from all queries."""
        return False

    @property
    def needs_queries(self) -> bool:
        """True if `of_heads` reads `seen.queries`, the last ones: scorers that read none are then rejected."""
        return False

    @property
    def sets_rows(self) -> bool:
        """True if entries follow from `average`, as in DuoAttention, and not from the policy's budget, which is None."""
        return False

    @property
    def grows_to(self) -> int | None:
        """Entries that segments of shorter prompts grow to under `Evict`, where `sets_rows`; None for no such number."""
        return None

    def of_heads(
        self, scores: Scores, candidates: Bool[Array, "B 1 S"], seen: Observed
    ) -> Float[Array, "B K *G"]:
        """Statistic `[B, K, ...]` of one layer per kv or query head, which `weight` reads; TypeError unless overridden.

        Args:
            scores: before pooling.
            candidates: entries that are neither padding nor stay anyway.
            seen: the layer, as the scorer sees it; `seen.sums` if needed.

        Returns:
            `[B, K]`, `[B, K, G]`, or several statistics of each query head, `[B, K, G, n]`.
        """
        raise TypeError(f"{type(self).__name__} does not look at scores")

    def weight(self, heads: Float[Array, "B H *n"]) -> Float[Array, " B"]:
        """Weight `[B]` of one layer in the division of entries among layers: the mean of its heads' statistics."""
        return heads.mean(axis=-1)

    def rows(self, of: Division) -> Table:
        """Entries per kv head `[L, N]` of each layer and prompt, forced entries included, at most the prompt's length.

        Args:
            of: prompts, and their entries on average.

        Returns:
            The entries.
        """
        raise NotImplementedError

    def average(self, length: Counts, always_kept: Counts) -> Counts:
        """Entries per kv head and layer on average `[N]`, where `sets_rows`; TypeError unless overridden."""
        raise TypeError(f"{type(self).__name__} says it sets entries: write its method `average`")

    def among(self, sliding_windows: SlidingWindows) -> "LayerBudgets":
        """Budgets of the layers without a window alone, counted from 0, by `ModelConfig.sliding_windows`; by default the same.

        Layer budgets that know layers by their index override it.
        """
        return self

    def require_fits(self, config: ModelConfig) -> None:
        """Raises ValueError for a model that this is not made for; passes by default."""

    def bound(self, budget: Counts, length: Counts, always_kept: Counts, *, layers: int) -> Counts:
        """Upper bound `[N]`, for N prompts, of entries per kv head summed over layers: L times the budget."""
        return layers * np.asarray(budget, np.int64)

    def widest(self, budget: Counts, length: Counts) -> Counts:
        """Upper bound `[N]` of the entries per kv head of any single layer, for any weights: the prompt's length."""
        return np.asarray(length, np.int64)

    def recents(self, budget: Counts, length: Counts, weights: Any) -> Table | None:
        """Number `[L, N]` of most recent entries each layer keeps; None, the default, to use the share `Keep.recent`."""
        return None

    def unlimited(self, layers: int) -> Bool[np.ndarray, " L"]:
        """Mask `[L]` of layers that keep all new entries, even under `Evict`; all False by default."""
        return np.zeros(layers, bool)


def round_to_sum(values: Reals, total: Counts, most: Counts) -> Table:
    """Integer entries `[L, N]` in [0, most] of sum `total` over layers: reals shifted by a common constant, then rounded.

    `total` lies between 0 and L * most; ties of remainders go to the lowest layer.
    """
    xp = namespace(values, total, most)
    total, most = xp.asarray(total, xp.int64), xp.asarray(most, xp.int64)
    values, sums, ends = (xp.asarray(each, xp.float64) for each in (values, total, most))

    def shifted(shift: Reals) -> Reals:
        return xp.clip(values + shift, 0.0, ends)

    # The sum of clipped values never falls as the shift grows: bisection finds it.
    low, high = -values.max(axis=0) - 1.0, ends - values.min(axis=0) + 1.0
    high = halved(low, high, lambda middle: shifted(middle).sum(axis=0) < sums)
    return round_remainders(shifted(high), total, most)


def round_remainders(real: Reals, total: Counts, most: Counts) -> Table:
    """Integers `[L, N]` of sum `total` over layers: reals rounded by largest remainder, none above `most`.

    Ties of remainders go to the lowest layer.
    """
    xp = namespace(real, total, most)
    floor = xp.floor(real + 1e-9)
    fraction = xp.round(real - floor, 9)
    floor = floor.astype(xp.int64)
    missing = total - floor.sum(axis=0)
    fraction = xp.where(floor >= most, -1.0, fraction)
    order = xp.argsort(-fraction, axis=0, stable=True)
    rank = xp.argsort(order, axis=0, stable=True)
    return floor + (rank < missing).astype(xp.int64)


def finite(weights: np.ndarray | Array | None) -> Reals:
    """Layer weights as a float64 array; ValueError if they are known on the host and not finite."""
    xp = namespace(weights)
    values = xp.asarray(weights, xp.float64)
    sound = is_traced(values) or bool(np.isfinite(values).all())
    require(sound, "weights", "not finite", "the model's attention is not finite: check it")
    return values


@dataclasses.dataclass(frozen=True, kw_only=True)
class UniformLayers(LayerBudgets):
    """Layer budgets that give every layer the same number of entries per kv head: the budget."""

    def rows(self, of: Division) -> Table:
        """Entries per kv head `[L, N]`: the budget, in every layer."""
        return of.xp.broadcast_to(of.budget, (of.layers, *np.shape(of.budget)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class GlobalLayers(UniformLayers):
    """Layer budgets under which the kv heads of all layers compete by score: a layer keeps as many entries as they win."""

    from_scores = True
    joint = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class _WithBeta(LayerBudgets):
    """Base of pyramid schedules with PyramidKV's `beta`: average entries divided by the top layer's entries, at least 1."""

    beta: int | float = 20.0

    def __post_init__(self) -> None:
        field(
            self,
            "beta",
            real,
            "give at least 1 (uniform); the paper uses 14 to 20",
            low=1.0,
            high=1e30,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Decreasing(_WithBeta):
    """Base of pyramid schedules whose entries sum exactly to the budget; subclasses give the relative entries in `shape`."""

    def shape(self, base: Any, depth: Any) -> Reals:
        """Relative entries of layers at depths from 0 (bottom) to 1 (top), which subclasses override.

        Args:
            base: entries per kv head on average that are not forced.
            depth: of each layer, in [0, 1].

        Returns:
            Positive numbers; `rows` scales them to the budget's sum.
        """
        raise NotImplementedError

    def rows(self, of: Division) -> Table:
        """Entries per kv head `[L, N]` of N prompts: forced entries, and L times the budget's rest split by `shape`."""
        xp, layers = of.xp, of.layers
        depth = xp.asarray(np.arange(layers)[:, None] / max(layers - 1, 1))
        shape = self.shape(of.base.astype(xp.float64), depth)
        return of.divided(shape / xp.maximum(shape.sum(axis=0), 1e-300))


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearLayers(_Decreasing):
    """PyramidKV's schedule (arXiv:2406.02069, eq. 1): entries fall linearly from bottom to top layer; exact sum.

    Attributes:
        beta: entries on average over entries of the top layer; at least 1.
    """

    def shape(self, base: Any, depth: Any) -> Reals:
        """Relative entries on a straight line from 2 * base - base / beta (bottom layer) to base / beta (top layer)."""
        top = base / self.beta
        bottom = 2 * base - top
        return bottom - (bottom - top) * depth


@dataclasses.dataclass(frozen=True, kw_only=True)
class GeometricLayers(_Decreasing):
    """Pyramid schedule whose entries fall by a constant ratio per layer, in all by 2 * beta - 1 (PyramidKV, Table 5).

    Attributes:
        beta: as for `LinearLayers`.
    """

    def shape(self, base: Any, depth: Any) -> Reals:
        """Relative entries that fall by a constant ratio from layer to layer, in all by 2 * beta - 1."""
        return base * (1 / (2 * self.beta - 1)) ** depth


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExponentialLayers(_Decreasing):
    """Pyramid schedule whose entries decay exponentially, by `rate`, from bottom to top layer (PyramidKV, Table 5).

    Attributes:
        beta: as for `LinearLayers`.
        rate: how far the decay has come at the top layer, exp(-rate).
    """

    rate: float = 5.0

    def __post_init__(self) -> None:
        super().__post_init__()
        field(self, "rate", real, "give a positive rate of decay", high=1e30, open_low=True)

    def shape(self, base: Any, depth: Any) -> Reals:
        """Relative entries: base / beta plus a part that decays over the layers as exp(-rate * depth)."""
        top = base / self.beta
        return top + (2 * base - 2 * top) * namespace(depth).exp(-self.rate * depth)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FromScores(LayerBudgets):
    """Base of layer budgets that divide entries in proportion to a statistic of each layer's scores."""

    from_scores = True

    def proportions(self, weights: Any) -> Reals:
        """Numbers `[L, N]`, 0 or more, in whose proportion layers share entries: here the weights, if they are finite.

        A common factor may depend on all layers' weights, nothing else.
        """
        return finite(weights)

    def rows(self, of: Division) -> Table:
        """Entries per kv head `[L, N]` of N prompts: forced entries, and L times the budget's rest split by `weights`."""
        return of.divided(self._share(of.weights))

    def at_most(self, of: Division) -> Table:
        """Upper bound `[n, N]` of the entries that `rows` gives the lowest n layers, whatever later layers' weights are.

        The weights are those of the n layers. All layers' bounds sum to L times twice the budget and one entry at most.
        """
        # A share falls with every further layer. What full layers leave is spread evenly over the others, of which
        # there are at most L - 1; it is what is left of all entries behind at least one full layer.
        xp, total, headroom = of.xp, of.layers * of.base, of.length - of.always_kept
        spread = xp.maximum(total - headroom, 0) / max(of.layers - 1, 1)
        wanted = self._share(of.weights) * total.astype(xp.float64)
        most = xp.floor(wanted + spread + 1e-6).astype(xp.int64) + 1
        return of.always_kept + xp.minimum(most, headroom)

    def _share(self, weights: Any) -> Reals:
        """Share `[L, N]` of each layer, by `proportions`; even shares where all of these are 0."""
        xp, parts = namespace(weights), self.proportions(weights)
        total = parts.sum(axis=0)
        return xp.where(total > 0, parts / xp.where(total > 0, total, 1.0), 1 / len(parts))


def _shares(
    scores: Float[Array, "B K S"], candidates: Bool[Array, "B 1 S"]
) -> Float[Array, "B K S"]:
    """Scores of candidates divided by their sum in each kv head, `[B, K, S]`; 0 for other entries."""
    inside = jnp.where(candidates, scores.astype(jnp.float32), 0.0)
    total = inside.sum(axis=-1, keepdims=True)
    return inside / jnp.where(total > 0, total, 1.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EntropyLayers(FromScores):
    """Layer budgets by entropy: layers whose attention is spread more evenly get more entries (PyramidKV, Table 5)."""

    def of_heads(
        self, scores: Scores, candidates: Bool[Array, "B 1 S"], seen: Observed
    ) -> Float[Array, "B K"]:
        """Entropy in nats `[B, K]` of each kv head's scores, normalised to a distribution over the candidates."""
        share = _shares(scores, candidates)
        terms = jnp.where(share > 0, share * jnp.log(jnp.where(share > 0, share, 1.0)), 0.0)
        return -terms.sum(axis=-1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GiniLayers(FromScores):
    """Layer budgets by Gini coefficient: layers of more concentrated attention get more entries (PyramidKV, Table 5)."""

    def of_heads(
        self, scores: Scores, candidates: Bool[Array, "B 1 S"], seen: Observed
    ) -> Float[Array, "B K"]:
        """Gini coefficient `[B, K]` of each kv head's scores, normalised to a distribution over the candidates."""
        share = jnp.where(candidates, _shares(scores, candidates), -1.0)
        count = candidates.sum(axis=-1, dtype=jnp.float32)
        # Ascending; the -1 of non-candidates sorts in front, so ranks count from there.
        ordered = jnp.sort(share, axis=-1)
        padded_len = share.shape[-1]
        rank = jnp.arange(1, padded_len + 1, dtype=jnp.float32) - (padded_len - count)[..., None]
        weighted = jnp.where(ordered >= 0, (2 * rank - count[..., None] - 1) * ordered, 0.0).sum(
            axis=-1
        )
        return weighted / jnp.maximum(count, 1.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Published(_WithBeta):
    """Base of pyramid schedules computed as published code does; the sum over layers may miss the budget."""

    exact = False

    def rows(self, of: Division) -> Table:
        """Entries per kv head `[L, N]`: `_one` of each prompt, at least the forced entries, at most the prompt's length."""
        columns = [
            self._one(int(capacity), int(length), of.layers, of.window)
            for capacity, length in zip(of.budget, of.length, strict=True)
        ]
        return np.clip(np.stack(columns, axis=1), np.asarray(of.always_kept), np.asarray(of.length))

    def _one(self, capacity: int, length: int, layers: int, window: int) -> Int[np.ndarray, " L"]:
        """Entries per kv head `[L]` of all layers for one prompt, window included; subclasses override it."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True, kw_only=True)
class OfficialLayers(_Published):
    """KVCache-Factory's pyramid schedule: whole-number steps, so up to 27% over budget; uniform for short prompts.

    Attributes:
        beta: as for `LinearLayers`.
    """

    def _one(self, capacity: int, length: int, layers: int, window: int) -> Int[np.ndarray, " L"]:
        base = capacity - window
        least = int(base // self.beta)
        most = 2 * base - least
        if most >= length - window:
            most = length - window
            least = 2 * base - most
        if length <= capacity or length < 2 * base or layers == 1:
            return np.full(layers, min(capacity, length))
        step = (most - least) // max(layers - 1, 1)
        return most - np.arange(layers) * step + window


@dataclasses.dataclass(frozen=True, kw_only=True)
class KVPressLayers(_Published):
    """kvpress' pyramid schedule, rounded half to even; uniform if a layer would get fewer entries than the window.

    Attributes:
        beta: as for `LinearLayers`.
    """

    def _one(self, kept: int, length: int, layers: int, window: int) -> Int[np.ndarray, " L"]:
        least = kept / self.beta
        most = 2 * kept - least
        if most >= length - window:
            most = float(length - window)
            least = 2 * kept - most
        if not (length >= most >= least >= window) or layers == 1:
            return np.full(layers, kept)
        depth = np.arange(layers) / max(layers - 1, 1)
        return np.asarray([round(most - (most - least) * d) for d in depth.tolist()])
