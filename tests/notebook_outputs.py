"""Runs notebooks as `notebooks/run.py` does, and compares the outputs with those that are stored."""

import base64
import json
import re
import struct
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parent.parent / "notebooks"
# The outputs of a cell with this tag differ from run to run, such as seconds: only their kinds are compared.
VARIES = "varies"
RELATIVE = 0.02
_NUMBER = re.compile(r"([-+]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?)")


def code_cells(path: Path) -> list[dict]:
    return [
        cell for cell in json.loads(path.read_text("utf-8"))["cells"] if cell["cell_type"] == "code"
    ]


def run(notebook: Path, out: Path) -> list[dict]:
    """Code cells of a notebook that ran in a process of its own, with the outputs of that run."""
    command = [sys.executable, FOLDER / "run.py", notebook, "--out", out]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    return code_cells(out)


def text_of(output: dict) -> str:
    return "".join(
        output["text"] if output["output_type"] == "stream" else output["data"]["text/plain"]
    )


def png_of(output: dict) -> bytes | None:
    text = output.get("data", {}).get("image/png")
    return None if text is None else base64.b64decode("".join(text))


def pixels(png: bytes) -> tuple[int, int]:
    """Width and height, which a PNG's first chunk begins with."""
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", png[16:24])


def kind_of(output: dict) -> tuple:
    """What two outputs of a cell have in common, whatever they say."""
    png = png_of(output)
    return (
        output["output_type"],
        output.get("name"),
        sorted(output.get("data", ())),
        png and pixels(png),
    )


def near(stored: str, fresh: str) -> bool:
    """Two printed numbers: whole ones are equal; others are within 2 % or within 1 of the last digit."""
    if "." not in stored or "." not in fresh:
        return stored == fresh
    one, other = (float(each.replace(",", "")) for each in (stored, fresh))
    digits, _, power = stored.partition("e")
    last = 10.0 ** (int(power or 0) - len(digits.partition(".")[2]))
    return abs(one - other) <= max(RELATIVE * abs(one), 1.001 * last)


def text_differs(stored: str, fresh: str) -> bool:
    """Texts are equal but for white space and numbers that are near."""
    # Columns are as wide as their numbers.
    ones, others = (_NUMBER.split(" ".join(text.split())) for text in (stored, fresh))
    if len(ones) != len(others) or ones[::2] != others[::2]:
        return True
    return not all(map(near, ones[1::2], others[1::2]))


def differences(stored: list[dict], fresh: list[dict]) -> list[str]:
    """Where the outputs of two runs of a notebook's code cells differ, as text for people."""
    found = []
    for number, (cell, again) in enumerate(zip(stored, fresh, strict=True), start=1):
        kinds, fresh_kinds = (
            [kind_of(output) for output in each["outputs"]] for each in (cell, again)
        )
        if kinds != fresh_kinds:
            found.append(f"code cell {number}: stored are {kinds}, a run gives {fresh_kinds}")
        elif VARIES not in cell["metadata"].get("tags", ()):
            pairs = [
                (text_of(one), text_of(other))
                for one, other in zip(cell["outputs"], again["outputs"], strict=True)
            ]
            found += [
                f"code cell {number}:\n{one}\na run gives:\n{other}"
                for one, other in pairs
                if text_differs(one, other)
            ]
    return found
