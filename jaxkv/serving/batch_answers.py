"""`Batch`: answers the lines of a batch's file by an engine, as its HTTP interface would answer their bodies."""

import dataclasses
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, wait
from typing import Any

from jaxkv._errors import require
from jaxkv.serving import asking
from jaxkv.serving.batch_lines import CHATS, TEXTS, Line, failed, responded
from jaxkv.serving.documents import Document
from jaxkv.serving.engine import Engine
from jaxkv.serving.forms import Asked, Form, asked_by, chat_form, text_form
from jaxkv.serving.limits import Limits
from jaxkv.serving.refused import refused_by, unknown_model
from jaxkv.serving.replies import Replies, usage_of
from jaxkv.serving.requests import Request

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
        asked: its body, read; None if it is refused.
        document: the document that it asks; None for none.
        error: the refusal, or what the line is no request for.
    """

    line: Line
    requests: tuple[Request, ...] = ()
    asked: Asked | None = None
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
        most: dict[str, Any] = {"most_tokens": engine.limits.new, "most_answers": MOST_ANSWERS}
        self._forms = {TEXTS: text_form(**most), CHATS: chat_form(**most)}

    def begin(self, line: Line) -> Begun:
        """Submits a line's requests; a refusal is part of what is returned. The engine's own failure is raised."""
        if line.fault is not None:
            return Begun(line=line, error=ValueError(line.fault))
        try:
            asked = _read(line, self._forms[line.url], usual=self.engine.limits.new)
            named = line.body.get("model")
            if named not in (None, self._name):
                raise unknown_model(named, [self._name])
            document = None if asked.document is None else self.engine.documents.of(asked.document)
            requests = asking.submitted(
                self.engine, asked, document, seconds=_SECONDS, offline=True
            )
        except Exception as error:  # noqa: BLE001 - whatever it is, the other lines are answered
            self._require_alive()
            return Begun(line=line, error=error)
        return Begun(line=line, requests=tuple(requests), asked=asked, document=document)

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
        assert begun.asked is not None
        replies = Replies(chat=line.url == CHATS, model=self._name, usage=False)
        usage = usage_of(list(begun.requests), begun.asked.n, begun.document)
        return responded(line, 200, replies.whole(completions, usage))

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


def _read(line: Line, form: Form, *, usual: int) -> Asked:
    """Reads a line's body; ValueError for a stream. Without a seed, the line has one of its own."""
    asked = asked_by(
        line.body, form, chat=line.url == CHATS, most_answers=MOST_ANSWERS, usual_tokens=usual
    )
    require(not asked.stream, "stream", True, "the answers of a batch are whole: leave it out")
    given = asked.seed is None or line.body.get("seed") is not None
    return asked if given else dataclasses.replace(asked, seed=line.seed)
