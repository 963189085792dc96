"""`recall`: share of full attention that falls on the rows that policies keep (PyramidKV, figure 8)."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxkv._drawing import COLUMN, paper, style
from jaxkv.analysis.choosing import Budget, Policies, grid
from jaxkv.analysis.figures import PolicyFigure, error
from jaxkv.analysis.measuring import Arrays, Layer, PolicyMeasure, Text, by_head, measured
from jaxkv.attention import probabilities
from jaxkv.attention.xla import exact_einsum
from jaxkv.loading import LanguageModel
from jaxkv.policies.scorer import Needs
from jaxkv.sharding.door import program
from jaxkv.sharding.mesh import Axes, host
from jaxkv.text.prompts import Prompt

FOLLOWING = 32


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recall(PolicyFigure):
    """Result of `recall`: share of later tokens' attention to the prompt that falls on kept rows, by policy and budget.

    Attributes:
        recall: `f32[P, N, T, L, H]` for each text, layer and query head: mass on the prompt's rows that are kept, of
            the mass on all of the prompt's rows, both summed over the queries.
        visible: `f32[P, N, T, L, H]` mass on everything that a query sees under the policy, tokens behind the prompt
            included; the mean over the queries.
        rows: `i64[P, N, T]` rows kept, over layers and kv heads.
        policies: names of the P policies.
        budgets: the N budgets, in rows per kv head and layer on average, or as shares of the prompt.
        following: number of queries, the tokens of each text behind its prompt.
        lengths: number of tokens of each of the T prompts.
        segments: number of layers times kv heads, over which rows spread.
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
        """Array `[P, N, T]` of recall averaged over layers and query heads, by policy, budget and text."""
        return self.recall.mean(axis=(3, 4))

    def difference(
        self, policy: str, other: str
    ) -> tuple[Float[np.ndarray, " N"], Float[np.ndarray, " N"]]:
        """Two arrays `[N]` by budget: mean over texts of one policy's recall minus another's, and standard error.

        Args:
            policy: name of the one.
            other: name of the other, whose recall is subtracted.

        Returns:
            By budget: the mean over texts, and its standard error.

        Raises:
            ValueError: for a policy that was not measured.
        """
        one, two = (self.by_text[self.index_of(name)] for name in (policy, other))
        apart = (one - two).astype(np.float64)
        return apart.mean(axis=1), np.asarray([error(each) for each in apart])

    def picture(self, path: str | Path) -> None:
        """Writes a picture file: recall against rows kept, one line per policy; bars are standard errors over texts.

        Args:
            path: the file; its suffix names the format, such as .png or .svg.

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
            panel.set(
                xlabel="rows kept per kv head and layer, on average", ylabel="attention recall, %"
            )
            panel.legend(frameon=False)

    def _record(self, policy: int, budget: int) -> dict[str, float]:
        """Dict of one table row: mean rows kept, and recall, its standard error and visible attention in %."""
        mine = self.by_text[policy, budget]
        return {
            "rows": float(self.rows[policy, budget].mean()),
            "recall %": 100 * float(mine.mean()),
            "st. err.": 100 * error(mine),
            "visible %": 100 * float(self.visible[policy, budget].mean()),
        }


def recall(
    params: LanguageModel,
    texts: Sequence[Prompt],
    *,
    policies: Policies,
    budgets: Sequence[Budget],
    following: int = FOLLOWING,
    key: int | Array | None = 0,
) -> Recall:
    """Runs texts through a model; returns share of full attention that falls on rows policies keep, as `Recall`.

    Policies see each text but for its last tokens, whose attention is then measured. Eviction during decoding is not
    applied: the rows chosen at the prompt's end stay. Merged rows count by the positions they are kept at, not by what
    was merged into them.

    Args:
        params: from `jaxkv.load`.
        texts: long texts, or their ids; each is run through the model once, and its prompt once for all policies.
        policies: names, classes or values, or a dictionary of them by names of your own; their budgets are ignored.
        budgets: rows per kv head and layer on average, or shares of a prompt.
        following: number of tokens of each text behind its prompt.
        key: random key or seed, for policies that draw.

    Returns:
        The figure.

    Raises:
        ValueError: for texts that are empty or too long for the model, budgets that cannot be honoured, and policies
            that choose for each token which rows they read.

    References:
        PyramidKV, arXiv:2406.02069, appendix N and figure 8.
    """
    return measured(
        params,
        texts,
        [RecallMeasure(grid(params, policies, budgets))],
        following=following,
        key=key,
    )[0]


class RecallMeasure(PolicyMeasure):
    """`Measure` class behind `recall`: sums the attention of the queries after the prompt on the rows policies keep."""

    least_following = 1

    def needs(self, text: Text) -> Needs:
        """`Needs` (prefill outputs to request): each layer's queries of the tokens after the prompt."""
        return Needs(queries=text.following)

    def of_layer(self, text: Text, layer: Layer) -> Arrays:
        """Tuple of one array `[H, w, C + 1]`: queries' attention on rows C policies keep, last on all prompt rows."""
        q, positions = layer.last(text.following)
        rows = text.masks(self.policies, layer.index)
        mine = host(paid(q, layer.out.k, positions, rows, axes=text.axes))[0]
        return (mine.reshape(-1, *mine.shape[2:]).astype(np.float64),)

    def of_text(self, text: Text, layers: list[Arrays]) -> Arrays:
        """Tuple of one text's recall and attention on all visible tokens (both `[C, L, H]`), rows kept `[C, L, K]`."""
        sets = np.moveaxis(np.stack([each for (each,) in layers]), -1, 0)
        kept, prompt = sets[:-1], sets[-1]
        recalled = kept.sum(axis=-1) / np.maximum(prompt.sum(axis=-1), 1e-30)
        return recalled, (kept + 1 - prompt).mean(axis=-1), self.counts(text)

    def figure(self, texts: list[Text], found: list[Arrays]) -> Recall:
        """`Recall` from the arrays of all texts, arranged by policy and budget."""
        recalled, seen, rows = (self.by_policy(each) for each in zip(*found, strict=True))
        return Recall(
            recall=recalled.astype(np.float32),
            visible=seen.astype(np.float32),
            rows=rows.sum(axis=(3, 4)),
            policies=self.grid.names,
            budgets=self.grid.budgets,
            following=texts[0].following,
            lengths=tuple(text.prompt for text in texts),
            segments=rows.shape[3] * rows.shape[4],
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
    """Attention probability of each query summed over the rows of each of n masks, `[B, K, G, w, n]`."""

    def head(mine: Array, keys: Array, sets: Array, position: Array) -> Array:
        shares = probabilities(mine, keys, position)
        # By default a GPU rounds products to ten bits, and policies differ in the fourth digit.
        return exact_einsum("gws,sn->gwn", shares, sets.astype(jnp.float32))

    return by_head(head, (q, k, rows), (positions,))
