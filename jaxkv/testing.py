"""Tests for user-written policies: a tiny model, and checks of the properties that every jaxkv policy has.

```python
jaxkv.testing.check_policy(Policy(budget=24, scorer=MyScorer()))
```
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxkv._checks import brief, settled, shortened
from jaxkv.cache import KVCache
from jaxkv.engine.generation_results import Generation
from jaxkv.engine.hadamard import keys_of, transformed
from jaxkv.engine.lengths import bucket
from jaxkv.engine.plan import PrefillPlan, plan_prefill
from jaxkv.generation import generate, prefill
from jaxkv.loading import LanguageModel
from jaxkv.models.config import ModelConfig
from jaxkv.models.decoder import Decoder
from jaxkv.policies.checks import Tokens
from jaxkv.policies.model_policy import policy_for
from jaxkv.policies.parts import Parts
from jaxkv.policies.policy import Policy
from jaxkv.sharding.mesh import host

_NEW = 12
# No tiny model takes longer texts.
_LONGEST = 4096
_ROUNDING = 1e-4


class Segment(NamedTuple):
    """One segment of a cache: keys, values and positions of one layer, sequence and kv head, as numpy arrays.

    Attributes:
        layer: its layer.
        sequence: its sequence.
        head: its kv head.
        k: `[n, D]` keys; those that pools hold transformed are transformed back, as are values.
        v: `[n, D]` values.
        pos: `i32[n]` positions.
    """

    layer: int
    sequence: int
    head: int
    k: np.ndarray
    v: np.ndarray
    pos: np.ndarray


def segments(cache: KVCache) -> Iterator[Segment]:
    """Yields every `Segment` of a cache, layer by layer.

    Args:
        cache: any cache.

    Yields:
        Its segments, layer by layer.
    """
    if not isinstance(cache, KVCache):
        raise TypeError(
            f"cache={shortened(brief(cache))}: give a KVCache, as prefill and Session return it"
        )
    whole = [(host(pool.k), host(pool.v), host(pool.pos)) for pool in cache.pools]
    centre = None if cache.tables.centre is None else host(cache.tables.centre)
    for layer, sequence, head, pool, rows in cache.spans():
        k, v, pos = (array[sequence, rows] for array in whole[pool])
        if centre is not None:
            mine = jnp.asarray(centre[layer, sequence, head])
            k = host(keys_of(jnp.asarray(k)[None, None], mine[None, None]))[0, 0]
            v = host(transformed(jnp.asarray(v)))
        yield Segment(layer, sequence, head, k, v, pos)


@settled
def tiny_model(
    config: ModelConfig | None = None, *, seed: int = 0, dtype: str = "float32"
) -> LanguageModel:
    """`LanguageModel` with random weights and without a tokenizer; prompts are token ids.

    Args:
        config: the model's; by default three layers of two kv heads with three query heads each.
        seed: of the weights. Queries and keys are large, so that attention is far from flat.
        dtype: of the weights.

    Returns:
        The model.
    """
    if config is None:
        config = ModelConfig(
            vocab=64,
            layers=3,
            embed=24,
            hidden=32,
            heads=6,
            kv_heads=2,
            head_dim=8,
            max_positions=1 << 16,
        )
    rng = np.random.default_rng(seed)
    decoder = Decoder(config, dtype=jnp.dtype(dtype))
    for path, parameter in nnx.to_flat_state(nnx.state(decoder, nnx.Param)):
        names = [part for part in path if part != "value"]
        size, at = parameter.get_value().shape, decoder
        for part in names:
            at = at[part] if isinstance(part, int) else getattr(at, part)  # type: ignore[call-overload,index]
        if names[-1] in ("scale", "q_gain", "k_gain"):
            value = 1 + 0.1 * rng.standard_normal(size)
            # Norms take away what makes attention far from flat.
            value *= 1.0 if names[-1] == "scale" else 1.6
        else:
            gain = {"q": 1.6, "kv": 1.6, "embedding": size[-1] ** 0.5}.get(str(names[-1]), 1.0)
            value = gain * rng.standard_normal(size) / size[-1] ** 0.5
        at.set_value(jnp.asarray(value, dtype))  # type: ignore[attr-defined]
    return LanguageModel(decoder, text=None, name=f"tiny-{seed}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Given(Policy):
    """Policy whose `parts()` are those given to it, so that tests can replace one part of a policy."""

    made: Parts = Parts()

    def parts(self) -> Parts:
        """The given parts."""
        return self.made


@dataclasses.dataclass(frozen=True)
class _Case:
    """A policy under test with a model and two prompts; its prefill plan and cache are computed once."""

    policy: Policy
    model: LanguageModel
    prompts: tuple[list[int], ...]

    @property
    def parts(self) -> Parts:
        """`Parts` of the policy under test."""
        return self.policy.composed

    @functools.cached_property
    def lengths(self) -> list[int]:
        """Number of tokens of each prompt."""
        return [len(prompt) for prompt in self.prompts]

    @functools.cached_property
    def needed(self) -> PrefillPlan:
        """`PrefillPlan` of the policy for both prompts."""
        return plan_prefill(self.model.config, self.policy, self.lengths)

    @functools.cached_property
    def cache(self) -> KVCache:
        """Compressed `KVCache` of both prompts."""
        return self.prefilled(self.prompts)

    def prefilled(
        self, prompts: Sequence[list[int]], policy: Policy | None = None, *, key: int = 0
    ) -> KVCache:
        """Compressed `KVCache` of some prompts, by the policy under test or another one."""
        return prefill(
            self.model, list(prompts), policy=policy or self.policy, key=key, progress=False
        )

    def drawn(self, policy: Policy) -> Generation:
        """`Generation` of 12 tokens after both prompts, with a policy."""
        prompts = [list(prompt) for prompt in self.prompts]
        return generate(
            self.model,
            prompts,
            policy=policy,
            max_new_tokens=_NEW,
            stop_at_eos=False,
            key=0,
            progress=False,
        )


def check_policy(
    policy: Policy | type[Policy] | str, *, model: LanguageModel | None = None, seed: int = 0
) -> None:
    """Checks that a policy has the properties that every jaxkv policy must have; AssertionError if not.

    Kept entries are the prompt's own, in order and each once; sinks, window and protected spans are kept; the number of
    entries and the cache's bytes are those of the plan; neither other sequences in the batch nor padding change a
    sequence's kept entries; a budget of the whole prompt changes no token; another random key changes nothing, unless a
    part declares that it samples; during decoding the cache grows as the policy declares; and equal policies make equal
    caches.

    Args:
        policy: a policy, or its name or class. Prompts are longer than a budget in entries, so that entries are dropped.
        model: any small model; `tiny_model()` by default.
        seed: of the prompts.

    Raises:
        AssertionError: naming the property that does not hold, and where.
    """
    model = tiny_model() if model is None else model
    policy = policy_for(policy, model.config, model.filter_layers, dtype=model.dtype)
    budget, rng = policy.composed.budget, np.random.default_rng(seed)
    longest = max(2 * budget.value + 1, 24) if isinstance(budget, Tokens) else 97
    # Alone, the shorter prompt is padded to a smaller bucket, and it still has entries to drop.
    lengths = (longest, bucket(longest) // 2)
    prompts = tuple(rng.integers(0, model.config.vocab, length).tolist() for length in lengths)
    case = _Case(policy, model, prompts)
    for check in _CHECKS:
        check(case)


def _require(holds: Any, about: str, *where: object) -> None:
    """Raises AssertionError with the property `about` and its location, unless `holds` is True."""
    if not holds:
        raise AssertionError(about + "".join(f"; {each}" for each in where))


def _rows_are_the_prompts(case: _Case) -> None:
    """Asserts that kept entries are equal to the prompt's own entries, in ascending order without repeats."""
    # Rounded as the policy's store rounds them.
    everything = _Given(made=Parts(store=case.parts.store))
    whole = {part[:3]: part for part in segments(case.prefilled(case.prompts, everything))}
    merges, rolls = case.parts.merge is not None, case.parts.rolling
    for part in segments(case.cache):
        where = f"layer {part.layer}, sequence {part.sequence}, head {part.head}"
        _require(
            len(part.pos) == 0 or (np.diff(part.pos) > 0).all(),
            "kept entries are in order, each once",
            where,
        )
        inside = len(part.pos) == 0 or (
            part.pos[0] >= 0 and part.pos[-1] < case.lengths[part.sequence]
        )
        _require(inside, "kept entries are entries of the prompt", where)
        _require(
            np.isfinite(part.k).all() and np.isfinite(part.v).all(), "entries are finite", where
        )
        same = whole[part[:3]]
        for name, mine, its in (("keys", part.k, same.k), ("values", part.v, same.v)):
            if not merges and not (rolls and name == "keys"):
                close = np.allclose(mine, its[part.pos], atol=_ROUNDING)
                _require(close, f"kept {name} are the prompt's own", where)


