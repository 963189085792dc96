"""From what a user gives (text, messages, ids, one or many) to token ids, with the conversation's turn kept."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

from jaxkv._errors import require
from jaxkv.cache import Turn
from jaxkv.config import ModelConfig
from jaxkv.text import Text

Message = Mapping[str, Any]
Prompt = str | Sequence[Any] | np.ndarray | Any

_MARK = "jaxkvlastmessageq"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Encoded:
    """Prompts as ids.

    Attributes:
        ids: one list per sequence, none empty.
        single: the user gave one prompt, not a list of prompts.
        turn: where the conversation stands after them.
    """

    ids: list[list[int]]
    single: bool
    turn: Turn

    @property
    def lengths(self) -> Int[np.ndarray, " B"]:
        """Tokens of each prompt."""
        return np.asarray([len(ids) for ids in self.ids], np.int32)

    def padded(self, slots: int) -> Int[np.ndarray, "B S"]:
        """Ids padded on the right with zeros.

        Args:
            slots: S.

        Returns:
            The ids as one array.
        """
        out = np.zeros((len(self.ids), slots), np.int32)
        for row, ids in enumerate(self.ids):
            out[row, : len(ids)] = ids
        return out


def encode(
    prompt: Prompt, text: Text | None, config: ModelConfig, *, turn: Turn = Turn.START, raw: bool = False, close: bool
) -> Encoded:
    """Turns prompts into ids.

    Args:
        prompt: text (a user message where the model has a chat template), chat messages, token ids, or a list of any.
        text: the model's tokenizer; None allows token ids only.
        config: for the vocabulary's size.
        turn: where the conversation stands before.
        raw: text is plain text, no message.
        close: end the user's turn and open the answer's.

    Returns:
        The ids and the turn after them.

    Raises:
        ValueError: for an empty prompt, ids outside the vocabulary, or text without a tokenizer.
        TypeError: for anything that is no prompt.
    """
    single, items = _split(prompt)
    require(bool(items), "prompt", prompt, "give at least one prompt")
    results = [_one(item, text, turn=turn, raw=raw, close=close) for item in items]
    for row, (ids, _) in enumerate(results):
        require(bool(ids), "prompt", items[row], f"prompt {row} has no tokens: give at least one")
        low, high = min(ids), max(ids)
        require(low >= 0 and high < config.vocab, "prompt", (low, high), f"token ids lie in [0, {config.vocab})")
    return Encoded(ids=[ids for ids, _ in results], single=single, turn=results[0][1])


def _split(prompt: Prompt) -> tuple[bool, list[Any]]:
    if isinstance(prompt, str):
        return True, [prompt]
    if hasattr(prompt, "ndim"):
        array = np.asarray(prompt)
        if array.dtype.kind not in "iu":
            raise TypeError(f"prompt={array.dtype}: token ids are integers")
        require(array.ndim in (1, 2), "prompt", array.shape, "give ids as [S] or [B, S]")
        return array.ndim == 1, [array] if array.ndim == 1 else list(array)
    if isinstance(prompt, Sequence):
        items = list(prompt)
        if items and (isinstance(items[0], Mapping) or isinstance(items[0], (int, np.integer))):
            return True, [items]
        return False, items
    raise TypeError(f"prompt={type(prompt).__name__}: give text, chat messages, token ids, or a list of them")


def _one(item: Any, text: Text | None, *, turn: Turn, raw: bool, close: bool) -> tuple[list[int], Turn]:
    if isinstance(item, str):
        return _text(item, text, turn=turn, raw=raw, close=close)
    items = list(np.asarray(item)) if hasattr(item, "ndim") else list(item) if isinstance(item, Sequence) else None
    if items is not None and all(_is_id(each) for each in items):
        return [int(each) for each in items], Turn.RAW
    if items is not None and items and all(isinstance(each, Mapping) for each in items):
        return _messages(items, text, turn=turn, raw=raw, close=close)
    raise TypeError(f"prompt={type(item).__name__}: give text, chat messages, token ids, or a list of them")


def _is_id(value: Any) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def _text(item: str, text: Text | None, *, turn: Turn, raw: bool, close: bool) -> tuple[list[int], Turn]:
    require(text is not None, "prompt", item[:40], "the checkpoint has no tokenizer: give token ids")
    assert text is not None
    if not item:
        return [], turn
    if raw or not text.has_template or turn is Turn.RAW:
        return text.encode(item, bos=turn is Turn.START), Turn.RAW
    before = text.open_turn() if turn is Turn.START else text.next_turn() if turn is Turn.ANSWER else ""
    after = text.close_turn() if close else ""
    return text.encode(before + item + after, bos=turn is Turn.START), Turn.ANSWER if close else Turn.USER


def _messages(items: list[Message], text: Text | None, *, turn: Turn, raw: bool, close: bool) -> tuple[list[int], Turn]:
    require(
        text is not None and text.has_template and not raw,
        "prompt",
        items[:1],
        "the model has no chat template: give text",
    )
    assert text is not None
    last = items[-1].get("role")
    require(last == "user", "prompt", last, "the last message must be the user's")
    written = isinstance(items[-1].get("content"), str)
    require(written, "prompt", dict(items[-1]), 'give its text: {"role": "user", "content": "..."}')
    if turn is not Turn.START:
        require(
            len(items) == 1, "prompt", len(items), "on top of a cache give one user message: the rest is in the cache"
        )
        return _text(items[0]["content"], text, turn=turn, raw=raw, close=close)
    if close:
        return text.encode(text.chat(items, generation_prompt=True), bos=True), Turn.ANSWER
    # The user's turn stays open: render with a mark behind the last message and cut there.
    marked = [*items[:-1], {**items[-1], "content": items[-1]["content"] + _MARK}]
    rendered = text.chat(marked, generation_prompt=False)
    require(rendered.count(_MARK) == 1, "prompt", "messages", "the chat template repeats or drops the last message")
    return text.encode(rendered.split(_MARK)[0], bos=True), Turn.USER
