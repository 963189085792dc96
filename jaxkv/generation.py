"""`prefill` and `generate`: from prompts to a compressed cache and generated text."""

import dataclasses
import sys
from collections.abc import Generator, Iterable
from typing import Any, Literal, TypedDict, Unpack, overload

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import PRNGKeyArray
from tqdm import tqdm

from jaxkv import _checks, arguments
from jaxkv._checks import settled
from jaxkv.attention import Implementation
from jaxkv.cache import KVCache, Turn
from jaxkv.engine.decode_loop import DecodeLoop
from jaxkv.engine.generation_results import Answers, Generation, Stats, Stream
from jaxkv.engine.lengths import LOOK
from jaxkv.engine.progress import run_to_end
from jaxkv.engine.sampling import Sampler
from jaxkv.engine.session import Session
from jaxkv.loading import LanguageModel
from jaxkv.machine import hosts
from jaxkv.machine.compilation import tell_if_slow
from jaxkv.policies.model_policy import policy_for
from jaxkv.policies.policy import Policy
from jaxkv.sharding.mesh import host
from jaxkv.text.prompts import Encoded, Prompt, encode


@settled
def prefill(
    params: LanguageModel,
    prompt: Prompt,
    *,
    policy: Policy | type[Policy] | str | None = None,
    raw: bool = False,
    key: PRNGKeyArray | int | None = None,
    mesh: Mesh | None = None,
    implementation: Implementation | str = Implementation.AUTO,
    progress: bool | None = None,
) -> KVCache:
    """Prefills one or more prompts into a compressed `KVCache`, which questions can then be asked on many times.

    A text prompt leaves the user's turn open: `generate(params, question, cache=cache)` closes it. A policy that scores
    entries by the attention of the prompt's end (SnapKV, PyramidKV, TOVA) cannot know the question: it warns, once.

    Args:
        params: from `jaxkv.load`.
        prompt: text, chat messages, token ids, or a list of such prompts.
        policy: the compression, or its name or class for the defaults; FullKV(), the default, keeps every entry.
        raw: True if the text is plain text, not a user's message.
        key: random key or seed, for policies that use random numbers.
        mesh: devices with the axes "data" and "model" to run on; the model is moved there once. None for where it is.
        implementation: the implementation of attention; by default the fastest one for these devices.
        progress: True for a progress bar on stderr; by default if stderr is a terminal.

    Returns:
        A cache without room for new entries. It is immutable: questions do not change it.

    Raises:
        ValueError: for an empty or over-long prompt, or a budget the policy cannot honour.
        TypeError: for an argument of the wrong kind, with what to give instead.
        MemoryError: naming the plan's bytes, if they are not there.

    Warns:
        UnseenQuestionWarning: for text of which such a policy drops entries, once per process and policy class.
    """
    hosts.require_same(
        "jaxkv.prefill",
        params,
        mesh,
        prompt=prompt,
        policy=policy,
        raw=raw,
        key=key,
        implementation=implementation,
    )
    params, raw = arguments.as_model(params, mesh), _checks.flag("raw", raw)
    key = arguments.as_key(key)
    progress = arguments.as_progress(progress)
    session = Session(params, policy, implementation=implementation, key=key)
    encoded = encode(prompt, params.text, params.config, raw=raw, close=False)
    arguments.require_fits(params.config, session.policy, encoded.lengths, 0, None)
    needed = session.plan(encoded.lengths)
    arguments.warn_unseen(session.policy, encoded, needed.budget)
    with bar(progress, params.config.layers, "prefill") as shown:
        cache = session.prefill(encoded, needed=needed, tick=shown.update)
    return dataclasses.replace(cache, logits=None)


class _SamplingNumbers(TypedDict, total=False):
    """Types of the fields of a `Sampling` that `generate` takes as arguments."""

    temperature: int | float | np.number | None
    top_k: int | np.integer | None
    top_p: int | float | np.number | None
    min_p: int | float | np.number | None


