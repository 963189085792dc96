"""Tasks whose samples are questions: a model answers them over compressed caches, and a metric scores the answer."""

import abc
import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import ClassVar, NamedTuple

import numpy as np

from jaxkv._checks import settled
from jaxkv.arguments import require_fits
from jaxkv.cache import KVCache, Turn
from jaxkv.engine.compress import finished
from jaxkv.engine.results import Generation
from jaxkv.engine.sampling import GREEDY
from jaxkv.engine.session import Session
from jaxkv.evals.kept import Watch
from jaxkv.evals.task import How, Outcome, Sample, Task, require_text, tokenizer_of
from jaxkv.generation import Call, answered, generate, prefill
from jaxkv.loading import LanguageModel
from jaxkv.policies.policy import Method
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
            dataclasses.replace(each, score=self.score(sample, each.prediction))
            for sample, each in zip(samples, drawn, strict=True)
        ]


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
    text, question = require_text(text), sample.question
    if raw or sample.raw or not text.has_template:
        return text.encode(sample.context, bos=True), text.encode(
            question + sample.prefix, bos=False
        )
    context = user_text(sample.context, text, turn=Turn.START, close=False)
    question = user_text(question, text, turn=Turn.USER, close=True, parted=False) + sample.prefix
    first, second = (text.encode(x, bos=False, shielded=True) for x in (context, question))
    return first, second


def answers(
    params: LanguageModel, policy: Method, samples: Sequence[Sample], how: How
) -> list[str]:
    """Answers a batch of samples over compressed caches, greedily; returns a list of one text for each."""
    return [answer.prediction for answer in asked(params, policy, samples, how)]


def asked(
    params: LanguageModel,
    policy: Method,
    samples: Sequence[Sample],
    how: How,
    *,
    shared: bool = False,
) -> list[Outcome]:
    """Draws a model's answers to a batch of samples over compressed caches; returns an unscored `Outcome` for each.

    Rows and bytes are those of the compressed tokens when the answer ends.

    Args:
        params: from `jaxkv.load`.
        policy: the compression.
        samples: the batch.
        how: settings of the run: question-agnostic or not, chat template, seed.
        shared: True compresses a context that several samples have once for all of them, in a question-agnostic run.

    Returns:
        One outcome per sample, in order, with a score of 0.
    """
    pairs = [ids_of(params.text, sample, raw=how.raw) for sample in samples]
    # A sample without a question runs the same whether or not the run is question-agnostic.
    # Answers of equal `new_tokens` are drawn together, so that no sample draws more tokens than it asks for.
    kinds = [
        (bool(question) and how.agnostic, sample.new_tokens)
        for (_, question), sample in zip(pairs, samples, strict=True)
    ]
    found: dict[int, Outcome] = {}
    for agnostic, new in dict.fromkeys(kinds):
        at = [number for number, kind in enumerate(kinds) if kind == (agnostic, new)]
        # The context alone is compressed, or all of the prompt.
        split = [pairs[n] if agnostic else (sum(pairs[n], []), []) for n in at]
        shown = next((row for row, n in enumerate(at) if samples[n].id == how.shown), None)
        watch = None if shown is None else Watch(split[shown][0])
        group = _Group(params, policy, split, new, how.seed, watch)
        if agnostic and shared:
            drawn = group.by_context()
        else:
            # Programs are compiled for one batch size: a smaller group is filled up with copies of its last sample.
            rows = [*range(len(at)), *[len(at) - 1] * (len(samples) - len(at))]
            drawn = group.draw(rows, group.prefilled(rows)) if agnostic else group.generated(rows)
        if shown is not None and watch is not None:
            drawn[shown] = dataclasses.replace(drawn[shown], held=watch.held)
        found |= zip(at, drawn, strict=False)
    return [found[at] for at in range(len(samples))]


class _Group(NamedTuple):
    """Prompts, of ids to compress and ids behind, with model, policy and seed; methods draw one `Outcome` for each.

    `watch` looks at the prefilled cache of one of them.
    """

    params: LanguageModel
    policy: Method
    pairs: Sequence[tuple[list[int], list[int]]]
    new: int
    key: int
    watch: Watch | None

    @settled
    def generated(self, rows: Sequence[int]) -> list[Outcome]:
        """Answers prompts as `generate` does, where the whole of them is compressed; the watch sees the cache."""
        prompts = [self.pairs[n][0] for n in rows]
        session = Session(self.params, self.policy, key=self.key)
        encoded = encode(prompts, self.params.text, self.params.config, close=True)
        require_fits(self.params.config, session.policy, encoded.lengths, self.new, None)
        call = Call(
            session=session,
            encoded=encoded,
            cache=None,
            max_new_tokens=self.new,
            sampling=GREEDY,
            stops=(),
            stop_at_eos=True,
            interval=None,
            progress=False,
            look=None if self.watch is None else partial(self.watch, prompts=prompts),
        )
        return self._outcomes(rows, finished(answered(call)))

    def by_context(self) -> list[Outcome]:
        """List of one `Outcome` per sample; compresses each distinct context once, for all questions on it."""
        asks: dict[tuple[int, ...], dict[tuple[int, ...], int]] = {}
        # A batch may be filled up with copies.
        first = [
            asks.setdefault(tuple(context), {}).setdefault(tuple(question), number)
            for number, (context, question) in enumerate(self.pairs)
        ]
        several = [[*each.values()] for each in asks.values()]
        # Programs are compiled for each batch size: powers of two keep them few.
        several += several[-1:] * ((1 << (len(several) - 1).bit_length()) - len(several))
        cache, found = self.prefilled([each[0] for each in several]), dict[int, Outcome]()
        for turn in range(max(map(len, several))):
            rows = [each[min(turn, len(each) - 1)] for each in several]
            found |= zip(rows, self.draw(rows, cache), strict=True)
        return [found[number] for number in first]

    def prefilled(self, rows: Sequence[int]) -> KVCache:
        """Prefills contexts of token ids and returns their compressed cache, which the watch, if any, has seen."""
        contexts = [self.pairs[n][0] for n in rows]
        cache = prefill(self.params, contexts, policy=self.policy, key=self.key, progress=False)
        if self.watch is not None:
            self.watch(cache, contexts)
        return cache

    def draw(self, rows: Sequence[int], cache: KVCache) -> list[Outcome]:
        """List of an `Outcome` for each sample: its question, answered over its context in `cache`."""
        questions = [self.pairs[n][1] for n in rows]
        out = generate(
            self.params,
            questions,
            cache=cache,
            max_new_tokens=self.new,
            key=self.key,
            progress=False,
        )
        return self._outcomes(rows, out)

    def _outcomes(self, rows: Sequence[int], out: Generation) -> list[Outcome]:
        """List of an `Outcome` for each sample: the drawn text, with rows and bytes kept."""
        tokenizer = tokenizer_of(self.params)
        # Rows beyond the limit belong to later tokens; a policy that drops a row for each new one has none.
        kept = np.minimum(host(out.cache.limit)[:, : len(rows)], out.cache.kept)
        ends = set(tokenizer.eos_ids)
        return [
            Outcome(
                score=0.0,
                prediction=tokenizer.decode([each for each in drawn.tolist() if each not in ends]),
                tokens=sum(map(len, self.pairs[number])),
                rows=float(kept[:, row].mean()),
                nbytes=int(kept[:, row].sum()) * out.cache.entry_bytes,
            )
            for row, (number, drawn) in enumerate(zip(rows, out.tokens, strict=True))
        ]
