"""Caches on disk: compressed once, asked by any process later."""

import contextlib
import dataclasses
import os
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from jaxkv import hosts
from jaxkv._errors import require
from jaxkv._settings import settled
from jaxkv.arguments import as_model, on_device, require_ours
from jaxkv.cache import KVCache
from jaxkv.cache.disk import encoded_policy, manifest_of, read_cache
from jaxkv.cache.encoding import UnknownClass, decode, encode
from jaxkv.checkpoints.orbax_files import CACHE
from jaxkv.loading import LanguageModel
from jaxkv.policies.policy import Method
from jaxkv.policies.registry import as_policy
from jaxkv.resharding import moved, reshard


@settled
def load_cache(
    path: str | os.PathLike[str],
    params: LanguageModel | None = None,
    *,
    policy: Method | type[Method] | str | None = None,
    mesh: Mesh | None = None,
) -> KVCache:
    """Loads a cache that `KVCache.save` has written, bit by bit as it was.

    Args:
        path: the folder.
        params: the model that is to go on from it, to have the cache of another refused here and not when it is used.
        policy: who compressed it, as `prefill` was given it, where its class is one that this process cannot find by
            name.
        mesh: devices with the axes "data" and "model" that it is to lie on, and `params` too; by default where those
            do, or the default device.

    Returns:
        The cache, its bank in host memory.

    Raises:
        TypeError: for a policy, a class, a model or a mesh that is none.
        ValueError: for what is no saved cache, one that is half-written, damaged, of another version of the format or
            made by another model or policy, and for a policy whose class is not in this process; for a mesh that does
            not divide the model.
    """
    given = None if policy is None else as_policy(policy)
    model = None if params is None else as_model(params, mesh)
    there = mesh if mesh is not None or model is None or model.axes is None else model.axes.mesh
    with hosts.together("jaxkv.load_cache", there):
        # What is to be split over devices need not fit on one of them.
        cache = _read(Path(path).expanduser(), given, on_host=there is not None)
    if mesh is not None:
        cache = reshard(cache, mesh)
    elif model is not None and model.axes is not None:
        cache = moved(cache, model.axes)
    else:
        cache = on_device(cache)
    if model is not None:
        require_ours(model, cache, None)
    return cache


def _read(folder: Path, given: Method | None, *, on_host: bool) -> KVCache:
    """The cache in a folder, on the default device or in its host memory, with the policy that compressed it."""
    manifest = manifest_of(folder)
    said = encoded_policy(manifest)
    made_by = _decoded(said) if given is None else given
    cache = read_cache(folder, manifest, on_host=on_host)
    require(isinstance(cache, KVCache), "cache", type(cache).__name__, f"{folder} holds no cache: {CACHE.again}")
    if given is not None:
        made_by = _agreed(given, said, cache.config.layers)
    return dataclasses.replace(cache, policy=made_by)


def _decoded(said: Any) -> Method:
    try:
        policy = decode(said, lambda name: None)
    except UnknownClass as error:
        raise ValueError(f"{error}, or give the policy that compressed the cache: policy=...") from error
    require(isinstance(policy, Method), "policy", said, f"no policy: {CACHE.again}")
    return policy


def _agreed(given: Method, said: Any, layers: int) -> Method:
    """The policy that somebody gives, if it is the one that compressed the cache."""
    fields = said.get("fields") if isinstance(said, dict) else None
    # Those of the model then, where the policy itself names none.
    filters = fields.get("filter_layers") if isinstance(fields, dict) else None
    with contextlib.suppress(ValueError):  # one that no model of so many layers takes is another one
        given = given.for_model(layers, tuple(filters) if isinstance(filters, list) else None)
    remedy = "another one compressed the cache: leave it out, or give that one"
    require(encode(given, None, "policy") == said, "policy", given, remedy)
    return given
