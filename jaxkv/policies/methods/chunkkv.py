"""ChunkKV: keep whole chunks of neighbouring rows, the same ones in all kv heads, by any policy's scores."""

import dataclasses

from jaxkv._checks import field, flag
from jaxkv._errors import require
from jaxkv.policies.chunked_heads import ChunkedHeads
from jaxkv.policies.heads import Order
from jaxkv.policies.parts import Parts
from jaxkv.policies.policy import Method
from jaxkv.policies.registry import register
from jaxkv.policies.wrapper import Wrapper


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class ChunkKV(Wrapper):
    """Keeps whole chunks of neighbouring rows, the same in all kv heads, by the mean of the base policy's scores.

    The sum of rows is the budget's: of the first chunk that does not fit, its best rows stay. Chunks that have rows of
    the window, sinks or protected spans are completed before others. With `gated=True`, chunks of high scores that come
    from few of their rows keep only these, and the rows that this frees go to further chunks.

    Attributes:
        base: the policy whose scores, kept rows and layer budgets are used.
        chunk: rows of a chunk; None: 20, or 10 if `gated`.
        gated: keep only the best rows of chunks whose mean score is at least the median and whose scores' entropy is
            below the median; otherwise chunks stay whole.
        peaks: rows kept of such a chunk; 4, if None.

    References:
        Liu et al., ChunkKV: Semantic-Preserving KV Cache Compression for Efficient Long-Context LLM Inference,
        arXiv:2502.00299; the gate is EntropyGatedChunkKV of kvpress 0.5.5.
    """

    chunk: int | None = None
    gated: bool = False
    peaks: int | None = None

    paper = "ChunkKV, arXiv:2502.00299"

    usual = "snapkv"

    def _check(self) -> None:
        field(self, "gated", flag)
        require(self.peaks is None or self.gated, "peaks", self.peaks, "it needs gated=True")
        super()._check()

    @property
    def heads(self) -> ChunkedHeads:
        """Makes `ChunkedHeads`, head budgets that keep whole chunks, of `chunk` and (if `gated`) `peaks`."""
        chunk = (10 if self.gated else 20) if self.chunk is None else self.chunk
        return ChunkedHeads(
            chunk=chunk, peaks=(4 if self.peaks is None else self.peaks) if self.gated else None
        )

    def check_base(self, base: Method, parts: Parts) -> None:
        """Checks the base policy; raises ValueError if it sets head budgets, nests layers, or evicts row by row."""
        plain = parts.heads.order in (Order.OWN, Order.MEAN) and not parts.heads.needs_norms
        require(plain, "base", base, "its heads choose in a way of their own: give SnapKV(), say")
        require(
            not parts.nested,
            "base",
            base,
            "its layers choose among the rows of the layer below: give SnapKV(), say",
        )
        require(
            not parts.evicts,
            "base",
            base,
            "rows that go one by one are in no chunk: give mode='prefill'",
        )

    def wrap(self, base: Parts) -> Parts:
        """Returns the base's `Parts` with `ChunkedHeads`: a layer's kv heads keep the same chunks of rows."""
        return base.replace(heads=self.heads)
