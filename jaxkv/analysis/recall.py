"""How much of full attention falls on the rows that policies keep (PyramidKV, figure 8)."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxkv._drawing import COLUMN, paper, style
from jaxkv._errors import require
from jaxkv.analysis.choosing import Budget, Grid, Policies, grid
from jaxkv.analysis.figures import Figure, error
from jaxkv.analysis.watching import Layer, Text, Watcher, watch
from jaxkv.attention import probabilities
from jaxkv.loading import LanguageModel
from jaxkv.policies.scorer import Needs
from jaxkv.sharding.door import program
from jaxkv.sharding.mesh import Axes, host
from jaxkv.text.prompts import Prompt

FOLLOWING = 32


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recall(Figure):
    """Full attention's probability on rows that policies keep, for the tokens that follow a prompt.

    Attributes:
        recall: `f32[P, N, T, L, H]` for each text, layer and query head: mass on the prompt's rows that are kept, of
            the mass on all of the prompt's rows, both summed over the queries.
        visible: `f32[P, N, T, L, H]` mass on everything that a query sees under the policy, tokens behind the prompt
            included; the mean over the queries.
        rows: `i64[P, N, T]` rows kept, over layers and kv heads.
        policies: P of them.
        budgets: N of them, rows per kv head and layer on average, or shares.
        following: queries: tokens of each text behind its prompt.
        lengths: tokens of each of the T prompts.
        segments: layers times kv heads, over which rows spread.
    """

    recall: Float[np.ndarray, "P N T L H"]
    visible: Float[np.ndarray, "P N T L H"]
    rows: Int[np.ndarray, "P N T"]
    policies: tuple[str, ...]
    budgets: tuple[Budget, ...]
    following: int
    lengths: tuple[int, ...]
    segments: int

    @property
    def by_text(self) -> Float[np.ndarray, "P N T"]:
        """Recall, averaged over layers and heads."""
        return self.recall.mean(axis=(3, 4))

    def difference(self, policy: str, other: str) -> tuple[Float[np.ndarray, " N"], Float[np.ndarray, " N"]]:
        """What sets two policies apart, text by text.

        Args:
            policy: one.
            other: another, whose recall is taken off.

        Returns:
            By budget: the mean over texts, and its standard error.

        Raises:
            ValueError: for a policy that was not measured.
        """
        for name in (policy, other):
            require(name in self.policies, "policy", name, f"give one of {', '.join(self.policies)}")
        one, two = (self.by_text[self.policies.index(name)] for name in (policy, other))
        apart = (one - two).astype(np.float64)
        return apart.mean(axis=1), np.asarray([error(each) for each in apart])

    def picture(self, path: str | Path) -> None:
        """Draws recall against rows, a line for each policy; bars are standard errors over texts.

        Args:
            path: where to; the suffix says how, such as .png or .svg.

        Raises:
            ImportError: without matplotlib, naming the extra that brings it.
        """
        with paper(path, width=COLUMN, height=2.6) as figure:
            panel = figure.add_subplot()
            for at, (name, mine) in enumerate(zip(self.policies, 100 * self.by_text, strict=True)):
                across = self.rows[at].mean(axis=1) / self.segments
                bars = [error(each) for each in mine] if mine.shape[1] > 1 else None
                panel.errorbar(across, mine.mean(axis=1), bars, label=name, capsize=2, **style(at))
            panel.set_xscale("log", base=2)
            panel.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
            panel.set(xlabel="rows kept per kv head and layer, on average", ylabel="attention recall, %")
            panel.legend(frameon=False)

    def records(self) -> list[dict[str, Any]]:
        """By policy and budget."""
        out = []
        for at, column in np.ndindex(*self.rows.shape[:2]):
            mine = self.by_text[at, column]
            out.append(
                {
                    "policy": self.policies[at],
                    "budget": self.budgets[column],
                    "rows": float(self.rows[at, column].mean()),
                    "recall %": 100 * float(mine.mean()),
                    "st. err.": 100 * error(mine),
                    "visible %": 100 * float(self.visible[at, column].mean()),
                }
            )
        return out


def recall(
    params: LanguageModel,
    texts: Sequence[Prompt],
    *,
    policies: Policies,
    budgets: Sequence[Budget],
    following: int = FOLLOWING,
    key: int | Array | None = 0,
) -> Recall:
    """Measures how much of full attention falls on rows that policies keep.

    Policies see each text but for its last tokens, whose attention is then looked at. What a policy drops while tokens
    are drawn is not: its rows are those behind the prompt. Of merged rows the places count, not what was merged.

    Args:
        params: from `jaxkv.load`.
        texts: long ones, or ids; each is run through the model once, and its prompt once for all policies.
        policies: by name, class or value, or in a dictionary under names of their own; their budgets do not matter.
        budgets: rows per kv head and layer on average, or shares of a prompt.
        following: tokens of each text behind its prompt.
        key: of policies that draw, or its seed.

    Returns:
        The figure.

    Raises:
        ValueError: for texts that are empty or too long for the model, budgets that cannot be honoured, and policies
            that choose what they read for each token.

    References:
        PyramidKV, arXiv:2406.02069, appendix N and figure 8.
    """
    watcher = RecallWatcher(grid(params, policies, budgets))
    return watch(params, texts, [watcher], following=following, key=key)[0]


class RecallWatcher(Watcher):
    """Looks at the queries behind prompts."""

    least_following = 1

    def __init__(self, given: Grid):
        """Takes the policies."""
        self.grid, self.policies = given, given.flat
        self.layers, self.texts = list[np.ndarray](), list[tuple[np.ndarray, ...]]()
        self.lengths, self.segments, self.following = list[int](), 0, 0

    def needs(self, text: Text) -> Needs:
        """The queries behind the prompt."""
        return Needs(queries=text.following)

    def look(self, text: Text, layer: Layer) -> None:
        """What they pay to the rows that each policy keeps."""
        q, positions = layer.last(text.following)
        rows = text.masks(self.policies, layer.index)
        mine = host(paid(q, layer.out.k, positions, rows, axes=text.axes))[0]
        self.layers.append(mine.reshape(-1, *mine.shape[2:]).astype(np.float64))

    def done(self, text: Text) -> None:
        """A text's figures: `[P * N, L, H]`."""
        sets = np.moveaxis(np.stack(self.layers), -1, 0)
        kept, prompt = sets[:-1], sets[-1]
        recalled = kept.sum(axis=-1) / np.maximum(prompt.sum(axis=-1), 1e-30)
        rows = np.asarray([text.rows[cell].sum() for cell in self.policies], np.int64)
        self.texts.append((recalled, (kept + 1 - prompt).mean(axis=-1), rows))
        self.lengths.append(text.prompt)
        self.following = text.following
        self.layers, self.segments = [], int(np.prod(text.rows[self.policies[0]].shape[:2]))

    def found(self) -> Recall:
        """Figures of all texts."""
        given = self.grid
        shape = (len(given.names), len(given.budgets), len(self.texts))
        recalled, seen, rows = (np.stack(each, axis=1) for each in zip(*self.texts, strict=True))
        by_cell = lambda a: a.reshape(*shape, *a.shape[2:]).astype(np.float32)  # noqa: E731
        return Recall(
            recall=by_cell(recalled),
            visible=by_cell(seen),
            rows=rows.reshape(shape),
            policies=given.names,
            budgets=given.budgets,
            following=self.following,
            lengths=tuple(self.lengths),
            segments=self.segments,
        )


