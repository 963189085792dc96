"""The policy's options: derived from the registered classes, whatever their fields."""

import dataclasses
import enum
import json
from typing import ClassVar, Literal

import cli_runs
import pytest
from cli_runs import refused

from jaxkv import D2O, H2O, TOVA, AdaKV, Merge, Method, PyramidKV, Quest, SnapKV, StreamingLLM, cli
from jaxkv.cli import generating
from jaxkv.policies import (
    BrutalOffload,
    CaM,
    CriticalKV,
    GroupReduce,
    LinearLayers,
    MaxPool,
    Mode,
    NoPool,
    OmniKV,
    PyramidInfer,
    Selector,
)
from jaxkv.policies.attended import Pooling, PoolOrder
from jaxkv.policies.registry import POLICIES, documented
from jaxkv.policies.unseen import Position


class Colour(enum.Enum):
    """Of no use."""

    RED = "red"
    BLUE = "blue"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Throwaway(Method):
    """A policy that is made up.

    Attributes:
        depth: how deep it goes,
            over two lines.
        quiet: whether it is 100% quiet.
        seed: of its own draws.

    References:
        None: of this.
    """

    budget: int | float | None = 64
    depth: int = 3
    share: float | None = None
    quiet: bool = True
    colour: Colour | str = Colour.RED
    how: Literal["fast", "slow"] = "fast"
    steps: tuple[int, ...] | None = None
    spans: tuple[tuple[int, int], ...] = ()
    smoothing: Pooling = MaxPool(3)
    seed: int = 0
    opaque: object = None

    paper: ClassVar[str] = "none"

    def parts(self):
        return self.compose(scorer=Position())


@pytest.fixture
def throwaway(monkeypatch):
    monkeypatch.setitem(POLICIES, "throwaway", Throwaway)


@pytest.fixture
def policy_of(monkeypatch):
    calls = cli_runs.answering(monkeypatch)

    def run(*arguments: str) -> Method:
        assert cli.main(["generate", "--prompt", "x", *arguments]) == 0
        return calls[-1]["policy"]

    return run


