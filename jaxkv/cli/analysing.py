"""`jaxkv filters` finds a model's filter layers on texts; `jaxkv fit-gate` fits KVzap's gate to a model."""

import dataclasses
import json
from typing import Annotated

import numpy as np

from jaxkv._errors import require
from jaxkv._plotting import saved, sheet
from jaxkv.analysis import FilterLayers, draw_maps, filter_layers, fit_gate
from jaxkv.checkpoints import names, save_filter_layers
from jaxkv.cli.models import ModelOption
from jaxkv.cli.options import Count, File, Word
from jaxkv.cli.outputs import Output, Picture, read_text, to_stdout
from jaxkv.policies.reads import without_window

# Share of the tokens visible to a query that counts as most attended when a layer's choice is scored.
SHARE = 0.067


@dataclasses.dataclass(frozen=True, kw_only=True)
class Filters(ModelOption):
    """`jaxkv filters`.

    Attributes:
        text_file: UTF-8 files with long texts; - for stdin.
        tokens: maximum tokens of each text.
        m: number of filter layers.
        most_whole: maximum number of layers that may read the whole cache (default: a quarter of all).
        json: print the layers and the map as JSON.
        picture: draw the map to a file: .png, .svg or .pdf (needs jaxkv[plots]).
        save: write the layers to the manifest of the named model.
    """

    text_file: Annotated[tuple[str, ...], Word("FILE", tuple, "extend")]
    tokens: Count = 4096
    m: Count = 3
    most_whole: Count | None = None
    json: bool = False
    picture: File = ""
    save: bool = False

    def run(self) -> None:
        """Print the filter layers, then save and draw them if requested.

        If saving or drawing fails, the layers are already on stdout.
        """
        if self.save:
            remedy = f"not a named model: only these have a manifest: {', '.join(names())}"
            require(self.model in names(), "--save", self.model, remedy)
        # Checked first, because the work takes minutes.
        picture = Picture(flag="--picture", name=self.picture)
        if self.picture:
            picture.check([*self.text_file, self.model])
        texts = [read_text(name, "--text-file") for name in self.text_file]
        params = self.loaded()
        ids = [params.tokenizer.encode(text, bos=True)[: self.tokens] for text in texts]
        found = filter_layers(params, ids, m=self.m, most_whole=self.most_whole, share=SHARE)
        whole = without_window(params.config.sliding_windows)
        if self.json:
            similarity = {"layers": whole, "mass": np.round(found.mass, 4).tolist()}
            record = {"filters": found.filters, "carried": round(found.carried, 4)}
            to_stdout(json.dumps(record | {"similarity": similarity}))
        else:
            to_stdout(f"filter layers of {self.model}: {', '.join(map(str, found.filters))}")
            said = f"carry {found.carried:.1%} of the attention above them"
            to_stdout(f"their chosen tokens ({SHARE:.1%} of all) {said}")
        if self.save:
            save_filter_layers(self.model, found.filters)
        if self.picture:
            picture.write(_drawn(found, whole, picture.kind))


def _drawn(found: FilterLayers, whole: tuple[int, ...], suffix: str) -> bytes:
    """Render the similarity map, with the filter layers marked; return the bytes of the image file."""
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class FitGate(ModelOption):
    """`jaxkv fit-gate`.

    Attributes:
        model: a name from `jaxkv models`, a Hugging Face folder, a .gguf file or a hub id.
        texts: UTF-8 files, each one text of about a thousand tokens; - for stdin.
        out: safetensors file to write, for `--policy kvzap --gate FILE`.
        tokens: maximum tokens of each text, up to the model's positions.
        penalty: ridge penalty, above 0; larger values give smaller weights, which fit these texts less.
    """

    model: Annotated[str, Word("MODEL", place=True)] = dataclasses.field()
    texts: Annotated[tuple[str, ...], Word("TEXT", tuple, "extend", place=True)]
    out: File
    tokens: Count = 2048
    penalty: float = 1.0

    def run(self) -> None:
        """Fit the gate, write its file, and print the fit of each layer."""
        # Checked first, because the work takes minutes.
        out = Output(flag="--out", name=self.out)
        out.check([*self.texts, self.model])
        texts = [read_text(name, "TEXT") for name in self.texts]
        params = self.loaded()
        most = min(self.tokens, params.config.max_positions)
        ids = [params.tokenizer.encode(text, bos=True)[:most] for text in texts]
        fitted = fit_gate(params, ids, penalty=self.penalty)
        out.write(fitted.gate.to_bytes())
        to_stdout(f"gate of {self.model} from {fitted.tokens} tokens: {self.out}")
        shares = ", ".join(f"{share:.0%}" for share in fitted.explained)
        to_stdout(f"explained variance of the scores in these texts, by layer: {shares}")
