"""Tests for user-written policies: a tiny model, and checks of the properties of every jaxkv policy.

```python
jaxkv.testing.check_policy(CustomPolicy(budget=24, scorer=MyScorer()))
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
# The limit of the tiny models.
_LONGEST = 4096
_ROUNDING = 1e-4


class Segment(NamedTuple):
    """One segment of a cache: keys, values and positions of one layer, sequence and kv head, as numpy arrays.

    Attributes:
        layer: index of the layer.
        sequence: index of the sequence.
        head: index of the kv head.
        k: `[n, D]` keys. Keys and values that pools store transformed are transformed back.
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
    """Yield every `Segment` of a cache, layer by layer.

    Args:
        cache: the cache.

    Yields:
        Segments in order of layer, sequence and kv head.
    """
    if not isinstance(cache, KVCache):
        raise TypeError(
            f"cache={shortened(brief(cache))}: not a KVCache. Pass one from prefill or Session"
        )
    arrays = [(host(pool.k), host(pool.v), host(pool.pos)) for pool in cache.pools]
    centre = None if cache.tables.centre is None else host(cache.tables.centre)
    for layer, sequence, head, pool, rows in cache.spans():
        k, v, pos = (array[sequence, rows] for array in arrays[pool])
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
        config: the model's config; by default three layers of two kv heads with three query heads each.
        seed: seed of the weights. Queries and keys are large, so that attention is far from uniform.
        dtype: dtype of the weights.

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
            # Norms would make attention nearly uniform.
            value *= 1.0 if names[-1] == "scale" else 1.6
        else:
            gain = {"q": 1.6, "kv": 1.6, "embedding": size[-1] ** 0.5}.get(str(names[-1]), 1.0)
            value = gain * rng.standard_normal(size) / size[-1] ** 0.5
        at.set_value(jnp.asarray(value, dtype))  # type: ignore[attr-defined]
    return LanguageModel(decoder, text=None, name=f"tiny-{seed}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class _FromParts(Policy):
    """Policy with the `parts()` passed to it, so that tests can replace one part of a policy."""

    made: Parts = Parts()

    def parts(self) -> Parts:
        """Return the parts."""
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
        """Return the compressed `KVCache` of some prompts, by the policy under test or another one."""
        return prefill(
            self.model, list(prompts), policy=policy or self.policy, key=key, progress=False
        )

    def generated(self, policy: Policy) -> Generation:
        """Return the `Generation` of 12 tokens after both prompts, with a policy."""
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
    """Check that a policy has the properties that every jaxkv policy must have.

    - Kept entries are entries of the prompt, in order and without repeats.
    - Sinks, observation window and protected spans are kept.
    - The number of entries and the cache's bytes are equal to the plan's.
    - Neither other sequences in the batch nor padding change a sequence's kept entries.
    - With a budget of the full prompt, no token changes.
    - Another random key changes no kept entry, unless a part declares that it samples.
    - During decoding, the cache grows as the policy declares.
    - Equal policies make equal caches.

    Args:
        policy: a policy, its name or its class. Prompts are longer than a budget in entries, so entries are evicted.
        model: any small model; `tiny_model()` by default.
        seed: seed of the prompts.

    Raises:
        AssertionError: naming the property that does not hold, and where.
    """
    model = tiny_model() if model is None else model
    policy = policy_for(policy, model.config, model.filter_layers, dtype=model.dtype)
    budget, rng = policy.composed.budget, np.random.default_rng(seed)
    longest = max(2 * budget.value + 1, 24) if isinstance(budget, Tokens) else 97
    # Without the other, the shorter prompt has a smaller bucket and more tokens than the budget.
    lengths = (longest, bucket(longest) // 2)
    prompts = tuple(rng.integers(0, model.config.vocab, length).tolist() for length in lengths)
    case = _Case(policy, model, prompts)
    for check in _CHECKS:
        check(case)


def _require(holds: Any, about: str, *where: object) -> None:
    """Raise AssertionError with the property `about` and its location unless `holds` is True."""
    if not holds:
        raise AssertionError(about + "".join(f"; {each}" for each in where))


def _entries_are_the_prompts(case: _Case) -> None:
    """Assert that kept entries are equal to the prompt's own, in ascending order without repeats."""
    # Entries are rounded as the policy's store rounds them.
    everything = _FromParts(made=Parts(store=case.parts.store))
    exact = {part[:3]: part for part in segments(case.prefilled(case.prompts, everything))}
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
        same = exact[part[:3]]
        for name, mine, its in (("keys", part.k, same.k), ("values", part.v, same.v)):
            if not merges and not (rolls and name == "keys"):
                close = np.allclose(mine, its[part.pos], atol=_ROUNDING)
                _require(close, f"kept {name} are the prompt's own", where)


def _always_kept_are_kept(case: _Case) -> None:
    """Assert that every segment keeps sinks, observation window and protected spans."""
    keep = case.parts.keep
    mask = keep.mask(np.asarray(case.lengths), max(case.lengths))
    for part in segments(case.cache):
        must = set(np.flatnonzero(mask[part.sequence]).tolist())
        missing = sorted(must - set(part.pos.tolist()))
        _require(
            not missing,
            f"{keep} are always kept",
            f"missing in layer {part.layer}, head {part.head}: {missing}",
        )


def _as_many_as_planned(case: _Case) -> None:
    """Assert that the number of kept entries and the cache's bytes are equal to the prefill plan's."""
    kept, needed = case.cache.kept.sum(axis=2), case.needed
    if needed.rows is not None:
        wanted = case.model.config.kv_heads * needed.rows
        # The mean of entries that differ between heads is rounded up.
        spare = case.model.config.kv_heads - 1 if case.parts.layers.sets_rows else 0
        fits = ((kept <= wanted) & (kept >= wanted - spare)).all()
        _require(
            fits,
            "each layer keeps as many entries as planned",
            f"{kept.tolist()}, {wanted.tolist()}",
        )
    elif case.parts.threshold is not None or case.parts.layers.exact:
        wanted, held = kept.shape[0] * case.model.config.kv_heads * needed.budget, kept.sum(axis=0)
        fits = held <= wanted if case.parts.threshold is not None else held == wanted
        _require(fits.all(), "all layers together keep as many entries as planned", wanted.tolist())
    weighs, planned = case.cache.nbytes, needed.cache_bytes
    _require(
        weighs == planned,
        "the cache has as many bytes as planned",
        f"{weighs} bytes, planned {planned}",
    )


def _neighbours_change_nothing(case: _Case) -> None:
    """Assert that neither another sequence in the batch nor padding changes a sequence's kept positions."""
    first, second = case.prompts
    for about, prompts, row, sequence in (
        ("another sequence in the batch changes what is kept", (first, second[::-1]), 0, 0),
        ("padding, or a longer sequence in the batch, changes what is kept", (second,), 0, 1),
    ):
        alone, beside = (
            case.prefilled(prompts).holds(row, _LONGEST),
            case.cache.holds(sequence, _LONGEST),
        )
        _require((alone == beside).all(), about, f"sequence {sequence}")


def _sampling_is_declared(case: _Case) -> None:
    """Assert that another random key changes no kept entry, unless the policy declares that it samples."""
    if case.parts.uses_key:
        return
    remedy = (
        "another random key changes what is kept: set the property `uses_key` of the "
        "scorer or merger to True"
    )
    for mine, other in zip(
        segments(case.cache), segments(case.prefilled(case.prompts, key=1)), strict=True
    ):
        same = all(np.array_equal(one, two) for one, two in zip(mine[3:], other[3:], strict=True))
        _require(same, remedy, f"layer {mine.layer}, sequence {mine.sequence}, head {mine.head}")


def _full_budget_changes_nothing(case: _Case) -> None:
    """Assert that a budget of the full text without a threshold yields the tokens of FullKV."""
    if case.parts.budget is None or case.parts.rolling or case.parts.threshold is not None:
        return
    roomy = _FromParts(made=case.parts.replace(budget=Tokens(max(case.lengths) + _NEW)))
    full, exact = (
        case.generated(roomy),
        case.generated(_FromParts(made=Parts(read=case.parts.read, store=case.parts.store))),
    )
    same = all((one.tokens == other.tokens).all() for one, other in zip(full, exact, strict=True))
    _require(same, "a budget of the full text changes no token")


def _growth_is_as_declared(case: _Case) -> None:
    """Assert that segments append, evict or recompress during decoding as the policy declares."""
    after, parts = case.generated(case.policy).cache, case.parts
    grown = after.kept.astype(np.int64) - case.cache.kept
    new = np.asarray(after.seen) - np.asarray(case.lengths)
    beyond = after.kept - np.asarray(after.limit)
    if parts.evicts:
        _require(
            (beyond <= 0).all(),
            "no segment exceeds its limit while entries are evicted one by one",
            beyond.max(),
        )
    elif parts.every is not None:
        _require(
            (beyond < parts.every).all(),
            "no segment exceeds its limit by `every` entries",
            beyond.max(),
        )
    else:
        _require(
            (grown == new[None, :, None]).all(),
            "each new token appends an entry",
            grown.tolist(),
        )
    for part in segments(after):
        distinct = len(set(part.pos.tolist())) == len(part.pos)
        last = int(np.asarray(after.seen)[part.sequence])
        _require(
            distinct and part.pos.max() < last,
            "positions are distinct and within the text during decoding",
        )


def _equal_policies_are_equal(case: _Case) -> None:
    """Assert that a copy of the policy is equal, has the same hash, and keeps the same entries."""
    same = dataclasses.replace(case.policy)
    _require(
        same == case.policy and hash(same) == hash(case.policy), "a policy is equal to its copy"
    )
    alike = case.prefilled(case.prompts, same).holds(0, _LONGEST) == case.cache.holds(0, _LONGEST)
    _require(alike.all(), "a copy keeps the same entries")


_CHECKS: tuple[Callable[[_Case], None], ...] = (
    _entries_are_the_prompts,
    _always_kept_are_kept,
    _as_many_as_planned,
    _neighbours_change_nothing,
    _sampling_is_declared,
    _full_budget_changes_nothing,
    _growth_is_as_declared,
    _equal_policies_are_equal,
)