class _AnswerOptions(_SamplingNumbers, total=False):
    """Types of the arguments of `generate` that say how tokens are sampled, and where answers end."""

    max_new_tokens: int | np.integer
    sampling: Sampler | None
    seed: int | np.integer | None
    key: PRNGKeyArray | int | None
    stop: str | Iterable[str] | None
    stop_at_eos: bool


class _Options(_AnswerOptions, total=False):
    """Types of the keyword arguments that all overloads of `generate` share."""

    policy: Policy | type[Policy] | str | None
    cache: KVCache | None
    raw: bool
    stream_interval: int | np.integer
    mesh: Mesh | None
    implementation: Implementation | str
    progress: bool | None


@overload
def generate(
    params: LanguageModel,
    prompt: Prompt,
    *,
    stream: Literal[False] = False,
    **options: Unpack[_Options],
) -> Generation: ...
@overload
def generate(
    params: LanguageModel, prompt: Prompt, *, stream: Literal[True], **options: Unpack[_Options]
) -> Stream: ...
@overload
def generate(
    params: LanguageModel, prompt: Prompt, *, stream: bool, **options: Unpack[_Options]
) -> Generation | Stream: ...
@settled
def generate(
    params: LanguageModel,
    prompt: Prompt,
    *,
    policy: Policy | type[Policy] | str | None = None,
    cache: KVCache | None = None,
    max_new_tokens: int | np.integer = 128,
    sampling: Sampler | None = None,
    temperature: int | float | np.number | None = None,
    top_k: int | np.integer | None = None,
    top_p: int | float | np.number | None = None,
    min_p: int | float | np.number | None = None,
    seed: int | np.integer | None = None,
    stop: str | Iterable[str] | None = (),
    stop_at_eos: bool = True,
    key: PRNGKeyArray | int | None = None,
    raw: bool = False,
    stream: bool = False,
    stream_interval: int | np.integer = 1,
    mesh: Mesh | None = None,
    implementation: Implementation | str = Implementation.AUTO,
    progress: bool | None = None,
) -> Generation | Stream:
    """Generates answers to one or more prompts over a compressed cache; returns a `Generation` or a `Stream`.

    Args:
        params: from `jaxkv.load`.
        prompt: text, chat messages, token ids, or a list of such prompts; with a cache, what follows its text. After
            `prefill` of a text a question follows behind a blank line, unless it begins with a line break or is ids.
        policy: the compression, or its name or class for the defaults; FullKV(), the default, keeps every entry. With a
            cache it is the cache's policy.
        cache: from `prefill` or an earlier `generate`; it is not changed. One sequence serves many prompts.
        max_new_tokens: largest number of tokens to sample.
        sampling: how tokens are sampled, a `Sampling` or a callable of logits and keys; the likeliest tokens if None.
        temperature: of a `Sampling`, given here instead.
        top_k: of a `Sampling`.
        top_p: of a `Sampling`.
        min_p: of a `Sampling`.
        seed: `key` as a number.
        stop: strings that end an answer. They are left out of its text, but stay in its tokens and in the cache: a
            policy that has dropped entries for them cannot restore those.
        stop_at_eos: True to end at the model's end-of-answer tokens.
        key: random key or seed for sampling and for policies that use random numbers; needed if sampling is not greedy.
        raw: True if the text is plain text, not a user's message.
        stream: True to return a `Stream` that yields the text of each token as it is sampled.
        stream_interval: number of tokens whose text a `Stream` yields at once.
        mesh: devices with the axes "data" and "model" to run on; the model is moved there once. None for where it is.
        implementation: the implementation of attention; by default the fastest one for these devices.
            `stats.attention` says which ran.
        progress: True for progress bars on stderr; by default if stderr is a terminal.

    Returns:
        A `Generation`, or a `Stream` whose `result` will be one. For a list of prompts its `text`, `tokens`,
        `finish_reason` and `stop_reason` are lists; iterating over it gives one `Completion` a prompt.

    Raises:
        ValueError: for an empty or over-long prompt, a budget the policy cannot honour, a cache of another policy or
            model.
        TypeError: for an argument of the wrong kind, with what to give instead.
        MemoryError: naming the plan's bytes, if they are not there.
    """
    hosts.require_same(
        "jaxkv.generate",
        params,
        mesh,
        prompt=prompt,
        policy=policy,
        cache=cache,
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        numbers=[temperature, top_k, top_p, min_p, seed],
        stop=stop,
        stop_at_eos=stop_at_eos,
        key=key,
        raw=raw,
        stream=stream,
        stream_interval=stream_interval,
        implementation=implementation,
    )
    params, cache = arguments.as_model(params, mesh), arguments.as_cache(cache)
    max_new_tokens = _checks.whole("max_new_tokens", max_new_tokens, "sample at least 1 token")
    interval = _checks.whole(
        "stream_interval", stream_interval, "yield the text of at least 1 token at a time"
    )
    sampling = arguments.as_sampling(
        sampling, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p
    )
    stops, key = arguments.as_stops(stop), arguments.as_key(key, seed)
    raw, stream = _checks.flag("raw", raw), _checks.flag("stream", stream)
    stop_at_eos = _checks.flag("stop_at_eos", stop_at_eos)
    implementation = arguments.as_implementation(implementation)
    progress = arguments.as_progress(progress)
    arguments.require_sampling(params, sampling, key, stops)
    turn = Turn.START if cache is None else cache.turn
    if cache is not None:
        policy = (
            None
            if policy is None
            else policy_for(policy, params.config, params.filter_layers, dtype=params.cache_dtype)
        )
        arguments.require_ours(params, cache, policy)
        policy = cache.policy
    session = Session(params, policy, implementation=implementation, key=key)
    encoded = encode(prompt, params.text, params.config, turn=turn, raw=raw, close=True)
    arguments.require_fits(params.config, session.policy, encoded.lengths, max_new_tokens, cache)
    call = GenerateCall(
        session=session,
        encoded=encoded,
        cache=cache,
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        stops=stops,
        stop_at_eos=stop_at_eos,
        interval=interval if stream else None,
        progress=progress,
    )
    pieces = answered(call)
    if stream:
        return Stream(pieces, encoded.single)
    return run_to_end(pieces)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerateCall:
    """Validated arguments of one `generate` call: session, encoded prompts, cache and options.

    `interval` is the number of tokens after each of which new text is yielded; None yields no text.
    """

    session: Session
    encoded: Encoded
    cache: KVCache | None
    max_new_tokens: int
    sampling: Sampler
    stops: tuple[str, ...]
    stop_at_eos: bool
    interval: int | None
    progress: bool | None


