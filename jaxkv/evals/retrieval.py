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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Question:
    """One question of 2StageRetr: its prompt, the colour that answers it, the colour's key and the dictionary's size.

    Attributes:
        prompt: the dictionary, the sum, and at the end the instruction.
        answer: the colour.
        key: the sum's result, the key of the colour.
        size: entries of the dictionary.
    """

    prompt: str
    answer: str
    key: int
    size: int


def two_stage(
    count: int, *, seed: int = 0, sizes: tuple[int, ...] = SIZES, reason: bool = False
) -> list[Question]:
    """Makes a list of 2StageRetr questions: prompts with a dictionary and a sum; the answer is the sum's entry.

    Args:
        count: number of questions.
        seed: seed of the questions, which are the same for the same seed.
        sizes: entries of the dictionaries, used in turn.
        reason: True asks for the sum to be worked out first, step by step.

    Returns:
        The questions.

    Raises:
        ValueError: for no cases, or dictionaries of fewer than three entries.

    References:
        OmniKV, appendix A: keys are 0 to n - 1, and every sum of the equation is one of them.
    """
    require(count >= 1, "count", count, "make at least 1 case")
    fits = min(sizes, default=0) >= 3
    require(fits, "sizes", sizes, "give dictionaries of at least 3 entries")
    rng = np.random.default_rng(seed)
    cases = []
    for size in itertools.islice(itertools.cycle(sizes), count):
        colours = rng.choice(COLOURS, size)
        key = int(rng.integers(2, size))
        first = int(rng.integers(1, key))
        entries = ", ".join(f"{number}: {colour}" for number, colour in enumerate(colours))
        task = "Answer the corresponding color based on the addition result."
        if reason:
            task = "First work out the addition step by step, then look its result up and say the corresponding color."
        prompt = (
            "Let's play a game. You have a dictionary and an addition equation. The keys of the dictionary are "
            "numbers. Find the value in the dictionary whose key is the result of the addition, and output it.\n"
            f"The dictionary is {{{entries}}}\n"
            f"The equation is {first} + {key - first} = ?\n{task}"
        )
        cases.append(Question(prompt=prompt, answer=str(colours[key]), key=key, size=size))
    return cases


@task("2stageretr")
@dataclasses.dataclass(frozen=True, kw_only=True)
class TwoStage(QuestionTask):
    """Task 2StageRetr (OmniKV, appendix A): a sum to work out, then its result to look up in a dictionary before it.

    Attributes:
        count: number of samples.
        sizes: entries of the dictionaries, used in turn.
        reason: True asks for the sum to be worked out first.
        new_tokens: tokens of an answer.
        seed: seed of the questions.
    """

    count: int = 34
    sizes: tuple[int, ...] = SIZES
    reason: bool = False
    new_tokens: int = 48
    seed: int = 0

    def __post_init__(self):
        super().__post_init__()
        two_stage(self.count, sizes=self.sizes)
        require(self.new_tokens >= 1, "new_tokens", self.new_tokens, "draw at least 1 token")

    def samples(self, params: LanguageModel) -> Sequence[Sample]:
        """Makes a list of one sample per question: the dictionary is its context, the equation its question."""
        cases = two_stage(self.count, seed=self.seed, sizes=self.sizes, reason=self.reason)
        return [
            Sample(
                id=f"{number:04d}",
                group="2stageretr",
                # The question begins with the equation: the cache is compressed to the dictionary alone.
                context=case.prompt[: case.prompt.index("The equation is")],
                question=case.prompt[case.prompt.index("The equation is") :],
                answers=(case.answer,),
                new_tokens=self.new_tokens,
                tags={"size": case.size, "key": case.key},
            )
            for number, case in enumerate(cases)
        ]

    def score(self, sample: Sample, prediction: str) -> float:
        """1 if the colour occurs in the prediction, in any case and also inside a word; else 0."""
        return float(sample.answers[0].lower() in prediction.lower())
