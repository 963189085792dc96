"""`answer_on_ray_cluster`: answers the lines of a batch with Ray Data actors, one engine each."""

import contextlib
import math
import pickle
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import ray
import ray.data

from jaxkv._errors import require
from jaxkv.serving.batch_answers import BatchFileRunner
from jaxkv.serving.batch_lines import ParsedBatchLine
from jaxkv.serving.engine_config import EngineConfig

# Lines per block, and blocks that an actor answers at the same time.
_LINES, _BLOCKS = 8, 32


class RayBatchWorker:
    """Ray actor that answers lines of a batch file with one engine, in a process of the cluster."""

    def __init__(self, recipe: EngineConfig, name: str):
        """Load the model, create this worker's engine, and a `BatchFileRunner` around it."""
        self._batch = BatchFileRunner(recipe.create_engine(), name=name)

    def __call__(self, batch: dict[str, Any]) -> dict[str, list[Any]]:
        """Answer the pickled lines in column "item"; return column "answered": pickled (line, output object) pairs."""
        lines = [pickle.loads(each) for each in batch["item"]]
        return {"answered": [pickle.dumps(each) for each in self._batch.answer_lines(lines)]}


@contextlib.contextmanager
def answer_on_ray_cluster(
    recipe: EngineConfig, *, name: str, address: str | None, workers: int | None
) -> Iterator[
    Callable[[Iterable[ParsedBatchLine]], Iterator[tuple[ParsedBatchLine, dict[str, Any]]]]
]:
    """Context manager that joins or starts a Ray cluster; yields a function from lines to (line, output object) pairs.

    Ray restarts an actor that ends, and answers its lines again.

    Args:
        recipe: configuration of the engine of each actor.
        name: name of the model in requests.
        address: address of the cluster; None for RAY_ADDRESS, or else a cluster on this machine.
        workers: number of actors; None for as many as the GPUs of the cluster allow, or one per machine.
    """
    begun = not ray.is_initialized()
    if begun:
        ray.init(address=address, log_to_driver=False)
    try:
        gpus = recipe.device_count if ray.cluster_resources().get("GPU", 0) else 0
        count = _count_cluster_workers(gpus) if workers is None else workers

        def answers(
            lines: Iterable[ParsedBatchLine],
        ) -> Iterator[tuple[ParsedBatchLine, dict[str, Any]]]:
            items = [pickle.dumps(line) for line in lines]
            data = ray.data.from_items(items, override_num_blocks=math.ceil(len(items) / _LINES))
            actors = ray.data.ActorPoolStrategy(
                size=count, enable_true_multi_threading=True, max_concurrent_calls_per_actor=_BLOCKS
            )
            done = data.map_batches(
                RayBatchWorker,
                batch_size=None,
                compute=actors,
                fn_constructor_args=(recipe, name),
                num_cpus=1,
                num_gpus=gpus,
            )
            try:
                for row in done.iter_rows():
                    yield pickle.loads(row["answered"])
            except ray.exceptions.RayError as error:
                said = f"--ray: a worker failed: {type(error).__name__}"
                raise OSError(f"{said}: run the same command again to resume") from error

        yield answers
    finally:
        if begun:
            ray.shutdown()


def _count_cluster_workers(gpus: int) -> int:
    """Return the number of workers: cluster GPUs // `gpus` per worker, ValueError if 0; machines if `gpus` is 0."""
    if not gpus:
        return sum(node["Alive"] for node in ray.nodes())
    there = int(ray.cluster_resources()["GPU"])
    require(
        there >= gpus,
        "--mesh",
        f"{gpus} devices",
        f"the cluster has {there} GPUs: use a smaller mesh",
    )
    return there // gpus
