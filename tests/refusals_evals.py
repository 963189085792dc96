"""Refusals of evaluations and analyses: of tasks' settings, of samples, runs and shards, of texts and figures."""

import dataclasses

import eval_models
import numpy as np
import tiny
from evaluating import POLICIES, Told, words
from looking import CONFIG, TEXTS
from refusing import calls, door
from test_analysis import CONFIG as DEEP
from test_analysis import a_map
from test_analysis_doors import POLICY, counted

import jaxkv
from jaxkv import D2O, OmniKV, Quest, SnapKV, StreamingLLM
from jaxkv.analysis import (
    Similarity,
    best_filters,
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
    task,
    two_stage,
    visible_attention,
)
from jaxkv.evals.infinitebench import InfiniteBench
from jaxkv.evals.longbench import LongBench
from jaxkv.evals.perplexity import Perplexity
from jaxkv.evals.turns import Turns
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

RUNS = [
    *door(
        "evaluate",
        evaluated,
        ({"task": "2stageret"}, "^task="),
        ({"batch": 0}, "^batch="),
        ({"shard": (2, 2)}, "^shard="),
        ({"shard": (0, 9)}, "^shard="),
        ({"policies": {}}, "^policies="),
        ({"policies": {"a\nb": jaxkv.FullKV()}}, "^policies="),
        ({"policies": ["full"]}, TypeError, "^policies="),
        ({"task": told("Silent", asks=False), "how": How(agnostic=True)}, "^agnostic="),
        ({"task": TWICE}, "^samples="),
    ),
    *door(
        "a seed of an evaluation", lambda seed: How(seed=seed), (-1, "^seed="), (2**32, "^seed=")
    ),
    *door(
        "a sample",
        lambda odd: Sample(id="0", group="g", **{"context": "w1", **odd}),
        ({"answers": "Paris"}, "^answers="),
        ({"context": ""}, "^context="),
        ({"tags": 3}, "^tags="),
        ({"new_tokens": 1.5}, "^new_tokens="),
        ({"raw": "no"}, "^raw="),
    ),
    *calls(
        "rows of names and budgets",
        (lambda: at_budgets(["snapkv"], [8]), "^snapkv@8: budget="),
        (lambda: at_budgets(["snapkv"]), "^budgets="),
    ),
    *calls("report", (lambda: jaxkv.report(None), TypeError, "^folder=")),
    *door("a name of a task", task, ("a b", "^name="), ("report", "^name=")),
    *door("an interval", interval, ([], "^scores="), ([2.0, 2.0], "^scores=")),
]

# --- tasks ------------------------------------------------------------------------------------------------------------

