"""`ChatTokenizer`: a checkpoint's tokenizer and chat template; `StreamDecoder`: incremental decoding of token ids."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any, NamedTuple

from jaxkv._errors import require
from jaxkv.checkpoints import Checkpoint, GgufTokenizer
from jaxkv.checkpoints.chat_template import read_chat_template, render_chat_template
from jaxkv.checkpoints.json_files import check_file_size, read_json
from jaxkv.text.control_tokens import EDGE, SpecialTokenShield

Message = Mapping[str, Any]

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# The largest vocabularies, of 260,000 tokens, have 40 MB.
_MOST_TOKENIZER_BYTES = 256 << 20
# An incomplete character decodes to fewer replacement characters; a longer run is real text.
_LONGEST_HELD = 8
_REASONING = "<think>\n{}\n</think>\n\n"


class TurnTexts(NamedTuple):
    """Texts that a chat template writes around messages, and whether it trims whitespace of user contents.

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


class ChatTokenizer:
    """A model's tokenizer and chat template: text to token ids, token ids to text, messages to text.

    Attributes:
        bos_id: id of the beginning-of-sequence token, or None.
        special_tokens: special tokens, `tokenizers.AddedToken` by id.
        template: Jinja source of the chat template, or None.
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
        self.template = template or None
        self.has_template = self.template is not None
        bos, eos = (self._specials.get(f"{kind}_token") for kind in ("bos", "eos"))
        self.bos_id: int | None = None if bos is None else tokenizer.token_to_id(bos)
        self._adds_bos = adds_bos and self.bos_id is not None
        ends = [None if eos is None else tokenizer.token_to_id(eos), *eos_ids]
        self._ends = [each for each in ends if each is not None]
        _mark_special_tokens(
            tokenizer, {*self._ends, *map(tokenizer.token_to_id, self._specials.values())}
        )
        self._controls = SpecialTokenShield(tokenizer)
        self.special_tokens = self._controls.special

    @functools.cached_property
    def eos_ids(self) -> tuple[int, ...]:
        """Tuple of ids that end an answer: those named by checkpoint or tokenizer, and the chat template's end token.

        The template's is the special token after a last message of the assistant. Tokens that the template writes after
        earlier answers count only without another one: in gpt-oss, one of them ends a message of reasoning. The chat
        template runs at the first call.
        """
        try:
            after = self.render_and_split(
                [make_user_message("?"), make_assistant_message(EDGE)],
                generation_prompt=False,
                edges=1,
            )[1]
            if not (after or self._ends):
                after = self.turn_texts.between
        except ValueError:
            return tuple(dict.fromkeys(self._ends))
        added = self._tokenizer.get_added_tokens_decoder()
        first = self._tokenizer.encode(after.lstrip(), add_special_tokens=False).ids[:1]
        own = [each for each in first if each in added and added[each].special]
        return tuple(dict.fromkeys([*self._ends, *own]))

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint) -> ChatTokenizer | None:
        """Build the `ChatTokenizer` of an open checkpoint; None if it has no tokenizer.

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
    def _from_gguf(cls, spec: GgufTokenizer, origin: str) -> ChatTokenizer:
        """Build the `ChatTokenizer` of a GGUF file's vocabulary, special tokens and chat template."""
        ids = {
            "bos_token": spec.bos,
            "eos_token": spec.eos,
            "pad_token": spec.pad,
            "unk_token": spec.unk,
        }
        return cls(
            spec.build_tokenizer(),
            specials={name: spec.tokens[index] for name, index in ids.items() if index is not None},
            eos_ids=[] if spec.eot is None else [spec.eot],
            adds_bos=spec.adds_bos,
            template=spec.chat_template,
            origin=origin,
        )

    @classmethod
    def _from_folder(cls, folder: Path, eos: Any) -> ChatTokenizer:
        """Build the `ChatTokenizer` of a folder in Hugging Face's layout; `eos` is the config's eos id, or a list."""
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
        template = read_chat_template(folder, settings)
        return cls(
            tokenizer,
            specials=specials,
            eos_ids=[] if eos is None else eos if isinstance(eos, list) else [eos],
            adds_bos=adds_bos,
            template=template,
            origin=str(folder),
        )

    @property
    def prepended_bos_id(self) -> int | None:
        """Id of the bos token, if prompts start with it; else None."""
        return self.bos_id if self._adds_bos else None

    def tokenizer_json(self) -> str:
        """Return the tokenizer as the JSON text of a `tokenizer.json` file."""
        return self._tokenizer.to_str()

    def export_special_tokens(self) -> dict[str, Any]:
        """Return special tokens as a dict for JSON: ids and matching rules by name, and spellings that encode as text.

        "special" has the id and properties of each token by its name. "spellings" has replacements
        for special tokens in a user's text that the model's vocabulary would otherwise join.
        """
        parted = {
            each: text
            for each, text in self._controls.special_token_spellings.items()
            if each != text
        }
        return {"special": self._controls.describe_special_tokens(), "spellings": parted}

    def export_turn_texts(self) -> list[str | bool]:
        """Return a list of the template's texts around messages and its trim flags, special tokens by name."""
        return [
            self._controls.mark_special_tokens(each) if isinstance(each, str) else each
            for each in self.turn_texts
        ]

    def encode(self, s: str, *, bos: bool, shielded: bool = False) -> list[int]:
        """Return a text's token ids, a list; `bos` adds the bos token if prompts start with one and the text does not.

        Args:
            s: the text.
            bos: True to start with the bos token, if the tokenizer adds it and the text lacks it.
            shielded: True for a text from `shielded`, or rendered from one; otherwise special tokens spelled in the
                text become special tokens.

        Raises:
            ValueError: for text that is not Unicode, or that the tokenizer's own rules reject.
        """
        with self._guard_encoding():
            ids = (
                self._controls.encode_shielded_text(s)
                if shielded
                else self._tokenizer.encode(s, add_special_tokens=False).ids
            )
        # A chat template may have written the bos token itself.
        if bos and self._adds_bos and ids[:1] != [self.bos_id]:
            ids = [self.bos_id, *ids]
        return ids

    def shield_special_tokens(self, value: Any) -> Any:
        """Return a text or messages with special tokens replaced, so that `encode(shielded=True)` treats them as text.

        Raises:
            ValueError: as `encode`.
        """
        with self._guard_encoding():
            return self._controls.shield_special_tokens(value)

    def _guard_encoding(self) -> contextlib.AbstractContextManager[None]:
        """Return a context manager that turns tokenizer errors into a ValueError that names the argument `prompt`."""
        remedy = "use other text, or token ids"
        return _wrap_tokenizer_errors(
            "...", "the tokenizer cannot encode it", remedy, name="prompt"
        )

    def decode(
        self, ids: Sequence[int], *, skip_special: bool = True, kept: Collection[str] = ()
    ) -> str:
        """Return the text of token ids, by default without special tokens, except those in `kept`."""
        if kept:
            special, skip_special = self.special_tokens, False
            ids = [each for each in ids if each not in special or special[each].content in kept]
        return self._tokenizer.decode([int(each) for each in ids], skip_special_tokens=skip_special)

    def spell_token(self, token: int) -> str:
        """Return the text that a token id, special ones included, adds to a text."""
        # Decoders may drop a leading space of the first token.
        first = self.decode([token], skip_special=False)
        return self.decode([token, token], skip_special=False)[len(first) :]

    def render_chat(
        self, messages: Sequence[Message], *, generation_prompt: bool, **variables: Any
    ) -> str:
        """Return chat messages as one text, rendered with the chat template; `encode` turns the text into ids.

        Args:
            messages: dictionaries with "role" and "content".
            generation_prompt: True to end with the start of an assistant's answer.
            variables: further variables of the template, such as `tools`.

        Returns:
            The text.

        Raises:
            ValueError: without a template, or if the template rejects the messages.
        """
        if self._requires_content_parts:
            messages = [_wrap_content_parts(message) for message in messages]
        return self._render_template(messages, generation_prompt, **variables)

    @functools.cached_property
    def _requires_content_parts(self) -> bool:
        """True if the chat template writes a message's content only if it is a list of parts, not if it is a text."""
        return not self._renders_message(make_user_message(EDGE)) and self._renders_message(
            _wrap_content_parts(make_user_message(EDGE))
        )

    def _renders_message(self, message: Message) -> bool:
        """Return True if the chat template accepts a message that contains the mark `EDGE`, and writes the mark."""
        try:
            return EDGE in self._render_template([message], False)
        except ValueError:
            return False

    def _render_template(
        self, messages: Sequence[Message], generation_prompt: bool, **variables: Any
    ) -> str:
        """Render messages with the chat template as text; ValueError without a template, or if it rejects them."""
        if self.template is None:
            raise ValueError(
                f"chat_template=None: {self._origin} has none: encode plain text instead"
            )
        try:
            return render_chat_template(
                self.template,
                messages=messages,
                add_generation_prompt=generation_prompt,
                documents=None,
                **{"tools": None, **variables, **self._specials},
            )
        except ValueError as error:
            roles = [message.get("role") for message in messages]
            remedy = f"the chat template of {self._origin} rejects these ({error}): change them, or encode plain text"
            raise ValueError(f"messages={roles}: {remedy}") from error

    @functools.cached_property
    def turn_texts(self) -> TurnTexts:
        """`TurnTexts` that the chat template writes around messages; ValueError if it repeats or omits messages."""
        opening, closing = self.render_and_split(
            [make_user_message(EDGE)], generation_prompt=True, edges=1
        )
        talk = [make_user_message("?"), make_assistant_message(EDGE), make_user_message(EDGE)]
        between = self.render_and_split(talk, generation_prompt=True, edges=2)[1]
        padded = self.render_and_split(
            [make_user_message(f" {EDGE} ")], generation_prompt=True, edges=1
        )
        return TurnTexts(opening, closing, between, padded[0] == opening, padded[1] == closing)

    @functools.cached_property
    def rewrites_answers(self) -> bool:
        """True if the template renders an earlier answer other than as sampled, such as without its reasoning.

        Whitespace does not count: some models sample the space that templates write before an answer.
        """
        turns = self.turn_texts
        written = self.render_chat(
            [make_user_message("?"), make_assistant_message("."), make_user_message("!")],
            generation_prompt=True,
        )
        sampled = f"{turns.opening}?{turns.closing}.{turns.between}!{turns.closing}"
        reasoning = self.render_chat(
            [
                make_user_message("?"),
                make_assistant_message(_REASONING.format(EDGE) + "."),
                make_user_message("!"),
            ],
            generation_prompt=True,
        )
        same = "".join(written.split()) == "".join(sampled.split())
        return not same or EDGE not in reasoning

    def render_and_split(
        self, messages: Sequence[Message], *, edges: int, **options: Any
    ) -> list[str]:
        """Return the text of `render_chat` split at `EDGE` in `edges` + 1 parts; ValueError for another number."""
        parts = self.render_chat(messages, **options).split(EDGE)
        remedy = "it does not render each message once, so turns cannot be split: use all messages together, or ids"
        require(len(parts) == edges + 1, "chat_template", self._origin, remedy)
        return parts


