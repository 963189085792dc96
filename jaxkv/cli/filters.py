"""`jaxkv filters`: finds a model's filter layers in some texts, prints, draws and saves them."""

import argparse
import json
import os
from pathlib import Path

import numpy as np

from jaxkv._drawing import drawing, saved, sheet
from jaxkv._errors import require
from jaxkv.analysis import FilterLayers, draw_maps, filter_layers
from jaxkv.checkpoints import manifests_folder, names, save_filter_layers
from jaxkv.cli.files import Target, read_long_text
from jaxkv.cli.models import add_model_option, ids_of, require_model
from jaxkv.cli.numbers import argument, positive, whole
from jaxkv.cli.streams import to_stdout
from jaxkv.loading import LanguageModel, load
from jaxkv.machine.compilation import enable_compilation_cache
from jaxkv.policies.reading import without_window

# Most attended tokens of which a layer's choice is judged, as a share of those that a query sees.
SHARE = 0.067


def add_filter_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `jaxkv filters` to its parser."""
    add = parser.add_argument
    add_model_option(add, about="")
    add(
        "--text-file",
        nargs="+",
        required=True,
        metavar="FILE",
        help="UTF-8 texts, long ones; - for stdin",
    )
    count = argument(positive)
    add(
        "--tokens",
        type=count,
        default=4096,
        metavar="N",
        help="of each text (default: %(default)s)",
    )
    add("-m", type=count, default=3, help="filter layers (default: %(default)s)")
    most = "layers that may read everything (default: a quarter of all)"
    add("--most-whole", type=argument(whole), metavar="N", help=most)
    add("--json", action="store_true", help="print the layers and the map as JSON")
    add("--picture", metavar="FILE", help="draw the map (needs jaxkv[plots])")
    add("--save", action="store_true", help="write the layers into the named model's manifest")


def print_filters(options: argparse.Namespace) -> int:
    """Runs `jaxkv filters`: prints the filter layers, then saves and draws them if asked; returns exit code 0.

    If saving or drawing fails, the layers are already on stdout.
    """
    require_model(options.model)
    most = options.most_whole
    require(
        most is None or options.m <= most,
        "m",
        options.m,
        f"filter layers read everything, and at most {most} layers may",
    )
    if options.save:
        _check_manifest(options.model)
    # Checked before minutes of work, which an unwritable picture would waste.
    picture = _picture(options) if options.picture is not None else None
    texts = [read_long_text(name, "--text-file") for name in options.text_file]
    enable_compilation_cache()
    params = load(options.model)
    ids = _ids(params, options, texts)
    found = filter_layers(params, ids, m=options.m, most_whole=most, share=SHARE)
    whole = without_window(params.config.windows)
    if options.json:
        found_in = {"layers": whole, "mass": np.round(found.mass, 4).tolist()}
        carried = round(found.carried, 4)
        to_stdout(
            json.dumps({"filters": found.filters, "carried": carried, "similarity": found_in})
        )
    else:
        to_stdout(f"filter layers of {options.model}: {', '.join(map(str, found.filters))}")
        to_stdout(
            f"what they choose ({SHARE:.1%} of the tokens) carries {found.carried:.1%} of the attention above them"
        )
    if options.save:
        save_filter_layers(options.model, found.filters)
    if picture is not None:
        picture.write(_drawn(found, whole, _suffix(picture.name)))
    return 0


def _check_manifest(model: str) -> None:
    """Raises ValueError unless `model` is a named model whose manifest can be written, as `--save` requires."""
    known = ", ".join(names())
    require(model in names(), "save", model, f"only named models have a manifest: {known}")
    folder = manifests_folder()
    require(
        os.access(folder, os.W_OK),
        "save",
        model,
        f"the folder {folder} cannot be written to: leave it out",
    )


def _picture(options: argparse.Namespace) -> Target:
    """`Target` of `--picture`, checked before the work; a name without suffix gets .png; ValueError if unwritable."""
    path = os.path.expanduser(options.picture)
    plain = not Path(path).suffix and (not os.path.exists(path) or os.path.isfile(path))
    target = Target(
        flag="--picture",
        name=options.picture + ".png" if plain and options.picture else options.picture,
    )
    inputs = {f"--text-file[{index}]": name for index, name in enumerate(options.text_file)}
    target.check({**inputs, "--model": options.model})
    drawing()
    from matplotlib.backend_bases import FigureCanvasBase

    known = FigureCanvasBase.filetypes
    suffix = _suffix(target.name)
    require(
        suffix in known,
        "--picture",
        options.picture,
        f"no such kind of picture: give .png, or {', '.join(known)}",
    )
    return target


def _suffix(name: str) -> str:
    """Suffix of a file name without its dot, in lower case; png if it has none."""
    return Path(name).suffix[1:].lower() or "png"


def _drawn(found: FilterLayers, whole: tuple[int, ...], suffix: str) -> bytes:
    """Bytes of an image file of the similarity map, with the filter layers marked."""
    title = "share of attention on the top tokens"
    figure = sheet(3.4, 2.9)
    draw_maps(
        figure,
        {title: found.mass},
        across="layer that reads",
        down="layer that chooses",
        label="share",
    )
    panel, ticks = figure.axes[0], range(0, len(whole), 1 + len(whole) // 10)
    for axis in (panel.xaxis, panel.yaxis):
        axis.set_ticks(ticks, labels=[whole[at] for at in ticks])
    for layer in found.filters:
        panel.axhline(whole.index(layer), color="#D55E00", linewidth=0.8, linestyle="--")
    return saved(figure, suffix)


def _ids(params: LanguageModel, options: argparse.Namespace, texts: list[str]) -> list[list[int]]:
    """List of each text's token ids cut to --tokens; ValueError for too many filter layers or a text too long."""
    ids = [each[: options.tokens] for each in ids_of(params, options.model, texts)]
    layers, longest = params.config.layers, params.config.max_positions
    most = -(-layers // 4) if options.most_whole is None else options.most_whole
    remedy = f"filter layers read everything, and {most} of {layers} layers may: give fewer, or a larger --most-whole"
    require(options.m <= min(most, layers - 1), "m", options.m, remedy)
    for name, each in zip(options.text_file, ids, strict=True):
        remedy = f"the model was made for {longest} tokens, and it has {len(each)}: give at most --tokens {longest}"
        require(len(each) <= longest, "--text-file", name, remedy)
    return ids
