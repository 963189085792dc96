"""Stores by the names that policies accept. A new store needs its own file and a line here."""

from jaxkv._errors import require
from jaxkv.cache.latents import DenseLatentStore, Int4LatentStore, Int8LatentStore, LatentStore
from jaxkv.cache.quantised import Int4Store, Int8Store, MixedStore, ResidualInt4Store
from jaxkv.cache.stores import DenseStore, Store

STORES: dict[str, type[Store]] = {
    "dense": DenseStore,
    "int8": Int8Store,
    "int4": Int4Store,
    "int4-residual": ResidualInt4Store,
    "mixed": MixedStore,
}
# The same encodings of entries whose value is their key.
_LATENTS: dict[type[Store], type[LatentStore]] = {
    DenseStore: DenseLatentStore,
    Int8Store: Int8LatentStore,
    Int4Store: Int4LatentStore,
}


def get_latent_store(store: type[Store]) -> type[Store]:
    """Return the store of latents that encodes as `store` does; a store of latents unchanged; else ValueError."""
    if store.values_are_keys:
        return store
    remedy = "no form of it holds latents, which are key and value at once: use 'dense', 'int8' or 'int4'"
    require(store in _LATENTS, "store", store.__name__, remedy)
    return _LATENTS[store]