class StreamDecoder:
    """Incremental decoder of token ids to text; it holds text back while the last character lacks bytes."""

    def __init__(self, text: ChatTokenizer, kept: Collection[str] = ()):
        """Start a stream without ids; special tokens are left out of its text, except those in `kept`."""
        self._decode = functools.partial(text.decode, kept=kept)
        # Decoders may treat the first token of a text differently (they drop a leading space). So the ids decoded last
        # are kept before the pending ones, and the new text is what the pending ids add.
        self._context: list[int] = []
        self._pending: list[int] = []

    def push_ids(self, ids: Iterable[int]) -> str:
        """Add token ids to the stream; return its new text, "" while the last character lacks bytes."""
        self._pending += [int(each) for each in ids]
        return self._take_complete_text(whole=False)

    def flush_text(self) -> str:
        """End the stream; return the text held back, with replacement characters for incomplete characters."""
        added = self._take_complete_text(whole=True)
        self._context = []
        return added

    def _take_complete_text(self, *, whole: bool) -> str:
        """Return the text of the pending ids, and clear them; "" while their end is incomplete, unless `whole`."""
        before = self._decode(self._context)
        added = self._decode(self._context + self._pending)[len(before) :]
        held = len(added) - len(added.rstrip(_REPLACEMENT))
        if not added or (0 < held <= _LONGEST_HELD and not whole):
            return ""
        self._context, self._pending = self._pending, []
        return added


