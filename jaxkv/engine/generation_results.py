"""Results of `generate`: `Generation`, `Completion`, `Stats`, `Stream`; `AnswerCollector` decodes sampled ids."""

import dataclasses
import itertools
import operator
from collections.abc import Collection, Container, Generator, Iterable, Iterator, Sequence
from typing import Any, Literal, SupportsIndex, overload

import numpy as np
from jaxtyping import Bool, Float, Int

from jaxkv._checks import shorten_text, use_package_jax_settings
from jaxkv._dataclasses import frozen_dataclass
from jaxkv.cache import KVCache
from jaxkv.engine.sampling_extras import ScoredToken
from jaxkv.text.tokenizer import ChatTokenizer, StreamDecoder

# OpenAI's and vLLM's names for why sampling ended.
FinishReason = Literal["stop", "length"]


@frozen_dataclass
class Stats:
    """Measurements of one `generate` call: numbers of tokens, seconds, bytes and entries.

    Attributes:
        prompt_tokens: number of prompt tokens, over all sequences.
        new_tokens: number of sampled tokens, over all sequences.
        prefill_seconds: wall-clock seconds from token ids to the compressed cache and the first logits. A first call
            includes compilation.
        decode_seconds: wall-clock seconds from the first logits to the last token, without the time that a stream's
            consumer spends between tokens. A first call includes compilation.
        compile_seconds: seconds of tracing and compiling that the call waited for, while the device may run; 0 if all
            shapes were compiled before.
        compiled_programs: number of programs compiled or loaded from a compile cache on disk.
        full_bytes: bytes of all entries (keys and values) of the prompts, uncompressed.
        kept_bytes: bytes of the entries kept on the device after prefill, as stored. Like full_bytes, without headroom,
            positions, scores and tables.
        cache_bytes: bytes of the whole cache after prefill, positions and tables included.
        allocated_bytes: bytes of the cache at the end, headroom included.
        kept: entries per kv head and layer on the device after prefill, averaged.
        attention: name of the attention implementation.
        layout: layout of segments in the pools, which determines the formulation of decode attention.
        decode_steps: number of decode steps; each samples a token of every active sequence.
        host_bytes: bytes of the cache in host memory.
        transfers: number of transfers of entries from host memory to the device during decoding; on a mesh, to each
            device of this process.
        transferred_bytes: bytes of these transfers.
        loaded_bytes: bytes of whole layers that a prompt on top of the cache loaded to the device before decoding.
        filter_layers: indices of layers that select which entries other layers attend to.
        moved_entries: entries kept in heads of another device than the one where they scored best, because of the
            policy's `capacity`, over all sequences; 0 without a mesh.
        evicted_above_threshold: entries with scores above the policy's `threshold` that were evicted because the budget
            was full, over all sequences, layers and kv heads, decoding included; 0 without a threshold.
        raised_budgets: number of prompts whose budget, a fraction of the prompt, was below the always-kept entries and
            was raised to their number.
    """

    prompt_tokens: int
    new_tokens: int
    prefill_seconds: float
    decode_seconds: float
    compile_seconds: float
    compiled_programs: int
    full_bytes: int
    kept_bytes: int
    cache_bytes: int
    allocated_bytes: int
    kept: float
    attention: str
    layout: str
    decode_steps: int
    host_bytes: int = 0
    transfers: int = 0
    transferred_bytes: int = 0
    loaded_bytes: int = 0
    filter_layers: tuple[int, ...] = ()
    moved_entries: int = 0
    evicted_above_threshold: int = 0
    raised_budgets: int = 0

    def __repr__(self) -> str:
        """Return a one-line summary of tokens, seconds, speed and cache size."""
        cache = f"{self.full_bytes / 1e6:.2f} MB full, {self.kept_bytes / 1e6:.2f} MB kept"
        cache += f" in {self.cache_bytes / 1e6:.2f} MB of memory"
        speed = f"{self.decode_tokens_per_second:.1f} tokens/s"
        return (
            f"Stats({self.prompt_tokens} prompt tokens in {self.prefill_seconds:.2f} s; {self.new_tokens} new ones at "
            f"{speed}; {self.compile_seconds:.2f} s of it compiling; {cache}, {self.kept:.1f} entries per kv head)"
        )

    @property
    def decode_tokens_per_second(self) -> float:
        """Tokens sampled per second of decoding, over all sequences; a first call includes compilation."""
        return self.new_tokens / self.decode_seconds if self.decode_seconds > 0 else 0.0

    @property
    def slack_bytes(self) -> int:
        """Bytes within `cache_bytes` that hold no entry, such as headroom, padding, positions, scores and tables."""
        return self.cache_bytes - self.kept_bytes

    @property
    def transfers_per_step(self) -> float:
        """Mean number of transfers from host memory per decode step."""
        return self.transfers / max(1, self.decode_steps)

    @property
    def transferred_bytes_per_step(self) -> float:
        """Mean number of bytes transferred from host memory per decode step."""
        return self.transferred_bytes / max(1, self.decode_steps)


