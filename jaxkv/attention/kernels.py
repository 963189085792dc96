"""Backend of the Pallas kernels of `pallas_kernels`, compiled for a GPU or interpreted anywhere."""

import dataclasses
from functools import partial
from types import ModuleType
from typing import Any, ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxkv.attention.backend import AttentionBackend, BackendCapabilities, DeviceTraits
from jaxkv.attention.shaping import PLAIN, LogitShaping
from jaxkv.attention.steps import NewEntries, UnrotatedProjections, WorkTable
from jaxkv.attention.xla import SegmentRanges, SegmentReadMode


class PallasBackend(AttentionBackend):
    """Backend of compiled Pallas (Triton) kernels for NVIDIA GPUs: attention, fused decode steps, eviction and norms.

    Attributes:
        interpret: True runs the kernels as plain JAX operations, to check them.
    """

    can = BackendCapabilities(
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
    def _pallas_kernels(self) -> ModuleType:
        """The module `pallas_kernels`, imported on first use because Pallas needs half a second and tens of MB."""
        import pallas_kernels as pallas_kernels

        return pallas_kernels

    def get_unsupported_reason(self, setting: DeviceTraits) -> str | None:
        """Return an error text for devices other than NVIDIA GPUs; None on GPUs."""
        return (
            None
            if setting.is_nvidia_gpu
            else f"not supported on {setting.platform}: these kernels need a GPU. Use xla"
        )

    def compute_prefill_attention(
        self,
        q: Array,
        k: Array,
        v: Array,
        length: Array,
        first: Array | None = None,
        *,
        lse: bool = True,
        shaping: LogitShaping = PLAIN,
        window: int | None = None,
    ) -> tuple[Array, Array | None]:
        """Compute causal attention of all prompts in one kernel; return output and log-sum-exp (None unless `lse`)."""
        masking = {"softcap": shaping.softcap, "window": window}
        needed = shaping.sink_logits is not None
        out, found = self._compute_flash_attention(
            q, k, v, length, first, lse=lse or needed, **masking
        )
        if found is not None:
            out, found = shaping.include_sink_logits(out, found)
        return out, found if lse else None

    def _compute_flash_attention(
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
        """Compute causal attention without sink logits; return output and log-sum-exp, even if `lse` is False."""
        flash = partial(self._pallas_kernels.flash, **masking, interpret=self.interpret)
        found: tuple[Array, Array] = flash(
            q, k, v, get_first_query_positions(first, length), length
        )
        return found

    def sum_attention_per_key(
        self,
        q: Array,
        k: Array,
        lse: Array,
        length: Array,
        first: Array | None = None,
        *,
        shaping: LogitShaping = PLAIN,
    ) -> Array:
        """Return causal attention `f32[B, K, G, S]` to each key, summed over T queries of known lse, by a kernel."""
        how = {"per_query_head": True, "interpret": self.interpret, "softcap": shaping.softcap}
        return self._pallas_kernels.sum_attention_per_key(
            q, k, lse, get_first_query_positions(first, length), length, **how
        )

    def average_window_attention(
        self,
        q: Array,
        k: Array,
        positions: Array,
        length: Array,
        *,
        shaping: LogitShaping = PLAIN,
    ) -> Array:
        """Return the attention `f32[B, K, S]` to each key: mean over the last w queries and G heads, by a kernel."""
        of = (q, k, positions[:, 0], length, shaping.sink_logits)
        how = {"softcap": shaping.softcap}
        sums = self._pallas_kernels.sum_window_attention(*of, **how, interpret=self.interpret)
        return sums / jnp.minimum(length, q.shape[3]).astype(jnp.float32)[:, None, None]

    def attend_to_segments(
        self, q: Array, store: Any, reach: SegmentRanges, *, shaping: LogitShaping = PLAIN
    ) -> tuple[Array, Array]:
        """Compute attention of R queries per kv head over its pool segment; return output, log-sum-exp."""
        rows = (*reach.decode_rotated_entries(store), reach.start, reach.length)
        how = _get_softmax_options(shaping.without_sink_logits)
        return shaping.include_sink_logits(
            *self._pallas_kernels.attend(q, *rows, **how, interpret=self.interpret)
        )

    def attend_and_score(
        self,
        q: Array,
        store: Any,
        reach: SegmentRanges,
        score: Array,
        counts: Array,
        *,
        shaping: LogitShaping = PLAIN,
    ) -> tuple[Array, Array]:
        """Attend with one token by kernels; return output, scores plus mean attention in sequences of mask `counts`."""
        rows = (*reach.decode_rotated_entries(store), reach.start, reach.length)
        scores = self._make_kernel_scores(score, reach, counts=counts)
        how = {"scores": scores, **_get_softmax_options(shaping), "interpret": self.interpret}
        out, _, score = self._pallas_kernels.attend(q, *rows, **how)
        return out, score

    def _make_kernel_scores(self, score: Array, reach: SegmentRanges, **more: Any) -> Any:
        """Return kernels' `EntryScores`: a pool's scores, most entries of a segment (P / K at strides), and `more`."""
        widest = reach.widest
        if reach.walk is SegmentReadMode.STRIDES:
            widest = score.shape[1] // reach.start.shape[1]
        return self._pallas_kernels.EntryScores(score=score, widest=widest, **more)

    def pack_kept_entries(self, k: Array, v: Array, source: Array) -> tuple[Array, Array, Array]:
        """Gather a layer's keys and values at `source` by a kernel; return keys, values and positions of pool rows."""
        return self._pallas_kernels.gather_kept_entries(k, v, source, interpret=self.interpret)

    def build_work_table(
        self, start: Array, length: Array, *, dim: int, itemsize: int | float
    ) -> Any:
        """Return the kernels' work table: all layers' segments in near-equal chunks, one for each program."""
        programs = self._pallas_kernels.count_concurrent_programs(
            dim=dim, itemsize=itemsize, interpret=self.interpret
        )
        return self._pallas_kernels.build_work_table(start, length, programs=programs)

    def compute_decode_attention(
        self,
        q: Array,
        split: UnrotatedProjections | None,
        new: NewEntries,
        pool: Any,
        reach: SegmentRanges,
        work: WorkTable,
        *,
        scored: bool = False,
        shaping: LogitShaping = PLAIN,
    ) -> tuple[Array, Any]:
        """Append, attend, score if `scored`: with `split` by kernels that rotate, else unfused; return output, pool."""
        if split is None:
            given = (q, split, new, pool, reach, work)
            return super().compute_decode_attention(*given, scored=scored, shaping=shaping)
        kernels = self._pallas_kernels
        options = _get_softmax_options(shaping)
        if scored and new.score is not None:
            begun = {"begin": new.score[..., 0], "start": work.start}
            options["scores"] = self._make_kernel_scores(pool.score, reach, **begun)
        if work.rows is not None:
            picks = (work.rows, work.scheduled, work.held, work.rest, work.start)
            options["picks"] = kernels.SelectedEntries(*picks)
        out, k, v, pos, *score = kernels.append_and_attend(
            split.q,
            kernels.NewTokenInputs(*split[1:], new.positions[:, 0], new.count, pool.pos),
            wrap_kernel_inputs(pool.store),
            work.chunks,
            layer=work.layer,
            dtype=pool.store.dtype,
            **options,
            interpret=self.interpret,
        )
        pool = dataclasses.replace(pool, store=pool.store.store_kernel_outputs(k, v), pos=pos)
        return out, dataclasses.replace(
            pool, score=score[0]
        ) if score else pool.append_initial_scores(new)

    def add_norm(
        self, x: Array, added: Array, scale: Array, *, eps: float, dtype: jnp.dtype
    ) -> tuple[Array, Array]:
        """Add split-K parts of a product to hidden states by a kernel; return the sum, and the sum RMS-normalised."""
        return self._pallas_kernels.add_norm(
            x, added, scale, eps=eps, dtype=dtype, interpret=self.interpret
        )

    def evict_lowest_entries(
        self, *args: Array | None, weigh: Any
    ) -> tuple[Array, Array, Array, Array | None, Array]:
        """In segments above their limit overwrite the lowest-ranked entry by the newest; return arrays, i32 flags."""
        return self._pallas_kernels.evict_lowest_entries(
            *args, weigh=weigh, interpret=self.interpret
        )

    def move_segment_entries(self, *args: Array | None) -> tuple[Array, Array, Array, Array | None]:
        """Move one entry of each masked segment over another, by a kernel; return keys, values, positions, scores."""
        return self._pallas_kernels.overwrite_evicted_rows(*args, interpret=self.interpret)


class InterpretedPallasBackend(PallasBackend):
    """Backend of the Pallas kernels run as plain JAX operations on any device, for tests; very slow."""

    interpret = True

    def get_unsupported_reason(self, setting: DeviceTraits) -> str | None:
        """Return None (no error): interpreted kernels run on every device."""
        return None


def wrap_kernel_inputs(store: Any) -> tuple[Any, ...]:
    """Return a store's keys and values for kernels: arrays as they are, codes in `Int8Pool` or `Int4Pool` tuples."""
    import pallas_kernels as pallas_kernels

    kinds = {"bytes": pallas_kernels.Int8Pool, "nibbles": pallas_kernels.Int4Pool}
    pairs = zip(store.kernels, store.kernel_inputs, strict=True)
    return tuple(kinds[name](*held) if name in kinds else held for name, held in pairs)


def get_first_query_positions(
    first: Int[Array, " B"] | None, length: Int[Array, " B"]
) -> Int[Array, " B"]:
    """Return the position `i32[B]` of each sequence's first query; zeros if `first` is None."""
    return jnp.zeros_like(length) if first is None else first


def _get_softmax_options(shaping: LogitShaping) -> dict[str, Any]:
    """Return a kernel's keyword arguments `softcap` and `sink_logits`, as a dict."""
    return {"softcap": shaping.softcap, "sink_logits": shaping.sink_logits}
