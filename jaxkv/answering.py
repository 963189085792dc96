"""How `generate` runs: a prompt is prefilled, or read on top of a cache, then tokens are drawn block by block."""

import dataclasses
import sys
from collections.abc import Callable, Generator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray
from tqdm import tqdm

from jaxkv._errors import require
from jaxkv.attention import Implementations
from jaxkv.bank import Traffic
from jaxkv.cache import KVCache, repack
from jaxkv.compilation import Clock
from jaxkv.load import LanguageModel
from jaxkv.models import chunked, staged
from jaxkv.models import decode as decoding
from jaxkv.models import loop as looping
from jaxkv.models import prefill as prefilling
from jaxkv.models.again import again, beyond, due
from jaxkv.models.decoder import Flat
from jaxkv.models.moving import program_for
from jaxkv.models.room import MOST_AHEAD, first_room, make_room, steps_that_fit
from jaxkv.plan import LOOK, Plan, available_bytes, bucket, check_bytes, check_memory, plan
from jaxkv.policies.base import Policy
from jaxkv.prompts import Encoded
from jaxkv.results import Answers, Generation, Stats
from jaxkv.sampling import Sampling

# Tokens drawn by one call of the compiled loop, at most.
_BLOCK = 256


@dataclasses.dataclass(frozen=True, kw_only=True)
class Clocks:
    """What a call takes. Compilation is told apart wherever it happens.

    Attributes:
        making: programs made before they are needed, so that no other clock waits for them.
        prefill: from ids to the first logits.
        decode: drawing.
    """

    making: Clock = dataclasses.field(default_factory=Clock)
    prefill: Clock = dataclasses.field(default_factory=Clock)
    decode: Clock = dataclasses.field(default_factory=Clock)

    @property
    def compile_seconds(self) -> float:
        """Seconds of compilation, wherever it happened."""
        return self.making.compile_seconds + self.prefill.compile_seconds + self.decode.compile_seconds

    @property
    def programs(self) -> int:
        """Programs compiled, or read from a cache on disk."""
        return self.making.programs + self.prefill.programs + self.decode.programs


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """A checked call of `generate`."""

    params: LanguageModel
    encoded: Encoded
    policy: Policy
    chosen: Implementations
    cache: KVCache | None
    max_new_tokens: int
    sampling: Sampling
    stops: tuple[str, ...]
    stop_at_eos: bool
    key: PRNGKeyArray
    look: bool
    progress: bool | None
    clocks: Clocks


def _bar(progress: bool | None, total: int, what: str) -> tqdm:
    shown = sys.stderr.isatty() if progress is None else progress
    return tqdm(total=total, desc=what, leave=False, disable=not shown, file=sys.stderr)


def prefilled(
    params: LanguageModel,
    flat: Flat,
    encoded: Encoded,
    policy: Policy,
    chosen: Implementations,
    clocks: Clocks,
    *,
    key: PRNGKeyArray | None,
    new: int,
    progress: bool | None,
) -> tuple[KVCache, Float[Array, "B V"], Plan]:
    """Runs prompts through the model and compresses them.

    Args:
        params: the model.
        flat: its parameters.
        encoded: the prompts.
        policy: the compression.
        chosen: what computes attention.
        clocks: two of them run.
        key: for policies that draw.
        new: tokens to be drawn afterwards.
        progress: a bar on stderr.

    Returns:
        The cache, with room for them; the logits of each last token; and the plan.

    Raises:
        MemoryError: naming the plan's bytes, if they are not there.
    """
    config, lengths = params.config, encoded.lengths.tolist()
    room: int | tuple[int, ...] = first_room(policy, config.layers, encoded.lengths, new) if new else 0
    needed = plan(config, policy, lengths, dtype=params.dtype, room=room)
    with clocks.making:
        check_memory(needed)
    if new > MOST_AHEAD and policy.upkeep is None:
        # It grows to that on the way, where a refusal would cost the answer.
        whole = plan(config, policy, lengths, dtype=params.dtype, room=bucket(new))
        check_bytes(whole.cache_bytes, f"the cache behind max_new_tokens={new}")
    tokens = encoded.padded(needed.slots)
    way: Any = chunked if policy.by_chunks else prefilling
    with clocks.making:
        way.compile_ahead(flat, config, len(encoded.ids), policy, needed, implementation=chosen.prefill)
    with clocks.prefill, _bar(progress, config.layers, "prefill") as bar:
        options: dict[str, Any] = {"model": params.fingerprint, "tick": bar.update, "implementation": chosen.prefill}
        if not policy.by_chunks:
            options["key"] = jax.random.key(0) if key is None else key
        cache, logits = way.prefill(flat, config, tokens, encoded.lengths, policy, needed, **options)
        jax.block_until_ready(logits)
    return cache, logits, needed


