"""Options and helpers that commands with a model share: its name and dtype, texts as token ids."""

import os
from collections.abc import Callable, Sequence
from typing import Any

from jaxkv._errors import require
from jaxkv.attention import Implementation
from jaxkv.loading import LanguageModel

_KNOWN = "a name from `jaxkv models`, a Hugging Face folder, a .gguf file or a hub id "


def add_model_option(add: Callable[..., Any], about: str = _KNOWN) -> None:
    """Adds the `--model` option by `add`, an argparse group's `add_argument`."""
    add(
        "--model",
        default="smollm2-135m-instruct",
        metavar="NAME",
        help=f"{about}(default: %(default)s)",
    )


def add_dtype_option(add: Callable[..., Any]) -> None:
    """Adds the `--dtype` option by `add`, an argparse group's `add_argument`."""
    add(
        "--dtype",
        help="float32, bfloat16 or float16 (default: bfloat16 on a GPU, float32 on a CPU)",
    )


def add_weights_option(add: Callable[..., Any]) -> None:
    """Adds the `--weights` option by `add`, an argparse group's `add_argument`."""
    add(
        "--weights",
        metavar="BITS",
        help="int8 or int4: linear maps in 8 bits, half of 16 bits' memory, or in 4, a third (default: dtype)",
    )


def add_implementation_option(add: Callable[..., Any]) -> None:
    """Adds the `--implementation` option by `add`, an argparse group's `add_argument`."""
    computing = (
        "what computes attention: auto, xla, pallas, cudnn, mosaic or tpu (default: %(default)s)"
    )
    add("--implementation", default=Implementation.AUTO.value, help=computing)


def require_model(name: str) -> None:
    """Raises ValueError for a `--model` that is blank or in the home folder (`~name`) of a user that does not exist."""
    require(
        bool(name.strip()),
        "--model",
        name,
        "give a name from `jaxkv models`, a folder, a .gguf file or a hub id",
    )
    home = name.startswith("~") and os.path.expanduser(name) == name
    require(
        not home, "--model", name, "there is no such home folder; a file of that name is ./" + name
    )


def ids_of(params: LanguageModel, name: str, texts: Sequence[str]) -> list[list[int]]:
    """List of each text's token ids, BOS first if the tokenizer adds it; ValueError if the model has no tokenizer."""
    remedy = "the checkpoint has no tokenizer: use jaxkv.analysis on ids"
    require(params.text is not None, "--model", name, remedy)
    assert params.text is not None
    return [params.text.encode(text, bos=True) for text in texts]
