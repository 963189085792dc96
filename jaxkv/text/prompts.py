"""Encodes prompts (text, chat messages or ids, one or many) to token ids and the conversation's state after each."""

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import numpy as np
from jaxtyping import Int

from jaxkv._checks import is_int_at_least, to_python_scalar, warn_once
from jaxkv._dataclasses import frozen_dataclass
from jaxkv._errors import build_value_error, require
from jaxkv.cache import ConversationState
from jaxkv.models.config import ModelConfig
from jaxkv.text.chat import Chat
from jaxkv.text.control_tokens import EDGE
from jaxkv.text.tokenizer import ChatTokenizer, Message, make_assistant_message, make_user_message

Prompt = str | Sequence[Any] | np.ndarray | Any

# Tokens of a question that an observation window holds.
LONGEST_QUESTION = 128
# Separates a cached text with an open user turn from the question, which would otherwise continue its last line.
_BLANK_LINE = "\n\n"


@frozen_dataclass
class EncodedPrompts:
    """A batch of prompts as token ids (`ids`), with the state of each conversation after its prompt (`turns`).

    Attributes:
        ids: one list per sequence, none empty.
        single: True for one prompt, not a list of prompts.
        turns: turn of each sequence's conversation after its prompt.
        unclosed: for each sequence, True for text or messages with an open user turn; always False for ids.
        kept: for each sequence, special tokens that its answer's text keeps; empty if all leave them out.
    """

    ids: list[list[int]]
    single: bool
    turns: tuple[ConversationState, ...]
    unclosed: tuple[bool, ...] = ()
    kept: tuple[tuple[str, ...], ...] = ()

    @property
    def conversation_state(self) -> ConversationState | tuple[ConversationState, ...]:
        """`ConversationState` after the prompts if all sequences have the same; else a tuple with one per sequence."""
        return self.turns[0] if len(set(self.turns)) == 1 else self.turns

    @property
    def prompt_lengths(self) -> Int[np.ndarray, " B"]:
        """Number of tokens of each prompt, int32 `[B]`."""
        return np.asarray([len(ids) for ids in self.ids], np.int32)

    def repeat_last_prompt(self, count: int) -> "EncodedPrompts":
        """Return a copy of the batch of prompts, its last prompt repeated `count` more times."""
        return dataclasses.replace(
            self,
            ids=self.ids + self.ids[-1:] * count,
            turns=self.turns + self.turns[-1:] * count,
            unclosed=self.unclosed + self.unclosed[-1:] * count,
            kept=self.kept + self.kept[-1:] * count,
        )

    def pad_ids(self, slots: int) -> Int[np.ndarray, "B S"]:
        """Return the prompts' token ids as int32 `[B, slots]`, padded on the right with zeros."""
        out = np.zeros((len(self.ids), slots), np.int32)
        for row, ids in enumerate(self.ids):
            out[row, : len(ids)] = ids
        return out


