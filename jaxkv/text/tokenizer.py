"""`Text`: a checkpoint's tokenizer and chat template; `StreamDecoder`: incremental decoding of token ids to text."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any, NamedTuple

from jaxkv._errors import require
from jaxkv.checkpoints import Checkpoint, GgufTokenizer
from jaxkv.checkpoints.chat_template import read_template, render_template
from jaxkv.checkpoints.json_files import check_size, read_json
from jaxkv.text.control_tokens import EDGE, Controls

Message = Mapping[str, Any]

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# The largest vocabularies, of 260,000 tokens, have 40 MB.
_MOST_TOKENIZER_BYTES = 256 << 20
# An incomplete character decodes to fewer replacement characters; a longer run is real text.
_LONGEST_HELD = 8
_REASONING = "<think>\n{}\n</think>\n\n"


class TurnTexts(NamedTuple):
    """Texts that a chat template writes around messages, and whether it trims whitespace of contents.

    Attributes:
        opening: text before the user's content in a new conversation, with a default system prompt.
        closing: text from the end of the user's content to the start of the assistant's answer.
        between: text from the end of an assistant's answer to the start of the user's next content.
        trims_start: True if whitespace at the start of the user's content is removed.
        trims_end: True if whitespace at its end is removed.
    """

    opening: str
    closing: str
    between: str
    trims_start: bool
    trims_end: bool


class Text:
    """A model's tokenizer and chat template: text to token ids, token ids to text, messages to text.

    Attributes:
        bos_id: id of the beginning-of-sequence token, or None.
        has_template: True if the checkpoint has a chat template.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        specials: Mapping[str, str] | None = None,
        eos_ids: Iterable[int] = (),
        adds_bos: bool = False,
        template: str | None = None,
        origin: str = "text",
    ):
        """Wrap a `tokenizers.Tokenizer` with its special tokens and the source of its chat template, if any.

        Args:
            tokenizer: a `tokenizers.Tokenizer`.
            specials: special tokens for templates, by name: bos_token, eos_token, pad_token, unk_token.
            eos_ids: ids that end an answer, in addition to the eos token.
            adds_bos: True if a prompt starts with the bos token.
            template: Jinja source of the chat template.
            origin: file or folder of the tokenizer, for error messages.
        """
        self._tokenizer = tokenizer
        self._specials = dict(specials or {})
        self._origin = origin
        self._template = template or None
        self.has_template = self._template is not None
        bos, eos = (self._specials.get(f"{kind}_token") for kind in ("bos", "eos"))
        self.bos_id: int | None = None if bos is None else tokenizer.token_to_id(bos)
        self._adds_bos = adds_bos and self.bos_id is not None
        ends = [None if eos is None else tokenizer.token_to_id(eos), *eos_ids]
        self._ends = [each for each in ends if each is not None]
        _mark_special(
            tokenizer, {*self._ends, *map(tokenizer.token_to_id, self._specials.values())}
        )
        self._controls = Controls(tokenizer)

    @functools.cached_property
    def eos_ids(self) -> tuple[int, ...]:
        """Ids of the tokens that end an answer: those that the checkpoint names, and the template's own.

        The template's is the special token after a last message of the assistant. Tokens that the template writes after
        earlier answers count only without another one: in gpt-oss, one of them ends a message of reasoning. The chat
        template runs at the first call.
        """
        try:
            after = self.parts([user("?"), answer(EDGE)], generation_prompt=False, edges=1)[1]
            if not (after or self._ends):
                after = self.turns.between
        except ValueError:
            return tuple(dict.fromkeys(self._ends))
        added = self._tokenizer.get_added_tokens_decoder()
        first = self._tokenizer.encode(after.lstrip(), add_special_tokens=False).ids[:1]
        own = [each for each in first if each in added and added[each].special]
        return tuple(dict.fromkeys([*self._ends, *own]))

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint) -> Text | None:
        """Build the `Text` of an open checkpoint; None if it has no tokenizer.

        Raises:
            ValueError: for a tokenizer of an unsupported kind, by name.
        """
        spec = checkpoint.tokenizer_spec
        if spec is None:
            return None
        return (
            cls._from_gguf(spec, str(checkpoint.path))
            if isinstance(spec, GgufTokenizer)
            else cls._from_folder(spec, checkpoint.config.get("eos_token_id"))
        )

    @classmethod
    def _from_gguf(cls, spec: GgufTokenizer, origin: str) -> Text:
        """Build the `Text` of a GGUF file's vocabulary."""
        ids = {
            "bos_token": spec.bos,
            "eos_token": spec.eos,
            "pad_token": spec.pad,
            "unk_token": spec.unk,
        }
        return cls(
            spec.build(),
            specials={name: spec.tokens[index] for name, index in ids.items() if index is not None},
            eos_ids=[] if spec.eot is None else [spec.eot],
            adds_bos=spec.adds_bos,
            template=spec.chat_template,
            origin=origin,
        )

    @classmethod
    def _from_folder(cls, folder: Path, eos: Any) -> Text:
        """Build the `Text` of a folder in Hugging Face's layout."""
        where = folder / "tokenizer_config.json"
        settings = read_json(where) if where.is_file() else {}
        tokenizer = _load_tokenizer(folder)
        specials = {}
        for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
            token = settings.get(name)
            token = token.get("content") if isinstance(token, dict) else token
            if token is not None:
                specials[name] = token
        adds_bos = settings.get("add_bos_token")
        if adds_bos is None:
            # The tokenizer's own post-processor decides.
            adds_bos = tokenizer.encode("").ids[:1] == [
                tokenizer.token_to_id(specials.get("bos_token", ""))
            ]
        template = read_template(folder, settings)
        return cls(
            tokenizer,
            specials=specials,
            eos_ids=[] if eos is None else eos if isinstance(eos, list) else [eos],
            adds_bos=adds_bos,
            template=template,
            origin=str(folder),
        )

    @property
    def begins_with(self) -> int | None:
        """Id of the bos token at the start of every prompt; None if prompts start without one."""
        return self.bos_id if self._adds_bos else None

    def tokenizer_json(self) -> str:
        """Return the tokenizer as the text of a `tokenizer.json`."""
        return self._tokenizer.to_str()

    def special_tokens(self) -> dict[str, Any]:
        """Return JSON values of special tokens: ids, names and spellings that separate them without this object.

        "special" has the id and properties of each token by its name in `marked_turns`. "spellings" has replacements
        for special tokens in a user's text that the model's vocabulary would otherwise join.
        """
        parted = {each: text for each, text in self._controls.spellings.items() if each != text}
        return {"special": self._controls.names(), "spellings": parted}

    def marked_turns(self) -> list[str | bool]:
        """Return the fields of `turns`, with special tokens replaced by their unique names from `special_tokens`."""
        return [
            self._controls.marked(each) if isinstance(each, str) else each for each in self.turns
        ]

    def encode(self, s: str, *, bos: bool, shielded: bool = False) -> list[int]:
        """Encode a text to token ids; `bos` adds the bos token if prompts have one.

        Args:
            s: the text.
            bos: True to start with the bos token, if the tokenizer adds it and the text lacks it.
            shielded: True for a text from `shielded`, or rendered from one; otherwise special tokens spelled in the
                text become special tokens.

        Raises:
            ValueError: for text that is not Unicode, or that the tokenizer's own rules reject.
        """
        with self._encoding():
            ids = (
                self._controls.ids(s)
                if shielded
                else self._tokenizer.encode(s, add_special_tokens=False).ids
            )
        # A chat template may have written the bos token itself.
        if bos and self._adds_bos and ids[:1] != [self.bos_id]:
            ids = [self.bos_id, *ids]
        return ids

    def shielded(self, value: Any) -> Any:
        """Replace special tokens in a text or messages, so that `encode(shielded=True)` treats them as text.

        Raises:
            ValueError: as `encode`.
        """
        with self._encoding():
            return self._controls.shielded(value)

    def _encoding(self) -> contextlib.AbstractContextManager[None]:
        """Context manager for encoding a user's text."""
        remedy = "use other text, or token ids"
        return _guarded("...", "the tokenizer cannot encode it", remedy, name="prompt")

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Decode token ids to text, by default without special tokens."""
        return self._tokenizer.decode([int(each) for each in ids], skip_special_tokens=skip_special)

    def chat(self, messages: Sequence[Message], *, generation_prompt: bool) -> str:
        """Render a conversation with the chat template; `encode` turns the text into ids.

        Args:
            messages: dictionaries with "role" and "content".
            generation_prompt: True to end with the start of an assistant's answer.

        Returns:
            The text.

        Raises:
            ValueError: without a template, or if the template rejects the messages.
        """
        if self._takes_parts:
            messages = [_in_parts(message) for message in messages]
        return self._render(messages, generation_prompt)

    @functools.cached_property
    def _takes_parts(self) -> bool:
        """True if the template ignores a text as content: templates of some image models accept only lists."""
        return not self._writes(user(EDGE)) and self._writes(_in_parts(user(EDGE)))

    def _writes(self, message: Message) -> bool:
        """True if the chat template accepts a message that contains `EDGE`, and writes it."""
        try:
            return EDGE in self._render([message], False)
        except ValueError:
            return False

    def _render(self, messages: Sequence[Message], generation_prompt: bool) -> str:
        """Render messages with the chat template; ValueError without one, or if it rejects them."""
        if self._template is None:
            raise ValueError(
                f"chat_template=None: {self._origin} has none: encode plain text instead"
            )
        try:
            return render_template(
                self._template,
                messages=messages,
                add_generation_prompt=generation_prompt,
                tools=None,
                documents=None,
                **self._specials,
            )
        except ValueError as error:
            roles = [message.get("role") for message in messages]
            remedy = f"the chat template of {self._origin} rejects these ({error}): change them, or encode plain text"
            raise ValueError(f"messages={roles}: {remedy}") from error

    @functools.cached_property
    def turns(self) -> TurnTexts:
        """Texts that the chat template writes around messages; ValueError if it repeats or omits messages."""
        opening, closing = self.parts([user(EDGE)], generation_prompt=True, edges=1)
        talk = [user("?"), answer(EDGE), user(EDGE)]
        between = self.parts(talk, generation_prompt=True, edges=2)[1]
        padded = self.parts([user(f" {EDGE} ")], generation_prompt=True, edges=1)
        return TurnTexts(opening, closing, between, padded[0] == opening, padded[1] == closing)

    @functools.cached_property
    def rewrites_answers(self) -> bool:
        """True if the template renders an earlier answer differently from its sampled text, such as without reasoning.

        Whitespace does not count: some models sample the space that templates write before an answer.
        """
        turns = self.turns
        written = self.chat([user("?"), answer("."), user("!")], generation_prompt=True)
        sampled = f"{turns.opening}?{turns.closing}.{turns.between}!{turns.closing}"
        reasoning = self.chat(
            [user("?"), answer(_REASONING.format(EDGE) + "."), user("!")], generation_prompt=True
        )
        same = "".join(written.split()) == "".join(sampled.split())
        return not same or EDGE not in reasoning

    def parts(
        self, messages: Sequence[Message], *, generation_prompt: bool, edges: int
    ) -> list[str]:
        """Render messages that contain `EDGE` `edges` times, and split the text there; ValueError if not once each."""
        parts = self.chat(messages, generation_prompt=generation_prompt).split(EDGE)
        remedy = "it does not render each message once, so turns cannot be split: use all messages together, or ids"
        require(len(parts) == edges + 1, "chat_template", self._origin, remedy)
        return parts


class StreamDecoder:
    """Incremental decoder of token ids to text, which holds text back while its last character lacks bytes."""

    def __init__(self, text: Text):
        """Start without ids; the decoded text leaves special tokens out."""
        self._text = text
        # Decoders may treat the first token of a text differently (they drop a leading space). So the ids decoded last
        # are kept before the pending ones, and the new text is what the pending ids add.
        self._context: list[int] = []
        self._pending: list[int] = []

    def push(self, ids: Iterable[int]) -> str:
        """Add token ids and return all text not yet returned; "" while its last character lacks bytes."""
        self._pending += [int(each) for each in ids]
        return self._released(whole=False)

    def flush(self) -> str:
        """End the stream and return the text held back, with replacement characters for incomplete characters."""
        added = self._released(whole=True)
        self._context = []
        return added

    def _released(self, *, whole: bool) -> str:
        """Return the text of the pending ids, which become the context; "" for an incomplete end unless `whole`."""
        before = self._text.decode(self._context)
        added = self._text.decode(self._context + self._pending)[len(before) :]
        held = len(added) - len(added.rstrip(_REPLACEMENT))
        if not added or (0 < held <= _LONGEST_HELD and not whole):
            return ""
        self._context, self._pending = self._pending, []
        return added


def user(content: str) -> Message:
    """Return a message of the user."""
    return {"role": "user", "content": content}


def answer(content: str) -> Message:
    """Return a message of the assistant."""
    return {"role": "assistant", "content": content}


def _in_parts(message: Message) -> Message:
    """Return the message with a text as content replaced by a list of one part."""
    content = message.get("content")
    if not isinstance(content, str):
        return message
    return {**message, "content": [{"type": "text", "text": content}]}


def _mark_special(tokenizer: Any, ids: Set[int | None]) -> None:
    """Mark added tokens of these ids as special, as transformers does; files of fine-tuned models often do not."""
    for index, token in tokenizer.get_added_tokens_decoder().items():
        if index in ids and not token.special:
            token.special = True
            tokenizer.add_special_tokens([token])


def _load_tokenizer(folder: Path) -> Any:
    """Load a folder's `tokenizers.Tokenizer`, with truncation and padding off; older layouts through transformers."""
    file = folder / "tokenizer.json"
    if file.is_file():
        import tokenizers

        check_size(file, _MOST_TOKENIZER_BYTES)
        with _guarded(file):
            tokenizer: Any = tokenizers.Tokenizer.from_file(str(file))
    else:
        # Older layouts are converted by transformers, whose import takes seconds.
        import transformers

        # By default, transformers would ask on the terminal whether to run the folder's own code.
        remedy = "for a sentencepiece model, pip install 'jaxkv[sentencepiece]'"
        with _guarded(folder, remedy=remedy):
            loaded: Any = transformers.AutoTokenizer.from_pretrained(
                str(folder), trust_remote_code=False
            )
            tokenizer = loaded.backend_tokenizer
    # Files may contain truncation and padding settings of a training run.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


@contextlib.contextmanager
def _guarded(
    origin: Path | str,
    problem: str = "it cannot be read",
    remedy: str = "copy or download it again",
    name: str = "tokenizer",
) -> Iterator[None]:
    """Context manager that turns any error of the tokenizer library into a ValueError that names `name`."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    # Rust raises plain Exception, and BaseException for a panic.
    except BaseException as error:
        first = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise ValueError(f"{name}={str(origin)!r}: {problem} ({first}): {remedy}") from error
