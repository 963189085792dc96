"""`Method`, the base of all policies: shared fields and `parts()`; and `Policy`, made of parts without a class."""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any, ClassVar

from jaxkv._errors import require
from jaxkv._values import Value, as_real, brief, normalise
from jaxkv.cache.stores import Store
from jaxkv.policies.checks import Budget, Span, as_policy_budget, as_spans, as_store, store_class
from jaxkv.policies.heads import HeadBudgets, UniformHeads
from jaxkv.policies.keep import Keep
from jaxkv.policies.layers import LayerBudgets, UniformLayers
from jaxkv.policies.merger import Merger, check_merger
from jaxkv.policies.parts import Parts
from jaxkv.policies.rank import After, Again, Append, Evict, Rank
from jaxkv.policies.scorer import Scorer

_PARTS = frozenset(field.name for field in dataclasses.fields(Parts))
# Prefix of the attributes in which a policy caches its parts.
_KEPT = "_parts_of_"


def _declares(cls: type, name: str) -> bool:
    """True if `cls` itself is a dataclass that declares the field `name`."""
    return "__dataclass_fields__" in vars(cls) and name in inspect.get_annotations(cls)


def _made_once(make: Callable[[Any], Parts]) -> Callable[[Any], Parts]:
    """Returns a method that calls the given `parts` method once per instance and caches the result in `__dict__`."""
    # By the id of `make`, which this closure keeps alive: a class defined again in a notebook has the same name.
    kept = f"{_KEPT}{id(make)}"

    @functools.wraps(make)
    def parts(self: Any) -> Parts:
        if kept not in vars(self):
            object.__setattr__(self, kept, make(self))
        return vars(self)[kept]

    return parts


