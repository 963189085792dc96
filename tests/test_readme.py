"""The README's example: one compressed document, three questions, three right answers, which the page shows."""

import ast
import re
from pathlib import Path

import pytest
import running

import jaxkv
from jaxkv.cache import ConversationState

pytestmark = pytest.mark.real

ROOT = Path(__file__).parent.parent
# In place of the README's own policy; None for that one.
POLICY = None
ANSWERS = ("Margaret Okafor", "212", "Velden")
TOKENS = range(1450, 1551)


def blocks():
    """The README's Python, block by block."""
    return re.findall(
        r"^```python\n(.*?)^```", (ROOT / "README.md").read_text("utf-8"), flags=re.S | re.M
    )


def asking():
    """The block that compresses once and asks many, as a tree, and the policy in it."""
    (block,) = (each for each in blocks() if "jaxkv.prefill(" in each)
    tree = ast.parse(block)
    calls = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "jaxkv.prefill"
    ]
    (policy,) = (given for call in calls for given in call.keywords if given.arg == "policy")
    return tree, policy


def test_the_report_is_as_long_as_said():
    data = ROOT / "benchmarks" / "data"
    text = running.smollm2().text
    count = len(text.encode((data / "report.txt").read_text("utf-8"), bos=False))
    assert count in TOKENS
    for page in (ROOT / "README.md", data / "README.md"):
        assert f"{count:,} tokens" in page.read_text("utf-8"), page


# The snippet opens a file in one line, as snippets do.
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_three_of_three_are_right(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = running.smollm2()
    monkeypatch.setattr(jaxkv, "load", lambda name: model)
    (tmp_path / "benchmarks").symlink_to(ROOT / "benchmarks")
    (tree, policy), said = asking(), []
    names = {"print": said.append, "POLICY": POLICY}
    if POLICY is not None:
        policy.value = ast.Name("POLICY", ast.Load())
    exec(compile(ast.fix_missing_locations(tree), "README.md", "exec"), names)
    assert len(said) == len(ANSWERS) and all(map(str.__contains__, said, ANSWERS)), said
    assert names["cache"].turn is ConversationState.USER, "loaded as it was saved"
    (shown,) = re.findall(
        r"^```text\n(.*?)^```", (ROOT / "README.md").read_text("utf-8"), flags=re.S | re.M
    )
    assert all(map(str.__contains__, shown.splitlines(), ANSWERS))
