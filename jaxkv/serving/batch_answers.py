"""`BatchRunner`: answers the lines of a batch's file by an engine, as its HTTP interface would answer their bodies."""

import itertools
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any

from jaxkv.serving import submission
from jaxkv.serving.batch_lines import Line, failed, responded
from jaxkv.serving.engine import Engine
from jaxkv.serving.errors import HttpError, http_error, unknown_model
from jaxkv.serving.limits import RequestLimits
from jaxkv.serving.schemas import CHATS, ChatBody, TextBody

# A batch has all the time that it takes.
_LIMITS = RequestLimits(seconds=1e9)
# The most lines that are under way at the same time.
_MOST = 256
# No request of theirs is rejected because others wait.
QUEUE = _MOST * _LIMITS.answers


class BatchRunner:
    """Answers lines by an engine whose queue has room for `QUEUE` requests.

    Attributes:
        engine: the engine.
        most: the most lines that are under way at the same time.
    """

    def __init__(self, engine: Engine, *, name: str):
        """Makes the batch of a model that bodies call `name`; they may leave it out."""
        self.engine, self._name = engine, name
        self.most = min(2 * engine.stats.slots, _MOST)

    def answer(self, line: Line) -> dict[str, Any]:
        """Answers a line and returns OpenAI's output object; the engine's own failure is raised."""
        if line.fault is not None:
            return failed(line, "invalid_line", line.fault)
        try:
            return responded(line, 200, self._reply(line))
        except Exception as error:
            # Whatever it is, the other lines are answered.
            if self.engine.error is not None:
                raise self.engine.error from error
            refused = http_error(error, prompt="messages" if line.url == CHATS else "prompt")
            return responded(line, refused.status, refused.body())

    def _reply(self, line: Line) -> dict[str, Any]:
        """OpenAI's object of the answer to a line's body."""
        body = (ChatBody if line.url == CHATS else TextBody).model_validate(line.body)
        if body.stream:
            said = "stream=true: the answers of a batch are whole: leave it out"
            raise HttpError(400, said, param="stream")
        if body.model not in (None, self._name):
            raise unknown_model(body.model, [self._name])
        document = None if body.document is None else self.engine.documents.of(body.document)
        requests = submission.submitted(
            self.engine,
            body,
            document,
            limits=_LIMITS,
            # Without a seed, the line has one of its own.
            seed=line.seed,
            offline=True,
        )
        with submission.while_asked(requests):
            completions = [each.result() for each in requests]
        reply = submission.whole(body, self._name, requests, completions, document)
        return reply.model_dump(exclude_unset=True)

    def answers(self, lines: Iterable[Line]) -> Iterator[tuple[Line, dict[str, Any]]]:
        """Yields each line with its output object, as they are complete; closes the engine if it is ended before."""
        left, under_way = iter(lines), dict[Future[dict[str, Any]], Line]()
        pool = ThreadPoolExecutor(self.most)
        try:
            while True:
                for line in itertools.islice(left, self.most - len(under_way)):
                    under_way[pool.submit(self.answer, line)] = line
                if not under_way:
                    return
                done, _ = wait(under_way, return_when=FIRST_COMPLETED)
                for each in done:
                    yield under_way.pop(each), each.result()
        finally:
            if under_way:
                self.engine.close(drain=False)
            pool.shutdown(cancel_futures=True)
