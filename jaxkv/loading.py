"""From a name or a path to parameters: every tensor of the checkpoint finds its place, or is refused by name."""

import hashlib
import math
import os
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxkv._errors import require
from jaxkv._settings import settled
from jaxkv.checkpoints import Checkpoint, fetch, manifest, names, open_checkpoint
from jaxkv.config import ModelConfig
from jaxkv.models.decoder import Decoder, Flat
from jaxkv.text import Text

_DTYPES = ("float32", "bfloat16", "float16")
# Buffers some exporters write; the rotation is computed from the config.
_DERIVED = re.compile(r"rotary_emb\.inv_freq$")

_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
# Name -> (our parameter, which slice of it); a bias lies beside its weight.
_ENDS: dict[str, tuple[str, int | None]] = {
    _EMBEDDING: ("embedding", None),
    "model.norm.weight": ("norm.scale", None),
    _HEAD: ("head", None),
}
_NORMS = {
    "input_layernorm": "attention_norm.scale",
    "post_attention_layernorm": "mlp_norm.scale",
    "self_attn.q_norm": "attention.q_norm.scale",
    "self_attn.k_norm": "attention.k_norm.scale",
}
_PROJECTIONS: dict[str, tuple[str, int | None]] = {
    "self_attn.q_proj": ("attention.q", None),
    "self_attn.k_proj": ("attention.kv", 0),
    "self_attn.v_proj": ("attention.kv", 1),
    "self_attn.o_proj": ("attention.out", None),
    "mlp.gate_proj": ("mlp.gate_up", 0),
    "mlp.up_proj": ("mlp.gate_up", 1),
    "mlp.down_proj": ("mlp.down", None),
}
_BLOCK = (
    {f"{name}.weight": (path, None) for name, path in _NORMS.items()}
    | {f"{name}.weight": place for name, place in _PROJECTIONS.items()}
    | {f"{name}.bias": (f"{path}_bias", part) for name, (path, part) in _PROJECTIONS.items()}
)


class LanguageModel(nnx.Module):
    """What `load` returns: a Flax decoder, with its tokenizer beside it.

    Attributes:
        decoder: the parameters, a Flax NNX module.
        text: tokenizer and chat template, or None where the checkpoint has none; it never enters jitted code.
        name: what was loaded.
        filter_layers: those that choose best what the layers above them read (OmniKV), where they have been found.
        fingerprint: tells these weights from others of the same shape; caches carry it.
    """

    def __init__(self, decoder: Decoder, *, text: Text | None, name: str, filter_layers: tuple[int, ...] | None = None):
        self.decoder = decoder
        self.text = text
        self.name = name
        self.filter_layers = filter_layers
        self.fingerprint = _fingerprint(decoder)
        self._flat: Flat | None = None

    def __repr__(self) -> str:
        layers, megabytes = self.config.layers, self.nbytes / 1e6
        return f"LanguageModel({self.name!r}, {layers} layers, {self.dtype}, {megabytes:,.1f} MB)"

    __str__ = __repr__  # Flax would print every parameter

    @property
    def config(self) -> ModelConfig:
        """What the decoder is made of: sizes, switches and special ids, as its checkpoint gave them."""
        return self.decoder.config

    @property
    def flat(self) -> Flat:
        """The decoder taken apart for jitted code: once, and again only after a parameter has been replaced."""
        if self._flat is None or not self._flat.is_of(self.decoder):
            self._flat = Flat(self.decoder)
        return self._flat

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype of weights, activations and cache."""
        return self.decoder.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of all parameters."""
        return self.decoder.nbytes


@settled
def load(name_or_path: str | os.PathLike[str], dtype: Any = None, *, progress: bool = True) -> LanguageModel:
    """Loads a model.

    Args:
        name_or_path: a name from `jaxkv models`, a folder in Hugging Face's layout, a `.gguf` file, or a hub id.
        dtype: float32, bfloat16 or float16; by default bfloat16 on a GPU and float32 on a CPU.
        progress: show bars on stderr, if it is a terminal.

    Returns:
        The parameters as a Flax module, with the tokenizer beside it.

    Raises:
        ValueError: for an unknown model, an unsupported config key, weights that are corrupt, missing, left over, of
            the wrong shape, or not finite.
    """
    if dtype is None:
        dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    kind = _dtype(dtype)
    path = fetch(os.fspath(name_or_path), progress=progress)
    checkpoint = open_checkpoint(path)
    config = ModelConfig.from_hf(checkpoint.config)
    _check_depth(config, checkpoint)
    decoder = Decoder(config, dtype=kind)
    fill(decoder, checkpoint)
    name = os.fspath(name_or_path)
    filters = manifest(name).filter_layers if name in names() else None
    return LanguageModel(decoder, text=Text.from_checkpoint(checkpoint), name=name, filter_layers=filters)


def _dtype(given: Any) -> np.dtype:
    try:
        name = jnp.dtype(given).name
    except TypeError:  # no dtype at all
        name = given
    require(name in _DTYPES, "dtype", name, f"give one of {', '.join(_DTYPES)}")
    return jnp.dtype(name)


