"""Reads the command line, runs one subcommand, and turns its errors into an exit code.

A subcommand is a module with ``HELP`` (a line), ``add_arguments(parser)`` and ``run(options)``,
which returns an exit code and, for ``--json``, prints one JSON object.
"""

from __future__ import annotations

import argparse
import os
import sys
from importlib import import_module

from .output import print_json

__all__ = ["COMMANDS", "EXIT_CODES", "main", "make_parser"]

COMMANDS = ("plan", "fit", "report", "diff", "convert", "doctor", "demo", "completion")
EXIT_CODES = {
    0: "done; for a question such as `fit`, the answer is yes",
    1: "failed, or the answer is no; the reason is on standard error or in the output",
    2: "the arguments are wrong; nothing was done",
    130: "interrupted with Ctrl-C",
}
"""What the command returns to the shell."""


def make_parser(prog: str = "headroom") -> argparse.ArgumentParser:
    """Returns the parser of the whole command."""
    codes = "\n".join(f"  {code:<4} {meaning}" for code, meaning in EXIT_CODES.items())
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Room for a PyTorch training loop: plan, look, convert.",
        epilog=f"exit codes:\n{codes}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    commands = parser.add_subparsers(metavar="COMMAND", dest="command")
    for name in COMMANDS:
        module = import_module(f".{name}", __package__)
        command = commands.add_parser(name, help=module.HELP, description=module.__doc__)
        module.add_arguments(command)
        if not any("--json" in action.option_strings for action in command._actions):
            command.add_argument("--json", action="store_true", help="print one JSON object")
        command.set_defaults(run=module.run)
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Runs the command with ``arguments``, by default those of the process, and returns its exit
    code, one of :data:`EXIT_CODES`.

    Raises:
        SystemExit: with 2 where the arguments are wrong, with 0 for ``--help``, as argparse does.
    """
    parser = make_parser()
    options = parser.parse_args(arguments)
    if options.version:
        import headroom

        print(f"headroom {headroom.__version__}")
        return 0
    if options.command is None:
        parser.error(f"a command is missing: one of {', '.join(COMMANDS)}")
    try:
        code = options.run(options)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        print(f"{parser.prog}: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output, such as head, has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (OSError, ValueError, TypeError, ImportError, RuntimeError, MemoryError) as error:
        # RuntimeError: also NotImplementedError, BusyFileError, StateFileError and PlanError.
        text = str(error) or type(error).__name__
        print(f"{parser.prog} {options.command}: {text}", file=sys.stderr)
        if options.json:
            print_json({"format": "headroom.error/1", "error": text, "type": type(error).__name__})
        return 1
