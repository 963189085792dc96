"""Tokens of one sample's prompt, and how many kv heads hold each after prefill, which the report shades."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jaxkv.cache import KVCache
from jaxkv.text.pieces import pieces_of
from jaxkv.text.shown import Shown, joined
from jaxkv.text.tokenizer import Text

# Of a longer prompt, as many tokens are shown from either end.
_EITHER_END = 500


@dataclasses.dataclass(frozen=True, kw_only=True)
class Held:
    """Tokens of one compressed prompt, and the number of kv heads over all layers that hold each after prefill.

    Attributes:
        ids: the n token ids.
        heads: number of kv heads over all layers.
        counts: for each token the number of kv heads that hold its row; None if the policy drops nothing.
        chooses: True if the policy chooses for each new token which of the rows it reads.
        later: True if the policy drops rows while it answers, too; counts are those before.
        merges: True if the policy merges dropped rows into kept ones.
    """

    ids: Sequence[int]
    heads: int
    counts: Sequence[int] | None
    chooses: bool = False
    later: bool = False
    merges: bool = False

    def as_json(self, text: Text) -> dict[str, Any]:
        """Dict of a `Record.held`: texts and counts of the tokens that are shown, of long prompts those of both ends.

        Args:
            text: the model's tokenizer.

        Returns:
            "ends" with [pieces, counts] of each part shown, the number of "tokens", the "share" of all rows kept (None
            if nothing is dropped), and the other fields.
        """
        count = len(self.ids)
        ends = [slice(count)]
        if count > 2 * _EITHER_END:
            ends = [slice(_EITHER_END), slice(count - _EITHER_END, count)]
        said = dataclasses.asdict(self)
        del said["ids"], said["counts"]
        said |= {"tokens": count, "ends": [], "share": None}
        if self.counts is not None:
            said["share"] = sum(self.counts) / (self.heads * count)
            for end in ends:
                said["ends"].append([pieces_of(self.ids[end], text).texts, [*self.counts[end]]])
        return said


def shaded(held: Mapping[str, Any]) -> Shown:
    """`Shown`, whose HTML has the tokens of a `Record.held` shaded by how many kv heads hold each."""
    return Shown(
        passages=tuple(joined(pieces, counts) for pieces, counts in held["ends"]),
        heads=held["heads"],
    )


class Watch:
    """Callable on prefilled caches: stores how many kv heads hold each token of the prompt that is to be shown."""

    def __init__(self, shown: str | None, ids: Sequence[str], prompts: Sequence[Sequence[int]]):
        """Takes the id of the sample to show, and the samples' ids and prompts; none is shown if it is not there."""
        self.at = ids.index(shown) if shown in ids else None
        self.prompts = prompts
        self.held: Held | None = None

    def __call__(self, cache: KVCache, prompts: Sequence[Sequence[int]]) -> None:
        """Stores in `held` the number of kv heads that hold each token of the prompt in a cache of `prompts`."""
        if self.at is None:
            return
        ids, parts = self.prompts[self.at], cache.policy.parts()
        row, drops = list(prompts).index(ids), parts.scorer is not None
        self.held = Held(
            ids=ids,
            heads=len(cache.compressed_layers) * cache.config.kv_heads,
            counts=cache.counts()[row][: len(ids)].tolist() if drops else None,
            chooses=parts.read is not None,
            later=parts.ongoing.compresses,
            merges=parts.merge is not None,
        )

    def of(self, number: int) -> Held | None:
        """`held` for the sample of this number, if it is the one to show; else None."""
        return self.held if number == self.at else None
