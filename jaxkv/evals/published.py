"""The tasks `longbench` and `infinitebench`: rows of JSONL files as prompts, truncated to a model's length."""

import functools
import json
import re
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from jaxkv._dataclasses import frozen_dataclass
from jaxkv._errors import build_value_error, require
from jaxkv.evals import metrics
from jaxkv.evals.question_tasks import QuestionTask
from jaxkv.evals.task import TaskSample, task
from jaxkv.evals.texts import parse_json_lines, read_json_lines, read_packaged_file
from jaxkv.loading import LanguageModel

# Truncated texts, joined and tokenized again, may have a few tokens more than their parts.
_SPARE = 16
_LEAST = 64


@functools.cache
def load_benchmark_table(name: str) -> Mapping[str, Mapping[str, Any]]:
    """Load a benchmark's packaged table, by part: "prompt" template, "new_tokens", "metric" and optional flags; cached.

    Optional flags are "raw" (few-shot examples, or code to continue, which a chat template would disturb), "first_line"
    (models continue with another example, so the answer is the first line), "choice" and "number" (kinds of answers),
    and "first_label" (the official functions use only the first label).
    """
    return json.loads(read_packaged_file(f"data/{name}.json"))


@frozen_dataclass
class BenchmarkTask(QuestionTask):
    """Base class of benchmarks read from files; each part has rows, a prompt template and a metric in a packaged table.

    Attributes:
        data: folder with the official files; by default they are downloaded from the hub.
        tasks: parts of the benchmark; by default all.
        count: samples per part, from its beginning; 0 for all.
        longest: maximum tokens of a prompt, whose middle is cut; 0 for the limit of the model's positions.
        new_tokens: maximum tokens of an answer; 0 for the official number of each part.
        benchmark: name of the benchmark's `load_benchmark_table`.
        repo: owner and name of the data set on the Hugging Face hub.
        file: file in `repo` of each part, with the part's name as "{name}"; in an archive, parts are its `member`.
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
        known = load_benchmark_table(self.benchmark)
        for name in self.tasks:
            require(name in known, "tasks", name, f"unknown part: use some of {', '.join(known)}")
        self.require_at_least(0, "count", "longest", "new_tokens")
        remedy = f"too small: use {_LEAST} or more, half for each end of the prompt, or 0"
        require(self.longest == 0 or self.longest >= _LEAST, "longest", self.longest, remedy)

    def samples(self, params: LanguageModel) -> Sequence[TaskSample]:
        """Make the list of samples for a model: the first `count` rows (0: all) of each selected benchmark part."""
        # Files are checked first, because tokenizing may take hours.
        rows = {
            name: self._read_rows(name)
            for name in self.tasks or load_benchmark_table(self.benchmark)
        }
        made = []
        for name, mine in rows.items():
            for number, row in enumerate(mine):
                try:
                    made.append(self._make_sample(params, name, number, row))
                except (LookupError, TypeError) as error:
                    remedy = f"not a row of the official file ({error!r}): check the file"
                    raise build_value_error("data", f"{name}, row {number}", remedy) from None
        return made

    def extract_answers(self, name: str, row: Mapping[str, Any]) -> tuple[str, ...]:
        """Return a row's list "answers" as a tuple, TypeError for a text; subclasses use the part's `name` too."""
        answers = row["answers"]
        if isinstance(answers, str):
            raise TypeError("answers are a text, not a list")
        return tuple(answers)

    def extract_template_fields(self, name: str, row: Mapping[str, Any]) -> dict[str, str]:
        """Return a row's "input" as "question" and as "input", by placeholder; subclasses add fields of part `name`."""
        return {"question": row["input"], "input": row["input"]}

    def score(self, sample: TaskSample, prediction: str) -> float:
        """Score a prediction in [0, 1] by its part's official metric, some on the first line; best over answers."""
        part = load_benchmark_table(self.benchmark)[sample.group]
        measure = getattr(metrics, part["metric"])
        if part.get("choice"):
            return measure(prediction, sample.answers)
        if part.get("first_line"):
            prediction = prediction.lstrip("\n").split("\n")[0]
        given = {"classes": sample.tags["classes"]} if part["metric"] == "one_class" else {}
        return max((measure(prediction, answer, **given) for answer in sample.answers), default=0.0)

    def _read_rows(self, name: str) -> list[dict[str, Any]]:
        """Read a part's first `count` rows (0: all) as dicts from folder `data`, or hub; FileNotFoundError if none."""
        if self.data is not None:
            path = Path(self.data).expanduser() / f"{name}.jsonl"
            return read_json_lines(path, ("context", "input"), self.count)
        from huggingface_hub import hf_hub_download

        file = self.file.format(name=name)
        try:
            path = Path(hf_hub_download(self.repo, file, repo_type="dataset"))
        # The hub's client raises its own errors and those of its HTTP library.
        except Exception as error:
            raise FileNotFoundError(
                f"data=None: {name} could not be downloaded from the hub ({type(error).__name__}): download "
                f"https://huggingface.co/datasets/{self.repo}, and use its folder with {name}.jsonl as data"
            ) from error
        if not self.member:
            return read_json_lines(path, ("context", "input"), self.count)
        with zipfile.ZipFile(path) as archive, archive.open(self.member.format(name=name)) as lines:
            return parse_json_lines(lines, f"{path.name}, {name}", ("context", "input"), self.count)

    def _make_sample(
        self, params: LanguageModel, name: str, number: int, row: Mapping[str, Any]
    ) -> TaskSample:
        """Make the `TaskSample` of row `number` of a benchmark part, the middle of a long prompt cut."""
        part = load_benchmark_table(self.benchmark)[name]
        fields = self.extract_template_fields(name, row)
        # Texts of fields may contain braces.
        before, after = (
            re.sub(r"\{(\w+)\}", lambda field: fields[field[1]], text)
            for text in part["prompt"].split("{context}")
        )
        new = self.new_tokens or part["new_tokens"]
        raw = part.get("raw", False)
        context, question, length = _truncate_prompt(
            params, before + row["context"], after, new_tokens=new, longest=self.longest, raw=raw
        )
        classes = row.get("all_classes")
        return TaskSample(
            id=f"{name}-{number:03d}",
            group=name,
            context=context,
            question=question,
            answers=self.extract_answers(name, row),
            new_tokens=new,
            raw=raw,
            tags={"prompt_tokens": length, **({"classes": tuple(classes)} if classes else {})},
        )


