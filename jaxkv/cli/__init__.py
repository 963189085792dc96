"""The command line: `jaxkv generate`, `plan`, `eval`, `analyze`, `filters`, `export`, `models` and `policies`."""

import argparse
import difflib
import importlib.metadata
import re
import tomllib
from pathlib import Path
from typing import Any, NoReturn

from jax.errors import JaxRuntimeError

from jaxkv.cli.analysing import ANALYZE_NOTES, add_analyze_options, run_analyze
from jaxkv.cli.evaluating import NOTES as EVAL_NOTES
from jaxkv.cli.evaluating import add_eval_options
from jaxkv.cli.exporting import add_export_options, run_export
from jaxkv.cli.filters import add_filter_options, print_filters
from jaxkv.cli.generating import add_generate_options, run_generate
from jaxkv.cli.listing import print_models, print_policies
from jaxkv.cli.planning import NOTES, add_plan_options, print_plan
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


# What bad input, a full disk or a missing package leads to. Anything else is our mistake and keeps its traceback.
_EXPECTED = (ValueError, TypeError, OverflowError, RecursionError, MemoryError, OSError, ImportError)


def main(argv: list[str] | None = None) -> int:
    """Runs the command line.

    Args:
        argv: the arguments; those of the process if None.

    Returns:
        The exit code: 0, or 2 after an error, which has been told on stderr.
    """
    prepare_streams()
    with warnings_in_one_line():
        return _run(_parser(), argv)


def _run(parser: argparse.ArgumentParser, argv: list[str] | None) -> int:
    """Exit code of the command that is asked for, errors told on stderr."""
    try:
        try:
            options = parser.parse_args(argv)
            # Up to Python 3.12 argparse makes an empty list of the value in `--model=--`.
            lost = [name for name, value in vars(options).items() if value == []]
            if lost:
                parser.error(f"{lost[0].split()[-1].removeprefix('--')}: -- is no value")
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
    """What to do about the few of this broad kind that are no mistakes of ours."""
    if "home directory" in str(error):  # pathlib's, where a user has none
        return "set HOME, and JAXKV_CACHE to a folder for models"
    if isinstance(error, JaxRuntimeError) and re.search("RESOURCE_EXHAUSTED|[Oo]ut of memory", str(error)):
        return "lower the budget, the window or the prompt's length"
    return None


def _message(error: BaseException) -> str:
    """The error's text in one line, or its kind where it has none, whichever library raised it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    message = "; ".join(lines) or type(error).__name__
    return f"nested too deeply ({message})" if isinstance(error, RecursionError) else message


def _complain(message: str) -> None:
    to_stderr(f"jaxkv: error: {message}")


def version() -> str:
    """The package's version.

    Returns:
        The installed distribution's; for a plain checkout what its pyproject.toml says.
    """
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
    """Complains in one form, whatever the subcommand, and notices where help cannot be written."""

    def error(self, message: str) -> NoReturn:
        if unknown := re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)$", message):
            near = difflib.get_close_matches(unknown[1], re.findall(r"[\w.-]+", unknown[2]), n=1)
            message += f"; did you mean {near[0]}?" if near else ""
        _complain(message)
        to_stderr(f"try: {self.prog} --help")
        raise SystemExit(2)

    def print_help(self, file: Any = None) -> None:
        to_stdout(self.format_help(), end="")


class _Version(argparse.Action):
    """Looks the version up only when it is asked for."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        to_stdout(f"jaxkv {version()}")
        parser.exit()


def _parser() -> argparse.ArgumentParser:
    told: dict[str, Any] = {"description": _ABOUT, "formatter_class": argparse.RawDescriptionHelpFormatter}
    parser = _Parser(prog="jaxkv", epilog=_EXAMPLES, **told)
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    generating = commands.add_parser("generate", help="answer a prompt", epilog=_GENERATE_NOTES + _EXAMPLES, **told)
    generating.set_defaults(run=run_generate)
    add_generate_options(generating)
    filters = commands.add_parser("filters", help="find the layers that choose best what others read (OmniKV)")
    filters.set_defaults(run=print_filters)
    add_filter_options(filters)
    exporting = commands.add_parser("export", help="write programs and weights that run without jaxkv")
    exporting.set_defaults(run=run_export)
    add_export_options(exporting)
    planning = commands.add_parser("plan", help="what fits on GPUs that need not be there", epilog=NOTES, **told)
    planning.set_defaults(run=print_plan)
    add_plan_options(planning)
    evaluating = commands.add_parser("eval", help="judge policies by tasks", epilog=EVAL_NOTES, **told)
    add_eval_options(evaluating)
    analysing = commands.add_parser("analyze", help="what attention looks like", epilog=ANALYZE_NOTES, **told)
    analysing.set_defaults(run=run_analyze)
    add_analyze_options(analysing)
    models = commands.add_parser("models", help="list the named models")
    models.set_defaults(run=print_models)
    policies = commands.add_parser("policies", help="list the policies: paper, parts, defaults, options")
    policies.set_defaults(run=print_policies)
    for command in (models, policies):
        command.add_argument("--json", action="store_true", help="print JSON")
    return parser
