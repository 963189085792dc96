"""Runs the HTTP application with uvicorn: 503 while it starts; the first signal drains it, the second stops it."""

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

from jaxkv._errors import build_value_error
from jaxkv.serving.errors import HttpError
from jaxkv.serving.http import HttpApplication

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
# Seconds that clients have to read the rest of complete answers.
_LAST_READ = 5


class Server(uvicorn.Server):
    """uvicorn server that answers 503 until its application exists, and completes running requests before it stops.

    Attributes:
        app: the application; None until it exists.
        progress: JSON values of the start so far.
        error: error raised during the start.
        cut: True if a signal stopped the server before all requests were answered, or during the start.
    """

    def __init__(self, app: HttpApplication | None = None):
        """Create the server of an application, or of one that is set later; `run` starts the server."""
        self.app, self.progress = app, dict[str, Any]()
        self.error: BaseException | None = None

        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            await (self.app or self._make_starting_response())(scope, receive, send)

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

    def _make_starting_response(self) -> Response:
        """Return the 503 response during the start: an error in OpenAI's form, with the progress so far."""
        starting = HttpError(503, "the server is starting: try again later", code="starting")
        body = {"status": "starting", **self.progress, **starting.make_error_body()}
        return JSONResponse(body, 503, {"Retry-After": "5"})

    def run_startup(self, make: Callable[[], object]) -> None:
        """Call `make`, which sets `app`, on this thread; if it raises, store the error and stop the server."""
        try:
            make()
        except BaseException as error:  # noqa: BLE001 - raised by the caller of `run`
            self.error, self.should_exit = error, True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Signal handler: drain the server; at a second signal, or during the start, stop immediately."""
        if self.app is None or self.app.service.draining:
            self.cut = self.should_exit = self.force_exit = True
            # uvicorn would log a traceback for each aborted answer.
            logging.getLogger("uvicorn.error").disabled = True
            return
        self.app.service.draining = True
        self._latest = time.monotonic() + self.app.service.limits.seconds + _LAST_READ

    async def on_tick(self, counter: int) -> bool:
        """Let a draining server stop once no request is active or the last deadline has passed; return True to stop."""
        idle = self.app is not None and self.app.service.active == 0
        if self._latest is not None and (idle or time.monotonic() > self._latest):
            self.should_exit = True
        return await super().on_tick(counter)

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Context manager that passes SIGTERM and SIGINT to `handle_exit`, and restores earlier handlers on exit."""
        before = {each: signal.signal(each, self.handle_exit) for each in _SIGNALS}
        try:
            yield
        finally:
            for each, handler in before.items():
                signal.signal(each, handler)


def open_listening_socket(host: str, port: int) -> socket.socket:
    """Return a socket that listens at an address, for port 0 at a free port; ValueError if unavailable."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, dualstack_ipv6=":" in host)
    except OSError as error:
        remedy = (
            f"{os.strerror(error.errno) if error.errno else error}: use another --host or --port"
        )
        raise build_value_error("address", f"{host}:{port}", remedy) from None


def raise_open_file_limit() -> None:
    """Raise the process's limit of open files to its maximum, for many idle connections; ignore failures."""
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