def fill(decoder: Decoder, checkpoint: Checkpoint) -> None:
    """Puts a checkpoint's tensors into a decoder's parameters, one at a time.

    Args:
        decoder: parameters as shapes.
        checkpoint: an open checkpoint.

    Raises:
        ValueError: naming the tensor that is missing, left over, misshapen or not finite.
    """
    places = _places(decoder)
    names = {name for name in checkpoint.names if not _DERIVED.search(name)}
    # Some exporters write the tied matrix twice.
    twice = (_EMBEDDING, _HEAD) if decoder.head is None and _HEAD in names else ()
    names -= set(twice[1:])
    missing, extra = sorted(places.keys() - names), sorted(names - places.keys())
    require(not missing, "weights", missing[:4], "the checkpoint lacks these tensors; it may be another model's")
    require(not extra, "weights", extra[:4], "the config has no place for these tensors; it may be another model's")
    started: dict[str, tuple[np.ndarray, set[int]]] = {}
    finite: list[tuple[str, jax.Array]] = []
    first: np.ndarray | None = None
    for name, array in checkpoint.tensors():
        if name in twice:
            first = array if first is None else _same(first, array)
        if name not in places:
            continue
        remedy = "weights are floating point; load the unquantised ones, or a GGUF"
        require(jnp.issubdtype(array.dtype, jnp.floating), f"{name}.dtype", array.dtype.name, remedy)
        path, part = places[name]
        parameter = _at(decoder, path)
        shape, dtype = parameter.get_value().shape, parameter.get_value().dtype
        target = shape if part is None else shape[1:]
        asked = _stored_shape(name, target)
        remedy = f"the config asks for {asked}; the weights belong to another model"
        require(array.shape == asked, name, array.shape, remedy)
        if part is None:
            value = jnp.array(array.reshape(target), dtype=dtype)
        else:
            buffer, parts = started.setdefault(path, (np.empty(shape, dtype), set()))
            buffer[part] = array.reshape(target)
            parts.add(part)
            if len(parts) < shape[0]:
                continue
            value = jnp.array(started.pop(path)[0])
        finite.append((name, jnp.isfinite(value).all()))
        parameter.set_value(value)
    bad = [name for name, ok in finite if not bool(ok)]
    remedy = "these tensors hold NaN or infinity: get the checkpoint again, or a wider dtype"
    require(not bad, "weights", bad[:4], remedy)


def _check_depth(config: ModelConfig, checkpoint: Checkpoint) -> None:
    """Before a block is made for each of the layers that a config claims."""
    held = {match[1] for name in checkpoint.names if (match := _LAYER.match(name))}
    remedy = f"the checkpoint holds {len(held)} layers: mend its config.json, or get the checkpoint again"
    require(config.layers <= len(held), "num_hidden_layers", config.layers, remedy)


def _same(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """The one of two matrices that a tied model needs, where they are equal."""
    remedy = (
        "it differs from the embedding, which tie_word_embeddings=true puts in its place: write "
        '"tie_word_embeddings": false into config.json to use it, or remove it from the weights'
    )
    if first.dtype != second.dtype:
        first, second = first.astype(np.float32), second.astype(np.float32)
    require(np.array_equal(first, second), "weights", _HEAD, remedy)
    return first


def _stored_shape(name: str, target: tuple[int, ...]) -> tuple[int, ...]:
    """How a checkpoint lays out a parameter: ours has the heads as an axis, where its rows run through all of them."""
    outputs = target if name.endswith(".bias") or len(target) == 1 else target[:-1]
    return (math.prod(outputs), *target[len(outputs) :])


def _places(decoder: Decoder) -> dict[str, tuple[str, int | None]]:
    """Where each tensor goes that the model has a parameter for."""
    places = dict(_ENDS)
    for index in range(decoder.config.layers):
        for name, (path, part) in _BLOCK.items():
            places[f"model.layers.{index}.{name}"] = (f"blocks.{index}.{path}", part)
    return {name: place for name, place in places.items() if _at(decoder, place[0]) is not None}


def _at(module: Any, path: str) -> Any:
    for part in path.split("."):
        if module is None:
            return None
        module = module[int(part)] if part.isdigit() else getattr(module, part)
    return module


def _fingerprint(decoder: Decoder) -> str:
    digest = hashlib.sha256(repr(decoder.config).encode())
    # All are begun before the first is waited for.
    for piece in [_sampled(leaf) for leaf in jax.tree.leaves(nnx.state(decoder, nnx.Param))]:
        for part in piece:
            digest.update(np.asarray(part).tobytes())
    return digest.hexdigest()[:16]


@jax.jit
def _sampled(leaf: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A parameter's first row, and the sum of all its bits, which no order of adding changes."""
    bits = jax.lax.bitcast_convert_type(leaf, jnp.uint16 if leaf.dtype.itemsize == 2 else jnp.uint32)
    return leaf.reshape(-1, leaf.shape[-1])[0], bits.sum(dtype=jnp.uint32)
