"""Refusals of evaluations and analyses: of tasks' settings, of samples, runs and shards, of texts and figures."""

import dataclasses
from pathlib import Path

import eval_models
import tiny
from evaluating import POLICIES, Told, Words, words
from looking import CONFIG, TEXTS
from refusing import calls, door

import jaxkv
from jaxkv import D2O, AdaKV, OmniKV, Quest, SnapKV, StreamingLLM
from jaxkv.analysis import (
    budgets,
    density,
    eviction_loss,
    filter_layers,
    recall,
    retained,
    similarity,
)
from jaxkv.evals import (
    How,
    Needle,
    Ruler,
    Sample,
    TwoStage,
    Visible,
    at_budgets,
    evaluate,
    interval,
    merge,
    task,
    two_stage,
    visible_attention,
)
from jaxkv.evals.infinitebench import InfiniteBench
from jaxkv.evals.longbench import LongBench
from jaxkv.evals.perplexity import Perplexity
from jaxkv.evals.turns import Turns
from jaxkv.models.values import LayerSpec
from tests.ruler_cases import model

# --- evaluations ------------------------------------------------------------------------------------------------------


def evaluated(options):
    return evaluate(
        **{"params": words(), "task": Told(), "policies": POLICIES, "out": "out"} | options
    )


def told(name, **said):
    """A task of one's own that says this."""
    return dataclasses.make_dataclass(name, [], bases=(Told,), namespace=said, frozen=True)()


TWICE = told("Twice", samples=lambda self, params: 2 * Told(count=1).samples(params))

FEW = StreamingLLM(budget=0.1, min_budget="raise")

RUNS = [
    *door(
        "evaluate",
        evaluated,
        ({"task": "2stageret"}, "did you mean 2stageretr"),
        ({"batch": 0}, "batch=0"),
        ({"batch": True}, "batch=True"),
        ({"shard": (2, 2)}, "shard=.*from 0 to n - 1"),
        ({"shard": (0, 9)}, "as many shards at most"),
        ({"policies": {}}, "at least one"),
        ({"policies": {"a\nb": jaxkv.FullKV()}}, "names of one line"),
        ({"out": "a\0b"}, "no name has this character"),
        ({"task": Words(), "policies": {"few": FEW}}, r"few: budget=0.1: prompt 0 \(22 tokens\)"),
        ({"task": told("Silent", asks=False), "how": How(agnostic=True)}, "silent asks nothing"),
        ({"task": TWICE}, "two samples of this id"),
    ),
    *door(
        "a seed of an evaluation",
        lambda seed: How(seed=seed),
        *(
            (seed, f"seed={seed}: give (an integer from 0 to|at most) 4294967295")
            for seed in (-1, 2**32, True)
        ),
    ),
    *door(
        "a sample",
        lambda odd: Sample(id="0", group="g", context="w1", **odd),
        ({"answers": "Paris"}, TypeError, "^answers=.*: give a tuple of texts"),
        ({"answers": ("Paris", 3)}, TypeError, "^answers=.*: give a tuple of texts"),
        ({"stop": "\n"}, TypeError, "^stop=.*: give a tuple of texts"),
        ({"stop": ("",)}, "^stop="),
        ({"tags": 3}, TypeError, "^tags=3: give a mapping"),
        ({"new_tokens": 1.5}, "^new_tokens="),
        ({"raw": "no"}, "^raw="),
    ),
    *calls(
        "rows of names and budgets",
        (lambda: at_budgets("full", [64]), TypeError, "names='full': give a list"),
        (lambda: at_budgets(["snapkv"], 64), TypeError, "budgets=64: give a list"),
        (lambda: at_budgets(["adavk"], [64]), "did you mean adakv"),
        (lambda: at_budgets(["snapkv"], [8]), "snapkv@8: budget=8: .*"),
        (lambda: at_budgets(["snapkv"]), "say which"),
    ),
    *calls("merge", (lambda: merge(Path("parts"), "out"), TypeError, "folders=.*give a list")),
    *calls("report", (lambda: jaxkv.report(None), TypeError, "folder=None")),
    *door(
        "a name of a task",
        task,
        *((name, "name=") for name in ("", "a b", "--x", "merge", "report", "a\n")),
        (3, TypeError, "name=3"),
    ),
    *door(
        "an interval",
        interval,
        *((scores, "scores=.*give a list") for scores in ([], 0.5, [[0.5]])),
        *(
            (scores, "scores=.*give shares=False")
            for scores in ([2.0, 2.0], [0.5, -0.1], [0.5, float("nan")])
        ),
    ),
]