def make_user_message(content: str) -> Message:
    """Return a chat message with the role "user" and this content."""
    return {"role": "user", "content": content}


def make_assistant_message(content: str) -> Message:
    """Return a chat message with the role "assistant" and this content."""
    return {"role": "assistant", "content": content}


def _wrap_content_parts(message: Message) -> Message:
    """Return the message with a text as content replaced by a list of one part of type "text"; others unchanged."""
    content = message.get("content")
    if not isinstance(content, str):
        return message
    return {**message, "content": [{"type": "text", "text": content}]}


def _mark_special_tokens(tokenizer: Any, ids: Set[int | None]) -> None:
    """Set `special` in place on a tokenizer's added tokens of these ids; files of fine-tuned models often do not."""
    for index, token in tokenizer.get_added_tokens_decoder().items():
        if index in ids and not token.special:
            token.special = True
            tokenizer.add_special_tokens([token])


def _load_tokenizer(folder: Path) -> Any:
    """Load a folder's `tokenizers.Tokenizer`, without truncation and padding; older layouts through transformers."""
    file = folder / "tokenizer.json"
    if file.is_file():
        import tokenizers

        check_file_size(file, _MOST_TOKENIZER_BYTES)
        with _wrap_tokenizer_errors(file):
            tokenizer: Any = tokenizers.Tokenizer.from_file(str(file))
    else:
        # Older layouts are converted by transformers, whose import takes seconds.
        import transformers

        # By default, transformers would ask on the terminal whether to run the folder's own code.
        remedy = "for a sentencepiece model, pip install 'jaxkv[sentencepiece]'"
        with _wrap_tokenizer_errors(folder, remedy=remedy):
            loaded: Any = transformers.AutoTokenizer.from_pretrained(
                str(folder), trust_remote_code=False
            )
            tokenizer = loaded.backend_tokenizer
    # Files may contain truncation and padding settings of a training run.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


@contextlib.contextmanager
def _wrap_tokenizer_errors(
    origin: Path | str,
    problem: str = "it cannot be read",
    remedy: str = "copy or download it again",
    name: str = "tokenizer",
) -> Iterator[None]:
    """Context manager: turn errors, also Rust panics, not interrupts or MemoryError, into ValueErrors about `name`."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    # Rust raises plain Exception, and BaseException for a panic.
    except BaseException as error:
        first = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise ValueError(f"{name}={str(origin)!r}: {problem} ({first}): {remedy}") from error
