"""`PrefixCache`: compressed caches of answered conversations in host memory, found by the tokens that they hold."""

import collections
import contextlib
import dataclasses
import functools
import threading
from collections.abc import Iterator, Sequence

import jax
import numpy as np
from jaxtyping import Array, Int

from jaxkv import _checks
from jaxkv._checks import use_package_jax_settings
from jaxkv._dataclasses import frozen_dataclass
from jaxkv._errors import require
from jaxkv.cache import KVCache, repack_through_host
from jaxkv.cache.host_store import make_host_sharding
from jaxkv.engine.lengths import round_up_to_bucket
from jaxkv.policies.checks import ShareBudget
from jaxkv.policies.policy import Policy
from jaxkv.sharding.mesh import copy_to_host

PREFIX_POLICIES = ("auto", "all", "none")
# The bytes of a cache without a budget of its own: a share of the memory that is left.
USUAL_SHARE = 0.25
# XLA's pool of pinned host memory has 64 GiB.
MOST_USUAL_BYTES = 32 << 30
# Maximum number of caches that are copied to host memory at a time: each waits in device memory.
_MOST_AT_ONCE = 2


@frozen_dataclass
class PrefixCacheConfig:
    """Config of an engine's reuse of prefixes: for which policies, and their maximum bytes in host memory.

    Attributes:
        policies: "auto" for policies whose choice of entries fits a longer text, too: they do not score by the prompt's
            end, have no random numbers, and do not compress answers to a share of the prompt. "all" for every policy;
            "none" to read every prompt anew.
        max_bytes: maximum bytes of all prefixes; above it the least recently used are dropped. None for a quarter of
            the machine's memory that the slots leave free.
    """

    policies: str = "auto"
    max_bytes: int | None = None

    def __post_init__(self) -> None:
        """Raise ValueError for unknown policies or negative bytes."""
        remedy = f"unknown value: use one of {', '.join(PREFIX_POLICIES)}"
        require(self.policies in PREFIX_POLICIES, "policies", self.policies, remedy)
        if self.max_bytes is not None:
            remedy = "use a number of bytes"
            _checks.validate_field(
                self, "max_bytes", _checks.validate_int, remedy, least=0, most=2**62
            )

    def includes_policy(self, policy: Policy) -> bool:
        """Return True if prefixes that this policy compressed may be reused."""
        parts = policy.composed
        shares = isinstance(parts.budget, ShareBudget) and parts.decoding_compression.compresses
        bound = parts.scorer.follows_last_queries or parts.uses_random_key or shares
        return self.policies == "all" or (self.policies == "auto" and not bound)


AUTO_PREFIXES = PrefixCacheConfig()


@frozen_dataclass
class PrefixOwner:
    """Requests that may reuse a prefix: those of one client, "" for no name, under an equal policy."""

    policy: Policy
    client: str


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class StoredPrefix:
    """Cache of one sequence in host memory, the token ids that it holds, and who may reuse it."""

    ids: Int[np.ndarray, " n"]
    cache: KVCache
    owner: PrefixOwner

    @functools.cached_property
    def is_divisible(self) -> bool:
        """True if the first entries of each segment are the cache of the first tokens: none evicted, and no state."""
        tables = self.cache.tables
        complete = bool((self.cache.kept == len(self.ids)).all())
        plain = tables.state is None and tables.centre is None and not self.cache.arrays.states
        return (
            complete
            and plain
            and self.owner.policy.composed.budget is None
            and all(pool.bounds is None for pool in self.cache.pools)
        )

    def count_reusable_tokens(self, ids: Int[np.ndarray, " n"]) -> int:
        """Return how many first tokens of a prompt this cache can replace; at least one is left, 0 for none."""
        most = min(len(self.ids), len(ids) - 1)
        differs = np.flatnonzero(self.ids[:most] != ids[:most])
        common = int(differs[0]) if differs.size else most
        return common if common == len(self.ids) or self.is_divisible else 0


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class MatchedPrefix:
    """Cache in host memory of the first `tokens` tokens of a prompt."""

    cache: KVCache
    tokens: int


