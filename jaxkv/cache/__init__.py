"""The KV cache: pools of key and value rows cut into segments, their layout, and rows offloaded to host memory."""

from jaxkv.cache.arrays import Cache, State, Tables
from jaxkv.cache.bank import Bank
from jaxkv.cache.kv_cache import KVCache, Turn, laid_out
from jaxkv.cache.layout import Layout
from jaxkv.cache.pools import Pool
from jaxkv.cache.quantised import Int4, Int8, Mixed
from jaxkv.cache.repacking import repack, slid
from jaxkv.cache.stores import Dense, Store

__all__ = [
    "Bank",
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
    "slid",
]
