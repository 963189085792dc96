"""`prefill` and `generate`: prompts in, a compressed cache and text out."""

import dataclasses
import sys
import time
from collections.abc import Callable, Generator, Iterable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray
from tqdm import tqdm

from jaxkv import arguments
from jaxkv._errors import require
from jaxkv.attention import Implementation, Implementations, choose, named
from jaxkv.bank import Traffic
from jaxkv.cache import KVCache, Turn, repack
from jaxkv.load import LanguageModel
from jaxkv.models import chunked, staged
from jaxkv.models import decode as decoding
from jaxkv.models import loop as looping
from jaxkv.models import prefill as prefilling
from jaxkv.models.again import again, due
from jaxkv.models.decoder import Flat
from jaxkv.models.moving import Live, program_for
from jaxkv.models.room import first_room, make_room, steps_that_fit
from jaxkv.plan import LOOK, Plan, bucket, check_bytes, check_memory, plan
from jaxkv.policies.base import Policy
from jaxkv.policies.full import FullKV
from jaxkv.policies.registry import as_policy
from jaxkv.prompts import Encoded, Prompt, encode
from jaxkv.results import Answers, Generation, Stats, Stream
from jaxkv.sampling import Greedy, Sampling

# New rows come in blocks, so that neither memory nor compilation follows max_new_tokens.
_BLOCK = 256


def prefill(
    params: LanguageModel,
    prompt: Prompt,
    *,
    policy: Policy | type[Policy] | str | None = None,
    raw: bool = False,
    key: PRNGKeyArray | int | None = None,
    implementation: Implementation | str | None = Implementation.AUTO,
    progress: bool | None = None,
) -> KVCache:
    """Runs prompts through the model and keeps what the policy keeps, to be asked about later, many times over.

    A text prompt leaves the user's turn open: `generate(params, question, cache=cache)` closes it.

    Args:
        params: from `jaxkv.load`.
        prompt: text, chat messages, token ids, or a list of any.
        policy: the compression, or the name or class of one with its defaults; FullKV() keeps everything.
        raw: the text is plain text, not a user's message.
        key: random key or seed, for policies that draw.
        implementation: what computes attention; by default the fastest one here.
        progress: a bar on stderr; by default where stderr is a terminal.

    Returns:
        A tight cache. It is a value: asking it changes nothing in it.

    Raises:
        ValueError: for an empty or over-long prompt, or a budget the policy cannot honour.
        TypeError: for an argument of the wrong kind, with what to give instead.
        MemoryError: naming the plan's bytes, if they are not there.
    """
    params, raw, key = arguments.as_model(params), arguments.as_flag("raw", raw), arguments.as_key(key)
    implementation, progress = arguments.as_implementation(implementation), arguments.as_progress(progress)
    policy = as_policy(policy).for_model(params.config.layers, params.filter_layers)
    encoded = encode(prompt, params.text, params.config, raw=raw, close=False)
    _require_fits(params, encoded.lengths, 0)
    chosen = _choose(params, policy, implementation)
    cache, _, _, _ = _prefill(params, Flat(params.decoder), encoded, policy, chosen, key=key, room=0, progress=progress)
    return dataclasses.replace(cache, turn=encoded.turn)


