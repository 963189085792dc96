"""Tasks whose samples are questions: the model answers, and a metric judges what it said."""

import abc
import dataclasses
from collections.abc import Sequence

import numpy as np

from jaxkv._errors import require
from jaxkv.evals.task import How, Outcome, Sample, Task
from jaxkv.generation import generate, prefill
from jaxkv.loading import LanguageModel
from jaxkv.policies.policy import Method
from jaxkv.sharding.mesh import host
from jaxkv.text.tokenizer import Text


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuestionTask(Task):
    """A task whose samples are asked and judged one by one."""

    @abc.abstractmethod
    def score(self, sample: Sample, prediction: str) -> float:
        """Judges an answer.

        Args:
            sample: the case.
            prediction: what the model said, without the prefix.

        Returns:
            A share in [0, 1].
        """

    def run(self, params: LanguageModel, policy: Method, samples: Sequence[Sample], how: How) -> list[Outcome]:
        """Asks a batch; see `Task.run`."""
        told = asked(params, policy, samples, how)
        return [
            Outcome(
                score=self.score(sample, answer.text),
                prediction=answer.text,
                tokens=answer.tokens,
                rows=answer.rows,
                nbytes=answer.nbytes,
            )
            for sample, answer in zip(samples, told, strict=True)
        ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer:
    """What the model said to one sample, and what its cache took.

    Attributes:
        text: up to the sample's number of tokens and its stop strings.
        tokens: of the whole prompt.
        rows: kept of it per kv head and layer, averaged: those held when the answer ends, without the rows of tokens
            that came behind what was compressed.
        nbytes: of these rows.
    """

    text: str
    tokens: int
    rows: float
    nbytes: int


def ids_of(text: Text | None, sample: Sample, *, raw: bool = False) -> tuple[list[int], list[int]]:
    """A sample as token ids, cut where a question-agnostic run cuts it: the whole is the same in both settings.

    Args:
        text: the model's tokenizer.
        sample: the case.
        raw: no chat template; nor is there one where the sample says so.

    Returns:
        The context's ids, with what the template writes before it; the question's, with what comes behind it.

    Raises:
        ValueError: without a tokenizer.
    """
    require(text is not None, "params", "no tokenizer", "tasks are texts: load a checkpoint that has one")
    assert text is not None
    chat = text.has_template and not (raw or sample.raw)
    before, after = (text.turns.opening, text.turns.closing) if chat else ("", "")
    context = text.encode(before + sample.context, bos=True)
    return context, text.encode(sample.question + after + sample.prefix, bos=False)


def answers(params: LanguageModel, policy: Method, samples: Sequence[Sample], how: How) -> list[str]:
    """What the model says to a batch; see `asked`, which also says what it took."""
    return [answer.text for answer in asked(params, policy, samples, how)]


def asked(params: LanguageModel, policy: Method, samples: Sequence[Sample], how: How) -> list[Answer]:
    """What the model says to a batch.

    Args:
        params: from `jaxkv.load`.
        policy: the compression.
        samples: the cases.
        how: whether the policy sees the questions.

    Returns:
        An answer to each.
    """
    pairs = [ids_of(params.text, sample, raw=how.raw) for sample in samples]
    # Without a question there is nothing to keep from the policy: such a sample runs as it does in the other setting.
    # Answers of one length are drawn together, so that no sample has more drawn for it than it asks for.
    kinds = [(bool(of[1]) and how.agnostic, sample.new_tokens) for of, sample in zip(pairs, samples, strict=True)]
    told: dict[int, Answer] = {}
    for kind in dict.fromkeys(kinds):
        at = [number for number, each in enumerate(kinds) if each == kind]
        # Programs are compiled for a batch's size, so a part of one is filled up with copies.
        all_of = at + at[-1:] * (len(samples) - len(at))
        said = _asked(params, policy, [samples[n] for n in all_of], [pairs[n] for n in all_of], how.seed, kind[0])
        told |= zip(at, said, strict=False)
    return [told[at] for at in range(len(samples))]


def _asked(
    params: LanguageModel,
    policy: Method,
    samples: Sequence[Sample],
    pairs: Sequence[tuple[list[int], list[int]]],
    key: int,
    agnostic: bool,
) -> list[Answer]:
    new_tokens, progress = samples[0].new_tokens, False
    if agnostic:
        cache = prefill(params, [context for context, _ in pairs], policy=policy, key=key, progress=progress)
        questions = [question for _, question in pairs]
        out = generate(params, questions, cache=cache, max_new_tokens=new_tokens, key=key, progress=progress)
    else:
        whole = [context + question for context, question in pairs]
        out = generate(params, whole, policy=policy, max_new_tokens=new_tokens, key=key, progress=progress)
    assert params.text is not None
    # Rows behind the limit are those of later tokens; a policy that drops a row for each of them has none.
    kept = np.minimum(host(out.cache.limit)[:, : len(pairs)], out.cache.kept)
    ends = set(params.text.eos_ids)
    told = []
    for at, (sample, tokens) in enumerate(zip(samples, out.tokens, strict=True)):
        mine = [each for each in tokens.tolist() if each not in ends]
        said = params.text.decode(mine)
        answer = Answer(
            text=min((said.split(stop)[0] for stop in sample.stop), key=len, default=said),
            tokens=sum(map(len, pairs[at])),
            rows=float(kept[:, at].mean()),
            nbytes=int(kept[:, at].sum()) * out.cache.row_bytes,
        )
        told.append(answer)
    return told
