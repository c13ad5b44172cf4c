"""Prints a script that completes the command in a shell: subcommands, options and their values.

bash:  headroom completion bash > ~/.local/share/bash-completion/completions/headroom
zsh:   headroom completion zsh > "${fpath[1]}/_headroom"
fish:  headroom completion fish > ~/.config/fish/completions/headroom.fish
"""

from __future__ import annotations

import argparse
from typing import NamedTuple

from .output import print_json

HELP = "print a completion script for bash, zsh or fish"
SHELLS = ("bash", "zsh", "fish")


class Option(NamedTuple):
    """An option of a subcommand, its help, and the values it takes: None for any, () for none."""

    names: tuple[str, ...]
    help: str
    values: tuple[str, ...] | None


class Command(NamedTuple):
    """A subcommand, what it completes and what its arguments are."""

    name: str
    help: str
    options: list[Option]
    words: tuple[str, ...]
    """The choices of its arguments; none: names of files."""


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.formatter_class = argparse.RawDescriptionHelpFormatter
    command.add_argument("shell", choices=SHELLS, help="the shell that reads the script")


def run(options: argparse.Namespace) -> int:
    from .command import make_parser  # which imports this file

    script = {"bash": bash, "zsh": zsh, "fish": fish}[options.shell](commands_of(make_parser()))
    if options.json:
        print_json({"format": "headroom.completion/1", "shell": options.shell, "script": script})
    else:
        print(script, end="")
    return 0


def commands_of(parser: argparse.ArgumentParser) -> list[Command]:
    """Returns what there is to complete, from the parser itself."""
    found = []
    for action in parser._actions:
        if not isinstance(action, argparse._SubParsersAction):
            continue
        helps = {choice.dest: choice.help or "" for choice in action._choices_actions}
        for name, command in action.choices.items():
            options, words = [], []
            for one in command._actions:
                if one.option_strings:
                    values = tuple(map(str, one.choices)) if one.choices else None
                    values = () if one.nargs == 0 else values
                    options.append(Option(tuple(one.option_strings), _plain(one.help), values))
                elif one.choices:
                    words += list(map(str, one.choices))
            found.append(Command(name, _plain(helps.get(name, "")), options, tuple(words)))
    return found


def _plain(text: str | None) -> str:
    """Text that no shell finds a special character in."""
    kept = "".join(c if c.isalnum() or c in " .,:;-+=_/" else " " for c in text or "")
    return " ".join(kept.split())


def bash(commands: list[Command]) -> str:
    names = " ".join(command.name for command in commands)
    lines = [
        "# bash completion of headroom",
        "_headroom() {",
        "    local current=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD-1]}",
        '    if [ "$COMP_CWORD" -eq 1 ]; then',
        f'        COMPREPLY=($(compgen -W "{names} --help --version" -- "$current"))',
        "        return",
        "    fi",
        '    case "${COMP_WORDS[1]} $before" in',
    ]
    for command in commands:
        for option in command.options:
            patterns = "|".join(f'"{command.name} {name}"' for name in option.names)
            if option.values:
                words = " ".join(option.values)
                reply = f'COMPREPLY=($(compgen -W "{words}" -- "$current"))'
                lines.append(f"    {patterns}) {reply}; return ;;")
            elif option.values is None:
                reply = 'COMPREPLY=($(compgen -f -- "$current"))'
                lines.append(f"    {patterns}) {reply}; return ;;")
    lines += ["    esac", '    case "${COMP_WORDS[1]}" in']
    for command in commands:
        options = " ".join(name for option in command.options for name in option.names)
        other = f'-W "{" ".join(command.words)}"' if command.words else "-f"
        lines += [
            f"    {command.name})",
            '        case "$current" in',
            f'        -*) COMPREPLY=($(compgen -W "{options}" -- "$current")) ;;',
            f'        *) COMPREPLY=($(compgen {other} -- "$current")) ;;',
            "        esac ;;",
        ]
    lines += ["    esac", "}", "complete -o filenames -F _headroom headroom"]
    return "\n".join(lines) + "\n"


def zsh(commands: list[Command]) -> str:
    lines = ["#compdef headroom", "_headroom() {", "    if (( CURRENT == 2 )); then"]
    lines += ["        local -a commands=("]
    lines += [f"            '{one.name}:{one.help.replace(':', ' ')}'" for one in commands]
    lines += ["        )", "        _describe command commands", "        return", "    fi"]
    lines += ['    case "${words[2]}" in']
    for command in commands:
        lines.append(f"    {command.name})")
        lines.append("        shift words; (( CURRENT-- ))")
        lines.append("        _arguments \\")
        for option in command.options:
            for name in option.names:
                help = option.help.replace(":", " ")
                value = ""
                if option.values:
                    value = f":value:({' '.join(option.values)})"
                elif option.values is None:
                    value = ":value:_files"
                lines.append(f"            '{name}[{help}]{value}' \\")
        words = f"({' '.join(command.words)})" if command.words else "_files"
        lines.append(f"            '*:argument:{words}' ;;")
    lines += ["    esac", "}", 'compdef _headroom headroom 2>/dev/null || _headroom "$@"']
    return "\n".join(lines) + "\n"


def fish(commands: list[Command]) -> str:
    lines = ["# fish completion of headroom"]
    for command in commands:
        start = "complete -c headroom -n __fish_use_subcommand -f"
        lines.append(f"{start} -a {command.name} -d '{command.help}'")
    for command in commands:
        start = f"complete -c headroom -n '__fish_seen_subcommand_from {command.name}'"
        for option in command.options:
            names = " ".join(
                f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}"
                for name in option.names
            )
            value = "" if option.values == () else " -r"
            if option.values:
                value = f" -x -a '{' '.join(option.values)}'"
            lines.append(f"{start} {names}{value} -d '{option.help}'")
        if command.words:
            lines.append(f"{start} -f -a '{' '.join(command.words)}'")
    return "\n".join(lines) + "\n"
