"""Command line `python -m jaxkv.checkpoints convert SRC DST`."""

import argparse
import sys

from jaxkv.checkpoints.converting import DTYPES, convert


def main(argv: list[str] | None = None) -> int:
    """Run `python -m jaxkv.checkpoints` and print the new folder; return 0, 2 after an error, 130 after Ctrl-C."""
    options = _build_parser().parse_args(argv)
    try:
        print(convert(**vars(options)))
    except (ValueError, OSError) as error:
        print(f"jaxkv.checkpoints: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("jaxkv.checkpoints: interrupted", file=sys.stderr)
        return 130
    return 0


def _build_parser() -> argparse.ArgumentParser:
    """Build the `argparse` parser of `python -m jaxkv.checkpoints`, with its only command, `convert`."""
    parser = argparse.ArgumentParser(
        prog="python -m jaxkv.checkpoints", description="Convert checkpoint files."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    about = "write a checkpoint as an Orbax folder, which loads in slices"
    converting = commands.add_parser("convert", help=about, description=about)
    converting.add_argument(
        "source", metavar="SRC", help="a model name, a folder, a .gguf file or a hub id"
    )
    converting.add_argument(
        "target", metavar="DST", help="new folder to write; the path must not exist"
    )
    converting.add_argument(
        "--dtype",
        choices=DTYPES,
        help="dtype of all weights (default: as stored; float32 for a GGUF)",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
