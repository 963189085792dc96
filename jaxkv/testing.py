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

from jaxkv._checks import format_non_default_fields, settled, shorten_text
from jaxkv._dataclasses import frozen_dataclass
from jaxkv.cache import KVCache
from jaxkv.engine.generation_results import Generation
from jaxkv.engine.hadamard import apply_hadamard, restore_original_keys
from jaxkv.engine.lengths import round_up_to_bucket
from jaxkv.engine.plan import PrefillPlan, plan_prefill
from jaxkv.generation import generate, prefill
from jaxkv.loading import LanguageModel
from jaxkv.models.config import ModelConfig
from jaxkv.models.decoder import Decoder
from jaxkv.policies.checks import EntryBudget
from jaxkv.policies.model_policy import resolve_policy_for_model
from jaxkv.policies.parts import Parts
from jaxkv.policies.policy import Policy
from jaxkv.sharding.mesh import copy_to_host

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
    """Yield every `Segment` of a cache by layer, sequence and kv head; Hadamard-transformed entries are restored.

    Args:
        cache: the cache.

    Yields:
        Segments in order of layer, sequence and kv head.
    """
    if not isinstance(cache, KVCache):
        raise TypeError(
            f"cache={shorten_text(format_non_default_fields(cache))}: not a KVCache. Pass one from prefill or Session"
        )
    arrays = [
        (copy_to_host(pool.k), copy_to_host(pool.v), copy_to_host(pool.pos)) for pool in cache.pools
    ]
    centre = None if cache.tables.centre is None else copy_to_host(cache.tables.centre)
    for layer, sequence, head, pool, rows in cache.iterate_segments():
        k, v, pos = (array[sequence, rows] for array in arrays[pool])
        if centre is not None:
            mine = jnp.asarray(centre[layer, sequence, head])
            k = copy_to_host(restore_original_keys(jnp.asarray(k)[None, None], mine[None, None]))[
                0, 0
            ]
            v = copy_to_host(apply_hadamard(jnp.asarray(v)))
        yield Segment(layer, sequence, head, k, v, pos)


