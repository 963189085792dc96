"""Encodes prompts (text, chat messages or ids, one or many) to token ids and the conversation's state after each."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import numpy as np
from jaxtyping import Int

from jaxkv._checks import is_whole, plain, warn_once
from jaxkv._errors import invalid, require
from jaxkv.cache import Turn
from jaxkv.models.config import ModelConfig
from jaxkv.text.control_tokens import EDGE
from jaxkv.text.tokenizer import Message, Text, answer, user

Prompt = str | Sequence[Any] | np.ndarray | Any

# Stands between a cached text whose user turn is open and the question, which would else continue its last line.
_BLANK_LINE = "\n\n"


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
    """Encode one prompt or a list to an `Encoded`: token ids, and each conversation's state (`Turn`) after its prompt.

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
            f"token ids are in [0, {config.vocab})",
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
    """Raise a TypeError for a value that is not a prompt, with a hint on what to give instead."""
    remedy = "give text, chat messages, token ids, or a list of them"
    if isinstance(given, Mapping):
        remedy = (
            "give its ids: prompt['input_ids']" if "input_ids" in given else f"{remedy}: [message]"
        )
    raise TypeError(f"prompt={type(given).__name__}: {remedy}")


def _listed(given: Any) -> str | list[Any]:
    """A prompt, or several, as a plain str or list: arrays and other sequences become lists; rejects other values."""
    if hasattr(given, "tolist") and not isinstance(given, memoryview):
        given = given.tolist()
    if isinstance(given, str):
        return str.__str__(given)
    if isinstance(given, (bytes, bytearray, memoryview)) or not isinstance(given, Sequence):
        _refuse(given)
    return list(given)


def _split(prompt: Prompt) -> tuple[bool, list[Any]]:
    """Two results: True if `prompt` is a single prompt and not several, and the list of prompts (of one if single)."""
    items = _listed(prompt)
    first = items[0] if items else None
    single = isinstance(items, str) or isinstance(first, Mapping) or _is_id(first)
    return single, [items] if single else list(items)


def _is_id(value: Any) -> bool:
    """True if `value` is an integer scalar of Python, numpy or JAX, as a token id is; False for a bool."""
    # Of ints, as most are, prompts have many.
    return is_whole(value if isinstance(value, int) else plain(value), -math.inf)


def _encode_one(
    item: Any, text: Text | None, *, turn: Turn, raw: bool, close: bool
) -> tuple[list[int], Turn]:
    """Token ids of one prompt (text, messages or ids), and the conversation's `Turn` after it; rejects other values."""
    items = _listed(item)
    if not items:
        return [], turn
    if not isinstance(items, str) and all(map(_is_id, items)):
        return [int(each) for each in items], Turn.RAW
    if not isinstance(items, str) and not all(isinstance(each, Mapping) for each in items):
        _refuse(items)
    if text is None:
        remedy = "the checkpoint has no tokenizer: give token ids"
        raise invalid("prompt", items[:40], remedy)
    if isinstance(items, str):
        if raw or turn is Turn.RAW or not text.has_template:
            given = items if raw else text.shielded(items)
            return text.encode(given, bos=turn is Turn.START, shielded=not raw), Turn.RAW
        items = [user(items)]
    else:
        _check_messages(items, text, turn=turn, raw=raw)
        if turn is Turn.RAW:
            return _encode_one(items[0]["content"], text, turn=turn, raw=raw, close=close)
    told = rendered(items, text, turn=turn, close=close)
    return text.encode(told, bos=False, shielded=True), Turn.ANSWER if close else Turn.USER


def _check_messages(items: Sequence[Message], text: Text, *, turn: Turn, raw: bool) -> None:
    """Raise ValueError for messages that do not end with a text of the user's, or do not go on from a cache."""
    require(not raw, "raw", raw, "messages are no plain text: leave it out, or give text")
    remedy = "the model has no chat template: give text"
    require(text.has_template, "prompt", items[:1], remedy)
    remedy = 'the last message is a text of the user\'s: {"role": "user", "content": "..."}'
    require(_is_users(items[-1]), "prompt", dict(items[-1]), remedy)
    remedy = "the rest is in the cache: on top of it give one user message"
    if turn is Turn.USER:
        remedy = "the cache holds the beginning of the user's turn: give its end first"
    fits = _is_users(items[0]) and (turn is Turn.USER or len(items) == 1)
    require(turn is Turn.START or fits, "prompt", len(items), remedy)


def _is_users(message: Message) -> bool:
    """True for a text of the user's."""
    return message.get("role") == "user" and isinstance(message.get("content"), str)


def rendered(
    messages: Sequence[Message], text: Text, *, turn: Turn, close: bool, parted: bool = True
) -> str:
    """Render what messages add to a conversation, special tokens that they spell shielded.

    Args:
        messages: the messages, the last a text of the user's; in the user's turn the first is more of it.
        text: the model's tokenizer, with a chat template.
        turn: turn of the conversation before them: `START`, `USER` or `ANSWER`.
        close: end the user's turn and open the answer's.
        parted: in the user's turn, begin with a blank line unless there is a line break.

    Returns:
        The text, of which `Text.encode(shielded=True)` makes ids.
    """
    told, skipped = text.shielded(list(messages)), turn is not Turn.START
    if turn is Turn.USER:
        content = told[0]["content"]
        before = "" if not parted or content.startswith(("\n", "\r")) else _BLANK_LINE
        told[0] = user(EDGE + before + content)
    if turn is Turn.ANSWER:
        if text.rewrites_answers:
            said = "the chat template renders earlier answers otherwise, such as without reasoning; the cache holds "
            said += "them as sampled. Render all messages anew to change that."
            warn_once(UserWarning, "rewrites_answers", f"cache: {said}")
        told = [user("?"), answer(EDGE), *told]
    # What is new stands behind the first `EDGE`, unless the conversation starts.
    if close:
        return text.parts(told, generation_prompt=True, edges=skipped)[skipped]
    told[-1] = {**told[-1], "content": told[-1]["content"] + EDGE}
    return text.parts(told, generation_prompt=False, edges=skipped + 1)[skipped]