def _what_must_stay_stays(case: _Case) -> None:
    """Asserts that every segment keeps the entries that the policy must keep: sinks, window, protected spans."""
    keep = case.parts.keep
    mask = keep.mask(np.asarray(case.lengths), max(case.lengths))
    for part in segments(case.cache):
        must = set(np.flatnonzero(mask[part.sequence]).tolist())
        missing = sorted(must - set(part.pos.tolist()))
        _require(
            not missing,
            f"{keep} always stay",
            f"missing in layer {part.layer}, head {part.head}: {missing}",
        )


def _as_many_as_planned(case: _Case) -> None:
    """Asserts that the number of kept entries and the cache's bytes equal the prefill plan's."""
    kept, needed = case.cache.kept.sum(axis=2), case.needed
    if needed.rows is not None:
        wanted = case.model.config.kv_heads * needed.rows
        # Entries that differ between heads by themselves have a mean that is rounded up.
        spare = case.model.config.kv_heads - 1 if case.parts.layers.sets_rows else 0
        fits = ((kept <= wanted) & (kept >= wanted - spare)).all()
        _require(fits, "each layer keeps what the plan says", f"{kept.tolist()}, {wanted.tolist()}")
    elif case.parts.threshold is not None or case.parts.layers.exact:
        wanted, held = kept.shape[0] * case.model.config.kv_heads * needed.budget, kept.sum(axis=0)
        fits = held <= wanted if case.parts.threshold is not None else held == wanted
        _require(fits.all(), "all layers together keep what the plan says", wanted.tolist())
    weighs, planned = case.cache.nbytes, needed.cache_bytes
    _require(
        weighs == planned, "the cache weighs what the plan says", f"{weighs} and {planned} bytes"
    )


