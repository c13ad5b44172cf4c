"""Replaces a file as one step that has happened or not, whatever fails."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import secrets
import stat
from collections.abc import Iterator
from typing import Any

NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK, errno.EINVAL)
NO_MODES = (errno.EPERM, errno.ENOSYS, errno.ENOTSUP)  # of file systems without permissions
KINDS_OF_FILES = (
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISLNK, "a link"),
    (stat.S_ISDIR, "a folder"),
)
ADVICE = {
    errno.ENOSPC: "free space there, or save elsewhere; keep= removes old states",
    errno.EDQUOT: "free some of your quota, or save elsewhere; keep= removes old states",
    errno.EFBIG: "raise the limit on the size of files (ulimit -f), or save elsewhere",
    errno.EACCES: "save in a folder that you may write to",
    errno.EPERM: "save in a folder that you may write to",
    errno.EROFS: "save in a folder that you may write to",
    errno.ENOENT: "save in a folder that stays",
    errno.ENOTDIR: "save in a folder",
    errno.EISDIR: "give the name of a file",
    errno.EEXIST: "remove it if nobody needs it, or save under another name",
    errno.ELOOP: "save under another name",
    errno.EIO: "the storage fails; save elsewhere, and look after it",
}


class BusyFileError(RuntimeError):
    """Says that another process or thread is writing the file."""


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str], size: int | None = None) -> Iterator[int]:
    """Yields a new file, open for writing, that takes the place of the one at ``path`` when the
    block ends without an error. The folder is made if it is missing. The new file has the
    permissions of the old one. ``size`` is for the message.

    Raises:
        OSError: the system refuses, or what is at ``path`` is not a file; the message says what
            became of the old file and what to do.
        BusyFileError: another process or thread is writing this file.
    """
    path = os.path.realpath(path)  # a link goes on pointing to the file
    replaced = False
    try:
        old = _replaceable(path)
        _make_folder(os.path.dirname(path))
        with _partial(path, old) as (file, partial):
            yield file
            _keep_permissions(file, old)
            os.fsync(file)
            os.replace(partial, path)
            replaced = True
            _sync_folder(os.path.dirname(path))
    except OSError as error:
        reason = error.strerror or str(error)
        if replaced:
            fate = "it is the new state, but might not survive a power cut; save again"
        else:
            old_one = "is as it was" if os.path.lexists(path) else "does not exist"
            advice = ADVICE.get(error.errno, "save elsewhere")
            count = "" if size is None else f" ({size:,} bytes)"
            fate = f"not written{count}, so that it {old_one}; {advice}"
        raise OSError(error.errno, f"{reason}: {fate}", path) from error


def write_json(path: str | os.PathLike[str], value: Any, indent: int | None = None) -> None:
    """Writes a value as JSON, on one line unless it is indented, as :func:`replacing` does."""
    with replacing(path) as file, os.fdopen(os.dup(file), "w", encoding="utf-8") as stream:
        json.dump(value, stream, indent=indent, separators=None if indent else (",", ":"))


def partial_of(name: str) -> str:
    """Returns the name that a file has while it is written."""
    return f".{name}.partial"


def remove_partial(path: str | os.PathLike[str]) -> None:
    """Removes what a killed process left of a file, but nothing that is being written."""
    with contextlib.suppress(OSError):
        _remove_left(os.fspath(path))


# ---- the file that is replaced ------------------------------------------------------------------


def _replaceable(path: str) -> os.stat_result | None:
    """Returns the status of the file that will be replaced, or None if there is none."""
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return None
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    _check_regular(status, "a save replaces files only")
    return status


def _check_regular(status: os.stat_result, rule: str) -> None:
    if not stat.S_ISREG(status.st_mode):
        kind = next((name for is_, name in KINDS_OF_FILES if is_(status.st_mode)), "no file")
        raise FileExistsError(errno.EEXIST, f"There is {kind}, and {rule}")


def _make_folder(folder: str) -> None:
    missing = []
    while not os.path.isdir(folder) and folder != os.path.dirname(folder):
        missing.append(folder)
        folder = os.path.dirname(folder)
    for made in reversed(missing):
        with contextlib.suppress(FileExistsError):  # another process made it, or a file; see below
            os.mkdir(made)
        _sync_folder(os.path.dirname(made))


def _sync_folder(folder: str) -> None:
    file = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(file)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # the file system syncs no folders
            raise
    finally:
        os.close(file)


def _keep_permissions(file: int, old: os.stat_result | None) -> None:
    """Gives a new file the mode and, where the system allows it, the owners of the old one."""
    if old is None:
        return
    new = os.fstat(file)
    if (old.st_uid, old.st_gid) != (new.st_uid, new.st_gid):
        with contextlib.suppress(OSError):
            os.fchown(file, old.st_uid, old.st_gid)
    if stat.S_IMODE(new.st_mode) != stat.S_IMODE(old.st_mode) & 0o777:
        try:
            os.fchmod(file, stat.S_IMODE(old.st_mode) & 0o777)
        except OSError as error:
            if error.errno not in NO_MODES:
                raise


# ---- the partial file ---------------------------------------------------------------------------


@contextlib.contextmanager
def _partial(path: str, old: os.stat_result | None) -> Iterator[tuple[int, str]]:
    """Yields a new file beside ``path``, as descriptor and name, and removes it afterwards unless
    it was renamed. Its name is always the same, so that what a killed process left is found and
    removed, and a lock tells that from a file that is being written: locks end with their
    process."""
    folder, name = os.path.split(path)
    mode = 0o666 if old is None else stat.S_IMODE(old.st_mode) & 0o777 | 0o600
    file, partial = _created(os.path.join(folder, partial_of(name)), mode, path)
    try:
        yield file, partial
    except BaseException:
        with contextlib.suppress(OSError):
            if _is_at(file, partial):
                os.unlink(partial)
        raise
    finally:
        with contextlib.suppress(OSError):  # the data are synced, or given up
            os.close(file)


def _created(partial: str, mode: int, path: str) -> tuple[int, str]:
    """Creates a file and locks it. Never writes to anything that has this name already, be it a
    link to another file, a pipe, or a file that someone else has open."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    try:
        while True:
            try:
                file = os.open(partial, flags, mode)
            except FileExistsError:
                _remove_left(partial)
                continue
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _is_at(file, partial):  # else another writer removed it as a leftover
                    return file, partial
            except BaseException as error:
                with contextlib.suppress(OSError):
                    if not isinstance(error, BlockingIOError) and _is_at(file, partial):
                        os.unlink(partial)
                os.close(file)
                raise
            os.close(file)
    except BlockingIOError:
        raise BusyFileError(
            f"{path} is being written by another process or thread; it stays as it is until "
            "then. Let only one save (with several ranks: rank 0), or give each a name of its "
            "own"
        ) from None
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
    # On a file system without locks, only the name can keep writers apart.
    name = f"{partial}.{secrets.token_hex(4)}"
    return os.open(name, flags, mode), name


def _remove_left(partial: str) -> None:
    """Removes what a killed process left under this name.

    Raises:
        BlockingIOError: it is being written.
        FileExistsError: it is not a file.
    """
    try:
        _check_regular(os.stat(partial, follow_symlinks=False), f"{partial} must be a file")
        file = os.open(partial, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return  # another writer was faster
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _is_at(file, partial):
            os.unlink(partial)
    finally:
        os.close(file)


def _is_at(file: int, path: str | os.PathLike[str]) -> bool:
    try:
        return os.path.samestat(os.fstat(file), os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False
