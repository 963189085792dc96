"""`Controls`: tells the special tokens that a chat template writes from those that a message merely spells."""

import copy
import functools
import re
from collections.abc import Mapping
from typing import Any

# Unicode's noncharacters stand in no text: in messages they become replacement characters.
_NONCHARACTERS = re.compile("[\ufdd0-\ufdef]")
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_MARK = "\ufdd0"
EDGE = "\ufdd1"
# Behind a mark, a private-use character names a special token: spelled by a message, or written by the template.
_SPELLED, _WRITTEN = 0xF0000, 0x100000
_SPELLED_TOKEN = re.compile(f"{_MARK}([{chr(_SPELLED)}-{chr(_WRITTEN - 1)}])")


class Controls:
    """Special tokens of a tokenizer, kept apart by who wrote them: the chat template, or the text of a message.

    `shielded` replaces special tokens that a message spells by private-use characters. The template is rendered with
    those, so what then still spells a special token is the template's; `ids` encodes the rendered text accordingly.
    """

    def __init__(self, tokenizer: Any):
        """Take the model's tokenizer; copy it when the first text spells a special token."""
        self._tokenizer = tokenizer
        decoder = tokenizer.get_added_tokens_decoder()
        self._special = {index: token for index, token in sorted(decoder.items()) if token.special}

    def shielded(self, value: Any) -> Any:
        """Text, or texts within mappings and lists, with special tokens replaced by private-use characters."""
        if isinstance(value, Mapping):
            return {key: self.shielded(each) for key, each in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.shielded(each) for each in value]
        if not isinstance(value, str):
            return value
        return self._replaced(_NONCHARACTERS.sub(_REPLACEMENT, value), _SPELLED)

    def ids(self, rendered: str) -> list[int]:
        """Token ids of a text rendered from shielded messages; special tokens that these spell are encoded as text."""
        if _MARK not in rendered:
            return self._tokenizer.encode(rendered, add_special_tokens=False).ids
        written = self._replaced(rendered, _WRITTEN)
        texts = list(self.spellings.values())
        text = _SPELLED_TOKEN.sub(lambda match: texts[ord(match[1]) - _SPELLED], written)
        found = self._apart.encode(text, add_special_tokens=False).ids
        return [index for each in found if (index := self._written.get(each, each)) is not None]

    def marked(self, text: str) -> str:
        """Text of a template in which each special token is replaced by its name, a key of `names`."""
        return self._replaced(text, _WRITTEN)

    def names(self) -> dict[str, tuple[int | None, dict[str, bool]]]:
        """Id of each special token, and how it is found in text, by the name that `marked` writes.

        The last name, of no token (None), only parts the characters around it.
        """
        named = [
            *((index, _flags(token)) for index, token in self._special.items()),
            (None, {"normalized": False}),
        ]
        return {_name(_WRITTEN, at): each for at, each in enumerate(named)}

    @functools.cached_property
    def spellings(self) -> dict[str, str]:
        """Each special token as text, by its content; parted where the model's vocabulary would join it."""
        contents = [token.content for token in self._special.values()]
        found = {each: self._apart.encode(each, add_special_tokens=False).ids for each in contents}
        joined = {each for each, ids in found.items() if not self._special.keys().isdisjoint(ids)}
        parting = _name(_WRITTEN, len(self._special))
        return {
            each: each[:1] + parting + each[1:] if each in joined else each for each in contents
        }

    def _replaced(self, text: str, first: int) -> str:
        """Text with each special token replaced by a mark and a private-use character from `first` on."""
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
        """Tokenizer that finds special tokens alone, by the model's rules: id 0 is other text, then they in order."""
        from tokenizers import (
            AddedToken,
            Tokenizer,
            models,
        )  # here, for `import jaxkv` does without it

        finder = Tokenizer(models.WordLevel({"": 0}, unk_token=""))
        if self._tokenizer.normalizer is not None:
            finder.normalizer = self._tokenizer.normalizer
        # White space around them is not theirs here.
        found = {"lstrip": False, "rstrip": False}
        finder.add_tokens(
            [AddedToken(each.content, **_flags(each) | found) for each in self._special.values()]
        )
        return finder

    @functools.cached_property
    def _apart(self) -> Any:
        """Copy of the tokenizer that reads special tokens as text, and their names as tokens of their own."""
        from tokenizers import AddedToken

        apart = copy.deepcopy(self._tokenizer)
        apart.add_tokens([AddedToken(name, **flags) for name, (_, flags) in self.names().items()])
        apart.encode_special_tokens = True
        return apart

    @functools.cached_property
    def _written(self) -> dict[int, int | None]:
        """Id of the special token for each id that `_apart` gives to a name; None for the name of none."""
        return {self._apart.token_to_id(name): index for name, (index, _) in self.names().items()}


def _name(first: int, index: int) -> str:
    """Name of the special token of an index: a mark and a private-use character."""
    return _MARK + chr(first + index)


def _flags(token: Any) -> dict[str, bool]:
    """How an added token is found in text, as arguments of `AddedToken`."""
    return {
        name: getattr(token, name) for name in ("single_word", "lstrip", "rstrip", "normalized")
    }
