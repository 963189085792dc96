"""`BatchFileRunner`: answers the lines of a batch file with an engine, as the HTTP server would answer their bodies."""

import itertools
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any

from jaxkv.serving import submission
from jaxkv.serving.batch_lines import ParsedBatchLine, make_error_output, make_response_output
from jaxkv.serving.engine import Engine
from jaxkv.serving.errors import HttpError, convert_to_http_error, make_unknown_model_error
from jaxkv.serving.limits import RequestLimits
from jaxkv.serving.schemas import CHATS, ChatBody, TextBody

# A batch has no deadline.
_LIMITS = RequestLimits(seconds=1e9)
# The most lines in flight at the same time.
_MOST = 256
# A queue of this length never rejects a line because others wait.
QUEUE = _MOST * _LIMITS.answers


class BatchFileRunner:
    """Runner that answers the lines of a batch file with an engine whose `queue` is at least `QUEUE`.

    Attributes:
        engine: the engine.
        most: the most lines in flight at the same time.
    """

    def __init__(self, engine: Engine, *, name: str):
        """Create a batch runner around an engine; bodies name its model `name`, or omit the name."""
        self.engine, self._name = engine, name
        self.most = min(2 * engine.stats.slots, _MOST)

    def answer_line(self, line: ParsedBatchLine) -> dict[str, Any]:
        """Answer one line; return OpenAI's output object, also for a rejected line; raise if the engine has failed."""
        if line.fault is not None:
            return make_error_output(line, "invalid_line", line.fault)
        try:
            return make_response_output(line, 200, self._compute_completion(line))
        except Exception as error:
            # An error of one line does not end the others.
            if self.engine.error is not None:
                raise self.engine.error from error
            failure = convert_to_http_error(
                error, prompt="messages" if line.url == CHATS else "prompt"
            )
            return make_response_output(line, failure.status, failure.make_error_body())

    def _compute_completion(self, line: ParsedBatchLine) -> dict[str, Any]:
        """Answer a line's body with the engine; return OpenAI's (chat) completion as a dict; raise if rejected."""
        body = (ChatBody if line.url == CHATS else TextBody).model_validate(line.body)
        if body.stream:
            said = "stream=true: a batch does not stream: leave it out"
            raise HttpError(400, said, param="stream")
        if body.model not in (None, self._name):
            raise make_unknown_model_error(body.model, [self._name])
        document = (
            None if body.document is None else self.engine.documents.get_document(body.document)
        )
        requests = submission.submit_body_requests(
            self.engine,
            body,
            document,
            limits=_LIMITS,
            # A line without a seed uses one derived from its id.
            seed=line.default_seed,
            offline=True,
        )
        with submission.cancel_on_exit(requests):
            completions = [each.result() for each in requests]
        reply = submission.make_complete_reply(body, self._name, requests, completions, document)
        return reply.model_dump(exclude_unset=True)

    def answer_lines(
        self, lines: Iterable[ParsedBatchLine]
    ) -> Iterator[tuple[ParsedBatchLine, dict[str, Any]]]:
        """Answer lines in parallel; yield (line, output object) once complete; if stopped early, close the engine."""
        left, under_way = iter(lines), dict[Future[dict[str, Any]], ParsedBatchLine]()
        pool = ThreadPoolExecutor(self.most)
        try:
            while True:
                for line in itertools.islice(left, self.most - len(under_way)):
                    under_way[pool.submit(self.answer_line, line)] = line
                if not under_way:
                    return
                done, _ = wait(under_way, return_when=FIRST_COMPLETED)
                for each in done:
                    yield under_way.pop(each), each.result()
        finally:
            if under_way:
                self.engine.close(drain=False)
            pool.shutdown(cancel_futures=True)
