"""Encodes prompts (text, chat messages or ids, one or many) to token ids and the conversation's state after each."""

import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any, NoReturn

import numpy as np
from jaxtyping import Int

from jaxkv._checks import warn_once
from jaxkv._errors import require
from jaxkv.cache import Turn
from jaxkv.models.config import ModelConfig
from jaxkv.text.controls import EDGE
from jaxkv.text.tokenizer import Message, Text, answer, user

Prompt = str | Sequence[Any] | np.ndarray | Any

# Stands between a cached text whose user turn is open and the question, which would else continue its last line.
_BLANK_LINE = "\n\n"
_BYTES = (bytes, bytearray, memoryview)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Encoded:
    """A batch of prompts as token ids (`ids`), with the conversation's state after each prompt (`turns`, of `Turn`).

    Attributes:
        ids: one list per sequence, none empty.
        single: True if the user gave one prompt, not a list of prompts.
        turns: turn of each sequence's conversation after its prompt.
        unclosed: for each sequence, True if it is text or messages whose user turn was left open; always False for ids.
    """

    ids: list[list[int]]
    single: bool
    turns: tuple[Turn, ...]
    unclosed: tuple[bool, ...] = ()

    @property
    def turn(self) -> Turn | tuple[Turn, ...]:
        """The `Turn` (conversation state) that all sequences share; if they differ, a tuple with one per sequence."""
        return self.turns[0] if len(set(self.turns)) == 1 else self.turns

    @property
    def lengths(self) -> Int[np.ndarray, " B"]:
        """Number of tokens of each prompt, int32 `[B]`."""
        return np.asarray([len(ids) for ids in self.ids], np.int32)

    def with_copies(self, count: int) -> "Encoded":
        """Copy of this batch with `count` more copies of its last prompt at the end."""
        return dataclasses.replace(
            self,
            ids=self.ids + self.ids[-1:] * count,
            turns=self.turns + self.turns[-1:] * count,
            unclosed=self.unclosed + self.unclosed[-1:] * count,
        )

    def padded(self, slots: int) -> Int[np.ndarray, "B S"]:
        """Token ids as one int32 array `[B, slots]`, padded on the right with zeros."""
        out = np.zeros((len(self.ids), slots), np.int32)
        for row, ids in enumerate(self.ids):
            out[row, : len(ids)] = ids
        return out


def encode(
    prompt: Prompt,
    text: Text | None,
    config: ModelConfig,
    *,
    turn: Turn | tuple[Turn, ...] = Turn.START,
    raw: bool = False,
    close: bool,
) -> Encoded:
    """Encodes one prompt or a list to an `Encoded`: token ids, and each conversation's state (`Turn`) after its prompt.

    Args:
        prompt: text (a user message where the model has a chat template), chat messages, token ids, or a list of any.
        text: the model's tokenizer; None allows token ids only.
        config: gives the vocabulary's size.
        turn: turn of the conversation before the prompt; one for all sequences, or one for each. In an open turn of the
            user's, text follows after a blank line, unless it begins with a line break.
        raw: text is plain text, not a message.
        close: end the user's turn and open the answer's.

    Returns:
        The ids and the turns after them.

    Raises:
        ValueError: for an empty prompt, ids outside the vocabulary, or text without a tokenizer.
        TypeError: for anything that is not a prompt.
    """
    single, items = _split(prompt)
    require(bool(items), "prompt", prompt, "give at least one prompt")
    turns = turn if isinstance(turn, tuple) else (turn,) * len(items)
    held = f"the cache holds {len(turns)} sequences: give as many prompts, or a cache of 1"
    require(len(turns) == len(items), "prompt", f"{len(items)} prompts", held)
    results = [
        _encode_one(item, text, turn=at, raw=raw, close=close)
        for item, at in zip(items, turns, strict=True)
    ]
    for row, (ids, _) in enumerate(results):
        require(bool(ids), "prompt", items[row], f"prompt {row} has no tokens: give at least one")
        low, high = min(ids), max(ids)
        require(
            low >= 0 and high < config.vocab,
            "prompt",
            (low, high),
            f"token ids lie in [0, {config.vocab})",
        )
    return Encoded(
        ids=[ids for ids, _ in results],
        single=single,
        turns=tuple(after for _, after in results),
        unclosed=tuple(
            not close and (after is Turn.USER or isinstance(item, str))
            for item, (_, after) in zip(items, results, strict=True)
        ),
    )


