"""Validates the request's own values in an engine: random key, smaller budget, deadline."""

import time
from typing import Any

import jax
import numpy as np
from jaxtyping import PRNGKeyArray

from jaxkv import _checks
from jaxkv._errors import require
from jaxkv.arguments import as_key
from jaxkv.policies.checks import Tokens, as_budget
from jaxkv.policies.policy import Policy
from jaxkv.policies.wrapper import with_budget
from jaxkv.serving.document_store import Document

_SECONDS = "use seconds from now"


def own_key(given: Any, like: PRNGKeyArray) -> PRNGKeyArray | None:
    """Copy a random key, or make the key of a seed; None for None; ValueError for another kind than `like`."""
    key = as_key(given)
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


def takes_own_budget(policy: Policy) -> bool:
    """True if requests under a policy may have a smaller budget of their own."""
    return policy.parts().budget is not None and policy.parts().every is None


def own_deadline(given: Any) -> float | None:
    """Return the time on the clock `time.monotonic` in `given` seconds; None for None."""
    return (
        None
        if given is None
        else time.monotonic() + _checks.real("deadline", given, _SECONDS, open_low=True)
    )


def own_policy(given: Any, policy: Policy, document: Document | None) -> Policy | None:
    """Return the policy with a request's budget; None for None. ValueError for a budget above it, or an invalid one."""
    if given is None:
        return None
    require(document is None, "budget", given, "the document is compressed already: leave it out")
    most = policy.parts().budget
    require(
        takes_own_budget(policy),
        "budget",
        given,
        f"{type(policy).__name__} supports no budget per request: leave it out",
    )
    budget = as_budget(given)
    assert most is not None and budget is not None
    kind = "entries per kv head" if isinstance(most, Tokens) else "a share of the prompt"
    fits = type(budget) is type(most) and budget.value <= most.value
    require(
        fits, "budget", budget, f"this engine's slots hold {most}: use {kind}, no more than that"
    )
    return with_budget(policy, budget.given)
