"""`cluster_answers`: answers the lines of a batch with Ray Data actors, one engine each."""

import contextlib
import math
import pickle
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import ray
import ray.data

from jaxkv._errors import require
from jaxkv.serving.batch_answers import BatchRunner
from jaxkv.serving.batch_lines import Line
from jaxkv.serving.engine_config import EngineConfig

# Lines per block, and blocks that an actor answers at the same time.
_LINES, _BLOCKS = 8, 32


class Worker:
    """One engine of a batch, in one process of a Ray cluster."""

    def __init__(self, recipe: EngineConfig, name: str):
        """Load the model and create the engine."""
        self._batch = BatchRunner(recipe.made(), name=name)

    def __call__(self, batch: dict[str, Any]) -> dict[str, list[Any]]:
        """Answer a block of lines; lines and answers are pickled."""
        lines = [pickle.loads(each) for each in batch["item"]]
        return {"answered": [pickle.dumps(each) for each in self._batch.answers(lines)]}


@contextlib.contextmanager
def cluster_answers(
    recipe: EngineConfig, *, name: str, address: str | None, workers: int | None
) -> Iterator[Callable[[Iterable[Line]], Iterator[tuple[Line, dict[str, Any]]]]]:
    """Context manager of a Ray cluster; its function yields each line with its output object as it completes.

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
        gpus = recipe.devices if ray.cluster_resources().get("GPU", 0) else 0
        count = _workers(gpus) if workers is None else workers

        def answers(lines: Iterable[Line]) -> Iterator[tuple[Line, dict[str, Any]]]:
            items = [pickle.dumps(line) for line in lines]
            data = ray.data.from_items(items, override_num_blocks=math.ceil(len(items) / _LINES))
            actors = ray.data.ActorPoolStrategy(
                size=count, enable_true_multi_threading=True, max_concurrent_calls_per_actor=_BLOCKS
            )
            done = data.map_batches(
                Worker,
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


def _workers(gpus: int) -> int:
    """Number of workers of a cluster: its GPUs divided by the GPUs of a worker, or its machines."""
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