def _truncate_prompt(
    params: LanguageModel, before: str, after: str, *, new_tokens: int, longest: int, raw: bool
) -> tuple[str, str, int]:
    """Return context, question and token count of a prompt; cut the middle above `longest` tokens (0: model's limit).

    `longest` is the maximum of prompt tokens, 0 for the positions that `new_tokens` leave. Raises ValueError if no
    prompt fits.
    """
    text = params.tokenizer
    around = (
        "" if raw or not text.has_template else text.turn_texts.opening + text.turn_texts.closing
    )
    room = params.config.max_positions - new_tokens - len(text.encode(around, bos=True))
    ids = text.encode(before + after, bos=True)
    if longest:
        remedy = f"the model's positions leave {room}, with {new_tokens} for the answer and the chat template"
        require(min(len(ids), longest) <= room, "longest", longest, f"{remedy}: lower it, or use 0")
    else:
        longest = room - _SPARE
        remedy = f"the model's {params.config.max_positions} positions leave none for a prompt: sample fewer tokens"
        require(longest >= _LEAST, "new_tokens", new_tokens, remedy)
    if len(ids) <= longest:
        return before, after, len(ids)
    half = longest // 2
    head = text.decode(ids[:half])
    tail = text.decode(ids[-half:])
    cut = max(len(tail) - len(after), 0)
    return head + tail[:cut], tail[cut:], 2 * half


@task("longbench")
@frozen_dataclass
class LongBench(BenchmarkTask):
    """Task LongBench (v1): question answering, summaries, few-shot learning, synthetic tasks and code, in English.

    A question-agnostic run hides from the policy the text after the document in the official prompt, such as the
    question; the text before the document never names the question.

    Attributes:
        data: folder with the official files, such as narrativeqa.jsonl (default: downloaded from the hub).
        tasks: data sets, such as ("hotpotqa", "lcc") (default: all 16).
        count: samples per data set, from its beginning; 0 for all.
        longest: maximum tokens of a prompt, whose middle is cut; 0 for the limit of the model's positions. The
            official figures use 3500 for models of 4096 positions, 7500 for 8192 and 31500 for 32768.
        new_tokens: maximum tokens of an answer; 0 for the official number of each data set.
    """

    benchmark = "longbench"
    repo = "THUDM/LongBench"
    file = "data.zip"
    member = "data/{name}.jsonl"


@task("infinitebench")
@frozen_dataclass
class InfiniteBench(BenchmarkTask):
    """Task InfiniteBench: retrieval, books, dialogue, mathematics and code at lengths above 100,000 tokens.

    Prompts are the official ones for open models (YaRN-Mistral, Yi and ChatGLM3), which begin the answer and have no
    chat template. A question-agnostic run hides from the policy the text after the document; the official prompts of
    math_find and code_run also name the question before the document.

    Attributes:
        data: folder with the official files, such as passkey.jsonl (default: downloaded from the hub).
        tasks: names of files, such as ("passkey", "kv_retrieval") (default: all 12).
        count: samples per file, from its beginning; 0 for all.
        longest: maximum tokens of a prompt, whose middle is cut; 0 for the limit of the model's positions.
        new_tokens: maximum tokens of an answer; 0 for the official number of each task (30,000 for math_calc).
    """

    benchmark = "infinitebench"
    repo = "xinrongzhang2022/InfiniteBench"
    file = "{name}.jsonl"

    def extract_template_fields(self, name: str, row: Mapping[str, Any]) -> dict[str, str]:
        """Return a row's texts by placeholder: question, options if any, code_run's function, math_find's prefix."""
        fields = super().extract_template_fields(name, row)
        options = zip(metrics.LETTERS, row.get("options") or (), strict=False)
        fields |= {f"OPTION_{letter}": str(each) for letter, each in options}
        if name == "code_run":
            call, function = re.findall(r"((func_[0-9]+)\(\-?[0-9]+\))", row["input"])[0]
            fields |= {"func": function, "func_call": call}
        if name == "math_find":
            sought = re.findall(r"The .+ of", row["input"])[0].lower()[:-3]
            fields["prefix"] = f"What is {sought} in the following list?"
        return fields

    def extract_answers(self, name: str, row: Mapping[str, Any]) -> tuple[str, ...]:
        """Return a row's answers as texts: numbers as JSON, choices as text and letter; some parts: the first only."""
        right = row["answer"]
        part = load_benchmark_table(self.benchmark)[name]
        several = right if isinstance(right, list) else [right]
        if part.get("choice") and len(several) != 2:
            several = [several[0], metrics.LETTERS[row["options"].index(several[0])]]
        if name == "math_calc":
            return (json.dumps(several[0] if isinstance(several[0], list) else several),)
        if part.get("number"):
            return (json.dumps(several[0]),)
        return tuple(str(each) for each in (several[:1] if part.get("first_label") else several))
