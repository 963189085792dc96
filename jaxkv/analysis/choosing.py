"""Which rows of a text policies keep: what their prefill would choose, of many policies at once and without a cache."""

import dataclasses
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, PRNGKeyArray

from jaxkv._errors import require
from jaxkv._values import brief, plain, typed
from jaxkv.analysis.given import several
from jaxkv.arguments import as_key, as_model
from jaxkv.attention import Implementation
from jaxkv.engine.choosing import Candidates, choose, of_prompt
from jaxkv.engine.compress import observe
from jaxkv.engine.lengths import Table, bucket, by_length, rows_by_claims
from jaxkv.engine.prefill import observed, read_layers
from jaxkv.engine.prefill_layer import LayerOut
from jaxkv.loading import LanguageModel
from jaxkv.models.decoder import Flat
from jaxkv.policies.policy import Method
from jaxkv.policies.registry import as_policy
from jaxkv.policies.scorer import Needs
from jaxkv.policies.wrapper import Wrapper
from jaxkv.sharding.mesh import host, place
from jaxkv.text.prompts import Encoded

Budget = int | float
PolicyLike = Method | type[Method] | str
Policies = Mapping[str, PolicyLike] | Sequence[PolicyLike]


def with_budget(policy: PolicyLike, budget: Budget) -> Method:
    """A policy at another budget; one that keeps everything as it is.

    Args:
        policy: any policy, or its name or class.
        budget: rows per kv head and layer on average, or a share of the prompt.

    Returns:
        The policy.

    Raises:
        ValueError: for a budget that it cannot have.
    """
    made = as_policy(policy)
    if made.parts().scorer is None:
        return made
    if isinstance(made, Wrapper) and isinstance(made.base, Method):
        return dataclasses.replace(made, budget=None, base=with_budget(made.base, budget))
    return dataclasses.replace(made, budget=budget)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Grid:
    """Policies, each at every budget.

    Attributes:
        names: of the policies.
        budgets: their budgets.
        cells: policies by name and budget.
    """

    names: tuple[str, ...]
    budgets: tuple[Budget, ...]
    cells: tuple[tuple[Method, ...], ...]

    @property
    def flat(self) -> tuple[Method, ...]:
        """All cells, one policy after the other."""
        return tuple(cell for row in self.cells for cell in row)


def grid(params: LanguageModel, policies: Policies, budgets: Sequence[Budget]) -> Grid:
    """Policies at every budget, as a model has them.

    Args:
        params: the model.
        policies: as for `checked`.
        budgets: as for `checked`.

    Returns:
        The grid.

    Raises:
        ValueError: as `checked`, and for policies that the model cannot honour.
    """
    params, made = as_model(params), checked(policies, budgets)
    of_model = (params.config.layers, params.filter_layers)
    cells = tuple(tuple(cell.for_model(*of_model) for cell in row) for row in made.cells)
    return dataclasses.replace(made, cells=cells)


def checked(policies: Policies, budgets: Sequence[Budget]) -> Grid:
    """Policies at every budget, whatever the model.

    Args:
        policies: by name, class or value, which is what they are called; or in a dictionary, under names of their own.
        budgets: rows, or shares.

    Returns:
        The grid.

    Raises:
        ValueError: for none, for two that are called alike, and for policies that choose what they read for each token.
    """
    listed = several("policies", policies, "give a list of one or more policies")
    budgets = tuple(map(plain, several("budgets", budgets, "give a list of one or more budgets, rows or shares")))
    once = len(set(map(typed, budgets))) == len(budgets)
    require(once, "budgets", budgets, "two of them are the same: give each once")
    called = listed if isinstance(policies, Mapping) else tuple(map(_name, listed))
    given = tuple(policies.values()) if isinstance(policies, Mapping) else listed
    for name in called:
        require(isinstance(name, str), "policies", name, "give each policy a name, which is text")
    require(len(set(called)) == len(called), "policies", called, "two of them are the same: give each once")
    for name, each in zip(called, given, strict=True):
        remedy = "it keeps what it does not read, and chooses for each token: use `jaxkv eval visible`, or leave it out"
        require(as_policy(each).parts().read is None, "policies", name, remedy)
    cells = tuple(
        tuple(_cell(name, each, budget) for budget in budgets) for name, each in zip(called, given, strict=True)
    )
    return Grid(names=called, budgets=budgets, cells=cells)


def _cell(name: str, policy: PolicyLike, budget: Budget) -> Method:
    try:
        return with_budget(policy, budget)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def _name(policy: PolicyLike) -> str:
    return policy if isinstance(policy, str) else brief(as_policy(policy))


