"""`report`: a finished evaluation as one HTML page that needs nothing else, to look at and to send."""

import base64
import hashlib
import html
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from jaxkv._errors import require
from jaxkv._values import is_whole, shortened
from jaxkv.checkpoints.whole_files import write_whole
from jaxkv.evals.pictures import PLOTS_MISSING, draw
from jaxkv.evals.records import Record
from jaxkv.evals.summary import Cell, Evaluation, number

PAGE = "report.html"

_STYLE = """\
:root { color-scheme: light dark; --ink: #1a1a1a; --dim: #5f6368; --page: #fff; --line: #d5d8dc; --bar: #cfe3f5;
  --head: #f2f4f6; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e6e6; --dim: #a0a6ad; --page: #16181b; --line: #3a3f45;
  --bar: #1f4466; --head: #22262b; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--page); margin: 2rem auto;
  max-width: 80rem; padding: 0 1.5rem; }
h1 { font-size: 1.6rem; margin-bottom: .2rem; } h2 { font-size: 1.2rem; margin-top: 2.2rem; }
p.about, small, .dim { color: var(--dim); }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; margin: .6rem 0; }
th, td { border-bottom: 1px solid var(--line); padding: .3rem .7rem; text-align: right; vertical-align: top;
  white-space: nowrap; }
th { background: var(--head); position: sticky; top: 0; }
th:first-child, td:first-child, th.text, td.text { text-align: left; }
th button { all: unset; cursor: pointer; font-weight: 600; }
th button:focus-visible { outline: 2px solid currentColor; }
th[aria-sort=ascending] button::after { content: " \\2191"; }
th[aria-sort=descending] button::after { content: " \\2193"; }
td.score { background: linear-gradient(90deg, var(--bar) var(--share), transparent var(--share)); }
td small { display: block; }
td.text { white-space: pre-wrap; overflow-wrap: anywhere; min-width: 8rem; max-width: 36rem; unicode-bidi: isolate; }
figure { margin: 1rem 0; background: #fff; border: 1px solid var(--line); border-radius: 6px; padding: .5rem; }
figure img { max-width: 100%; height: auto; display: block; margin: auto; }
figcaption { color: #5f6368; text-align: center; }
details { margin: .4rem 0; } summary { cursor: pointer; } summary b { margin-right: .6rem; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1rem; } dt { color: var(--dim); }
dd { margin: 0; overflow-wrap: anywhere; } code { font-size: .9em; }
"""

_SCRIPT = """\
for (const button of document.querySelectorAll("th button")) button.addEventListener("click", () => {
  const head = button.parentElement, row = head.parentElement, body = row.closest("table").tBodies[0];
  const up = head.getAttribute("aria-sort") !== "ascending", at = [...row.cells].indexOf(head);
  for (const cell of row.cells) cell.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", up ? "ascending" : "descending");
  const value = (line) => line.cells[at].dataset.value ?? line.cells[at].textContent;
  const order = (a, b) => a !== "" && b !== "" && !isNaN(a) && !isNaN(b) ? a - b : a.localeCompare(b);
  const lines = [...body.rows].sort((a, b) => (up ? 1 : -1) * order(value(a), value(b)));
  for (const line of lines) body.append(line);
});
"""


def report(folder: str | os.PathLike[str], *, samples: int = 200) -> Path:
    """Writes a finished evaluation as one HTML page: tables to sort, pictures, what was asked, samples with answers.

    The page fetches nothing, and what models have said is shown as text, whatever it is.

    Args:
        folder: where `jaxkv.evaluate`, `jaxkv eval` or `jaxkv eval merge` wrote to.
        samples: of each policy that are on the page, from the first on.

    Returns:
        The page, `report.html` in the folder; without pictures where matplotlib is not there.

    Raises:
        ValueError: where there is no evaluation, or one that has not come to its end.
        OSError: where the page cannot be written; an old one is then as it was.
    """
    require(is_whole(samples), "samples", samples, "give how many to show of each policy; 0 for none")
    evaluation = Evaluation.read(folder)
    path = evaluation.folder / PAGE
    write_whole(path, _page(evaluation, samples).encode())
    return path


def _page(evaluation: Evaluation, samples: int) -> str:
    hashed = base64.b64encode(hashlib.sha256(_SCRIPT.encode()).digest()).decode()
    # Nothing that a model has said runs, should it ever get past `_text`.
    allowed = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{hashed}'"
    run, parts = evaluation.run, ["<!DOCTYPE html>", '<html lang="en">', "<head>", '<meta charset="utf-8">']
    parts += [f'<meta http-equiv="Content-Security-Policy" content="{allowed}">']
    parts += ['<meta name="viewport" content="width=device-width, initial-scale=1">']
    parts += [f"<title>{_text(evaluation.title)}</title>", f"<style>\n{_STYLE}</style>", "</head>", "<body>"]
    asked = "the context was compressed before the question was seen" if run.agnostic else "policies saw whole prompts"
    parts += [f"<h1>{_text(run.task)}</h1>", f'<p class="about">{_text(evaluation.title)}; {asked}.</p>']
    parts += ["<h2>Policies</h2>", f'<p class="about">{_text(evaluation.scale)}; intervals are of 95%.</p>']
    parts += [_policies(evaluation)]
    for what, rows in evaluation.sections().items():
        parts += [f"<h2>By {what}</h2>", *(_section(evaluation, what, rows, part) for part in evaluation.blocks())]
    parts += ["<h2>Pictures</h2>", *_pictures(evaluation), "<h2>Samples</h2>"]
    parts += [_samples(evaluation, policy, samples) for policy in evaluation.policies]
    parts += ["<h2>What was asked</h2>", _asked(evaluation), f"<script>{_SCRIPT}</script>", "</body>", "</html>", ""]
    return "\n".join(parts)


