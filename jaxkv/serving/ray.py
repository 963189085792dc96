"""Ray Serve application: replicas, each with an engine, behind a router that knows which one holds a document.

`serve run docs/ray_serve.yaml`, whose `import_path` is `jaxkv.serving.ray:app`.
"""

import asyncio
import contextlib
import dataclasses
import json
import time
from collections.abc import AsyncIterator, Iterable, Mapping
from typing import Any

from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from starlette.requests import Request as HttpRequest
from starlette.responses import Response, StreamingResponse
from starlette.types import Message

from jaxkv import _checks
from jaxkv._errors import require
from jaxkv.policies.registry import as_policy
from jaxkv.serving.bodies import ClientGone, body_of
from jaxkv.serving.http import Application
from jaxkv.serving.limits import Limits
from jaxkv.serving.recipe import Recipe
from jaxkv.serving.refused import Refused, as_json

# Seconds between two questions whether a replica is there, and after which one that does not answer is not asked.
_EVERY, _SILENT = 1.0, 10.0
# Seconds that a request may take in the router beyond its limit in the replica.
_MARGIN = 5.0
# Requests under way in a replica: its engine's queue refuses more, not Ray Serve.
_MOST = 10_000
_ARGUMENTS = frozenset(
    "model name dtype weights mesh replicas cpus gpus policy policy_options api_key timeout max_body_bytes slots "
    "max_prompt_tokens max_new_tokens max_question_tokens queue documents document_bytes".split()
)
_OF_ENGINE = ("slots", "max_prompt_tokens", "max_new_tokens", "queue", "document_bytes")


class Replica:
    """One engine behind OpenAI's HTTP interface, called by the router."""

    def __init__(self, recipe: Recipe, name: str, limits: Limits):
        """Loads the model and makes the engine."""
        self._engine = recipe.made()
        self._app = Application({name: self._engine}, limits=limits)

    async def ask(self, scope: dict[str, Any], body: bytes) -> AsyncIterator[Message]:
        """Answers an HTTP request; yields the ASGI messages of its response."""
        sent: asyncio.Queue[Message | None] = asyncio.Queue()
        given, gone = (
            iter([{"type": "http.request", "body": body, "more_body": False}]),
            asyncio.Event(),
        )

        async def receive() -> Message:
            message = next(given, None)
            if message is None:
                await gone.wait()
            return message or {"type": "http.disconnect"}

        async def answer() -> None:
            try:
                await self._app(scope, receive, sent.put)
            finally:
                await sent.put(None)

        answering = asyncio.create_task(answer())
        try:
            while (message := await sent.get()) is not None:
                yield message
        finally:
            # The router cancels this call when the client goes; cancelling the application would lose what it submits.
            gone.set()
            with contextlib.suppress(Exception):
                await answering

    async def holds(self, document: str) -> bool:
        """True if a document of this id is here."""
        with contextlib.suppress(ValueError):
            return bool(self._engine.documents.of(document))
        return False

    def check_health(self) -> None:
        """Raises if the engine has failed: Ray Serve then starts another replica."""
        if self._engine.error is not None:
            raise RuntimeError("the engine has failed") from self._engine.error


@dataclasses.dataclass(kw_only=True)
class _Place:
    """A replica as the router sees it.

    Attributes:
        handle: Ray Serve's handle.
        active: requests under way there.
        given: requests that it was given so far.
        seen: time at which it last answered, on the clock `time.monotonic`.
        gone: True if its process has ended, and the next one does not answer yet.
    """

    handle: Any
    active: int = 0
    given: int = 0
    seen: float = 0.0
    gone: bool = True

    @property
    def there(self) -> bool:
        """True if it answers."""
        return not self.gone and time.monotonic() - self.seen < _SILENT


