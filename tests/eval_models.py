"""Tiny random models that speak bytes, for tasks whose prompts are texts."""

import functools

import tiny
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import jaxkv
from jaxkv.loading import LanguageModel
from jaxkv.testing import tiny_model
from jaxkv.text.tokenizer import ChatTokenizer

CHAT = "{% for m in messages %}<turn>{{ m.role + ':' + m.content + '<end>' }}{% endfor %}"
CHAT += "{% if add_generation_prompt %}<turn>assistant:{% endif %}"
SPECIALS = ("<s>", "</s>", "<turn>", "<end>")


def text(template: str | None = None) -> ChatTokenizer:
    """A tokenizer of bytes, with a bos token and perhaps a chat template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: index for index, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIALS))
    specials = {"bos_token": "<s>", "eos_token": "</s>"}
    return ChatTokenizer(tokenizer, specials=specials, adds_bos=True, template=template)


@functools.cache
def speaking(*, chat: bool = False, positions: int = 512) -> LanguageModel:
    """A model of two layers and random weights, with a tokenizer."""
    config = jaxkv.ModelConfig(
        vocab=256 + len(SPECIALS),
        layers=2,
        embed=24,
        hidden=32,
        heads=4,
        kv_heads=2,
        head_dim=8,
        max_positions=positions,
    )
    model = tiny_model(config, seed=tiny.VOCAB)
    model.text = text(CHAT if chat else None)
    return model
