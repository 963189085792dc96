"""The command line: makes the parser of all commands, runs one, and turns expected errors into one line."""

import argparse
import difflib
import importlib.metadata
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from jax.errors import JaxRuntimeError

from jaxkv.cli.analysing import ANALYZE_NOTES, add_analyze_options, run_analyze
from jaxkv.cli.batching import BATCH_NOTES, add_batch_options, run_batch
from jaxkv.cli.documents import DOCUMENT_NOTES, add_ask_options, add_compress_options, run_ask, run_compress
from jaxkv.cli.evaluating import NOTES as EVAL_NOTES
from jaxkv.cli.evaluating import add_eval_options, print_tasks
from jaxkv.cli.exporting import add_export_options, run_export
from jaxkv.cli.filters import add_filter_options, print_filters
from jaxkv.cli.fitting import add_fit_options, run_fit
from jaxkv.cli.generating import add_generate_options, run_generate
from jaxkv.cli.listing import add_json_option, print_models, print_policies
from jaxkv.cli.planning import NOTES, add_plan_options, print_plan
from jaxkv.cli.serving import SERVE_NOTES, add_serve_options, run_serve
from jaxkv.cli.streams import Unwritten, prepare_streams, to_stderr, to_stdout, warnings_in_one_line

_ABOUT = "Answers questions about long texts with a compressed KV cache."
_EXAMPLES = """\
examples:
  ask a question about a document, keeping 256 rows per kv head of its cache:
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
_GENERATE_NOTES = """\
The prompt is the file, the text of --prompt and the question, joined by blank lines. With a chat template it is one
user message; --raw gives it to the model as it is. The text goes to stdout (as it comes, if that is a terminal), the
figures to stderr. Options that the policy does not have are refused: `jaxkv policies` lists what each one has.

Compiled programs are kept on disk: the second run with prompts of similar length starts faster.

"""


# Raised for bad input, a full disk or a missing package. Anything else is our mistake and keeps its traceback.
_EXPECTED = (ValueError, TypeError, OverflowError, RecursionError, MemoryError, OSError, ImportError)


def main(argv: list[str] | None = None) -> int:
    """Runs the command line on `argv` (default: the process's arguments) and returns the exit code.

    The code is 0, 2 after an error, which is one line on stderr, or 130 after an interrupt.
    """
    prepare_streams()
    with warnings_in_one_line():
        return _run(_parser(), argv)


def _run(parser: argparse.ArgumentParser, argv: list[str] | None) -> int:
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
    if isinstance(error, JaxRuntimeError) and re.search("RESOURCE_EXHAUSTED|[Oo]ut of memory", str(error)):
        return "lower the budget, the window or the prompt's length"
    return None


def _message(error: BaseException) -> str:
    """An error's text on one line, or its class name if it has no text."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    message = "; ".join(lines) or type(error).__name__
    return f"nested too deeply ({message})" if isinstance(error, RecursionError) else message


def _complain(message: str) -> None:
    """Writes `jaxkv: error: ` and the message to stderr."""
    to_stderr(f"jaxkv: error: {message}")


def version() -> str:
    """Version of the installed package as text, else that in the checkout's pyproject.toml, else "unknown"."""
    try:
        return importlib.metadata.version("jaxkv")
    except importlib.metadata.PackageNotFoundError:
        pass
    try:
        project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text("utf-8"))["project"]
        return project["version"] if project["name"] == "jaxkv" else "unknown"
    except (OSError, ValueError, KeyError):
        return "unknown"


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
    known = [name for action in command._actions for name in action.option_strings if name.startswith("--")]
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
        to_stdout(f"jaxkv {version()}")
        parser.exit()


def _parser() -> argparse.ArgumentParser:
    """Builds the `ArgumentParser` of the whole command line; each command stores its function as `run`."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = _Parser(prog="jaxkv", description=_ABOUT, epilog=_EXAMPLES, formatter_class=raw)
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    def add(
        name: str,
        about: str,
        add_options: Callable[[argparse.ArgumentParser], None],
        run: Callable[[argparse.Namespace], int],
        notes: str | None = None,
    ) -> None:
        said = f"{about[:1].upper()}{about[1:]}."
        command = commands.add_parser(name, help=about, description=said, epilog=notes, formatter_class=raw)
        command.set_defaults(run=run, command=command)
        add_options(command)
        if not any(isinstance(action, argparse._SubParsersAction) for action in command._actions):
            command.usage = _usage(command)

    add("generate", "answer a prompt", add_generate_options, run_generate, _GENERATE_NOTES + _EXAMPLES)
    add("compress", "save a document's compressed cache", add_compress_options, run_compress, DOCUMENT_NOTES)
    add("ask", "answer questions about a saved document", add_ask_options, run_ask, DOCUMENT_NOTES)
    add("serve", "answer OpenAI's HTTP interface, many requests at a time", add_serve_options, run_serve, SERVE_NOTES)
    add("batch", "answer a file of requests into a file of answers", add_batch_options, run_batch, BATCH_NOTES)
    add("filters", "find the layers that choose best what others read (OmniKV)", add_filter_options, print_filters)
    add("fit-gate", "train KVzap's gate for a model", add_fit_options, run_fit)
    add("export", "write programs and weights that run without jaxkv", add_export_options, run_export)
    add("plan", "say what fits on GPUs that need not be there", add_plan_options, print_plan, NOTES)
    add("eval", "judge policies by tasks", add_eval_options, print_tasks, EVAL_NOTES)
    add("analyze", "show what attention looks like", add_analyze_options, run_analyze, ANALYZE_NOTES)
    add("models", "list the named models", add_json_option, print_models)
    add("policies", "list the policies: paper, parts, defaults, options", add_json_option, print_policies)
    return parser
