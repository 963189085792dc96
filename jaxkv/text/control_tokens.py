"""`SpecialTokenShield`: separates the special tokens that a chat template writes from those that a message spells."""

import copy
import functools
import re
from collections.abc import Mapping
from typing import Any

# Unicode's noncharacters occur in no text: in messages they become replacement characters.
_NONCHARACTERS = re.compile("[\ufdd0-\ufdef]")
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_MARK = "\ufdd0"
EDGE = "\ufdd1"
# After a mark, a private-use character names a special token: spelled by a message, or written by the template.
_SPELLED, _WRITTEN = 0xF0000, 0x100000
_SPELLED_TOKEN = re.compile(f"{_MARK}([{chr(_SPELLED)}-{chr(_WRITTEN - 1)}])")


class SpecialTokenShield:
    """Encoder for one tokenizer that keeps a chat template's special tokens, and encodes those in messages as text.

    `shield_special_tokens` replaces the special tokens that a message spells by private-use characters. The template
    is rendered
    with these, so that all remaining special tokens are the template's; `encode_shielded_text` encodes the rendered
    text accordingly.

    Attributes:
        special: each special token, an `AddedToken`, by its id.
    """

    def __init__(self, tokenizer: Any):
        """Wrap the model's tokenizer; it is copied when the first text spells a special token."""
        self._tokenizer = tokenizer
        decoder = tokenizer.get_added_tokens_decoder()
        self.special = {index: token for index, token in sorted(decoder.items()) if token.special}

    def shield_special_tokens(self, value: Any) -> Any:
        """Return texts (also in dicts, lists), special tokens as private-use characters and U+FDD0-U+FDEF as U+FFFD."""
        if isinstance(value, Mapping):
            shield = self.shield_special_tokens
            return {shield(key): shield(each) for key, each in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.shield_special_tokens(each) for each in value]
        if not isinstance(value, str):
            return value
        return self._replace_special_tokens(_NONCHARACTERS.sub(_REPLACEMENT, value), _SPELLED)

    def encode_shielded_text(self, rendered: str) -> list[int]:
        """Return token ids of text rendered from shielded messages, whose special tokens become plain text."""
        if _MARK not in rendered:
            return self._tokenizer.encode(rendered, add_special_tokens=False).ids
        written = self._replace_special_tokens(rendered, _WRITTEN)
        texts = list(self.special_token_spellings.values())
        text = _SPELLED_TOKEN.sub(lambda match: texts[ord(match[1]) - _SPELLED], written)
        found = self._literal_tokenizer.encode(text, add_special_tokens=False).ids
        return [
            index
            for each in found
            if (index := self._special_ids_by_name_id.get(each, each)) is not None
        ]

    def mark_special_tokens(self, text: str) -> str:
        """Return a template's text with special tokens replaced by their names in `describe_special_tokens`."""
        return self._replace_special_tokens(text, _WRITTEN)

    def describe_special_tokens(self) -> dict[str, tuple[int | None, dict[str, bool]]]:
        """Return a dict from each name that `mark_special_tokens` writes to the special token's id and matching rules.

        The last name, without a token (None), only separates the characters around it.
        """
        named = [
            *((index, _get_matching_rules(token)) for index, token in self.special.items()),
            (None, {"normalized": False}),
        ]
        return {_make_token_name(_WRITTEN, at): each for at, each in enumerate(named)}

    @functools.cached_property
    def special_token_spellings(self) -> dict[str, str]:
        """Dict from each special token's text to one that encodes as plain text: the same, or with a separator."""
        contents = [token.content for token in self.special.values()]
        found = {
            each: self._literal_tokenizer.encode(each, add_special_tokens=False).ids
            for each in contents
        }
        joined = {each for each, ids in found.items() if not self.special.keys().isdisjoint(ids)}
        parting = _make_token_name(_WRITTEN, len(self.special))
        return {
            each: each[:1] + parting + each[1:] if each in joined else each for each in contents
        }

    def _replace_special_tokens(self, text: str, first: int) -> str:
        """Return a text, special tokens replaced by a mark and a private-use character, numbered from `first` on."""
        found = self._special_token_finder.encode(text, add_special_tokens=False)
        pieces, end = [], 0
        for index, (start, stop) in zip(found.ids, found.offsets, strict=True):
            if index == 0:
                continue
            pieces += [text[end:start], _make_token_name(first, index - 1)]
            end = stop
        return "".join([*pieces, text[end:]])

    @functools.cached_property
    def _special_token_finder(self) -> Any:
        """Tokenizer that finds only special tokens: id 0 is other text, id i + 1 the special token of index i."""
        from tokenizers import (
            AddedToken,
            Tokenizer,
            models,
        )  # imported here, because `import jaxkv` needs none

        finder = Tokenizer(models.WordLevel({"": 0}, unk_token=""))
        if self._tokenizer.normalizer is not None:
            finder.normalizer = self._tokenizer.normalizer
        # Whitespace around special tokens is not part of them here.
        found = {"lstrip": False, "rstrip": False}
        finder.add_tokens(
            [
                AddedToken(each.content, **_get_matching_rules(each) | found)
                for each in self.special.values()
            ]
        )
        return finder

    @functools.cached_property
    def _literal_tokenizer(self) -> Any:
        """Copy of the tokenizer that encodes special tokens as text, and their private-use names as single tokens."""
        from tokenizers import AddedToken

        apart = copy.deepcopy(self._tokenizer)
        apart.add_tokens(
            [
                AddedToken(name, **flags)
                for name, (_, flags) in self.describe_special_tokens().items()
            ]
        )
        apart.encode_special_tokens = True
        return apart

    @functools.cached_property
    def _special_ids_by_name_id(self) -> dict[int, int | None]:
        """Dict from a private-use name's id in `_literal_tokenizer` to the special token's id; separator: None."""
        return {
            self._literal_tokenizer.token_to_id(name): index
            for name, (index, _) in self.describe_special_tokens().items()
        }


def _make_token_name(first: int, index: int) -> str:
    """Return the name of the special token of this index: a mark and the private-use character `first + index`."""
    return _MARK + chr(first + index)


def _get_matching_rules(token: Any) -> dict[str, bool]:
    """Return the matching rules of an `AddedToken`, such as "lstrip", as a dict of keyword arguments for a new one."""
    return {
        name: getattr(token, name) for name in ("single_word", "lstrip", "rstrip", "normalized")
    }
