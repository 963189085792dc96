"""Chat templates: finds a checkpoint's template, and renders it in Jinja's sandbox, as transformers does."""

import datetime
import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxkv._errors import require
from jaxkv.checkpoints.json_files import read_json, read_text

# Templates add texts such as tool descriptions to their input, far fewer characters than this.
_MOST_CHARACTERS = 1 << 28
_LONGEST_ERROR = 500


def read_chat_template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    """Return the Jinja source of a Hugging Face folder's default chat template; None if it has none.

    `settings` is the content of the folder's `tokenizer_config.json`.

    Raises:
        ValueError: if the template is neither a string nor a list of named strings.
    """
    if (folder / "chat_template.jinja").is_file():
        return read_text(folder / "chat_template.jinja")
    file = folder / "chat_template.json"
    template = read_json(file).get("chat_template") if file.is_file() else None
    if not template:
        file = folder / "tokenizer_config.json"
        template = settings.get("chat_template")
    if isinstance(template, list):  # several templates by name
        for each in template:
            named = isinstance(each, dict) and isinstance(each.get("name"), str)
            remedy = (
                f'malformed: use {{"name": ..., "template": ...}} in the chat_template of {file}'
            )
            require(named and isinstance(each.get("template"), str), "chat_template", each, remedy)
        template = {each["name"]: each["template"] for each in template}.get("default")
    require(
        template is None or isinstance(template, str),
        "chat_template",
        template,
        f"not a string: use one in {file}",
    )
    return template or None


def render_chat_template(source: str, /, **variables: Any) -> str:
    """Render a chat template in a sandbox from its Jinja source and variables; return the text.

    The sandbox keeps a template from Python's objects and files. The length of the text is bounded, the time is not.

    Raises:
        ValueError: if the template rejects its input or fails, with its message.
    """
    pieces = []
    total = 0
    try:
        for piece in _compile_template(source).generate(variables):
            pieces.append(piece)
            total += len(piece)
            if total > _MOST_CHARACTERS:
                raise MemoryError(f"more than {_MOST_CHARACTERS:,} characters")
    except Exception as error:
        kind = "" if type(error).__module__.startswith("jinja2") else f"{type(error).__name__}: "
        raise ValueError(f"{kind}{error}"[:_LONGEST_ERROR]) from error
    return "".join(pieces)


@functools.lru_cache(maxsize=16)
def _compile_template(source: str) -> Any:
    """Compile Jinja source for a sandbox, with transformers' settings; return the `jinja2.Template`, cached."""
    import jinja2.ext
    import jinja2.sandbox

    class GenerationTagExtension(jinja2.ext.Extension):
        """Jinja extension that renders the content of `{% generation %}` blocks and ignores the tags."""

        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            """Parse a `{% generation %}` block to its end tag; return the Jinja nodes of its content."""
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(
        value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[GenerationTagExtension, "jinja2.ext.loopcontrols"],
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment.from_string(source)
