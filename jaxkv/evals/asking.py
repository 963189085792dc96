"""Tasks whose samples are questions: a model answers them over compressed caches, and a metric scores the answer."""

import abc
import dataclasses
from collections.abc import Sequence

import numpy as np

from jaxkv.evals.task import How, Outcome, Sample, Task, require_text, tokenizer_of
from jaxkv.generation import generate, prefill
from jaxkv.loading import LanguageModel
from jaxkv.policies.policy import Method
from jaxkv.sharding.mesh import host
from jaxkv.text.tokenizer import Text


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuestionTask(Task):
    """Base of tasks whose answers are texts: a subclass defines `samples`, and `score` for a predicted text."""

    @abc.abstractmethod
    def score(self, sample: Sample, prediction: str) -> float:
        """Returns the score in [0, 1] of the text that a model predicted for one sample.

        Args:
            sample: the sample.
            prediction: text that the model has drawn, without the sample's prefix.

        Returns:
            The score, a share in [0, 1].
        """

    def run(self, params: LanguageModel, policy: Method, samples: Sequence[Sample], how: How) -> list[Outcome]:
        """Draws the answers to one batch of prompts and returns one Outcome per sample: score, text, rows and bytes."""
        drawn = asked(params, policy, samples, how)
        return [
            Outcome(
                score=self.score(sample, answer.text),
                prediction=answer.text,
                tokens=answer.tokens,
                rows=answer.rows,
                nbytes=answer.nbytes,
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
    """

    text: str
    tokens: int
    rows: float
    nbytes: int


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
    chat = text.has_template and not (raw or sample.raw)
    before, after = (text.turns.opening, text.turns.closing) if chat else ("", "")
    context = text.encode(before + sample.context, bos=True)
    return context, text.encode(sample.question + after + sample.prefix, bos=False)


def answers(params: LanguageModel, policy: Method, samples: Sequence[Sample], how: How) -> list[str]:
    """Draws a model's answers to a batch of samples over compressed caches and returns their texts."""
    return [answer.text for answer in asked(params, policy, samples, how)]


def asked(params: LanguageModel, policy: Method, samples: Sequence[Sample], how: How) -> list[Answer]:
    """Draws a model's answers to a batch of samples over compressed caches; returns one `Answer` per sample.

    Args:
        params: from `jaxkv.load`.
        policy: the compression.
        samples: the batch.
        how: settings of the run: question-agnostic or not, chat template, seed.

    Returns:
        One answer per sample, in order.
    """
    pairs = [ids_of(params.text, sample, raw=how.raw) for sample in samples]
    # A sample without a question runs the same whether or not the run is question-agnostic.
    # Answers of equal `new_tokens` are drawn together, so that no sample draws more tokens than it asks for.
    kinds = [(bool(ids[1]) and how.agnostic, one.new_tokens) for ids, one in zip(pairs, samples, strict=True)]
    found: dict[int, Answer] = {}
    for kind in dict.fromkeys(kinds):
        at = [number for number, each in enumerate(kinds) if each == kind]
        # Programs are compiled for one batch size: a smaller group is filled up with copies of its last sample.
        filled = at + at[-1:] * (len(samples) - len(at))
        drawn = _draw(params, policy, [samples[n] for n in filled], [pairs[n] for n in filled], how.seed, kind[0])
        found |= zip(at, drawn, strict=False)
    return [found[at] for at in range(len(samples))]


def _draw(
    params: LanguageModel,
    policy: Method,
    samples: Sequence[Sample],
    pairs: Sequence[tuple[list[int], list[int]]],
    key: int,
    agnostic: bool,
) -> list[Answer]:
    """Draws one `Answer` per sample, all of equal `new_tokens`; `agnostic` compresses contexts before questions."""
    new_tokens = samples[0].new_tokens
    if agnostic:
        cache = prefill(params, [context for context, _ in pairs], policy=policy, key=key, progress=False)
        questions = [question for _, question in pairs]
        out = generate(params, questions, cache=cache, max_new_tokens=new_tokens, key=key, progress=False)
    else:
        whole = [context + question for context, question in pairs]
        out = generate(params, whole, policy=policy, max_new_tokens=new_tokens, key=key, progress=False)
    tokenizer = tokenizer_of(params)
    # Rows beyond the limit belong to later tokens; a policy that drops a row for each new one has none.
    kept = np.minimum(host(out.cache.limit)[:, : len(pairs)], out.cache.kept)
    ends = set(tokenizer.eos_ids)
    found = []
    for at, (sample, tokens) in enumerate(zip(samples, out.tokens, strict=True)):
        text = tokenizer.decode([each for each in tokens.tolist() if each not in ends])
        answer = Answer(
            text=min((text.split(stop)[0] for stop in sample.stop), key=len, default=text),
            tokens=sum(map(len, pairs[at])),
            rows=float(kept[:, at].mean()),
            nbytes=int(kept[:, at].sum()) * out.cache.row_bytes,
        )
        found.append(answer)
    return found
