"""The command line: builds the parser of all commands, runs one, and prints expected errors as one line."""

import argparse
import difflib
import importlib
import re
import sys
from typing import Any, NoReturn

import jaxkv
from jaxkv.cli.outputs import (
    StdoutWriteError,
    prepare_standard_streams,
    warnings_in_one_line,
    write_to_stderr,
    write_to_stdout,
)

_ABOUT = "Answers questions about long texts with a compressed KV cache."

EXAMPLES = """\
examples:
  ask a question about a document with 256 entries per kv head in the cache:
    jaxkv generate --model smollm2-135m-instruct --policy adakv --budget 256 \\
        --prompt-file report.txt --question "What did it cost?"

  keep a fifth of the cache with PyramidKV, and print one JSON object:
    jaxkv generate --policy pyramidkv --budget 0.2 --prompt-file report.txt --question "Who?" --json

  Ada-KV over PyramidKV, with the first 4 tokens and tokens 100 to 199 always kept:
    jaxkv generate --policy adakv --base pyramidkv --budget 512 --sinks 4 --protect 100:200 --prompt-file report.txt

  no compression, plain text without a chat template, random sampling:
    jaxkv generate --policy full --raw --prompt "Once upon a time" --temperature 0.8 --top-p 0.9 --seed 1

  check whether a model, a policy and prompts fit on GPUs, present or not:
    jaxkv plan --model llama-3.1-70b --gpus h100x8 --context 131072 --batch 4 --policy adakv --budget 2048

  list the models and policies:
    jaxkv models
    jaxkv policies
"""

# Each command with its help, its module, and the dataclass of its options, whose `run_command` runs it.
_COMMANDS = {
    "generate": ("answer a prompt", "generating GenerateCommand"),
    "compress": ("save a document's compressed cache", "compress_and_ask CompressCommand"),
    "ask": ("answer questions about a saved document", "compress_and_ask AskCommand"),
    "serve": ("serve OpenAI's HTTP API, many requests at a time", "serving ServeCommand"),
    "batch": ("answer a file of requests, and write a file of answers", "batching BatchCommand"),
    "filters": ("find the filter layers of a model (OmniKV)", "analysing FindFilterLayersCommand"),
    "fit-gate": ("fit KVzap's gate to a model", "analysing FitGateCommand"),
    "fit-tri": ("measure a model's queries for TriAttention", "analysing FitTriCommand"),
    "export": ("export programs and weights that run without jaxkv", "exporting ExportCommand"),
    "plan": ("plan memory and speed on GPUs, present or not", "planning PlanCommand"),
    "eval": ("evaluate policies on tasks", "evaluating ListTasksCommand"),
    "models": ("list the named models", "listing ListModelsCommand"),
    "policies": (
        "list the policies: paper, parts, defaults, options",
        "listing ListPoliciesCommand",
    ),
}

# Errors of bad input, a full disk or a missing package. Any other error is a bug and keeps its traceback.
_EXPECTED = (
    StdoutWriteError,
    ValueError,
    TypeError,
    OverflowError,
    RecursionError,
    MemoryError,
    OSError,
    ImportError,
)


def main(argv: list[str] | None = None) -> int:
    """Run the jaxkv command line on `argv` (default: the process's arguments) and return the exit code.

    The code is 0, 2 after an error, which is one line on stderr, or 130 after an interrupt.
    """
    prepare_standard_streams()
    given = sys.argv[1:] if argv is None else argv
    with warnings_in_one_line():
        try:
            _parse_and_run(_build_parser(given), given)
        except SystemExit as end:  # argparse has printed the help or the error
            return end.code if isinstance(end.code, int) else 2
        except KeyboardInterrupt:
            _print_error("interrupted")
            return 130
        except Exception as error:
            if isinstance(error, StdoutWriteError) and error.gone:
                return 0
            remedy = _find_error_remedy(error)
            if remedy is None:
                raise
            _print_error(_format_error_message(error) + remedy)
            return 2
    return 0


def _parse_and_run(parser: argparse.ArgumentParser, argv: list[str]) -> None:
    """Parse `argv` and run its command; for an unknown option, exit with an error that suggests the nearest one."""
    options, unknown = parser.parse_known_args(argv)
    if unknown:
        message = " ".join(unknown)
        first = unknown[0].partition("=")[0]
        known = [name for action in options.command._actions for name in action.option_strings]
        near = _suggest_nearest_word(first, known)
        if first == "--compression-ratio":
            near = "; it is the evicted share in kvpress: use --budget with the kept share"
        options.command.error(f"unrecognized arguments: {message}{near}")
    options.run(options)


def _suggest_nearest_word(word: str, known: list[str]) -> str:
    """Return "; did you mean WORD?" with the nearest of the known words, or an empty string if none is near."""
    near = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {near[0]}?" if near else ""


def _find_error_remedy(error: Exception) -> str | None:
    """Return advice for a device's out-of-memory error, "" for other expected errors, None for bugs."""
    if isinstance(error, _EXPECTED):
        return ""
    if not isinstance(error, RuntimeError):
        return None
    from jax.errors import JaxRuntimeError  # here, because `jaxkv --help` needs no JAX

    full = re.search("RESOURCE_EXHAUSTED|[Oo]ut of memory", str(error))
    if full and isinstance(error, JaxRuntimeError):
        return "; lower the budget, the window or the length of the prompt"
    return None


def _format_error_message(error: BaseException) -> str:
    """Return an error's text and notes joined on one line, or its class name if both are empty."""
    text = "\n".join([str(error), *getattr(error, "__notes__", ())])
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return "; ".join(lines) or type(error).__name__


def _print_error(message: str) -> None:
    """Write "jaxkv: error: " and a message to stderr, as one line."""
    write_to_stderr(f"jaxkv: error: {message}")


class _CommandParser(argparse.ArgumentParser):
    """`ArgumentParser` with jaxkv's error format and exit code 2; help raises `StdoutWriteError` if stdout fails."""

    def error(self, message: str) -> NoReturn:
        if unknown := re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)$", message):
            message += _suggest_nearest_word(unknown[1], re.findall(r"[\w.-]+", unknown[2]))
        _print_error(message)
        write_to_stderr(f"try: {self.prog} --help")
        raise SystemExit(2)

    def _print_message(self, message: str, file: Any = None) -> None:
        write_to_stdout(message, end="")


def _build_parser(argv: list[str] | None = None) -> argparse.ArgumentParser:
    """Build jaxkv's `ArgumentParser` with a subparser per command, whose parsed options hold the function `run`.

    Only commands in `argv` are imported and get their options and `run`; None imports all of them.
    """
    raw = argparse.RawDescriptionHelpFormatter
    parser = _CommandParser(prog="jaxkv", description=_ABOUT, epilog=EXAMPLES, formatter_class=raw)
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
        importlib.import_module("jaxkv.cli.options").configure_command_parser(
            command, getattr(module, cls)
        )
        must = [action for action in command._actions if action.required]
        words = [" ".join([*each.option_strings[:1], str(each.metavar)]) for each in must]
        words += ["TASK"] if name == "eval" else []
        command.usage = " ".join([command.prog, *words, "[options]"])
    return parser
