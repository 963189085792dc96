"""A saved cache's folder, a manifest and arrays: what writes it and what reads it. `encoding` says what values are."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxkv import hosts
from jaxkv._errors import require
from jaxkv.cache.bank import host_of
from jaxkv.cache.encoding import decode, encode
from jaxkv.checkpoints.orbax_files import (
    ARRAYS,
    CACHE,
    described,
    read_array,
    read_manifest,
    require_whole,
    write_folder,
)

# What the manifest calls its two values.
_POLICY, _CACHE = "policy", "cache"


def write_cache(folder: Path, policy: Any, cache: Any, mesh: Mesh | None) -> None:
    """Writes a cache's folder, whole or not at all; of several processes on one mesh the first one writes.

    Args:
        folder: where; nothing may be there.
        policy: what compressed the cache.
        cache: the cache without its policy, as a single device holds it.
        mesh: the mesh that it lies on, if any.

    Raises:
        ValueError: where something lies in `folder`, nothing can be written there, or a value holds what no text says.
    """
    arrays: dict[str, np.ndarray] = {}
    manifest = {_POLICY: encode(policy, None, _POLICY), _CACHE: encode(cache, arrays)}
    with hosts.together("KVCache.save", mesh):
        if hosts.speaks() or not hosts.spans(mesh):
            write_folder(folder, CACHE, manifest, arrays)


def manifest_of(folder: Path) -> dict[str, Any]:
    """The manifest of a saved cache's folder; ValueError for a folder that is half-written or holds something else."""
    require_whole(folder, CACHE)
    return read_manifest(folder, CACHE)


def encoded_policy(manifest: Mapping[str, Any]) -> Any:
    """What `encode` said of the policy that compressed the cache."""
    return manifest.get(_POLICY)


def read_cache(folder: Path, manifest: Mapping[str, Any], *, on_host: bool) -> Any:
    """The value that was saved as a cache, without its policy.

    Args:
        folder: the folder.
        manifest: from `manifest_of`.
        on_host: True puts all arrays into host memory, False only the bank's; others go to the default device.

    Raises:
        ValueError: for arrays that are missing or damaged, and for what `decode` refuses.
    """
    entries = described(folder, manifest.get(CACHE.listed), CACHE)
    device = next(iter(jnp.zeros(()).devices()))

    def array(name: str) -> jax.Array:
        require(name in entries, "array", name, f"the manifest in {folder} says nothing of it: {CACHE.again}")
        read = read_array(folder / ARRAYS, entries[name])
        waits = name.startswith("bank.") or on_host
        return jax.device_put(read, host_of(device)) if waits else jnp.asarray(read)

    return decode(manifest.get(_CACHE), array)
