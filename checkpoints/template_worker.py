"""Script of the process that renders chat templates, isolated because templates are untrusted code.

`chat_template` starts it with Jinja's folders as arguments. Each line of standard input is a request for one text, each
line of standard output its answer, both as JSON. Too much memory is an error; too much time ends the process.
"""

from __future__ import annotations

import json
import signal
import sys
from typing import Any

_IDLE_SECONDS = 60
# The parent process kills this one earlier, unless the parent itself has ended.
_GRACE_SECONDS = 5
# Limit of address space, of which Python and Jinja take an eighth.
_BYTES, _BYTES_PER_INPUT = 1 << 30, 64
# Templates add text such as tool descriptions to their input; none repeats the input often.
_OUTPUT, _OUTPUT_PER_INPUT = 4 << 20, 16
_LONGEST_ERROR = 500


def _bound_memory(size: int) -> None:
    """Limits this process's address space to 1 GiB plus 64 bytes per byte of the request; not on Windows."""
    try:
        import resource
    except ImportError:  # Windows: the process that asks bounds the time
        return
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = _BYTES + _BYTES_PER_INPUT * size
    try:
        resource.setrlimit(resource.RLIMIT_AS, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
    except (OSError, ValueError):
        pass  # macOS may refuse it


def _bound_time(seconds: float) -> None:
    """Sets or resets the timer that ends this process after `seconds`; does nothing on Windows."""
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_REAL, seconds)


def _compile(source: str) -> Any:
    """Compiles Jinja source in a sandbox, with Hugging Face's settings; returns the Jinja template."""
    import datetime

    import jinja2.ext
    import jinja2.sandbox

    class Generation(jinja2.ext.Extension):
        """Jinja extension that renders the content of `{% generation %}` blocks as if they were unmarked."""

        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            """Parses a `{% generation %}` block and returns the nodes inside it."""
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment.from_string(source)


def _render(template: Any, variables: dict[str, Any], most: int) -> str:
    """Text rendered by a template from variables; MemoryError beyond `most` characters."""
    pieces, total = [], 0
    for piece in template.generate(**variables):
        pieces.append(piece)
        total += len(piece)
        if total > most:
            raise MemoryError(f"more than {most:,} characters")
    return "".join(pieces)


def main() -> None:
    """Answers rendering requests from stdin on stdout until stdin ends or no request comes for 60 seconds."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that asks
    sys.path += sys.argv[1:]
    compiled: dict[str, Any] = {}
    while True:
        _bound_time(_IDLE_SECONDS)
        line = sys.stdin.buffer.readline()
        if not line:
            return
        request = json.loads(line)
        _bound_time(request["seconds"] + _GRACE_SECONDS)
        _bound_memory(len(line))
        try:
            source = request["source"]
            if source not in compiled:
                compiled[source] = _compile(source)
            text = _render(compiled[source], request["variables"], _OUTPUT + _OUTPUT_PER_INPUT * len(line))
            answer = json.dumps({"text": text})
        except Exception as error:
            kind = "" if type(error).__module__.startswith("jinja2") else f"{type(error).__name__}: "
            answer = json.dumps({"error": f"{kind}{error}"[:_LONGEST_ERROR]})
        sys.stdout.buffer.write(answer.encode() + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
