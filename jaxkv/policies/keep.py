"""`Keep`, the always-kept entries of a prompt: sinks, observation window, protected spans."""

import operator
from functools import reduce
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from jaxkv._checks import select_array_module, validate_field, validate_float, validate_int
from jaxkv._dataclasses import frozen_dataclass
from jaxkv.policies.checks import Span, parse_spans


@frozen_dataclass
class Keep:
    """Always-kept entries: sinks, observation window, protected spans, and a share of recent entries.

    Attributes:
        sinks: number of first positions.
        window: number of last positions of the prompt.
        protect: spans `(start, stop)` of the prompt's positions, with Python's slice meaning on each sequence.
        recent: share for the most recent tokens of a layer's entries that are not always kept.
    """

    sinks: int = 0
    window: int = 0
    protect: tuple[Span, ...] = ()
    recent: float = 0.0

    def __post_init__(self) -> None:
        validate_field(self, "sinks", validate_int, "give 0 or more first tokens", least=0)
        validate_field(self, "window", validate_int, "give 0 or more last tokens", least=0)
        remedy = "give the share of a layer's entries, between 0 and 1; a number of last tokens is window="
        validate_field(self, "recent", validate_float, remedy, high=1.0)
        validate_field(self, "protect", parse_spans)

    def mask_always_kept(self, lengths: Any, padded_len: int) -> Any:
        """Return the mask `[B, S]` of always-kept entries of B prompts, without the share `recent`.

        Args:
            lengths: `[B]` tokens of each prompt: numbers on the host, or a JAX array, which may be traced.
            padded_len: S.

        Returns:
            `bool[B, S]`, a numpy or JAX array as the lengths are.
        """
        xp = select_array_module(lengths)
        length = xp.asarray(lengths)[:, None]
        position = xp.arange(padded_len, dtype=xp.int32)
        return _mask_positions_in_spans(position, self._list_kept_spans(length, length)) & (
            position < length
        )

    def count_always_kept(self, lengths: Any, prompts: Any = None) -> Any:
        """Return the number `[N]` of always-kept entries per kv head of N texts, without the share `recent`.

        Args:
            lengths: `[N]` tokens of each text: numbers on the host, or a JAX array, which may be traced.
            prompts: `[N]` tokens of each text's prompt, to which spans refer; the text's by default.

        Returns:
            `[N]` entries, a numpy or JAX array as the lengths are.
        """
        xp = select_array_module(lengths)
        lengths = lengths if xp is jnp else np.asarray(lengths, np.int64)
        spans = self._list_kept_spans(
            lengths if prompts is None else xp.asarray(prompts, lengths.dtype), lengths
        )
        first = xp.stack([xp.maximum(first, xp.zeros_like(lengths)) for first, _ in spans])
        last = xp.stack([xp.minimum(last, lengths) for _, last in spans])
        order = xp.argsort(first, axis=0, stable=True)
        first, last = (xp.take_along_axis(edge, order, axis=0) for edge in (first, last))
        # Spans may overlap: each counts from the largest end of earlier spans.
        ended = last[0]
        count = last[0]
        for begin, end in zip(first[1:], last[1:], strict=True):
            count = count + xp.maximum(end - xp.maximum(begin, ended), 0)
            ended = xp.maximum(ended, end)
        return count

    def mask_protected_positions(
        self, pos: Int[Array, "..."], prompt: Int[Array, "..."]
    ) -> Bool[Array, "..."]:
        """Return the mask, of the shape of `pos`, of positions in sinks or protected spans, not the observation window.

        Args:
            pos: positions of entries.
            prompt: tokens of their prompts.

        Returns:
            The mask, of the positions' shape.
        """
        return _mask_positions_in_spans(pos, self._list_kept_spans(prompt))

    def _list_kept_spans(self, prompt: Any, length: Any = None) -> list[tuple[Any, Any]]:
        """Return a list of always-kept spans `(first, last + 1)`: sinks, the window if `length` is given, `protect`."""
        spans: list[tuple[Any, Any]] = [(0, self.sinks)]
        spans += [(length - self.window, length)] if self.window and length is not None else []
        for start, stop in self.protect:
            first, last = (prompt + edge if edge < 0 else edge for edge in (start, stop))
            # Spans refer to the prompt: tokens sampled after a short prompt are not in them.
            spans.append(
                (first, last if stop < 0 else select_array_module(prompt).minimum(last, prompt))
            )
        return spans


def _mask_positions_in_spans(position: Any, spans: list[tuple[Any, Any]]) -> Any:
    """Return the mask of positions that are in any of the spans `(first, last + 1)`."""
    return reduce(operator.or_, ((position >= first) & (position < last) for first, last in spans))
