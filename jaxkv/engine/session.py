"""A model and a policy, ready to run: prompts become caches, caches take more tokens, and tokens are drawn."""

import dataclasses
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Int, PRNGKeyArray

from jaxkv import arguments, hosts, memory
from jaxkv._errors import require
from jaxkv._settings import own_settings, settled
from jaxkv.attention import Implementation
from jaxkv.cache import KVCache
from jaxkv.cache.bank import Traffic
from jaxkv.compilation import Clocks
from jaxkv.engine import decode as decoding
from jaxkv.engine import prefill as prefilling
from jaxkv.engine import staged
from jaxkv.engine.compress import Walk, finished
from jaxkv.engine.drawing import Drawing
from jaxkv.engine.growth import MOST_AHEAD, first_room, forked, make_room, ready_to_draw
from jaxkv.engine.lengths import bucket, tokens_per_call
from jaxkv.engine.plan import PrefillPlan, check_memory, plan_prefill
from jaxkv.engine.recompress import due, recompress
from jaxkv.engine.spec import implementations_for, spec_for
from jaxkv.loading import LanguageModel
from jaxkv.policies.policy import Method
from jaxkv.policies.registry import as_policy
from jaxkv.sampling import Greedy, Sampling
from jaxkv.sharding.mesh import missing
from jaxkv.text.prompts import Encoded, Prompt, encode