def encode_prompts(
    prompt: Prompt,
    text: ChatTokenizer | None,
    config: ModelConfig,
    *,
    turn: ConversationState | tuple[ConversationState, ...] = ConversationState.START,
    raw: bool = False,
    close: bool,
) -> EncodedPrompts:
    """Encode one prompt or a list as `EncodedPrompts`: token ids, and each conversation's state after its prompt.

    Args:
        prompt: text (a user message if the model has a chat template), chat messages, a `Chat`, token ids, or a list
            of any.
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
    single, items = _list_prompts(prompt)
    require(bool(items), "prompt", prompt, "no prompt: use at least one")
    turns = turn if isinstance(turn, tuple) else (turn,) * len(items)
    held = f"the cache holds {len(turns)} sequences: use as many prompts, or a cache of 1"
    require(len(turns) == len(items), "prompt", f"{len(items)} prompts", held)
    results = [
        _encode_prompt(item, text, turn=at, raw=raw, close=close)
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
    return EncodedPrompts(
        ids=[ids for ids, _ in results],
        single=single,
        turns=tuple(after for _, after in results),
        unclosed=tuple(
            not close and (after is ConversationState.USER or isinstance(item, str))
            for item, (_, after) in zip(items, results, strict=True)
        ),
        kept=tuple(item.kept_special_tokens if isinstance(item, Chat) else () for item in items),
    )


def choose_question_window(prompt: Prompt, text: ChatTokenizer | None, *, raw: bool) -> int:
    """Return the least power of two, from 8 to 128, that holds each prompt's question: its last paragraph, turn's end.

    Args:
        prompt: as for `encode_prompts`, which has checked it.
        text: the model's tokenizer.
        raw: True if text is plain text, not a message.

    Returns:
        The number of last tokens.

    Raises:
        ValueError: for token ids.
    """
    most = 8
    for item in _list_prompts(prompt)[1]:
        told = getattr(item, "messages", item)
        last = told[-1]["content"] if isinstance(told[-1], Mapping) else told
        if text is None or not isinstance(last, str):
            remedy = "token ids have no question: give a number of tokens, such as 64"
            raise build_value_error("window", "question", remedy)
        closing = text.turn_texts.closing if text.has_template and not raw else ""
        # A blank line may hold spaces or a carriage return, and end the text, too.
        asked = re.split(r"\n\s*\n", last.strip())[-1]
        asked = text.shield_special_tokens(asked) + closing
        most = max(most, len(text.encode(asked, bos=False, shielded=True)))
    return min(LONGEST_QUESTION, 1 << (most - 1).bit_length())


def _raise_not_a_prompt(given: Any) -> NoReturn:
    """Raise a TypeError for a value that is not a prompt, with a remedy."""
    remedy = "not a prompt: use text, chat messages, a Chat, token ids, or a list of them"
    if isinstance(given, Mapping):
        remedy = (
            "not a prompt: use prompt['input_ids']"
            if "input_ids" in given
            else f"{remedy}: [message]"
        )
    raise TypeError(f"prompt={type(given).__name__}: {remedy}")


def _convert_to_list(given: Any) -> str | list[Any]:
    """Return one prompt or several as a str if text, else as a list, also from arrays; TypeError for other values."""
    if hasattr(given, "tolist") and not isinstance(given, memoryview):
        given = given.tolist()
    if isinstance(given, str):
        return str.__str__(given)
    if isinstance(given, (bytes, bytearray, memoryview)) or not isinstance(given, Sequence):
        _raise_not_a_prompt(given)
    return list(given)


def _list_prompts(prompt: Prompt) -> tuple[bool, list[Any]]:
    """Return two values: True if `prompt` is a single prompt, not a list of prompts; and the list of prompts."""
    if isinstance(prompt, Chat):
        return True, [prompt]
    items = _convert_to_list(prompt)
    first = items[0] if items else None
    single = isinstance(items, str) or isinstance(first, Mapping) or _is_token_id(first)
    return single, [items] if single else list(items)


def _is_token_id(value: Any) -> bool:
    """True if `value` is an integer scalar of Python, NumPy or JAX, as token ids are; False for a bool."""
    # Ints take a short path, because prompts have many of them.
    return is_int_at_least(value if isinstance(value, int) else to_python_scalar(value), -math.inf)


def _encode_prompt(
    item: Any, text: ChatTokenizer | None, *, turn: ConversationState, raw: bool, close: bool
) -> tuple[list[int], ConversationState]:
    """Encode one prompt (text, messages or ids); return its token ids and the conversation's state after it."""
    items: Any = list(item.messages) if isinstance(item, Chat) else _convert_to_list(item)
    if not items:
        return [], turn
    if not isinstance(items, str) and all(map(_is_token_id, items)):
        return [int(each) for each in items], ConversationState.RAW
    if not isinstance(items, str) and not all(isinstance(each, Mapping) for each in items):
        _raise_not_a_prompt(items)
    if text is None:
        remedy = "the checkpoint has no tokenizer: use token ids"
        raise build_value_error("prompt", items[:40], remedy)
    if isinstance(items, str):
        if raw or turn is ConversationState.RAW or not text.has_template:
            given = items if raw else text.shield_special_tokens(items)
            return text.encode(
                given, bos=turn is ConversationState.START, shielded=not raw
            ), ConversationState.RAW
        chat = Chat(messages=[make_user_message(items)])
    else:
        chat = item if isinstance(item, Chat) else Chat(messages=items)
        _check_chat(chat, text, turn=turn, raw=raw, close=close)
        if turn is ConversationState.RAW:
            return _encode_prompt(items[0]["content"], text, turn=turn, raw=raw, close=close)
    told = render_added_messages(chat, text, turn=turn, close=close)
    return text.encode(
        told, bos=False, shielded=True
    ), ConversationState.ANSWER if close else ConversationState.USER


