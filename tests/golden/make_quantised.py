"""Writes tiny Llamas in the formats of compressed-tensors, each with the floats that the library reads from it.

Run it in an environment that has ``torch==2.13.0`` (CPU) and ``compressed-tensors==0.17.0``, the last line
that writes ``weight_g_idx``::

    python tests/golden/make_quantised.py

Each folder of ``tests/golden/quantised/`` has a ``config.json``, a ``model.safetensors`` of the library's codes and
scales, and ``dequantised.safetensors``: all tensors as the library decompresses them.
"""

import json
import shutil
from pathlib import Path

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.format import infer_module_format
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import dequantize
from compressed_tensors.quantization.quant_scheme import PRESET_SCHEMES
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from safetensors.torch import save_file

HERE = Path(__file__).resolve().parent / "quantised"
CONFIG = {
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LINEAR = {
    "self_attn.q_proj": (64, 32),
    "self_attn.k_proj": (32, 32),
    "self_attn.v_proj": (32, 32),
    "self_attn.o_proj": (32, 64),
    "mlp.gate_proj": (64, 32),
    "mlp.up_proj": (64, 32),
    "mlp.down_proj": (32, 64),
}
# Presets of the library, with other settings of weights, by folder.
SCHEMES = {
    "float_tensor": ("FP8", {}),
    "float_channel": ("FP8_DYNAMIC", {}),
    "float_block": ("FP8_BLOCK", {"block_structure": [24, 40]}),
    "int_channel": ("W8A8", {}),
    "int_asymmetric": ("W8A8", {"symmetric": False}),
    "pack_group": ("W4A16", {"group_size": 16}),
    "pack_asymmetric": ("W4A16_ASYM", {"group_size": 32}),
    "pack_ordered": ("W4A16", {"group_size": 16, "actorder": "group"}),
    "nvfp4": ("NVFP4", {}),
    "mxfp4": ("MXFP4A16", {}),
}


def extremes(weight, args, groups):
    """Least and largest weights of each tensor, output, group or block."""
    if args.strategy == "tensor":
        parts = weight.reshape(1, -1)
        return parts.amin(1), parts.amax(1)
    if args.strategy == "channel":
        return weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
    if args.strategy == "block":
        high, wide = args.block_structure
        rows = [part.split(wide, dim=1) for part in weight.split(high, dim=0)]
        ends = (torch.amin, torch.amax)
        return [torch.stack([torch.stack([end(b) for b in row]) for row in rows]) for end in ends]
    if groups is not None:
        weight = weight[:, torch.argsort(groups)]
    parts = weight.unflatten(-1, (-1, args.group_size))
    return parts.amin(-1), parts.amax(-1)


def compress(weight, scheme):
    """The library's tensors of a weight, and what it reads from them."""
    args, state = scheme.weights, {"weight": weight}
    ordered = args.actorder is not None
    if ordered:
        state["weight_g_idx"] = torch.randperm(weight.shape[1]).int() // args.group_size
    if args.strategy == "tensor_group":
        state["weight_global_scale"] = generate_gparam(weight.amin(), weight.amax())
    least, most = extremes(weight, args, state.get("weight_g_idx"))
    scale, zero = calculate_qparams(least, most, args, state.get("weight_global_scale"))
    state |= {"weight_scale": scale} | ({} if args.symmetric else {"weight_zero_point": zero})
    library = BaseCompressor.get_value_from_registry(scheme.format)
    stored = library.compress(dict(state), scheme)
    if args.strategy == "block":  # decompress would take blocks of equal sizes
        return stored, dequantize(stored["weight"], scale, args=args)
    if "weight_packed" in stored and args.type == "float":  # decompress would round to bfloat16
        codes = unpack_fp4_from_uint8(stored["weight_packed"], *weight.shape, dtype=torch.float32)
        return stored, dequantize(
            codes, scale, args=args, global_scale=state.get("weight_global_scale")
        )
    return stored, library.decompress(dict(stored), scheme)["weight"]


def main():
    """Writes every folder."""
    shutil.rmtree(HERE, ignore_errors=True)
    for name, (preset, changes) in SCHEMES.items():
        torch.manual_seed(0)
        settings = dict(PRESET_SCHEMES[preset])
        settings["weights"] = settings["weights"].model_copy(update=changes)
        scheme = QuantizationScheme(targets=["Linear"], **settings)
        scheme.format = infer_module_format(torch.nn.Linear, scheme).value
        both = {"model.embed_tokens.weight": torch.randn(96, 32)}
        for norm in ("layers.0.input_layernorm", "layers.0.post_attention_layernorm", "norm"):
            both[f"model.{norm}.weight"] = torch.ones(32)
        stored, read = dict(both), dict(both)
        for base, shape in LINEAR.items():
            prefix = f"model.layers.0.{base}."
            parts, weight = compress(torch.randn(shape), scheme)
            stored |= {prefix + part: each.contiguous() for part, each in parts.items()}
            read[f"{prefix}weight"] = weight.float().contiguous()
        quantised = QuantizationConfig(
            config_groups={"group_0": scheme},
            format=scheme.format,
            quantization_status="compressed",
            ignore=["lm_head"],
        )
        folder = HERE / name
        folder.mkdir(parents=True)
        config = CONFIG | {"quantization_config": quantised.model_dump(mode="json")}
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        save_file(stored, folder / "model.safetensors")
        save_file(read, folder / "dequantised.safetensors")


if __name__ == "__main__":
    main()
