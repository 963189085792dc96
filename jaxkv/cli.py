"""The command line: `jaxkv generate`, `jaxkv filters`, `jaxkv models`, `jaxkv policies`."""

import argparse
import contextlib
import dataclasses
import json
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any, NoReturn

import jax

from jaxkv._errors import require
from jaxkv.attention import Implementation, named
from jaxkv.compilation import enable_compilation_cache
from jaxkv.finding import add_filter_options, print_filters
from jaxkv.generate import generate
from jaxkv.listing import print_models, print_policies
from jaxkv.load import load
from jaxkv.policies import LinearLayers, MaxPool, NoPool, OmniKV, Policy
from jaxkv.policies.registry import POLICIES, defaults, policy_class
from jaxkv.results import Generation
from jaxkv.sampling import Greedy, MinP, Sampling, Temperature, TopK, TopP

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


def main(argv: list[str] | None = None) -> int:
    """Runs the command line.

    Args:
        argv: the arguments; those of the process if None.

    Returns:
        The exit code: 0, or 2 after an error, which has been told on stderr.
    """
    try:
        options = _parser().parse_args(argv)
    except SystemExit as end:  # argparse has printed the help or the error
        return end.code if isinstance(end.code, int) else 2
    try:
        code = options.run(options)
        sys.stdout.flush()  # here, where a reader that has gone is no traceback
        return code
    except (ValueError, TypeError, MemoryError, OSError, ImportError) as error:
        if isinstance(error, BrokenPipeError):
            # The reader of our output has gone, `head` say. Python would complain when it flushes stdout at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
        _complain(str(error) or type(error).__name__)
        return 2
    except KeyboardInterrupt:
        _complain("interrupted")
        return 130


def _complain(message: str) -> None:
    print(f"jaxkv: error: {message}", file=sys.stderr)


class _Parser(argparse.ArgumentParser):
    """Complains in one form, whatever the subcommand."""

    def error(self, message: str) -> NoReturn:
        _complain(message)
        print(f"try: {self.prog} --help", file=sys.stderr)
        raise SystemExit(2)


def _parser() -> argparse.ArgumentParser:
    plain = argparse.RawDescriptionHelpFormatter
    parser = _Parser(prog="jaxkv", description=_ABOUT, epilog=_EXAMPLES, formatter_class=plain)
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    notes = _GENERATE_NOTES + _EXAMPLES
    asking = commands.add_parser(
        "generate", help="answer a prompt", description=_ABOUT, epilog=notes, formatter_class=plain
    )
    asking.set_defaults(run=_generate)
    _add_prompt_options(asking)
    _add_policy_options(asking)
    _add_drawing_options(asking)
    finding = commands.add_parser("filters", help="find the layers that choose best what others read (OmniKV)")
    finding.set_defaults(run=print_filters)
    add_filter_options(finding)
    models = commands.add_parser("models", help="list the named models")
    models.set_defaults(run=lambda options: print_models(as_json=options.json))
    policies = commands.add_parser("policies", help="list the policies: paper, parts, defaults")
    policies.set_defaults(run=lambda options: print_policies(as_json=options.json))
    for command in (models, policies):
        command.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _add_prompt_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("model and prompt")
    known = "smollm2-135m-instruct"
    group.add_argument(
        "--model",
        default=known,
        metavar="NAME",
        help="a name from `jaxkv models`, a Hugging Face folder, a .gguf file or a hub id (default: %(default)s)",
    )
    group.add_argument("--dtype", help="float32, bfloat16 or float16 (default: bfloat16 on a GPU, float32 on a CPU)")
    group.add_argument(
        "--implementation",
        default=Implementation.AUTO.value,
        help="what computes attention: auto, xla, pallas or cudnn (default: %(default)s)",
    )
    group.add_argument("--prompt", metavar="TEXT", help="the prompt itself")
    group.add_argument("--prompt-file", metavar="FILE", help="a UTF-8 text file with the prompt; - for stdin")
    group.add_argument("--question", metavar="TEXT", help="what to ask about it; follows after a blank line")
    group.add_argument("--raw", action="store_true", help="plain text: no chat template")