def _check_chat(
    chat: Chat, text: ChatTokenizer, *, turn: ConversationState, raw: bool, close: bool
) -> None:
    """Raise ValueError for a chat with `raw`, without a template, ended by another role, or unfit for a cache."""
    items = chat.messages
    require(not raw, "raw", raw, "messages are not plain text: leave it out, or use text")
    remedy = "the model has no chat template: use text"
    require(text.has_template, "prompt", items[:1], remedy)
    remedy = 'not a text of the user or a tool: end with {"role": "user", "content": "..."}'
    # A question cannot continue the result of a tool.
    ends = _is_text_of("user", items[-1]) or (close and _is_text_of("tool", items[-1]))
    require(ends, "prompt", dict(items[-1]), remedy)
    remedy = "not rendered: give them where the conversation begins, if the model's chat template has tools"
    renders = turn is ConversationState.START and "tools" in (text.template or "")
    require(renders or not chat.tools, "tools", len(chat.tools), remedy)
    remedy = "the cache has the earlier messages: use one user message"
    if turn is ConversationState.USER:
        remedy = "the cache has the beginning of the user's turn: continue with its end"
    fits = _is_text_of("user", items[0]) and (turn is ConversationState.USER or len(items) == 1)
    require(turn is ConversationState.START or fits, "prompt", len(items), remedy)


def _is_text_of(role: str, message: Message) -> bool:
    """True if a message has this role and a text as content."""
    return message.get("role") == role and isinstance(message.get("content"), str)


def render_added_messages(
    chat: Chat,
    text: ChatTokenizer,
    *,
    turn: ConversationState,
    close: bool,
    parted: bool = True,
) -> str:
    """Return the text that a chat adds to a conversation by the chat template, special tokens in its texts shielded.

    Args:
        chat: the messages, the last a text of the user or a tool; in an open user turn, the first continues it.
        text: the model's tokenizer, with a chat template.
        turn: turn of the conversation before them: `START`, `USER` or `ANSWER`.
        close: True to end the user's turn and open the answer's.
        parted: in an open user turn, True to start with a blank line unless there is a line break.

    Returns:
        The text, for `ChatTokenizer.encode(shielded=True)`.
    """
    shield, skipped = text.shield_special_tokens, turn is not ConversationState.START
    given = {name: shield(value) for name, value in chat.template_inputs.items()}
    told = given.pop("messages")
    if turn is ConversationState.USER:
        content = told[0]["content"]
        before = "" if not parted or content.startswith(("\n", "\r")) else _BLANK_LINE
        told[0] = make_user_message(EDGE + before + content)
    if turn is ConversationState.ANSWER:
        if text.rewrites_answers:
            said = "the chat template renders earlier answers differently, such as without reasoning; the cache has "
            said += "them as sampled: to change that, render all messages again."
            warn_once(UserWarning, "rewrites_answers", f"cache: {said}")
        told = [make_user_message("?"), make_assistant_message(EDGE), *told]
    # New text is after the first `EDGE`, unless the conversation starts.
    if close:
        return text.render_and_split(told, edges=skipped, generation_prompt=True, **given)[skipped]
    told[-1] = {**told[-1], "content": told[-1]["content"] + EDGE}
    return text.render_and_split(told, edges=skipped + 1, generation_prompt=False, **given)[skipped]
