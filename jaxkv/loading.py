"""From a name or a path to parameters: every tensor of the checkpoint finds its place, or is refused by name."""

import functools
import hashlib
import math
import os
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxkv import hosts, memory
from jaxkv._errors import require
from jaxkv._settings import settled
from jaxkv.axes import Axes, put
from jaxkv.checkpoints import Checkpoint, StoredTensor, fetch, manifest, names, open_checkpoint
from jaxkv.checkpoints.converting import DTYPES
from jaxkv.models.config import ModelConfig
from jaxkv.models.decoder import Decoder, Flat, parameters
from jaxkv.sharding import model_mesh, spec_of
from jaxkv.text.tokenizer import Text

# Buffers some exporters write; the rotation is computed from the config.
_DERIVED = re.compile(r"rotary_emb\.inv_freq$")

_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
# Our parameter -> the tensors that are stacked in it; a bias lies beside its weight.
_ENDS = {"embedding": (_EMBEDDING,), "norm.scale": ("model.norm.weight",), "head": (_HEAD,)}
_NORMS = {
    "attention_norm.scale": ("input_layernorm",),
    "mlp_norm.scale": ("post_attention_layernorm",),
    "attention.q_norm.scale": ("self_attn.q_norm",),
    "attention.k_norm.scale": ("self_attn.k_norm",),
}
_PROJECTIONS: dict[str, tuple[str, ...]] = {
    "attention.q": ("self_attn.q_proj",),
    "attention.kv": ("self_attn.k_proj", "self_attn.v_proj"),
    "attention.out": ("self_attn.o_proj",),
    "mlp.gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.down": ("mlp.down_proj",),
}
_BLOCK = {path: tuple(f"{each}.weight" for each in of) for path, of in (_NORMS | _PROJECTIONS).items()} | {
    f"{path}_bias": tuple(f"{each}.bias" for each in of) for path, of in _PROJECTIONS.items()
}


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
    def axes(self) -> Axes | None:
        """Of the mesh that the parameters lie on; None where they lie on one device."""
        return self.flat.axes

    def on(self, mesh: Mesh) -> "LanguageModel":
        """The same model with its parameters on a mesh, moved there at the first call.

        Args:
            mesh: devices with the axes "data" and "model".

        Returns:
            A model that shares nothing but the tokenizer; this one, if it lies there already.

        Raises:
            TypeError: for a mesh that is none.
            ValueError: for a mesh whose axes are others, or do not divide the model.
        """
        axes = Axes(mesh=model_mesh(mesh, self.config))
        if axes == self.axes:
            return self
        # With the parameters taken apart: a new model where one of them has been replaced.
        moved = self.flat.moved.get(axes)
        if moved is None:
            hosts.require_same("LanguageModel.on", self, mesh)
            decoder = Decoder(self.config, dtype=self.dtype)
            _spread_over(self.decoder, decoder, axes.mesh)
            moved = LanguageModel(decoder, text=self.text, name=self.name, filter_layers=self.filter_layers)
            self.flat.moved = {axes: moved}
        # They may have been found since.
        moved.filter_layers = self.filter_layers
        return moved

    @property
    def flat(self) -> Flat:
        """The decoder taken apart for jitted code: once, and again only after a parameter has been replaced."""
        if self._flat is None or not self._flat.is_of(self.decoder):
            axes = next(filter(None, map(Axes.of, parameters(self.decoder))), None)
            if axes is not None:
                # One that has been replaced may lie whole on a device, or on each of them: parts are told by place.
                _spread_over(self.decoder, self.decoder, axes.mesh)
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
def load(
    name_or_path: str | os.PathLike[str], dtype: Any = None, *, mesh: Mesh | None = None, progress: bool = True
) -> LanguageModel:
    """Loads a model.

    Args:
        name_or_path: a name from `jaxkv models`, a folder in Hugging Face's layout, a `.gguf` file, a hub id, or a
            folder that `python -m jaxkv.checkpoints convert` has written.
        dtype: float32, bfloat16 or float16; by default bfloat16 on a GPU and float32 on a CPU.
        mesh: devices with the axes "data" and "model": each gets its part of every parameter. A process reads what its
            own devices get, and holds that and two tensors at most. The checksums of a converted folder are of whole
            tensors, so that parts of them are read unchecked.
        progress: show bars on stderr, if it is a terminal.

    Returns:
        The parameters as a Flax module, with the tokenizer beside it.

    Raises:
        TypeError: for a mesh that is none.
        ValueError: for an unknown model, an unsupported config key, weights that are corrupt, missing, left over, of
            the wrong shape, or not finite; for a mesh whose axes are others, or do not divide the model.
        MemoryError: naming the bytes, if parameters, or a device's part of them, do not fit.
    """
    if dtype is None:
        platform = jax.default_backend() if not isinstance(mesh, Mesh) else mesh.devices.flat[0].platform
        dtype = "float32" if platform == "cpu" else "bfloat16"
    with hosts.together("jaxkv.load", mesh):
        kind = _dtype(dtype)
        checkpoint = open_checkpoint(fetch(os.fspath(name_or_path), progress=progress and hosts.speaks()))
        config = ModelConfig.from_hf(checkpoint.config)
        _check_depth(config, checkpoint)
        text = Text.from_checkpoint(checkpoint)
    hosts.require_same("jaxkv.load", None, mesh, dtype=kind, config=config)
    decoder = Decoder(config, dtype=kind)
    fill(decoder, checkpoint, None if mesh is None else model_mesh(mesh, config))
    name = os.fspath(name_or_path)
    filters = manifest(name).filter_layers if name in names() else checkpoint.filter_layers
    return LanguageModel(decoder, text=text, name=name, filter_layers=filters)


