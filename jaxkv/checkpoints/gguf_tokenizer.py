"""The vocabulary of a GGUF file as plain data, and the `tokenizers.Tokenizer` built from it."""

import dataclasses
import math
from typing import Any

from jaxkv._dataclasses import frozen_dataclass
from jaxkv._errors import build_value_error, require
from jaxkv.checkpoints.gguf_names import TABLES

_MOST_CUTS = 10**9
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4  # llama.cpp's token types
_PRE = TABLES["pre"]


@frozen_dataclass
class GgufTokenizer:
    """Vocabulary of a GGUF file as plain data: tokens, merges or scores, special token ids, chat template.

    Attributes:
        model: kind of tokenizer: "gpt2" is byte-level BPE, "llama" is sentencepiece BPE.
        pre: llama.cpp's name of the pre-tokenizer, for "gpt2".
        tokens: the vocabulary, V strings.
        types: llama.cpp's token types, V or none.
        merges: "left right" in order of rank, for "gpt2".
        scores: V scores, for "llama".
        bos: id of the beginning-of-sequence token.
        eos: id of the end-of-sequence token.
        eot: id of the end-of-turn token.
        pad: id of the padding token.
        unk: id of the unknown token.
        add_bos: True if a prompt starts with `bos`; None for the default of the kind.
        add_space_prefix: True if text gets a leading space; None for the default of the kind.
        chat_template: Jinja source.
    """

    model: str
    pre: str | None = None
    tokens: tuple[str, ...] = dataclasses.field(repr=False)
    types: tuple[int, ...] = dataclasses.field(default=(), repr=False)
    merges: tuple[str, ...] = dataclasses.field(default=(), repr=False)
    scores: tuple[float, ...] = dataclasses.field(default=(), repr=False)
    bos: int | None = None
    eos: int | None = None
    eot: int | None = None
    pad: int | None = None
    unk: int | None = None
    add_bos: bool | None = None
    add_space_prefix: bool | None = None
    chat_template: str | None = dataclasses.field(default=None, repr=False)

    @property
    def adds_bos(self) -> bool:
        """True if prompts start with `bos`: as the file says, else llama.cpp's default for this kind of tokenizer."""
        if self.add_bos is not None:
            return self.add_bos
        return self.model == "llama" or "whole" in _PRE.get(self.pre or "", ())

    def build_tokenizer(self) -> Any:
        """Build a Hugging Face `tokenizers.Tokenizer` from the vocabulary, with its special tokens.

        Returns:
            A `tokenizers.Tokenizer`.

        Raises:
            ValueError: for an unsupported kind or pre-tokenizer, by name, or an inconsistent vocabulary.
        """
        require(
            self.model in ("gpt2", "llama"),
            "tokenizer.ggml.model",
            self.model,
            "not supported: use gpt2 or llama",
        )
        if self.types:
            require(
                len(self.types) == len(self.tokens),
                "token_type",
                len(self.types),
                "not one per token: download the file again",
            )
        try:
            tokenizer = (
                _build_byte_level_bpe(self)
                if self.model == "gpt2"
                else _build_sentencepiece_bpe(self)
            )
        except ValueError:
            raise
        # The Rust library raises plain Exception, such as for a merge whose parts are not tokens.
        except Exception as error:
            raise build_value_error(
                "tokenizer.ggml.model",
                self.model,
                f"inconsistent vocabulary ({error}): download the file again",
            ) from error
        tokenizer.add_special_tokens(self._list_added_tokens(special=True))
        tokenizer.add_tokens(self._list_added_tokens(special=False))
        return tokenizer

    def _list_added_tokens(self, *, special: bool) -> list[Any]:
        """List special, or without `special` user-defined, tokens as `AddedToken`, which are matched as a whole."""
        from tokenizers import AddedToken

        chosen = {
            each for each in (self.bos, self.eos, self.eot, self.pad, self.unk) if each is not None
        }
        chosen |= {index for index, kind in enumerate(self.types) if kind in (_UNKNOWN, _CONTROL)}
        if not special:
            chosen = {
                index for index, kind in enumerate(self.types) if kind == _USER_DEFINED
            } - chosen
        return [
            AddedToken(self.tokens[index], special=special, normalized=False)
            for index in sorted(chosen)
        ]


def _build_byte_level_bpe(spec: GgufTokenizer) -> Any:
    """Build the byte-level BPE `Tokenizer` of a "gpt2" vocabulary; ValueError for an unknown pre-tokenizer."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    pre = spec.pre or "default"
    require(
        pre in _PRE,
        "tokenizer.ggml.pre",
        pre,
        f"not supported: use one of {', '.join(sorted(_PRE))}",
    )
    vocab = {token: index for index, token in enumerate(spec.tokens)}
    merges = [(left, right) for left, _, right in (merge.partition(" ") for merge in spec.merges)]
    tokenizer = Tokenizer(models.BPE(vocab, merges, ignore_merges="whole" in _PRE[pre]))
    splits = [pre_tokenizers.Split(Regex(each), "isolated") for each in _PRE[pre]["patterns"]]
    prefix = bool(spec.add_space_prefix)
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, bytes_])
    tokenizer.decoder = decoders.ByteLevel()
    if "nfc" in _PRE[pre]:
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def _build_sentencepiece_bpe(spec: GgufTokenizer) -> Any:
    """Build the BPE `Tokenizer` of a "llama" (sentencepiece) vocabulary, with merges derived from token scores."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    require(
        len(spec.scores) == len(spec.tokens),
        "scores",
        len(spec.scores),
        "sentencepiece needs one per token: download the file again",
    )
    longest = max(map(len, spec.tokens))
    # The search below tries every split of each token into two: quadratic in its length.
    sane = sum(len(token) ** 2 for token in spec.tokens) < _MOST_CUTS and all(
        map(math.isfinite, spec.scores)
    )
    require(
        sane,
        "tokens",
        f"{longest} characters",
        "tokens too long, or scores not finite: download the file again",
    )
    vocab = {token: index for index, token in enumerate(spec.tokens)}
    # Sentencepiece joins the neighbours whose union has the best score: every split of a piece into two pieces is a
    # merge, ranked by the score of the piece.
    ranked = sorted(
        (-spec.scores[index], index, cut, piece)
        for piece, index in vocab.items()
        for cut in range(1, len(piece))
        if piece[:cut] in vocab and piece[cut:] in vocab
    )
    merges = [(piece[:cut], piece[cut:]) for *_, cut, piece in ranked]
    unknown = None if spec.unk is None else spec.tokens[spec.unk]
    tokenizer = Tokenizer(
        models.BPE(vocab, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    spaces = normalizers.Replace(" ", "▁")
    undo = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if spec.add_space_prefix is not False:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces])
        undo.append(decoders.Strip(" ", 1, 0))
    else:
        tokenizer.normalizer = spaces
    tokenizer.decoder = decoders.Sequence(undo)
    return tokenizer
