"""`cluster_answers`: answers the lines of a batch by workers of a Ray cluster, each with an engine."""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import ray

from jaxkv._errors import require
from jaxkv.serving.batch_answers import Batch
from jaxkv.serving.batch_lines import Line
from jaxkv.serving.recipe import Recipe

# How often a worker that ends is started again, and how often a line is given to the next one.
_AGAIN = 3
# Lines that a worker answers at the same time, at most.
_THREADS = 256


class Worker:
    """One engine of a batch, in a process of a Ray cluster."""

    def __init__(self, recipe: Recipe, name: str):
        """Loads the model and makes the engine."""
        self._batch = Batch(recipe.made(), name=name)

    def most(self) -> int:
        """Number of lines that keep the engine busy."""
        return min(self._batch.most, _THREADS)

    def answer(self, line: Line) -> dict[str, Any]:
        """Answers one line."""
        return self._batch.answer(self._batch.begin(line))


@contextlib.contextmanager
def cluster_answers(
    recipe: Recipe, *, name: str, address: str | None, workers: int | None
) -> Iterator[Callable[[Iterable[Line]], Iterator[tuple[Line, dict[str, Any]]]]]:
    """Context manager with the workers; its function yields each line with its output object, as they are complete.

    A worker that ends is started again, and its lines are asked again; after three times the run ends.

    Args:
        recipe: what each worker's engine is made of.
        name: the model's name in requests.
        address: the cluster's address; None for that of RAY_ADDRESS, or a cluster of this machine.
        workers: number of workers; None for as many as the cluster's GPUs allow, or one for each machine.
    """
    begun = not ray.is_initialized()
    if begun:
        ray.init(address=address, log_to_driver=False)
    made = []
    try:
        gpus = recipe.devices if ray.cluster_resources().get("GPU", 0) else 0
        count = _workers(gpus) if workers is None else workers
        cls = ray.remote(Worker).options(
            num_cpus=1,
            num_gpus=gpus,
            max_restarts=_AGAIN,
            max_task_retries=_AGAIN,
            max_concurrency=_THREADS,
        )
        made = [cls.remote(recipe, name) for _ in range(count)]
        most = ray.get([each.most.remote() for each in made])
        yield lambda lines: _answers(dict(zip(made, most, strict=True)), lines)
    finally:
        for each in made:
            ray.kill(each)
        if begun:
            ray.shutdown()


def _workers(gpus: int) -> int:
    """Number of workers of the cluster: its GPUs over those of a worker, or its machines."""
    if not gpus:
        return sum(node["Alive"] for node in ray.nodes())
    there = int(ray.cluster_resources()["GPU"])
    require(
        there >= gpus,
        "--mesh",
        f"{gpus} devices",
        f"the cluster has {there} GPUs: give a smaller mesh",
    )
    return there // gpus


def _answers(
    workers: dict[Any, int], lines: Iterable[Line]
) -> Iterator[tuple[Line, dict[str, Any]]]:
    """Yields each line with its output object; gives lines to the workers as they have room."""
    left, under_way, busy = iter(lines), dict[Any, tuple[Any, Line]](), dict.fromkeys(workers, 0)
    while True:
        while free := [each for each, most in workers.items() if busy[each] < most]:
            line = next(left, None)
            if line is None:
                break
            worker = min(free, key=lambda each: busy[each] / workers[each])
            under_way[worker.answer.remote(line)] = worker, line
            busy[worker] += 1
        if not under_way:
            return
        (done, *_), _ = ray.wait(list(under_way))
        worker, line = under_way.pop(done)
        busy[worker] -= 1
        yield line, _result(done)


def _result(done: Any) -> dict[str, Any]:
    """Output object of a call that has ended; RuntimeError if its worker ended too often or its engine failed."""
    try:
        return ray.get(done)
    except ray.exceptions.RayError as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        last = lines[-1].strip() if lines else type(error).__name__
        raise OSError(
            f"--ray: a worker failed: {last}; the same command goes on from here"
        ) from error
