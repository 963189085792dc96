"""`export`: writes a model and a policy as programs, weights and a manifest, complete or not at all."""

import dataclasses
import datetime
import functools
import hashlib
import importlib.metadata
import itertools
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

from jaxkv._checks import settled, validate_int
from jaxkv._dataclasses import frozen_dataclass
from jaxkv._errors import require
from jaxkv.arguments import validate_model, validate_sampler
from jaxkv.attention import (
    PREFILL_ONLY,
    Implementation,
    get_attention_backend,
    parse_attention_implementation,
)
from jaxkv.cache.encoding import encode_as_json
from jaxkv.checkpoints.json_files import write_json
from jaxkv.checkpoints.orbax_files import create_folder_atomically
from jaxkv.engine.lengths import round_up_to_bucket, tokens_per_call
from jaxkv.engine.sampling import (
    GREEDY,
    BatchSampling,
    Sampler,
    convert_sampler_to_pytree,
    get_settings,
    is_builtin_sampling,
    is_greedy,
    needs_extras,
)
from jaxkv.exporting import exported_programs
from jaxkv.exporting.artefacts import (
    ParameterNames,
    SerialisedProgram,
    make_abstract,
    serialise_program,
)
from jaxkv.exporting.buckets import (
    BudgetTable,
    TokenLimits,
    create_bucket_spec,
    require_enough_positions,
    require_exportable,
    tabulate_budgets,
)
from jaxkv.exporting.tensors import write_tensors
from jaxkv.loading import LanguageModel
from jaxkv.models.decoder import EmbeddingAndHead
from jaxkv.policies.model_policy import resolve_policy_for_model
from jaxkv.policies.policy import Policy

FORMAT = "jaxkv export"
VERSION = 5
PLATFORMS = ("cpu", "cuda", "rocm", "tpu")
# Days for which JAX guarantees that later and earlier versions read an export:
# https://docs.jax.dev/en/latest/export/export.html#compatibility-guarantees
_BACKWARD = 180
_FORWARD = 21
_CUSTOM_CALLS = (
    "attention by Pallas kernels is a custom call: neither StableHLO nor JAX guarantees that another version accepts "
    "it: run it with the same jax and jaxlib"
)


