"""What a policy's class may say, checked when one is made: a part of the wrong kind, or misspelt, would do nothing."""

import dataclasses
import difflib
import functools
import types
from collections.abc import Callable
from typing import Any

from jaxkv._values import as_real, is_whole, plain
from jaxkv.policies.budgets import LayerBudgets
from jaxkv.policies.protocol import Carry, Scorer, Settings
from jaxkv.policies.select import HeadBudgets

# Names as near as this to a part that a class leaves as it is are taken for it.
_NEAR = 0.85


def _is(kind: type) -> Callable[[Any], bool]:
    # A class has the attributes that its instances have.
    return lambda value: isinstance(value, kind) and not isinstance(value, type)


_KINDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "kept_first": (lambda value: is_whole(plain(value)), "a number of rows, 0 or more"),
    "kept_last": (lambda value: is_whole(plain(value)), "a number of rows, 0 or more"),
    "layers": (_is(LayerBudgets), "budgets over layers, UniformLayers() say"),
    "heads": (_is(HeadBudgets), "budgets over heads, UniformHeads() say"),
    "rolling": (_is(bool), "True or False"),
    "recent_share": (lambda value: 0 <= (-1.0 if (s := as_real(value)) is None else s) <= 1, "a share from 0 to 1"),
    "evicts": (_is(bool), "True or False"),
    "carries_over": (_is(bool), "True or False"),
    "by_chunks": (_is(bool), "True or False"),
    "settings": (_is(Settings), "Settings(...)"),
}


def check_parts(policy: Any, root: Any) -> None:
    """Refuses parts that cannot be what they are meant to be.

    Args:
        policy: a policy under construction.
        root: the class whose public names are all that the engine reads.

    Raises:
        TypeError: naming the part, what it is and what is wanted.
    """
    cls: Any = type(policy)
    wrong = misspelt(cls, root)
    if wrong is not None:
        name, meant = wrong
        remedy = f"no part of a policy has this name, and nobody would read it: `{meant}` was meant, or begin it with _"
        raise TypeError(f"{cls.__name__}.{name}: {remedy}")
    for name, member in vars(root).items():
        if name.startswith("_") or not isinstance(member, (property, types.FunctionType)):
            continue
        if isinstance(member, property):
            _check_value(f"{cls.__name__}.{name}", name, getattr(policy, name))
        elif not callable(getattr(policy, name)):
            raise TypeError(f"{cls.__name__}.{name}: a method with arguments is wanted: leave out @property")


def _check_value(label: str, name: str, value: Any) -> None:
    if isinstance(value, types.MethodType) and not isinstance(value.__self__, type):
        raise TypeError(f"{label}: it is a method: write @property above it")
    if name == "scorer":
        check_scorer(label, value)
    elif name in _KINDS:
        fits, wanted = _KINDS[name]
        if not fits(value):
            raise TypeError(f"{label}={value!r}: give {wanted}")


def check_scorer(label: str, scorer: Any) -> None:
    """Refuses what is no scorer.

    Args:
        label: what to call it.
        scorer: what a policy gave; None is allowed.

    Raises:
        TypeError: naming what it lacks.
    """
    if scorer is None:
        return
    if isinstance(scorer, type):
        raise TypeError(f"{label}={scorer.__name__}: it is a class: give an instance, {scorer.__name__}()")
    missing = [each for each in ("queries", "sums", "carry", "mass", "scores") if not hasattr(scorer, each)]
    if missing or not isinstance(scorer, Scorer):
        raise TypeError(f"{label}={scorer!r}: a scorer has {', '.join(missing)}, too: see jaxkv.policies.Scorer")
    for name, fits, wanted in (
        ("queries", is_whole, "a number of last queries, 0 or more"),
        ("sums", lambda value: isinstance(value, bool), "True or False"),
        ("carry", lambda value: value is None or isinstance(value, Carry), "a Carry, or None"),
        ("mass", callable, "a method"),
        ("scores", callable, "a method"),
    ):
        value = getattr(scorer, name)
        if not fits(value):
            raise TypeError(f"{label}.{name}={value!r}: give {wanted}")
    try:
        hash(scorer)
    except TypeError as error:
        remedy = f"programs are kept by it ({error}): make it a frozen dataclass of numbers and tuples"
        raise TypeError(f"{label}={type(scorer).__name__}: {remedy}") from None


@functools.cache
def misspelt(cls: Any, root: Any) -> tuple[str, str] | None:
    """A public name of a class that is nearly a part's, where the part itself is left as it is.

    Args:
        cls: a policy's class.
        root: the class whose public names are the parts.

    Returns:
        The name and the part's, or None.
    """
    below = cls.__mro__[: cls.__mro__.index(root)]
    said = {name for each in below for name in vars(each)}
    fields = {field.name for field in dataclasses.fields(cls)} if dataclasses.is_dataclass(cls) else set()
    parts = [name for name in vars(root) if not name.startswith("_") and name not in said]
    for each in below:
        if each.__module__.startswith("jaxkv."):
            continue
        for name in vars(each):
            if name.startswith("_") or name in fields or hasattr(root, name):
                continue
            near = difflib.get_close_matches(name, parts, n=1, cutoff=_NEAR)
            if near:
                return name, near[0]
    return None
