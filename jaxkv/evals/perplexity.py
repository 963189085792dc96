"""The task `loss`: loss of true text, read token by token over a compressed cache."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxkv._dataclasses import frozen_dataclass
from jaxkv._errors import require
from jaxkv.cache import ConversationState, KVCache
from jaxkv.engine.session import Session
from jaxkv.evals.task import EvaluationTask, How, SampleOutcome, TaskSample, task
from jaxkv.evals.texts import read_texts
from jaxkv.loading import LanguageModel
from jaxkv.policies.policy import Policy
from jaxkv.sharding.mesh import copy_to_host
from jaxkv.text.prompts import EncodedPrompts

# Maximum number of points of a curve.
_POINTS = 128


@task("loss")
@frozen_dataclass
class TextLossTask(EvaluationTask):
    """Task: loss in nats per token of true text after compressed prefixes (D2O, table 6, figure 6, on PG-19).

    The first tokens of a text are prefilled, then its true tokens are read one by one, as if they were sampled:
    policies that evict an entry for every new one do so, and with `every=n` caches are recompressed. The loss of a
    token is measured on the logits before it is read. The curve shows the mean loss up to each position after the
    prefix; entries are counted at the end. A text may be shorter than prefix and tokens: the prefix is then shortened,
    but not below the number of tokens.

    Attributes:
        data: a text file, a folder of .txt files (as PG-19 has them), or a file of JSON lines with a "text" (default:
            eight documents in the public domain, speeches and chapters of about 5,000 tokens).
        count: number of texts, from the first on; 0 for all.
        prefix: number of prefilled tokens; 64 for a curve over the length of a text.
        tokens: number of tokens after the prefix whose loss is measured.
    """

    unit = "nats"
    higher = False
    asks = False

    data: str | None = None
    count: int = 0
    prefix: int = 4096
    tokens: int = 512

    def __post_init__(self):
        super().__post_init__()
        self.require_at_least(0, "count")
        self.require_at_least(1, "prefix", "tokens")

    def samples(self, params: LanguageModel) -> Sequence[TaskSample]:
        """Make one sample per text, longest (as cut) first; ValueError if texts, or the positions, are too short."""
        texts = read_texts(self.data, self.count)
        most = params.config.max_positions
        need = self.tokens + min(self.prefix, self.tokens)
        text = params.tokenizer
        lengths = {title: len(text.encode(each, bos=True)) for title, each in texts.items()}
        short = {title: length for title, length in lengths.items() if min(length, most) < need}
        remedy = f"with a prefix {need} are needed, but {short}, or the model's {most} positions, have less"
        require(not short, "tokens", self.tokens, f"{remedy}: lower it, or leave texts out")
        # Texts of similar lengths run in one batch, which has the shape of its longest text.
        order = sorted(texts, key=lambda title: -min(lengths[title], self.prefix + self.tokens))
        return [
            TaskSample(
                id=f"{number:03d}",
                group="texts",
                context=texts[title],
                raw=True,
                tags={"title": title},
            )
            for number, title in enumerate(order)
        ]

    def run(
        self, params: LanguageModel, policy: Policy, samples: Sequence[TaskSample], how: How
    ) -> list[SampleOutcome]:
        """Feed true tokens one by one after each prefix; return per text a `SampleOutcome` with mean loss and curve."""
        prefixes, after = zip(*(self._split_prefix(params, each) for each in samples), strict=True)
        told = np.asarray(after, np.int32)
        found = measure_text_losses(params, policy, prefixes, told, seed=how.seed)
        wide = -(-self.tokens // _POINTS)
        points = np.arange(wide, self.tokens + wide, wide).clip(max=self.tokens)
        return [
            SampleOutcome(
                score=float(loss.mean()),
                figures={
                    "positions": points.tolist(),
                    "losses": [float(part.mean()) for part in np.split(loss, points[:-1])],
                    "rows_after_prefill": float(found.before[at]),
                },
                tokens=len(prefixes[at]) + self.tokens,
                rows=float(found.rows[at]),
                nbytes=int(found.nbytes[at]),
            )
            for at, loss in enumerate(found.losses)
        ]

    def list_compressed_ids(self, params: LanguageModel, sample: TaskSample, how: How) -> list[int]:
        """Return the token ids of the text's prefix, which is prefilled and compressed."""
        return self._split_prefix(params, sample)[0]

    def _split_prefix(
        self, params: LanguageModel, sample: TaskSample
    ) -> tuple[list[int], list[int]]:
        """Return (prefix ids, the `tokens` ids after it) of a text; shorter prefix if text or positions are short."""
        ids = params.tokenizer.encode(sample.context, bos=True)
        end = min(self.prefix, min(len(ids), params.config.max_positions) - self.tokens)
        return ids[:end], ids[end : end + self.tokens]