def bar(progress: bool | None, total: int, title: str) -> tqdm:
    """`tqdm` progress bar on stderr, only in the first process; with `progress` None, only on a terminal."""
    shown = sys.stderr.isatty() if progress is None else progress
    return tqdm(
        total=total,
        desc=title,
        leave=False,
        disable=not (shown and hosts.speaks()),
        file=sys.stderr,
    )


def answered(call: GenerateCall) -> Generator[list[str], None, Generation]:
    """Generator that runs one `generate` call: yields new texts if requested, returns the `Generation`."""
    session, params, encoded = call.session, call.session.params, call.encoded
    cache, sizes = _read(call)
    eos = params.ends if call.stop_at_eos else ()
    decode_loop = session.decode_loop(
        cache, new=call.max_new_tokens, sampling=call.sampling, eos=eos
    )
    answers = Answers(params.text, len(encoded.ids), call.stops)
    yield from _sampled(call, decode_loop, answers)
    with session.clocks.decode:
        cache = decode_loop.close()
        jax.block_until_ready(cache.pools)
    cache = session.compress_again(cache)
    closing = answers.flush()
    if call.interval is not None and any(closing):
        yield closing
    return Generation(
        completions=tuple(answers.completions(eos)),
        cache=dataclasses.replace(cache, turn=encoded.turn, logits=None),
        stats=_stats(call, cache, sizes, answers, decode_loop),
    )


