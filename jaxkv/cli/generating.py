"""`jaxkv generate`: checks its options, then loads the model, answers, prints and writes."""

import argparse
import dataclasses
import json
import re
import sys
from collections.abc import Iterable
from typing import Any

from jaxkv._errors import require
from jaxkv.arguments import as_sampling, random_key
from jaxkv.attention import named
from jaxkv.cli.examples import EXAMPLES
from jaxkv.cli.files import Target, read_text
from jaxkv.cli.models import (
    add_dtype_option,
    add_implementation_option,
    add_model_option,
    add_weights_option,
    require_model,
)
from jaxkv.cli.numbers import argument, positive, real, seed
from jaxkv.cli.policy_options import add_policy_options, policy_from
from jaxkv.cli.streams import Unwritten, stdout_is_closed, to_stderr, to_stdout
from jaxkv.engine.results import Generation
from jaxkv.engine.sampling import Sampler
from jaxkv.generation import generate
from jaxkv.loading import load
from jaxkv.machine.compilation import enable_compilation_cache
from jaxkv.policies import Method

GENERATE_NOTES = f"""\
The prompt is the file, the text of --prompt and the question, joined by blank lines. With a chat template it is one
user message; --raw gives it to the model as it is. The text goes to stdout (as it comes, if that is a terminal), the
figures to stderr. Options that the policy does not have are refused: `jaxkv policies` lists what each one has.

Compiled programs are kept on disk: the second run with prompts of similar length starts faster.

{EXAMPLES}"""


def add_generate_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `jaxkv generate` to its parser."""
    add = parser.add_argument_group("model and prompt").add_argument
    add_model_option(add)
    add_dtype_option(add)
    add_weights_option(add)
    add_implementation_option(add)
    add("--prompt", metavar="TEXT", help="the prompt itself")
    add(
        "--prompt-file",
        metavar="FILE",
        help="a UTF-8 text file with the prompt, 64 MiB at most; - for stdin",
    )
    add(
        "--question", metavar="TEXT", help="what to ask about this text; follows after a blank line"
    )
    add("--raw", action="store_true", help="plain text: no chat template")
    add_drawing_options(parser)
    add = parser.add_argument_group("output").add_argument
    add("--json", action="store_true", help="one JSON object on stdout instead of the text")
    output = "also write that JSON object to a file, whole or not at all; a FIFO or device is written to, not replaced"
    add("--output", metavar="FILE", help=output)
    add("--no-stream", action="store_true", help="print the text when it is complete")
    add_policy_options(parser)


def add_drawing_options(parser: argparse.ArgumentParser) -> None:
    """Adds options of sampling (--temperature, --top-k, --seed), --max-new-tokens and --stop to a parser."""
    share, count = argument(real), argument(positive)
    add = parser.add_argument_group("drawing tokens").add_argument
    add("--max-new-tokens", type=count, default=128, metavar="N", help="(default: %(default)s)")
    add("--stop", action="extend", nargs="+", metavar="S", help="strings that end it")
    add(
        "--temperature",
        type=share,
        metavar="T",
        help="draw at random; 0 for the likeliest token (default: 0, or 1 with a cut)",
    )
    add("--top-k", type=count, metavar="K", help="among the K likeliest")
    add("--top-p", type=share, metavar="P", help="among the likeliest that hold probability P")
    add("--min-p", type=share, metavar="P", help="at least P times as likely as the likeliest")
    add(
        "--seed",
        type=argument(seed),
        default=0,
        metavar="N",
        help="of random draws (default: %(default)s)",
    )


def sampling_from(options: argparse.Namespace) -> Sampler:
    """Sampler by --temperature, --top-k, --top-p and --min-p; the likeliest tokens without any."""
    names = ("temperature", "top_k", "top_p", "min_p")
    return as_sampling(None, **{name: getattr(options, name) for name in names})


def require_text(flag: str, texts: Iterable[str]) -> None:
    """Raises ValueError, naming the option, if any of the texts holds bytes that are not UTF-8 (lone surrogates)."""
    for text in texts:
        # Bytes that are not UTF-8 reach Python from the shell as lone surrogates.
        require(not re.search("[\ud800-\udfff]", text), flag, text, "not UTF-8 text")


def _prompt(options: argparse.Namespace) -> str:
    """Prompt text: --prompt-file, --prompt, --question joined by blank lines; ValueError without the first two."""
    for flag in ("prompt", "question", "stop"):
        given = getattr(options, flag) or ()
        require_text(f"--{flag}", [given] if isinstance(given, str) else given)
    file = (
        None
        if options.prompt_file is None
        else read_text(options.prompt_file, "--prompt-file").strip()
    )
    given = [text for text in (file, options.prompt) if text]
    remedy = "it has no text to be asked about: give --prompt-file FILE; a prompt without a document is --prompt TEXT"
    require(bool(given) or not options.question, "--question", options.question, remedy)
    require(bool(given), "prompt", None, "give --prompt TEXT or --prompt-file FILE")
    return "\n\n".join([*given, *([options.question] if options.question else [])])


def run_generate(options: argparse.Namespace) -> int:
    """Runs `jaxkv generate`: prints the answer, writes --output, then figures to stderr; returns exit code 0.

    Options that cannot be honoured are refused before the model is fetched and loaded.

    Where the answer cannot be written to its file, the OSError says that it is on stdout, or else on stderr. Where
    stdout fails, the file is written nonetheless, and `Unwritten` raised.
    """
    policy, sampling, implementation = (
        policy_from(options),
        sampling_from(options),
        named(options.implementation),
    )
    require(all(options.stop or ()), "--stop", "", "a stop string has at least one character")
    require_model(options.model)
    target = None
    if options.output is None:
        require(
            not stdout_is_closed(),
            "stdout",
            "closed",
            "there is nowhere to answer; give --output FILE",
        )
    else:
        target = Target(flag="--output", name=options.output)
        target.check({"--prompt-file": options.prompt_file or "", "--model": options.model})
    prompt = _prompt(options)  # last: stdin or a FIFO may keep us waiting
    enable_compilation_cache()
    model = load(options.model, dtype=options.dtype, weights=options.weights)
    streams = sys.stdout.isatty() and not options.json and not options.no_stream
    answered = generate(
        model,
        prompt,
        policy=policy,
        max_new_tokens=options.max_new_tokens,
        sampling=sampling,
        stop=options.stop or (),
        key=random_key(options.seed),
        raw=options.raw,
        stream=streams,
        implementation=implementation,
        # A progress bar on stderr and text on stdout would overwrite each other on a terminal.
        progress=False if streams else None,
    )
    lost = None
    if isinstance(answered, Generation):
        result = answered
    else:
        lost = _print_pieces(answered, go_on=target is not None)
        assert answered.result is not None
        result = answered.result
    record = _record(options.model, policy, sampling, result)
    answer = _answer(record, result, as_json=options.json)
    if not streams and not stdout_is_closed():
        # Printed before the file is written: a FIFO blocks until it has a reader.
        lost = _print(answer)
    if target is not None:
        _write(target, json_text(record, "utf-8", indent=2) + "\n", answer, on_stdout=lost is None)
    if not options.json:
        _print_stats(result)
    if lost is not None:
        raise lost
    return 0


def _answer(record: dict[str, Any], result: Generation, *, as_json: bool) -> str:
    """Text for stdout: the record as JSON, or the answer's text, or its token ids without a tokenizer."""
    if as_json:
        return json_text(record, getattr(sys.stdout, "encoding", None) or "utf-8")
    return result.text if isinstance(result.text, str) else " ".join(map(str, record["tokens"]))


