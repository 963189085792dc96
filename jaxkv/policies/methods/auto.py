"""Auto: choose a policy by what is known of the requests."""

import functools
from typing import Any

from jaxkv._dataclasses import frozen_dataclass
from jaxkv._errors import require
from jaxkv.policies.parts import Parts
from jaxkv.policies.policy import Policy
from jaxkv.policies.registry import register, resolve_policy
from jaxkv.policies.wrapper import collect_given_fields

# Name, fields of its own, and reason of each choice.
_Choice = tuple[str, dict[str, Any], str]
_SEEN: _Choice = ("criticalkv", {}, "it keeps what the prompt's last queries attend to")
_SEEN_SMALL: _Choice = ("cake", {}, "layers compete for the few entries")
_LATER: _Choice = ("compactor", {}, "it scores entries by the prompt alone, in one pass")
_LATER_LARGE: _Choice = ("kvzip", {"weighted": True}, "it keeps what repeating the prompt needs")
_LONG: _Choice = ("triattention", {}, "it scores new entries, too, for queries to come")
# Shares of the prompt's entries below which layers compete, and from which the second pass pays.
_SMALL, _LARGE = 0.05, 0.1


@register
@frozen_dataclass
class Auto(Policy):
    """Choose the policy that scored best, by two facts about requests: where the question is, how long answers are.

    The choice follows the leaderboard's scores of small models. `chosen` is the policy, `reason` says why.

    A later question and a share of 10 % or more choose KVzip+, whose prefill takes three times FullKV's time.

    Attributes:
        question: "seen" if the question ends the prompt, "later" if it follows when the prompt is compressed.
        answers: "short" if answers are appended to the compressed prompt, "long" to compress sampled tokens, too.
    """

    question: str = "seen"
    answers: str = "short"

    paper = "jaxkv's own"

    @property
    def _choice(self) -> _Choice:
        if self.answers == "long":
            return _LONG
        share = self.budget if isinstance(self.budget, float) else None
        if self.question == "seen":
            # Layers do not compete again while decoding.
            is_small = share is not None and share < _SMALL and self.every is None
            return _SEEN_SMALL if is_small else _SEEN
        return _LATER_LARGE if share is not None and share >= _LARGE else _LATER

    @property
    def reason(self) -> str:
        """Why `chosen` was chosen, a clause."""
        return self._choice[2]

    @functools.cached_property
    def chosen(self) -> Policy:
        """The chosen policy, with the budget and the shared fields given here."""
        name, fields, _ = self._choice
        return resolve_policy(name, options=fields | collect_given_fields(self))

    def _check_fields(self) -> None:
        for name, known in (("question", ("seen", "later")), ("answers", ("short", "long"))):
            given = getattr(self, name)
            require(given in known, name, given, f"unknown: give {' or '.join(map(repr, known))}")

    def fill_model_fields(self, layers: int, found: tuple[int, ...] | None) -> Policy:
        """Return the chosen policy, filled in: saved caches name it, and no later version chooses another for them."""
        return self.chosen.fill_model_fields(layers, found)

    def build_policy_parts(self) -> Parts:
        """Return the chosen policy's `Parts`."""
        return self.chosen.composed