class PrefixCache:
    """Compressed caches of conversations, up to `most_bytes` of host memory; the least recently used are dropped.

    Attributes:
        most_bytes: maximum bytes of the stored caches.
        nbytes: bytes of the stored caches.
    """

    def __init__(self, *, most_bytes: int):
        """Create an empty cache of prefixes."""
        self.most_bytes, self.nbytes = most_bytes, 0
        # In order of use, the most recent last.
        self._stored: collections.OrderedDict[int, StoredPrefix] = collections.OrderedDict()
        self._numbers, self._lock = 0, threading.Lock()
        # Token ids and owners of the conversations that are being stored.
        self._storing = dict[threading.Thread, tuple[list[int], PrefixOwner]]()

    @property
    def accepts_more(self) -> bool:
        """True if a cache can be stored in the background now."""
        return len(self._storing) < _MOST_AT_ONCE

    def store_in_background(self, cache: KVCache, ids: list[int], owner: PrefixOwner) -> None:
        """Store a cache, as `store_prefix` does, in a thread; errors leave it unstored."""

        def store() -> None:
            try:
                with contextlib.suppress(Exception), use_package_jax_settings():
                    self.store_prefix(cache, ids, owner)
            finally:
                del self._storing[thread]

        thread = threading.Thread(target=store, daemon=True)
        self._storing[thread] = ids, owner
        try:
            thread.start()
        except RuntimeError:
            # The process may have no more threads.
            del self._storing[thread]

    def is_storing_for(self, ids: list[int], owner: PrefixOwner) -> bool:
        """Return True if a conversation is being stored that may save enough of a prompt's prefill."""
        # With fewer tokens in common it is not used (`_saves_length`).
        least = max(1, len(ids) - round_up_to_bucket(len(ids)) // 2)
        storing = list(self._storing.values())
        return any(each == owner and held[:least] == ids[:least] for held, each in storing)

    def store_prefix(self, cache: KVCache, ids: Sequence[int], owner: PrefixOwner) -> None:
        """Store a copy of a cache of one sequence, without headroom; it holds the first tokens, or all, of `ids`.

        It replaces stored caches that it can stand for. Others are dropped if the bytes exceed the maximum; a cache
        that is larger alone is not stored.
        """
        # The last token of an answer did not run.
        ids = ids[: int(copy_to_host(cache.seen)[0])]
        on_host = make_host_sharding(next(iter(cache.seen.sharding.addressable_devices)))
        tight = repack_through_host(
            dataclasses.replace(cache, logits=None),
            None,
            put=lambda array, _: jax.device_put(array, on_host),
        )
        made = StoredPrefix(ids=np.asarray(ids, np.int32), cache=tight, owner=owner)
        if tight.nbytes > self.most_bytes:
            return
        with self._lock:
            for number, other in list(self._stored.items()):
                if other.owner == owner and _stands_for(made, other):
                    self._drop_prefix(number)
            while self.nbytes + tight.nbytes > self.most_bytes:
                self._drop_prefix(next(iter(self._stored)))
            self._numbers += 1
            self._stored[self._numbers] = made
            self.nbytes += tight.nbytes

    def find_prefixes(self, ids: Sequence[int], owner: PrefixOwner) -> Iterator[MatchedPrefix]:
        """Generator: yield stored caches of a prompt's first tokens, the most tokens and the most recent first.

        Only those that save half of a prefill's length: a token on top of a cache takes more than twice as long as one
        of a prefill.
        """
        asked = np.asarray(ids, np.int32)
        with self._lock:
            stored = [
                (number, each) for number, each in self._stored.items() if each.owner == owner
            ]
        counted = [(each.count_reusable_tokens(asked), number, each) for number, each in stored]
        for tokens, number, each in sorted(counted, key=lambda each: each[:2], reverse=True):
            if not _saves_length(len(asked), tokens):
                return
            with self._lock:
                if number in self._stored:
                    self._stored.move_to_end(number)
            found = each.cache
            if tokens < int(copy_to_host(found.seen)[0]):
                found = found.replace_arrays(
                    length=_fill_like(found.length, tokens), seen=_fill_like(found.seen, tokens)
                )
            yield MatchedPrefix(cache=found, tokens=tokens)

    def drop_all_prefixes(self) -> None:
        """Remove all stored caches, once nothing is being stored."""
        for thread in list(self._storing):
            thread.join()
        with self._lock:
            self._stored.clear()
            self.nbytes = 0

    def _drop_prefix(self, number: int) -> None:
        """Remove a stored cache and its bytes; the caller holds the lock."""
        self.nbytes -= self._stored.pop(number).cache.nbytes


def _fill_like(array: Int[Array, "..."], value: int) -> Int[Array, "..."]:
    """Return an array like the given one, in the same memory, filled with a number."""
    return jax.device_put(np.full(array.shape, value, array.dtype), array.sharding)


def _stands_for(new: StoredPrefix, old: StoredPrefix) -> bool:
    """Return True if every prompt that can reuse the old cache can reuse as many tokens of the new one."""
    begins = len(old.ids) <= len(new.ids) and bool((new.ids[: len(old.ids)] == old.ids).all())
    return begins and (len(old.ids) == len(new.ids) or new.is_divisible)


def _saves_length(tokens: int, reused: int) -> bool:
    """Return True if a prompt without its reused tokens is padded to at most half of its length."""
    return reused > 0 and 2 * round_up_to_bucket(tokens - reused) <= round_up_to_bucket(tokens)
