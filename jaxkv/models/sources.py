"""Map from each model parameter to the checkpoint tensors, or slices of them, with its values, by model family."""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping

from jaxkv._dataclasses import frozen_dataclass
from jaxkv.checkpoints.hub_config import FAMILIES, TENSORS
from jaxkv.models.config import ModelConfig
from jaxkv.models.decoder import Decoder, named_parameters
from jaxkv.models.values import Rope, compute_channel_order

Shape = tuple[int, ...]
# Parameters of a mixture that transformers 5 calls alike in all families, if one tensor holds all experts.
_FUSED = ("mlp.experts", "mlp.router")
# Parameters whose tensors' names do not end in weight or bias.
_BARE = ("attention.sink_logits", "multiplier", "mlp.factors", "mlp.router_norm.scale")
# Parameters with the channels of rotated heads, besides keys.
_ROTATED = tuple(
    f"attention.{each}" for each in ("q", "q_gain", "k_gain", "q_norm.scale", "k_norm.scale")
)
# Parameters of a gated delta net that hold queries (0), keys (1), values (2) or gates (3) of each head.
_CHANNELS = {"qk": (0, 1), "vz": (2, 3), "taps_qk": (0, 1), "taps_v": (2,)}

# Names of the tensors of latents by parameter.
_LATENTS = {
    "latent": "kv_a_proj_with_mqa",
    "latent_norm.scale": "kv_a_layernorm",
    "q_down": "q_a_proj",
    "q_down_norm.scale": "q_a_layernorm",
}


@frozen_dataclass
class TensorSource:
    """Location of a parameter, or a slice of it, in a checkpoint tensor: name, map of axes and channels; no data.

    Attributes:
        name: name of the tensor.
        axes: for each axis of the tensor, the sizes of the parameter's axes that it flattens, the slowest first.
        at: index into the parameter's first axes, for a tensor with one slice of them; empty for all.
        pick: for each of those axes from the first on, the indices that belong to the parameter: an integer for an axis
            that the parameter does not have, or a range. Axes without one are taken completely.
        within: first index on the tensor's first axis, and that axis' size, if the tensor also holds other parameters.
        order: the tensor's channels in the parameter's order, if the orders differ.
        along: the parameter's axis of these channels, -1 or, if widths follow, -2.
    """

    name: str
    axes: tuple[Shape, ...]
    at: Shape = ()
    pick: tuple[int | range, ...] = ()
    within: tuple[int, int] | None = None
    order: Shape = ()
    along: int = -2

    @property
    def shape(self) -> Shape:
        """Expected shape of the whole checkpoint tensor, from the sizes of the parameter's axes."""
        sizes = tuple(math.prod(each) for each in self.axes)
        return sizes if self.within is None else (self.within[1], *sizes[1:])

    def locate_shard_in_tensor(self, part: list[range]) -> list[list[tuple[int, int]]]:
        """Return (first, end) index spans in the checkpoint tensor, a list per axis, of `part` of its parameter slice.

        `part` has one range for each of the parameter's axes after those in `at`.
        """
        sizes = [size for axis in self.axes for size in axis]
        rest = iter(part)
        there = []
        for axis, size in enumerate(sizes):
            pick = self.pick[axis] if axis < len(self.pick) else range(size)
            if isinstance(pick, int):
                there.append(range(pick, pick + 1))
            else:
                span = next(rest)
                there.append(pick[span.start : span.stop])
        ends = itertools.accumulate(map(len, self.axes))
        flat = [
            _flatten_ranges(there[end - len(axis) : end], axis)
            for axis, end in zip(self.axes, ends, strict=True)
        ]
        before = 0 if self.within is None else self.within[0]
        return [[(before + begin, before + end) for begin, end in flat[0]], *flat[1:]]


def _flatten_ranges(part: list[range], shape: Shape) -> list[tuple[int, int]]:
    """Convert one range per axis of `shape` to (first, end) spans of indices of the flattened axis."""
    inner = math.prod(shape[1:])
    below = _flatten_ranges(part[1:], shape[1:]) if len(part) > 1 else [(0, 1)]
    if below == [(0, inner)]:
        return [(part[0].start * inner, part[0].stop * inner)]
    return [
        (each * inner + first, each * inner + last) for each in part[0] for first, last in below
    ]


