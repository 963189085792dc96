"""Recipes of RULER's tasks by name, as its scripts/synthetic.yaml configures them."""

import dataclasses
from typing import Any

from jaxkv._errors import require
from jaxkv.evals.ruler.chains import Chains
from jaxkv.evals.ruler.counted import Common, Frequent
from jaxkv.evals.ruler.niah import Needles
from jaxkv.evals.ruler.qa import FILES, Documents, read
from jaxkv.evals.ruler.recipe import Counter, Recipe, fit
from jaxkv.evals.ruler.wording import SMALL_WORDS, Wording

_NIAH: dict[str, dict[str, Any]] = {
    "niah_single_1": {"haystack": "noise"},
    "niah_single_2": {"haystack": "essay"},
    "niah_single_3": {"haystack": "essay", "value_kind": "uuids"},
    "niah_multikey_1": {"haystack": "essay", "keys": 4},
    "niah_multikey_2": {"haystack": "needle"},
    "niah_multikey_3": {"haystack": "needle", "key_kind": "uuids", "value_kind": "uuids"},
    "niah_multivalue": {"haystack": "essay", "values": 4},
    "niah_multiquery": {"haystack": "essay", "queries": 4},
}
# Made from words alone; the others read questions from files.
MADE = (*_NIAH, "vt", "cwe", "fwe")
NAMES = (*MADE, *FILES)
# RULER's: tokens of a solved example of variable tracking, and from where on lists are long.
_SHOT_TOKENS = 500
_LONG = 4096


def recipe_of(
    name: str, *, wording: Wording, length: int, count: Counter, data: str | None = None
) -> Recipe:
    """Recipe of the RULER task `name`, configured for prompts and answers of `length` tokens together.

    `data` is the folder of the files of qa_1 and qa_2; without them it is a FileNotFoundError that names them. Unknown
    tasks, and those that the small wording has no words for, are refused.
    """
    require(name in NAMES, "tasks", name, f"take some of {', '.join(NAMES)}")
    small = wording.name == "small"
    if name in _NIAH:
        return _needles(wording, _NIAH[name])
    if name == "vt":
        return Chains(wording=wording, new_tokens=8) if small else _tracking(wording, length, count)
    if name == "cwe":
        return _common(wording, length)
    if name == "fwe":
        new = 10 if small else 50
        # At least a fifth word, so that the answer's three are more frequent than another.
        different = max(5, (length - new) // 50)
        return Frequent(
            wording=wording,
            new_tokens=new,
            vocabulary=min(different, len(SMALL_WORDS) + 1) if small else different,
        )
    require(not small, "tasks", name, "the small wording has no documents: take the official one")
    return Documents(wording=wording, new_tokens=32, data=read(data, name))


def _needles(wording: Wording, settings: dict[str, Any]) -> Needles:
    """`Needles` recipe of a niah task with these settings; in the small wording fewer tokens are drawn."""
    recipe = Needles(wording=wording, new_tokens=128, **settings)
    if wording.name == "official":
        return recipe
    # Digits, with a comma and a space or the like behind them, and a mark in front.
    tokens = (11 if recipe.value_kind == "uuids" else 6) * recipe.values * recipe.queries + 2
    return dataclasses.replace(recipe, new_tokens=tokens)


def _tracking(wording: Wording, length: int, count: Counter) -> Chains:
    """`Chains` recipe of variable tracking, with a solved example before each text."""
    alone = Chains(wording=wording, new_tokens=0)
    return Chains(wording=wording, new_tokens=30, shot=fit(alone, min(_SHOT_TOKENS, length), count))


def _common(wording: Wording, length: int) -> Common:
    """`Common` recipe of common words extraction, with counts of words for the wording and prompt length."""
    if wording.name == "small":
        # So few words that they have to occur more often as lists grow.
        often, seldom = (6, 1) if length < 1024 else (12, 2) if length < 2560 else (30, 3)
        return Common(wording=wording, new_tokens=34, often=often, seldom=seldom)
    if length < _LONG:
        return Common(wording=wording, new_tokens=120, often=6, seldom=1, shot=(20, 3, 1))
    return Common(wording=wording, new_tokens=120, often=30, seldom=3, shot=(40, 10, 3))
