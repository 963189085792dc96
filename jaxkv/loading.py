"""`load`: load a checkpoint as a `LanguageModel`. Every tensor of the checkpoint is used, or rejected by name."""

import dataclasses
import functools
import hashlib
import math
import os
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxkv._checks import settled, to_python_scalar, validate_int
from jaxkv._errors import build_value_error, require
from jaxkv.cache import ConversationState, KVCache
from jaxkv.cache.stores import choose_cache_dtype
from jaxkv.checkpoints import (
    Checkpoint,
    StoredTensor,
    fetch_checkpoint,
    get_manifest,
    list_model_names,
    open_checkpoint,
)
from jaxkv.checkpoints.converting import DTYPES
from jaxkv.machine import hosts, memory
from jaxkv.models.config import ModelConfig
from jaxkv.models.decoder import Decoder, named_parameters
from jaxkv.models.sources import TensorSource, map_parameter_sources
from jaxkv.models.split_decoder import SplitDecoder
from jaxkv.models.values import check_weight_format
from jaxkv.models.weights import read_parameter, read_quantised_weight
from jaxkv.sharding.mesh import ShardingMesh, move_to_sharding
from jaxkv.sharding.parameters import compute_shard_shape, get_parameter_spec, make_model_mesh
from jaxkv.text.prompts import Prompt, encode_prompts
from jaxkv.text.shown import KeptTokensDisplay, decode_token_texts, join_equally_kept_tokens
from jaxkv.text.tokenizer import ChatTokenizer

# Tensors that are not read: rotations, which are computed from the config instead, constants of xIELU, and layers that
# predict several tokens.
_UNREAD = re.compile(r"(rotary_emb\.inv_freq|mlp\.act_fn\.(beta|eps))$|\bmtp(\b|_)")

_LAYER = re.compile(r"(?:model\.layers|transformer\.h)\.(\d+)\.")
_HEAD = "lm_head.weight"
# Keys of `generation_config.json` that are fields of `Sampling`.
_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


