"""Writes GGUF files: numbers by llama.cpp's keys, and tensors."""

import gguf
import numpy as np


def write(path, arch, tensors, *, numbers, kinds=None, edit=lambda writer: None):
    """A GGUF of numbers and tensors, some given as blocks of a kind; `edit` adds what is no number."""
    writer = gguf.GGUFWriter(path, arch)
    for key, value in numbers.items():
        if value is None:
            continue
        key = key if key.startswith("tokenizer.") else f"{arch}.{key}"
        add = {
            int: writer.add_uint32,
            float: writer.add_float32,
            str: writer.add_string,
            bool: writer.add_bool,
        }
        add.get(type(value), writer.add_array)(key, value)
    edit(writer)
    for key, array in tensors.items():
        writer.add_tensor(key, np.ascontiguousarray(array), raw_dtype=(kinds or {}).get(key))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def numbers_of(embed, hidden, heads, kv_heads, *, layers=1, context=256):
    """The numbers that every family has."""
    return {
        "block_count": layers,
        "context_length": context,
        "embedding_length": embed,
        "feed_forward_length": hidden,
        "attention.head_count": heads,
        "attention.head_count_kv": kv_heads,
        "attention.layer_norm_rms_epsilon": 1e-5,
    }


def layer_shapes(embed, hidden, wide, narrow):
    """Shapes of a layer's tensors by llama.cpp's names; queries are `wide`, keys and values `narrow`."""
    return {
        "attn_norm": (embed,),
        "ffn_norm": (embed,),
        "attn_q": (wide, embed),
        "attn_k": (narrow, embed),
        "attn_v": (narrow, embed),
        "attn_output": (embed, wide),
        "ffn_gate": (hidden, embed),
        "ffn_up": (hidden, embed),
        "ffn_down": (embed, hidden),
    }
