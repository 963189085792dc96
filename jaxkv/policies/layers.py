"""How a budget spreads over layers: exact integer schedules, computed on the host, or within a program."""

import dataclasses
from typing import Any, ClassVar, Protocol, runtime_checkable

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxkv._errors import require
from jaxkv._values import Value, halved, is_traced, namespace, real

# Numbers of N prompts, and of their L layers: numpy's on the host; or JAX's and traced, with 64 bits switched on.
Counts = Any
Table = Any
Reals = Any


@runtime_checkable
class LayerBudgets(Protocol):
    """How a policy's average rows per kv head spread over layers.

    Attributes:
        from_scores: whether the spread depends on what every layer saw: then all layers' rows are held until the last,
            and one pool is shared by all layers.
        exact: whether the sum over layers is the budget's; published arithmetic sometimes is not.
        joint: True if the kv heads of all layers compete for one budget; `rows` then gives every layer's average.
    """

    @property
    def from_scores(self) -> bool:
        """Whether `weight` must be called for every layer."""

    @property
    def exact(self) -> bool:
        """Whether the budget's sum is kept."""

    @property
    def joint(self) -> bool:
        """True if the kv heads of all layers compete for one budget: `of_heads` and `weight` are not called."""

    @property
    def needs_sums(self) -> bool:
        """Whether `weight` looks at the attention received from all queries."""

    def of_heads(
        self,
        scores: Float[Array, "B K S"],
        candidates: Bool[Array, "B 1 S"],
        sums: Float[Array, "B K G S"] | None,
        length: Int[Array, " B"],
    ) -> Float[Array, "B K *G"]:
        """A statistic of each head of one layer.

        Args:
            scores: before pooling.
            candidates: rows that are neither padding nor stay anyway.
            sums: attention received from all queries, if needed.
            length: tokens of each sequence.

        Returns:
            The statistic, of kv heads or of query heads.
        """

    def weight(self, heads: Float[Array, "B H"]) -> Float[Array, " B"]:
        """One layer's claim on rows.

        Args:
            heads: from `of_heads`, of all heads of the layer.

        Returns:
            What `rows` turns into numbers.
        """

    def rows(self, budget: Counts, length: Counts, forced: Counts, *, layers: int, window: int, weights: Any) -> Table:
        """Rows per kv head of each layer.

        Args:
            budget: rows per kv head and layer on average, forced ones included.
            length: tokens of each prompt.
            forced: rows that stay anyway, in every layer.
            layers: L.
            window: the observation window, for schedules that exclude it.
            weights: `[L, N]` from `weight`, where `from_scores`.

        Returns:
            Rows, forced ones included, never above the length.
        """

    def bound(self, budget: Counts, length: Counts, *, layers: int) -> Counts:
        """The most rows per kv head that all layers together can get, whatever their claims."""

    def widest(self, budget: Counts, length: Counts) -> Counts:
        """The most rows per kv head that any one layer can get, whatever the claims."""

    def recents(self, budget: Counts, length: Counts, weights: Any) -> Table | None:
        """Most recent rows of each layer, where they follow from the layers' claims; None where they do not."""

    def unlimited(self, layers: int) -> Bool[np.ndarray, " L"]:
        """Layers that go on growing where others drop a row for every new one."""


def round_to_sum(values: Reals, total: Counts, most: Counts) -> Table:
    """Clamps real targets to [0, most] by a common shift that keeps the sum, and rounds by largest remainder.

    Args:
        values: what each layer should have.
        total: what they must sum to; between 0 and L * most.
        most: the largest a layer can take.

    Returns:
        Integers with exactly this sum; ties of remainders go to the lowest layer.
    """
    xp = namespace(values, total, most)
    total, most = xp.asarray(total, xp.int64), xp.asarray(most, xp.int64)
    values, sums, ends = (xp.asarray(each, xp.float64) for each in (values, total, most))
    # The sum of clipped values grows with the shift.
    shifted = lambda shift: xp.clip(values + shift, 0.0, ends)  # noqa: E731
    low, high = -values.max(axis=0) - 1.0, ends - values.min(axis=0) + 1.0
    high = halved(low, high, lambda middle: shifted(middle).sum(axis=0) < sums)
    return round_remainders(shifted(high), total, most)


def round_remainders(real: Reals, total: Counts, most: Counts) -> Table:
    """Rounds to integers of a given sum by largest remainder.

    Args:
        real: what each layer should have, with this sum.
        total: the sum.
        most: the largest a layer can take.

    Returns:
        The integers; ties of remainders go to the lowest layer.
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
    """Every layer's claim in float64, refused where it is known not to be finite."""
    if weights is None:
        raise TypeError("these layer budgets need every layer's weight")
    xp = namespace(weights)
    values = xp.asarray(weights, xp.float64)
    sound = is_traced(values) or bool(np.isfinite(values).all())
    require(sound, "weights", "not finite", "the model's attention is not finite: check it")
    return values