class LanguageModel(nnx.Module):
    """A loaded model: a Flax NNX decoder (`decoder`) with the parameters, and its tokenizer (`text`) or None.

    Attributes:
        decoder: the Flax NNX module that holds the parameters.
        text: tokenizer and chat template, or None if the checkpoint has none. It never enters jitted code.
        name: name or path of the checkpoint.
        filter_layers: layers whose attention best predicts what the layers above attend to (OmniKV), or None.
        generation: keys of the checkpoint's `generation_config.json`; empty without this file.
        fingerprint: hash of these weights. Caches carry it, so that a cache of other weights is rejected.
    """

    def __init__(
        self,
        decoder: Decoder,
        *,
        text: ChatTokenizer | None,
        name: str,
        filter_layers: tuple[int, ...] | None = None,
        generation: Mapping[str, Any] = {},
    ):
        self.decoder = decoder
        self.text = text
        self.name = name
        self.filter_layers = filter_layers
        self.generation = generation
        self.fingerprint = _hash_model(decoder)
        self._flat: SplitDecoder | None = None

    def __repr__(self) -> str:
        layers = self.config.layers
        megabytes = self.nbytes / 1e6
        weights = "" if self.decoder.weights is None else f" with {self.decoder.weights} weights"
        return f"LanguageModel({self.name!r}, {layers} layers, {self.dtype}{weights}, {megabytes:,.1f} MB)"

    __str__ = __repr__  # Flax would print every parameter.

    @property
    def config(self) -> ModelConfig:
        """`ModelConfig` of the decoder: sizes, family switches and special token ids."""
        return self.decoder.config

    @property
    def tokenizer(self) -> ChatTokenizer:
        """`ChatTokenizer` of the checkpoint; ValueError for a checkpoint without a tokenizer."""
        if self.text is None:
            remedy = "the checkpoint has no tokenizer: pass token ids instead of text"
            raise build_value_error("params", self.name, remedy)
        return self.text

    @property
    def end_token_ids(self) -> tuple[int, ...]:
        """Sorted ids of the tokens that end an answer, from the config and the tokenizer."""
        return tuple(sorted({*self.config.eos, *(self.text.eos_ids if self.text else ())}))

    @property
    def sampling_defaults(self) -> dict[str, Any]:
        """Fields of `Sampling` that the checkpoint's `generation_config.json` sets; temperature 0 if it is greedy."""
        given = self.generation
        greedy = {"temperature": 0.0} if given.get("do_sample") is False else {}
        return {name: given[name] for name in _SAMPLING if given.get(name) is not None} | greedy

    @property
    def axes(self) -> ShardingMesh | None:
        """`ShardingMesh` of the mesh that the parameters are sharded over; None on a single device."""
        return self.flat_decoder.axes

    def show_kept_tokens(self, cache: KVCache, prompt: Prompt) -> KeptTokensDisplay:
        """Return the prompts as a `KeptTokensDisplay`, tokens shaded by how many heads of compressed layers keep them.

        Args:
            cache: a cache of this model.
            prompt: the prompt, as it was passed to prefill.

        Returns:
            A `KeptTokensDisplay` text.

        Raises:
            ValueError: for a cache of another model, a model without a tokenizer, or a prompt that is not the cache's.
        """
        require(
            cache.model == self.fingerprint,
            "params",
            self.name,
            "the cache belongs to another model: pass the model that made it",
        )
        text = self.tokenizer
        raw = cache.turn is ConversationState.RAW
        fresh = (ConversationState.START,) * cache.batch
        encoded = encode_prompts(prompt, text, self.config, turn=fresh, raw=raw, close=False)
        held = cache.counts()
        passages = []
        for ids, counts in zip(encoded.ids, held, strict=True):
            remedy = f"the cache has seen {len(counts)}: pass the prompt that it was made from"
            require(len(ids) <= len(counts), "prompt", f"{len(ids)} tokens", remedy)
            passages.append(
                join_equally_kept_tokens(
                    decode_token_texts(ids, text).texts, counts[: len(ids)].tolist()
                )
            )
        return KeptTokensDisplay(
            passages=tuple(passages), heads=len(cache.compressed_layers) * self.config.kv_heads
        )

    def on(self, mesh: Mesh) -> "LanguageModel":
        """Return the model with its parameters sharded over a mesh, a cached copy; this model if already on the mesh.

        Args:
            mesh: mesh with the axes "data" and "model".

        Returns:
            A model that shares only the tokenizer with this one, or this model if its parameters are already on the
            mesh.

        Raises:
            TypeError: if `mesh` is not a mesh.
            ValueError: for a mesh with other axes, or with axes that do not divide the model.
        """
        axes = ShardingMesh(mesh=make_model_mesh(mesh, self.config))
        if axes == self.axes:
            return self
        # Cached with the split parameters, so that replacing a parameter invalidates it.
        there = self.flat_decoder.on_mesh.get(axes)
        if there is None:
            hosts.require_same_arguments("LanguageModel.on", self, mesh)
            decoder = Decoder(self.config, dtype=self.dtype, weights=self.decoder.weights)
            _shard_parameters(self.decoder, decoder, axes.mesh)
            there = LanguageModel(
                decoder,
                text=self.text,
                name=self.name,
                filter_layers=self.filter_layers,
                generation=self.generation,
            )
            self.flat_decoder.on_mesh = {axes: there}
        # The filter layers may have changed since the copy was made.
        there.filter_layers = self.filter_layers
        return there

    @property
    def flat_decoder(self) -> SplitDecoder:
        """Decoder as a `SplitDecoder`, cached until a parameter changes; if one is on a mesh, all are sharded on it."""
        if self._flat is None or not self._flat.is_split_of(self.decoder):
            leaves = (each.get_raw_value() for _, each in named_parameters(self.decoder))
            axes = next(filter(None, map(ShardingMesh.get_array_mesh, leaves)), None)
            if axes is not None:
                # A replaced parameter may be on one device, or replicated on each of them.
                _shard_parameters(self.decoder, self.decoder, axes.mesh)
            self._flat = SplitDecoder(self.decoder)
        return self._flat

    @property
    def cache_dtype(self) -> jnp.dtype:
        """Dtype in which devices hold cache entries: float32 on a CPU, else the model's dtype."""
        platform = jax.default_backend() if self.axes is None else self.axes.platform
        return choose_cache_dtype(self.dtype, platform)

    @property
    def dtype(self) -> jnp.dtype:
        """Dtype of embedding, norms, activations and unquantised weights; a CPU holds caches in float32 instead."""
        return self.decoder.dtype

    @property
    def nbytes(self) -> int:
        """Total size of all parameters of the model, in bytes."""
        return self.decoder.nbytes