@program(static=("axes",))
def paid(
    q: Float[Array, "B K G w D"],
    k: Float[Array, "B K S D"],
    positions: Int[Array, "B w"],
    rows: Bool[Array, "B K S n"],
    *,
    axes: Axes | None,
) -> Float[Array, "B K G w n"]:
    """What queries pay to sets of rows.

    Args:
        q: rotated queries.
        k: rotated keys at positions 0 .. S.
        positions: of the queries.
        rows: n sets for each kv head.
        axes: of the mesh that they lie on, if they do.

    Returns:
        The sums of their probabilities, float32.
    """
    batch, heads, group, window, _ = q.shape

    def head(inputs: tuple[Array, ...]) -> Array:
        mine, keys, position, sets = inputs
        shares = probabilities(mine, keys, position)
        # A GPU would round them to ten bits, and what policies differ by is in the fourth digit.
        return jnp.einsum("gws,sn->gwn", shares, sets.astype(jnp.float32), precision=lax.Precision.HIGHEST)

    flat = lambda a: a.reshape(batch * heads, *a.shape[2:])  # noqa: E731
    spread = jnp.broadcast_to(positions[:, None], (batch, heads, window))
    return lax.map(head, (flat(q), flat(k), flat(spread), flat(rows))).reshape(batch, heads, group, window, -1)
