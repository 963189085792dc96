"""Fits a policy to a model: fields that depend on its layers, and budgets in bytes as entries of the model's sizes."""

from typing import Any

import jax.numpy as jnp

from jaxkv._checks import ENDLESS
from jaxkv._errors import build_value_error, require
from jaxkv.cache.named_stores import get_latent_store
from jaxkv.models.config import ModelConfig
from jaxkv.policies.checks import ByteBudget
from jaxkv.policies.policy import Policy
from jaxkv.policies.registry import resolve_policy
from jaxkv.policies.wrapper import replace_policy_budget, replace_policy_store


def resolve_policy_for_model(
    given: Any,
    config: ModelConfig,
    filters: tuple[int, ...] | None = None,
    *,
    dtype: Any,
    field: str = "policy",
) -> Policy:
    """Return a policy (or one of a name or class) fitted to a model: filter layers, bytes as entries; else ValueError.

    Args:
        given: the policy.
        config: the model's sizes.
        filters: the model's filter layers, if known.
        dtype: the model's dtype of keys and values.
        field: the argument's name, for error messages.

    Returns:
        The policy, its budget in entries, a share, or None.

    Raises:
        ValueError: if the model does not support the policy.
        TypeError: for anything but a policy.
    """
    policy = resolve_policy(given, field=field).fill_model_fields(config, filters)
    policy = fit_store(policy, config)
    policy.composed.require_fits_model(config)
    return _convert_byte_budget(policy, config, dtype)


def fit_store(policy: Policy, config: ModelConfig) -> Policy:
    """Return the policy, with a store of latents if the model has latents.

    Args:
        policy: the policy.
        config: the model's sizes.

    Returns:
        The policy; a copy if its store changes.

    Raises:
        ValueError: for a store that cannot hold the model's entries, or a policy that does not pass its store on.
    """
    given = policy.composed.store
    if config.latent is None:
        remedy = "it drops values, and the model has them: leave it out"
        require(not given.values_are_keys, "store", given.__name__, remedy)
        return policy
    remedy = "host memory and chunked prefill are not supported for latents: leave them out"
    require(not policy.composed.read.needs_whole_prompts, "policy", policy, remedy)
    store = get_latent_store(given)
    if store is given:
        return policy
    fitted = replace_policy_store(policy, store)
    remedy = f"the model needs {store.__name__}: build the parts with this policy's store"
    require(fitted.composed.store is store, "store", fitted.composed.store.__name__, remedy)
    return fitted


def _convert_byte_budget(policy: Policy, config: ModelConfig, dtype: Any) -> Policy:
    """Return the policy, a byte budget (less windows, states, residual) as entries per head; ValueError if below 1."""
    parts = policy.composed
    budget = parts.budget
    if not isinstance(budget, ByteBudget):
        return policy
    # Bytes of one entry in every kv head and layer; layers also hold sliding windows, states and residuals.
    item = jnp.dtype(dtype).itemsize
    sizes = [config.kv_heads * parts.compute_entry_bytes(dim, item) for dim in config.entry_dims]
    widths = config.sliding_windows
    each = sum(row for row, width in zip(sizes, widths, strict=True) if width is None)
    sliding_windows = sum(row * (width or 0) for row, width in zip(sizes, widths, strict=True))
    fixed = sliding_windows + config.state_bytes + parts.compute_residual_bytes(config, item)
    beside = f" besides {fixed:,} bytes of sliding windows, states and residuals" if fixed else ""
    rows = (budget.value - fixed) // each
    require(
        rows >= 1,
        "budget",
        budget,
        f"an entry of every kv head and layer takes {each:,} bytes{beside}: give more",
    )
    try:
        return replace_policy_budget(policy, min(rows, ENDLESS))
    except ValueError as error:
        # The policy's own least entries, for its sinks and window.
        raise build_value_error(
            "budget", budget, f"of {each:,} bytes an entry in all kv heads and layers, {error}"
        ) from None
