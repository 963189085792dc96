"""The KV cache: pools of entries divided into segments, their layout, and entries offloaded to host memory."""

from jaxkv.cache.arrays import CacheArrays, PolicyState, SegmentTables
from jaxkv.cache.host_store import HostStore
from jaxkv.cache.kv_cache import ConversationState, KVCache, repack_through_host
from jaxkv.cache.latents import DenseLatentStore, Int4LatentStore, Int8LatentStore, LatentStore
from jaxkv.cache.layout import SegmentLayout
from jaxkv.cache.pools import EntryPool
from jaxkv.cache.quantised import Int4Store, Int8Store, MixedStore, ResidualInt4Store
from jaxkv.cache.repacking import drop_outside_sliding_windows, repack_cache
from jaxkv.cache.stores import DenseStore, Store

__all__ = [
    "HostStore",
    "CacheArrays",
    "DenseLatentStore",
    "DenseStore",
    "Int4LatentStore",
    "Int4Store",
    "Int8LatentStore",
    "Int8Store",
    "KVCache",
    "LatentStore",
    "SegmentLayout",
    "MixedStore",
    "EntryPool",
    "PolicyState",
    "ResidualInt4Store",
    "Store",
    "SegmentTables",
    "ConversationState",
    "repack_through_host",
    "repack_cache",
    "drop_outside_sliding_windows",
]
