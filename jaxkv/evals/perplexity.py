"""The tasks `perplexity` and `loss`: loss of true text, read token by token over a compressed cache."""

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
from jaxkv.evals.task import How, Outcome, Sample, Task, task, tokenizer_of
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
        """Makes one sample per text; refuses texts of fewer than `prefix + tokens` tokens."""
        texts, need = texts_of(self.data, self.count), self.prefix + self.tokens
        lengths = {title: len(tokenizer_of(params).encode(text, bos=True)) for title, text in texts.items()}
        short = {title: length for title, length in lengths.items() if length < need}
        remedy = f"with prefix={self.prefix} more than there are of {short}: lower one"
        require(not short, "tokens", self.tokens, remedy)
        return [
            Sample(id=f"{number:03d}", group="texts", context=text, raw=True, tags={"title": title})
            for number, (title, text) in enumerate(texts.items())
        ]

    def run(self, params: LanguageModel, policy: Method, samples: Sequence[Sample], how: How) -> list[Outcome]:
        """Scores a batch of texts, tokens after the `prefix` read one by one; one Outcome (mean loss) per text."""
        tokenizer, need = tokenizer_of(params), self.prefix + self.tokens
        ids = np.asarray([tokenizer.encode(each.context, bos=True)[:need] for each in samples], np.int32)
        found = losses_of(params, policy, ids, self.prefix, seed=how.seed)
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


class Read(NamedTuple):
    """Losses in nats, mean rows per kv head and layer `before` the first loss and at the end, bytes at the end."""

    losses: Float[np.ndarray, "B T"]
    before: Float[np.ndarray, " B"]
    rows: Float[np.ndarray, " B"]
    nbytes: Int[np.ndarray, " B"]


def losses_of(
    params: LanguageModel, policy: Method, ids: Int[np.ndarray, "B N"], prefix: int, *, seed: int = 0
) -> Read:
    """`Read` of texts: losses of the tokens after `prefix`, read one by one over the prefix's compressed cache."""
    session, losses = Session(params, policy, key=seed), []
    cache = session.prefill(ids[:, :prefix], new=ids.shape[1] - prefix)
    before = cache.kept.mean(axis=(0, 2))
    for at in range(prefix, ids.shape[1]):
        assert cache.logits is not None
        # On a mesh the batch may be padded.
        losses.append(_loss(cache.logits, np.pad(ids[:, at], (0, cache.padding), mode="edge")))
        if at + 1 < ids.shape[1]:
            cache = feed(session, cache, ids[:, at : at + 1], donate=True)
    found = np.stack([host(each) for each in losses], axis=1, dtype=np.float64)[: len(ids)]
    kept = cache.kept
    return Read(found, before, kept.mean(axis=(0, 2)), kept.sum(axis=(0, 2)) * cache.row_bytes)


def feed(session: Session, cache: KVCache, ids: Any, *, donate: bool) -> KVCache:
    """Cache after one more token (or none) per sequence, as if just drawn: may evict, or recompress with `every`."""
    cache = session.extend(cache, ids, chunk=1, donate=donate)
    period = session.policy.parts().every
    return session.compress_again(cache, room=period) if period else cache


@jax.jit
def _loss(logits: Float[Array, "B V"], token: Int[Array, " B"]) -> Float[Array, " B"]:
    """Negative log-probability of one token per sequence, in nats."""
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), token[:, None], axis=1)[:, 0]


def texts_of(data: str | None, count: int = 0) -> Mapping[str, str]:
    """Dict {title: text} of the first `count` texts (0: all) in a text file, a folder of .txt files or a .jsonl file.

    None gives the documents that come with jaxkv. A path without texts is a FileNotFoundError that says what to give.
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
    """Text of a UTF-8 file; refuses other encodings."""
    try:
        return path.read_text("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"data={str(path)!r}: not UTF-8 text ({error}); save it as such") from None
