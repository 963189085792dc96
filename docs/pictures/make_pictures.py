"""Make the pictures of docs/concepts.md: SVG, legible on light and dark pages, the same bytes every time.

`python docs/pictures/make_pictures.py` writes them next to this file; `--check` lists those that differ.
"""

import argparse
import random
import sys
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path

HERE = Path(__file__).parent
# Each picture brings its own ground, so that it does not matter whether the page or the system is the dark one.
STYLE = """
text { font: 14px system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; fill: #24292f }
.title { font-weight: 600 }
.note { font-size: 12px; fill: #57606a }
.code { font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; font-size: 13px }
.ground { fill: #fcfcfa; stroke: #d5d5ce }
.kept { fill: #3f83cf }
.always { fill: #dd8a33 }
.gone { fill: #e3e3dd }
.new { fill: #3f9d5c }
.room { fill: none; stroke: #8b929b; stroke-dasharray: 3 3 }
.box { fill: #eef3fa; stroke: #3f83cf }
.line { fill: none; stroke: #57606a; stroke-width: 1.5 }
.curve { fill: none; stroke-width: 2.5 }
.a { stroke: #3f83cf } .b { stroke: #dd8a33 } .c { stroke: #3f9d5c } .d { stroke: #a05cc4 } .e { stroke: #7a828c }
.dashed { stroke-dasharray: 6 5 }
@media (prefers-color-scheme: dark) {
  text { fill: #e6e8eb }
  .note { fill: #a9b1bb }
  .ground { fill: #1b1e23; stroke: #3b4048 }
  .gone { fill: #383d45 }
  .box { fill: #20303f }
  .line { stroke: #a9b1bb }
}
"""
CELL = 14


class Picture:
    """A picture's elements, in order."""

    def __init__(self, width: int, height: int, says: str):
        self.head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
            f'height="{height}" role="img"><title>{escape(says)}</title><style>{STYLE}</style>'
        )
        self.parts = [
            f'<rect class="ground" x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="8"/>'
        ]

    def text(self, x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> None:
        """Words, their base line at y."""
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" class="{kind}" text-anchor="{anchor}">{escape(words)}</text>'
        )

    def box(
        self, x: float, y: float, width: float, height: float, kind: str, *, round_by: float = 2
    ) -> None:
        """A rectangle."""
        self.parts.append(
            f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{round_by:g}"/>'
        )

    def cells(self, x: float, y: float, kinds: Sequence[str]) -> None:
        """A line of cells, one for each token or entry."""
        for at, kind in enumerate(kinds):
            self.box(x + at * CELL + 1, y, CELL - 2, CELL - 2, kind)

    def curve(self, points: Sequence[tuple[float, float]], kind: str) -> None:
        """A line through points."""
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        self.parts.append(f'<polyline class="{kind}" points="{path}"/>')

    def arrow(self, x: float, y: float, to: float) -> None:
        """To the right, from x to another x."""
        self.curve([(x, y), (to, y)], "line")
        self.curve([(to - 6, y - 4), (to, y), (to - 6, y + 4)], "line")

    def legend(self, x: float, y: float, entries: Sequence[tuple[str, str]]) -> None:
        """What the colours mean."""
        for kind, words in entries:
            self.box(x, y - 11, 12, 12, kind)
            self.text(x + 18, y, words, "note")
            x += 38 + 6.4 * len(words)

    def __str__(self) -> str:
        """The file's text."""
        return "\n".join([self.head, *self.parts, "</svg>", ""])


def _choices(*, adaptive: bool) -> list[list[str]]:
    """What four heads keep of 24 tokens by a budget of 8: a sink, a window of 3, and the best of the others."""
    chance, tokens, budget = random.Random(5), 24, 8
    # Heads differ: the first looks at few places, the last at many.
    scores = [
        [chance.random() ** (4 - head) + head / 9 for _ in range(tokens)] for head in range(4)
    ]
    always = {0, *range(tokens - 3, tokens)}
    free = [
        (scores[head][at], head, at)
        for head in range(4)
        for at in range(tokens)
        if at not in always
    ]
    free.sort(reverse=True)
    if adaptive:
        won = {(head, at) for _, head, at in free[: 4 * (budget - len(always))]}
    else:
        own = [
            [each for each in free if each[1] == head][: budget - len(always)] for head in range(4)
        ]
        won = {(head, at) for each in own for _, head, at in each}
    kind = lambda head, at: "always" if at in always else "kept" if (head, at) in won else "gone"  # noqa: E731
    return [[kind(head, at) for at in range(tokens)] for head in range(4)]


