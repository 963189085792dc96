"""`Slots`: a running batch for continuous batching, whose sequences join and leave independently."""

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Int, PRNGKeyArray

from jaxkv import arguments
from jaxkv._checks import settled, use_package_jax_settings, validate_int
from jaxkv._errors import require
from jaxkv.cache import (
    CacheArrays,
    KVCache,
    drop_outside_sliding_windows,
    repack_through_host,
)
from jaxkv.cache.slot_copies import copy_from_slots, copy_into_slots, repeat_sequence_in_slots
from jaxkv.engine import token_loop
from jaxkv.engine.lengths import BLOCK, round_up_to_bucket
from jaxkv.engine.progress import Walk, run_generator
from jaxkv.engine.prompt_scores import UNSCORED, PromptScorer
from jaxkv.engine.recompress import (
    FixedSizes,
    count_entries_over_limit,
    find_due_sequences,
    recompress,
)
from jaxkv.engine.sampling import Sampler, collect_end_ids
from jaxkv.engine.sampling_extras import concatenate_logprobs, create_extras
from jaxkv.engine.sequences import PausedSequence, create_sequences
from jaxkv.engine.session import Session
from jaxkv.engine.slot_extras import SlotExtras
from jaxkv.engine.slot_shape import (
    EXTRAS,
    FEW,
    SlotPrograms,
    SlotShape,
    compute_slot_shape,
    uses_window_eviction,
)
from jaxkv.engine.spec import create_decode_spec
from jaxkv.machine import memory
from jaxkv.machine.compilation import StageClocks
from jaxkv.policies.policy import Policy
from jaxkv.sharding.mesh import copy_to_host, place_host_array
from jaxkv.text.prompts import EncodedPrompts, Prompt

# Number of parts of `Slots.compile_programs`.
PARTS = 2
# Errors that only leave a conversation unstored, a prompt read whole, or prompts read one by one.
MEMORY_ERRORS = (MemoryError, jax.errors.JaxRuntimeError)


