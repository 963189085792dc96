"""Base classes of measurement results: arrays, table rows and a picture; mean and standard error over texts."""

import abc
import dataclasses
import math
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from jaxkv._errors import require

# The largest float below 1.
BELOW_ONE = math.nextafter(1.0, 0.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Figure(abc.ABC):
    """Base class of a measurement's result: arrays and numbers, with a picture file and table rows made from them.

    Attributes:
        layers: index in the model of each of the L layers that were measured: of all without a window; () for 0 to
            L - 1.
    """

    layers: tuple[int, ...] = ()

    def indices(self, count: int) -> tuple[int, ...]:
        """Tuple of the indices in the model of the figure's `count` layers."""
        return self.layers or tuple(range(count))

    @abc.abstractmethod
    def picture(self, path: str | Path) -> None:
        """Writes the figure as a picture file in the size of a paper's figure.

        Args:
            path: the file; its suffix names the format, such as .png or .svg.

        Raises:
            ImportError: without matplotlib, naming the extra that brings it.
        """

    @abc.abstractmethod
    def records(self) -> list[dict[str, Any]]:
        """Table rows as a list of dictionaries {column name: text or number}, ready for JSON.

        Returns:
            Dictionaries of equal keys.
        """

    def _repr_png_(self) -> bytes | None:
        """Bytes of the picture as PNG, for Jupyter to show; None without matplotlib."""
        try:
            with tempfile.TemporaryDirectory() as folder:
                self.picture(path := Path(folder) / "figure.png")
                return path.read_bytes()
        except ImportError:
            return None

    def arrays(self) -> dict[str, np.ndarray]:
        """Dict {field name: the field as a numpy array}, ready for `np.savez`."""
        return {
            field.name: np.asarray(getattr(self, field.name)) for field in dataclasses.fields(self)
        }


class PolicyFigure(Figure):
    """`Figure` of policies at several budgets: the first two axes of its arrays are policy and budget."""

    policies: tuple[str, ...]
    budgets: tuple[int | float, ...]

    def index_of(self, policy: str) -> int:
        """Index of a policy on the arrays' first axis, by its name; ValueError for an unknown name."""
        require(
            policy in self.policies, "policy", policy, f"give one of {', '.join(self.policies)}"
        )
        return self.policies.index(policy)

    def records(self) -> list[dict[str, Any]]:
        """Table rows as a list of dictionaries, one for each policy at each budget."""
        return [
            {"policy": policy, "budget": budget, **self._record(at, column)}
            for at, policy in enumerate(self.policies)
            for column, budget in enumerate(self.budgets)
        ]

    @abc.abstractmethod
    def _record(self, policy: int, budget: int) -> dict[str, float]:
        """Dict {column name: number} of one table row, that of a policy and a budget given by index."""


def mean_of(parts: list[np.ndarray]) -> np.ndarray:
    """Mean over texts of arrays of one shape, as float32."""
    return np.mean(np.stack(parts).astype(np.float64), axis=0).astype(np.float32)


def error(values: np.ndarray) -> float:
    """Standard error of the mean of `values`, one per text; NaN for a single value."""
    return float(np.std(values, ddof=1) / len(values) ** 0.5) if len(values) > 1 else float("nan")