def map_parameter_sources(
    decoder: Decoder, family: str, names: frozenset[str]
) -> dict[str, tuple[TensorSource, ...]]:
    """Return the `TensorSource` objects of each parameter of a decoder, by parameter path; not of scales and minima.

    `names` are the checkpoint's tensors, which determine how mixtures are stored. All sources of one parameter have an
    `at` of the same length.
    """
    found: dict[str, tuple[TensorSource, ...]] = {}
    parameters = dict(named_parameters(decoder))
    for path, parameter in parameters.items():
        if path.endswith(("_scale", "_scales", "_leasts")):
            continue  # Scales and minima, computed together with the codes.
        shape = parameter.get_value().shape
        if f"{path}_scales" in parameters:
            shape = (*shape[:-1], 2 * shape[-1])  # A byte holds two codes.
        inner = path
        prefix = ""
        if path.startswith("blocks."):
            number, inner = _locate_block(path, decoder.config)
            prefix = f"{FAMILIES[family].layers}.{number}."
        found[path] = tuple(
            _yield_parameter_sources(inner, prefix, shape, family, decoder.config, names)
        )
    return found


def _locate_block(path: str, config: ModelConfig) -> tuple[int, str]:
    """Return the number of a parameter's block in the checkpoint, and the rest of its path; `state.` for state layers.

    A layer's block follows the blocks of the state layers below it.
    """
    _, layer, inner = path.split(".", 2)
    below = [len(config.get_layer_spec(each).below) for each in range(int(layer) + 1)]
    number = int(layer) + sum(below)
    if not inner.startswith("below."):
        return number, inner
    _, index, inner = inner.split(".", 2)
    return number + int(index) - below[-1], inner.replace("attention.", "state.")


def _yield_parameter_sources(
    inner: str,
    prefix: str,
    shape: Shape,
    family: str,
    config: ModelConfig,
    names: frozenset[str],
) -> Iterator[TensorSource]:
    """Yield the `TensorSource` objects of parameter `inner`, in the family's names; `prefix` is that of its block."""
    kind = "bias" if inner.endswith(("_bias", ".bias")) else "weight"
    base = inner.removesuffix("_bias")
    tensors = {**TENSORS, **FAMILIES[family].tensors}
    if fused_experts := f"{prefix}mlp.experts.gate_up_proj" in names:
        # transformers 5 stores all experts in one tensor; files on the hub have one tensor per expert.
        tensors |= {each: TENSORS[each] for each in _FUSED}
    fused = base in ("attention.q", "attention.kv")
    if base.startswith("state."):
        yield from _yield_delta_net_sources(base.removeprefix("state."), prefix, family, config)
    elif config.attention_gate and base in ("attention.q", "attention.out_gate"):
        # For every head, a tensor holds the rows of its query, then those of its gate.
        of_heads = ((*shape[:2], 2, shape[2]), shape[3:])
        part = (range(shape[0]), range(shape[1]), int(base == "attention.out_gate"))
        source = TensorSource(name=f"{prefix}self_attn.q_proj.weight", axes=of_heads, pick=part)
        yield _add_channel_order(source, base, config)
    elif family == "falcon" and fused:
        name = f"{prefix}self_attention.query_key_value.{kind}"
        yield from _yield_falcon_sources(base, name, kind == "bias", config)
    elif family == "phi3" and fused:
        yield from _yield_phi3_sources(base, f"{prefix}self_attn.qkv_proj.weight", shape, config)
    elif config.latent is not None and base.startswith("attention.") and base != "attention.out":
        yield _make_latent_source(
            base.removeprefix("attention."), f"{prefix}self_attn", shape, config
        )
    elif base in _BARE:
        yield TensorSource(name=f"{prefix}{tensors[base]}", axes=(shape,))
    elif base == "mlp.xielu":
        for index, each in enumerate(("alpha_p", "alpha_n")):
            yield TensorSource(name=f"{prefix}mlp.act_fn.{each}", axes=((1,),), at=(index,))
    elif base.endswith("_gain") and family == "stablelm":
        name = prefix + tensors[base]
        for index, at in enumerate(itertools.product(*map(range, shape[:-1]))):
            source = _make_tensor_source(f"{name}.{index}.weight", shape[-1:], at)
            yield _add_channel_order(source, base, config)
    elif base.startswith("mlp.experts") and family == "gpt_oss":
        # These parameters have several sources, which are read in turn.
        name = f"{prefix}mlp.experts.{base.removeprefix('mlp.experts_')}_proj.{kind}"
        for expert in range(shape[0]):
            each_axis = tuple((size,) for size in shape)
            yield TensorSource(name=name, axes=each_axis, at=(expert,), pick=(expert,))
    elif base == "mlp.correction":
        # ERNIE's has an axis of modalities, with text alone.
        more = [0] * (family == "ernie4_5_moe")
        axes: tuple[Shape, ...] = (*((1,) for _ in more), shape)
        yield TensorSource(name=f"{prefix}{tensors[base]}", axes=axes, pick=tuple(more))
    elif base.startswith("mlp.experts"):
        yield from _yield_expert_sources(base, prefix, shape, tensors, fused_experts)
    else:
        held = tensors[base].split()
        if family == "falcon" and "_norm." in base and config.parallel and not config.shared_norm:
            # Two parallel norms of the same hidden states have different names from one norm or two sequential ones.
            held = ["ln_mlp" if base.startswith("mlp") else "ln_attn"]
        stacked = len(held) > 1
        # Values from keys have no tensor.
        for index, each in enumerate(held[: shape[0]] if stacked else held):
            name = f"{prefix}{each}.{kind}"
            source = (
                _make_tensor_source(name, shape[1:], (index,))
                if stacked
                else _make_tensor_source(name, shape)
            )
            yield _add_channel_order(source, base, config)


