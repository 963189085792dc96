"""What `jaxkv filters` does: finds a model's filter layers in some texts, prints and draws and saves them."""

import argparse
import os
import tempfile
from pathlib import Path

from jaxkv._drawing import drawing
from jaxkv._errors import require
from jaxkv.analysis import FilterLayers, filter_layers
from jaxkv.checkpoints import manifests_folder, names, save_filter_layers
from jaxkv.cli.files import Target, read_text
from jaxkv.cli.generating import require_model
from jaxkv.cli.numbers import argument, whole
from jaxkv.cli.streams import to_stdout
from jaxkv.compilation import enable_compilation_cache
from jaxkv.loading import LanguageModel, load


def add_filter_options(parser: argparse.ArgumentParser) -> None:
    """The subcommand's options.

    Args:
        parser: the subcommand's.
    """
    add = parser.add_argument
    add("--model", default="smollm2-135m-instruct", metavar="NAME", help="(default: %(default)s)")
    add("--text-file", nargs="+", required=True, metavar="FILE", help="UTF-8 texts, long ones; - for stdin")
    count = argument(whole, least=1)
    add("--tokens", type=count, default=4096, metavar="N", help="of each text (default: %(default)s)")
    add("-m", type=count, default=3, help="filter layers (default: %(default)s)")
    most = "layers that may read everything (default: a quarter of all)"
    add("--most-whole", type=argument(whole), metavar="N", help=most)
    add("--json", action="store_true", help="print the layers and the map as JSON")
    add("--picture", metavar="FILE", help="draw the map (needs jaxkv[plots])")
    add("--save", action="store_true", help="write the layers into the named model's manifest")


def print_filters(options: argparse.Namespace) -> int:
    """Finds the layers and prints them.

    Args:
        options: of `add_filter_options`.

    Returns:
        The exit code, 0.

    Raises:
        ValueError: for options that cannot be honoured, before the model is fetched and loaded.
        OSError: where the map or the manifest could not be written; the layers are then on stdout.
    """
    require_model(options.model)
    most = options.most_whole
    require(most is None or options.m <= most, "m", options.m, f"filters read everything, as at most {most} layers do")
    if options.save:
        _check_manifest(options.model)
    # Minutes of work would be lost where the picture cannot be.
    picture = _picture(options) if options.picture is not None else None
    texts = [_text(name) for name in options.text_file]
    enable_compilation_cache()
    params = load(options.model)
    ids = _ids(params, options, texts)
    found = filter_layers(params, ids, m=options.m, most_whole=most)
    if options.json:
        to_stdout(found.to_json())
    else:
        to_stdout(f"filter layers of {options.model}: {', '.join(map(str, found.filters))}")
        share = f"{found.similarity.share:.1%} of the tokens"
        to_stdout(f"what they choose ({share}) carries {found.carried:.1%} of the attention above them")
    # What can fail comes after what the work was for.
    if options.save:
        save_filter_layers(options.model, found.filters)
    if picture is not None:
        picture.write(_drawn(found, _suffix(picture.name)))
    return 0


def _check_manifest(model: str) -> None:
    known = ", ".join(names())
    require(model in names(), "save", model, f"only named models have a manifest: {known}")
    folder = manifests_folder()
    require(os.access(folder, os.W_OK), "save", model, f"the folder {folder} cannot be written to: leave it out")


def _picture(options: argparse.Namespace) -> Target:
    """Where the picture goes: without a suffix matplotlib adds its own."""
    path = os.path.expanduser(options.picture)
    plain = not Path(path).suffix and (not os.path.exists(path) or os.path.isfile(path))
    target = Target(flag="--picture", name=options.picture + ".png" if plain and options.picture else options.picture)
    inputs = {f"--text-file[{index}]": name for index, name in enumerate(options.text_file)}
    target.check({**inputs, "--model": options.model})
    drawing()
    from matplotlib.backend_bases import FigureCanvasBase

    known = FigureCanvasBase.filetypes
    suffix = _suffix(target.name)
    require(suffix in known, "--picture", options.picture, f"no such kind of picture: give .png, or {', '.join(known)}")
    return target


def _suffix(name: str) -> str:
    return Path(name).suffix[1:].lower() or "png"


def _drawn(found: FilterLayers, suffix: str) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"map.{suffix}"
        found.similarity.picture(path, found.filters)
        return path.read_bytes()


def _text(name: str) -> str:
    text = read_text(name, "--text-file")
    require(bool(text.strip()), "--text-file", name, "it is empty: give a long text")
    return text


def _ids(params: LanguageModel, options: argparse.Namespace, texts: list[str]) -> list[list[int]]:
    """The texts as ids, with what the model's shape makes impossible refused before the first is run."""
    remedy = "the checkpoint has no tokenizer: use jaxkv.analysis on ids"
    require(params.text is not None, "model", options.model, remedy)
    assert params.text is not None
    layers, longest = params.config.layers, params.config.max_positions
    most = -(-layers // 4) if options.most_whole is None else options.most_whole
    remedy = f"filters read everything, as at most {most} of {layers} layers do: give fewer, or a larger --most-whole"
    require(options.m <= min(most, layers - 1), "m", options.m, remedy)
    ids = [params.text.encode(text, bos=True)[: options.tokens] for text in texts]
    for name, each in zip(options.text_file, ids, strict=True):
        remedy = f"the model was made for {longest} tokens, and it has {len(each)}: give at most --tokens {longest}"
        require(len(each) <= longest, "--text-file", name, remedy)
    return ids
