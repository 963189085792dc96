"""`jaxkv batch`: validates its options, loads the model, and answers a file of requests."""

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
Each line of FILE is a request in OpenAI's batch format. Each line of the output is an answer, in the same order. An
invalid or rejected line gets an error in the output. To resume a run, repeat the command: answers are in
OUT.jsonl.partial until all are complete. An existing OUT.jsonl keeps its answers, and only other requests are computed.

a line:
  {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions",
   "body": {"messages": [{"role": "user", "content": "Why is the sky blue?"}], "temperature": 0}}

examples:
  answer a file of requests:
    jaxkv batch requests.jsonl -o answers.jsonl --model smollm2-135m-instruct --policy adakv --budget 1024

  on all machines of a Ray cluster:
    jaxkv batch requests.jsonl -o answers.jsonl --policy adakv --budget 1024 --ray --ray-address auto
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchCommand(SlotOptions):
    """`jaxkv batch`.

    Attributes:
        file: file of requests, one JSON object per line.
        out: file of answers, one JSON object per line.
        documents: folder of documents of `jaxkv serve` for questions.
        max_question_tokens: maximum tokens of a question on a document in --documents; 0: no documents.
        ray: answer with workers of a Ray cluster, one engine each.
        ray_address: address of the cluster; auto for the one on this machine (default: RAY_ADDRESS, or a new one).
        workers: number of engines (default: as many as the GPUs of the cluster allow, else one per machine).
    """

    file: Annotated[str, Word("FILE", place=True)]
    out: File
    max_question_tokens: Natural = 0
    ray: bool = False
    ray_address: Annotated[str, Word("HOST:PORT")] | None = None
    workers: Count | None = None

    def run(self) -> None:
        """Answer the requests that earlier runs left, and write all answers."""
        with needing("serve", "batches need"):
            from jaxkv.serving.batch_answers import QUEUE
            from jaxkv.serving.batch_files import Ledger, alone
        policy = self.policy.policy()
        options = self.engine() | {"policy": policy, "queue": QUEUE, "documents": self.documents}
        recipe = EngineConfig(**picked(self, "model dtype weights mesh"), options=options)
        requests, out = self._files()
        about = [self.model, self.dtype, repr(policy), self.max_new_tokens]
        fine = self.ray or (self.ray_address is None and self.workers is None)
        require(fine, "--ray", False, "--ray-address and --workers need it: add --ray")
        with alone(out):
            ledger = Ledger(requests, out, json.dumps(about))
            require(
                ledger.lines > 0, "FILE", self.file, "the file is empty: write one request per line"
            )
            bad = _answered(ledger, lambda: self._answering(recipe))
        failed = f", {bad} of them without status 200" if bad else ""
        to_stderr(f"jaxkv: {ledger.lines} lines in {self.out}{failed}")

    def _answering(self, recipe: EngineConfig) -> Any:
        """Context manager of a function from request lines to answers, with a local engine or Ray workers."""
        if not self.ray:
            return _here(recipe, self.name)
        with needing("ray", "--ray needs"):
            from jaxkv.serving.ray_batches import cluster_answers
        return cluster_answers(
            recipe, name=self.name, address=self.ray_address, workers=self.workers
        )

    def _files(self) -> tuple[Path, Path]:
        """Return the paths (requests, answers); ValueError unless one is a readable file and the other writable."""
        requests, out = Path(self.file).expanduser(), Path(self.out).expanduser().resolve()
        remedy = "not a readable file: use one; a pipe is not supported, because it is read twice"
        require(requests.is_file() and os.access(requests, os.R_OK), "FILE", self.file, remedy)
        Output(flag="-o", name=self.out).check([self.file])
        plain = self.out != "-" and (not out.exists() or out.is_file())
        require(plain, "-o", self.out, "not a file: use the path of one")
        return requests, out


@contextlib.contextmanager
def _here(recipe: EngineConfig, name: str) -> Iterator[Callable[..., Any]]:
    """Context manager that creates an engine in this process and yields its function from request lines to answers."""
    from jaxkv.serving.batch_answers import BatchRunner

    with recipe.made() as engine:
        to_stderr(f"jaxkv: {name}, {engine.stats.slots} slots, {recipe.options['policy']}")
        yield BatchRunner(engine, name=name).answers


def _answered(ledger: Any, answering: Callable[[], Any]) -> int:
    """Answer the lines that a ledger has left, write the output, and return how many lack status 200."""
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