@settled
def load(
    name_or_path: str | os.PathLike[str],
    dtype: Any = None,
    *,
    weights: Any = None,
    max_positions: int | None = None,
    mesh: Mesh | None = None,
    progress: bool = True,
) -> LanguageModel:
    """Load a model by name, path or hub id; return a `LanguageModel` with its parameters on the device or mesh.

    Args:
        name_or_path: a name from `jaxkv models`, a folder in Hugging Face's layout, a `.gguf` file, a hub id, or a
            folder that `python -m jaxkv.checkpoints convert` has written.
        dtype: float32, bfloat16 or float16; by default bfloat16 on a GPU and float32 on a CPU.
        weights: quantisation of linear maps. None keeps them in `dtype`. "int8" stores 8-bit codes with a float32 scale
            per output: about half the memory of 16 bits. "int4" stores 4-bit codes with a scale and a minimum per 32
            codes: 5 bits per weight. Weights are quantised while they are loaded. An NVIDIA GPU multiplies one
            sequence's vectors by codes directly; elsewhere each step dequantises them, which is slower. Embeddings,
            activations and caches are in `dtype` in every case.
        max_positions: tokens of the longest sequence, including new ones; by default the model's own limit. A model
            with longrope (Phi-3 128K, Phi-4-mini) rotates as for texts of that length. It uses one list of factors up
            to its original length and another above, independently of each text's length.
        mesh: mesh with the axes "data" and "model"; parameters are sharded over it. A process reads the shards of its
            own devices, and holds these and at most two tensors. Checksums of a converted folder cover complete
            tensors, so shards are read without them.
        progress: True shows bars on stderr if stderr is a terminal.

    Returns:
        A `LanguageModel`: the parameters as a Flax module, and the tokenizer.

    Raises:
        TypeError: for a name that is neither a string nor a path, or a `mesh` that is not a mesh.
        ValueError: for an unknown model, an unsupported config key, or more positions than the model supports; for
            weights that are corrupt, missing, unexpected, of the wrong shape, or not finite; for a mesh with other
            axes, or with axes that do not divide the model.
        MemoryError: if the parameters, or one device's shard of them, do not fit; the message names the bytes.
    """
    if dtype is None:
        platform = (
            jax.default_backend() if not isinstance(mesh, Mesh) else mesh.devices.flat[0].platform
        )
        dtype = "float32" if platform == "cpu" else "bfloat16"
    with hosts.share_failures("jaxkv.load", mesh):
        kind = validate_dtype(dtype)
        narrow = check_weight_format(weights)
        checkpoint = open_checkpoint(
            fetch_checkpoint(name_or_path, progress=progress and hosts.is_first_process())
        )
        config = ModelConfig.from_hf(checkpoint.config)
        config = config if max_positions is None else config.limit_positions(max_positions)
        _check_layer_count(config, checkpoint)
        text = ChatTokenizer.from_checkpoint(checkpoint)
    hosts.require_same_arguments(
        "jaxkv.load", None, mesh, dtype=kind, weights=narrow, config=config
    )
    decoder = Decoder(config, dtype=kind, weights=narrow)
    load_parameters(decoder, checkpoint, None if mesh is None else make_model_mesh(mesh, config))
    name = os.fspath(name_or_path)
    filters = (
        get_manifest(name).filter_layers if name in list_model_names() else checkpoint.filter_layers
    )
    return LanguageModel(
        decoder, text=text, name=name, filter_layers=filters, generation=checkpoint.generation
    )


def validate_dtype(given: Any) -> np.dtype:
    """Return the parameters' dtype, float32, bfloat16 or float16, as a numpy dtype; raise ValueError for others."""
    try:
        name = jnp.dtype(to_python_scalar(given)).name
    except TypeError:  # Not a dtype.
        name = given
    require(name in DTYPES, "dtype", name, f"not supported: use one of {', '.join(DTYPES)}")
    return jnp.dtype(name)


