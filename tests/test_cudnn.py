"""cuDNN's prefill, of which a machine without a GPU sees the lowered program, and the arithmetic around the call."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

import jaxkv
from jaxkv.attention import Implementation, cudnn, xla
from jaxkv.engine.prefill_layer import layer
from jaxkv.models.rope import compute_rope_tables
from jaxkv.policies.attended import ObservationWindowAttention
from jaxkv.policies.scorer import ScorerInputs

SLOTS = 64


@pytest.fixture(autouse=True)
def version(monkeypatch):
    """JAX asks for cuDNN's version while it traces; there is none here."""
    from jax._src.cudnn import fused_attention_stablehlo

    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91000)


def lowered(function, *arrays):
    """For a GPU that is not there: JAX from 0.11 on lowers kernels for none but a named one."""
    gpu = jax.sharding.AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
    with jax.sharding.use_abstract_mesh(
        jax.sharding.AbstractMesh((1,), ("x",), abstract_device=gpu)
    ):
        return jax.jit(function).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()


def calls(text):
    """Targets of custom calls, the kernels by their names."""
    targets = re.findall(r"custom_call @(\S+?)\(", text)
    return [each for each in targets if "cudnn" in each], re.findall(
        r'name = "((?:window|column|flash)_\w+)"', text
    )


POLICIES = {
    "full": jaxkv.FullKV(),
    "snapkv": jaxkv.SnapKV(budget=16, window=8),
    "h2o": jaxkv.H2O(budget=16),
}


@pytest.mark.parametrize("name", POLICIES)
def test_a_layer_is_prefilled_by_cudnn(name):
    """Whatever the policy looks at; column sums come from a kernel that is given cuDNN's log-sum-exp."""
    model = tiny.tiny(tiny.MODELS["gqa3"], dtype="bfloat16")
    flat, needs = model.flat_decoder, POLICIES[name].build_policy_parts().needs
    x, length = jnp.zeros((2, SLOTS, 24), jnp.bfloat16), jnp.array([60, 33], jnp.int32)
    table = compute_rope_tables(
        jnp.arange(SLOTS, dtype=jnp.int32)[None], model.config.rope, model.config.head_dim
    )

    def run(x, length):
        options = {"graphs": flat.graphs, "needs": needs, "last": False}
        return layer(
            flat.blocks[0], x, length, table, implementation=Implementation.CUDNN, **options
        )

    text = lowered(run, x, length)
    by_cudnn, kernels = calls(text)
    assert by_cudnn == ["__cudnn$fmhaSoftmax"]
    assert kernels == (["column_sums"] if needs.sums else [])
    # Its log-sum-exp reaches the sums in float32.
    assert ("tensor<2x6x64xf32>" in text) == needs.sums


def test_a_window_is_scored_by_a_kernel_where_cudnn_prefills():
    arrays = jnp.zeros((2, 2, 3, 8, 8), jnp.bfloat16), jnp.zeros((2, 2, SLOTS, 8), jnp.bfloat16)
    positions = jnp.arange(8, dtype=jnp.int32)[None] + jnp.array([[52], [25]], jnp.int32)

    def observe(q, k):
        seen = {
            "extras": {"queries": q},
            "k": k,
            "v": k,
            "q_positions": positions,
            "length": positions[:, -1] + 1,
        }
        seen |= {"layer": jnp.int32(0), "key": jax.random.key(0)}
        return ObservationWindowAttention(window=8).score_entries(
            ScorerInputs(**seen, implementation=Implementation.CUDNN)
        )

    assert calls(lowered(observe, *arrays)) == ([], ["window_lse", "window_sums"])


def test_what_surrounds_the_call(monkeypatch):
    """Order of axes, padding and the log-sum-exp, with an attention in cuDNN's place that keeps what it does."""
    rng = np.random.default_rng(0)
    q, k, v = (
        jnp.asarray(rng.standard_normal(s), jnp.float32)
        for s in ((2, 2, 3, 16, 8), (2, 2, 16, 8), (2, 2, 16, 8))
    )
    length = jnp.array([16, 5], jnp.int32)

    @jax.custom_vjp
    def attention(q, k, v):
        return forward(q, k, v)[0]

    def forward(q, k, v):
        """By cuDNN's axes [B, S, H, D]; what lies beyond a sequence's end is not a number."""
        folded = (
            jnp.swapaxes(q, 1, 2).reshape(2, 2, 3, 16, 8),
            jnp.swapaxes(k, 1, 2),
            jnp.swapaxes(v, 1, 2),
        )
        out, lse = jax.vmap(lambda *a: xla.compute_causal_attention(*a, jnp.int32(0)))(*folded)
        beyond = jnp.arange(16)[None] >= length[:, None]
        lse = jnp.where(beyond[:, None], jnp.nan, lse.reshape(2, 6, 16))
        out = jnp.where(beyond[:, None, :, None], jnp.nan, out.reshape(2, 6, 16, 8))
        return jnp.swapaxes(out, 1, 2), (lse, jnp.int32(0))

    attention.defvjp(forward, lambda kept, given: (given, None, None))
    monkeypatch.setattr(jax.nn, "dot_product_attention", lambda q, k, v, **_: attention(q, k, v))
    out, lse = cudnn.compute_cudnn_attention(q, k, v, length, lse=True)
    alone, nothing = cudnn.compute_cudnn_attention(q, k, v, length, lse=False)
    np.testing.assert_array_equal(np.asarray(out), np.asarray(alone))
    assert nothing is None and lse is not None
    for b, tokens in enumerate((16, 5)):
        expected = xla.compute_causal_attention(q[b], k[b], v[b], jnp.int32(0))
        np.testing.assert_allclose(
            np.asarray(out)[b, :, :, :tokens], np.asarray(expected[0])[:, :, :tokens], atol=1e-5
        )
        np.testing.assert_allclose(
            np.asarray(lse)[b, :, :, :tokens], np.asarray(expected[1])[:, :, :tokens], atol=1e-5
        )
        assert (
            not np.asarray(out)[b, :, :, tokens:].any()
            and np.isneginf(np.asarray(lse)[b, :, :, tokens:]).all()
        )


def test_a_jax_that_keeps_no_log_sum_exp_is_refused(monkeypatch):
    monkeypatch.setattr(jax.nn, "dot_product_attention", lambda q, k, v, **_: q)
    q, k = jnp.zeros((1, 1, 2, 4, 8), jnp.bfloat16), jnp.zeros((1, 1, 4, 8), jnp.bfloat16)
    with pytest.raises(NotImplementedError, match="implementation='pallas'"):
        cudnn.compute_cudnn_attention(q, k, k, jnp.array([4], jnp.int32), lse=True)