def answered(request: Request) -> Generator[list[str], None, Generation]:
    """Prefills or extends, then draws tokens block by block.

    Args:
        request: the call.

    Yields:
        The new text of every sequence at each look.

    Returns:
        The generation.
    """
    params, encoded, policy, chosen = request.params, request.encoded, request.policy, request.chosen
    flat, batch, clocks = Flat(params.decoder), len(encoded.ids), request.clocks
    block = min(_BLOCK, bucket(request.max_new_tokens))
    before, traffic = Traffic(), Traffic()
    if request.cache is None:
        options: dict[str, Any] = {"key": request.key, "new": request.max_new_tokens, "progress": request.progress}
        cache, logits, needed = prefilled(params, flat, encoded, policy, chosen, clocks, **options)
        spare = batch * params.config.kv_heads * sum(needed.room) * cache.row_bytes
        sizes = (needed.full_bytes, cache.nbytes - spare, needed.slack_bytes)
    else:
        given = request.cache
        sizes = (given.full_nbytes, given.nbytes, given.slack_nbytes)
        cache, logits = _extended(flat, request, clocks, before)
    kept = float(np.mean(cache.kept))
    program = program_for(flat, cache, chosen.decode)
    with clocks.making:
        draw = looping.Draw(logits=logits, done=jnp.zeros((batch,), bool), key=request.key)
    eos = sorted({*params.config.eos, *(params.text.eos_ids if params.text else ())}) if request.stop_at_eos else []
    ends = jnp.asarray(eos or [-2], jnp.int32)
    answers = Answers(params.text, batch, request.stops)

    draw_steps: Callable[..., Any] = partial(looping.decode, flat)
    if cache.bank is not None:
        draw_steps = partial(staged.decode, flat, traffic=traffic)
    draw_steps = partial(draw_steps, program=program, sampling=request.sampling, size=block)
    with clocks.making:
        running = looping.begin(cache, program=program, size=block)
        # A run of no steps compiles and changes nothing.
        running, draw, _, _ = draw_steps(running, draw, ends, 0)
        cache = looping.settle(running, program=program)
        running = looping.begin(cache, program=program, size=block)
    held, steps_left = 0, steps_that_fit(cache)  # Rows drawn since the last settling; steps before the next.
    with _bar(request.progress, request.max_new_tokens, "decode") as bar:
        look = request.look or not bar.disable
        # A row behind a stop string is taken back: not once another had to go for it, or was scored by it.
        pace = 1 if request.stops and (program.evicts or program.scored) else LOOK if look else block
        left, ended = request.max_new_tokens, False
        while left and not ended:
            with clocks.decode:
                steps = min(left, pace, block)
                if steps_left < 1 or held + steps > block:
                    cache = looping.settle(running, program=program)
                    if steps_left < 1:
                        cache = make_room(flat, cache, left, key=request.key)
                    running = looping.begin(cache, program=program, size=block)
                    held, steps_left = 0, steps_that_fit(cache)
                steps = min(steps, steps_left)
                if steps < 1:
                    raise RuntimeError(f"no room for a token after making some: a defect of jaxkv ({policy})")
                running, draw, drawn, count = draw_steps(running, draw, ends, steps)
                out, ran = np.asarray(drawn), int(count)
                inside = bool((out < params.config.vocab).all())
                require(inside, "sampling", request.sampling, f"it gave an id outside of [0, {params.config.vocab})")
                left, held, steps_left = left - ran, held + ran, steps_left - ran
                surplus, pieces = answers.take(out[:, :ran])
                # The token that ends a sequence is drawn but never becomes a row.
                surplus = surplus - ((surplus > 0) & np.asarray(draw.done))
                if surplus.any():
                    running = running.rewound(jnp.asarray(surplus, jnp.int32))
                draw = dataclasses.replace(draw, done=draw.done | jnp.asarray(answers.stopped))
                ended = bool(draw.done.all())
            bar.update(ran)
            if request.look:
                yield pieces
    with clocks.decode:
        cache = looping.settle(running, program=program)
        if due(cache).any():
            cache = again(flat, cache, key=request.key)
        jax.block_until_ready(cache.pools)
    closing = answers.flush()
    if request.look and any(closing):
        yield closing
    stats = Stats(
        prompt_tokens=int(encoded.lengths.sum()),
        new_tokens=sum(len(tokens) for tokens in answers.tokens),
        prefill_seconds=clocks.prefill.running_seconds,
        decode_seconds=clocks.decode.running_seconds,
        compile_seconds=clocks.compile_seconds,
        compiled_programs=clocks.programs,
        full_bytes=sizes[0],
        cache_bytes=sizes[1],
        allocated_bytes=cache.nbytes,
        slack_bytes=sizes[2],
        kept=kept,
        attention=str(chosen),
        decode_form=cache.form.value,
        decode_steps=request.max_new_tokens - left,
        host_bytes=cache.host_nbytes,
        transfers=traffic.transfers,
        transferred_bytes=traffic.bytes,
        loaded_bytes=before.bytes,
        filter_layers=() if program.reading is None else program.reading.filters,
    )
    return _generation(request, answers, cache, stats)