def _add_policy_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("policy")
    group.add_argument("--policy", default="full", metavar="NAME", help=f"{', '.join(POLICIES)} (default: full)")
    group.add_argument(
        "--budget",
        type=_budget,
        metavar="N",
        help="rows kept per kv head, sinks and window included: a number (256), or a share of the prompt (0.2)",
    )
    group.add_argument("--base", metavar="NAME", help="adakv, criticalkv: the policy it is built on (default: snapkv)")
    group.add_argument("--window", type=int, metavar="W", help="last tokens, which score the others and always stay")
    group.add_argument("--pool-kernel", type=int, metavar="K", help="width of the pooling over neighbours, odd")
    group.add_argument("--beta", type=float, help="pyramidkv: steepness of the pyramid, 1 is flat")
    group.add_argument("--alpha", type=float, help="adakv: share of the budget that is even over heads")
    group.add_argument("--sinks", type=int, metavar="N", help="first tokens that always stay")
    group.add_argument("--recent", type=float, metavar="S", help="h2o, roco, d2o: the most recent tokens' share")
    group.add_argument("--mode", metavar="M", help="h2o, roco, tova, d2o: streaming (a row out for each in) or prefill")
    group.add_argument("--every", type=int, metavar="N", help="compress again every N tokens")
    group.add_argument(
        "--protect",
        type=_span,
        action="append",
        metavar="A:B",
        help="tokens that always stay, as a Python slice; may be given again; write negative ones --protect=-9:-1",
    )
    group.add_argument("--filters", type=int, nargs="+", metavar="L", help="omnikv: layers that choose for others")
    group.add_argument("--mem", type=float, metavar="S", help="omnikv: share of the cache at hand, instead of --budget")
    group.add_argument("--selector", metavar="S", help="omnikv: whose queries choose: last, exponential or uniform")
    group.add_argument("--prefill-ratio", type=float, metavar="R", help="omnikv: tokens read per token of a chunk")
    group.add_argument("--offload", action="store_true", default=None, help="omnikv: rows wait in host memory")
    group.add_argument(
        "--min-budget",
        choices=("raise", "clamp"),
        help="a share below sinks + window + protected tokens: refuse it (the default), or raise it to them",
    )


def _add_drawing_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("drawing tokens")
    group.add_argument("--max-new-tokens", type=int, default=128, metavar="N", help="(default: %(default)s)")
    group.add_argument("--stop", action="extend", nargs="+", default=[], metavar="S", help="strings that end it")
    group.add_argument("--temperature", type=float, metavar="T", help="draw at random (default: the likeliest token)")
    cut = group.add_mutually_exclusive_group()
    cut.add_argument("--top-k", type=int, metavar="K", help="among the K likeliest")
    cut.add_argument("--top-p", type=float, metavar="P", help="among the likeliest that hold probability P")
    cut.add_argument("--min-p", type=float, metavar="P", help="among those at least P times as likely as the likeliest")
    group.add_argument("--seed", type=int, default=0, help="of random draws (default: %(default)s)")
    group = parser.add_argument_group("output")
    group.add_argument("--json", action="store_true", help="one JSON object on stdout instead of the text")
    group.add_argument("--output", metavar="FILE", help="also write that JSON object to a file, whole or not at all")
    group.add_argument("--no-stream", action="store_true", help="print the text when it is complete")


def _budget(text: str) -> int | float:
    try:
        return int(text) if re.fullmatch(r"[+-]?\d+", text) else float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: give rows per head (256) or a share (0.2)") from None


def _span(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(-?\d+):(-?\d+)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r}: give first and last + 1, such as 100:200")
    return int(match[1]), int(match[2])


def _policy(options: argparse.Namespace) -> Policy:
    """The policy that was asked for; what it does not have is refused, never passed over."""
    cls = policy_class(options.policy)
    # OmniKV may have a base, and then two budgets: that is said in Python.
    nested = "base" in defaults(cls) and cls is not OmniKV
    require(options.base is None or nested, "--base", options.base, f"{options.policy} is not built on a policy")
    inner = policy_class(options.base or "snapkv") if nested else cls
    name = options.base or "snapkv" if nested else options.policy
    fields = defaults(inner)
    given: dict[str, Any] = {}
    own: dict[str, Any] = {}
    for option, field in _FIELDS.items():
        value = getattr(options, option)
        if value is None:
            continue
        flag = "--" + option.replace("_", "-")
        if nested and option == "alpha" and "alpha" in defaults(cls):
            own[field] = value
            continue
        keeps_all = inner is POLICIES["full"]
        has = field in fields and not keeps_all and (option != "beta" or "LinearLayers" in fields[field])
        require(has, flag, value, f"{name} has no such option; leave it out")
        given[field] = _FROM_OPTION.get(option, lambda same: same)(value)
    return cls(base=inner(**given), **own) if nested else cls(**given)  # type: ignore[call-arg]


def _pooling(kernel: int) -> MaxPool | NoPool:
    return NoPool() if kernel == 1 else MaxPool(kernel)


# Option -> field of the policy; and how the field's value follows from the option's, where it is not the same.
_FIELDS = {
    "budget": "budget",
    "window": "window",
    "pool_kernel": "pooling",
    "beta": "allocation",
    "alpha": "alpha",
    "sinks": "sinks",
    "recent": "recent",
    "mode": "mode",
    "every": "every",
    "protect": "protect",
    "min_budget": "min_budget",
    "filters": "filter_layers",
    "mem": "mem",
    "selector": "selector",
    "prefill_ratio": "prefill_ratio",
    "offload": "offload",
}
_FROM_OPTION: dict[str, Any] = {
    "pool_kernel": _pooling,
    "beta": lambda beta: LinearLayers(beta=beta),
    "protect": tuple,
    "filters": tuple,
}


