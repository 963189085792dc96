"""`Policy`, the base of all policies: shared fields and `parts()`; and `CustomPolicy`, made of parts without a class."""

import dataclasses
from typing import Any, ClassVar, TypeVar

from jaxkv._checks import as_real, brief, field, instance, normalise, static
from jaxkv._errors import require
from jaxkv.cache.stores import Store
from jaxkv.policies.checks import Budget, Share, Span, as_budget, as_spans, as_store, store_class
from jaxkv.policies.head_budgets import HeadBudgets, UniformHeads
from jaxkv.policies.keep import Keep
from jaxkv.policies.layer_budgets import LayerBudgets, UniformLayers
from jaxkv.policies.merger import Merger
from jaxkv.policies.parts import Parts
from jaxkv.policies.phases import After, Append, Evict, KeepAll, Recompress
from jaxkv.policies.rank import Rank
from jaxkv.policies.reads import ReadAll
from jaxkv.policies.scorer import Scorer

Part = TypeVar("Part")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Policy:
    """Base class of all policies: budget, protected spans, recompression, merging, store; subclasses implement `parts`.

    Attributes:
        budget: int: entries kept per kv head and layer on average, sinks and window included. float in (0, 1]: that
            share of each sequence's own prompt. Text such as "64MB": as many entries as these bytes of a sequence's cache
            hold, over all layers, in the model's sizes and the store's bits. None: everything. 1024 entries by default,
            unless the policy says another default. numpy's numbers count as Python's of their kind.
        min_budget: "clamp" raises a ratio that comes out below sinks + window + protected entries, as it does for short
            prompts, to these entries, and counts such sequences in `Stats.raised_budgets`; "raise" rejects it.
        protect: spans `(start, stop)` of the prompt's positions that always stay, with Python's slice meaning on each
            sequence.
        every: recompress after this many more tokens, over prompt and answer in order of position: the cache never
            holds more than the budget and this many entries. None compresses the prompt only.
        merge: how dropped entries are folded into their nearest kept entries, such as `Merge()`; None drops them.
        store: how entries are held: "dense" as the model computes them, "int8" in 8 bits with a scale each, "int4" in 4
            bits with a scale for 32 elements, "mixed" keys in 8 and values in 4; or a subclass of `jaxkv.cache.Store`.
        composed: what `parts` returned at construction, which is all that the engine reads.
    """

    budget: Budget = None
    min_budget: str = "clamp"
    protect: tuple[Span, ...] = ()
    every: int | None = None
    merge: Merger | None = None
    store: str | type[Store] = "dense"
    composed: Parts = dataclasses.field(init=False, repr=False)

    def __new__(cls, *args: Any, **options: Any) -> Any:
        """Makes a policy; TypeError, with the budget, for kvpress' compression ratio, which is the share removed."""
        if "compression_ratio" in options:
            removed = as_real(options["compression_ratio"])
            # Rounded: in floats 1 - 0.9 is a little less than 0.1.
            kept = "1 - compression_ratio" if removed is None else round(1 - removed, 9)
            raise TypeError(
                f"compression_ratio: the share removed. Give the share kept, budget={kept}."
            )
        return super().__new__(cls)

    paper: ClassVar[str] = ""

    def __str__(self) -> str:
        """One-line text of the class and the fields that differ from their defaults, as errors name a policy."""
        return brief(self)

    def __post_init__(self) -> None:
        normalise(self)
        if isinstance(share := as_budget(self.budget), Share):
            object.__setattr__(self, "budget", share.value)
        known = isinstance(self.min_budget, str) and self.min_budget in ("raise", "clamp")
        require(known, "min_budget", self.min_budget, "give 'raise' or 'clamp'")
        field(self, "protect", as_spans)
        object.__setattr__(self, "store", as_store(self.store))
        self._check()
        remedy = "return Parts(...), or self.compose(scorer=...)"
        parts = static("parts", instance("parts", self.parts(), Parts, remedy))
        object.__setattr__(self, "composed", parts)

    def _check(self) -> None:
        """Checks and normalises fields at construction, before `parts` is called; a hook of subclasses, empty here."""

    def part(self, kind: type[Part], **others: Any) -> Part:
        """Makes a part of this policy's fields of the same names, which take the part's checked values.

        Args:
            kind: the part's class, a dataclass.
            **others: fields of the part that this policy does not have, or means otherwise.

        Returns:
            The part.
        """
        fields = {each.name for each in dataclasses.fields(kind)}  # type: ignore[arg-type]
        names = fields & vars(self).keys() - others.keys()
        made = kind(**{name: getattr(self, name) for name in names}, **others)
        for name in names:
            object.__setattr__(self, name, getattr(made, name))
        return made

    def parts(self) -> Parts:
        """Returns the `Parts` that are kept as `composed`; TypeError unless a subclass overrides it.

        Returns:
            The parts.
        """
        raise TypeError(
            f"{type(self).__name__}: write its method `parts`, which returns self.compose(scorer=...)"
        )

    def compose(
        self,
        *,
        scorer: Scorer | None,
        keep: Keep | None = None,
        evict: Rank | None = None,
        rolling: bool = False,
        **parts: Any,
    ) -> Parts:
        """Returns `Parts` of the arguments and of the fields of every policy: budget, spans, `every` and merging.

        Args:
            scorer: which entries matter; None keeps everything.
            keep: which entries always stay, besides the protected spans.
            evict: drop the entry of lowest rank for every new one.
            rolling: positions are those within the cache: keys are stored before RoPE and rotated on read.
            **parts: other fields of `Select` and of `Parts` whose value is not the default.

        Returns:
            The parts.

        Raises:
            ValueError: for parts that exclude one another.
            TypeError: for parts of a wrong type.
        """
        keep = instance("keep", Keep() if keep is None else keep, Keep, "give Keep(sinks=4), say")
        after: After = Append() if evict is None else Evict(rank=evict)
        if self.every is not None:
            remedy = "this policy drops an entry for every token already: leave it out"
            require(evict is None, "every", self.every, remedy)
            after = Recompress(every=self.every, rank=(scorer or KeepAll.scorer).rank)
        usual: dict[str, Any] = {
            "budget": as_budget(self.budget),
            "clamp": self.min_budget == "clamp",
            "merge": self.merge,
            "keep": dataclasses.replace(keep, protect=keep.protect + self.protect),
            "after": after,
            "read": ReadAll(rolling=rolling),
            "store": store_class(self.store),
        }
        return Parts.of(scorer=scorer, **(usual | parts))

    def for_model(self, layers: int, found: tuple[int, ...] | None) -> "Policy":
        """Returns this policy with fields that depend on the model filled in, such as filter layers; itself by default.

        Args:
            layers: L.
            found: the model's filter layers, if they have been found.

        Returns:
            A policy that needs nothing more.

        Raises:
            ValueError: if the model cannot honour it.
        """
        return self


