"""The command ``headroom``, also ``python -m headroom``: a file per subcommand, which reads
arguments and calls the packages."""

from .command import EXIT_CODES, main

__all__ = ["EXIT_CODES", "main"]
