"""`Engine`: answers many requests concurrently over the slots of one running batch."""

from jaxkv.serving.document_store import Document
from jaxkv.serving.engine import Engine
from jaxkv.serving.prefix_cache import PrefixCacheConfig
from jaxkv.serving.requests import EngineClosed, QueueFull, Request
from jaxkv.serving.stats import EngineStats, RequestStats

__all__ = [
    "Document",
    "Engine",
    "EngineClosed",
    "EngineStats",
    "PrefixCacheConfig",
    "QueueFull",
    "Request",
    "RequestStats",
]
