"""Models whose layers differ in rotary embedding and scale, against a forward pass in plain numpy, float64."""

import dataclasses

import numpy as np
import pytest
import tiny
from meshes import mesh_of, model_of

import jaxkv
from jaxkv.engine import token_loop
from jaxkv.engine.spec import DecodeSpec
from jaxkv.models.decoder import named_parameters
from jaxkv.models.rope import compute_rope_frequencies
from jaxkv.models.split_decoder import SplitDecoder
from jaxkv.models.values import LayerSpec, NoRope, Rope

KINDS = (LayerSpec(), LayerSpec(rope=Rope(theta=40.0), scale=0.6))
CONFIG = dataclasses.replace(tiny.shape(layers=3, kv_heads=2, group=3, dim=8), kinds=KINDS)
LENGTHS, NEW = (37, 20), 6


def _turned(rows, rope):
    """Rotates rows `[..., N, D]` at positions 0 .. N."""
    frequencies, factors = compute_rope_frequencies(rope, rows.shape[-1])
    angle = np.arange(rows.shape[-2])[:, None] * frequencies
    cos, sin = np.cos(angle) * factors, np.sin(angle) * factors
    one, other = np.split(rows, 2, axis=-1)
    return np.concatenate([one * cos - other * sin, other * cos + one * sin], axis=-1)


def _normed(x, scale, eps):
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps) * scale


def capped(logits, cap):
    return logits if cap is None else cap * np.tanh(logits / cap)


def forward(model, ids):
    """Logits of the token after one sequence, and each layer's shares `[K, G, n, n]` of attention."""
    config, paid = model.config, []
    of = {
        name: np.asarray(each.get_value(), np.float64)
        for name, each in named_parameters(model.decoder)
    }
    x = of["embedding"][np.asarray(ids)]
    for layer in range(config.layers):
        part = lambda name, layer=layer: of[f"blocks.{layer}.{name}"]  # noqa: E731
        normed, spec = (
            _normed(x, part("attention_norm.scale"), config.norm_eps),
            config.get_layer_spec(layer),
        )
        q = _turned(np.einsum("ne,kgde->kgnd", normed, part("attention.q")), spec.rope)
        k, v = np.einsum("ne,tkde->tknd", normed, part("attention.kv"))
        k, scale = _turned(k, spec.rope), spec.scale or config.head_dim**-0.5
        seen = np.tri(len(x), dtype=bool)
        if spec.sliding_window is not None:
            seen &= ~np.tri(len(x), k=-spec.sliding_window, dtype=bool)
        logits = capped(np.einsum("kgnd,kmd->kgnm", q, k) * scale, spec.softcap)
        logits = np.where(seen, logits, -np.inf)
        most = logits.max(axis=-1, keepdims=True)
        share, sink = np.exp(logits - most), 0.0
        if config.sink_logits:
            sink = np.exp(part("attention.sink_logits")[..., None, None] - most)
        paid.append(share / (share.sum(axis=-1, keepdims=True) + sink))
        out = np.einsum("kgnm,kmd->nkgd", paid[-1], v).reshape(len(x), -1)
        x = x + out @ part("attention.out").T
        normed = _normed(x, part("mlp_norm.scale"), config.norm_eps)
        gate, up = (normed @ part("mlp.gate_up")[index].T for index in range(2))
        x = x + (gate / (1 + np.exp(-gate)) * up) @ part("mlp.down").T
    last = _normed(x[-1], of["norm.scale"], config.norm_eps) @ of["head"].T
    return capped(last, config.logit_softcap), paid


def check_answers(model, policy=None):
    """Greedy tokens behind two prompts, each the oracle's."""
    ids = tiny.prompts(3, LENGTHS)
    session = jaxkv.Session(model, policy)
    cache = session.prefill(ids, new=NEW)
    for row, each in enumerate(ids):
        np.testing.assert_allclose(
            np.asarray(cache.logits)[row], forward(model, each)[0], atol=2e-4
        )
    _, tokens = session.sample(cache, NEW)
    for row, each in enumerate(ids):
        so_far = list(each)
        for token in tokens[row].tolist():
            assert token == int(forward(model, so_far)[0].argmax())
            so_far.append(token)


def test_every_layer_has_its_own_rotation_and_scale():
    check_answers(tiny.tiny(CONFIG))


def test_rows_in_host_memory():
    check_answers(
        tiny.tiny(CONFIG), jaxkv.OmniKV(budget=64, filter_layers=(0,), adjacent=0, offload=True)
    )


@pytest.mark.parametrize(
    "policy",
    (
        jaxkv.StreamingLLM(budget=64, rolling_positions=True),
        jaxkv.ExpectedAttention(budget=64, every=4),
    ),
    ids=("rolling", "again"),
)
def test_layers_without_rotation(policy):
    """By policies that turn keys back, or queries on the average, and keep everything."""
    kinds = (LayerSpec(rope=Rope(theta=40.0), scale=0.6), LayerSpec(rope=NoRope()))
    check_answers(tiny.tiny(dataclasses.replace(CONFIG, layers=2, kinds=kinds)), policy)


def test_a_mesh_answers_as_one_device_does():
    config = dataclasses.replace(model_of(4).config, kinds=KINDS)
    model, ids = tiny.tiny(config), tiny.prompts(3, LENGTHS)
    of = {
        "policy": jaxkv.H2O(budget=16),
        "max_new_tokens": NEW,
        "stop_at_eos": False,
        "progress": False,
    }
    alone, apart = (
        jaxkv.generate(model, ids, **of, **more) for more in ({}, {"mesh": mesh_of(2, 4)})
    )
    assert [each.tokens.tolist() for each in alone] == [each.tokens.tolist() for each in apart]


def test_alike_layers_share_programs():
    flat = tiny.tiny(CONFIG).flat_decoder
    assert flat.get_layer_graphs(0) == flat.get_layer_graphs(2) != flat.get_layer_graphs(1)
    alike = tiny.tiny(dataclasses.replace(CONFIG, kinds=KINDS[:1])).flat_decoder
    assert len({alike.get_layer_graphs(layer) for layer in range(3)}) == 1


@pytest.mark.parametrize("where", (SplitDecoder, DecodeSpec), ids=("prefill", "decode"))
def test_a_spec_of_another_layer_is_found(where, monkeypatch, request):
    # Programs compiled before the fault would hide it, those compiled with it outlive it.
    token_loop._loop.clear_cache()
    request.addfinalizer(token_loop._loop.clear_cache)
    monkeypatch.setattr(
        where,
        "get_layer_graphs",
        lambda self, layer: self.graphs.replace_layer_spec(self.config.get_layer_spec(layer + 1)),
    )
    with pytest.raises(AssertionError):
        check_answers(tiny.tiny(CONFIG))


@pytest.mark.usefixtures("as_users_call")
@pytest.mark.parametrize("field", ["rope", "kinds", "experts", "latent"])
@pytest.mark.parametrize("given", ["x", 3, ("x",), {}])
def test_parts_of_another_class_are_rejected(field, given):
    plain = tiny.shape(layers=3, kv_heads=2, group=3, dim=8)
    with pytest.raises(ValueError, match=f"^{field}=.*: give a "):
        dataclasses.replace(plain, **{field: given})
    if field == "rope":
        with pytest.raises(ValueError, match="^rope=.*: give a Rope"):
            LayerSpec(rope=given)
        with pytest.raises(ValueError, match="^below=.*: give a tuple of DeltaNetSpec"):
            LayerSpec(below=given)