@settled
def tiny_model(
    config: ModelConfig | None = None, *, seed: int = 0, dtype: str = "float32"
) -> LanguageModel:
    """Return a `LanguageModel` of a config, by default tiny, with random weights and no tokenizer; prompts are ids.

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
        like = parameter.get_value()
        size = like.shape
        at = decoder
        for part in names:
            at = at[part] if isinstance(part, int) else getattr(at, part)  # type: ignore[call-overload,index]
        if names[-1] in ("scale", "q_gain", "k_gain"):
            value = 1 + 0.1 * rng.standard_normal(size)
            # Norms would make attention nearly uniform.
            value *= 1.0 if names[-1] == "scale" else 1.6
        else:
            gain = {"q": 1.6, "kv": 1.6, "embedding": size[-1] ** 0.5}.get(str(names[-1]), 1.0)
            value = gain * rng.standard_normal(size) / size[-1] ** 0.5
        at.set_value(jnp.asarray(value, like.dtype))  # type: ignore[attr-defined]
    return LanguageModel(decoder, text=None, name=f"tiny-{seed}")


@frozen_dataclass
class _PolicyFromParts(Policy):
    """Policy with the `Parts` passed to its constructor, so that tests can replace one part of a policy."""

    made: Parts = Parts()

    def build_policy_parts(self) -> Parts:
        """Return the `Parts` passed to the constructor."""
        return self.made


@dataclasses.dataclass(frozen=True)
class _PolicyTestCase:
    """Policy under test with a model and two prompts; its prefill plan and cache are computed once."""

    policy: Policy
    model: LanguageModel
    prompts: tuple[list[int], ...]

    @property
    def policy_parts(self) -> Parts:
        """`Parts` of the policy under test."""
        return self.policy.composed

    @functools.cached_property
    def prompt_lengths(self) -> list[int]:
        """Number of tokens of each of the two prompts, a list of ints."""
        return [len(prompt) for prompt in self.prompts]

    @functools.cached_property
    def prefill_plan(self) -> PrefillPlan:
        """`PrefillPlan` of the policy for both prompts, computed once."""
        return plan_prefill(self.model.config, self.policy, self.prompt_lengths)

    @functools.cached_property
    def prompt_cache(self) -> KVCache:
        """Compressed `KVCache` of both prompts, prefilled once by the policy under test."""
        return self.prefill_prompts(self.prompts)

    def prefill_prompts(
        self, prompts: Sequence[list[int]], policy: Policy | None = None, *, key: int = 0
    ) -> KVCache:
        """Return the compressed `KVCache` of some prompts, by the policy under test or another one."""
        return prefill(
            self.model, list(prompts), policy=policy or self.policy, key=key, progress=False
        )

    def generate_answers(self, policy: Policy) -> Generation:
        """Return the `Generation` of 12 new tokens after each of both prompts, with a given policy."""
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
    """Check that a policy has the properties that every jaxkv policy must have; raise AssertionError otherwise.

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
    policy = resolve_policy_for_model(policy, model.config, model.filter_layers, dtype=model.dtype)
    budget = policy.composed.budget
    rng = np.random.default_rng(seed)
    longest = max(2 * budget.value + 1, 24) if isinstance(budget, EntryBudget) else 97
    # Without the other, the shorter prompt has a smaller bucket and more tokens than the budget.
    lengths = (longest, round_up_to_bucket(longest) // 2)
    prompts = tuple(rng.integers(0, model.config.vocab, length).tolist() for length in lengths)
    case = _PolicyTestCase(policy, model, prompts)
    for check in _CHECKS:
        check(case)


def _assert_property(holds: Any, about: str, *where: object) -> None:
    """Raise AssertionError with the property `about` and its location unless `holds` is true."""
    if not holds:
        raise AssertionError(about + "".join(f"; {each}" for each in where))


def _check_entries_match_prompt(case: _PolicyTestCase) -> None:
    """Assert that kept entries are finite, the prompt's own (unless merged, or keys rolled), ascending, each once."""
    # Entries are rounded as the policy's store rounds them.
    everything = _PolicyFromParts(made=Parts(store=case.policy_parts.store))
    exact = {part[:3]: part for part in segments(case.prefill_prompts(case.prompts, everything))}
    merges = case.policy_parts.merge is not None
    # Keys that roll are not rotated; a latent's key is its value.
    rolls = {"keys"} if case.policy_parts.rolling else set()
    rolls |= {"values"} if rolls and case.policy_parts.store.values_are_keys else set()
    for part in segments(case.prompt_cache):
        where = f"layer {part.layer}, sequence {part.sequence}, head {part.head}"
        _assert_property(
            len(part.pos) == 0 or (np.diff(part.pos) > 0).all(),
            "kept entries are in order, each once",
            where,
        )
        inside = len(part.pos) == 0 or (
            part.pos[0] >= 0 and part.pos[-1] < case.prompt_lengths[part.sequence]
        )
        _assert_property(inside, "kept entries are entries of the prompt", where)
        _assert_property(
            np.isfinite(part.k).all() and np.isfinite(part.v).all(), "entries are finite", where
        )
        same = exact[part[:3]]
        for name, mine, its in (("keys", part.k, same.k), ("values", part.v, same.v)):
            if not merges and name not in rolls:
                close = np.allclose(mine, its[part.pos], atol=_ROUNDING)
                _assert_property(close, f"kept {name} are the prompt's own", where)


def _check_always_kept_entries(case: _PolicyTestCase) -> None:
    """Assert that every segment keeps sinks, observation window and protected spans."""
    keep = case.policy_parts.keep
    mask = keep.mask_always_kept(np.asarray(case.prompt_lengths), max(case.prompt_lengths))
    for part in segments(case.prompt_cache):
        must = set(np.flatnonzero(mask[part.sequence]).tolist())
        missing = sorted(must - set(part.pos.tolist()))
        _assert_property(
            not missing,
            f"{keep} are always kept",
            f"missing in layer {part.layer}, head {part.head}: {missing}",
        )


def _check_planned_sizes(case: _PolicyTestCase) -> None:
    """Assert that each layer, or all together, keep the planned number of entries (threshold: at most) and bytes."""
    kept = case.prompt_cache.kept.sum(axis=2)
    needed = case.prefill_plan
    if needed.rows is not None:
        wanted = case.model.config.kv_heads * needed.rows
        # The mean of entries that differ between heads is rounded up.
        spare = case.model.config.kv_heads - 1 if case.policy_parts.layers.sets_entry_count else 0
        fits = ((kept <= wanted) & (kept >= wanted - spare)).all()
        _assert_property(
            fits,
            "each layer keeps as many entries as planned",
            f"{kept.tolist()}, {wanted.tolist()}",
        )
    elif case.policy_parts.score_threshold is not None or case.policy_parts.layers.has_exact_sum:
        wanted = kept.shape[0] * case.model.config.kv_heads * needed.budget
        held = kept.sum(axis=0)
        fits = held <= wanted if case.policy_parts.score_threshold is not None else held == wanted
        _assert_property(
            fits.all(), "all layers together keep as many entries as planned", wanted.tolist()
        )
    weighs = case.prompt_cache.nbytes
    planned = needed.cache_bytes
    _assert_property(
        weighs == planned,
        "the cache has as many bytes as planned",
        f"{weighs} bytes, planned {planned}",
    )


def _check_batch_independence(case: _PolicyTestCase) -> None:
    """Assert that neither another sequence in the batch nor padding changes a sequence's kept positions."""
    first, second = case.prompts
    for about, prompts, row, sequence in (
        ("another sequence in the batch changes what is kept", (first, second[::-1]), 0, 0),
        ("padding, or a longer sequence in the batch, changes what is kept", (second,), 0, 1),
    ):
        alone = case.prefill_prompts(prompts).mask_kept_tokens(row, _LONGEST)
        beside = case.prompt_cache.mask_kept_tokens(sequence, _LONGEST)
        _assert_property((alone == beside).all(), about, f"sequence {sequence}")


def _check_key_independence(case: _PolicyTestCase) -> None:
    """Assert that another random key changes no kept entry; skipped if the policy declares `uses_random_key`."""
    if case.policy_parts.uses_random_key:
        return
    remedy = (
        "another random key changes what is kept: set the property `uses_random_key` of the "
        "scorer or merger to True"
    )
    for mine, other in zip(
        segments(case.prompt_cache),
        segments(case.prefill_prompts(case.prompts, key=1)),
        strict=True,
    ):
        same = all(np.array_equal(one, two) for one, two in zip(mine[3:], other[3:], strict=True))
        _assert_property(
            same, remedy, f"layer {mine.layer}, sequence {mine.sequence}, head {mine.head}"
        )


def _check_full_budget(case: _PolicyTestCase) -> None:
    """Assert that a budget of the full text changes no token; skipped without budget, with threshold or rolling."""
    if (
        case.policy_parts.budget is None
        or case.policy_parts.rolling
        or case.policy_parts.score_threshold is not None
    ):
        return
    roomy = _PolicyFromParts(
        made=case.policy_parts.replace(budget=EntryBudget(max(case.prompt_lengths) + _NEW))
    )
    full = case.generate_answers(roomy)
    exact = case.generate_answers(
        _PolicyFromParts(made=Parts(read=case.policy_parts.read, store=case.policy_parts.store))
    )
    same = all((one.tokens == other.tokens).all() for one, other in zip(full, exact, strict=True))
    _assert_property(same, "a budget of the full text changes no token")


def _check_cache_growth(case: _PolicyTestCase) -> None:
    """Assert that while decoding segments append every token or respect limits, as declared; positions are distinct."""
    after = case.generate_answers(case.policy).cache
    parts = case.policy_parts
    grown = after.kept.astype(np.int64) - case.prompt_cache.kept
    new = np.asarray(after.seen) - np.asarray(case.prompt_lengths)
    beyond = after.kept - np.asarray(after.limit)
    if parts.evicts_while_decoding:
        _assert_property(
            (beyond <= 0).all(),
            "no segment exceeds its limit while entries are evicted one by one",
            beyond.max(),
        )
    elif parts.recompression_interval is not None:
        _assert_property(
            (beyond < parts.recompression_interval).all(),
            "no segment exceeds its limit by `every` entries",
            beyond.max(),
        )
    else:
        _assert_property(
            (grown == new[None, :, None]).all(),
            "each new token appends an entry",
            grown.tolist(),
        )
    for part in segments(after):
        distinct = len(set(part.pos.tolist())) == len(part.pos)
        last = int(np.asarray(after.seen)[part.sequence])
        _assert_property(
            distinct and part.pos.max() < last,
            "positions are distinct and within the text during decoding",
        )


def _check_policy_equality(case: _PolicyTestCase) -> None:
    """Assert that a copy of the policy is equal, has the same hash, and keeps the same entries."""
    same = dataclasses.replace(case.policy)
    _assert_property(
        same == case.policy and hash(same) == hash(case.policy), "a policy is equal to its copy"
    )
    alike = case.prefill_prompts(case.prompts, same).mask_kept_tokens(
        0, _LONGEST
    ) == case.prompt_cache.mask_kept_tokens(0, _LONGEST)
    _assert_property(alike.all(), "a copy keeps the same entries")


_CHECKS: tuple[Callable[[_PolicyTestCase], None], ...] = (
    _check_entries_match_prompt,
    _check_always_kept_entries,
    _check_planned_sizes,
    _check_batch_independence,
    _check_key_independence,
    _check_full_budget,
    _check_cache_growth,
    _check_policy_equality,
)
