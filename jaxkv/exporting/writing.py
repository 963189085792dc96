"""`export`: a model and a policy as programs, weights and a manifest, whole or not at all."""

import dataclasses
import datetime
import hashlib
import importlib.metadata
import os
import re
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from jaxkv._errors import require
from jaxkv._settings import settled
from jaxkv._values import is_whole, plain
from jaxkv.arguments import as_count, as_model, as_sampling
from jaxkv.attention import PREFILL_ONLY, Implementation, backend_of, named
from jaxkv.cache.encoding import encode
from jaxkv.checkpoints.json_files import write_json
from jaxkv.engine.lengths import bucket, tokens_per_call
from jaxkv.exporting import programs
from jaxkv.exporting.artefacts import Artefact, Names, artefact, shapes_of
from jaxkv.exporting.buckets import Asked, Table, require_exportable, require_places, setting_of, table
from jaxkv.exporting.place import as_folder, unfinished
from jaxkv.exporting.tensors import write_tensors
from jaxkv.loading import LanguageModel
from jaxkv.models.decoder import Ends
from jaxkv.policies.policy import Method
from jaxkv.policies.registry import as_policy
from jaxkv.sampling import Greedy, Sampling, argument
from jaxkv.sharding.door import Door

FORMAT, VERSION = "jaxkv export", 3
PLATFORMS = ("cpu", "cuda", "rocm", "tpu")
# What JAX promises of what it has exported: https://docs.jax.dev/en/latest/export/export.html#compatibility-guarantees
_BACKWARD, _FORWARD = 180, 21
_CUSTOM_CALLS = (
    "attention by Pallas kernels: a custom call, of which neither StableHLO nor JAX promises that another version "
    "takes it; run it with the same jax and jaxlib"
)


@settled
def export(
    params: LanguageModel,
    directory: str | os.PathLike[str],
    *,
    policy: Method | type[Method] | str | None = None,
    lengths: int | Sequence[int] = 1024,
    batch: int | Sequence[int] = 1,
    question: int = 64,
    new: int = 256,
    platforms: str | Sequence[str] = "cpu",
    mesh: Mesh | None = None,
    sampling: Sampling | Sequence[Sampling] = (),
    implementation: Implementation | str = Implementation.XLA,
    weights: bool = True,
) -> Path:
    """Writes a model and a policy as programs that run without jaxkv.

    `directory` then holds StableHLO by `jax.export`, `manifest.json`, the weights as safetensors, the tokenizer's file
    if there is one, and `runtime.py`, which generates from them with jax and numpy alone.

    Args:
        params: from `jaxkv.load`, in the dtype that is to be exported.
        directory: the folder to make; nothing may be there.
        policy: the compression, or the name or class of one with its defaults; FullKV() keeps everything.
        lengths: tokens of the longest prompt; several make programs for as many buckets.
        batch: sequences at a time, one number or several.
        question: tokens that can be read on top of a cache; 0 for none.
        new: tokens that can be drawn.
        platforms: of "cpu", "cuda", "rocm" and "tpu", each of which gets programs of its own.
        mesh: devices with the axes "data" and "model" to run on; as many, of any platform, are needed where it runs.
        sampling: how tokens can be drawn besides Greedy(), which always is there: each is a program whose numbers are
            arguments.
        implementation: what computes attention: "xla", or "pallas", of which nothing is guaranteed.
        weights: write them, too; else the runtime is given them.

    Returns:
        The folder.

    Raises:
        ValueError: for a policy that programs without a host cannot honour, a platform that is none, a mesh that does
            not divide the model or the batch, sizes beyond the model's positions, and a folder that is taken.
        TypeError: for an argument of the wrong kind.
        OSError: where it cannot be written; nothing is left behind.
    """
    _require_flatbuffers()
    params = as_model(params, mesh)
    request = _request(params, policy, lengths, batch, question, new, platforms, sampling, implementation)
    folder = as_folder(directory)
    # Beside it, so that the last step is a rename; and before the programs, which take long.
    with unfinished(folder) as part:
        _write(part, params, request, _programs(params, request), weights)
    return folder


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Request:
    """What was asked for, checked."""

    policy: Method
    slots: tuple[int, ...]
    batch: tuple[int, ...]
    asked: Asked
    platforms: tuple[str, ...]
    samplings: tuple[Sampling, ...]
    implementation: Implementation


