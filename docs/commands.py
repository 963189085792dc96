"""Options of all commands as Markdown, read from the commands' parsers; `make_lists.py` writes them into the page."""

import argparse
import re
import textwrap

from jaxkv.checkpoints.__main__ import _parser as of_checkpoints
from jaxkv.cli import _parser as of_jaxkv

_WIDTH = 132
_POLICY = "policy"
_HEAD = "## Options of policies\n"
_TITLES = {"positional arguments": "Arguments", "options": "Options"}
# What Markdown would take for markup.
_MARKS = re.compile(r"([<>*_|\[\]\\])")


def text() -> str:
    """Markdown of all commands of both programs: a section each, with its options by group, and its examples.

    The options of policies, which several commands share, have a section of their own, the last.
    """
    found = commands()
    shared = {_policies(parser) for parser, _ in found.values()} - {""}
    if len(shared) != 1:
        raise SystemExit(
            "commands differ in their options of policies: give each its own list in docs/commands.py"
        )
    return "\n".join([*(_section(name, *each) for name, each in found.items()), _HEAD, *shared])


def commands() -> dict[str, tuple[argparse.ArgumentParser, str]]:
    """Parser and line of help of each subcommand of both programs, by what is typed."""
    return _commands_of(of_jaxkv()) | _commands_of(of_checkpoints())


def _commands_of(
    program: argparse.ArgumentParser,
) -> dict[str, tuple[argparse.ArgumentParser, str]]:
    """A program's subcommands, and those that they have."""
    found = {}
    for subparsers in (
        action for action in program._actions if isinstance(action, argparse._SubParsersAction)
    ):
        about = {
            each.dest: (each.help or "").replace("%%", "%") for each in subparsers._choices_actions
        }
        for name, parser in subparsers.choices.items():
            found |= {parser.prog: (parser, about[name].rstrip("."))} | _commands_of(parser)
    return found


def _policies(parser: argparse.ArgumentParser) -> str:
    """A command's options of policies as a Markdown list; empty if it has none."""
    groups = [group for group in parser._action_groups if group.title == _POLICY]
    return "\n".join(
        f"{_option(each, parser)}"
        for group in groups
        for each in group._group_actions
        if _shown(each)
    )


def _section(name: str, parser: argparse.ArgumentParser, about: str) -> str:
    """One command's section."""
    lines = [f"## {name}", "", f"{_plain(about[:1].upper() + about[1:])}.", ""]
    for group in parser._action_groups:
        options = [_option(action, parser) for action in group._group_actions if _shown(action)]
        if not options:
            continue
        title = _TITLES.get(group.title or "", (group.title or "").capitalize())
        said = f" {_plain(group.description)}" if group.description else ""
        if group.title == _POLICY:
            said, options = f" [Options of policies](#options-of-policies).{said}", []
        lines += [*textwrap.wrap(f"**{title}.**{said}", _WIDTH, break_on_hyphens=False), ""]
        lines += [*options, ""] if options else []
    if parser.epilog:
        lines += ["```text", parser.epilog.strip("\n"), "```", ""]
    return "\n".join(lines)


def _shown(action: argparse.Action) -> bool:
    """Whether an action is an option that help shows, other than help itself."""
    return not isinstance(action, argparse._HelpAction | argparse._SubParsersAction) and (
        action.help != argparse.SUPPRESS
    )


def _option(action: argparse.Action, parser: argparse.ArgumentParser) -> str:
    """One option as an item of a list: its spellings, and its help."""
    formatter = parser._get_formatter()
    words = formatter._format_args(action, action.dest.upper()) if action.option_strings else ""
    spellings = action.option_strings or [formatter._format_args(action, action.dest)]
    named = ", ".join(f"`{spelling} {words}".strip() + "`" for spelling in spellings)
    help_ = (action.help or "") % {**vars(action), "prog": parser.prog} if action.help else ""
    item = f"- {named}: {_plain(help_)}" if help_ else f"- {named}"
    return "\n".join(textwrap.wrap(item, _WIDTH, subsequent_indent="  ", break_on_hyphens=False))


def _plain(said: str) -> str:
    """A text in which nothing outside of backticks is markup."""
    parts = said.split("`")
    return "`".join(part if at % 2 else _MARKS.sub(r"\\\1", part) for at, part in enumerate(parts))
