"""Phases of a policy: `KeepAll` or `Select` for a prompt's entries; then `Append`, `Evict` or `Recompress`."""

from jaxkv._checks import ENDLESS, require_instance, validate_bool, validate_field, validate_int
from jaxkv._dataclasses import frozen_dataclass
from jaxkv._errors import require
from jaxkv.policies.checks import EntryBudget, Kept, ShareBudget, parse_budget
from jaxkv.policies.head_budgets import (
    HeadBudgets,
    UniformHeads,
    get_competing_budgets,
    get_score_threshold,
    heads_share_positions,
)
from jaxkv.policies.keep import Keep
from jaxkv.policies.layer_budgets import LayerBudgets, UniformLayers
from jaxkv.policies.merger import Merger, check_merger
from jaxkv.policies.rank import ByNewScores, Rank, check_eviction_rank
from jaxkv.policies.scorer import Scorer, check_scorer


@frozen_dataclass
class KeepAll:
    """Selection that keeps every entry of a prompt: its scorer has no needs, and is not called."""

    scorer = Scorer()
    budget = None
    clamp = False
    keep = Keep()
    layers = UniformLayers()
    heads = UniformHeads()
    merge = None
    nested = False


@frozen_dataclass
class Select:
    """Selection of a prompt's entries by scores, under a budget that is divided among layers and kv heads.

    Attributes:
        scorer: scorer of entries.
        budget: `EntryBudget`: entries kept per kv head and layer on average, sinks and window included. `ShareBudget`:
            of each
            sequence's own prompt. `ByteBudget` of a sequence's cache, which `resolve_policy_for_model` converts to
            entries. Numbers and text, as in policies, become one of these. None: `layers` set the number of entries.
        clamp: True raises a share that is below a sequence's always-kept entries; False rejects it.
        keep: always-kept entries.
        layers: layer budgets: how the budget is divided among layers.
        heads: head budgets: how a layer's budget is divided among its kv heads.
        merge: merger of evicted entries into kept ones; None discards them.
        nested: a layer chooses among the positions that the layer below kept.
    """

    scorer: Scorer
    budget: Kept | None = None
    clamp: bool = False
    keep: Keep = Keep()
    layers: LayerBudgets = UniformLayers()
    heads: HeadBudgets = UniformHeads()
    merge: Merger | None = None
    nested: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "budget", parse_budget(self.budget))
        check_scorer("scorer", self.scorer)
        validate_field(self, "keep", require_instance, Keep, "give Keep(...)")
        remedy = "give an instance of a subclass of LayerBudgets, such as UniformLayers()"
        validate_field(self, "layers", require_instance, LayerBudgets, remedy)
        remedy = "give an instance of a subclass of HeadBudgets, such as UniformHeads()"
        validate_field(self, "heads", require_instance, HeadBudgets, remedy)
        check_merger("merge", self.merge)
        validate_field(self, "clamp", validate_bool)
        validate_field(self, "nested", validate_bool)
        self._check_entry_count()

    def _check_entry_count(self) -> None:
        """Raise ValueError for selection fields that exclude one another, or a budget below sinks + window."""
        budget = self.budget
        layers = self.layers
        heads = self.heads
        remedy = "give entries per head or a ratio; FullKV keeps every entry"
        if layers.sets_entry_count:
            remedy = f"{layers} sets the number of kept entries: leave it out"
        require((budget is None) is layers.sets_entry_count, "budget", budget, remedy)
        remedy = "head budgets with limits are layer budgets, too: give the same value as layers"
        require(heads.get_segment_limits() is None or layers == heads, "heads", heads, remedy)
        if isinstance(budget, EntryBudget):
            first = self.keep.sinks
            last = self.keep.window
            remedy = f"below sinks + window = {first} + {last}: give at least {first + last}, or a smaller window"
            require(budget.value >= first + last, "budget", budget, remedy)
        remedy = f"layer budgets by last queries need a scorer with queries, not {self.scorer}: "
        remedy += "give SnapKV's, for example"
        read = bool(self.scorer.needs.queries) or not layers.needs_last_queries
        require(read, "layers", layers, remedy)
        remedy = "heads of all layers share one budget: use AdaptiveHeads(alpha=0), for example"
        require(
            not layers.uses_joint_budget or get_competing_budgets(heads) is not None,
            "layers",
            layers,
            remedy,
        )
        remedy = f"{layers} sets the number of kept entries: give UniformLayers() or GlobalLayers()"
        threshold = get_score_threshold(heads)
        free = layers.uses_joint_budget or not layers.depends_on_scores
        require(threshold is None or free, "threshold", threshold, remedy)
        remedy = "heads need one set of positions: use SharedHeads()"
        require(not self.nested or heads_share_positions(heads), "nested", self.nested, remedy)
        count = self.scorer.needs.references
        same = self.merge is None or not count or self.merge.reference_count in (0, count)
        remedy = f"the scorer reads {count} reference queries: give the merger references={count}"
        require(same, "merge", self.merge, remedy)
        equal = self.merge is None or heads.is_uniform or not self.merge.needs_equal_evictions
        remedy = (
            "a decision shared by heads needs as many evicted entries in each: use decision='token'"
        )
        require(equal, "merge", self.merge, remedy)


