"""Stores by the names that policies accept. A new store needs its own file and a line here."""

from jaxkv.cache.quantised import Int4Store, Int8Store, MixedStore
from jaxkv.cache.stores import DenseStore, Store

STORES: dict[str, type[Store]] = {
    "dense": DenseStore,
    "int8": Int8Store,
    "int4": Int4Store,
    "mixed": MixedStore,
}