def _sampling(options: argparse.Namespace) -> Sampling:
    heat = options.temperature
    require(heat is None or heat > 0, "--temperature", heat, "give a positive number; leave it out for the likeliest")
    warmth = {} if heat is None else {"temperature": heat}
    if options.top_k is not None:
        return TopK(k=options.top_k, **warmth)
    if options.top_p is not None:
        return TopP(p=options.top_p, **warmth)
    if options.min_p is not None:
        return MinP(p=options.min_p, **warmth)
    return Greedy() if heat is None else Temperature(**warmth)


def _prompt(options: argparse.Namespace) -> str:
    parts = [options.prompt, options.question]
    if options.prompt_file is not None:
        parts.insert(0, _read(options.prompt_file))
    said = [part for part in parts if part]
    require(bool(said), "prompt", None, "give --prompt TEXT, --prompt-file FILE or --question TEXT")
    return "\n\n".join(said)


def _read(name: str) -> str:
    try:
        if name == "-":
            return sys.stdin.read().strip()
        return Path(name).expanduser().read_text("utf-8").strip()
    except UnicodeDecodeError as error:
        raise ValueError(f"--prompt-file={name}: not UTF-8 text ({error.reason} at byte {error.start})") from None
    except OSError as error:
        raise type(error)(f"--prompt-file={name}: {error.strerror}; give a readable text file") from None


def _generate(options: argparse.Namespace) -> int:
    # Everything cheap is checked before the model is fetched and loaded.
    policy, sampling, prompt = _policy(options), _sampling(options), _prompt(options)
    implementation = named(options.implementation)
    if options.output is not None:
        folder = Path(options.output).expanduser().resolve().parent
        require(folder.is_dir(), "--output", options.output, f"there is no folder {folder}; make it first")
    enable_compilation_cache()
    model = load(options.model, dtype=options.dtype)
    streams = sys.stdout.isatty() and not options.json and not options.no_stream
    result = generate(
        model,
        prompt,
        policy=policy,
        max_new_tokens=options.max_new_tokens,
        sampling=sampling,
        stop=options.stop,
        key=jax.random.key(options.seed),
        raw=options.raw,
        stream=streams,
        implementation=implementation,
        # A bar on stderr and text on stdout would write over each other on one terminal.
        progress=False if streams else None,
    )
    if streams:
        for piece in result:
            print(piece, end="", flush=True)
        print()
        result = result.result
    record = _record(options, policy, sampling, result)
    if options.output is not None:
        _write_whole(Path(options.output).expanduser(), json.dumps(record, indent=2, ensure_ascii=False) + "\n")
    if options.json:
        print(json.dumps(record, ensure_ascii=False))
    else:
        if not streams:
            print(result.text if result.text is not None else " ".join(map(str, result.tokens.tolist())))
        _print_stats(result)
    return 0


def _record(options: argparse.Namespace, policy: Policy, sampling: Sampling, result: Generation) -> dict[str, Any]:
    stats = dataclasses.asdict(result.stats)
    stats["decode_tokens_per_second"] = result.stats.decode_tokens_per_second
    return {
        "model": options.model,
        "policy": repr(policy),
        "sampling": repr(sampling),
        "text": result.text,
        "tokens": result.tokens.tolist() if not isinstance(result.tokens, list) else [],
        "stats": stats,
    }


def _print_stats(result: Generation) -> None:
    stats = result.stats
    lines = (
        f"prompt   {stats.prompt_tokens} tokens in {stats.prefill_seconds:.2f} s",
        f"answer   {stats.new_tokens} tokens at {stats.decode_tokens_per_second:.1f} tokens/s",
        f"compile  {stats.compile_seconds:.2f} s",
        f"cache    {stats.full_bytes / 1e6:.2f} MB full, {stats.cache_bytes / 1e6:.2f} MB kept "
        f"({stats.kept:.1f} rows per kv head; {stats.slack_bytes / 1e6:.2f} MB unused)",
    )
    print(*lines, sep="\n", file=sys.stderr)
    if stats.filter_layers:
        print(f"filters  layers {', '.join(map(str, stats.filter_layers))} choose what others read", file=sys.stderr)
    if stats.host_bytes:
        sent = f"{stats.transfers_per_step:.0f} transfers and {stats.transferred_bytes_per_step / 1e6:.3f} MB a token"
        print(f"host     {stats.host_bytes / 1e6:.2f} MB there; {sent}", file=sys.stderr)


def _write_whole(path: Path, text: str) -> None:
    """Another process sees the old file or the whole new one: it is written beside, then renamed."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        # mkstemp's files are for their owner alone; a result is as readable as any file the user makes.
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(temporary, 0o666 & ~mask)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
