"""`jaxkv compress` saves a document's compressed cache; `jaxkv ask` loads it and answers questions about it."""

import dataclasses
import json
import os
from pathlib import Path
from typing import Annotated

from jaxkv._dataclasses import frozen_dataclass
from jaxkv._errors import require
from jaxkv.arguments import make_random_key
from jaxkv.cache.saved import load_cache
from jaxkv.cli.generating import SamplingOptions
from jaxkv.cli.models import ComputeOptions
from jaxkv.cli.options import ArgumentSpec, Name, PolicyArguments, Seed
from jaxkv.cli.outputs import read_text, write_to_stderr, write_to_stdout
from jaxkv.generation import generate, prefill
from jaxkv.planning.plans import format_policy

NOTES = """\
`jaxkv compress` prefills a document once and saves its compressed cache to a folder. `jaxkv ask` answers questions from
that folder, in any later process with the same model. The questions are unknown when the document is compressed: choose
a policy that does not score by the end of the prompt, such as kvzip, keydiff or defensivekv.

examples:
  keep a quarter of a report's cache, and ask it two questions:
    jaxkv compress report.txt --policy kvzip --budget 0.25 --out report.cache
    jaxkv ask report.cache "Who is the director?" "What did it cost?"

"""


@frozen_dataclass
class CompressCommand(ComputeOptions):
    """The command `jaxkv compress` and its options: save a document's compressed cache to a folder.

    Attributes:
        file: a UTF-8 text file with the document, at most 64 MiB; - for stdin.
        out: new folder for the compressed cache.
        raw: treat the document as plain text, without a chat template.
        seed: seed of policies that use random numbers.
    """

    file: Annotated[str, ArgumentSpec("FILE", place=True)]
    out: Name
    raw: bool = False
    seed: Seed = 0
    policy: PolicyArguments

    def run_command(self) -> None:
        """Prefill a document, save its compressed cache to a new folder, and print entries and bytes to stderr."""
        policy = self.policy.build_policy()
        out = Path(os.path.expanduser(self.out))
        fine = not os.path.lexists(out) and out.parent.is_dir()
        remedy = "not a new folder: use a new one in an existing folder"
        require(fine, "--out", self.out, remedy)
        text = read_text(self.file, "FILE").strip()
        cache = prefill(
            self.load_model(),
            text,
            policy=policy,
            key=make_random_key(self.seed),
            raw=self.raw,
            implementation=self.implementation,
        )
        cache.save(out)
        rows = f"{cache.kept.mean():,.0f} of {int(cache.seen.max()):,} entries per kv head"
        sizes = f"{cache.kept_nbytes / 1e6:,.1f} of {cache.full_nbytes / 1e6:,.1f} MB"
        write_to_stderr(f"jaxkv: {self.out}: {rows}, {sizes}, {format_policy(policy)}")


@frozen_dataclass
class AskCommand(SamplingOptions):
    """The command `jaxkv ask` and its options: answer questions about a document whose cache is saved.

    Attributes:
        folder: folder written by `jaxkv compress`, or by `cache.save` in Python.
        questions: one or more questions, answered as one batch; programs are compiled for each number of
            questions.
        json: print a JSON list with question, text, token ids and finish reason.
    """

    folder: Annotated[str, ArgumentSpec("FOLDER", place=True)]
    questions: Annotated[tuple[str, ...], ArgumentSpec("QUESTION", tuple, "extend", place=True)]
    json: bool = False

    def run_command(self) -> None:
        """Load a saved cache, answer questions about it as one batch; print text or JSON, and figures to stderr."""
        questions = list(self.questions)
        # First, because a large model takes minutes to load.
        cache = load_cache(self.folder)
        answers = generate(self.load_model(), questions, cache=cache, **self.generation_arguments)
        stats = answers.stats
        told = f"{len(questions)} questions, prefilled in {stats.prefill_seconds:.1f} s"
        told += f"; {stats.new_tokens} tokens, {stats.decode_tokens_per_second:.1f} tokens/s"
        write_to_stderr(f"jaxkv: {told}; {stats.compile_seconds:.1f} s of compilation included")
        found = [
            {
                "question": question,
                **dataclasses.asdict(answer),
                "tokens": answer.tokens.tolist(),
                "logprobs": answer.logprobs and answer.logprobs.to_lists(),
            }
            for question, answer in zip(questions, answers, strict=True)
        ]
        if self.json:
            write_to_stdout(json.dumps(found))
            return
        for each in found:
            told = f"{each['question']}\n  {' '.join(each['text'].split())}"
            write_to_stdout(each["text"] if len(found) == 1 else told)
