"""The task `turns`: conversations on one cache, where facts of the first turns are asked for in the last ones."""

import dataclasses
import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxkv._errors import require
from jaxkv.cache import KVCache
from jaxkv.evals.metrics import rouge_l
from jaxkv.evals.task import How, Outcome, Sample, Task, task, tokenizer_of
from jaxkv.evals.texts import rows_of_file, texts_of
from jaxkv.generation import generate
from jaxkv.loading import LanguageModel
from jaxkv.policies.policy import Method
from jaxkv.sharding.mesh import host

# Separates the turns in a sample's context; texts that contain it are refused.
_NEXT = "\x1e"
JUDGES = ("substring", "rouge-l")


# Sentences with a gap, the question that asks for it, and values to draw from.
_FACTS = (
    ("My dog is called {}.", "What is my dog called?", "Bramble Pixel Juno Otto Clover Biscuit"),
    ("My sister lives in {}.", "Where does my sister live?", "Lisbon Oslo Kyoto Lima Turin Cork"),
    (
        "My meeting is on {}.",
        "On which day is my meeting?",
        "Monday Tuesday Thursday Friday Sunday",
    ),
    ("I keep the spare key in the {}.", "Where is my spare key?", "teapot shed piano drawer boot"),
    (
        "My front door is {}.",
        "Which colour is my front door?",
        "turquoise crimson yellow violet grey",
    ),
    ("I work as a {}.", "What do I work as?", "welder dentist botanist pilot tailor plumber"),
    ("My locker's code is {}.", "What is my locker's code?", "4817 2960 7352 6148 9073 3581"),
    (
        "My train leaves from platform {}.",
        "From which platform does my train leave?",
        "17 23 31 46 52",
    ),
)


@task("turns")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Turns(Task):
    """Task: conversations on one cache (D2O, appendix, MT-bench's setting): answers against references, rows by turn.

    Policies that drop a row for every new one, such as H2O and D2O, stay within their budget. Others compress only the
    first turn, and keep all rows of later ones: give them `every=n`, which compresses again every n tokens.

    By default conversations are made up: the user states facts in the first turns, quotes passages in the middle ones,
    and asks for the facts in the last ones. The score is the share of asking turns whose answer has the fact.

    MT-bench's own questions are read from its `question.jsonl`. Its judge, a large language model, is out of reach:
    turns with a reference are scored, and conversations without any are left out.

    Attributes:
        data: a file of lines of JSON as MT-bench's question.jsonl has them: "turns", and for each of them a
            "reference", empty where none is asked for; by default conversations are made.
        count: number of conversations; 0 for all of the file.
        turns: turns of each made conversation.
        words: words of each quoted passage.
        new_tokens: tokens of an answer.
        judge: how an answer is scored against its reference: "substring", in any case, or "rouge-l".
        seed: seed of made conversations.
    """

    asks = False

    data: str | None = None
    count: int = 20
    turns: int = 10
    words: int = 80
    new_tokens: int = 32
    judge: str = "substring"
    seed: int = 0

    def __post_init__(self):
        super().__post_init__()
        require(self.judge in JUDGES, "judge", self.judge, f"choose among {', '.join(JUDGES)}")
        require(
            self.count >= (self.data is None), "count", self.count, "hold at least 1 conversation"
        )
        most = 3 * len(_FACTS)
        require(
            2 <= self.turns <= most,
            "turns",
            self.turns,
            f"give 2 to {most}: something to tell, and to ask for",
        )
        for name in ("words", "new_tokens"):
            require(getattr(self, name) >= 1, name, getattr(self, name), "give 1 or more")

    def samples(self, params: LanguageModel) -> Sequence[Sample]:
        """Makes a list of one sample per conversation, its turns joined in `context`; ValueError for one too long."""
        tokenizer = tokenizer_of(params)
        talks = (
            _stored(self.data)
            if self.data is not None
            else _made(self.turns, self.words, self.seed)
        )
        made, most = [], params.config.max_positions
        for talk in itertools.islice(talks, self.count or None):
            # A template writes a few words around each turn.
            length = sum(
                len(tokenizer.encode(turn, bos=True)) + self.new_tokens + 32 for turn in talk.turns
            )
            remedy = f"they may take {length} tokens, and the model has {most} positions: give fewer or shorter ones"
            require(length <= most, "turns", len(talk.turns), remedy)
            sample = Sample(
                id=talk.name,
                group=talk.group,
                context=_NEXT.join(talk.turns),
                answers=talk.references,
                new_tokens=self.new_tokens,
                tags={"turns": len(talk.turns)},
            )
            made.append(sample)
        return made

    def run(
        self, params: LanguageModel, policy: Method, samples: Sequence[Sample], how: How
    ) -> list[Outcome]:
        """Runs a batch of conversations; list of one `Outcome` each: mean score, answers, and rows after each turn."""
        outcomes: dict[int, Outcome] = {}
        # Conversations with equally many turns run as one batch.
        lengths = [sample.context.count(_NEXT) for sample in samples]
        for length in dict.fromkeys(lengths):
            at = [number for number, each in enumerate(lengths) if each == length]
            spoken, kept, cache = _hold(params, policy, [samples[number] for number in at], how)
            tokens = host(cache.seen)
            for row, number in enumerate(at):
                answers = samples[number].answers
                scores = [
                    self._score(text, right)
                    for text, right in zip(spoken[row], answers, strict=True)
                    if right
                ]
                rows = [each[:, row] for each in kept]
                means = [float(each.mean()) for each in rows]
                outcomes[number] = Outcome(
                    score=float(np.mean(scores)),
                    prediction=json.dumps(spoken[row], ensure_ascii=False),
                    figures={
                        "rows": means,
                        "most_rows": [int(each.max()) for each in rows],
                        "scores": scores,
                    },
                    tokens=int(tokens[row]),
                    rows=means[-1],
                    nbytes=int(rows[-1].sum()) * cache.entry_bytes,
                )
        return [outcomes[number] for number in range(len(samples))]

    def _score(self, text: str, right: str) -> float:
        """Score in [0, 1] of one answer against its reference `right`, by the task's judge."""
        return (
            float(right.lower() in text.lower())
            if self.judge == "substring"
            else rouge_l(text, right)
        )


