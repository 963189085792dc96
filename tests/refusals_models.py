"""Rejections of models: configs of every family, names, dtypes and meshes that a model is loaded with."""

import dataclasses
import functools
import json
import math
import re

import jax
import numpy as np
import tiny
from meshes import mesh_of, model_of, prompts
from refusing import calls, door
from running import GOLDEN

import jaxkv
from jaxkv.checkpoints import GgufTokenizer, fetch_checkpoint, get_manifest
from jaxkv.models.config import ModelConfig
from jaxkv.models.values import LayerSpec
from jaxkv.sharding import mesh_argument
from jaxkv.sharding.parameters import make_model_mesh

MODELS = GOLDEN / "models"
LLAMA = MODELS / "llama_gqa"


def read(keys):
    """A tiny model's config with other keys, read."""
    return ModelConfig.from_hf(json.loads((LLAMA / "config.json").read_text("utf-8")) | keys)


class BytesPath:
    """A path as `os.fspath` takes it, of bytes."""

    def __fspath__(self):
        return b"model"

    def __repr__(self):
        return "BytesPath()"


KINDS = [
    *calls(
        "kinds of layers",
        (lambda: LayerSpec(scale=-1.0), "scale=-1"),
    ),
    *calls(
        "end ids",
        (lambda: dataclasses.replace(tiny.TWO_LAYERS, eos=2), TypeError, "eos=2: give token ids"),
        (lambda: dataclasses.replace(tiny.TWO_LAYERS, eos=(-1,)), "eos=-1"),
    ),
]

NAMES = [
    *door(
        "load",
        jaxkv.load,
        *(
            (
                given,
                TypeError,
                re.escape(f"name_or_path={given!r}"),
            )
            for given in (None, 5, BytesPath())
        ),
    ),
    *door(
        "a dtype",
        lambda dtype: jaxkv.load(LLAMA, dtype=dtype),
        *(
            (dtype, f"dtype={name}")
            for dtype, name in (
                ("bf16", "'bf16'"),
                (float, "'float64'"),
            )
        ),
    ),
    *door(
        "fetch",
        fetch_checkpoint,
        *(
            (name, "use a path, one of smollm2-135m-instruct")
            for name in ("no-such-model", "x" * 5000, "a\0b")
        ),
        (3, TypeError, "name_or_path.*3"),
    ),
    *calls(
        "a manifest",
        (lambda: get_manifest("gpt-9"), "name='gpt-9': unknown model: use one of smollm2"),
    ),
    *door(
        "a vocabulary of GGUF",
        lambda parts: GgufTokenizer(**parts).build_tokenizer(),
        (
            {"model": "llama", "unk": 0, "scores": (math.nan,), "tokens": ("x",)},
            "tokens='.* characters': tokens too long, or scores not finite",
        ),
        (
            {"model": "gpt2", "pre": "tekken", "tokens": ("a",)},
            "tokenizer.ggml.pre='tekken'.*smollm",
        ),
        ({"model": "t5", "tokens": ("a",)}, "tokenizer.ggml.model='t5'"),
        (
            {"model": "gpt2", "pre": "gpt-2", "tokens": ("a",), "merges": ("a b",)},
            "inconsistent vocabulary",
        ),
    ),
]


@functools.cache
def cache():
    return jaxkv.prefill(
        model_of(4), prompts(5, (20, 21)), policy=jaxkv.SnapKV(budget=24, window=8), progress=False
    )


def asked(mesh):
    policy = jaxkv.SnapKV(budget=24, window=8)
    return jaxkv.generate(
        model_of(4), prompts(5, (20, 21, 22)), mesh=mesh, policy=policy, progress=False
    )


def axes_of(*names):
    return jax.make_mesh((2, 4), names)


AXES = "wrong axes: give a mesh with the axes 'data' and 'model'"
EMPTY = jax.sharding.Mesh(np.zeros((0, 1), object), ("data", "model"))

MESHES = [
    *door(
        "load on a mesh",
        lambda mesh: jaxkv.load(LLAMA, mesh=mesh),
        ((2, 4), TypeError, "mesh=tuple"),
        (axes_of("data", "tensor"), f"mesh=.*{AXES}"),
        # Two kv heads of three query heads: four devices would cut a group.
        (
            mesh_of(2, 4),
            r"mesh\.model=4: it does not divide kv_heads=2, heads=6.*give one of \[1, 2\]",
        ),
    ),
    *door(
        "generate on a mesh",
        asked,
        (EMPTY, r"mesh=\{'data': 0, 'model': 1\}: empty: give a mesh of at least one device"),
    ),
    *calls(
        "a mesh of a model",
        # Six kv heads on four devices: each would have three of them with half of their queries.
        (
            lambda: make_model_mesh(
                mesh_of(1, 4), dataclasses.replace(read({}), heads=24, kv_heads=6)
            ),
            r"give one of \[1, 2\]",
        ),
    ),
    *door(
        "reshard",
        lambda given: jaxkv.reshard(given, mesh_of(2, 4)),
        (None, TypeError, "cache="),
    ),
    *door(
        "reshard to a mesh",
        lambda mesh: jaxkv.reshard(cache(), mesh),
        ((2, 4), TypeError, "mesh=tuple"),
        (mesh_of(1, 3), r"mesh\.model=3: it does not divide kv_heads=4"),
    ),
    *door(
        "a mesh of the command line",
        lambda given: mesh_argument.make_mesh_from_text(*given),
        (("4x4",), "this process has 8 devices"),
        (("4x4", "cpu"), "this process has 8 CPU devices"),
        # XLA's CPU dies of so many.
        (("100000x1",), "give at most 1024 devices"),
    ),
]

ROWS = [*KINDS, *NAMES, *MESHES]