def _refuse(given: Any) -> NoReturn:
    """Raises a TypeError for a value that is not a prompt, with a hint on what to give instead."""
    remedy = "give text, chat messages, token ids, or a list of them"
    if isinstance(given, _BYTES):
        remedy = 'bytes are neither text nor ids: give prompt.decode("utf-8"), or list(prompt)'
    elif isinstance(given, os.PathLike):
        remedy = "give the file's text: prompt.read_text('utf-8')"
    elif isinstance(given, Mapping):
        ids = "input_ids" in given
        remedy = (
            "give its ids: prompt['input_ids']"
            if ids
            else remedy + "; one message goes into a list: [message]"
        )
    elif isinstance(given, (Iterator, Set)):
        remedy += "; list(prompt) is one, if it is in order and has an end"
    elif isinstance(given, (list, tuple)) and given:
        kinds = ", ".join(sorted({type(each).__name__ for each in given})[:4])
        remedy += f"; this is a list of {kinds}"
    raise TypeError(f"prompt={type(given).__name__}: {remedy}")


def _listed(given: Any) -> str | list[Any]:
    """A prompt, or several, as a plain str or list: arrays and other sequences become lists; refuses other values."""
    if hasattr(given, "ndim") and hasattr(given, "dtype") and not isinstance(given, str):
        array = np.asarray(given)
        if array.dtype.kind not in "UOiu":
            raise TypeError(f"prompt={array.dtype}: token ids are integers")
        require(
            array.dtype.kind in "UO" or array.ndim in (1, 2),
            "prompt",
            array.shape,
            "give ids as [S] or [B, S]",
        )
        given = array.tolist()
    if isinstance(given, str):
        return str.__str__(given)
    if isinstance(given, _BYTES) or not isinstance(given, Sequence):
        _refuse(given)
    return list(given)


def _split(prompt: Prompt) -> tuple[bool, list[Any]]:
    """Two results: True if `prompt` is a single prompt and not several, and the list of prompts (of one if single)."""
    # An empty array is one prompt without ids; an empty list is no prompt.
    empty = (
        getattr(prompt, "ndim", 0) == 1 and not isinstance(prompt, memoryview) and not len(prompt)
    )
    items = _listed(prompt)
    if (
        isinstance(items, str)
        or empty
        or (items and (isinstance(items[0], Mapping) or _is_id(items[0])))
    ):
        return True, [items]
    return False, items


def _encode_one(
    item: Any, text: Text | None, *, turn: Turn, raw: bool, close: bool
) -> tuple[list[int], Turn]:
    """Token ids of one prompt (text, messages or ids), and the conversation's `Turn` after it; refuses other values."""
    items = _listed(item)
    if isinstance(items, str):
        return _encode_text(items, text, turn=turn, raw=raw, close=close)
    if all(_is_id(each) for each in items):
        return [int(each) for each in items], Turn.RAW
    if all(isinstance(each, Mapping) for each in items):
        return _encode_messages(items, text, turn=turn, raw=raw, close=close)
    _refuse(items)


def _is_id(value: Any) -> bool:
    """True if `value` is an integer scalar of Python, numpy or JAX, as a token id is; False for a bool."""
    if isinstance(value, int):
        return not isinstance(value, bool)
    scalar = hasattr(value, "dtype") and getattr(value, "ndim", None) == 0
    return scalar and np.asarray(value).dtype.kind in "iu"


