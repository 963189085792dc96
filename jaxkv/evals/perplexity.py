"""How well a model goes on with true text over a cache that a policy has compressed, token by token."""

import dataclasses
import gzip
import json
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxkv._errors import require
from jaxkv.cache import KVCache
from jaxkv.engine.session import Session
from jaxkv.evals.stored import json_lines
from jaxkv.evals.task import How, Outcome, Sample, Task, task
from jaxkv.loading import LanguageModel
from jaxkv.policies.policy import Method
from jaxkv.sharding.mesh import host

# Points of a curve, at most.
_POINTS = 128


@task("perplexity")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Perplexity(Task):
    """Loss by position over a long text under a fixed budget (D2O, figure 6, of PG-19), in nats a token.

    A text's first tokens are prefilled, then its true tokens follow one by one, as if they had been drawn: policies
    that drop a row for every new one do so, and with `every=n` caches are compressed again. Each token is judged by
    what the cache says of it before it is read. The curve is of the mean loss up to each position; rows are those held
    in the end.

    Attributes:
        data: a text, a folder of texts (.txt, as PG-19 has them), or a file of lines of JSON with a "text"; by default
            eight documents in the public domain, speeches and chapters of about 5,000 tokens.
        count: texts, from the beginning; 0 for all.
        prefix: tokens prefilled.
        tokens: tokens judged behind them.
    """

    unit = "nats"
    higher = False
    asks = False

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
        """The texts; see `Task.samples`."""
        require(params.text is not None, "params", "no tokenizer", "tasks are texts: load a checkpoint that has one")
        texts, need = texts_of(self.data, self.count), self.prefix + self.tokens
        lengths = {title: len(_ids(params, text)) for title, text in texts.items()}
        short = {title: length for title, length in lengths.items() if length < need}
        remedy = f"with prefix={self.prefix} more than there are of {short}: lower one"
        require(not short, "tokens", self.tokens, remedy)
        return [
            Sample(id=f"{number:03d}", group="texts", context=text, raw=True, tags={"title": title})
            for number, (title, text) in enumerate(texts.items())
        ]

    def run(self, params: LanguageModel, policy: Method, samples: Sequence[Sample], how: How) -> list[Outcome]:
        """Reads a batch of texts; see `Task.run`."""
        ids = np.asarray([_ids(params, sample.context)[: self.prefix + self.tokens] for sample in samples], np.int32)
        found = judged(params, policy, ids, self.prefix, seed=how.seed)
        wide = -(-self.tokens // _POINTS)
        ends = np.arange(wide, self.tokens + wide, wide).clip(max=self.tokens)
        return [
            Outcome(
                score=float(loss.mean()),
                figures={
                    "positions": (self.prefix + ends).tolist(),
                    "losses": [float(part.mean()) for part in np.split(loss, ends[:-1])],
                    "rows_after_prefill": float(found.before[at]),
                },
                tokens=ids.shape[1],
                rows=float(found.rows[at]),
                nbytes=int(found.nbytes[at]),
            )
            for at, loss in enumerate(found.losses)
        ]


@task("loss")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Loss(Perplexity):
    """Loss of true continuations behind compressed prompts (D2O, table 6, as loss), in nats a token.

    Attributes:
        data: a text, a folder of texts (.txt), or a file of lines of JSON with a "text"; by default eight documents in
            the public domain.
        count: texts, from the beginning; 0 for all.
        prefix: tokens prefilled.
        tokens: tokens judged behind them.
    """

    prefix: int = 4096
    tokens: int = 512


class Read(NamedTuple):
    """What came of texts that were read on top of compressed prefixes.

    Attributes:
        losses: of each token, in nats.
        before: rows per kv head and layer after prefill, averaged.
        rows: in the end.
        nbytes: that these weigh.
    """

    losses: Float[np.ndarray, "B T"]
    before: Float[np.ndarray, " B"]
    rows: Float[np.ndarray, " B"]
    nbytes: Int[np.ndarray, " B"]


def judged(params: LanguageModel, policy: Method, ids: Int[np.ndarray, "B N"], prefix: int, *, seed: int = 0) -> Read:
    """The loss of each token behind a prefix, read one by one on top of its compressed cache.

    Args:
        params: the model.
        policy: the compression.
        ids: texts of equal length.
        prefix: tokens of each that are prefilled.
        seed: for policies that draw.

    Returns:
        Losses, and what the caches held.

    Raises:
        ValueError: for texts longer than the model's positions.
    """
    session, losses = Session(params, policy, key=seed), []
    cache = session.prefill(ids[:, :prefix], new=ids.shape[1] - prefix)
    before = cache.kept.mean(axis=(0, 2))
    for at in range(prefix, ids.shape[1]):
        assert cache.logits is not None
        # On a mesh the batch may be filled up.
        losses.append(_loss(cache.logits, np.pad(ids[:, at], (0, cache.padding), mode="edge")))
        if at + 1 < ids.shape[1]:
            cache = fed(session, cache, ids[:, at : at + 1], donate=True)
    found = np.stack([host(each) for each in losses], axis=1, dtype=np.float64)[: len(ids)]
    kept = cache.kept
    return Read(found, before, kept.mean(axis=(0, 2)), kept.sum(axis=(0, 2)) * cache.row_bytes)


def fed(session: Session, cache: KVCache, ids: Any, *, donate: bool) -> KVCache:
    """Reads a token of each sequence as if it had been drawn: rows go for it, and with `every` they are chosen anew.

    Args:
        session: the model and the policy.
        cache: of its.
        ids: one token for each sequence, or none for those at their end; see `Session.extend`.
        donate: give the cache up.

    Returns:
        The cache, with the logits behind the tokens.
    """
    cache = session.extend(cache, ids, chunk=1, donate=donate)
    period = session.policy.parts().every
    return session.compress_again(cache, room=period) if period else cache


@jax.jit
def _loss(logits: Float[Array, "B V"], token: Int[Array, " B"]) -> Float[Array, " B"]:
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), token[:, None], axis=1)[:, 0]


