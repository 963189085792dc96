"""`jaxkv filters` finds filter layers of a model on texts; `fit-gate` and `fit-tri` make files of policies for it."""

import dataclasses
import json
from typing import Annotated

import numpy as np

from jaxkv._dataclasses import frozen_dataclass
from jaxkv._errors import require
from jaxkv._plotting import make_figure, render_figure
from jaxkv.analysis import (
    FilterLayers,
    find_filter_layers,
    fit_kvzap_gate,
    fit_query_statistics,
    plot_maps,
)
from jaxkv.checkpoints import list_model_names, save_filter_layers
from jaxkv.cli.models import ModelOption
from jaxkv.cli.options import ArgumentSpec, Count, File
from jaxkv.cli.outputs import OutputTarget, PictureOutputTarget, read_text, write_to_stdout
from jaxkv.loading import LanguageModel
from jaxkv.policies.reads import list_full_attention_layers

# Share of the tokens visible to a query that counts as most attended when a layer's choice is scored.
SHARE = 0.067


@frozen_dataclass
class FindFilterLayersCommand(ModelOption):
    """The command `jaxkv filters` and its options: find a model's filter layers (OmniKV) on texts.

    Attributes:
        text_file: UTF-8 files with long texts; - for stdin.
        tokens: maximum tokens of each text.
        m: number of filter layers.
        most_whole: maximum number of layers that may read the whole cache (default: a quarter of all).
        json: print the layers and the map as JSON.
        picture: plot the map to a file: .png, .svg or .pdf (needs jaxkv[plots]).
        save: write the layers to the manifest of the named model.
    """

    text_file: Annotated[tuple[str, ...], ArgumentSpec("FILE", tuple, "extend")]
    tokens: Count = 4096
    m: Count = 3
    most_whole: Count | None = None
    json: bool = False
    picture: File = ""
    save: bool = False

    def run_command(self) -> None:
        """Find and print a model's filter layers on texts; if requested, save them and plot a map of layers.

        If saving or plotting fails, the layers are already on stdout.
        """
        if self.save:
            remedy = (
                f"not a named model: only these have a manifest: {', '.join(list_model_names())}"
            )
            require(self.model in list_model_names(), "--save", self.model, remedy)
        # Checked first, because the work takes minutes.
        picture = PictureOutputTarget(flag="--picture", name=self.picture)
        if self.picture:
            picture.require_writable([*self.text_file, self.model])
        texts = [read_text(name, "--text-file") for name in self.text_file]
        params = self.load_model()
        ids = [params.tokenizer.encode(text, bos=True)[: self.tokens] for text in texts]
        found = find_filter_layers(params, ids, m=self.m, most_whole=self.most_whole, share=SHARE)
        whole = list_full_attention_layers(params.config.sliding_windows)
        if self.json:
            similarity = {"layers": whole, "mass": np.round(found.mass, 4).tolist()}
            record = {"filters": found.filters, "carried": round(found.carried, 4)}
            write_to_stdout(json.dumps(record | {"similarity": similarity}))
        else:
            write_to_stdout(f"filter layers of {self.model}: {', '.join(map(str, found.filters))}")
            said = f"carry {found.carried:.1%} of the attention above them"
            write_to_stdout(f"their chosen tokens ({SHARE:.1%} of all) {said}")
        if self.save:
            save_filter_layers(self.model, found.filters)
        if self.picture:
            picture.write_bytes(_render_similarity_map(found, whole, picture.image_format))


def _render_similarity_map(found: FilterLayers, whole: tuple[int, ...], suffix: str) -> bytes:
    """Plot the map of layers' attention shares on other layers' top tokens, with filter layers; return image bytes."""
    title = "share of attention on the top tokens"
    figure = make_figure(3.4, 2.9)
    plot_maps(
        figure,
        {title: found.mass},
        across="layer that reads",
        down="layer that chooses",
        label="share",
    )
    panel = figure.axes[0]
    ticks = range(0, len(whole), 1 + len(whole) // 10)
    for axis in (panel.xaxis, panel.yaxis):
        axis.set_ticks(ticks, labels=[whole[at] for at in ticks])
    for layer in found.filters:
        panel.axhline(whole.index(layer), color="#D55E00", linewidth=0.8, linestyle="--")
    return render_figure(figure, suffix)


@frozen_dataclass
class _FitCommand(ModelOption):
    """Base of commands that fit a file of a policy to a model on texts.

    Attributes:
        model: a name from `jaxkv models`, a Hugging Face folder, a .gguf file or a hub id.
    """

    model: Annotated[str, ArgumentSpec("MODEL", place=True)] = dataclasses.field()
    texts: Annotated[tuple[str, ...], ArgumentSpec("TEXT", tuple, "extend", place=True)]
    out: File

    @property
    def target(self) -> OutputTarget:
        """`OutputTarget` of the option `out`."""
        return OutputTarget(flag="--out", name=self.out)

    def load_model_and_ids(self) -> tuple[LanguageModel, list[list[int]]]:
        """Return the model and each text's token ids; ValueError first if the output cannot be written."""
        # Checked first, because the work takes minutes.
        self.target.require_writable([*self.texts, self.model])
        texts = [read_text(name, "TEXT") for name in self.texts]
        params = self.load_model()
        return params, [params.tokenizer.encode(text, bos=True) for text in texts]


@frozen_dataclass
class FitGateCommand(_FitCommand):
    """The command `jaxkv fit-gate` and its options: fit KVzap's gate to a model on texts.

    Attributes:
        texts: UTF-8 files, each one text of about a thousand tokens; - for stdin.
        out: safetensors file to write, for `--policy kvzap --gate FILE`.
        tokens: maximum tokens of each text, up to the model's positions.
        penalty: ridge penalty, above 0; larger values give smaller weights, which fit these texts less.
    """

    tokens: Count = 2048
    penalty: float = 1.0

    def run_command(self) -> None:
        """Fit KVzap's gate to texts, write it as safetensors, and print the explained variance of each layer."""
        params, ids = self.load_model_and_ids()
        most = min(self.tokens, params.config.max_positions)
        fitted = fit_kvzap_gate(params, [each[:most] for each in ids], penalty=self.penalty)
        self.target.write_bytes(fitted.gate.encode_safetensors())
        write_to_stdout(f"gate of {self.model} from {fitted.tokens} tokens: {self.out}")
        shares = ", ".join(f"{share:.0%}" for share in fitted.explained)
        write_to_stdout(f"explained variance of the scores in these texts, by layer: {shares}")


@frozen_dataclass
class FitTriCommand(_FitCommand):
    """The command `jaxkv fit-tri` and its options: measure a model's queries on texts, for TriAttention.

    Attributes:
        texts: UTF-8 files of any text; - for stdin. 32,768 tokens are enough.
        out: safetensors file to write, for `--policy triattention --statistics FILE`.
        tokens: maximum tokens of all texts together.
        chunk: maximum tokens that the model reads at a time, up to its positions.
    """

    tokens: Count = 32768
    chunk: Count = 4096

    def run_command(self) -> None:
        """Measure the model's queries in texts, write the statistics as safetensors, and print the number of tokens."""
        params, ids = self.load_model_and_ids()
        every = [token for each in ids for token in each][: self.tokens]
        size = min(self.chunk, params.config.max_positions)
        pieces = [every[at : at + size] for at in range(0, len(every), size)]
        self.target.write_bytes(fit_query_statistics(params, pieces).encode_safetensors())
        write_to_stdout(f"statistics of {self.model} from {len(every)} tokens: {self.out}")
