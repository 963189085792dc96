"""`jaxkv export`: validates its options, loads the model, and writes programs that run without jaxkv."""

import dataclasses
import json
import os
from functools import partial
from pathlib import Path
from typing import Annotated

from jaxkv.attention import Implementation
from jaxkv.checkpoints.orbax_files import require_free
from jaxkv.cli.models import ModelOption
from jaxkv.cli.options import (
    Count,
    Mesh,
    Name,
    Natural,
    Spelled,
    Word,
    commas,
    one_of,
    picked,
    whole,
)
from jaxkv.cli.outputs import to_stderr, to_stdout
from jaxkv.engine.sampling import Sampling
from jaxkv.exporting import PLATFORMS, export
from jaxkv.sharding.mesh_argument import mesh_of

Counts = Annotated[tuple[int, ...], commas(partial(whole, least=1))]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Export(ModelOption):
    """`jaxkv export`.

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

    directory: Annotated[str, Word("DIR", place=True)]
    dtype: Name | None = None
    lengths: Counts = (1024,)
    batch: Counts = (1,)
    question_tokens: Natural = 64
    new: Count = 256
    platforms: Annotated[tuple[str, ...], commas(one_of(PLATFORMS), "A,B")] = ("cpu",)
    mesh: Mesh | None = None
    sampling: bool = False
    implementation: Implementation = Implementation.XLA
    weights: bool = True
    policy: Spelled

    def run(self) -> None:
        """Write a folder of programs and weights, and print their sizes.

        Invalid options are rejected before the model is loaded.
        """
        policy, folder = self.policy.policy(), Path(os.path.expanduser(self.directory))
        require_free(folder, "DIR")
        # Programs are exported for the number of devices of the mesh on any platform; CPU devices replace them here.
        mesh = mesh_of(self.mesh, "cpu")
        made = export(
            self.loaded(dtype=self.dtype),
            folder,
            policy=policy,
            question=self.question_tokens,
            mesh=mesh,
            sampling=Sampling() if self.sampling else (),
            **picked(self, "lengths batch new platforms implementation weights"),
        )
        manifest = json.loads((made / "manifest.json").read_text("utf-8"))
        programs, weights = manifest["programs"], manifest["weights"].values()
        size, held = (sum(each["bytes"] for each in files) / 1e6 for files in (programs, weights))
        said = f"{len(programs)} programs ({size:.1f} MB), weights ({held:.1f} MB), runtime.py"
        to_stdout(f"{made}: {said}")
        if manifest["guaranteed"]["lost"]:
            to_stderr(f"warning: {manifest['guaranteed']['lost']}")
