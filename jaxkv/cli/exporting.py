"""`jaxkv export`: checks its options, then loads the model, and writes programs that run without jaxkv."""

import argparse
import json
import os
from collections.abc import Collection
from pathlib import Path

from jaxkv._errors import require
from jaxkv.attention import named
from jaxkv.checkpoints.orbax_files import require_free
from jaxkv.cli.models import add_dtype_option, add_model_option, require_model
from jaxkv.cli.numbers import argument, natural, positive
from jaxkv.cli.policy_options import add_policy_options, policy_from
from jaxkv.cli.streams import to_stderr, to_stdout
from jaxkv.engine.sampling import Sampling
from jaxkv.exporting import PLATFORMS, export
from jaxkv.loading import load
from jaxkv.sharding.sizes import mesh_of


def add_export_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `jaxkv export` to its parser."""
    add = parser.add_argument
    add("directory", metavar="DIR", help="the folder to make; nothing may be there")
    add_model_option(add, about="")
    add_dtype_option(add)
    add(
        "--lengths",
        default="1024",
        metavar="N,N",
        help="tokens of the longest prompt, of each bucket (default: 1024)",
    )
    add("--batch", default="1", metavar="N,N", help="prompts at a time (default: 1)")
    question = "tokens that can be read on top of a cache (default: %(default)s)"
    add("--question-tokens", type=argument(natural), default=64, metavar="N", help=question)
    add(
        "--new",
        type=argument(positive),
        default=256,
        metavar="N",
        help="tokens that can be drawn (default: 256)",
    )
    add(
        "--platforms",
        default="cpu",
        metavar="A,B",
        help=f"of {', '.join(PLATFORMS)} (default: cpu)",
    )
    add("--mesh", metavar="DxM", help="devices by data and model, such as 1x8 (default: one)")
    drawing = "draw at random, too, with a temperature, top-k, top-p and min-p given where it runs"
    add("--sampling", action="store_true", help=drawing)
    add(
        "--implementation",
        default="xla",
        help="xla, or pallas, of which nothing is guaranteed (default: xla)",
    )
    add(
        "--no-weights",
        action="store_true",
        help="programs alone; the loader is then given the weights",
    )
    add_policy_options(parser)


def run_export(options: argparse.Namespace) -> int:
    """Runs `jaxkv export`: writes a folder of programs and weights, prints their sizes; returns exit code 0.

    Bad options are refused before the model is loaded.
    """
    policy, implementation = policy_from(options), named(options.implementation)
    require_model(options.model)
    folder = Path(os.path.expanduser(options.directory))
    require_free(folder, "DIR")
    platforms = _names("--platforms", options.platforms, PLATFORMS)
    require(bool(platforms), "--platforms", options.platforms, f"give of {', '.join(PLATFORMS)}")
    lengths, batch = _counts("--lengths", options.lengths), _counts("--batch", options.batch)
    # Programs are exported for the mesh's number of devices on any platform; CPU devices stand in for them here.
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
        sampling=Sampling() if options.sampling else (),
        implementation=implementation,
        weights=not options.no_weights,
    )
    manifest = json.loads((made / "manifest.json").read_text("utf-8"))
    programs = manifest["programs"]
    size = sum(each["bytes"] for each in programs) / 1e6
    weights = sum(each["bytes"] for each in manifest["weights"].values()) / 1e6
    to_stdout(
        f"{made}: {len(programs)} programs ({size:.1f} MB), weights ({weights:.1f} MB), runtime.py"
    )
    if manifest["guaranteed"]["lost"]:
        to_stderr(f"warning: {manifest['guaranteed']['lost']}")
    return 0


def _names(flag: str, given: str, known: Collection[str]) -> tuple[str, ...]:
    """Comma-separated names as a tuple, maybe empty; ValueError for a name not in `known`."""
    names = tuple(filter(None, given.split(",")))
    require(all(name in known for name in names), flag, given, f"give of {', '.join(known)}")
    return names


def _counts(flag: str, given: str) -> list[int]:
    """Comma-separated positive integers as a list; ValueError for other text."""
    try:
        return [positive(word) for word in given.split(",")]
    except ValueError as error:
        raise ValueError(f"{flag}={given!r}: give numbers such as 1024,4096") from error
