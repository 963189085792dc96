"""Long answers: RULER's prompts whose tokens are read one by one, as if sampled, and then its question."""

import dataclasses
from collections.abc import Sequence

import numpy as np

import jaxkv
from jaxkv.cache import ConversationState
from jaxkv.engine.session import Session
from jaxkv.evals import How, Ruler, SampleOutcome, TaskSample, encode_sample
from jaxkv.policies.policy import Policy
from jaxkv.text.prompts import EncodedPrompts


@dataclasses.dataclass(frozen=True, kw_only=True)
class LongAnswers(Ruler):
    """Task: keep what is needed of tokens read one by one; RULER's samples, scores and tasks.

    Attributes:
        prefix: tokens that are prefilled.
    """

    prefix: int = 64

    def run(
        self, params: jaxkv.LanguageModel, policy: Policy, samples: Sequence[TaskSample], how: How
    ) -> list[SampleOutcome]:
        """Feed each prompt's tokens but the prefix, then sample the answer."""
        prompts = [sum(encode_sample(params.tokenizer, each, raw=how.raw), []) for each in samples]
        lengths = [*map(len, prompts)]
        steps = max(each.new_tokens for each in samples)
        session = Session(params, policy, key=how.seed)
        first = [ids[: self.prefix] for ids in prompts]
        cache = session.prefill(first, new=max(lengths) - self.prefix + steps)
        parts = policy.composed
        # A policy that evicts does so at every token; between two compressions tokens may come at once.
        chunk = 1 if parts.evicts_while_decoding else parts.recompression_interval
        piece = parts.recompression_interval or max(lengths)
        told = EncodedPrompts(
            ids=prompts, single=False, turns=(ConversationState.RAW,) * len(prompts)
        )
        for at in range(self.prefix, max(lengths), piece):
            part = dataclasses.replace(told, ids=[ids[at : at + piece] for ids in prompts])
            cache = session.extend(cache, part, chunk=chunk, donate=True)
            if parts.recompression_interval:
                cache = session.recompress_sequences(cache, headroom=piece)
        cache, found = session.sample(cache, steps, eos=params.end_token_ids)
        kept = cache.kept
        nbytes = cache.layer_entry_bytes @ kept.sum(axis=2)
        texts = [
            params.tokenizer.decode([int(token) for token in ids if token >= 0][: each.new_tokens])
            for each, ids in zip(samples, np.asarray(found), strict=True)
        ]
        return [
            SampleOutcome(
                score=self.score(sample, text),
                prediction=text,
                tokens=lengths[at],
                rows=float(kept[:, at].mean()),
                nbytes=int(nbytes[at]),
            )
            for at, (sample, text) in enumerate(zip(samples, texts, strict=True))
        ]
