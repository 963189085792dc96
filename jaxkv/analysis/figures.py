"""Bases of all figures: arrays, table records and a picture; and means and standard errors over texts."""

import abc
import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np

from jaxkv._errors import require

# The largest share that is not all of something.
BELOW_ONE = math.nextafter(1.0, 0.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Figure(abc.ABC):
    """Arrays and numbers measured in some texts."""

    @abc.abstractmethod
    def picture(self, path: str | Path) -> None:
        """Draws the figure, fit for a paper.

        Args:
            path: the file; its suffix names the format, such as .png or .svg.

        Raises:
            ImportError: without matplotlib, naming the extra that brings it.
        """

    @abc.abstractmethod
    def records(self) -> list[dict[str, Any]]:
        """Rows of a table: names to text and numbers, as JSON has them.

        Returns:
            Dictionaries of equal keys.
        """

    def arrays(self) -> dict[str, np.ndarray]:
        """All fields as arrays by name, as `np.savez` takes them."""
        return {field.name: np.asarray(getattr(self, field.name)) for field in dataclasses.fields(self)}


class PolicyFigure(Figure):
    """Figure of policies, each at every budget: the first two axes of its arrays are the policy and the budget."""

    policies: tuple[str, ...]
    budgets: tuple[int | float, ...]

    def index_of(self, policy: str) -> int:
        """Index of a policy by its name."""
        require(policy in self.policies, "policy", policy, f"give one of {', '.join(self.policies)}")
        return self.policies.index(policy)

    def records(self) -> list[dict[str, Any]]:
        """Rows of a table, one for each policy at each budget."""
        return [
            {"policy": policy, "budget": budget, **self._record(at, column)}
            for at, policy in enumerate(self.policies)
            for column, budget in enumerate(self.budgets)
        ]

    @abc.abstractmethod
    def _record(self, policy: int, budget: int) -> dict[str, float]:
        """Numbers of the table's row for a policy and a budget, given by index."""


def mean_of(parts: list[np.ndarray]) -> np.ndarray:
    """Mean over texts, float32."""
    return np.mean(np.stack(parts).astype(np.float64), axis=0).astype(np.float32)


def error(values: np.ndarray) -> float:
    """Standard error of the mean over texts; NaN for a single text."""
    return float(np.std(values, ddof=1) / len(values) ** 0.5) if len(values) > 1 else float("nan")
