"""Backend of the Pallas kernels of `pallas_kernels`, compiled for a GPU or interpreted anywhere."""

from types import ModuleType
from typing import Any, ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxkv.attention.backend import Backend, Setting
from jaxkv.attention.shaping import PLAIN, Shaping
from jaxkv.attention.xla import Walk


class Kernels(Backend):
    """Backend of the compiled Pallas (Triton) kernels: attention, fused decode steps, eviction and norms.

    Attributes:
        interpret: True runs the kernels as plain JAX operations, to check them.
    """

    windows = True
    few_launches = True
    fused_step = True
    fused_eviction = True
    custom_calls = ("__gpu$xla.gpu.triton", "tpu_custom_call", "mosaic_gpu_v2", "mosaic_gpu")
    interpret: ClassVar[bool] = False

    def _rows(self, held: Any) -> Any:
        """Keys or values of `Store.held` as kernels take them: the array, `Coded` in 8 bits or `Nibbles` in 4."""
        if not isinstance(held, tuple):
            return held
        return (self._kernels.Coded if len(held) == 2 else self._kernels.Nibbles)(*held)

    @property
    def _kernels(self) -> ModuleType:
        """Module `pallas_kernels`, imported on first use: Pallas takes half a second and tens of megabytes."""
        import pallas_kernels as pallas_kernels

        return pallas_kernels

    def refusal(self, setting: Setting) -> str | None:
        """Error text for devices other than NVIDIA GPUs; None on GPUs."""
        return (
            None
            if setting.gpu
            else f"these kernels need a GPU, this is {setting.platform}: use xla"
        )

    def prefill(
        self,
        q: Array,
        k: Array,
        v: Array,
        length: Array,
        first: Array | None = None,
        *,
        lse: bool = True,
        shaping: Shaping = PLAIN,
        window: int | None = None,
    ) -> tuple[Array, Array | None]:
        """Causal attention of all prompts in one kernel; returns output and log-sum-exp (None unless `lse`)."""
        how = {"window": window, "softcap": shaping.softcap, "interpret": self.interpret}
        found = self._kernels.flash(q, k, v, _firsts(first, length), length, **how)
        out, found = shaping.joined(*found)
        return out, found if lse else None

    def column_sums(
        self,
        q: Array,
        k: Array,
        lse: Array,
        length: Array,
        first: Array | None = None,
        *,
        shaping: Shaping = PLAIN,
    ) -> Array:
        """Attention `f32[B, K, G, S]` that each key receives from T queries of each prompt, summed, in one kernel."""
        how = {"per_query_head": True, "interpret": self.interpret, "softcap": shaping.softcap}
        return self._kernels.column_sums(q, k, lse, _firsts(first, length), length, **how)

    def window_mean(
        self,
        q: Array,
        k: Array,
        positions: Array,
        length: Array,
        *,
        shaping: Shaping = PLAIN,
    ) -> Array:
        """Mean attention `f32[B, K, S]` that each key receives from the last w queries, by the `window_sums` kernel."""
        of, how = (q, k, positions[:, 0], length, shaping.sink_logits), {"softcap": shaping.softcap}
        sums = self._kernels.window_sums(*of, **how, interpret=self.interpret)
        return sums / jnp.minimum(length, q.shape[3]).astype(jnp.float32)[:, None, None]

    def attend(
        self,
        q: Array,
        k: Array,
        v: Array,
        start: Array,
        length: Array,
        *,
        walk: Walk,
        shaping: Shaping = PLAIN,
    ) -> tuple[Array, Array]:
        """Attention of R queries per kv head over its pool segment; returns output, log-sum-exp. `walk` is ignored."""
        how = {"softcap": shaping.softcap, "interpret": self.interpret}
        return shaping.joined(*self._kernels.attend(q, k, v, start, length, **how))

    def attend_scored(
        self,
        q: Array,
        k: Array,
        v: Array,
        start: Array,
        length: Array,
        score: Array,
        counts: Array,
        *,
        walk: Walk,
        widest: int | None = None,
        shaping: Shaping = PLAIN,
    ) -> tuple[Array, Array]:
        """One token per sequence attends to pool rows; returns output, row scores plus attention."""
        widest = k.shape[1] // q.shape[1] if walk is Walk.STRIDES else widest
        how = {"score": score, "counts": counts, "widest": widest, **_given(shaping)}
        out, _, score = self._kernels.attend(
            q, k, v, start, length, **how, interpret=self.interpret
        )
        return out, score

    def packed(self, k: Array, v: Array, source: Array) -> tuple[Array, Array, Array]:
        """Gathers a layer's keys and values at `source` into a pool, by a kernel: pool keys, values, positions."""
        return self._kernels.compact(k, v, source, interpret=self.interpret)

    def deal(self, start: Array, length: Array, *, dim: int, itemsize: int | float) -> Any:
        """Table of the pool rows that each program of a decode kernel reads, from segments' starts and lengths."""
        programs = self._kernels.programs(dim=dim, itemsize=itemsize, interpret=self.interpret)
        return self._kernels.deal(start, length, programs=programs)

    def decode_token(
        self,
        q: Array,
        kv: Array,
        angles: tuple[Array, Array],
        positions: Array,
        counts: Array,
        pool: tuple[Any, Any, Array],
        start: Array,
        chunks: Any,
        *,
        picks: tuple[Array, ...] | None = None,
        shaping: Shaping = PLAIN,
        **more: Any,
    ) -> tuple[Any, ...]:
        """Rotates a token, appends its row and attends, in one kernel; returns output, pool, and scores if given."""
        k, v, pos = pool
        k, v = map(self._rows, (k, v))
        more["picks"] = None if picks is None else self._kernels.Picks(*picks)
        return self._kernels.decode_token(
            q,
            kv,
            *angles,
            positions,
            counts,
            k,
            v,
            pos,
            start,
            chunks,
            **more,
            **_given(shaping),
            interpret=self.interpret,
        )

    def add_norm(
        self, x: Array, added: Array, scale: Array, *, eps: float, dtype: jnp.dtype
    ) -> tuple[Array, Array]:
        """Adds split-K parts of a product to hidden states in one kernel; returns the sum and its RMS norm."""
        return self._kernels.add_norm(
            x, added, scale, eps=eps, dtype=dtype, interpret=self.interpret
        )

    def evict_rows(
        self, *args: Array | None, weigh: Any
    ) -> tuple[Array, Array, Array, Array | None, Array]:
        """Overwrites the lowest-ranked row of segments above their limit by the newest; returns pool and i32 flags."""
        return self._kernels.evict_rows(*args, weigh=weigh, interpret=self.interpret)

    def replace_rows(self, *args: Array | None) -> tuple[Array, Array, Array, Array | None]:
        """Moves a row of each masked segment over another, in a kernel; returns keys, values, positions, scores."""
        return self._kernels.replace_rows(*args, interpret=self.interpret)


class Interpreted(Kernels):
    """Backend of the Pallas kernels run as plain JAX operations on any device, for tests; very slow."""

    interpret = True

    def refusal(self, setting: Setting) -> str | None:
        """Always None, which means no error: interpreted kernels run on every device."""
        return None


def _firsts(first: Int[Array, " B"] | None, length: Int[Array, " B"]) -> Int[Array, " B"]:
    """Position `i32[B]` of each sequence's first query; zeros if `first` is None."""
    return jnp.zeros_like(length) if first is None else first


def _given(shaping: Shaping) -> dict[str, Any]:
    """Arguments of a kernel that shapes its softmax."""
    return {"softcap": shaping.softcap, "sink_logits": shaping.sink_logits}