@settled
def export(
    params: LanguageModel,
    directory: str | os.PathLike[str],
    *,
    policy: Policy | type[Policy] | str | None = None,
    lengths: int | Sequence[int] = 1024,
    batch: int | Sequence[int] = 1,
    question: int = 64,
    new: int = 256,
    platforms: str | Sequence[str] = "cpu",
    mesh: Mesh | None = None,
    sampling: Sampler | Sequence[Sampler] = (),
    implementation: Implementation | str = Implementation.XLA,
    weights: bool = True,
) -> Path:
    """Write a model and a policy as StableHLO programs and weights that run without jaxkv; return the folder's path.

    `directory` then contains StableHLO from `jax.export`, `manifest.json`, the weights as safetensors, the tokenizer's
    file if there is one, and `runtime.py`, which generates from them with only jax and numpy.

    Args:
        params: from `jaxkv.load`, in the dtype to export.
        directory: folder to create; the path must not exist.
        policy: compression policy, or the name or class of one with its defaults; FullKV() keeps every entry.
        lengths: maximum tokens of a prompt; several lengths give programs for several buckets.
        batch: batch size, one number or several.
        question: maximum tokens of a question appended to a cache; 0 for none.
        new: maximum number of sampled tokens.
        platforms: platforms among "cpu", "cuda", "rocm" and "tpu", with programs of their own.
        mesh: devices with the axes "data" and "model"; the run needs as many devices, of any platform.
        sampling: samplers in addition to greedy decoding, one program each. The numbers of a `Sampling` are arguments
            of its program, with these values as defaults.
        implementation: implementation of attention: "xla", or "pallas" without a compatibility guarantee.
        weights: True to write the weights; otherwise the runtime needs them as an argument.

    Returns:
        The folder.

    Raises:
        ValueError: for a policy that needs the host while it runs, an unknown platform, a mesh that does not divide the
            model or the batch, sizes beyond the model's positions, and an existing folder.
        TypeError: for an argument of the wrong type.
        OSError: if the folder cannot be written; nothing is left behind.
    """
    params = validate_model(params, mesh)
    held = params.decoder.weights
    remedy = "quantised weights cannot be exported: load the model without weights="
    require(held is None, "params", f"{held} weights", remedy)
    remedy = "layers with a state cannot be exported: use jaxkv, and save the cache"
    require(not params.config.state_layers, "params", params.name, remedy)
    positions = params.config.max_positions
    chosen = resolve_policy_for_model(
        policy, params.config, params.filter_layers, dtype=params.dtype
    )
    longest = _parse_counts("lengths", lengths)
    batches = _parse_counts("batch", batch)
    new = validate_int("new", new, "sample at least 1 token")
    question = validate_int("question", question, "use a number of tokens, or 0 for none", least=0)
    groups = 1 if params.axes is None else params.axes.count_axis_shards("B")
    odd = [size for size in batches if size % groups]
    require(
        not odd,
        "batch",
        odd,
        f"the mesh has {groups} groups of sequences: use multiples of {groups}",
    )
    # If positions count cached entries, only kept entries matter: `require_enough_positions` checks them by the tables.
    rolling = chosen.composed.rolling
    most = max(longest) + (0 if rolling else question + new)
    texts = "a prompt" if rolling else "prompt, question and new tokens together"
    require(
        most <= positions, "lengths", most, f"{texts}: the model has only {positions} positions"
    )
    listed = (platforms,) if isinstance(platforms, str) else tuple(platforms)
    unknown = [each for each in listed if each not in PLATFORMS]
    require(
        bool(listed) and not unknown,
        "platforms",
        unknown or listed,
        f"unknown platform: use some of {', '.join(PLATFORMS)}",
    )
    backend = parse_attention_implementation(implementation)
    usable = backend not in (Implementation.AUTO, *PREFILL_ONLY)
    require(
        usable,
        "implementation",
        implementation,
        "not supported: use 'xla', or 'pallas' for its kernels",
    )
    padded_len = tuple(sorted({round_up_to_bucket(n) for n in longest}))
    require_exportable(chosen, params.config.sliding_windows, padded_len[-1])
    job = _ExportJob(
        params=params,
        policy=chosen,
        padded_len=padded_len,
        batches=batches,
        limits=TokenLimits(question, new),
        platforms=tuple(dict.fromkeys(listed)),
        samplings=_collect_samplers(sampling),
        implementation=backend,
    )
    if not isinstance(directory, (str, os.PathLike)):
        raise TypeError(f"directory={directory!r}: not a path: use that of a new folder")
    folder = Path(os.path.expanduser(directory))
    # Written to a temporary folder next to it, so that the last step is a rename.
    with create_folder_atomically(folder, "directory") as part:
        _write_remaining_files(part, job, _write_programs(part, job), weights)
    return folder


# Manifest entries of the written programs, and the policy's budget tables by bucket.
_Made = tuple[list[dict[str, Any]], dict[int, BudgetTable]]


def _parse_counts(name: str, given: Any) -> tuple[int, ...]:
    """Return one or several positive integers as a sorted tuple without duplicates; ValueError for anything else."""
    listed = given if isinstance(given, (list, tuple, np.ndarray)) else (given,)
    remedy = "use one number or several, at least 1"
    require(len(listed) > 0, name, given, remedy)
    return tuple(sorted({validate_int(name, each, remedy) for each in listed}))


def _collect_samplers(given: Any) -> dict[str, Sampler]:
    """Return a dict of samplers by class name, with "Greedy" added; ValueError for two of one class or a greedy one."""
    listed = given if isinstance(given, (list, tuple)) else (given,)
    chosen = [validate_sampler(each) for each in listed]
    found = {"Greedy": GREEDY} | {type(each).__name__: each for each in chosen}
    remedy = "use one sampler per class, none greedy: its numbers are arguments at run time"
    fine = len(found) == 1 + len(chosen) and not any(map(is_greedy, chosen))
    require(fine, "sampling", chosen, remedy)
    for each in chosen:
        given = get_settings(each)
        extra = needs_extras(each) or given.stop_token_ids or given.prompt_logprobs is not None
        remedy = "penalties, logit_bias, stop_token_ids and logprobs cannot be exported: leave out"
        require(not extra, "sampling", each, remedy)
    return found


