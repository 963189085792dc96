"""`prefill` and `generate`: compress prompts into a cache and generate text over it."""

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
    """Prefill one or more prompts into a compressed `KVCache`, to be reused for any number of questions.

    A text prompt leaves the user's turn open; `generate(params, question, cache=cache)` closes it. Policies that score
    entries by the attention of the prompt's end (SnapKV, PyramidKV, TOVA) cannot see the question. They warn once.

    Args:
        params: model from `jaxkv.load`.
        prompt: text, chat messages, token ids, or a list of such prompts.
        policy: compression policy, its name, or its class for default settings. FullKV(), the default, keeps every
            entry.
        raw: True if the text is plain text, not a user's message.
        key: random key or seed, for policies that use random numbers.
        mesh: mesh with the axes "data" and "model". The model is copied to it once. None runs on the model's own
            devices.
        implementation: attention implementation; by default the fastest one on these devices.
        progress: True shows a progress bar on stderr. By default a bar is shown on terminals only.

    Returns:
        A cache without headroom. It is immutable: questions do not change it.

    Raises:
        ValueError: for an empty or too long prompt, or a budget that is too small for the policy.
        TypeError: for an argument of the wrong type; the message says what to pass.
        MemoryError: if the planned bytes exceed the free memory; the message names them.

    Warns:
        UnseenQuestionWarning: if such a policy evicts entries of a text, once per process and policy class.
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
    """Types of the `Sampling` fields that `generate` accepts as arguments."""

    temperature: int | float | np.number | None
    top_k: int | np.integer | None
    top_p: int | float | np.number | None
    min_p: int | float | np.number | None


class _AnswerOptions(_SamplingNumbers, total=False):
    """Types of the `generate` arguments for sampling and for the end of answers."""

    max_new_tokens: int | np.integer
    sampling: Sampler | None
    seed: int | np.integer | None
    key: PRNGKeyArray | int | None
    stop: str | Iterable[str] | None
    stop_at_eos: bool


class _Options(_AnswerOptions, total=False):
    """Types of the keyword arguments shared by all overloads of `generate`."""

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
    """Generate answers to one or more prompts over a compressed cache; return a `Generation` or a `Stream`.

    Args:
        params: model from `jaxkv.load`.
        prompt: text, chat messages, token ids, or a list of such prompts. With a cache, the text that continues it.
            After `prefill` of a text, a question is separated by a blank line, unless it begins with a line break or
            consists of ids.
        policy: compression policy, its name, or its class for default settings. FullKV(), the default, keeps every
            entry. With a cache the policy is the cache's.
        cache: cache from `prefill` or an earlier `generate`; it is not changed. A cache of one sequence serves many
            prompts.
        max_new_tokens: maximum number of tokens to sample.
        sampling: a `Sampling`, or a callable of logits and keys that samples tokens. None is greedy decoding.
        temperature: as in `Sampling`.
        top_k: as in `Sampling`.
        top_p: as in `Sampling`.
        min_p: as in `Sampling`.
        seed: `key` as a number.
        stop: strings that end an answer. The answer's text excludes them; its tokens and the cache include them.
            Entries that the policy evicted for these tokens are not restored.
        stop_at_eos: True ends answers at the model's end-of-answer tokens.
        key: random key or seed for sampling and for policies that use random numbers; required unless decoding is
            greedy.
        raw: True if the text is plain text, not a user's message.
        stream: True returns a `Stream` that yields text as tokens are sampled.
        stream_interval: number of tokens per text that a `Stream` yields.
        mesh: mesh with the axes "data" and "model". The model is copied to it once. None runs on the model's own
            devices.
        implementation: attention implementation; by default the fastest one on these devices. `stats.attention` names
            the one that ran.
        progress: True shows progress bars on stderr. By default bars are shown on terminals only.

    Returns:
        A `Generation`, a sequence of one `Completion` per prompt, or a `Stream` whose `result` is one.

    Raises:
        ValueError: for an empty or too long prompt, a budget that is too small for the policy, or a cache of another
            policy or model.
        TypeError: for an argument of the wrong type; the message says what to pass.
        MemoryError: if the planned bytes exceed the free memory; the message names them.
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

    `interval` is the number of tokens between two yields of new text; None yields no text.
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
    """`tqdm` progress bar on stderr, in the first process only; with `progress=None`, on terminals only."""
    shown = sys.stderr.isatty() if progress is None else progress
    return tqdm(
        total=total,
        desc=title,
        leave=False,
        disable=not (shown and hosts.speaks()),
        file=sys.stderr,
    )


def answered(call: GenerateCall) -> Generator[list[str], None, Generation]:
    """Generator that runs one `generate` call: yields new text if requested, returns the `Generation`."""
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
    """Prefill the prompts, or append them to the given cache; return the cache and its sizes for `Stats`."""
    session, encoded, given, new = call.session, call.encoded, call.cache, call.max_new_tokens
    if given is not None:
        # Sizes are read before the cache is extended.
        sizes = _sizes(given, given.nbytes)
        return session.extend(given, encoded, new=new), sizes
    needed = session.plan(encoded.lengths, new)
    with bar(call.progress, session.params.config.layers, "prefill") as shown:
        cache = session.prefill(encoded, new=new, needed=needed, tick=shown.update)
    spare = len(cache.seen) * cache.headroom_nbytes(needed.headroom)
    return cache, _sizes(cache, cache.nbytes - spare)


def _sizes(cache: KVCache, weighs: int) -> dict[str, Any]:
    """Size fields of `Stats` for a cache of `weighs` bytes after prefill."""
    entries = {"full_bytes": cache.full_nbytes, "kept_bytes": cache.kept_nbytes}
    return entries | {"cache_bytes": weighs, "kept": float(np.mean(cache.kept))}


def _sampled(
    call: GenerateCall, decode_loop: DecodeLoop, answers: Answers
) -> Generator[list[str], None, None]:
    """Generator that samples tokens until all sequences end; yields each sequence's new text if requested."""
    axes = call.session.params.axes
    with bar(call.progress, call.max_new_tokens, "decode") as shown:
        # One process shows the bar; all processes sample blocks of the same size.
        look = (
            bool(call.stops) or not shown.disable or (axes is not None and hosts.spans(axes.mesh))
        )
        # Entries after a stop string are rolled back. Eviction and rescoring cannot be rolled back: one token per
        # block.
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
    """Return the `Stats` of one `generate` call from its clocks, cache sizes and transfers; log slow compilation."""
    session, given = call.session, call.cache
    clocks, reading = session.clocks, decode_loop.reading
    moved, cut = _tallied(cache)
    tell_if_slow(clocks.compile_seconds)
    if given is not None:
        # The cache's sequences may be repeated.
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
    """Counts (moved, cut) over all sequences: entries moved to other devices by `capacity`, and cut by the budget."""
    moved, cut = (
        0 if each is None else int(host(each)[: cache.batch].sum())
        for each in (cache.tally.moved, cache.tally.cut)
    )
    return moved, cut
