"""Policies by name, for command lines and configuration files."""

import dataclasses
import difflib
import inspect
import re
from collections.abc import Mapping
from typing import Any

from jaxkv._errors import require
from jaxkv.policies.policy import Method

POLICIES: dict[str, type[Method]] = {}


def register(cls: type[Method] | None = None, *, name: str = "") -> Any:
    """Makes a policy's class known by name: to `policy="snapkv"`, and to the command line with all its options.

    Args:
        cls: the class; a decorator's way of giving it.
        name: its name; by default the class', in lower case.

    Returns:
        The class; a decorator, if only a name was given.

    Raises:
        ValueError: for a name that another class has.
        TypeError: for what is no policy's class.
    """
    if cls is None:
        return lambda cls: register(cls, name=name)
    if not (isinstance(cls, type) and issubclass(cls, Method)):
        raise TypeError(f"register({cls!r}): give a class derived from Method")
    known = _spelled(name or cls.__name__)
    mine = POLICIES.setdefault(known, cls)
    same = (mine.__module__, mine.__qualname__) == (cls.__module__, cls.__qualname__)
    require(same, "name", known, f"{mine.__module__}.{mine.__qualname__} has it: choose another")
    # A notebook's cell that is run again makes its class anew.
    POLICIES[known] = cls
    return cls


def _spelled(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "")


def policy_class(name: str) -> type[Method]:
    """Looks up a policy.

    Args:
        name: one of `POLICIES`, in any case, with or without hyphens.

    Returns:
        Its class.

    Raises:
        ValueError: for a name that is not known; the message lists those that are, and the nearest.
    """
    return _class_of(name, "policy")


def _class_of(name: str, field: str) -> type[Method]:
    plain = _spelled(name)
    plain = "full" if plain == "fullkv" else plain
    near = difflib.get_close_matches(plain, POLICIES, n=2)
    meant = f"; did you mean {' or '.join(near)}?" if near else ""
    require(plain in POLICIES, field, name, f"no such policy; known policies: {', '.join(POLICIES)}{meant}")
    return POLICIES[plain]


def as_policy(given: Any, *, field: str = "policy", options: Mapping[str, Any] | None = None) -> Method:
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
    if isinstance(given, Method):
        return given
    given = "full" if given is None else given
    cls = _class_of(given, field) if isinstance(given, str) else given
    if not (isinstance(cls, type) and issubclass(cls, Method)):
        remedy = "give a policy such as SnapKV(budget=256), or a name such as 'snapkv'"
        raise TypeError(f"{field}={type(given).__name__}: {remedy}")
    needed = [f.name for f in dataclasses.fields(cls) if f.init and _has_no_default(f)]
    if needed:
        raise TypeError(f"{field}={cls.__name__}: {', '.join(needed)} must be said: give {cls.__name__}(...)")
    return cls(**(options or {}))


def _has_no_default(field: dataclasses.Field) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def defaults(cls: type[Method]) -> dict[str, str]:
    """What a policy is made with when nothing is said.

    Args:
        cls: the class.

    Returns:
        Its fields' names and defaults, as Python would write them.
    """
    return {field.name: repr(field.default) for field in dataclasses.fields(cls)}


def takes_budget(cls: type[Method]) -> bool:
    """Whether a policy keeps, or reads, a part of a prompt, and can be told how large a part.

    Args:
        cls: the class.

    Returns:
        False for one that keeps everything, such as FullKV.
    """
    if cls().parts().scorer is not None:
        return True
    try:
        cls(budget=1)
    except ValueError:
        return False
    return True


def documented(cls: type[Any]) -> dict[str, str]:
    """What a class' docstring, and those it inherits, say of its fields.

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
