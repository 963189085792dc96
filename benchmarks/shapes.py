"""Attention shapes of real models, and whole models of Llama 3's shapes, without weights or with random ones."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from jaxkv.loading import LanguageModel
from jaxkv.models.config import ModelConfig
from jaxkv.models.decoder import Decoder


@dataclasses.dataclass(frozen=True, kw_only=True)
class Heads:
    """One device's share of a model's heads."""

    name: str
    kv_heads: int
    group: int
    dim: int


# One model per head dim.
MODELS = (
    Heads(name="SmolLM2-135M", kv_heads=3, group=3, dim=64),
    Heads(name="Phi-2", kv_heads=32, group=1, dim=80),
    Heads(name="Phi-3-mini", kv_heads=32, group=1, dim=96),
    Heads(name="Llama-3-8B", kv_heads=8, group=4, dim=128),
    Heads(name="Gemma-2-9B", kv_heads=8, group=2, dim=256),
)


def llama(*, layers, embed, hidden, heads, kv_heads=8):
    """The config of a Llama 3 of some size."""
    return ModelConfig.from_hf(
        {
            "model_type": "llama",
            "architectures": ["LlamaForCausalLM"],
            "hidden_size": embed,
            "intermediate_size": hidden,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "num_hidden_layers": layers,
            "vocab_size": 128256,
            "max_position_embeddings": 1 << 20,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "tie_word_embeddings": False,
            "hidden_act": "silu",
            "eos_token_id": 128001,
        }
    )


def llama_3_8b(layers=32):
    """The config of Llama 3 8B, cut to some layers if need be."""
    return llama(layers=layers, embed=4096, hidden=14336, heads=32)


def llama_3_70b(layers=80):
    """The config of Llama 3.1 70B, as well."""
    return llama(layers=layers, embed=8192, hidden=28672, heads=64)


# Steps of codes, by the ends of their parameters' names, that make weights about as large as random ones of 0.02.
_STEPS = {"_scale": 0.0005, "_scales": 0.0075, "_leasts": -0.06}


@partial(jax.jit, static_argnames=("shape", "dtype"))
def _filled(key, *, shape, dtype):
    if jnp.issubdtype(dtype, jnp.integer):
        return jax.random.bits(key, shape, jnp.uint8).astype(dtype)
    return (0.02 * jax.random.normal(key, shape, jnp.float32)).astype(dtype)


def _parameter(key, path, leaf):
    """A parameter's random values; a norm's scale is the one with one axis: at 1 activations keep their size."""
    name = jax.tree_util.keystr(path)
    for end, step in _STEPS.items():
        if name.endswith(f"{end}'].value"):
            return jnp.full(leaf.shape, step, leaf.dtype)
    if len(leaf.shape) == 1:
        return jnp.ones(leaf.shape, leaf.dtype)
    return _filled(key, shape=leaf.shape, dtype=leaf.dtype)


def random_llama(name, *, layers=None, weights=None):
    """A model with random bfloat16 weights (linear maps in fewer bits if asked): "llama-3-8b"'s shape, or "tiny".

    The former has as many layers as asked for, all 32 if nothing is.
    """
    config = llama_3_8b(layers or 32)
    if name == "tiny":
        small = {
            "model_type": "llama",
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_attention_heads": 4,
        }
        small |= {
            "num_key_value_heads": 2,
            "num_hidden_layers": 2,
            "vocab_size": 256,
            "rms_norm_eps": 1e-5,
        }
        small |= {"max_position_embeddings": 4096, "eos_token_id": 0, "tie_word_embeddings": False}
        config = ModelConfig.from_hf(small | {"hidden_act": "silu"})
    return random_model(config, f"random-{name}", weights=weights)


def random_model(config, name, *, dtype=jnp.bfloat16, weights=None):
    """A model of a config with random weights."""
    graph, state = nnx.split(Decoder(config, dtype=dtype, weights=weights))
    leaves, structure = jax.tree_util.tree_flatten_with_path(state)
    keys = jax.random.split(jax.random.key(0), len(leaves))
    filled = [_parameter(key, path, leaf) for key, (path, leaf) in zip(keys, leaves, strict=True)]
    decoder = nnx.merge(graph, jax.tree.unflatten(structure, filled))
    return LanguageModel(decoder, text=None, name=name)
