"""Warnings once per process and subject, at the user's own line."""

import contextlib
import sys
import warnings
from pathlib import Path

_PACKAGE = str(Path(__file__).parent)
# The decorator `@settled` stands between a user's call and ours.
_DECORATORS = contextlib.__file__
_told: set[tuple[type[Warning], str]] = set()


class UnseenQuestionWarning(UserWarning):
    """A document was compressed by the attention of its end, before any question about it was seen."""


def warn_once(category: type[Warning], subject: str, message: str) -> None:
    """Warns at the innermost line outside jaxkv, if this process has not warned of this category and subject before.

    The subject is a policy class' name, say; the message names the remedy.
    """
    if (category, subject) in _told:
        return
    warnings.warn(message, category, stacklevel=_stacklevel())
    # After it: where warnings are errors every call is refused, not the first one alone.
    _told.add((category, subject))


def forget() -> None:
    """Forgets which warnings were given, so that each comes once more, for tests."""
    _told.clear()


def _stacklevel() -> int:
    """Number of frames from `warn_once` to the user's, as `warnings.warn` takes it."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and _ours(frame.f_code.co_filename):
        frame, level = frame.f_back, level + 1
    return level


def _ours(file: str) -> bool:
    """True for a file of this package, or of the decorator around its doors."""
    return file.startswith(_PACKAGE) or file == _DECORATORS
