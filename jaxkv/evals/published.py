"""The tasks `longbench` and `infinitebench`: rows of JSONL files, as prompts cut to a model's length."""

import dataclasses
import functools
import json
import re
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from jaxkv._errors import invalid, require
from jaxkv.evals import metrics
from jaxkv.evals.question_tasks import QuestionTask
from jaxkv.evals.task import Sample, task
from jaxkv.evals.texts import json_lines, rows_of_file, shipped
from jaxkv.loading import LanguageModel

# Cut texts, joined and tokenized again, may take a few tokens more than their parts.
_SPARE = 16
_LEAST = 64


@functools.cache
def table(name: str) -> Mapping[str, Mapping[str, Any]]:
    """Dict {part name: its "prompt" template, "new_tokens" and "metric"} of a benchmark, read from a packaged file.

    Where they are true it has "raw" (few-shot examples, or code to be continued, which a chat template would disturb),
    "first_line" (models continue with another example: the answer is the first line), "choice" and "number" (kinds of
    answers), "first_label" (the official functions use the first label alone).
    """
    return json.loads(shipped(f"data/{name}.json"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredTask(QuestionTask):
    """Base of benchmarks read from files; each part has rows, and a prompt template and metric in its `table`.

    Attributes:
        data: folder with the official files; by default they are fetched from the hub.
        tasks: parts of the benchmark; by default all.
        count: samples of each part, from its beginning; 0 for all.
        longest: most tokens of a prompt; longer ones lose their middle; 0 for what the model's positions leave.
        new_tokens: tokens of an answer; 0 for the official number of each part.
        benchmark: name of the benchmark's `table`.
        repo: owner and name of the data set on the Hugging Face hub.
        file: file there of each part, whose name stands for "{name}"; an archive has them as `member`.
    """

    data: str | None = None
    tasks: tuple[str, ...] = ()
    count: int = 0
    longest: int = 0
    new_tokens: int = 0

    benchmark: ClassVar[str]
    repo: ClassVar[str]
    file: ClassVar[str]
    member: ClassVar[str] = ""

    def __post_init__(self):
        super().__post_init__()
        known = table(self.benchmark)
        for name in self.tasks:
            require(name in known, "tasks", name, f"choose among {', '.join(known)}")
        self.require_least(0, "count", "longest", "new_tokens")
        remedy = f"give {_LEAST} or more, of which half stay from either end, or 0"
        require(self.longest == 0 or self.longest >= _LEAST, "longest", self.longest, remedy)

    def samples(self, params: LanguageModel) -> Sequence[Sample]:
        """Make a list of samples of the benchmark's chosen parts: the first `count` rows of each file (0: all)."""
        # Missing files are reported before hours of tokenizing.
        rows = {name: self._rows(name) for name in self.tasks or table(self.benchmark)}
        made = []
        for name, mine in rows.items():
            for number, row in enumerate(mine):
                try:
                    made.append(self._sample(params, name, number, row))
                except (LookupError, TypeError) as error:
                    remedy = f"is it the official file ({error!r})?"
                    raise invalid("data", f"{name}, row {number}", remedy) from None
        return made

    def answers_of(self, name: str, row: Mapping[str, Any]) -> tuple[str, ...]:
        """Tuple of the right answers in a row of benchmark part `name`, as texts that the part's metric takes."""
        answers = row["answers"]
        if isinstance(answers, str):
            raise TypeError("answers are a text, not a list")
        return tuple(answers)

    def fields_of(self, name: str, row: Mapping[str, Any]) -> dict[str, str]:
        """Dict {field: text} for the prompt template of benchmark part `name`, from a row; without the context."""
        return {"question": row["input"], "input": row["input"]}

    def score(self, sample: Sample, prediction: str) -> float:
        """Score in [0, 1] by the official metric of the sample's part; the highest over its answers, if several."""
        part = table(self.benchmark)[sample.group]
        measure = getattr(metrics, part["metric"])
        if part.get("choice"):
            return measure(prediction, sample.answers)
        if part.get("first_line"):
            prediction = prediction.lstrip("\n").split("\n")[0]
        given = {"classes": sample.tags["classes"]} if part["metric"] == "one_class" else {}
        return max((measure(prediction, answer, **given) for answer in sample.answers), default=0.0)

    def _rows(self, name: str) -> list[dict[str, Any]]:
        """Rows of the part's file in the folder `data`, or from the hub; FileNotFoundError says what to put where."""
        if self.data is not None:
            path = Path(self.data).expanduser() / f"{name}.jsonl"
            return rows_of_file(path, ("context", "input"), self.count)
        from huggingface_hub import hf_hub_download

        file = self.file.format(name=name)
        try:
            path = Path(hf_hub_download(self.repo, file, repo_type="dataset"))
        # The hub's client lets through its own errors and those of whichever HTTP library it was built on.
        except Exception as error:
            raise FileNotFoundError(
                f"data=None: {name} could not be fetched from the hub ({type(error).__name__}): download "
                f"https://huggingface.co/datasets/{self.repo}, and give its folder with {name}.jsonl as data"
            ) from error
        if not self.member:
            return rows_of_file(path, ("context", "input"), self.count)
        with zipfile.ZipFile(path) as archive, archive.open(self.member.format(name=name)) as lines:
            return json_lines(lines, f"{path.name}, {name}", ("context", "input"), self.count)

    def _sample(
        self, params: LanguageModel, name: str, number: int, row: Mapping[str, Any]
    ) -> Sample:
        """Make the `Sample` of row `number` of a benchmark part, its prompt cut to the model's length."""
        part, fields = table(self.benchmark)[name], self.fields_of(name, row)
        # Texts of fields may contain braces.
        before, after = (
            re.sub(r"\{(\w+)\}", lambda field: fields[field[1]], text)
            for text in part["prompt"].split("{context}")
        )
        new, raw = self.new_tokens or part["new_tokens"], part.get("raw", False)
        context, question, length = _fitted(
            params, before + row["context"], after, new_tokens=new, longest=self.longest, raw=raw
        )
        classes = row.get("all_classes")
        return Sample(
            id=f"{name}-{number:03d}",
            group=name,
            context=context,
            question=question,
            answers=self.answers_of(name, row),
            new_tokens=new,
            raw=raw,
            tags={"prompt_tokens": length, **({"classes": tuple(classes)} if classes else {})},
        )


def _fitted(
    params: LanguageModel, before: str, after: str, *, new_tokens: int, longest: int, raw: bool
) -> tuple[str, str, int]:
    """Context text, question text, token count; cuts the middle of prompts over `longest`; ValueError if none can fit.

    `longest` is the most tokens of the prompt, 0 for what the model's positions leave beside `new_tokens`.
    """
    text = params.tokenizer
    around = "" if raw or not text.has_template else text.turns.opening + text.turns.closing
    room = params.config.max_positions - new_tokens - len(text.encode(around, bos=True))
    ids = text.encode(before + after, bos=True)
    if longest:
        remedy = f"the model's positions leave {room} beside {new_tokens} of the answer and the chat template"
        require(min(len(ids), longest) <= room, "longest", longest, f"{remedy}: give less, or 0")
    else:
        longest = room - _SPARE
        remedy = f"the model's {params.config.max_positions} positions leave no prompt beside them: draw fewer tokens"
        require(longest >= _LEAST, "new_tokens", new_tokens, remedy)
    if len(ids) <= longest:
        return before, after, len(ids)
    half = longest // 2
    head, tail = text.decode(ids[:half]), text.decode(ids[-half:])
    cut = max(len(tail) - len(after), 0)
    return head + tail[:cut], tail[cut:], 2 * half


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

    def fields_of(self, name: str, row: Mapping[str, Any]) -> dict[str, str]:
        """Dict {placeholder: text} for the prompt template from a row: question, options, call."""
        fields = super().fields_of(name, row)
        options = zip(metrics.LETTERS, row.get("options") or (), strict=False)
        fields |= {f"OPTION_{letter}": str(each) for letter, each in options}
        if name == "code_run":
            call, function = re.findall(r"((func_[0-9]+)\(\-?[0-9]+\))", row["input"])[0]
            fields |= {"func": function, "func_call": call}
        if name == "math_find":
            sought = re.findall(r"The .+ of", row["input"])[0].lower()[:-3]
            fields["prefix"] = f"What is {sought} in the following list?"
        return fields

    def answers_of(self, name: str, row: Mapping[str, Any]) -> tuple[str, ...]:
        """Tuple of a row's right answers as texts: numbers as JSON, a choice as option and letter."""
        right, part = row["answer"], table(self.benchmark)[name]
        several = right if isinstance(right, list) else [right]
        if part.get("choice") and len(several) != 2:
            several = [several[0], metrics.LETTERS[row["options"].index(several[0])]]
        if name == "math_calc":
            return (json.dumps(several[0] if isinstance(several[0], list) else several),)
        if part.get("number"):
            return (json.dumps(several[0]),)
        return tuple(str(each) for each in (several[:1] if part.get("first_label") else several))