def _dtype(given: Any) -> np.dtype:
    try:
        name = jnp.dtype(given).name
    except TypeError:  # no dtype at all
        name = given
    require(name in DTYPES, "dtype", name, f"give one of {', '.join(DTYPES)}")
    return jnp.dtype(name)


def fill(decoder: Decoder, checkpoint: Checkpoint, mesh: Mesh | None = None) -> None:
    """Puts a checkpoint's tensors into a decoder's parameters, one at a time.

    Args:
        decoder: parameters as shapes.
        checkpoint: an open checkpoint.
        mesh: devices that share the parameters, from `model_mesh`; None for the default device.

    Raises:
        ValueError: naming the tensor that is missing, left over, misshapen or not finite.
    """
    sources = _sources(decoder)
    places = {name for of in sources.values() for name in of}
    names = {name for name in checkpoint.names if not _DERIVED.search(name)}
    # Some exporters write the tied matrix twice.
    twice = decoder.head is None and _HEAD in names
    names -= {_HEAD} if twice else set()
    missing, extra = sorted(places - names), sorted(names - places)
    # The processes of a mesh wait for one another where they look at all of a parameter: once each has read its part.
    with hosts.together("reading weights", mesh):
        require(not missing, "weights", missing[:4], "the checkpoint lacks these tensors; it may be another model's")
        require(not extra, "weights", extra[:4], "the config has no place for these tensors; it may be another model's")
        for path, of in sources.items():
            shape = _at(decoder, path).get_value().shape
            for name in of:
                _check_stored(name, checkpoint.stored[name], shape if len(of) == 1 else shape[1:])
        if twice:
            _check_same(checkpoint.stored[_EMBEDDING], checkpoint.stored[_HEAD])
        _check_room({path: _at(decoder, path).get_value() for path in sources}, mesh)
        for path, of in sources.items():
            parameter, tensors = _at(decoder, path), [checkpoint.stored[name] for name in of]
            parameter.set_value(_read(tensors, parameter.get_value(), path, mesh))
    _check_finite({of: _at(decoder, path).get_value() for path, of in sources.items()})


def _check_room(parameters: dict[str, Any], mesh: Mesh | None) -> None:
    """Refuses parameters for which there is no room, before the first is read."""
    if mesh is None:
        total = sum(math.prod(each.shape) * each.dtype.itemsize for each in parameters.values())
        memory.check_bytes(total, "the model", remedy="give a narrower dtype, or a mesh of several devices")
        return
    total = 0
    for path, each in parameters.items():
        part = NamedSharding(mesh, spec_of(path, mesh)).shard_shape(each.shape)
        total += math.prod(part) * each.dtype.itemsize
    for device in mesh.local_devices:
        share = total * Axes(mesh=mesh).in_one_memory
        remedy = f"give mesh.model more than {mesh.shape['kv'] * mesh.shape['rep']} devices, or a narrower dtype"
        memory.check_bytes(share, "a device's part of the model", device, remedy=remedy)


