"""Constraints of answers by grammars: llguidance's matchers, and the masks of tokens that they allow next."""

import functools
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import UInt32

from jaxkv._errors import build_value_error, require
from jaxkv.loading import LanguageModel
from jaxkv.text.grammar import Grammar


class GrammarCompiler:
    """Compiler of grammars for the answers of one model; llguidance is imported for the first one."""

    def __init__(self, params: LanguageModel):
        """Create the compiler of a model's grammars."""
        self._params = params

    def compile(self, grammar: Grammar) -> Any:
        """Return the `LLMatcher` of a grammar at the beginning of an answer.

        Raises:
            ValueError: for an invalid grammar, with llguidance's message; without llguidance, or a tokenizer that it
                supports.
        """
        try:
            from llguidance import LLMatcher

            tokenizer = self._tokenizer
        except (ModuleNotFoundError, ValueError) as error:
            raise build_value_error(
                "grammar",
                grammar.rules,
                f"needs llguidance (pip install 'jaxkv[serve]') and a tokenizer that it supports: {error}",
            ) from error
        matcher = LLMatcher(tokenizer, grammar.rules, log_level=0)
        fault = _shorten_fault(matcher.get_error())
        require(not fault, "grammar", grammar.rules, f"{fault}: change the grammar")
        return matcher

    @functools.cached_property
    def _tokenizer(self) -> Any:
        """The model's tokenizer for llguidance; ValueError if it has none, or one of an unsupported kind."""
        from llguidance import LLTokenizer

        params = self._params
        return LLTokenizer(
            params.tokenizer.tokenizer_json(),
            n_vocab=params.config.vocab,
            eos_token=[*params.end_token_ids],
        )


def compute_token_masks(
    matchers: Mapping[int, Any], slots: int, vocab: int
) -> tuple[UInt32[np.ndarray, "B w"], dict[int, ValueError]]:
    """Compute, in parallel, which tokens each slot may sample next.

    Args:
        matchers: `LLMatcher` by slot; other slots may sample all tokens.
        slots: number of slots, B.
        vocab: size of the vocabulary.

    Returns:
        Masks, 32 tokens per word, lowest bit first, with end tokens where the text may end; and errors of slots that
        may sample no token.
    """
    from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask_par

    masks = allocate_token_bitmask(slots, vocab)
    pairs = [(matcher, slot) for slot, matcher in matchers.items()]
    fill_next_token_bitmask_par(_create_executor(), pairs, masks)
    errors = {
        slot: build_value_error(
            "grammar",
            _shorten_fault(matcher.get_error()),
            "no token can follow: allow other texts",
        )
        for matcher, slot in pairs
        if matcher.is_error() or not masks[slot].any()
    }
    return masks.view(np.uint32), errors


@functools.cache
def _create_executor() -> Any:
    """Return the threads of llguidance that compute masks, cached."""
    from llguidance import LLExecutor

    return LLExecutor()


def _shorten_fault(fault: str) -> str:
    """Return a message of llguidance in one line, without its quotes of the grammar and of the parser's state."""
    return " ".join(re.split(r"\n(?:<| +1 \|)", fault)[0].split())[:500]
