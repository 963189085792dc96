"""What all figures of an analysis have in common: arrays, records and a picture."""

import abc
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class Figure(abc.ABC):
    """What was found in some texts; its fields are numbers and arrays."""

    @abc.abstractmethod
    def picture(self, path: str | Path) -> None:
        """Draws it, fit for a paper.

        Args:
            path: where to; the suffix says how, such as .png or .svg.

        Raises:
            ImportError: without matplotlib, naming the extra that brings it.
        """

    @abc.abstractmethod
    def records(self) -> list[dict[str, Any]]:
        """What a table says of it: names, and numbers that JSON has."""

    def arrays(self) -> dict[str, np.ndarray]:
        """All fields as arrays, as `np.savez` takes them."""
        return {field.name: np.asarray(getattr(self, field.name)) for field in dataclasses.fields(self)}


def stacked(parts: list[np.ndarray]) -> np.ndarray:
    """The mean over texts, float32."""
    return np.mean(np.stack(parts).astype(np.float64), axis=0).astype(np.float32)


def error(values: np.ndarray) -> float:
    """The standard error of some texts' mean; NaN for one alone."""
    return float(np.std(values, ddof=1) / len(values) ** 0.5) if len(values) > 1 else float("nan")
