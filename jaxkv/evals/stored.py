"""Base of published benchmarks: rows of JSONL files, local or on the hub, as prompts cut to a model's length."""

import abc
import dataclasses
import functools
import json
import os
import re
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, ClassVar

from jaxkv._errors import require
from jaxkv.evals.asking import QuestionTask
from jaxkv.evals.task import Sample, tokenizer_of
from jaxkv.loading import LanguageModel

# Cut texts, joined and tokenized again, may take a few tokens more than their parts.
_SPARE = 16
_LEAST = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hub:
    """Place of a data set on the Hugging Face hub: its repository, and the file name of each part.

    Attributes:
        repo: owner and name.
        file: name of the file, in which "{name}" is the part's name.
        member: name of the part's file inside, where `file` is an archive.
    """

    repo: str
    file: str
    member: str = ""

    @property
    def url(self) -> str:
        """URL of the data set's page."""
        return f"https://huggingface.co/datasets/{self.repo}"


@functools.cache
def table(name: str) -> Mapping[str, Mapping[str, Any]]:
    """Dict {part name: its "prompt" template, "new_tokens" and "metric"} of a benchmark, read from a packaged file."""
    return json.loads((resources.files("jaxkv.evals") / "data" / f"{name}.json").read_text("utf-8"))


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
        hub: the data set on the hub.
        keys: keys that each row must have.
    """

    data: str | None = None
    tasks: tuple[str, ...] = ()
    count: int = 0
    longest: int = 0
    new_tokens: int = 0

    benchmark: ClassVar[str]
    hub: ClassVar[Hub]
    keys: ClassVar[tuple[str, ...]]

    def __post_init__(self):
        super().__post_init__()
        known = table(self.benchmark)
        wrong = [each for each in self.tasks if each not in known]
        require(not wrong, "tasks", wrong, f"choose among {', '.join(known)}")
        for name in ("count", "longest", "new_tokens"):
            require(getattr(self, name) >= 0, name, getattr(self, name), "give 0 or more")
        remedy = f"give {_LEAST} or more, of which half stay from either end, or 0"
        require(self.longest == 0 or self.longest >= _LEAST, "longest", self.longest, remedy)

    def samples(self, params: LanguageModel) -> Sequence[Sample]:
        """Makes a list of samples of the benchmark's chosen parts: the first `count` rows of each file (0: all)."""
        names = self.tasks or tuple(table(self.benchmark))
        # Missing files are reported before hours of tokenizing.
        rows = {name: rows_of(name, self.data, self.hub, self.keys, self.count) for name in names}
        return [
            self._sample(params, name, number, row)
            for name in names
            for number, row in enumerate(rows[name])
        ]

    @abc.abstractmethod
    def answers_of(self, name: str, row: Mapping[str, Any]) -> tuple[str, ...]:
        """Tuple of the right answers in a row of benchmark part `name`, as texts that the part's metric takes."""

    @abc.abstractmethod
    def fields_of(self, name: str, row: Mapping[str, Any]) -> Mapping[str, str]:
        """Dict {field: text} for the prompt template of benchmark part `name`, from a row; without the context."""

    def raw(self, name: str) -> bool:
        """True if the prompts of benchmark part `name` get no chat template; by default always True."""
        return True

    def _sample(
        self, params: LanguageModel, name: str, number: int, row: Mapping[str, Any]
    ) -> Sample:
        """Makes the `Sample` of row `number` of a benchmark part, its prompt cut to the model's length."""
        for key in ("context", "input"):
            remedy = (
                f"row {number + 1} of {name} has no text as its {key}: is it the official file?"
            )
            require(isinstance(row[key], str), "data", row[key], remedy)
        part, fields, classes = (
            table(self.benchmark)[name],
            self.fields_of(name, row),
            row.get("all_classes"),
        )
        before, after = (_filled(text, fields) for text in part["prompt"].split("{context}"))
        new, raw = self.new_tokens or part["new_tokens"], self.raw(name)
        context, question, length = _fitted(
            params, before + row["context"], after, new_tokens=new, longest=self.longest, raw=raw
        )
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


def _filled(prompt: str, fields: Mapping[str, str]) -> str:
    """Text of the prompt template with each "{name}" replaced by its field's text, which may contain braces."""
    return re.sub(r"\{(\w+)\}", lambda name: fields[name[1]], prompt)


def rows_of(
    name: str, data: str | None, hub: Hub, keys: Sequence[str], count: int = 0
) -> list[dict[str, Any]]:
    """List of the first `count` rows (0: all), as dicts, of `<name>.jsonl` in folder `data`, or on the hub if None.

    A missing file is a FileNotFoundError that says what to put where; rows without one of `keys` are refused.
    """
    if data is None:
        path = _fetched(name, hub)
    else:
        path = Path(os.path.expanduser(data)) / f"{name}.jsonl"
        if not path.is_file():
            raise FileNotFoundError(
                f"data={data!r}: no {path.name} in it; put the files of {hub.url} there"
            )
    if data is None and hub.member:
        with zipfile.ZipFile(path) as archive, archive.open(hub.member.format(name=name)) as file:
            return _rows(file, f"{path.name}, {name}", keys, count)
    return json_lines(path, keys, count)


def _fetched(name: str, hub: Hub) -> Path:
    """Path of the part's file in the hub's local cache; downloads it if missing, FileNotFoundError if that fails."""
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(hub.repo, hub.file.format(name=name), repo_type="dataset"))
    # The hub's client lets through its own errors and those of whichever HTTP library it was built on.
    except Exception as error:
        raise FileNotFoundError(
            f"data=None: {name} could not be fetched from the hub ({type(error).__name__}); where there is a network, "
            f"download {hub.url}, put {name}.jsonl and the others into a folder, and give that folder as data"
        ) from error


def json_lines(path: Path, keys: Sequence[str], count: int = 0) -> list[dict[str, Any]]:
    """List of the first `count` rows (0: all), as dicts, of a JSON-lines file; ValueError if one lacks a key."""
    with path.open("rb") as file:
        return _rows(file, str(path), keys, count)


def _rows(
    lines: Iterable[bytes], where: str, keys: Sequence[str], count: int
) -> list[dict[str, Any]]:
    """Parses JSON lines to a list of dicts, `count` of them (0: all); ValueError for bad JSON or missing `keys`.

    Lines end with a line feed alone; empty lines are skipped, a leading byte order mark too.
    """
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        if count and len(rows) == count:
            break
        if not line.strip():
            continue
        try:
            row = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
        except (ValueError, RecursionError) as error:
            raise ValueError(
                f"data={where!r}: line {number} is no JSON ({error}); download the file again"
            ) from None
        require(
            isinstance(row, dict),
            "data",
            where,
            f"line {number} is no object of JSON: is it the right file?",
        )
        missing = [key for key in keys if key not in row]
        require(
            not missing,
            "data",
            where,
            f"line {number} lacks {', '.join(missing)}: is it the right file?",
        )
        rows.append(row)
    return rows


def _fitted(
    params: LanguageModel, before: str, after: str, *, new_tokens: int, longest: int, raw: bool
) -> tuple[str, str, int]:
    """Context text, question text, token count; cuts the middle of prompts over `longest`; ValueError if none can fit.

    `longest` is the most tokens of the prompt, 0 for what the model's positions leave beside `new_tokens`.
    """
    text = tokenizer_of(params)
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
