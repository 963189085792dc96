"""RULER's tasks by name, as its scripts/synthetic.yaml configures them."""

import dataclasses
import string
from typing import Any

from jaxkv._errors import require
from jaxkv.evals.ruler import chains, niah
from jaxkv.evals.ruler.chains import Chains
from jaxkv.evals.ruler.niah import Needles
from jaxkv.evals.ruler.recipe import Counter, Recipe, fit
from jaxkv.evals.ruler.wording import NOISE, SENTENCES, SMALL_WORDS, Wording, pieces

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
NAMES = (*_NIAH, "vt")
# Of a solved example of variable tracking; RULER's.
_SHOT_TOKENS = 500


def recipe_of(name: str, *, wording: Wording, length: int, count: Counter) -> Recipe:
    """How a task's prompts are made.

    Args:
        name: one of `NAMES`.
        wording: the words.
        length: tokens of the prompts and their answers, which some tasks depend on.
        count: a prompt's tokens.

    Returns:
        The recipe, for `Cell.of`.

    Raises:
        ValueError: for another name.
    """
    require(name in NAMES, "tasks", name, f"take some of {', '.join(NAMES)}")
    if name in _NIAH:
        return _needles(wording, _NIAH[name])
    if not wording.shots:
        return Chains(wording=wording, new_tokens=8)
    alone = Chains(wording=wording, new_tokens=0)
    return Chains(wording=wording, new_tokens=30, shot=fit(alone, min(_SHOT_TOKENS, length), count))


def small_vocabulary() -> tuple[str, ...]:
    """Every word, digit and mark that prompts and answers of the small wording are made of, without space between.

    Returns:
        The pieces, sorted; `pieces` of any such text lie among them.
    """
    templates = (*NOISE, *SENTENCES, *niah.TEMPLATES, niah.NEEDLE, *chains.TEMPLATES)
    # What slots are called is no word of a prompt's.
    fixed = [text for template in templates for text, *_ in string.Formatter().parse(template)]
    found = pieces(" ".join([*fixed, "number numbers uuid uuids 0123456789 , and . - ="]))
    return tuple(sorted({*found, *SMALL_WORDS, *(word.upper() for word in SMALL_WORDS)}))


def _needles(wording: Wording, settings: dict[str, Any]) -> Needles:
    recipe = Needles(wording=wording, new_tokens=128, **settings)
    if wording.name == "official":
        return recipe
    # Digits, and a comma or the like behind them.
    tokens = (11 if recipe.value_kind == "uuids" else 6) * recipe.values * recipe.queries
    return dataclasses.replace(recipe, new_tokens=tokens)