@frozen_dataclass
class Append:
    """Phase after the prompt that appends new entries to the kept ones and evicts none."""

    def require_fits_selection(self, select: Select) -> None:
        """Do nothing: appending can follow any selection, so that no error is raised."""


@frozen_dataclass
class Evict:
    """Phase after the prompt that evicts the entry of lowest `rank`, a `Rank`, for every new entry beyond the budget.

    Attributes:
        rank: how entries are compared.
    """

    rank: Rank

    def __post_init__(self) -> None:
        check_eviction_rank("rank", self.rank)

    def require_fits_selection(self, select: Select) -> None:
        """Raise ValueError if a selection's score threshold, shared positions or merger exclude single evictions."""
        remedy = "single evictions compare entries with one another, not with a threshold: give every=64, for example"
        threshold = get_score_threshold(select.heads)
        require(threshold is None, "threshold", threshold, remedy)
        remedy = "evicting one position in all heads needs segments of equal layout: give a schedule, or every=64"
        alike = not (heads_share_positions(select.heads) and select.layers.depends_on_scores)
        require(alike, "after", self, remedy)
        fits = select.merge is None or bool(select.merge.compared_tensors)
        require(fits, "merge", select.merge, "it merges in prompts only: give Merge(), or None")


@frozen_dataclass
class Recompress:
    """Phase that compresses the cache, prompt and answer together, after every `every` new tokens.

    Attributes:
        every: number of new tokens between compressions: the cache never holds more than the budget and this many
            entries.
        rank: how scores change until then; `ByNewScores()` scores again, with the last queries that the scorer needs.
        grows: a budget that is a share is one of all tokens seen so far, not of the prompt alone.
    """

    every: int
    rank: Rank = ByNewScores()
    grows: bool = False

    def __post_init__(self) -> None:
        validate_field(self, "every", validate_int, "give a number of tokens, at least 1")
        object.__setattr__(self, "every", min(self.every, ENDLESS))
        validate_field(self, "grows", validate_bool)
        check_eviction_rank("rank", self.rank)

    def require_fits_selection(self, select: Select) -> None:
        """Raise ValueError if, to recompress, the selection's scorer needs inputs that no cache holds."""
        remedy = (
            "a share of the tokens grows, and other budgets do not: give budget=0.25, for example"
        )
        share = isinstance(select.budget, ShareBudget)
        require(share or not self.grows, "grows", self.grows, remedy)
        free = select.layers.uses_joint_budget or not select.layers.depends_on_scores
        remedy = f"{select.layers} divides the prompt's budget by its scores, once: leave grows out"
        require(free or not self.grows, "grows", self.grows, remedy)
        scorer = select.scorer
        anew = isinstance(self.rank, ByNewScores)
        remedy = f"{select.layers} needs the prompt's scores as they are: leave smoothing out"
        require(free or not (anew and self.rank.stores_scores), "smoothing", self.rank, remedy)
        needs = scorer.needs
        once = anew and bool(needs.replay or needs.gate or scorer.has_first_stage)
        merges = select.merge is not None and select.merge.only_prompts
        remedy = f"{select.merge if merges else scorer} needs the prompt as it was: give every=None"
        never = once or merges or bool(needs.blocks or needs.references)
        require(not never, "every", self.every, remedy)
        forgets = anew and needs.moments is not None and not needs.queries
        remedy = f"{scorer} needs the mean of queries, and the cache holds none: give remembered=256, for example"
        require(not forgets, "every", self.every, remedy)


After = Append | Evict | Recompress