# Arrays have no single truth value, so results are equal only to themselves.
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class TokenLogprobs:
    """Natural log-probabilities of an answer's or prompt's n tokens, and of the k likeliest tokens in place of each.

    Those of the model's own logits: before penalties, biases and temperature.

    Attributes:
        token_logprobs: of the tokens.
        top_ids: ids of the likeliest tokens, in descending order.
        top_logprobs: of these.
    """

    token_logprobs: Float[np.ndarray, " n"]
    top_ids: Int[np.ndarray, "n k"]
    top_logprobs: Float[np.ndarray, "n k"]

    @classmethod
    def from_tokens(cls, scored: Sequence[ScoredToken]) -> "TokenLogprobs | None":
        """Build them from scored tokens; None without any."""
        if not scored:
            return None
        ids, values = (np.asarray(each) for each in zip(*scored, strict=True))
        values = values.astype(np.float32)
        return cls(token_logprobs=values[:, 0], top_ids=ids[:, 1:], top_logprobs=values[:, 1:])

    def to_lists(self) -> dict[str, list[Any]]:
        """Return the arrays as a dict of lists by name, for JSON."""
        return {name: array.tolist() for name, array in vars(self).items()}


# Arrays have no single truth value, so results are equal only to themselves.
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Completion:
    """Answer to one prompt of a `generate` call: text, token ids, finish reason, stop string, log-probabilities.

    Attributes:
        text: the answer; None without a tokenizer.
        tokens: ids of the sampled tokens, `i32[n]`, including the token that ended the answer.
        finish_reason: "stop" at an end-of-answer token or a stop string, "length" after `max_new_tokens` tokens.
        stop_reason: the stop string that ended the answer; None for an end-of-answer token or "length".
        logprobs: log-probabilities of the tokens; None unless the `Sampling` asks for them.
        prompt_logprobs: those of the prompt's tokens from the second on; None unless the `Sampling` asks for them.
    """

    text: str | None
    tokens: Int[np.ndarray, " n"]
    finish_reason: FinishReason
    stop_reason: str | None = None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: TokenLogprobs | None = None

    def __repr__(self) -> str:
        """Return a one-line summary: text or token ids, number of tokens, finish reason."""
        shown = (
            f"tokens={shorten_text(str(self.tokens.tolist()))}"
            if self.text is None
            else repr(shorten_text(self.text))
        )
        ended = (
            self.finish_reason
            if self.stop_reason is None
            else f"{self.finish_reason} at {self.stop_reason!r}"
        )
        return f"Completion({shown}, {len(self.tokens)} tokens, {ended})"


