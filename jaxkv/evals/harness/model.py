"""The model "jaxkv" of lm-evaluation-harness: requests of its tasks answered over compressed caches."""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int
from tqdm import tqdm

from jaxkv._errors import require
from jaxkv.cache import KVCache, Turn
from jaxkv.engine.session import Session
from jaxkv.evals.arguments import seed_of
from jaxkv.evals.perplexity import fed
from jaxkv.generation import generate
from jaxkv.loading import LanguageModel, load
from jaxkv.policies.policy import Method
from jaxkv.policies.registry import as_policy
from jaxkv.sampling import Greedy, MinP, Sampling, Temperature, TopK, TopP
from jaxkv.sharding.mesh import host
from jaxkv.text.prompts import Encoded

try:
    from lm_eval.api.model import LM
    from lm_eval.api.registry import register_model
except ImportError:
    raise ImportError("this adapter needs lm-evaluation-harness: pip install 'jaxkv[harness]'") from None

_LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
_KNOWN = ("until", "do_sample", "temperature", "top_k", "top_p", "min_p", *_LENGTHS)
_Item = TypeVar("_Item")


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Pair:
    """A context and what is judged behind it, as ids; the request that it answers."""

    context: list[int]
    continuation: list[int]
    request: int


@register_model("jaxkv")
class JaxKVLM(LM):
    """A jaxkv model whose caches a policy compresses, for lm-evaluation-harness.

    Contexts are prefilled and compressed. Answers are drawn on top of the compressed cache, and continuations read on
    top of it token by token, so that policies which drop a row for every new one do. Choices that share a context share
    its cache.
    """

    def __init__(
        self,
        model: LanguageModel | str = "smollm2-135m-instruct",
        *,
        policy: Method | str = "full",
        dtype: str | None = None,
        batch_size: int | str = 1,
        max_gen_toks: int = 256,
        seed: int = 0,
        max_batch_size: int | None = None,
        device: str | None = None,
        **options: Any,
    ):
        """Loads the model.

        Args:
            model: a model, or what `jaxkv.load` takes.
            policy: the compression, or its name.
            dtype: of weights and cache; by default `jaxkv.load` chooses.
            batch_size: requests run together; contexts of a policy that draws run one by one.
            max_gen_toks: tokens of an answer where the harness' task does not say.
            seed: for policies and samplings that draw.
            max_batch_size: not looked at: no batch size is searched for.
            device: not looked at: JAX chooses, by JAX_PLATFORMS.
            options: fields of a policy that is only named, such as budget=256 and window=16.

        Raises:
            ValueError: for a batch size that is no number, for unknown options, or a model without a tokenizer.
            TypeError: for options beside a policy that is made already.
        """
        super().__init__()
        fits = str(batch_size).isdigit() and int(batch_size) >= 1
        require(fits, "batch_size", batch_size, "give a number: what fits is not searched for")
        if isinstance(policy, Method) and options:
            raise TypeError(f"{', '.join(options)}: the policy is made already; say these in it")
        self.params = load(model, dtype) if isinstance(model, str) else model
        require(self.params.text is not None, "model", self.params.name, "it has no tokenizer: load one that has")
        self.policy = as_policy(policy, options=options)
        self.batch_size, self.max_gen_toks, self.seed = int(batch_size), max_gen_toks, seed

    @property
    def max_length(self) -> int:
        """Positions of the model."""
        return self.params.config.max_positions

    @property
    def tokenizer_name(self) -> str:
        """What the harness' caches are told apart by."""
        return self.params.name.replace("/", "__")

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Renders a conversation; see `LM.apply_chat_template`."""
        assert self.params.text is not None
        return self.params.text.chat(chat_history, generation_prompt=add_generation_prompt)

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Answers drawn up to a stop string; see `LM.generate_until`."""
        told: dict[int, str] = {}
        asked = [request.args for request in requests]
        # Those that are drawn alike go together, the longest first: what does not fit is known at once.
        order = sorted(range(len(asked)), key=lambda at: (repr(asked[at][1]), -len(asked[at][0])))
        with tqdm(total=len(asked), disable=disable_tqdm, desc="jaxkv, generate_until") as bar:
            for _, alike in itertools.groupby(order, key=lambda at: repr(asked[at][1])):
                for batch in _batches(list(alike), self._side_by_side):
                    texts = self._drawn([asked[at][0] for at in batch], asked[batch[0]][1], batch[0])
                    for at, text in zip(batch, texts, strict=True):
                        told[at] = text
                        self.cache_hook.add_partial("generate_until", asked[at], text)
                    bar.update(len(batch))
        return [told[at] for at in range(len(asked))]

    def _drawn(self, contexts: Sequence[str], given: Mapping[str, Any], number: int) -> list[str]:
        stops, new, sampling = _drawing(given, self.max_gen_toks)
        room = self.max_length - new
        require(room >= 1, "max_gen_toks", new, f"the model has {self.max_length} positions: draw fewer")
        # A prompt that is too long loses its beginning, as in the harness' own models.
        ids = [self._encoded(text)[-room:] or [self._first] for text in contexts]
        of: dict[str, Any] = {"policy": self.policy, "max_new_tokens": new, "sampling": sampling, "stop": stops}
        key = self._key(ids[0])
        # Answers that are drawn by chance are others each time, in whichever batch: a task may ask for several.
        key = key if isinstance(sampling, Greedy) else seed_of(key, f"request {number}")
        out = generate(self.params, ids, **of, key=key, progress=False)
        assert isinstance(out.text, list)
        return out.text

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Log-probabilities of continuations, and whether greedy drawing gives them; see `LM.loglikelihood`."""
        asked = [request.args for request in requests]
        pairs = [self._pair(number, *of) for number, of in enumerate(asked)]
        found = self._judged(pairs, disable_tqdm)
        for of, result in zip(asked, found, strict=True):
            self.cache_hook.add_partial("loglikelihood", of, result)
        return found

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-probabilities of whole texts, token by token on one cache; see `LM.loglikelihood_rolling`."""
        asked = [request.args for request in requests]
        pairs = [
            pair
            for number, (text,) in enumerate(asked)
            for pair in self._windows(number, self._encoded(text, bos=False))
        ]
        found = np.zeros(len(asked))
        for pair, (value, _) in zip(pairs, self._judged(pairs, disable_tqdm), strict=True):
            found[pair.request] += value
        for of, result in zip(asked, found.tolist(), strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", of, result)
        return found.tolist()

    @property
    def _side_by_side(self) -> int:
        """Contexts that run together: those of a policy that draws would share their draws."""
        return 1 if self.policy.parts().draws else self.batch_size

    def _key(self, ids: Sequence[int]) -> int:
        """The seed; of a policy that draws a context's own, however often it is asked about."""
        return seed_of(self.seed, " ".join(map(str, ids))) if self.policy.parts().draws else self.seed

    def _encoded(self, text: str, *, bos: bool = True) -> list[int]:
        assert self.params.text is not None
        return self.params.text.encode(text, bos=bos)

    @property
    def _first(self) -> int:
        """What stands before a text that nothing stands before."""
        text = self.params.text
        assert text is not None
        firsts = [*([] if text.bos_id is None else [text.bos_id]), *text.eos_ids]
        require(bool(firsts), "model", self.params.name, "no bos or eos token to begin an empty context with")
        return firsts[0]

    def _pair(self, number: int, context: str, continuation: str) -> _Pair:
        """Ids of both: spaces between them belong to the continuation, whose tokens are those that it adds."""
        cut = len(context.rstrip())
        context, continuation = context[:cut], context[cut:] + continuation
        if context:
            before = self._encoded(context)
            behind = self._encoded(context + continuation)[len(before) :]
        else:
            before, behind = [self._first], self._encoded(continuation, bos=False)
        require(bool(behind), "continuation", continuation, "it adds no token to its context")
        room = self.max_length - len(behind) + 1
        require(room >= 1, "continuation", continuation[:40], f"longer than the model's {self.max_length} positions")
        return _Pair(context=before[-room:], continuation=behind, request=number)

    def _windows(self, number: int, ids: list[int]) -> Iterator[_Pair]:
        """A text in parts of the model's length: each token is judged once, the last part's with what fits before."""
        most, whole = self.max_length, [self._first, *ids]
        for first in range(0, len(ids), most):
            end = min(first + most, len(ids))
            begin = max(0, end - most)
            yield _Pair(context=whole[begin : first + 1], continuation=ids[first:end], request=number)

    def _judged(self, pairs: Sequence[_Pair], disable_tqdm: bool) -> list[tuple[float, bool]]:
        """Pairs in their order: those of one context on one cache, the others side by side."""
        found: dict[int, tuple[float, bool]] = {}
        by_context: dict[tuple[int, ...], list[int]] = {}
        for at, pair in enumerate(pairs):
            by_context.setdefault(tuple(pair.context), []).append(at)
        # Those of one context share its cache, however many they are.
        groups = [group for group in by_context.values() if len(group) > 1]
        alone = [group[0] for group in by_context.values() if len(group) == 1]
        alone.sort(key=lambda at: -len(pairs[at].context) - len(pairs[at].continuation))
        groups += [list(batch) for batch in _batches(alone, self._side_by_side)]
        for group in tqdm(groups, disable=disable_tqdm, desc="jaxkv, loglikelihood"):
            contexts = [pairs[at].context for at in group]
            contexts = contexts[:1] if all(each == contexts[0] for each in contexts) else contexts
            values, greedy = self._scored(contexts, [pairs[at].continuation for at in group])
            found |= {at: (float(values[row]), bool(greedy[row])) for row, at in enumerate(group)}
        return [found[at] for at in range(len(pairs))]

    def _scored(
        self, contexts: list[list[int]], continuations: list[list[int]]
    ) -> tuple[Float[np.ndarray, " B"], Bool[np.ndarray, " B"]]:
        """Sums of log-probabilities, and whether each token was the likeliest, on top of compressed contexts.

        One context is prefilled once, and its continuations read on top of it, a batch of them at a time.
        """
        session, count = Session(self.params, self.policy, key=self._key(contexts[0])), len(continuations)
        # The last token is not read; where positions are short, the first one makes room.
        room = self.max_length - max(map(len, contexts))
        cache = session.prefill(contexts, new=min(max(map(len, continuations)) - 1, room))
        shared = len(contexts) < count
        parts = _batches(continuations, self.batch_size) if shared else [continuations]
        found = [_read(session, cache, part, shared=shared) for part in parts]
        values, greedy = (np.concatenate(each) for each in zip(*found, strict=True))
        return values, greedy


def _read(
    session: Session, cache: KVCache, continuations: Sequence[list[int]], *, shared: bool
) -> tuple[Float[np.ndarray, " B"], Bool[np.ndarray, " B"]]:
    """Reads continuations token by token, as if each had been drawn; the cache is given up where it is not shared."""
    count, longest = len(continuations), max(map(len, continuations))
    values, greedy = np.zeros(count), np.ones(count, bool)
    for at in range(longest):
        there = np.asarray([at < len(each) for each in continuations])
        tokens = np.asarray([each[at] if at < len(each) else 0 for each in continuations], np.int32)
        assert cache.logits is not None
        # Of a context that all share there is one row; on a mesh the batch may be filled up.
        logits = jnp.broadcast_to(cache.logits[: cache.batch], (count, cache.config.vocab))
        value, likeliest = (host(each) for each in _told(logits, tokens))
        values += np.where(there, value, 0)
        greedy &= likeliest | ~there
        if at + 1 < longest:
            # Those at their end read nothing.
            part = [each[at : at + 1] if at + 1 < len(each) else [] for each in continuations]
            new = Encoded(ids=part, single=False, turns=(Turn.RAW,) * count)
            cache = fed(session, cache, new, donate=at > 0 or not shared)
    return values, greedy


@jax.jit
def _told(logits: Float[Array, "B V"], tokens: Int[Array, " B"]) -> tuple[Float[Array, " B"], Bool[Array, " B"]]:
    value = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, None], axis=1)[:, 0]
    return value, logits.argmax(axis=1) == tokens


