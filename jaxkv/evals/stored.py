"""Data sets of others: JSONL files in a folder or on the hub, and prompts of them that are cut to a model's length."""

import abc
import dataclasses
import functools
import json
import re
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, ClassVar

from jaxkv._errors import require
from jaxkv.evals.asking import QuestionTask
from jaxkv.evals.task import Sample
from jaxkv.loading import LanguageModel

# A text that was cut and put together may take a few tokens more than its parts.
_SPARE = 16
_LEAST = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hub:
    """Where a data set lies on the Hugging Face hub, as the files that its makers put there.

    Attributes:
        repo: owner and name.
        file: the file's name; "{name}" is replaced by the part's.
        member: where that is an archive, the part's file in it.
    """

    repo: str
    file: str
    member: str = ""

    @property
    def url(self) -> str:
        """Its page."""
        return f"https://huggingface.co/datasets/{self.repo}"


@functools.cache
def table(name: str) -> Mapping[str, Mapping[str, Any]]:
    """A benchmark's prompts, output lengths and metrics, as they lie beside this file.

    Args:
        name: of the benchmark.

    Returns:
        What belongs to each of its parts, by name.
    """
    return json.loads((resources.files("jaxkv.evals") / "data" / f"{name}.json").read_text("utf-8"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredTask(QuestionTask):
    """A benchmark of several parts, each a file of rows, a prompt and a metric.

    Attributes:
        data: folder with the official files; by default they are fetched from the hub.
        tasks: parts of the benchmark; by default all.
        count: samples of each, from its beginning; 0 for all.
        longest: tokens of a prompt, above which its middle goes; 0 for what the model's positions leave.
        new_tokens: tokens of an answer; 0 for the official number of each part.
        benchmark: the name of its table.
        hub: where its files lie.
        keys: what each row has to have.
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
        """The cases; see `Task.samples`."""
        names = self.tasks or tuple(table(self.benchmark))
        # What is missing is said before hours of tokenizing.
        rows = {name: rows_of(name, self.data, self.hub, self.keys, self.count) for name in names}
        return [self._sample(params, name, number, row) for name in names for number, row in enumerate(rows[name])]

    @abc.abstractmethod
    def answers_of(self, name: str, row: Mapping[str, Any]) -> tuple[str, ...]:
        """What is right, as the part's metric takes it."""

    @abc.abstractmethod
    def fields_of(self, name: str, row: Mapping[str, Any]) -> Mapping[str, str]:
        """What the part's prompt takes from a row besides its context."""

    def raw(self, name: str) -> bool:
        """Whether no chat template belongs around the part's prompts."""
        return True

    def _sample(self, params: LanguageModel, name: str, number: int, row: Mapping[str, Any]) -> Sample:
        for key in ("context", "input"):
            remedy = f"row {number + 1} of {name} has no text as its {key}: is it the official file?"
            require(isinstance(row[key], str), "data", row[key], remedy)
        of, told, classes = table(self.benchmark)[name], self.fields_of(name, row), row.get("all_classes")
        before, after = (filled(part, told) for part in of["prompt"].split("{context}"))
        new, raw = self.new_tokens or of["new_tokens"], self.raw(name)
        whole = (before + row["context"], after)
        context, question, length = fitted(params, *whole, new_tokens=new, longest=self.longest, raw=raw)
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


def filled(prompt: str, told: Mapping[str, str]) -> str:
    """A prompt with its fields filled in, whose texts may have braces of their own.

    Args:
        prompt: with names in braces.
        told: a text for each.

    Returns:
        The prompt.
    """
    return re.sub(r"\{(\w+)\}", lambda name: told[name[1]], prompt)


def rows_of(name: str, data: str | None, hub: Hub, keys: Sequence[str], count: int = 0) -> list[dict[str, Any]]:
    """The rows of one part of a data set.

    Args:
        name: of the part; its file is `<name>.jsonl`.
        data: the folder that holds it; None for the hub, where a network and the hub's own cache decide.
        hub: where it lies there.
        keys: what each row has to have.
        count: rows to read; 0 for all.

    Returns:
        The rows, in order.

    Raises:
        FileNotFoundError: where the file is missing, saying what to put where.
        ValueError: naming file, line and what is wrong there.
    """
    if data is None:
        path = _fetched(name, hub)
    else:
        path = Path(data).expanduser() / f"{name}.jsonl"
        if not path.is_file():
            raise FileNotFoundError(f"data={data!r}: no {path.name} in it; put the files of {hub.url} there")
    if data is None and hub.member:
        with zipfile.ZipFile(path) as archive, archive.open(hub.member.format(name=name)) as file:
            return _rows(file, f"{path.name}, {name}", keys, count)
    return json_lines(path, keys, count)


def _fetched(name: str, hub: Hub) -> Path:
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
    """Rows of a file of lines of JSON, which end with a line feed and nothing else; empty ones are passed over.

    Args:
        path: the file; its bytes may begin with the mark that some editors put there.
        keys: what each row has to have.
        count: rows to read; 0 for all.

    Returns:
        The rows, in order.

    Raises:
        ValueError: naming file, line and what is wrong there.
    """
    with path.open("rb") as file:
        return _rows(file, str(path), keys, count)


def _rows(lines: Iterable[bytes], where: str, keys: Sequence[str], count: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        if count and len(rows) == count:
            break
        if not line.strip():
            continue
        try:
            row = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"data={where!r}: line {number} is no JSON ({error}); download the file again") from None
        missing = [key for key in keys if key not in row] if isinstance(row, dict) else list(keys)
        require(not missing, "data", where, f"line {number} lacks {', '.join(missing)}: is it the right file?")
        rows.append(row)
    return rows


def fitted(
    params: LanguageModel, before: str, after: str, *, new_tokens: int, longest: int = 0, raw: bool = False
) -> tuple[str, str, int]:
    """A prompt that loses its middle where it is too long: its first and its last half stay, as LongBench has it.

    Args:
        params: the model, whose tokenizer counts.
        before: the prompt up to the question.
        after: the question.
        new_tokens: tokens to draw, which positions are left for.
        longest: tokens that the prompt may take; 0 for what the model's positions leave.
        raw: no chat template comes around it.

    Returns:
        The prompt up to the question, the question, and the tokens of both.

    Raises:
        ValueError: without a tokenizer, or without room for a prompt.
    """
    text = params.text
    require(text is not None, "params", "no tokenizer", "tasks are texts: load a checkpoint that has one")
    assert text is not None
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
