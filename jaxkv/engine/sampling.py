"""Sampling of the next token from logits: `Sampling`, or any callable of logits and keys.

The numbers of a `Sampling` are arguments of the compiled loop, not static: ten temperatures share one program.
"""

import dataclasses
import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeGuard, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, Key

from jaxkv import _checks
from jaxkv._dataclasses import frozen_dataclass
from jaxkv._errors import require
from jaxkv.policies.topk import compare_with_kth_largest, encode_sort_keys

# Most alternatives per token, OpenAI's limit, and most ids that end an answer besides the model's: places in programs.
MOST_LOGPROBS, MOST_STOP_IDS = 20, 16
# Smallest and largest numbers; of those that are added or subtracted as OpenAI and vLLM have them.
_MOST_BIAS = 100
_PENALTIES = {
    "repetition_penalty": (0.01, 100),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
}


@runtime_checkable
class Sampler(Protocol):
    """Protocol of samplers: hashable callables that sample one token id per sequence from logits.

    A sampler is compiled into the decode loop.
    """

    def __call__(self, logits: Float[Array, "B V"], keys: Key[Array, " B"]) -> Int[Array, " B"]:
        """Sample a token id `i32[B]` for each sequence from its float32 logits and its random key."""


@frozen_dataclass
class Sampling:
    """Sampler from softmax(logits / temperature), masked by `top_k`, `top_p`, then `min_p`; greedy at temperature 0.

    Before, biases are added, then penalties applied: `repetition_penalty`, `frequency_penalty`, `presence_penalty`.

    Attributes:
        temperature: divisor of the logits; 0 is greedy, with ties to the lowest id.
        top_k: number of likeliest tokens to sample from; 0 or -1 for all. Ties with the last of these are included.
        top_p: sample from the fewest likeliest tokens whose probabilities sum to this number (arXiv:1904.09751).
        min_p: sample from tokens with at least this fraction of the likeliest one's probability (arXiv:2407.01082).
        repetition_penalty: divides positive and multiplies negative logits of tokens in prompt or answer
            (arXiv:1909.05858). With a cache, only tokens after it are known.
        presence_penalty: subtracted from the logits of tokens in the answer.
        frequency_penalty: subtracted from a token's logit for each time that the answer contains it.
        logit_bias: numbers from -100 to 100 to add to logits, by token id: a dict or pairs.
        stop_token_ids: up to 16 ids that end the answer, in addition to the model's.
        logprobs: number of likeliest tokens, up to 20, whose log-probabilities are returned with those of each sampled
            token; before penalties, biases and temperature. None for no log-probabilities.
        prompt_logprobs: the same for the tokens of the prompt, as the whole prompt, before its compression, predicts
            them. Not for a prompt that continues a cache.
    """

    temperature: int | float = 1.0
    top_k: int = 0
    top_p: int | float = 1.0
    min_p: int | float = 0.0
    repetition_penalty: int | float = 1.0
    presence_penalty: int | float = 0.0
    frequency_penalty: int | float = 0.0
    logit_bias: Mapping[int, int | float] | tuple[tuple[int, int | float], ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    @classmethod
    def of(cls, params: Any) -> "Sampling":
        """Return the settings of a model's `generation_config.json`; the defaults of fields that it leaves out.

        Args:
            params: from `jaxkv.load`.

        Returns:
            The sampler; greedy if the file has `"do_sample": false`.

        Raises:
            ValueError: for a value that is not supported.
        """
        return cls(**params.sampling_defaults)

    def __post_init__(self) -> None:
        _checks.validate_field(
            self, "temperature", _checks.validate_float, "give a number of 0 or more"
        )
        remedy = "give a whole number, 0 or -1 for no cut"
        _checks.validate_field(self, "top_k", _checks.validate_int, remedy, least=-1)
        object.__setattr__(self, "top_k", max(self.top_k, 0))
        remedy = "give a probability in (0, 1]"
        _checks.validate_field(
            self, "top_p", _checks.validate_float, remedy, high=1.0, open_low=True
        )
        _checks.validate_field(
            self, "min_p", _checks.validate_float, "give a share in [0, 1]", high=1.0
        )
        for name, (low, high) in _PENALTIES.items():
            _checks.validate_field(self, name, _checks.validate_float, low=low, high=high)
        _checks.validate_field(self, "logit_bias", _parse_logit_bias)
        _checks.validate_field(self, "stop_token_ids", _parse_stop_ids)
        for name in ("logprobs", "prompt_logprobs"):
            _checks.validate_optional_field(
                self, name, _checks.validate_int, least=0, most=MOST_LOGPROBS
            )

    def __call__(self, logits: Float[Array, "B V"], keys: Key[Array, " B"]) -> Int[Array, " B"]:
        """Return a token id per sequence, `i32[B]`, from logits and random keys; the likeliest at temperature 0.

        The logits are biased and penalised already: what these need, the tokens so far, is not an argument.
        """
        return (
            select_likeliest_tokens(logits, keys)
            if is_greedy(self)
            else _stack_sampling_numbers([self])(logits, keys)
        )


def _parse_logit_bias(name: str, given: Any) -> tuple[tuple[int, float], ...]:
    """Return biases as a tuple of pairs (id, bias), sorted by id; ValueError or TypeError for invalid ones."""
    try:
        biases = dict(given)
    except (TypeError, ValueError):
        remedy = "give a dict of numbers by token id: {50256: -100}"
        raise TypeError(f"{name}={given!r}: {remedy}") from None
    numbers = {
        _checks.validate_int(name, token, "give token ids of 0 or more", least=0): (
            _checks.validate_float(name, bias, low=-_MOST_BIAS, high=_MOST_BIAS)
        )
        for token, bias in biases.items()
    }
    return tuple(sorted(numbers.items()))


def _parse_stop_ids(name: str, given: Any) -> tuple[int, ...]:
    """Return token ids, several or one, as a sorted tuple without duplicates; ValueError for other values."""
    listed, remedy = np.atleast_1d(given).tolist(), "give token ids of 0 or more"
    ids = {_checks.validate_int(name, each, remedy, least=0) for each in listed}
    require(len(ids) <= MOST_STOP_IDS, name, given, f"give at most {MOST_STOP_IDS}")
    return tuple(sorted(ids))


GREEDY = Sampling(temperature=0.0)
_get_extras = operator.attrgetter(*_PENALTIES, "logit_bias", "logprobs")


def get_settings(sampling: Sampler) -> Sampling:
    """Return a `Sampling` itself, and for a custom sampler one without penalties, biases, stop ids, logprobs."""
    return sampling if isinstance(sampling, Sampling) else GREEDY


def needs_extras(sampling: Sampler) -> bool:
    """Return True for a `Sampling` with penalties, biases or log-probabilities, which the plain token loop lacks."""
    return _get_extras(get_settings(sampling)) != _get_extras(GREEDY)


def collect_end_ids(sampling: Sampler, eos: Iterable[int]) -> tuple[int, ...]:
    """Return a sorted tuple of the ids that end an answer: `eos`, and the sampler's `stop_token_ids`."""
    return tuple(sorted({*eos, *get_settings(sampling).stop_token_ids}))


def make_end_id_table(sampling: Sampler, eos: Collection[int]) -> Int[np.ndarray, " n"]:
    """Return the ids that end an answer, padded with -2 to one size for any `stop_token_ids`, another for none."""
    ids, more = collect_end_ids(sampling, eos), bool(get_settings(sampling).stop_token_ids)
    # -2 is no token id: without end ids, only the number of steps ends sampling.
    table = np.full(max(1, len(set(eos))) + MOST_STOP_IDS * more, -2, np.int32)
    table[: len(ids)] = ids
    return table


def require_ids_in_vocabulary(sampling: Sampler, vocab: int) -> None:
    """Raise ValueError if a sampler biases, or ends at, a token id outside a vocabulary of size `vocab`."""
    given = get_settings(sampling)
    for name, ids in (
        ("logit_bias", dict(given.logit_bias)),
        ("stop_token_ids", given.stop_token_ids),
    ):
        require(max(ids, default=0) < vocab, name, [*ids], f"give token ids in [0, {vocab})")


def is_greedy(sampling: Sampler) -> bool:
    """Return True for a `Sampling` of temperature 0 without a `__call__` of its own, which needs no random key."""
    return is_builtin_sampling(sampling) and sampling.temperature == 0


def is_builtin_sampling(sampling: Sampler) -> TypeGuard[Sampling]:
    """Return True if the sampler is a `Sampling` without a `__call__` of its own, so that its numbers define it."""
    return isinstance(sampling, Sampling) and type(sampling).__call__ is Sampling.__call__


def select_likeliest_tokens(
    logits: Float[Array, "B V"], keys: Key[Array, " B"]
) -> Int[Array, " B"]:
    """Return the token ids `i32[B]` of each sequence's largest logit, ties to the lowest id; keys are unused."""
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _StaticSampler:
    """A custom or greedy sampler as a static pytree, so that jitted functions compile it in."""

    sampler: Any

    def __call__(self, logits: Float[Array, "B V"], keys: Key[Array, " B"]) -> Any:
        """Call the wrapped sampler with logits and keys; return its token ids."""
        return self.sampler(logits, keys)


def convert_sampler_to_pytree(sampling: Any) -> Any:
    """Return a sampler as a pytree for jitted functions: a `Sampling`'s numbers as arrays; greedy and custom static."""
    if isinstance(sampling, BatchSampling):
        return sampling
    # With extras, temperatures of 0 and others share a program.
    if is_greedy(sampling) and not needs_extras(sampling):
        return _StaticSampler(select_likeliest_tokens)
    return (
        _stack_sampling_numbers([sampling])
        if is_builtin_sampling(sampling)
        else _StaticSampler(sampling)
    )


# Tokens per block of the vocabulary: about the square root of usual vocabulary sizes.
_BLOCK = 256


def _sample_token(key: Key[Array, ""], logits: Float[Array, " V"]) -> Int[Array, ""]:
    """Sample a token id `i32[]` from softmax(logits): first a block of the vocabulary, then a token in it.

    Two blocks of random numbers suffice for a vocabulary. A float32 Gumbel variate of mode "low" never exceeds 16.6, so
    tokens of probability 1e-7 would be sampled too rarely.
    """
    size = min(_BLOCK, logits.size)
    blocks = jnp.pad(logits, (0, -logits.size % size), constant_values=-jnp.inf).reshape(-1, size)
    of_block, of_token = jax.random.split(key)
    block = jax.random.categorical(of_block, jax.nn.logsumexp(blocks, axis=-1), mode="high")
    token = jax.random.categorical(of_token, blocks[block], mode="high")
    return (block * size + token).astype(jnp.int32)


@jax.tree_util.register_dataclass
@frozen_dataclass
class BatchSampling:
    """Sampler of a batch: arrays of a `Sampling`'s numbers per sequence, or one for all; any mix shares one program.

    Attributes:
        temperature: 0 is greedy.
        top_k: 0 for all tokens.
        top_p: 1 for all tokens.
        min_p: 0 for all tokens.
    """

    temperature: Float[Array, " #B"]
    top_k: Int[Array, " #B"]
    top_p: Float[Array, " #B"]
    min_p: Float[Array, " #B"]

    def __call__(self, logits: Float[Array, "B V"], keys: Key[Array, " B"]) -> Int[Array, " B"]:
        """Return token ids `i32[B]`: sampled for positive temperatures, else those of the largest logits."""
        best, warm = select_likeliest_tokens(logits, keys), self.temperature > 0
        sampled = lax.cond(warm.any(), _sample_tokens, _take_likeliest_tokens, self, logits, keys)
        return jnp.where(warm, sampled, best)

    def mask_logits(self, logits: Float[Array, "B V"]) -> Float[Array, "B V"]:
        """Return logits `[B, V]`, not divided by the temperature, -inf for ids that top-k, top-p or min-p excludes."""
        used = (
            (self.top_k > 0, _apply_top_k),
            (self.top_p < 1, _apply_top_p),
            (self.min_p > 0, _apply_min_p),
        )
        for asked, masked in used:
            logits = lax.cond(asked.any(), masked, _keep_all_logits, self, logits)
        return logits

    def scale_logits(self, logits: Float[Array, "B V"]) -> Float[Array, "B V"]:
        """Return logits minus the sequence's largest one, divided by its temperature (clipped): at most 0."""
        return (logits - logits.max(axis=-1, keepdims=True)) / self.temperature_divisor

    @property
    def temperature_divisor(self) -> Float[Array, "B 1"]:
        """Temperatures `[B, 1]`, clipped to normal float32 numbers with an inverse; XLA flushes smaller ones to 0."""
        least = jnp.finfo(jnp.float32).tiny
        return jnp.clip(self.temperature, least, 1 / least)[:, None]


def _sample_tokens(of: BatchSampling, logits: Array, keys: Array) -> Array:
    """Return token ids `i32[B]` sampled at each sequence's temperature from the masked logits."""
    # Mask first: division by an extreme temperature makes all logits equal.
    return jax.vmap(_sample_token)(keys, of.scale_logits(of.mask_logits(logits)))


def _take_likeliest_tokens(of: BatchSampling, logits: Array, keys: Array) -> Array:
    """Return the token ids of the largest logits, with the signature of `_sample_tokens`."""
    return select_likeliest_tokens(logits, keys)


def _keep_all_logits(of: BatchSampling, logits: Array) -> Array:
    """Return the logits unchanged, with the signature of `_apply_top_k`, `_apply_top_p` and `_apply_min_p`."""
    return logits


def _apply_top_k(of: BatchSampling, logits: Array) -> Array:
    """Return logits, with those below their sequence's k-th largest at minus infinity; all are kept for k = 0."""
    keys, count = encode_sort_keys(logits), logits.shape[-1]
    k = jnp.where(of.top_k > 0, jnp.minimum(of.top_k, count), count)
    return jnp.where(compare_with_kth_largest(keys, k)[0], logits, -jnp.inf)


def _apply_top_p(of: BatchSampling, logits: Array) -> Array:
    """Return logits, at minus infinity outside the fewest likeliest tokens whose probabilities reach p; keep ties."""
    p = of.top_p[:, None]
    ordered = jnp.sort(logits, axis=-1, descending=True)
    probabilities = jax.nn.softmax(of.scale_logits(ordered), axis=-1)
    before = jnp.cumsum(probabilities, axis=-1) - probabilities
    # p = 1 keeps rare tokens whose probability vanishes in a sum near 1; p rounded to 0 keeps the likeliest one.
    kept = (before < p) | (before == 0) | (p == 1)
    least = jnp.where(kept, ordered, jnp.inf).min(axis=-1, keepdims=True)
    return jnp.where(logits >= least, logits, -jnp.inf)


def _apply_min_p(of: BatchSampling, logits: Array) -> Array:
    """Return logits, at minus infinity for tokens of probability below p times the likeliest token's."""
    share = jnp.log(of.min_p)[:, None]
    least = logits.max(axis=-1, keepdims=True) + of.temperature_divisor * share
    return jnp.where(logits >= least, logits, -jnp.inf)


def combine_samplers(samplers: Iterable[Sampler]) -> BatchSampling:
    """Combine one `Sampling` per sequence into a `BatchSampling`; raise TypeError for custom samplers."""
    given = list(samplers)
    for sampler in given:
        if not is_builtin_sampling(sampler):
            raise TypeError(
                f"sampling={sampler}: custom samplers not supported in slots. Give a jaxkv.Sampling."
            )
    return _stack_sampling_numbers(given)


def _stack_sampling_numbers(given: Sequence[Any]) -> BatchSampling:
    """Return the `BatchSampling` of several `Sampling` objects: arrays of their numbers, in 32 bits."""
    kinds = {"temperature": np.float32, "top_k": np.int32, "top_p": np.float32, "min_p": np.float32}
    with np.errstate(over="ignore", under="ignore"):
        arrays = {
            name: np.asarray([getattr(each, name) for each in given], kind)
            for name, kind in kinds.items()
        }
    return BatchSampling(**jax.tree.map(jnp.asarray, arrays))
