"""`jaxkv export`: validates its options, loads the model, and writes programs that run without jaxkv."""

import json
import os
from functools import partial
from pathlib import Path
from typing import Annotated

from jaxkv._dataclasses import frozen_dataclass
from jaxkv.attention import Implementation
from jaxkv.checkpoints.orbax_files import require_new_path
from jaxkv.cli.models import ModelOption
from jaxkv.cli.options import (
    ArgumentSpec,
    Count,
    Mesh,
    Name,
    Natural,
    PolicyArguments,
    make_choice_parser,
    make_comma_list_spec,
    parse_integer,
    pick_fields,
)
from jaxkv.cli.outputs import write_to_stderr, write_to_stdout
from jaxkv.engine.sampling import Sampling
from jaxkv.exporting import PLATFORMS, export
from jaxkv.sharding.mesh_argument import make_mesh_from_text

Counts = Annotated[tuple[int, ...], make_comma_list_spec(partial(parse_integer, least=1))]


@frozen_dataclass
class ExportCommand(ModelOption):
    """The command `jaxkv export` and its options: write programs and weights that run without jaxkv.

    Attributes:
        directory: new folder to write; the path must not exist.
        dtype: float32, bfloat16 or float16 (default: bfloat16 on a GPU, float32 on a CPU).
        lengths: maximum prompt tokens of each bucket.
        batch: batch sizes.
        question_tokens: maximum tokens that can be appended to a cache as a question.
        new: maximum number of sampled tokens.
        platforms: platforms among cpu, cuda, rocm, tpu.
        mesh: devices by data and model, such as 1x8 (default: one device).
        sampling: export random sampling as well, with temperature, top-k, top-p and min-p set at run time.
        implementation: xla, or pallas, whose programs have no compatibility guarantee.
        weights: write the weights as well; without them, the loader needs them as an argument.
    """

    directory: Annotated[str, ArgumentSpec("DIR", place=True)]
    dtype: Name | None = None
    lengths: Counts = (1024,)
    batch: Counts = (1,)
    question_tokens: Natural = 64
    new: Count = 256
    platforms: Annotated[
        tuple[str, ...], make_comma_list_spec(make_choice_parser(PLATFORMS), "A,B")
    ] = ("cpu",)
    mesh: Mesh | None = None
    sampling: bool = False
    implementation: Implementation = Implementation.XLA
    weights: bool = True
    policy: PolicyArguments

    def run_command(self) -> None:
        """Export programs and weights to a new folder, and print the number of programs and the sizes.

        Invalid options are rejected before the model is loaded.
        """
        policy = self.policy.build_policy()
        folder = Path(os.path.expanduser(self.directory))
        require_new_path(folder, "DIR")
        # Programs are exported for the number of devices of the mesh on any platform; CPU devices replace them here.
        mesh = make_mesh_from_text(self.mesh, "cpu")
        made = export(
            self.load_model(dtype=self.dtype),
            folder,
            policy=policy,
            question=self.question_tokens,
            mesh=mesh,
            sampling=Sampling() if self.sampling else (),
            **pick_fields(self, "lengths batch new platforms implementation weights"),
        )
        manifest = json.loads((made / "manifest.json").read_text("utf-8"))
        programs = manifest["programs"]
        weights = manifest["weights"].values()
        size, held = (sum(each["bytes"] for each in files) / 1e6 for files in (programs, weights))
        said = f"{len(programs)} programs ({size:.1f} MB), weights ({held:.1f} MB), runtime.py"
        write_to_stdout(f"{made}: {said}")
        if manifest["guaranteed"]["lost"]:
            write_to_stderr(f"warning: {manifest['guaranteed']['lost']}")