class Router:
    """Sends each HTTP request to the replica with the fewest, or to the one that holds the document that it asks."""

    def __init__(self, limits: Limits, *handles: Any):
        """Makes the router of replicas' handles."""
        self._limits, self._places = limits, [_Place(handle=each) for each in handles]
        self._watching: list[asyncio.Task[None]] = []

    async def __call__(self, request: HttpRequest) -> Response:
        """Answers an HTTP request; 503 with Retry-After where no replica can."""
        if not self._watching:
            self._watching = [asyncio.create_task(self._watch(place)) for place in self._places]
        try:
            body = (
                await body_of(request, self._limits)
                if request.method in ("POST", "PUT", "PATCH")
                else b""
            )
            async with asyncio.timeout(self._limits.seconds + _MARGIN):
                return await self._answered(request, body)
        except Refused as refused:
            return refused.response()
        except _ENDED:
            return _away().response()
        except ClientGone:
            return Refused(499, "the client closed the connection", code="client_gone").response()
        except TimeoutError:
            return Refused(
                504, "the time for this request is over", code="deadline_exceeded"
            ).response()

    async def _answered(self, request: HttpRequest, body: bytes) -> Response:
        """Response of a replica; if one ends before it has begun to answer, another one is asked, where that can be."""
        if request.method == "GET" and request.url.path.rstrip("/") == "/v1/documents":
            return await self._documents(request)
        document = _document_of(request, body)
        tried: list[_Place] = []
        while True:
            place = await self._holder(document) if document else self._free(tried)
            tried.append(place)
            try:
                return await self._asked(place, request, body)
            except _ENDED:
                place.gone = True
                # No other replica has the document.
                if document:
                    raise _away() from None

    def _free(self, tried: Iterable[_Place]) -> _Place:
        """The replica with the fewest requests of those that answer and are not tried yet; `Refused` for none."""
        found = [each for each in self._places if each.there and each not in tried]
        if not found:
            raise _away()
        return min(found, key=lambda each: (each.active, each.given))

    async def _holder(self, document: str) -> _Place:
        """The replica that holds a document; any one if none does; `Refused` while one that may hold it is away."""
        places, missing = [each for each in self._places if each.there], False
        # The first that has it: one that has just ended answers late.
        for asked in asyncio.as_completed([_holds(each, document) for each in places]):
            place, holds = await asked
            if holds:
                return place
            missing = missing or holds is None
        if missing or len(places) < len(self._places):
            raise _away()
        return self._free(())

    async def _asked(self, place: _Place, request: HttpRequest, body: bytes) -> Response:
        """Response of one replica, whole or as a stream; `_Gone` or a RayError if it ends before it begins."""
        messages = place.handle.options(stream=True).ask.remote(_scope_of(request), body)
        place.active, place.given = place.active + 1, place.given + 1
        left = contextlib.ExitStack()
        left.callback(lambda: setattr(place, "active", place.active - 1))
        left.callback(messages.cancel)
        try:
            start = await _next(messages, place)
            headers = {name.decode(): value.decode() for name, value in start["headers"]}
            if headers.get("content-type", "").startswith("text/event-stream"):
                kept = left.pop_all()
                return StreamingResponse(
                    _events(messages, place, kept), status_code=start["status"], headers=headers
                )
            data, more = b"", True
            while more:
                message = await _next(messages, place)
                data, more = data + message.get("body", b""), message.get("more_body", False)
            return Response(data, status_code=start["status"], headers=headers)
        finally:
            left.close()

    async def _documents(self, request: HttpRequest) -> Response:
        """List of the documents of all replicas that answer."""
        data: list[Any] = []
        for place in [each for each in self._places if each.there]:
            response = await self._asked(place, request, b"")
            if response.status_code != 200:
                return response
            data += json.loads(bytes(response.body))["data"]
        return as_json({"object": "list", "data": sorted(data, key=lambda each: each["id"])})

    async def _watch(self, place: _Place) -> None:
        """Asks a replica again and again whether it is there."""
        while True:
            if (await _holds(place, ""))[1] is not None:
                place.seen, place.gone = time.monotonic(), False
            await asyncio.sleep(_EVERY)


class _Gone(Exception):
    """Error for a replica that does not answer any more."""


# What a call of a replica raises if there is none.
_ENDED = (RayError, RayServeException, _Gone)


async def _holds(place: _Place, document: str) -> tuple[_Place, bool | None]:
    """A replica, and whether it holds a document; None if it does not answer."""
    try:
        async with asyncio.timeout(_SILENT):
            return place, await place.handle.holds.remote(document)
    except (*_ENDED, TimeoutError):
        return place, None