# --- tasks ------------------------------------------------------------------------------------------------------------

TASKS = [
    *door(
        "Ruler",
        lambda settings: Ruler(**settings).samples(model()),
        ({"tasks": ("niah",)}, "tasks='niah': take some of niah_single_1, "),
        ({"tasks": ()}, r"tasks=\(\): name at least one"),
        ({"tasks": ("vt", "vt")}, "name each once"),
        ({"data": "x"}, "data='x': only qa_1 and qa_2 read files: name them among the tasks"),
        ({"lengths": ()}, r"lengths=\(\): name at least one"),
        ({"lengths": (512, 512)}, "name each once"),
        ({"count": 0}, "count=0: make at least 1"),
        ({"seed": -1}, "seed=-1"),
        ({"wording": "tiny"}, "wording='tiny': take 'official' or 'small'"),
        (
            {"wording": "small", "haystack": "x.txt"},
            "haystack='x.txt': the small wording makes its own",
        ),
        ({"lengths": (1 << 20,)}, "lengths=1048576: the model was made for 65536 tokens"),
        ({"lengths": (100,)}, "length=100: Needles takes [0-9]+ tokens at least"),
        (
            {"tasks": ("qa_1",), "wording": "small", "data": "x"},
            "the small wording has no documents",
        ),
        (
            {"tasks": ("cwe",), "wording": "small", "lengths": (32768,)},
            "the small wording has no more words",
        ),
        ({"haystack": "nowhere.txt"}, FileNotFoundError, "haystack='nowhere.txt': no such file"),
        (
            {"tasks": ("qa_1",)},
            FileNotFoundError,
            r"data=None: qa_1 .* put https://rajpurkar.* as squad.json",
        ),
        (
            {"tasks": ("qa_2",), "data": "."},
            FileNotFoundError,
            r"put http://curtis.*v1.json into .*hotpotqa.json",
        ),
    ),
    *door(
        "Needle",
        lambda settings: Needle(**settings).samples(model()),
        ({"depths": ()}, r"depths=\(\): name at least one"),
        ({"depths": (0.5, 1.5)}, "give shares from 0 to 1"),
        ({"depths": (0.5, 0.5)}, "name each once"),
        ({"lengths": (0,)}, "lengths=0: count tokens|lengths=.*count tokens"),
        ({"new_tokens": 0}, "new_tokens=0: draw at least 1"),
        ({"needle": " "}, "needle=' ': say it in words"),
        ({"needle": "A stone.", "wording": "small"}, "the small wording has its own"),
        (
            {"needle": "A stone."},
            r"question='What is the best .* belongs to another needle than 'A stone.': give",
        ),
        (
            {"needle": "A stone.", "question": "What?", "prefix": ""},
            "answer='eat a sandwich .* belongs to another",
        ),
        ({"lengths": (64,)}, "length=64: Story takes [0-9]+ tokens at least"),
        ({"lengths": (1 << 20,)}, "the model was made for 65536 tokens"),
    ),
    *door(
        "Visible",
        lambda settings: Visible(**settings),
        ({"count": 0}, "count=0"),
        ({"steps": 0}, "steps=0"),
        ({"seed": -1}, "^seed=-1: give 0 or more"),
    ),
    *calls(
        "visible attention",
        (
            lambda: visible_attention(
                tiny.tiny(CONFIG),
                OmniKV(budget=12, filter_layers=(0,), base=SnapKV(budget=20, window=4)),
                TEXTS[0][:-4],
                TEXTS[0][-4:],
            ),
            "policy='OmniKV'",
        ),
        (
            lambda: visible_attention(
                tiny.tiny(CONFIG), Quest(dense_layers=1), TEXTS[0][:-4], TEXTS[0][-4:]
            ),
            "policy='Quest': Quest chooses pages",
        ),
        (
            lambda: visible_attention(
                tiny.tiny(CONFIG), AdaKV(base=SnapKV(budget=12, window=4)), TEXTS[0][:-4], []
            ),
            r"answer=\[\]: give at least 1 token",
        ),
    ),
    *calls(
        "LongBench and InfiniteBench",
        (lambda: LongBench(tasks=("lsht",)), "tasks=.*lsht.*narrativeqa"),
        (lambda: LongBench(longest=1), "^longest=1"),
        (lambda: InfiniteBench(count=-1), "count=-1"),
    ),
    *calls(
        "Perplexity",
        (lambda: Perplexity(prefix=0), "prefix=0"),
        (
            lambda: Perplexity(data="nowhere").samples(eval_models.speaking()),
            FileNotFoundError,
            r"nowhere'.*folder of \.txt files",
        ),
    ),
    *door(
        "Turns",
        lambda settings: Turns(**settings).samples(eval_models.speaking()),
        ({"turns": 10}, "turns=10.*the model has 512 positions"),
        ({"data": "none.jsonl"}, FileNotFoundError, r"no such file; give a question\.jsonl"),
        ({"judge": "gpt-4"}, "judge="),
        ({"turns": 1}, "turns="),
        ({"count": 0}, "count="),
        ({"words": 0}, "words="),
    ),
    *calls("Turns", (lambda: Turns().samples(tiny.tiny(tiny.TWO_LAYERS)), "tokenizer")),
    *calls(
        "TwoStage",
        (lambda: two_stage(0), "count"),
        (lambda: TwoStage(sizes=(3, 2)), r"sizes=\(3, 2\): give dictionaries of at least 3"),
    ),
]

