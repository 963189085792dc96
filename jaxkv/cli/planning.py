"""`jaxkv plan`: whether a model, a policy and prompts fit on GPUs, which need not be present."""

import dataclasses
import json
from typing import Annotated

from jaxkv._errors import require
from jaxkv.cli.models import Bits
from jaxkv.cli.options import (
    Count,
    File,
    Mesh,
    Name,
    Natural,
    Spelled,
    Word,
    picked,
    spelled,
    written,
)
from jaxkv.cli.outputs import Picture, to_stderr, to_stdout
from jaxkv.planning import picture
from jaxkv.planning.comparison import compared
from jaxkv.planning.compiled import plugin
from jaxkv.planning.named import accelerators_named
from jaxkv.planning.planner import plan
from jaxkv.planning.setting import tokens_of
from jaxkv.policies import Policy

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

  how many entries the same bytes of a sequence's cache hold in 16 bits, in 8 and in 4:
    jaxkv plan --model llama-3.1-8b --gpus h200x1 --context 32K --batch 8 --budget 256MB \\
        --compare 'snapkv,snapkv --store int8,snapkv --store int4'

  how many requests `jaxkv serve` answers, by policy:
    jaxkv plan --model llama-3.1-8b --gpus h200x1 --context 32K --budget 1024 --compare full,adakv --serve
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Planning:
    """`jaxkv plan`.

    Attributes:
        model: a model of the catalogue such as llama-3.1-70b, a name from `jaxkv models`, a Hugging Face folder, a
            .gguf file or a hub id; no weights are read.
        gpus: h100x8, 8xh100 or h100:8, say, and so a100-80gb, h200, l4, v5e; an unknown kind is told all; or cpu, this
            machine's.
        mesh: groups of GPUs with a part of the prompts each, and GPUs of a group (default: one group).
        context: tokens of each prompt, such as 128K.
        batch: prompts.
        new: tokens to sample.
        questions: questions that each prompt answers, which share its prefill.
        dtype: bfloat16, float16 or float32 (default: bfloat16 on GPUs, float32 on a CPU).
        weights: int8 or int4: linear maps in 8 bits, half of 16 bits' memory, or in 4, a third (default: dtype).
        rope_scaling: N times the model's positions, by YaRN.
        serve: an engine, too: slots that fit, and such prompts answered an hour.
        compare: policies, with commas between them: a table, an entry each; options go behind a name: 'snapkv --store
            int8'.
        plot: sample memory against context: .png, .svg or .pdf (needs jaxkv[plots]).
        compile: ask XLA's compiler for these GPUs, too; minutes.
        json: print JSON; of --compare a list.
    """

    model: Name
    gpus: Annotated[str, Word("KINDxN")]
    mesh: Mesh | None = None
    context: Annotated[int, Word("N", tokens_of)]
    batch: Count = 1
    new: Natural = 256
    questions: Count = 1
    dtype: Name | None = None
    weights: Bits | None = None
    rope_scaling: Annotated[str, Word("yarn:N")] | None = None
    serve: bool = False
    compare: Annotated[str, Word("NAMES")] = ""
    plot: File = ""
    compile: bool = False
    json: bool = False
    policy: Spelled

    def run(self) -> None:
        """Prints plans as text, table or JSON, then writes the picture of `--plot`.

        If the picture cannot be written, the plans are already on stdout.
        """
        out = Picture(flag="--plot", name=self.plot)
        if self.plot:
            out.check([self.model])
        policies = self._compared() if self.compare else [self.policy.policy()]
        if self.compile:
            plugin(accelerators_named(self.gpus)[0])
            to_stderr(f"jaxkv: compiling for {self.gpus}, a minute or two for each policy")
        names = (
            "model gpus mesh context batch new questions dtype weights rope_scaling serve compile"
        )
        plans = [plan(policy=each, **picked(self, names)) for each in policies]
        if self.json:
            records = [each.as_dict() for each in plans]
            to_stdout(json.dumps(records if self.compare else records[0], indent=2))
        else:
            to_stdout(compared(plans) if self.compare else str(plans[0]))
        if self.plot:
            out.write(picture.drawn(plans, out.kind))

    def _compared(self) -> list[Policy]:
        """List of `--compare`'s policies, each with the given options it has; ValueError for one that none has."""
        remedy = "give it among those of --compare, or leave it out"
        require(self.policy.name == "full", "--policy", self.policy.name, remedy)
        entries = spelled(self.compare, "--compare")
        for flag, words in self.policy.given.items():
            remedy = f"none of them has {written(flag, words)}: leave it out"
            require(any(flag in each.flags for each in entries), "--compare", self.compare, remedy)
        # A policy that is named twice is compared once.
        return list(dict.fromkeys(each.over(self.policy.given).policy() for each in entries))