def _require_flatbuffers() -> None:
    try:
        import flatbuffers  # noqa: F401
    except ImportError as error:
        raise ImportError("jax.export writes its files with flatbuffers: pip install flatbuffers") from error


def _counts(name: str, given: Any) -> tuple[int, ...]:
    listed = given if isinstance(given, (list, tuple, np.ndarray)) else (given,)
    numbers = tuple(sorted({plain(each) for each in listed if is_whole(plain(each), 1)}))
    sound = bool(numbers) and all(is_whole(plain(each), 1) for each in listed)
    require(sound, name, given, "give a number, or several, at least 1")
    return numbers


def _request(params, policy, lengths, batch, question, new, platforms, sampling, implementation) -> _Request:
    config, axes = params.config, params.axes
    chosen = as_policy(policy).for_model(config.layers, params.filter_layers)
    slots = tuple(sorted({bucket(n) for n in _counts("lengths", lengths)}))
    sizes, new = _counts("batch", batch), as_count("new", new, "draw at least 1 token")
    asked_question = plain(question)
    require(is_whole(asked_question), "question", question, "give tokens, 0 for none")
    groups = 1 if axes is None else axes.size("B")
    odd = [size for size in sizes if size % groups]
    require(not odd, "batch", odd, f"the mesh has {groups} groups of sequences: give multiples of {groups}")
    # Where positions are places within the cache, what is kept counts: the tables say how much that is.
    rolling, limit = chosen.parts().rolling, config.max_positions
    longest = max(_counts("lengths", lengths)) + (0 if rolling else asked_question + new)
    remedy = f"{'a prompt' if rolling else 'prompt, question and new tokens together'}: the model was made for {limit}"
    require(longest <= limit, "lengths", longest, remedy)
    listed = (platforms,) if isinstance(platforms, str) else tuple(platforms)
    unknown = [each for each in listed if each not in PLATFORMS]
    require(bool(listed) and not unknown, "platforms", unknown or listed, f"give of {', '.join(PLATFORMS)}")
    way = named(implementation)
    whole = way not in (Implementation.AUTO, *PREFILL_ONLY)
    require(whole, "implementation", implementation, "give 'xla', or 'pallas' for its kernels")
    require_exportable(chosen, config.layers, slots[-1])
    given = sampling if isinstance(sampling, (list, tuple)) else (sampling,)
    samplings = (Greedy(), *(as_sampling(each) for each in given if type(each) is not Greedy))
    kinds = [type(each).__name__ for each in samplings]
    remedy = "give one of each class: its numbers are arguments where it runs"
    require(len(set(kinds)) == len(kinds), "sampling", list(samplings), remedy)
    return _Request(
        policy=chosen,
        slots=slots,
        batch=sizes,
        asked=Asked(asked_question, new),
        platforms=tuple(dict.fromkeys(listed)),
        samplings=samplings,
        implementation=way,
    )


@dataclasses.dataclass
class _Made:
    """Programs as the manifest says them, their bytes by file, and tables of numbers by bucket."""

    said: list[dict[str, Any]]
    files: dict[str, bytes]
    tables: dict[int, Table]


def names_of(params: LanguageModel) -> Names:
    """What a model's parameters are called, in the order that programs take them."""

    def named_leaves(module: Any, prefix: str) -> tuple[str, ...]:
        leaves = jax.tree_util.tree_flatten_with_path(nnx.split(module)[1])[0]
        return tuple(prefix + ".".join(str(key.key) for key in path if hasattr(key, "key")) for path, _ in leaves)

    blocks = tuple(named_leaves(block, f"blocks.{at}.") for at, block in enumerate(params.decoder.blocks))
    return Names(named_leaves(Ends(params.decoder), ""), blocks)


