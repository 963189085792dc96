"""RULER's tasks: synthetic prompts of any length that contain the answers to their questions.

References:
    Hsieh et al. 2024, "RULER: What's the Real Context Size of Your Long-Context Language Models?", and
    https://github.com/NVIDIA/RULER at c3f5e3b, from which templates and counts are taken.
"""

from jaxkv.evals.ruler.recipe import Cell, Counter, Prompt, Recipe, fit
from jaxkv.evals.ruler.task import MADE, NAMES, Ruler, recipe_of
from jaxkv.evals.ruler.wording import SMALL_WORDS, Wording, pieces, wording_of

__all__ = [
    "MADE",
    "NAMES",
    "SMALL_WORDS",
    "Cell",
    "Counter",
    "Prompt",
    "Recipe",
    "Ruler",
    "Wording",
    "fit",
    "pieces",
    "recipe_of",
    "wording_of",
]
