"""`budgets`: number of entries that policies keep in each layer and kv head, and the masks of these entries."""

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
from jaxtyping import Array, Bool, Int

from jaxkv import _checks
from jaxkv._checks import settled
from jaxkv._errors import require
from jaxkv.analysis.reading import encoded, whole_layers_of
from jaxkv.arguments import as_model
from jaxkv.engine.lengths import bucket
from jaxkv.engine.session import Session
from jaxkv.loading import LanguageModel
from jaxkv.policies.policy import Method
from jaxkv.policies.registry import as_policy
from jaxkv.policies.wrapper import with_budget
from jaxkv.sharding.mesh import place
from jaxkv.text.prompts import Encoded, Prompt

Budget = int | float
Policies = Sequence[Method | type[Method] | str]


@settled
def budgets(
    params: LanguageModel,
    texts: Sequence[Prompt],
    *,
    policies: Policies,
    budgets: Sequence[Budget],
    following: int = 0,
    key: int | Array | None = 0,
) -> Int[np.ndarray, "P N T L K"]:
    """Counts the rows that policies keep of texts.

    Args:
        params: from `jaxkv.load`.
        texts: T long texts, or their ids.
        policies: P names, classes or values; their own budgets are replaced.
        budgets: N numbers of rows per kv head and layer on average, or shares of a text.
        following: number of last tokens of each text that policies do not see.
        key: random key or seed, for policies that draw.

    Returns:
        Rows kept by policy, budget, text, layer and kv head. L counts the layers without a window.

    Raises:
        ValueError: for texts that are empty or too long for the model, and budgets that cannot be honoured.
    """
    params = as_model(params)
    following = _checks.whole("following", following, least=0)
    cells = at_budgets(policies, budgets)
    kept = kept_rows(params, encoded(params, texts, following), cells, following, key)
    return by_policy([each.sum(axis=-1) for _, each in kept], len(cells[0]))


def at_budgets(policies: Policies, budgets: Sequence[Budget]) -> list[list[Method]]:
    """Each policy at each budget; ValueError for policies that choose the rows to read for each token."""
    remedy = "give a list of one or more rows or shares"
    sizes = _checks.several("budgets", budgets, remedy)
    listed = _checks.several("policies", policies, "give a list of one or more policies")
    given = [as_policy(each) for each in listed]
    for policy in given:
        remedy = "it drops no rows: use `jaxkv eval visible`, or leave it out"
        require(policy.parts().read.everything, "policies", policy, remedy)
    return [[with_budget(policy, budget) for budget in sizes] for policy in given]


def kept_rows(
    params: LanguageModel,
    texts: Sequence[Encoded],
    cells: Sequence[Sequence[Method]],
    following: int,
    key: int | Array | None,
) -> Iterator[tuple[Encoded, Bool[np.ndarray, "C L K n"]]]:
    """Yields each text, and masks of the prompt rows that caches of all C policies hold behind its prefill.

    The prompt is the text without its `following` last tokens. Layers with a window are left out.
    """
    whole = list(whole_layers_of(params))
    sessions = [Session(params, policy, key=key) for row in cells for policy in row]
    for text in texts:
        count = len(text.ids[0]) - following
        prompt = dataclasses.replace(text, ids=[ids[:count] for ids in text.ids])
        masks = [session.prefill(prompt).holds(0, count)[whole] for session in sessions]
        yield text, np.stack(masks)


def placed(
    params: LanguageModel, rows: Bool[np.ndarray, "C K n"], text: Encoded
) -> Bool[Array, "B K S C"]:
    """One layer's masks of kept rows, padded to the text's slots, on the model's mesh."""
    count, heads, prompt = rows.shape
    out = np.zeros((len(text.ids), heads, bucket(len(text.ids[0])), count), bool)
    out[:, :, :prompt] = np.moveaxis(rows, 0, -1)
    return place(out, "B K S n", params.axes)


def by_policy(found: Sequence[np.ndarray], budgets: int) -> np.ndarray:
    """Arrays `[C, ...]` of T texts as one `[P, N, T, ...]`: policy, budget and text first."""
    stacked = np.stack(found, axis=1)
    return stacked.reshape(-1, budgets, *stacked.shape[1:])
