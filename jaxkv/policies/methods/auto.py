"""Auto: choose a policy by what is known of the requests."""

import bisect
import contextlib
import functools
from collections.abc import Callable
from typing import Any

from jaxkv._dataclasses import frozen_dataclass
from jaxkv._errors import require
from jaxkv.models.config import ModelConfig
from jaxkv.policies.methods.cake import CAKE
from jaxkv.policies.methods.chunkkv import ChunkKV
from jaxkv.policies.methods.compactor import Compactor
from jaxkv.policies.methods.criticalkv import CriticalKV
from jaxkv.policies.methods.kvzip import KVGrad, KVzip
from jaxkv.policies.methods.snapkv import SnapKV
from jaxkv.policies.methods.triattention import TriAttention
from jaxkv.policies.parts import Parts
from jaxkv.policies.policy import Policy
from jaxkv.policies.registry import register
from jaxkv.policies.wrapper import collect_given_fields

# Builds a policy of shared fields; why.
_Choice = tuple[Callable[..., Policy], str]
_SEEN: _Choice = (CriticalKV, "it keeps what the prompt's last queries attend to")
_LATER: _Choice = (Compactor, "it scores entries by the prompt alone, in one pass")
_LONG: _Choice = (TriAttention, "it scores new entries, too, for queries to come")
_REPEATED: _Choice = (KVGrad, "it keeps what repeating the prompt needs, by gradients")


def _compete_by_layer(**fields: Any) -> Policy:
    """CAKE, whose window leaves places in 2 % of 1,000 tokens."""
    return CAKE(window=8, **fields)


def _watch_few(**fields: Any) -> Policy:
    """CriticalKV, whose window leaves places in 5 % of 1,000 tokens."""
    return CriticalKV(base=SnapKV(window=16, **fields))


def _repeat_prompt(**fields: Any) -> Policy:
    """KVzip+, whose second pass weighs attention by values."""
    return KVzip(weighted=True, **fields)


# Shares of the prompt's entries that part the best choices.
_SHARES = (0.05, 0.1, 0.25)
_BEST: dict[str, tuple[_Choice, ...]] = {
    "seen": (
        (_compete_by_layer, "layers compete for the few entries"),
        (_watch_few, _SEEN[1]),
        _SEEN,
        (ChunkKV, "it keeps whole chunks that the prompt's last queries attend to"),
    ),
    "later": (
        _LATER,
        _REPEATED,
        _REPEATED,
        (_repeat_prompt, "it keeps what repeating the prompt needs"),
    ),
}


@register
@frozen_dataclass
class Auto(Policy):
    """Choose the policy that scored best, by two facts about requests: where the question is, how long answers are.

    The choice follows the leaderboard's scores of small models. `chosen` is the policy, `reason` says why. For short
    answers a model that does not support it, such as one with experts, which have no gradients, gets CriticalKV or, for
    a later question, Compactor. These are also the choice for budgets that are no share.

    A later question chooses KVGrad from 5 % to below 25 %, and KVzip+ from there on. Their prefill takes nine and three
    times FullKV's time and needs a tokenizer. Small shares have smaller windows.

    Attributes:
        question: "seen" if the question ends the prompt, "later" if it follows when the prompt is compressed.
        answers: "short" if answers are appended to the compressed prompt, "long" to compress sampled tokens, too.
    """

    question: str = "seen"
    answers: str = "short"

    paper = "jaxkv's own"

    @property
    def _usual(self) -> _Choice:
        """Choice without a share of entries, and where the best one is rejected."""
        if self.answers == "long":
            return _LONG
        return _SEEN if self.question == "seen" else _LATER

    @property
    def _best(self) -> _Choice:
        share = self.budget
        # Entries that are chosen again while decoding were not measured.
        measured = self.answers == "short" and self.every is None
        if not (measured and isinstance(share, float)):
            return self._usual
        return _BEST[self.question][bisect.bisect(_SHARES, share)]

    def _choose(self, config: ModelConfig | None = None) -> tuple[Policy, str]:
        """Return the best policy, or the usual one if that rejects the fields given here or a model; and the reason."""
        fields = collect_given_fields(self)
        build, reason = self._best
        usual, its_reason = self._usual
        with contextlib.suppress(ValueError):
            policy = build(**fields)
            if config is not None:
                policy.composed.require_fits_model(config)
            if build is not usual:
                reason = f"{reason}; {usual.__name__} if a model rejects it"
            return policy, reason
        return usual(**fields), its_reason

    @property
    def reason(self) -> str:
        """Why `chosen` was chosen, a clause."""
        return self._choose()[1]

    @functools.cached_property
    def chosen(self) -> Policy:
        """The chosen policy, with the budget and the shared fields given here."""
        return self._choose()[0]

    def _check_fields(self) -> None:
        for name, known in (("question", ("seen", "later")), ("answers", ("short", "long"))):
            given = getattr(self, name)
            require(given in known, name, given, f"unknown: give {' or '.join(map(repr, known))}")

    def fill_model_fields(self, config: ModelConfig, found: tuple[int, ...] | None) -> Policy:
        """Return the chosen policy, filled in: saved caches name it, and no later version chooses another for them."""
        return self._choose(config)[0].fill_model_fields(config, found)

    def build_policy_parts(self) -> Parts:
        """Return the chosen policy's `Parts`."""
        return self.chosen.composed