class TextLosses(NamedTuple):
    """Result by text: losses in nats per token; entries per kv head after prefill and at the end; bytes."""

    losses: Float[np.ndarray, "B T"]
    before: Float[np.ndarray, " B"]
    rows: Float[np.ndarray, " B"]
    nbytes: Int[np.ndarray, " B"]


def measure_text_losses(
    params: LanguageModel,
    policy: Policy,
    prefixes: Sequence[Sequence[int]],
    after: Int[np.ndarray, "B T"],
    *,
    seed: int = 0,
) -> TextLosses:
    """Compress prefixes, feed ids `after`; return `TextLosses`: nats by token, entries and bytes by text."""
    session = Session(params, policy, key=seed)
    cache = session.prefill([list(each) for each in prefixes], new=after.shape[1])
    before = cache.kept.mean(axis=(0, 2))
    losses, _, cache = teacher_force_tokens(session, cache, after.tolist())
    kept = cache.kept
    return TextLosses(
        losses, before, kept.mean(axis=(0, 2)), cache.layer_entry_bytes @ kept.sum(axis=2)
    )


def teacher_force_tokens(
    session: Session, cache: KVCache, after: Sequence[Sequence[int]], *, donate: bool = True
) -> tuple[Float[np.ndarray, "B T"], Bool[np.ndarray, "B T"], KVCache]:
    """Feed ids but the last, one by one, over a cache (donated); return losses `[B, T]` in nats, greedy mask, cache.

    After the end of a sequence, its loss is 0 and its mask True. A cache of one sequence is shared by all.
    """
    told = EncodedPrompts(
        ids=list(map(list, after)), single=False, turns=(ConversationState.RAW,) * len(after)
    )
    longest = int(told.prompt_lengths.max())
    found = []
    tokens = told.pad_ids(longest)
    there = np.arange(longest) < told.prompt_lengths[:, None]
    for at in range(longest):
        assert cache.logits is not None
        # On a mesh the batch may be padded.
        logits = jnp.broadcast_to(cache.logits[: cache.batch], (len(after), cache.config.vocab))
        found.append(_compute_token_loss(logits, tokens[:, at]))
        if at + 1 < longest:
            part = [ids[at : at + 1] if at + 1 < len(ids) else [] for ids in told.ids]
            new = dataclasses.replace(told, ids=part)
            cache = feed_one_token(session, cache, new, donate=donate or at > 0)
    losses, greedy = (
        np.stack([*map(copy_to_host, each)], axis=1) for each in zip(*found, strict=True)
    )
    return np.where(there, losses, 0).astype(np.float64), greedy | ~there, cache


def feed_one_token(session: Session, cache: KVCache, ids: Any, *, donate: bool) -> KVCache:
    """Append one token (or none) per sequence to a cache as in decoding, with eviction or recompression; return it."""
    cache = session.extend(cache, ids, chunk=1, donate=donate)
    period = session.policy.build_policy_parts().recompression_interval
    return session.recompress_sequences(cache, headroom=period) if period else cache


@jax.jit
def _compute_token_loss(
    logits: Float[Array, "B V"], tokens: Int[Array, " B"]
) -> tuple[Float[Array, " B"], Bool[Array, " B"]]:
    """Return the loss `[B]` in nats of one token per sequence, and a mask `[B]`, True if its logit is the largest."""
    value = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, None], axis=1)[:, 0]
    return -value, logits.argmax(axis=1) == tokens
