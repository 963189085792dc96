"""Caches on disk: `load_cache` loads what `KVCache.save` wrote, in any process."""

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
    """Load a `KVCache` from a folder that `KVCache.save` wrote.

    Args:
        path: the folder.
        params: the model to use the cache with; the cache of another model is rejected.
        policy: the policy that compressed the cache, as passed to `prefill`; required if its class is not imported in
            this process.
        mesh: mesh with the axes "data" and "model" to place the cache on; by default the model's devices, or the
            default device.

    Returns:
        The cache; offloaded entries are in host memory.

    Raises:
        TypeError: for a policy, class, model or mesh of the wrong type.
        ValueError: for a folder without a saved cache; a cache that is incomplete, damaged, of another format version,
            or of another model or policy; a policy whose class is not imported in this process; or a mesh that does not
            divide the model.
    """
    given = None if policy is None else as_policy(policy)
    model = None if params is None else as_model(params, mesh)
    target = mesh if mesh is not None or model is None or model.axes is None else model.axes.mesh
    with hosts.together("jaxkv.load_cache", target):
        # A cache that is to be sharded need not fit on one device, so it is read to the host.
        cache = _read(Path(os.path.expanduser(path)), given, on_host=target is not None)
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
    """Read the cache and its policy from a folder, onto the default device or, with `on_host`, into host memory."""
    manifest = read_manifest(folder, CACHE)
    encoded = manifest.get("policy")
    made_by = _decoded(encoded) if given is None else given
    cache = read_cache(folder, manifest, on_host=on_host)
    require(
        isinstance(cache, KVCache),
        "cache",
        type(cache).__name__,
        f"{folder} contains no cache: {CACHE.again}",
    )
    if given is not None:
        made_by = _agreed(given, encoded, cache.config.layers)
    return dataclasses.replace(cache, policy=made_by)


def _decoded(encoded: Any) -> Policy:
    """Decode the policy from a cache's manifest; ValueError if its class is unknown."""
    try:
        policy = decode(encoded, lambda name: None)
    except UnknownClass as error:
        raise ValueError(
            f"{error}, or pass the policy that compressed the cache: policy=..."
        ) from error
    require(isinstance(policy, Policy), "policy", encoded, f"no policy: {CACHE.again}")
    return policy


def _agreed(given: Policy, encoded: Any, layers: int) -> Policy:
    """Return the user's policy, bound to the model; ValueError if the manifest describes another one."""
    fields = encoded.get("fields") if isinstance(encoded, dict) else None
    # The manifest has the model's filter layers if the policy names none.
    filters = fields.get("filter_layers") if isinstance(fields, dict) else None
    with contextlib.suppress(
        ValueError
    ):  # A policy that rejects this number of layers is another one.
        given = given.for_model(layers, tuple(filters) if isinstance(filters, list) else None)
    budget, remedy = (
        given.composed.budget,
        "a saved cache has its number of entries: omit the policy",
    )
    require(not isinstance(budget, Bytes), "policy.budget", budget, remedy)
    remedy = "another policy compressed the cache: omit it, or pass that one"
    require(encode(given, None, "policy") == encoded, "policy", given, remedy)
    return given
