"""`Session`: a model and a policy; `prefill` creates caches, `extend` appends tokens, `sample` generates tokens."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jaxtyping import Int, PRNGKeyArray

from jaxkv import arguments
from jaxkv._checks import require_instance, settled, use_package_jax_settings, validate_int
from jaxkv._errors import require
from jaxkv.attention import Implementation
from jaxkv.cache import ConversationState, KVCache
from jaxkv.cache.host_store import HostStoreLoader, TransferCounter
from jaxkv.engine import decode as decoding
from jaxkv.engine import prefill as prefilling
from jaxkv.engine.decode_loop import DecodeLoop
from jaxkv.engine.headroom import (
    MOST_AHEAD,
    compute_prefill_headroom,
    count_places_for_evicting_tokens,
    fork_cache,
    make_headroom,
    prepare_cache_for_decoding,
)
from jaxkv.engine.lengths import SHORT, round_up_to_bucket, tokens_per_call
from jaxkv.engine.plan import PrefillPlan, check_memory, plan_prefill
from jaxkv.engine.progress import Walk, run_generator
from jaxkv.engine.prompt_scores import UNSCORED, PromptScorer
from jaxkv.engine.recompress import find_due_sequences, recompress
from jaxkv.engine.replay import PaddedPrompts, encode_second_pass_texts
from jaxkv.engine.sampling import Sampler, get_settings, is_greedy, require_ids_in_vocabulary
from jaxkv.engine.spec import DecodeSpec, create_cache_spec, select_implementations
from jaxkv.loading import LanguageModel
from jaxkv.machine import hosts, memory
from jaxkv.machine.compilation import StageClocks
from jaxkv.policies.model_policy import resolve_policy_for_model
from jaxkv.policies.policy import Policy
from jaxkv.sharding.mesh import count_padding_sequences
from jaxkv.text.prompts import EncodedPrompts, Prompt, encode_prompts


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
        """Create a session: check model and policy, select attention backends; compile nothing.

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
        self.params = arguments.validate_model(params)
        fitted = resolve_policy_for_model(
            policy, self.params.config, self.params.filter_layers, dtype=self.params.cache_dtype
        )
        self.policy = fitted
        self.implementations = select_implementations(
            params, self.policy, arguments.validate_implementation(implementation)
        )
        self.texts = encode_second_pass_texts(
            self.policy.composed.needs.replay, params.text, params.config
        )
        self.clocks = StageClocks()
        self.question_traffic = TransferCounter()
        self.decode_traffic = TransferCounter()
        given = arguments.validate_random_key(key)
        self._keyed = given is not None
        with self.clocks.prefill:
            self.key = jax.random.key(0) if given is None else given

    def plan(self, lengths: Int[np.ndarray, " B"], new: int = 0) -> PrefillPlan:
        """Return a `PrefillPlan` for prompt lengths and `new` tokens; MemoryError if it exceeds free memory.

        Args:
            lengths: number of tokens of each prompt, `[B]`.
            new: number of tokens to sample later.

        Returns:
            The plan.

        Raises:
            MemoryError: if the plan's bytes exceed free memory.
        """
        parts = self.policy.composed
        config = self.params.config
        mesh = self.params.flat_decoder.mesh
        device = None if mesh is None else mesh.local_devices[0]
        headroom = (
            compute_prefill_headroom(parts, config.sliding_windows, lengths, new) if new else 0
        )
        needed = self.plan_without_memory_check(lengths, headroom)
        with self.clocks.prefill, hosts.share_failures("a session's plan", mesh):
            check_memory(needed, device)
            if new > MOST_AHEAD and not parts.decoding_compression.compresses:
                # The cache will grow to this size, and a MemoryError during decoding would lose the answer.
                grown = self.plan_without_memory_check(lengths, round_up_to_bucket(new)).cache_bytes
                memory.require_free_bytes(grown, f"the cache for max_new_tokens={new}", device)
        return needed

    def plan_without_memory_check(
        self, lengths: Int[np.ndarray, " B"], headroom: int | tuple[int, ...]
    ) -> PrefillPlan:
        """Return a `PrefillPlan` for prompt lengths, with `headroom` free places per segment; no memory check.

        Bytes are those of one device; on a CPU mesh, of all its devices, which share one memory.

        Args:
            lengths: number of tokens of each prompt, `[B]`.
            headroom: free places behind every segment, or one number per layer.

        Returns:
            The plan.

        Raises:
            ValueError: for a budget that the policy does not support.
        """
        params = self.params
        axes = self.params.axes
        plan = plan_prefill(
            params.config,
            self.policy,
            lengths.tolist(),
            dtype=params.cache_dtype,
            headroom=headroom,
            mesh=params.flat_decoder.mesh,
            implementation=self.implementations.prefill,
        )
        if axes is None:
            return plan
        held, peak = (
            each * axes.devices_sharing_memory for each in (plan.cache_bytes, plan.peak_bytes)
        )
        # Each local device has its own copy of the host store, in the memory of its process's machine.
        waiting = plan.host_bytes * len(axes.mesh.local_devices)
        return dataclasses.replace(plan, cache_bytes=held, peak_bytes=peak, host_bytes=waiting)

    @settled
    def prefill(
        self,
        ids: Prompt | EncodedPrompts,
        *,
        new: int = 0,
        needed: PrefillPlan | None = None,
        tick: Callable[..., object] = lambda layers=1.0: None,
        key: PRNGKeyArray | int | None = None,
        scorer: PromptScorer = UNSCORED,
    ) -> KVCache:
        """Run prompts through the model; return a cache compressed by the policy, with prompts' last logits.

        Args:
            ids: token ids of one or several prompts; plain text if the model has a tokenizer.
            new: number of tokens to sample later; reserves headroom for these.
            needed: plan to use instead of the one from `plan`.
            tick: called with the number of layers run since its last call.
            key: random key or seed, for policies that use random numbers, in place of the session's.
            scorer: scores the tokens of the prompts.

        Returns:
            The cache, with the logits of each prompt's last token.

        Raises:
            ValueError: for an empty or over-long prompt, or a budget that the policy does not support.
            MemoryError: if the plan's bytes exceed free memory.
        """
        walk = self.iterate_prefill(ids, new=new, needed=needed, key=key, scorer=scorer)
        return run_generator(walk, lambda layers: tick(layers) if layers else None)

    def iterate_prefill(
        self,
        ids: Prompt | EncodedPrompts,
        *,
        new: int = 0,
        needed: PrefillPlan | None = None,
        key: PRNGKeyArray | int | None = None,
        scorer: PromptScorer = UNSCORED,
    ) -> Walk[KVCache]:
        """Generator: prefill and compress prompts; yield layers run since the last yield; return the `KVCache`.

        Args:
            ids: token ids of one or several prompts; plain text if the model has a tokenizer.
            new: number of tokens to sample later; reserves headroom for these.
            needed: plan to use instead of the one from `plan`.
            key: random key or seed, for policies that use random numbers, in place of the session's.
            scorer: scores the tokens of the prompts.

        Yields:
            A float: 1 after each layer, 0 after each packed layer, fractions of a layer in chunked prefill.

        Returns:
            The cache, with the logits of each prompt's last token.

        Raises:
            ValueError: for an empty or over-long prompt, or a budget that the policy does not support.
            MemoryError: if the plan's bytes exceed free memory.
        """
        with use_package_jax_settings():
            self._require_same_arguments("prefill", ids, new=new, needed=needed, key=key)
            encoded = self.tokenize_prompts(ids)
            params = self.params
            self._require_valid_request(encoded.prompt_lengths, new)
            needed = self.plan(encoded.prompt_lengths, new) if needed is None else needed
            copies = count_padding_sequences(len(encoded.ids), params.axes)
            every = encoded.repeat_last_prompt(copies)
            padded = PaddedPrompts(
                every.pad_ids(needed.padded_len), every.prompt_lengths, self.texts
            )
            walk = prefilling.prefill(
                params.flat_decoder,
                padded,
                self.policy,
                needed.repeat_last_prompt(copies),
                key=self.resolve_key(key),
                scorer=scorer,
                implementation=self.implementations.prefill,
            )
        while True:
            try:
                with use_package_jax_settings(), self.clocks.prefill:
                    layers = next(walk)
            except StopIteration as end:
                cache, logits = end.value
                break
            yield layers
        with use_package_jax_settings(), self.clocks.prefill:
            jax.block_until_ready((logits, cache))
        return dataclasses.replace(
            cache,
            model=params.fingerprint,
            turn=encoded.conversation_state,
            logits=logits,
            padding=copies,
        )

    @settled
    def extend(
        self,
        cache: KVCache,
        ids: Prompt | EncodedPrompts,
        *,
        new: int = 0,
        chunk: int | None = None,
        donate: bool = False,
    ) -> KVCache:
        """Run a prompt per sequence on a cache (copied unless `donate`); return the extended cache with logits.

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
        self._require_same_arguments(
            "extend", ids, cache=cache, new=new, chunk=chunk, donate=donate
        )
        chunk = (
            None
            if chunk is None
            else validate_int("chunk", chunk, "give chunks of at least 1 token")
        )
        encoded = self.tokenize_prompts(ids, cache)
        flat = self.params.flat_decoder
        self._require_valid_request(encoded.prompt_lengths, new, cache)
        batch = len(encoded.ids)
        longest = int(encoded.prompt_lengths.max())
        with self.clocks.prefill:
            evicts = chunk == 1 and self.policy.composed.evicts_while_decoding
            places = count_places_for_evicting_tokens(cache, longest) if evicts else longest
            if not donate or cache.batch != batch or cache.compute_layer_headroom().min() < places:
                cache = fork_cache(cache, batch, max(SHORT, places), new)
            spec = create_cache_spec(flat, cache, self.implementations.decode, new=0)
            cache = self.append_prompts(cache, encoded, spec, chunk)
            logits = cache.logits
            cache = dataclasses.replace(cache, extended=cache.extended or chunk != 1)
            if new and self.policy.composed.decoding_compression.compresses:
                # The policy compresses a long question, too.
                cache = make_headroom(flat, cache, new, key=self.key)
            jax.block_until_ready((logits, cache))
        return dataclasses.replace(cache, logits=logits)

    def append_prompts(
        self, cache: KVCache, encoded: EncodedPrompts, spec: DecodeSpec, chunk: int | None = None
    ) -> KVCache:
        """Run encoded prompts, one per sequence, into a cache's free places (donated); return it with logits.

        Args:
            cache: with free places for the prompts.
            encoded: the prompts; copies of the last one fill up a mesh's groups.
            spec: static config of the compiled program.
            chunk: tokens per chunk; by default chosen by the prompts' length.

        Returns:
            The cache.
        """
        longest = int(encoded.prompt_lengths.max())
        size = tokens_per_call(max(SHORT, longest)) if chunk is None else chunk
        every = encoded.repeat_last_prompt(len(cache.seen) - len(encoded.ids))
        loader = HostStoreLoader.create_host_loader(cache.host_store, self.question_traffic)
        run = partial(decoding.run_new_tokens, self.params.flat_decoder, spec=spec, loader=loader)
        tokens = every.pad_ids(-(-longest // size) * size)
        logits, cache = decoding.prefill_on_cache(
            run, cache, tokens, every.prompt_lengths, size=size
        )
        return dataclasses.replace(cache, logits=logits, turn=encoded.conversation_state)

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
        """Sample up to `steps` tokens per sequence on a cache; return a new cache and ids `[B, n]`, -1 after an end.

        Args:
            cache: from this session, or another of the same model and policy.
            steps: maximum number of tokens to sample per sequence.
            new: total number of tokens of this and the following calls, so that all share compiled programs; by default
                `steps`.
            sampling: sampler; greedy if None. Penalties know the tokens of this call; `start_decode_loop` takes others.
            eos: ids that end a sequence.
            key: random key or seed for sampling, in place of the session's.
            donate: True donates the cache's buffers.

        Returns:
            The cache with the sampled tokens, and their ids `i32[B, n]`, -1 after a sequence's end.

        Raises:
            ValueError: for a cache without logits or of another policy or model, or for too many steps.
        """
        self._require_same_arguments(
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
        steps = validate_int("steps", steps, "sample at least 1 token")
        self._require_valid_request(np.zeros(cache.batch, np.int32), steps, cache)
        new = (
            steps
            if new is None
            else max(steps, validate_int("new", new, "sample at least 1 token"))
        )
        sampling = arguments.validate_sampler(sampling)
        remedy = "sample returns no log-probabilities: leave logprobs out, or use jaxkv.generate"
        given = get_settings(sampling)
        require(given.logprobs is given.prompt_logprobs is None, "sampling", sampling, remedy)
        if not donate:
            with self.clocks.decode:
                cache = fork_cache(cache, cache.batch, 0, new)
        decode_loop = self.start_decode_loop(cache, new=new, sampling=sampling, eos=eos, key=key)
        parts = []
        with self.clocks.decode:
            while steps and not decode_loop.ended_sequences.all():
                parts.append(decode_loop.sample_tokens(steps))
                steps -= parts[-1].shape[1]
            return decode_loop.finish_sampling(), np.concatenate(parts, axis=1)

    @settled
    def start_decode_loop(
        self,
        cache: KVCache,
        *,
        new: int,
        sampling: Sampler | None = None,
        eos: Iterable[int] = (),
        key: PRNGKeyArray | int | None = None,
        prompts: Sequence[Sequence[int]] = (),
    ) -> DecodeLoop:
        """Return a `DecodeLoop` on a cache with logits (donated), recompressed if due; random samplers need a key.

        Args:
            cache: with logits; its buffers are donated.
            new: number of tokens to sample.
            sampling: sampler; greedy if None.
            eos: ids that end a sequence.
            key: random key or seed for sampling, in place of the session's.
            prompts: known token ids before the answer of each sequence, for `repetition_penalty`.

        Returns:
            The loop.

        Raises:
            ValueError: for a cache without logits, or a sampler's token ids outside the vocabulary.
        """
        self._require_valid_request(np.zeros(cache.batch, np.int32), 0, cache)
        sampling = arguments.validate_sampler(sampling)
        require_ids_in_vocabulary(sampling, self.params.config.vocab)
        keyed = is_greedy(sampling) or self._keyed or key is not None
        require(
            keyed, "key", key, f"{sampling} samples at random: give key=jax.random.key(0), or key=0"
        )
        remedy = "give a cache from a session's prefill, extend or sample"
        require(cache.logits is not None, "cache", "without logits", remedy)
        eos = require_instance("eos", eos, Iterable, "give token ids, such as (2,)")
        flat = self.params.flat_decoder
        key = self.resolve_key(key)
        with self.clocks.decode:
            cache = prepare_cache_for_decoding(flat, cache, new, key=key)
            return DecodeLoop(
                flat,
                cache,
                spec=create_cache_spec(flat, cache, self.implementations.decode, new=new),
                sampling=sampling,
                eos=tuple(eos),
                key=key,
                new=new,
                traffic=self.decode_traffic,
                prompts=prompts,
            )

    @settled
    def recompress_sequences(self, cache: KVCache, *, headroom: int = 0) -> KVCache:
        """Recompress the sequences that exceed their limit by `every` entries; return a new cache, or the same if none.

        Args:
            cache: from the same model and policy.
            headroom: free places behind every segment.

        Returns:
            A new cache, or `cache` itself if no sequence is due.

        Raises:
            ValueError: for a cache of another policy or model.
        """
        self._require_valid_request(np.zeros(cache.batch, np.int32), 0, cache)
        if not find_due_sequences(cache).any():
            return cache
        with self.clocks.decode:
            return jax.block_until_ready(
                recompress(self.params.flat_decoder, cache, key=self.key, headroom=headroom)
            )

    def resolve_key(self, given: PRNGKeyArray | int | None) -> PRNGKeyArray:
        """Return the random key of a call: the one given as key or seed, else the session's."""
        key = arguments.validate_random_key(given)
        return self.key if key is None else key

    def _require_same_arguments(self, call: str, ids: Any, **given: Any) -> None:
        """Raise an error if a call's arguments differ between a mesh's processes; encoded prompts skip the check."""
        if not isinstance(ids, EncodedPrompts):
            own = {
                "policy": self.policy,
                "session.key": self.key,
                "implementation": self.implementations,
            }
            hosts.require_same_arguments(
                f"Session.{call}", self.params, None, **{"ids": ids} | own | given
            )

    def tokenize_prompts(
        self, ids: Prompt | EncodedPrompts, cache: KVCache | None = None
    ) -> EncodedPrompts:
        """Return `EncodedPrompts` of texts that continue the cache's text, or of token ids; encoded ones unchanged."""
        if isinstance(ids, EncodedPrompts):
            return ids
        turn = ConversationState.START if cache is None else cache.turn
        return encode_prompts(
            ids, self.params.text, self.params.config, raw=True, close=False, turn=turn
        )

    def _require_valid_request(
        self, lengths: Int[np.ndarray, " B"], new: int, cache: KVCache | None = None
    ) -> None:
        """Raise an error for a cache of another model, policy or batch size, or for more tokens than positions."""
        if cache is not None:
            arguments.require_matching_cache(self.params, cache, self.policy)
        arguments.require_prompts_fit(self.params.config, self.policy, lengths, new, cache)