def _neighbours_change_nothing(case: _Case) -> None:
    """Asserts that another sequence in the batch, or padding, does not change a sequence's kept positions."""
    first, second = case.prompts
    for about, prompts, row, sequence in (
        ("another sequence beside it changes what is kept", (first, second[::-1]), 0, 0),
        ("padding, or a longer sequence beside it, changes what is kept", (second,), 0, 1),
    ):
        alone, beside = (
            case.prefilled(prompts).holds(row, _LONGEST),
            case.cache.holds(sequence, _LONGEST),
        )
        _require((alone == beside).all(), about, f"sequence {sequence}")


def _draws_are_said(case: _Case) -> None:
    """Asserts that another random key changes no kept entry, unless the policy declares that it samples."""
    if case.parts.uses_key:
        return
    remedy = "another random key changes what is kept: a scorer or merger that samples has a property `draws`, True"
    for mine, other in zip(
        segments(case.cache), segments(case.prefilled(case.prompts, key=1)), strict=True
    ):
        same = all(np.array_equal(one, two) for one, two in zip(mine[3:], other[3:], strict=True))
        _require(same, remedy, f"layer {mine.layer}, sequence {mine.sequence}, head {mine.head}")


def _a_whole_budget_changes_nothing(case: _Case) -> None:
    """Asserts that with a budget of the whole text and no threshold, the tokens are those of FullKV."""
    if case.parts.budget is None or case.parts.rolling or case.parts.threshold is not None:
        return
    roomy = _Given(made=case.parts.replace(budget=Tokens(max(case.lengths) + _NEW)))
    ours, whole = (
        case.drawn(roomy),
        case.drawn(_Given(made=Parts(read=case.parts.read, store=case.parts.store))),
    )
    same = all((one.tokens == other.tokens).all() for one, other in zip(ours, whole, strict=True))
    _require(same, "a budget of the whole text changes no token")


def _it_grows_as_it_says(case: _Case) -> None:
    """Asserts that during decoding, segments append, evict or compress as the policy declares."""
    after, parts = case.drawn(case.policy).cache, case.parts
    grown = after.kept.astype(np.int64) - case.cache.kept
    new = np.asarray(after.seen) - np.asarray(case.lengths)
    beyond = after.kept - np.asarray(after.limit)
    if parts.evicts:
        _require(
            (beyond <= 0).all(),
            "no segment holds more than its limit while entries go one by one",
            beyond.max(),
        )
    elif parts.every is not None:
        _require(
            (beyond < parts.every).all(),
            "no segment grows by `every` entries beyond its limit",
            beyond.max(),
        )
    else:
        _require(
            (grown == new[None, :, None]).all(),
            "an entry is added for each new token",
            grown.tolist(),
        )
    for part in segments(after):
        distinct = len(set(part.pos.tolist())) == len(part.pos)
        last = int(np.asarray(after.seen)[part.sequence])
        _require(
            distinct and part.pos.max() < last,
            "positions stay distinct and of the text while decoding",
        )


def _equal_policies_are_equal(case: _Case) -> None:
    """Asserts that a copy of the policy is equal to it, has the same hash, and keeps the same entries."""
    same = dataclasses.replace(case.policy)
    _require(same == case.policy and hash(same) == hash(case.policy), "a policy equals its copy")
    alike = case.prefilled(case.prompts, same).holds(0, _LONGEST) == case.cache.holds(0, _LONGEST)
    _require(alike.all(), "and keeps the same entries")


_CHECKS: tuple[Callable[[_Case], None], ...] = (
    _rows_are_the_prompts,
    _what_must_stay_stays,
    _as_many_as_planned,
    _neighbours_change_nothing,
    _draws_are_said,
    _a_whole_budget_changes_nothing,
    _it_grows_as_it_says,
    _equal_policies_are_equal,
)
