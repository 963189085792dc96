"""The text model of a checkpoint that also takes images: its config, and its tensors by a text model's names."""

from collections.abc import Mapping
from typing import Any

from jaxkv._errors import require
from jaxkv.checkpoints.hub_config import IGNORED
from jaxkv.checkpoints.tensor import StoredTensor

# Model type with images -> model type and class of the text model in it.
_TEXT_MODELS = {"gemma3": ("gemma3_text", "Gemma3ForCausalLM")}
# Top-level keys that are ignored, of vision.
_HARMLESS = set(
    """boi_token_index bos_token_id eoi_token_index image_token_id image_token_index mm_tokens_per_image
    text_config vision_config""".split()
)
# Top-level keys that hold for the text model.
_SHARED = ("eos_token_id", "quantization_config", "tie_word_embeddings")
# Prefixes of tensor names in a checkpoint with images (of transformers 4, 4, 5), and in one of text alone.
_PREFIXES = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
}
_IMAGES = (
    "vision_tower.",
    "multi_modal_projector.",
    "model.vision_tower.",
    "model.multi_modal_projector.",
)


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Config of the text model within a model that also takes images; any other config is returned as it is.

    Args:
        config: the keys of a Hugging Face `config.json`.

    Returns:
        The text model's config, as of a text-only checkpoint.

    Raises:
        ValueError: for a `text_config` that is missing or of another model type, and for keys that are not known.
    """
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in _TEXT_MODELS:
        return config
    text, found = _TEXT_MODELS[kind], config.get("text_config")
    require(
        isinstance(found, Mapping),
        "text_config",
        found,
        f"a {kind} has the keys of its text model here",
    )
    given = found if isinstance(found, Mapping) else {}
    own = given.get("model_type", text[0])
    require(
        own == text[0], "text_config.model_type", own, f"the text model of a {kind} is a {text[0]}"
    )
    unknown = sorted(map(str, set(config) - IGNORED - _HARMLESS - set(_SHARED)))
    require(
        not unknown,
        "config",
        unknown,
        "these keys are not supported; remove them only if they change nothing",
    )
    shared = {key: config[key] for key in _SHARED if config.get(key) is not None}
    return {**given, **shared, "model_type": text[0], "architectures": [text[1]]}


def text_tensors(stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Tensors named as in a text-only checkpoint; those of vision are dropped, other names are kept.

    Args:
        stored: all tensors by their names in the file.

    Returns:
        The tensors by their new names.
    """
    found = {}
    for name, tensor in stored.items():
        if not name.startswith(_IMAGES):
            begins = next((each for each in _PREFIXES if name.startswith(each)), "")
            found[_PREFIXES.get(begins, "") + name.removeprefix(begins)] = tensor
    return found
