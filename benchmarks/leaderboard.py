"""Leaderboard: every policy at five shares of the cache's bytes, by task, with intervals.

    python -m benchmarks.leaderboard                       all cells, some hours; ended half-way, it goes on
    python -m benchmarks.leaderboard --only long --count 2 --out few.json
    python -m benchmarks.leaderboard --page                the page alone, from what there is

Settings are the tiny model on RULER with the question unseen and seen, the tiny model on long answers, whose tokens are
read one by one as if sampled, and on SmolLM2 ten policies (needles, question unseen) and twelve (loss). A share
counts bytes of entries in 16 bits, so that a quantised store holds more entries. Windows are at most half of a budget.
"""

import argparse
import dataclasses
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import jax
import jinja2
import numpy as np

import jaxkv
from benchmarks import record
from benchmarks.long_answers import LongAnswers
from jaxkv.evals import EvaluationTask, How, Ruler, SampleOutcome, TextLossTask
from jaxkv.evals.needle import Needle
from jaxkv.evals.results import compute_confidence_interval
from jaxkv.machine.compilation import enable_compilation_cache
from jaxkv.policies.policy import Policy

# Those that tell policies apart come first.
BUDGETS = (0.1, 0.05, 0.25, 0.02, 0.5)
LENGTH = 1024
# Those that the tiny model can do.
TASKS = (
    "niah_single_1",
    "niah_single_2",
    "niah_single_3",
    "niah_multikey_1",
    "niah_multikey_2",
    "niah_multivalue",
    "niah_multiquery",
    "vt",
)
# Entries of the 16-bit store that take the bytes of one in the quantised store, at the tiny model's head size of 64.
STORES = {"int8": 1.83, "int4": 3.0}
# Tokens between two compressions of a long answer; a cache holds a budget with them.
EVERY = 16
FULL = "FullKV"
REJECTED = "rejected"
Interval = dict[str, float]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """One column of the leaderboard.

    Attributes:
        title: heading.
        model: name of the model.
        task: makes and scores the samples.
        how: whether the question is seen.
        batch: samples at once; those of a task have equal shapes, and share compiled programs.
        only: policies to run; all if empty.
        decoding: policies compress what they read one by one, too.
    """

    title: str
    model: str
    task: EvaluationTask
    how: How = How()
    batch: int
    only: tuple[str, ...] = ()
    decoding: bool = False