# Arrays have no single truth value, so results are equal only to themselves.
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Generation:
    """Result of `generate`: a sequence with one `Completion` per prompt, plus the cache and statistics.

    For a single prompt, no index is needed: `out.text` is `out[0].text`. With several prompts, `text`,
    `tokens`, `finish_reason`, `stop_reason`, `logprobs` and `prompt_logprobs` raise an AttributeError.

    Attributes:
        completions: one `Completion` per prompt, in order.
        cache: the cache after the answers, for the next turn.
        stats: seconds, bytes and entries.
    """

    completions: tuple[Completion, ...]
    cache: KVCache
    stats: Stats

    @property
    def text(self) -> str | None:
        """Text of the answer to the only prompt; None without a tokenizer; AttributeError for several prompts."""
        return self._get_only_completion("text").text

    @property
    def tokens(self) -> Int[np.ndarray, " n"]:
        """Sampled ids `i32[n]` of the only prompt, an end token included; AttributeError for several prompts."""
        return self._get_only_completion("tokens").tokens

    @property
    def finish_reason(self) -> FinishReason:
        """Why the answer to the only prompt ended, "stop" or "length"; AttributeError for several prompts."""
        return self._get_only_completion("finish_reason").finish_reason

    @property
    def stop_reason(self) -> str | None:
        """Stop string that ended the only prompt's answer, None if none did; AttributeError for several prompts."""
        return self._get_only_completion("stop_reason").stop_reason

    @property
    def logprobs(self) -> TokenLogprobs | None:
        """`TokenLogprobs` of the only prompt's answer, None if not asked for; AttributeError for several prompts."""
        return self._get_only_completion("logprobs").logprobs

    @property
    def prompt_logprobs(self) -> TokenLogprobs | None:
        """`TokenLogprobs` of the only prompt's tokens but the first; AttributeError for several prompts."""
        return self._get_only_completion("prompt_logprobs").prompt_logprobs

    def _get_only_completion(self, name: str) -> Completion:
        """Return the `Completion` of the only prompt; for several raise an AttributeError that names `name`."""
        if len(self.completions) > 1:
            count = len(self.completions)
            raise AttributeError(f"{name}: of {count} completions. Use out[0].{name}, or iterate.")
        return self.completions[0]

    def __len__(self) -> int:
        """Return the number of completions, one per prompt."""
        return len(self.completions)

    @overload
    def __getitem__(self, at: SupportsIndex) -> Completion: ...
    @overload
    def __getitem__(self, at: slice) -> tuple[Completion, ...]: ...
    def __getitem__(self, at: SupportsIndex | slice) -> Completion | tuple[Completion, ...]:
        """Return the `Completion` of the prompt at an index, or a tuple of completions for a slice.

        Args:
            at: index, negative ones from the end, or slice.

        Returns:
            The completion, or a tuple of completions.
        """
        return self.completions[at]

    def __iter__(self) -> Iterator[Completion]:
        """Iterate over the completions of the prompts."""
        return iter(self.completions)

    def __repr__(self) -> str:
        """Return a one-line summary: the answer's text or the number of answers, the number of tokens, the cache."""
        tokens = sum(len(each.tokens) for each in self)
        text = self[0].text
        shown = f"{tokens} tokens"
        if len(self) > 1:
            shown = f"{len(self)} answers, {shown}"
        elif text is not None:
            shown = f"text={shorten_text(text)!r}, {shown}"
        return f"Generation({shown}; {self.cache!r})"


class Stream(Iterator[Any]):
    """Iterator over generated text: an item is the new text of 1 or n tokens, for several prompts a list of such texts.

    With `stream_interval=n` an item is the text of n tokens. An item is empty if its tokens complete no character or
    may begin a stop string.

    Attributes:
        result: the `Generation`, set after the last item; None before.
    """

    def __init__(self, pieces: Generator[list[str], None, Generation], single: bool):
        self.result: Generation | None = None
        self._pieces = pieces
        self._single = single

    def __next__(self) -> Any:
        """Return the next new text, for several prompts a list; at the end store the `Generation` in `result`."""
        try:
            with use_package_jax_settings():
                piece = next(self._pieces)
        except StopIteration as end:
            self.result = end.value if end.value is not None else self.result
            raise StopIteration from None
        return piece[0] if self._single else piece


