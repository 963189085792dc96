"""What `generate` gives back, and how ids become answers on the way."""

import dataclasses
from collections.abc import Generator, Iterator, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Int

from jaxkv._settings import own_settings
from jaxkv._values import shortened
from jaxkv.cache import KVCache
from jaxkv.text.tokenizer import StreamDecoder, Text


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stats:
    """What a generation took. Seconds leave compilation out, which has its own.

    Attributes:
        prompt_tokens: tokens fed, over all sequences.
        new_tokens: tokens drawn, over all sequences.
        prefill_seconds: from ids to the first logits, compression included.
        decode_seconds: drawing tokens, what a stream's reader takes between them left out.
        compile_seconds: tracing and compiling, wherever it happened; 0 where shapes were met before.
        compiled_programs: programs compiled meanwhile, or read from a cache on disk.
        full_bytes: what the sequences' prompts weigh in a full, unpadded cache.
        cache_bytes: what the cache weighs after prefill, room for new rows left out.
        allocated_bytes: what it weighs in the end, room included.
        slack_bytes: part of cache_bytes no row fills.
        kept: rows per kv head and layer on the device after prefill, averaged.
        attention: the implementation that ran.
        layout: how segments lie in the pool, which decides decoding's formulation.
        decode_steps: steps that drew them, each a token of every sequence that had not ended.
        host_bytes: what waits in host memory.
        transfers: transfers of its rows to the device while tokens were drawn, counted where they are made; on a mesh
            those to each of this process' devices.
        transferred_bytes: their bytes.
        loaded_bytes: bytes of whole layers that a prompt on top of the cache brought to the device before.
        filter_layers: layers that chose what others read.
        moved_rows: rows that went to another device's heads than they were best for, because of the policy's
            `capacity`, over all sequences; 0 without a mesh.
        copies: sequences that were run beside those asked for, copies of the last one: where a batch of a size met for
            the first time takes less time filled up to one that programs were compiled for. Seconds are those of all;
            tokens, and bytes but at the height of the run, those of the sequences asked for.
    """

    prompt_tokens: int
    new_tokens: int
    prefill_seconds: float
    decode_seconds: float
    compile_seconds: float
    compiled_programs: int
    full_bytes: int
    cache_bytes: int
    allocated_bytes: int
    slack_bytes: int
    kept: float
    attention: str
    layout: str
    decode_steps: int
    host_bytes: int = 0
    transfers: int = 0
    transferred_bytes: int = 0
    loaded_bytes: int = 0
    filter_layers: tuple[int, ...] = ()
    moved_rows: int = 0
    copies: int = 0

    def __repr__(self) -> str:
        """One line; `dataclasses.asdict` gives everything."""
        cache = f"{self.cache_bytes / 1e6:.2f} of {self.full_bytes / 1e6:.2f} MB kept"
        speed = f"{self.decode_tokens_per_second:.1f} tokens/s"
        return (
            f"Stats({self.prompt_tokens} prompt tokens in {self.prefill_seconds:.2f} s; {self.new_tokens} new ones at "
            f"{speed}; {self.compile_seconds:.2f} s compiling; {cache}, {self.kept:.1f} rows per kv head)"
        )

    @property
    def decode_tokens_per_second(self) -> float:
        """New tokens of all sequences per second of decoding."""
        return self.new_tokens / self.decode_seconds if self.decode_seconds > 0 else 0.0

    @property
    def transfers_per_step(self) -> float:
        """Transfers of a step, which are those of a token: all sequences' rows go together."""
        return self.transfers / max(1, self.decode_steps)

    @property
    def transferred_bytes_per_step(self) -> float:
        """Bytes that they bring, for all sequences."""
        return self.transferred_bytes / max(1, self.decode_steps)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Generation:
    """What `generate` returns; lists where a list of prompts was given.

    Attributes:
        text: the answers, None without a tokenizer.
        tokens: `i32[n]` the tokens drawn, the one that ended the answer included.
        cache: the cache after them, ready for the next turn.
        stats: what it took.
    """

    text: str | list[str] | None
    tokens: np.ndarray | list[np.ndarray]
    cache: KVCache
    stats: Stats

    def __repr__(self) -> str:
        """One line: the answer, or how many there are, and what it left behind."""
        several = isinstance(self.tokens, list)
        tokens = sum(map(len, self.tokens)) if several else len(self.tokens)
        shown = f"{len(self.tokens)} answers, {tokens} tokens" if several else f"{tokens} tokens"
        if isinstance(self.text, str):
            shown = f"text={shortened(self.text)!r}, {shown}"
        return f"Generation({shown}; {self.cache!r})"