def pool() -> Picture:
    """Two policies' choices, and the pools that hold them."""
    picture = Picture(
        760,
        430,
        "Entries of four heads, chosen by SnapKV and by AdaKV, and the pools that hold them",
    )
    grey = ("24 tokens of a prompt; grey ones", "are evicted, and their memory is freed.")
    won = ("Head 3 wins entries from heads 0 and 2.", "(AdaKV's floor per head is left out.)")
    for top, title, adaptive, said in (
        (28, "SnapKV(budget=8): equally many entries in every head", False, grey),
        (218, "AdaKV(budget=8): heads compete, the sum is the same", True, won),
    ):
        heads = _choices(adaptive=adaptive)
        picture.text(20, top, title, "title")
        for head, kinds in enumerate(heads):
            y = top + 16 + head * 19
            picture.text(20, y + 11, f"head {head}", "note")
            picture.cells(76, y, kinds)
            kept = sum(kind != "gone" for kind in kinds)
            picture.text(76 + 24 * CELL + 12, y + 11, f"keeps {kept}", "note")
        for line, words in enumerate(said):
            picture.text(500, top + 27 + 16 * line, words, "note")
        y, x = top + 122, 76.0
        picture.text(20, y + 11, "pool", "note")
        for head, kinds in enumerate(heads):
            rows = [kind for kind in kinds if kind != "gone"]
            picture.cells(x, y, rows)
            picture.curve(
                [(x + 1, y + 17), (x + 1, y + 21), (x + len(rows) * CELL - 1, y + 21)], "line"
            )
            picture.curve(
                [(x + len(rows) * CELL - 1, y + 21), (x + len(rows) * CELL - 1, y + 17)], "line"
            )
            picture.text(x + len(rows) * CELL / 2, y + 35, f"head {head}", "note", "middle")
            x += len(rows) * CELL + 8
        picture.box(x + 1, y, 8 * CELL - 2, CELL - 2, "room")
        picture.text(x + 4 * CELL, y + 35, "headroom", "note", "middle")
    picture.legend(
        76,
        414,
        [
            ("kept", "chosen by score"),
            ("always", "sink and window, always kept"),
            ("gone", "evicted"),
        ],
    )
    return picture


def parts() -> Picture:
    """The parts of a policy, in order."""
    picture = Picture(
        760, 250, "The parts of a policy, in the order in which the engine calls them"
    )
    picture.text(20, 28, "after the prompt, layer by layer", "title")
    boxes = [
        ("scorer", "a score for", "every entry"),
        ("layers, heads", "how many entries", "each keeps"),
        ("keep", "sinks, window,", "protected spans"),
        ("merge", "adds evicted entries", "to kept ones, or not"),
    ]
    for at, (name, first, second) in enumerate(boxes):
        x = 20 + at * 184
        picture.box(x, 44, 152, 70, "box", round_by=6)
        picture.text(x + 76, 66, name, "code", "middle")
        picture.text(x + 76, 86, first, "note", "middle")
        picture.text(x + 76, 102, second, "note", "middle")
        if at:
            picture.arrow(x - 30, 79, x - 3)
    picture.text(20, 148, "with each new token", "title")
    later = [
        ("read", "all entries, or what", "filter layers choose"),
        ("after: Append", "the cache grows", "by an entry"),
        ("after: Evict(rank)", "the lowest-ranked", "entry is evicted"),
        ("after: Recompress(every=n)", "after n tokens: score", "and select again"),
    ]
    for at, (name, first, second) in enumerate(later):
        x = 20 + at * 184
        picture.box(x, 164, 152 if at < 3 else 168, 70, "box", round_by=6)
        middle = x + (76 if at < 3 else 84)
        picture.text(middle, 186, name, "code", "middle")
        picture.text(middle, 206, first, "note", "middle")
        picture.text(middle, 222, second, "note", "middle")
        if at == 1:
            picture.arrow(x - 30, 199, x - 3)
        if at > 1:
            picture.text(x - 16, 203, "or", "note", "middle")
    return picture


