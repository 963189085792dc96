"""What `jaxkv export` does: checks what it is asked for, loads the model, and writes what runs without jaxkv."""

import argparse
import json
import os
from pathlib import Path

from jaxkv._errors import require
from jaxkv.attention import named
from jaxkv.checkpoints.orbax_files import require_free
from jaxkv.cli.generating import require_model
from jaxkv.cli.meshes import mesh_of
from jaxkv.cli.numbers import argument, whole
from jaxkv.cli.policy_options import add_policy_options, policy_from
from jaxkv.cli.streams import to_stderr, to_stdout
from jaxkv.exporting import PLATFORMS, export
from jaxkv.loading import load
from jaxkv.sampling import MinP, Sampling, Temperature, TopK, TopP

# What tokens can be drawn by besides the likeliest: the numbers are arguments of the exported program.
_SAMPLERS: dict[str, Sampling] = {
    "temperature": Temperature(),
    "top-k": TopK(k=40),
    "top-p": TopP(p=0.95),
    "min-p": MinP(p=0.1),
}


def add_export_options(parser: argparse.ArgumentParser) -> None:
    """The subcommand's options.

    Args:
        parser: the subcommand's.
    """
    add = parser.add_argument
    add("directory", metavar="DIR", help="the folder to make; nothing may be there")
    add("--model", default="smollm2-135m-instruct", metavar="NAME", help="(default: %(default)s)")
    add("--dtype", help="float32, bfloat16 or float16 (default: bfloat16 on a GPU, float32 on a CPU)")
    add("--lengths", default="1024", metavar="N,N", help="tokens of the longest prompt, of each bucket (default: 1024)")
    add("--batch", default="1", metavar="N,N", help="prompts at a time (default: 1)")
    count = argument(whole, least=1)
    question = "tokens that can be read on top of a cache (default: %(default)s)"
    add("--question-tokens", type=argument(whole), default=64, metavar="N", help=question)
    add("--new", type=count, default=256, metavar="N", help="tokens that can be drawn (default: %(default)s)")
    add("--platforms", default="cpu", metavar="A,B", help=f"of {', '.join(PLATFORMS)} (default: cpu)")
    add("--mesh", metavar="DxM", help="devices by data and model, such as 1x8 (default: one)")
    drawing = f"of {', '.join(_SAMPLERS)}, besides the likeliest token"
    add("--sampling", default="", metavar="A,B", help=drawing)
    add("--implementation", default="xla", help="xla, or pallas, of which nothing is guaranteed (default: xla)")
    add("--no-weights", action="store_true", help="programs alone; the loader is then given the weights")
    add_policy_options(parser)


def run_export(options: argparse.Namespace) -> int:
    """Writes the folder.

    Args:
        options: of `add_export_options`.

    Returns:
        The exit code, 0.

    Raises:
        ValueError: for options that cannot be honoured; before the model is fetched and loaded, where that can be told.
        OSError: where the folder cannot be written; nothing is left behind.
    """
    policy, implementation = policy_from(options), named(options.implementation)
    require_model(options.model)
    folder = Path(os.path.expanduser(options.directory))
    require_free(folder, "DIR")
    platforms = tuple(filter(None, options.platforms.split(",")))
    unknown = [each for each in platforms if each not in PLATFORMS]
    require(bool(platforms) and not unknown, "--platforms", options.platforms, f"give of {', '.join(PLATFORMS)}")
    samplers = [name for name in options.sampling.split(",") if name]
    odd = [name for name in samplers if name not in _SAMPLERS]
    require(not odd, "--sampling", options.sampling, f"give of {', '.join(_SAMPLERS)}")
    lengths, batch = _counts("--lengths", options.lengths), _counts("--batch", options.batch)
    # Programs are for as many devices as the mesh has, and for whichever platform: here a CPU stands for them.
    mesh = None if options.mesh is None else mesh_of(options.mesh, "cpu")
    params = load(options.model, dtype=options.dtype)
    made = export(
        params,
        folder,
        policy=policy,
        lengths=lengths,
        batch=batch,
        question=options.question_tokens,
        new=options.new,
        platforms=platforms,
        mesh=mesh,
        sampling=[_SAMPLERS[name] for name in samplers],
        implementation=implementation,
        weights=not options.no_weights,
    )
    said = json.loads((made / "manifest.json").read_text("utf-8"))
    size = sum(each["bytes"] for each in said["programs"]) / 1e6
    weights = sum(each["bytes"] for each in said["weights"].values()) / 1e6
    to_stdout(f"{made}: {len(said['programs'])} programs ({size:.1f} MB), weights ({weights:.1f} MB), runtime.py")
    if said["guaranteed"]["lost"]:
        to_stderr(f"warning: {said['guaranteed']['lost']}")
    return 0


def _counts(flag: str, given: str) -> list[int]:
    try:
        return [whole(word, least=1) for word in given.split(",")]
    except ValueError as error:
        raise ValueError(f"{flag}={given!r}: give numbers such as 1024,4096") from error