def _add_channel_order(source: TensorSource, base: str, config: ModelConfig) -> TensorSource:
    """Return a source of Q, K or their norms with the channel order, all-heads gains flattened; others unchanged."""
    # Index 0 of keys and values are the keys.
    if base not in _ROTATED and not (base == "attention.kv" and source.at == (0,)):
        return source
    gain = base.endswith("_gain")
    if gain and not config.qk_layer_norm:
        source = dataclasses.replace(source, axes=(source.axes[0] + source.axes[1],))
    # Weights of layer norms per head are a matrix of channels.
    along = -1 if gain or len(source.axes) == 1 else -2
    return dataclasses.replace(source, order=config.channel_permutation or (), along=along)


def _make_tensor_source(name: str, shape: Shape, at: Shape = ()) -> TensorSource:
    """Return the `TensorSource` of a tensor that fills a parameter, or its slice `at`, output axes flattened."""
    vector = name.endswith(".bias") or len(shape) == 1
    return TensorSource(name=name, axes=(shape,) if vector else (shape[:-1], shape[-1:]), at=at)


def _make_latent_source(base: str, prefix: str, shape: Shape, config: ModelConfig) -> TensorSource:
    """Return the `TensorSource` of a parameter of `LatentAttention`, channels in the order of `apply_rope`."""
    latent = config.latent
    assert latent is not None
    if base in ("key_up", "value_up"):
        # One tensor holds, for every head, its projection of keys, then that of values.
        begin = 0 if base == "key_up" else latent.unrotated
        both = latent.unrotated + latent.value
        return TensorSource(
            name=f"{prefix}.kv_b_proj.weight",
            axes=((1, shape[1], both), shape[-1:]),
            pick=(range(1), range(shape[1]), range(begin, begin + shape[2])),
        )
    if base == "q":
        name = "q_proj" if latent.query_rank is None else "q_b_proj"
        dim = latent.query_dim
        rope = Rope(share=latent.rotated / dim)
        found = compute_channel_order(rope, dim, interleaved=config.interleaved)
        # A checkpoint has rotated channels behind the others.
        order = tuple((at + latent.unrotated) % dim for at in found)
        return dataclasses.replace(
            _make_tensor_source(f"{prefix}.{name}.weight", shape), order=order
        )
    source = _make_tensor_source(f"{prefix}.{_LATENTS[base]}.weight", shape)
    if base != "latent":
        return source
    found = compute_channel_order(Rope(), latent.rotated, interleaved=config.interleaved)
    order = (*range(latent.rank), *(latent.rank + at for at in found))
    return dataclasses.replace(source, order=order)


