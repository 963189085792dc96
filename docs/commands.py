"""Options of all commands as Markdown, read from the commands' parsers; `make_lists.py` writes them into the page."""

import argparse
import collections
import re
import textwrap

from jaxkv.checkpoints.__main__ import _build_parser as of_checkpoints
from jaxkv.cli import _build_parser as of_jaxkv

_WIDTH = 132
_POLICY = "policy"
# What the page says of options of policies, of which there are about a hundred.
_POLICIES = "`jaxkv policies` prints the options of each policy, [their reference](api/policies.rst) says more."
_SEVERAL = "## Options of several commands\n"
# Options of this many commands are described once.
_MANY = 2
_TITLES = {"positional arguments": "Arguments", "options": "Options"}
# What Markdown would take for markup.
_MARKS = re.compile(r"([<>*_|\[\]\\])")


def text() -> str:
    """Markdown of all commands of both programs: a section each, with its options by group, and its examples.

    Options that several commands share are described once, in the last section; those of policies are left out.
    """
    found = commands()
    counts = collections.Counter(
        line for parser, _ in found.values() for line in map(_described, _options(parser))
    )
    several = {line: None for line, count in counts.items() if count >= _MANY}
    sections = [_section(name, *each, several) for name, each in found.items()]
    return "\n".join([*sections, _SEVERAL, *several])


def _options(
    parser: argparse.ArgumentParser,
) -> list[tuple[argparse.Action, argparse.ArgumentParser]]:
    """A command's options, those of policies left out, each with the parser."""
    groups = [group for group in parser._action_groups if group.title != _POLICY]
    return [(each, parser) for group in groups for each in group._group_actions if _shown(each)]


def _described(option: tuple[argparse.Action, argparse.ArgumentParser]) -> str:
    """Markdown item of an option."""
    return _option(*option)


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


def _section(
    name: str, parser: argparse.ArgumentParser, about: str, several: dict[str, None]
) -> str:
    """One command's section; options in `several` are named only."""
    lines = [f"## {name}", "", f"{_plain(about[:1].upper() + about[1:])}.", ""]
    shared = []
    for group in parser._action_groups:
        options = []
        for action in filter(_shown, group._group_actions):
            line = _option(action, parser)
            if group.title != _POLICY and line in several:
                shared.append(f"`{(action.option_strings or [action.dest])[0]}`")
            else:
                options.append(line)
        if not options:
            continue
        title = _TITLES.get(group.title or "", (group.title or "").capitalize())
        said = f" {_plain(group.description)}" if group.description else ""
        if group.title == _POLICY:
            said, options = f" {_POLICIES}{said}", []
        lines += [*textwrap.wrap(f"**{title}.**{said}", _WIDTH, break_on_hyphens=False), ""]
        lines += [*options, ""] if options else []
    if shared:
        said = f"[Options of several commands](#options-of-several-commands): {', '.join(shared)}."
        lines += [*textwrap.wrap(said, _WIDTH, break_on_hyphens=False), ""]
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
