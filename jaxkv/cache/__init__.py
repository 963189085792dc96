"""The cache: pools of rows, segments in them and how they lie, what waits in host memory."""

from jaxkv.cache.arrays import Cache, State, Tables
from jaxkv.cache.bank import Bank
from jaxkv.cache.kv_cache import KVCache, Turn, laid_out
from jaxkv.cache.layout import Layout
from jaxkv.cache.pools import Pool
from jaxkv.cache.repacking import repack
from jaxkv.cache.stores import Dense, Store

__all__ = [
    "Bank",
    "Cache",
    "Dense",
    "KVCache",
    "Layout",
    "Pool",
    "State",
    "Store",
    "Tables",
    "Turn",
    "laid_out",
    "repack",
]
