"""Chat templates: where a checkpoint keeps its own, and rendering them within bounds of time and memory."""

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

# What Python needs to start, and to know the time.
_ENVIRONMENT = ("PATH", "SYSTEMROOT", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "TZ", "LANG", "LC_ALL")
# A template takes a thousandth of that; a busy machine may take long to start Python.
_SECONDS, _SECONDS_PER_BYTE = 10.0, 1e-6


def read_template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    """Finds the chat template of a folder in Hugging Face's layout.

    Args:
        folder: the folder.
        settings: its `tokenizer_config.json`.

    Returns:
        Jinja source, or None.

    Raises:
        ValueError: where it is no text, nor a list of texts with names.
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
    """A template ran for longer than any needs, or the machine had no time for it."""


class ChatTemplate:
    """A chat template, rendered by a process of its own, whose time, memory and output are bounded.

    A template is code from elsewhere. The process starts with the first text asked for, serves the later ones, and ends
    with this object or when it has nothing to do; copies and pickles leave it out.
    """

    def __init__(self, source: str):
        """Takes the source; nothing is compiled or run yet.

        Args:
            source: Jinja source.
        """
        self._source = source
        self._begin()

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._worker: _Worker | None = None
        self._end: Any = None

    def __getstate__(self) -> dict[str, str]:
        return {"source": self._source}

    def __setstate__(self, state: dict[str, str]) -> None:
        self._source = state["source"]
        self._begin()

    def render(self, **variables: Any) -> str:
        """Renders the template.

        Args:
            **variables: what it sees, as far as JSON holds it: "messages", "add_generation_prompt", special tokens.

        Returns:
            The text.

        Raises:
            TypeError: for a variable that JSON does not hold.
            ValueError: where the template refuses, fails, or takes more time or memory than any template needs.
        """
        request = {"source": self._source, "variables": variables}
        with self._lock:
            answer = self._ask(request)
        if "error" in answer:
            raise (TemplateTimeout if answer.get("late") else ValueError)(answer["error"])
        return answer["text"]

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        body = json.dumps(request, default=_plain)
        seconds = _SECONDS + _SECONDS_PER_BYTE * len(body)
        line = f'{{"seconds": {seconds}, {body[1:]}\n'.encode()
        # One that idled too long has ended, or somebody ended it; a process that has forked has none of its own.
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
        if self._end is not None:
            self._end()
        worker = self._worker = _Worker()
        self._end = weakref.finalize(self, worker.end)
        return worker


class _Worker:
    """One process that renders."""

    def __init__(self) -> None:
        # Where Jinja lies, and nothing else of the path: no module of a user's stands in for the standard library's.
        specs = [importlib.util.find_spec(name) for name in ("jinja2", "markupsafe")]
        folders = {str(Path(spec.origin).parents[1]) for spec in specs if spec is not None and spec.origin}
        script = Path(__file__).with_name("template_worker.py")
        command = [sys.executable or "python3", "-I", "-S", str(script), *sorted(folders)]
        pipe = subprocess.PIPE
        try:
            # Nothing of the caller's is the template's business: no tokens in the environment, no folder to write to.
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
        """Whether this process started it; a fork would talk to its parent's."""
        return self._owner == os.getpid()

    def ask(self, line: bytes, seconds: float) -> bytes | None:
        """Sends a request and waits for its answer; None, and the end of the process, where none comes in time."""
        self.late = False
        timer = threading.Timer(seconds, self._give_up)
        timer.daemon = True
        timer.start()
        try:
            assert self._process.stdin is not None and self._process.stdout is not None
            self._process.stdin.write(line)
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        except (OSError, ValueError):  # it has ended, and its pipes with it
            answer = b""
        except BaseException:  # an interrupt: its answer would be taken for the next one's
            self.end()
            raise
        finally:
            timer.cancel()
        if not answer.endswith(b"\n"):
            self.end()
            return None
        return answer

    def _give_up(self) -> None:
        self.late = True
        self._process.kill()

    def end(self) -> None:
        """Ends the process and frees what it held here."""
        if not self.mine:
            return
        self._process.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            try:
                if pipe is not None:
                    pipe.close()
            except OSError:
                pass  # what was not sent is not wanted any more
        self._process.wait()


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} is neither text nor a number, a list or an object")