def decoding() -> Picture:
    """Entries per kv head while decoding."""
    picture = Picture(760, 360, "Entries per kv head while 600 tokens are sampled, by policy")
    left, right, top, bottom = 70, 500, 50, 310

    def at(tokens, rows):
        return (
            left + (right - left) * tokens / 600,
            bottom - (bottom - top) * rows / 1700,
        )  # noqa: E731

    picture.text(20, 28, "entries per kv head after a prompt of 1,000 tokens, budget=256", "title")
    picture.curve([(left, top), (left, bottom), (right, bottom)], "line")
    for rows in (0, 256, 1000, 1600):
        x, y = at(0, rows)
        picture.text(x - 8, y + 4, f"{rows:,}", "note", "end")
    for tokens in (0, 200, 400, 600):
        picture.text(at(tokens, 0)[0], bottom + 18, str(tokens), "note", "middle")
    picture.text((left + right) / 2, bottom + 36, "tokens sampled", "note", "middle")
    saw = [(tokens, 256 + tokens % 64) for tokens in range(0, 601)]
    saw = [each for each in saw if (each[0] % 64) in (0, 63) or each[0] == 600]
    lines: list[tuple[str, list[tuple[int, int]], str, float]] = [
        ("e", [(0, 1000), (600, 1600)], "FullKV, and what OmniKV keeps", 0),
        ("d dashed", [(0, 512), (600, 1112)], "what OmniKV(budget=512) reads", 0),
        ("a", [(0, 256), (600, 856)], "SnapKV: appends", 0),
        ("c", saw, "SnapKV(every=64)", -7),
        ("b", [(0, 256), (600, 257)], "H2O: evicts one per token", 9),
    ]
    for kind, points, words, shift in lines:
        picture.curve([at(*each) for each in points], f"curve {kind}")
        picture.text(right + 12, at(*points[-1])[1] + 4 + shift, words, "note")
    return picture


def budgets() -> Picture:
    """How one sum spreads over layers and heads."""
    picture = Picture(
        760, 250, "The same number of entries, spread over layers and over heads in different ways"
    )
    spreads: list[tuple[str, str, list[float]]] = [
        ("UniformLayers", "layers", [256.0] * 8),
        ("LinearLayers", "layers", [436 - 360 * at / 7 for at in range(8)]),
        ("VarianceLayers", "layers", [390, 330, 180, 240, 210, 300, 150, 248]),
        ("AdaptiveHeads", "heads", [120, 420, 190, 310, 240, 96, 400, 272]),
    ]
    for at, (name, over, rows) in enumerate(spreads):
        x = 28 + at * 184
        picture.text(x, 32, name, "code")
        for index, each in enumerate(rows):
            height = each * 0.3
            picture.box(
                x + index * 18, 186 - height, 14, height, "kept" if over == "layers" else "new"
            )
        picture.curve([(x - 4, 186 - 256 * 0.3), (x + 148, 186 - 256 * 0.3)], "line dashed")
        picture.curve([(x - 4, 186), (x + 148, 186)], "line")
        picture.text(x, 204, f"{over} 0 to 7", "note")
    picture.text(
        28,
        234,
        "The dashed line is budget=256, the average, which every spread keeps exactly. A sketch: figures are made up.",
        "note",
    )
    return picture


PICTURES: dict[str, Callable[[], Picture]] = {
    "pool": pool,
    "parts": parts,
    "decoding": decoding,
    "budgets": budgets,
}


def main(argv: list[str] | None = None) -> int:
    """Write the pictures, or compare them.

    Args:
        argv: the arguments; those of the process if None.

    Returns:
        1 if a picture is not what would be written, else 0.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing")
    check, stale = parser.parse_args(argv).check, []
    for name, build in PICTURES.items():
        file, wanted = HERE / f"{name}.svg", str(build())
        if not check:
            file.write_text(wanted, encoding="utf-8")
        elif not file.exists() or file.read_text(encoding="utf-8") != wanted:
            stale.append(file.name)
    if stale:
        print(
            f"{', '.join(stale)}: not what docs/pictures/make_pictures.py makes; run it",
            file=sys.stderr,
        )
    return int(bool(stale))


if __name__ == "__main__":
    sys.exit(main())
