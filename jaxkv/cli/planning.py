"""`jaxkv plan`: whether a model, a policy and prompts fit on GPUs, present or not."""

import json
from typing import Annotated

from jaxkv._dataclasses import frozen_dataclass
from jaxkv._errors import require
from jaxkv.cli.models import Bits
from jaxkv.cli.options import (
    ArgumentSpec,
    Count,
    File,
    Mesh,
    Name,
    Natural,
    PolicyArguments,
    format_option,
    parse_policy_list,
    pick_fields,
)
from jaxkv.cli.outputs import PictureOutputTarget, write_to_stderr, write_to_stdout
from jaxkv.planning import picture
from jaxkv.planning.comparison import compared
from jaxkv.planning.compiled import require_compiler_plugin
from jaxkv.planning.named import parse_accelerators
from jaxkv.planning.planner import plan
from jaxkv.planning.setting import parse_token_count
from jaxkv.policies import Policy

NOTES = """\
Memory follows from shapes by arithmetic, on any machine: weights, the compressed cache, and the buffers of prefill and
of a decode step, for one GPU. --compile runs XLA's compiler for the GPUs, present or not, which takes minutes. Seconds
of prefill, tokens per second and requests per hour are estimates from rates measured on one H200, for TPUs as well;
--gpus cpu has none.

examples:
  does it fit, how much more fits, and what to change if not:
    jaxkv plan --model llama-3.1-70b --gpus h100x8 --context 131072 --batch 4 --policy adakv --budget 2048

  several policies in one table, and a plot of memory over context:
    jaxkv plan --model llama-3.1-8b --gpus a100-80gb --context 32768 --batch 8 --budget 1024 \\
        --compare full,snapkv,adakv,omnikv --plot memory.svg

  how many entries fit into the same bytes of a sequence's cache in 16, 8 and 4 bits:
    jaxkv plan --model llama-3.1-8b --gpus h200x1 --context 32K --batch 8 --budget 256MB \\
        --compare 'snapkv,snapkv --store int8,snapkv --store int4'

  how many requests `jaxkv serve` answers, by policy:
    jaxkv plan --model llama-3.1-8b --gpus h200x1 --context 32K --budget 1024 --compare full,adakv --serve
"""


@frozen_dataclass
class PlanCommand:
    """The command `jaxkv plan` and its options: plan memory and speed of a model on GPUs, present or not.

    Attributes:
        model: a model of the catalogue such as llama-3.1-70b, a name from `jaxkv models`, a Hugging Face folder, a
            .gguf file or a hub id; no weights are read.
        gpus: kind and number, such as h100x8, 8xh100 or h100:8, also a100-80gb, h200, l4, v5e; or cpu for this machine.
            The error for an unknown kind lists all.
        mesh: data-parallel groups of GPUs, and GPUs per group (default: one group).
        context: tokens of each prompt, such as 128K.
        batch: number of prompts.
        new: number of tokens to sample.
        questions: number of questions per prompt, which share its prefill.
        dtype: bfloat16, float16 or float32 (default: bfloat16 on GPUs, float32 on a CPU).
        weights: quantise linear maps to int8, half the memory of 16 bits, or int4, a third (default: dtype).
        rope_scaling: extend the model's positions N times by YaRN.
        serve: also plan an engine: slots that fit, and such prompts answered per hour.
        compare: compare policies, separated by commas, in a table with a row each; each with options: 'snapkv --store
            int8'.
        plot: plot memory over context to a file: .png, .svg or .pdf (needs jaxkv[plots]).
        compile: also run XLA's compiler for these GPUs, which takes minutes.
        json: print JSON; a list with --compare.
    """

    model: Name
    gpus: Annotated[str, ArgumentSpec("KINDxN")]
    mesh: Mesh | None = None
    context: Annotated[int, ArgumentSpec("N", parse_token_count)]
    batch: Count = 1
    new: Natural = 256
    questions: Count = 1
    dtype: Name | None = None
    weights: Bits | None = None
    rope_scaling: Annotated[str, ArgumentSpec("yarn:N")] | None = None
    serve: bool = False
    compare: Annotated[str, ArgumentSpec("NAMES")] = ""
    plot: File = ""
    compile: bool = False
    json: bool = False
    policy: PolicyArguments

    def run_command(self) -> None:
        """Plan each policy's memory and speed; print text, a table or JSON, then make the picture of `--plot`.

        If writing the picture fails, the plans are already on stdout.
        """
        out = PictureOutputTarget(flag="--plot", name=self.plot)
        if self.plot:
            out.require_writable([self.model])
        policies = self._parse_compared_policies() if self.compare else [self.policy.build_policy()]
        if self.compile:
            require_compiler_plugin(parse_accelerators(self.gpus)[0])
            write_to_stderr(f"jaxkv: compiling for {self.gpus}, a minute or two for each policy")
        names = (
            "model gpus mesh context batch new questions dtype weights rope_scaling serve compile"
        )
        plans = [plan(policy=each, **pick_fields(self, names)) for each in policies]
        if self.json:
            records = [each.as_dict() for each in plans]
            write_to_stdout(json.dumps(records if self.compare else records[0], indent=2))
        else:
            write_to_stdout(compared(plans) if self.compare else str(plans[0]))
        if self.plot:
            out.write_bytes(picture.plot_peak_memory(plans, out.image_format))

    def _parse_compared_policies(self) -> list[Policy]:
        """Return --compare's policies with the options each accepts; ValueError for --policy or unused ones."""
        remedy = "conflicts with --compare: add it there, or leave it out"
        require(self.policy.name == "full", "--policy", self.policy.name, remedy)
        entries = parse_policy_list(self.compare, "--compare")
        for flag, words in self.policy.given.items():
            remedy = f"none of these policies has {format_option(flag, words)}: leave it out"
            require(
                any(flag in each.accepted_flags for each in entries),
                "--compare",
                self.compare,
                remedy,
            )
        # A repeated policy is compared once.
        return list(
            dict.fromkeys(
                each.add_shared_options(self.policy.given).build_policy() for each in entries
            )
        )
