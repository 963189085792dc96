"""`measured`: runs each text through the model once, layer by layer, and passes each layer's output to measurements.

Alive at once: hidden states and one layer's queries, keys and values. The rows that policies keep are found before,
from each text's beginning; the measures look at the whole text.
"""

import abc
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxkv import _checks
from jaxkv._errors import require
from jaxkv._settings import settled
from jaxkv._values import plain
from jaxkv.analysis.choosing import Grid, kept_rows
from jaxkv.analysis.figures import Figure
from jaxkv.arguments import as_model
from jaxkv.engine.lengths import bucket
from jaxkv.engine.prefill import read_layers
from jaxkv.engine.prefill_layer import LayerOut
from jaxkv.loading import LanguageModel
from jaxkv.models.decoder import Graphs, Leaves
from jaxkv.policies.policy import Method
from jaxkv.policies.reading import without_window
from jaxkv.policies.scorer import Needs
from jaxkv.sharding.mesh import Axes, missing, place
from jaxkv.text.prompts import Encoded, Prompt, encode

Arrays = tuple[np.ndarray, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Text:
    """One measured text: its numbers of tokens, and the masks of prompt rows that each policy keeps (`rows`).

    Attributes:
        count: number of tokens.
        slots: number of tokens after padding.
        prompt: number of first tokens, those that policies see.
        rows: `bool[L, K, n]` by policy, the prompt rows that it keeps in the L measured layers.
        axes: axes of the model's mesh; None for one device.
        copies: number of sequences: the text, once for each data group of a mesh.
    """

    count: int
    slots: int
    prompt: int
    rows: Mapping[Method, Bool[np.ndarray, "L K n"]]
    axes: Axes | None
    copies: int

    @property
    def following(self) -> int:
        """Number of tokens after the prompt."""
        return self.count - self.prompt

    def masks(self, policies: Sequence[Method], layer: int) -> Bool[Array, "B K S n"]:
        """One array `bool[B, K, S, n]` on the mesh: rows policy n keeps in one layer; the last n: all prompt rows."""
        heads = next(iter(self.rows.values())).shape[1]
        out = np.zeros((heads, self.slots, len(policies) + 1), bool)
        for at, policy in enumerate(policies):
            out[:, : self.prompt, at] = self.rows[policy][layer]
        out[:, : self.prompt, -1] = True
        return place(np.broadcast_to(out, (self.copies, *out.shape)), "B K S n", self.axes)

    def repeated(self, value: int) -> Int[Array, " B"]:
        """int32 array `[B]` that holds `value` for each sequence, placed on the mesh."""
        return place(np.full(self.copies, value, np.int32), "B", self.axes)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layer:
    """One measured layer: its index among these, parameters, prefill output (`out`, with queries, keys and values)."""

    index: int
    leaves: Leaves
    graphs: Graphs
    out: LayerOut

    def last(self, queries: int) -> tuple[Float[Array, "B K G w D"], Int[Array, "B w"]]:
        """The layer's last `queries` queries `[B, K, G, w, D]` and their positions `[B, w]`."""
        first = self.out.q.shape[3] - queries
        return self.out.q[..., first:, :], self.out.q_positions[:, first:]


class Measure(abc.ABC):
    """Base class of a measurement: computes arrays of each layer, from them arrays of each text, then a `Figure`.

    Attributes:
        policies: policies whose kept rows it looks at.
        least_following: fewest tokens that must follow each prompt.
    """

    policies: Sequence[Method] = ()
    least_following: int = 0

    def needs(self, text: Text) -> Needs | None:
        """Prefill outputs required besides keys and values, as `Needs`; None if no layer outputs are used."""
        return None

    def of_layer(self, text: Text, layer: Layer) -> Arrays:
        """Tuple of arrays computed from one layer of one text; empty by default."""
        return ()

    @abc.abstractmethod
    def of_text(self, text: Text, layers: list[Arrays]) -> Arrays:
        """Tuple of arrays of one text, computed from the arrays of its layers."""

    @abc.abstractmethod
    def figure(self, texts: list[Text], found: list[Arrays]) -> Figure:
        """The measurement's result (a `Figure`) from the arrays of all texts; each `Text` comes without its masks."""


class QueryMeasure(Measure):
    """Base class of measurements of attention by each text's last `queries` queries, or all of a shorter text."""

    queries: int

    def needs(self, text: Text) -> Needs:
        """`Needs` (prefill outputs to request): each layer's last `queries` queries, or all of a shorter text."""
        return Needs(queries=min(self.queries, text.count))

    def last(self, text: Text, layer: Layer) -> tuple[Float[Array, "B K G w D"], Int[Array, "B w"]]:
        """The layer's last queries `[B, K, G, w, D]`, as many as were requested, and their positions `[B, w]`."""
        return layer.last(min(self.queries, text.count))


class PolicyMeasure(Measure):
    """Base class of measurements of policies, each at every budget of a `Grid`; counts rows kept, groups by policy."""

    def __init__(self, grid: Grid):
        self.grid = grid
        self.policies = tuple(cell for row in grid.cells for cell in row)

    def counts(self, text: Text) -> Int[np.ndarray, "C L K"]:
        """Numbers of a text's rows kept, int64 `[C, L, K]`: by cell (policy and budget), layer and kv head."""
        return np.asarray([text.rows[cell].sum(axis=-1) for cell in self.policies], np.int64)

    def by_policy(self, found: Sequence[np.ndarray]) -> np.ndarray:
        """Stacks the texts' arrays `[C, ...]` into one array `[P, N, T, ...]`: policy, budget and text first."""
        stacked = np.stack(found, axis=1)
        return stacked.reshape(len(self.grid.names), len(self.grid.budgets), *stacked.shape[1:])


@settled
def measured(
    params: LanguageModel,
    texts: Sequence[Prompt],
    measures: Sequence[Measure],
    *,
    following: int = 0,
    key: int | Array | None = 0,
    begin: Callable[[int, int], object] = lambda at, tokens: None,
) -> list[Any]:
    """Runs texts under full attention; returns one `Figure` per measurement in a list; ValueError for non-finite ones.

    Layers with a window, from which policies choose nothing, are run, but not measured.
    If measurements have policies, each text without its `following` last tokens is run once more, for all policies
    together. `key` is for policies that draw; `begin` is called before each text with its index and number of tokens.
    """
    params = as_model(params)
    whole = without_window(params.config.windows)
    remedy = "every layer has a window, and none attends to the whole text: take another model"
    require(bool(whole), "params", params.name, remedy)
    least = max((measure.least_following for measure in measures), default=0)
    remedy = f"give how many last tokens policies do not see, {least} or more"
    following = _checks.whole("following", following, remedy, least=least)
    policies = tuple(dict.fromkeys(policy for measure in measures for policy in measure.policies))
    done, found = list[Text](), [list[Arrays]() for _ in measures]
    for at, encoded in enumerate(_encoded(params, texts, following)):
        count, copies = len(encoded.ids[0]), missing(1, params.axes)
        begin(at, count)
        prompt = dataclasses.replace(
            encoded, ids=[encoded.ids[0][: count - following]]
        ).with_copies(copies)
        text = Text(
            count=count,
            slots=bucket(count),
            prompt=count - following,
            rows=kept_rows(params, prompt, policies, key=key) if policies else {},
            axes=params.axes,
            copies=1 + copies,
        )
        layers = _layers(params, encoded.with_copies(copies), text, measures)
        for each, mine, measure in zip(found, layers, measures, strict=True):
            each.append(measure.of_text(text, mine))
        done.append(dataclasses.replace(text, rows={}))
    made = (measure.figure(done, each) for measure, each in zip(measures, found, strict=True))
    figures = [dataclasses.replace(figure, layers=whole) for figure in made]
    for figure in figures:
        sound = all(
            np.isfinite(each).all() for each in figure.arrays().values() if each.dtype.kind == "f"
        )
        require(
            sound, "params", params.name, "the model's attention is not finite: check its weights"
        )
    return figures


def _layers(
    params: LanguageModel, encoded: Encoded, text: Text, measures: Sequence[Measure]
) -> list[list[Arrays]]:
    """Arrays of each layer of one text, as one list per measurement; the model runs only if a measurement needs it."""
    asked = [measure.needs(text) for measure in measures]
    found = [list[Arrays]() for _ in measures]
    some = [each for each in asked if each is not None]
    if not some:
        return found
    flat, axes = params.flat, params.axes
    require(
        not params.config.sink_logits, "params", params.name, "attention with sinks is not analysed"
    )
    whole = without_window(params.config.windows)
    needs = Needs(queries=max(each.queries for each in some), sums=any(each.sums for each in some))
    tokens, length = (
        place(encoded.padded(text.slots), "B S", axes),
        place(encoded.lengths, "B", axes),
    )
    for index, out in enumerate(read_layers(flat, tokens, length, needs=needs)):
        if index in whole:
            graphs, at = flat.graphs_of(index), whole.index(index)
            layer = Layer(index=at, leaves=flat.blocks[index], graphs=graphs, out=out)
            for mine, measure, need in zip(found, measures, asked, strict=True):
                if need is not None:
                    mine.append(measure.of_layer(text, layer))
            del layer
        del out
    return found


def _encoded(params: LanguageModel, texts: Sequence[Prompt], following: int) -> list[Encoded]:
    """List of each text as `Encoded` token ids; ValueError if too long for the model, or of <= `following` tokens."""
    listed = _checks.several("texts", texts, "give a list of one or more texts")
    one = isinstance(texts, Mapping) or any(isinstance(plain(part), int) for part in listed)
    require(not one, "texts", texts, "give a list of texts, each of them text or ids")
    most, out = params.config.max_positions, []
    for text in listed:
        encoded = encode(text, params.text, params.config, raw=True, close=False)
        require(
            encoded.single, "texts", f"{len(encoded.ids)} in one", "give a list of single texts"
        )
        count = int(encoded.lengths[0])
        require(
            count <= most,
            "texts",
            f"{count} tokens",
            f"the model was made for {most}: shorten the text",
        )
        remedy = f"{following} of them follow the prompt: give a longer text, or let fewer follow"
        require(count > following, "texts", f"{count} tokens", remedy)
        out.append(encoded)
    return out


def by_head(
    function: Callable[..., Any], per_head: Sequence[Array], per_sequence: Sequence[Array]
) -> Any:
    """Calls `function` for one kv head of one sequence at a time, to save memory; returns the results `[B, K, ...]`.

    `function` takes the arrays `[B, K, ...]`, then the arrays `[B, ...]`, each without its batch and head axes.
    """
    batch, heads = per_head[0].shape[:2]
    spread = [jnp.broadcast_to(a[:, None], (batch, heads, *a.shape[1:])) for a in per_sequence]
    flat = [a.reshape(batch * heads, *a.shape[2:]) for a in (*per_head, *spread)]
    out = lax.map(lambda arrays: function(*arrays), flat)
    return jax.tree.map(lambda a: a.reshape(batch, heads, *a.shape[1:]), out)
