"""Policies by name, for command lines and configuration files: `POLICIES`, and the documentation of fields."""

import difflib
import inspect
import re
from collections.abc import Mapping
from typing import Any

from jaxkv._errors import require
from jaxkv.policies.policy import Policy

# Classes by name, in order of registration.
POLICIES: dict[str, type[Policy]] = {}


def register(cls: type[Policy] | None = None, *, name: str = "") -> Any:
    """Class decorator: add a policy class to `POLICIES` by name, and return it; a decorator if only a name is given.

    Args:
        cls: the class; absent in `@register(name=...)`.
        name: its name; by default the class', in lower case.

    Returns:
        The class; a decorator, if only a name was given.

    Raises:
        ValueError: for a name that another class has.
        TypeError: for anything but a class derived from `Policy`.
    """
    if cls is None:
        return lambda cls: register(cls, name=name)
    if not (isinstance(cls, type) and issubclass(cls, Policy)):
        raise TypeError(f"cls={cls!r}: not a policy. Give a class derived from Policy.")
    known = _normalise_policy_name(name or cls.__name__)
    mine = POLICIES.setdefault(known, cls)
    same = (mine.__module__, mine.__qualname__) == (cls.__module__, cls.__qualname__)
    require(same, "name", known, f"{mine.__module__}.{mine.__qualname__} has it: choose another")
    # A notebook cell that runs again creates its class again.
    POLICIES[known] = cls
    return cls


def _normalise_policy_name(name: str) -> str:
    """Return the name of a policy in lower case, without hyphens and underscores."""
    return name.lower().replace("-", "").replace("_", "")


def find_policy_class(name: str, field: str = "policy") -> type[Policy]:
    """Return the policy class of a name, in any case or hyphenation; ValueError with similar names if unknown."""
    plain = _normalise_policy_name(name)
    plain = "full" if plain == "fullkv" else plain
    near = difflib.get_close_matches(plain, POLICIES, n=2)
    meant = f"; did you mean {' or '.join(near)}?" if near else ""
    require(
        plain in POLICIES,
        field,
        name,
        f"no such policy; known policies: {', '.join(POLICIES)}{meant}",
    )
    return POLICIES[plain]


def resolve_policy(
    given: Any, *, field: str = "policy", options: Mapping[str, Any] | None = None
) -> Policy:
    """Return a policy: an instance unchanged, a name or class created with `options` as fields; None gives `FullKV`.

    Error messages call the argument `field`.
    """
    if isinstance(given, Policy):
        remedy = "only generate() and engines know it: give a number of tokens, such as 64"
        known = field == "base" or given.set_question_window(1) is given
        require(known, "window", "question", remedy)
        return given
    given = "full" if given is None else given
    cls = find_policy_class(given, field) if isinstance(given, str) else given
    if not (isinstance(cls, type) and issubclass(cls, Policy)):
        remedy = "give a policy such as SnapKV(budget=256), or a name such as 'snapkv'"
        raise TypeError(f"{field}={type(given).__name__}: {remedy}")
    return cls(**(options or {}))


def takes_budget(cls: type[Policy]) -> bool:
    """Return True if a policy class accepts a budget of entries kept or attended to; FullKV, for one, does not."""
    if cls().composed.budget is not None:
        return True
    try:
        # The whole prompt: small numbers may be invalid, as 1 is for Quest's pages.
        cls(budget=1.0)
    except ValueError:
        return False
    return True


def parse_field_descriptions(cls: type[Any]) -> dict[str, str]:
    """Return a dict of field descriptions, from "Attributes:" in the docstrings of a class and its bases."""
    about: dict[str, str] = {}
    for each in reversed(cls.__mro__):
        lines = inspect.cleandoc(each.__doc__ or "").splitlines()
        start = lines.index("Attributes:") + 1 if "Attributes:" in lines else len(lines)
        name = ""
        for line in lines[start:]:
            if line and not line.startswith(" "):
                break
            if match := re.fullmatch(r"    (\w+): (.*)", line):
                name = match[1]
                about[match[1]] = match[2]
            elif name and line.strip():
                about[name] += " " + line.strip()
    return about
