"""Turns the rows of `benchmarks.gpu` into tables: `python -m benchmarks.gpu_report ROWS.jsonl [--out FILE.md]`.

Of rows that stand under one name the last one counts, and the newest versions and sources that it was measured with.
"""

import argparse
import sys
from pathlib import Path

from benchmarks import gpu_rows


def latest(rows):
    """The last row of each part and case."""
    found = {}
    for row in rows:
        found[row["part"], row["case"].get("name")] = row
    return list(found.values())


def table(head, lines):
    """A table in Markdown, without columns in which nothing stands, or nothing where it has no lines."""
    if not lines:
        return ""
    filled = [index for index in range(len(head)) if any(line[index] for line in lines)]
    head, lines = (
        [head[index] for index in filled],
        [[line[index] for index in filled] for line in lines],
    )
    text = [
        f"| {' | '.join(head)} |",
        f"|{' --- |' * len(head)}",
        *(f"| {' | '.join(line)} |" for line in lines),
    ]
    return "\n".join(text) + "\n"


def micro(figures):
    """Microseconds, with their range."""
    low, high = figures["range"]
    return f"{figures['seconds'] * 1e6:,.1f} ({low * 1e6:,.1f} to {high * 1e6:,.1f})"


def kernels(rows, copy):
    """Attention over segments: microseconds and share of what a copy gives."""
    lines = []
    for row in rows:
        figures = row["figures"]
        share = f"{figures['bytes_per_second'] / copy:.0%}" if copy else ""
        lines.append([row["case"]["name"], micro(figures), share])
    return table(["case", "us", "of copy"], lines)


def models(rows):
    """End to end: step, prefill, bytes."""
    lines = []
    for row in rows:
        figures, (low, high) = row["figures"], row["figures"]["step"]["range"]
        name, peak = row["case"]["name"], figures["prefill_holds"]["peak_bytes"]
        step = f"{figures['step_seconds'] * 1e3:.2f} ({low * 1e3:.2f} to {high * 1e3:.2f})"
        line = [
            name,
            figures["runs"],
            step,
            f"{figures['tokens_per_second']:,.1f}",
        ]
        line += [f"{figures['prefill_seconds']:.2f}", f"{figures['cache_bytes'] / 1e9:.2f}"]
        lines.append([*line, "" if peak is None else f"{peak / 1e9:.1f}"])
    head = [
        "case",
        "ran",
        "ms a step",
        "tokens/s",
        "prefill s",
        "cache GB",
        "peak GB of prefill",
    ]
    return table(head, lines)


def _tera(value):
    return f"{value / 1e12:.2f}"


def _copies(figures):
    return [_tera(figures[f"{kind}_bytes_per_second"]) for kind in ("copy", "read")]


# Titles, parts, columns behind the case's name, and what a row has in them.
PLAIN = (
    ("Copies", "copy", ("copy, TB/s", "read, TB/s"), lambda f: _copies(f)),
    (
        "Matrix products",
        "products",
        ("us", "TFLOP/s"),
        lambda f: [micro(f), _tera(f["flops_per_second"])],
    ),
    (
        "Products with codes",
        "linear",
        ("us", "TB/s"),
        lambda f: [micro(f), _tera(f["bytes_per_second"])],
    ),
    (
        "Experts of a mixture",
        "experts",
        ("us", "by token, us", "in blocks, us", "TB/s"),
        lambda f: [
            *(micro(f[each]) for each in ("tensor_cores", "by_token", "in_blocks")),
            _tera(f["bytes_per_second"]),
        ],
    ),
    (
        "Kernels against numpy",
        "checks",
        ("largest error",),
        lambda f: [f"{f['largest']:.1e}"],
    ),
    (
        "Prefill attention",
        "prefill",
        ("us", "TFLOP/s"),
        lambda f: [micro(f), _tera(f["flops_per_second"])],
    ),
    (
        "Scores",
        "scores",
        ("window, us", "all queries, us"),
        lambda f: [micro(f["window"]), micro(f["columns"])],
    ),
    (
        "Rows gathered",
        "gather",
        ("us", "TB/s"),
        lambda f: [micro(f), _tera(f["bytes_per_second"])],
    ),
    (
        "torch's scaled_dot_product_attention",
        "torch",
        ("us",),
        lambda f: [micro(f) if "seconds" in f else "absent"],
    ),
)
DECODE = (
    ("Decode attention", "decode"),
    ("Decode attention of a new token, which joins the pool", "token"),
    ("The same over rows in 8 and 4 bits", "codes"),
    ("Decode attention that adds to scores", "mass"),
)


def report(rows):
    """The whole report of rows as a file has them."""
    rows = latest(rows)
    of = lambda *parts: [row for row in rows if row["part"] in parts and "figures" in row]  # noqa: E731
    copy = max((row["figures"]["copy_bytes_per_second"] for row in of("copy")), default=None)
    sections = []
    for title, part, columns, cells in PLAIN:
        lines = [[row["case"]["name"], *cells(row["figures"])] for row in of(part)]
        sections.append((title, table(["case", *columns], lines)))
    # Below copies, products and checks.
    sections[4:4] = [(title, kernels(of(part), copy)) for title, part in DECODE]
    sections.append(
        (
            "Llama 3 8B's shape, random weights",
            models(of("end", "ways", "bits")),
        )
    )
    failed = [row for row in rows if "failed" in row]
    why = lambda row: row["failed"].replace("|", "/")[:160]  # noqa: E731
    lines = [[row["part"], row["case"].get("name", ""), why(row)] for row in failed]
    sections.append(("Failed", table(["part", "case", "why"], lines)))
    return "\n".join(
        [*heading(rows), *(f"## {title}\n\n{text}" for title, text in sections if text)]
    )


def heading(rows):
    """Where and when."""
    if not rows:
        return ["# No rows\n"]
    parts = [f"# {rows[0]['device']}\n"]
    for versions in {str(row["versions"]): row["versions"] for row in rows}.values():
        said = ", ".join(f"{name} {version}" for name, version in versions.items())
        dates = [row["date"] for row in rows if row["versions"] == versions]
        parts.append(f"Measured {min(dates)} to {max(dates)} with {said}.\n")
    return parts


def main():
    """Prints the report, or writes it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("rows", type=Path, help="a file of rows")
    parser.add_argument("--out", type=Path, help="file to write (default: print)")
    args = parser.parse_args()
    try:
        text = report(gpu_rows.load(args.rows))
    except gpu_rows.RowsError as error:
        sys.exit(f"error: {error}")
    if args.out:
        args.out.write_text(text, encoding="utf-8")
    else:
        print(text)


if __name__ == "__main__":
    main()
