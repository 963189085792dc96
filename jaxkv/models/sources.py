"""Maps each model parameter to the checkpoint tensors, or parts of them, that hold its values, by model family."""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping

from jaxkv.models.config import ModelConfig
from jaxkv.models.decoder import Decoder, named_parameters

_LLAMA_ENDS = {
    "embedding": "model.embed_tokens.weight",
    "norm.scale": "model.norm.weight",
    "head": "lm_head.weight",
}
_FALCON_ENDS = {
    "embedding": "transformer.word_embeddings.weight",
    "norm.scale": "transformer.ln_f.weight",
    "norm.bias": "transformer.ln_f.bias",
    "head": "lm_head.weight",
}
# Parameter -> tensors that are stacked in it; a bias has the name of its weight.
_LLAMA = {
    "attention_norm.scale": ("input_layernorm",),
    "mlp_norm.scale": ("post_attention_layernorm",),
    "attention.q_norm.scale": ("self_attn.q_norm",),
    "attention.k_norm.scale": ("self_attn.k_norm",),
    "attention.q": ("self_attn.q_proj",),
    "attention.kv": ("self_attn.k_proj", "self_attn.v_proj"),
    "attention.out": ("self_attn.o_proj",),
    "mlp.gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.down": ("mlp.down_proj",),
}
# What families beside Llama's call their norms, and norms behind attention and MLP.
_OLMO_NORMS = {
    "attention_out_norm.scale": ("post_attention_layernorm",),
    "mlp_out_norm.scale": ("post_feedforward_layernorm",),
}
_GEMMA_NORMS = _OLMO_NORMS | {"mlp_norm.scale": ("pre_feedforward_layernorm",)}
_OTHER_NORMS = {
    "gemma2": _GEMMA_NORMS,
    "gemma3_text": _GEMMA_NORMS,
    "glm4": {
        "attention_out_norm.scale": ("post_self_attn_layernorm",),
        "mlp_out_norm.scale": ("post_mlp_layernorm",),
    },
    "olmo2": _OLMO_NORMS,
    "olmo3": _OLMO_NORMS,
}
# Vectors over heads, whole as they are.
_VECTORS = {
    "attention.q_gain": "self_attn.q_norm.weight",
    "attention.k_gain": "self_attn.k_norm.weight",
    "attention.sink_logits": "self_attn.sinks",
}
# Families with one tensor for gate and up.
_ONE_GATE_UP = ("glm4", "phi3")
_FALCON = {
    "attention.out": ("self_attention.dense",),
    "mlp.up": ("mlp.dense_h_to_4h",),
    "mlp.down": ("mlp.dense_4h_to_h",),
}
# Names of a mixture (Mixtral's, all others'), each with its gate, up and down projections.
_MIXTURES = {
    "block_sparse_moe": ("w1", "w3", "w2"),
    "mlp": ("gate_proj", "up_proj", "down_proj"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Source:
    """Checkpoint tensor that holds a parameter or a slice of it: its name, and how its axes map to the parameter's.

    Attributes:
        name: name of the tensor.
        axes: for each axis of the tensor, the sizes of the parameter's axes that it flattens, the slowest first.
        at: index into the parameter's first axes, for a tensor that holds one slice of them; empty for all.
        pick: which part of each of those axes belongs to the parameter, from the first axis on: an integer for an axis
            that the parameter does not have, a range for a part; axes left out are taken whole.
        within: first index of these on the tensor's first axis, and that axis' size, where it holds other parameters,
            too.
        order: the tensor's channels in the parameter's order, where that is another.
        along: the parameter's axis of these channels, -1 or, where widths follow, -2.
    """

    name: str
    axes: tuple[tuple[int, ...], ...]
    at: tuple[int, ...] = ()
    pick: tuple[int | range, ...] = ()
    within: tuple[int, int] | None = None
    order: tuple[int, ...] = ()
    along: int = -2

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the checkpoint tensor as a tuple of ints."""
        sizes = tuple(math.prod(each) for each in self.axes)
        return sizes if self.within is None else (self.within[1], *sizes[1:])

    def spans(self, part: list[range]) -> list[list[tuple[int, int]]]:
        """Index spans (first, end) of a parameter's part in the checkpoint tensor: one list per tensor axis.

        `part` has one range for each of the parameter's axes after those in `at`.
        """
        sizes = [size for axis in self.axes for size in axis]
        rest, there = iter(part), []
        for axis, size in enumerate(sizes):
            pick = self.pick[axis] if axis < len(self.pick) else range(size)
            if isinstance(pick, int):
                there.append(range(pick, pick + 1))
            else:
                span = next(rest)
                there.append(pick[span.start : span.stop])
        ends = itertools.accumulate(map(len, self.axes))
        flat = [
            _flat_spans(there[end - len(axis) : end], axis)
            for axis, end in zip(self.axes, ends, strict=True)
        ]
        before = 0 if self.within is None else self.within[0]
        return [[(before + begin, before + end) for begin, end in flat[0]], *flat[1:]]


def _flat_spans(part: list[range], shape: tuple[int, ...]) -> list[tuple[int, int]]:
    """(first, end) index spans on one flattened axis, for a part given as one range per axis that it flattens."""
    inner = math.prod(shape[1:])
    below = _flat_spans(part[1:], shape[1:]) if len(part) > 1 else [(0, 1)]
    if below == [(0, inner)]:
        return [(part[0].start * inner, part[0].stop * inner)]
    return [
        (each * inner + first, each * inner + last) for each in part[0] for first, last in below
    ]


def sources_of(
    decoder: Decoder, family: str, names: frozenset[str]
) -> dict[str, tuple[Source, ...]]:
    """Dictionary from parameter path to the checkpoint tensors (`Source`s) that fill that parameter of a decoder.

    `names` are the checkpoint's tensors, which decide how mixtures are stored. All sources of one parameter have an
    `at` of the same length.
    """
    ends = _FALCON_ENDS if family == "falcon" else _LLAMA_ENDS
    found: dict[str, tuple[Source, ...]] = {}
    parameters = dict(named_parameters(decoder))
    for path, parameter in parameters.items():
        if path.endswith(("_scale", "_scales", "_leasts")):
            continue  # beside codes, computed with them
        shape = parameter.get_value().shape
        if f"{path}_scales" in parameters:
            shape = (*shape[:-1], 2 * shape[-1])  # two codes are a byte
        if path in ends:
            found[path] = (_plain(ends[path], shape),)
            continue
        _, index, inner = path.split(".", 2)
        if family == "falcon":
            found[path] = tuple(_falcon(inner, f"transformer.h.{index}.", shape, decoder.config))
        elif family in _ONE_GATE_UP and inner == "mlp.gate_up":
            found[path] = (_plain(f"model.layers.{index}.mlp.gate_up_proj.weight", shape),)
        elif family == "phi3" and inner in ("attention.q", "attention.kv"):
            of = tuple(_phi3(inner, f"model.layers.{index}.", shape, decoder.config))
            found[path] = _ordered(of, inner, decoder.config)
        elif inner in _VECTORS:
            found[path] = (_vector(inner, f"model.layers.{index}.", shape, decoder.config),)
        elif family == "gpt_oss" and inner.startswith("mlp."):
            found[path] = tuple(_gpt_oss(inner, f"model.layers.{index}.mlp.", shape))
        elif inner in ("mlp.router", "mlp.experts_gate_up", "mlp.experts_down"):
            found[path] = tuple(_mixture(inner, f"model.layers.{index}.", shape, family, names))
        else:
            of = tuple(
                _stacked(
                    _LLAMA | _OTHER_NORMS.get(family, {}), inner, f"model.layers.{index}.", shape
                )
            )
            found[path] = _ordered(of, inner, decoder.config)
    return found


def _ordered(of: tuple[Source, ...], inner: str, config: ModelConfig) -> tuple[Source, ...]:
    """Sources of a parameter with the order of the channels of queries and keys, where the checkpoint's is another."""
    order = config.channels
    if order is None:
        return of
    along = -1 if inner.endswith("_bias") else -2
    turned = inner in ("attention.q", "attention.q_bias", "attention.kv", "attention.kv_bias")
    # Of keys and values the first are the keys.
    first = (dataclasses.replace(of[0], order=order, along=along),) if turned else of[:1]
    return first + of[1:]


def _vector(inner: str, prefix: str, shape: tuple[int, ...], config: ModelConfig) -> Source:
    """`Source` of a vector over heads; of weights of layer norms per head, which a checkpoint holds as a matrix."""
    name = f"{prefix}{_VECTORS[inner]}"
    if config.qk_layer_norm and inner != "attention.sink_logits":
        return Source(
            name=name, axes=(shape[:-1], shape[-1:]), order=config.channels or (), along=-1
        )
    return Source(name=name, axes=(shape,))


def _plain(name: str, shape: tuple[int, ...], at: tuple[int, ...] = ()) -> Source:
    """`Source` of a whole tensor, its output axes flattened into one, with an input axis unless it is a vector."""
    vector = name.endswith(".bias") or len(shape) == 1
    return Source(name=name, axes=(shape,) if vector else (shape[:-1], shape[-1:]), at=at)


def _stacked(
    table: Mapping[str, tuple[str, ...]], inner: str, prefix: str, shape: tuple[int, ...]
) -> Iterator[Source]:
    """Yields the `Source`s of a parameter that stacks whole tensors, whose names are in `table`."""
    kind = "bias" if inner.endswith("_bias") else "weight"
    of = table[inner.removesuffix("_bias")]
    for index, each in enumerate(of):
        name = f"{prefix}{each}.{kind}"
        yield _plain(name, shape) if len(of) == 1 else _plain(name, shape[1:], (index,))


def _falcon(
    inner: str, prefix: str, shape: tuple[int, ...], config: ModelConfig
) -> Iterator[Source]:
    """Yields the `Source`s of a Falcon parameter; queries, keys and values share one fused tensor."""
    kind = "bias" if inner.endswith(("_bias", ".bias")) else "weight"
    part, _, name = inner.rpartition(".")
    if name.removesuffix("_bias") in ("q", "kv"):
        # One tensor holds, for every kv head, its queries, then its key, then its value.
        outputs = (config.kv_heads, config.group + 2, config.head_dim)
        fused = f"{prefix}self_attention.query_key_value.{kind}"
        axes = (outputs,) if kind == "bias" else (outputs, (config.embed,))
        if name.startswith("q"):
            yield Source(name=fused, axes=axes, pick=(range(config.kv_heads), range(config.group)))
            return
        for index in range(2):
            yield Source(
                name=fused,
                axes=axes,
                at=(index,),
                pick=(range(config.kv_heads), config.group + index),
            )
    elif part.endswith("_norm"):
        # Two parallel norms of the same hidden states are named differently from one norm or two sequential ones.
        both = config.parallel and not config.shared_norm
        names = ("ln_attn", "ln_mlp") if both else ("input_layernorm", "post_attention_layernorm")
        yield _plain(f"{prefix}{names[part == 'mlp_norm']}.{kind}", shape)
    else:
        yield from _stacked(_FALCON, inner, prefix, shape)


def _phi3(inner: str, prefix: str, shape: tuple[int, ...], config: ModelConfig) -> Iterator[Source]:
    """Yields the `Source`s of a Phi-3's queries, or of its keys and values, which share one tensor."""
    name, queries, keys = f"{prefix}self_attn.qkv_proj.weight", config.heads, config.kv_heads
    rows = (queries + 2 * keys) * config.head_dim
    if inner == "attention.q":
        yield dataclasses.replace(_plain(name, shape), within=(0, rows))
        return
    for index in range(2):
        first = (queries + index * keys) * config.head_dim
        yield dataclasses.replace(_plain(name, shape[1:], (index,)), within=(first, rows))


def _gpt_oss(inner: str, prefix: str, shape: tuple[int, ...]) -> Iterator[Source]:
    """Yields the `Source`s of a gpt-oss' router or experts, which are read one after another."""
    part, kind = (
        inner.removeprefix("mlp.").removesuffix("_bias"),
        "bias" if inner.endswith("_bias") else "weight",
    )
    if part == "router":
        yield _plain(f"{prefix}router.{kind}", shape)
        return
    name = f"{prefix}experts.{part.removeprefix('experts_')}_proj.{kind}"
    for expert in range(shape[0]):
        yield Source(name=name, axes=tuple((size,) for size in shape), at=(expert,), pick=(expert,))


def _mixture(
    inner: str, prefix: str, shape: tuple[int, ...], family: str, names: frozenset[str]
) -> Iterator[Source]:
    """Yields the `Source`s of a mixture's router or experts: one fused tensor, or one tensor per expert."""
    # transformers 5 keeps all experts in one tensor; files on the hub have a tensor for each expert.
    fused = f"{prefix}mlp.experts.gate_up_proj" in names
    called = "block_sparse_moe" if family == "mixtral" and not fused else "mlp"
    gate, up, down = _MIXTURES[called]
    if inner == "mlp.router":
        yield _plain(f"{prefix}{called}.gate.weight", shape)
        return
    experts, each, upwards = shape[0], f"{prefix}{called}.experts", inner == "mlp.experts_gate_up"
    if fused:
        axes = ((experts,), shape[1:-1], shape[-1:])
        yield Source(name=f"{each}.{'gate_up' if upwards else 'down'}_proj", axes=axes)
        return
    for expert in range(experts):
        if upwards:
            for index, name in enumerate((gate, up)):
                yield _plain(f"{each}.{expert}.{name}.weight", shape[2:], (expert, index))
        else:
            yield _plain(f"{each}.{expert}.{down}.weight", shape[1:], (expert,))
