"""Words: banned phrases, sentences of pages, docstrings that begin with a pronoun, names that are used twice."""

import ast
import collections
import io
import json
import re
import tokenize
from pathlib import Path

ROOT = Path(__file__).parents[1]
BANNED = [
    re.compile(line, re.IGNORECASE)
    for line in (ROOT / "docs" / "banned.txt").read_text("utf-8").splitlines()
    if line and line[0] != "#"
]
CODE = sorted([*(ROOT / "jaxkv").rglob("*.py"), *(ROOT / "pallas_kernels").rglob("*.py")])
PAGES = sorted([*(ROOT / "docs").glob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"])
# Places where a banned phrase is right: published prompts, quotations, names of other projects.
ALLOWED: dict[str, int] = {}
MOST_ALLOWED, MOST_WORDS = 30, 30
PRONOUNS = re.compile(r"(It|They|This|These|Those|That|What|Which|Who|There|Here|Of|As)\b")


def prose_of(path):
    """Docstrings, comments and string literals with a space of a module."""
    for token in tokenize.generate_tokens(io.StringIO(path.read_text("utf-8")).readline):
        if token.type == tokenize.COMMENT or (
            token.type == tokenize.STRING and " " in token.string
        ):
            # Code, what f-strings insert, and names of arguments are not prose.
            prose = re.sub(r"`[^`]*`|\{[^}]*\}", "", token.string)
            yield token.start[0], re.sub(r"(?m)^ +\w+(, \w+)*: ", "", prose)


def lines_of(path):
    """Lines of a page outside of code, tables and inline code."""
    text = re.sub(
        r"```.*?```", lambda m: "\n" * m[0].count("\n"), path.read_text("utf-8"), flags=re.S
    )
    for number, line in enumerate(text.splitlines(), start=1):
        yield number, re.sub(r"`[^`]*`|\]\([^)]*\)|https?://\S+", "", line)


def notebook_lines():
    """Lines of the notebooks' markdown."""
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        for cell in json.loads(path.read_text("utf-8"))["cells"]:
            if cell["cell_type"] == "markdown":
                yield from ((path, re.sub(r"`[^`]*`", "", line)) for line in cell["source"])


def test_no_banned_phrase():
    lines = [(path, line) for path in CODE for _, line in prose_of(path)]
    lines += [(path, line) for path in PAGES for _, line in lines_of(path)]
    lines += notebook_lines()
    found = collections.Counter(
        str(path.relative_to(ROOT))
        for path, line in lines
        for banned in BANNED
        for _ in banned.findall(line)
    )
    assert {name: count for name, count in found.items() if count > ALLOWED.get(name, 0)} == {}
    assert sum(ALLOWED.values()) <= MOST_ALLOWED


def test_sentences_of_pages_are_short():
    long = []
    for path in PAGES:
        text = " ".join(line for _, line in lines_of(path) if not line.startswith(("|", "#")))
        for sentence in re.split(r"(?<=[.!?:;])\s+|\s[-*] ", text):
            if len(re.findall(r"[A-Za-z]\w*", sentence)) > MOST_WORDS:
                long.append((path.name, sentence[:80]))
    assert long == []


def test_docstrings_begin_with_a_noun_or_a_verb():
    begun = []
    for path in CODE:
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.Module)):
                doc = ast.get_docstring(node) or ""
                if PRONOUNS.match(doc):
                    begun.append((path.name, doc[:60]))
    assert begun == []


def test_modules_and_public_classes_have_names_of_their_own():
    own = [path for path in CODE if path.is_relative_to(ROOT / "jaxkv")]
    modules = collections.Counter(path.stem for path in own if path.stem[:2] != "__")
    classes = collections.Counter(
        node.name
        for path in own
        for node in ast.parse(path.read_text("utf-8")).body
        if isinstance(node, ast.ClassDef) and node.name[0] != "_"
    )
    assert [name for name, count in (modules + classes).items() if count > 1] == []
