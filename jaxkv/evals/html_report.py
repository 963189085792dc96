"""`report`: evaluations as one HTML page that needs no other file, to look at and to send."""

import base64
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxkv._checks import shortened
from jaxkv._errors import require
from jaxkv.checkpoints.whole_files import write_whole
from jaxkv.evals.pictures import PLOTS_MISSING, draw
from jaxkv.evals.results import Evaluation, number
from jaxkv.evals.texts import shipped
from jaxkv.text.shown import Shown, joined


def report(
    *folders: str | os.PathLike[str],
    samples: int = 200,
    out: str | os.PathLike[str] | None = None,
) -> Path:
    """Write an evaluation as one HTML page and return its path: tables, plots, settings, sample, tokens kept.

    Of an evaluation that is not finished it shows what is there, and says what is missing. The page loads nothing from
    elsewhere, and shows everything that models drew as text, never as markup.

    Args:
        *folders: where `jaxkv.evaluate` or `jaxkv eval` wrote to; several are shards, or further policies, of one
            evaluation.
        samples: number of samples of each policy on the page, from the first on; 0 for none.
        out: file of the page; by default `report.html` in the first folder.

    Returns:
        Path of the page; it has no pictures if matplotlib is not installed.

    Raises:
        ValueError: if a folder holds no evaluation, or folders those of different settings.
        OSError: if the page cannot be written; an older page then stays unchanged.
    """
    import jinja2
    import markupsafe

    evaluation = Evaluation.read(*folders)
    require(bool(evaluation.records), "folder", str(evaluation.folder), "nothing ran there yet")
    environment = jinja2.Environment(
        autoescape=True, finalize=_printable, undefined=jinja2.StrictUndefined, trim_blocks=True
    )
    environment.filters |= {
        "number": number,
        "shortened": shortened,
        "shaded": lambda held: markupsafe.Markup(shaded(held)._repr_html_()),
    }
    pictures = {} if PLOTS_MISSING else draw(evaluation, ("svg",))
    text = environment.from_string(shipped("data/report.html.jinja")).render(
        evaluation=evaluation,
        samples=samples,
        asked={**vars(evaluation.run), **evaluation.methods},
        pictures={name: base64.b64encode(data).decode() for name, data in pictures.items()},
    )
    path = evaluation.folder / "report.html" if out is None else Path(out).expanduser()
    write_whole(path, text.encode("utf-8", "backslashreplace"))
    return path


def shaded(held: Mapping[str, Any]) -> Shown:
    """`Shown`, whose HTML has the tokens of a `Record.held` shaded by how many kv heads hold each."""
    passages = tuple(joined(pieces, counts) for pieces, counts in held["ends"])
    return Shown(passages=passages, heads=held["heads"])


def _printable(value: Any) -> Any:
    """Text of `value` with unprintable characters escaped, for HTML templates; markup is returned unchanged."""
    if hasattr(value, "__html__"):
        return value
    return "".join(
        each if each.isprintable() or each in "\n\t" else repr(each)[1:-1] for each in str(value)
    )