def settings(count: int, seed: int) -> dict[str, Setting]:
    """All settings by name, with so many samples per task."""
    ruler = Ruler(tasks=TASKS, lengths=(LENGTH,), wording="small", count=count, seed=seed)
    tiny = {"model": "tiny-retrieval", "task": ruler, "batch": count}
    smol = {"model": "smollm2-135m-instruct", "batch": 8}
    return {
        "unseen": Setting(title="RULER, question unseen", how=How(agnostic=True), **tiny),
        "seen": Setting(title="RULER, question seen", **tiny),
        "long": Setting(
            title="Long answers",
            model="tiny-retrieval",
            task=LongAnswers(
                tasks=("niah_single_2", "niah_multikey_1", "niah_multiquery", "vt"),
                lengths=(LENGTH,),
                wording="small",
                count=2 * count,
                seed=seed,
            ),
            decoding=True,
            batch=4 * count,
        ),
        "needles": Setting(
            title="SmolLM2, needles, question unseen",
            how=How(agnostic=True),
            only=SOME,
            task=Needle(
                lengths=(LENGTH,), depths=(0.2, 0.4, 0.6, 0.8), count=max(1, count // 2), seed=seed
            ),
            **smol,
        ),
        "loss": Setting(
            title="SmolLM2, loss over the full cache's",
            task=TextLossTask(prefix=LENGTH, tokens=128, count=8),
            only=(*SOME, "KVzip", "Refit over KVzip+"),
            **smol,
        ),
    }


SOME = (
    "StreamingLLM",
    "SnapKV",
    "AdaKV",
    "PyramidKV",
    "H2O",
    "D2O",
    "KVzip+",
    "KeyDiff",
    "Compactor",
    "LayerDefensiveKV",
)


def policies(entries: int, **fields: Any) -> dict[str, Policy | str]:
    """All policies that need no file made for the model, at so many entries per kv head, with these fields."""
    fields |= {"budget": entries}
    # The usual window is 32; at most half of a budget, a power of two.
    watched = fields | {"window": min(32, 1 << (entries // 2).bit_length() - 1)}
    snap = jaxkv.SnapKV(**watched)
    expected = jaxkv.ExpectedAttention(**fields, epsilon=0.01)
    plain = (
        *(jaxkv.StreamingLLM, jaxkv.H2O, jaxkv.RoCo, jaxkv.TOVA, jaxkv.D2O, jaxkv.PyramidKV),
        *(jaxkv.KeyDiff, jaxkv.QFilters, jaxkv.LagKV, jaxkv.CurDKV, jaxkv.CAPKV, jaxkv.RKV),
        *(jaxkv.TriAttention, jaxkv.Compactor, jaxkv.KVzip, jaxkv.KVGrad, jaxkv.OmniKV),
        *(jaxkv.Quest, jaxkv.RocketKV, jaxkv.LocalWindow, jaxkv.KNorm, jaxkv.RandomKV),
        jaxkv.ExpectedAttention,
    )
    with_window = (
        *(jaxkv.SnapKV, jaxkv.CAKE, jaxkv.CaM, jaxkv.PyramidInfer, jaxkv.DefensiveKV),
        *(jaxkv.LayerDefensiveKV, jaxkv.DropKV),
    )
    over = (jaxkv.AdaKV, jaxkv.CriticalKV, jaxkv.ChunkKV, jaxkv.GlobalBudget, jaxkv.Refit)
    found: dict[str, Callable[[], Policy]] = {
        **{cls.__name__: lambda cls=cls: cls(**fields) for cls in plain},
        **{cls.__name__: lambda cls=cls: cls(**watched) for cls in with_window},
        **{cls.__name__: lambda cls=cls: cls(base=snap) for cls in over},
        "SimLayerKV": lambda: jaxkv.SimLayerKV(**watched, recent=max(4, entries // 4)),
        "KVzip+": lambda: jaxkv.KVzip(**fields, weighted=True),
        "Refit over KVzip+": lambda: jaxkv.Refit(base=jaxkv.KVzip(**fields, weighted=True)),
        "KVzip, each layer": lambda: jaxkv.KVzip(**fields, over="layer"),
        "AdaKV over ExpectedAttention": lambda: jaxkv.AdaKV(base=expected),
        "CriticalKV over KeyDiff": lambda: jaxkv.CriticalKV(base=jaxkv.KeyDiff(**fields)),
    }
    for store, fold in STORES.items():
        more = fields | {"budget": int(entries * fold), "store": store}
        found[f"SnapKV, {store}"] = lambda more=more: jaxkv.SnapKV(**watched | more)
        found[f"KVzip, {store}"] = lambda more=more: jaxkv.KVzip(**more)
    return {name: _made(make) for name, make in found.items()}


def _made(make: Callable[[], Policy]) -> Policy | str:
    """A policy, or why its class rejects the budget."""
    try:
        return make()
    except ValueError as error:
        return str(error)


def rows(setting: Setting, wanted: Collection[str]) -> dict[str, Policy | str]:
    """Those wanted of all policies, or why there is none, by the title of their cell; by default the setting's."""
    only = wanted or setting.only
    found: dict[str, Policy | str] = {FULL: jaxkv.FullKV()}
    for share in BUDGETS:
        entries = round(share * LENGTH)
        made = policies(entries)
        if setting.decoding:
            made = while_decoding(made, entries)
        if "Auto" in wanted:
            question = "later" if setting.how.agnostic else "seen"
            answers = "long" if setting.decoding else "short"
            made["Auto"] = jaxkv.Auto(budget=share, question=question, answers=answers)
        found |= {
            f"{name} @ {share}": policy for name, policy in made.items() if not only or name in only
        }
    return found


def while_decoding(made: Mapping[str, Policy | str], entries: int) -> dict[str, Policy | str]:
    """Policies that compress what comes one by one: those that evict at every token, the others with `every`."""
    few = f"fewer than {2 * EVERY} entries, with {EVERY} between two compressions"
    # Tokens between two compressions are part of the bytes.
    less = policies(entries - EVERY, every=EVERY) if entries > 2 * EVERY else {}
    return {
        name: policy
        if isinstance(policy, Policy) and policy.composed.evicts_while_decoding
        else less.get(name, few)
        for name, policy in made.items()
    }


def run(params: jaxkv.LanguageModel, setting: Setting, policy: Policy | str) -> dict[str, Any]:
    """One cell: scores of all samples, groups and bytes, or why the policy rejects the setting."""
    if isinstance(policy, str):
        return {REJECTED: policy}
    samples = setting.task.samples(params)
    found: list[SampleOutcome] = []
    try:
        for first in range(0, len(samples), setting.batch):
            how = dataclasses.replace(setting.how, seed=first)
            found += setting.task.run(params, policy, samples[first : first + setting.batch], how)
    except ValueError as error:
        return {REJECTED: str(error)}
    # As text: a line of the file, not one for each sample.
    return {
        "scores": " ".join(f"{each.score:.5g}" for each in found),
        "megabytes": round(sum(each.nbytes or 0 for each in found) / len(found) / 1e6, 4),
    }


def interval(task: EvaluationTask, cell: Mapping[str, Any], full: Mapping[str, Any]) -> Interval:
    """Mean of a cell's scores in % and its 95 % interval; of losses, by how much they exceed the full cache's."""
    scores = np.array(cell["scores"].split(), float)
    percent = task.unit == "%"
    if not percent:
        scores -= np.array(full["scores"].split(), float)
    low, high = compute_confidence_interval(scores, (0, 1) if percent else None)
    folds = 100 if percent else 1
    return {"mean": folds * float(scores.mean()), "low": folds * low, "high": folds * high}


def write_page(results: Mapping[str, Any], out: Path) -> None:
    """Write the page, which sorts and filters by itself, and Markdown's table of its means."""
    lines = []
    seconds = 0.0
    for name, setting in settings(1, 0).items():
        cells = results["cells"].get(name, {})
        seconds += sum(cell.get("seconds", 0) for cell in cells.values())
        if FULL not in cells:
            continue
        full = cells[FULL]
        digits = 1 if setting.task.unit == "%" else 3
        for title, cell in cells.items():
            policy, _, share = title.partition(" @ ")
            line = {"setting": setting.title, "policy": policy, "share": 100 * float(share or 1)}
            if REJECTED in cell:
                lines.append(line | {"rejected": cell[REJECTED]})
                continue
            found = interval(setting.task, cell, full)
            # A quantised store's bytes are held against 16 bits.
            wide = 2 if ", int" in policy else 1
            measured = 100 * wide * cell["megabytes"] / full["megabytes"]
            lines.append(line | found | {"bytes": measured, "digits": digits})
    template = Path(__file__).parent / "data" / "leaderboard.html.jinja"
    page = jinja2.Environment(autoescape=True).from_string(template.read_text("utf-8"))
    known = {"machine": results.get("machine", {}), "settings": results["settings"]}
    whole = page.render(lines=lines, hours=seconds / 3600, **known)
    out.with_suffix(".html").write_text(whole, "utf-8")


def main() -> None:
    """Runs what is missing, saves and writes the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=10, help="samples per task")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", help="one setting, by name")
    parser.add_argument("--policies", help="some of all policies, by name, separated by ';'")
    parser.add_argument("--page", action="store_true")
    parser.add_argument("--out", type=Path, default=record.RESULTS / "leaderboard.json")
    options = parser.parse_args()
    enable_compilation_cache()
    results = record.resume(
        options.out, {"count": options.count, "seed": options.seed, "length": LENGTH}
    )
    every = results.setdefault("cells", {})
    for name, setting in settings(options.count, options.seed).items():
        if options.page or options.only not in (None, name):
            continue
        params = jaxkv.load(setting.model)
        cells = every.setdefault(name, {})
        wanted = options.policies.split(";") if options.policies else ()
        for title, policy in rows(setting, wanted).items():
            if title in cells:
                continue
            start = time.perf_counter()
            cells[title] = run(params, setting, policy)
            cells[title]["seconds"] = round(time.perf_counter() - start, 1)
            results["machine"] = record.machine()
            record.save(options.out, results)
            shown = cells[title].get(REJECTED)
            shown = shown or interval(setting.task, cells[title], cells[FULL])
            print(f"{name:8s} {title:40s} {shown}", flush=True)
            # A process may have 65,530 mappings; each program takes some.
            jax.clear_caches()
    write_page(results, options.out)


if __name__ == "__main__":
    main()
