"""Finds the newest state in a folder, and removes old ones."""

from __future__ import annotations

import errno
import os
import re
import warnings
from collections.abc import Iterable
from pathlib import Path

from .._core.atomic import partial_of, remove_partial
from .._core.text import quoted
from .file import StateFile, StateFileError, is_state_file


def latest(directory: str | os.PathLike[str], *, verify: bool = True) -> Path | None:
    """Returns the state in a folder that was saved last, or None if there is no state or no folder.

    The file is whole: all of its checksums are compared. States that are damaged or cut off, and
    files that cannot be read, are passed over with a warning; if there are some and none is whole,
    that is an error, since a run that then began anew would do so beside its states. Files that are
    not states are passed over in silence, and so are folders and names that begin with a dot.

    The order is that of the number in every state, which is higher than those of the states that
    were in its folder when it was saved, and does not depend on clocks, names or times of files.
    Files of Headroom 0.1.0 have no number and count as older; among them, and between equal numbers
    (of copies, or of two runs that save in one folder in the same moment), the time of saving
    decides, which is in the file too, and then the numbers in the names.

    Args:
        directory: the folder; folders in it are not searched.
        verify: read the newest file whole, at the speed of the disk or of memory. Otherwise only
            its length and its header are checked; :func:`load_state` checks the rest.

    Raises:
        StateFileError: there are states, and none is whole.
        OSError: the folder or files in it cannot be read, and none is whole.
    """
    try:
        paths = list(Path(directory).iterdir())
    except FileNotFoundError:
        return None
    states, failures = _by_age(paths)
    found = None
    while states and found is None:
        path = states.pop()
        try:
            if verify:
                with StateFile(path) as file:
                    file.read()
            found = path
        except FileNotFoundError:
            continue  # removed by a save with keep=
        except (StateFileError, OSError) as error:
            failures.append(error)
    if found is None and failures:
        count = f"{len(failures)} file{'s' * (len(failures) > 1)} in {os.fspath(directory)}"
        advice = f"{count}, and none that is a whole state: {quoted(failures[0], 1000)}. Move away"
        unread = [error for error in failures if isinstance(error, OSError)]
        if unread:
            raise OSError(
                unread[0].errno or errno.EIO,
                f"cannot be read, or is damaged: {advice} what is not needed, or mend permissions",
                unread[0].filename or os.fspath(directory),
            ) from unread[0]
        raise StateFileError(f"{advice} what is damaged to begin anew") from failures[0]
    for error in failures:
        warnings.warn(f"passed over: {error}", stacklevel=2)
    return found


def remove_older(path: str, keep: int) -> None:
    """Removes all but the newest ``keep`` states among the file that has just been written and the
    files whose names differ from its name in nothing but the last number."""
    written = Path(os.path.realpath(path))
    # Another number may be that of another run, as in seed1-step100.
    parts = re.fullmatch(r"(.*?)\d+(\D*)", written.name, re.DOTALL)
    family = r"\d+".join(map(re.escape, parts.groups() if parts else [written.name]))
    others = [
        other
        for other in written.parent.iterdir()
        if re.fullmatch(family, other.name) and other != written
    ]
    states, _ = _by_age(others)  # what cannot be read is left alone
    for other in states[: max(0, len(states) - (keep - 1))]:
        try:
            other.unlink(missing_ok=True)
        except OSError as error:
            warnings.warn(f"an old state is not removed: {error}", stacklevel=3)
    for other in written.parent.iterdir():
        if re.fullmatch(partial_of(family), other.name):
            remove_partial(other)


def _by_age(paths: Iterable[Path]) -> tuple[list[Path], list[Exception]]:
    """Returns the files that are states, the oldest first, and the errors of those that may be
    states and could not be read."""
    found, failures = [], []
    for path in paths:
        try:
            if path.name.startswith(".") or not is_state_file(path):
                continue
            with StateFile(path) as file:
                numbers = [int(digits) for digits in re.findall(r"\d+", path.name)]
                found.append((file.sequence, file.document["saved_ns"], numbers, path))
        except FileNotFoundError:
            continue  # removed by a save with keep=
        except (StateFileError, OSError) as error:
            failures.append(error)
    return [path for *_, path in sorted(found)], failures