def _yield_delta_net_sources(
    base: str, prefix: str, family: str, config: ModelConfig
) -> Iterator[TensorSource]:
    """Yield the `TensorSource` objects of a gated delta net's parameter: a Qwen3-Next's by key head, or others'."""
    spec = config.state_layers[0]
    heads, group, width = spec.key_heads, spec.group_size, (config.embed,)
    values = group * spec.value_dim
    sizes = (spec.key_dim, spec.key_dim, values, values)
    firsts = (0, *itertools.accumulate(sizes[:-1]))
    net = f"{prefix}linear_attn"
    by_head = family == "qwen3_next"
    for slot, index in enumerate(_CHANNELS.get(base, ())):
        first, size = firsts[index], sizes[index]
        rows = (heads, size)
        convolved = TensorSource(
            name=f"{net}.in_proj_qkv.weight",
            axes=(rows, width),
            at=(slot,),
            within=(heads * first, heads * firsts[-1]),
        )
        if base.startswith("taps"):
            yield dataclasses.replace(
                convolved,
                name=f"{net}.conv1d.weight",
                axes=(rows, (1,), (spec.window + 1,)),
                at=() if base == "taps_v" else (slot,),
                pick=(*map(range, rows), 0),
            )
        elif by_head:
            axes, pick = ((heads, sum(sizes)), width), (range(heads), range(first, first + size))
            name = f"{net}.in_proj_qkvz.weight"
            yield TensorSource(name=name, axes=axes, at=(slot,), pick=pick)
        elif index == 3:
            yield dataclasses.replace(convolved, name=f"{net}.in_proj_z.weight", within=None)
        else:
            yield convolved
    for slot in range(2 if base == "rd" else 0):
        if by_head:
            pick = (range(heads), range(slot * group, (slot + 1) * group))
            both = ((heads, 2 * group), width)
            yield TensorSource(name=f"{net}.in_proj_ba.weight", axes=both, at=(slot,), pick=pick)
        else:
            name = f"{net}.in_proj_{'ba'[slot]}.weight"
            yield TensorSource(name=name, axes=((heads, group), width), at=(slot,))
    plain: dict[str, tuple[str, tuple[Shape, ...]]] = {
        "out": ("out_proj.weight", (width, (heads * values,))),
        "norm.scale": ("norm.weight", ((spec.value_dim,),)),
        "log_speed": ("A_log", ((heads, group),)),
        "speed_offset": ("dt_bias", ((heads, group),)),
    }
    if base in plain:
        name, whole = plain[base]
        yield TensorSource(name=f"{net}.{name}", axes=whole)


def _yield_falcon_sources(
    base: str, name: str, bias: bool, config: ModelConfig
) -> Iterator[TensorSource]:
    """Yield the `TensorSource` objects of a Falcon's queries, or of its keys and values, in one tensor by kv head."""
    # The tensor holds, for every kv head, its queries, then its key, then its value.
    outputs = (config.kv_heads, config.group_size + 2, config.head_dim)
    axes = (outputs,) if bias else (outputs, (config.embed,))
    if base == "attention.q":
        yield TensorSource(
            name=name, axes=axes, pick=(range(config.kv_heads), range(config.group_size))
        )
        return
    for index in range(2):
        pick = range(config.kv_heads), config.group_size + index
        yield TensorSource(name=name, axes=axes, at=(index,), pick=pick)


def _yield_phi3_sources(
    base: str, name: str, shape: Shape, config: ModelConfig
) -> Iterator[TensorSource]:
    """Yield the `TensorSource` of a Phi-3's queries, or of its keys and values, in one tensor one after the other."""
    queries = config.heads
    keys = config.kv_heads
    rows = (queries + 2 * keys) * config.head_dim
    parts: list[tuple[Shape, Shape, int]] = [(shape, (), 0)]
    if base == "attention.kv":
        parts = [(shape[1:], (index,), queries + index * keys) for index in range(2)]
    for of, at, heads in parts:
        source = dataclasses.replace(
            _make_tensor_source(name, of, at), within=(heads * config.head_dim, rows)
        )
        yield _add_channel_order(source, base, config)


def _yield_expert_sources(
    base: str, prefix: str, shape: Shape, tensors: Mapping[str, str], fused: bool
) -> Iterator[TensorSource]:
    """Yield the `TensorSource` objects of experts' gates and ups, or downs: of one tensor of all, or one of each."""
    called, *parts = tensors["mlp.experts"].split()
    down = base == "mlp.experts_down"
    if fused or base in tensors or not parts:
        stacked = f"{called}.{'down' if down else 'gate_up'}_proj"
        name = f"{tensors[base]}.weight" if base in tensors else stacked
        yield TensorSource(name=prefix + name, axes=(shape[:1], shape[1:-1], shape[-1:]))
        return
    parts = parts[2:] if down else parts[:2]
    for expert, (index, part) in itertools.product(range(shape[0]), enumerate(parts)):
        at = (expert, index)[: len(shape) - 2]
        name = f"{prefix}{called}.{expert}.{part}.weight"
        yield _make_tensor_source(name, shape[len(at) :], at)
