"""How many rows policies give to each layer and head."""

import dataclasses
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Array, Float, Int

from jaxkv._drawing import PAGE, paper, whole_numbers
from jaxkv.analysis.choosing import Budget, Grid, Policies, grid
from jaxkv.analysis.figures import Figure, stacked
from jaxkv.analysis.given import place_of
from jaxkv.analysis.watching import Layer, Text, Watcher, watch
from jaxkv.loading import LanguageModel
from jaxkv.text.prompts import Prompt

# Maps in a row.
_ACROSS = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Budgets(Figure):
    """Rows that policies keep, by layer and kv head.

    Attributes:
        rows: `f32[P, N, L, K]` rows kept, averaged over texts.
        totals: `i64[P, N, T]` rows kept of each text, over layers and heads.
        policies: P of them.
        budgets: N of them, rows per kv head and layer on average, or shares.
        lengths: tokens of each text that policies see.
    """

    rows: Float[np.ndarray, "P N L K"]
    totals: Int[np.ndarray, "P N T"]
    policies: tuple[str, ...]
    budgets: tuple[Budget, ...]
    lengths: tuple[int, ...]

    def picture(self, path: str | Path, budget: int = 0) -> None:
        """Draws a map of layers and heads for each policy.

        Args:
            path: where to; the suffix says how, such as .png or .svg.
            budget: which of the budgets, by its place.

        Raises:
            ImportError: without matplotlib, naming the extra that brings it.
        """
        budget = place_of("budget", budget, len(self.budgets))
        mine, wide = self.rows[:, budget], min(len(self.policies), _ACROSS)
        high, heads = -(-len(self.policies) // wide), mine.shape[2]
        with paper(path, width=min(PAGE, 1.2 + 1.45 * wide), height=0.3 + 2.3 * high) as figure:
            panels = figure.subplots(high, wide, sharey=True, squeeze=False)
            image = None
            for panel, name, rows in zip(panels.flat, self.policies, mine, strict=False):
                image = panel.imshow(rows, vmin=0, vmax=mine.max(), cmap="cividis", aspect="auto", origin="lower")
                panel.set_title("\n".join(textwrap.wrap(name, 22)), fontsize=7)
                panel.set(xlabel="kv head", xticks=np.unique(np.linspace(0, heads - 1, 4).round()))
                whole_numbers(panel.yaxis)
            for panel in panels.flat[len(self.policies) :]:
                panel.set_axis_off()
            for panel in panels[:, 0]:
                panel.set_ylabel("layer")
            given = self.budgets[budget]
            said = f"{given} rows" if isinstance(given, int) else f"{given:.0%} of the prompt"
            figure.colorbar(image, ax=panels, label=f"rows kept, budget {said}")

    def records(self) -> list[dict[str, Any]]:
        """By policy and budget."""
        out = []
        for at, name in enumerate(self.policies):
            for column, budget in enumerate(self.budgets):
                mine = self.rows[at, column]
                out.append(
                    {
                        "policy": name,
                        "budget": budget,
                        "rows": float(self.totals[at, column].mean()),
                        "per head": float(mine.mean()),
                        "least head": float(mine.min()),
                        "most head": float(mine.max()),
                        "lowest layer": float(mine[0].mean()),
                        "highest layer": float(mine[-1].mean()),
                    }
                )
        return out


def budgets(
    params: LanguageModel,
    texts: Sequence[Prompt],
    *,
    policies: Policies,
    budgets: Sequence[Budget],
    following: int = 0,
    key: int | Array | None = 0,
) -> Budgets:
    """Counts the rows that policies keep of texts.

    Args:
        params: from `jaxkv.load`.
        texts: long ones, or ids; each is run through the model once for all policies.
        policies: by name, class or value, or in a dictionary under names of their own; their budgets do not matter.
        budgets: rows per kv head and layer on average, or shares of a text.
        following: last tokens of each text that policies do not see.
        key: of policies that draw, or its seed.

    Returns:
        The figure.

    Raises:
        ValueError: for texts that are empty or too long for the model, and budgets that cannot be honoured.
    """
    watcher = BudgetsWatcher(grid(params, policies, budgets))
    return watch(params, texts, [watcher], following=following, key=key)[0]


class BudgetsWatcher(Watcher):
    """Counts rows, and does not look at layers."""

    def __init__(self, given: Grid):
        """Takes the policies."""
        self.grid, self.policies = given, given.flat
        self.texts, self.lengths = list[np.ndarray](), list[int]()

    def needs(self, text: Text) -> None:
        """Nothing."""

    def look(self, text: Text, layer: Layer) -> None:
        """Is not asked to."""

    def done(self, text: Text) -> None:
        """A text's rows."""
        counts = [[text.rows[cell].sum(axis=-1) for cell in row] for row in self.grid.cells]
        self.texts.append(np.asarray(counts, np.int64))
        self.lengths.append(text.prompt)

    def found(self) -> Budgets:
        """Counts of all texts."""
        totals = np.stack([each.sum(axis=(2, 3)) for each in self.texts], axis=-1)
        given, rows = self.grid, stacked(self.texts)
        return Budgets(
            rows=rows, totals=totals, policies=given.names, budgets=given.budgets, lengths=tuple(self.lengths)
        )
