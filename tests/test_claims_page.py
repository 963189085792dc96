"""docs/claims.md has every row once, says how each stands, and names tests, files and commands that exist."""

import ast
import re
import shlex
from pathlib import Path

import pytest
from cli_runs import read

TESTS = Path(__file__).parent
ROOT = TESTS.parent
PAGE = (ROOT / "docs" / "claims.md").read_text("utf-8")
ROWS = {
    row: cells
    for row, *cells in re.findall(
        r"^\| ([A-Z]-\d+) \| (.*?) \| (.*?) \| (.*) \|$", PAGE, flags=re.M
    )
}
PAPERS = {"P": 12, "A": 13, "D": 14, "O": 16}


def named_in(text):
    return re.findall(r"`(test_\w+\.py)::(test_\w+)`", text)


def functions(name):
    tree = ast.parse((TESTS / name).read_text("utf-8"))
    return [
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    ]


def test_every_row_is_there_once():
    listed = re.findall(r"^\| ([A-Z]-\d+) \|", PAGE, flags=re.M)
    assert (
        listed
        == list(ROWS)
        == [f"{paper}-{row}" for paper, rows in PAPERS.items() for row in range(1, rows + 1)]
    )


@pytest.mark.parametrize("row", ROWS)
def test_what_is_reproduced_is_known_by_tests(row):
    _, standing, known = ROWS[row]
    named = named_in(known)
    assert all(test in functions(file) for file, test in named)
    assert named or "reproduced" not in standing


def test_every_test_of_a_claim_is_named_in_its_row():
    for test in functions("test_claims.py"):
        paper, number = re.match(r"test_([pado])(\d+)_", test).groups()
        assert ("test_claims.py", test) in named_in(ROWS[f"{paper.upper()}-{number}"][2])


def test_commands_exist():
    commands = [shlex.split(each) for each in re.findall(r"`((?:jaxkv|python -m) [^`]+)`", PAGE)]
    assert len(commands) > 20
    for words in commands:
        if words[0] == "python":
            file = words[2].replace(".", "/")
            assert any((ROOT / each).is_file() for each in (f"{file}.py", f"{file}/__main__.py")), (
                words
            )
        else:
            read(words[1:])
