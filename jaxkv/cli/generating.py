"""`jaxkv generate`: validates its options, loads the model, answers, prints and writes."""

import dataclasses
import itertools
import json
import sys
from typing import Annotated, Any

from jaxkv._dataclasses import frozen_dataclass
from jaxkv._errors import require
from jaxkv.arguments import make_random_key
from jaxkv.cli import EXAMPLES
from jaxkv.cli.models import ComputeOptions
from jaxkv.cli.options import ArgumentSpec, Count, File, PolicyArguments, Seed, pick_fields
from jaxkv.cli.outputs import OutputTarget, read_text, write_to_stderr, write_to_stdout
from jaxkv.engine.generation_results import Generation
from jaxkv.engine.sampling import GREEDY, Sampling
from jaxkv.generation import generate
from jaxkv.policies import Policy

NOTES = f"""\
The prompt is the file, the text of --prompt and the question, joined by blank lines. With a chat template it is one
user message; --raw passes it to the model unchanged. The text goes to stdout (streamed on a terminal), the figures to
stderr. Options that the policy does not support are rejected: `jaxkv policies` lists the options of each policy.

Compiled programs are cached on disk: the second run with prompts of similar length starts faster.

{EXAMPLES}"""


@frozen_dataclass
class SamplingOptions(ComputeOptions):
    """Options of commands that sample an answer: tokens, stop strings, seed, sampling; greedy decoding by default.

    Attributes:
        max_new_tokens: maximum tokens of the answer.
        stop: strings that end the answer.
        seed: seed of random sampling; without a sampling option, decoding is greedy.
    """

    max_new_tokens: Count = 128
    stop: Annotated[tuple[str, ...], ArgumentSpec("S", tuple, "extend")] = ()
    seed: Seed = 0
    sampling: Sampling = GREEDY

    @property
    def generation_arguments(self) -> dict[str, Any]:
        """Dict of arguments for `jaxkv.generate` from a command's options, with the seed's random key."""
        given = pick_fields(self, "max_new_tokens stop sampling implementation")
        return given | {"key": make_random_key(self.seed)}


@frozen_dataclass
class GenerateCommand(SamplingOptions):
    """The command `jaxkv generate` and its options: answer one prompt under a policy.

    Attributes:
        prompt: text of the prompt.
        prompt_file: a UTF-8 text file with the prompt, at most 64 MiB; - for stdin.
        question: question about the text, added after a blank line.
        raw: treat the prompt as plain text, without a chat template.
        json: print one JSON object instead of the text.
        output: also write the JSON object to a file, complete or not at all; a FIFO or device is written to, not
            replaced.
        stream: print the text while it is sampled, if stdout is a terminal.
    """

    prompt: str = ""
    prompt_file: File | None = None
    question: str = ""
    raw: bool = False
    json: bool = False
    output: File | None = None
    stream: bool = True
    policy: PolicyArguments

    def run_command(self) -> None:
        """Answer the prompt: print text or JSON, write --output's JSON; without --json, print figures to stderr.

        Invalid options are rejected before the model is downloaded and loaded. The file is written even if stdout
        fails.
        """
        policy = self.policy.build_policy()
        out = None
        if self.output is not None:
            out = OutputTarget(flag="--output", name=self.output)
            out.require_writable([self.prompt_file or "", self.model])
        prompt = self._build_prompt()  # last, because stdin or a FIFO may block
        model = self.load_model()
        streams = self.stream and not self.json and sys.stdout.isatty()
        answered: Any = generate(
            model,
            prompt,
            policy=policy,
            raw=self.raw,
            stream=streams,
            # A progress bar on stderr and text on stdout would overwrite each other on a terminal.
            progress=False if streams else None,
            **self.generation_arguments,
        )
        if streams:
            for piece in itertools.chain(answered, "\n"):
                write_to_stdout(piece, end="")
        result: Any = answered.result if streams else answered
        record = self._build_json_record(policy, result)
        try:
            if not streams:
                # Printed before the file is written: a FIFO blocks until it has a reader.
                write_to_stdout(json.dumps(record) if self.json else result.text)
        finally:
            if out is not None:
                text = json.dumps(record, indent=2, ensure_ascii=False)
                # Invalid UTF-8 in a model's name is escaped, which JSON allows.
                out.write_bytes(f"{text}\n".encode("utf-8", "backslashreplace"))
        if not self.json:
            _print_stats(result)

    def _build_prompt(self) -> str:
        """Join --prompt-file's text, --prompt and --question by blank lines; ValueError if the first two are empty."""
        file = "" if self.prompt_file is None else read_text(self.prompt_file, "--prompt-file")
        remedy = "no prompt: use --prompt TEXT or --prompt-file FILE; a question alone is a prompt"
        require(bool(file.strip() or self.prompt), "prompt", None, remedy)
        return "\n\n".join(filter(None, (file.strip(), self.prompt, self.question)))

    def _build_json_record(self, policy: Policy, result: Any) -> dict[str, Any]:
        """Return an answer's JSON values: model, policy, sampling, text, token ids, finish reason and stats."""
        stats = dataclasses.asdict(result.stats)
        stats["decode_tokens_per_second"] = result.stats.decode_tokens_per_second
        return {
            "model": self.model,
            "policy": repr(policy),
            "sampling": repr(self.sampling),
            "text": result.text,
            "tokens": result.tokens.tolist(),
            "finish_reason": result.finish_reason,
            "stop_reason": result.stop_reason,
            "logprobs": result.logprobs and result.logprobs.to_lists(),
            "prompt_logprobs": result.prompt_logprobs and result.prompt_logprobs.to_lists(),
            "stats": stats,
        }


def _print_stats(result: Generation) -> None:
    """Print an answer's token counts, speed, seconds, reason of its end, kept entries and cache bytes to stderr."""
    stats = result.stats
    ended = "ended by itself" if result.finish_reason == "stop" else "cut at --max-new-tokens"
    ended = ended if result.stop_reason is None else f"ended at {result.stop_reason!r}"
    lines = [
        f"prompt   {stats.prompt_tokens} tokens in {stats.prefill_seconds:.2f} s",
        f"answer   {stats.new_tokens} tokens at {stats.decode_tokens_per_second:.1f} tokens/s; {ended}",
        f"compile  {stats.compile_seconds:.2f} s of these, tracing included",
        f"cache    {stats.full_bytes / 1e6:.2f} MB full, {stats.kept_bytes / 1e6:.2f} MB kept "
        f"({stats.kept:.1f} entries per kv head) in {stats.cache_bytes / 1e6:.2f} MB of memory",
    ]
    if stats.evicted_above_threshold:
        lines.append(
            f"cut      {stats.evicted_above_threshold} entries reached the threshold but exceeded the budget"
        )
    if stats.filter_layers:
        lines.append(
            f"filters  layers {', '.join(map(str, stats.filter_layers))} choose what others read"
        )
    if stats.host_bytes:
        sent = f"{stats.transfers_per_step:.0f} transfers and {stats.transferred_bytes_per_step / 1e6:.3f} MB per token"
        lines.append(f"host     {stats.host_bytes / 1e6:.2f} MB in host memory; {sent}")
    write_to_stderr("\n".join(lines))
