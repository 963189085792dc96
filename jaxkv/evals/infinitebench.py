"""The task `infinitebench`: twelve tasks above 100,000 tokens, with the official prompts, lengths and metrics."""

import dataclasses
import json
import re
from collections.abc import Mapping
from typing import Any

from jaxkv._errors import require
from jaxkv.evals import metrics
from jaxkv.evals.stored import StoredTask, table
from jaxkv.evals.task import Sample, task

_OPTIONS = "ABCD"
_CHOICES = ("code_debug", "longbook_choice_eng")
_NUMBERS = ("code_run", "math_find")
# For these the official functions use the first label alone.
_FIRST_LABEL = ("passkey", "number_string", "kv_retrieval", "longdialogue_qa_eng")


@task("infinitebench")
@dataclasses.dataclass(frozen=True, kw_only=True)
class InfiniteBench(StoredTask):
    """Task InfiniteBench: retrieval, books, dialogue, mathematics and code at lengths above 100,000 tokens.

    Prompts are the official ones for open models (those of YaRN-Mistral, Yi and ChatGLM3), which begin the answer and
    have no chat template. A question-agnostic run keeps from the policy the text after the document; the official
    prompts of math_find and code_run name the question before the document, too.

    Attributes:
        data: folder with the official files, such as passkey.jsonl; by default they are fetched from the hub.
        tasks: names of files, such as ("passkey", "kv_retrieval"); by default all 12.
        count: samples of each, from its beginning; 0 for all.
        longest: most tokens of a prompt; longer ones lose their middle; 0 for what the model's positions leave.
        new_tokens: tokens of an answer; 0 for the official number of each task, which is 30,000 of math_calc.
    """

    benchmark = "infinitebench"
    repo, file = "xinrongzhang2022/InfiniteBench", "{name}.jsonl"
    keys = ("context", "input", "answer")

    def fields_of(self, name: str, row: Mapping[str, Any]) -> Mapping[str, str]:
        """Dict {placeholder: text} for the prompt template from a row: question, options, call; checks the format."""
        asked, options = row["input"], row.get("options") or ()
        fields = {
            f"OPTION_{letter}": str(each) for letter, each in zip(_OPTIONS, options, strict=False)
        }
        fields |= {"question": asked, "input": asked}
        wanted = {"code_run": r"(func_[0-9]+)\(\-?[0-9]+\)", "math_find": r"The .+ of"}.get(
            name, ""
        )
        found = re.search(wanted, asked)
        fits = found is not None and (name not in _CHOICES or len(options) == len(_OPTIONS))
        require(fits, "data", asked, f"no question of {name}: is it the official file?")
        assert found is not None
        if name == "code_run":
            fields |= {"func": found[1], "func_call": found[0]}
        if name == "math_find":
            fields["prefix"] = f"What is {found[0].lower()[:-3]} in the following list?"
        return fields

    def answers_of(self, name: str, row: Mapping[str, Any]) -> tuple[str, ...]:
        """Tuple of a row's right answers as texts: numbers as JSON, a choice as option and letter; checks them."""
        right = row["answer"]
        several = right if isinstance(right, list) else [right]
        choice = name in _CHOICES and len(several) != 2
        fits = bool(several) and (not choice or several[0] in row["options"])
        require(fits, "data", right, f"no answer of {name}: is it the official file?")
        if choice:
            several = [several[0], _OPTIONS[row["options"].index(several[0])]]
        if name == "math_calc":
            return (json.dumps(several[0] if isinstance(several[0], list) else several),)
        if name in _NUMBERS:
            return (json.dumps(several[0]),)
        return tuple(str(each) for each in (several[:1] if name in _FIRST_LABEL else several))

    def score(self, sample: Sample, prediction: str) -> float:
        """Score in [0, 1] by the official metric of the sample's task; the highest over its answers, if several."""
        measure = getattr(metrics, table(self.benchmark)[sample.group]["metric"])
        if sample.group in _CHOICES:
            return measure(prediction, sample.answers)
        return max((measure(prediction, answer) for answer in sample.answers), default=0.0)
