"""The task `turns`: conversations on one cache, with facts in the first turns and questions on them in the last."""

import functools
import json
from collections.abc import Sequence

import numpy as np

from jaxkv._dataclasses import frozen_dataclass
from jaxkv._errors import require
from jaxkv.evals.task import EvaluationTask, How, SampleOutcome, TaskSample, task
from jaxkv.evals.texts import read_packaged_file, read_texts
from jaxkv.generation import generate
from jaxkv.loading import LanguageModel
from jaxkv.policies.policy import Policy
from jaxkv.sharding.mesh import copy_to_host

# Separates the turns in a sample's context.
_NEXT = "\x1e"


@functools.cache
def load_facts() -> list[list[str]]:
    """Load a list of packaged facts: [sentence with a gap, question for it, its values joined by spaces]; cached."""
    return json.loads(read_packaged_file("data/facts.json"))


@task("turns")
@frozen_dataclass
class ConversationTask(EvaluationTask):
    """Task: conversations on one cache (D2O, appendix, MT-bench's setting): the user states facts, then asks for them.

    Policies that evict an entry for every new one, such as H2O and D2O, keep within their budget. Others compress only
    the first turn, and keep all entries of later ones: use them with `every=n`, which recompresses every n tokens.

    The user states facts in the first turns, quotes passages in the middle ones, and asks for the facts in the last
    ones. The score is the share of last turns whose answer contains the fact, in any case.

    Attributes:
        count: number of conversations.
        turns: number of turns per conversation.
        words: number of words of each quoted passage.
        new_tokens: maximum tokens of an answer.
        seed: seed of the conversations.
    """

    asks = False

    count: int = 20
    turns: int = 10
    words: int = 80
    new_tokens: int = 32
    seed: int = 0

    def __post_init__(self):
        super().__post_init__()
        most = 3 * len(load_facts())
        require(
            2 <= self.turns <= most,
            "turns",
            self.turns,
            f"out of range: use 2 to {most}, for facts and their questions",
        )
        self.require_at_least(1, "count", "words", "new_tokens")

    def samples(self, params: LanguageModel) -> Sequence[TaskSample]:
        """Make `count` samples, the same for every model: a conversation each, user's turns joined in `context`."""
        passages = [text.split() for text in read_texts(None).values()]
        return [self._make_conversation(number, passages) for number in range(self.count)]

    def _make_conversation(self, number: int, passages: Sequence[Sequence[str]]) -> TaskSample:
        """Make a conversation's sample, from the seed and its number; turns with an empty answer are not scored."""
        rng = np.random.default_rng([self.seed, number])
        told = max(1, self.turns * 3 // 10)
        chosen = [load_facts()[at] for at in rng.permutation(len(load_facts()))[:told]]
        values = [str(rng.choice(several.split())) for *_, several in chosen]
        said = [text.format(value) for (text, *_), value in zip(chosen, values, strict=True)]
        for _ in range(self.turns - 2 * told):
            text = passages[int(rng.integers(len(passages)))]
            first = int(rng.integers(max(1, len(text) - self.words)))
            passage = " ".join(text[first : first + self.words])
            said.append(f'Here is a passage: "{passage}" Say in a few words what it is about.')
        order = rng.permutation(told)
        return TaskSample(
            id=f"{number:03d}",
            group="facts and questions",
            context=_NEXT.join([*said, *(chosen[at][1] for at in order)]),
            answers=(*[""] * len(said), *(values[at] for at in order)),
            new_tokens=self.new_tokens,
            tags={"turns": self.turns},
        )

    def run(
        self, params: LanguageModel, policy: Policy, samples: Sequence[TaskSample], how: How
    ) -> list[SampleOutcome]:
        """Run a batch of conversations; return a `SampleOutcome` each: mean score, answers, entries after each turn."""
        spoken = list[Sequence[str]]()
        kept = list[np.ndarray]()
        cache = None
        for texts in zip(*(sample.context.split(_NEXT) for sample in samples), strict=True):
            if how.raw or not params.tokenizer.has_template:
                # Without a template, empty lines separate question and answer.
                texts = tuple(("" if cache is None else "\n\n") + f"{text}\n" for text in texts)
            out = generate(
                params,
                list(texts),
                policy=policy if cache is None else None,
                cache=cache,
                max_new_tokens=samples[0].new_tokens,
                raw=how.raw,
                key=how.seed,
                progress=False,
            )
            cache = out.cache
            kept.append(cache.kept)
            spoken.append([each.text or "" for each in out])
        assert cache is not None
        tokens = copy_to_host(cache.seen)
        outcomes = []
        for row, (sample, said) in enumerate(zip(samples, zip(*spoken, strict=True), strict=True)):
            pairs = zip(said, sample.answers, strict=True)
            scores = [float(right.lower() in text.lower()) for text, right in pairs if right]
            rows = [each[:, row] for each in kept]
            means = [float(each.mean()) for each in rows]
            most = [int(each.max()) for each in rows]
            outcome = SampleOutcome(
                score=float(np.mean(scores)),
                prediction=json.dumps(said, ensure_ascii=False),
                figures={"rows": means, "most_rows": most, "scores": scores},
                tokens=int(tokens[row]),
                rows=means[-1],
                nbytes=int(cache.layer_entry_bytes @ rows[-1].sum(axis=1)),
            )
            outcomes.append(outcome)
        return outcomes
