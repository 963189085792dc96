"""KVzap: rows by a gate that was trained to predict KVzip+'s scores from hidden states."""

import dataclasses
from functools import partial
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Shaped

from jaxkv.policies.gates import Gate, LayerTensors
from jaxkv.policies.parts import Keep, Parts
from jaxkv.policies.policy import Method
from jaxkv.policies.registry import register
from jaxkv.policies.unseen import GateScores


@partial(jax.tree_util.register_dataclass, data_fields=["weight", "bias", "inner", "inner_bias"], meta_fields=[])
@dataclasses.dataclass(frozen=True, kw_only=True)
class KVzapWeights:
    """One layer of KVzap's gate: a linear map from W numbers to K scores, and for W < E one from the hidden state."""

    weight: Shaped[Array | np.ndarray, "K W"]
    bias: Shaped[Array | np.ndarray, " K"]
    inner: Shaped[Array | np.ndarray, "W E"] | None = None
    inner_bias: Shaped[Array | np.ndarray, " W"] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class KVzapGate(Gate):
    """KVzap's gate: each layer's normed hidden state, by a linear map or by two with a GELU between, to K scores.

    Tensors are `layers.0.weight` and `layers.0.bias`, or `layers.0.0.weight`, `layers.0.0.bias`, `layers.0.2.weight`
    and `layers.0.2.bias`, for each layer.
    """

    beginning: ClassVar[str] = r"layers\.(\d+)\."

    @classmethod
    def of_layer(cls, found: LayerTensors) -> KVzapWeights:
        """Weights of one layer, linear or of two layers, by the names of its tensors."""
        if "weight" in found.stored:
            weight = found.take("weight", None, None)
            return KVzapWeights(weight=weight, bias=found.take("bias", len(weight)))
        inner = found.take("0.weight", None, None)
        weight = found.take("2.weight", None, len(inner))
        bias, inner_bias = found.take("2.bias", len(weight)), found.take("0.bias", len(inner))
        return KVzapWeights(weight=weight, bias=bias, inner=inner, inner_bias=inner_bias)

    @classmethod
    def sizes(cls, weights: KVzapWeights) -> tuple[int, int]:
        """K and E of one layer's weights."""
        return len(weights.bias), (weights.weight if weights.inner is None else weights.inner).shape[1]

    def scores(self, weights: KVzapWeights, hidden: Float[Array, "B S E"]) -> Float[Array, "B K S"]:
        """Predicted logarithms of KVzip+'s scores."""
        x, of = hidden.astype(jnp.float32), {"precision": lax.Precision.HIGHEST}
        if weights.inner is not None:
            x = jax.nn.gelu(jnp.einsum("bse,we->bsw", x, weights.inner, **of) + weights.inner_bias, approximate=False)
        return jnp.einsum("bsw,kw->bks", x, weights.weight, **of) + weights.bias[:, None]


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class KVzap(Method):
    """Keeps the rows that a trained gate expects to be needed to repeat the prompt; no question has to be known.

    The published policy keeps rows whose score is above a threshold, the same for all layers and heads: with a number
    of rows in its place, `GlobalBudget(base=KVzap(...))`.

    Attributes:
        gate: the model's gate: a safetensors file with the published names of tensors, or a folder with
            model.safetensors, or what `KVzapGate.read` returned.
        sinks: first tokens that always stay.
        window: last tokens that always stay.

    References:
        Jegou and Jeblick, KVzap: Fast, Adaptive, and Faithful KV Cache Pruning, arXiv:2601.07891.
    """

    budget: int | float | None = 1024
    gate: str | KVzapGate | None = None
    sinks: int = 0
    window: int = 128

    paper: ClassVar[str] = "KVzap, arXiv:2601.07891"

    def _check(self) -> None:
        if self.gate is not None:
            object.__setattr__(self, "gate", KVzapGate.read("gate", self.gate))
        self._adopt(Keep(sinks=self.sinks, window=self.window), "sinks", "window")

    def for_model(self, layers: int, found: tuple[int, ...] | None) -> Method:
        """Returns this policy; raises ValueError without a gate, or with that of a model of other layers."""
        self._scorer.require_gate(layers)
        return self

    @property
    def _scorer(self) -> GateScores:
        """The scorer (`GateScores`) with this policy's gate."""
        return GateScores(gate=self.gate if isinstance(self.gate, Gate) else None)

    def parts(self) -> Parts:
        """Returns `Parts` that score rows by the gate, with sinks and window always kept."""
        return self.compose(scorer=self._scorer, keep=Keep(sinks=self.sinks, window=self.window))