def generate(
    params: LanguageModel,
    prompt: Prompt,
    *,
    policy: Policy | type[Policy] | str | None = None,
    cache: KVCache | None = None,
    max_new_tokens: int | np.integer = 128,
    sampling: Sampling | None = None,
    stop: str | Iterable[str] | None = (),
    stop_at_eos: bool = True,
    key: PRNGKeyArray | int | None = None,
    raw: bool = False,
    stream: bool = False,
    implementation: Implementation | str | None = Implementation.AUTO,
    progress: bool | None = None,
) -> Any:
    """Answers prompts, over a cache compressed by a policy.

    Args:
        params: from `jaxkv.load`.
        prompt: text, chat messages, token ids, or a list of any; on top of a cache: what comes next.
        policy: the compression, or the name or class of one with its defaults; FullKV() keeps everything. With a
            cache, the cache's own.
        cache: from `prefill` or an earlier `generate`; it is not changed. One sequence serves many prompts.
        max_new_tokens: tokens to draw at most.
        sampling: how to draw; Greedy() if None.
        stop: strings that end an answer. They are left out of its text, but stay in its tokens and in the cache: a
            policy that has dropped rows for them cannot take them back.
        stop_at_eos: end at the model's end-of-answer tokens.
        key: random key or seed for sampling and for policies that draw; needed if sampling is not greedy.
        raw: the text is plain text, not a user's message.
        stream: return a `Stream` that yields text as it comes.
        implementation: what computes attention; by default the fastest one here. `stats.attention` says what ran.
        progress: bars on stderr; by default where stderr is a terminal.

    Returns:
        A `Generation`, or a `Stream` whose `result` will be one.

    Raises:
        ValueError: for an empty or over-long prompt, a budget the policy cannot honour, a cache of another policy or
            model.
        TypeError: for an argument of the wrong kind, with what to give instead.
        MemoryError: naming the plan's bytes, if they are not there.
    """
    params, cache = arguments.as_model(params), arguments.as_cache(cache)
    max_new_tokens = arguments.as_count("max_new_tokens", max_new_tokens, "draw at least 1 token")
    sampling, stops, key = arguments.as_sampling(sampling), arguments.as_stops(stop), arguments.as_key(key)
    raw, stream, stop_at_eos = (
        arguments.as_flag("raw", raw),
        arguments.as_flag("stream", stream),
        arguments.as_flag("stop_at_eos", stop_at_eos),
    )
    implementation, progress = arguments.as_implementation(implementation), arguments.as_progress(progress)
    require(isinstance(sampling, Greedy) or key is not None, "key", key, f"{sampling} needs jax.random.key(...)")
    require(not stops or params.text is not None, "stop", stop, "the checkpoint has no tokenizer: stop by eos only")
    turn = Turn.START if cache is None else cache.turn
    policy = None if policy is None else as_policy(policy).for_model(params.config.layers, params.filter_layers)
    if cache is not None:
        _require_ours(params, cache, policy)
    encoded = encode(prompt, params.text, params.config, turn=turn, raw=raw, close=True)
    _require_fits(params, encoded.lengths, max_new_tokens, cache)
    policy = cache.policy if cache is not None else FullKV() if policy is None else policy
    request = _Request(
        params=params,
        encoded=encoded,
        policy=policy,
        chosen=_choose(params, policy, implementation),
        cache=cache,
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        stops=stops,
        stop_at_eos=stop_at_eos,
        key=jax.random.key(0) if key is None else key,
        look=stream or bool(stops),
        progress=progress,
    )
    pieces = _run(request)
    if stream:
        return Stream(pieces, encoded.single)
    while True:
        try:
            next(pieces)
        except StopIteration as end:
            return end.value


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Request:
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


def _choose(params: LanguageModel, policy: Policy, implementation: Implementation | str) -> Implementations:
    chosen = choose(
        implementation,
        platform=jax.default_backend(),
        dtype=params.dtype,
        head_dim=params.config.head_dim,
        scores=policy.needs.queries > 0 or policy.needs.sums,
        sums=policy.needs.sums,
    )
    if not policy.by_chunks:
        return chosen
    remedy = "chunks attend to the cache, which cuDNN does not: leave it out"
    require(named(implementation) is not Implementation.CUDNN, "implementation", implementation, remedy)
    return dataclasses.replace(chosen, prefill=chosen.decode)


def _require_ours(params: LanguageModel, cache: KVCache, policy: Policy | None) -> None:
    require(
        policy is None or policy == cache.policy,
        "policy",
        policy,
        f"the cache was compressed by {cache.policy}: leave policy out, or prefill anew",
    )
    require(
        cache.config == params.config and cache.model == params.fingerprint,
        "cache",
        cache.model,
        f"it was made by another model than {params.name!r}: prefill with this one",
    )


def _require_fits(params: LanguageModel, lengths: np.ndarray, new: int, cache: KVCache | None = None) -> None:
    seen = 0 if cache is None else np.asarray(cache.seen)
    if cache is not None:
        matches = cache.batch in (1, len(lengths))
        require(
            matches, "prompt", f"{len(lengths)} prompts", f"the cache holds {cache.batch}: give as many, or 1 cache"
        )
    total = int((seen + lengths).max()) + new
    limit = params.config.max_positions
    require(
        total <= limit,
        "prompt",
        f"{total} tokens, {new} new ones included",
        f"the model was made for {limit}: shorten the prompt or lower max_new_tokens",
    )


def _bar(progress: bool | None, total: int, what: str) -> tqdm:
    shown = sys.stderr.isatty() if progress is None else progress
    return tqdm(total=total, desc=what, leave=False, disable=not shown, file=sys.stderr)


