"""The folder of a saved cache: a JSON manifest (see `encoding`) and one file per array."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxkv._errors import require
from jaxkv.cache.encoding import decode_from_json, encode_as_json
from jaxkv.cache.host_store import make_host_sharding
from jaxkv.checkpoints.orbax_files import (
    ARRAYS,
    CACHE,
    parse_array_entries,
    read_array,
    write_array_folder,
)
from jaxkv.machine import hosts


def write_cache_folder(folder: Path, policy: Any, cache: Any, mesh: Mesh | None) -> None:
    """Write a cache and its policy to a new folder atomically; on a mesh of several processes only the first writes.

    `cache` is laid out for one device and has no policy. ValueError if `folder` exists or cannot be written, or if the
    policy holds a value that cannot be encoded.
    """
    arrays: dict[str, np.ndarray] = {}
    manifest = {
        "policy": encode_as_json(policy, None, "policy"),
        "cache": encode_as_json(cache, arrays),
    }
    with hosts.share_failures("KVCache.save", mesh):
        if hosts.is_first_process() or not hosts.has_several_processes(mesh):
            write_array_folder(folder, CACHE, manifest, arrays)


def read_cache_folder(folder: Path, manifest: Mapping[str, Any], *, on_host: bool) -> Any:
    """Read a saved `KVCache` without its policy: to the default device, host store (or all with `on_host`) to the host.

    `on_host=True` reads all arrays into host memory. False does so for the host store only and uses the default device
    for the others.
    """
    entries = parse_array_entries(folder, manifest.get(CACHE.listed), CACHE)
    device = next(iter(jnp.zeros(()).devices()))

    def array(name: str) -> jax.Array:
        require(
            name in entries,
            "array",
            name,
            f"missing in the manifest in {folder}: {CACHE.again}",
        )
        read = read_array(folder / ARRAYS, entries[name])
        waits = name.startswith("host_store.") or on_host
        return jax.device_put(read, make_host_sharding(device)) if waits else jnp.asarray(read)

    return decode_from_json(manifest.get("cache"), array)