# --- analyses ---------------------------------------------------------------------------------------------------------


def looked(of):
    """An analysis of one text."""
    run, options = of
    given = {"texts": TEXTS[:1], **options}
    return run(tiny.tiny(CONFIG), given.pop("texts"), **given)


def counted(options):
    """An analysis of a policy."""
    run = options.pop("run", budgets)
    return looked((run, {"policies": [SnapKV(window=4)], "budgets": [8], **options}))


ANALYSES = [
    *door(
        "an analysis of policies",
        counted,
        ({"budgets": 8}, "budgets="),
        ({"budgets": "8"}, "budgets="),
        ({"budgets": ["8MB"]}, "budgets="),
        ({"budgets": [2]}, "budget="),
        ({"policies": SnapKV}, "policies="),
        ({"policies": []}, "policies="),
        ({"policies": [OmniKV()]}, "policies="),
        ({"following": True}, "following="),
        ({"following": 60}, "texts="),
        ({"run": recall, "following": 0}, "following="),
        ({"run": eviction_loss, "policies": [D2O()]}, "policies="),
        (
            {"run": eviction_loss, "policies": [StreamingLLM(rolling_positions=True)]},
            "policies=",
        ),
    ),
    *door(
        "an analysis",
        looked,
        ((density, {"least": 1.0}), "least="),
        ((density, {"bins": 0}), "bins="),
        ((density, {"texts": [[1]]}), "texts="),
        ((retained, {"shares": (0.0,)}), "shares="),
        ((retained, {"queries": 1.5}), "queries="),
        ((similarity, {"share": "a"}), "share="),
        ((similarity, {"queries": 0}), "queries="),
        ((similarity, {"texts": TEXTS[0]}), "texts="),
        ((similarity, {"texts": None}), "texts="),
        ((similarity, {"texts": [[1] * 600]}), "texts="),
        ((filter_layers, {"m": 1.0}), "m="),
        ((filter_layers, {"m": 3}), "m="),
        ((filter_layers, {"m": 1, "adjacent": 0.5}), "adjacent="),
        ((filter_layers, {"m": 1, "most_whole": 1.5}), "most_whole="),
    ),
    *calls(
        "an analysis of other models",
        (lambda: density("tiny", TEXTS), TypeError, "jaxkv.load"),
        (
            lambda: density(
                tiny.tiny(dataclasses.replace(CONFIG, kinds=(LayerSpec(window=8),))), TEXTS
            ),
            "params=",
        ),
        (
            lambda: density(tiny.tiny(dataclasses.replace(CONFIG, sink_logits=True)), TEXTS),
            "params=",
        ),
    ),
]

ROWS = [*RUNS, *TASKS, *ANALYSES]
