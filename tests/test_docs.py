"""What pages say of jaxkv is so: links lead somewhere, names exist, examples are Python, commands are taken."""

import ast
import importlib
import importlib.util
import re
import shlex
import tomllib
from pathlib import Path

import pytest
from cli_runs import read
from packaging.requirements import Requirement

import jaxkv
import jaxkv.evals
import jaxkv.policies
from jaxkv.checkpoints.__main__ import _build_parser as of_checkpoints
from jaxkv.cli import _build_parser as of_jaxkv
from jaxkv.cli.options import extract_policy_arguments
from jaxkv.policies.registry import POLICIES

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
TEXTS = {str(page.relative_to(ROOT)): page.read_text(encoding="utf-8") for page in PAGES}
KNOWN = {
    **vars(jaxkv.evals),
    **vars(jaxkv.policies),
    **{name: getattr(jaxkv, name) for name in dir(jaxkv)},
}
# Capitals between backticks that are no names of ours.
OTHERS = {"ValueError", "RuntimeError", "DIR", "SRC", "DST", "LICENSE", "WORD", "FILE"}


def loaded(name):
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


links = loaded("links")


def blocks_of(text, *kinds):
    return [
        code
        for kind, code in re.findall(r"^```([a-z ]*)\n(.*?)^```", text, flags=re.S | re.M)
        if kind in kinds
    ]


def test_every_link_leads_somewhere():
    assert links.main([]) == 0


@pytest.mark.parametrize(
    ("target", "fault"),
    [
        ("other.md#two-words-gguf", None),
        ("other.md#again-1", None),
        ("https://arxiv.org/abs/2404.14469", None),
        ("missing.md", "no such file"),
        ("other.md#three", "no such heading"),
        (".", "a folder"),
        ("https://nowhere", "no address"),
        ("htps://arxiv.org", "no address"),
    ],
)
def test_a_link_that_leads_nowhere_is_named(tmp_path, monkeypatch, target, fault):
    monkeypatch.setattr(links, "ROOT", tmp_path)
    monkeypatch.setattr(links, "PAGES", ("*.md",))
    (tmp_path / "other.md").write_text("# Two *words*: `GGUF`\n\n## Again\n\n## Again\n")
    page = tmp_path / "page.md"
    page.write_text(f"# Here\n\n`[code](nowhere.md)` and [a link]({target}).\n")
    assert [where for _, where in links.links_of(page.read_text())] == [target]
    found = links.fault_of(target, page)
    assert found is None if fault is None else fault in found
    assert links.main([]) == (fault is not None)


def test_an_address_that_none_can_be_is_a_fault_as_well():
    assert "Invalid IPv6" in links.fault_of("https://[::1", DOCS / "index.md")


def test_links_of_notebooks_and_pictures_are_followed(tmp_path):
    cell = (
        '{"cells": [{"cell_type": "markdown", "source": '
        '["![x](a.svg)"]}, {"cell_type": "code", "source": ["[a](b)"]}]}'
    )
    (tmp_path / "n.ipynb").write_text(cell)
    assert links.links_of(links.text_of(tmp_path / "n.ipynb")) == [(1, "a.svg")]


def test_every_policy_is_in_the_table():
    rows = re.findall(r"^\| `(\w+)` \|.*\|(.*)\|$", TEXTS["docs/policies.md"], flags=re.M)
    papers = {cls: paper for cls, paper in rows if cls in KNOWN}
    assert set(papers) == {cls.__name__ for cls in POLICIES.values()}
    assert all(f"{len(papers)} policies" in TEXTS[name] for name in ("README.md", "docs/index.md"))
    for policy, cls in POLICIES.items():
        identifier = re.findall(r"\d{4}\.\d{5}", cls.paper or "")
        assert all(each in papers[cls.__name__] for each in identifier), policy


@pytest.mark.parametrize("name", TEXTS)
def test_examples_are_python_and_name_what_exists(name):
    for code in blocks_of(TEXTS[name], "python", "python run", "python hosts"):
        for node in ast.walk(ast.parse(code)):
            if (
                isinstance(node, ast.Attribute)
                and isinstance(node.value, ast.Name)
                and node.value.id == "jaxkv"
            ):
                assert hasattr(jaxkv, node.attr), (name, node.attr)
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("jaxkv"):
                module = importlib.import_module(node.module)
                assert all(hasattr(module, each.name) for each in node.names), (
                    name,
                    ast.unparse(node),
                )


