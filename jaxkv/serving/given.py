"""Validates the request's own values in an engine: random key, smaller budget, deadline."""

import time
from typing import Any

import jax
import numpy as np
from jaxtyping import PRNGKeyArray

from jaxkv import _checks
from jaxkv._errors import require
from jaxkv.arguments import validate_random_key
from jaxkv.policies.checks import EntryBudget, parse_budget
from jaxkv.policies.policy import Policy
from jaxkv.policies.wrapper import replace_policy_budget
from jaxkv.serving.document_store import Document

_SECONDS = "use seconds from now"


def resolve_random_key(given: Any, like: PRNGKeyArray) -> PRNGKeyArray | None:
    """Return a copy of a random key, or a seed's key; None for None; ValueError unless it has `like`'s dtype."""
    key = validate_random_key(given)
    if key is None:
        return None
    require(
        key.dtype == like.dtype,
        "key",
        key.dtype,
        "wrong kind: use jax.random.key(0), or a seed such as 0",
    )
    # The caller may delete the key, and it may be on another device.
    return jax.random.wrap_key_data(jax.device_put(np.asarray(jax.random.key_data(key))))


def supports_request_budget(policy: Policy) -> bool:
    """Return True if requests may have smaller budgets: the policy has one and never recompresses."""
    return (
        policy.build_policy_parts().budget is not None
        and policy.build_policy_parts().recompression_interval is None
    )


def compute_deadline(given: Any) -> float | None:
    """Return the value of `time.monotonic` in `given` seconds from now; None for None."""
    return (
        None
        if given is None
        else time.monotonic() + _checks.validate_float("deadline", given, _SECONDS, open_low=True)
    )


def apply_request_budget(given: Any, policy: Policy, document: Document | None) -> Policy:
    """Return `policy` with a request's budget `given`, if not None; ValueError if not supported or too high."""
    if given is None:
        return policy
    require(document is None, "budget", given, "the document is compressed already: leave it out")
    most = policy.build_policy_parts().budget
    require(
        supports_request_budget(policy),
        "budget",
        given,
        f"{type(policy).__name__} supports no budget per request: leave it out",
    )
    budget = parse_budget(given)
    assert most is not None and budget is not None
    kind = "entries per kv head" if isinstance(most, EntryBudget) else "a share of the prompt"
    fits = type(budget) is type(most) and budget.value <= most.value
    require(
        fits, "budget", budget, f"this engine's slots hold {most}: use {kind}, no more than that"
    )
    return replace_policy_budget(policy, budget.field_value)
