"""Fits a policy to a model: fields that depend on its layers, and a budget in bytes as entries of the model's sizes."""

from typing import Any

import jax.numpy as jnp

from jaxkv._checks import ENDLESS
from jaxkv._errors import invalid, require
from jaxkv.models.config import ModelConfig
from jaxkv.policies.checks import Bytes
from jaxkv.policies.policy import Policy
from jaxkv.policies.registry import as_policy
from jaxkv.policies.wrapper import with_budget


def policy_for(
    given: Any,
    config: ModelConfig,
    filters: tuple[int, ...] | None = None,
    *,
    dtype: Any,
    field: str = "policy",
) -> Policy:
    """Returns a policy instance from one, a name, class or None, fitted to a model; ValueError if the model cannot.

    Args:
        given: the policy.
        config: the model's sizes.
        filters: the model's filter layers, if they have been found.
        dtype: of the model, in which it computes keys and values.
        field: what rejections call the policy.

    Returns:
        The policy, its budget in entries, a share, or None.

    Raises:
        ValueError: if the model cannot honour it.
        TypeError: for no policy.
    """
    policy = as_policy(given, field=field).for_model(config.layers, filters)
    policy.composed.require_fits(config)
    return _in_rows(policy, config, dtype)


def _in_rows(policy: Policy, config: ModelConfig, dtype: Any) -> Policy:
    """The policy with a budget in bytes as entries per kv head; itself for other budgets; ValueError for too few bytes."""
    parts = policy.composed
    budget = parts.budget
    if not isinstance(budget, Bytes):
        return policy
    # Of every kv head and layer one: what a budget of one entry more takes. Sliding-window layers hold their windows beside it.
    row = config.kv_heads * parts.row_bytes(config.head_dim, jnp.dtype(dtype).itemsize)
    each, sliding_windows = (
        config.sliding_windows.count(None) * row,
        sum(width or 0 for width in config.sliding_windows) * row,
    )
    beside = f" beside {sliding_windows:,} bytes of layers with windows" if sliding_windows else ""
    rows = (budget.value - sliding_windows) // each
    require(
        rows >= 1,
        "budget",
        budget,
        f"an entry of every kv head and layer takes {each:,} bytes{beside}: give more",
    )
    try:
        return with_budget(policy, min(rows, ENDLESS))
    except ValueError as error:
        # A policy's own least entries, of its sinks and window.
        raise invalid(
            "budget", budget, f"of {each:,} bytes an entry in all kv heads and layers, {error}"
        ) from None
