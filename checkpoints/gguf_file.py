"""GGUF files as checkpoints: a Hugging Face config, and tensors under Hugging Face names, dequantised when read."""

import functools
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from . import gguf_reader
from ._errors import refusal, require
from .gguf_tokenizer import GgufTokenizer
from .tensor import Index, StoredTensor

# Mistral models are written as arch "llama".
_ARCHITECTURES = ("llama", "qwen2", "qwen3")
# Types whose blocks are 4-bit steps of one size from a least value, in groups of 32.
_STEPPED = ("Q4_0", "Q4_1", "Q4_K")
_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
# Tables of the rotary embedding: configuration, not weights.
_TABLES = re.compile(r"rope_freqs\.weight|blk\.\d+\.attn_rot_embd\.weight")
# Elements dequantised at once, so that no tensor is in memory twice.
_AT_ONCE = 1 << 20


class GgufFile:
    """GGUF file opened for reading: Hugging Face config, tensors under Hugging Face names, and vocabulary.

    Attributes:
        path: the file.
        config: its metadata under the keys of a Hugging Face `config.json`.
        tensors: its tensors by their Hugging Face names, float32 when they are read.
        tokenizer: its vocabulary as plain data, or None where it carries none.
    """

    def __init__(self, path: Path):
        """Opens the file and reads its metadata, not its weights; ValueError if it is corrupt or unsupported.

        Raises:
            ValueError: where the file is missing, truncated or corrupt, or its architecture is not built.
        """
        self.path = path
        self._metadata, self._stored = gguf_reader.read(path)
        read = functools.partial
        self.tensors = {
            (hf := _hf_name(name)): StoredTensor(
                shape=tensor.shape or (1,),
                dtype=np.dtype(np.float32),
                read=read(self._read, hf, tensor),
                stepped=tensor.kind.name in _STEPPED,
            )
            for name, tensor in self._stored.items()
            if not _is_table(name)
        }
        self._arch = self._get("general.architecture", kind=str)
        known = ", ".join(_ARCHITECTURES)
        require(self._arch in _ARCHITECTURES, "general.architecture", self._arch, f"jaxkv reads GGUFs of {known}")
        parts = self._get("split.count", 1, kind=int)
        require(parts <= 1, "split.count", parts, "merge the parts into one file with llama.cpp's gguf-split --merge")
        self.config = self._read_config()
        self.tokenizer = self._read_tokenizer()

    def _read(self, name: str, tensor: gguf_reader.GgufTensor, index: Index) -> np.ndarray:
        """Part `index` of a tensor as float32, dequantised, in Hugging Face's row order; reads only the heads in it."""
        heads = self._interleaved(name, tensor)
        first, last, _ = (index[0] if index else slice(None)).indices((*tensor.shape, 1)[0])
        if heads is None:
            return self._dequantised(name, tensor, first, last)[(slice(None), *index[1:])]
        size = tensor.shape[0] // heads
        low, high = first // size, -(-last // size)
        rows = undo_permutation(self._dequantised(name, tensor, low * size, high * size), high - low)
        return rows[(slice(first - low * size, last - low * size), *index[1:])]

    def _interleaved(self, name: str, tensor: gguf_reader.GgufTensor) -> int | None:
        """Number of heads of a Q or K projection whose rows llama.cpp has interleaved; None for other tensors."""
        for part, key in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
            heads, head_dim = self.config[key], self.config["head_dim"]
            # A tensor of another shape is refused later, when the model is loaded.
            if self._arch == "llama" and f".self_attn.{part}." in name and tensor.shape[:1] == (heads * head_dim,):
                return heads if head_dim % 2 == 0 else None
        return None

    def _dequantised(self, name: str, tensor: gguf_reader.GgufTensor, first: int, last: int) -> np.ndarray:
        """Rows first to last - 1 of a tensor as float32, in the file's row order; ValueError for unknown formats."""
        from gguf import quants

        try:
            # A vector's quantisation blocks run along its only axis: it is cut after dequantising.
            if len(tensor.shape) < 2:
                return np.asarray(np.atleast_1d(quants.dequantize(tensor.data, tensor.kind))[first:last], np.float32)
            array = np.empty((last - first, *tensor.shape[1:]), np.float32)
            step = max(1, _AT_ONCE // max(1, math.prod(tensor.shape[1:])))
            for start in range(first, last, step):
                stop = min(start + step, last)
                array[start - first : stop - first] = quants.dequantize(tensor.rows(start, stop), tensor.kind)
            return array
        except NotImplementedError as error:
            remedy = "this quantisation has no reader; use a Q4, Q5, Q6, Q8, F16 or BF16 file"
            raise refusal(f"{name}.type", tensor.kind.name, remedy) from error

    def _get(self, key: str, default: Any = None, *, kind: type) -> Any:
        """Metadata value of a key, or `default` if the key is absent; ValueError if it is not of type `kind`."""
        value = self._metadata.get(key)
        if value is None:
            return default
        # An integer is accepted as a float; a bool is accepted as neither.
        sound = type(value) in ((int, float) if kind is float else (kind,))
        require(sound, key, value, f"{_KINDS[kind]} is expected; convert the model again")
        return value

    def _list(self, key: str, kind: type) -> tuple[Any, ...]:
        """Metadata list of a key as a tuple, empty if the key is absent; ValueError for items not of type `kind`."""
        values = self._get(key, [], kind=list)
        sound = all(type(value) is kind for value in values)
        require(sound, key, values[:3], f"a list of {_KINDS[kind]} is expected; convert the model again")
        return tuple(values)

    def _hyper(self, key: str, default: Any = None, *, kind: type = int) -> Any:
        """Number under a key of the architecture, such as `llama.block_count`; ValueError if layers differ in it."""
        key = f"{self._arch}.{key}"
        value = self._metadata.get(key)
        if isinstance(value, list):
            # Models whose layers differ (OpenELM and the like) write one value per layer.
            require(len(set(value)) == 1, key, value[:8], "layers of different shapes are not built")
            value = value[0]
        else:
            value = self._get(key, default, kind=kind)
        remedy = f"the metadata must give {_KINDS[kind]}; convert the model again"
        require(type(value) in (int, kind), key, value, remedy)
        return value

    def _read_config(self) -> dict[str, Any]:
        """Dict with the keys of a Hugging Face `config.json`, from the metadata; ValueError if unsupported."""
        arch, heads, embed = self._arch, self._hyper("attention.head_count"), self._hyper("embedding_length")
        require(heads > 0, f"{arch}.attention.head_count", heads, "give at least 1; convert the model again")
        head_dim = self._hyper("attention.key_length", embed // heads)
        for key in ("attention.value_length", "rope.dimension_count"):
            value = self._hyper(key, head_dim)
            remedy = f"only heads where it equals head_dim={head_dim} are built"
            require(value == head_dim, f"{arch}.{key}", value, remedy)
        experts = self._hyper("expert_count", 0)
        require(experts == 0, f"{arch}.expert_count", experts, "mixtures of experts are read from safetensors only")
        given = "model.embed_tokens.weight" in self.tensors
        require(given, "tensor", "token_embd.weight", f"missing from {self.path}; download it again")
        config = {
            "model_type": arch,
            "vocab_size": self.tensors["model.embed_tokens.weight"].shape[0],
            "hidden_size": embed,
            "intermediate_size": self._hyper("feed_forward_length"),
            "num_hidden_layers": self._hyper("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": self._hyper("attention.head_count_kv", heads),
            "head_dim": head_dim,
            "hidden_act": "silu",
            # float32 in the file: rounded back to the decimal that it was written from.
            "rms_norm_eps": _decimal(self._hyper("attention.layer_norm_rms_epsilon", kind=float)),
            "rope_theta": _decimal(self._hyper("rope.freq_base", 10_000.0, kind=float)),
            "rope_scaling": self._read_rope_scaling(),
            "max_position_embeddings": self._hyper("context_length"),
            "tie_word_embeddings": "lm_head.weight" not in self.tensors,
        }
        if arch != "qwen2":  # its projections always carry biases
            config["attention_bias"] = "model.layers.0.self_attn.q_proj.bias" in self.tensors
        config["mlp_bias"] = "model.layers.0.mlp.gate_proj.bias" in self.tensors
        window = self._get(f"{arch}.attention.sliding_window", kind=int)
        if window:
            config |= {"sliding_window": window, "use_sliding_window": True}
            if arch != "llama":  # windows in all layers, not only above transformers' default of 28
                config["max_window_layers"] = 0
        ids = self._ids()
        # Null where the file has none: keys left out mean the defaults of transformers' config class.
        config |= {f"{kind}_token_id": ids[kind] for kind in ("bos", "eos", "pad")}
        if None not in (ids["eos"], ids["eot"]) and ids["eos"] != ids["eot"]:
            config["eos_token_id"] = [ids["eos"], ids["eot"]]
        return config

    def _ids(self) -> dict[str, int | None]:
        """Dict of special token ids by kind (bos, eos, eot, pad, unk); None for one without id or sound default."""
        ids = {kind: self._get(f"tokenizer.ggml.{key}_token_id", kind=int) for kind, key in _ID_KEYS.items()}
        # llama.cpp's defaults for a sentencepiece vocabulary; its default for "gpt2" is 11, a comma in most files.
        if self._get("tokenizer.ggml.model", kind=str) == "llama":
            count = len(self._get("tokenizer.ggml.tokens", [], kind=list))
            ids |= {kind: id for kind, id in _SENTENCEPIECE_IDS.items() if ids[kind] is None and id < count}
        return ids

    def _read_rope_scaling(self) -> dict[str, Any] | None:
        """Hugging Face's `rope_scaling` dictionary from the metadata; None for plain RoPE; ValueError if unknown."""
        arch = self._arch
        kind = self._get(f"{arch}.rope.scaling.type", kind=str)
        # The factor has a new and an old key; without a type it means linear, as in llama.cpp.
        factor = self._get(f"{arch}.rope.scaling.factor", kind=float)
        factor = self._get(f"{arch}.rope.scale_linear", kind=float) if factor is None else factor
        kind = "linear" if kind is None and factor not in (None, 0.0, 1.0) else kind
        factors = self._stored["rope_freqs.weight"].data if "rope_freqs.weight" in self._stored else None
        if factors is not None and not np.allclose(factors, 1):
            plain = kind in (None, "none")
            require(plain, f"{arch}.rope.scaling.type", kind, "scaling on top of rope_freqs is not built")
            theta = _decimal(self._hyper("rope.freq_base", 10_000.0, kind=float))
            return _llama3_scaling(np.asarray(factors, np.float64), theta)
        if kind in (None, "none"):
            return None
        require(kind in ("linear", "yarn"), f"{arch}.rope.scaling.type", kind, "jaxkv reads linear, yarn and llama3")
        remedy = "the metadata must give a number; convert the model again"
        require(factor is not None, f"{arch}.rope.scaling.factor", factor, remedy)
        scaling: dict[str, Any] = {"rope_type": kind, "factor": _decimal(factor)}
        if kind == "yarn":
            original = self._hyper("rope.scaling.original_context_length", self._hyper("context_length"))
            scaling["original_max_position_embeddings"] = original
            extra = self._get(f"{arch}.rope.scaling.attn_factor", 1.0, kind=float)
            remedy = "only YaRN's own attention factor is built"
            require(extra == 1.0, f"{arch}.rope.scaling.attn_factor", extra, remedy)
            for key in ("beta_fast", "beta_slow"):
                value = self._get(f"{arch}.rope.scaling.yarn_{key}", kind=float)
                if value is not None:
                    scaling[key] = _decimal(value)
        return scaling

    def _read_tokenizer(self) -> GgufTokenizer | None:
        """The file's vocabulary as a `GgufTokenizer`; None if it has no tokens."""

        def get(key: str, kind: type) -> Any:
            return self._get(f"tokenizer.ggml.{key}", kind=kind)

        tokens = self._list("tokenizer.ggml.tokens", str)
        if not tokens:
            return None
        ids = self._ids()
        stray = {kind: value for kind, value in ids.items() if value is not None and not 0 <= value < len(tokens)}
        require(not stray, "tokenizer.ggml", stray, f"ids outside the {len(tokens)} tokens; download the file again")
        return GgufTokenizer(
            model=get("model", str) or "",
            pre=get("pre", str),
            tokens=tokens,
            types=self._list("tokenizer.ggml.token_type", int),
            merges=self._list("tokenizer.ggml.merges", str),
            scores=self._list("tokenizer.ggml.scores", float),
            add_bos=get("add_bos_token", bool),
            add_space_prefix=get("add_space_prefix", bool),
            chat_template=self._get("tokenizer.chat_template", kind=str),
            **ids,
        )


_KINDS = {str: "text", int: "a whole number", float: "a number", bool: "true or false", list: "a list"}
_SENTENCEPIECE_IDS = {"bos": 1, "eos": 2, "unk": 0}
_ID_KEYS = {"bos": "bos", "eos": "eos", "eot": "eot", "pad": "padding", "unk": "unknown"}


def undo_permutation(array: Float[np.ndarray, "rows *rest"], heads: int) -> Float[np.ndarray, "rows *rest"]:
    """Query or key projection `[heads * D, ...]` of arch "llama", with rows reordered into Hugging Face's order.

    llama.cpp rotates neighbouring rows (2i, 2i + 1) of a head, Hugging Face rows (i, i + D/2), so the conversion to
    GGUF interleaves the two halves of each head; this takes them apart again.
    """
    pairs = array.reshape(heads, array.shape[0] // heads // 2, 2, *array.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(array.shape)


def _is_table(name: str) -> bool:
    """True if a tensor of this name holds rotary embedding tables, which are not weights."""
    return _TABLES.fullmatch(name) is not None


def _hf_name(name: str) -> str:
    """Hugging Face name for a llama.cpp tensor name; ValueError for tensors of unsupported model parts."""
    if name in _TOP:
        return _TOP[name]
    match = _LAYER.fullmatch(name)
    known = match is not None and match[2] in _IN_LAYER
    require(known, "tensor", name, "jaxkv builds no part that uses it; the model is of an unsupported kind")
    assert match is not None
    return f"model.layers.{match[1]}.{_IN_LAYER[match[2]]}.{match[3]}"


def _decimal(value: float) -> float:
    """Shortest decimal that rounds to this float32, as a float: 1e-5 rather than 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _llama3_scaling(factors: np.ndarray, theta: float) -> dict[str, Any]:
    """`rope_scaling` dictionary of Llama 3 that reproduces the divisors in `rope_freqs`; ValueError if none does."""
    # The file holds only each frequency's divisor. Llama 3.1 to 3.3 share every constant but the factor, which is
    # the largest divisor; divisors that these constants do not reproduce are refused.
    low, high, original, factor = 1.0, 4.0, 8192, round(float(factors.max()), 4)
    wavelengths = 2 * math.pi * theta ** (np.arange(factors.size) / factors.size)
    smooth = np.clip((original / wavelengths - low) / (high - low), 0, 1)
    expected = 1 / ((1 - smooth) / factor + smooth)
    close = np.allclose(factors, expected, rtol=1e-3)
    require(close, "rope_freqs.weight", f"factor {factor}", "not Llama 3's scaling (low 1, high 4, original 8192)")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }
