"""Caches on disk: `load_cache` loads what `KVCache.save` wrote, in any process."""

import contextlib
import dataclasses
import os
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from jaxkv._checks import settled
from jaxkv._errors import require
from jaxkv.arguments import move_cache_to_device, require_matching_cache, validate_model
from jaxkv.cache import KVCache
from jaxkv.cache.disk import read_cache_folder
from jaxkv.cache.encoding import UnknownClassError, decode_from_json, encode_as_json
from jaxkv.checkpoints.orbax_files import CACHE, read_manifest
from jaxkv.loading import LanguageModel
from jaxkv.machine import hosts
from jaxkv.models.config import ModelConfig
from jaxkv.policies.checks import ByteBudget
from jaxkv.policies.model_policy import fit_store
from jaxkv.policies.policy import Policy
from jaxkv.policies.registry import resolve_policy
from jaxkv.sharding.resharding import move_cache_to_mesh, reshard


@settled
def load_cache(
    path: str | os.PathLike[str],
    params: LanguageModel | None = None,
    *,
    policy: Policy | type[Policy] | str | None = None,
    mesh: Mesh | None = None,
) -> KVCache:
    """Load a `KVCache` onto devices from a folder that `KVCache.save` wrote; ValueError if of another model or policy.

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
    given = None if policy is None else resolve_policy(policy)
    model = None if params is None else validate_model(params, mesh)
    target = mesh if mesh is not None or model is None or model.axes is None else model.axes.mesh
    with hosts.share_failures("jaxkv.load_cache", target):
        # A cache that is to be sharded need not fit on one device, so it is read to the host.
        cache = _read_cache_and_policy(
            Path(os.path.expanduser(path)), given, on_host=target is not None
        )
    if mesh is not None:
        cache = reshard(cache, mesh)
    elif model is not None and model.axes is not None:
        cache = move_cache_to_mesh(cache, model.axes)
    else:
        cache = move_cache_to_device(cache).cast_for_devices()
    if model is not None:
        require_matching_cache(model, cache, None)
    return cache


def _read_cache_and_policy(folder: Path, given: Policy | None, *, on_host: bool) -> KVCache:
    """Read a `KVCache` and its policy from a folder, to the device or host; ValueError if policy `given` differs."""
    manifest = read_manifest(folder, CACHE)
    encoded = manifest.get("policy")
    made_by = _decode_policy(encoded) if given is None else given
    cache = read_cache_folder(folder, manifest, on_host=on_host)
    require(
        isinstance(cache, KVCache),
        "cache",
        type(cache).__name__,
        f"{folder} contains no cache: {CACHE.again}",
    )
    if given is not None:
        made_by = _require_same_policy(given, encoded, cache.config)
    return dataclasses.replace(cache, policy=made_by)


def _decode_policy(encoded: Any) -> Policy:
    """Return the policy encoded in a cache's manifest; ValueError if its class is unknown or it is no policy."""
    try:
        policy = decode_from_json(encoded, lambda name: None)
    except UnknownClassError as error:
        raise ValueError(
            f"{error}, or pass the policy that compressed the cache: policy=..."
        ) from error
    require(isinstance(policy, Policy), "policy", encoded, f"no policy: {CACHE.again}")
    return policy


def _require_same_policy(given: Policy, encoded: Any, config: ModelConfig) -> Policy:
    """Return policy `given`, the saved filter layers filled in; ValueError for a byte budget or if not as saved."""
    fields = encoded.get("fields") if isinstance(encoded, dict) else None
    # The manifest has the model's filter layers if the policy names none.
    filters = fields.get("filter_layers") if isinstance(fields, dict) else None
    # A policy that rejects this model is another one.
    with contextlib.suppress(ValueError):
        given = given.fill_model_fields(
            config, tuple(filters) if isinstance(filters, list) else None
        )
        given = fit_store(given, config)
    budget = given.composed.budget
    remedy = "a saved cache has its number of entries: omit the policy"
    require(not isinstance(budget, ByteBudget), "policy.budget", budget, remedy)
    remedy = "another policy compressed the cache: omit it, or pass that one"
    require(encode_as_json(given, None, "policy") == encoded, "policy", given, remedy)
    return given
