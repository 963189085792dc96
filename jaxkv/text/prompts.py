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

# Separates a cached text with an open user turn from the question, which would otherwise continue its last line.
_BLANK_LINE = "\n\n"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Encoded:
    """A batch of prompts as token ids (`ids`), with the conversation's state after each prompt (`turns`, of `Turn`).

    Attributes:
        ids: one list per sequence, none empty.
        single: True for one prompt, not a list of prompts.
        turns: turn of each sequence's conversation after its prompt.
        unclosed: for each sequence, True for text or messages with an open user turn; always False for ids.
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
        """Return this batch with `count` more copies of its last prompt at the end."""
        return dataclasses.replace(
            self,
            ids=self.ids + self.ids[-1:] * count,
            turns=self.turns + self.turns[-1:] * count,
            unclosed=self.unclosed + self.unclosed[-1:] * count,
        )

    def padded(self, slots: int) -> Int[np.ndarray, "B S"]:
        """Return the token ids as one int32 array `[B, slots]`, padded on the right with zeros."""
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
        prompt: text (a user message if the model has a chat template), chat messages, token ids, or a list of any.
        text: the model's tokenizer; None allows only token ids.
        config: config of the model, for the size of the vocabulary.
        turn: turn of the conversation before the prompt; one for all sequences, or one for each. In an open user turn,
            text follows after a blank line, unless it begins with a line break.
        raw: True if text is plain text, not a message.
        close: True to end the user's turn and open the answer's.

    Returns:
        The ids and the turns after them.

    Raises:
        ValueError: for an empty prompt, ids outside of the vocabulary, or text without a tokenizer.
        TypeError: for anything that is not a prompt.
    """
    single, items = _split(prompt)
    require(bool(items), "prompt", prompt, "no prompt: use at least one")
    turns = turn if isinstance(turn, tuple) else (turn,) * len(items)
    held = f"the cache holds {len(turns)} sequences: use as many prompts, or a cache of 1"
    require(len(turns) == len(items), "prompt", f"{len(items)} prompts", held)
    results = [
        _encode_one(item, text, turn=at, raw=raw, close=close)
        for item, at in zip(items, turns, strict=True)
    ]
    for row, (ids, _) in enumerate(results):
        require(bool(ids), "prompt", items[row], f"prompt {row} has no tokens: use at least one")
        low, high = min(ids), max(ids)
        require(
            low >= 0 and high < config.vocab,
            "prompt",
            (low, high),
            f"token ids out of range: use ids in [0, {config.vocab})",
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
    """Raise a TypeError for a value that is not a prompt, with a remedy."""
    remedy = "not a prompt: use text, chat messages, token ids, or a list of them"
    if isinstance(given, Mapping):
        remedy = (
            "not a prompt: use prompt['input_ids']"
            if "input_ids" in given
            else f"{remedy}: [message]"
        )
    raise TypeError(f"prompt={type(given).__name__}: {remedy}")


def _listed(given: Any) -> str | list[Any]:
    """Convert a prompt, or several, to a str or list: arrays and other sequences become lists; reject other values."""
    if hasattr(given, "tolist") and not isinstance(given, memoryview):
        given = given.tolist()
    if isinstance(given, str):
        return str.__str__(given)
    if isinstance(given, (bytes, bytearray, memoryview)) or not isinstance(given, Sequence):
        _refuse(given)
    return list(given)


def _split(prompt: Prompt) -> tuple[bool, list[Any]]:
    """Return True if `prompt` is a single prompt, and the list of prompts (of one if single)."""
    items = _listed(prompt)
    first = items[0] if items else None
    single = isinstance(items, str) or isinstance(first, Mapping) or _is_id(first)
    return single, [items] if single else list(items)


def _is_id(value: Any) -> bool:
    """True if `value` is an integer scalar of Python, NumPy or JAX, as token ids are; False for a bool."""
    # Ints take a short path, because prompts have many of them.
    return is_whole(value if isinstance(value, int) else plain(value), -math.inf)


def _encode_one(
    item: Any, text: Text | None, *, turn: Turn, raw: bool, close: bool
) -> tuple[list[int], Turn]:
    """Encode one prompt (text, messages or ids); return ids and the conversation's `Turn` after it."""
    items = _listed(item)
    if not items:
        return [], turn
    if not isinstance(items, str) and all(map(_is_id, items)):
        return [int(each) for each in items], Turn.RAW
    if not isinstance(items, str) and not all(isinstance(each, Mapping) for each in items):
        _refuse(items)
    if text is None:
        remedy = "the checkpoint has no tokenizer: use token ids"
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
    """Raise ValueError for messages that do not end with a user's text, or cannot continue a cache."""
    require(not raw, "raw", raw, "messages are not plain text: leave it out, or use text")
    remedy = "the model has no chat template: use text"
    require(text.has_template, "prompt", items[:1], remedy)
    remedy = 'not a text of the user: end with {"role": "user", "content": "..."}'
    require(_is_users(items[-1]), "prompt", dict(items[-1]), remedy)
    remedy = "the cache has the earlier messages: use one user message"
    if turn is Turn.USER:
        remedy = "the cache has the beginning of the user's turn: continue with its end"
    fits = _is_users(items[0]) and (turn is Turn.USER or len(items) == 1)
    require(turn is Turn.START or fits, "prompt", len(items), remedy)


def _is_users(message: Message) -> bool:
    """True for a text of the user."""
    return message.get("role") == "user" and isinstance(message.get("content"), str)


def rendered(
    messages: Sequence[Message], text: Text, *, turn: Turn, close: bool, parted: bool = True
) -> str:
    """Render what messages add to a conversation, with special tokens in their texts shielded.

    Args:
        messages: the messages, the last a text of the user; in an open user turn, the first continues it.
        text: the model's tokenizer, with a chat template.
        turn: turn of the conversation before them: `START`, `USER` or `ANSWER`.
        close: True to end the user's turn and open the answer's.
        parted: in an open user turn, True to start with a blank line unless there is a line break.

    Returns:
        The text, for `Text.encode(shielded=True)`.
    """
    told, skipped = text.shielded(list(messages)), turn is not Turn.START
    if turn is Turn.USER:
        content = told[0]["content"]
        before = "" if not parted or content.startswith(("\n", "\r")) else _BLANK_LINE
        told[0] = user(EDGE + before + content)
    if turn is Turn.ANSWER:
        if text.rewrites_answers:
            said = "the chat template renders earlier answers differently, such as without reasoning; the cache has "
            said += "them as sampled: to change that, render all messages again."
            warn_once(UserWarning, "rewrites_answers", f"cache: {said}")
        told = [user("?"), answer(EDGE), *told]
    # New text is after the first `EDGE`, unless the conversation starts.
    if close:
        return text.parts(told, generation_prompt=True, edges=skipped)[skipped]
    told[-1] = {**told[-1], "content": told[-1]["content"] + EDGE}
    return text.parts(told, generation_prompt=False, edges=skipped + 1)[skipped]