class Slots:
    """A running batch of sequences that join and leave its slots independently, by programs compiled beforehand.

    The pools of a slot fit any prompt of up to `max_prompt` tokens and its new tokens. Prompts are prefilled directly
    into pools of that shape, so inserting a sequence is a copy. Sampled tokens depend neither on other sequences nor on
    the slot.

    ```python
    slots = Slots(jaxkv.Session(params, policy), count=4, max_prompt=2048, max_new_tokens=256)
    slots.insert_sequence(slots.begin_sequence(slots.prefill(ids), max_new_tokens=64), 2)
    tokens = slots.decode(8, until="any")          # [4, n], -1 where a slot samples nothing
    ```

    Attributes:
        session: model, policy and attention backends.
        count: number of slots.
        size: maximum number of tokens per call of the compiled loop.
        shape: maximum numbers of entries and tokens per slot.
        extras: penalties, biases and token masks of all slots, while a slot needs some.
        needed: bytes of the entries and states of all slots.
        done: mask `bool[B]` of slots that sample nothing: empty, released, or finished.
        programs: all programs that `compile_further_programs` compiles.
        uncompiled: those that it has not compiled yet, each with the error of the last attempt, or None.
        logprobs: `SampledLogprobs` of the tokens of the last `decode`, on the host; None if it ran without extras.
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
        prefill_tokens: int = 1,
        ends: int = 8,
        size: int = 64,
        start: bool = True,
    ):
        """Check arguments; if `start`, allocate `count` slots and compile the programs that fill and run them.

        Args:
            session: model, policy and attention backends.
            count: number of slots; on a mesh, a multiple of its groups.
            max_prompt: maximum number of tokens per prompt.
            max_new_tokens: maximum number of sampled tokens per sequence.
            max_question: maximum number of tokens per question.
            prefill_tokens: maximum number of padded tokens of prompts for which batches are compiled.
            ends: maximum number of ids that end a sequence.
            size: maximum number of tokens per call of the compiled loop.
            start: False defers allocation and compilation to `compile_programs`.

        Raises:
            ValueError: for a policy with a host store or chunked prefill; for a number of slots that the mesh cannot
                divide; for more tokens than the model has positions.
            MemoryError: if the slots need more bytes than are free.
        """
        params, self.session = session.params, session
        self.count = count = validate_int("count", count, "use at least 1 slot")
        self.size = validate_int("size", size, "sample at least 1 token per call")
        self._ends = validate_int("ends", ends, "allow at least 1 end id")
        max_prompt = validate_int("max_prompt", max_prompt, "allow prompts of at least 1 token")
        max_new_tokens = validate_int("max_new_tokens", max_new_tokens, "sample at least 1 token")
        max_question = validate_int(
            "max_question", max_question, "give 0 for none, or at least 1 token", least=0
        )
        config, parts, self._axes = params.config, session.policy.composed, params.axes
        self._groups, kv_shards = (
            (1, 1)
            if self._axes is None
            else (self._axes.count_axis_shards("B"), self._axes.count_axis_shards("K"))
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
        self.shape = compute_slot_shape(
            parts,
            config,
            prompt=max_prompt,
            question=max_question,
            new=max_new_tokens,
            kv_shards=kv_shards,
        )
        heads_here = config.kv_heads // kv_shards
        widest = max(
            parts.cache_layout.get_max_segment_length(rows, heads_here) for rows in self.shape.rows
        )
        self._fixed = FixedSizes(
            rows=self.shape.rows, padded_len=min(widest, self.shape.longest_text)
        )
        local = config.get_device_config(self._axes)
        each = self.shape.compute_slot_bytes(parts, local, params.cache_dtype.itemsize)
        self.needed = count * each
        device = None if self._axes is None else self._axes.mesh.local_devices[0]
        memory.require_free_bytes(self.needed // self._groups, f"count={count} slots", device)
        self._parts, self._every = parts, parts.recompression_interval
        # Layers that evict entries outside their sliding windows.
        self._sliding = np.asarray(
            [width is not None and uses_window_eviction(parts) for width in config.sliding_windows]
        )
        self._spec = create_decode_spec(
            params.flat_decoder,
            parts,
            padded_len=round_up_to_bucket(max_prompt),
            extended=parts.evicts_while_decoding
            and not parts.heads.is_uniform
            and max_question > 0,
            implementation=session.implementations.decode,
        )
        self.done: Bool[np.ndarray, " B"] = np.ones(self.count, bool)
        # Per slot, known without a device read: entries beyond the limit, and free places behind sliding-window
        # segments.
        self._beyond, self._left = (np.zeros(self.count, np.int64) for _ in range(2))
        self._keys: list[PRNGKeyArray] = [session.key] * self.count
        self._all: Any = ()
        self.extras = SlotExtras(
            count=count, groups=self._groups, vocab=config.vocab, axes=self._axes
        )
        self.logprobs = None
        # Each group of a mesh reads one prompt at a time.
        self.programs = self.shape.list_programs(prefill_tokens, 1 if self._axes else count)
        self.uncompiled = dict[SlotPrograms, Exception | None].fromkeys(self.programs)
        if start:
            self.compile_programs()

    @settled
    def prefill(self, ids: Prompt, *, key: PRNGKeyArray | int | None = None) -> KVCache:
        """Prefill prompts (mesh: one per group) into new pools of a slot's size; return a cache, in no slot.

        Any number of sequences can begin from the cache.

        Args:
            ids: token ids of one or several prompts; plain text if the model has a tokenizer.
            key: random key or seed in place of the session's.

        Returns:
            The cache.

        Raises:
            ValueError: for an empty or over-long prompt, or a budget that the policy does not support.
        """
        return run_generator(self.iterate_prefill(ids, key=key))

    def iterate_prefill(
        self,
        ids: Prompt,
        *,
        key: PRNGKeyArray | int | None = None,
        policy: Policy | None = None,
        scorer: PromptScorer = UNSCORED,
    ) -> Walk[KVCache]:
        """Generator: prefill prompts into slot-sized pools; yield layers run since the last yield; return `KVCache`.

        Slots may decode between two yields. `policy` is the slots' policy with another budget of at most as many
        entries. `scorer` scores the prompt's tokens.
        """
        with use_package_jax_settings():
            session = copy.copy(self.session)
            session.policy = self.session.policy if policy is None else policy
            encoded = session.tokenize_prompts(ids)
            longest, most = int(encoded.prompt_lengths.max()), self.shape.prompt
            require(
                longest <= most,
                "ids",
                f"{longest} tokens",
                f"longer than max_prompt={most} of these slots: shorten the prompt",
            )
            many = f"give one prompt, or one for each of the mesh's {self._groups} groups"
            fits = self._axes is None or len(encoded.ids) in (1, self._groups)
            require(fits, "ids", f"{len(encoded.ids)} prompts", many)
            needed = session.plan_without_memory_check(encoded.prompt_lengths, 0)
            needed = dataclasses.replace(needed, pools=self.shape.rows)
        cache = yield from session.iterate_prefill(encoded, needed=needed, key=key, scorer=scorer)
        # Limits are arrays of the cache: decoding does not depend on the budget.
        return dataclasses.replace(cache, policy=self.session.policy)

    @settled
    def extend(
        self,
        cache: KVCache,
        ids: Prompt,
        *,
        key: PRNGKeyArray | int | None = None,
        new: int | None = None,
        donate: bool = False,
    ) -> KVCache:
        """Append a question to each sequence of a cache (a copy unless `donate`); recompress if due; return the cache.

        Args:
            cache: from `prefill` of these slots.
            ids: token ids of one question per sequence.
            key: random key or seed in place of the session's.
            new: tokens of the answer to leave places for; by default as many as the slots allow.
            donate: True donates the cache's buffers.

        Returns:
            A new cache.

        Raises:
            ValueError: for an empty or over-long question, or a cache that does not come from these slots' `prefill`.
        """
        encoded = self.session.tokenize_prompts(ids)
        longest, most = int(encoded.prompt_lengths.max()), self.shape.question
        require(
            longest <= most,
            "ids",
            f"{longest} tokens",
            f"longer than max_question={most} of these slots: shorten the question",
        )
        self._require_compatible_cache(cache, self._count_needed_places(longest, new))
        many = f"the cache holds {cache.batch} sequences: give a question for each"
        require(len(encoded.ids) == cache.batch, "ids", f"{len(encoded.ids)} questions", many)
        copy = cache if donate else jax.tree.map(jnp.copy, cache)
        if self._count_free_window_places(copy).min() < longest:
            copy = drop_outside_sliding_windows(copy, self.shape.rows)
        copy = self.session.append_prompts(copy, encoded, self._spec)
        if not find_due_sequences(copy).any():
            return copy
        renewed = self._recompress_cache(copy, self.session.resolve_key(key))
        return dataclasses.replace(renewed, logits=copy.logits)

    def iterate_extend(
        self, cache: KVCache, encoded: EncodedPrompts, *, key: PRNGKeyArray | None, new: int
    ) -> Walk[KVCache]:
        """Generator: append the rest of a prompt to a cache (donated) in chunks, with yields between; return the cache.

        A chunk has at most as many tokens as a question. `new` tokens of an answer must fit behind the last one.
        """
        size, (ids,) = self.question_chunk, encoded.ids
        for at in range(0, len(ids), size):
            chunk = dataclasses.replace(encoded, ids=[ids[at : at + size]])
            cache = self.extend(cache, chunk, key=key, new=new, donate=True)
            yield 0.0
        return cache

    @property
    def question_chunk(self) -> int:
        """Maximum tokens that `iterate_extend` appends at a time."""
        return min(BLOCK, self.shape.question)

    def place_stored_cache(self, cache: KVCache, question: int, new: int) -> KVCache | None:
        """Return a copy of a cache from host memory in a slot's shape; None unless question and answer fit behind it.

        `question` and `new` are numbers of tokens.
        """
        free = self.shape.count_places_after_repacking(cache, self._sliding)
        if self._count_needed_places(question, new) > free:
            return None
        return repack_through_host(cache, self._axes, rows=self.shape.rows)

    @settled
    def copy_cache(self, slot: int) -> KVCache:
        """Return a copy of the cache of a slot's sequence; the slot is unchanged."""
        return dataclasses.replace(
            self._wrap_in_kv_cache(self.copy_sequence(slot).arrays.cache),
            model=self.session.params.fingerprint,
        )

    def _count_needed_places(self, question: int, new: int | None) -> int:
        """Return the free places per segment that a question and its answer need; compression empties places itself."""
        answer = 0 if self._parts.decoding_compression.compresses else new or self.shape.new
        return question + answer

    @settled
    def begin_sequence(
        self,
        cache: KVCache,
        *,
        max_new_tokens: int,
        sampling: Sampler | None = None,
        eos: Iterable[int] = (),
        key: PRNGKeyArray | int | None = None,
        prompt: Sequence[int] = (),
        extras: bool = False,
        row: int = 0,
    ) -> PausedSequence:
        """Return a `PausedSequence` to sample tokens on top of a cache after `insert_sequence`; the cache is unchanged.

        The last sampled token, including one in `eos`, does not run through the model.

        Args:
            cache: from `prefill` or `extend` of these slots.
            max_new_tokens: maximum number of tokens to sample.
            sampling: sampler; greedy if None.
            eos: ids that end the sequence.
            key: random key or seed in place of the session's.
            prompt: known token ids before the answer, for `repetition_penalty`.
            extras: True for a sequence with token masks (`extras.set_token_masks`).
            row: index of the sequence in a cache of several prompts without a mesh; it is copied.

        Returns:
            The paused sequence.

        Raises:
            ValueError: for more tokens or end ids than the slots allow, or a cache that does not come from these slots.
            TypeError: for a custom sampler.
        """
        new = validate_int("max_new_tokens", max_new_tokens, "sample at least 1 token")
        self._require_compatible_cache(
            cache, 1 if self._parts.decoding_compression.compresses else new
        )
        sampling, vocab = arguments.validate_sampler(sampling), self.session.params.config.vocab
        most, ids = self.shape.new, collect_end_ids(sampling, eos)
        require(new <= most, "max_new_tokens", new, f"more than the slots' {most}: lower it")
        require(len(ids) <= self._ends, "eos", ids, f"more than {self._ends}: give fewer")
        key = self.session.resolve_key(key)
        table = np.full(self._ends, -2, np.int32)
        table[: len(ids)] = ids
        arrays, batch = create_sequences(cache, new, sampling, table, key), self._groups
        created = create_extras(
            sampling, [prompt] * batch, batch=batch, vocab=vocab, axes=self._axes, always=extras
        )
        told = self._count_entries_and_places(cache)
        if len(cache.seen) > self._groups:
            at = np.asarray([row], np.int32)
            arrays = copy_from_slots(arrays, self._place_slot_values(at), axes=self._axes)
            told = {name: each[at] for name, each in told.items()}
        return PausedSequence(arrays=arrays, key=key, done=False, extras=created, **told)

    @settled
    def peek_first_token(self, sequence: PausedSequence) -> int:
        """Return the id of the first token that a `PausedSequence` without extras will sample; change nothing."""
        arrays = sequence.arrays
        seen = arrays.cache.tables.seen
        return int(
            copy_to_host(
                token_loop.run_sampling_step(
                    arrays.sampling_state, seen, arrays.sampling, axes=self._axes
                ).token
            )[0]
        )

    @settled
    def insert_sequence(self, sequence: PausedSequence, slot: int) -> None:
        """Copy a `PausedSequence` into a slot of the running batch, in place; other slots are unchanged."""
        where = self._place_slot_values(self._locate_slot_in_groups(slot))
        self._all = copy_into_slots(self._all, sequence.arrays, where, axes=self._axes)
        self.extras.insert(sequence.extras, slot, where)
        self.done[slot] = sequence.done
        group = self._find_mesh_group(slot)
        self._beyond[slot], self._left[slot] = sequence.beyond[group], sequence.left[group]
        self._keys[slot] = sequence.key

    @settled
    def copy_sequence(self, slot: int) -> PausedSequence:
        """Return a copy of a slot's sequence as `PausedSequence`, to insert into any slot; the slot is unchanged."""
        where = self._place_slot_values(self._locate_slot_in_groups(slot))
        arrays = copy_from_slots(self._all, where, axes=self._axes)
        over, left = (np.full(self._groups, each[slot]) for each in (self._beyond, self._left))
        return PausedSequence(
            arrays=arrays,
            key=self._keys[slot],
            beyond=over,
            left=left,
            done=bool(self.done[slot]),
            extras=self.extras.copy(slot, where),
        )

    @settled
    def release_slots(self, slots: Iterable[int]) -> None:
        """End the sequences in the given slots; these slots sample nothing until the next `insert_sequence`."""
        which = np.zeros(self.count, bool)
        for slot in slots:
            self._require_valid_slot(slot)
            which[slot] = True
        self.done |= which
        sampling_state = dataclasses.replace(
            self._all.sampling_state,
            done=self._all.sampling_state.done | self._place_slot_values(which),
        )
        self._all = dataclasses.replace(self._all, sampling_state=sampling_state)

    @settled
    def decode(self, steps: int, *, until: Literal["any", "all"] = "all") -> Int[np.ndarray, "B n"]:
        """Sample up to `steps` tokens in every active slot, recompress sequences when due; return the ids `i32[B, n]`.

        Args:
            steps: maximum number of tokens per slot.
            until: "any" stops as soon as another slot is done, "all" when all slots are done.

        Returns:
            Token ids `i32[B, n]`, -1 where none was sampled.

        Raises:
            ValueError: for another `until`, or fewer than 1 step.
        """
        require(until in ("any", "all"), "until", until, "unknown value: give 'any' or 'all'")
        steps = validate_int("steps", steps, "sample at least 1 token")
        idle = self.count - 1 if until == "all" else int(self.done.sum())
        parts = [(np.zeros((self.count, 0), np.int32), None)]
        while steps and self.done.sum() <= idle:
            parts.append(self._run_token_loop(steps, idle))
            steps -= parts[-1][0].shape[1]
        tokens, logprobs = zip(*parts, strict=True)
        # Once no slot needs extras, none does until the next call: calls without them are the last.
        self.logprobs = concatenate_logprobs(logprobs)
        return np.concatenate(tokens, axis=1)

    def _run_token_loop(self, steps: int, idle: int) -> tuple[Int[np.ndarray, "B n"], Any]:
        """Recompress or evict in slots that are due, run the compiled loop once; return ids, -1 for none, and logprobs.

        The call ends before `steps` tokens if a sequence must be recompressed or must evict entries outside its
        windows.
        """
        steps = min(steps, self.size)
        if self._every is not None:
            for slot in np.flatnonzero(~self.done & (self._beyond >= self._every)).tolist():
                self._recompress_slot(slot)
            steps = min(steps, self._every - int(self._beyond[~self.done].max(initial=0)))
        if self._sliding.any():
            for slot in np.flatnonzero(~self.done & (self._left == 0)).tolist():
                self._evict_outside_windows(slot)
            steps = min(steps, int(self._left[~self.done].min(initial=steps)))
        self.extras.drop_if_unneeded(self.done)
        before, now, flat = self.done, self._all, self.session.params.flat_decoder
        cache, sampling_state, out, ran, logprobs = token_loop.decode(
            flat,
            now.cache,
            dataclasses.replace(now.sampling_state, extras=self.extras.arrays),
            steps,
            spec=self._spec,
            sampling=now.sampling,
            size=self.size,
            idle=idle,
        )
        tokens, self.done = (
            copy_to_host(out)[:, : int(copy_to_host(ran))],
            np.array(copy_to_host(sampling_state.done)),
        )
        logprobs = jax.tree.map(lambda each: copy_to_host(each)[:, : tokens.shape[1]], logprobs)
        self.extras.arrays = sampling_state.extras
        sampling_state = dataclasses.replace(sampling_state, extras=None)
        self._all = dataclasses.replace(now, cache=cache, sampling_state=sampling_state)
        # The token that ends a sequence adds no entry.
        rows = (tokens >= 0).sum(axis=1) - (self.done & ~before)
        self._beyond, self._left = self._beyond + rows, self._left - rows
        return tokens, logprobs

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays of all slots (cache, sampling state, sampler, extras), over all devices."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves((self._all, self.extras.arrays)))

    @settled
    def compile_programs(
        self, tick: Callable[[str], object] = lambda what: None, *, lengths: bool = True
    ) -> None:
        """Allocate slots; compile the decode loop and all padded lengths (one unless `lengths`) on dummy prompts."""
        tick("prefill")
        cache = None
        while cache is None:
            first = next(iter(self.uncompiled))
            self._usual = first.length
            cache = run_generator(self.compile_further_programs(first))
        begun = self.begin_sequence(cache, max_new_tokens=min(2, self.shape.new))
        self.peek_first_token(begun)
        self._all = repeat_sequence_in_slots(begun.arrays, slots=self.count, axes=self._axes)
        self.release_slots(range(self.count))
        self.insert_sequence(begun, 0)
        tick("decode loop")
        self.decode(1)
        self.insert_sequence(self.copy_sequence(0), 0)
        if self._every is not None:
            self._recompress_slot(0)
        if self._sliding.any():
            self._evict_outside_windows(0)
        self.release_slots(range(self.count))
        for programs in [*self.uncompiled] if lengths else ():
            try:
                if programs != EXTRAS:
                    run_generator(self.compile_further_programs(programs))
            except MEMORY_ERRORS as error:
                if programs.batch == 1:
                    raise
                self.uncompiled[programs] = error
        jax.block_until_ready(self._all)
        memory.release_freed_memory()

    @settled
    def _compile_extras(self) -> None:
        """Compile the decode loop with extras, and their copies."""
        where = self._place_slot_values(self._locate_slot_in_groups(0))
        now, flat = self._all, self.session.params.flat_decoder
        spare = dataclasses.replace(self.extras, arrays=None)
        spare.insert(spare.create_neutral(self._groups), 0, where)
        spare.copy(0, where)
        state = dataclasses.replace(now.sampling_state, extras=spare.arrays)
        given = token_loop.collect_loop_arguments(
            flat, now.cache, state, 1, now.sampling, 0, spec=self._spec
        )
        token_loop.compile_loop(given, spec=self._spec, size=self.size)

    def compile_further_programs(self, programs: SlotPrograms) -> Walk[KVCache | None]:
        """Generator: compile some of `uncompiled`, with yields between; return a dummy cache, if prompts were run.

        Slots are unchanged, so another thread may use them. The programs of a length that the policy rejects count as
        compiled.
        """
        cache, asks = None, programs.kind == "question"
        size, batch = self._usual if asks else programs.length, programs.batch
        if programs == EXTRAS:
            self._compile_extras()
        else:
            with contextlib.suppress(ValueError):
                cache = yield from _prefill_dummy_prompts(self.session, self.shape, size, batch)
        if cache and batch > 1:
            self.begin_sequence(cache, max_new_tokens=1)
        if cache and asks:
            cache = self.extend(cache, [0] * min(programs.length, self.shape.question))
            if self._parts.decoding_compression.compresses:
                self._recompress_cache(cache, self.session.key)
        del self.uncompiled[programs]
        return cache

    def _locate_slot_in_groups(self, slot: int) -> Int[np.ndarray, " g"]:
        """Return one number per mesh group, `[g]`: the slot's index for the group that holds the slot, else -1."""
        self._require_valid_slot(slot)
        return np.where(np.arange(self._groups) == self._find_mesh_group(slot), slot, -1).astype(
            np.int32
        )

    def _require_valid_slot(self, slot: int) -> None:
        """Raise ValueError unless the slot index is in [0, count)."""
        require(0 <= slot < self.count, "slot", slot, f"no such slot: give 0 to {self.count - 1}")

    def _require_compatible_cache(self, cache: KVCache, rows: int) -> None:
        """Raise ValueError for another model's, policy's or slots' cache, or one with fewer than `rows` free places."""
        arguments.require_matching_cache(self.session.params, cache, self.session.policy)
        self.shape.require_cache_fits(self._parts, cache, rows, self._sliding)

    def _find_mesh_group(self, slot: int) -> int:
        """Return the index of the mesh group that holds a slot."""
        return slot * self._groups // self.count

    def _place_slot_values(self, of_each: np.ndarray) -> jax.Array:
        """Return an array of one value per slot as a device array, sharded over the mesh if the session has one."""
        return place_host_array(of_each, "B", self._axes)

    def _recompress_slot(self, slot: int) -> None:
        """Recompress the sequence in a slot, in place, if it exceeds its limit by `every` entries."""
        self._replace_slot_cache(slot, partial(self._recompress_cache, key=self._keys[slot]))

    def _evict_outside_windows(self, slot: int) -> None:
        """Evict the entries outside the windows of a slot's sliding-window layers, in place."""
        self._replace_slot_cache(slot, partial(drop_outside_sliding_windows, rows=self.shape.rows))

    def _replace_slot_cache(self, slot: int, change: Callable[[KVCache], KVCache]) -> None:
        """Replace a slot's cache, in place, by the result of a function of it, and update the slot's counters."""
        sequence = self.copy_sequence(slot)
        cache = change(self._wrap_in_kv_cache(sequence.arrays.cache))
        arrays = dataclasses.replace(sequence.arrays, cache=cache.arrays)
        self.insert_sequence(
            dataclasses.replace(sequence, arrays=arrays, **self._count_entries_and_places(cache)),
            slot,
        )

    def _count_entries_and_places(self, cache: KVCache) -> dict[str, Any]:
        """Return a dict of `beyond`, most entries over limit, `left`, free window places, per sequence."""
        none = np.zeros(len(cache.seen), np.int64)
        over = count_entries_over_limit(cache) if self._every else none
        return {"beyond": over, "left": self._count_free_window_places(cache)}

    def _count_free_window_places(self, cache: KVCache) -> Int[np.ndarray, " B"]:
        """Return the fewest free places `[B]` of sliding-window layers per sequence; the largest int64 if none."""
        if not self._sliding.any():
            return np.full(len(cache.seen), np.iinfo(np.int64).max)
        return cache.compute_sequence_headroom()[self._sliding].min(axis=0)

    def _recompress_cache(self, cache: KVCache, key: PRNGKeyArray) -> KVCache:
        """Return a copy of a cache with due sequences recompressed, in pools of the slots' fixed size."""
        return recompress(
            self.session.params.flat_decoder,
            cache,
            key=key,
            headroom=self._every or 1,
            fixed=self._fixed,
        )

    def _wrap_in_kv_cache(self, arrays: CacheArrays) -> KVCache:
        """Wrap a slot's cache arrays in a `KVCache` with the slots' policy, model config and layout."""
        return KVCache(
            arrays=arrays,
            layout=self._parts.cache_layout,
            policy=self.session.policy,
            config=self.session.params.config,
            dtype=self.session.params.dtype.name,
            padded_len=round_up_to_bucket(self.shape.prompt),
            axes=self._axes,
        )


def _prefill_dummy_prompts(
    session: Session, shape: SlotShape, size: int, batch: int
) -> Walk[KVCache]:
    """Generator: prefill dummy prompts of padded length `size`, of few tokens if possible; return their `KVCache`.

    Return a cache in pools of a slot's size; raise ValueError if the policy rejects all prompts of this length.
    """
    # Clocks are not shared between threads.
    session = copy.copy(session)
    session.clocks = StageClocks()
    longest = min(size, shape.prompt)
    planned = dataclasses.replace(
        session.plan_without_memory_check(np.full(batch, longest), 0), pools=shape.rows
    )
    try:
        few = min(longest, FEW)
        numbers = session.plan_without_memory_check(np.full(batch, few), 0).numbers
        planned = dataclasses.replace(planned, numbers=numbers)
    except ValueError:
        few = longest
    return (yield from session.iterate_prefill([[0] * few] * batch, needed=planned))
