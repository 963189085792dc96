"""Base of published benchmarks: rows of JSONL files, local or on the hub, as prompts cut to a model's length."""

import abc
import dataclasses
import functools
import json
import re
import zipfile
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, ClassVar

from jaxkv._errors import require
from jaxkv.evals.asking import QuestionTask
from jaxkv.evals.task import Sample, tokenizer_of
from jaxkv.evals.texts import json_lines, rows_of_file
from jaxkv.loading import LanguageModel

# Cut texts, joined and tokenized again, may take a few tokens more than their parts.
_SPARE = 16
_LEAST = 64


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
        repo: owner and name of the data set on the Hugging Face hub.
        file: file there of each part, whose name stands for "{name}"; an archive has them as `member`.
        keys: keys that each row must have.
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
    keys: ClassVar[tuple[str, ...]]

    def __post_init__(self):
        super().__post_init__()
        known = table(self.benchmark)
        for name in self.tasks:
            require(name in known, "tasks", name, f"choose among {', '.join(known)}")
        for name in ("count", "longest", "new_tokens"):
            require(getattr(self, name) >= 0, name, getattr(self, name), "give 0 or more")
        remedy = f"give {_LEAST} or more, of which half stay from either end, or 0"
        require(self.longest == 0 or self.longest >= _LEAST, "longest", self.longest, remedy)

    def samples(self, params: LanguageModel) -> Sequence[Sample]:
        """Makes a list of samples of the benchmark's chosen parts: the first `count` rows of each file (0: all)."""
        # Missing files are reported before hours of tokenizing.
        rows = {name: self._rows(name) for name in self.tasks or table(self.benchmark)}
        return [
            self._sample(params, name, number, row)
            for name, mine in rows.items()
            for number, row in enumerate(mine)
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

    def _rows(self, name: str) -> list[dict[str, Any]]:
        """Rows of the part's file in the folder `data`, or from the hub; FileNotFoundError says what to put where."""
        if self.data is not None:
            path = Path(self.data).expanduser() / f"{name}.jsonl"
            return rows_of_file(path, self.keys, self.count)
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
            return rows_of_file(path, self.keys, self.count)
        with zipfile.ZipFile(path) as archive, archive.open(self.member.format(name=name)) as lines:
            return json_lines(lines, f"{path.name}, {name}", self.keys, self.count)

    def _sample(
        self, params: LanguageModel, name: str, number: int, row: Mapping[str, Any]
    ) -> Sample:
        """Makes the `Sample` of row `number` of a benchmark part, its prompt cut to the model's length."""
        part, fields = table(self.benchmark)[name], self.fields_of(name, row)
        # Texts of fields may contain braces.
        before, after = (
            re.sub(r"\{(\w+)\}", lambda field: fields[field[1]], text)
            for text in part["prompt"].split("{context}")
        )
        new, raw = self.new_tokens or part["new_tokens"], self.raw(name)
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