@frozen_dataclass
class _ExportJob:
    """Validated arguments of `export`: model, policy, padded lengths, batches, limits, platforms, samplers, backend."""

    params: LanguageModel
    policy: Policy
    padded_len: tuple[int, ...]
    batches: tuple[int, ...]
    limits: TokenLimits
    platforms: tuple[str, ...]
    samplings: dict[str, Sampler]
    implementation: Implementation

    @functools.cached_property
    def parameter_names(self) -> ParameterNames:
        """`ParameterNames` of the model, in the order of the programs' arguments."""
        decoder = self.params.decoder
        blocks = tuple(
            _list_parameter_names(block, f"blocks.{at}.") for at, block in enumerate(decoder.blocks)
        )
        return ParameterNames(_list_parameter_names(EmbeddingAndHead(decoder), ""), blocks)

    @property
    def end_ids(self) -> list[int]:
        """Token ids that end a sequence, from config and tokenizer; [-2], which matches no token, without any."""
        return list(self.params.end_token_ids) or [-2]


def _list_parameter_names(module: Any, prefix: str) -> tuple[str, ...]:
    """Return the dotted names of a module's parameters, each after `prefix`, in the order of the module's leaves."""
    leaves = jax.tree_util.tree_flatten_with_path(nnx.split(module)[1])[0]
    return tuple(
        prefix + ".".join(str(key.key) for key in path if hasattr(key, "key")) for path, _ in leaves
    )


def _write_programs(part: Path, job: _ExportJob) -> _Made:
    """Write the programs of every bucket, platform and batch into `part`; return manifest entries and budget tables."""
    entries = list[dict[str, Any]]()
    tables = dict[int, BudgetTable]()
    parts = job.policy.composed
    config = job.params.config
    (part / "programs").mkdir()
    for padded_len in job.padded_len:
        known = tables[padded_len] = tabulate_budgets(parts, config.sliding_windows, padded_len)
        require_enough_positions(parts, known, job.limits, config.max_positions)
        for platform, batch in itertools.product(job.platforms, job.batches):
            for kind, each in _serialise_bucket(job, known, padded_len, platform, batch):
                name = f"{kind}-{padded_len}x{batch}-{platform}.bin"
                (part / "programs" / name).write_bytes(each.data)
                entries.append({"kind": kind, "padded_len": padded_len, "file": name} | each.entry)
    return entries, tables


def _serialise_bucket(
    job: _ExportJob, known: BudgetTable, padded_len: int, platform: str, batch: int
) -> Iterator[tuple[str, SerialisedProgram]]:
    """Yield pairs (kind, `SerialisedProgram`) for all programs of one bucket, platform and batch size."""
    flat = job.params.flat_decoder
    limits = job.limits
    spec = create_bucket_spec(
        flat, job.policy, known, limits, platform=platform, implementation=job.implementation
    )
    made = functools.partial(
        serialise_program, spec=spec, names=job.parameter_names, platform=platform, batch=batch
    )

    def make_shape_struct(dtype: Any, *shape: int) -> Any:
        """Return the `ShapeDtypeStruct` of an array with the given dtype and shape."""
        return jax.ShapeDtypeStruct(shape, dtype)

    weights = make_abstract((flat.ends, flat.blocks))
    key = make_shape_struct(jnp.uint32, 2)
    done = make_shape_struct(jnp.bool_, batch)
    count = make_shape_struct(jnp.int32, batch)
    numbers = make_abstract(
        jax.tree.map(lambda each: each[..., np.zeros(batch, np.int32)], known.numbers)
    )
    first = made(
        exported_programs.prefill_prompts,
        *weights,
        make_shape_struct(jnp.int32, batch, padded_len),
        count,
        numbers,
        key,
    )
    yield "prompt", first
    pools, cache, logits, _ = first.out
    if limits.question:
        tokens = make_shape_struct(jnp.int32, batch, tokens_per_call(limits.question))
        yield (
            "question",
            made(exported_programs.append_question, *weights, pools, cache, logits, tokens, count),
        )
    if job.policy.composed.decoding_compression.compresses:
        yield "again", made(exported_programs.recompress_due_sequences, *weights, pools, cache, key)
    for name, sampling in job.samplings.items():
        asked = exported_programs.LoopInputs(
            done,
            key,
            make_shape_struct(jnp.int32, len(job.end_ids)),
            make_shape_struct(jnp.int32),
            convert_sampler_to_pytree(sampling),
        )
        yield (
            f"sample.{name}",
            made(exported_programs.run_exported_loop, *weights, pools, cache, logits, asked),
        )


