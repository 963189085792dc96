"""`Slots`: a running batch whose sequences join and leave one by one, sampled from by the loop that `generate` runs."""

import copy
import dataclasses
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Int, PRNGKeyArray

from jaxkv import arguments
from jaxkv._checks import own_settings, settled, whole
from jaxkv._errors import require
from jaxkv.cache import Cache, KVCache, drop_outside_sliding_windows
from jaxkv.cache.slot_copies import insert, spread, taken
from jaxkv.engine import token_loop
from jaxkv.engine.lengths import bucket
from jaxkv.engine.progress import Walk, run_to_end
from jaxkv.engine.recompress import Fixed, beyond, due, recompress
from jaxkv.engine.sampling import Sampler
from jaxkv.engine.sequences import Paused, sequences_of
from jaxkv.engine.session import Session
from jaxkv.engine.slot_shape import FEW, SlotShape, slides, slot_shape
from jaxkv.engine.spec import specialise
from jaxkv.machine import memory
from jaxkv.machine.compilation import Clocks
from jaxkv.policies.policy import Policy
from jaxkv.sharding.mesh import host, place
from jaxkv.text.prompts import Prompt

# Number of parts of `Slots.compile`.
PARTS = 2


class Slots:
    """A running batch whose sequences join and leave one by one; once it has started, nothing more is compiled.

    The pools of a slot fit any prompt of up to `max_prompt` tokens with its new tokens, and prompts are prefilled
    straight into that shape: to join is a copy. What a sequence samples depends on no other sequence and on no slot.

    ```python
    slots = Slots(jaxkv.Session(params, policy), count=4, max_prompt=2048, max_new_tokens=256)
    slots.insert(slots.begin(slots.prefill(ids), max_new_tokens=64), 2)
    tokens = slots.decode(8, until="any")          # [4, n], -1 where a slot draws nothing
    ```

    Attributes:
        session: model, policy and attention backends.
        count: number of slots.
        size: the most tokens that one run of the compiled loop samples.
        shape: the most entries and tokens of a slot.
        needed: bytes of the entries of all slots.
        done: `bool[B]` mask of slots that sample nothing: never filled, released, or at their end.
        uncompiled: padded lengths that `compiling` has not met yet, each behind whether it is a question's.
    """

    @settled
    def __init__(
        self,
        session: Session,
        *,
        count: int,
        max_prompt: int,
        max_new_tokens: int,
        max_question: int = 0,
        ends: int = 8,
        size: int = 64,
        start: bool = True,
    ):
        """Allocates `count` slots and compiles all programs for filling, sampling from and emptying them.

        A slot takes a prompt of up to `max_prompt`, a question of up to `max_question` and an answer of up to
        `max_new_tokens` tokens, and up to `ends` ids that end its sequence; one run of the compiled loop samples up to
        `size` tokens. On a mesh `count` is a multiple of its groups. `start=False` leaves all to `compile`.

        Raises:
            ValueError: for a policy that keeps entries in host memory or reads prompts in chunks; for a number of slots
                that a mesh cannot divide; for more tokens than the model has positions.
            MemoryError: if all slots take more bytes than are free.
        """
        params, self.session = session.params, session
        self.count = count = whole("count", count, "give at least 1 slot")
        self.size = whole("size", size, "sample at least 1 token at a time")
        self._ends = whole("ends", ends, "give room for at least 1 end token")
        max_prompt = whole("max_prompt", max_prompt, "take prompts of at least 1 token")
        max_new_tokens = whole("max_new_tokens", max_new_tokens, "sample at least 1 token")
        max_question = whole(
            "max_question", max_question, "give 0 for none, or at least 1 token", least=0
        )
        config, parts, self._axes = params.config, session.policy.composed, params.axes
        self._groups, kv_shards = (
            (1, 1) if self._axes is None else (self._axes.size("B"), self._axes.size("K"))
        )
        require(
            count % self._groups == 0,
            "count",
            count,
            f"give a multiple of the mesh's {self._groups} groups",
        )
        tokens = max_prompt + max_question + max_new_tokens
        remedy = (
            f"the model was made for {config.max_positions}: lower max_prompt or max_new_tokens"
        )
        require(
            parts.rolling or tokens <= config.max_positions,
            "max_prompt",
            f"{tokens} tokens in all",
            remedy,
        )
        self.shape = slot_shape(
            parts,
            config,
            prompt=max_prompt,
            question=max_question,
            new=max_new_tokens,
            kv_shards=kv_shards,
        )
        mine = config.kv_heads // kv_shards
        widest = max(parts.layout.widest(rows, mine) for rows in self.shape.rows)
        self._fixed = Fixed(rows=self.shape.rows, padded_len=min(widest, self.shape.longest))
        self.needed = (
            count
            * sum(self.shape.rows)
            * parts.row_bytes(config.head_dim, params.cache_dtype.itemsize)
        )
        device = None if self._axes is None else self._axes.mesh.local_devices[0]
        memory.check_bytes(self.needed // self._groups, f"count={count} slots", device)
        self._parts, self._every = parts, parts.every
        # Layers whose entries are dropped as they leave the window.
        self._sliding = np.asarray(
            [width is not None and slides(parts) for width in config.sliding_windows]
        )
        self._spec = specialise(
            params.flat,
            parts,
            padded_len=bucket(max_prompt),
            extended=parts.evicts and not parts.heads.uniform and max_question > 0,
            implementation=session.implementations.decode,
        )
        self.done: Bool[np.ndarray, " B"] = np.ones(self.count, bool)
        # Known for each slot without reading the device: entries beyond its limit, and entries left behind the windows of
        # layers that slide.
        self._beyond, self._left = (np.zeros(self.count, np.int64) for _ in range(2))
        self._keys: list[PRNGKeyArray] = [session.key] * self.count
        self._all: Any = ()
        self.uncompiled = self.shape.lengths
        if start:
            self.compile()

    @settled
    def prefill(self, ids: Prompt, *, key: PRNGKeyArray | int | None = None) -> KVCache:
        """Prefills one prompt (on a mesh, one for each group) into pools of a slot's size; returns its cache.

        The cache serves any number of sequences; `key` replaces the session's. Raises ValueError for an empty or
        over-long prompt, and for a budget that the policy cannot honour.
        """
        return run_to_end(self.prefilling(ids, key=key))

    def prefilling(
        self, ids: Prompt, *, key: PRNGKeyArray | int | None = None, policy: Policy | None = None
    ) -> Walk[KVCache]:
        """Generator form of `prefill`: yields how many layers ran since the last yield; returns the `KVCache`.

        Slots may decode between two yields. `policy` is that of the slots with another budget, of no more entries.
        """
        with own_settings():
            session = copy.copy(self.session)
            session.policy = self.session.policy if policy is None else policy
            encoded = session.encoded(ids)
            longest, most = int(encoded.lengths.max()), self.shape.prompt
            require(
                longest <= most,
                "ids",
                f"{longest} tokens",
                f"these slots take up to max_prompt={most}",
            )
            many = f"give one prompt, or one for each of the mesh's {self._groups} groups"
            require(
                len(encoded.ids) in (1, self._groups), "ids", f"{len(encoded.ids)} prompts", many
            )
            needed = session.planned(encoded.lengths, 0)
            needed = dataclasses.replace(needed, pools=self.shape.rows)
        cache = yield from session.prefilling(encoded, needed=needed, key=key)
        # Limits of segments are arrays of the cache: how decoding goes on does not depend on the budget.
        return dataclasses.replace(cache, policy=self.session.policy)

    @settled
    def extend(
        self,
        cache: KVCache,
        ids: Prompt,
        *,
        key: PRNGKeyArray | int | None = None,
        donate: bool = False,
    ) -> KVCache:
        """Copy of a prompt's cache with a question appended to each sequence, recompressed if over its entry limit.

        `key` replaces the session's, `donate` gives the cache up for its buffers. Raises ValueError for an empty or
        over-long question, and for a cache that these slots' `prefill` did not make.
        """
        encoded = self.session.encoded(ids)
        longest, most = int(encoded.lengths.max()), self.shape.question
        require(
            longest <= most,
            "ids",
            f"{longest} tokens",
            f"these slots take up to max_question={most}",
        )
        self._require_fits(
            cache, longest + (0 if self._parts.ongoing.compresses else self.shape.new)
        )
        many = f"the cache holds {cache.batch}: give a question for each"
        require(len(encoded.ids) == cache.batch, "ids", f"{len(encoded.ids)} questions", many)
        copy = cache if donate else jax.tree.map(jnp.copy, cache)
        if self._free(copy).min() < longest:
            copy = drop_outside_sliding_windows(copy, self.shape.rows)
        copy = self.session.on_top(copy, encoded, self._spec)
        if not due(copy).any():
            return copy
        again = self._compressed(copy, self.session.key_of(key))
        return dataclasses.replace(again, logits=copy.logits)

    @settled
    def begin(
        self,
        cache: KVCache,
        *,
        max_new_tokens: int,
        sampling: Sampler | None = None,
        eos: Iterable[int] = (),
        key: PRNGKeyArray | int | None = None,
    ) -> Paused:
        """Makes a sequence (`Paused`) that will sample tokens on top of a cache from `prefill` or `extend`; for `insert`.

        The cache is unchanged. The last token sampled, like one of the ids `eos`, does not run through the model. Raises
        ValueError for more tokens or end ids than the slots were made for, and for a cache that these slots' `prefill`
        did not make; TypeError for a user's own sampler.
        """
        new = whole("max_new_tokens", max_new_tokens, "sample at least 1 token")
        self._require_fits(cache, 1 if self._parts.ongoing.compresses else new)
        most, ids = self.shape.new, sorted(set(eos))
        require(new <= most, "max_new_tokens", new, f"these slots were made for up to {most}")
        require(len(ids) <= self._ends, "eos", ids, f"these slots were made for up to {self._ends}")
        key = self.session.key_of(key)
        table = np.full(self._ends, -2, np.int32)
        table[: len(ids)] = ids
        arrays = sequences_of(cache, new, arguments.as_sampling(sampling), table, key)
        return Paused(arrays=arrays, key=key, done=False, **self._counts(cache))

    @settled
    def peek(self, sequence: Paused) -> int:
        """Id of the first token that a sequence will sample in a slot; the sequence itself is unchanged."""
        arrays = sequence.arrays
        seen = arrays.cache.tables.seen
        return int(
            host(
                token_loop.next_tokens(
                    arrays.sampling_state, seen, arrays.sampling, axes=self._axes
                ).token
            )[0]
        )

    @settled
    def insert(self, sequence: Paused, slot: int) -> None:
        """Copies a sequence from `begin` or `take` into a slot, in place; the other slots are unchanged."""
        where = self._placed(self._of_groups(slot))
        self._all = insert(self._all, sequence.arrays, where, axes=self._axes)
        self.done[slot] = sequence.done
        group = self._group_of(slot)
        self._beyond[slot], self._left[slot] = sequence.beyond[group], sequence.left[group]
        self._keys[slot] = sequence.key

    @settled
    def take(self, slot: int) -> Paused:
        """Copy of a slot's sequence as a `Paused`, to be inserted into any slot; the original stays in its slot."""
        arrays = taken(self._all, self._placed(self._of_groups(slot)), axes=self._axes)
        over, left = (np.full(self._groups, each[slot]) for each in (self._beyond, self._left))
        return Paused(
            arrays=arrays, key=self._keys[slot], beyond=over, left=left, done=bool(self.done[slot])
        )

    @settled
    def release(self, slots: Iterable[int]) -> None:
        """Ends the sequences in slots with these indices; the slots sample nothing until others are inserted."""
        which = np.zeros(self.count, bool)
        for slot in slots:
            self._require_slot(slot)
            which[slot] = True
        self.done |= which
        sampling_state = dataclasses.replace(
            self._all.sampling_state, done=self._all.sampling_state.done | self._placed(which)
        )
        self._all = dataclasses.replace(self._all, sampling_state=sampling_state)

    @settled
    def decode(self, steps: int, *, until: Literal["any", "all"] = "all") -> Int[np.ndarray, "B n"]:
        """Samples up to `steps` tokens in every slot that is not done; returns ids `[B, n]`, -1 where none was sampled.

        Sequences that become due are recompressed on the way. `until="any"` stops as soon as another slot is done,
        "all" only when all are.
        """
        require(until in ("any", "all"), "until", until, "give 'any' or 'all'")
        steps = whole("steps", steps, "sample at least 1 token")
        idle = self.count - 1 if until == "all" else int(self.done.sum())
        parts = [np.zeros((self.count, 0), np.int32)]
        while steps and self.done.sum() <= idle:
            parts.append(self._run(steps, idle))
            steps -= parts[-1].shape[1]
        return np.concatenate(parts, axis=1)

    def _run(self, steps: int, idle: int) -> Int[np.ndarray, "B n"]:
        """One call of the compiled loop, up to `steps` tokens per slot; returns ids `[B, n]`, -1 where none was sampled.

        It samples fewer if a sequence becomes due to be recompressed or to drop entries of windows.
        """
        steps = min(steps, self.size)
        if self._every is not None:
            for slot in np.flatnonzero(~self.done & (self._beyond >= self._every)).tolist():
                self._again(slot)
            steps = min(steps, self._every - int(self._beyond[~self.done].max(initial=0)))
        if self._sliding.any():
            for slot in np.flatnonzero(~self.done & (self._left == 0)).tolist():
                self._slide(slot)
            steps = min(steps, int(self._left[~self.done].min(initial=steps)))
        before, now, flat = self.done, self._all, self.session.params.flat
        cache, sampling_state, out, ran = token_loop.decode(
            flat,
            now.cache,
            now.sampling_state,
            steps,
            spec=self._spec,
            sampling=now.sampling,
            size=self.size,
            idle=idle,
        )
        self._all = dataclasses.replace(now, cache=cache, sampling_state=sampling_state)
        tokens, self.done = host(out)[:, : int(host(ran))], np.array(host(sampling_state.done))
        # A token that ends a sequence becomes no entry.
        rows = (tokens >= 0).sum(axis=1) - (self.done & ~before)
        self._beyond, self._left = self._beyond + rows, self._left - rows
        return tokens

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays of all slots over all devices."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self._all))

    @settled
    def compile(
        self, tick: Callable[[str], object] = lambda what: None, *, lengths: bool = True
    ) -> None:
        """Allocates all slots; compiles the programs of all `lengths`, or one, by running them; ticks `PARTS` times."""
        tick("prefill")
        cache = None
        while cache is None:
            question, self._usual = self.uncompiled.pop(0)
            cache = run_to_end(self.compiling(question, self._usual))
        begun = self.begin(cache, max_new_tokens=min(2, self.shape.new))
        self.peek(begun)
        self._all = spread(begun.arrays, slots=self.count, axes=self._axes)
        self.release(range(self.count))
        self.insert(begun, 0)
        tick("decode loop")
        self.decode(1)
        self.insert(self.take(0), 0)
        if self._every is not None:
            self._again(0)
        if self._sliding.any():
            self._slide(0)
        self.release(range(self.count))
        while lengths and self.uncompiled:
            run_to_end(self.compiling(*self.uncompiled.pop(0)))
        jax.block_until_ready(self._all)
        memory.trim()

    def compiling(self, question: bool, size: int) -> Walk[KVCache | None]:
        """Generator: compiles the programs of one of the lengths `uncompiled`, yields between them.

        No slot changes: another thread may use them. Returns a made-up cache, or None if the policy rejects the length.
        """
        try:
            cache = yield from _made_up(self.session, self.shape, self._usual if question else size)
        except ValueError:
            return None
        if question:
            cache = self.extend(cache, [0] * min(size, self.shape.question))
            if self._parts.ongoing.compresses:
                self._compressed(cache, self.session.key)
        return cache

    def _of_groups(self, slot: int) -> Int[np.ndarray, " g"]:
        """Array with one entry per mesh group: the slot's index for the group that holds it, -1 for the others."""
        self._require_slot(slot)
        return np.where(np.arange(self._groups) == self._group_of(slot), slot, -1).astype(np.int32)

    def _require_slot(self, slot: int) -> None:
        """Raises ValueError unless the slot index is in [0, count)."""
        require(0 <= slot < self.count, "slot", slot, f"there are {self.count}: give one from 0 on")

    def _require_fits(self, cache: KVCache, rows: int) -> None:
        """Raises an error for a cache of another model, policy, store or pool size, or with fewer than `rows` free."""
        arguments.require_ours(self.session.params, cache, self.session.policy)
        self.shape.require_fits(self._parts, cache, rows, self._sliding)

    def _group_of(self, slot: int) -> int:
        """Index of the mesh group whose devices hold a slot."""
        return slot * self._groups // self.count

    def _placed(self, of_each: np.ndarray) -> jax.Array:
        """Device array of a host array `[B]` with one number per slot, sharded over the mesh if there is one."""
        return place(of_each, "B", self._axes)

    def _again(self, slot: int) -> None:
        """Compresses the sequence in a slot again, as its policy does every `every` entries, in place."""
        self._renew(slot, partial(self._compressed, key=self._keys[slot]))

    def _slide(self, slot: int) -> None:
        """Drops the entries of a slot's sliding-window layers that have left their windows, in place."""
        self._renew(slot, partial(drop_outside_sliding_windows, rows=self.shape.rows))

    def _renew(self, slot: int, change: Callable[[KVCache], KVCache]) -> None:
        """Puts what a function makes of a slot's cache in its place."""
        one = self.take(slot)
        cache = change(self._handle(one.arrays.cache))
        arrays = dataclasses.replace(one.arrays, cache=cache.arrays)
        self.insert(dataclasses.replace(one, arrays=arrays, **self._counts(cache)), slot)

    def _counts(self, cache: KVCache) -> dict[str, Any]:
        """Fields `beyond` and `left` of a cache's `Paused`."""
        over = beyond(cache) if self._every else np.zeros(self._groups, np.int64)
        return {"beyond": over, "left": self._free(cache)}

    def _free(self, cache: KVCache) -> Int[np.ndarray, " g"]:
        """Fewest free places `[g]` behind windows of layers that slide, per mesh group; the largest int64 if none."""
        if not self._sliding.any():
            return np.full(self._groups, np.iinfo(np.int64).max)
        return cache.free_rows()[self._sliding].min(axis=0)

    def _compressed(self, cache: KVCache, key: PRNGKeyArray) -> KVCache:
        """Copy of a cache with sequences over their row limit recompressed, in pools of the slots' fixed size."""
        return recompress(
            self.session.params.flat, cache, key=key, headroom=self._every or 1, fixed=self._fixed
        )

    def _handle(self, arrays: Cache) -> KVCache:
        """Makes a `KVCache` from the device arrays of a sequence taken out of a slot."""
        return KVCache(
            arrays=arrays,
            layout=self._parts.layout,
            policy=self.session.policy,
            config=self.session.params.config,
            dtype=self.session.params.dtype.name,
            padded_len=bucket(self.shape.prompt),
            axes=self._axes,
        )


def _made_up(session: Session, shape: SlotShape, size: int) -> Walk[KVCache]:
    """Generator: prefills a made-up prompt of padded length `size`, few tokens unless the policy rejects that.

    Returns its cache in pools of a slot; ValueError if the policy rejects all prompts of this length.
    """
    # Clocks belong to one thread.
    session = copy.copy(session)
    session.clocks = Clocks()
    longest = min(size, shape.prompt)
    planned = dataclasses.replace(session.planned(np.asarray([longest]), 0), pools=shape.rows)
    try:
        few = min(longest, FEW)
        numbers = session.planned(np.asarray([few]), 0).numbers
        planned = dataclasses.replace(planned, numbers=numbers)
    except ValueError:
        few = longest
    return (yield from session.prefilling([0] * few, needed=planned))
