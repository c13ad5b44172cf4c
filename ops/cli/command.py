"""Reads the command line, runs one subcommand, and turns its errors into an exit code.

A subcommand is a module with ``HELP`` (a line), ``add_arguments(parser)`` and ``run(options)``,
which returns an exit code and, for ``--json``, prints one JSON object; or it returns a function
that returns the code, whose errors are those of a user's program and pass through. A module without
``--json`` says ``HAS_JSON = False``.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import traceback
from importlib import import_module

from .arguments import ArgumentError, Parser
from .output import print_json

__all__ = ["COMMANDS", "EXIT_CODES", "main", "make_parser"]

COMMANDS = ("plan", "fit", "run", "rehearse", "verify", "report", "diff", "convert", "doctor")
EXIT_CODES = {
    0: "done; for a question such as `fit`, the answer is yes",
    1: "failed, or the answer is no; the reason is on standard error or in the output",
    2: "an argument is missing or wrong; nothing was done",
    130: "interrupted with Ctrl-C",
}
"""What the command returns to the shell."""
EXPLAINED = (OSError, ValueError, TypeError, ImportError, RuntimeError, MemoryError)
"""Errors whose text says what failed; RuntimeError: also those of files, states and plans."""


def make_parser(prog: str = "headroom") -> argparse.ArgumentParser:
    """Returns the parser of the whole command."""
    codes = "\n".join(f"  {code:<4} {meaning}" for code, meaning in EXIT_CODES.items())
    parser = Parser(
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
        if not getattr(module, "HAS_JSON", True):
            command.set_defaults(json=False)
        elif not any("--json" in action.option_strings for action in command._actions):
            command.add_argument("--json", action="store_true", help="print one JSON object")
        named = {one.dest: one.option_strings[-1] for one in command._actions if one.option_strings}
        command.set_defaults(run=module.run, options=named)
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Runs the command with ``arguments``, by default those of the process, and returns its exit
    code, one of :data:`EXIT_CODES`.

    Raises:
        SystemExit: with 2 where the arguments are wrong, with 0 for ``--help``, as argparse does.
    """
    parser, words = make_parser(), sys.argv[1:] if arguments is None else arguments
    name = next((f"{parser.prog} {word}" for word in words if word in COMMANDS), parser.prog)
    options = None
    try:
        options, unknown = parser.parse_known_args(words)
        if options.version:
            import headroom

            print(f"headroom {headroom.__version__}")
            return 0
        if options.command is None:
            parser.error(f"a command is missing: one of {', '.join(COMMANDS)}")
        if unknown:
            parser.error(f"there is no argument {unknown[0]!r}; see {name} --help")
        code = options.run(options)
        sys.stdout.flush()
    except ArgumentError as error:
        _say(name, str(error), error, "--json" in words and words[0] != "run")
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        print(f"{parser.prog}: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output, such as head, has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (Exception, SystemExit) as error:  # of any type: the arguments name users' functions
        if options is None:  # --help ends the process with 0
            raise
        text = _reason(error, options.options)
        _say(name, text, error, options.json)
        if isinstance(error, (ValueError, TypeError)) and text.startswith("--"):
            raise SystemExit(2) from None
        return 1
    return code() if callable(code) else code


def _reason(error: BaseException, options: dict[str, str]) -> str:
    """Returns what an error says, with the options in place of the arguments of Python that they
    stand for, and with its type and place where the text alone would not say what failed."""
    text = str(error)
    if not text or not isinstance(error, EXPLAINED):
        place = traceback.extract_tb(error.__traceback__)[-1]
        text = f"{type(error).__name__}: {text}" if text else type(error).__name__
        return f"{text}, in {place.name} ({place.filename}:{place.lineno})"
    for argument, option in options.items():
        text = re.sub(rf"^{argument}(?= is | must )|(?<=give ){argument}=", option, text)
    return text


def _say(name: str, text: str, error: BaseException, as_json: bool) -> None:
    """Prints an error, for people and, where they asked for it, for programs."""
    print(f"{name}: {text}", file=sys.stderr)
    if as_json:
        print_json({"format": "headroom.error/1", "error": text, "type": type(error).__name__})