def _text(value: object) -> str:
    """Any text as a page shows it; characters that nobody sees, by their number."""
    shown = (each if each.isprintable() or each in "\n\t" else repr(each)[1:-1] for each in str(value))
    return html.escape("".join(shown))


def _table(head: Sequence[str], rows: Iterable[str], texts: Sequence[int] = ()) -> str:
    cells = (
        f'<th scope="col"{" class=text" if at in texts else ""}><button type="button">{_text(name)}</button></th>'
        for at, name in enumerate(head)
    )
    body = "\n".join(f"<tr>{row}</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{"".join(cells)}</tr></thead><tbody>\n{body}\n</tbody></table></div>'


def _cell(shown: str, value: object = "", *, kind: str = "", about: str = "", style: str = "") -> str:
    given = {"class": kind, "data-value": value, "title": about, "style": style}
    said = "".join(f' {name}="{_text(each)}"' for name, each in given.items() if each not in ("", None))
    return f"<td{said}>{shown}</td>"


def _score(evaluation: Evaluation, cell: Cell) -> str:
    share = f"--share: {100 * min(1.0, max(0.0, cell.mean)):.1f}%" if evaluation.run.unit == "%" else ""
    costs = f"{cell.n} samples; {number(cell.rows, 1)} rows kept; {number(cell.nbytes, 3, 1e6)} MB"
    told = f"{evaluation.shown(cell.mean)}<small>{evaluation.shown_interval(cell)}</small>"
    kind = "score" if share else ""
    return _cell(told, repr(cell.mean), kind=kind, about=costs, style=share or "")


def _policies(evaluation: Evaluation) -> str:
    rows = []
    for policy in evaluation.policies:
        cell = evaluation.cell(policy)
        row = [_cell(_text(policy), about=evaluation.run.policies[policy]), _score(evaluation, cell)]
        row += [
            _cell(str(cell.n)),
            _cell(number(cell.rows, 1), cell.rows),
            _cell(number(cell.nbytes, 3, 1e6), cell.nbytes),
        ]
        rows.append("".join([*row, _cell(number(cell.tokens, 0), cell.tokens)]))
    return _table(["policy", "score", "samples", "rows kept", "MB", "prompt tokens"], rows)


def _section(evaluation: Evaluation, what: str, rows: dict[str, dict[str, Any]], policies: Sequence[str]) -> str:
    lines = []
    for name, by in rows.items():
        cells = [evaluation.cell(policy, **by) for policy in policies]
        head = _cell(_text(name) if by else "<b>mean</b>", by.get("length", ""))
        lines.append("".join([head, _cell(str(cells[0].n)), *(_score(evaluation, cell) for cell in cells)]))
    return _table([what, "samples", *policies], lines)


def _pictures(evaluation: Evaluation) -> list[str]:
    if PLOTS_MISSING:
        return ["<p>They need matplotlib: pip install 'jaxkv[plots]', and make the report again.</p>"]
    made = []
    for name, data in draw(evaluation, ("svg",)).items():
        shown = base64.b64encode(data).decode()
        caption = _text(name.removesuffix(".svg").replace("_", " "))
        image = f'<img src="data:image/svg+xml;base64,{shown}" alt="{caption}">'
        made.append(f"<figure>{image}<figcaption>{caption}</figcaption></figure>")
    return made


def _samples(evaluation: Evaluation, policy: str, most: int) -> str:
    records = evaluation.of(policy)
    left = f'<p class="about">The first {most} of {len(records)} samples.</p>' if len(records) > most else ""
    head = ["sample", "group", "score", "prediction", "answers", "tokens", "rows kept", "tags"]
    table = _table(head, (_sample(evaluation, record) for record in records[:most]), texts=(1, 3, 4, 7))
    mean = evaluation.shown(evaluation.cell(policy).mean)
    return f"<details><summary><b>{_text(policy)}</b> {mean}, {len(records)} samples</summary>{left}{table}</details>"


def _sample(evaluation: Evaluation, record: Record) -> str:
    answers = "\n".join(record.answers)
    tags = ", ".join(f"{name} {value}" for name, value in record.tags.items())
    texts = {"prediction": record.prediction, "answers": answers}
    row = [_cell(_text(record.id)), _cell(_text(record.group), kind="text")]
    row.append(_cell(evaluation.shown(record.score), repr(record.score)))
    row += [_cell(_text(shortened(text, 2000)), kind="text") for text in texts.values()]
    row += [_cell(number(record.tokens, 0), record.tokens), _cell(number(record.rows, 1), record.rows)]
    return "".join([*row, _cell(_text(shortened(tags, 200)), kind="text")])


def _asked(evaluation: Evaluation) -> str:
    said = evaluation.run.as_dict()
    policies = said.pop("policies")
    flat = {name: value for name, value in said.items() if name not in ("format", "budgets") and value is not None}
    rows = {**flat, **{f"policy {name}": value for name, value in policies.items()}}
    told = (
        f"<dt>{_text(name)}</dt><dd><code>{_text(value if isinstance(value, str) else json.dumps(value))}</code></dd>"
        for name, value in rows.items()
    )
    return f"<dl>{''.join(told)}</dl>"
