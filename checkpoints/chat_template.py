"""Chat templates: finds the one of a checkpoint, and renders it in a process bounded in time, memory and output."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ._errors import require
from .json_files import read_json, read_text

# Environment variables that Python needs to start and to know the time zone.
_ENVIRONMENT = ("PATH", "SYSTEMROOT", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "TZ", "LANG", "LC_ALL")
# Templates take milliseconds; a busy machine may take seconds to start Python.
_SECONDS, _SECONDS_PER_BYTE = 10.0, 1e-6


def read_template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    """Jinja source of a Hugging Face folder's default chat template, None if it has none; ValueError if malformed.

    `settings` is the content of its `tokenizer_config.json`.

    Raises:
        ValueError: where the template is neither a string nor a list of strings with names.
    """
    if (folder / "chat_template.jinja").is_file():
        return read_text(folder / "chat_template.jinja")
    file = folder / "chat_template.json"
    template = read_json(file).get("chat_template") if file.is_file() else None
    if not template:
        file, template = folder / "tokenizer_config.json", settings.get("chat_template")
    if isinstance(template, list):  # several, by name
        for each in template:
            named = isinstance(each, dict) and isinstance(each.get("name"), str)
            remedy = f'give {{"name": ..., "template": ...}} in the chat_template of {file}'
            require(named and isinstance(each.get("template"), str), "chat_template", each, remedy)
        template = {each["name"]: each["template"] for each in template}.get("default")
    require(template is None or isinstance(template, str), "chat_template", template, f"give a string in {file}")
    return template or None


class TemplateTimeout(ValueError):
    """ValueError for a chat template that was not rendered in time: it runs too long, or the machine is too busy."""


class ChatTemplate:
    """Chat template from Jinja source, rendered in a separate process with bounded time, memory and output.

    A template is untrusted code. The process is started for the first text, reused for later ones, and ended with this
    object or when idle; copies and pickles start without one.
    """

    def __init__(self, source: str):
        """Stores the Jinja source; compiles and runs nothing yet."""
        self._source = source
        self._begin()

    def _begin(self) -> None:
        """Initialises the object's lock and process handles, without starting a process."""
        self._lock = threading.Lock()
        self._worker: _Worker | None = None
        self._end: Any = None

    def __getstate__(self) -> dict[str, str]:
        return {"source": self._source}

    def __setstate__(self, state: dict[str, str]) -> None:
        self._source = state["source"]
        self._begin()

    def render(self, **variables: Any) -> str:
        """Renders the template with JSON-like variables in its own process; returns the text, ValueError if it fails.

        Raises:
            TypeError: for a variable that JSON cannot hold.
            ValueError: where the template refuses, fails, or takes more time or memory than templates need.
        """
        request = {"source": self._source, "variables": variables}
        with self._lock:
            answer = self._ask(request)
        if "error" in answer:
            raise (TemplateTimeout if answer.get("late") else ValueError)(answer["error"])
        return answer["text"]

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Sends a request to the rendering process and returns its answer, a dictionary with "text", or with "error".

        Starts a new process if the old one has ended.
        """
        body = json.dumps(request, default=_plain)
        seconds = _SECONDS + _SECONDS_PER_BYTE * len(body)
        line = f'{{"seconds": {seconds}, {body[1:]}\n'.encode()
        # If the process has ended (idle, killed) or belongs to the parent of this fork, a new one is started.
        for worker in (self._worker, None):
            if worker is None:
                worker = self._start()
            elif not worker.mine:
                continue
            answer = worker.ask(line, seconds)
            if answer is not None:
                return json.loads(answer)
            if worker.late:
                return {"error": f"it ran for more than {seconds:.3g} s", "late": True}
        return {"error": "it brought its process down"}

    def _start(self) -> _Worker:
        """Starts a new rendering process, after ending the earlier one, and returns its `_Worker`."""
        if self._end is not None:
            self._end()
        worker = self._worker = _Worker()
        self._end = weakref.finalize(self, worker.end)
        return worker


class _Worker:
    """Handle of a rendering process: exchanges lines of JSON with it, and kills it if it takes too long."""

    def __init__(self) -> None:
        # Only Jinja's folders are on its path, so that no user's module shadows the standard library's.
        specs = [importlib.util.find_spec(name) for name in ("jinja2", "markupsafe")]
        folders = {str(Path(spec.origin).parents[1]) for spec in specs if spec is not None and spec.origin}
        script = Path(__file__).with_name("template_worker.py")
        command = [sys.executable or "python3", "-I", "-S", str(script), *sorted(folders)]
        pipe = subprocess.PIPE
        try:
            # The template sees nothing of the caller's: no access tokens in the environment, no folder to write to.
            kept = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
            self._process = subprocess.Popen(
                command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, env=kept, cwd=os.path.abspath(os.sep)
            )
        except OSError as error:
            raise ValueError(f"no process could be started for it: {command[0]}: {error.strerror}") from error
        self._owner = os.getpid()
        self.late = False

    @property
    def mine(self) -> bool:
        """True if this Python process started the worker; a forked child must not use its parent's."""
        return self._owner == os.getpid()

    def ask(self, line: bytes, seconds: float) -> bytes | None:
        """Sends one request line and returns the answer line; None, with the process killed, if none comes in time."""
        self.late = False
        timer = threading.Timer(seconds, self._give_up)
        timer.daemon = True
        timer.start()
        try:
            assert self._process.stdin is not None and self._process.stdout is not None
            self._process.stdin.write(line)
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        except (OSError, ValueError):  # the process has ended
            answer = b""
        except BaseException:  # after an interrupt the answer would be taken for the next request's
            self.end()
            raise
        finally:
            timer.cancel()
        if not answer.endswith(b"\n"):
            self.end()
            return None
        return answer

    def _give_up(self) -> None:
        """Kills the process and sets `late`; called by the timer when the time for an answer is over."""
        self.late = True
        self._process.kill()

    def end(self) -> None:
        """Kills the process, closes its pipes and waits for it; does nothing in a forked child."""
        if not self.mine:
            return
        self._process.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            try:
                if pipe is not None:
                    pipe.close()
            except OSError:
                pass  # unsent bytes are not needed any more
        self._process.wait()


def _plain(value: Any) -> Any:
    """Dict of a mapping, for `json.dumps` to write (its `default`); TypeError for any other type."""
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} is neither text nor a number, a list or an object")
