"""`Policy`, the base of all policies, with their shared fields; and `CustomPolicy`, put together by hand from parts."""

import dataclasses
from typing import Any, ClassVar, TypeVar

from jaxkv._checks import (
    format_non_default_fields,
    normalise_fields,
    require_hashable,
    require_instance,
    to_float_or_none,
    validate_bool,
    validate_field,
    validate_float,
)
from jaxkv._dataclasses import frozen_dataclass
from jaxkv._errors import require
from jaxkv.cache.stores import Store
from jaxkv.models.config import ModelConfig
from jaxkv.policies.checks import (
    Budget,
    ShareBudget,
    Span,
    get_store_class,
    normalise_store,
    parse_budget,
    parse_spans,
)
from jaxkv.policies.head_budgets import HeadBudgets, UniformHeads
from jaxkv.policies.keep import Keep
from jaxkv.policies.layer_budgets import LayerBudgets, UniformLayers
from jaxkv.policies.merger import Merger
from jaxkv.policies.parts import Parts
from jaxkv.policies.phases import After, Append, Evict, KeepAll, Recompress
from jaxkv.policies.rank import ByNewScores, Rank
from jaxkv.policies.reads import ReadAll
from jaxkv.policies.scorer import Scorer

Part = TypeVar("Part")


@frozen_dataclass
class Policy:
    """Base of all policies, with budget, protected spans, recompression, merger and store; subclasses build `Parts`.

    Attributes:
        budget: int: entries kept per kv head and layer on average, sinks and window included. float in (0, 1]: share of
            each sequence's own prompt. Text such as "64MB": bytes of a sequence's cache over all layers, converted to
            entries by the model's sizes and the store's bits. None: every entry. Default 1024 entries, unless the
            policy has its own default. numpy's numbers count as Python's of their kind.
        min_budget: "clamp" raises a ratio that gives a short prompt fewer than sinks + window + protected entries to
            these, and counts such sequences in `Stats.raised_budgets`; "raise" rejects it.
        protect: spans `(start, stop)` of prompt positions that are never evicted, with Python's slice meaning on each
            sequence.
        every: recompress after this many new tokens, over prompt and answer in order of position: the cache never holds
            more than the budget and this many entries. None compresses the prompt only.
        grows: with `every` and a share as the budget: the share is of all tokens seen so far, prompt and answer, not of
            the prompt alone.
        smoothing: with `every`: weight, below 1, of an entry's older score in its new one at each recompression; 0
            uses new scores alone.
        merge: merger of evicted entries into their nearest kept entries, such as `Merge()`; None discards them.
        store: how entries are held: "dense" as the model computes them; "int8" in 8 bits with a scale per key and
            value; "int4" in 4 bits with a scale per 32 elements; "int4-residual" with the last 32 appended entries also
            as the model computes them; "mixed" with keys in 8 bits and values in 4; or a subclass of
            `jaxkv.cache.Store`.
        composed: the `Parts` that `build_policy_parts` returned at construction, all that the engine reads.
    """

    budget: Budget = None
    min_budget: str = "clamp"
    protect: tuple[Span, ...] = ()
    every: int | None = None
    grows: bool = False
    smoothing: float = 0.0
    merge: Merger | None = None
    store: str | type[Store] = "dense"
    composed: Parts = dataclasses.field(init=False, repr=False)

    def __new__(cls, *args: Any, **options: Any) -> Any:
        """Create a policy; TypeError that names the right `budget` for kvpress' argument `compression_ratio`."""
        if "compression_ratio" in options:
            removed = to_float_or_none(options["compression_ratio"])
            # Rounded: in floats 1 - 0.9 is a little less than 0.1.
            kept = "1 - compression_ratio" if removed is None else round(1 - removed, 9)
            raise TypeError(
                f"compression_ratio: the share removed. Give the share kept, budget={kept}."
            )
        return super().__new__(cls)

    paper: ClassVar[str] = ""

    def __str__(self) -> str:
        """Return one line with the class and its fields that differ from their defaults, as errors name a policy."""
        return format_non_default_fields(self)

    def __post_init__(self) -> None:
        normalise_fields(self)
        if isinstance(share := parse_budget(self.budget), ShareBudget):
            object.__setattr__(self, "budget", share.value)
        known = isinstance(self.min_budget, str) and self.min_budget in ("raise", "clamp")
        require(known, "min_budget", self.min_budget, "no such rule: give 'raise' or 'clamp'")
        validate_field(self, "protect", parse_spans)
        validate_field(self, "grows", validate_bool)
        validate_field(self, "smoothing", validate_float, "give a weight below 1", high=1.0)
        for name in ("grows", "smoothing"):
            unused = self.every is not None or not getattr(self, name)
            remedy = "it changes how the cache is recompressed: give every=128, for example"
            require(unused, name, getattr(self, name), remedy)
        object.__setattr__(self, "store", normalise_store(self.store))
        smallest = self.set_question_window(1)
        if smallest is not self:
            # Checks the other fields; `resolve_policy` rejects these parts.
            object.__setattr__(self, "composed", smallest.composed)
            return
        self._check_fields()
        remedy = "return Parts(...), or self.compose(scorer=...)"
        parts = require_hashable(
            "build_policy_parts",
            require_instance("build_policy_parts", self.build_policy_parts(), Parts, remedy),
        )
        object.__setattr__(self, "composed", parts)

    def set_question_window(self, size: int) -> "Policy":
        """Return the policy with a window of `size` tokens in place of "question", its own or that of its base.

        Args:
            size: number of a prompt's last tokens.

        Returns:
            The policy; itself if no window is the question's.
        """
        given: dict[str, Any] = {}
        base = getattr(self, "base", None)
        if getattr(self, "window", None) == "question":
            given["window"] = size
        elif isinstance(base, Policy) and (fitted := base.set_question_window(size)) is not base:
            given["base"] = fitted
        return dataclasses.replace(self, **given) if given else self

    def _check_fields(self) -> None:
        """Validate and normalise fields at construction, before the parts are built; a hook, empty here."""

    def create_part(self, kind: type[Part], **others: Any) -> Part:
        """Create a part of class `kind` from `others` and like-named policy fields; both get checked values.

        Args:
            kind: the part's class, a dataclass.
            **others: fields of the part that this policy lacks, or uses otherwise.

        Returns:
            The part.
        """
        fields = {each.name for each in dataclasses.fields(kind)}  # type: ignore[arg-type]
        names = fields & vars(self).keys() - others.keys()
        made = kind(**{name: getattr(self, name) for name in names}, **others)
        for name in names:
            object.__setattr__(self, name, getattr(made, name))
        return made

    def build_policy_parts(self) -> Parts:
        """Return the policy's `Parts`, which construction stores in `composed`; TypeError unless overridden.

        Returns:
            The parts.
        """
        raise TypeError(
            f"{type(self).__name__}: no `build_policy_parts`. Write the method: return self.compose(scorer=...)"
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
        """Return `Parts` of the arguments and of the shared fields, such as budget, spans, `every`, merger and store.

        Args:
            scorer: scorer of entries; None keeps every entry.
            keep: always-kept entries, in addition to the protected spans.
            evict: evict the entry of lowest rank for every new entry.
            rolling: count positions within the cache: keys are stored before RoPE and rotated on each read.
            **parts: other fields of `Select` and of `Parts` that differ from their defaults.

        Returns:
            The parts.

        Raises:
            ValueError: for parts that exclude one another.
            TypeError: for parts of a wrong type.
        """
        keep = require_instance(
            "keep", Keep() if keep is None else keep, Keep, "give Keep(sinks=4)"
        )
        after: After = Append() if evict is None else Evict(rank=evict)
        if self.every is not None:
            remedy = "this policy evicts an entry for every token already: leave it out"
            require(evict is None, "every", self.every, remedy)
            rank = (scorer or KeepAll.scorer).eviction_rank
            if self.smoothing:
                remedy = (
                    f"{rank} has scores of its own, which change with every token: leave it out"
                )
                require(isinstance(rank, ByNewScores), "smoothing", self.smoothing, remedy)
                rank = ByNewScores(smoothing=self.smoothing)
            after = Recompress(every=self.every, rank=rank, grows=self.grows)
        usual: dict[str, Any] = {
            "budget": parse_budget(self.budget),
            "clamp": self.min_budget == "clamp",
            "merge": self.merge,
            "keep": dataclasses.replace(keep, protect=keep.protect + self.protect),
            "after": after,
            "read": ReadAll(rolling=rolling),
            "store": get_store_class(self.store),
        }
        return Parts.create_from_fields(scorer=scorer, **(usual | parts))

    def fill_model_fields(self, config: ModelConfig, found: tuple[int, ...] | None) -> "Policy":
        """Return the policy with model-dependent fields filled in, such as filter layers; itself by default.

        Args:
            config: the model's sizes.
            found: the model's filter layers, if known.

        Returns:
            A policy that is complete for this model.

        Raises:
            ValueError: if the model does not support the policy.
        """
        return self


@frozen_dataclass
class BudgetMethod(Policy):
    """Base class of policies with a scorer of class `scored_by` and, by default, 1024 entries per kv head and layer."""

    budget: Budget = 1024

    # The scorer's class; its fields are this policy's.
    scored_by: ClassVar[type[Scorer]]

    @property
    def always_kept_entries(self) -> Keep:
        """`Keep` of the first `sinks` and last `window` tokens, 0 without such a field; no spans, no share `recent`."""
        return self.create_part(Keep, protect=(), recent=0.0)

    def create_scorer(self) -> Scorer:
        """Return the scorer, of class `scored_by` with this policy's fields; override it for other fields."""
        return self.create_part(self.scored_by)

    def compose_with_scorer(self, **parts: Any) -> Parts:
        """Return `Parts` of this policy's scorer, always-kept entries and shared fields, overridden by `parts`."""
        usual: dict[str, Any] = {"scorer": self.create_scorer(), "keep": self.always_kept_entries}
        return self.compose(**(usual | parts))

    def build_policy_parts(self) -> Parts:
        """Return `Parts` that keep entries by `scored_by`, by default equally many per kv head and layer."""
        return self.compose_with_scorer()


@frozen_dataclass
class CustomPolicy(Policy):
    """Policy composed by hand from parts: `CustomPolicy(budget=256, scorer=KeyNorm(), keep=Keep(sinks=4))`.

    Attributes:
        scorer: scorer of entries; None keeps every entry.
        keep: always-kept entries.
        layers: layer budgets: how the budget is divided among layers.
        heads: head budgets: how a layer's budget is divided among its kv heads.
        evict: evict the entry of lowest rank for every new entry beyond the budget.
        rolling: count positions within the cache: keys are stored before RoPE and rotated on each read.
        nested: a layer chooses among the positions that the layer below kept.
    """

    scorer: Scorer | None = None
    keep: Keep = Keep()
    layers: LayerBudgets = UniformLayers()
    heads: HeadBudgets = UniformHeads()
    evict: Rank | None = None
    rolling: bool = False
    nested: bool = False

    def build_policy_parts(self) -> Parts:
        """Return `Parts` of this policy's fields: the shared ones, and its own, such as scorer, `keep` and `evict`."""
        names = ("scorer", "keep", "layers", "heads", "evict", "rolling", "nested")
        return self.compose(**{name: getattr(self, name) for name in names})
