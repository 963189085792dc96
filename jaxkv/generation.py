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
from jaxkv._dataclasses import frozen_dataclass
from jaxkv._errors import require
from jaxkv.attention import Implementation
from jaxkv.cache import ConversationState, KVCache
from jaxkv.engine.decode_loop import DecodeLoop
from jaxkv.engine.early_compilation import start_loop_compilation
from jaxkv.engine.generation_results import AnswerCollector, Generation, Stats, Stream
from jaxkv.engine.lengths import LOOK
from jaxkv.engine.progress import run_generator
from jaxkv.engine.prompt_scores import PromptScorer
from jaxkv.engine.sampling import Sampler, collect_end_ids, get_settings, make_end_id_table
from jaxkv.engine.session import Session
from jaxkv.loading import LanguageModel
from jaxkv.machine import hosts
from jaxkv.machine.compilation import log_slow_compilation
from jaxkv.policies.model_policy import resolve_policy_for_model
from jaxkv.policies.policy import Policy
from jaxkv.sharding.mesh import copy_to_host
from jaxkv.text.prompts import EncodedPrompts, Prompt, choose_question_window, encode_prompts


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
        prompt: text, chat messages, a `Chat`, token ids, or a list of such prompts.
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
    hosts.require_same_arguments(
        "jaxkv.prefill",
        params,
        mesh,
        prompt=prompt,
        policy=policy,
        raw=raw,
        key=key,
        implementation=implementation,
    )
    params = arguments.validate_model(params, mesh)
    raw = _checks.validate_bool("raw", raw)
    key = arguments.validate_random_key(key)
    progress = arguments.validate_progress(progress)
    session = Session(params, policy, implementation=implementation, key=key)
    encoded = encode_prompts(prompt, params.text, params.config, raw=raw, close=False)
    arguments.require_prompts_fit(params.config, session.policy, encoded.prompt_lengths, 0, None)
    needed = session.plan(encoded.prompt_lengths)
    arguments.warn_unseen_question(session.policy, encoded, needed.budget)
    with make_progress_bar(progress, params.config.layers, "prefill") as shown:
        cache = session.prefill(encoded, needed=needed, tick=shown.update)
    return dataclasses.replace(cache, logits=None)


class _SamplingOptions(TypedDict, total=False):
    """Types of the keyword arguments temperature, top_k, top_p and min_p of `generate`, fields of `Sampling`."""

    temperature: int | float | np.number | None
    top_k: int | np.integer | None
    top_p: int | float | np.number | None
    min_p: int | float | np.number | None


class _AnswerOptions(_SamplingOptions, total=False):
    """Types of the keyword arguments of `generate` for sampling and for the end of answers."""

    max_new_tokens: int | np.integer
    sampling: Sampler | None
    seed: int | np.integer | None
    key: PRNGKeyArray | int | None
    stop: str | Iterable[str] | None
    stop_at_eos: bool


