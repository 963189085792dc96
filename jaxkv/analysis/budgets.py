"""`budgets`: number of rows that policies keep in each layer and kv head."""

import dataclasses
import textwrap
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Array, Float, Int

from jaxkv import _checks
from jaxkv._drawing import PAGE, layer_names, paper, whole_numbers
from jaxkv.analysis.choosing import Budget, Policies, grid
from jaxkv.analysis.figures import PolicyFigure, mean_of
from jaxkv.analysis.measuring import Arrays, PolicyMeasure, Text, measured
from jaxkv.loading import LanguageModel
from jaxkv.text.prompts import Prompt

# Largest number of maps side by side in the picture.
_ACROSS = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Budgets(PolicyFigure):
    """Result of `budgets`: rows kept by each policy at each budget, by layer and kv head (`rows`), by text (`totals`).

    Attributes:
        rows: `f32[P, N, L, K]` rows kept, averaged over texts.
        totals: `i64[P, N, T]` rows kept of each text, over layers and heads.
        policies: names of the P policies.
        budgets: the N budgets, in rows per kv head and layer on average, or as shares of the prompt.
        lengths: number of tokens of each text that policies see.
    """

    rows: Float[np.ndarray, "P N L K"]
    totals: Int[np.ndarray, "P N T"]
    policies: tuple[str, ...]
    budgets: tuple[Budget, ...]
    lengths: tuple[int, ...]

    def picture(self, path: str | Path, budget: int = 0) -> None:
        """Writes a picture file: one heat map per policy of the rows kept by layer and kv head, at one budget.

        Args:
            path: the file; its suffix names the format, such as .png or .svg.
            budget: index of the budget that is drawn.

        Raises:
            ImportError: without matplotlib, naming the extra that brings it.
        """
        budget = _checks.index("budget", budget, len(self.budgets))
        mine, wide = self.rows[:, budget], min(len(self.policies), _ACROSS)
        high, heads = -(-len(self.policies) // wide), mine.shape[2]
        with paper(path, width=min(PAGE, 1.2 + 1.45 * wide), height=0.3 + 2.3 * high) as figure:
            panels = figure.subplots(high, wide, sharey=True, squeeze=False)
            image = None
            for panel, name, rows in zip(panels.flat, self.policies, mine, strict=False):
                image = panel.imshow(
                    rows, vmin=0, vmax=mine.max(), cmap="cividis", aspect="auto", origin="lower"
                )
                panel.set_title("\n".join(textwrap.wrap(name, 22)), fontsize=7)
                panel.set(xlabel="kv head", xticks=np.unique(np.linspace(0, heads - 1, 4).round()))
                whole_numbers(panel.yaxis)
                layer_names(panel.yaxis, self.indices(mine.shape[1]))
            for panel in panels.flat[len(self.policies) :]:
                panel.set_axis_off()
            for panel in panels[:, 0]:
                panel.set_ylabel("layer")
            given = self.budgets[budget]
            said = f"{given} rows" if isinstance(given, int) else f"{given:.0%} of the prompt"
            figure.colorbar(image, ax=panels, label=f"rows kept, budget {said}")

    def _record(self, policy: int, budget: int) -> dict[str, float]:
        """Dict of one table row: mean rows per text; mean, min, max per head; means of the first and the last layer."""
        mine = self.rows[policy, budget]
        return {
            "rows": float(self.totals[policy, budget].mean()),
            "per head": float(mine.mean()),
            "least head": float(mine.min()),
            "most head": float(mine.max()),
            "first layer": float(mine[0].mean()),
            "last layer": float(mine[-1].mean()),
        }


def budgets(
    params: LanguageModel,
    texts: Sequence[Prompt],
    *,
    policies: Policies,
    budgets: Sequence[Budget],
    following: int = 0,
    key: int | Array | None = 0,
) -> Budgets:
    """Runs texts through a model and counts rows that policies keep, by budget, layer and kv head; returns `Budgets`.

    Args:
        params: from `jaxkv.load`.
        texts: long texts, or their ids; each is run through the model once for all policies.
        policies: names, classes or values, or a dictionary of them by names of your own; their budgets are ignored.
        budgets: rows per kv head and layer on average, or shares of a text.
        following: number of last tokens of each text that policies do not see.
        key: random key or seed, for policies that draw.

    Returns:
        The figure.

    Raises:
        ValueError: for texts that are empty or too long for the model, and budgets that cannot be honoured.
    """
    return measured(
        params,
        texts,
        [BudgetsMeasure(grid(params, policies, budgets))],
        following=following,
        key=key,
    )[0]


class BudgetsMeasure(PolicyMeasure):
    """`Measure` class behind `budgets`: counts the rows that each policy keeps; uses no layer outputs."""

    def of_text(self, text: Text, layers: list[Arrays]) -> Arrays:
        """Tuple of one array `[C, L, K]`: numbers of rows kept, by cell (policy and budget), layer and kv head."""
        return (self.counts(text),)

    def figure(self, texts: list[Text], found: list[Arrays]) -> Budgets:
        """`Budgets` from the counts of all texts: means over texts (`rows`), sums over layers and heads (`totals`)."""
        counts = self.by_policy([each for (each,) in found])
        return Budgets(
            rows=mean_of(list(np.moveaxis(counts, 2, 0))),
            totals=counts.sum(axis=(3, 4)),
            policies=self.grid.names,
            budgets=self.grid.budgets,
            lengths=tuple(text.prompt for text in texts),
        )
