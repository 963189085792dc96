"""`Slots`: a running batch for continuous batching, whose sequences join and leave independently."""

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
    """A running batch whose sequences join and leave independently; nothing compiles after construction.

    The pools of a slot fit any prompt of up to `max_prompt` tokens and its new tokens. Prompts are prefilled directly
    into pools of that shape, so inserting a sequence is a copy. Sampled tokens depend neither on other sequences nor on
    the slot.

    ```python
    slots = Slots(jaxkv.Session(params, policy), count=4, max_prompt=2048, max_new_tokens=256)
    slots.insert(slots.begin(slots.prefill(ids), max_new_tokens=64), 2)
    tokens = slots.decode(8, until="any")          # [4, n], -1 where a slot samples nothing
    ```

    Attributes:
        session: model, policy and attention backends.
        count: number of slots.
        size: maximum number of tokens per call of the compiled loop.
        shape: maximum numbers of entries and tokens per slot.
        needed: bytes of the entries of all slots.
        done: mask `bool[B]` of slots that sample nothing: empty, released, or finished.
        uncompiled: padded lengths that `compiling` has not compiled yet, as pairs (is a question, length).
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
        """Allocate `count` slots and compile all programs that fill, sample from and empty them.

        Args:
            session: model, policy and attention backends.
            count: number of slots; on a mesh, a multiple of its groups.
            max_prompt: maximum number of tokens per prompt.
            max_new_tokens: maximum number of sampled tokens per sequence.
            max_question: maximum number of tokens per question.
            ends: maximum number of ids that end a sequence.
            size: maximum number of tokens per call of the compiled loop.
            start: False defers allocation and compilation to `compile`.

        Raises:
            ValueError: for a policy with a host store or chunked prefill; for a number of slots that the mesh cannot
                divide; for more tokens than the model has positions.
            MemoryError: if the slots need more bytes than are free.
        """
        params, self.session = session.params, session
        self.count = count = whole("count", count, "use at least 1 slot")
        self.size = whole("size", size, "sample at least 1 token per call")
        self._ends = whole("ends", ends, "allow at least 1 end id")
        max_prompt = whole("max_prompt", max_prompt, "allow prompts of at least 1 token")
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
            f"not divisible by the mesh's {self._groups} groups: give a multiple",
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
        heads_here = config.kv_heads // kv_shards
        widest = max(parts.layout.widest(rows, heads_here) for rows in self.shape.rows)
        self._fixed = Fixed(rows=self.shape.rows, padded_len=min(widest, self.shape.longest))
        self.needed = (
            count
            * sum(self.shape.rows)
            * parts.row_bytes(config.head_dim, params.cache_dtype.itemsize)
        )
        device = None if self._axes is None else self._axes.mesh.local_devices[0]
        memory.check_bytes(self.needed // self._groups, f"count={count} slots", device)
        self._parts, self._every = parts, parts.every
        # Layers that evict entries outside their sliding windows.
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
        # Per slot, known without a device read: entries beyond the limit, and free places behind sliding-window
        # segments.
        self._beyond, self._left = (np.zeros(self.count, np.int64) for _ in range(2))
        self._keys: list[PRNGKeyArray] = [session.key] * self.count
        self._all: Any = ()
        self.uncompiled = self.shape.lengths
        if start:
            self.compile()

    @settled
    def prefill(self, ids: Prompt, *, key: PRNGKeyArray | int | None = None) -> KVCache:
        """Prefill one prompt (on a mesh, one per group) into pools of a slot's size; return its cache.

        Any number of sequences can begin from the cache.

        Args:
            ids: token ids of the prompt; plain text if the model has a tokenizer.
            key: random key or seed in place of the session's.

        Returns:
            The cache.

        Raises:
            ValueError: for an empty or over-long prompt, or a budget that the policy does not support.
        """
        return run_to_end(self.prefilling(ids, key=key))

    def prefilling(
        self, ids: Prompt, *, key: PRNGKeyArray | int | None = None, policy: Policy | None = None
    ) -> Walk[KVCache]:
        """Generator form of `prefill`: yield the layers run since the last yield, return the `KVCache`.

        Slots may decode between two yields. `policy` is the slots' policy with another budget of at most as many
        entries.
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
                f"longer than max_prompt={most} of these slots: shorten the prompt",
            )
            many = f"give one prompt, or one for each of the mesh's {self._groups} groups"
            require(
                len(encoded.ids) in (1, self._groups), "ids", f"{len(encoded.ids)} prompts", many
            )
            needed = session.planned(encoded.lengths, 0)
            needed = dataclasses.replace(needed, pools=self.shape.rows)
        cache = yield from session.prefilling(encoded, needed=needed, key=key)
        # Limits are arrays of the cache: decoding does not depend on the budget.
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
        """Append a question to each sequence of a cache; recompress sequences over their limit.

        Args:
            cache: from `prefill` of these slots.
            ids: token ids of one question per sequence.
            key: random key or seed in place of the session's.
            donate: True donates the cache's buffers.

        Returns:
            A new cache.

        Raises:
            ValueError: for an empty or over-long question, or a cache that does not come from these slots' `prefill`.
        """
        encoded = self.session.encoded(ids)
        longest, most = int(encoded.lengths.max()), self.shape.question
        require(
            longest <= most,
            "ids",
            f"{longest} tokens",
            f"longer than max_question={most} of these slots: shorten the question",
        )
        self._require_fits(
            cache, longest + (0 if self._parts.ongoing.compresses else self.shape.new)
        )
        many = f"the cache holds {cache.batch} sequences: give a question for each"
        require(len(encoded.ids) == cache.batch, "ids", f"{len(encoded.ids)} questions", many)
        copy = cache if donate else jax.tree.map(jnp.copy, cache)
        if self._free(copy).min() < longest:
            copy = drop_outside_sliding_windows(copy, self.shape.rows)
        copy = self.session.on_top(copy, encoded, self._spec)
        if not due(copy).any():
            return copy
        renewed = self._compressed(copy, self.session.key_of(key))
        return dataclasses.replace(renewed, logits=copy.logits)

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
        """Create a sequence that samples tokens on top of a cache, for `insert`; the cache is unchanged.

        The last sampled token, including one in `eos`, does not run through the model.

        Args:
            cache: from `prefill` or `extend` of these slots.
            max_new_tokens: maximum number of tokens to sample.
            sampling: sampler; greedy if None.
            eos: ids that end the sequence.
            key: random key or seed in place of the session's.

        Returns:
            The paused sequence.

        Raises:
            ValueError: for more tokens or end ids than the slots allow, or a cache that does not come from these slots.
            TypeError: for a custom sampler.
        """
        new = whole("max_new_tokens", max_new_tokens, "sample at least 1 token")
        self._require_fits(cache, 1 if self._parts.ongoing.compresses else new)
        most, ids = self.shape.new, sorted(set(eos))
        require(new <= most, "max_new_tokens", new, f"more than the slots' {most}: lower it")
        require(len(ids) <= self._ends, "eos", ids, f"more than {self._ends}: give fewer")
        key = self.session.key_of(key)
        table = np.full(self._ends, -2, np.int32)
        table[: len(ids)] = ids
        arrays = sequences_of(cache, new, arguments.as_sampling(sampling), table, key)
        return Paused(arrays=arrays, key=key, done=False, **self._counts(cache))

    @settled
    def peek(self, sequence: Paused) -> int:
        """Return the id of the first token that a sequence will sample in a slot; the sequence is unchanged."""
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
        """Copy a sequence from `begin` or `take` into a slot, in place; other slots are unchanged."""
        where = self._placed(self._of_groups(slot))
        self._all = insert(self._all, sequence.arrays, where, axes=self._axes)
        self.done[slot] = sequence.done
        group = self._group_of(slot)
        self._beyond[slot], self._left[slot] = sequence.beyond[group], sequence.left[group]
        self._keys[slot] = sequence.key

    @settled
    def take(self, slot: int) -> Paused:
        """Return a copy of a slot's sequence, to be inserted into any slot; the slot is unchanged."""
        arrays = taken(self._all, self._placed(self._of_groups(slot)), axes=self._axes)
        over, left = (np.full(self._groups, each[slot]) for each in (self._beyond, self._left))
        return Paused(
            arrays=arrays, key=self._keys[slot], beyond=over, left=left, done=bool(self.done[slot])
        )

    @settled
    def release(self, slots: Iterable[int]) -> None:
        """End the sequences in the slots with these indices; the slots sample nothing until the next `insert`."""
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
        """Sample up to `steps` tokens in every active slot, and recompress sequences that become due.

        Args:
            steps: maximum number of tokens per slot.
            until: "any" stops as soon as another slot is done, "all" when all slots are done.

        Returns:
            Token ids `i32[B, n]`, -1 where none was sampled.

        Raises:
            ValueError: for another `until`, or fewer than 1 step.
        """
        require(until in ("any", "all"), "until", until, "unknown value: give 'any' or 'all'")
        steps = whole("steps", steps, "sample at least 1 token")
        idle = self.count - 1 if until == "all" else int(self.done.sum())
        parts = [np.zeros((self.count, 0), np.int32)]
        while steps and self.done.sum() <= idle:
            parts.append(self._run(steps, idle))
            steps -= parts[-1].shape[1]
        return np.concatenate(parts, axis=1)

    def _run(self, steps: int, idle: int) -> Int[np.ndarray, "B n"]:
        """Run the compiled loop once; return ids `[B, n]`, -1 where none was sampled.

        The call ends before `steps` tokens if a sequence must be recompressed or must evict entries outside its
        windows.
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
        # The token that ends a sequence adds no entry.
        rows = (tokens >= 0).sum(axis=1) - (self.done & ~before)
        self._beyond, self._left = self._beyond + rows, self._left - rows
        return tokens

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays of all slots, over all devices."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self._all))

    @settled
    def compile(
        self, tick: Callable[[str], object] = lambda what: None, *, lengths: bool = True
    ) -> None:
        """Allocate all slots; compile the programs of all `lengths`, or of one, by running them; tick `PARTS` times."""
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
        """Generator: compile the programs of one padded length from `uncompiled`, yield in between.

        Slots are unchanged, so another thread may use them. Return a dummy cache, or None if the policy rejects the
        length.
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
        """Return one number per mesh group: the slot's index for the group that holds it, else -1."""
        self._require_slot(slot)
        return np.where(np.arange(self._groups) == self._group_of(slot), slot, -1).astype(np.int32)

    def _require_slot(self, slot: int) -> None:
        """Raise ValueError unless the slot index is in [0, count)."""
        require(0 <= slot < self.count, "slot", slot, f"no such slot: give 0 to {self.count - 1}")

    def _require_fits(self, cache: KVCache, rows: int) -> None:
        """Raise ValueError for a cache of another model, policy, store or pool size, or without `rows` free places."""
        arguments.require_ours(self.session.params, cache, self.session.policy)
        self.shape.require_fits(self._parts, cache, rows, self._sliding)

    def _group_of(self, slot: int) -> int:
        """Return the index of the mesh group that holds a slot."""
        return slot * self._groups // self.count

    def _placed(self, of_each: np.ndarray) -> jax.Array:
        """Return a device array of one number per slot, sharded over the mesh if the session has one."""
        return place(of_each, "B", self._axes)

    def _again(self, slot: int) -> None:
        """Recompress the sequence in a slot, in place."""
        self._renew(slot, partial(self._compressed, key=self._keys[slot]))

    def _slide(self, slot: int) -> None:
        """Evict the entries outside the windows of a slot's sliding-window layers, in place."""
        self._renew(slot, partial(drop_outside_sliding_windows, rows=self.shape.rows))

    def _renew(self, slot: int, change: Callable[[KVCache], KVCache]) -> None:
        """Replace a slot's cache by the result of a function of it."""
        sequence = self.take(slot)
        cache = change(self._handle(sequence.arrays.cache))
        arrays = dataclasses.replace(sequence.arrays, cache=cache.arrays)
        self.insert(dataclasses.replace(sequence, arrays=arrays, **self._counts(cache)), slot)

    def _counts(self, cache: KVCache) -> dict[str, Any]:
        """Return the fields `beyond` and `left` of a cache's `Paused`."""
        over = beyond(cache) if self._every else np.zeros(self._groups, np.int64)
        return {"beyond": over, "left": self._free(cache)}

    def _free(self, cache: KVCache) -> Int[np.ndarray, " g"]:
        """Return the fewest free places `[g]` per mesh group in sliding-window layers, or the largest int64."""
        if not self._sliding.any():
            return np.full(self._groups, np.iinfo(np.int64).max)
        return cache.free_rows()[self._sliding].min(axis=0)

    def _compressed(self, cache: KVCache, key: PRNGKeyArray) -> KVCache:
        """Recompress a copy of a cache into pools of the slots' fixed size."""
        return recompress(
            self.session.params.flat, cache, key=key, headroom=self._every or 1, fixed=self._fixed
        )

    def _handle(self, arrays: Cache) -> KVCache:
        """Return the `KVCache` of the device arrays of a slot's sequence."""
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
    """Generator: prefill a dummy prompt of padded length `size`, with few tokens unless the policy rejects that.

    Return its cache in pools of a slot's size; raise ValueError if the policy rejects all prompts of this length.
    """
    # Clocks are not shared between threads.
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
