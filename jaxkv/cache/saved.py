"""Caches on disk: `load_cache` reads what `KVCache.save` wrote, in any process."""

import contextlib
import dataclasses
import os
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from jaxkv._checks import settled
from jaxkv._errors import require
from jaxkv.arguments import as_model, on_device, require_ours
from jaxkv.cache import KVCache
from jaxkv.cache.disk import read_cache
from jaxkv.cache.encoding import UnknownClass, decode, encode
from jaxkv.checkpoints.orbax_files import CACHE, read_manifest
from jaxkv.loading import LanguageModel
from jaxkv.machine import hosts
from jaxkv.policies.checks import Bytes
from jaxkv.policies.policy import Policy
from jaxkv.policies.registry import as_policy
from jaxkv.sharding.resharding import cache_on, reshard


@settled
def load_cache(
    path: str | os.PathLike[str],
    params: LanguageModel | None = None,
    *,
    policy: Policy | type[Policy] | str | None = None,
    mesh: Mesh | None = None,
) -> KVCache:
    """Loads a `KVCache` that `KVCache.save` wrote; ValueError if damaged, or another model's or policy's.

    Args:
        path: the folder.
        params: the model that the cache will be used with; the cache of another model is then rejected here.
        policy: the policy that compressed the cache, as given to `prefill`; needed if its class cannot be found in this
            process by name.
        mesh: devices with the axes "data" and "model" to put the cache on; by default the model's devices, or the
            default device.

    Returns:
        The cache; entries that wait in host memory are there.

    Raises:
        TypeError: for a policy, class, model or mesh of the wrong kind.
        ValueError: for a folder without a saved cache; a cache that is half-written, damaged, of another version of the
            format or made by another model or policy; a policy whose class is not in this process; and a mesh that does
            not divide the model.
    """
    given = None if policy is None else as_policy(policy)
    model = None if params is None else as_model(params, mesh)
    there = mesh if mesh is not None or model is None or model.axes is None else model.axes.mesh
    with hosts.together("jaxkv.load_cache", there):
        # A cache that is to be sharded need not fit on one device.
        cache = _read(Path(os.path.expanduser(path)), given, on_host=there is not None)
    if mesh is not None:
        cache = reshard(cache, mesh)
    elif model is not None and model.axes is not None:
        cache = cache_on(cache, model.axes)
    else:
        cache = on_device(cache).held_here()
    if model is not None:
        require_ours(model, cache, None)
    return cache


def _read(folder: Path, given: Policy | None, *, on_host: bool) -> KVCache:
    """Reads the cache and its policy from a folder, onto the default device or, with `on_host`, into host memory."""
    manifest = read_manifest(folder, CACHE)
    said = manifest.get("policy")
    made_by = _decoded(said) if given is None else given
    cache = read_cache(folder, manifest, on_host=on_host)
    require(
        isinstance(cache, KVCache),
        "cache",
        type(cache).__name__,
        f"{folder} holds no cache: {CACHE.again}",
    )
    if given is not None:
        made_by = _agreed(given, said, cache.config.layers)
    return dataclasses.replace(cache, policy=made_by)


def _decoded(said: Any) -> Policy:
    """Policy decoded from its description in a cache's manifest; ValueError if its class is unknown."""
    try:
        policy = decode(said, lambda name: None)
    except UnknownClass as error:
        raise ValueError(
            f"{error}, or give the policy that compressed the cache: policy=..."
        ) from error
    require(isinstance(policy, Policy), "policy", said, f"no policy: {CACHE.again}")
    return policy


def _agreed(given: Policy, said: Any, layers: int) -> Policy:
    """The user's policy, bound to the model; ValueError if the manifest describes another one."""
    fields = said.get("fields") if isinstance(said, dict) else None
    # The manifest has the model's filter layers where the policy names none.
    filters = fields.get("filter_layers") if isinstance(fields, dict) else None
    with contextlib.suppress(
        ValueError
    ):  # a policy that no model of so many layers takes is another one
        given = given.for_model(layers, tuple(filters) if isinstance(filters, list) else None)
    budget, remedy = (
        given.composed.budget,
        "a saved cache says how many entries they were: leave the policy out",
    )
    require(not isinstance(budget, Bytes), "policy.budget", budget, remedy)
    remedy = "another one compressed the cache: leave it out, or give that one"
    require(encode(given, None, "policy") == said, "policy", given, remedy)
    return given
