"""The task `2stageretr`: a sum to work out, then its result to look up in a dictionary earlier in the prompt."""

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np

from jaxkv._errors import require
from jaxkv.evals.asking import QuestionTask
from jaxkv.evals.task import Sample, task
from jaxkv.loading import LanguageModel

COLOURS = tuple(
    "red blue green yellow purple orange pink brown black white gray gold silver cyan magenta lime teal navy "
    "maroon olive violet indigo turquoise".split()
)
SIZES = tuple(range(40, 201, 10))
_OPENING = (
    "Let's play a game. You have a dictionary and an addition equation. The keys of the dictionary are "
    "numbers. Find the value in the dictionary whose key is the result of the addition, and output it.\n"
)


@task("2stageretr")
@dataclasses.dataclass(frozen=True, kw_only=True)
class TwoStage(QuestionTask):
    """Task 2StageRetr (OmniKV, appendix A): a sum to work out, then its result to look up in a dictionary before it.

    Attributes:
        count: number of samples.
        sizes: entries of the dictionaries, used in turn.
        reason: True asks for the sum to be worked out first, step by step.
        new_tokens: tokens of an answer.
        seed: seed of the questions, which are the same for the same seed.

    References:
        OmniKV, appendix A: keys are 0 to n - 1, and every sum of the equation is one of them.
    """

    count: int = 34
    sizes: tuple[int, ...] = SIZES
    reason: bool = False
    new_tokens: int = 48
    seed: int = 0

    def __post_init__(self):
        super().__post_init__()
        self.require_least(1, "count", "new_tokens")
        fits = min(self.sizes, default=0) >= 3
        require(fits, "sizes", self.sizes, "give dictionaries of at least 3 entries")

    def samples(self, params: LanguageModel) -> Sequence[Sample]:
        """Makes a list of one sample per question: the dictionary is its context, the equation its question."""
        rng, made = np.random.default_rng(self.seed), []
        asked = "Answer the corresponding color based on the addition result."
        if self.reason:
            asked = "First work out the addition step by step, then look its result up and say the corresponding color."
        for number, size in enumerate(itertools.islice(itertools.cycle(self.sizes), self.count)):
            colours = rng.choice(COLOURS, size)
            key = int(rng.integers(2, size))
            first = int(rng.integers(1, key))
            entries = ", ".join(f"{at}: {colour}" for at, colour in enumerate(colours))
            sample = Sample(
                id=f"{number:04d}",
                group="2stageretr",
                # The question begins with the equation: the cache is compressed to the dictionary alone.
                context=_OPENING + f"The dictionary is {{{entries}}}\n",
                question=f"The equation is {first} + {key - first} = ?\n{asked}",
                answers=(str(colours[key]),),
                new_tokens=self.new_tokens,
                tags={"size": size, "key": key},
            )
            made.append(sample)
        return made

    def score(self, sample: Sample, prediction: str) -> float:
        """1 if the colour occurs in the prediction, in any case and also inside a word; else 0."""
        return float(sample.answers[0].lower() in prediction.lower())
