"""The command line: makes the parser of all commands, runs one, and turns expected errors into one line."""

import argparse
import difflib
import importlib
import re
import sys
from typing import Any, NoReturn

import jaxkv
from jaxkv.cli.examples import EXAMPLES
from jaxkv.cli.streams import Unwritten, prepare_streams, to_stderr, to_stdout, warnings_in_one_line

_ABOUT = "Answers questions about long texts with a compressed KV cache."

# What each command does; its module, and there the functions that add options and that run it, and its notes.
_COMMANDS = {
    "generate": ("answer a prompt", "generating add_generate_options run_generate GENERATE_NOTES"),
    "compress": (
        "save a document's compressed cache",
        "documents add_compress_options run_compress DOCUMENT_NOTES",
    ),
    "ask": (
        "answer questions about a saved document",
        "documents add_ask_options run_ask DOCUMENT_NOTES",
    ),
    "serve": (
        "answer OpenAI's HTTP interface, many requests at a time",
        "serving add_serve_options run_serve SERVE_NOTES",
    ),
    "batch": (
        "answer a file of requests into a file of answers",
        "batching add_batch_options run_batch BATCH_NOTES",
    ),
    "filters": (
        "find the layers that choose best what others read (OmniKV)",
        "filters add_filter_options print_filters",
    ),
    "fit-gate": ("train KVzap's gate for a model", "fitting add_fit_options run_fit"),
    "export": (
        "write programs and weights that run without jaxkv",
        "exporting add_export_options run_export",
    ),
    "plan": (
        "say what fits on GPUs that need not be there",
        "planning add_plan_options print_plan NOTES",
    ),
    "eval": ("judge policies by tasks", "evaluating add_eval_options print_tasks NOTES"),
    "models": ("list the named models", "listing add_json_option print_models"),
    "policies": (
        "list the policies: paper, parts, defaults, options",
        "listing add_json_option print_policies",
    ),
}

# Raised for bad input, a full disk or a missing package. Anything else is our mistake and keeps its traceback.
_EXPECTED = (
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
    with warnings_in_one_line():
        given = sys.argv[1:] if argv is None else argv
        return _run(_parser(given), given)


def _run(parser: argparse.ArgumentParser, argv: list[str]) -> int:
    """Parses `argv`, runs its command and returns the exit code; expected errors become one line on stderr."""
    try:
        try:
            options, unknown = parser.parse_known_args(argv)
            if unknown:
                options.command.error(_unknown(unknown, options.command))
            # Up to Python 3.12, argparse turns the value in `--model=--` into an empty list.
            empty = [name for name, value in vars(options).items() if value == []]
            if empty:
                parser.error(f"{empty[0].split()[-1].removeprefix('--')}: -- is no value")
        except SystemExit as end:  # argparse has printed the help or the error
            return end.code if isinstance(end.code, int) else 2
        return options.run(options)
    except Unwritten as lost:
        if lost.gone:
            return 0
        _complain(str(lost))
        return 2
    except _EXPECTED as error:
        _complain(_message(error))
        return 2
    except RuntimeError as error:
        remedy = _remedy(error)
        if remedy is None:
            raise
        _complain(f"{_message(error)}; {remedy}")
        return 2
    except KeyboardInterrupt:
        _complain("interrupted")
        return 130


def _remedy(error: RuntimeError) -> str | None:
    """Remedy for a RuntimeError that the machine causes (no home folder, out of memory) as text; None for any other."""
    if "home directory" in str(error):  # pathlib's, where a user has none
        return "set HOME, and JAXKV_CACHE to a folder for models"
    from jax.errors import JaxRuntimeError  # here, for `jaxkv --help` does without JAX

    if isinstance(error, JaxRuntimeError) and re.search(
        "RESOURCE_EXHAUSTED|[Oo]ut of memory", str(error)
    ):
        return "lower the budget, the window or the prompt's length"
    return None


def _message(error: BaseException) -> str:
    """An error's text and notes on one line, or its class name if it has neither."""
    text = "\n".join([str(error), *getattr(error, "__notes__", ())])
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    message = "; ".join(lines) or type(error).__name__
    return f"nested too deeply ({message})" if isinstance(error, RecursionError) else message


def _complain(message: str) -> None:
    """Writes `jaxkv: error: ` and the message to stderr."""
    to_stderr(f"jaxkv: error: {message}")


class _Parser(argparse.ArgumentParser):
    """`ArgumentParser` with jaxkv's error format and exit code 2; its help raises `Unwritten` if stdout fails."""

    def error(self, message: str) -> NoReturn:
        if unknown := re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)$", message):
            near = difflib.get_close_matches(unknown[1], re.findall(r"[\w.-]+", unknown[2]), n=1)
            message += f"; did you mean {near[0]}?" if near else ""
        _complain(message)
        to_stderr(f"try: {self.prog} --help")
        raise SystemExit(2)

    def print_help(self, file: Any = None) -> None:
        to_stdout(self.format_help(), end="")


def _unknown(given: list[str], command: argparse.ArgumentParser) -> str:
    """Error text for arguments that a command does not take, with what other libraries' names or nearest ones mean."""
    message = f"unrecognized arguments: {' '.join(given)}"
    first = given[0].partition("=")[0]
    if first == "--compression-ratio":
        return f"{message}; it is kvpress' share of rows removed: give --budget, the share that is kept"
    known = [
        name
        for action in command._actions
        for name in action.option_strings
        if name.startswith("--")
    ]
    near = difflib.get_close_matches(first, known, n=1)
    return f"{message}; did you mean {near[0]}?" if near else message


def _usage(command: argparse.ArgumentParser) -> str:
    """Usage text of a command: what must be given, and `[options]` for all that follows below it."""
    words = [command.prog]
    for action in command._actions:
        name, several = action.metavar or action.dest.upper(), action.nargs in ("+", "*")
        word = f"{name} [{name} ...]" if several else str(name)
        if action.required:
            words.append(" ".join([*action.option_strings[:1], word]))
    return " ".join([*words, "[options]"]).replace("%", "%%")


class _Version(argparse.Action):
    """Argparse action of `--version`: looks the package's version up, prints it to stdout and exits."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        to_stdout(f"jaxkv {jaxkv.__version__}")
        parser.exit()


def _parser(argv: list[str] | None = None) -> argparse.ArgumentParser:
    """Builds the `ArgumentParser` of the command line; each command stores its function as `run`.

    Only commands named in `argv` are imported, and get their options and `run`; without `argv`, all of them.
    """
    raw = argparse.RawDescriptionHelpFormatter
    parser = _Parser(prog="jaxkv", description=_ABOUT, epilog=EXAMPLES, formatter_class=raw)
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for name, (about, home) in _COMMANDS.items():
        said = f"{about[:1].upper()}{about[1:]}."
        command = commands.add_parser(name, help=about, description=said, formatter_class=raw)
        if argv is not None and name not in argv:
            continue
        file, add_options, run, *notes = home.split()
        module = importlib.import_module(f"jaxkv.cli.{file}")
        command.epilog = getattr(module, notes[0]) if notes else None
        command.set_defaults(run=getattr(module, run), command=command)
        getattr(module, add_options)(command)
        if not any(isinstance(action, argparse._SubParsersAction) for action in command._actions):
            command.usage = _usage(command)
    return parser
