"""Starts the command ``headroom``.

It is installed as ``headroom_command``, a package of its own, because ``headroom doctor`` must also
work where ``import headroom`` does not, to say why, and ``headroom rehearse`` begins before torch.
"""

import importlib.util
import sys
from pathlib import Path

__all__ = ["main"]


def main() -> int:
    """Runs the command with the arguments of the process, and returns its exit code."""
    if sys.argv[1:2] == ["doctor"]:
        found = importlib.util.find_spec("headroom")  # which does not import it
        folders = list(found.submodule_search_locations or ()) if found else []
        files = [Path(folder, "cli", "doctor.py") for folder in folders]
        for file in filter(Path.exists, files):
            spec = importlib.util.spec_from_file_location("headroom_doctor", file)
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            return module.main(sys.argv[2:])
    if sys.argv[1:2] == ["rehearse"]:
        from headroom_rehearsal.command import main as rehearse

        return rehearse(sys.argv[2:])
    from headroom.cli import main as run

    return run()
