"""Texts on their way through the model, each once, layer by layer, and those who look on.

Alive at once: hidden states and one layer's queries, keys and values. What policies would keep is known before: they
see a text's beginning, and all of it is looked at.
"""

import abc
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxkv._errors import require
from jaxkv._settings import settled
from jaxkv._values import plain
from jaxkv.analysis.choosing import kept_rows
from jaxkv.analysis.given import several, whole
from jaxkv.arguments import as_model
from jaxkv.engine.lengths import bucket
from jaxkv.engine.prefill import read_layers
from jaxkv.engine.prefill_layer import LayerOut
from jaxkv.loading import LanguageModel
from jaxkv.models.decoder import Graphs, Leaves
from jaxkv.policies.policy import Method
from jaxkv.policies.scorer import Needs
from jaxkv.sharding.mesh import Axes, missing, place
from jaxkv.text.prompts import Encoded, Prompt, encode


@dataclasses.dataclass(frozen=True, kw_only=True)
class Text:
    """A text that is looked at.

    Attributes:
        count: its tokens.
        slots: what it is padded to.
        prompt: how many of its tokens policies see.
        rows: `bool[L, K, n]` by policy: what each would keep.
        axes: of the mesh that the model lies on, if it does.
        copies: sequences: the text, once for each of a mesh's groups.
    """

    count: int
    slots: int
    prompt: int
    rows: Mapping[Method, Bool[np.ndarray, "L K n"]]
    axes: Axes | None
    copies: int

    @property
    def following(self) -> int:
        """Tokens behind the prompt."""
        return self.count - self.prompt

    def masks(self, policies: Sequence[Method], layer: int) -> Bool[Array, "B K S n"]:
        """Prompt rows that policies keep in a layer, where the model lies; the last of the n is all of them."""
        heads = next(iter(self.rows.values())).shape[1]
        out = np.zeros((heads, self.slots, len(policies) + 1), bool)
        for at, policy in enumerate(policies):
            out[:, : self.prompt, at] = self.rows[policy][layer]
        out[:, : self.prompt, -1] = True
        return place(np.broadcast_to(out, (self.copies, *out.shape)), "B K S n", self.axes)

    def numbers(self, value: int) -> Int[Array, " B"]:
        """A number for each sequence, where the model lies."""
        return place(np.full(self.copies, value, np.int32), "B", self.axes)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layer:
    """A layer that is looked at.

    Attributes:
        index: which one.
        leaves: its parameters.
        graphs: the decoder's static half.
        out: queries, keys and values.
    """

    index: int
    leaves: Leaves
    graphs: Graphs
    out: LayerOut

    def last(self, queries: int) -> tuple[Float[Array, "B K G w D"], Int[Array, "B w"]]:
        """So many last queries, of which others may have asked for more, and their positions."""
        first = self.out.q.shape[3] - queries
        return self.out.q[..., first:, :], self.out.q_positions[:, first:]


class Watcher(abc.ABC):
    """One who looks at texts, and says in the end what was found.

    Attributes:
        policies: those whose choices it wants to know.
        least_following: tokens that must follow a prompt, at least, where it looks at them alone.
    """

    policies: Sequence[Method] = ()
    least_following: int = 0

    @abc.abstractmethod
    def needs(self, text: Text) -> Needs | None:
        """What layers are to show of a text; None for one who does not look at them."""

    @abc.abstractmethod
    def look(self, text: Text, layer: Layer) -> None:
        """One layer of a text."""

    @abc.abstractmethod
    def done(self, text: Text) -> None:
        """All layers of a text have been looked at."""

    @abc.abstractmethod
    def found(self) -> Any:
        """The figure, once all texts are done."""


@settled
def watch(
    params: LanguageModel,
    texts: Sequence[Prompt],
    watchers: Sequence[Watcher],
    *,
    following: int = 0,
    key: int | Array | None = 0,
    begin: Callable[[int, int], object] = lambda at, tokens: None,
) -> list[Any]:
    """Runs texts through the model under full attention, each once, for any number of watchers.

    Args:
        params: from `jaxkv.load`.
        texts: long ones, or ids.
        watchers: who looks at them. Where some ask for policies, each text's beginning is run once besides.
        following: last tokens of each text that policies do not see.
        key: of policies that draw, or its seed.
        begin: called before each text with its number and its tokens.

    Returns:
        What each has found.

    Raises:
        ValueError: for texts that are empty or too long for the model, or budgets that a policy cannot honour.
    """
    params = as_model(params)
    least = max((watcher.least_following for watcher in watchers), default=0)
    remedy = f"give how many last tokens policies do not see, {least} or more"
    following = whole("following", following, remedy, least=least)
    policies = tuple({policy: None for watcher in watchers for policy in watcher.policies})
    for at, encoded in enumerate(_encoded(params, texts, following)):
        count, copies = len(encoded.ids[0]), missing(1, params.axes)
        begin(at, count)
        prompt = count - following
        beginning = dataclasses.replace(encoded, ids=[encoded.ids[0][:prompt]]).with_copies(copies)
        every, slots = encoded.with_copies(copies), bucket(count)
        rows = kept_rows(params, beginning, policies, key=key) if policies else {}
        text = Text(count=count, slots=slots, prompt=prompt, rows=rows, axes=params.axes, copies=1 + copies)
        asked = [(watcher, needs) for watcher in watchers if (needs := watcher.needs(text)) is not None]
        if asked:
            _show(params, every, text, [watcher for watcher, _ in asked], [needs for _, needs in asked])
        for watcher in watchers:
            watcher.done(text)
    found = [watcher.found() for watcher in watchers]
    for each in found:
        numbers = [part for part in each.arrays().values() if part.dtype.kind == "f"]
        sound = all(np.isfinite(part).all() for part in numbers)
        require(sound, "params", params.name, "the model's attention is not finite: check its weights")
    return found


def _show(
    params: LanguageModel, every: Encoded, text: Text, watchers: Sequence[Watcher], asked: Sequence[Needs]
) -> None:
    flat, axes = params.flat, params.axes
    needs = Needs(queries=max(each.queries for each in asked), sums=any(each.sums for each in asked))
    tokens, length = place(every.padded(text.slots), "B S", axes), place(every.lengths, "B", axes)
    for index, out in enumerate(read_layers(flat, tokens, length, needs=needs)):
        layer = Layer(index=index, leaves=flat.blocks[index], graphs=flat.graphs_of(index), out=out)
        for watcher in watchers:
            watcher.look(text, layer)
        del out, layer


def _encoded(params: LanguageModel, texts: Sequence[Prompt], following: int) -> list[Encoded]:
    """All texts, refused before the first is run."""
    listed = several("texts", texts, "give a list of one or more texts")
    one = isinstance(texts, Mapping) or any(isinstance(plain(part), int) for part in listed)
    require(not one, "texts", texts, "give a list of texts, each of them text or ids")
    most, out = params.config.max_positions, []
    for text in listed:
        encoded = encode(text, params.text, params.config, raw=True, close=False)
        require(encoded.single, "texts", f"{len(encoded.ids)} in one", "give a list of single texts")
        count = int(encoded.lengths[0])
        require(count <= most, "texts", f"{count} tokens", f"the model was made for {most}: shorten the text")
        remedy = f"{following} of them follow the prompt: give a longer text, or let fewer follow"
        require(count > following, "texts", f"{count} tokens", remedy)
        out.append(encoded)
    return out