def _generation(request: Request, answers: Answers, cache: KVCache, stats: Stats) -> Generation:
    tokens = [np.asarray(tokens, np.int32) for tokens in answers.tokens]
    text = None if request.params.text is None else answers.text
    single = request.encoded.single
    return Generation(
        text=text[0] if single and text is not None else text,
        tokens=tokens[0] if single else tokens,
        cache=dataclasses.replace(cache, turn=request.encoded.turn),
        stats=stats,
    )


def _forked(given: KVCache, encoded: Encoded, new: int) -> KVCache:
    """A copy of a cache for these prompts, with room for them and, where rows are only added, for new tokens."""
    batch, longest = len(encoded.ids), int(encoded.lengths.max())
    goes_on = given.policy.upkeep is not None
    wanted = longest + (1 if goes_on else min(bucket(new), MOST_AHEAD))
    # A cache fresh from prefill always gets room: slack varies with the prompt's length, and shapes must not. One that
    # has grown grows twofold, so that turn after turn meets few shapes.
    grown = int(beyond(given).max())
    fits = grown > 0 and given.free().min() >= wanted
    room = 0 if fits else bucket(wanted)
    twofold = room if fits or goes_on else bucket(max(wanted, grown))
    available = available_bytes(next(iter(given.seen.devices())))
    if twofold > room and (available is None or _copy_bytes(given, batch, twofold) <= available // 2):
        room = twofold
    copied = _copy_bytes(given, batch, max(room, 0 if goes_on else bucket(new)))
    check_bytes(copied, f"a copy of the cache for {batch} prompts and max_new_tokens={new}")
    return repack(given, room=room, batch=batch)


def _copy_bytes(given: KVCache, batch: int, room: int) -> int:
    """What a copy of a cache for so many sequences weighs, with room, and what a prompt on top of it loads."""
    segments = given.config.layers * given.config.kv_heads
    copied = given.nbytes * batch // given.batch + batch * segments * room * given.row_bytes
    if given.bank is not None:
        # Whole layers come to the device for every prompt: one in use, the same in attention's order, those ahead.
        reading = given.policy.reading(given.config.layers, given.bank.rows[0].shape[1])
        copied += (2 + reading.ahead) * batch * given.bank.rows[0].nbytes // given.bank.rows[0].shape[0]
    return copied


def _extended(flat: Flat, request: Request, clocks: Clocks, traffic: Traffic) -> tuple[KVCache, Float[Array, "B V"]]:
    """Forks the cache and runs the prompts on top of it."""
    given, encoded = request.cache, request.encoded
    assert given is not None
    batch, longest = len(encoded.ids), int(encoded.lengths.max())
    with clocks.prefill:
        cache = _forked(given, encoded, request.max_new_tokens)
    size = min(_BLOCK, bucket(longest))
    tokens = encoded.padded(-(-longest // size) * size)
    program = program_for(flat, cache, request.chosen.decode)
    run: Callable[..., Any] = partial(decoding.extend, flat, program=program)
    if cache.bank is not None:
        run = partial(staged.step, flat, program=program)
    # A run over no tokens compiles and changes nothing.
    with clocks.making:
        nothing = jnp.zeros((batch,), jnp.int32)
    warm: dict[str, Any] = {} if cache.bank is None else {"traffic": Traffic()}
    counted: dict[str, Any] = {} if cache.bank is None else {"traffic": traffic}
    with clocks.making:
        logits, cache = run(cache=cache, tokens=jnp.zeros((batch, size), jnp.int32), count=nothing, **warm)
        jax.block_until_ready(logits)
    with clocks.prefill:
        for first in range(0, tokens.shape[1], size):
            count = np.clip(encoded.lengths - first, 0, size).astype(np.int32)
            part = jnp.asarray(tokens[:, first : first + size])
            new, cache = run(cache=cache, tokens=part, count=jnp.asarray(count), **counted)
            logits = jnp.where(jnp.asarray(count > 0)[:, None], new, logits)
        jax.block_until_ready(logits)
        if given.policy.upkeep is not None:
            # A long question leaves nothing behind but what the policy keeps of it.
            cache = make_room(flat, cache, request.max_new_tokens, key=request.key)
    return cache, logits