def _prefill(
    params: LanguageModel,
    flat: Flat,
    encoded: Encoded,
    policy: Policy,
    chosen: Implementations,
    *,
    key: PRNGKeyArray | None,
    room: int | tuple[int, ...],
    progress: bool | None,
) -> tuple[KVCache, Float[Array, "B V"], Plan, tuple[float, float]]:
    """The cache, logits, plan, and seconds of prefill and of compilation."""
    config = params.config
    needed = plan(config, policy, encoded.lengths.tolist(), dtype=params.dtype, room=room)
    check_memory(needed)
    begin = time.perf_counter()
    tokens = encoded.padded(needed.slots)
    way: Any = chunked if policy.by_chunks else prefilling
    way.compile_ahead(flat, config, len(encoded.ids), policy, needed, implementation=chosen.prefill)
    compiled = time.perf_counter()
    with _bar(progress, config.layers, "prefill") as bar:
        options: dict[str, Any] = {"model": params.fingerprint, "tick": bar.update, "implementation": chosen.prefill}
        if not policy.by_chunks:
            options["key"] = jax.random.key(0) if key is None else key
        cache, logits = way.prefill(flat, config, tokens, encoded.lengths, policy, needed, **options)
    jax.block_until_ready(logits)
    return cache, logits, needed, (time.perf_counter() - compiled, compiled - begin)