TASKS = [
    *door(
        "Ruler",
        lambda settings: Ruler(**settings).samples(model()),
        ({"tasks": ("niah",)}, "^tasks="),
        ({"tasks": ("vt", "vt")}, "^tasks="),
        ({"data": "x"}, "^data="),
        ({"lengths": ()}, "^lengths="),
        ({"lengths": (512, 512)}, "^lengths="),
        ({"count": 0}, "^count="),
        ({"seed": -1}, "^seed="),
        ({"wording": "tiny"}, "^wording="),
        ({"wording": "small", "haystack": "x.txt"}, "^haystack="),
        ({"lengths": (1 << 20,)}, "^lengths="),
        ({"lengths": (100,)}, "^length="),
        ({"tasks": ("qa_1",), "wording": "small", "data": "x"}, "^tasks="),
        ({"tasks": ("cwe",), "wording": "small", "lengths": (32768,)}, "^length="),
        ({"haystack": "nowhere.txt"}, FileNotFoundError, "^haystack="),
        ({"tasks": ("qa_1",)}, FileNotFoundError, "^data=.*https://rajpurkar.* as squad.json"),
        ({"tasks": ("qa_2",), "data": "."}, FileNotFoundError, "^data=.*hotpotqa.json"),
    ),
    *door(
        "Needle",
        lambda settings: Needle(**settings).samples(model()),
        ({"depths": ()}, "^depths="),
        ({"depths": (0.5, 1.5)}, "^depths="),
        ({"depths": (0.5, 0.5)}, "^depths="),
        ({"new_tokens": 0}, "^new_tokens="),
        ({"needle": " "}, "^needle="),
        ({"needle": "A stone.", "wording": "small"}, "^needle="),
        ({"needle": "A stone."}, "^question="),
    ),
    *door(
        "Visible",
        lambda settings: Visible(**settings),
        ({"count": 0}, "^count="),
        ({"steps": 0}, "^steps="),
    ),
    *door(
        "visible attention",
        lambda policy: visible_attention(tiny.tiny(CONFIG), policy, TEXTS[0][:-4], TEXTS[0][-4:]),
        (
            OmniKV(budget=12, filter_layers=(0,), base=SnapKV(budget=20, window=4)),
            "^policy=",
        ),
        (Quest(dense_layers=1), "^policy="),
    ),
    *calls(
        "visible attention",
        (
            lambda: visible_attention(tiny.tiny(CONFIG), SnapKV(budget=12, window=4), TEXTS[0], []),
            "^answer=",
        ),
    ),
    *calls(
        "LongBench and InfiniteBench",
        (lambda: LongBench(tasks=("lsht",)), "^tasks="),
        (lambda: LongBench(longest=1), "^longest="),
        (lambda: InfiniteBench(count=-1), "^count="),
    ),
    *calls(
        "Perplexity",
        (lambda: Perplexity(prefix=0), "^prefix="),
        (
            lambda: Perplexity(data="nowhere").samples(eval_models.speaking()),
            FileNotFoundError,
            "^data=",
        ),
    ),
    *door(
        "Turns",
        lambda settings: Turns(**settings).samples(eval_models.speaking()),
        ({"turns": 10}, "^turns="),
        ({"data": "none.jsonl"}, FileNotFoundError, "^data="),
        ({"judge": "gpt-4"}, "^judge="),
        ({"turns": 1}, "^turns="),
        ({"count": 0}, "^count="),
        ({"words": 0}, "^words="),
    ),
    *calls("Turns", (lambda: Turns().samples(tiny.tiny(tiny.TWO_LAYERS)), "^params=")),
    *calls(
        "TwoStage",
        (lambda: two_stage(0), "^count="),
        (lambda: TwoStage(sizes=(3, 2)), "^sizes="),
    ),
]

# --- analyses ---------------------------------------------------------------------------------------------------------

SMALL = tiny.shape(layers=2, kv_heads=2, group=2, dim=8)


def figures(of):
    """Of both texts, by a model of two layers."""
    run, options = of
    return run(tiny.tiny(SMALL), tiny.prompts(0, (40, 23)), **options)


def measured(of):
    """Of one text."""
    run, options = of
    given = {"texts": TEXTS[:1], "policies": [SnapKV()], "budgets": (32,), **options}
    return run(tiny.tiny(CONFIG), given.pop("texts"), **given)


def shown(of):
    """Likewise, of measures that take no policies."""
    run, options = of
    given = {"texts": TEXTS[:1], **options}
    return run(tiny.tiny(CONFIG), given.pop("texts"), **given)