def _batches(of: Sequence[_Item], size: int) -> list[Sequence[_Item]]:
    return [of[first : first + size] for first in range(0, len(of), size)]


def _drawing(given: Mapping[str, Any], usual: int) -> tuple[tuple[str, ...], int, Sampling]:
    """Stop strings, new tokens and sampling of a task's generation arguments."""
    unknown = [name for name in given if name not in _KNOWN]
    require(not unknown, "generation_kwargs", unknown, f"known are {', '.join(_KNOWN)}")
    until = given.get("until") or ()
    stops = (until,) if isinstance(until, str) else tuple(until)
    new = next((int(given[name]) for name in _LENGTHS if given.get(name) is not None), usual)
    said = given.get("temperature")
    temperature = float(said or 0.0)
    if not given.get("do_sample", temperature > 0) or (temperature == 0 and said is not None):
        return stops, new, Greedy()
    # Values that let everything through are none.
    let = {"top_k": (None, 0, -1), "top_p": (None, 1), "min_p": (None, 0)}
    active = [name for name, through in let.items() if given.get(name) not in through]
    require(len(active) < 2, "generation_kwargs", active, "one cut at a time: give one of them")
    if not active:
        return stops, new, Temperature(temperature=temperature or 1.0)
    (name,) = active
    cuts: dict[str, Any] = {"top_k": TopK, "top_p": TopP, "min_p": MinP}
    return stops, new, cuts[name](temperature=temperature or 1.0, **{name[-1]: given[name]})
