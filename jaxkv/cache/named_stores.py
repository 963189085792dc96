"""Stores by the names that policies accept. A new store needs its own file and a line here."""

from jaxkv.cache.quantised import Int4, Int8, Mixed
from jaxkv.cache.stores import Dense, Store

STORES: dict[str, type[Store]] = {"dense": Dense, "int8": Int8, "int4": Int4, "mixed": Mixed}
