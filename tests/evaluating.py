"""Tasks for evaluations: one that asks a tiny model, one that needs none, and a folder's bytes."""

import dataclasses
import functools
import hashlib
from collections.abc import Sequence

import numpy as np
from tiny import TWO_LAYERS, tiny
from tokenizers import Tokenizer, models, pre_tokenizers

import jaxkv
from jaxkv.evals import EvaluationTask, How, QuestionTask, SampleOutcome, TaskSample, evaluate
from jaxkv.loading import LanguageModel
from jaxkv.policies import Policy
from jaxkv.text.tokenizer import ChatTokenizer

POLICIES = {
    "full": jaxkv.FullKV(),
    "knorm@9": jaxkv.KNorm(budget=9),
    "streamingllm@9": jaxkv.StreamingLLM(budget=9),
}


@functools.cache
def words() -> LanguageModel:
    """A tiny random model whose tokens are words: w0, w1, ..."""
    tokenizer = Tokenizer(
        models.WordLevel({f"w{each}": each for each in range(64)}, unk_token="w0")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    given = tiny(TWO_LAYERS)
    return LanguageModel(given.decoder, text=ChatTokenizer(tokenizer, origin="words"), name="words")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Words(QuestionTask):
    """Words to go on with.

    Attributes:
        count: texts.
        seed: of the samples.
    """

    count: int = 6
    seed: int = 0

    def samples(self, params: LanguageModel) -> Sequence[TaskSample]:
        rng = np.random.default_rng(self.seed)
        lengths = [20 + at for at in range(self.count)]
        contexts = [
            " ".join(f"w{each}" for each in rng.integers(1, 64, length)) for length in lengths
        ]
        return [
            TaskSample(
                id=f"text-{at}",
                group="words",
                context=text,
                question=" w1 w2",
                answers=("w3",),
                new_tokens=3,
            )
            for at, text in enumerate(contexts)
        ]

    def score(self, sample: TaskSample, prediction: str) -> float:
        return len(set(prediction.split())) / 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Told(EvaluationTask):
    """Answers that no model gives: they follow from the sample's id and the policy.

    Attributes:
        count: of each group.
        groups: how many.
        hostile: text that is in every answer.
        sizes: numbers.
        share: a number.
        name: a word.
        loud: a switch.
        seed: of nothing.
        batch: has the name of another option.
    """

    count: int = 7
    groups: int = 2
    hostile: str = ""
    sizes: tuple[int, ...] = (1, 2)
    share: float = 0.5
    name: str | None = None
    loud: bool = False
    seed: int = 0
    batch: str = "none"

    def samples(self, params: LanguageModel) -> Sequence[TaskSample]:
        return [
            TaskSample(
                id=f"{group}{at}",
                group="ab|<i>"[group] if group < 2 else f"<b>{group}</b>",
                context="w1",
                answers=(f"a{at}" + self.hostile,),
                tags={"length": 10 * (1 + at % 3), "depth": at % 2, "kind": self.hostile},
            )
            for at in range(self.count)
            for group in range(self.groups)
        ]

    def run(
        self, params: LanguageModel, policy: Policy, samples: Sequence[TaskSample], how: How
    ) -> list[SampleOutcome]:
        return [self.outcome(policy, sample, how) for sample in samples]

    def outcome(self, policy: Policy, sample: TaskSample, how: How) -> SampleOutcome:
        # Of the fields that policies had first: what tests look at does not change with those that came later.
        said = f"{sample.id}{policy!r}{how.agnostic}".replace(", store='dense'", "")
        digest = hashlib.sha256(said.encode()).digest()
        losses = [each / 256 for each in digest[: 5 + digest[0] % 3]]
        figures = {"losses": losses, "some": np.float32(0.5)}
        text = f"{digest.hex()[:6]} ö\u2028\r{self.hostile}"
        return SampleOutcome(
            score=float(digest[1] % 2),
            prediction=text,
            figures=figures,
            tokens=9,
            rows=digest[2] / 2,
            nbytes=8,
        )


def told(out, task: EvaluationTask | None = None, **options) -> bytes:
    """Evaluates, and returns the lines."""
    policies = options.pop("policies", POLICIES)
    evaluate(words(), task or Told(), policies, out, **{"batch": 3, "progress": False, **options})
    return (out / "results.jsonl").read_bytes()
