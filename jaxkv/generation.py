"""`prefill` and `generate`: prompts in, a compressed cache and text out."""

import dataclasses
from collections.abc import Iterable
from typing import Literal, TypedDict, Unpack, overload

import numpy as np
from jax.sharding import Mesh
from jaxtyping import PRNGKeyArray

from jaxkv import arguments, hosts
from jaxkv._errors import require
from jaxkv._settings import settled
from jaxkv.answering import Request, answered, bar
from jaxkv.attention import Implementation
from jaxkv.cache import KVCache, Turn
from jaxkv.engine.compress import finished
from jaxkv.engine.session import Session
from jaxkv.loading import LanguageModel
from jaxkv.policies.policy import Method
from jaxkv.policies.registry import as_policy
from jaxkv.results import Generation, Stream
from jaxkv.sampling import Greedy, Sampling
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
    """Runs prompts through the model and keeps what the policy keeps, to be asked about later, many times over.

    A text prompt leaves the user's turn open: `generate(params, question, cache=cache)` closes it. A policy that goes
    by what the prompt's end attends to (SnapKV, PyramidKV, TOVA) cannot know what will be asked: it warns, once.

    Args:
        params: from `jaxkv.load`.
        prompt: text, chat messages, token ids, or a list of any.
        policy: the compression, or the name or class of one with its defaults; FullKV() keeps everything.
        raw: the text is plain text, not a user's message.
        key: random key or seed, for policies that draw.
        mesh: devices with the axes "data" and "model" to run on: the model is moved there once. By default where it is.
        implementation: what computes attention; by default the fastest one here.
        progress: a bar on stderr; by default where stderr is a terminal.

    Returns:
        A tight cache. It is a value: asking it changes nothing in it.

    Raises:
        ValueError: for an empty or over-long prompt, or a budget the policy cannot honour.
        TypeError: for an argument of the wrong kind, with what to give instead.
        MemoryError: naming the plan's bytes, if they are not there.

    Warns:
        UnseenQuestionWarning: for text of which such a policy drops rows, once per process and policy class.
    """
    given = {"raw": raw, "key": key, "implementation": implementation}
    hosts.require_same("jaxkv.prefill", params, mesh, prompt=prompt, policy=policy, **given)
    params, raw, key = arguments.as_model(params, mesh), arguments.as_flag("raw", raw), arguments.as_key(key)
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
    """What `generate` takes by name whatever it returns; told once for all its forms."""

    policy: Method | type[Method] | str | None
    cache: KVCache | None
    max_new_tokens: int | np.integer
    sampling: Sampling | None
    stop: str | Iterable[str] | None
    stop_at_eos: bool
    key: PRNGKeyArray | int | None
    raw: bool
    mesh: Mesh | None
    implementation: Implementation | str | None
    progress: bool | None


@overload
def generate(
    params: LanguageModel, prompt: Prompt, *, stream: Literal[False] = False, **options: Unpack[_Options]
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
    sampling: Sampling | None = None,
    stop: str | Iterable[str] | None = (),
    stop_at_eos: bool = True,
    key: PRNGKeyArray | int | None = None,
    raw: bool = False,
    stream: bool = False,
    mesh: Mesh | None = None,
    implementation: Implementation | str | None = Implementation.AUTO,
    progress: bool | None = None,
) -> Generation | Stream:
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
        mesh: devices with the axes "data" and "model" to run on: the model is moved there once. By default where it is.
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
    hosts.require_same(
        "jaxkv.generate",
        params,
        mesh,
        prompt=prompt,
        policy=policy,
        cache=cache,
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        stop=stop,
        stop_at_eos=stop_at_eos,
        key=key,
        raw=raw,
        stream=stream,
        implementation=implementation,
    )
    params, cache = arguments.as_model(params, mesh), arguments.as_cache(cache)
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
    if cache is not None:
        policy = None if policy is None else as_policy(policy).for_model(params.config.layers, params.filter_layers)
        arguments.require_ours(params, cache, policy)
        policy = cache.policy
    session = Session(params, policy, implementation=implementation, key=key)
    encoded = encode(prompt, params.text, params.config, turn=turn, raw=raw, close=True)
    arguments.require_fits(params.config, session.policy, encoded.lengths, max_new_tokens, cache)
    request = Request(
        session=session,
        encoded=encoded,
        cache=cache,
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        stops=stops,
        stop_at_eos=stop_at_eos,
        look=stream or bool(stops),
        progress=progress,
    )
    pieces = answered(request)
    if stream:
        return Stream(pieces, encoded.single)
    return finished(pieces)
