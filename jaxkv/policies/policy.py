"""Policies: values with a method's names and defaults, whose `parts()` are all that the engine reads."""

import dataclasses
import inspect
from typing import Any, ClassVar

from jaxkv._errors import require
from jaxkv._values import Value, normalise
from jaxkv.policies.asked import Span, as_budget, as_spans
from jaxkv.policies.heads import HeadBudgets, UniformHeads
from jaxkv.policies.layers import LayerBudgets, UniformLayers
from jaxkv.policies.merger import Merger, check_merger
from jaxkv.policies.parts import Keep, Parts
from jaxkv.policies.rank import After, Again, Append, Evict, Rank
from jaxkv.policies.scorer import Scorer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Method(Value):
    """What all policies can be asked for; a method of the literature is a subclass that writes `parts`.

    Attributes:
        budget: int: rows kept per kv head and layer on average, sinks and window included. float in (0, 1]: that
            share of each sequence's own prompt. None: everything. numpy's numbers count as Python's of their kind.
        min_budget: "raise" refuses a ratio that comes out below sinks + window + protected rows for some sequence;
            "clamp" raises it to them.
        protect: spans `(start, stop)` of the prompt's positions that always stay, with Python's slice meaning on each
            sequence.
        every: compress again after so many more tokens, over prompt and answer in order of position: the cache never
            holds more than the budget and this many rows. None compresses the prompt only.
        merge: what becomes of dropped rows: None drops them, `Merge()` folds them into their nearest kept rows.
    """

    budget: int | float | None = None
    min_budget: str = "raise"
    protect: tuple[Span, ...] = ()
    every: int | None = None
    merge: Merger | None = None

    paper: ClassVar[str] = ""

    def __post_init__(self) -> None:
        normalise(self)
        object.__setattr__(self, "budget", as_budget(self.budget))
        object.__setattr__(self, "protect", as_spans(self.protect))
        check_merger("merge", self.merge)
        self._check()
        _check_read(type(self))
        parts = self.parts()
        if not isinstance(parts, Parts):
            name = type(self).__name__
            raise TypeError(f"{name}.parts()={parts!r}: return Parts(...), or self.compose(scorer=...)")
        try:
            hash(parts)
        except TypeError as error:
            remedy = "programs are kept by a policy's parts: give numbers, tuples and frozen dataclasses"
            raise TypeError(f"{type(self).__name__}: {error}; {remedy}") from None

    def _check(self) -> None:
        """Refuses fields that cannot be meant, before parts are made of them."""

    def parts(self) -> Parts:
        """What this policy is made of."""
        raise TypeError(f"{type(self).__name__}: write its method `parts`, which returns self.compose(scorer=...)")

    def compose(
        self, *, scorer: Scorer | None, keep: Keep | None = None, evict: Rank | None = None, **parts: Any
    ) -> Parts:
        """Parts with everything in them that any policy can be asked for: budget, spans, `every` and merging.

        Args:
            scorer: which rows matter; None keeps everything.
            keep: which rows always stay, besides the spans that were asked for.
            evict: drop a row for every new one, by this rank.
            **parts: of the others, those that are not as usual.

        Returns:
            The parts.
        """
        keep = Keep() if keep is None else keep
        if not isinstance(keep, Keep):
            raise TypeError(f"keep={keep!r}: give Keep(sinks=4), say")
        every = self.every
        after: After = Append() if evict is None else Evict(rank=evict)
        if every is not None:
            require(evict is None, "every", every, "this policy drops a row for every token already: leave it out")
            after = Again(every=every, rank=None if scorer is None else scorer.rank)
        given: dict[str, Any] = {
            "budget": self.budget,
            "min_budget": self.min_budget,
            "merge": self.merge,
            "keep": dataclasses.replace(keep, protect=self.protect),
            "after": after,
        }
        return Parts(scorer=scorer, **(given | parts))

    def meaning(self) -> dict[str, Any]:
        """What it is made of, however that was said."""
        return {"parts": self.parts()}

    def for_model(self, layers: int, found: tuple[int, ...] | None) -> "Method":
        """This policy with what it takes from the model filled in.

        Args:
            layers: L.
            found: the model's filter layers, if they have been found.

        Returns:
            A policy that needs nothing more.

        Raises:
            ValueError: if the model cannot honour it.
        """
        return self


_PARTS = frozenset(field.name for field in dataclasses.fields(Parts))


def _check_read(cls: type[Method]) -> None:
    """Refuses a class that says a part where nobody reads it: as an attribute, beside parts that are made elsewhere."""
    for each in cls.__mro__[: cls.__mro__.index(Method)]:
        mine, noted = vars(each).keys(), inspect.get_annotations(each).keys()
        above = {
            field.name
            for base in each.__bases__
            if dataclasses.is_dataclass(base)
            for field in dataclasses.fields(base)
        }
        unread = set() if {"parts", "wrap"} & mine else _PARTS & (mine | noted) - above
        for name in sorted(unread):
            remedy = f"nobody reads it: write `parts`, returning dataclasses.replace(super().parts(), {name}=...)"
            raise TypeError(f"{each.__name__}.{name}: {remedy}")
        remedy = "dataclasses take no default without a type: write"
        for name in sorted(above & mine - noted):
            raise TypeError(f"{each.__name__}.{name}: {remedy} `{name}: ... = {vars(each)[name]!r}`")
        if above & noted and "__dataclass_fields__" not in mine:
            raise TypeError(f"{each.__name__}: write @dataclasses.dataclass(frozen=True, kw_only=True) above the class")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Policy(Method):
    """A policy of parts, without a class of its own: `Policy(budget=256, scorer=KeyNorm(), keep=Keep(sinks=4))`.

    Attributes:
        scorer: which rows matter; None keeps everything.
        keep: which rows stay whatever their score.
        layers: how the budget spreads over layers.
        heads: how a layer's budget spreads over its kv heads.
        evict: drop a row for every new one beyond the budget, by this rank.
        rolling: positions are those within the cache: keys are stored before RoPE and rotated on read.
        nested: a layer chooses among the positions that the layer below kept.
    """

    scorer: Scorer | None = None
    keep: Keep = Keep()
    layers: LayerBudgets = UniformLayers()
    heads: HeadBudgets = UniformHeads()
    evict: Rank | None = None
    rolling: bool = False
    nested: bool = False

    def _check(self) -> None:
        keep = self.keep
        if isinstance(keep, Keep) and keep.protect:
            # The same spans are a copy's, which is made of the fields of a policy that has them.
            once = self.protect in ((), keep.protect)
            require(once, "protect", self.protect, f"{keep} has spans: give them in one place")
            object.__setattr__(self, "protect", keep.protect)

    def parts(self) -> Parts:
        """As given."""
        names = ("scorer", "keep", "layers", "heads", "evict", "rolling", "nested")
        return self.compose(**{name: getattr(self, name) for name in names})
