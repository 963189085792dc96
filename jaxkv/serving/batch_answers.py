"""`Batch`: answers the lines of a batch's file by an engine, as its HTTP interface would answer their bodies."""

import dataclasses
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, wait
from typing import Any

from jaxkv.serving import asking
from jaxkv.serving.batch_lines import Line, failed, responded
from jaxkv.serving.documents import Document
from jaxkv.serving.engine import Engine
from jaxkv.serving.errors import Refused, refused_by, unknown_model
from jaxkv.serving.limits import Limits
from jaxkv.serving.requests import Request
from jaxkv.serving.schemas import CHATS, ChatBody, TextBody

# A batch has all the time that it takes.
_SECONDS = 1e9
# The most answers that one line can ask for.
MOST_ANSWERS = Limits().answers


@dataclasses.dataclass(frozen=True, kw_only=True)
class Begun:
    """A line that is being answered: its requests in the engine; or the error that it has been refused with.

    Attributes:
        line: the line.
        requests: its requests; none if it is refused.
        body: its body, read; None if it is refused.
        document: the document that it asks; None for none.
        error: the refusal, or what the line is no request for.
    """

    line: Line
    requests: tuple[Request, ...] = ()
    body: TextBody | ChatBody | None = None
    document: Document | None = None
    error: Exception | None = None

    @property
    def done(self) -> bool:
        """True if all its requests are answered, or one has failed."""
        ended = [each for each in self.requests if each.done]
        return len(ended) == len(self.requests) or any(
            each.future.exception() is not None for each in ended
        )


class Batch:
    """Answers lines by an engine.

    Attributes:
        engine: the engine.
        most: the most answers that are under way before another line is begun.
    """

    def __init__(self, engine: Engine, *, name: str):
        """Makes the batch of a model that bodies call `name`; they may leave it out."""
        self.engine, self._name = engine, name
        self.most = 2 * engine.stats.slots

    def begin(self, line: Line) -> Begun:
        """Submits a line's requests; a refusal is part of what is returned. The engine's own failure is raised."""
        if line.fault is not None:
            return Begun(line=line, error=ValueError(line.fault))
        try:
            body = (ChatBody if line.url == CHATS else TextBody).model_validate(line.body)
            if body.stream:
                said = "stream=true: the answers of a batch are whole: leave it out"
                raise Refused(400, said, param="stream")
            if body.model not in (None, self._name):
                raise unknown_model(body.model, [self._name])
            document = None if body.document is None else self.engine.documents.of(body.document)
            requests = asking.submitted(
                self.engine,
                body,
                document,
                most_answers=MOST_ANSWERS,
                seconds=_SECONDS,
                # Without a seed, the line has one of its own.
                seed=line.seed,
                offline=True,
            )
        except Exception as error:  # noqa: BLE001 - whatever it is, the other lines are answered
            self._require_alive()
            return Begun(line=line, error=error)
        return Begun(line=line, requests=tuple(requests), body=body, document=document)

    def answer(self, begun: Begun) -> dict[str, Any]:
        """Waits for a line's answers and returns OpenAI's output object; the engine's own failure is raised."""
        line, error = begun.line, begun.error
        if line.fault is not None:
            return failed(line, "invalid_line", line.fault)
        if error is None:
            try:
                with asking.while_asked(list(begun.requests)):
                    completions = [each.result() for each in begun.requests]
            except Exception as raised:  # noqa: BLE001 - as above
                self._require_alive()
                error = raised
        if error is not None:
            refused = refused_by(error, prompt="messages" if line.url == CHATS else "prompt")
            return responded(line, refused.status, refused.body())
        assert begun.body is not None
        requests = list(begun.requests)
        reply = asking.whole(begun.body, self._name, requests, completions, begun.document)
        return responded(line, 200, reply.model_dump(exclude_unset=True))

    def answers(self, lines: Iterable[Line]) -> Iterator[tuple[Line, dict[str, Any]]]:
        """Yields each line with its output object, as they are complete; reads lines as slots become free."""
        left, under_way = iter(lines), list[Begun]()
        try:
            while True:
                while sum(len(each.requests) for each in under_way) < self.most and (
                    line := next(left, None)
                ):
                    under_way.append(self.begin(line))
                    if under_way[-1].done:
                        break
                if not under_way:
                    return
                waiting = [
                    each.future for begun in under_way for each in begun.requests if not each.done
                ]
                if not any(each.done for each in under_way):
                    wait(waiting, return_when=FIRST_COMPLETED)
                ended = [each for each in under_way if each.done]
                under_way = [each for each in under_way if each not in ended]
                for each in ended:
                    yield each.line, self.answer(each)
        finally:
            for each in under_way:
                asking.cancel(list(each.requests))

    def _require_alive(self) -> None:
        """Raises the error that ended the engine, if one has."""
        if self.engine.error is not None:
            raise self.engine.error