def _programs(params: LanguageModel, request: _Request) -> _Made:
    made, layers = _Made([], {}, {}), params.config.layers
    parts = request.policy.parts()
    for slots in request.slots:
        made.tables[slots] = table(parts, layers, slots)
        require_places(parts, made.tables[slots], request.asked, params.config.max_positions)
        for platform in request.platforms:
            for batch in request.batch:
                for kind, each in _of_bucket(params, request, made.tables[slots], slots, platform, batch):
                    name = f"{kind}-{slots}x{batch}-{platform}.bin"
                    made.files[name] = each.data
                    made.said.append({"kind": kind, "slots": slots, "file": name} | each.said)
    return made


def _of_bucket(
    params: LanguageModel, request: _Request, known: Table, slots: int, platform: str, batch: int
) -> Iterator[tuple[str, Artefact]]:
    """The programs of a bucket, each with its kind."""
    flat, asked = params.flat, request.asked
    of_setting: dict[str, Any] = {"platform": platform, "implementation": request.implementation}
    setting = setting_of(flat, request.policy, known, asked, **of_setting)
    names = names_of(params)

    def made(door: Door, *args: Any, sampling: Sampling | None = None) -> Artefact:
        numbers = () if sampling is None else tuple(each.name for each in dataclasses.fields(_as_numbers(sampling)))
        return artefact(door, args, setting, names._replace(sampling=numbers), platform, batch)

    of, i32 = jax.ShapeDtypeStruct, lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)
    weights = jax.tree.map(_shape, (flat.ends, flat.blocks))
    key, done = of((2,), jnp.uint32), of((batch,), jnp.bool_)
    told = shapes_of(jax.tree.map(lambda numbers: numbers[..., np.zeros(batch, np.int32)], known.told))
    first = made(programs.prompt, *weights, i32(batch, slots), i32(batch), told, key)
    yield "prompt", first
    pools, cache, logits, _, beside = first.out
    if asked.question:
        tokens = i32(batch, tokens_per_call(asked.question))
        yield "question", made(programs.question, *weights, pools, cache, logits, tokens, i32(batch))
    if request.policy.parts().ongoing is not None:
        yield "again", made(programs.again, *weights, pools, cache, key)
    rest = (pools, cache, logits, done, key, i32(max(1, len(_eos(params)))), i32())
    for sampling in request.samplings:
        door = (programs.draw, *weights) if beside is None else (programs.draw_beside, *weights, beside)
        yield f"draw.{type(sampling).__name__}", made(*door, *rest, argument(sampling), sampling=sampling)
    if beside is not None:
        yield "settle", made(programs.settle, beside, pools, cache)


def _as_numbers(sampling: Any) -> Any:
    """A sampler whose fields are a program's arguments; somebody else's is compiled in, and has none."""
    return sampling if type(sampling).__module__ == Greedy.__module__ else Greedy()


def _shape(leaf: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)


def _eos(params: LanguageModel) -> list[int]:
    text = params.text.eos_ids if params.text else ()
    return sorted({*params.config.eos, *text})


