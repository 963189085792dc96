"""Sources of layers to compress: what `compress` asks of them, and what all sources of prompts share."""

import abc
import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxkv._checks import is_traced
from jaxkv._errors import require
from jaxkv.cache.packing import Unpacked
from jaxkv.engine.choosing import Candidates, of_prompt, within_window
from jaxkv.engine.lengths import ByLength, Numbers, rows_of
from jaxkv.engine.observing import observe
from jaxkv.models.config import Windows
from jaxkv.policies.parts import Parts
from jaxkv.policies.scorer import Observed
from jaxkv.sharding.mesh import Axes, host, place


class Source(abc.ABC):
    """Abstract base: gives `compress` each layer's candidates with scores, rows to keep, pool size, keys and values.

    Attributes:
        indices: indices of the layers in the model.
        kept_rows: `[L, B]` rows per kv head to keep in each layer, on the host or traced; None until they are known.
        recents: `[L, B]` number of most recent rows that stay among them, likewise.
        windows: each of the model's layers' window, None for none; budgets are those of the layers without one.
        axes: axes of the mesh that the layers lie on; None off a mesh.
        ahead: number of layers that may still be computed while the next one is dispatched, as memory allows.
        dtype: in which pools hold entries; None for that of the rows.
    """

    indices: Sequence[int]
    windows: Windows
    kept_rows: Any
    recents: Any
    axes: Axes | None = None
    ahead: int = 0
    dtype: jnp.dtype | None = None

    @abc.abstractmethod
    def candidates(self, index: int) -> Candidates:
        """`Candidates` to choose from in layer `index`: scores, positions, masks of real rows and of forced rows."""

    def wanted(
        self, group: Sequence[int], claims: list[Array | None]
    ) -> tuple[Int[Array, "n B"], Int[Array, "n B"]]:
        """Two counts `[n, B]` for a group of n layers: rows to keep per kv head, and most recent rows among them."""
        part = slice(group[0], group[-1] + 1)
        rows, recents = (
            place(table[part], "n B", self.axes, jnp.int32)
            for table in (self.kept_rows, self.recents)
        )
        return rows, recents

    def at_most(self, claims: list[Array | None]) -> tuple[Int[Array, "n B"], Int[Array, "n B"]]:
        """Pair of upper bounds `[n, B]` of what `wanted` gives layers that ran, 0 for others; by default TypeError."""
        raise TypeError(f"{type(self).__name__} compresses no layers before it has all")

    @abc.abstractmethod
    def pool_rows(self, group: Sequence[int], kept: Int[Array, "n B K"]) -> int:
        """Pool size P in rows, for layers whose segments keep `kept` rows; on a mesh, of one device's part."""

    def packed_rows(self, index: int, size: int) -> int:
        """P, `size` or more, to which layer `index` is packed before its pool is cut to `size`; by default `size`."""
        return size

    @abc.abstractmethod
    def rows(self, index: int) -> Unpacked:
        """Keys, values and scores of one layer, as `Unpacked` rows ready to be packed into a pool."""


class PromptSource(Source):
    """Base of sources of right-padded prompts, whose candidates are scored by what the policy's scorer observes.

    Attributes:
        parts: the policy's parts; those that score must be there for layers that `scored` is called for.
        lengths: tokens of each prompt, on the host or traced; `length` are the same on the device.
        numbers: the policy's numbers for these lengths.
        held: keys and values of layers that wait to be packed.
        nans: for each scored layer, whether a score is NaN.
    """

    def __init__(
        self,
        parts: Parts,
        lengths: Numbers,
        numbers: ByLength,
        *,
        heads: int,
        slots: int,
        indices: Sequence[int],
        windows: Windows,
        axes: Axes | None = None,
    ):
        """Prepares masks of prompts of `slots` tokens, whose layers have `heads` kv heads (on a mesh, of a device)."""
        self.parts, self.lengths, self.numbers = parts, lengths, numbers
        self.indices, self.windows, self.axes = indices, windows, axes
        self.kept_rows, self.recents = numbers.rows, numbers.recent
        self.length = place(lengths, "B", axes, jnp.int32)
        self.forced = place(parts.keep.mask(lengths, slots), "B S", axes)
        # Rows of a layer that is not scored yet; and rows of a layer that keeps all.
        self.unscored = of_prompt(None, self.forced, self.length)
        everything = jnp.broadcast_to(self.unscored.inside, (*self.length.shape, heads, slots))
        self.all_kept = dataclasses.replace(self.unscored, inside=everything)
        self.held, self.nans, self.checked = dict[int, Unpacked](), list[Array](), 0

    def unchosen(self, index: int, rows: Unpacked) -> Candidates:
        """`Candidates` of a layer that keeps its rows, or those of its window; keeps K and V to pack."""
        # Rows of a pool that layers share wait until the last layer has run: a window's rows alone.
        cut = self.parts.layout.one_pool
        self.held[index], found = within_window(
            rows, self.all_kept, self.windows[index], cut=cut, axes=self.axes
        )
        return found

    def scored(
        self,
        index: int,
        rows: Unpacked,
        seen: Observed,
        norms: Float[Array, "B K S"] | None = None,
    ) -> Candidates:
        """`Candidates` of a layer with the scores of what the scorer observes in it; keeps K and V to pack."""
        parts = self.parts
        found = observe(seen, self.forced, scorer=parts.scorer, layers=parts.layers, axes=self.axes)
        self.nans.append(found.nan)
        score = found.mass if parts.scored else None
        self.held[index] = rows._replace(mass=found.mass, score=score)
        return dataclasses.replace(
            self.unscored,
            scores=found.scores,
            norms=norms,
            claim=found.claim,
            first=found.first,
        )

    def wanted(
        self, group: Sequence[int], claims: list[Array | None]
    ) -> tuple[Int[Array, "n B"], Int[Array, "n B"]]:
        """Two counts `[n, B]` for a group of n layers: rows to keep per kv head, and most recent rows among them."""
        if self.parts.claims:
            of = (self.lengths, self.numbers.forced, self.windows, self.weights(claims))
            self.kept_rows, self.recents = rows_of(self.parts, self.numbers.budget, *of)
        return super().wanted(group, claims)

    def weights(self, claims: list[Array | None]) -> Any:
        """Stacks layers' claims to `[n, B]`, on the host unless traced; ValueError for NaN scores that are known."""
        known = [each for each in claims if each is not None]
        if is_traced(known[0]):
            return jnp.stack(known)
        self.require_ordered()
        return np.stack([host(claim) for claim in known])

    def rows(self, index: int) -> Unpacked:
        """Removes one layer's waiting keys and values from the source and returns them as `Unpacked` rows."""
        return self.held.pop(index)

    def require_ordered(self) -> None:
        """Raises ValueError, naming the layers, if any score since the last call is NaN; waits for the device."""
        first, new = self.checked, self.nans[self.checked :]
        self.checked = len(self.nans)
        for each in new:
            each.copy_to_host_async()
        scored = [layer for layer in self.indices if self.windows[layer] is None][first:]
        layers = [layer for layer, each in zip(scored, new, strict=False) if bool(host(each))]
        remedy = f"{self.parts.scorer} gave rows of layers {layers} what is not a number: mend it, or the model, if "
        require(not layers, "scores", "NaN", remedy + "that is not finite")
