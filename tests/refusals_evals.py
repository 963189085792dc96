"""Rejections of evaluations and analyses: of tasks' settings, of samples, runs and shards, of texts and figures."""

import dataclasses

import eval_models
import tiny
from evaluating import POLICIES, Told, words
from looking import CONFIG, TEXTS
from refusing import calls, door

from jaxkv import D2O, OmniKV, Quest, SnapKV
from jaxkv.analysis import (
    budgets,
    density,
    eviction_loss,
    find_filter_layers,
    recall,
    retained,
    similarity,
)
from jaxkv.evals import (
    How,
    Needle,
    Ruler,
    TwoStage,
    VisibleAttentionTask,
    at_budgets,
    evaluate,
    measure_visible_attention,
)
from jaxkv.evals.perplexity import TextLossTask
from jaxkv.evals.published import InfiniteBench, LongBench
from jaxkv.evals.turns import ConversationTask
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

RUNS = [
    *door(
        "evaluate",
        evaluated,
        ({"task": "2stageret"}, "^task="),
        ({"batch": 0}, "^batch="),
        ({"shard": (0, 9)}, "^shard="),
        ({"policies": {}}, "^policies="),
        ({"task": told("Silent", asks=False), "how": How(agnostic=True)}, "^agnostic="),
        ({"task": TWICE}, "^samples="),
    ),
    *calls(
        "entries of names and budgets",
        (lambda: at_budgets(["snapkv"], [8]), "^budget="),
        (lambda: at_budgets(["snapkv"]), "^budgets="),
    ),
]

# --- tasks ------------------------------------------------------------------------------------------------------------

TASKS = [
    *door(
        "Ruler",
        lambda settings: Ruler(**settings).samples(model()),
        ({"data": "x"}, "^data="),
        ({"wording": "tiny"}, "^wording="),
        ({"lengths": (100,)}, "^length="),
        ({"tasks": ("qa_1",), "wording": "small", "data": "x"}, "^tasks="),
        ({"tasks": ("cwe",), "wording": "small", "lengths": (32768,)}, "^length="),
        ({"haystack": "nowhere.txt"}, FileNotFoundError, "^haystack="),
        ({"tasks": ("qa_1",)}, FileNotFoundError, "^data=.*https://rajpurkar.* as squad.json"),
    ),
    *door(
        "Needle",
        lambda settings: Needle(**settings).samples(model()),
        ({"depths": (0.5, 1.5)}, "^depths="),
        ({"new_tokens": 0}, "^new_tokens="),
    ),
    *door(
        "VisibleAttentionTask",
        lambda settings: VisibleAttentionTask(**settings),
        ({"count": 0}, "^count="),
        ({"steps": 0}, "^steps="),
    ),
    *door(
        "visible attention",
        lambda policy: measure_visible_attention(
            tiny.tiny(CONFIG), policy, TEXTS[0][:-4], TEXTS[0][-4:]
        ),
        (
            OmniKV(budget=12, filter_layers=(0,), base=SnapKV(budget=20, window=4)),
            "^policy=",
        ),
        (Quest(dense_layers=1), "^policy="),
    ),
    *calls(
        "LongBench and InfiniteBench",
        (lambda: LongBench(tasks=("lsht",)), "^tasks="),
        (lambda: LongBench(longest=1), "^longest="),
        (lambda: InfiniteBench(count=-1), "^count="),
    ),
    *calls(
        "TextLossTask",
        (lambda: TextLossTask(prefix=0), "^prefix="),
        (
            lambda: TextLossTask(data="nowhere").samples(eval_models.speaking()),
            FileNotFoundError,
            "^data=",
        ),
    ),
    *door(
        "ConversationTask",
        lambda settings: ConversationTask(**settings).samples(eval_models.speaking()),
        ({"turns": 1}, "^turns="),
        ({"count": 0}, "^count="),
    ),
    *door(
        "TwoStage",
        lambda settings: TwoStage(**settings),
        ({"sizes": (3, 2)}, "^sizes="),
        ({"count": 0}, "^count="),
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
        ({"budgets": [2]}, "budget="),
        ({"policies": [OmniKV()]}, "policies="),
        ({"following": 60}, "texts="),
        ({"run": recall, "following": 0}, "following="),
        ({"run": eviction_loss, "policies": [D2O()]}, "policies="),
    ),
    *door(
        "an analysis",
        looked,
        ((density, {"least": 1.5}), "least="),
        ((retained, {"shares": (0.0,)}), "shares="),
        ((similarity, {"share": "a"}), "share="),
        ((find_filter_layers, {"m": 3}), "m="),
    ),
    *calls(
        "an analysis of other models",
        (
            lambda: density(
                tiny.tiny(dataclasses.replace(CONFIG, kinds=(LayerSpec(sliding_window=8),))), TEXTS
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