def _ids(params: LanguageModel, text: str) -> list[int]:
    assert params.text is not None
    return params.text.encode(text, bos=True)


def texts_of(data: str | None, count: int = 0) -> Mapping[str, str]:
    """Texts by title.

    Args:
        data: a text, a folder of texts, or a file of lines of JSON with a "text" and perhaps a "title"; None for the
            documents that come with jaxkv.
        count: texts to read; 0 for all.

    Returns:
        The texts, in order: of a folder, by file name.

    Raises:
        FileNotFoundError: where there are none, saying what to put where.
        ValueError: for a file that is no such thing.
    """
    if data is None:
        packed = (resources.files("jaxkv.evals") / "data" / "documents.json.gz").read_bytes()
        rows = json.loads(gzip.decompress(packed))
        return {row["title"]: row["text"] for row in rows[: count or None]}
    path = Path(data).expanduser()
    if path.suffix == ".jsonl" and path.is_file():
        read = json_lines(path, ("text",), count)
        odd = next((row["text"] for row in read if not isinstance(row["text"], str)), None)
        require(odd is None, "data", odd, 'give lines such as {"text": "..."}')
        return {f"{number:03d} {row.get('title', '')}".strip(): row["text"] for number, row in enumerate(read)}
    files = sorted(path.glob("*.txt")) if path.is_dir() else [path] if path.is_file() else []
    if not files:
        remedy = "give a text, a .jsonl file of texts, or a folder of .txt files, such as PG-19's test set"
        raise FileNotFoundError(f"data={data!r}: no text there; {remedy}")
    return {each.stem: _read(each) for each in files[: count or None]}


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"data={str(path)!r}: not UTF-8 text ({error}); save it as such") from None
