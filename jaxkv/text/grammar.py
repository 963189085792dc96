"""`Grammar`: the texts that an answer may be; `build_answer_grammar`: those of a chat's answer with calls of tools."""

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from jaxkv._dataclasses import frozen_dataclass
from jaxkv.text.answer_parsing import AnswerFormat
from jaxkv.text.tokenizer import ChatTokenizer

# Without a limit, some models write spaces for ever.
_JSON_OPTIONS = {"x-guidance": {"whitespace_pattern": r"[ \t\r\n]{0,20}"}}


@frozen_dataclass
class Grammar:
    """Texts that an answer may be: JSON of a schema, matches of a regular expression, or the rules of a grammar.

    An answer ends once its text is complete; an end token is sampled only where the text may end.

    ```python
    grammar = jaxkv.Grammar.from_json_schema({"type": "object", "properties": {"town": {"type": "string"}}})
    engine.submit("Where is the tower?", grammar=grammar)
    ```

    Attributes:
        rules: a grammar in [llguidance's form](https://github.com/guidance-ai/llguidance) of Lark, whose texts are a
            `start`.
    """

    rules: str

    @classmethod
    def from_json_schema(cls, schema: Mapping[str, Any]) -> "Grammar":
        """Return the grammar of JSON values that follow a JSON schema.

        Args:
            schema: the schema; `{"type": "object"}` for any object.

        Returns:
            The grammar.
        """
        return cls(rules=f"start: {_write_json_rule(schema)}")

    @classmethod
    def from_regex(cls, pattern: str) -> "Grammar":
        """Return the grammar of the texts that a regular expression matches as a whole, in the syntax of Rust's regex.

        Args:
            pattern: the regular expression.

        Returns:
            The grammar.
        """
        escaped = re.sub(r"(\\.)|/", lambda match: match[1] or r"\/", pattern)
        return cls(rules=f"start: /{escaped or '()'}/")

    @classmethod
    def from_choices(cls, choices: Iterable[str]) -> "Grammar":
        """Return the grammar of a few texts.

        Args:
            choices: the texts.

        Returns:
            The grammar.
        """
        return cls(rules=f"start: {' | '.join(map(json.dumps, choices))}")


def build_answer_grammar(
    format: AnswerFormat,
    text: ChatTokenizer,
    *,
    content: Grammar | None,
    tools: Iterable[Mapping[str, Any]],
) -> Grammar:
    """Build the grammar of a chat's answer: reasoning in the model's format, then a content or the call of a tool.

    Args:
        format: format of the answer.
        text: the model's tokenizer.
        content: grammar of the content; None for a call.
        tools: OpenAI's descriptions of the functions that the answer may call instead.

    Returns:
        The grammar.
    """
    answers = [format.rules["content"]] if content else []
    schemas = []
    for at, tool in enumerate(tools):
        function, arguments = tool["function"], f"arguments_{at}"
        call = format.rules["call"].replace("$name", function["name"])
        answers.append(call.replace("$arguments", arguments))
        schema = {**function.get("parameters", {}), "type": "object"}
        schemas.append(f"{arguments}: {_write_json_rule(schema)}")
    thought = "reasoning_rest GAP" if format.reasons else "(reasoning GAP)?"
    start = (
        f"start: {thought if 'reasoning_content' in format.markers else ''} ({' | '.join(answers)})"
    )
    rules = f"{start}\n{format.rules['reasoning']}"
    for index, token in text.special_tokens.items():
        # No text contains a special token, so that the first one ends a text.
        rules = rules.replace(f'[suffix="{token.content}"]: TEXT', f": TEXT <[{index}]>")
        rules = rules.replace(token.content, f'" <[{index}]> "')
    grammars = [{"lark_grammar": "\n".join([rules, *schemas])}]
    if content:
        grammars.append({"name": "content", "lark_grammar": content.rules})
    return Grammar(rules=json.dumps({"grammars": grammars}))


def _write_json_rule(schema: Mapping[str, Any]) -> str:
    """Return a JSON schema as a rule of Lark."""
    return f"%json {json.dumps({**_JSON_OPTIONS, **schema})}"
