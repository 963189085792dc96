"""Auto: choose a policy by what is known of the requests."""

import dataclasses
import functools

from jaxkv._checks import is_strictly_equal
from jaxkv._dataclasses import frozen_dataclass
from jaxkv._errors import require
from jaxkv.policies.parts import Parts
from jaxkv.policies.policy import Policy
from jaxkv.policies.registry import register, resolve_policy

# By `question` and `answers`: a policy's name, fields of its own, and why.
_CHOICES = {
    ("seen", "short"): ("criticalkv", {}, "it keeps what the prompt's last tokens attend to"),
    ("later", "short"): ("compactor", {}, "it scores entries by prompt alone, in one pass"),
    ("seen", "long"): ("rkv", {"every": 128}, "it drops repetitions while the answer grows"),
    ("later", "long"): ("rkv", {"every": 128}, "it drops repetitions while the answer grows"),
}


@register
@frozen_dataclass
class Auto(Policy):
    """Choose the policy that scored best, by two facts about requests: where the question is, how long answers are.

    The choice follows the leaderboard's scores of small models. `chosen` is the policy, `reason` says why.

    Attributes:
        question: "seen" if the question ends the prompt, "later" if it follows when the prompt is compressed.
        answers: "short" if answers are appended to the compressed prompt, "long" to compress sampled tokens, too.
    """

    question: str = "seen"
    answers: str = "short"

    paper = "jaxkv's own"

    @property
    def reason(self) -> str:
        """Why `chosen` was chosen, a clause."""
        return _CHOICES[self.question, self.answers][2]

    @functools.cached_property
    def chosen(self) -> Policy:
        """The chosen policy, with the budget and the shared fields given here."""
        name, fields, _ = _CHOICES[self.question, self.answers]
        given = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(Policy)
            if field.init and not is_strictly_equal(getattr(self, field.name), field.default)
        }
        return resolve_policy(name, options=fields | given)

    def _check_fields(self) -> None:
        for name, known in (("question", ("seen", "later")), ("answers", ("short", "long"))):
            given = getattr(self, name)
            require(given in known, name, given, f"unknown: give {' or '.join(map(repr, known))}")

    def build_policy_parts(self) -> Parts:
        """Return the chosen policy's `Parts`."""
        return self.chosen.composed
