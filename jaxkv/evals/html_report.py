"""`report`: writes evaluations as one self-contained HTML page."""

import base64
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxkv._checks import shorten_text
from jaxkv._errors import require
from jaxkv.checkpoints.whole_files import write_file_atomically
from jaxkv.evals.pictures import PLOTS_MISSING, plot_evaluation
from jaxkv.evals.results import Evaluation, format_decimal_number
from jaxkv.evals.texts import read_packaged_file
from jaxkv.text.shown import KeptTokensDisplay, join_equally_kept_tokens


def report(
    *folders: str | os.PathLike[str],
    samples: int = 200,
    out: str | os.PathLike[str] | None = None,
) -> Path:
    """Write the evaluation in folders as one HTML page: tables, plots, settings, samples, kept tokens; return its path.

    For an incomplete evaluation, the page shows the results so far and names the missing ones. The page loads nothing
    from other servers, and shows all sampled text as text, never as markup.

    Args:
        *folders: folders written by `jaxkv.evaluate` or `jaxkv eval`; several are shards, or further policies, of one
            evaluation.
        samples: number of samples per policy on the page, from the first on; 0 for none.
        out: file of the page; by default `report.html` in the first folder.

    Returns:
        Path of the page, which has no plots if matplotlib is not installed.

    Raises:
        ValueError: if a folder has no evaluation, or the folders have different settings.
        OSError: if the page cannot be written; an older page is unchanged.
    """
    import jinja2
    import markupsafe

    evaluation = Evaluation.read(*folders)
    require(
        bool(evaluation.records), "folder", str(evaluation.folder), "no results yet: run it first"
    )
    environment = jinja2.Environment(
        autoescape=True,
        finalize=_escape_unprintable,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
    )
    environment.filters |= {
        "number": format_decimal_number,
        "shortened": shorten_text,
        "shaded": lambda held: markupsafe.Markup(shade_kept_tokens(held)._repr_html_()),
    }
    pictures = {} if PLOTS_MISSING else plot_evaluation(evaluation, ("svg",))
    text = environment.from_string(read_packaged_file("data/report.html.jinja")).render(
        evaluation=evaluation,
        samples=samples,
        asked={**vars(evaluation.run), **evaluation.policy_reprs},
        pictures={name: base64.b64encode(data).decode() for name, data in pictures.items()},
    )
    path = evaluation.folder / "report.html" if out is None else Path(out).expanduser()
    write_file_atomically(path, text.encode("utf-8", "backslashreplace"))
    return path


def shade_kept_tokens(held: Mapping[str, Any]) -> KeptTokensDisplay:
    """Return a `KeptTokensDisplay` of a `SampleRecord.held`: its HTML shades tokens by how many kv heads keep each."""
    passages = tuple(join_equally_kept_tokens(pieces, counts) for pieces, counts in held["ends"])
    return KeptTokensDisplay(passages=passages, heads=held["heads"])


def _escape_unprintable(value: Any) -> Any:
    """Convert a template's value to text with unprintable characters escaped; return markup unchanged."""
    if hasattr(value, "__html__"):
        return value
    return "".join(
        each if each.isprintable() or each in "\n\t" else repr(each)[1:-1] for each in str(value)
    )
