"""`jaxkv fit-gate`: fits KVzap's linear gate to a model in some texts, and writes its file."""

import argparse

from jaxkv.analysis import fit_gate
from jaxkv.cli.files import Target, read_long_text
from jaxkv.cli.models import ids_of, require_model
from jaxkv.cli.numbers import argument, positive, real
from jaxkv.cli.streams import to_stdout
from jaxkv.loading import load
from jaxkv.machine.compilation import enable_compilation_cache


def add_fit_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `jaxkv fit-gate` to its parser."""
    add = parser.add_argument
    add(
        "model",
        metavar="MODEL",
        help="a name from `jaxkv models`, a Hugging Face folder, a .gguf file or a hub id",
    )
    add(
        "texts",
        nargs="+",
        metavar="TEXT",
        help="UTF-8 files, each one text of about a thousand tokens; - for stdin",
    )
    add(
        "--out",
        required=True,
        metavar="FILE",
        help="safetensors file to write, for `--policy kvzap --gate FILE`",
    )
    add(
        "--tokens",
        type=argument(positive),
        default=2048,
        metavar="N",
        help="most tokens read of each text, if the model has as many positions (default: %(default)s)",
    )
    most = "above 0: larger numbers make smaller weights, which fit these texts less (default: %(default)s)"
    add("--penalty", type=argument(real), default=1.0, metavar="X", help=most)


def run_fit(options: argparse.Namespace) -> int:
    """Runs `jaxkv fit-gate`: fits the gate, writes its file, prints how well each layer fits; returns exit code 0."""
    require_model(options.model)
    # Checked before minutes of work, which a file that cannot be written would waste.
    target = Target(flag="--out", name=options.out)
    target.check(
        {f"TEXT[{index}]": name for index, name in enumerate(options.texts)}
        | {"MODEL": options.model}
    )
    texts = [read_long_text(name, "TEXT") for name in options.texts]
    enable_compilation_cache()
    params = load(options.model)
    most = min(options.tokens, params.config.max_positions)
    ids = [each[:most] for each in ids_of(params, options.model, texts)]
    fitted = fit_gate(params, ids, penalty=options.penalty)
    target.write(fitted.gate.to_bytes())
    to_stdout(f"gate of {options.model} from {fitted.tokens} tokens: {options.out}")
    shares = ", ".join(f"{share:.0%}" for share in fitted.explained)
    to_stdout(f"variance of the scores that it explains in these texts, by layer: {shares}")
    return 0
