"""`jaxkv batch`: validates its options, loads the model, and answers a file of requests."""

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

from tqdm import tqdm

from jaxkv._dataclasses import frozen_dataclass
from jaxkv._errors import require
from jaxkv.cli.models import EngineOptions
from jaxkv.cli.options import ArgumentSpec, Count, File, Natural, pick_fields
from jaxkv.cli.outputs import OutputTarget, write_to_stderr
from jaxkv.cli.serving import explain_missing_package
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


@frozen_dataclass
class BatchCommand(EngineOptions):
    """The command `jaxkv batch` and its options: answer a file of requests in OpenAI's batch format.

    Attributes:
        file: file of requests, one JSON object per line.
        out: file of answers, one JSON object per line.
        documents: folder of documents of `jaxkv serve` for questions.
        max_question_tokens: maximum tokens of a question on a document in --documents; 0: no documents.
        ray: answer with workers of a Ray cluster, one engine each.
        ray_address: address of the cluster; auto for the one on this machine (default: RAY_ADDRESS, or a new one).
        workers: number of engines (default: as many as the GPUs of the cluster allow, else one per machine).
    """

    file: Annotated[str, ArgumentSpec("FILE", place=True)]
    out: File
    max_question_tokens: Natural = 0
    ray: bool = False
    ray_address: Annotated[str, ArgumentSpec("HOST:PORT")] | None = None
    workers: Count | None = None

    def run_command(self) -> None:
        """Answer a batch file's requests that earlier runs left unanswered, and write the file of all answers."""
        with explain_missing_package("serve", "batches need"):
            from jaxkv.serving.batch_answers import QUEUE
            from jaxkv.serving.batch_files import ResumableBatchOutput, lock_output_file
        policy = self.policy.build_policy()
        options = self.build_engine_arguments() | {
            "policy": policy,
            "queue": QUEUE,
            "documents": self.documents,
        }
        recipe = EngineConfig(**pick_fields(self, "model dtype weights mesh"), options=options)
        requests, out = self._validate_file_paths()
        about = [self.model, self.dtype, repr(policy), self.max_new_tokens]
        fine = self.ray or (self.ray_address is None and self.workers is None)
        require(fine, "--ray", False, "--ray-address and --workers need it: add --ray")
        with lock_output_file(out):
            ledger = ResumableBatchOutput(requests, out, json.dumps(about))
            require(
                ledger.lines > 0, "FILE", self.file, "the file is empty: write one request per line"
            )
            bad = _answer_remaining_lines(ledger, lambda: self._choose_line_answerer(recipe))
        failed = f", {bad} of them without status 200" if bad else ""
        write_to_stderr(f"jaxkv: {ledger.lines} lines in {self.out}{failed}")

    def _choose_line_answerer(self, recipe: EngineConfig) -> Any:
        """Return a context manager that yields a function from lines to (line, output object) pairs: engine or Ray."""
        if not self.ray:
            return _open_local_engine(recipe, self.served_model_id)
        with explain_missing_package("ray", "--ray needs"):
            from jaxkv.serving.ray_batches import answer_on_ray_cluster
        return answer_on_ray_cluster(
            recipe, name=self.served_model_id, address=self.ray_address, workers=self.workers
        )

    def _validate_file_paths(self) -> tuple[Path, Path]:
        """Return the paths (requests, answers); ValueError unless the first is a readable file, the second writable."""
        requests = Path(self.file).expanduser()
        out = Path(self.out).expanduser().resolve()
        remedy = "not a readable file: use one; a pipe is not supported, because it is read twice"
        require(requests.is_file() and os.access(requests, os.R_OK), "FILE", self.file, remedy)
        OutputTarget(flag="-o", name=self.out).require_writable([self.file])
        plain = self.out != "-" and (not out.exists() or out.is_file())
        require(plain, "-o", self.out, "not a file: use the path of one")
        return requests, out


@contextlib.contextmanager
def _open_local_engine(recipe: EngineConfig, name: str) -> Iterator[Callable[..., Any]]:
    """Context manager that creates a local engine and yields its function from lines to (line, output object) pairs."""
    from jaxkv.serving.batch_answers import BatchFileRunner

    with recipe.create_engine() as engine:
        write_to_stderr(f"jaxkv: {name}, {engine.stats.slots} slots, {recipe.options['policy']}")
        yield BatchFileRunner(engine, name=name).answer_lines


def _answer_remaining_lines(ledger: Any, answering: Callable[[], Any]) -> int:
    """Answer a batch's unanswered lines, write the output file, and return the number of lines without status 200."""
    if ledger.kept:
        write_to_stderr(f"jaxkv: {ledger.kept} of {ledger.lines} lines are answered already")
    try:
        if ledger.kept < ledger.lines:
            bar = tqdm(total=ledger.lines, initial=ledger.kept, unit=" lines", disable=None)
            with bar, answering() as answers:
                for line, answer in answers(ledger.iterate_unanswered_lines()):
                    ledger.append_answer(line, answer)
                    bar.update()
        return ledger.write_output_file()
    finally:
        ledger.close_partial_file()
