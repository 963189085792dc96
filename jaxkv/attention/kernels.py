"""Backend of the Pallas kernels of `pallas_kernels`, compiled for a GPU or interpreted anywhere."""

import dataclasses
from functools import partial
from types import ModuleType
from typing import Any, ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxkv.attention.backend import Backend, Capabilities, DeviceTraits
from jaxkv.attention.shaping import PLAIN, Shaping
from jaxkv.attention.steps import NewEntries, Unrotated, WorkTable
from jaxkv.attention.xla import Reach, Walk


class Kernels(Backend):
    """Backend of the compiled Pallas (Triton) kernels: attention, fused decode steps, eviction and norms.

    Attributes:
        interpret: True runs the kernels as plain JAX operations, to check them.
    """

    can = Capabilities(
        sliding_windows=True,
        few_launches=True,
        steps=frozenset(("rows", "bytes", "nibbles")),
        evicts=frozenset(("rows",)),
        custom_calls=(
            "__gpu$xla.gpu.triton",
            "tpu_custom_call",
            "mosaic_gpu_v2",
            "mosaic_gpu",
        ),
    )
    interpret: ClassVar[bool] = False

    @property
    def _kernels(self) -> ModuleType:
        """Module `pallas_kernels`, imported on first use because Pallas needs half a second and tens of megabytes."""
        import pallas_kernels as pallas_kernels

        return pallas_kernels

    def invalid(self, setting: DeviceTraits) -> str | None:
        """Return an error text for devices other than NVIDIA GPUs; None on GPUs."""
        return (
            None
            if setting.gpu
            else f"not supported on {setting.platform}: these kernels need a GPU. Use xla"
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
        """Compute causal attention of all prompts in one kernel; return output and log-sum-exp (None unless `lse`)."""
        masking, needed = (
            {"softcap": shaping.softcap, "window": window},
            shaping.sink_logits is not None,
        )
        out, found = self._flash(q, k, v, length, first, lse=lse or needed, **masking)
        if found is not None:
            out, found = shaping.joined(out, found)
        return out, found if lse else None

    def _flash(
        self,
        q: Array,
        k: Array,
        v: Array,
        length: Array,
        first: Array | None,
        *,
        lse: bool,
        **masking: Any,
    ) -> tuple[Array, Array | None]:
        """Causal attention without sink logits; returns output and, if requested, log-sum-exp."""
        flash = partial(self._kernels.flash, **masking, interpret=self.interpret)
        found: tuple[Array, Array] = flash(q, k, v, firsts(first, length), length)
        return found

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
        """Return the attention `f32[B, K, G, S]` that each key receives from T queries per prompt, in one kernel."""
        how = {"per_query_head": True, "interpret": self.interpret, "softcap": shaping.softcap}
        return self._kernels.column_sums(q, k, lse, firsts(first, length), length, **how)

    def window_mean(
        self,
        q: Array,
        k: Array,
        positions: Array,
        length: Array,
        *,
        shaping: Shaping = PLAIN,
    ) -> Array:
        """Return the attention `f32[B, K, S]` that each key receives, mean over the last w queries (`window_sums`)."""
        of, how = (q, k, positions[:, 0], length, shaping.sink_logits), {"softcap": shaping.softcap}
        sums = self._kernels.window_sums(*of, **how, interpret=self.interpret)
        return sums / jnp.minimum(length, q.shape[3]).astype(jnp.float32)[:, None, None]

    def attend(
        self, q: Array, store: Any, reach: Reach, *, shaping: Shaping = PLAIN
    ) -> tuple[Array, Array]:
        """Compute attention of R queries per kv head over its pool segment; return output, log-sum-exp."""
        rows, how = (*reach.view(store), reach.start, reach.length), _given(shaping.without_sinks)
        return shaping.joined(*self._kernels.attend(q, *rows, **how, interpret=self.interpret))

    def attend_scored(
        self,
        q: Array,
        store: Any,
        reach: Reach,
        score: Array,
        counts: Array,
        *,
        shaping: Shaping = PLAIN,
    ) -> tuple[Array, Array]:
        """Attend to pool rows with one token per sequence; return output, and entries' scores plus attention."""
        rows = (*reach.view(store), reach.start, reach.length)
        scores = self._scores(score, reach, counts=counts)
        how = {"scores": scores, **_given(shaping), "interpret": self.interpret}
        out, _, score = self._kernels.attend(q, *rows, **how)
        return out, score

    def _scores(self, score: Array, reach: Reach, **more: Any) -> Any:
        """Return the kernels' `Scores`: scores and a segment's most entries, a stride where segments are at strides."""
        widest = reach.widest
        if reach.walk is Walk.STRIDES:
            widest = score.shape[1] // reach.start.shape[1]
        return self._kernels.Scores(score=score, widest=widest, **more)

    def packed(self, k: Array, v: Array, source: Array) -> tuple[Array, Array, Array]:
        """Gather a layer's keys and values at `source` into a pool, by a kernel: pool keys, values, positions."""
        return self._kernels.compact(k, v, source, interpret=self.interpret)

    def work_table(self, start: Array, length: Array, *, dim: int, itemsize: int | float) -> Any:
        """Divide all segments' rows into near-equal chunks, at most one per concurrent program of a decode kernel."""
        programs = self._kernels.programs(dim=dim, itemsize=itemsize, interpret=self.interpret)
        return self._kernels.work_table(start, length, programs=programs)

    def decode_token(
        self,
        q: Array,
        split: Unrotated | None,
        new: NewEntries,
        pool: Any,
        reach: Reach,
        work: WorkTable,
        *,
        scored: bool = False,
        shaping: Shaping = PLAIN,
    ) -> tuple[Array, Any]:
        """Rotate a token, append its entry and attend, in one kernel if steps are fused; return output, pool."""
        if split is None:
            given = (q, split, new, pool, reach, work)
            return super().decode_token(*given, scored=scored, shaping=shaping)
        kernels, options = self._kernels, _given(shaping)
        if scored and new.score is not None:
            begun = {"begin": new.score[..., 0], "start": work.start}
            options["scores"] = self._scores(pool.score, reach, **begun)
        if work.rows is not None:
            picks = (work.rows, work.scheduled, work.held, work.rest, work.start)
            options["picks"] = kernels.Picks(*picks)
        out, k, v, pos, *score = kernels.decode_token(
            split.q,
            kernels.Token(*split[1:], new.positions[:, 0], new.count, pool.pos),
            rows_of(pool.store),
            work.chunks,
            layer=work.layer,
            dtype=pool.store.dtype,
            **options,
            interpret=self.interpret,
        )
        pool = dataclasses.replace(pool, store=pool.store.holding(k, v), pos=pos)
        return out, dataclasses.replace(pool, score=score[0]) if score else pool.begun(new)

    def add_norm(
        self, x: Array, added: Array, scale: Array, *, eps: float, dtype: jnp.dtype
    ) -> tuple[Array, Array]:
        """Add split-K parts of a product to hidden states in one kernel; return the sum and its RMS norm."""
        return self._kernels.add_norm(
            x, added, scale, eps=eps, dtype=dtype, interpret=self.interpret
        )

    def evict_rows(
        self, *args: Array | None, weigh: Any
    ) -> tuple[Array, Array, Array, Array | None, Array]:
        """Overwrite the lowest-ranked entry of segments above their limit by the newest; return pool, i32 flags."""
        return self._kernels.evict_rows(*args, weigh=weigh, interpret=self.interpret)

    def replace_rows(self, *args: Array | None) -> tuple[Array, Array, Array, Array | None]:
        """Move an entry of each masked segment to another row; return keys, values, positions, scores."""
        return self._kernels.replace_rows(*args, interpret=self.interpret)


class InterpretedKernels(Kernels):
    """Backend of the Pallas kernels run as plain JAX operations on any device, for tests; very slow."""

    interpret = True

    def invalid(self, setting: DeviceTraits) -> str | None:
        """Return None (no error): interpreted kernels run on every device."""
        return None


def rows_of(store: Any) -> tuple[Any, ...]:
    """Return a store's keys and values as kernels accept them: arrays, or codes by the names of its `kernels`."""
    import pallas_kernels as pallas_kernels

    kinds = {"bytes": pallas_kernels.Coded, "nibbles": pallas_kernels.Nibbles}
    pairs = zip(store.kernels, store.held, strict=True)
    return tuple(kinds[name](*held) if name in kinds else held for name, held in pairs)


def firsts(first: Int[Array, " B"] | None, length: Int[Array, " B"]) -> Int[Array, " B"]:
    """Return the position `i32[B]` of each sequence's first query; zeros if `first` is None."""
    return jnp.zeros_like(length) if first is None else first


def _given(shaping: Shaping) -> dict[str, Any]:
    """Return the softmax arguments of a kernel that supports softcaps and sink logits."""
    return {"softcap": shaping.softcap, "sink_logits": shaping.sink_logits}
