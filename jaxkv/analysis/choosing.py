"""Masks of the prompt rows that policies keep: many policies and budgets from one forward pass, without a cache."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, PRNGKeyArray

from jaxkv import _checks
from jaxkv._errors import require
from jaxkv._values import brief, plain
from jaxkv.arguments import as_key, as_model
from jaxkv.attention import Implementation
from jaxkv.engine.choosing import Candidates, choose, of_prompt
from jaxkv.engine.compress import observe, ranked_first
from jaxkv.engine.lengths import Table, bucket, by_length, rows_by_claims
from jaxkv.engine.prefill import observed, read_layers
from jaxkv.engine.prefill_layer import LayerOut
from jaxkv.engine.session import Session
from jaxkv.loading import LanguageModel
from jaxkv.models.decoder import Flat
from jaxkv.policies.checks import as_budget
from jaxkv.policies.fitting import policy_for
from jaxkv.policies.policy import Method
from jaxkv.policies.registry import as_policy
from jaxkv.policies.scorer import Needs
from jaxkv.policies.wrapper import with_budget
from jaxkv.sharding.mesh import host, place
from jaxkv.text.prompts import Encoded

Budget = int | float
PolicyLike = Method | type[Method] | str
Policies = Mapping[str, PolicyLike] | Sequence[PolicyLike]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Grid:
    """Policies with each of several budgets set (`cells[policy][budget]`), with the policies' `names` and `budgets`."""

    names: tuple[str, ...]
    budgets: tuple[Budget, ...]
    cells: tuple[tuple[Method, ...], ...]


def grid(params: LanguageModel, policies: Policies, budgets: Sequence[Budget]) -> Grid:
    """Validated `Grid` of every policy at every budget, fitted to the model's layers and its filter layers (OmniKV)."""
    params, made = as_model(params), checked(policies, budgets)
    fitted = functools.partial(
        policy_for, config=params.config, filters=params.filter_layers, dtype=params.dtype
    )
    cells = tuple(tuple(map(fitted, row)) for row in made.cells)
    return dataclasses.replace(made, cells=cells)


def checked(policies: Policies, budgets: Sequence[Budget]) -> Grid:
    """Validated `Grid` of every policy at every budget, not fitted to a model; policies without a name are given one.

    ValueError for empty lists, repeated names or budgets, and policies that choose the rows to read for each token.
    """
    listed = _checks.several("policies", policies, "give a list of one or more policies")
    remedy = "give a list of one or more budgets, rows or shares"
    budgets = tuple(map(plain, _checks.several("budgets", budgets, remedy)))
    numbers = not any(isinstance(budget, str) for budget in budgets)
    require(numbers, "budgets", budgets, "figures are drawn over rows: give rows, or shares")
    once = len(set(map(as_budget, budgets))) == len(budgets)
    require(once, "budgets", budgets, "two of them are the same: give each once")
    names = listed if isinstance(policies, Mapping) else tuple(map(_name, listed))
    given = tuple(policies.values()) if isinstance(policies, Mapping) else listed
    for name in names:
        require(isinstance(name, str), "policies", name, "give each policy a name, which is text")
    require(
        len(set(names)) == len(names), "policies", names, "two of them are the same: give each once"
    )
    for name, each in zip(names, given, strict=True):
        remedy = "it drops no rows, and chooses for each token which to read: use `jaxkv eval visible`, or leave it out"
        require(as_policy(each).parts().read is None, "policies", name, remedy)
    cells = tuple(
        tuple(_cell(name, each, budget) for budget in budgets)
        for name, each in zip(names, given, strict=True)
    )
    return Grid(names=names, budgets=budgets, cells=cells)


def _cell(name: str, policy: PolicyLike, budget: Budget) -> Method:
    """Policy with its budget set to `budget`, from a policy, class or name; a ValueError's text begins with `name`."""
    try:
        return with_budget(as_policy(policy), budget)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def _name(policy: PolicyLike) -> str:
    """Name of a policy as text: the string it was given as, else its class and the fields that differ from defaults."""
    return policy if isinstance(policy, str) else brief(as_policy(policy))


def kept_rows(
    params: LanguageModel,
    prompt: Encoded,
    policies: Sequence[Method],
    *,
    key: int | Array | None = 0,
) -> dict[Method, Bool[np.ndarray, "L K n"]]:
    """Dict {policy: mask `bool[L, K, n]` of rows its prefill keeps in L layers without a window}; one pass serves all.

    Policies that read prompts twice run a prefill of their own.
    `prompt` holds one prompt, repeated for each data group of a mesh. `key` is the random key of policies that draw;
    None means seed 0.
    """
    flat, axes = params.flat, params.axes
    slots, count = bucket(int(prompt.lengths.max())), int(prompt.lengths[0])
    given = as_key(key)
    drawn = jax.random.key(0) if given is None else given
    twice = {
        policy: _after_prefill(params, prompt, policy, drawn)
        for policy in policies
        if _reads_twice(policy)
    }
    once = [policy for policy in policies if policy not in twice]
    choices = [_Choices(flat, policy, prompt, slots, drawn) for policy in once]
    all_needs = [each.parts.needs for each in choices]
    needs = Needs(
        queries=max((each.queries for each in all_needs), default=0),
        sums=any(each.sums for each in all_needs),
        norms=any(each.norms for each in all_needs),
        future=tuple(dict.fromkeys(asked for each in all_needs for asked in each.future)),
        blocks=tuple(dict.fromkeys(asked for each in all_needs for asked in each.blocks)),
        unrotated=any(each.unrotated for each in all_needs),
        hidden=any(each.hidden for each in all_needs),
    )
    tokens, length = place(prompt.padded(slots), "B S", axes), place(prompt.lengths, "B", axes)
    for index, out in enumerate(read_layers(flat, tokens, length, needs=needs) if choices else ()):
        for each in choices if flat.config.windows[index] is None else ():
            each.look(index, out)
        del out
    masks = twice | {policy: each.masks() for policy, each in zip(once, choices, strict=True)}
    return {policy: masks[policy][..., :count] for policy in policies}


