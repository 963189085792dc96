"""Attention by the Pallas kernels of `pallas_kernels` as a backend, compiled for a GPU or interpreted anywhere."""

from types import ModuleType
from typing import Any, ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxkv.attention.backend import Backend, Setting
from jaxkv.attention.xla import Walk


class Kernels(Backend):
    """The kernels, compiled: they append, evict, add and norm as well.

    Attributes:
        interpret: kernels run as plain JAX operations, to check them.
    """

    few_launches = True
    fused_step = True
    fused_eviction = True
    custom_calls = ("__gpu$xla.gpu.triton", "tpu_custom_call", "mosaic_gpu_v2", "mosaic_gpu")
    interpret: ClassVar[bool] = False

    @property
    def _kernels(self) -> ModuleType:
        """The package; Pallas takes half a second and tens of megabytes to import, paid by those who use it."""
        import jaxkv.pallas_kernels as pallas_kernels

        return pallas_kernels

    def refusal(self, setting: Setting) -> str | None:
        """Refuses all but GPUs."""
        return None if setting.gpu else f"these kernels need a GPU, this is {setting.platform}: use xla"

    def prefill(
        self,
        q: Float[Array, "B K G T D"],
        k: Float[Array, "B K S D"],
        v: Float[Array, "B K S D"],
        length: Int[Array, " B"],
        first: Int[Array, " B"] | None = None,
        *,
        lse: bool = True,
    ) -> tuple[Float[Array, "B K G T D"], Float[Array, "B K G T"] | None]:
        """Causal attention of all prompts in one kernel."""
        out, found = self._kernels.flash(q, k, v, _firsts(first, length), length, interpret=self.interpret)
        return out, found if lse else None

    def column_sums(
        self,
        q: Float[Array, "B K G T D"],
        k: Float[Array, "B K S D"],
        lse: Float[Array, "B K G T"],
        length: Int[Array, " B"],
        first: Int[Array, " B"] | None = None,
    ) -> Float[Array, "B K G S"]:
        """Attention that each key receives from T consecutive queries of each prompt, in one kernel."""
        at = (_firsts(first, length), length)
        return self._kernels.column_sums(q, k, lse, *at, per_query_head=True, interpret=self.interpret)

    def window_mean(
        self,
        q: Float[Array, "B K G w D"],
        k: Float[Array, "B K S D"],
        positions: Int[Array, "B w"],
        length: Int[Array, " B"],
    ) -> Float[Array, "B K S"]:
        """Mean attention that each key receives from the last w queries: no probabilities lie in memory."""
        sums = self._kernels.window_sums(q, k, positions[:, 0], length, interpret=self.interpret)
        return sums / jnp.minimum(length, q.shape[3]).astype(jnp.float32)[:, None, None]

    def attend(
        self,
        q: Float[Array, "B K R D"],
        k: Float[Array, "B P D"],
        v: Float[Array, "B P D"],
        start: Int[Array, "B K"],
        length: Int[Array, "B K"],
        *,
        walk: Walk,
    ) -> tuple[Float[Array, "B K R D"], Float[Array, "B K R"]]:
        """Attention of R queries per kv head over all rows of that head's segment; `walk` changes nothing."""
        return self._kernels.attend(q, k, v, start, length, interpret=self.interpret)

    def attend_scored(
        self,
        q: Float[Array, "B K G D"],
        k: Float[Array, "B P D"],
        v: Float[Array, "B P D"],
        start: Int[Array, "B K"],
        length: Int[Array, "B K"],
        score: Float[Array, "B P"],
        counts: Bool[Array, " B"],
        *,
        walk: Walk,
        widest: int | None = None,
        other: Float[Array, "B K D"] | None = None,
    ) -> tuple[Float[Array, "B K G D"], Float[Array, "B P"]]:
        """Attention of one token, and the scores; logits of `widest` rows per segment lie in memory."""
        widest = k.shape[1] // q.shape[1] if walk is Walk.STRIDES else widest
        options = {"score": score, "counts": counts, "widest": widest, "interpret": self.interpret}
        out, _, score = self._kernels.attend(q, k, v, start, length, **options)
        return out, score

    def packed(
        self, k: Float[Array, "B K S D"], v: Float[Array, "B K S D"], source: Int[Array, "B P"]
    ) -> tuple[Float[Array, "B P D"], Float[Array, "B P D"], Int[Array, "B P"]]:
        """Chosen rows of one layer, gathered into a pool in one pass."""
        return self._kernels.compact(k, v, source, interpret=self.interpret)

    def deal(self, start: Int[Array, "L B K"], length: Int[Array, "L B K"], *, dim: int, itemsize: int) -> Any:
        """Table of the rows that each program of a decode step reads, cut by the segments' actual lengths."""
        programs = self._kernels.programs(dim=dim, itemsize=itemsize, interpret=self.interpret)
        return self._kernels.deal(start, length, programs=programs)

    def decode_token(
        self,
        q: Float[Array, "n M K G D"],
        kv: Float[Array, "n M two K D"],
        angles: tuple[Float[Array, "B half"], Float[Array, "B half"]],
        positions: Int[Array, " B"],
        counts: Int[Array, " B"],
        pool: tuple[Float[Array, "B P D"], Float[Array, "B P D"], Int[Array, "B P"]],
        start: Int[Array, "L B K"],
        chunks: Any,
        *,
        layer: int,
        score: Float[Array, "B P"] | None = None,
        begin: Float[Array, "B K"] | None = None,
        widest: int | None = None,
        picks: tuple[Array, ...] | None = None,
    ) -> tuple[Array, ...]:
        """Rotates a new token of each sequence, appends its row and attends, in one kernel."""
        of = (q, kv, *angles, positions, counts, *pool, start, chunks)
        options = {"score": score, "begin": begin, "widest": widest, "interpret": self.interpret}
        options["picks"] = None if picks is None else self._kernels.Picks(*picks)
        return self._kernels.decode_token(*of, layer=layer, **options)

    def add_norm(
        self,
        x: Float[Array, "M N E"],
        added: Float[Array, "n M N E"],
        scale: Float[Array, " E"],
        *,
        eps: float,
        dtype: jnp.dtype,
    ) -> tuple[Float[Array, "M N E"], Float[Array, "M N E"]]:
        """Adds parts to hidden states and takes the RMS norm of the sum, in one kernel."""
        return self._kernels.add_norm(x, added, scale, eps=eps, dtype=dtype, interpret=self.interpret)

    def evict_rows(self, *args: Array | None, weigh: Any) -> tuple[Array, Array, Array, Array | None, Array]:
        """Finds the lowest row of each segment above its limit and writes the newest row there, in one kernel."""
        return self._kernels.evict_rows(*args, weigh=weigh, interpret=self.interpret)

    def replace_rows(
        self,
        k: Float[Array, "B P D"],
        v: Float[Array, "B P D"],
        pos: Int[Array, "B P"],
        score: Float[Array, "B P"] | None,
        place: Int[Array, "B K"],
        last: Int[Array, "B K"],
        over: Bool[Array, "B K"],
    ) -> tuple[Array, Array, Array, Array | None]:
        """Moves the last row of segments to another row's place, in one kernel."""
        return self._kernels.replace_rows(k, v, pos, score, place, last, over, interpret=self.interpret)


class Interpreted(Kernels):
    """The kernels as plain JAX operations, on any device; very slow."""

    interpret = True

    def refusal(self, setting: Setting) -> str | None:
        """Refuses nothing."""
        return None


def _firsts(first: Int[Array, " B"] | None, length: Int[Array, " B"]) -> Int[Array, " B"]:
    """Position of each sequence's first query, 0 where none is given."""
    return jnp.zeros_like(length) if first is None else first