def load_parameters(decoder: Decoder, checkpoint: Checkpoint, mesh: Mesh | None = None) -> None:
    """Set a decoder's parameters from a checkpoint, on device or mesh; ValueError for missing, extra, non-finite ones.

    With `mesh` (from `make_model_mesh`) each device gets its shard; without, the default device gets all parameters.

    Raises:
        ValueError: for a tensor that is missing, unexpected, of the wrong shape or not finite; the message names it.
    """
    sources = map_parameter_sources(
        decoder, str(checkpoint.config.get("model_type")), checkpoint.tensor_names
    )
    parameters = dict(named_parameters(decoder))
    places = {source.name for of in sources.values() for source in of}
    names = {name for name in checkpoint.tensor_names if not _UNREAD.search(name)}
    names -= _find_predicting_layers(names, decoder.config.blocks, checkpoint.config)
    # Some exporters write the tied matrix twice.
    twice = decoder.head is None and _HEAD in names
    names -= {_HEAD} if twice else set()
    missing = sorted(places - names)
    extra = sorted(names - places)
    # With several processes the check of sharded parameters is collective, so it follows all reads.
    with hosts.share_failures("reading weights", mesh):
        require(
            not missing,
            "weights",
            missing[:4],
            "missing in the checkpoint, which may belong to another model: get the "
            "checkpoint again",
        )
        require(
            not extra,
            "weights",
            extra[:4],
            "not a parameter of this config: use the config.json of this checkpoint",
        )
        for of in sources.values():
            for source in of:
                _check_stored_tensor(source, checkpoint.stored[source.name])
        if twice:
            _check_tied_head(
                *(checkpoint.stored[name] for name in (sources["embedding"][0].name, _HEAD))
            )
        _check_parameters_fit({path: each.get_value() for path, each in parameters.items()}, mesh)
        for path, of in sources.items():
            parts = [(source, checkpoint.stored[source.name]) for source in of]
            beside = _list_scale_paths(path, parameters)
            like = parameters[path].get_value()
            values = (
                [read_parameter(parts, like, path, mesh)]
                if not beside
                else read_quantised_weight(parts, like, path, beside, mesh)
            )
            for each, value in zip((path, *beside), values, strict=True):
                parameters[each].set_value(value)
    # Codes are finite; a scale is not finite if one of its weights is not.
    held = {
        path: parameters[next(iter(_list_scale_paths(path, parameters)), path)] for path in sources
    }
    _check_finite({of: held[path].get_value() for path, of in sources.items()})


def _find_predicting_layers(names: set[str], layers: int, config: Mapping[str, Any]) -> set[str]:
    """Return the tensors of the layers that predict several tokens, as many as the config says behind its layers."""
    keys = ("num_nextn_predict_layers", "num_mtp_layers")
    more = max(validate_int(key, config.get(key) or 0, least=0) for key in keys)
    found = {name: int(at[1]) for name in names if (at := _LAYER.match(name))}
    # Each joins embeddings and hidden states: another layer belongs to a config of more layers.
    joining = {at for name, at in found.items() if ".eh_proj." in name}
    return {name for name, at in found.items() if at in joining and layers <= at < layers + more}


def _list_scale_paths(path: str, parameters: Mapping[str, Any]) -> list[str]:
    """Return the parameter paths of a quantised weight's scales, then minima; empty for a float weight."""
    return [
        each for name in ("scale", "scales", "leasts") if (each := f"{path}_{name}") in parameters
    ]


def _check_parameters_fit(parameters: dict[str, Any], mesh: Mesh | None) -> None:
    """Raise MemoryError if the parameters do not fit into their devices' free memory, before any tensor is read."""
    if mesh is None:
        total = sum(math.prod(each.shape) * each.dtype.itemsize for each in parameters.values())
        memory.require_free_bytes(
            total, "the model", remedy="use a narrower dtype, or a mesh of several devices"
        )
        return
    total = 0
    for path, each in parameters.items():
        total += math.prod(compute_shard_shape(path, each.shape, mesh)) * each.dtype.itemsize
    for device in mesh.local_devices:
        share = total * ShardingMesh(mesh=mesh).devices_sharing_memory
        remedy = (
            f"use more than mesh.model={mesh.shape['kv'] * mesh.shape['rep']} devices, "
            "or a narrower dtype"
        )
        memory.require_free_bytes(share, "a device's shard of the model", device, remedy=remedy)


def _check_finite(parameters: dict[tuple[TensorSource, ...], jax.Array]) -> None:
    """Raise ValueError, naming the tensors, if parameters contain NaN or infinity."""
    # All computations are dispatched before the first result is awaited.
    finite = {
        of: _jit_replicated(_make_finite_check(len(of[0].at)), value)(value)
        for of, value in parameters.items()
    }
    bad: list[str] = []
    for of, rows in finite.items():
        sound = np.asarray(rows)
        bad += [source.name for source in of if not sound[source.at]]
    remedy = "these tensors contain NaN or infinity: get the checkpoint again, or use a wider dtype"
    require(not bad, "weights", list(dict.fromkeys(bad))[:4], remedy)


@functools.cache
def _make_finite_check(depth: int) -> Callable[[jax.Array], jax.Array]:
    """Return a function from a parameter to bools over its first `depth` axes, True where all values are finite."""
    return lambda value: jnp.isfinite(value).all(axis=tuple(range(depth, value.ndim)))


