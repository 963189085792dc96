"""`report`: a finished evaluation as one HTML page that needs no other file, to look at and to send."""

import base64
import dataclasses
import functools
import hashlib
import json
import os
from importlib import resources
from pathlib import Path
from typing import Any

from jaxkv import _checks as checks
from jaxkv._values import shortened
from jaxkv.checkpoints.whole_files import write_whole
from jaxkv.evals.kept import read_kept
from jaxkv.evals.pictures import PLOTS_MISSING, draw
from jaxkv.evals.records import Record
from jaxkv.evals.summary import Evaluation, number
from jaxkv.evals.task import TASKS

PAGE = "report.html"


def report(folder: str | os.PathLike[str], *, samples: int = 200) -> Path:
    """Writes an evaluation as one HTML page and returns its path: tables to sort, plots, settings, samples.

    Of an evaluation that is not finished it shows the policies that are, and names the others. The page loads nothing
    from elsewhere, and shows everything that models drew as text, never as markup.

    Args:
        folder: where `jaxkv.evaluate`, `jaxkv eval` or `jaxkv eval merge` wrote to.
        samples: number of samples of each policy on the page, from the first on; 0 for none.

    Returns:
        Path of the page, `report.html` in the folder; it has no pictures if matplotlib is not installed.

    Raises:
        ValueError: if the folder holds no evaluation, or one without a finished policy.
        OSError: if the page cannot be written; an older page then stays unchanged.
    """
    samples = checks.whole(
        "samples", samples, "give how many to show of each policy; 0 for none", least=0
    )
    evaluation, missing = _finished(folder)
    path = evaluation.folder / PAGE
    write_whole(path, _page(evaluation, samples, missing).encode())
    return path


def _finished(folder: str | os.PathLike[str]) -> tuple[Evaluation, list[str]]:
    """Pair: an evaluation with its finished policies alone, and the names of the others; ValueError if none is."""
    found = Evaluation.begun(folder)
    run, each = found.run, found.run.lines // len(found.run.policies)
    names = [*run.policies]
    done = names[: len(found.records) // each]
    if not done or done == names:
        return Evaluation.read(folder), []
    policies = {name: run.policies[name] for name in done}
    run = dataclasses.replace(
        run, policies=policies, budgets={name: run.budgets[name] for name in done}
    )
    finished = dataclasses.replace(found, run=run, records=found.records[: len(done) * each])
    return finished, names[len(done) :]


@functools.cache
def data_file(name: str) -> str:
    """Text of a packaged file in `jaxkv/evals/data`, by its name; cached."""
    return (resources.files("jaxkv.evals") / "data" / name).read_text("utf-8")


def _page(evaluation: Evaluation, samples: int, missing: list[str]) -> str:
    """HTML text of an evaluation's report: tables, plots, settings, samples; `missing` policies are not finished."""
    import jinja2
    import markupsafe

    environment = jinja2.Environment(
        autoescape=True,
        finalize=_visible,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"number": number, "shortened": shortened}
    script = data_file("report.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    # Should a model's text ever get past the escapes, the browser still runs none of it.
    allowed = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    return environment.from_string(data_file("report.html.jinja")).render(
        evaluation=evaluation,
        missing=missing,
        run=evaluation.run,
        samples=samples,
        pictures=[] if PLOTS_MISSING else _pictures(evaluation),
        kept=read_kept(evaluation.folder),
        asked=_asked(evaluation),
        tags=_tags,
        allowed=markupsafe.Markup(allowed),
        style=markupsafe.Markup(data_file("report.css")),
        script=markupsafe.Markup(script),
    )


def _visible(value: Any) -> Any:
    """Text of `value` with unprintable characters escaped, for HTML templates; markup is returned unchanged."""
    if hasattr(value, "__html__"):
        return value
    return "".join(
        each if each.isprintable() or each in "\n\t" else repr(each)[1:-1] for each in str(value)
    )


def _pictures(evaluation: Evaluation) -> list[tuple[str, str]]:
    """List of (caption, base64 text of the SVG) pairs, one for each plot of the evaluation."""
    drawn = draw(evaluation, ("svg",)).items()
    return [
        (name.removesuffix(".svg").replace("_", " "), base64.b64encode(data).decode())
        for name, data in drawn
    ]


def _tags(record: Record) -> str:
    """A record's tags as one line of text, such as "length 4096, depth 0.5"."""
    return ", ".join(f"{name} {value}" for name, value in record.tags.items())


def _asked(evaluation: Evaluation) -> dict[str, str]:
    """Dict {name: text} of the run's settings and policies, for the report's section "What was asked"."""
    run = evaluation.run.as_dict()
    # A task of this name may be another one by now, or none.
    unused = TASKS[run["task"]].unused(run["settings"]) if run["task"] in TASKS else ()
    run["settings"] = {name: value for name, value in run["settings"].items() if name not in unused}
    policies = {f"policy {name}": policy for name, policy in run.pop("policies").items()}
    kept = {
        name: value
        for name, value in run.items()
        if name not in ("format", "budgets") and value is not None
    }
    both = (kept | policies).items()
    return {name: value if isinstance(value, str) else json.dumps(value) for name, value in both}
