"""Policies by name, for command lines and configuration files."""

import dataclasses
import difflib
import inspect
import re
from collections.abc import Mapping
from typing import Any

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
        name: one of `POLICIES`, in any case, with or without hyphens.

    Returns:
        Its class.

    Raises:
        ValueError: for a name that is not known; the message lists those that are, and the nearest.
    """
    return _class_of(name, "policy")


def _class_of(name: str, field: str) -> type[Policy]:
    plain = name.lower().replace("-", "").replace("_", "")
    plain = name_of(FullKV) if plain == FullKV.__name__.lower() else plain
    near = difflib.get_close_matches(plain, POLICIES, n=2)
    meant = f"; did you mean {' or '.join(near)}?" if near else ""
    require(plain in POLICIES, field, name, f"no such policy; known policies: {', '.join(POLICIES)}{meant}")
    return POLICIES[plain]


def as_policy(given: Any, *, field: str = "policy", options: Mapping[str, Any] | None = None) -> Policy:
    """The policy that somebody means.

    Args:
        given: a policy; the name of one, or its class, for one with its defaults; None keeps everything.
        field: the argument's name, for error messages.
        options: fields of a policy that is only named.

    Returns:
        The policy.

    Raises:
        ValueError: for a name that is not known; the message offers the nearest one.
        TypeError: for anything else.
    """
    if isinstance(given, Policy):
        return given
    cls = FullKV if given is None else _class_of(given, field) if isinstance(given, str) else given
    if not (isinstance(cls, type) and issubclass(cls, Policy)):
        remedy = "give a policy such as SnapKV(budget=256), or a name such as 'snapkv'"
        raise TypeError(f"{field}={type(given).__name__}: {remedy}")
    needed = [f.name for f in dataclasses.fields(cls) if f.init and _has_no_default(f)]
    if needed:
        raise TypeError(f"{field}={cls.__name__}: {', '.join(needed)} must be said: give {cls.__name__}(...)")
    return cls(**(options or {}))


def _has_no_default(field: dataclasses.Field) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


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
