"""The cache: pools of rows, segments in them and how they lie, what waits in host memory."""

from jaxkv.cache.kv_cache import KVCache, State, Turn, repack

__all__ = ["KVCache", "State", "Turn", "repack"]