def _reads_twice(policy: Method) -> bool:
    """True if the policy's prefill reads prompts a second time for its scores (as KVzip's does)."""
    return policy.parts().needs.replay is not None


def _after_prefill(
    params: LanguageModel, prompt: Encoded, policy: Method, key: PRNGKeyArray
) -> Bool[np.ndarray, "L K n"]:
    """Mask `bool[L, K, n]` of the first prompt's rows that a policy's own prefill keeps in layers without a window."""
    cache = Session(params, policy, key=key).prefill(prompt)
    return cache.holds(0, int(prompt.lengths[0]))[cache.compressed_layers]


class _Choices:
    """Collects one policy's masks of kept rows: layer by layer, or at the end if layer budgets depend on scores."""

    def __init__(self, flat: Flat, policy: Method, prompt: Encoded, slots: int, key: PRNGKeyArray):
        # As of a model of the layers without a window.
        windows = flat.config.windows
        self.flat, self.parts, self.windows = (
            flat,
            policy.parts().among(windows),
            (None,) * windows.count(None),
        )
        self.lengths, self.key = prompt.lengths.astype(np.int64), key
        self.told = by_length(self.parts, self.lengths, self.windows)
        self.length = place(prompt.lengths, "B", flat.axes)
        self.forced = place(self.parts.keep.mask(self.lengths, slots), "B S", flat.axes)
        self.whole = of_prompt(None, self.forced, self.length)
        self.waiting, self.chosen = list[Candidates](), list[np.ndarray]()
        self.below: Array | None = None

    def look(self, index: int, out: LayerOut) -> None:
        """Scores one layer's rows; stores its mask of kept rows, or its scores if budgets depend on all layers."""
        parts, scorer = self.parts, self.parts.scorer
        if scorer is None:
            self.chosen.append(np.broadcast_to(host(self.whole.inside)[0], out.k.shape[1:3]))
            return
        seen = observed(self.flat, out, scorer, self.length, index, self.key, Implementation.XLA)
        scores, _, claim = observe(
            seen, self.forced, scorer=scorer, layers=parts.layers, axes=self.flat.axes
        )
        first = ranked_first(seen, scorer=scorer, axes=self.flat.axes)
        norms = out.norms if parts.heads.needs_norms else None
        self.waiting.append(
            dataclasses.replace(self.whole, scores=scores, norms=norms, claim=claim, first=first)
        )
        if not parts.layers.from_scores:
            rows, recent = self._tables()
            at = len(self.chosen)
            self._choose([self.waiting], rows[at : at + 1], recent[at : at + 1])

    def masks(self) -> Bool[np.ndarray, "L K n"]:
        """Masks `bool[L, K, n]` of all layers' kept rows, after the last `look`; chosen here if budgets use scores."""
        if self.waiting and self.parts.layers.joint:
            rows, recent = self._tables()
            self._choose([self.waiting], rows[:1], recent[:1])
        elif self.waiting:
            claims = np.stack([host(layer.claim) for layer in self.waiting])
            told = self.told
            rows, recent = rows_by_claims(
                self.parts, told.budget, self.lengths, told.forced, claims, self.windows
            )
            self._choose([[layer] for layer in self.waiting], rows, recent)
        return np.stack(self.chosen)

    def _tables(self) -> tuple[Table, Table]:
        """Two int tables `[L, B]` by layer and sequence: rows to keep, and how many of them are the most recent."""
        assert self.told.rows is not None and self.told.recent is not None
        return self.told.rows, self.told.recent

    def _choose(self, groups: Sequence[Sequence[Candidates]], rows: Table, recent: Table) -> None:
        """Selects the kept rows of each group of layers with a shared budget, appends their masks, drops the scores."""
        axes = self.flat.axes
        for layers, wanted, last in zip(groups, rows, recent, strict=True):
            some, newest = (place(each, "B", axes, jnp.int32) for each in (wanted, last))
            heads, index = self.parts.heads, len(self.chosen)
            masks = choose(
                layers, some, newest, self.below, heads=heads, axes=axes, index=index
            ).masks
            self.below = masks[-1][:, 0] if self.parts.nested else None
            self.chosen += [host(mask)[0] for mask in masks]
        self.waiting = []