def _read(call: GenerateCall) -> tuple[KVCache, dict[str, Any]]:
    """Prefills the prompts, or reads them on top of the given cache; returns the cache and its sizes for `Stats`."""
    session, encoded, given, new = call.session, call.encoded, call.cache, call.max_new_tokens
    if given is not None:
        # Read before the cache is extended.
        sizes = _sizes(given, given.nbytes)
        return session.extend(given, encoded, new=new), sizes
    needed = session.plan(encoded.lengths, new)
    with bar(call.progress, session.params.config.layers, "prefill") as shown:
        cache = session.prefill(encoded, new=new, needed=needed, tick=shown.update)
    spare = len(cache.seen) * cache.headroom_nbytes(needed.headroom)
    return cache, _sizes(cache, cache.nbytes - spare)


def _sizes(cache: KVCache, weighs: int) -> dict[str, Any]:
    """Fields of `Stats` for a cache of `weighs` bytes after prefill."""
    entries = {"full_bytes": cache.full_nbytes, "kept_bytes": cache.kept_nbytes}
    return entries | {"cache_bytes": weighs, "kept": float(np.mean(cache.kept))}


def _sampled(
    call: GenerateCall, decode_loop: DecodeLoop, answers: Answers
) -> Generator[list[str], None, None]:
    """Generator that samples tokens until all sequences have ended; yields each sequence's new text if requested."""
    axes = call.session.params.axes
    with bar(call.progress, call.max_new_tokens, "decode") as shown:
        # Only one of several processes shows the bar, but all must sample blocks of the same size.
        look = (
            bool(call.stops) or not shown.disable or (axes is not None and hosts.spans(axes.mesh))
        )
        # Entries after a stop string are rolled back; with eviction or rescoring that is impossible: one token per block.
        pace = 1 if call.stops and decode_loop.final else LOOK if look else decode_loop.size
        interval = call.interval or decode_loop.left
        ended, wanted = False, interval
        while decode_loop.left and not ended:
            with call.session.clocks.decode:
                sampled = decode_loop.sample(min(decode_loop.left, pace, wanted))
                decode_loop.take_back(answers.take(sampled))
                decode_loop.end(answers.stopped)
                ended = bool(decode_loop.done.all())
            shown.update(sampled.shape[1])
            wanted -= sampled.shape[1]
            if call.interval is not None and (ended or not decode_loop.left or wanted < 1):
                yield answers.fresh()
            wanted = wanted or interval


def _stats(
    call: GenerateCall,
    cache: KVCache,
    sizes: dict[str, Any],
    answers: Answers,
    decode_loop: DecodeLoop,
) -> Stats:
    """`Stats` of one `generate` call, from its clocks, cache sizes and transfers; logs slow compilation once."""
    session, given = call.session, call.cache
    clocks, reading = session.clocks, decode_loop.reading
    moved, cut = _tallied(cache)
    tell_if_slow(clocks.compile_seconds)
    if given is not None:
        # The given cache's sequences may be repeated.
        before = [rows * cache.batch // given.batch for rows in _tallied(given)]
        moved, cut = moved - before[0], cut - before[1]
    return Stats(
        **sizes,
        prompt_tokens=int(call.encoded.lengths.sum()),
        new_tokens=sum(len(tokens) for tokens in answers.tokens),
        prefill_seconds=clocks.prefill.seconds,
        decode_seconds=clocks.decode.seconds,
        compile_seconds=clocks.compile_seconds,
        compiled_programs=clocks.programs,
        allocated_bytes=cache.nbytes,
        attention=str(session.implementations),
        layout=cache.layout.value,
        decode_steps=call.max_new_tokens - decode_loop.left,
        host_bytes=cache.host_nbytes,
        transfers=session.decode_traffic.transfers,
        transferred_bytes=session.decode_traffic.bytes,
        loaded_bytes=session.question_traffic.bytes,
        filter_layers=reading.filters,
        moved_entries=moved,
        evicted_above_threshold=cut,
        raised_budgets=0
        if given is not None
        else session.policy.composed.raised(call.encoded.lengths),
    )


def _tallied(cache: KVCache) -> tuple[int, int]:
    """Counts (moved, cut) over all sequences: entries that `capacity` moved to other devices, entries that the budget cut."""
    moved, cut = (
        0 if each is None else int(host(each)[: cache.batch].sum())
        for each in (cache.tally.moved, cache.tally.cut)
    )
    return moved, cut
