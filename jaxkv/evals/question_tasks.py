"""Tasks whose samples are questions: a model answers them over compressed caches, and a metric scores the answers."""

import abc
import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np

from jaxkv._dataclasses import frozen_dataclass
from jaxkv.cache import ConversationState
from jaxkv.evals.task import EvaluationTask, How, SampleOutcome, TaskSample
from jaxkv.generation import generate, prefill
from jaxkv.loading import LanguageModel
from jaxkv.policies.policy import Policy
from jaxkv.sharding.mesh import copy_to_host
from jaxkv.text.chat import Chat
from jaxkv.text.prompts import render_added_messages
from jaxkv.text.tokenizer import ChatTokenizer, make_user_message


@frozen_dataclass
class QuestionTask(EvaluationTask):
    """Base class of tasks with text answers: a subclass defines `samples`, and `score` for a predicted text.

    A question-agnostic run compresses a context once for all samples of a batch that share it.
    """

    @abc.abstractmethod
    def score(self, sample: TaskSample, prediction: str) -> float:
        """Abstract: return the score in [0, 1] of one sample's predicted text.

        Args:
            sample: the sample.
            prediction: text sampled by the model, without the sample's prefix.

        Returns:
            The score, a share in [0, 1].
        """

    def run(
        self, params: LanguageModel, policy: Policy, samples: Sequence[TaskSample], how: How
    ) -> list[SampleOutcome]:
        """Generate answers to a batch of samples; return a `SampleOutcome` each: score, text, entries and bytes."""
        outcomes = answer_samples(params, policy, samples, how)
        return [
            dataclasses.replace(each, score=self.score(sample, each.prediction))
            for sample, each in zip(samples, outcomes, strict=True)
        ]

    def list_compressed_ids(self, params: LanguageModel, sample: TaskSample, how: How) -> list[int]:
        """Return a sample's token ids to compress: the prompt's, or the context's if question-agnostic."""
        return _split_compressed_ids(params, sample, how)[0]


def encode_sample(
    text: ChatTokenizer, sample: TaskSample, *, raw: bool = False
) -> tuple[list[int], list[int]]:
    """Encode a sample's context, and its question with prefix, as two id lists, the prompt; templated unless `raw`.

    Args:
        text: the model's tokenizer.
        sample: the sample.
        raw: True to leave out the chat template, as `TaskSample.raw` does.

    Returns:
        The context's ids, with the template's opening; the question's, with the template's closing and the prefix.
    """
    question = sample.question
    if raw or sample.raw or not text.has_template:
        return text.encode(sample.context, bos=True), text.encode(
            question + sample.prefix, bos=False
        )
    context = render_added_messages(
        Chat(messages=[make_user_message(sample.context)]),
        text,
        turn=ConversationState.START,
        close=False,
    )
    asked = render_added_messages(
        Chat(messages=[make_user_message(question)]),
        text,
        turn=ConversationState.USER,
        close=True,
        parted=False,
    )
    encode = partial(text.encode, bos=False, shielded=True)
    return encode(context), encode(asked + sample.prefix)


def answer_samples(
    params: LanguageModel, policy: Policy, samples: Sequence[TaskSample], how: How
) -> list[SampleOutcome]:
    """Generate answers to a batch of samples over compressed caches; return a `SampleOutcome` of score 0 for each.

    Entries and bytes are those of the compressed tokens at the end of the answer. Samples that compress the same tokens
    share their cache.

    Args:
        params: from `jaxkv.load`.
        policy: compression policy.
        samples: the batch.
        how: settings of the run: question-agnostic or not, chat template, seed.

    Returns:
        One outcome per sample, in order, with a score of 0.
    """
    # A sample without a question is the same in both settings.
    # Answers of equal `create_new_tokens` are sampled together, so that no sample gets more tokens than it needs.
    kinds: dict[tuple[bool, int], dict[int, tuple[list[int], list[int]]]] = {}
    for number, sample in enumerate(samples):
        pair = _split_compressed_ids(params, sample, how)
        kinds.setdefault((bool(pair[1]), sample.new_tokens), {})[number] = pair
    found: dict[int, SampleOutcome] = {}
    for (_, new), pairs in kinds.items():
        found |= _generate_outcomes(
            params, policy, pairs, size=len(samples), new=new, seed=how.seed
        )
    return [found[number] for number in range(len(samples))]


def _split_compressed_ids(
    params: LanguageModel, sample: TaskSample, how: How
) -> tuple[list[int], list[int]]:
    """Return a sample's ids to compress and the ids after them: the question's if question-agnostic, else none."""
    context, question = encode_sample(params.tokenizer, sample, raw=how.raw)
    return (context, question) if how.agnostic else (context + question, [])


def _generate_outcomes(
    params: LanguageModel,
    policy: Policy,
    pairs: Mapping[int, tuple[list[int], list[int]]],
    *,
    size: int,
    new: int,
    seed: int,
) -> dict[int, SampleOutcome]:
    """Answer samples, given as (ids to compress, ids after) by number; return `SampleOutcome` of score 0 by number."""
    # The first sample of each context and question: a batch may contain copies.
    asks: dict[tuple[int, ...], dict[tuple[int, ...], int]] = {}
    first = {
        number: asks.setdefault(tuple(context), {}).setdefault(tuple(question), number)
        for number, (context, question) in pairs.items()
    }
    # Programs are compiled for a number of contexts: copies of the last one fill them up to few such numbers.
    several = [[*each.values()] for each in asks.values()]
    several += several[-1:] * (min(size, 1 << (len(several) - 1).bit_length()) - len(several))
    contexts = [pairs[numbers[0]][0] for numbers in several]
    answered = partial(generate, params, max_new_tokens=new, key=seed, progress=False)
    follows = any(question for _, question in pairs.values())
    if follows:
        cache = prefill(params, contexts, policy=policy, key=seed, progress=False)
    found: dict[int, SampleOutcome] = {}
    for turn in range(max(map(len, several))):
        rows = [numbers[min(turn, len(numbers) - 1)] for numbers in several]
        if follows:
            out = answered([pairs[number][1] for number in rows], cache=cache)
        else:
            out = answered(contexts, policy=policy)
        # Entries beyond the limit belong to later tokens; a policy that evicts one for each new token has none.
        kept = np.minimum(copy_to_host(out.cache.limit)[:, : len(rows)], out.cache.kept)
        for row, (number, completion) in enumerate(zip(rows, out, strict=True)):
            found[number] = SampleOutcome(
                score=0.0,
                prediction=completion.text or "",
                tokens=sum(map(len, pairs[number])),
                rows=float(kept[:, row].mean()),
                nbytes=int(out.cache.layer_entry_bytes @ kept[:, row].sum(axis=1)),
            )
    return {number: found[at] for number, at in first.items()}