ANALYSES = [
    *door(
        "budgets",
        lambda options: counted(**options),
        ({"budgets": 8}, "budgets=8: give a list"),
        ({"budgets": "8"}, "budgets='8': give a list"),
        ({"budgets": np.array(8)}, "budgets=8: give a list"),
        ({"texts": np.array(8)}, "texts=8: give a list"),
        ({"budgets": [8, np.int64(8)]}, "budgets=.8, 8.: two of them"),
        ({"policies": POLICY}, "policies=SnapKV"),
        ({"policies": SnapKV}, "policies=<class"),
        ({"policies": None}, "policies=None"),
        ({"policies": b"full"}, "policies=b'full'"),
        ({"policies": {1: POLICY}}, "policies=1: .* name"),
        ({"texts": None}, "texts=None"),
        ({"texts": b"abc"}, "texts=b'abc'"),
        ({"texts": TEXTS[0]}, "texts=.*each of them text or ids"),
        ({"texts": {"one": TEXTS[0]}}, "texts=.*each of them text or ids"),
        ({"following": -1}, "following=-1"),
        ({"following": True}, "following=True"),
        ({"following": 1.5}, "following=1.5"),
    ),
    *door(
        "an analysis",
        figures,
        ((density, {"least": "a"}), "least='a'"),
        ((density, {"bins": 2.5}), "bins=2.5"),
        ((density, {"bins": True}), "bins=True"),
        ((retained, {"shares": 0.5}), "shares=0.5"),
        ((retained, {"shares": [True]}), "shares=True"),
        ((retained, {"queries": 1.5}), "queries=1.5"),
        ((similarity, {"share": "a"}), "share='a'"),
        ((similarity, {"queries": 2.5}), "queries=2.5"),
        ((filter_layers, {"m": 1.0}), "m=1.0"),
        ((filter_layers, {"m": True}), "m=True"),
        ((filter_layers, {"m": 1, "adjacent": 0.5}), "adjacent=0.5"),
        ((filter_layers, {"m": 1, "most_whole": 1.5}), "most_whole=1.5"),
    ),
    *door(
        "an analysis of policies",
        measured,
        ((recall, {"policies": [OmniKV()]}), "policies='OmniKV.*jaxkv eval visible"),
        ((recall, {"policies": "snapkv"}), "policies='snapkv'"),
        ((recall, {"policies": []}), "policies="),
        ((recall, {"policies": ["snapkv", "snapkv"]}), "policies=.*the same"),
        ((recall, {"budgets": ()}), "budgets="),
        ((recall, {"budgets": (4,)}), "budget=4: below sinks"),
        (
            (recall, {"budgets": (0.5,), "policies": [SnapKV(min_budget="raise")]}),
            "budget=0.5: prompt 0",
        ),
        ((recall, {"following": 0}), "following=0"),
        ((recall, {"following": 60}), "texts='60 tokens'"),
        ((budgets, {"texts": []}), "texts="),
        ((eviction_loss, {"policies": [D2O()]}), "policies='D2O.*merges"),
        (
            (eviction_loss, {"policies": [StreamingLLM(rolling_positions=True)]}),
            "policies='StreamingLLM.*positions",
        ),
    ),
    *door(
        "an analysis of attention",
        shown,
        ((jaxkv.analysis.density, {"least": 1.0}), "least=1.0"),
        ((jaxkv.analysis.density, {"bins": 0}), "bins=0"),
        ((jaxkv.analysis.density, {"texts": [[1]]}), "texts='1 tokens'"),
        ((jaxkv.analysis.retained, {"shares": (0.0,)}), "shares="),
        ((jaxkv.analysis.retained, {"queries": 0}), "queries=0"),
    ),
    *calls(
        "an analysis of no model",
        (lambda: budgets("tiny", TEXTS, policies=[POLICY], budgets=[8]), TypeError, "jaxkv.load"),
        (lambda: density("tiny", TEXTS), TypeError, "jaxkv.load"),
    ),
    *door(
        "similarity",
        lambda options: similarity(tiny.tiny(DEEP), **{"texts": [[1, 2, 3]], **options}),
        ({"texts": []}, "texts"),
        ({"share": 0.0}, "share"),
        ({"queries": 0}, "queries"),
        ({"texts": [[1] * 600]}, "texts"),
    ),
    *calls("best_filters", (lambda: best_filters(a_map(8), m=3), "m=3")),
    *calls(
        "a picture",
        (lambda: counted().picture("a.png", budget=1), "budget=1: give an index from 0 to 0"),
        (
            lambda: density(tiny.tiny(SMALL), TEXTS[:1], bins=4).picture("a.png", layers=[9]),
            "layers=9",
        ),
        (
            lambda: Similarity(
                mass=np.eye(2, dtype=np.float32), share=0.1, queries=4, lengths=(9,)
            ).picture("a.png", filters=[2]),
            "filters=2: give an index from 0 to 1",
        ),
    ),
]

ROWS = [*RUNS, *TASKS, *ANALYSES]
