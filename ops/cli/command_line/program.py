"""The program that a command runs: how it is given, before anything of Headroom is imported."""

from __future__ import annotations

import argparse

__all__ = ["MISSING", "add_program", "typed", "words_of"]

MISSING = "PROGRAM is missing: a script, a command, or -m and a module"


def add_program(command: argparse.ArgumentParser) -> None:
    """Adds the arguments that say which program is run."""
    command.add_argument("-m", dest="is_module", action="store_true", help="PROGRAM is a module")
    command.add_argument(
        "program",
        nargs=argparse.REMAINDER,
        metavar="PROGRAM ARGS...",
        help="a script or a command of this environment, and its arguments",
    )


def words_of(options: argparse.Namespace) -> list[str]:
    """Returns the name of the program and its arguments; nothing if it is missing."""
    return options.program[options.program[:1] == ["--"] :]


def typed(options: argparse.Namespace) -> list[str]:
    """Returns the program as it was given: its name and arguments, behind ``-m`` if a module."""
    return [*(["-m"] if options.is_module else []), *words_of(options)]