class Stream(Iterator[Any]):
    """Yields text as it comes: a string per look, or a list of strings for a list of prompts.

    Attributes:
        result: the whole `Generation`, once the iteration has ended; None before.
    """

    def __init__(self, pieces: Generator[list[str], None, Generation], single: bool):
        self.result: Generation | None = None
        self._pieces = pieces
        self._single = single

    def __next__(self) -> Any:
        """The next piece of text."""
        try:
            with own_settings():
                piece = next(self._pieces)
        except StopIteration as end:
            self.result = end.value if end.value is not None else self.result
            raise StopIteration from None
        return piece[0] if self._single else piece


class Answers:
    """Gathers drawn ids into text, and watches for stop strings.

    Attributes:
        tokens: ids of each sequence so far.
        stopped: `bool[B]` sequences whose text has met a stop string.
    """

    def __init__(self, text: Text | None, batch: int, stops: Sequence[str]):
        self.tokens: list[list[int]] = [[] for _ in range(batch)]
        self.stopped: Bool[np.ndarray, " B"] = np.zeros(batch, bool)
        self._decoders = [None if text is None else StreamDecoder(text) for _ in range(batch)]
        self._text = [""] * batch
        self._shown = [0] * batch
        self._stops = tuple(stops)

    def take(self, drawn: Int[np.ndarray, "B n"]) -> tuple[Int[np.ndarray, " B"], list[str]]:
        """Adds drawn ids.

        Args:
            drawn: new ids of every sequence, -1 behind a sequence's end.

        Returns:
            How many of them lie behind a stop string, per sequence, and the text that can be shown now.
        """
        surplus = np.zeros(len(self.tokens), np.int64)
        for row, ids in enumerate(drawn.tolist()):
            fresh = [token for token in ids if token >= 0]
            for used, token in enumerate(fresh, start=1):
                if self._push(row, token):
                    surplus[row] = len(fresh) - used
                    break
        return surplus, [self._show(row) for row in range(len(self.tokens))]

    def flush(self) -> list[str]:
        """The text held back so far: unfinished characters, and what might have begun a stop string."""
        for row, decoder in enumerate(self._decoders):
            if decoder is not None and not self.stopped[row]:
                self._text[row] += decoder.flush()
        return [self._show(row, all_of_it=True) for row in range(len(self.tokens))]

    @property
    def text(self) -> list[str]:
        """The answers, without stop strings."""
        return list(self._text)

    def _push(self, row: int, token: int) -> bool:
        """Adds one id; whether it completed a stop string."""
        self.tokens[row].append(token)
        decoder = self._decoders[row]
        if decoder is None:
            return False
        self._text[row] += decoder.push([token])
        found = [at for at in (self._text[row].find(stop) for stop in self._stops) if at >= 0]
        if found:
            self._text[row] = self._text[row][: min(found)]
            self.stopped[row] = True
        return bool(found)

    def _show(self, row: int, *, all_of_it: bool = False) -> str:
        text = self._text[row]
        end = len(text)
        if not all_of_it and not self.stopped[row]:
            # What could be the beginning of a stop string is not shown before it turns out not to be.
            end -= max((n for stop in self._stops for n in range(1, len(stop)) if text.endswith(stop[:n])), default=0)
        piece = text[self._shown[row] : end]
        self._shown[row] = max(end, self._shown[row])
        return piece
