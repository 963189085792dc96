"""`jaxkv batch`: checks its options, loads the model, and answers a file of requests into a file of answers."""

import contextlib
import dataclasses
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

from tqdm import tqdm

from jaxkv._errors import require
from jaxkv.cli.models import SlotOptions
from jaxkv.cli.options import Count, File, Natural, Word, picked
from jaxkv.cli.outputs import Output, to_stderr
from jaxkv.cli.serving import needing
from jaxkv.serving.engine_config import EngineConfig

NOTES = """\
Each line of FILE is a request in OpenAI's batch format, each line of the output an answer, in the same order. A line
that cannot be read, or is rejected, has an error there. A run that was ended goes on with the same command: answers lie
in OUT.jsonl.partial until all are there. Where OUT.jsonl is there, it keeps its answers, and other requests are asked.

a line:
  {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions",
   "body": {"messages": [{"role": "user", "content": "Why is the sky blue?"}], "temperature": 0}}

examples:
  answer a file of requests:
    jaxkv batch requests.jsonl -o answers.jsonl --model smollm2-135m-instruct --policy adakv --budget 1024

  by all machines of a Ray cluster:
    jaxkv batch requests.jsonl -o answers.jsonl --policy adakv --budget 1024 --ray --ray-address auto
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchCommand(SlotOptions):
    """`jaxkv batch`.

    Attributes:
        file: requests, one JSON object a line.
        out: answers, one JSON object a line.
        documents: folder of documents of `jaxkv serve` that requests may ask.
        max_question_tokens: most tokens of a question on a document of `jaxkv serve` in --documents; 0: no documents.
        ray: answer by workers of a Ray cluster, each with an engine.
        ray_address: the cluster; auto for the one that runs here (default: RAY_ADDRESS, or one of this machine alone).
        workers: number of engines (default: as many as the cluster's GPUs allow, else one for each machine).
    """

    file: Annotated[str, Word("FILE", place=True)]
    out: File
    max_question_tokens: Natural = 0
    ray: bool = False
    ray_address: Annotated[str, Word("HOST:PORT")] | None = None
    workers: Count | None = None

    def run(self) -> None:
        """Answers the requests that earlier runs left and writes all answers."""
        with needing("serve", "batches need"):
            from jaxkv.serving.batch_answers import QUEUE
            from jaxkv.serving.batch_files import Ledger, alone
        policy = self.policy.policy()
        options = self.engine() | {"policy": policy, "queue": QUEUE, "documents": self.documents}
        recipe = EngineConfig(**picked(self, "model dtype weights mesh"), options=options)
        requests, out = self._files()
        about = [self.model, self.dtype, repr(policy), self.max_new_tokens]
        fine = self.ray or (self.ray_address is None and self.workers is None)
        require(fine, "--ray", False, "--ray-address and --workers say something of it: give it")
        with alone(out):
            ledger = Ledger(requests, out, json.dumps(about))
            require(ledger.lines > 0, "FILE", self.file, "it is empty: give a request a line")
            bad = _answered(ledger, lambda: self._answering(recipe))
        refused = f", {bad} of them without status 200" if bad else ""
        to_stderr(f"jaxkv: {ledger.lines} lines in {self.out}{refused}")

    def _answering(self, recipe: EngineConfig) -> Any:
        """Context manager yielding a function from request lines to answers: by an engine here, or by Ray workers."""
        if not self.ray:
            return _here(recipe, self.name)
        with needing("ray", "--ray needs"):
            from jaxkv.serving.ray_batches import cluster_answers
        return cluster_answers(
            recipe, name=self.name, address=self.ray_address, workers=self.workers
        )

    def _files(self) -> tuple[Path, Path]:
        """Paths (requests, answers); ValueError unless one is a readable file and the other writable."""
        requests, out = Path(self.file).expanduser(), Path(self.out).expanduser().resolve()
        remedy = "give a file that can be read; it is read twice, so that no pipe will do"
        require(requests.is_file() and os.access(requests, os.R_OK), "FILE", self.file, remedy)
        Output(flag="-o", name=self.out).check([self.file])
        plain = self.out != "-" and (not out.exists() or out.is_file())
        require(plain, "-o", self.out, "it is no file: give one")
        return requests, out


@contextlib.contextmanager
def _here(recipe: EngineConfig, name: str) -> Iterator[Callable[..., Any]]:
    """Context manager that makes an engine in this process and yields its function from request lines to answers."""
    from jaxkv.serving.batch_answers import BatchRunner

    with recipe.made() as engine:
        to_stderr(f"jaxkv: {name}, {engine.stats.slots} slots, {recipe.options['policy']}")
        yield BatchRunner(engine, name=name).answers


def _answered(ledger: Any, answering: Callable[[], Any]) -> int:
    """Answers the lines a ledger has left, with a progress bar, writes the output; returns how many lack status 200."""
    if ledger.kept:
        to_stderr(f"jaxkv: {ledger.kept} of {ledger.lines} lines are answered already")
    try:
        if ledger.kept < ledger.lines:
            bar = tqdm(total=ledger.lines, initial=ledger.kept, unit=" lines", disable=None)
            with bar, answering() as answers:
                for line, answer in answers(ledger.left()):
                    ledger.add(line, answer)
                    bar.update()
        return ledger.finish()
    finally:
        ledger.close()