def _jit_replicated(fn: Callable[..., Any], leaf: jax.Array) -> Callable[..., Any]:
    """Jit a function of one parameter; if the parameter is on a mesh, the result is replicated on all its devices."""
    mesh = leaf.sharding.mesh if isinstance(leaf.sharding, NamedSharding) else None
    return _jit_on_mesh(fn, mesh)


@functools.cache
def _jit_on_mesh(fn: Callable[..., Any], mesh: Mesh | None) -> Callable[..., Any]:
    """Jit a function, cached by function and mesh; on a mesh its results are replicated on all devices."""
    return (
        jax.jit(fn)
        if mesh is None
        else jax.jit(fn, out_shardings=NamedSharding(mesh, PartitionSpec()))
    )


def _check_layer_count(config: ModelConfig, checkpoint: Checkpoint) -> None:
    """Raise ValueError if the config has more layers than the checkpoint, before any block is built."""
    held = {match[1] for name in checkpoint.tensor_names if (match := _LAYER.match(name))}
    remedy = (
        f"the checkpoint has {len(held)} layers: correct its config.json, or get the "
        "checkpoint again"
    )
    require(config.blocks <= len(held), "num_hidden_layers", config.blocks, remedy)


def _check_stored_tensor(source: TensorSource, tensor: StoredTensor) -> None:
    """Raise ValueError if a stored tensor has floats of 8 bits or integers, or another shape than the config's."""
    remedy = (
        "not floats of 16 bits or more: codes need tensors of scales, and a quantization_config "
        "in config.json"
    )
    require(
        jnp.issubdtype(tensor.dtype, jnp.floating) and tensor.dtype.itemsize > 1,
        f"{source.name}.dtype",
        tensor.dtype.name,
        remedy,
    )
    remedy = f"the config requires {source.shape}: use the config.json of this checkpoint"
    require(tensor.shape == source.shape, source.name, tensor.shape, remedy)


def _check_tied_head(embedding: StoredTensor, head: StoredTensor) -> None:
    """Raise ValueError if a tied checkpoint also stores an output matrix that differs from the embedding."""
    remedy = (
        "it differs from the embedding, which tie_word_embeddings=true uses instead: set "
        '"tie_word_embeddings": false in config.json to use it, or remove it from the weights'
    )
    first = embedding.read(())
    second = head.read(())
    if first.dtype != second.dtype:
        first = first.astype(np.float32)
        second = second.astype(np.float32)
    require(np.array_equal(first, second), "weights", _HEAD, remedy)


def _shard_parameters(source: Decoder, target: Decoder, mesh: Mesh) -> None:
    """Copy all parameters of `source` into the decoder `target`, in place, sharded over a mesh."""
    values = dict(named_parameters(source))
    for path, parameter in named_parameters(target):
        compute_shard_shape(path, values[path].get_value().shape, mesh)
        parameter.set_value(
            move_to_sharding(
                values[path].get_value(), NamedSharding(mesh, get_parameter_spec(path, mesh))
            )
        )


def _hash_model(decoder: Decoder) -> str:
    """Return a model's hash as 16 hex digits: of its config, and of each parameter's first row and sum of bits."""
    digest = hashlib.sha256(_format_non_default_config(decoder.config).encode())
    # All computations are dispatched before the first result is awaited.
    for piece in [
        _jit_replicated(_summarise_parameter_bits, leaf)(leaf)
        for leaf in jax.tree.leaves(nnx.state(decoder, nnx.Param))
    ]:
        for part in piece:
            digest.update(np.asarray(part).tobytes())
    return digest.hexdigest()[:16]


def _format_non_default_config(value: Any) -> str:
    """Return as text the fields of a (nested) dataclass that differ from their defaults; for other values the `repr`.

    Fields that later versions add do not change the text of models that do not set them.
    """
    if isinstance(value, tuple):
        return f"({', '.join(map(_format_non_default_config, value))})"
    if not dataclasses.is_dataclass(value):
        return repr(value)
    given = (
        (each.name, getattr(value, each.name), each.default) for each in dataclasses.fields(value)
    )
    text = ", ".join(
        f"{name}={_format_non_default_config(mine)}" for name, mine, usual in given if mine != usual
    )
    return f"{type(value).__name__}({text})"


def _summarise_parameter_bits(leaf: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return a parameter's first row as unsigned integers of its bits, and the uint32 sum over all elements."""
    bits = jax.lax.bitcast_convert_type(
        leaf, {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[leaf.dtype.itemsize]
    )
    # Bits, because a mesh gathers floats by adding zeros, which turns -0.0 into 0.0.
    return bits[(0,) * (leaf.ndim - 1)], bits.sum(dtype=jnp.uint32)
