"""`prefill` and `generate`: prompts in, a compressed cache and text out."""

import dataclasses
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np
from jaxtyping import PRNGKeyArray

from jaxkv import arguments
from jaxkv._errors import require
from jaxkv._settings import settled
from jaxkv.answering import Clocks, Request, answered, prefilled
from jaxkv.attention import Implementation, Implementations, choose, named
from jaxkv.cache import KVCache, Turn
from jaxkv.config import ModelConfig
from jaxkv.loading import LanguageModel
from jaxkv.models.decoder import Flat
from jaxkv.plan import plan
from jaxkv.policies.methods import FullKV
from jaxkv.policies.policy import Method
from jaxkv.policies.registry import as_policy
from jaxkv.prompts import Prompt, encode
from jaxkv.results import Stream
from jaxkv.sampling import Greedy, Sampling


@settled
def prefill(
    params: LanguageModel,
    prompt: Prompt,
    *,
    policy: Method | type[Method] | str | None = None,
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
    _require_fits(params, policy, encoded.lengths, 0)
    chosen = _choose(params, policy, implementation)
    options: dict[str, Any] = {"key": key, "new": 0, "progress": progress}
    cache, _, _ = prefilled(params, Flat(params.decoder), encoded, policy, chosen, Clocks(), **options)
    return dataclasses.replace(cache, turn=encoded.turn)


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
    policy = cache.policy if cache is not None else FullKV() if policy is None else policy
    _require_fits(params, policy, encoded.lengths, max_new_tokens, cache)
    clocks = Clocks()
    with clocks.making:
        key = jax.random.key(0) if key is None else key
    request = Request(
        params=params,
        encoded=encoded,
        policy=policy,
        chosen=_choose(params, policy, implementation),
        cache=cache,
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        stops=stops,
        stop_at_eos=stop_at_eos,
        key=key,
        look=stream or bool(stops),
        progress=progress,
        clocks=clocks,
    )
    pieces = answered(request)
    if stream:
        return Stream(pieces, encoded.single)
    while True:
        try:
            next(pieces)
        except StopIteration as end:
            return end.value


def _choose(params: LanguageModel, policy: Method, implementation: Implementation | str) -> Implementations:
    needs, read = policy.parts().needs, policy.parts().read
    chosen = choose(
        implementation,
        platform=jax.default_backend(),
        dtype=params.dtype,
        head_dim=params.config.head_dim,
        scores=needs.queries > 0 or needs.sums,
        sums=needs.sums,
    )
    if read is None or not read.by_chunks:
        return chosen
    remedy = "chunks attend to the cache, which cuDNN does not: leave it out"
    require(named(implementation) is not Implementation.CUDNN, "implementation", implementation, remedy)
    return dataclasses.replace(chosen, prefill=chosen.decode)


def _require_ours(params: LanguageModel, cache: KVCache, policy: Method | None) -> None:
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


def _require_fits(
    params: LanguageModel, policy: Method, lengths: np.ndarray, new: int, cache: KVCache | None = None
) -> None:
    seen = 0 if cache is None else np.asarray(cache.seen)
    if cache is not None:
        matches = cache.batch in (1, len(lengths))
        require(
            matches, "prompt", f"{len(lengths)} prompts", f"the cache holds {cache.batch}: give as many, or 1 cache"
        )
    limit = params.config.max_positions
    policy = policy if cache is None else cache.policy
    if policy.parts().rolling:
        return _require_places(params.config, policy, lengths, new, cache)
    total = int((seen + lengths).max()) + new
    what = f"{total} tokens, {new} new ones included"
    require(
        total <= limit, "prompt", what, f"the model was made for {limit}: shorten the prompt or lower max_new_tokens"
    )


def _require_places(config: ModelConfig, policy: Method, lengths: np.ndarray, new: int, cache: KVCache | None) -> None:
    """Where positions are places within the cache, those count: of a prompt while it is read, and of what is kept."""
    limit, parts = config.max_positions, policy.parts()
    if cache is None:
        read, needed = int(lengths.max()), plan(config, policy, lengths.tolist())
        assert needed.rows is not None
        now, target = int(needed.rows.max()), int(parts.may_hold(lengths, needed.budget).max())
    else:
        read = now = int((cache.kept.max(axis=(0, 2)) + lengths).max())
        target = int(np.asarray(cache.limit).max())
    remedy = f"the model was made for {limit} at a time: shorten the prompt"
    require(read <= limit, "prompt", f"{read} tokens, those kept included", remedy)
    every = parts.every
    most = now + new if every is None else min(now + new, target + every)
    remedy = f"{most} rows would be kept and the model was made for {limit}: lower it, or give every=64, say, to go on"
    require(most <= limit, "max_new_tokens", new, remedy)
