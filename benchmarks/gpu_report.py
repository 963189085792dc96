"""Turns the rows of `benchmarks.gpu` into tables, measurements beside the performance model's estimates.

    python -m benchmarks.gpu_report benchmarks/results/nvidia-h200.jsonl [--out FILE.md] [--estimates gpu_model.md]

Of rows that stand under one name the last one counts, and the newest versions and sources that it was measured with;
rows of a table of tiles stand apart. Estimates are those of cases of the same name, and are marked so.
"""

import argparse
import re
import sys
from pathlib import Path

from benchmarks import gpu_rows

ESTIMATES = gpu_rows.ROOT / "benchmarks" / "results" / "gpu_model.md"


def latest(rows):
    """The last row of each part, case and way of being tuned."""
    found = {}
    for row in rows:
        found[row["part"], row["case"].get("name"), row["case"].get("repeat"), row["tuned"]] = row
    return list(found.values())


def table(head, lines):
    """A table in Markdown, or nothing where it has no lines."""
    if not lines:
        return ""
    text = [f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}", *(f"| {' | '.join(line)} |" for line in lines)]
    return "\n".join(text) + "\n"


def micro(figures):
    """Microseconds, with their range."""
    low, high = figures["range"]
    return f"{figures['seconds'] * 1e6:,.1f} ({low * 1e6:,.1f} to {high * 1e6:,.1f})"


def plain(name):
    """A case's name without what tables write differently."""
    return re.sub(r"[^a-z0-9,/ ]", "", name.lower()).removeprefix("8b ").strip()


def estimates(path):
    """Of the performance model, by case: what the columns of its tables say that name an estimate of time or share.

    Returns:
        By a case's plain name a dictionary of columns.
    """
    found, head = {}, []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")] if line.startswith("|") else []
        if not cells:
            head = []
        elif not head:
            head = cells
        elif not set(line) <= set("|-: "):
            found.setdefault(plain(cells[0]), {}).update(zip(head[1:], cells[1:], strict=False))
    return found


def _share(value, whole):
    return "" if not whole else f"{value / whole:.0%}"


def kernels(rows, copy, guessed):
    """Attention over segments: microseconds, share of what a copy gives, and the model's columns."""
    lines = []
    columns = sorted({name for each in guessed.values() for name in each if re.search(r"\bus\b|of copy", name)})
    shown = [name for name in columns if any(name in guessed.get(plain(row["case"]["name"]), {}) for row in rows)]
    for row in rows:
        figures, name = row["figures"], row["case"]["name"]
        tuned = "table" if row["tuned"] else "rule"
        line = [name, tuned, micro(figures), _share(figures["bytes_per_second"], copy)]
        fused = figures.get("token")
        line += [micro(fused) if fused else ""]
        lines.append(line + [guessed.get(plain(name), {}).get(column, "") for column in shown])
    return table(["case", "tiles", "us", "of copy", "us, a whole token's", *(f"estimate: {c}" for c in shown)], lines)


def models(rows):
    """End to end: step, prefill, bytes."""
    lines = []
    for row in rows:
        f, low = row["figures"], row["figures"]["step"]["range"]
        step = f"{f['step_seconds'] * 1e3:.2f} ({low[0] * 1e3:.2f} to {low[1] * 1e3:.2f})"
        peak = f["prefill_holds"]["peak_bytes"]
        line = [row["case"]["name"], f["runs"], step, f"{f['tokens_per_second']:,.1f}", f"{f['prefill_seconds']:.2f}"]
        lines.append([*line, f"{f['cache_bytes'] / 1e9:.2f}", "" if peak is None else f"{peak / 1e9:.1f}"])
    head = ["case", "ran", "ms a step", "tokens/s", "prefill s", "cache GB", "peak GB of prefill"]
    return table(head, lines)


def report(rows, guessed):
    """The whole report."""
    rows = latest(rows)
    good = [row for row in rows if "figures" in row]
    of = lambda *parts: [row for row in good if row["part"] in parts]  # noqa: E731
    copies = of("copy")
    copy = max((row["figures"]["copy_bytes_per_second"] for row in copies), default=None)
    parts = [f"# {rows[0]['device']}\n" if rows else "# no rows\n"]
    for versions in {str(row["versions"]): row["versions"] for row in rows}.values():
        said = ", ".join(f"{name} {version}" for name, version in versions.items())
        dates = [row["date"] for row in rows if row["versions"] == versions]
        parts.append(f"Measured {min(dates)} to {max(dates)} with {said}.\n")

    def add(title, text):
        if text:
            parts.append(f"## {title}\n\n{text}")

    terabytes = lambda value: f"{value / 1e12:.2f}"  # noqa: E731
    lines = [
        [r["case"]["name"], *(terabytes(r["figures"][f"{k}_bytes_per_second"]) for k in ("copy", "read"))]
        for r in copies
    ]
    add("Copies", table(["arrays of", "copy, TB/s", "read, TB/s"], lines))
    lines = [
        [r["case"]["name"], micro(r["figures"]), terabytes(r["figures"]["flops_per_second"])] for r in of("products")
    ]
    add("Matrix products", table(["case", "us", "TFLOP/s"], lines))
    lines = [[r["case"]["name"], f"{r['figures']['largest']:.1e}"] for r in of("checks")]
    add("Kernels against numpy", table(["dtype, head dim", "largest error"], lines))
    add("Decode attention", kernels(of("decode"), copy, guessed))
    add("Decode attention with scores", kernels(of("mass"), copy, {}))
    lines = [
        [
            r["case"]["name"],
            "table" if r["tuned"] else "rule",
            micro(r["figures"]),
            terabytes(r["figures"]["flops_per_second"]),
        ]
        for r in of("prefill")
    ]
    add("Prefill attention", table(["case", "tiles", "us", "TFLOP/s"], lines))
    lines = [[r["case"]["name"], micro(r["figures"]["window"]), micro(r["figures"]["columns"])] for r in of("scores")]
    add("Scores", table(["case", "window, us", "all queries, us"], lines))
    lines = [
        [r["case"]["name"], micro(r["figures"]), _share(r["figures"]["bytes_per_second"], copy)] for r in of("gather")
    ]
    add("Rows gathered", table(["case", "us", "of copy"], lines))
    add("Llama 3 8B's shape, random weights", models(of("end", "ways", "headline")))
    lines = [[r["case"]["name"], micro(r["figures"])] for r in of("torch") if "seconds" in r["figures"]]
    add("torch's scaled_dot_product_attention", table(["case", "us"], lines))
    lines = [
        [r["part"], r["case"].get("name", ""), r["failed"].replace("|", "/")[:160]]
        for r in rows
        if "failed" in r and not r["part"].startswith("tune_")
    ]
    add("Failed", table(["part", "case", "why"], lines))
    return "\n".join(parts)


def main():
    """Prints the report, or writes it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=Path, help="a file of rows")
    parser.add_argument("--out", type=Path, help="file to write (default: print)")
    parser.add_argument("--estimates", type=Path, default=ESTIMATES, help="tables of the performance model")
    args = parser.parse_args()
    try:
        text = report(gpu_rows.load(args.rows), estimates(args.estimates))
    except gpu_rows.RowsError as error:
        sys.exit(f"error: {error}")
    if args.out:
        args.out.write_text(text, encoding="utf-8")
    else:
        print(text)


if __name__ == "__main__":
    main()
