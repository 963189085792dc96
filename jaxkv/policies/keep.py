"""`Keep`, the always-kept entries of a prompt: sinks, observation window, protected spans."""

import dataclasses
import operator
from functools import reduce
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from jaxkv._checks import field, namespace, real, whole
from jaxkv.policies.checks import Span, as_spans


@dataclasses.dataclass(frozen=True, kw_only=True)
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
        field(self, "sinks", whole, "give 0 or more first tokens", least=0)
        field(self, "window", whole, "give 0 or more last tokens", least=0)
        remedy = "give the share of a layer's entries, between 0 and 1; a number of last tokens is window="
        field(self, "recent", real, remedy, high=1.0)
        field(self, "protect", as_spans)

    def mask(self, lengths: Any, padded_len: int) -> Any:
        """Return the mask `[B, S]` of a prompt's always-kept entries, without the share `recent`.

        Args:
            lengths: `[B]` tokens of each prompt: numbers on the host, or a JAX array, which may be traced.
            padded_len: S.

        Returns:
            `bool[B, S]`, a numpy or JAX array as the lengths are.
        """
        xp = namespace(lengths)
        length = xp.asarray(lengths)[:, None]
        position = xp.arange(padded_len, dtype=xp.int32)
        return _inside(position, self._spans(length, length)) & (position < length)

    def counts(self, lengths: Any, prompts: Any = None) -> Any:
        """Return the number `[N]` of always-kept entries of N texts, without the share `recent`.

        Args:
            lengths: `[N]` tokens of each text: numbers on the host, or a JAX array, which may be traced.
            prompts: `[N]` tokens of each text's prompt, to which spans refer; the text's by default.

        Returns:
            `[N]` entries, a numpy or JAX array as the lengths are.
        """
        xp = namespace(lengths)
        lengths = lengths if xp is jnp else np.asarray(lengths, np.int64)
        spans = self._spans(
            lengths if prompts is None else xp.asarray(prompts, lengths.dtype), lengths
        )
        first = xp.stack([xp.maximum(first, xp.zeros_like(lengths)) for first, _ in spans])
        last = xp.stack([xp.minimum(last, lengths) for _, last in spans])
        order = xp.argsort(first, axis=0, stable=True)
        first, last = (xp.take_along_axis(edge, order, axis=0) for edge in (first, last))
        # Spans may overlap: each counts from the largest end of earlier spans.
        ended, count = last[0], last[0]
        for begin, end in zip(first[1:], last[1:], strict=True):
            count = count + xp.maximum(end - xp.maximum(begin, ended), 0)
            ended = xp.maximum(ended, end)
        return count

    def protected(self, pos: Int[Array, "..."], prompt: Int[Array, "..."]) -> Bool[Array, "..."]:
        """Return the mask of positions that are sinks or in protected spans, without the window.

        Args:
            pos: positions of entries.
            prompt: tokens of their prompts.

        Returns:
            The mask, of the positions' shape.
        """
        return _inside(pos, self._spans(prompt))

    def _spans(self, prompt: Any, length: Any = None) -> list[tuple[Any, Any]]:
        """Return always-kept spans `(first, last + 1)`: sinks, the window if `length` is given, protected spans."""
        spans: list[tuple[Any, Any]] = [(0, self.sinks)]
        spans += [(length - self.window, length)] if self.window and length is not None else []
        for start, stop in self.protect:
            first, last = (prompt + edge if edge < 0 else edge for edge in (start, stop))
            # Spans refer to the prompt: tokens sampled after a short prompt are not in them.
            spans.append((first, last if stop < 0 else namespace(prompt).minimum(last, prompt)))
        return spans


def _inside(position: Any, spans: list[tuple[Any, Any]]) -> Any:
    """Return the mask of positions that are in any of the spans `(first, last + 1)`."""
    return reduce(operator.or_, ((position >= first) & (position < last) for first, last in spans))