@dataclasses.dataclass(frozen=True, kw_only=True)
class BudgetMethod(Policy):
    """Base class of policies that keep 1024 entries per kv head and layer, unless told another budget."""

    budget: Budget = 1024

    # Made of this policy's fields.
    scored_by: ClassVar[type[Scorer]]

    @property
    def stays(self) -> Keep:
        """Entries that always stay: the first `sinks` and the last `window` tokens, where the policy has such fields."""
        return self.part(Keep, protect=(), recent=0.0)

    def scoring(self) -> Scorer:
        """Scorer of this policy's fields, of the class `scored_by`; overridden where the scorer has other fields."""
        return self.part(self.scored_by)

    def observed(self, **parts: Any) -> Parts:
        """Returns `Parts` with this policy's scorer, and the entries that it keeps anyway; `parts` gives other fields."""
        usual: dict[str, Any] = {"scorer": self.scoring(), "keep": self.stays}
        return self.compose(**(usual | parts))

    def parts(self) -> Parts:
        """Config `Parts`: entries by the scores of `scored_by`, equally many in each kv head and layer."""
        return self.observed()


@dataclasses.dataclass(frozen=True, kw_only=True)
class CustomPolicy(Policy):
    """Policy composed of parts given as fields: `CustomPolicy(budget=256, scorer=KeyNorm(), keep=Keep(sinks=4))`.

    Attributes:
        scorer: which entries matter; None keeps everything.
        keep: which entries stay whatever their score.
        layers: how the budget spreads over layers.
        heads: how a layer's budget spreads over its kv heads.
        evict: drop the entry of lowest rank for every new one beyond the budget.
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

    def parts(self) -> Parts:
        """Returns `Parts` of this policy's own fields: scorer, kept entries, budgets of layers and heads, eviction."""
        names = ("scorer", "keep", "layers", "heads", "evict", "rolling", "nested")
        return self.compose(**{name: getattr(self, name) for name in names})