def test_a_registered_class_has_its_options(throwaway, policy_of, capsys):
    given = "--policy throwaway --budget 0.5 --depth 7 --share 1 --no-quiet --colour blue --how slow --steps 1 2"
    given += " --spans 1:2 --spans=-4:-1 --smoothing-kernel 5 --policy-seed 9 --seed 1"
    expected = Throwaway(
        budget=0.5,
        depth=7,
        share=1.0,
        quiet=False,
        colour=Colour.BLUE,
        how="slow",
        steps=(1, 2),
        spans=((1, 2), (-4, -1)),
        smoothing=MaxPool(5),
        seed=9,
    )
    assert vars(policy_of(*given.split())) == vars(expected)
    capsys.readouterr()
    assert cli.main(["generate", "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "--depth N throwaway: how deep it goes, over two lines" in text
    assert "--quiet, --no-quiet throwaway: whether it is 100% quiet" in text
    assert "--colour {red,blue}" in text and "--opaque" not in text
    assert cli.main(["policies", "--json"]) == 0
    row = next(row for row in json.loads(capsys.readouterr().out) if row["name"] == "throwaway")
    assert {"--depth", "--no-quiet", "--opaque"} & set(row["options"]) == {"--depth"}
    assert "--depth=3: snapkv has no such option" in refused(
        capsys, "generate", "--prompt", "x", "--policy", "snapkv", "--depth", "3"
    )


def test_help_names_the_few_policies_without_an_option(capsys):
    """An option that most policies have names those without it; its sentence is on the second line of the help."""
    assert cli.main(["plan", "--help"]) == 0
    out = capsys.readouterr().out
    first, _, said, *_ = out.splitlines()
    assert first == "usage: jaxkv plan --model NAME --gpus KINDxN --context N [options]"
    assert said == "Say what fits on GPUs that need not be there."
    words = " ".join(out.split())
    without = ", ".join(
        name
        for name, cls in POLICIES.items()
        if "--min-budget" not in cli.policy_options.flags_of(cls)
    )
    assert (
        f'--min-budget WORD all but {without}: "clamp" raises' in words
        and "--page N quest: rows of a page" in words
    )


def test_every_simple_field_is_an_option():
    """What is left to Python: whole policies and parts with several numbers."""
    left: dict[str, set[str]] = {}
    for name, cls in POLICIES.items():
        fields = {option.field for option in cli.policy_options.options_of(cls).values()}
        for field in {each.name for each in dataclasses.fields(cls) if each.init} - fields:
            left.setdefault(field, set()).add(name)
    assert left.keys() == {
        "base",
        "safeguard",
        "allocation",
        "budget",
        "min_budget",
        "protect",
        "every",
        "merge",
    }
    assert left["base"] == {
        "adakv",
        "chunkkv",
        "criticalkv",
        "globalbudget",
        "lukv",
        "omnikv",
        "quest",
    }
    assert left["budget"] == {"full", "brutaloffload", "duoattention"}
    assert left["merge"] == {"full", "brutaloffload", "omnikv", "quest"}  # they keep everything


@pytest.mark.parametrize(
    ("arguments", "policy"),
    [
        (
            "--policy snapkv --group max --order first",
            SnapKV(group=GroupReduce.MAX, order=PoolOrder.FIRST),
        ),
        ("--policy streamingllm --slide", StreamingLLM(slide=True)),
        (
            "--policy streamingllm --rolling-positions --every 64",
            StreamingLLM(rolling_positions=True, every=64),
        ),
        ("--policy tova --per-head --mode prefill", TOVA(per_head=True, mode=Mode.PREFILL)),
        ("--policy h2o --recent 0.25 --merge", H2O(recent=0.25, merge=Merge())),
        ("--policy d2o --no-merge", D2O(merge=None)),
        ("--policy d2o --official", D2O(official=True)),
        ("--policy cam --start 0.2 --expected", CaM(start=0.2, expected=True)),
        ("--policy pyramidinfer --beta 4", PyramidInfer(allocation=LinearLayers(beta=4.0))),
        ("--policy snapkv --pool-kernel 1", SnapKV(pooling=NoPool())),
        (
            "--policy criticalkv --first 0.7 --epsilon 0",
            CriticalKV(base=SnapKV(), first=0.7, epsilon=0.0),
        ),
        (
            "--policy criticalkv --base adakv --alpha 0.5 --budget 1_000",
            CriticalKV(base=AdaKV(budget=1000, alpha=0.5)),
        ),
        ("--policy adakv --base pyramidkv --window 4", AdaKV(base=PyramidKV(window=4))),
        (
            "--policy omnikv --filter-layers 1 3 --adjacent 2",
            OmniKV(filter_layers=(1, 3), adjacent=2),
        ),
        (
            "--policy omnikv --filters 1 3 --selector uniform",
            OmniKV(filter_layers=(1, 3), selector=Selector.UNIFORM),
        ),
        (
            "--policy omnikv --prefill-ratio 2 --prefill-chunk 64",
            OmniKV(prefill_ratio=2, prefill_chunk=64),
        ),
        ("--policy omnikv --no-offload --include-generated", OmniKV(include_generated=True)),
        (
            "--policy quest --budget 64 --page 8 --dense-layers 1",
            Quest(budget=64, page=8, dense_layers=1),
        ),
        (
            "--policy brutaloffload --resident-layers 2 --ahead 0",
            BrutalOffload(resident_layers=2, ahead=0),
        ),
    ],
)
def test_options_make_the_policy(policy_of, arguments, policy):
    assert policy_of(*arguments.split()) == policy


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--policy snapkv --budget many", "--budget=many: give a number, such as 256 or 0.2"),
        ("--policy snapkv --budget 0x10", "--budget=0x10: give a number, such as 256 or 0.2"),
        ("--policy snapkv --budget nan", "--budget=nan: give a finite number"),
        ("--policy snapkv --budget 1e400", "--budget=1e400: give a finite number"),
        ("--policy snapkv --budget 99999999999", "--budget=99999999999: give at most 2147483647"),
        (f"--policy snapkv --budget {'9' * 5000}", "999...: give at most 2147483647"),
        ("--policy snapkv --window 2.5", "--window=2.5: give a whole number"),
        (f"--policy snapkv --window {2**63}", "give at most 2147483647"),
        (f"--policy snapkv --protect 0:{2**64}", f"--protect=0:{2**64}: give at most 2147483647"),
        ("--policy snapkv --protect 7", "--protect=7: give first and last + 1"),
        ("--policy snapkv --group sum", "--group=sum: use one of mean, max"),
        ("--policy h2o --mode slow", "--mode=slow: use one of streaming, prefill"),
        ("--policy h2o --recent nan", "--recent=nan: give a finite number"),
        ("--policy criticalkv --epsilon inf", "--epsilon=inf: give a finite number"),
        ("--policy omnikv --filters 1 x", "--filter-layers=1 x: give a whole number"),
        ("--policy omnikv --no-merge", "--no-merge: omnikv has no such option"),
        ("--policy omnikv --base snapkv", "--base='snapkv': omnikv is not built on a policy"),
        ("--policy brutaloffload --protect 1:2", "--protect=1:2: brutaloffload has no such option"),
        ("--policy cam --no-merge", "--no-merge: cam always folds"),
        ("--policy snapkv --min-budget other", "min_budget='other': give 'raise' or 'clamp'"),
        ("--policy snapvk", "did you mean snapkv?"),
        ("--policy adakv --base pyramid", "did you mean pyramidkv or pyramidinfer?"),
    ],
)
def test_what_a_policy_cannot_take_is_refused(capsys, monkeypatch, arguments, message):
    monkeypatch.setattr(generating, "load", lambda *_, **__: pytest.fail("loaded a model"))
    assert message in refused(capsys, "generate", "--prompt", "x", *arguments.split())


def test_policies_that_disagree_on_an_option_are_found(monkeypatch):
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Odd(Throwaway):
        window: bool = False

    monkeypatch.setitem(POLICIES, "odd", Odd)
    with pytest.raises(TypeError, match=r"--window: .*odd differ in the words behind it"):
        generating.add_generate_options(cli._parser().__class__())


def test_docstrings_say_what_fields_are():
    about = documented(TOVA)
    assert about["per_head"] == "let each kv head drop a row of its own."
    assert about["sinks"] == "first tokens that always stay, within the budget."
    assert about["every"].startswith(
        "compress again after this many more tokens, over prompt and answer in order"
    )
    assert documented(Throwaway).keys() == documented(Method).keys() | {"depth", "quiet", "seed"}
