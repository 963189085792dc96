"""`Controls`: separates the special tokens that a chat template writes from those that a message spells."""

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


class Controls:
    """Special tokens of a tokenizer, separated by their author: the chat template, or the text of a message.

    `shielded` replaces the special tokens that a message spells by private-use characters. The template is rendered
    with these, so that all remaining special tokens are the template's; `ids` encodes the rendered text accordingly.
    """

    def __init__(self, tokenizer: Any):
        """Wrap the model's tokenizer; it is copied when the first text spells a special token."""
        self._tokenizer = tokenizer
        decoder = tokenizer.get_added_tokens_decoder()
        self._special = {index: token for index, token in sorted(decoder.items()) if token.special}

    def shielded(self, value: Any) -> Any:
        """Replace special tokens by private-use characters in a text, or in texts within mappings and lists."""
        if isinstance(value, Mapping):
            return {key: self.shielded(each) for key, each in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.shielded(each) for each in value]
        if not isinstance(value, str):
            return value
        return self._replaced(_NONCHARACTERS.sub(_REPLACEMENT, value), _SPELLED)

    def ids(self, rendered: str) -> list[int]:
        """Encode a text rendered from shielded messages; special tokens that these spell are encoded as text."""
        if _MARK not in rendered:
            return self._tokenizer.encode(rendered, add_special_tokens=False).ids
        written = self._replaced(rendered, _WRITTEN)
        texts = list(self.spellings.values())
        text = _SPELLED_TOKEN.sub(lambda match: texts[ord(match[1]) - _SPELLED], written)
        found = self._apart.encode(text, add_special_tokens=False).ids
        return [index for each in found if (index := self._written.get(each, each)) is not None]

    def marked(self, text: str) -> str:
        """Replace each special token of a template's text by its name, a key of `names`."""
        return self._replaced(text, _WRITTEN)

    def names(self) -> dict[str, tuple[int | None, dict[str, bool]]]:
        """Return the id and matching rules of each special token, by the name that `marked` writes.

        The last name, without a token (None), only separates the characters around it.
        """
        named = [
            *((index, _flags(token)) for index, token in self._special.items()),
            (None, {"normalized": False}),
        ]
        return {_name(_WRITTEN, at): each for at, each in enumerate(named)}

    @functools.cached_property
    def spellings(self) -> dict[str, str]:
        """Each special token as text, by its content; separated if the model's vocabulary would join it."""
        contents = [token.content for token in self._special.values()]
        found = {each: self._apart.encode(each, add_special_tokens=False).ids for each in contents}
        joined = {each for each, ids in found.items() if not self._special.keys().isdisjoint(ids)}
        parting = _name(_WRITTEN, len(self._special))
        return {
            each: each[:1] + parting + each[1:] if each in joined else each for each in contents
        }

    def _replaced(self, text: str, first: int) -> str:
        """Replace each special token of a text by a mark and a private-use character from `first` on."""
        found = self._finder.encode(text, add_special_tokens=False)
        pieces, end = [], 0
        for index, (start, stop) in zip(found.ids, found.offsets, strict=True):
            if index == 0:
                continue
            pieces += [text[end:start], _name(first, index - 1)]
            end = stop
        return "".join([*pieces, text[end:]])

    @functools.cached_property
    def _finder(self) -> Any:
        """Tokenizer that finds only special tokens, by the model's rules: id 0 is other text, then they in order."""
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
            [AddedToken(each.content, **_flags(each) | found) for each in self._special.values()]
        )
        return finder

    @functools.cached_property
    def _apart(self) -> Any:
        """Copy of the tokenizer that reads special tokens as text, and their names as tokens."""
        from tokenizers import AddedToken

        apart = copy.deepcopy(self._tokenizer)
        apart.add_tokens([AddedToken(name, **flags) for name, (_, flags) in self.names().items()])
        apart.encode_special_tokens = True
        return apart

    @functools.cached_property
    def _written(self) -> dict[int, int | None]:
        """Id of the special token by the id of its name in `_apart`; None for the separating name."""
        return {self._apart.token_to_id(name): index for name, (index, _) in self.names().items()}


def _name(first: int, index: int) -> str:
    """Return the name of a special token by index: a mark and a private-use character."""
    return _MARK + chr(first + index)


def _flags(token: Any) -> dict[str, bool]:
    """Return the matching rules of an added token, as arguments of `AddedToken`."""
    return {
        name: getattr(token, name) for name in ("single_word", "lstrip", "rstrip", "normalized")
    }