def _write(part: Path, params: LanguageModel, request: _Request, made: _Made, weights: bool) -> None:
    (part / "programs").mkdir()
    for name, data in made.files.items():
        (part / "programs" / name).write_bytes(data)
    manifest = _manifest(params, request, made)
    if weights:
        names, flat = names_of(params), params.flat
        leaves = dict(zip(names.ends, flat.ends, strict=True))
        for of, block in zip(names.blocks, flat.blocks, strict=True):
            leaves |= dict(zip(of, block, strict=True))
        manifest["weights"] = write_tensors(part, "weights", leaves)
    tables: dict[str, Any] = {}
    for slots, known in made.tables.items():
        said = {each.name: getattr(known.told, each.name) for each in dataclasses.fields(known.told)}
        numbers = {f"told.{name}": value for name, value in said.items() if value is not None}
        tables[str(slots)] = write_tensors(part, f"lengths-{slots}", numbers)
    manifest["lengths"] = tables
    manifest["text"] = _write_text(part, params)
    runtime = Path(__file__).with_name("runtime.py").read_bytes()
    (part / "runtime.py").write_bytes(runtime)
    write_json(part / "manifest.json", manifest)


def _manifest(params: LanguageModel, request: _Request, made: _Made) -> dict[str, Any]:
    config, axes, parts, names = params.config, params.axes, request.policy.parts(), names_of(params)
    today, unstable = datetime.date.today(), bool(backend_of(request.implementation).custom_calls)
    stable = re.search(rb"StableHLO_v([\d.]+)", next(iter(made.files.values())))
    try:
        policy = encode(request.policy, None, "policy")
    except ValueError:  # what no text says, a scorer that holds arrays say, is in the programs all the same
        policy = {"class": type(request.policy).__qualname__, "text": repr(request.policy)}
    return {
        "format": FORMAT,
        "version": VERSION,
        "made_by": {
            "jax": jax.__version__,
            "jaxlib": importlib.metadata.version("jaxlib"),
            "stablehlo": stable[1].decode() if stable else None,
            "on": today.isoformat(),
        },
        "guaranteed": {
            "jax": jax.__version__,
            "from": list(jax.__version_info__[:2]),
            "calling_convention": made.said[0]["calling_convention"],
            "by_later_jax_until": None if unstable else _day(today, _BACKWARD),
            "by_earlier_jax_from": None if unstable else _day(today, -_FORWARD),
            "lost": _CUSTOM_CALLS if unstable else None,
        },
        "platforms": list(request.platforms),
        "mesh": None if axes is None else dict(axes.mesh.shape),
        "devices": 1 if axes is None else axes.mesh.size,
        "implementation": request.implementation.value,
        "dtype": params.dtype.name,
        "model": {"name": params.name, "fingerprint": params.fingerprint, "layers": config.layers},
        "vocab": config.vocab,
        "positions": config.max_positions,
        "rolling": parts.rolling,
        "eos": _eos(params) or [-2],
        "policy": policy,
        "every": parts.every,
        "evicts": parts.evicts,
        "batch": list(request.batch),
        "question": request.asked.question,
        "new": request.asked.new,
        "room": request.asked.every_token,
        "grows": parts.ongoing is None or bool(parts.layers.unlimited(config.layers).any()),
        "samplings": {
            type(each).__name__: {} if _as_numbers(each) is not each else dataclasses.asdict(_as_numbers(each))
            for each in request.samplings
        },
        "parameters": [*names.ends, *(name for block in names.blocks for name in block)],
        "programs": made.said,
        "weights": {},
    }


def _day(day: datetime.date, later: int) -> str:
    return (day + datetime.timedelta(days=later)).isoformat()


def _write_text(part: Path, params: LanguageModel) -> dict[str, Any] | None:
    """The tokenizer's file, and what the chat template writes around a message; None for a model without text."""
    if params.text is None:
        return None
    tokenizer = params.text.tokenizer_json()
    if tokenizer is None:
        return None
    text, turns = params.text, ["", "", ""]
    if text.has_template:
        try:
            turns = list(text.turns)
        except ValueError as error:
            warnings.warn(f"prompts are plain text to the runtime: {error}", stacklevel=3)
    data = tokenizer.encode()
    (part / "tokenizer.json").write_bytes(data)
    digest = hashlib.sha256(data).hexdigest()
    said = {"file": "tokenizer.json", "bytes": len(data), "sha256": digest}
    return said | {"turns": turns, "bos": text.begins_with}