class _GenerateOptions(_AnswerOptions, total=False):
    """Types of all keyword arguments of `generate` except `stream`, shared by its overloads."""

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
    **options: Unpack[_GenerateOptions],
) -> Generation: ...
@overload
def generate(
    params: LanguageModel,
    prompt: Prompt,
    *,
    stream: Literal[True],
    **options: Unpack[_GenerateOptions],
) -> Stream: ...
@overload
def generate(
    params: LanguageModel, prompt: Prompt, *, stream: bool, **options: Unpack[_GenerateOptions]
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
    """Generate answers to prompts over a compressed cache, given or prefilled; return a `Generation`, or a `Stream`.

    Args:
        params: model from `jaxkv.load`.
        prompt: text, chat messages, a `Chat`, token ids, or a list of such prompts. With a cache, the text that
            continues it. After `prefill` of a text, a question is separated by a blank line, unless it begins with a
            line break or consists of ids.
        policy: compression policy, its name, or its class for default settings. FullKV(), the default, keeps every
            entry. With a cache the policy is the cache's.
        cache: cache from `prefill` or an earlier `generate`; it is not changed. A cache of one sequence serves many
            prompts.
        max_new_tokens: maximum number of tokens to sample.
        sampling: a `Sampling`, which also has penalties, biases and log-probabilities, or a callable of logits and keys
            that samples tokens. None is greedy decoding.
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
    hosts.require_same_arguments(
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
    params = arguments.validate_model(params, mesh)
    cache = arguments.validate_cache(cache)
    max_new_tokens = _checks.validate_int(
        "max_new_tokens", max_new_tokens, "sample at least 1 token"
    )
    interval = _checks.validate_int(
        "stream_interval", stream_interval, "yield the text of at least 1 token at a time"
    )
    sampling = arguments.validate_sampler(
        sampling, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p
    )
    stops = arguments.validate_stop_strings(stop)
    key = arguments.validate_random_key(key, seed)
    raw = _checks.validate_bool("raw", raw)
    stream = _checks.validate_bool("stream", stream)
    stop_at_eos = _checks.validate_bool("stop_at_eos", stop_at_eos)
    implementation = arguments.validate_implementation(implementation)
    progress = arguments.validate_progress(progress)
    continues = cache is not None
    arguments.check_sampling_options(params, sampling, key, stops, continues=continues)
    turn = ConversationState.START if cache is None else cache.turn
    asks = isinstance(policy, Policy) and policy.set_question_window(1) is not policy
    if cache is not None:
        remedy = f"the cache was compressed by {cache.policy}, before this question: omit policy"
        require(not asks, "policy", policy, remedy)
        policy = (
            None
            if policy is None
            else resolve_policy_for_model(
                policy, params.config, params.filter_layers, dtype=params.cache_dtype
            )
        )
        arguments.require_matching_cache(params, cache, policy)
        policy = cache.policy
    encoded = encode_prompts(prompt, params.text, params.config, turn=turn, raw=raw, close=True)
    if isinstance(policy, Policy) and asks:
        policy = policy.set_question_window(choose_question_window(prompt, params.text, raw=raw))
    session = Session(params, policy, implementation=implementation, key=key)
    arguments.require_prompts_fit(
        params.config, session.policy, encoded.prompt_lengths, max_new_tokens, cache
    )
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
    pieces = run_generation(call)
    if stream:
        return Stream(pieces, encoded.single)
    return run_generator(pieces)


@frozen_dataclass
class GenerateCall:
    """Validated arguments of one `generate` call: session, encoded prompts, cache and options.

    `interval` is the number of tokens between two yields of new text; None yields no text.
    """

    session: Session
    encoded: EncodedPrompts
    cache: KVCache | None
    max_new_tokens: int
    sampling: Sampler
    stops: tuple[str, ...]
    stop_at_eos: bool
    interval: int | None
    progress: bool | None


def make_progress_bar(progress: bool | None, total: int, title: str) -> tqdm:
    """Return a `tqdm` bar on stderr, shown in the first process only; with `progress=None`, on terminals only."""
    shown = sys.stderr.isatty() if progress is None else progress
    return tqdm(
        total=total,
        desc=title,
        leave=False,
        disable=not (shown and hosts.is_first_process()),
        file=sys.stderr,
    )


def run_generation(call: GenerateCall) -> Generator[list[str], None, Generation]:
    """Generator: run one `generate` call; if streaming, yield lists of new text per sequence; return `Generation`."""
    session = call.session
    params = call.session.params
    encoded = call.encoded
    eos = params.end_token_ids if call.stop_at_eos else ()
    scorer = PromptScorer(top=get_settings(call.sampling).prompt_logprobs)
    size = len(make_end_id_table(call.sampling, eos))
    cache, sizes = _prefill_or_extend(call, scorer, ends=size)
    decode_loop = session.start_decode_loop(
        cache, new=call.max_new_tokens, sampling=call.sampling, eos=eos, prompts=encoded.ids
    )
    top = get_settings(call.sampling).logprobs
    answers = AnswerCollector(params.text, len(encoded.ids), call.stops, encoded.kept, top)
    yield from _sample_until_end(call, decode_loop, answers)
    with session.clocks.decode:
        cache = decode_loop.finish_sampling()
        jax.block_until_ready(cache.pools)
    cache = session.recompress_sequences(cache)
    closing = answers.flush_text()
    if call.interval is not None and any(closing):
        yield closing
    ends = collect_end_ids(call.sampling, eos)
    return Generation(
        completions=tuple(answers.build_completions(ends, scorer.scored)),
        cache=dataclasses.replace(cache, turn=encoded.conversation_state, logits=None),
        stats=_build_stats(call, cache, sizes, answers, decode_loop),
    )


def _prefill_or_extend(
    call: GenerateCall, scorer: PromptScorer, *, ends: int
) -> tuple[KVCache, dict[str, Any]]:
    """Prefill prompts while the decode loop compiles, or extend the given cache; return cache and sizes for `Stats`."""
    session = call.session
    encoded = call.encoded
    given = call.cache
    new = call.max_new_tokens
    if given is not None:
        # Sizes are read before the cache is extended.
        sizes = _collect_cache_sizes(given, given.nbytes)
        return session.extend(given, encoded, new=new), sizes
    needed = session.plan(encoded.prompt_lengths, new)
    loop = start_loop_compilation(session, needed, new=new, sampling=call.sampling, ends=ends)
    with make_progress_bar(call.progress, session.params.config.layers, "prefill") as shown:
        cache = session.prefill(encoded, new=new, needed=needed, tick=shown.update, scorer=scorer)
    if loop is not None:
        loop.wait()
    spare = len(cache.seen) * cache.headroom_nbytes(needed.headroom)
    return cache, _collect_cache_sizes(cache, cache.nbytes - spare)


def _collect_cache_sizes(cache: KVCache, weighs: int) -> dict[str, Any]:
    """Return a dict of `Stats` sizes: full, kept and cache (`weighs`) bytes; mean kept entries per segment."""
    entries = {"full_bytes": cache.full_nbytes, "kept_bytes": cache.kept_nbytes}
    return entries | {"cache_bytes": weighs, "kept": float(np.mean(cache.kept))}


def _sample_until_end(
    call: GenerateCall, decode_loop: DecodeLoop, answers: AnswerCollector
) -> Generator[list[str], None, None]:
    """Generator: sample until all sequences end or `max_new_tokens`; if streaming, yield lists of new text."""
    axes = call.session.params.axes
    with make_progress_bar(call.progress, call.max_new_tokens, "decode") as shown:
        # One process shows the bar; all processes sample blocks of the same size.
        look = (
            bool(call.stops)
            or not shown.disable
            or (axes is not None and hosts.has_several_processes(axes.mesh))
        )
        # Entries after a stop string are rolled back. Eviction and rescoring cannot be rolled back: one token per
        # block.
        pace = (
            1
            if call.stops and decode_loop.is_rollback_impossible
            else LOOK
            if look
            else decode_loop.size
        )
        interval = call.interval or decode_loop.left
        ended = False
        wanted = interval
        while decode_loop.left and not ended:
            with call.session.clocks.decode:
                sampled = decode_loop.sample_tokens(min(decode_loop.left, pace, wanted))
                surplus = answers.append_token_ids(sampled, decode_loop.logprobs)
                decode_loop.roll_back_tokens(surplus)
                decode_loop.end_sequences(answers.stopped_sequences)
                ended = bool(decode_loop.ended_sequences.all())
            shown.update(sampled.shape[1])
            wanted -= sampled.shape[1]
            if call.interval is not None and (ended or not decode_loop.left or wanted < 1):
                yield answers.take_new_text()
            wanted = wanted or interval


def _build_stats(
    call: GenerateCall,
    cache: KVCache,
    sizes: dict[str, Any],
    answers: AnswerCollector,
    decode_loop: DecodeLoop,
) -> Stats:
    """Return the `Stats` of one `generate` call from its clocks, cache sizes and transfers; log slow compilation."""
    session = call.session
    given = call.cache
    clocks = session.clocks
    reading = decode_loop.sparse_attention_config
    moved, cut = _sum_tally_counts(cache)
    log_slow_compilation(clocks.compile_seconds)
    if given is not None:
        # The cache's sequences may be repeated.
        before = [rows * cache.batch // given.batch for rows in _sum_tally_counts(given)]
        moved = moved - before[0]
        cut = cut - before[1]
    return Stats(
        **sizes,
        prompt_tokens=int(call.encoded.prompt_lengths.sum()),
        new_tokens=sum(len(tokens) for tokens in answers.tokens),
        prefill_seconds=clocks.prefill.seconds,
        decode_seconds=clocks.decode.seconds,
        compile_seconds=clocks.compile_seconds,
        compiled_programs=clocks.program_count,
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
        else session.policy.composed.count_raised_budgets(call.encoded.prompt_lengths),
    )


def _sum_tally_counts(cache: KVCache) -> tuple[int, int]:
    """Return two totals of a cache: places given to other devices' heads, entries above score threshold but evicted."""
    moved, cut = (
        0 if each is None else int(copy_to_host(each)[: cache.batch].sum())
        for each in (cache.tally.moved, cache.tally.cut)
    )
    return moved, cut
