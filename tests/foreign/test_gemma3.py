"""The transform under KerasHub's Gemma 3: five layers of a window for one without, two rotary embeddings.

It runs in an environment of its own, `make test-foreign`.
"""

import functools
import os

os.environ["KERAS_BACKEND"] = "jax"

import jax
import jax.numpy as jnp
import keras
import keras_hub
import numpy as np
import pytest

import jaxkv
from jaxkv import AdaKV, FullKV, SnapKV

WINDOW, LAYERS, SLOTS, NEW = 9, 7, 48, 14


@pytest.fixture(scope="module", params=[None, 1.5])
def model(request):
    """A Gemma 3 of seven layers with random weights, without and with a cap; large queries make attention choose."""
    keras.utils.set_random_seed(0)
    backbone = keras_hub.models.Gemma3Backbone(
        vocabulary_size=97,
        image_size=8,
        num_layers=LAYERS,
        num_query_heads=6,
        num_key_value_heads=2,
        hidden_dim=48,
        intermediate_dim=96,
        head_dim=8,
        use_post_ffw_norm=True,
        use_post_attention_norm=True,
        use_sliding_window_attention=True,
        sliding_window_size=WINDOW,
        global_rope_scaling_factor=8.0,
        attention_logit_soft_cap=request.param,
    )
    made = keras_hub.models.Gemma3CausalLM(backbone=backbone, preprocessor=None)
    for block in backbone.transformer_layers:
        block.attention.query_norm.scale.assign(3 * np.ones_like(block.attention.query_norm.scale))
    made.compile(sampler="greedy")
    return made


def window_of(block):
    """Number of last tokens that a block attends to, None for all."""
    return (
        block.attention.sliding_window_size
        if block.attention.use_sliding_window_attention
        else None
    )


def queries_keys_values(block, x, start):
    """A block's queries, keys and values `[B, heads, N, D]` after RoPE, of sequences from positions `start` on."""
    layer, normed = block.attention, block.pre_attention_norm(x)
    positions = start[:, None] + jnp.arange(x.shape[1])
    q, k = layer.query_norm(layer.query_dense(normed)), layer.key_norm(layer.key_dense(normed))
    q, k = (layer.rope_layer(each, positions=positions) for each in (q, k))
    return tuple(jnp.swapaxes(each, 1, 2) for each in (q, k, layer.value_dense(normed)))


def finish(block, x, out):
    """The rest of the block, given its attention's output `[B, H, N, D]`."""
    added = block.attention.output_dense(jnp.swapaxes(out, 1, 2))
    x = x + block.post_attention_norm(added)
    normed = block.pre_ffw_norm(x)
    gated = keras.activations.gelu(block.gating_ffw(normed), approximate=True) * block.gating_ffw_2(
        normed
    )
    return x + block.post_ffw_norm(block.ffw_linear(gated))


def embedded(model, tokens):
    return model.backbone.token_embedding(tokens) * jnp.sqrt(jnp.float32(model.backbone.hidden_dim))


def logits(model, x):
    return model.backbone.token_embedding(model.backbone.layer_norm(x), reverse=True)


def prefill(model, tokens, length, policy):
    """Each layer's rows, and the logits of each prompt's last token; the prompt attends as KerasHub's blocks do."""
    x, rows = embedded(model, tokens), []
    padding = jnp.arange(SLOTS) < length[:, None]
    for block in model.backbone.transformer_layers:
        q, k, v = queries_keys_values(block, x, jnp.zeros(len(length), jnp.int32))
        given = {"sliding_window": window_of(block), "softcap": block.attention.logit_soft_cap}
        rows.append(
            jaxkv.compress(k, v, queries=q, length=length, policy=policy, headroom=NEW, **given)
        )
        x = block(x, padding_mask=padding)
    return rows, logits(model, jnp.take_along_axis(x, (length - 1)[:, None, None], axis=1)[:, 0])


@functools.partial(jax.jit, static_argnames=("model", "policy"))
def run(weights, tokens, length, *, model, policy):
    """Greedy tokens `[B, NEW]`, and the rows that the prompts left."""
    with keras.StatelessScope(state_mapping=list(zip(model.variables, weights, strict=True))):
        begun, first = prefill(model, tokens, length, policy)

        def step(carry, _):
            rows, last = carry
            token, after = last.argmax(axis=-1).astype(jnp.int32), []
            x = embedded(model, token[:, None])
            for block, held in zip(model.backbone.transformer_layers, rows, strict=True):
                q, k, v = queries_keys_values(block, x, held.seen[0])
                after.append(held.append(k, v))
                x = finish(block, x, after[-1].attend(q))
            return (after, logits(model, x[:, 0])), token

        _, drawn = jax.lax.scan(step, (begun, first), length=NEW)
    return drawn.T, begun


def own(model, prompt, length):
    """Greedy tokens of one prompt by KerasHub's own loop and cache."""
    ids = np.zeros((1, length + NEW), np.int32)
    ids[0, :length] = prompt[:length]
    given = {"token_ids": jnp.asarray(ids), "padding_mask": jnp.arange(length + NEW)[None] < length}
    # The step of `generate`, which itself trips over the images that a text has none of.
    out = model.generate_step(given, stop_token_ids=None)
    return np.asarray(out["token_ids"])[0, length:]


@pytest.mark.parametrize(
    "policy", [FullKV(), SnapKV(budget=64, window=8), AdaKV(base=SnapKV(budget=64, window=8))]
)
@pytest.mark.parametrize("lengths", [(48, 5)])
def test_a_budget_of_the_whole_prompt_draws_the_models_own_tokens(model, policy, lengths):
    """Past the window, of prompts that are shorter and longer than one."""
    prompt = np.random.default_rng(lengths[0]).integers(1, 97, (2, SLOTS))
    weights = [variable.value for variable in model.variables]
    drawn, _ = run(weights, jnp.asarray(prompt), jnp.asarray(lengths), model=model, policy=policy)
    theirs = np.stack([own(model, prompt[row], n) for row, n in enumerate(lengths)])
    np.testing.assert_array_equal(drawn, theirs)
    assert len(set(theirs.ravel().tolist())) > 4


def test_a_budget_holds_for_layers_without_a_window(model):
    """SlidingWindows keep their last rows, the sixth layer what its policy says."""
    lengths, weights = (48, 20), [variable.value for variable in model.variables]
    prompt = np.random.default_rng(1).integers(1, 97, (2, SLOTS))
    policy = SnapKV(budget=12, window=4)
    drawn, rows = run(
        weights, jnp.asarray(prompt), jnp.asarray(lengths), model=model, policy=policy
    )
    for layer, held in enumerate(rows):
        want = 12 if layer % 6 == 5 else WINDOW
        assert np.asarray(held.length)[0].tolist() == [[want, want]] * 2
    assert drawn.shape == (2, NEW)