def _read(tensors: list[StoredTensor], like: Any, path: str, mesh: Mesh | None) -> jax.Array:
    """A parameter of this shape and dtype, on the default device or each device's part of it."""
    if mesh is None:
        return jnp.array(_part(tensors, like.shape, like.dtype, (slice(None),) * len(like.shape)))
    return _spread(tensors, like.shape, like.dtype, NamedSharding(mesh, spec_of(path, mesh)))


def _check_finite(parameters: dict[tuple[str, ...], jax.Array]) -> None:
    """Refuses tensors that are not, wherever the parameters lie that they are stacked in."""
    # All are begun before the first is waited for.
    finite = {of: _replicated(_are_finite, value)(value) for of, value in parameters.items()}
    bad: list[str] = []
    for of, rows in finite.items():
        sound = np.asarray(rows)
        bad += [name for name, ok in zip(of, sound if len(of) > 1 else [sound.all()], strict=True) if not ok]
    remedy = "these tensors hold NaN or infinity: get the checkpoint again, or a wider dtype"
    require(not bad, "weights", bad[:4], remedy)


def _part(tensors: list[StoredTensor], shape: tuple[int, ...], dtype: np.dtype, index: tuple[slice, ...]) -> np.ndarray:
    """Reads a part of a parameter, and nothing else of the tensors where their files allow it."""
    spans = [range(*each.indices(size)) for each, size in zip(index, shape, strict=True)]
    stacked = len(tensors) > 1
    own = spans[1:] if stacked else spans
    buffer = np.empty([len(each) for each in spans], dtype)
    for to, part in enumerate(spans[0] if stacked else [0]):
        tensor = tensors[part]
        # Axes of ours that are one of the file's: those of the output, all of them in the first.
        axes = len(own) - len(tensor.shape) + 1
        columns = tuple(slice(each.start, each.stop) for each in own[axes:])
        target = (buffer[to] if stacked else buffer).reshape(-1, *[len(each) for each in own[axes:]])
        at = 0
        for first, last in _rows(own[:axes], shape[1:] if stacked else shape):
            whole = (first, last) == (0, tensor.shape[0]) and all(
                (each.start, each.stop) == (0, size) for each, size in zip(columns, tensor.shape[1:], strict=True)
            )
            target[at : at + last - first] = tensor.read(() if whole else (slice(first, last), *columns))
            at += last - first
    return buffer


def _rows(spans: list[range], shape: tuple[int, ...]) -> list[tuple[int, int]]:
    """Where a part of several axes lies on the one that runs through them: stretches, as long as can be."""
    if not spans:
        return [(0, 1)]
    inner = math.prod(shape[1 : len(spans)])
    below = _rows(spans[1:], shape[1:]) if len(spans) > 1 else [(0, 1)]
    if below == [(0, inner)]:
        return [(spans[0].start * inner, spans[0].stop * inner)]
    return [(each * inner + first, each * inner + last) for each in spans[0] for first, last in below]


def _spread(tensors: list[StoredTensor], shape: tuple[int, ...], dtype: np.dtype, where: NamedSharding) -> jax.Array:
    """A parameter of which each device has its part; devices with the same part share what was read."""
    read: dict[tuple, np.ndarray] = {}

    def part(index: Any) -> np.ndarray:
        key = tuple(each.indices(size) for each, size in zip(index, shape, strict=True))
        if key not in read:
            read[key] = _part(tensors, shape, dtype, index)
        return read[key]

    return jax.make_array_from_callback(shape, where, part, dtype=dtype)


def _are_finite(value: jax.Array) -> jax.Array:
    """Whether a parameter is, row by row of its first axis: tensors are stacked along it."""
    return jnp.isfinite(value).all(axis=tuple(range(1, value.ndim)))


