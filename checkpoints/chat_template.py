"""Chat templates: where a checkpoint keeps its own, and Jinja set up the way they expect."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .safetensors_files import read_json


def read_template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    """Finds the chat template of a folder in Hugging Face's layout.

    Args:
        folder: the folder.
        settings: its `tokenizer_config.json`.

    Returns:
        Jinja source, or None.
    """
    if (folder / "chat_template.jinja").is_file():
        return (folder / "chat_template.jinja").read_text("utf-8")
    template = _of_file(folder / "chat_template.json") or settings.get("chat_template")
    if isinstance(template, list):  # several, by name
        template = {each["name"]: each["template"] for each in template}.get("default")
    return template


def _of_file(path: Path) -> str | None:
    return read_json(path).get("chat_template") if path.is_file() else None


def compile_template(source: str) -> Any:
    """Compiles a chat template as Hugging Face does, sandboxed: a template is code from elsewhere.

    Args:
        source: Jinja source.

    Returns:
        The template; its `render` takes "messages", "add_generation_prompt" and the special tokens.
    """
    import jinja2.ext
    import jinja2.sandbox

    class Generation(jinja2.ext.Extension):
        """Passes `{% generation %}` blocks through; they mark answers for training."""

        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            """Reads the block and returns what is inside."""
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
