"""`KeptTokens`: token ids of a document, and which kv heads of which layers keep the entry of each token."""

import base64
import dataclasses
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int, UInt8

from jaxkv.cache import KVCache


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class KeptTokens:
    """Token ids of a compressed document, and the (layer, kv head) pairs that keep the entry of each token.

    Attributes:
        ids: token ids, `[n]`.
        bits: mask `[L, K, n]` of kept entries, eight tokens per byte.
    """

    ids: Int[np.ndarray, " n"]
    bits: UInt8[np.ndarray, "L K m"]

    @classmethod
    def from_cache(cls, cache: KVCache, ids: Sequence[int]) -> "KeptTokens":
        """Return a document's `KeptTokens`, from its cache and its token ids `ids`."""
        return cls(
            ids=np.asarray(ids, np.int32),
            bits=np.packbits(cache.mask_kept_tokens(0, len(ids)), axis=-1),
        )

    def counts(self, layer: int | None = None, head: int | None = None) -> Int[np.ndarray, " n"]:
        """Return `[n]`, for each token how many (layer, kv head) pairs, of all or a given layer or head, keep it."""
        layers = slice(None) if layer is None else slice(layer, layer + 1)
        heads = slice(None) if head is None else slice(head, head + 1)
        mask = np.unpackbits(self.bits[layers, heads], axis=-1, count=len(self.ids))
        return mask.sum(axis=(0, 1), dtype=np.int64)

    def to_json_values(self) -> dict[str, Any]:
        """Return `KeptTokens` as a dict of JSON values, ids and compressed mask, for `from_json_values`."""
        packed = base64.b64encode(zlib.compress(self.bits.tobytes())).decode("ascii")
        return {"ids": self.ids.tolist(), "shape": list(self.bits.shape), "bits": packed}

    @classmethod
    def from_json_values(cls, described: Mapping[str, Any]) -> "KeptTokens":
        """Restore `KeptTokens` from `to_json_values`; ValueError, TypeError or KeyError if invalid."""
        try:
            data = zlib.decompress(base64.b64decode(described["bits"], validate=True))
        except zlib.error as error:
            raise ValueError(f"bits: {error}") from None
        bits = np.frombuffer(data, np.uint8).reshape(described["shape"])
        ids = np.asarray(described["ids"], np.int32)
        if bits.ndim != 3 or bits.shape[2] != -(-len(ids) // 8):
            raise ValueError(f"bits of shape {bits.shape} for {len(ids)} tokens")
        return cls(ids=ids, bits=bits)
