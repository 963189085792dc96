"""The policy's options: derived from the registered classes, whatever their fields."""

import dataclasses
import enum
import json
from typing import ClassVar

import cli_runs
import pytest
from cli_runs import refused

from jaxkv import D2O, H2O, TOVA, AdaKV, FullKV, KNorm, KVzip, Policy, PyramidKV, Quest, SnapKV, cli
from jaxkv.cli import options
from jaxkv.policies import (
    CriticalKV,
    EvictionMode,
    GroupReduce,
    LinearLayers,
    MaxPool,
    Merge,
    NoPool,
    OmniKV,
    QueryWeighting,
)
from jaxkv.policies.attended import Pooling
from jaxkv.policies.registry import POLICIES
from jaxkv.policies.unseen import PositionScores


class Colour(enum.Enum):
    """Of no use."""

    RED = "red"
    BLUE = "blue"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Throwaway(Policy):
    """A policy that is made up.

    Attributes:
        depth: how deep it goes,
            over two lines.
        quiet: whether it is 100% quiet.
        seed: of its own samples.

    References:
        None: of this.
    """

    budget: int | float | None = 64
    depth: int = 3
    share: float | None = None
    quiet: bool = True
    colour: Colour | str = Colour.RED
    steps: tuple[int, ...] | None = None
    spans: tuple[tuple[int, int], ...] = ()
    pooling: Pooling = MaxPool(3)
    seed: int = 0
    opaque: object = None

    paper: ClassVar[str] = "none"

    def build_policy_parts(self):
        return self.compose(scorer=PositionScores())


@pytest.fixture
def throwaway(monkeypatch):
    monkeypatch.setitem(POLICIES, "throwaway", Throwaway)


@pytest.fixture
def policy_of(monkeypatch):
    calls = cli_runs.answering(monkeypatch)

    def run(*arguments: str) -> Policy:
        assert cli.main(["generate", "--prompt", "x", *arguments]) == 0
        return calls[-1]["policy"]

    return run


def test_a_registered_class_has_its_options(throwaway, policy_of, capsys):
    given = (
        "--policy throwaway --budget 0.5 --depth 7 --share 1 --no-quiet --colour blue --steps 1 2"
    )
    given += " --spans 1:2 --spans=-4:-1 --pool-kernel 5 --policy-seed 9 --seed 1"
    expected = Throwaway(
        budget=0.5,
        depth=7,
        share=1.0,
        quiet=False,
        colour=Colour.BLUE,
        steps=(1, 2),
        spans=((1, 2), (-4, -1)),
        pooling=MaxPool(5),
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
    assert said == "Plan memory and speed on GPUs, present or not."
    words = " ".join(out.split())
    without = ", ".join(
        name
        for name, cls in POLICIES.items()
        if "--min-budget" not in options.list_policy_flags(cls)
    )
    assert (
        f'--min-budget TEXT all but {without}: "clamp" raises' in words
        and "--page N quest, rocketkv: entries per page" in words
    )


@pytest.mark.parametrize(
    ("arguments", "policy"),
    [
        ("", FullKV()),
        ("--policy SnapKV --group max", SnapKV(group=GroupReduce.MAX)),
        ("--policy snapkv --budget 1.0 --pool-kernel 1", SnapKV(budget=1.0, pooling=NoPool())),
        ("--policy knorm --every 64", KNorm(every=64)),
        ("--policy tova --per-head --mode prefill", TOVA(per_head=True, mode=EvictionMode.PREFILL)),
        ("--policy h2o --recent 0.25 --merge", H2O(recent=0.25, merge=Merge())),
        ("--policy d2o --no-merge", D2O(merge=None)),
        (
            "--policy criticalkv --base adakv --alpha 0.5 --budget 1_000 --epsilon 0",
            CriticalKV(base=AdaKV(budget=1000, alpha=0.5), epsilon=0.0),
        ),
        (
            "--policy adakv --base pyramidkv --beta 14 --protect 1:3 --protect=-9:-4",
            AdaKV(base=PyramidKV(layers=LinearLayers(beta=14.0), protect=((1, 3), (-9, -4)))),
        ),
        (
            "--policy omnikv --mem 0.3 --filters 1 3 --selector uniform --prefill-ratio 2",
            OmniKV(mem=0.3, filter_layers=(1, 3), selector=QueryWeighting.UNIFORM, prefill_ratio=2),
        ),
        (
            "--policy omnikv --filter-layers 1,3 --offload",
            OmniKV(filter_layers=(1, 3), offload=True),
        ),
        ("--policy quest --budget 64 --page 8", Quest(budget=64, page=8)),
        (
            "--policy kvzip --first what? --following= --closing=.",
            KVzip(first="what?", following="", closing="."),
        ),
        (
            "--policy adakv --base snapkv --window question",
            AdaKV(base=SnapKV(window="question")),
        ),
    ],
)
def test_options_make_the_policy(policy_of, arguments, policy):
    assert policy_of(*arguments.split()) == policy


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--policy snapkv --budget many", "--budget=many: not a number"),
        ("--policy snapkv --window many", "--window=many: "),
        (f"--policy snapkv --budget {'9' * 5000}", "--budget=999"),
        ("--policy snapkv --budget 16", "budget=16: below sinks + window"),
        ("--policy snapkv --window 2.5", "--window=2.5: not a whole number"),
        (f"--policy snapkv --window {2**63}", f"--window={2**63}"),
        ("--policy snapkv --protect 7", "--protect=7: not a span: use first:last+1"),
        ("--policy snapkv --group sum", "--group=sum: use one of mean, max"),
        ("--policy snapkv --pool-kernel 4", "kernel=4"),
        ("--policy h2o --recent nan", "--recent=nan: not finite: use a finite number"),
        ("--policy omnikv --filters 1 x", "--filter-layers=1 x: not a whole number"),
        ("--policy adakv --beta 20", "--beta=20: adakv over snapkv has no such option"),
        ("--policy adakv --base full", "it evicts nothing"),
        ("--policy omnikv --base snapkv", "--base='snapkv': omnikv supports no base"),
        ("--protect 1:2", "--protect=1:2: full has no such option"),
        ("--policy cam --no-merge", "--no-merge: cam always merges"),
        ("--policy adakv --base pyramid", "did you mean pyramidkv or pyramidinfer?"),
    ],
)
def test_what_a_policy_cannot_take_is_refused(capsys, monkeypatch, arguments, message):
    cli_runs.unloadable(monkeypatch)
    assert message in refused(capsys, "generate", "--prompt", "x", *arguments.split())
