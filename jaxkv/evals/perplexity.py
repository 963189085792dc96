"""The tasks `perplexity`, `loss` and `text`: loss of true text, read token by token over a compressed cache."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxkv._errors import require
from jaxkv.cache import KVCache
from jaxkv.engine.session import Session
from jaxkv.evals.kept import Watch
from jaxkv.evals.task import How, Outcome, Sample, Task, task, tokenizer_of
from jaxkv.evals.texts import texts_of
from jaxkv.loading import LanguageModel
from jaxkv.policies.policy import Method
from jaxkv.sharding.mesh import host

# Most points of a curve.
_POINTS = 128


@task("perplexity")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Perplexity(Task):
    """Task: loss by position over a long text under a fixed budget (D2O, figure 6, of PG-19), in nats a token.

    A text's first tokens are prefilled, then its true tokens are read one by one, as if they had been drawn: policies
    that drop a row for every new one do so, and with `every=n` caches are compressed again. A token's loss is
    measured on the logits before it is read. The curve shows the mean loss up to each position; rows are those held
    at the end.

    Attributes:
        data: a text, a folder of texts (.txt, as PG-19 has them), or a file of lines of JSON with a "text"; by default
            eight documents in the public domain, speeches and chapters of about 5,000 tokens.
        count: number of texts, from the first on; 0 for all.
        prefix: number of tokens prefilled.
        tokens: number of tokens after the prefix whose loss is measured.
    """

    unit = "nats"
    higher = False
    asks = False
    # Whether the curve's positions are counted from the end of the prefix.
    counts_behind: ClassVar[bool] = False

    data: str | None = None
    count: int = 8
    prefix: int = 64
    tokens: int = 4032

    def __post_init__(self):
        super().__post_init__()
        require(self.count >= 0, "count", self.count, "give 0 or more")
        for name in ("prefix", "tokens"):
            require(getattr(self, name) >= 1, name, getattr(self, name), "give at least 1 token")

    def samples(self, params: LanguageModel) -> Sequence[Sample]:
        """Makes a list of one sample per text; ValueError for texts of fewer than `prefix + tokens` tokens."""
        texts, need = texts_of(self.data, self.count), self.prefix + self.tokens
        lengths = _lengths(params, texts)
        short = {title: length for title, length in lengths.items() if length < need}
        remedy = f"with prefix={self.prefix} more than there are of {short}: lower one"
        require(not short, "tokens", self.tokens, remedy)
        return _of_texts(texts)

    def prefix_of(self, length: int, positions: int) -> int:
        """Number of a text's tokens to prefill: `prefix`; subclasses also use `length` and the model's `positions`."""
        return self.prefix

    def run(
        self, params: LanguageModel, policy: Method, samples: Sequence[Sample], how: How
    ) -> list[Outcome]:
        """Reads texts token by token after a prefix; list of an `Outcome` each: mean loss, curve, rows and bytes."""
        tokenizer = tokenizer_of(params)
        ids = [tokenizer.encode(each.context, bos=True) for each in samples]
        ends = [self.prefix_of(len(each), params.config.max_positions) for each in ids]
        prefixes = [each[:end] for each, end in zip(ids, ends, strict=True)]
        after = np.asarray(
            [each[end : end + self.tokens] for each, end in zip(ids, ends, strict=True)], np.int32
        )
        shown = next((at for at, each in enumerate(samples) if each.id == how.shown), None)
        watch = None if shown is None else Watch(prefixes[shown])
        found = losses_of(params, policy, prefixes, after, seed=how.seed, watch=watch)
        wide = -(-self.tokens // _POINTS)
        points = np.arange(wide, self.tokens + wide, wide).clip(max=self.tokens)
        return [
            Outcome(
                score=float(loss.mean()),
                figures={
                    "positions": ((0 if self.counts_behind else ends[at]) + points).tolist(),
                    "losses": [float(part.mean()) for part in np.split(loss, points[:-1])],
                    "rows_after_prefill": float(found.before[at]),
                },
                tokens=ends[at] + self.tokens,
                rows=float(found.rows[at]),
                nbytes=int(found.nbytes[at]),
                held=watch.held if watch is not None and at == shown else None,
            )
            for at, loss in enumerate(found.losses)
        ]


@task("loss")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Loss(Perplexity):
    """Task: loss of the true continuations of compressed prompts (D2O, table 6, as loss), in nats a token.

    Attributes:
        data: a text, a folder of texts (.txt), or a file of lines of JSON with a "text"; by default eight documents in
            the public domain.
        count: number of texts, from the first on; 0 for all.
        prefix: number of tokens prefilled.
        tokens: number of tokens after the prefix whose loss is measured.
    """

    prefix: int = 4096
    tokens: int = 512


@task("text")
@dataclasses.dataclass(frozen=True, kw_only=True)
class OwnTexts(Perplexity):
    """Task: loss of the true ends of your own texts, over the compressed cache of what stands before them, in nats.

    Of each text the last `tokens` tokens are measured, of a long one those after its first `prefix` tokens; texts may
    have any lengths from twice `tokens` on.

    Attributes:
        data: a text, a folder of texts (.txt), or a file of lines of JSON with a "text".
        count: number of texts, from the first on; 0 for all.
        prefix: most tokens prefilled of a text; fewer where the model has no positions for them.
        tokens: number of tokens after them whose loss is measured.
    """

    counts_behind = True

    data: str = dataclasses.field()
    count: int = 0
    prefix: int = 4096
    tokens: int = 128

    def samples(self, params: LanguageModel) -> Sequence[Sample]:
        """Makes a list of one sample per text, longest first; ValueError for texts of under twice `tokens` tokens."""
        texts, most = texts_of(self.data, self.count), params.config.max_positions
        require(
            2 * self.tokens <= most,
            "tokens",
            self.tokens,
            f"more than half of the model's {most} positions",
        )
        lengths = _lengths(params, texts)
        short = {title: length for title, length in lengths.items() if length < 2 * self.tokens}
        remedy = f"more than half of {short}, the number of tokens of these texts: lower it, or leave them out"
        require(not short, "tokens", self.tokens, remedy)
        # Texts of like lengths run in one batch, which has the shape of its longest.
        longest = sorted(texts, key=lambda title: -self.prefix_of(lengths[title], most))
        return _of_texts({title: texts[title] for title in longest})

    def prefix_of(self, length: int, positions: int) -> int:
        """Number of a text's tokens to prefill: `prefix`, or fewer to leave `tokens` within length and positions."""
        return min(length - self.tokens, self.prefix, positions - self.tokens)


