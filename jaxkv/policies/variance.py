"""D2O's layer budgets: the more unevenly a layer's keys are attended to, the fewer rows it gets."""

import dataclasses
import enum
from typing import ClassVar

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxkv._errors import require
from jaxkv._values import choice, plain, real
from jaxkv.policies.budgets import Counts, Exact, round_remainders, round_to_sum

# No layer falls below this share of the prompt, as in the published code.
_LEAST = 100


class Statistic(enum.Enum):
    """How unevenness turns into a claim on rows.

    HEADNORM: exp(-F), F the mean over heads of variances scaled to [0, 1] within the layer: the published code.
    RAW: exp(-F), F the mean variance itself, as the paper prints it: nearly all goes to the least uneven layers.
    LAYER_ZSCORE: exp(-F), F standardised over layers.
    RECIPROCAL, EXP_DECAY, UNIFORM: the ablations of D2O's Table 4: 1 / F; exp(-F) of the prompt, raised or lowered by
    as many rows in each layer until the sum is right; the same for every layer.
    """

    HEADNORM = "headnorm"
    RAW = "raw"
    LAYER_ZSCORE = "layer_zscore"
    RECIPROCAL = "reciprocal"
    EXP_DECAY = "exp_decay"
    UNIFORM = "uniform"


@dataclasses.dataclass(frozen=True, kw_only=True)
class VarianceLayers(Exact):
    """Layers in which attention is spread more evenly over keys get more rows; the sum is exact.

    Attributes:
        statistic: how unevenness turns into a claim.
        dense_layers: layers that keep the whole prompt; negative ones count from the top. Their rows are taken out of
            the budget.

    References:
        D2O, arXiv:2406.13035, equations 4 and 5, Table 4.
    """

    from_scores: ClassVar[bool] = True
    needs_sums: ClassVar[bool] = True

    statistic: Statistic | str = Statistic.HEADNORM
    dense_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        choice(self, "statistic", Statistic)
        given = self.dense_layers
        listed = isinstance(given, (tuple, list, np.ndarray))
        layers = tuple(plain(layer) for layer in given) if listed else ()
        whole = listed and all(isinstance(layer, int) and not isinstance(layer, bool) for layer in layers)
        require(whole, "dense_layers", given, "give layers such as (0, 1, -1)")
        object.__setattr__(self, "dense_layers", layers)

    def of_heads(
        self,
        scores: Float[Array, "B K S"],
        candidates: Bool[Array, "B 1 S"],
        sums: Float[Array, "B K G S"] | None,
        length: Int[Array, " B"],
    ) -> Float[Array, "B K G"]:
        """Variances over keys of what each query head's keys received in all."""
        if sums is None:
            raise TypeError("VarianceLayers needs sums over all queries")
        batch, heads, group, slots = sums.shape
        received = sums.reshape(batch, heads * group, slots)
        inside = jnp.arange(slots, dtype=jnp.int32) < length[:, None, None]
        count = jnp.maximum(length, 1).astype(jnp.float32)[:, None]
        mean = jnp.where(inside, received, 0.0).sum(axis=-1) / count
        off = jnp.where(inside, received - mean[..., None], 0.0)
        return ((off * off).sum(axis=-1) / jnp.maximum(count - 1, 1)).reshape(batch, heads, group)

    def weight(self, heads: Float[Array, "B H"]) -> Float[Array, " B"]:
        """The layer's statistic, F: the variances' mean, or that of where each lies between the least and the most."""
        variance = heads
        if self.statistic is Statistic.HEADNORM:
            least, most = variance.min(axis=-1, keepdims=True), variance.max(axis=-1, keepdims=True)
            variance = (variance - least) / (most - least + 1e-6)
        return variance.mean(axis=-1)

    def widest(self, budget: Counts, length: Counts) -> Counts:
        """Scaled variances lie between 0 and 1: no layer gets more than e times the average."""
        length = np.asarray(length, np.int64)
        if self.statistic is not Statistic.HEADNORM or self.dense_layers:
            return length
        return np.minimum(length, np.ceil(np.e * np.asarray(budget, np.int64)).astype(np.int64) + 1)

    def rows(
        self, budget: Counts, length: Counts, forced: Counts, *, layers: int, window: int, weights: np.ndarray | None
    ) -> Int[np.ndarray, "L N"]:
        """See `LayerBudgets.rows`; at least a hundredth of the prompt and one row that can be chosen, where it fits."""
        columns = [
            self._one(int(c), int(n), int(f), w, layers)
            for c, n, f, w in zip(budget, length, forced, checked(weights).T, strict=True)
        ]
        return np.stack(columns, axis=1)

    def _one(self, budget: int, length: int, forced: int, stat: np.ndarray, layers: int) -> Int[np.ndarray, " L"]:
        if budget >= length:
            return np.full(layers, length)
        dense = dense_mask(self.dense_layers, layers)
        least = min(budget, max(forced + 1, -(-length // _LEAST)))
        free = layers - int(dense.sum())
        left = layers * budget - (layers - free) * length
        require(
            least * free <= left,
            "dense_layers",
            self.dense_layers,
            f"they take {(layers - free) * length} of {layers * budget} rows: name fewer of them, or raise the budget",
        )
        rows = np.full(layers, length)
        if free:
            rows[~dense] = self._spread(stat[~dense], left, length, least)
        return rows

    def _spread(self, stat: np.ndarray, total: int, length: int, least: int) -> Int[np.ndarray, " L"]:
        if self.statistic is Statistic.EXP_DECAY:
            column = (length * np.exp(-stat) - least)[:, None]
            sums, most = np.asarray([total - least * len(stat)]), np.asarray([length - least])
            return least + round_to_sum(column, sums, most)[:, 0]
        real = _scaled(self._claims(stat), total, least, length)
        return round_remainders(real[:, None], np.asarray([total]), np.asarray([length]))[:, 0]

    def _claims(self, stat: np.ndarray) -> Float[np.ndarray, " L"]:
        match self.statistic:
            case Statistic.UNIFORM:
                return np.ones_like(stat)
            case Statistic.RECIPROCAL:
                return 1 / np.maximum(stat, 1e-12)
            case Statistic.LAYER_ZSCORE:
                if np.ptp(stat) == 0 or stat.std() == 0:
                    return np.ones_like(stat)
                return np.exp(-(stat - stat.mean()) / stat.std())
        return np.exp(-(stat - stat.min()))


def checked(weights: np.ndarray | None) -> Float[np.ndarray, "L N"]:
    """Every layer's statistic in float64, refused where it is not finite."""
    if weights is None:
        raise TypeError("these layer budgets need every layer's statistic")
    values = np.asarray(weights, np.float64)
    require(bool(np.isfinite(values).all()), "weights", "not finite", "the model's attention is not finite: check it")
    return values


def dense_mask(dense_layers: tuple[int, ...], layers: int) -> Bool[np.ndarray, " L"]:
    """Which layers are named."""
    mask = np.zeros(layers, bool)
    for layer in dense_layers:
        require(-layers <= layer < layers, "dense_layers", dense_layers, f"the model has {layers} layers")
        mask[layer] = True
    return mask


def _scaled(claims: np.ndarray, total: int, least: int, most: int) -> Float[np.ndarray, " L"]:
    """clip(c * claims, least, most) for the c that gives the total; claims of nothing share what c cannot place."""
    alive = claims >= claims.max() * 1e-300
    reach = np.where(alive, most, least)
    if reach.sum() <= total:
        return reach + np.where(alive, 0.0, (total - reach.sum()) / max(1, int((~alive).sum())))
    # In logarithms: claims may lie hundreds of orders of magnitude apart.
    logs = np.log(np.where(alive, claims, 1.0))

    def lifted(by: float) -> np.ndarray:
        return np.where(alive, np.clip(np.exp(np.minimum(logs + by, np.log(most) + 1)), least, most), least)

    low, high = np.log(least) - logs[alive].max() - 1.0, np.log(most) - logs[alive].min() + 1.0
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if lifted(middle).sum() < total else (low, middle)
    return lifted(high)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OfficialVarianceLayers(VarianceLayers):
    """D2O's published arithmetic: three layers keep the prompt on top of the budget, sizes are cut to integers.

    Attributes:
        recent_share: share of a layer's rows that goes to the most recent tokens, cut to an integer on its own.
    """

    exact: ClassVar[bool] = False

    dense_layers: tuple[int, ...] = (0, 1, -1)
    recent_share: float = 0.5

    def __post_init__(self) -> None:
        real(self, "recent_share", "give a share between 0 and 1", low=0, high=1)
        super().__post_init__()

    def sizes(self, budget: int, length: int, stat: np.ndarray) -> Int[np.ndarray, "2 L"]:
        """Rows chosen by score, and most recent rows, of each layer; together the prompt where nothing is dropped."""
        layers = len(stat)
        rho = budget / max(1, length)
        claims = np.exp(-(stat - stat.min()))
        ratio = np.clip(claims / claims.sum() * layers * rho, 0.01, 1.0)
        recent = ((length + 1) * (ratio * self.recent_share)).astype(np.int64)
        heavy = ((length + 1) * (ratio * (1 - self.recent_share))).astype(np.int64)
        dense = dense_mask(self.dense_layers, layers) | (heavy + recent >= length)
        return np.stack([np.where(dense, length - recent, heavy), recent])

    def _one(self, budget: int, length: int, forced: int, stat: np.ndarray, layers: int) -> Int[np.ndarray, " L"]:
        if budget >= length:
            return np.full(layers, length)
        return np.clip(self.sizes(budget, length, stat).sum(axis=0), min(forced, length), length)

    def recents(self, budget: Counts, length: Counts, weights: np.ndarray) -> Int[np.ndarray, "L N"]:
        """Cut to integers on their own; see `LayerBudgets.recents`."""
        columns = zip(budget, length, checked(weights).T, strict=True)
        return np.stack([self.sizes(int(c), int(n), stat)[1] for c, n, stat in columns], axis=1)

    def bound(self, budget: Counts, length: Counts, *, layers: int) -> Counts:
        """See `LayerBudgets.bound`: the budget's sum, what the clamp adds, and the layers that keep the prompt."""
        length = np.asarray(length, np.int64)
        dense = int(dense_mask(self.dense_layers, layers).sum())
        raised = layers * (np.asarray(budget, np.int64) + 1 + -(-(length + 1) // _LEAST))
        return np.minimum(raised + dense * length, layers * length)

    def unlimited(self, layers: int) -> Bool[np.ndarray, " L"]:
        """The layers that keep the prompt."""
        return dense_mask(self.dense_layers, layers)