class AnswerCollector:
    """Collector of token ids and text of each sequence during sampling; cuts text at stop strings.

    Attributes:
        tokens: ids of each sequence so far.
        met: the stop string in each sequence's text; None without one.
        scored: ids and log-probabilities of each sequence per token, the token's own first; empty if not asked for.
    """

    def __init__(
        self,
        text: ChatTokenizer | None,
        batch: int,
        stops: Sequence[str],
        kept: Sequence[Collection[str]],
        top: int | None = None,
    ):
        self.tokens: list[list[int]] = [[] for _ in range(batch)]
        self.met: list[str | None] = [None] * batch
        self._decoders = [
            None if text is None else StreamDecoder(text, each) for each in kept or [()] * batch
        ]
        self._text = [""] * batch
        self._shown = [0] * batch
        self._stops = tuple(stops)
        self.scored: list[list[ScoredToken]] = [[] for _ in range(batch)]
        # Log-probabilities per token: its own, and those of the likeliest tokens.
        self._scores = 0 if top is None else 1 + top

    @property
    def stopped_sequences(self) -> Bool[np.ndarray, " B"]:
        """Mask `bool[B]` of sequences whose text contains a stop string."""
        return np.asarray([stop is not None for stop in self.met], bool)

    def append_token_ids(
        self, sampled: Int[np.ndarray, "B n"], logprobs: Any = None
    ) -> Int[np.ndarray, " B"]:
        """Append sampled ids `[B, n]` (-1: none) up to a stop string; return the number `[B]` of ids after it.

        `logprobs` are their `SampledLogprobs` on the host, or None.
        """
        surplus = np.zeros(len(self.tokens), np.int64)
        for row, ids in enumerate(sampled.tolist()):
            fresh = [token for token in ids if token >= 0]
            for used, token in enumerate(fresh, start=1):
                if self._scores:
                    at = np.s_[row, used - 1, : self._scores]
                    scored = logprobs.ids[at].tolist(), logprobs.values[at].tolist()
                    self.scored[row].append(scored)
                if self._append_token(row, token):
                    surplus[row] = len(fresh) - used
                    break
        return surplus

    def take_new_text(self) -> list[str]:
        """Return each sequence's new text since the last call, without a suffix that may begin a stop string."""
        return [self._take_unshown_text(row) for row in range(len(self.tokens))]

    def flush_text(self) -> list[str]:
        """Finish decoding; return each sequence's remaining text, including suffixes that might begin a stop string."""
        for row, decoder in enumerate(self._decoders):
            if decoder is not None and self.met[row] is None:
                self._text[row] += decoder.flush_text()
        return [self._take_unshown_text(row, whole=True) for row in range(len(self.tokens))]

    def build_completions(
        self, eos: Container[int], prompts: Iterable[Sequence[ScoredToken]] = ()
    ) -> list[Completion]:
        """Return the `Completion` of each sequence; `eos` are the ids that end one, `prompts` the prompts' tokens."""
        completions = []
        before = itertools.chain(prompts, itertools.repeat(()))
        for ids, stop, text, decoder, scored, prompt in zip(
            self.tokens, self.met, self._text, self._decoders, self.scored, before, strict=False
        ):
            ended = stop is not None or any(each in eos for each in ids[-1:])
            completions.append(
                Completion(
                    text=None if decoder is None else text,
                    tokens=np.asarray(ids, np.int32),
                    finish_reason="stop" if ended else "length",
                    stop_reason=stop,
                    logprobs=TokenLogprobs.from_tokens(scored),
                    prompt_logprobs=TokenLogprobs.from_tokens(prompt[1:]),
                )
            )
        return completions

    def _append_token(self, row: int, token: int) -> bool:
        """Append one id to a sequence; return True if its text now contains a stop string, at which it is cut."""
        self.tokens[row].append(token)
        decoder = self._decoders[row]
        if decoder is None:
            return False
        self._text[row] += decoder.push_ids([token])
        matches = [(at, stop) for stop in self._stops if (at := self._text[row].find(stop)) >= 0]
        if matches:
            # Of two stop strings at one place, the first in the list wins.
            at, self.met[row] = min(matches, key=operator.itemgetter(0))
            self._text[row] = self._text[row][:at]
        return bool(matches)

    def _take_unshown_text(self, row: int, *, whole: bool = False) -> str:
        """Return a sequence's text not yet returned, up to a suffix that may begin a stop string unless `whole`."""
        text = self._text[row]
        end = len(text)
        if not whole and self.met[row] is None:
            # Hold back a suffix that may be the beginning of a stop string.
            end -= max(
                (n for stop in self._stops for n in range(1, len(stop)) if text.endswith(stop[:n])),
                default=0,
            )
        piece = text[self._shown[row] : end]
        self._shown[row] = max(end, self._shown[row])
        return piece