@dataclasses.dataclass(frozen=True, kw_only=True)
class Exact(Value):
    """What budgets share whose sum over layers is kept."""

    exact: ClassVar[bool] = True
    joint: ClassVar[bool] = False
    needs_sums: ClassVar[bool] = False

    def bound(self, budget: Counts, length: Counts, *, layers: int) -> Counts:
        """See `LayerBudgets.bound`."""
        return layers * np.asarray(budget, np.int64)

    def widest(self, budget: Counts, length: Counts) -> Counts:
        """See `LayerBudgets.widest`."""
        return np.asarray(length, np.int64)

    def recents(self, budget: Counts, length: Counts, weights: Any) -> Table | None:
        """They are a share of each layer's rows; see `LayerBudgets.recents`."""
        return None

    def unlimited(self, layers: int) -> Bool[np.ndarray, " L"]:
        """No layer; see `LayerBudgets.unlimited`."""
        return np.zeros(layers, bool)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _HostLayers(Exact):
    """What schedules share that know their spread before the model runs."""

    from_scores: ClassVar[bool] = False

    def of_heads(
        self,
        scores: Float[Array, "B K S"],
        candidates: Bool[Array, "B 1 S"],
        sums: Float[Array, "B K G S"] | None,
        length: Int[Array, " B"],
    ) -> Float[Array, "B K *G"]:
        raise TypeError(f"{type(self).__name__} does not look at scores")

    def weight(self, heads: Float[Array, "B H"]) -> Float[Array, " B"]:
        raise TypeError(f"{type(self).__name__} does not look at scores")


