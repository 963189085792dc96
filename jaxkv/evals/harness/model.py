"""The model "jaxkv" of lm-evaluation-harness, which answers requests over compressed caches."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from jaxtyping import Bool, Float
from tqdm import tqdm

from jaxkv._errors import require
from jaxkv.engine.sampling import GREEDY, Sampling, is_greedy
from jaxkv.engine.session import Session
from jaxkv.evals.perplexity import teacher_force_tokens
from jaxkv.evals.runs import derive_seed
from jaxkv.generation import generate
from jaxkv.loading import LanguageModel, load
from jaxkv.policies.policy import Policy
from jaxkv.policies.registry import resolve_policy

try:
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ImportError:
    raise ImportError(
        "this adapter needs lm-evaluation-harness: pip install 'jaxkv[harness]'"
    ) from None

_LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
_NUMBERS = ("temperature", "top_k", "top_p", "min_p")
_KNOWN = ("until", "do_sample", *_NUMBERS, *_LENGTHS)
_Item = TypeVar("_Item")


@register_model("jaxkv")
class JaxKVLM(TemplateLM):
    """lm-evaluation-harness model that answers and scores requests over a jaxkv model's compressed caches.

    Contexts are prefilled and compressed. Answers are sampled on top of the compressed cache. Continuations are scored
    on top of it token by token, so that policies which evict an entry for every new one do so. Choices that share a
    context share its cache.
    """

    def __init__(
        self,
        model: LanguageModel | str = "smollm2-135m-instruct",
        *,
        policy: Policy | str = "full",
        dtype: str | None = None,
        batch_size: int | str = 1,
        max_gen_toks: int = 256,
        seed: int = 0,
        max_batch_size: int | None = None,
        device: str | None = None,
        **options: Any,
    ):
        """Wrap a model, or load one by name, for lm-evaluation-harness; ValueError without a tokenizer.

        Args:
            model: a model, or a name or path for `jaxkv.load`.
            policy: compression policy, or its name.
            dtype: dtype of weights and cache; by default the choice of `jaxkv.load`.
            batch_size: number of requests per batch; with a policy that uses random numbers, contexts run one by one.
            max_gen_toks: maximum tokens of an answer if the harness's task sets none.
            seed: seed of policies and samplers that use random numbers.
            max_batch_size: ignored: jaxkv does not search for a batch size.
            device: ignored: JAX chooses, by JAX_PLATFORMS.
            options: fields of a policy given by name, such as budget=256 and window=16.

        Raises:
            ValueError: for a batch size that is not a number, unknown options, or a model without a tokenizer.
            TypeError: for options if `policy` is a policy, not a name.
        """
        super().__init__()
        fits = str(batch_size).isdigit() and int(batch_size) >= 1
        require(
            fits, "batch_size", batch_size, "not a number: use one, jaxkv does not search for it"
        )
        if isinstance(policy, Policy) and options:
            raise TypeError(f"{', '.join(options)}: the policy is an object: set them in it")
        self.params = load(model, dtype) if isinstance(model, str) else model
        self.text = self.params.tokenizer
        self.policy = resolve_policy(policy, options=options)
        self.batch_size = int(batch_size)
        self.max_gen_toks = max_gen_toks
        self.seed = seed

    @property
    def max_length(self) -> int:
        """Maximum tokens of a prompt with its answer: the model's number of positions."""
        return self.params.config.max_positions

    @property
    def tokenizer_name(self) -> str:
        """Name of the model with "/" as "__", which separates the harness's cached requests by model."""
        return self.params.name.replace("/", "__")

    @property
    def eot_token_id(self) -> int:
        """Id of the model's first eos token; without one, of the bos token, or 0."""
        return next(iter(self.text.eos_ids), self.text.bos_id or 0)

    @property
    def prefix_token_id(self) -> int:
        """Id of the token that stands for an empty context: bos, or `eot_token_id` without one."""
        return self.eot_token_id if self.text.bos_id is None else self.text.bos_id

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **options: Any
    ) -> list[int]:
        """Encode a text to token ids, with bos if the tokenizer adds it, unless `add_special_tokens` is False."""
        return self.text.encode(string, bos=add_special_tokens is not False)

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Render chat messages as text, which opens the assistant's answer if `add_generation_prompt`."""
        return self.text.render_chat(chat_history, generation_prompt=add_generation_prompt)

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Generate one text per request, in order, until a stop string or limit; long contexts lose their start."""
        answers: dict[int, str] = {}
        asked = [request.args for request in requests]
        # Requests of equal arguments run together, the longest first, so that a prompt that is too long fails early.
        order = sorted(range(len(asked)), key=lambda at: (repr(asked[at][1]), -len(asked[at][0])))
        batches = [
            batch
            for _, equal in itertools.groupby(order, key=lambda at: repr(asked[at][1]))
            for batch in _split_into_batches(list(equal), self._contexts_per_batch)
        ]
        for batch in tqdm(batches, disable=disable_tqdm, desc="jaxkv, generate_until"):
            contexts = [asked[at][0] for at in batch]
            arguments = asked[batch[0]][1]
            for at, text in zip(
                batch, self._generate_texts(contexts, arguments, batch[0]), strict=True
            ):
                answers[at] = text
                self.cache_hook.add_partial("generate_until", asked[at], text)
        return [answers[at] for at in range(len(asked))]

    def _generate_texts(
        self, contexts: list[str], arguments: Mapping[str, Any], number: int
    ) -> Any:
        """List a text per context; `number`, the batch's first request, varies the seed of random samplers."""
        stop, new, sampling = _parse_generation_arguments(arguments, self.max_gen_toks)
        room = self.max_length - new
        # A prompt that is too long loses its beginning, as in the harness's own models.
        ids = [self.tok_encode(text)[-room:] or [self.prefix_token_id] for text in contexts]
        key = self._seed_for_context(ids[0])
        # A task may repeat a request: random answers differ by request, independent of the batch.
        key = key if is_greedy(sampling) else derive_seed(key, f"request {number}")
        out = generate(
            self.params,
            ids,
            policy=self.policy,
            max_new_tokens=new,
            sampling=sampling,
            stop=stop,
            key=key,
            progress=False,
        )
        return [each.text for each in out]

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        """List each text's log-probability, the sum over its tokens, scored in windows that fit the model's positions.

        A policy that compresses only prompts has nothing to evict there.
        """
        texts = [request.args[0] for request in requests]
        windows = [self._split_into_windows(self.tok_encode(text, False)) for text in texts]
        pairs = [pair for each in windows for pair in each]
        values = iter(self._score_pairs(pairs, disable_tqdm))
        sums = [float(sum(next(values)[0] for _ in each)) for each in windows]
        for text, value in zip(texts, sums, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), value)
        return sums

    def _split_into_windows(self, ids: list[int]) -> list[tuple[list[int], list[int]]]:
        """Split token ids into (context, continuation) pairs that fit the model's positions; each id is scored once."""
        first = self.prefix_token_id
        most = self.max_length
        windows = get_rolling_token_windows(ids, first, most, context_len=1)
        return list(map(make_disjoint_window, windows))

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[tuple[str, str], list[int], list[int]]],
        disable_tqdm: bool = False,
        **options: Any,
    ) -> list[tuple[float, bool]]:
        """List (continuation's log-probability, True if greedy decoding yields it); long contexts lose their start."""
        pairs = []
        for (_, text), context, continuation in requests:
            require(
                bool(continuation),
                "continuation",
                text,
                "adds no token to its context: use a longer one",
            )
            room = self.max_length - len(continuation) + 1
            # The harness moves trailing spaces of a context to the continuation, so a context may be empty.
            pairs.append((context[-room:] or [self.prefix_token_id], continuation))
        results = self._score_pairs(pairs, disable_tqdm)
        for (texts, *_), result in zip(requests, results, strict=True):
            self.cache_hook.add_partial("loglikelihood", texts, result)
        return results

    def _score_pairs(
        self, pairs: Sequence[tuple[list[int], list[int]]], disable_tqdm: bool
    ) -> list[tuple[float, bool]]:
        """Return (log-probability, True if greedy decoding yields the continuation) per (context, continuation)."""
        found: dict[int, tuple[float, bool]] = {}
        by_context: dict[tuple[int, ...], list[int]] = {}
        for at in sorted(range(len(pairs)), key=lambda at: -sum(map(len, pairs[at]))):
            by_context.setdefault(tuple(pairs[at][0]), []).append(at)
        # Continuations of one context share its cache; the others run in batches.
        groups = [group for group in by_context.values() if len(group) > 1]
        alone = [group[0] for group in by_context.values() if len(group) == 1]
        groups += [list(batch) for batch in _split_into_batches(alone, self._contexts_per_batch)]
        for group in tqdm(groups, disable=disable_tqdm, desc="jaxkv, loglikelihood"):
            # Distinct contexts: one, or as many as continuations.
            contexts = [*map(list, dict.fromkeys(tuple(pairs[at][0]) for at in group))]
            values, greedy = self._score_continuations(contexts, [pairs[at][1] for at in group])
            found |= {at: (float(values[row]), bool(greedy[row])) for row, at in enumerate(group)}
        return [found[at] for at in range(len(pairs))]

    @property
    def _contexts_per_batch(self) -> int:
        """Number of contexts per batch: `batch_size`, or 1 if the policy uses random numbers."""
        return 1 if self.policy.build_policy_parts().uses_random_key else self.batch_size

    def _seed_for_context(self, ids: Sequence[int]) -> int:
        """Return the random seed: `seed`, or a hash of it and the context's ids if the policy uses random numbers."""
        return (
            derive_seed(self.seed, " ".join(map(str, ids)))
            if self.policy.build_policy_parts().uses_random_key
            else self.seed
        )

    def _score_continuations(
        self, contexts: list[list[int]], continuations: list[list[int]]
    ) -> tuple[Float[np.ndarray, " B"], Bool[np.ndarray, " B"]]:
        """Prefill contexts; return log-probabilities `[B]` of continuations, mask `[B]`: True if decoded so greedily.

        One context is prefilled once, and its continuations are scored on top of it in batches.
        """
        session = Session(self.params, self.policy, key=self._seed_for_context(contexts[0]))
        # The last token of a continuation is not read. Each pair fits the model's positions, but the longest context
        # and the longest continuation of different pairs may not.
        room = self.max_length - max(map(len, contexts))
        cache = session.prefill(contexts, new=min(max(map(len, continuations)) - 1, room))
        shared = len(contexts) < len(continuations)
        values = list[Any]()
        greedy = list[Any]()
        for part in (
            _split_into_batches(continuations, self.batch_size) if shared else [continuations]
        ):
            losses, likeliest, _ = teacher_force_tokens(session, cache, part, donate=not shared)
            values += [-losses.sum(axis=1)]
            greedy += [likeliest.all(axis=1)]
        return np.concatenate(values), np.concatenate(greedy)


def _split_into_batches(items: Sequence[_Item], size: int) -> list[Sequence[_Item]]:
    """Split a sequence into consecutive parts of at most `size` items."""
    return [items[first : first + size] for first in range(0, len(items), size)]


def _parse_generation_arguments(
    arguments: Mapping[str, Any], usual: int
) -> tuple[Any, int, Sampling]:
    """Parse lm-eval's generation arguments to stop strings, number of new tokens and sampler; ValueError for others."""
    unknown = [name for name in arguments if name not in _KNOWN]
    require(
        not unknown, "generation_kwargs", unknown, f"not supported: use some of {', '.join(_KNOWN)}"
    )
    given = {name: value for name, value in arguments.items() if value is not None}
    new = int(next((given[name] for name in _LENGTHS if name in given), usual))
    random = given.get("do_sample", given.get("temperature", 0) != 0)
    numbers = {name: given[name] for name in _NUMBERS if name in given}
    return given.get("until"), new, Sampling(**numbers) if random else GREEDY
