"""RULER's metrics, of one answer: scripts/eval/synthetic/constants.py and scripts/eval/evaluate.py."""

import re
from collections.abc import Sequence

_CONTROL = re.compile(r"[\x00-\x1f]")


def cleaned(prediction: str) -> str:
    """An answer as the metrics read it: control characters are line ends, and there is no space around it."""
    return _CONTROL.sub("\n", prediction.strip()).strip()


def string_match_all(prediction: str, references: Sequence[str]) -> float:
    """The share of the references that occur in the answer, whatever the case.

    Args:
        prediction: what the model said.
        references: what is right, at least one.

    Returns:
        A share in [0, 1].
    """
    said = cleaned(prediction).lower()
    return sum(each.lower() in said for each in references) / len(references)


def string_match_part(prediction: str, references: Sequence[str]) -> float:
    """Whether any of the references occurs in the answer, whatever the case.

    Args:
        prediction: what the model said.
        references: what is right, at least one.

    Returns:
        1.0 or 0.0.
    """
    said = cleaned(prediction).lower()
    return float(any(each.lower() in said for each in references))
