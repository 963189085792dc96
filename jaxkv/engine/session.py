"""`Session`: a model and a policy; `prefill` creates caches, `extend` appends tokens, `sample` generates tokens."""

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
    """A model and a policy, with the steps of `generate` as methods: prefill, extend, sample.

    Caches are immutable: each call returns a new one, and reuses the buffers of its argument only with `donate`.

    ```python
    session = jaxkv.Session(params, jaxkv.SnapKV(budget=256))
    cache = session.prefill(document)
    cache = session.extend(cache, question)
    cache, tokens = session.sample(cache, 32)
    ```

    Attributes:
        params: the model.
        policy: the compression policy.
        implementations: attention backends of prefill and decode.
        texts: token ids that a second pass runs before each chunk; None for policies without a second pass.
        key: random key for sampling and for policies that use random numbers.
        clocks: wall-clock seconds of prefill and decode so far.
        question_traffic, decode_traffic: transfers from host memory for prompts on top of caches, and for sampled
            tokens.
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
        """Check the arguments and select attention backends; compile nothing.

        Args:
            params: model from `jaxkv.load`.
            policy: compression policy, or the name or class of one with default arguments; `FullKV()` keeps every
                entry.
            implementation: attention backend; by default the fastest one on this device.
            key: random key or seed, for sampling and for policies that use random numbers.

        Raises:
            ValueError: for a policy that the model does not support.
            TypeError: for an argument of the wrong type.
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
        """Plan a prefill with headroom for `new` tokens, and check that its bytes fit into free memory.

        Args:
            lengths: number of tokens of each prompt, `[B]`.
            new: number of tokens to sample later.

        Returns:
            The plan.

        Raises:
            MemoryError: if the plan's bytes exceed free memory.
        """
        parts, config, mesh = self.policy.composed, self.params.config, self.params.flat.mesh
        device = None if mesh is None else mesh.local_devices[0]
        headroom = first_headroom(parts, config.sliding_windows, lengths, new) if new else 0
        needed = self.planned(lengths, headroom)
        with self.clocks.prefill, hosts.together("a session's plan", mesh):
            check_memory(needed, device)
            if new > MOST_AHEAD and not parts.ongoing.compresses:
                # The cache will grow to this size, and a MemoryError during decoding would lose the answer.
                grown = self.planned(lengths, bucket(new)).cache_bytes
                memory.check_bytes(grown, f"the cache for max_new_tokens={new}", device)
        return needed

    def planned(
        self, lengths: Int[np.ndarray, " B"], headroom: int | tuple[int, ...]
    ) -> PrefillPlan:
        """Plan a prefill with `headroom` free places behind each segment, without a memory check.

        Bytes are those of one device; on a CPU mesh, of all its devices, which share one memory.

        Args:
            lengths: number of tokens of each prompt, `[B]`.
            headroom: free places behind every segment, or one number per layer.

        Returns:
            The plan.

        Raises:
            ValueError: for a budget that the policy does not support.
        """
        params, axes = self.params, self.params.axes
        plan = plan_prefill(
            params.config,
            self.policy,
            lengths.tolist(),
            dtype=params.cache_dtype,
            headroom=headroom,
            mesh=params.flat.mesh,
            implementation=self.implementations.prefill,
        )
        if axes is None:
            return plan
        held, peak = (each * axes.in_one_memory for each in (plan.cache_bytes, plan.peak_bytes))
        # Each local device has its own copy of the host store, in the memory of its process's machine.
        waiting = plan.host_bytes * len(axes.mesh.local_devices)
        return dataclasses.replace(plan, cache_bytes=held, peak_bytes=peak, host_bytes=waiting)

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
        """Run prompts through the model; return a cache of their keys and values, compressed by the policy.

        Args:
            ids: token ids of one or several prompts; plain text if the model has a tokenizer.
            new: number of tokens to sample later; reserves headroom for these.
            needed: plan to use instead of the one from `plan`.
            tick: called with the number of layers run since its last call.
            key: random key or seed, for policies that use random numbers, in place of the session's.

        Returns:
            The cache, with the logits of each prompt's last token.

        Raises:
            ValueError: for an empty or over-long prompt, or a budget that the policy does not support.
            MemoryError: if the plan's bytes exceed free memory.
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
        """Generator form of `prefill`: yield the number of layers run since the last yield; return the `KVCache`.

        Args:
            ids: token ids of one or several prompts; plain text if the model has a tokenizer.
            new: number of tokens to sample later; reserves headroom for these.
            needed: plan to use instead of the one from `plan`.
            key: random key or seed, for policies that use random numbers, in place of the session's.

        Yields:
            A float: 1 after each layer, 0 after each packed layer, fractions of a layer in chunked prefill.

        Returns:
            The cache, with the logits of each prompt's last token.

        Raises:
            ValueError: for an empty or over-long prompt, or a budget that the policy does not support.
            MemoryError: if the plan's bytes exceed free memory.
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
        """Run prompts on top of a cache; return a cache with their entries appended.

        Args:
            cache: from the same model and policy; a single sequence serves any number of prompts.
            ids: token ids of one prompt per sequence; plain text if the model has a tokenizer.
            new: number of tokens to sample later. If positive, recompress sequences over their limit and make headroom.
            chunk: tokens per chunk; by default 256, or 64 or 128 for shorter prompts. With chunk=1 tokens evict entries
                and attend to selected entries, as sampled tokens do.
            donate: True donates the cache's buffers.

        Returns:
            The cache, with the logits of each prompt's last token.

        Raises:
            ValueError: for an empty or over-long prompt, or a cache of another policy or model.
            MemoryError: if the copy does not fit into memory.
        """
        self._require_same("extend", ids, cache=cache, new=new, chunk=chunk, donate=donate)
        chunk = None if chunk is None else whole("chunk", chunk, "give chunks of at least 1 token")
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
                # The policy compresses a long question, too.
                cache = make_headroom(flat, cache, new, key=self.key)
            jax.block_until_ready((logits, cache))
        return dataclasses.replace(cache, logits=logits)

    def on_top(
        self, cache: KVCache, encoded: Encoded, spec: Spec, chunk: int | None = None
    ) -> KVCache:
        """Run one prompt per sequence on top of a cache and donate its buffers; return it with new logits.

        Args:
            cache: with free places for the prompts.
            encoded: the prompts; copies of the last one fill up a mesh's groups.
            spec: static config of the compiled program.
            chunk: tokens per chunk; by default chosen by the prompts' length.

        Returns:
            The cache.
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
        """Sample up to `steps` tokens per sequence on top of a cache; return the new cache and the token ids.

        Args:
            cache: from this session, or another of the same model and policy.
            steps: maximum number of tokens to sample per sequence.
            new: total number of tokens of this and the following calls, so that all share compiled programs; by default
                `steps`.
            sampling: sampler; greedy if None.
            eos: ids that end a sequence.
            key: random key or seed for sampling, in place of the session's.
            donate: True donates the cache's buffers.

        Returns:
            The cache with the sampled tokens, and their ids `i32[B, n]`, -1 after a sequence's end.

        Raises:
            ValueError: for a cache without logits or of another policy or model, or for too many steps.
        """
        self._require_same(
            "sample",
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
        """Create a `DecodeLoop`, which donates a cache's buffers and samples tokens block by block.

        Args:
            cache: with logits; its buffers are donated.
            new: number of tokens to sample.
            sampling: sampler; greedy if None.
            eos: ids that end a sequence.
            key: random key or seed for sampling, in place of the session's.

        Returns:
            The loop.

        Raises:
            ValueError: for a cache without logits.
        """
        self._check(np.zeros(cache.batch, np.int32), 0, cache)
        sampling = arguments.as_sampling(sampling)
        keyed = is_greedy(sampling) or self._keyed or key is not None
        require(
            keyed, "key", key, f"{sampling} samples at random: give key=jax.random.key(0), or key=0"
        )
        remedy = "give a cache from a session's prefill, extend or sample"
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
        """Recompress the sequences that exceed their limit by `every` entries.

        Args:
            cache: from the same model and policy.
            headroom: free places behind every segment.

        Returns:
            A new cache, or `cache` itself if no sequence is due.

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
        """Return the random key of a call: its own key or seed, else the session's."""
        key = arguments.as_key(given)
        return self.key if key is None else key

    def _require_same(self, call: str, ids: Any, **given: Any) -> None:
        """Raise an error if arguments differ between a mesh's processes; `Encoded` prompts skip the whole check."""
        if not isinstance(ids, Encoded):
            own = {
                "policy": self.policy,
                "session.key": self.key,
                "implementation": self.implementations,
            }
            hosts.require_same(f"Session.{call}", self.params, None, **{"ids": ids} | own | given)

    def encoded(self, ids: Prompt | Encoded, cache: KVCache | None = None) -> Encoded:
        """Return prompts as `Encoded` token ids, tokenized if needed; plain text continues the cache's conversation."""
        if isinstance(ids, Encoded):
            return ids
        turn = Turn.START if cache is None else cache.turn
        return encode(ids, self.params.text, self.params.config, raw=True, close=False, turn=turn)

    def _check(
        self, lengths: Int[np.ndarray, " B"], new: int, cache: KVCache | None = None
    ) -> None:
        """Raise an error for a cache of another model or policy, or more tokens than the model has positions."""
        if cache is not None:
            arguments.require_ours(self.params, cache, self.policy)
        arguments.require_fits(self.params.config, self.policy, lengths, new, cache)