def _replicated(fn: Callable[..., Any], leaf: jax.Array) -> Callable[..., Any]:
    """A function of one parameter whose result every process has, wherever the parameter lies."""
    mesh = leaf.sharding.mesh if isinstance(leaf.sharding, NamedSharding) else None
    return _jitted(fn, mesh)


@functools.cache
def _jitted(fn: Callable[..., Any], mesh: Mesh | None) -> Callable[..., Any]:
    return jax.jit(fn) if mesh is None else jax.jit(fn, out_shardings=NamedSharding(mesh, PartitionSpec()))


def _check_depth(config: ModelConfig, checkpoint: Checkpoint) -> None:
    """Before a block is made for each of the layers that a config claims."""
    held = {match[1] for name in checkpoint.names if (match := _LAYER.match(name))}
    remedy = f"the checkpoint holds {len(held)} layers: mend its config.json, or get the checkpoint again"
    require(config.layers <= len(held), "num_hidden_layers", config.layers, remedy)


def _check_stored(name: str, tensor: StoredTensor, target: tuple[int, ...]) -> None:
    remedy = "weights are floating point; load the unquantised ones, or a GGUF"
    require(jnp.issubdtype(tensor.dtype, jnp.floating), f"{name}.dtype", tensor.dtype.name, remedy)
    asked = _stored_shape(name, target)
    require(
        tensor.shape == asked, name, tensor.shape, f"the config asks for {asked}; the weights belong to another model"
    )


def _check_same(embedding: StoredTensor, head: StoredTensor) -> None:
    """Whether the matrix that a tied model does not need is the one that it has."""
    remedy = (
        "it differs from the embedding, which tie_word_embeddings=true puts in its place: write "
        '"tie_word_embeddings": false into config.json to use it, or remove it from the weights'
    )
    first, second = embedding.read(()), head.read(())
    if first.dtype != second.dtype:
        first, second = first.astype(np.float32), second.astype(np.float32)
    require(np.array_equal(first, second), "weights", _HEAD, remedy)


def _stored_shape(name: str, target: tuple[int, ...]) -> tuple[int, ...]:
    """How a checkpoint lays out a parameter: ours has the heads as an axis, where its rows run through all of them."""
    outputs = target if name.endswith(".bias") or len(target) == 1 else target[:-1]
    return (math.prod(outputs), *target[len(outputs) :])


def _sources(decoder: Decoder) -> dict[str, tuple[str, ...]]:
    """The tensors of each parameter that the model has."""
    sources: dict[str, tuple[str, ...]] = dict(_ENDS)
    for index in range(decoder.config.layers):
        prefix = f"model.layers.{index}."
        for path, of in _BLOCK.items():
            sources[f"blocks.{index}.{path}"] = tuple(prefix + each for each in of)
    return {path: of for path, of in sources.items() if _at(decoder, path) is not None}


def _spread_over(source: Decoder, target: Decoder, mesh: Mesh) -> None:
    """Puts one decoder's parameters into another one, each device's part of them on a mesh of `model_mesh`."""
    for path in _sources(target):
        value, there = _at(source, path).get_value(), NamedSharding(mesh, spec_of(path, mesh))
        _at(target, path).set_value(put(value, there))


def _at(module: Any, path: str) -> Any:
    for part in path.split("."):
        if module is None:
            return None
        module = module[int(part)] if part.isdigit() else getattr(module, part)
    return module


def _fingerprint(decoder: Decoder) -> str:
    digest = hashlib.sha256(repr(decoder.config).encode())
    # All are begun before the first is waited for.
    for piece in [_replicated(_sampled, leaf)(leaf) for leaf in jax.tree.leaves(nnx.state(decoder, nnx.Param))]:
        for part in piece:
            digest.update(np.asarray(part).tobytes())
    return digest.hexdigest()[:16]


def _sampled(leaf: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A parameter's first row, and the sum of all its bits, which no order of adding changes."""
    bits = jax.lax.bitcast_convert_type(leaf, jnp.uint16 if leaf.dtype.itemsize == 2 else jnp.uint32)
    return leaf[(0,) * (leaf.ndim - 1)], bits.sum(dtype=jnp.uint32)