@dataclasses.dataclass(frozen=True, kw_only=True)
class Method(Value):
    """Base class of all policies: budget, protected spans, recompression, merging, store; subclasses implement `parts`.

    Attributes:
        budget: int: rows kept per kv head and layer on average, sinks and window included. float in (0, 1]: that
            share of each sequence's own prompt. Text such as "64MB": as many rows as these bytes of a sequence's cache
            hold, over all layers, in the model's sizes and the store's bits. None: everything. 1024 rows by default,
            unless the policy says another default. numpy's numbers count as Python's of their kind.
        min_budget: "clamp" raises a ratio that comes out below sinks + window + protected rows, as it does for short
            prompts, to these rows, and counts such sequences in `Stats.raised_budgets`; "raise" refuses it.
        protect: spans `(start, stop)` of the prompt's positions that always stay, with Python's slice meaning on each
            sequence.
        every: compress again after this many more tokens, over prompt and answer in order of position: the cache never
            holds more than the budget and this many rows. None compresses the prompt only.
        merge: how dropped rows are folded into their nearest kept rows, such as `Merge()`; None drops them.
        store: how rows are held: "dense" as the model computes them, "int8" in 8 bits with a scale each, "int4" in 4
            bits with a scale for 32 elements, "mixed" keys in 8 and values in 4; or a subclass of `jaxkv.cache.Store`.
    """

    budget: Budget = None
    min_budget: str = "clamp"
    protect: tuple[Span, ...] = ()
    every: int | None = None
    merge: Merger | None = None
    store: str | type[Store] = "dense"

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

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if inspect.isfunction(vars(cls).get("parts")):
            cls.parts = _made_once(cls.parts)  # type: ignore[assignment,method-assign]
        fields = {
            field.name for field in dataclasses.fields(cls)
        }  # its base's: `cls` is not decorated yet
        # Bases that are policies were checked when they were defined; mixins were not.
        for each in (
            cls,
            *(
                base
                for base in cls.__mro__[: cls.__mro__.index(Method)]
                if not issubclass(base, Method)
            ),
        ):
            said = vars(each).keys() | inspect.get_annotations(each).keys()
            unread = (
                set()
                if {"parts", "wrap"} & said
                else _PARTS & said - (fields if each is cls else set())
            )
            for name in sorted(unread):
                remedy = f"nobody reads it: write `parts`, returning dataclasses.replace(super().parts(), {name}=...)"
                raise TypeError(f"{each.__name__}.{name}: {remedy}")

    def __post_init__(self) -> None:
        name = type(self).__name__
        for field in dataclasses.fields(self):
            # The class that declares a field has no attribute of its name if the field has no plain default.
            declared = (
                each
                for each in type(self).__mro__
                if field.name in vars(each) or _declares(each, field.name)
            )
            owner = next(declared)
            default = vars(owner).get(field.name, dataclasses.MISSING)
            if default is not field.default:
                remedy = f"it is no field's default: write `{field.name}: ... = {default!r}` in the class, and "
                remedy += "@dataclasses.dataclass(frozen=True, kw_only=True) above it"
                raise TypeError(f"{owner.__name__}.{field.name}: {remedy}")
        normalise(self)
        object.__setattr__(self, "budget", as_policy_budget(self.budget))
        object.__setattr__(self, "protect", as_spans(self.protect))
        object.__setattr__(self, "store", as_store(self.store))
        check_merger("merge", self.merge)
        self._check()
        if not callable(self.parts):
            raise TypeError(
                f"{name}.parts={self.parts!r}: make it a method that returns Parts(...)"
            )
        parts = self.parts()
        if not isinstance(parts, Parts):
            raise TypeError(
                f"{name}.parts()={parts!r}: return Parts(...), or self.compose(scorer=...)"
            )
        try:
            hash(parts)
        except TypeError as error:
            remedy = (
                "programs are kept by a policy's parts: give numbers, tuples and frozen dataclasses"
            )
            raise TypeError(f"{name}: {error}; {remedy}") from None

    def __getstate__(self) -> dict[str, Any]:
        # Parts are recomputed from the fields.
        return {name: value for name, value in vars(self).items() if not name.startswith(_KEPT)}

    def _check(self) -> None:
        """Checks and normalises fields at construction, before `parts` is called; a hook of subclasses, empty here."""

    def _adopt(self, part: Any, *names: str) -> None:
        """Copies the attributes `names` of a checked part into this policy's fields of the same names."""
        for name in names:
            object.__setattr__(self, name, getattr(part, name))

    def parts(self) -> Parts:
        """Returns the `Parts` that the engine reads, made once per instance; TypeError unless a subclass overrides it.

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
        **parts: Any,
    ) -> Parts:
        """Returns `Parts` of the arguments and of the fields of every policy: budget, spans, `every` and merging.

        Args:
            scorer: which rows matter; None keeps everything.
            keep: which rows always stay, besides the protected spans.
            evict: drop the row of lowest rank for every new one.
            **parts: other fields of `Parts` whose value is not the default.

        Returns:
            The parts.

        Raises:
            ValueError: for parts that exclude one another.
            TypeError: for parts of a wrong type.
        """
        keep = Keep() if keep is None else keep
        if not isinstance(keep, Keep):
            raise TypeError(f"keep={keep!r}: give Keep(sinks=4), say")
        after: After = Append() if evict is None else Evict(rank=evict)
        if self.every is not None:
            remedy = "this policy drops a row for every token already: leave it out"
            require(evict is None, "every", self.every, remedy)
            after = Again(every=self.every, rank=None if scorer is None else scorer.rank)
        usual: dict[str, Any] = {
            "budget": self.budget,
            "min_budget": self.min_budget,
            "merge": self.merge,
            "keep": dataclasses.replace(keep, protect=self.protect),
            "after": after,
            "store": store_class(self.store),
        }
        return Parts(scorer=scorer, **(usual | parts))

    def meaning(self) -> dict[str, Any]:
        """Dict that policies are compared and hashed by: their parts, so that two spellings of one policy are equal."""
        return {"parts": self.parts()}

    def for_model(self, layers: int, found: tuple[int, ...] | None) -> "Method":
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
class Policy(Method):
    """Policy composed of parts given as fields: `Policy(budget=256, scorer=KeyNorm(), keep=Keep(sinks=4))`.

    Attributes:
        scorer: which rows matter; None keeps everything.
        keep: which rows stay whatever their score.
        layers: how the budget spreads over layers.
        heads: how a layer's budget spreads over its kv heads.
        evict: drop the row of lowest rank for every new one beyond the budget.
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
            # `dataclasses.replace` passes all fields, so that a copy has the same spans in both.
            once = self.protect in ((), keep.protect)
            require(once, "protect", self.protect, f"{keep} has spans: give them in one place")
            object.__setattr__(self, "protect", keep.protect)

    def parts(self) -> Parts:
        """Returns `Parts` of this policy's own fields: scorer, kept rows, budgets of layers and heads, eviction."""
        return self.compose(
            scorer=self.scorer,
            keep=self.keep,
            layers=self.layers,
            heads=self.heads,
            evict=self.evict,
            rolling=self.rolling,
            nested=self.nested,
        )
