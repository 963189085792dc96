"""`Session`: a model and a policy; prefill makes caches, extend adds tokens to them, sample generates tokens."""

import dataclasses
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import jax
import numpy as np
from jaxtyping import Int, PRNGKeyArray

from jaxkv import arguments
from jaxkv._checks import own_settings, settled, whole
from jaxkv._errors import require
from jaxkv.attention import Implementation
from jaxkv.cache import KVCache, Turn
from jaxkv.cache.host_store import Loader, Traffic
from jaxkv.engine import decode as decoding
from jaxkv.engine import prefill as prefilling
from jaxkv.engine.decode_loop import DecodeLoop
from jaxkv.engine.headroom import MOST_AHEAD, first_headroom, forked, make_headroom, ready_to_decode
from jaxkv.engine.lengths import SHORT, bucket, tokens_per_call
from jaxkv.engine.plan import PrefillPlan, check_memory, plan_prefill
from jaxkv.engine.progress import Walk, run_to_end
from jaxkv.engine.recompress import due, recompress
from jaxkv.engine.replay import Padded, texts_of
from jaxkv.engine.sampling import Sampler, is_greedy
from jaxkv.engine.spec import Spec, implementations_for, spec_for
from jaxkv.loading import LanguageModel
from jaxkv.machine import hosts, memory
from jaxkv.machine.compilation import Clocks
from jaxkv.policies.model_policy import policy_for
from jaxkv.policies.policy import Policy
from jaxkv.sharding.mesh import missing
from jaxkv.text.prompts import Encoded, Prompt, encode


