"""Runs the HTTP application by uvicorn: the first SIGTERM or SIGINT drains it, the second one ends it at once."""

import contextlib
import logging
import os
import signal
import socket
import time
from collections.abc import Generator
from types import FrameType

import uvicorn

from jaxkv._errors import refusal
from jaxkv.serving.http import Application

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
# Seconds that clients have to read the end of their answers, once all are complete.
_LAST_READ = 5


class Server(uvicorn.Server):
    """uvicorn's server that answers what it has before it ends.

    Attributes:
        cut: True if a second signal ended it before all requests were answered.
    """

    def __init__(self, app: Application):
        """Makes the server of an application; `run` starts it."""
        config = uvicorn.Config(
            app,
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
        self._service = app.service
        self._latest: float | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begins to drain; the second time, ends at once."""
        if self._service.draining:
            self.cut = self.should_exit = self.force_exit = True
            # It would log a traceback for each answer that is cut off.
            logging.getLogger("uvicorn.error").disabled = True
            return
        self._service.draining = True
        self._latest = time.monotonic() + self._service.limits.seconds + _LAST_READ

    async def on_tick(self, counter: int) -> bool:
        """Ends the server once it drains and nothing is under way, or every deadline has passed."""
        if self._latest is not None and (self._service.active == 0 or time.monotonic() > self._latest):
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


def bound(host: str, port: int) -> socket.socket:
    """Socket bound to an address; port 0 takes a free one. ValueError names an address that cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    found = socket.socket(family)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind((host, port))
    except OSError as error:
        found.close()
        raise _unusable(host, port, error) from None
    return found


def listen(found: socket.socket) -> None:
    """Lets connections to a bound socket wait for the server; ValueError if another process serves its address."""
    try:
        found.listen()
    except OSError as error:
        host, port = found.getsockname()[:2]
        raise _unusable(host, port, error) from None


def _unusable(host: str, port: int, error: OSError) -> ValueError:
    """Makes the ValueError of an address that the operating system refuses with `error`."""
    remedy = f"{os.strerror(error.errno) if error.errno else error}: give another --host or --port"
    return refusal("address", f"{host}:{port}", remedy)


def many_files() -> None:
    """Raises the process' limit of open files to the most that it may have: each idle connection is one."""
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