def _encode_text(
    item: str, text: Text | None, *, turn: Turn, raw: bool, close: bool
) -> tuple[list[int], Turn]:
    """Token ids of a text, encoded by `turn` as plain text, a user message or more of one; and the `Turn` after it."""
    require(
        text is not None, "prompt", item[:40], "the checkpoint has no tokenizer: give token ids"
    )
    assert text is not None
    if not item:
        return [], turn
    try:
        item.encode("utf-8")
    except UnicodeEncodeError as error:
        part = item[max(0, error.start - 20) : error.end]
        raise ValueError(
            f"prompt={part!r}: half a character at {error.start}: decode with errors='replace'"
        ) from None
    if raw or not text.has_template or turn is Turn.RAW:
        given = item if raw else text.shielded(item)
        return text.encode(given, bos=turn is Turn.START, shielded=not raw), Turn.RAW
    rendered = user_text(item, text, turn=turn, close=close)
    return text.encode(rendered, bos=False, shielded=True), Turn.ANSWER if close else Turn.USER


def user_text(
    item: str,
    text: Text,
    *,
    turn: Turn,
    close: bool,
    parted: bool = True,
    after: Sequence[Message] = (),
) -> str:
    """Renders what a user's message adds to a conversation, special tokens that it spells shielded.

    Args:
        item: content of the message, or, in the user's turn, more of it.
        text: the model's tokenizer, with a chat template.
        turn: turn of the conversation before it: `START`, `USER` or `ANSWER`.
        close: end the user's turn and open the answer's.
        parted: in the user's turn, begin with a blank line unless there is a line break.
        after: messages after it, in the user's turn.

    Returns:
        The text, of which `Text.encode(shielded=True)` makes ids.
    """
    content = text.shielded(item)
    if turn is Turn.START:
        return _rendered([user(content)], text, turn=turn, close=close)
    if turn is Turn.USER:
        before = "" if not parted or content.startswith(("\n", "\r")) else _BLANK_LINE
        whole = [user(EDGE + before + content), *text.shielded(list(after))]
        return _rendered(whole, text, turn=turn, close=close)
    if text.rewrites_answers:
        told = "the chat template renders earlier answers otherwise, such as without reasoning; the cache holds them"
        warn_once(
            UserWarning,
            "rewrites_answers",
            f"cache: {told} as sampled. Render all messages anew to change that.",
        )
    return _rendered([user("?"), answer(EDGE), user(content)], text, turn=turn, close=close)


def _rendered(messages: list[Message], text: Text, *, turn: Turn, close: bool) -> str:
    """Renders shielded messages and cuts out what is new: behind the first `EDGE`, unless the conversation starts."""
    before = turn is not Turn.START
    if close:
        return text.parts(messages, generation_prompt=True, edges=before)[before]
    last = {**messages[-1], "content": messages[-1]["content"] + EDGE}
    return text.parts([*messages[:-1], last], generation_prompt=False, edges=before + 1)[before]


def _encode_messages(
    items: list[Message], text: Text | None, *, turn: Turn, raw: bool, close: bool
) -> tuple[list[int], Turn]:
    """Token ids of chat messages, the last of which must be the user's, and the conversation's `Turn` after them."""
    require(not raw, "raw", raw, "messages are no plain text: leave it out, or give text")
    chats = text is not None and text.has_template
    require(chats, "prompt", items[:1], "the model has no chat template: give text")
    assert text is not None
    last = items[-1].get("role")
    require(last == "user", "prompt", last, "the last message must be the user's")
    written = isinstance(items[-1].get("content"), str)
    require(written, "prompt", dict(items[-1]), 'give its text: {"role": "user", "content": "..."}')
    if turn is not Turn.START:
        (first, *after), open_ = items, turn is Turn.USER
        remedy = "the rest is in the cache: on top of it give one user message"
        if open_:
            remedy = "the cache holds the beginning of the user's turn: give its end first"
        fine = first.get("role") == "user" and isinstance(first.get("content"), str)
        require(fine and (open_ or not after), "prompt", len(items), remedy)
        if not after:
            return _encode_text(first["content"], text, turn=turn, raw=raw, close=close)
        rendered = user_text(first["content"], text, turn=turn, close=close, after=after)
        return text.encode(rendered, bos=False, shielded=True), Turn.ANSWER if close else turn
    rendered = _rendered(text.shielded(items), text, turn=turn, close=close)
    return text.encode(rendered, bos=False, shielded=True), Turn.ANSWER if close else Turn.USER