def kept_rows(
    params: LanguageModel, prompt: Encoded, policies: Sequence[Method], *, key: int | Array | None = 0
) -> dict[Method, Bool[np.ndarray, "L K n"]]:
    """What policies keep of a prompt, which runs through the model once.

    Args:
        params: the model.
        prompt: one prompt; on a mesh as often as it has groups.
        policies: which; those that read less than they keep have no answer.
        key: of those that draw, or its seed; seed 0 for None, as everywhere.

    Returns:
        By policy the rows that stay, as prefill chooses them.

    Raises:
        ValueError: for a budget that a policy cannot honour.
    """
    flat, axes = params.flat, params.axes
    slots, count = bucket(int(prompt.lengths.max())), int(prompt.lengths[0])
    given = as_key(key)
    drawn = jax.random.key(0) if given is None else given
    choosers = [_Chooser(flat, policy, prompt, slots, drawn) for policy in policies]
    all_needs = [each.parts.needs for each in choosers]
    needs = Needs(
        queries=max(each.queries for each in all_needs),
        sums=any(each.sums for each in all_needs),
        norms=any(each.norms for each in all_needs),
        future=tuple(dict.fromkeys(asked for each in all_needs for asked in each.future)),
    )
    tokens, length = place(prompt.padded(slots), "B S", axes), place(prompt.lengths, "B", axes)
    for index, out in enumerate(read_layers(flat, tokens, length, needs=needs)):
        for chooser in choosers:
            chooser.look(index, out)
        del out
    return {policy: each.rows()[..., :count] for policy, each in zip(policies, choosers, strict=True)}


class _Chooser:
    """One policy's choice among the rows of one layer after the other, or of all layers where these share a budget."""

    def __init__(self, flat: Flat, policy: Method, prompt: Encoded, slots: int, key: PRNGKeyArray):
        self.flat, self.parts = flat, policy.parts()
        self.lengths, self.key = prompt.lengths.astype(np.int64), key
        self.told = by_length(self.parts, self.lengths, flat.config.layers)
        self.length = place(prompt.lengths, "B", flat.axes)
        self.forced = place(self.parts.keep.mask(self.lengths, slots), "B S", flat.axes)
        self.whole = of_prompt(None, self.forced, self.length)
        self.waiting, self.masks = list[Candidates](), list[np.ndarray]()
        self.below: Array | None = None

    def look(self, index: int, out: LayerOut) -> None:
        """A layer: its rows are chosen now, or wait for what the others claim."""
        parts, scorer = self.parts, self.parts.scorer
        if scorer is None:
            inside = np.broadcast_to(host(self.whole.inside)[0], out.k.shape[1:3])
            self.masks.append(inside)
            return
        seen = observed(self.flat, out, scorer, self.length, index, self.key, Implementation.XLA)
        axes = self.flat.axes
        scores, _, claim = observe(seen, self.forced, scorer=scorer, layers=parts.layers, axes=axes)
        norms = out.norms if parts.heads.needs_norms else None
        self.waiting.append(dataclasses.replace(self.whole, scores=scores, norms=norms, claim=claim))
        if not parts.layers.from_scores:
            assert self.told.rows is not None and self.told.recent is not None
            self._choose(self.told.rows[index : index + 1], self.told.recent[index : index + 1])

    def rows(self) -> Bool[np.ndarray, "L K n"]:
        """What stays, once every layer has been looked at."""
        if self.waiting and self.parts.layers.joint:
            self._choose_over_layers()
        elif self.waiting:
            parts, told = self.parts, self.told
            claims = np.stack([host(layer.claim) for layer in self.waiting])
            self._choose(*rows_by_claims(parts, told.budget, self.lengths, told.forced, claims))
        return np.stack(self.masks)

    def _choose_over_layers(self) -> None:
        """Appends each layer's mask of the rows that stay, where the heads of all layers share one budget."""
        assert self.told.rows is not None and self.told.recent is not None
        axes = self.flat.axes
        rows, newest = (place(each[0], "B", axes, jnp.int32) for each in (self.told.rows, self.told.recent))
        chosen = choose(self.waiting, rows, newest, heads=self.parts.heads, axes=axes)
        self.masks += [host(mask)[0] for mask in chosen.masks]

    def _choose(self, rows: Table, recent: Table) -> None:
        axes = self.flat.axes
        for layer, wanted, last in zip(self.waiting, rows, recent, strict=True):
            some, newest = (place(each, "B", axes, jnp.int32) for each in (wanted, last))
            (mask,) = choose([layer], some, newest, self.below, heads=self.parts.heads, axes=axes).masks
            self.below = mask[:, 0] if self.parts.nested else None
            self.masks.append(host(mask)[0])
        self.waiting = []
