"""Trained gates of the literature, KVzap's and Fast KVzip's: their files and their scores of entries."""

import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy
from jax import lax
from jaxtyping import Array, Float, Shaped

from jaxkv._dataclasses import frozen_dataclass
from jaxkv.attention.xla import exact_einsum
from jaxkv.policies.gates import Gate
from jaxkv.policies.of_model import NamedTensors

_EPSILON = 1e-6


@jax.tree_util.register_dataclass
@frozen_dataclass
class KVzapWeights:
    """Weights of one layer of KVzap's gate: a linear map to K scores, after an optional hidden layer `inner`.

    `weight` maps the W outputs of the hidden layer; without `inner`, the hidden state.
    """

    weight: Shaped[Array | np.ndarray, "K W"]
    bias: Shaped[Array | np.ndarray, " K"]
    inner: Shaped[Array | np.ndarray, "W E"] | None = None
    inner_bias: Shaped[Array | np.ndarray, " W"] | None = None


@frozen_dataclass
class KVzapGate(Gate):
    """KVzap's gate: scores from each layer's normed hidden state, by one linear map or two with a GELU between.

    A file has, for each layer, tensors `layers.0.weight` and `layers.0.bias`, or `layers.0.0.weight`,
    `layers.0.0.bias`, `layers.0.2.weight` and `layers.0.2.bias`.
    """

    beginning = r"layers\.(\d+)\."

    @classmethod
    def read_layer_weights(cls, found: NamedTensors) -> KVzapWeights:
        """Return one layer's `KVzapWeights`, of one linear map or two, popped from its named tensors."""
        if "weight" in found.stored:
            weight = found.pop_tensor("weight", None, None)
            return KVzapWeights(weight=weight, bias=found.pop_tensor("bias", len(weight)))
        inner = found.pop_tensor("0.weight", None, None)
        weight = found.pop_tensor("2.weight", None, len(inner))
        bias = found.pop_tensor("2.bias", len(weight))
        inner_bias = found.pop_tensor("0.bias", len(inner))
        return KVzapWeights(weight=weight, bias=bias, inner=inner, inner_bias=inner_bias)

    @classmethod
    def infer_gate_sizes(cls, weights: KVzapWeights) -> tuple[int, int]:
        """Return the number of kv heads K and the width of hidden states E, from one layer's weights."""
        return len(weights.bias), (
            weights.weight if weights.inner is None else weights.inner
        ).shape[1]

    def encode_safetensors(self) -> bytes:
        """Return the bytes of a safetensors file of this gate, with the published tensor names."""
        found: dict[str, np.ndarray] = {}
        for layer, weights in enumerate(self.host_weights):
            names = {"weight": weights.weight, "bias": weights.bias}
            if weights.inner is not None:
                names = {f"2.{name}": array for name, array in names.items()}
                names |= {"0.weight": weights.inner, "0.bias": weights.inner_bias}
            found |= {
                f"layers.{layer}.{name}": np.ascontiguousarray(array)
                for name, array in names.items()
            }
        return safetensors.numpy.save(found, metadata={"format": "pt"})

    def score_hidden_states(
        self, weights: KVzapWeights, hidden: Float[Array, "B S E"]
    ) -> Float[Array, "B K S"]:
        """Return scores `[B, K, S]` of entries from normed hidden states: predicted logarithms of KVzip+'s scores."""
        x = hidden.astype(jnp.float32)
        if weights.inner is not None and weights.inner_bias is not None:
            x = jax.nn.gelu(
                exact_einsum("bse,we->bsw", x, weights.inner) + weights.inner_bias,
                approximate=False,
            )
        return exact_einsum("bsw,kw->bks", x, weights.weight) + weights.bias[:, None]


@jax.tree_util.register_dataclass
@frozen_dataclass
class FastKVzipWeights:
    """Weights of a layer of Fast KVzip's gate: per kv head W query maps, a key map, N base keys, biases; two norms."""

    q: Shaped[Array | np.ndarray, "K W C E"]
    q_bias: Shaped[Array | np.ndarray, "K W C"]
    k: Shaped[Array | np.ndarray, "K C E"]
    q_norm: Shaped[Array | np.ndarray, " C"]
    k_norm: Shaped[Array | np.ndarray, " C"]
    base: Shaped[Array | np.ndarray, "K N C"]
    bias: Shaped[Array | np.ndarray, "K W"]


@frozen_dataclass
class FastKVzipGate(Gate):
    """Fast KVzip's gate: softmax share of a token's own key among learned base keys, mean over learned query maps.

    A file has, for layer 0, tensors `0.q_proj.weight`, `0.q_proj.bias`, `0.k_proj.weight`, `0.q_norm.weight`,
    `0.k_norm.weight`, `0.k_base` and `0.b`: the names within each layer of the published files, which are pickles.
    """

    beginning = r"(\d+)\."

    @classmethod
    def read_layer_weights(cls, found: NamedTensors) -> FastKVzipWeights:
        """Return one layer's `FastKVzipWeights`, popped from its named tensors; query and key maps split by kv head."""
        base = found.pop_tensor("k_base", None, 1, None, None)[:, 0]
        heads, _, width = base.shape
        bias = found.pop_tensor("b", heads, 1, None)[:, 0]
        rows = bias.size * width
        q = found.pop_tensor("q_proj.weight", rows, None)
        return FastKVzipWeights(
            q=q.reshape(heads, -1, width, q.shape[1]),
            q_bias=found.pop_tensor("q_proj.bias", rows).reshape(heads, -1, width),
            k=found.pop_tensor("k_proj.weight", heads * width, q.shape[1]).reshape(
                heads, width, -1
            ),
            q_norm=found.pop_tensor("q_norm.weight", width),
            k_norm=found.pop_tensor("k_norm.weight", width),
            base=base,
            bias=bias,
        )

    @classmethod
    def infer_gate_sizes(cls, weights: FastKVzipWeights) -> tuple[int, int]:
        """Return the number of kv heads K and the width of hidden states E, from one layer's weights."""
        return weights.k.shape[0], weights.k.shape[2]

    def score_hidden_states(
        self, weights: FastKVzipWeights, hidden: Float[Array, "B S E"]
    ) -> Float[Array, "B K S"]:
        """Return scores `[B, K, S]` in [0, 1]: the own key's softmax share among base keys, mean over query maps."""
        x = hidden.astype(jnp.float32)
        divisor = weights.base.shape[2] ** 0.5
        q = exact_einsum("bse,kwce->bkswc", x, weights.q) + weights.q_bias[:, None]
        q = _apply_rms_norm(q, weights.q_norm)
        k = _apply_rms_norm(exact_einsum("bse,kce->bksc", x, weights.k), weights.k_norm)
        own = exact_einsum("bkswc,bksc->bksw", q, k) / divisor + weights.bias[:, None]
        base = exact_einsum("bkswc,knc->bkswn", q, weights.base) / divisor
        return jax.nn.sigmoid(own - jax.nn.logsumexp(base, axis=-1)).mean(axis=-1)


def _apply_rms_norm(
    x: Float[Array, "... C"], weight: Shaped[Array | np.ndarray, " C"]
) -> Float[Array, "... C"]:
    """Return vectors after RMS normalisation over the last axis, multiplied by `weight`."""
    return x * lax.rsqrt((x * x).mean(axis=-1, keepdims=True) + _EPSILON) * weight
