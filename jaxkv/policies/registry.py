"""Policies by name, for command lines and configuration files."""

import dataclasses
import difflib
import inspect
import re

from jaxkv._errors import require
from jaxkv.policies.adakv import AdaKV
from jaxkv.policies.base import Policy
from jaxkv.policies.cam import CaM
from jaxkv.policies.controls import KNorm, Random
from jaxkv.policies.criticalkv import CriticalKV
from jaxkv.policies.d2o import D2O
from jaxkv.policies.full import FullKV
from jaxkv.policies.heavy import H2O, TOVA, RoCo
from jaxkv.policies.omnikv import BrutalOffload, OmniKV
from jaxkv.policies.pyramidinfer import PyramidInfer
from jaxkv.policies.pyramidkv import PyramidKV
from jaxkv.policies.snapkv import SnapKV
from jaxkv.policies.streaming import LocalWindow, StreamingLLM

_CLASSES: tuple[type[Policy], ...] = (
    FullKV,
    StreamingLLM,
    SnapKV,
    PyramidKV,
    AdaKV,
    H2O,
    D2O,
    RoCo,
    TOVA,
    CaM,
    CriticalKV,
    PyramidInfer,
    OmniKV,
    BrutalOffload,
    LocalWindow,
    KNorm,
    Random,
)


def name_of(cls: type[Policy]) -> str:
    """The name of a policy's class.

    Args:
        cls: the class.

    Returns:
        Its lower-case name; FullKV's is "full".
    """
    return "full" if cls is FullKV else cls.__name__.lower()


POLICIES: dict[str, type[Policy]] = {name_of(cls): cls for cls in _CLASSES}


def policy_class(name: str) -> type[Policy]:
    """Looks up a policy.

    Args:
        name: one of `POLICIES`, in any case.

    Returns:
        Its class.

    Raises:
        ValueError: for a name that is not known; the message lists those that are, and the nearest.
    """
    remedy = f"no such policy; known policies: {', '.join(POLICIES)}"
    nearest = difflib.get_close_matches(name.lower(), POLICIES, n=2)
    if nearest:
        remedy += f"; did you mean {' or '.join(nearest)}?"
    require(name.lower() in POLICIES, "policy", name, remedy)
    return POLICIES[name.lower()]


def defaults(cls: type[Policy]) -> dict[str, str]:
    """What a policy is made with when nothing is said.

    Args:
        cls: the class.

    Returns:
        Its fields' names and defaults, as Python would write them.
    """
    return {field.name: repr(field.default) for field in dataclasses.fields(cls)}


def documented(cls: type[Policy]) -> dict[str, str]:
    """What a policy's docstring, and those it inherits, say of its fields.

    Args:
        cls: the class.

    Returns:
        Each field's line under "Attributes:", in one piece; the nearest class's where several have one.
    """
    about: dict[str, str] = {}
    for each in reversed(cls.__mro__):
        lines = inspect.cleandoc(each.__doc__ or "").splitlines()
        start = lines.index("Attributes:") + 1 if "Attributes:" in lines else len(lines)
        name = ""
        for line in lines[start:]:
            if line and not line.startswith(" "):
                break
            if match := re.fullmatch(r"    (\w+): (.*)", line):
                name, about[match[1]] = match[1], match[2]
            elif name and line.strip():
                about[name] += " " + line.strip()
    return about