def _write_remaining_files(part: Path, job: _ExportJob, made: _Made, weights: bool) -> None:
    """Write manifest, budget tables, tokenizer, `runtime.py` and, if `weights`, the weights into `part`."""
    entries, tables = made
    manifest = _build_manifest(part, job, entries)
    if weights:
        names = job.parameter_names
        flat = job.params.flat_decoder
        leaves = dict(zip(names.ends, flat.ends, strict=True))
        for of_block, block in zip(names.blocks, flat.blocks, strict=True):
            leaves |= dict(zip(of_block, block, strict=True))
        manifest["weights"] = write_tensors(part, "weights", leaves)
    manifest["lengths"] = {}
    for padded_len, known in tables.items():
        told = vars(known.numbers).items()
        numbers = {f"told.{name}": value for name, value in told if value is not None}
        manifest["lengths"][str(padded_len)] = write_tensors(part, f"lengths-{padded_len}", numbers)
    manifest["text"] = _write_tokenizer(part, job.params)
    (part / "runtime.py").write_bytes(Path(__file__).with_name("runtime.py").read_bytes())
    write_json(part / "manifest.json", manifest)


def _build_manifest(part: Path, job: _ExportJob, entries: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the manifest as a dict of JSON values; the caller adds weights, budget tables and tokenizer later."""
    params = job.params
    names = job.parameter_names
    parts = job.policy.composed
    config = params.config
    axes = params.axes
    data = (part / "programs" / entries[0]["file"]).read_bytes()
    today = datetime.date.today()
    unstable = bool(get_attention_backend(job.implementation).can.custom_calls)
    stable = re.search(rb"StableHLO_v([\d.]+)", data)
    try:
        policy = encode_as_json(job.policy, None, "policy")
    except ValueError:  # a scorer with arrays cannot be encoded, but the programs contain it
        policy = {"class": type(job.policy).__qualname__, "text": repr(job.policy)}
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
            "calling_convention": entries[0]["calling_convention"],
            "by_later_jax_until": None if unstable else _shift_date(today, _BACKWARD),
            "by_earlier_jax_from": None if unstable else _shift_date(today, -_FORWARD),
            "lost": _CUSTOM_CALLS if unstable else None,
        },
        "platforms": list(job.platforms),
        "mesh": None if axes is None else dict(axes.mesh.shape),
        "devices": 1 if axes is None else axes.mesh.size,
        "implementation": job.implementation.value,
        "dtype": params.dtype.name,
        "model": {"name": params.name, "fingerprint": params.fingerprint, "layers": config.layers},
        "vocab": config.vocab,
        "positions": config.max_positions,
        "rolling": parts.rolling,
        "eos": job.end_ids,
        "policy": policy,
        "every": parts.recompression_interval,
        "evicts": parts.evicts_while_decoding,
        "batch": list(job.batches),
        "question": job.limits.question,
        "new": job.limits.new,
        "headroom": job.limits.max_added_tokens,
        "grows": not parts.decoding_compression.compresses
        or bool(parts.mask_layers_without_eviction(config.sliding_windows).any()),
        "samplings": {
            name: {
                number.name: getattr(each, number.name)
                for number in dataclasses.fields(BatchSampling)
            }
            if is_builtin_sampling(each) and name != "Greedy"
            else {}
            for name, each in job.samplings.items()
        },
        "parameters": [*names.ends, *(name for block in names.blocks for name in block)],
        "programs": entries,
        "weights": {},
    }


def _shift_date(day: datetime.date, later: int) -> str:
    """Return the date `later` days after `day` as ISO text."""
    return (day + datetime.timedelta(days=later)).isoformat()


def _write_tokenizer(part: Path, params: LanguageModel) -> dict[str, Any] | None:
    """Write `tokenizer.json` into `part`; return its manifest entry with the chat turns; None without a tokenizer."""
    if params.text is None:
        return None
    text = params.text
    turns = None
    if text.has_template:
        try:
            turns = text.export_turn_texts()
        except ValueError as error:
            warnings.warn(f"the runtime treats prompts as plain text: {error}", stacklevel=3)
    data = text.tokenizer_json().encode()
    (part / "tokenizer.json").write_bytes(data)
    digest = hashlib.sha256(data).hexdigest()
    entry = {"file": "tokenizer.json", "bytes": len(data), "sha256": digest}
    bos = None if text.has_template else text.prepended_bos_id
    return entry | {"turns": turns, "bos": bos} | text.export_special_tokens()
