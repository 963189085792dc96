"""GGUF files as checkpoints: a Hugging Face config, and tensors under Hugging Face names, dequantised when read."""

import functools
import math
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from jaxkv._errors import build_value_error, require
from jaxkv.checkpoints import gguf_reader
from jaxkv.checkpoints.gguf_config import convert_metadata_to_config
from jaxkv.checkpoints.gguf_metadata import GgufMetadata
from jaxkv.checkpoints.gguf_names import TABLES, convert_tensor_name, is_rope_table
from jaxkv.checkpoints.gguf_tokenizer import GgufTokenizer
from jaxkv.checkpoints.gpt_oss import join_gates_and_ups
from jaxkv.checkpoints.tensor import Index, StoredTensor

# Types whose blocks are 4-bit steps of one size from a minimum, in groups of 32.
_STEPPED = ("Q4_0", "Q4_1", "Q4_K")
# Architectures whose norms multiply by 1 plus their weights: files store the sum.
_MORE_BY_ONE = ("gemma2", "gemma3")
# Elements dequantised in one step, so that no tensor is in memory twice.
_AT_ONCE = 1 << 20


class GgufFile:
    """GGUF file, or several of one model: Hugging Face config, float32 tensors by Hugging Face names, and vocabulary.

    Attributes:
        path: path of the file, or of any of several.
        config: its metadata under the keys of a Hugging Face `config.json`.
        tensors: its tensors by their Hugging Face names, float32 when read.
        tokenizer: its vocabulary as plain data, or None without one.
    """

    def __init__(self, path: Path):
        """Open a GGUF file, or all of its model: read headers, build config and tensor list; weights are read later.

        Raises:
            ValueError: if the file is missing, truncated or corrupt, or its architecture is not supported.
        """
        self.path = path
        values, self._stored = gguf_reader.read_gguf_headers(path)
        self._meta = meta = GgufMetadata(values)
        known = TABLES["layers"]
        remedy = f"not supported: use one of {', '.join(known)}"
        require(meta.arch in known, "general.architecture", meta.arch, remedy)
        self.tensors = {
            (hf := convert_tensor_name(name, meta.arch)): StoredTensor(
                shape=tensor.shape or (1,),
                dtype=np.dtype(np.float32),
                read=functools.partial(self._read_tensor, hf, tensor),
                stepped=tensor.kind.name in _STEPPED,
                computed=True,
            )
            for name, tensor in self._stored.items()
            if not is_rope_table(name)
        }
        self.tensors = join_gates_and_ups(self.tensors) if meta.arch == "gpt-oss" else self.tensors
        factors = (
            self._stored["rope_freqs.weight"].stored_array
            if "rope_freqs.weight" in self._stored
            else None
        )
        self.config = convert_metadata_to_config(meta, self.tensors, factors)
        self.tokenizer = self._read_tokenizer()

    def _read_tensor(self, name: str, tensor: gguf_reader.GgufTensor, index: Index) -> np.ndarray:
        """Read slices `index` of a tensor, dequantised to float32, with Hugging Face's row order and norm weights."""
        heads = self._count_interleaved_heads(name, tensor)
        first, last, _ = (index[0] if index else slice(None)).indices((*tensor.shape, 1)[0])
        if heads is None:
            rows = self._dequantise_rows(name, tensor, first, last)[(slice(None), *index[1:])]
            return (
                rows - 1
                if self._meta.arch in _MORE_BY_ONE and name.endswith("norm.weight")
                else rows
            )
        size = tensor.shape[0] // heads
        low = first // size
        high = -(-last // size)
        rows = undo_rope_permutation(
            self._dequantise_rows(name, tensor, low * size, high * size), high - low
        )
        return rows[(slice(first - low * size, last - low * size), *index[1:])]

    def _count_interleaved_heads(self, name: str, tensor: gguf_reader.GgufTensor) -> int | None:
        """Return the number of heads of a Llama Q or K projection, whose rows are interleaved; None for others."""
        for part, key in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
            heads = self.config[key]
            head_dim = self.config["head_dim"]
            # A tensor of another shape is rejected when the model is loaded.
            if (
                self._meta.arch == "llama"
                and f".self_attn.{part}." in name
                and tensor.shape[:1] == (heads * head_dim,)
            ):
                return heads if head_dim % 2 == 0 else None
        return None

    def _dequantise_rows(
        self, name: str, tensor: gguf_reader.GgufTensor, first: int, last: int
    ) -> np.ndarray:
        """Read rows first to last - 1 of a tensor as float32 in the file's order; ValueError if unsupported."""
        from gguf import quants

        try:
            # A vector's quantisation blocks run along its only axis, so it is sliced after dequantisation.
            if len(tensor.shape) < 2:
                return np.asarray(
                    np.atleast_1d(quants.dequantize(tensor.stored_array, tensor.kind))[first:last],
                    np.float32,
                )
            array = np.empty((last - first, *tensor.shape[1:]), np.float32)
            step = max(1, _AT_ONCE // max(1, math.prod(tensor.shape[1:])))
            for start in range(first, last, step):
                stop = min(start + step, last)
                with np.errstate(
                    over="ignore"
                ):  # infinities from MXFP4's largest scales are rejected later
                    array[start - first : stop - first] = quants.dequantize(
                        tensor.read_rows(start, stop), tensor.kind
                    )
            return array
        except NotImplementedError as error:
            remedy = (
                "this quantisation is not supported: use a Q4, Q5, Q6, Q8, MXFP4, F16 or BF16 file"
            )
            raise build_value_error(f"{name}.type", tensor.kind.name, remedy) from error

    def _read_tokenizer(self) -> GgufTokenizer | None:
        """Build a `GgufTokenizer` from the file's metadata; None if it has no tokens, ValueError for invalid ids."""

        def get(key: str, kind: type) -> Any:
            return self._meta.get_value(f"tokenizer.ggml.{key}", kind=kind)

        tokens = self._meta.get_list("tokenizer.ggml.tokens", str)
        if not tokens:
            return None
        ids = self._meta.get_special_ids()
        stray = {
            kind: value
            for kind, value in ids.items()
            if value is not None and not 0 <= value < len(tokens)
        }
        require(
            not stray,
            "tokenizer.ggml",
            stray,
            f"ids outside of the {len(tokens)} tokens: download the file again",
        )
        return GgufTokenizer(
            model=get("model", str) or "",
            pre=get("pre", str),
            tokens=tokens,
            types=self._meta.get_list("tokenizer.ggml.token_type", int),
            merges=self._meta.get_list("tokenizer.ggml.merges", str),
            scores=self._meta.get_list("tokenizer.ggml.scores", float),
            add_bos=get("add_bos_token", bool),
            add_space_prefix=get("add_space_prefix", bool),
            chat_template=self._meta.get_value("tokenizer.chat_template", kind=str),
            **ids,
        )


def undo_rope_permutation(
    array: Float[np.ndarray, "rows *rest"],  # noqa: F821
    heads: int,
) -> Float[np.ndarray, "rows *rest"]:  # noqa: F821
    """Reorder the rows of a Llama Q or K projection `[heads * D, ...]` from llama.cpp's order to Hugging Face's.

    llama.cpp rotates neighbouring rows (2i, 2i + 1) of a head, Hugging Face rows (i, i + D/2), so the conversion to
    GGUF interleaves the two halves of each head; this separates them again.
    """
    pairs = array.reshape(heads, array.shape[0] // heads // 2, 2, *array.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(array.shape)