def _print_pieces(pieces: Iterable[str], *, go_on: bool) -> Unwritten | None:
    """Prints pieces of text as they come and a newline; raises a stdout error, or returns it at the end if `go_on`."""
    lost = None
    for piece in pieces:
        lost = lost or _print(piece, end="")
        if lost is not None and not go_on:
            raise lost
    return lost or _print("")


def _print(text: str, *, end: str = "\n") -> Unwritten | None:
    """Writes text to stdout; returns the `Unwritten` error if that fails, else None."""
    try:
        to_stdout(text, end=end)
    except Unwritten as lost:
        return lost
    return None


def _write(target: Target, text: str, answer: str, *, on_stdout: bool) -> None:
    """Writes text to the output file; if that fails, prints the answer to stderr unless stdout has it, and raises."""
    try:
        target.write(text.encode())
    except (OSError, ValueError) as error:
        on_stdout = on_stdout and not stdout_is_closed()
        if not on_stdout:
            to_stderr(answer)
        raise OSError(f"{error}; the answer is on {'stdout' if on_stdout else 'stderr'}") from error


def json_text(record: Any, encoding: str, indent: int | None = None) -> str:
    """JSON text of one or several records; non-ASCII characters are escaped only if the encoding lacks some of them."""
    text = json.dumps(record, indent=indent, ensure_ascii=False)
    try:
        text.encode(encoding)
    except (UnicodeEncodeError, LookupError):
        return json.dumps(record, indent=indent)
    return text


def _record(model: str, policy: Method, sampling: Sampler, result: Generation) -> dict[str, Any]:
    """Dictionary for JSON of the answer: model, policy, sampler, text, token ids, reason of its end and stats."""
    stats = dataclasses.asdict(result.stats)
    stats["decode_tokens_per_second"] = result.stats.decode_tokens_per_second
    return {
        "model": model,
        "policy": repr(policy),
        "sampling": repr(sampling),
        "text": result.text,
        "tokens": result.tokens.tolist() if not isinstance(result.tokens, list) else [],
        "finish_reason": result.finish_reason,
        "stop_reason": result.stop_reason,
        "stats": stats,
    }


def _print_stats(result: Generation) -> None:
    """Writes the answer's times, tokens per second, reason of its end and cache bytes to stderr."""
    stats = result.stats
    ended = "ended by itself" if result.finish_reason == "stop" else "cut at --max-new-tokens"
    ended = ended if result.stop_reason is None else f"ended at {result.stop_reason!r}"
    lines = [
        f"prompt   {stats.prompt_tokens} tokens in {stats.prefill_seconds:.2f} s",
        f"answer   {stats.new_tokens} tokens at {stats.decode_tokens_per_second:.1f} tokens/s; {ended}",
        f"compile  {stats.compile_seconds:.2f} s of these, tracing included",
        f"cache    {stats.full_bytes / 1e6:.2f} MB full, {stats.kept_bytes / 1e6:.2f} MB kept "
        f"({stats.kept:.1f} rows per kv head) in {stats.cache_bytes / 1e6:.2f} MB of memory",
    ]
    if stats.cut_rows:
        lines.append(
            f"cut      {stats.cut_rows} rows reached the threshold, for which the budget had no room"
        )
    if stats.filter_layers:
        lines.append(
            f"filters  layers {', '.join(map(str, stats.filter_layers))} choose what others read"
        )
    if stats.host_bytes:
        sent = f"{stats.transfers_per_step:.0f} transfers and {stats.transferred_bytes_per_step / 1e6:.3f} MB a token"
        lines.append(f"host     {stats.host_bytes / 1e6:.2f} MB there; {sent}")
    to_stderr("\n".join(lines))
