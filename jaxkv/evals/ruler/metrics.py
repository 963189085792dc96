"""RULER's metrics of one answer, as in its scripts/eval/synthetic/constants.py and scripts/eval/evaluate.py."""

import re
from collections.abc import Sequence

_CONTROL = re.compile(r"[\x00-\x1f]")


def cleaned(prediction: str) -> str:
    """The prediction without whitespace at its ends, and with control characters replaced by line feeds."""
    return _CONTROL.sub("\n", prediction.strip()).strip()


def string_match_all(prediction: str, references: Sequence[str]) -> float:
    """Share in [0, 1] of the references that occur in the prediction, in any case and also inside a word."""
    text = cleaned(prediction).lower()
    return sum(each.lower() in text for each in references) / len(references)


def string_match_part(prediction: str, references: Sequence[str]) -> float:
    """1 if any of the references occurs in the prediction, in any case and also inside a word; else 0."""
    text = cleaned(prediction).lower()
    return float(any(each.lower() in text for each in references))
