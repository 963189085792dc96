"""`jaxkv plan`: whether a model, a policy and prompts fit on GPUs, which need not be present."""

import argparse
import json

from jaxkv._drawing import drawing
from jaxkv._errors import require
from jaxkv.cli.files import Target
from jaxkv.cli.models import add_weights_option, require_model
from jaxkv.cli.numbers import argument, natural, positive
from jaxkv.cli.policy_options import add_policy_options, given_flags, policy_from
from jaxkv.cli.policy_rows import spelled
from jaxkv.cli.streams import to_stderr, to_stdout
from jaxkv.planning import picture
from jaxkv.planning.comparison import compared
from jaxkv.planning.compiled import plugin
from jaxkv.planning.named import accelerators, accelerators_named
from jaxkv.planning.planner import plan
from jaxkv.planning.plans import Plan
from jaxkv.planning.setting import tokens_of
from jaxkv.policies import Method

NOTES = """\
Memory follows from shapes by arithmetic, at once and on any machine: weights, the compressed cache, what prefill and a
decode step compute with, for one GPU. --compile asks XLA's own compiler for GPUs that are not there, in some minutes.
Seconds of prefill, tokens per second and requests an hour are estimates with the rates that one H200 reached, for TPUs,
too; --gpus cpu has none.

examples:
  does it fit, how much more would, and what would make it fit:
    jaxkv plan --model llama-3.1-70b --gpus h100x8 --context 131072 --batch 4 --policy adakv --budget 2048

  several policies in one table, and a picture of memory against context:
    jaxkv plan --model llama-3.1-8b --gpus a100-80gb --context 32768 --batch 8 --budget 1024 \\
        --compare full,snapkv,adakv,omnikv --plot memory.svg

  how many rows the same bytes of a sequence's cache hold in 16 bits, in 8 and in 4:
    jaxkv plan --model llama-3.1-8b --gpus h200x1 --context 32K --batch 8 --budget 256MB \\
        --compare 'snapkv,snapkv --store int8,snapkv --store int4'

  how many requests `jaxkv serve` answers, by policy:
    jaxkv plan --model llama-3.1-8b --gpus h200x1 --context 32K --budget 1024 --compare full,adakv --serve
"""


def add_plan_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `jaxkv plan` to its parser."""
    count = argument(positive)
    add = parser.add_argument_group("what is planned for").add_argument
    known = "a model of the catalogue such as llama-3.1-70b, a name from `jaxkv models`, a Hugging Face folder"
    known += ", a .gguf file or a hub id"
    add("--model", required=True, metavar="NAME", help=f"{known}; no weights are read")
    kinds = (
        f"h100x8, 8xh100 or h100:8, say; kinds: {', '.join(accelerators())}; or cpu, this machine's"
    )
    add("--gpus", required=True, metavar="KINDxN", help=kinds)
    groups = (
        "groups of GPUs with a part of the prompts each, and GPUs of a group (default: one group)"
    )
    add("--mesh", metavar="DxM", help=groups)
    add(
        "--context",
        type=argument(_tokens),
        required=True,
        metavar="N",
        help="tokens of each prompt, such as 128K",
    )
    add("--batch", type=count, default=1, metavar="N", help="prompts (default: %(default)s)")
    add(
        "--new",
        type=argument(natural),
        default=256,
        metavar="N",
        help="tokens to draw (default: %(default)s)",
    )
    asked = "questions that each prompt answers, which share its prefill (default: %(default)s)"
    add("--questions", type=count, default=1, metavar="N", help=asked)
    add(
        "--dtype", help="bfloat16, float16 or float32 (default: bfloat16 on GPUs, float32 on a CPU)"
    )
    add_weights_option(add)
    add("--rope-scaling", metavar="yarn:N", help="N times the model's positions, by YaRN")
    add(
        "--serve",
        action="store_true",
        help="an engine, too: slots that fit, and such prompts answered an hour",
    )
    add = parser.add_argument_group("output").add_argument
    compare = "policies, with commas between them: a table, a row each; options go behind a name: 'snapkv --store int8'"
    add("--compare", metavar="NAMES", help=compare)
    add(
        "--plot",
        metavar="FILE",
        help="draw memory against context: .png, .svg or .pdf (needs jaxkv[plots])",
    )
    add("--compile", action="store_true", help="ask XLA's compiler for these GPUs, too; minutes")
    add("--json", action="store_true", help="print JSON; of --compare a list")
    add_policy_options(parser)


def _tokens(text: str) -> int:
    """Number of tokens, 1 to 2^31 - 1, parsed from text such as 131072 or 128K; ValueError for other text."""
    return positive(text) if text.strip().isdigit() else positive(str(tokens_of(text, "--context")))


def print_plan(options: argparse.Namespace) -> int:
    """Runs `jaxkv plan`: prints plans as text, table or JSON, then writes the picture of `--plot`; returns exit code 0.

    If the picture cannot be written, the plans are already on stdout.
    """
    require_model(options.model)
    target = _target(options)
    policies = [policy_from(options)] if options.compare is None else _compared(options)
    plans = _plans(options, policies)
    if options.json:
        records = [each.as_dict() for each in plans]
        to_stdout(json.dumps(records if options.compare is not None else records[0], indent=2))
    elif options.compare is not None:
        to_stdout(compared(plans))
    else:
        to_stdout(str(plans[0]))
    if target is not None:
        target.write(picture.drawn(plans, picture.kind_of(target.name)))
    return 0


def _plans(options: argparse.Namespace, policies: list[Method]) -> list[Plan]:
    """List of each policy's plan (memory, speed), with XLA's figures under --compile."""
    if options.compile:
        plugin(accelerators_named(options.gpus)[0])
        to_stderr(f"jaxkv: compiling for {options.gpus}, a minute or two for each policy")
    names = "model gpus mesh context batch new questions dtype weights rope_scaling serve compile"
    given = {name: getattr(options, name) for name in names.split()}
    return [plan(policy=each, **given) for each in policies]


def _target(options: argparse.Namespace) -> Target | None:
    """`Target` of `--plot`, checked to be writable before any plan is printed; None if the option is not given."""
    if options.plot is None:
        return None
    picture.kind_of(options.plot)
    target = Target(flag="--plot", name=options.plot)
    target.check({"--model": options.model})
    drawing()
    return target


def _compared(options: argparse.Namespace) -> list[Method]:
    """List of `--compare`'s policies, each with the given options it has; ValueError for an option that none has."""
    require(
        options.policy == "full",
        "--policy",
        options.policy,
        "give it among those of --compare, or leave it out",
    )
    entries = list(spelled(options.compare, "--compare"))
    for flag, written in given_flags(options).items():
        some = any(flag in each.flags for each in entries)
        require(some, "--compare", options.compare, f"none of them has {written}: leave it out")
    # A policy that is named twice is compared once.
    return list(dict.fromkeys(each.beside(options) for each in entries))