class Session:
    """A model and a policy with the steps of `generate` as methods: prefill, extend, sample; calls return new caches.

    Caches are immutable: calls return new ones, and reuse the buffers of the one given only with `donate`.

    ```python
    session = jaxkv.Session(params, jaxkv.SnapKV(budget=256))
    cache = session.prefill(document)
    cache = session.extend(cache, question)
    cache, tokens = session.draw(cache, 32)
    ```

    Attributes:
        params: the model.
        policy: the compression.
        implementations: attention backends of prefill and decode.
        texts: token ids that a second pass reads before each chunk; None for policies that read prompts once.
        key: random key for policies that use random numbers, and for sampling.
        clocks: wall-clock seconds that the session has taken so far.
        read, decode_traffic: transfers from host memory for tokens read on top of caches, and for tokens sampled.
    """

    @settled
    def __init__(
        self,
        params: LanguageModel,
        policy: Policy | type[Policy] | str | None = None,
        *,
        implementation: Implementation | str | None = Implementation.AUTO,
        key: PRNGKeyArray | int | None = None,
    ):
        """Makes a session: checks the arguments and chooses attention backends; compiles nothing.

        Args:
            params: from `jaxkv.load`.
            policy: the compression, or the name or class of one with its defaults; FullKV() keeps everything.
            implementation: attention backend; by default the fastest one here.
            key: random key or seed, for policies that use random numbers and for sampling.

        Raises:
            ValueError: for a policy that the model cannot honour.
            TypeError: for an argument of the wrong kind, with what to give instead.
        """
        self.params = arguments.as_model(params)
        fitted = policy_for(
            policy, self.params.config, self.params.filter_layers, dtype=self.params.cache_dtype
        )
        self.policy = fitted
        self.implementations = implementations_for(
            params, self.policy, arguments.as_implementation(implementation)
        )
        self.texts = texts_of(self.policy.composed.needs.replay, params.text, params.config)
        self.clocks, self.question_traffic, self.decode_traffic = Clocks(), Traffic(), Traffic()
        given = arguments.as_key(key)
        self._keyed = given is not None
        with self.clocks.prefill:
            self.key = jax.random.key(0) if given is None else given

    def plan(self, lengths: Int[np.ndarray, " B"], new: int = 0) -> PrefillPlan:
        """Plan of a prefill with room for `new` tokens; raises MemoryError if its bytes do not fit into free memory.

        Args:
            lengths: `[B]` tokens of each prompt.
            new: tokens that will be sampled.

        Returns:
            The plan.

        Raises:
            MemoryError: if the plan's bytes, which it names, are not free.
        """
        parts, config, mesh = self.policy.composed, self.params.config, self.params.flat.mesh
        device = None if mesh is None else mesh.local_devices[0]
        headroom = first_headroom(parts, config.sliding_windows, lengths, new) if new else 0
        needed = self.planned(lengths, headroom)
        with self.clocks.prefill, hosts.together("a session's plan", mesh):
            check_memory(needed, device)
            if new > MOST_AHEAD and not parts.ongoing.compresses:
                # The cache grows to that size on the way, where a MemoryError would lose the answer.
                grown = self.planned(lengths, bucket(new)).cache_bytes
                memory.check_bytes(grown, f"the cache behind max_new_tokens={new}", device)
        return needed

    def planned(
        self, lengths: Int[np.ndarray, " B"], headroom: int | tuple[int, ...]
    ) -> PrefillPlan:
        """Plan of a prefill with `headroom` free places behind each segment; does not check memory.

        Bytes are those of one device, on a CPU's mesh those of all its devices, which are in one memory.

        Args:
            lengths: `[B]` tokens of each prompt.
            headroom: entries to leave behind every segment; one number, or one for each layer.

        Returns:
            The plan.

        Raises:
            ValueError: for a budget the policy cannot honour.
        """
        params, axes = self.params, self.params.axes
        mine = plan_prefill(
            params.config,
            self.policy,
            lengths.tolist(),
            dtype=params.cache_dtype,
            headroom=headroom,
            mesh=params.flat.mesh,
            implementation=self.implementations.prefill,
        )
        if axes is None:
            return mine
        held, peak = (each * axes.in_one_memory for each in (mine.cache_bytes, mine.peak_bytes))
        # Entries wait beside each device that reads them, in the memory of its process' machine.
        waiting = mine.host_bytes * len(axes.mesh.local_devices)
        return dataclasses.replace(mine, cache_bytes=held, peak_bytes=peak, host_bytes=waiting)

    @settled
    def prefill(
        self,
        ids: Prompt | Encoded,
        *,
        new: int = 0,
        needed: PrefillPlan | None = None,
        tick: Callable[..., object] = lambda layers=1.0: None,
        key: PRNGKeyArray | int | None = None,
    ) -> KVCache:
        """Runs prompts through the model; returns a cache of their keys and values, compressed by the policy.

        Args:
            ids: token ids of a prompt, or of several; plain text if the model has a tokenizer.
            new: tokens to be sampled later, for which room is left.
            needed: a plan in place of the one that `plan` gives.
            tick: called with the number of layers done since its last call.
            key: random key or seed for policies that use random numbers, in place of the session's.

        Returns:
            The cache, with the logits of each prompt's last token.

        Raises:
            ValueError: for an empty or over-long prompt, or a budget the policy cannot honour.
            MemoryError: if the plan's bytes, which it names, are not free.
        """
        walk = self.prefilling(ids, new=new, needed=needed, key=key)
        return run_to_end(walk, lambda layers: tick(layers) if layers else None)

    def prefilling(
        self,
        ids: Prompt | Encoded,
        *,
        new: int = 0,
        needed: PrefillPlan | None = None,
        key: PRNGKeyArray | int | None = None,
    ) -> Walk[KVCache]:
        """Generator form of `prefill`: yields layers run since the last yield (a float); returns the `KVCache`.

        Args:
            ids: token ids of a prompt, or of several; plain text if the model has a tokenizer.
            new: tokens to be sampled later, for which room is left.
            needed: a plan in place of the one that `plan` gives.
            key: random key or seed for policies that use random numbers, in place of the session's.

        Yields:
            Layers run since the last time: 1 after each, 0 after a layer was packed, and fractions for policies that
            read prompts in chunks.

        Returns:
            The cache, with the logits of each prompt's last token.

        Raises:
            ValueError: for an empty or over-long prompt, or a budget the policy cannot honour.
            MemoryError: if the plan's bytes, which it names, are not free.
        """
        with own_settings():
            self._require_same("prefill", ids, new=new, needed=needed, key=key)
            encoded, params = self.encoded(ids), self.params
            self._check(encoded.lengths, new)
            needed = self.plan(encoded.lengths, new) if needed is None else needed
            copies = missing(len(encoded.ids), params.axes)
            every = encoded.with_copies(copies)
            padded = Padded(every.padded(needed.padded_len), every.lengths, self.texts)
            walk = prefilling.prefill(
                params.flat,
                padded,
                self.policy,
                needed.with_copies(copies),
                key=self.key_of(key),
                implementation=self.implementations.prefill,
            )
        while True:
            try:
                with own_settings(), self.clocks.prefill:
                    layers = next(walk)
            except StopIteration as end:
                cache, logits = end.value
                break
            yield layers
        with own_settings(), self.clocks.prefill:
            jax.block_until_ready((logits, cache))
        return dataclasses.replace(
            cache, model=params.fingerprint, turn=encoded.turn, logits=logits, padding=copies
        )

    @settled
    def extend(
        self,
        cache: KVCache,
        ids: Prompt | Encoded,
        *,
        new: int = 0,
        chunk: int | None = None,
        donate: bool = False,
    ) -> KVCache:
        """Runs prompts on top of a cache; returns a cache with entries added; `new` recompresses sequences over limit.

        Args:
            cache: of this model and policy; one sequence serves many prompts.
            ids: token ids of a prompt for each sequence; plain text if the model has a tokenizer.
            new: tokens to be sampled later; with it, sequences over their limit are recompressed and room is made.
            chunk: tokens at a time; by default 256, or 64 or 128 if they are fewer. Tokens read one at a time evict
                entries and read chosen entries as sampled tokens do.
            donate: True gives the cache up, so that its own buffers are written.

        Returns:
            The cache, with the logits of each prompt's last token.

        Raises:
            ValueError: for an empty or over-long prompt, or a cache of another policy or model.
            MemoryError: if the copy does not fit.
        """
        self._require_same("extend", ids, cache=cache, new=new, chunk=chunk, donate=donate)
        chunk = None if chunk is None else whole("chunk", chunk, "read at least 1 token at a time")
        encoded, flat = self.encoded(ids, cache), self.params.flat
        self._check(encoded.lengths, new, cache)
        batch, longest = len(encoded.ids), int(encoded.lengths.max())
        with self.clocks.prefill:
            if not donate or cache.batch != batch or cache.free().min() < longest:
                cache = forked(cache, batch, max(SHORT, longest), new)
            spec = spec_for(flat, cache, self.implementations.decode)
            cache = self.on_top(cache, encoded, spec, chunk)
            logits = cache.logits
            cache = dataclasses.replace(cache, extended=cache.extended or chunk != 1)
            if new and self.policy.composed.ongoing.compresses:
                # Of a long question only those entries stay that the policy keeps.
                cache = make_headroom(flat, cache, new, key=self.key)
            jax.block_until_ready((logits, cache))
        return dataclasses.replace(cache, logits=logits)

    def on_top(
        self, cache: KVCache, encoded: Encoded, spec: Spec, chunk: int | None = None
    ) -> KVCache:
        """Reads a prompt for each sequence on top of a cache, whose buffers are given up; returns it with new logits.

        Args:
            cache: with room for the prompts.
            encoded: the prompts; the last one is read by what fills up a mesh's groups, too.
            spec: static config of the program.
            chunk: tokens at a time; by default as many as the prompts' length asks for.
        """
        longest = int(encoded.lengths.max())
        size = tokens_per_call(max(SHORT, longest)) if chunk is None else chunk
        every = encoded.with_copies(len(cache.seen) - len(encoded.ids))
        loader = Loader.of(cache.host_store, self.question_traffic)
        run = partial(decoding.extend, self.params.flat, spec=spec, loader=loader)
        tokens = every.padded(-(-longest // size) * size)
        logits, cache = decoding.read_on_top(run, cache, tokens, every.lengths, size=size)
        return dataclasses.replace(cache, logits=logits, turn=encoded.turn)

    @settled
    def sample(
        self,
        cache: KVCache,
        steps: int,
        *,
        new: int | None = None,
        sampling: Sampler | None = None,
        eos: Iterable[int] = (),
        key: PRNGKeyArray | int | None = None,
        donate: bool = False,
    ) -> tuple[KVCache, Int[np.ndarray, "B n"]]:
        """Samples up to `steps` tokens per sequence on top of a cache; returns the new cache and the token ids.

        Args:
            cache: from this session, or another of the same model and policy.
            steps: the most tokens to sample per sequence.
            new: tokens that this call and the following ones will sample together, so that they share programs; by
                default `steps`.
            sampling: how to sample; the likeliest tokens if None.
            eos: ids that end a sequence.
            key: random key or seed for the sampling, in place of the session's.
            donate: True gives the cache up, so that its own buffers are written.

        Returns:
            The cache with the tokens, ready for the next ones; and the tokens `i32[B, n]`, -1 behind a sequence's end.

        Raises:
            ValueError: for a cache without logits, or of another policy or model; for too many steps.
        """
        self._require_same(
            "draw",
            None,
            cache=cache,
            steps=steps,
            new=new,
            sampling=sampling,
            eos=eos,
            key=key,
            donate=donate,
        )
        steps = whole("steps", steps, "sample at least 1 token")
        self._check(np.zeros(cache.batch, np.int32), steps, cache)
        new = steps if new is None else max(steps, whole("new", new, "sample at least 1 token"))
        if not donate:
            with self.clocks.decode:
                cache = forked(cache, cache.batch, 0, new)
        decode_loop, parts = (
            self.decode_loop(cache, new=new, sampling=sampling, eos=eos, key=key),
            [],
        )
        with self.clocks.decode:
            while steps and not decode_loop.done.all():
                parts.append(decode_loop.sample(steps))
                steps -= parts[-1].shape[1]
            return decode_loop.close(), np.concatenate(parts, axis=1)

    @settled
    def decode_loop(
        self,
        cache: KVCache,
        *,
        new: int,
        sampling: Sampler | None = None,
        eos: Iterable[int] = (),
        key: PRNGKeyArray | int | None = None,
    ) -> DecodeLoop:
        """Makes a `DecodeLoop` object, which takes over a cache (donates its buffers) and samples tokens block by block.

        Args:
            cache: with logits; its buffers are given up.
            new: tokens that will be sampled.
            sampling: how to sample; the likeliest tokens if None.
            eos: ids that end a sequence.
            key: random key or seed for the sampling, in place of the session's.

        Raises:
            ValueError: for a cache without logits.
        """
        self._check(np.zeros(cache.batch, np.int32), 0, cache)
        sampling = arguments.as_sampling(sampling)
        keyed = is_greedy(sampling) or self._keyed or key is not None
        require(
            keyed, "key", key, f"{sampling} samples at random: give key=jax.random.key(0), or key=0"
        )
        remedy = "give what a session's prefill, extend or sample returned"
        require(cache.logits is not None, "cache", "without logits", remedy)
        flat, key = self.params.flat, self.key_of(key)
        with self.clocks.decode:
            cache = ready_to_decode(flat, cache, new, key=key)
            return DecodeLoop(
                flat,
                cache,
                spec=spec_for(flat, cache, self.implementations.decode),
                sampling=sampling,
                eos=tuple(eos),
                key=key,
                new=new,
                traffic=self.decode_traffic,
            )

    @settled
    def compress_again(self, cache: KVCache, *, headroom: int = 0) -> KVCache:
        """Compresses sequences again that are `every` entries over their limit; returns a new cache, or the same if none.

        Args:
            cache: of this model and policy.
            headroom: free places to leave behind every segment.

        Returns:
            A new cache; the same one if no sequence is due.

        Raises:
            ValueError: for a cache of another policy or model.
        """
        self._check(np.zeros(cache.batch, np.int32), 0, cache)
        if not due(cache).any():
            return cache
        with self.clocks.decode:
            return jax.block_until_ready(
                recompress(self.params.flat, cache, key=self.key, headroom=headroom)
            )

    def key_of(self, given: PRNGKeyArray | int | None) -> PRNGKeyArray:
        """Random key of a call: the key or seed that it was given, else the session's."""
        key = arguments.as_key(given)
        return self.key if key is None else key

    def _require_same(self, call: str, ids: Any, **given: Any) -> None:
        """Raises an error if arguments differ between a mesh's processes; encoded prompts were compared before."""
        if not isinstance(ids, Encoded):
            mine = {
                "policy": self.policy,
                "session.key": self.key,
                "implementation": self.implementations,
            }
            hosts.require_same(f"Session.{call}", self.params, None, **{"ids": ids} | mine | given)

    def encoded(self, ids: Prompt | Encoded, cache: KVCache | None = None) -> Encoded:
        """Prompts as `Encoded` token ids, tokenised if needed; plain text continues the cache's conversation."""
        if isinstance(ids, Encoded):
            return ids
        turn = Turn.START if cache is None else cache.turn
        return encode(ids, self.params.text, self.params.config, raw=True, close=False, turn=turn)

    def _check(
        self, lengths: Int[np.ndarray, " B"], new: int, cache: KVCache | None = None
    ) -> None:
        """Raises an error for a cache of another model or policy, or more tokens than the model has positions."""
        if cache is not None:
            arguments.require_ours(self.params, cache, self.policy)
        arguments.require_fits(self.params.config, self.policy, lengths, new, cache)
