"""DuoAttention: kv heads of two kinds: some keep every row, the others the first and the most recent ones."""

import dataclasses
from typing import Any

from jaxkv._checks import field, real, whole
from jaxkv.policies.head_kinds import HeadKinds
from jaxkv.policies.head_scores import as_pattern
from jaxkv.policies.keep import Keep
from jaxkv.policies.parts import Parts
from jaxkv.policies.policy import Method
from jaxkv.policies.rank import ByAge
from jaxkv.policies.registry import register
from jaxkv.policies.unseen import Position


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class DuoAttention(Method):
    """Keeps every row in retrieval heads, the first and most recent ones in other kv heads, also while decoding.

    How many rows stay follows from the pattern: there is no budget. For each new row the oldest one after the sinks of
    a streaming head goes. Prompts are read by full attention in all heads, as in kvpress, and room for new rows is as
    large behind streaming heads as behind retrieval heads.

    Attributes:
        pattern: how much each layer's kv heads need all rows, `[L][K]` numbers from 0 to 1, or the published folder;
            one row for every layer of the model, those of layers with a window are ignored.
        sparsity: share of kv heads that are streaming heads: those of the lowest numbers. Heads of layers with a
            window do not count.
        sinks: first tokens that always stay; None: config.json's in the pattern's folder, 64 without one.
        window: most recent tokens that stay in streaming heads, where rows of `protect` take the places of its oldest;
            None: config.json's, 256 without one.

    References:
        Xiao et al., DuoAttention: Efficient Long-Context LLM Inference with Retrieval and Streaming Heads,
        arXiv:2410.10819, sections 2.2 and 2.3.
    """

    pattern: str | tuple[tuple[float, ...], ...] | None = None
    sparsity: float = 0.5
    sinks: int | None = None
    window: int | None = None

    paper = "DuoAttention, arXiv:2410.10819"

    def _check(self) -> None:
        config: dict[str, Any] = {}
        if self.pattern is not None:
            table, config = as_pattern("pattern", self.pattern)
            object.__setattr__(self, "pattern", table)
        for name, key, usual, least in (
            ("sinks", "sink_size", 64, 0),
            ("window", "recent_size", 256, 1),
        ):
            if getattr(self, name) is None:
                object.__setattr__(self, name, config.get(key, usual))
            remedy = f"give {least} or more tokens, or None for the pattern's own"
            field(self, name, whole, remedy, least=least)
        field(
            self, "sparsity", real, "give the share of streaming heads, between 0 and 1", high=1.0
        )

    def parts(self) -> Parts:
        """Config `Parts`: retrieval heads keep all rows; others keep sinks and recent rows and evict by age."""
        assert self.sinks is not None and self.window is not None
        assert not isinstance(self.pattern, str)
        reach, pattern = self.sinks + self.window, self.pattern or ()
        kinds = HeadKinds(pattern=pattern, reach=reach, sparsity=self.sparsity)
        keep = Keep(sinks=self.sinks, window=1)
        return self.compose(scorer=Position(), keep=keep, evict=ByAge(), layers=kinds, heads=kinds)
