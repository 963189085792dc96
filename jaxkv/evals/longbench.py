"""The task `longbench`: 16 English data sets of long documents, with the official prompts, lengths and metrics."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxkv._errors import require
from jaxkv.evals import metrics
from jaxkv.evals.stored import StoredTask, table
from jaxkv.evals.task import Sample, task

# Few-shot examples or code to be continued, which a chat template would disturb.
_RAW = ("trec", "triviaqa", "samsum", "lcc", "repobench-p")
# Models continue with another example: the answer is the first line.
_FIRST_LINE = ("trec", "triviaqa", "samsum")


@task("longbench")
@dataclasses.dataclass(frozen=True, kw_only=True)
class LongBench(StoredTask):
    """Task LongBench (v1): question answering, summaries, few-shot learning, synthetic tasks and code, in English.

    A question-agnostic run keeps from the policy the text after the document in the official prompt, such as the
    question; the text before the document never names the question.

    Attributes:
        data: folder with the official files, such as narrativeqa.jsonl; by default they are fetched from the hub.
        tasks: data sets, such as ("hotpotqa", "lcc"); by default all 16.
        count: samples of each, from its beginning; 0 for all.
        longest: most tokens of a prompt; longer ones lose their middle; 0 for what the model's positions leave. The
            official figures have 3500 for models of 4096 positions, 7500 for 8192 and 31500 for 32768.
        new_tokens: tokens of an answer; 0 for the official number of each data set.
    """

    benchmark = "longbench"
    repo, file, member = "THUDM/LongBench", "data.zip", "data/{name}.jsonl"
    keys = ("input", "context", "answers", "all_classes")

    def raw(self, name: str) -> bool:
        """True if a data set's prompts get no chat template: the few-shot and code ones."""
        return name in _RAW

    def fields_of(self, name: str, row: Mapping[str, Any]) -> Mapping[str, str]:
        """Dict {"input": the row's question} for the prompt template."""
        return {"input": row["input"]}

    def answers_of(self, name: str, row: Mapping[str, Any]) -> tuple[str, ...]:
        """Tuple of all right answers of a row as texts; ValueError for a row of another format."""
        right, metric = row["answers"], table(self.benchmark)[name]["metric"]
        fits = isinstance(right, list) and bool(right)
        fits = fits and all(isinstance(each, str) for each in right)
        if metric == "paragraph":
            fits = fits and all(map(metrics.PARAGRAPH.search, right))
        if metric == "one_class":
            fits = fits and bool(row["all_classes"])
        require(fits, "data", right, f"no answers of {name}: is it the official file?")
        return tuple(right)

    def score(self, sample: Sample, prediction: str) -> float:
        """Highest score in [0, 1] over the right answers by the data set's metric; few-shot sets: of the first line."""
        metric = table(self.benchmark)[sample.group]["metric"]
        given = {"classes": sample.tags["classes"]} if metric == "one_class" else {}
        if sample.group in _FIRST_LINE:
            prediction = prediction.lstrip("\n").split("\n")[0]
        measure = getattr(metrics, metric)
        return max((measure(prediction, answer, **given) for answer in sample.answers), default=0.0)
