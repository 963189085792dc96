"""`command-line` shows a command's options as its parser has them, so that the page cannot go stale."""

import argparse
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from jaxkv.checkpoints.__main__ import _parser as of_checkpoints
from jaxkv.cli import _parser as of_jaxkv


def commands() -> dict[str, tuple[argparse.ArgumentParser, str]]:
    """The subcommands of both programs.

    Returns:
        Each one's parser, and its line of help, by what is typed.
    """
    return _commands_of(of_jaxkv()) | _commands_of(of_checkpoints())


def _commands_of(program: argparse.ArgumentParser) -> dict[str, tuple[argparse.ArgumentParser, str]]:
    """A program's subcommands, and those that they have."""
    found = {}
    for subparsers in (action for action in program._actions if isinstance(action, argparse._SubParsersAction)):
        about = {each.dest: (each.help or "").replace("%%", "%") for each in subparsers._choices_actions}
        for name, parser in subparsers.choices.items():
            found |= {parser.prog: (parser, about[name].rstrip("."))} | _commands_of(parser)
    return found


def _help_of(action: argparse.Action, parser: argparse.ArgumentParser) -> str:
    return (action.help or "") % {**vars(action), "prog": parser.prog} if action.help else ""


def _paragraph(text: str) -> nodes.paragraph:
    """What is between backticks is code."""
    parts = text.split("`")
    return nodes.paragraph(
        "", "", *(nodes.literal("", each) if at % 2 else nodes.Text(each) for at, each in enumerate(parts))
    )


def _options(group: argparse._ArgumentGroup, parser: argparse.ArgumentParser) -> nodes.definition_list:
    formatter = parser._get_formatter()
    listed = nodes.definition_list()
    for action in group._group_actions:
        if isinstance(action, argparse._HelpAction | argparse._SubParsersAction) or action.help == argparse.SUPPRESS:
            continue
        term = nodes.term()
        for at, spelling in enumerate(action.option_strings or [formatter._format_args(action, action.dest)]):
            term += nodes.Text(", ") if at else nodes.Text("")
            words = formatter._format_args(action, action.dest.upper()) if action.option_strings else ""
            term += nodes.literal("", f"{spelling} {words}".strip())
        about = nodes.definition("", _paragraph(_help_of(action, parser)))
        listed += nodes.definition_list_item("", term, about)
    return listed


class CommandLine(SphinxDirective):
    """All commands, a section each."""

    def run(self) -> list[nodes.Node]:
        """Sphinx' hook."""
        sections: list[nodes.Node] = []
        for name, (parser, about) in commands().items():
            section = nodes.section(ids=[nodes.make_id(name)], names=[name])
            section += nodes.title("", name)
            section += nodes.paragraph("", f"{about[:1].upper()}{about[1:]}.")
            for group in parser._action_groups:
                options = _options(group, parser)
                if not len(options):
                    continue
                titles = {"positional arguments": "Arguments", "options": "Options"}
                title = titles.get(group.title or "", (group.title or "").capitalize())
                section += nodes.rubric("", title)
                if group.description:
                    section += nodes.paragraph("", group.description)
                section += options
            if parser.epilog:
                section += nodes.rubric("", "More")
                section += nodes.literal_block(parser.epilog, parser.epilog, language="none")
            sections.append(section)
        return sections


def setup(app: Sphinx) -> dict[str, Any]:
    """Sphinx' hook."""
    app.add_directive("command-line", CommandLine)
    return {"parallel_read_safe": True}
