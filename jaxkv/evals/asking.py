"""Tasks whose samples are questions: a model answers them over compressed caches, and a metric scores the answer."""

import abc
import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import ClassVar, NamedTuple

import numpy as np

from jaxkv._settings import settled
from jaxkv.answering import Call, answered
from jaxkv.arguments import require_fits
from jaxkv.cache import KVCache, Turn
from jaxkv.engine.compress import finished
from jaxkv.engine.session import Session
from jaxkv.evals.kept import Held, Watch
from jaxkv.evals.records import RAISED
from jaxkv.evals.task import How, Outcome, Sample, Task, require_text, tokenizer_of
from jaxkv.generation import generate, prefill
from jaxkv.loading import LanguageModel
from jaxkv.policies.policy import Method
from jaxkv.results import Generation
from jaxkv.sampling import GREEDY
from jaxkv.sharding.mesh import host
from jaxkv.text.prompts import encode, user_text
from jaxkv.text.tokenizer import Text


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuestionTask(Task):
    """Base of tasks whose answers are texts: a subclass defines `samples`, and `score` for a predicted text.

    Attributes:
        shares_contexts: True if several samples have one context, which a question-agnostic run then compresses once
            for all of them in a batch.
    """

    shares_contexts: ClassVar[bool] = False

    @abc.abstractmethod
    def score(self, sample: Sample, prediction: str) -> float:
        """Returns the score in [0, 1] of the text that a model predicted for one sample.

        Args:
            sample: the sample.
            prediction: text that the model has drawn, without the sample's prefix.

        Returns:
            The score, a share in [0, 1].
        """

    def run(
        self, params: LanguageModel, policy: Method, samples: Sequence[Sample], how: How
    ) -> list[Outcome]:
        """Generates the answers to a batch of samples; returns an `Outcome` per sample: score, text, rows and bytes."""
        drawn = asked(params, policy, samples, how, shared=self.shares_contexts)
        return [
            Outcome(
                score=self.score(sample, answer.text),
                prediction=answer.text,
                tokens=answer.tokens,
                rows=answer.rows,
                nbytes=answer.nbytes,
                figures={RAISED: 1} if answer.raised else {},
                held=answer.held,
            )
            for sample, answer in zip(samples, drawn, strict=True)
        ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer:
    """A model's answer to one sample: its text, the number of prompt tokens, and rows and bytes of its cache.

    Attributes:
        text: the answer, cut at the sample's stop strings.
        tokens: number of tokens of the whole prompt.
        rows: rows kept per kv head and layer, averaged, when the answer ends; rows of tokens after the compressed ones
            do not count.
        nbytes: bytes of these rows.
        raised: True if the budget, a share, came out below the rows that must stay and was raised to them.
        held: the compressed tokens and how many kv heads hold each after prefill, if `How.shown` names the sample.
    """

    text: str
    tokens: int
    rows: float
    nbytes: int
    raised: bool = False
    held: Held | None = None


def ids_of(text: Text | None, sample: Sample, *, raw: bool = False) -> tuple[list[int], list[int]]:
    """Token ids of a sample's context and of its question, as two lists; concatenated they are the prompt.

    Args:
        text: the model's tokenizer.
        sample: the sample.
        raw: True leaves the chat template out, as `Sample.raw` does.

    Returns:
        The context's ids, with the template's opening; the question's, with the template's closing and the prefix.

    Raises:
        ValueError: without a tokenizer.
    """
    text = require_text(text)
    if raw or sample.raw or not text.has_template:
        return text.encode(sample.context, bos=True), text.encode(
            sample.question + sample.prefix, bos=False
        )
    context = user_text(sample.context, text, turn=Turn.START, close=False)
    question = (
        user_text(sample.question, text, turn=Turn.USER, close=True, parted=False) + sample.prefix
    )
    return text.encode(context, bos=False, shielded=True), text.encode(
        question, bos=False, shielded=True
    )


def answers(
    params: LanguageModel, policy: Method, samples: Sequence[Sample], how: How
) -> list[str]:
    """Answers a batch of samples over compressed caches, greedily; returns a list of one text for each."""
    return [answer.text for answer in asked(params, policy, samples, how)]


def asked(
    params: LanguageModel,
    policy: Method,
    samples: Sequence[Sample],
    how: How,
    *,
    shared: bool = False,
) -> list[Answer]:
    """Draws a model's answers to a batch of samples over compressed caches; returns a list of one `Answer` per sample.

    Args:
        params: from `jaxkv.load`.
        policy: the compression.
        samples: the batch.
        how: settings of the run: question-agnostic or not, chat template, seed.
        shared: True compresses a context that several samples have once for all of them, in a question-agnostic run.

    Returns:
        One answer per sample, in order.
    """
    pairs = [ids_of(params.text, sample, raw=how.raw) for sample in samples]
    # A sample without a question runs the same whether or not the run is question-agnostic.
    # Answers of equal `new_tokens` are drawn together, so that no sample draws more tokens than it asks for.
    kinds = [
        (bool(ids[1]) and how.agnostic, one.new_tokens)
        for ids, one in zip(pairs, samples, strict=True)
    ]
    found: dict[int, Answer] = {}
    for kind in dict.fromkeys(kinds):
        at = [number for number, each in enumerate(kinds) if each == kind]
        shown = next((n for n in at if samples[n].id == how.shown), None)
        watch = (
            None if shown is None else Watch(pairs[shown][0] if kind[0] else sum(pairs[shown], []))
        )
        group = _Group(
            params, policy, [samples[n] for n in at], [pairs[n] for n in at], how.seed, watch
        )
        drawn = (
            group.by_context()
            if shared and kind[0]
            else group.together(len(samples), agnostic=kind[0])
        )
        if shown is not None and watch is not None:
            drawn[at.index(shown)] = dataclasses.replace(drawn[at.index(shown)], held=watch.held)
        found |= zip(at, drawn, strict=True)
    return [found[at] for at in range(len(samples))]


class _Group(NamedTuple):
    """Samples of equal `new_tokens` with token ids, model, policy and seed; methods draw one `Answer` per sample.

    `watch` looks at the prefilled cache of one of them.
    """

    params: LanguageModel
    policy: Method
    samples: Sequence[Sample]
    pairs: Sequence[tuple[list[int], list[int]]]
    key: int
    watch: Watch | None

    def together(self, size: int, *, agnostic: bool) -> list[Answer]:
        """List of one `Answer` per sample, in one batch padded to `size`; `agnostic` compresses contexts alone."""
        at = [*range(len(self.samples))]
        # Programs are compiled for one batch size: a smaller group is filled up with copies of its last sample.
        at += at[-1:] * (size - len(at))
        pairs = [self.pairs[n] for n in at]
        if agnostic:
            return self._draw(at, self._prefilled([context for context, _ in pairs]))[
                : len(self.samples)
            ]
        whole = [context + question for context, question in pairs]
        return self._answers(at, self._generated(whole), whole)[: len(self.samples)]

    @settled
    def _generated(self, prompts: Sequence[list[int]]) -> Generation:
        """Answers prompts of token ids as `generate` does, as a `Generation`; the watch sees the prefilled cache."""
        session, new = Session(self.params, self.policy, key=self.key), self.samples[0].new_tokens
        encoded = encode(list(prompts), self.params.text, self.params.config, close=True)
        require_fits(self.params.config, session.policy, encoded.lengths, new, None)
        call = Call(
            session=session,
            encoded=encoded,
            cache=None,
            max_new_tokens=new,
            sampling=GREEDY,
            stops=(),
            stop_at_eos=True,
            interval=None,
            progress=False,
            look=None if self.watch is None else partial(self.watch, prompts=prompts),
        )
        return finished(answered(call))

    def by_context(self) -> list[Answer]:
        """List of one `Answer` per sample; compresses each distinct context once, for all questions on it."""
        first = {sample.id: number for number, sample in reversed([*enumerate(self.samples)])}
        asks: dict[tuple[int, ...], list[int]] = {}
        for number in sorted(first.values()):
            asks.setdefault(tuple(self.pairs[number][0]), []).append(number)
        # Programs are compiled for each batch size: powers of two keep them few.
        documents = [*asks]
        documents += documents[-1:] * ((1 << (len(documents) - 1).bit_length()) - len(documents))
        cache, found = self._prefilled([list(each) for each in documents]), dict[int, Answer]()
        for turn in range(max(map(len, asks.values()))):
            at = [asks[each][min(turn, len(asks[each]) - 1)] for each in documents]
            found |= zip(at, self._draw(at, cache), strict=True)
        return [found[first[sample.id]] for sample in self.samples]

    def _prefilled(self, contexts: Sequence[list[int]]) -> KVCache:
        """Prefills contexts of token ids and returns their compressed cache, which the watch, if any, has seen."""
        cache = prefill(self.params, contexts, policy=self.policy, key=self.key, progress=False)
        if self.watch is not None:
            self.watch(cache, contexts)
        return cache

    def _draw(self, at: Sequence[int], cache: KVCache) -> list[Answer]:
        """List of an `Answer` for each sample index in `at`: its question, answered over its context in `cache`."""
        questions, new = [self.pairs[n][1] for n in at], self.samples[0].new_tokens
        out = generate(
            self.params, questions, cache=cache, max_new_tokens=new, key=self.key, progress=False
        )
        return self._answers(at, out, [self.pairs[n][0] for n in at])

    def _answers(
        self, at: Sequence[int], out: Generation, compressed: Sequence[Sequence[int]]
    ) -> list[Answer]:
        """List of an `Answer` for each sample index in `at`: drawn text, cut at stop strings, with rows and bytes kept.

        `compressed` are the token ids that each was compressed of.
        """
        tokenizer = tokenizer_of(self.params)
        # Rows beyond the limit belong to later tokens; a policy that drops a row for each new one has none.
        kept = np.minimum(host(out.cache.limit)[:, : len(at)], out.cache.kept)
        ends, parts = set(tokenizer.eos_ids), self.policy.parts()
        found = []
        for row, (number, tokens) in enumerate(zip(at, out.tokens, strict=True)):
            text = tokenizer.decode([each for each in tokens.tolist() if each not in ends])
            answer = Answer(
                text=min(
                    (text.split(stop)[0] for stop in self.samples[number].stop),
                    key=len,
                    default=text,
                ),
                tokens=sum(map(len, self.pairs[number])),
                rows=float(kept[:, row].mean()),
                nbytes=int(kept[:, row].sum()) * out.cache.entry_bytes,
                raised=bool(parts.raised(np.asarray([len(compressed[row])]))),
            )
            found.append(answer)
        return found
