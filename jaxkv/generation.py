"""`prefill` and `generate`: from prompts to a compressed cache and generated text."""

import dataclasses
from collections.abc import Iterable
from typing import Literal, TypedDict, Unpack, overload

import numpy as np
from jax.sharding import Mesh
from jaxtyping import PRNGKeyArray

from jaxkv import _checks, arguments, hosts
from jaxkv._settings import settled
from jaxkv.answering import Call, answered, bar
from jaxkv.attention import Implementation
from jaxkv.cache import KVCache, Turn
from jaxkv.engine.compress import finished
from jaxkv.engine.session import Session
from jaxkv.loading import LanguageModel
from jaxkv.policies.fitting import policy_for
from jaxkv.policies.policy import Method
from jaxkv.results import Generation, Stream
from jaxkv.sampling import Sampler
from jaxkv.text.prompts import Prompt, encode


@settled
def prefill(
    params: LanguageModel,
    prompt: Prompt,
    *,
    policy: Method | type[Method] | str | None = None,
    raw: bool = False,
    key: PRNGKeyArray | int | None = None,
    mesh: Mesh | None = None,
    implementation: Implementation | str | None = Implementation.AUTO,
    progress: bool | None = None,
) -> KVCache:
    """Prefills one or more prompts into a compressed `KVCache`, which questions can then be asked on many times.

    A text prompt leaves the user's turn open: `generate(params, question, cache=cache)` closes it. A policy that scores
    rows by the attention of the prompt's end (SnapKV, PyramidKV, TOVA) cannot know the question: it warns, once.

    Args:
        params: from `jaxkv.load`.
        prompt: text, chat messages, token ids, or a list of such prompts.
        policy: the compression, or its name or class for the defaults; FullKV(), the default, keeps every row.
        raw: True if the text is plain text, not a user's message.
        key: random key or seed, for policies that draw.
        mesh: devices with the axes "data" and "model" to run on; the model is moved there once. None for where it is.
        implementation: the implementation of attention; by default the fastest one for these devices.
        progress: True for a progress bar on stderr; by default if stderr is a terminal.

    Returns:
        A cache without room for new rows. It is immutable: questions do not change it.

    Raises:
        ValueError: for an empty or over-long prompt, or a budget the policy cannot honour.
        TypeError: for an argument of the wrong kind, with what to give instead.
        MemoryError: naming the plan's bytes, if they are not there.

    Warns:
        UnseenQuestionWarning: for text of which such a policy drops rows, once per process and policy class.
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
    params, raw, key = (
        arguments.as_model(params, mesh),
        _checks.flag("raw", raw),
        arguments.as_key(key),
    )
    progress = arguments.as_progress(progress)
    session = Session(params, policy, implementation=implementation, key=key)
    encoded = encode(prompt, params.text, params.config, raw=raw, close=False)
    arguments.require_fits(params.config, session.policy, encoded.lengths, 0, None)
    needed = session.plan(encoded.lengths)
    arguments.warn_unseen(session.policy, encoded, needed.budget)
    with bar(progress, params.config.layers, "prefill") as shown:
        cache = session.prefill(encoded, needed=needed, tick=shown.update)
    return dataclasses.replace(cache, logits=None)


class _Options(TypedDict, total=False):
    """Types of the keyword arguments that all overloads of `generate` share."""

    policy: Method | type[Method] | str | None
    cache: KVCache | None
    max_new_tokens: int | np.integer
    sampling: Sampler | None
    temperature: int | float | np.number | None
    top_k: int | np.integer | None
    top_p: int | float | np.number | None
    min_p: int | float | np.number | None
    seed: int | np.integer | None
    stop: str | Iterable[str] | None
    stop_at_eos: bool
    key: PRNGKeyArray | int | None
    raw: bool
    stream_interval: int | np.integer
    mesh: Mesh | None
    implementation: Implementation | str | None
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
    policy: Method | type[Method] | str | None = None,
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
    implementation: Implementation | str | None = Implementation.AUTO,
    progress: bool | None = None,
) -> Generation | Stream:
    """Generates answers to one or more prompts over a compressed cache; returns a `Generation` or a `Stream`.

    Args:
        params: from `jaxkv.load`.
        prompt: text, chat messages, token ids, or a list of such prompts; with a cache, what follows its text. After
            `prefill` of a text a question follows behind a blank line, unless it begins with a line break or is ids.
        policy: the compression, or its name or class for the defaults; FullKV(), the default, keeps every row. With a
            cache it is the cache's policy.
        cache: from `prefill` or an earlier `generate`; it is not changed. One sequence serves many prompts.
        max_new_tokens: largest number of tokens to draw.
        sampling: how tokens are drawn, a `Sampling` or a callable of logits and keys; the likeliest tokens if None.
        temperature: of a `Sampling`, given here instead.
        top_k: of a `Sampling`.
        top_p: of a `Sampling`.
        min_p: of a `Sampling`.
        seed: `key` as a number.
        stop: strings that end an answer. They are left out of its text, but stay in its tokens and in the cache: a
            policy that has dropped rows for them cannot restore those.
        stop_at_eos: True to end at the model's end-of-answer tokens.
        key: random key or seed for sampling and for policies that draw; needed if sampling is not greedy.
        raw: True if the text is plain text, not a user's message.
        stream: True to return a `Stream` that yields the text of each token as it is drawn.
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
    max_new_tokens = _checks.whole("max_new_tokens", max_new_tokens, "draw at least 1 token")
    interval = _checks.whole(
        "stream_interval", stream_interval, "yield the text of at least 1 token at a time"
    )
    sampling, stops, key = (
        arguments.as_sampling(
            sampling, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p
        ),
        arguments.as_stops(stop),
        arguments.as_key(key, seed),
    )
    raw, stream = _checks.flag("raw", raw), _checks.flag("stream", stream)
    stop_at_eos = _checks.flag("stop_at_eos", stop_at_eos)
    implementation, progress = (
        arguments.as_implementation(implementation),
        arguments.as_progress(progress),
    )
    arguments.require_drawable(params, sampling, key, stops)
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
    call = Call(
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
    return finished(pieces)