def _run(request: _Request) -> Generator[list[str], None, Generation]:
    """Prefills or extends, then draws tokens block by block; yields the new text of every sequence at each look."""
    params, encoded = request.params, request.encoded
    flat, batch, chosen = Flat(params.decoder), len(request.encoded.ids), request.chosen
    block = min(_BLOCK, bucket(request.max_new_tokens))
    policy, before, traffic = request.policy, Traffic(), Traffic()
    if request.cache is None:
        room = first_room(policy, params.config.layers, encoded.lengths, block)
        cache, logits, needed, (prefill_seconds, compile_seconds) = _prefill(
            params, flat, encoded, policy, chosen, key=request.key, room=room, progress=request.progress
        )
        spare = batch * params.config.kv_heads * sum(room) * cache.row_bytes
        sizes = (needed.full_bytes, cache.nbytes - spare, needed.slack_bytes)
    else:
        given = request.cache
        sizes = (given.full_nbytes, given.nbytes, given.slack_nbytes)
        begin = time.perf_counter()
        cache, logits, compile_seconds = _extend(flat, given, encoded, block, chosen, request.key, before)
        prefill_seconds = time.perf_counter() - begin - compile_seconds
    kept = float(np.mean(cache.kept))
    program = program_for(flat, cache, chosen.decode)
    draw = looping.Draw(logits=logits, done=jnp.zeros((batch,), bool), key=request.key)
    eos = sorted({*params.config.eos, *(params.text.eos_ids if params.text else ())}) if request.stop_at_eos else []
    ends = jnp.asarray(eos or [-2], jnp.int32)
    answers = Answers(params.text, batch, request.stops)
    begin = time.perf_counter()

    draw_steps: Callable[..., Any] = partial(looping.decode, flat)
    if cache.bank is not None:
        draw_steps = partial(staged.decode, flat, bank=cache.bank, traffic=traffic)
    draw_steps = partial(draw_steps, program=program, sampling=request.sampling, size=block)
    running = looping.begin(Live.of(cache), program=program, size=block)
    # A run of no steps compiles and changes nothing: the clock of decoding starts after it.
    running, draw, _, _ = draw_steps(running, draw, ends, 0)
    cache = looping.settle(running, program=program).into(cache)
    running = looping.begin(Live.of(cache), program=program, size=block)
    held, steps_left = 0, steps_that_fit(cache)  # Rows drawn since the last settling; steps before the next.
    compile_seconds += time.perf_counter() - begin
    begin = time.perf_counter()
    with _bar(request.progress, request.max_new_tokens, "decode") as bar:
        look = request.look or not bar.disable
        # A row behind a stop string is taken back: not once another had to go for it, or was scored by it.
        pace = 1 if request.stops and (program.evicts or program.scored) else LOOK if look else block
        left = request.max_new_tokens
        while left and not bool(draw.done.all()):
            steps = min(left, pace, block)
            if steps_left < 1 or held + steps > block:
                cache = looping.settle(running, program=program).into(cache)
                if steps_left < 1:
                    cache = make_room(flat, cache, block, key=request.key)
                running = looping.begin(Live.of(cache), program=program, size=block)
                held, steps_left = 0, steps_that_fit(cache)
            steps = min(steps, steps_left)
            running, draw, drawn, count = draw_steps(running, draw, ends, steps)
            out, ran = np.asarray(drawn), int(count)
            left, held, steps_left = left - ran, held + ran, steps_left - ran
            surplus, pieces = answers.take(out[:, :ran])
            # The token that ends a sequence is drawn but never becomes a row.
            surplus = surplus - ((surplus > 0) & np.asarray(draw.done))
            if surplus.any():
                running = running.rewound(jnp.asarray(surplus, jnp.int32))
            draw = dataclasses.replace(draw, done=draw.done | jnp.asarray(answers.stopped))
            bar.update(ran)
            if request.look:
                yield pieces
    cache = looping.settle(running, program=program).into(cache)
    if due(cache).any():
        cache = again(flat, cache, key=request.key)
    jax.block_until_ready(cache.pools)
    decode_seconds = time.perf_counter() - begin
    closing = answers.flush()
    if request.look and any(closing):
        yield closing
    stats = Stats(
        prompt_tokens=int(encoded.lengths.sum()),
        new_tokens=sum(len(tokens) for tokens in answers.tokens),
        prefill_seconds=prefill_seconds,
        decode_seconds=decode_seconds,
        compile_seconds=compile_seconds,
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
    tokens = [np.asarray(tokens, np.int32) for tokens in answers.tokens]
    text = None if params.text is None else answers.text
    single = encoded.single
    return Generation(
        text=text[0] if single and text is not None else text,
        tokens=tokens[0] if single else tokens,
        cache=dataclasses.replace(cache, turn=encoded.turn),
        stats=stats,
    )


def _extend(
    flat: Flat,
    given: KVCache,
    encoded: Encoded,
    block: int,
    chosen: Implementations,
    key: PRNGKeyArray,
    traffic: Traffic,
) -> tuple[KVCache, Float[Array, "B V"], float]:
    """Forks a cache, with room, and runs the prompts on top of it; also returns the seconds spent compiling."""
    batch, longest = len(encoded.ids), int(encoded.lengths.max())
    goes_on = given.policy.upkeep is not None
    wanted = longest + (1 if goes_on else block)
    # A cache fresh from prefill always gets room: slack varies with the prompt's length, and shapes must not.
    grown = bool((given.kept > np.asarray(given.limit)).any())
    room = 0 if grown and given.free().min() >= wanted else -(-wanted // 64) * 64
    segments = given.config.layers * given.config.kv_heads
    copied = given.nbytes * batch // given.batch + batch * segments * room * given.row_bytes
    if given.bank is not None:
        # Whole layers come to the device for every prompt: one in use, the same in attention's order, those ahead.
        reading = given.policy.reading(given.config.layers, given.bank.rows[0].shape[1])
        copied += (2 + reading.ahead) * batch * given.bank.rows[0].nbytes // given.bank.rows[0].shape[0]
    check_bytes(copied, f"a copy of the cache for {batch} prompts, with room for new rows,")
    cache = repack(given, room=room, batch=batch)
    size = min(_BLOCK, bucket(longest))
    tokens = encoded.padded(-(-longest // size) * size)
    program = program_for(flat, cache, chosen.decode)
    run: Callable[..., Any] = partial(decoding.extend, flat, program=program)
    if cache.bank is not None:
        run = partial(staged.step, flat, bank=cache.bank, program=program)
    begin = time.perf_counter()
    # A run over no tokens compiles and changes nothing.
    nothing = jnp.zeros((batch,), jnp.int32)
    warm: dict[str, Any] = {} if cache.bank is None else {"traffic": Traffic()}
    counted: dict[str, Any] = {} if cache.bank is None else {"traffic": traffic}
    logits, live = run(live=Live.of(cache), tokens=jnp.zeros((batch, size), jnp.int32), count=nothing, **warm)
    jax.block_until_ready(logits)
    spent = time.perf_counter() - begin
    for first in range(0, tokens.shape[1], size):
        count = np.clip(encoded.lengths - first, 0, size).astype(np.int32)
        part = jnp.asarray(tokens[:, first : first + size])
        new, live = run(live=live, tokens=part, count=jnp.asarray(count), **counted)
        logits = jnp.where(jnp.asarray(count > 0)[:, None], new, logits)
    jax.block_until_ready(logits)
    cache = live.into(cache)
    # A long question leaves nothing behind but what the policy keeps of it.
    return (make_room(flat, cache, block, key=key) if goes_on else cache), logits, spent
