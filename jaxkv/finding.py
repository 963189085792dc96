"""What `jaxkv filters` does: finds a model's filter layers in some texts, prints and draws and saves them."""

import argparse
from pathlib import Path

from jaxkv._errors import require
from jaxkv.analysis import drawing, filter_layers
from jaxkv.checkpoints import names, save_filter_layers
from jaxkv.compilation import enable_compilation_cache
from jaxkv.load import load


def add_filter_options(parser: argparse.ArgumentParser) -> None:
    """The subcommand's options."""
    parser.add_argument("--model", default="smollm2-135m-instruct", metavar="NAME", help="(default: %(default)s)")
    parser.add_argument("--text-file", nargs="+", required=True, metavar="FILE", help="UTF-8 texts, long ones")
    parser.add_argument("--tokens", type=int, default=4096, metavar="N", help="of each text (default: %(default)s)")
    parser.add_argument("-m", type=int, default=3, help="filter layers (default: %(default)s)")
    parser.add_argument(
        "--most-whole", type=int, metavar="N", help="layers that may read everything (default: a quarter of all)"
    )
    parser.add_argument("--json", action="store_true", help="print the layers and the map as JSON")
    parser.add_argument("--picture", metavar="FILE", help="draw the map (needs jaxkv[plots])")
    parser.add_argument("--save", action="store_true", help="write the layers into the named model's manifest")


def print_filters(options: argparse.Namespace) -> int:
    """Finds the layers and prints them.

    Args:
        options: of `add_filter_options`.

    Returns:
        The exit code, 0.
    """
    named = options.model in names()
    require(
        named or not options.save, "save", options.model, f"only named models have a manifest: {', '.join(names())}"
    )
    require(options.tokens >= 1, "tokens", options.tokens, "give at least 1")
    if options.picture:
        # Before minutes of work, whose result it would cost.
        folder = Path(options.picture).parent
        require(folder.is_dir(), "picture", options.picture, f"there is no folder {folder}")
        drawing()
    enable_compilation_cache()
    params = load(options.model)
    require(
        params.text is not None, "model", options.model, "the checkpoint has no tokenizer: use jaxkv.analysis on ids"
    )
    assert params.text is not None
    texts = [
        params.text.encode(Path(name).read_text("utf-8"), bos=True)[: options.tokens] for name in options.text_file
    ]
    found = filter_layers(params, texts, m=options.m, most_whole=options.most_whole)
    if options.save:
        save_filter_layers(options.model, found.filters)
    if options.json:
        print(found.to_json())
    else:
        listed = ", ".join(str(layer) for layer in found.filters)
        print(f"filter layers of {options.model}: {listed}")
        share = f"{found.similarity.share:.1%} of the tokens"
        print(f"what they choose ({share}) carries {found.carried:.1%} of the attention above them")
    if options.picture:
        found.similarity.picture(options.picture, found.filters)
    return 0
