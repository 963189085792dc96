"""Runs the HTTP application by uvicorn: while it is made, 503; a first signal drains it, a second ends it at once."""

import contextlib
import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Generator
from types import FrameType
from typing import Any

import uvicorn
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from jaxkv._errors import invalid
from jaxkv.serving.errors import HttpError
from jaxkv.serving.http import Application

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
# Seconds that clients have to read the end of their answers, once all are complete.
_LAST_READ = 5


class Server(uvicorn.Server):
    """uvicorn's server: answers 503 until its application is made, and what it has before it ends.

    Attributes:
        app: the application; None until it is made.
        progress: what is made before, as JSON.
        error: what was raised instead of making it.
        cut: True if a signal ended it before all requests were answered, or any was taken.
    """

    def __init__(self, app: Application | None = None):
        """Makes the server; `run` starts it."""
        self.app, self.progress = app, dict[str, Any]()
        self.error: BaseException | None = None

        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            await (self.app or self._starting())(scope, receive, send)

        config = uvicorn.Config(
            answer,
            http="h11",
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=_LAST_READ,
        )
        super().__init__(config)
        self.cut = False
        self._latest: float | None = None

    def _starting(self) -> Response:
        """Response to all requests until the application is made: an error in OpenAI's form, and the progress."""
        refused = HttpError(503, "the server is starting: try again later", code="starting")
        body = {"status": "starting", **self.progress, **refused.body()}
        return JSONResponse(body, 503, {"Retry-After": "5"})

    def make(self, make: Callable[[], object]) -> None:
        """Calls, in a thread, a function that sets `app`; its error ends the server."""
        try:
            make()
        except BaseException as error:  # noqa: BLE001 - whoever runs the server raises it
            self.error, self.should_exit = error, True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begins to drain; the second time, or before there is anything to drain, ends at once."""
        if self.app is None or self.app.service.draining:
            self.cut = self.should_exit = self.force_exit = True
            # It would log a traceback for each answer that is cut off.
            logging.getLogger("uvicorn.error").disabled = True
            return
        self.app.service.draining = True
        self._latest = time.monotonic() + self.app.service.limits.seconds + _LAST_READ

    async def on_tick(self, counter: int) -> bool:
        """Ends the server once it drains and nothing is under way, or every deadline has passed."""
        idle = self.app is not None and self.app.service.active == 0
        if self._latest is not None and (idle or time.monotonic() > self._latest):
            self.should_exit = True
        return await super().on_tick(counter)

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Context manager in which signals come to `handle_exit`; they end the process in order, not by themselves."""
        before = {each: signal.signal(each, self.handle_exit) for each in _SIGNALS}
        try:
            yield
        finally:
            for each, handler in before.items():
                signal.signal(each, handler)


def listening(host: str, port: int) -> socket.socket:
    """Socket that listens at an address; port 0 takes a free one. ValueError names an address that cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, dualstack_ipv6=":" in host)
    except OSError as error:
        remedy = (
            f"{os.strerror(error.errno) if error.errno else error}: give another --host or --port"
        )
        raise invalid("address", f"{host}:{port}", remedy) from None


def many_files() -> None:
    """Raises the process' limit of open files to the most that it may have: each idle connection is one."""
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