class Session:
    """A model and a policy, ready to run: what `generate` is made of, a step at a time.

    Caches are values: none that is given is changed, unless it is given up with `donate`.

    ```python
    session = jaxkv.Session(params, jaxkv.SnapKV(budget=256))
    cache = session.prefill(document)
    cache = session.extend(cache, question)
    cache, tokens = session.draw(cache, 32)
    ```

    Attributes:
        params: the model.
        policy: the compression.
        implementations: what computes attention.
        key: for policies that draw, and for sampling.
        clocks: what the session has taken so far.
        read: what has been brought from host memory for tokens read on top of caches.
        drawn: what has been brought for tokens drawn.
    """

    @settled
    def __init__(
        self,
        params: LanguageModel,
        policy: Method | type[Method] | str | None = None,
        *,
        implementation: Implementation | str | None = Implementation.AUTO,
        key: PRNGKeyArray | int | None = None,
    ):
        """Makes ready.

        Args:
            params: from `jaxkv.load`.
            policy: the compression, or the name or class of one with its defaults; FullKV() keeps everything.
            implementation: what computes attention; by default the fastest one here.
            key: random key or seed, for policies that draw and for sampling.

        Raises:
            ValueError: for a policy that the model cannot honour.
            TypeError: for an argument of the wrong kind, with what to give instead.
        """
        self.params = arguments.as_model(params)
        self.policy = as_policy(policy).for_model(params.config.layers, params.filter_layers)
        self.implementations = implementations_for(params, self.policy, arguments.as_implementation(implementation))
        self.clocks, self.read, self.drawn = Clocks(), Traffic(), Traffic()
        given = arguments.as_key(key)
        self._keyed = given is not None
        with self.clocks.making:
            self.key = jax.random.key(0) if given is None else given

    def plan(self, lengths: Int[np.ndarray, " B"], new: int = 0) -> PrefillPlan:
        """What prompts will need.

        Args:
            lengths: tokens of each.
            new: tokens that will be drawn.

        Returns:
            The plan of a prefill with room for them.

        Raises:
            MemoryError: naming the plan's bytes, if they are not there.
        """
        config, policy, axes = self.params.config, self.policy, self.params.axes
        room = first_room(policy.parts(), config.layers, lengths, new) if new else 0
        needed = self.planned(lengths, room)
        mesh = None if axes is None else axes.mesh
        device = None if mesh is None else mesh.local_devices[0]
        with self.clocks.making, hosts.together("a session's plan", mesh):
            check_memory(self._share(needed, lengths), device)
            if new > MOST_AHEAD and policy.parts().ongoing is None:
                # It grows to that on the way, where a refusal would cost the answer.
                grown = self._share(self.planned(lengths, bucket(new)), lengths)
                memory.check_bytes(grown.cache_bytes, f"the cache behind max_new_tokens={new}", device)
        return needed

    def planned(
        self, lengths: Int[np.ndarray, " B"], room: int | tuple[int, ...], mesh: Mesh | None = None
    ) -> PrefillPlan:
        """The plan of a prefill, whether or not there is memory for it.

        Args:
            lengths: tokens of each prompt.
            room: rows to leave behind every segment; one number, or one for each layer.
            mesh: to plan for one of its devices; by default for all of them together.

        Returns:
            The plan.

        Raises:
            ValueError: for a budget the policy cannot honour.
        """
        options: dict[str, Any] = {"dtype": self.params.dtype, "implementation": self.implementations.prefill}
        return plan_prefill(self.params.config, self.policy, lengths.tolist(), room=room, mesh=mesh, **options)

    def _share(self, needed: PrefillPlan, lengths: Int[np.ndarray, " B"]) -> PrefillPlan:
        """What a plan takes of a device: on a mesh its part of heads and prompts, a CPU's devices together."""
        axes = self.params.axes
        if axes is None:
            return needed
        mine = self.planned(lengths, needed.room, axes.mesh)
        of_all = {name: getattr(mine, name) * axes.in_one_memory for name in ("cache_bytes", "peak_bytes")}
        # What waits does so beside each device that asks for it, in the memory of its process' machine.
        return dataclasses.replace(mine, **of_all, host_bytes=mine.host_bytes * len(axes.mesh.local_devices))

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
        """Runs prompts through the model, and compresses their keys and values.

        Args:
            ids: token ids of a prompt, or of several; plain text where the model has a tokenizer.
            new: tokens to be drawn later, for which room is left.
            needed: the plan, if it is to be another than `plan` gives.
            tick: called on the way with the number of layers done.
            key: for policies that draw, in place of the session's.

        Returns:
            The cache, with the logits of each prompt's last token.

        Raises:
            ValueError: for an empty or over-long prompt, or a budget the policy cannot honour.
            MemoryError: naming the plan's bytes, if they are not there.
        """
        walk = self.prefilling(ids, new=new, needed=needed, key=key)
        return finished(walk, lambda layers: tick(layers) if layers else None)

    def prefilling(
        self,
        ids: Prompt | Encoded,
        *,
        new: int = 0,
        needed: PrefillPlan | None = None,
        key: PRNGKeyArray | int | None = None,
    ) -> Walk[KVCache]:
        """Prefills prompts layer by layer, a generator whose caller may run other programs between two layers.

        Args:
            ids: token ids of a prompt, or of several; plain text where the model has a tokenizer.
            new: tokens to be drawn later, for which room is left.
            needed: the plan, if it is to be another than `plan` gives.
            key: for policies that draw, in place of the session's.

        Yields:
            The number of layers looked at since the last time: 1 after each, 0 after a layer was packed, and parts of
            one for policies that read prompts in chunks.

        Returns:
            The cache, with the logits of each prompt's last token.

        Raises:
            ValueError: for an empty or over-long prompt, or a budget the policy cannot honour.
            MemoryError: naming the plan's bytes, if they are not there.
        """
        with own_settings():
            self._require_same("prefill", ids, new=new, needed=needed, key=key)
            encoded, params, given = self.encoded(ids), self.params, arguments.as_key(key)
            self._check(encoded.lengths, new)
            needed = self.plan(encoded.lengths, new) if needed is None else needed
            copies = missing(len(encoded.ids), params.axes)
            every, needed = (encoded.with_copies(copies), needed.with_copies(copies)) if copies else (encoded, needed)
            of = (params.flat, every.padded(needed.slots), every.lengths, self.policy, needed)
            key, implementation = self.key if given is None else given, self.implementations.prefill
            walk = prefilling.prefill(*of, key=key, implementation=implementation)
        while True:
            try:
                with own_settings(), self.clocks.prefill:
                    layers = next(walk)
            except StopIteration as end:
                cache, logits = end.value
                break
            yield layers
        with own_settings(), self.clocks.prefill:
            jax.block_until_ready(logits)
        model = params.fingerprint
        return dataclasses.replace(cache, model=model, turn=encoded.turn, logits=logits, padding=copies)

    @settled
    def compile_ahead(self, needed: PrefillPlan, batch: int) -> None:
        """Compiles what `prefill` will call, by a prefill of made-up prompts; nothing where one of this shape has run.

        Args:
            needed: the prefill's plan.
            batch: prompts.
        """
        params, implementation = self.params, self.implementations.prefill
        with self.clocks.making:
            copies = missing(batch, params.axes)
            batch, needed = batch + copies, needed.with_copies(copies) if copies else needed
            tokens = np.arange(batch * needed.slots, dtype=np.int32) % params.config.vocab
            signature = prefilling.signature_of(params.flat, batch, self.policy, needed, implementation=implementation)
            if signature in params.flat.compiled:
                return
            of = (params.flat, tokens.reshape(batch, -1), np.full(batch, needed.slots), self.policy, needed)
            # Spans may protect more of prompts of a whole bucket than of those that were planned: none is refused.
            walk = prefilling.prefill(*of, key=self.key, implementation=implementation, strict=False)
            jax.block_until_ready(finished(walk))

    @settled
    def extend(
        self, cache: KVCache, ids: Prompt | Encoded, *, new: int = 0, chunk: int | None = None, donate: bool = False
    ) -> KVCache:
        """Runs more tokens on top of a cache. They are only added to it, unless room is to be made for new ones.

        Args:
            cache: of this model and policy; one sequence serves many prompts.
            ids: as for `prefill`, one prompt for each sequence.
            new: tokens to be drawn later: what is due is compressed again, and room is made.
            chunk: tokens at a time; by default 256, or all if they are fewer. One at a time are read as drawn ones are:
                where a row goes for each new one, it does then.
            donate: give the cache up, so that its own buffers are written.

        Returns:
            The cache, with the logits of each prompt's last token.

        Raises:
            ValueError: for an empty or over-long prompt, or a cache of another policy or model.
            MemoryError: if the copy does not fit.
        """
        self._require_same("extend", ids, cache=cache, new=new, chunk=chunk, donate=donate)
        chunk = None if chunk is None else arguments.as_count("chunk", chunk, "read at least 1 token at a time")
        encoded, flat = self.encoded(ids, cache), self.params.flat
        self._check(encoded.lengths, new, cache)
        batch, longest = len(encoded.ids), int(encoded.lengths.max())
        with self.clocks.prefill:
            if not donate or cache.batch != batch or cache.free().min() < longest:
                cache = forked(cache, batch, longest, new)
        size = tokens_per_call(longest) if chunk is None else chunk
        lengths = np.pad(encoded.lengths, (0, cache.padding))
        tokens = np.pad(encoded.padded(-(-longest // size) * size), ((0, cache.padding), (0, 0)))
        spec = spec_for(flat, cache, self.implementations.decode)
        run: Any = partial(decoding.extend, flat, spec=spec)
        if cache.bank is not None:
            run = partial(staged.step, flat, spec=spec, bank=cache.bank, traffic=self.read)
        with self.clocks.prefill:
            logits, cache = decoding.read_on_top(run, cache, tokens, lengths, size=size)
            cache = dataclasses.replace(cache, extended=cache.extended or size > 1)
            jax.block_until_ready(logits)
            if new and self.policy.parts().ongoing is not None:
                # A long question leaves nothing behind but what the policy keeps of it.
                cache = make_room(flat, cache, new, key=self.key)
        return dataclasses.replace(cache, turn=encoded.turn, logits=logits)

    @settled
    def draw(
        self,
        cache: KVCache,
        steps: int,
        *,
        new: int | None = None,
        sampling: Sampling | None = None,
        eos: Iterable[int] = (),
        key: PRNGKeyArray | int | None = None,
        donate: bool = False,
    ) -> tuple[KVCache, Int[np.ndarray, "B n"]]:
        """Draws tokens on top of a cache.

        Args:
            cache: from this session, or another of the same model and policy.
            steps: tokens per sequence at most.
            new: tokens that will be drawn in the end, by this call and by those that follow: they then share their
                programs; by default as many as now.
            sampling: how to draw; Greedy() if None.
            eos: ids that end a sequence.
            key: for the sampling, in place of the session's: another key is another sample.
            donate: give the cache up, so that its own buffers are written.

        Returns:
            The cache with the tokens, ready for the next ones; and the tokens, -1 behind a sequence's end.

        Raises:
            ValueError: for a cache without logits, or of another policy or model; for too many steps.
        """
        given = {"new": new, "sampling": sampling, "eos": eos, "key": key, "donate": donate}
        self._require_same("draw", None, cache=cache, steps=steps, **given)
        steps = arguments.as_count("steps", steps, "draw at least 1 token")
        self._check(np.zeros(cache.batch, np.int32), steps, cache)
        new = steps if new is None else max(steps, arguments.as_count("new", new, "draw at least 1 token"))
        if not donate:
            with self.clocks.decode:
                cache = forked(cache, cache.batch, 0, new)
        drawing, parts = self.drawing(cache, new=new, sampling=sampling, eos=eos, key=key), []
        with self.clocks.decode:
            while steps and not drawing.done.all():
                parts.append(drawing.draw(steps))
                steps -= parts[-1].shape[1]
            return drawing.close(), np.concatenate(parts, axis=1)

    @settled
    def drawing(
        self,
        cache: KVCache,
        *,
        new: int,
        sampling: Sampling | None = None,
        eos: Iterable[int] = (),
        key: PRNGKeyArray | int | None = None,
    ) -> Drawing:
        """What draws tokens on top of a cache block by block, for callers that look at them in between.

        Args:
            cache: with logits; given up.
            new: tokens that will be drawn.
            sampling: how to draw; Greedy() if None.
            eos: ids that end a sequence.
            key: as for `draw`.

        Returns:
            The drawing.

        Raises:
            ValueError: for a cache without logits.
        """
        self._check(np.zeros(cache.batch, np.int32), 0, cache)
        sampling, given = arguments.as_sampling(sampling), arguments.as_key(key)
        keyed = isinstance(sampling, Greedy) or self._keyed or given is not None
        require(keyed, "key", key, f"{sampling} needs jax.random.key(...)")
        remedy = "give what a session's prefill, extend or draw returned"
        require(cache.logits is not None, "cache", "without logits", remedy)
        flat, key = self.params.flat, self.key if given is None else given
        with self.clocks.making:
            cache = ready_to_draw(flat, cache, new, key=key)
            return Drawing(
                flat,
                cache,
                spec=spec_for(flat, cache, self.implementations.decode),
                sampling=sampling,
                eos=tuple(eos),
                key=key,
                new=new,
                traffic=self.drawn,
            )

    @settled
    def compress_again(self, cache: KVCache, *, room: int = 0) -> KVCache:
        """Compresses the sequences that are due: with `every=n`, those that have grown by n rows.

        Args:
            cache: of this model and policy.
            room: rows to leave behind every segment.

        Returns:
            A new cache; the same one if no sequence is due.

        Raises:
            ValueError: for a cache of another policy or model.
        """
        self._check(np.zeros(cache.batch, np.int32), 0, cache)
        if not due(cache).any():
            return cache
        with self.clocks.decode:
            return jax.block_until_ready(recompress(self.params.flat, cache, key=self.key, room=room))

    def _require_same(self, call: str, ids: Any, **given: Any) -> None:
        """Several processes on a mesh are given the same; what comes encoded has been compared before."""
        if not isinstance(ids, Encoded):
            of = {"policy": self.policy, "session.key": self.key, "implementation": self.implementations}
            hosts.require_same(f"Session.{call}", self.params, None, ids=ids, **of, **given)

    def encoded(self, ids: Prompt | Encoded, cache: KVCache | None = None) -> Encoded:
        """Token ids of prompts, of plain text where that is given, on top of a cache if there is one."""
        if isinstance(ids, Encoded):
            return ids
        turn = {} if cache is None else {"turn": cache.turn}
        return encode(ids, self.params.text, self.params.config, raw=True, close=False, **turn)

    def _check(self, lengths: Int[np.ndarray, " B"], new: int, cache: KVCache | None = None) -> None:
        if cache is not None:
            arguments.require_ours(self.params, cache, self.policy)
        arguments.require_fits(self.params.config, self.policy, lengths, new, cache)