def _hold(
    params: LanguageModel, policy: Method, samples: Sequence[Sample], how: How
) -> tuple[list[list[str]], list[np.ndarray], KVCache]:
    """Runs conversations turn by turn; returns answers, arrays [L, B, K] of rows after each turn, and the cache."""
    tokenizer = tokenizer_of(params)
    cache: KVCache | None = None
    spoken: list[list[str]] = [[] for _ in samples]
    kept, ends = [], set(tokenizer.eos_ids)
    for texts in zip(*(sample.context.split(_NEXT) for sample in samples), strict=True):
        if how.raw or not tokenizer.has_template:
            # Without a template, empty lines stand between question and answer.
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
        for mine, tokens in zip(spoken, out.tokens, strict=True):
            mine.append(tokenizer.decode([each for each in tokens.tolist() if each not in ends]))
    assert cache is not None
    return spoken, kept, cache


class _Talk(NamedTuple):
    """One conversation: its name and group, the user's turns, and each turn's right answer ("" if there is none)."""

    name: str
    group: str
    turns: tuple[str, ...]
    references: tuple[str, ...]


def _made(turns: int, words: int, seed: int) -> Iterator[_Talk]:
    """Yields made-up conversations without end, of `turns` turns each; the n-th depends on `seed` and n alone."""
    passages = [text.split() for text in texts_of(None).values()]
    facts = max(1, turns * 3 // 10)
    for number in itertools.count():
        rng = np.random.default_rng([seed, number])
        chosen = [_FACTS[at] for at in rng.permutation(len(_FACTS))[:facts]]
        values = [str(rng.choice(several.split())) for *_, several in chosen]
        said = [text.format(value) for (text, *_), value in zip(chosen, values, strict=True)]
        for _ in range(turns - 2 * facts):
            text = passages[rng.integers(len(passages))]
            first = int(rng.integers(max(1, len(text) - words)))
            said.append(
                f'Here is a passage: "{" ".join(text[first : first + words])}" Say in a few words what it is about.'
            )
        order = rng.permutation(facts)
        asked = [chosen[at][1] for at in order]
        right = [values[at] for at in order]
        yield _Talk(
            f"{number:03d}", "told and asked", (*said, *asked), (*([""] * len(said)), *right)
        )


def _stored(data: str) -> Iterator[_Talk]:
    """Yields the conversations that have a reference, from a file in the format of MT-bench's `question.jsonl`."""
    found = 0
    for number, row in enumerate(rows_of_file(Path(data).expanduser(), ("turns",)), start=1):
        turns, right = row["turns"], row.get("reference") or []
        fits = isinstance(turns, list) and isinstance(right, list) and bool(turns)
        fits = fits and all(isinstance(x, str) and x.strip() and _NEXT not in x for x in turns)
        fits = fits and all(isinstance(each, str | None) for each in right)
        remedy = (
            f'conversation {number}: give lines such as {{"turns": ["..."], "reference": ["..."]}}'
        )
        require(fits, "data", turns, remedy)
        if not any(right):
            continue
        found += 1
        padded = [*(each or "" for each in right), *[""] * len(turns)][: len(turns)]
        name, group = str(row.get("question_id", number)), str(row.get("category", "turns"))
        yield _Talk(name, group, tuple(turns), tuple(padded))
    require(found > 0, "data", data, "no conversation has a reference: give some with one")
