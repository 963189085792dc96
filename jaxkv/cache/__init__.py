"""The KV cache: pools of entries divided into segments, their layout, and entries offloaded to host memory."""

from jaxkv.cache.arrays import Cache, State, Tables
from jaxkv.cache.host_store import HostStore
from jaxkv.cache.kv_cache import KVCache, Turn, laid_out
from jaxkv.cache.layout import Layout
from jaxkv.cache.pools import Pool
from jaxkv.cache.quantised import Int4, Int8, Mixed
from jaxkv.cache.repacking import drop_outside_sliding_windows, repack
from jaxkv.cache.stores import Dense, Store

__all__ = [
    "HostStore",
    "Cache",
    "Dense",
    "Int4",
    "Int8",
    "KVCache",
    "Layout",
    "Mixed",
    "Pool",
    "State",
    "Store",
    "Tables",
    "Turn",
    "laid_out",
    "repack",
    "drop_outside_sliding_windows",
]
