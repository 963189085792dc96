"""The command line: makes the parser of all commands, runs one, and turns expected errors into one line."""

import argparse
import difflib
import importlib
import re
import sys
from typing import Any, NoReturn

import jaxkv
from jaxkv.cli.outputs import Unwritten, prepare_streams, to_stderr, to_stdout, warnings_in_one_line

_ABOUT = "Answers questions about long texts with a compressed KV cache."

EXAMPLES = """\
examples:
  ask a question about a document, keeping 256 entries per kv head of its cache:
    jaxkv generate --model smollm2-135m-instruct --policy adakv --budget 256 \\
        --prompt-file report.txt --question "What did it cost?"

  keep a fifth of the cache, with PyramidKV; one JSON object on stdout:
    jaxkv generate --policy pyramidkv --budget 0.2 --prompt-file report.txt --question "Who?" --json

  Ada-KV over PyramidKV, with the first 4 tokens and tokens 100 to 199 always kept:
    jaxkv generate --policy adakv --base pyramidkv --budget 512 --sinks 4 --protect 100:200 --prompt-file report.txt

  no compression, plain text instead of a chat, sampled:
    jaxkv generate --policy full --raw --prompt "Once upon a time" --temperature 0.8 --top-p 0.9 --seed 1

  whether a model, a policy and prompts fit on GPUs that are not there:
    jaxkv plan --model llama-3.1-70b --gpus h100x8 --context 131072 --batch 4 --policy adakv --budget 2048

  which models and policies there are:
    jaxkv models
    jaxkv policies
"""

# What each command does; its module, and there the dataclass of its options, whose `run` runs it.
_COMMANDS = {
    "generate": ("answer a prompt", "generating Generate"),
    "compress": ("save a document's compressed cache", "compress_and_ask Compress"),
    "ask": ("answer questions about a saved document", "compress_and_ask Ask"),
    "serve": ("answer OpenAI's HTTP interface, many requests at a time", "serving Serve"),
    "batch": ("answer a file of requests into a file of answers", "batching BatchCommand"),
    "filters": ("find the layers that choose best what others read (OmniKV)", "analysing Filters"),
    "fit-gate": ("train KVzap's gate for a model", "analysing FitGate"),
    "export": ("write programs and weights that run without jaxkv", "exporting Export"),
    "plan": ("say what fits on GPUs that need not be there", "planning Planning"),
    "eval": ("judge policies by tasks", "evaluating TasksCommand"),
    "models": ("list the named models", "listing Models"),
    "policies": ("list the policies: paper, parts, defaults, options", "listing Policies"),
}

# Raised for bad input, a full disk or a missing package. Anything else is our mistake and keeps its traceback.
_EXPECTED = (
    Unwritten,
    ValueError,
    TypeError,
    OverflowError,
    RecursionError,
    MemoryError,
    OSError,
    ImportError,
)


def main(argv: list[str] | None = None) -> int:
    """Runs the command line on `argv` (default: the process's arguments) and returns the exit code.

    The code is 0, 2 after an error, which is one line on stderr, or 130 after an interrupt.
    """
    prepare_streams()
    given = sys.argv[1:] if argv is None else argv
    with warnings_in_one_line():
        try:
            _run(_parser(given), given)
        except SystemExit as end:  # argparse has printed the help or the error
            return end.code if isinstance(end.code, int) else 2
        except KeyboardInterrupt:
            _complain("interrupted")
            return 130
        except Exception as error:
            if isinstance(error, Unwritten) and error.gone:
                return 0
            remedy = _remedy(error)
            if remedy is None:
                raise
            _complain(_message(error) + remedy)
            return 2
    return 0


def _run(parser: argparse.ArgumentParser, argv: list[str]) -> None:
    """Parses `argv` and runs its command."""
    options, unknown = parser.parse_known_args(argv)
    if unknown:
        message, first = " ".join(unknown), unknown[0].partition("=")[0]
        known = [name for action in options.command._actions for name in action.option_strings]
        near = _nearest(first, known)
        if first == "--compression-ratio":
            near = (
                "; it is kvpress' share of entries removed: give --budget, the share that is kept"
            )
        options.command.error(f"unrecognized arguments: {message}{near}")
    options.run(options)


def _nearest(word: str, known: list[str]) -> str:
    """Question whether the nearest of the known words was meant; empty if none is near."""
    near = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {near[0]}?" if near else ""


def _remedy(error: Exception) -> str | None:
    """Remedy for an error that the machine causes as text, empty for other expected ones; None for our mistakes."""
    if isinstance(error, _EXPECTED):
        return ""
    if not isinstance(error, RuntimeError):
        return None
    from jax.errors import JaxRuntimeError  # here, for `jaxkv --help` does without JAX

    full = re.search("RESOURCE_EXHAUSTED|[Oo]ut of memory", str(error))
    if full and isinstance(error, JaxRuntimeError):
        return "; lower the budget, the window or the prompt's length"
    return None


def _message(error: BaseException) -> str:
    """An error's text and notes on one line, or its class name if it has neither."""
    text = "\n".join([str(error), *getattr(error, "__notes__", ())])
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return "; ".join(lines) or type(error).__name__


def _complain(message: str) -> None:
    """Writes `jaxkv: error: ` and the message to stderr."""
    to_stderr(f"jaxkv: error: {message}")


class _Parser(argparse.ArgumentParser):
    """`ArgumentParser` with jaxkv's error format and exit code 2; its help raises `Unwritten` if stdout fails."""

    def error(self, message: str) -> NoReturn:
        if unknown := re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)$", message):
            message += _nearest(unknown[1], re.findall(r"[\w.-]+", unknown[2]))
        _complain(message)
        to_stderr(f"try: {self.prog} --help")
        raise SystemExit(2)

    def _print_message(self, message: str, file: Any = None) -> None:
        to_stdout(message, end="")


def _parser(argv: list[str] | None = None) -> argparse.ArgumentParser:
    """Builds the `ArgumentParser` of the command line; each command stores its function as `run`.

    Only commands named in `argv` are imported, and get their options and `run`; without `argv`, all of them.
    """
    raw = argparse.RawDescriptionHelpFormatter
    parser = _Parser(prog="jaxkv", description=_ABOUT, epilog=EXAMPLES, formatter_class=raw)
    version = f"jaxkv {jaxkv.__version__}"
    parser.add_argument("--version", action="version", version=version, help="print the version")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for name, (about, home) in _COMMANDS.items():
        said = f"{about[:1].upper()}{about[1:]}."
        command = commands.add_parser(name, help=about, description=said, formatter_class=raw)
        if argv is not None and name not in argv:
            continue
        file, cls = home.split()
        module = importlib.import_module(f"jaxkv.cli.{file}")
        command.epilog = getattr(module, "NOTES", None)
        importlib.import_module("jaxkv.cli.options").add_command(command, getattr(module, cls))
        must = [action for action in command._actions if action.required]
        words = [" ".join([*each.option_strings[:1], str(each.metavar)]) for each in must]
        words += ["TASK"] if name == "eval" else []
        command.usage = " ".join([command.prog, *words, "[options]"])
    return parser