@pytest.mark.parametrize("name", TEXTS)
def test_commands_are_taken(name):
    lines = [
        line
        for code in blocks_of(TEXTS[name], "", "sh")
        for line in code.replace("\\\n", "").splitlines()
    ]
    for line in (line for line in lines if line.startswith(("jaxkv ", "python -m jaxkv"))):
        words = shlex.split(line, comments=True)
        if words[:3] == ["python", "-m", "jaxkv.checkpoints"]:
            of_checkpoints().parse_args(words[3:])
        if words[:1] == ["jaxkv"]:
            options = of_jaxkv().parse_args(words[1:])
            read(words[1:])
            if hasattr(options, "policy") and not vars(options).get("--compare"):
                extract_policy_arguments(options).build_policy()


# The page of renamed names has names that are no longer there.
@pytest.mark.parametrize("name", sorted({*TEXTS} - {"docs/changes.md"}))
def test_values_between_backticks_can_be_made(name):
    """`SnapKV(budget=256, every=64)` in a sentence or a line has fields that exist, and is not rejected."""
    # What is written from docstrings names what is beside them, too.
    written = TEXTS[name].partition("<!-- Written by docs/make_lists.py")[0]
    for code in re.findall(
        r"(?<!`)`([A-Z]\w*(?:\([^`]*\))?)`(?!`)", re.sub(r"```.*?```", "", written, flags=re.S)
    ):
        called, _, given = code.partition("(")
        if called in OTHERS or called.isupper() and not given:
            continue
        assert called in KNOWN, f"{name}: {code} is no name of jaxkv or jaxkv.policies"
        if given and "..." not in given and "=," not in given and "=)" not in given:
            eval(code, dict(KNOWN))
    for code in blocks_of(TEXTS[name], "python"):
        for line in ast.parse(code).body:
            called = (
                line.value
                if isinstance(line, ast.Expr) and isinstance(line.value, ast.Call)
                else None
            )
            if called and all(
                each.id in KNOWN for each in ast.walk(called) if isinstance(each, ast.Name)
            ):
                if isinstance(called.func, ast.Name):
                    eval(ast.unparse(called), dict(KNOWN))


def test_the_architecture_names_files_that_exist():
    """Paths without a folder of their own lie below jaxkv/, as the page says."""
    text = (DOCS / "architecture.md").read_text(encoding="utf-8")
    paths = set(re.findall(r"(?<![\w/.])((?:[\w-]+/)*[\w-]+\.py|(?:[\w-]+/)+)(?![\w/])", text))
    assert len(paths) > 50
    assert not [
        path for path in paths if not any((root / path).exists() for root in (ROOT, ROOT / "jaxkv"))
    ]


def test_figures_of_the_readme_are_those_of_their_pages():
    why = TEXTS["README.md"].partition("## Why\n")[2].partition("\n## ")[0]
    rows = [re.findall(r"[^|]+", line) for line in why.splitlines() if re.match(r"\| \w", line)]
    full, snapkv = ([row[at].strip() for row in rows[:3]] for at in (1, 2))
    found = [("gpu", "FullKV | 8 x", full), ("gpu", "SnapKV | 8 x", snapkv)]
    for name, *figures in rows[4:]:
        found.append(("which_policy", name.split(",")[0].strip(), list(map(str.strip, figures))))
    assert len(found) == 7 and [row[1].strip() for row in rows[3:4]] == ["5 %"]
    for page, begins, figures in found:
        lines = TEXTS[f"docs/{page}.md"].splitlines()
        lines = [line for line in lines if line.startswith(f"| {begins}")]
        assert any(all(each in line for each in figures) for line in lines), (begins, figures)


def test_the_extra_takes_what_is_pinned():
    pins = dict(
        re.findall(
            r"^([\w.-]+)==(\S+)$",
            (DOCS / "requirements.txt").read_text("utf-8").lower(),
            flags=re.M,
        )
    )
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"][
        "optional-dependencies"
    ]
    for requirement in map(Requirement, extras["docs"]):
        assert requirement.specifier.contains(pins[requirement.name])


def test_the_readme_is_short():
    assert len(TEXTS["README.md"].split()) <= 1300


def test_lists_of_policies_are_made_of_their_files(tmp_path, monkeypatch):
    """`make format` has nothing to write; what it writes follows the files, and nothing else."""
    lists = loaded("make_lists")
    assert lists.main(write=False) == []
    found = lists.found()
    assert found.keys() == set(lists.methods.__all__) and set(found.values()) == set(
        POLICIES.values()
    )
    for name in found:
        assert {name} <= set(jaxkv.__all__) and {name} <= set(jaxkv.policies.__all__)
    stale = tmp_path / "__init__.py"
    stale.write_text("")
    monkeypatch.setattr(lists, "INIT", stale)
    monkeypatch.setattr(lists, "ROOT", tmp_path)
    assert (
        lists.main() == ["__init__.py"]
        and "import SnapKV\n" in stale.read_text()
        and lists.main() == []
    )