async def _next(messages: Any, place: _Place) -> dict[str, Any]:
    """Next message of a replica; `_Gone` once it does not answer whether it is there."""
    coming = asyncio.ensure_future(anext(messages))
    try:
        while not coming.done():
            await asyncio.wait({coming}, timeout=_EVERY)
            if not coming.done() and not place.there:
                raise _Gone
        return coming.result()
    finally:
        coming.cancel()


async def _events(messages: Any, place: _Place, kept: contextlib.ExitStack) -> AsyncIterator[bytes]:
    """Yields the events of a replica's stream; if it ends too early, an event with the error is the last."""
    with kept:
        try:
            more = True
            while more:
                message = await _next(messages, place)
                more = message.get("more_body", False)
                yield message.get("body", b"")
        except _ENDED:
            place.gone = True
            yield b"data: " + json.dumps(_away().body()).encode() + b"\n\n"


def _away() -> Refused:
    """The refusal while a replica that is needed is not there."""
    message = "the replica that is needed for this is starting, or has ended: try again later"
    return Refused(503, message, code="replica_away", headers={"Retry-After": "5"})


def _document_of(request: HttpRequest, body: bytes) -> str | None:
    """Id of the document that a request asks, shows or deletes; None for none."""
    path = request.url.path
    if path.startswith("/v1/documents/"):
        return path.removeprefix("/v1/documents/").partition("/")[0] or None
    if b'"document"' not in body or not path.startswith("/v1/"):
        return None
    try:
        given = json.loads(body)
    except (ValueError, RecursionError):
        # The replica says what is wrong with it.
        return None
    document = given.get("document") if isinstance(given, dict) else None
    return document if isinstance(document, str) else None


def _scope_of(request: HttpRequest) -> dict[str, Any]:
    """Copies a request's ASGI scope (method, path, query, headers) without entries that cannot be sent to a process."""
    names = (
        "type",
        "method",
        "path",
        "raw_path",
        "query_string",
        "root_path",
        "scheme",
        "http_version",
    )
    return {name: request.scope[name] for name in names if name in request.scope} | {
        "headers": [(bytes(name), bytes(value)) for name, value in request.scope["headers"]],
        "asgi": {"version": "3.0"},
    }


def app(args: Mapping[str, Any]) -> Any:
    """Builds the Ray Serve application from the `args` of its configuration; docs/serving.md lists them."""
    known = ", ".join(sorted(_ARGUMENTS))
    for name in args:
        require(
            name in _ARGUMENTS, name, args[name], f"there is no such argument; there are {known}"
        )
    count = _checks.whole("replicas", args.get("replicas", 1), "start at least 1")
    model = args.get("model", "smollm2-135m-instruct")
    options = {name: args[name] for name in _OF_ENGINE if name in args}
    options["policy"] = as_policy(args.get("policy"), options=args.get("policy_options"))
    options["max_question_tokens"] = args.get("max_question_tokens", 256)
    numbers = {name: args.get(name) for name in ("dtype", "weights", "mesh")}
    recipe = Recipe(model=model, **numbers, options=options)
    given = {
        "api_key": args.get("api_key"),
        "seconds": args.get("timeout"),
        "body_bytes": args.get("max_body_bytes"),
    }
    limits = Limits(**{name: value for name, value in given.items() if value is not None})
    resources = {"num_cpus": args.get("cpus", 1), "num_gpus": args.get("gpus", 0)}
    replica = serve.deployment(Replica).options(
        max_ongoing_requests=_MOST, ray_actor_options=resources
    )
    router = serve.deployment(Router).options(
        max_ongoing_requests=_MOST, ray_actor_options={"num_cpus": 0}
    )
    made = []
    for at in range(count):
        own = recipe
        if args.get("documents") is not None:
            # A replica that is started again finds its own.
            own = dataclasses.replace(
                recipe, options={**options, "documents": f"{args['documents']}/{at}"}
            )
        made.append(
            replica.options(name=f"replica-{at}").bind(own, args.get("name", model), limits)
        )
    return router.bind(limits, *made)