def _lengths(params: LanguageModel, texts: Mapping[str, str]) -> dict[str, int]:
    """Dict {title: number of the text's tokens, bos included}."""
    return {
        title: len(tokenizer_of(params).encode(text, bos=True)) for title, text in texts.items()
    }


def _of_texts(texts: Mapping[str, str]) -> list[Sample]:
    """List of one `Sample` per text, without chat template, with its title as tag."""
    return [
        Sample(id=f"{number:03d}", group="texts", context=text, raw=True, tags={"title": title})
        for number, (title, text) in enumerate(texts.items())
    ]


class Read(NamedTuple):
    """Result of `losses_of`: losses in nats, rows per kv head and layer `before` and after them, bytes at the end."""

    losses: Float[np.ndarray, "B T"]
    before: Float[np.ndarray, " B"]
    rows: Float[np.ndarray, " B"]
    nbytes: Int[np.ndarray, " B"]


def losses_of(
    params: LanguageModel,
    policy: Method,
    prefixes: Sequence[Sequence[int]],
    after: Int[np.ndarray, "B T"],
    *,
    seed: int = 0,
    watch: Watch | None = None,
) -> Read:
    """`Read` with losses [B, T] in nats of the ids `after` prefixes, read one by one over their compressed cache.

    The `Watch` looks at this cache before the first of them is read.
    """
    session, losses, count = Session(params, policy, key=seed), [], after.shape[1]
    cache = session.prefill([list(each) for each in prefixes], new=count)
    before = cache.kept.mean(axis=(0, 2))
    if watch is not None:
        watch(cache, prefixes)
    for at in range(count):
        assert cache.logits is not None
        # On a mesh the batch may be padded.
        losses.append(_loss(cache.logits, np.pad(after[:, at], (0, cache.padding), mode="edge")))
        if at + 1 < count:
            cache = feed(session, cache, after[:, at : at + 1], donate=True)
    found = np.stack([host(each) for each in losses], axis=1, dtype=np.float64)[: len(after)]
    kept = cache.kept
    return Read(found, before, kept.mean(axis=(0, 2)), kept.sum(axis=(0, 2)) * cache.entry_bytes)


def feed(session: Session, cache: KVCache, ids: Any, *, donate: bool) -> KVCache:
    """New cache after reading one more token (or none) per sequence, as in decoding: may evict rows, or recompress."""
    cache = session.extend(cache, ids, chunk=1, donate=donate)
    period = session.policy.parts().every
    return session.compress_again(cache, room=period) if period else cache


@jax.jit
def _loss(logits: Float[Array, "B V"], token: Int[Array, " B"]) -> Float[Array, " B"]:
    """Array [B]: negative log-probability in nats of one token per sequence, from logits [B, V]."""
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), token[:, None], axis=1)[:, 0]