@dataclasses.dataclass(frozen=True, kw_only=True)
class UniformLayers(_HostLayers):
    """Every layer keeps as many."""

    def rows(self, budget: Counts, length: Counts, forced: Counts, *, layers: int, window: int, weights: Any) -> Table:
        """The budget, in every layer; see `LayerBudgets.rows`."""
        xp = namespace(budget)
        return xp.broadcast_to(xp.asarray(budget, xp.int64), (layers, *np.shape(budget)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class GlobalLayers(UniformLayers):
    """One budget for the kv heads of all layers together: a layer keeps as many rows as its heads win."""

    from_scores: ClassVar[bool] = True
    joint: ClassVar[bool] = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Decreasing(_HostLayers):
    """Schedules between the linear one's ends: k_0 = 2 * base - k_last at the bottom, k_last = base / beta on top."""

    beta: int | float = 20.0

    def __post_init__(self) -> None:
        real(self, "beta", "give at least 1 (uniform); the paper uses 14 to 20", low=1, high=1e30)

    def shape(self, base: Any, depth: Any) -> Reals:
        """Targets at depth 0 (bottom layer) to 1 (top layer), of any positive sum."""
        raise TypeError(f"{type(self).__name__} has no schedule")

    def rows(self, budget: Counts, length: Counts, forced: Counts, *, layers: int, window: int, weights: Any) -> Table:
        """The schedule over the rows that are not forced; see `LayerBudgets.rows`."""
        xp = namespace(budget)
        base = xp.asarray(budget, xp.int64) - forced
        depth = xp.asarray(np.arange(layers)[:, None] / max(layers - 1, 1))
        shape = self.shape(base.astype(xp.float64), depth)
        total = xp.maximum(shape.sum(axis=0), 1e-300)
        wanted = shape * ((layers * base).astype(xp.float64) / total)
        return forced + round_to_sum(wanted, layers * base, length - forced)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearLayers(_Decreasing):
    """PyramidKV's arithmetic sequence (arXiv:2406.02069, eq. 1), its sum kept exactly."""

    def shape(self, base: Any, depth: Any) -> Reals:
        """A straight line."""
        top = base / self.beta
        bottom = 2 * base - top
        return bottom - (bottom - top) * depth


@dataclasses.dataclass(frozen=True, kw_only=True)
class GeometricLayers(_Decreasing):
    """A geometric sequence with the linear one's ratio between its ends (Table 5 of PyramidKV)."""

    def shape(self, base: Any, depth: Any) -> Reals:
        """A constant ratio from layer to layer."""
        return base * (1 / (2 * self.beta - 1)) ** depth


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExponentialLayers(_Decreasing):
    """Exponential decay towards the top layer's share (Table 5 of PyramidKV; the rate is not given there).

    Attributes:
        rate: how far the decay has come at the top layer, exp(-rate).
    """

    rate: float = 5.0

    def __post_init__(self) -> None:
        super().__post_init__()
        real(self, "rate", "give a positive rate of decay", low=0, high=1e30, above=True)

    def shape(self, base: Any, depth: Any) -> Reals:
        """Fast at the bottom, flat at the top."""
        top = base / self.beta
        return top + (2 * base - 2 * top) * namespace(depth).exp(-self.rate * depth)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _FromScores(Exact):
    """Spreads in proportion to a statistic of each layer's attention."""

    from_scores: ClassVar[bool] = True

    def weight(self, heads: Float[Array, "B H"]) -> Float[Array, " B"]:
        """The mean over heads."""
        return heads.mean(axis=-1)

    def rows(self, budget: Counts, length: Counts, forced: Counts, *, layers: int, window: int, weights: Any) -> Table:
        """In proportion to the weights, over the rows that are not forced; see `LayerBudgets.rows`."""
        xp, weights = namespace(weights), finite(weights)
        base = xp.asarray(budget, xp.int64) - forced
        total = weights.sum(axis=0)
        share = xp.where(total > 0, weights / xp.where(total > 0, total, 1.0), 1 / layers)
        wanted = share * (layers * base).astype(xp.float64)
        return forced + round_to_sum(wanted, layers * base, length - forced)


def _shares(scores: Float[Array, "B K S"], candidates: Bool[Array, "B 1 S"]) -> Float[Array, "B K S"]:
    inside = jnp.where(candidates, scores.astype(jnp.float32), 0.0)
    total = inside.sum(axis=-1, keepdims=True)
    return inside / jnp.where(total > 0, total, 1.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EntropyLayers(_FromScores):
    """Layers whose attention is spread more evenly get more rows (Table 5 of PyramidKV)."""

    def of_heads(
        self,
        scores: Float[Array, "B K S"],
        candidates: Bool[Array, "B 1 S"],
        sums: Float[Array, "B K G S"] | None,
        length: Int[Array, " B"],
    ) -> Float[Array, "B K"]:
        """Entropy in nats of each head's distribution over candidates."""
        share = _shares(scores, candidates)
        terms = jnp.where(share > 0, share * jnp.log(jnp.where(share > 0, share, 1.0)), 0.0)
        return -terms.sum(axis=-1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GiniLayers(_FromScores):
    """Layers whose attention is concentrated more get more rows (Table 5 of PyramidKV)."""

    def of_heads(
        self,
        scores: Float[Array, "B K S"],
        candidates: Bool[Array, "B 1 S"],
        sums: Float[Array, "B K G S"] | None,
        length: Int[Array, " B"],
    ) -> Float[Array, "B K"]:
        """Gini coefficient of each head's distribution over candidates."""
        share = jnp.where(candidates, _shares(scores, candidates), -1.0)
        count = candidates.sum(axis=-1, dtype=jnp.float32)
        # Ascending; the -1 of non-candidates sorts in front, so ranks count from there.
        ordered = jnp.sort(share, axis=-1)
        slots = share.shape[-1]
        rank = jnp.arange(1, slots + 1, dtype=jnp.float32) - (slots - count)[..., None]
        weighted = jnp.where(ordered >= 0, (2 * rank - count[..., None] - 1) * ordered, 0.0).sum(axis=-1)
        return weighted / jnp.maximum(count, 1.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Published(_HostLayers):
    """Arithmetic as a published code has it: the sum over layers is not always the budget."""

    exact: ClassVar[bool] = False

    beta: int | float = 20.0

    def __post_init__(self) -> None:
        real(self, "beta", "give at least 1 (uniform); the paper uses 14 to 20", low=1, high=1e30)

    def rows(self, budget: Counts, length: Counts, forced: Counts, *, layers: int, window: int, weights: Any) -> Table:
        """The published arithmetic, prompt by prompt; rows that stay anyway always fit. See `LayerBudgets.rows`."""
        columns = [self._one(int(c), int(n), layers, window) for c, n in zip(budget, length, strict=True)]
        return np.clip(np.stack(columns, axis=1), np.asarray(forced), np.asarray(length))

    def _one(self, capacity: int, length: int, layers: int, window: int) -> Int[np.ndarray, " L"]:
        raise TypeError(f"{type(self).__name__} has no arithmetic")


@dataclasses.dataclass(frozen=True, kw_only=True)
class OfficialLayers(_Published):
    """KVCache-Factory's pyramid: floors the step, so that up to 27% more than the budget stays; uniform at times."""

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
    """kvpress' pyramid: budgets hold the window, layers round half to even; uniform where one would be below it."""

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
