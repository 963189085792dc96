"""Caches on disk: compressed once, asked by any process later."""

import dataclasses
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxkv._errors import require
from jaxkv._settings import settled
from jaxkv.arguments import as_model, require_ours
from jaxkv.cache import KVCache
from jaxkv.cache.bank import committed, host_of
from jaxkv.cache.encoding import UnknownClass, decode, encode
from jaxkv.checkpoints.orbax_files import ARRAYS, CACHE, described, read_array, read_manifest, require_whole
from jaxkv.loading import LanguageModel
from jaxkv.policies.policy import Method
from jaxkv.resharding import moved, reshard


@settled
def load_cache(
    path: str | os.PathLike[str],
    params: LanguageModel | None = None,
    *,
    policy: Method | None = None,
    mesh: Mesh | None = None,
) -> KVCache:
    """Loads a cache that `KVCache.save` has written, bit by bit as it was.

    Args:
        path: the folder.
        params: the model that is to go on from it, to have the cache of another refused here and not when it is used.
        policy: who compressed it, where its class is one that this process cannot find by name.
        mesh: devices with the axes "data" and "model" that it is to lie on; by default where `params` does, or the
            default device.

    Returns:
        The cache, its bank in host memory.

    Raises:
        TypeError: for a policy, a model or a mesh that is none.
        ValueError: for what is no saved cache, one that is half-written, damaged, of another version of the format or
            made by another model or policy, and for a policy whose class is not in this process; for a mesh that does
            not divide the model.
    """
    folder = Path(path).expanduser()
    require_whole(folder)
    manifest = read_manifest(folder, CACHE)
    entries = described(folder, manifest.get("arrays"))
    device = next(iter(jnp.zeros(()).devices()))

    def array(name: str) -> Any:
        require(name in entries, "array", name, f"the manifest in {folder} says nothing of it: save the cache anew")
        read = read_array(folder / ARRAYS, entries[name])
        # What is to be split over devices need not fit on one of them.
        waits = name.startswith("bank.") or elsewhere
        return jax.device_put(read, host_of(device)) if waits else jnp.asarray(read)

    model = None if params is None else as_model(params)
    elsewhere = mesh is not None or (model is not None and model.axes is not None)
    made_by = _policy(manifest.get("policy"), policy)
    cache = decode(manifest.get("cache"), array)
    require(isinstance(cache, KVCache), "cache", type(cache).__name__, f"{folder} holds no cache: save it anew")
    cache = dataclasses.replace(cache, policy=made_by)
    if mesh is not None:
        cache = reshard(cache, mesh)
    elif model is not None and model.axes is not None:
        cache = moved(cache, model.axes)
    elif cache.bank is not None:
        cache = dataclasses.replace(committed(dataclasses.replace(cache, bank=None)), bank=cache.bank)
    if model is not None:
        require_ours(model, cache, None)
    return cache


def _policy(said: Any, given: Any) -> Method:
    if given is not None:
        if not isinstance(given, Method):
            raise TypeError(
                f"policy={type(given).__name__}: give the policy that compressed the cache, or leave it out"
            )
        remedy = "another one compressed the cache: leave it out, or give that one"
        require(encode(given, None, "policy") == said, "policy", given, remedy)
        return given
    try:
        policy = decode(said, lambda name: None)
    except UnknownClass as error:
        raise ValueError(f"{error}, or give the policy that compressed the cache: policy=...") from error
    require(isinstance(policy, Method), "policy", said, "no policy: save the cache anew")
    return policy
