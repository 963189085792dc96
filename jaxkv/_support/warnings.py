"""Warnings that are given once per process and subject, at the user's own line of code."""

import contextlib
import sys
import warnings
from pathlib import Path

_PACKAGE = str(Path(__file__).parents[1])
# The stack frame of the decorator `@settled` lies between a user's frame and jaxkv's.
_DECORATORS = contextlib.__file__
_told: set[tuple[type[Warning], str]] = set()


class UnseenQuestionWarning(UserWarning):
    """Warning that a document was compressed by its end's attention before any question about it was seen."""


def warn_once(category: type[Warning], subject: str, message: str) -> None:
    """Issues a warning at the user's line of code, once per process for each category and subject.

    `subject` is, for example, a policy class's name; the message should name the remedy.
    """
    if (category, subject) in _told:
        return
    warnings.warn(message, category, stacklevel=_stacklevel())
    # Recorded after the warning, so that with warnings as errors every call raises, not only the first.
    _told.add((category, subject))


def forget() -> None:
    """Clears the record of warnings given, so that each is given once more; for tests."""
    _told.clear()


def _stacklevel() -> int:
    """Number of stack frames from `warn_once` to the user's code, for `warnings.warn`."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and _ours(frame.f_code.co_filename):
        frame, level = frame.f_back, level + 1
    return level


def _ours(file: str) -> bool:
    """True if a source file belongs to this package or is contextlib, whose decorator wraps the public functions."""
    return file.startswith(_PACKAGE) or file == _DECORATORS
