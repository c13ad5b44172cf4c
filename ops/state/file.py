"""The container of saved states: a safetensors file with a checksum for every byte.

The layout is that of safetensors, so any tool can read the tensors: the length of the header in 8
bytes, the header in JSON, the data of the tensors one after the other. ``__metadata__`` holds

- ``crc32``, first, so that it lies at a fixed place: the CRC-32 of length and header, with this
  field as zeros;
- ``sequence``, behind it, in 16 digits: higher than that of any state file that was in the folder
  when this one was saved. It orders the files of a folder whatever the clock does. Files of format
  1 have none, and count as older than all that have one;
- ``headroom``, a JSON document (:data:`DOCUMENT`): ``format`` (:data:`FORMAT`), the ``tree`` that
  refers to tensors, ``piece`` (a number of bytes), and ``tensors``: for each the CRC-32 of each of
  its pieces, and its strides if it is dense in another order than the file, which has the order of
  indices.

CRC-32 finds every flipped bit and every burst of up to 32. It is in the standard library, keeps up
with disks, and lets go of the interpreter's lock, so that pieces are summed while others are
written or read. Where the package isal is installed, its CRC-32 keeps up with memory.

What is summed is what is written, and what is read: every piece is copied to memory that belongs to
the save before it is summed and written, so that a thread that goes on training does no harm, and
read to memory that belongs to the load before it is checked and used, so that no other process can
change it in between. Nothing is mapped.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import json
import os
import re
import secrets
import stat
import struct
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from tqdm import tqdm

from .._core.overlap import spanned_bytes

try:
    from isal.isal_zlib import crc32  # the same sums, several times as fast
except ImportError:
    from zlib import crc32

__all__ = [
    "MALFORMED",
    "StateFile",
    "StateFileError",
    "check_storage",
    "check_tensor",
    "identity",
    "is_state_file",
    "partial_of",
    "remove_partial",
    "replacing",
    "shortened",
    "write",
]

FORMAT = 2
PIECE = 8 << 20
BLOCK = 1 << 20  # copied or read at a time: stays in the cache until it is summed
SMALL = 1 << 18  # summed by the thread that writes: handing it to another would take longer
LONGEST_HEADER = 100_000_000  # safetensors' own limit
MOST_VALUES = 1 << 22  # in a header: some 300 MB of Python objects at worst
MOST_DIMS = 64  # torch's loops have no more
DEEPEST = 400  # brackets in each other in a header; Python's own limit is 1,000 calls
PREFIX = b'{"__metadata__":{"crc32":"'
ZEROS = b"0" * 8
BEFORE_SEQUENCE = b'","sequence":"'
SEQUENCE_DIGITS = 16
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
DOCUMENT = {"tree": dict, "module_versions": dict, "saved_ns": int, "piece": int, "tensors": dict}
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


# What reading a header that someone has made up may raise.
MALFORMED = (
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    RuntimeError,
    TypeError,
    ValueError,
)


class StateFileError(RuntimeError):
    """A state file is damaged, is none, or is being written by someone else."""

    def __init__(self, message: str) -> None:
        super().__init__(shortened(message, 1000))  # it may quote the file


# ---- tensors -------------------------------------------------------------------------------------


def check_tensor(tensor: Tensor, name: str) -> None:
    """Raises TypeError for a tensor that is not one run of plain numbers, and ValueError for one
    whose numbers have been freed."""
    if isinstance(tensor, DTensor):
        raise TypeError(
            f"'{name}' is a DTensor: a state file holds whole tensors. Save sharded states with "
            "torch.distributed.checkpoint, or gather them first with "
            "torch.distributed.checkpoint.state_dict and full_state_dict=True"
        )
    if is_traceable_wrapper_subclass(tensor):
        raise TypeError(
            f"'{name}' is a {type(tensor).__name__}, which wraps other tensors; save those"
        )
    if tensor.is_nested:
        raise TypeError(f"'{name}' is a nested tensor; save the list of tensors of its unbind()")
    if tensor.layout != torch.strided:
        raise TypeError(f"'{name}' is sparse ({tensor.layout}); save tensor.to_dense()")
    if tensor.device.type == "meta":
        raise TypeError(f"'{name}' is on the meta device and has no values to save")
    if tensor.is_complex():
        raise TypeError(f"'{name}' is complex; save torch.view_as_real of it")
    if tensor.dtype not in NAMES:
        raise TypeError(f"'{name}' is {tensor.dtype}, which safetensors files do not hold")
    if tensor.dim() > MOST_DIMS:
        raise TypeError(f"'{name}' has {tensor.dim()} dimensions; save tensor.flatten()")
    check_storage(tensor, name)


def check_storage(tensor: Tensor, name: str) -> None:
    """Raises for a tensor whose storage is shorter than the tensor, as after
    ``untyped_storage().resize_(0)``: torch reads and writes such a one without looking."""
    if not tensor.numel():
        return
    storage = tensor.untyped_storage()
    if storage.device.type != tensor.device.type:
        raise TypeError(f"'{name}' is a {type(tensor).__name__}, which has no values")
    wanted = spanned_bytes(tensor)
    if storage.nbytes() < wanted:
        raise ValueError(
            f"the storage of '{name}' has {storage.nbytes():,} bytes, and the tensor lies in "
            f"{wanted:,}: it has been freed or resized, as by untyped_storage().resize_(0); give "
            "it memory again first"
        )


def identity(tensor: Tensor) -> Any:
    """Equal for tensors that are the same memory seen in the same way."""
    if not tensor.numel():
        return id(tensor)
    return (
        tensor.device,
        tensor.data_ptr(),
        tensor.dtype,
        tensor.shape,
        tensor.stride(),
        tensor.is_neg(),
    )


def _order(tensor: Tensor) -> list[int] | None:
    """The strides of a tensor that is dense in another order than that of its indices."""
    if tensor.is_contiguous() or not torch.ops.aten.is_non_overlapping_and_dense(tensor):
        return None
    return list(tensor.stride())


def _in_order(tensor: Tensor) -> Tensor:
    """The values on the CPU, in the order of their indices. A copy only where there must be one."""
    tensor = tensor.detach()
    if tensor.device.type == "cpu" and tensor.is_contiguous() and not tensor.is_neg():
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)


def _threads() -> int:
    return min(8, os.cpu_count() or 1)


def _memory(tensor: Tensor) -> memoryview:
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


# ---- writing -------------------------------------------------------------------------------------


def write(
    path: str, document: dict[str, Any], tensors: dict[str, Tensor], *, progress: bool = True
) -> None:
    """Writes a state file beside ``path`` and then puts it there, as one step that has happened or
    not, whatever fails. At no time is more copied than one tensor and some pieces.

    Raises:
        OSError: the system refuses, or what is at ``path`` is no file; the message says what became
            of the old file and what to do.
        StateFileError: another process or thread is writing this file.
        TypeError: a tensor is none that a file can hold.
        ValueError: too many tensors or values, or a tensor whose memory has been freed.
    """
    for name, tensor in tensors.items():
        check_tensor(tensor, name)
    # Larger elements first: every tensor is then aligned to its elements. Detached, so that a
    # thread that gives a parameter another tensor meanwhile does not change this one.
    tensors = {
        name: tensor.detach()
        for name, tensor in sorted(tensors.items(), key=lambda item: -item[1].element_size())
    }
    sums = {name: [0] * -(-tensor.nbytes // PIECE) for name, tensor in tensors.items()}
    header = _header(document, tensors, sums, 0)
    if len(header) > LONGEST_HEADER:
        raise ValueError(
            f"{len(tensors):,} tensors make a header of {len(header):,} bytes, and a safetensors "
            f"file allows {LONGEST_HEADER:,}; save the parts in several files"
        )
    if _rough_count(header) > MOST_VALUES:
        try:
            _parsed(header[8:])
        except ValueError as error:
            raise ValueError(
                f"the header would not be read again: {error}; save long lists of numbers as "
                "tensors, and the parts in several files"
            ) from None
    size = len(header) + sum(tensor.nbytes for tensor in tensors.values())
    with replacing(path, size) as file:
        sequence = _next_sequence(os.path.dirname(os.path.realpath(path)))
        bar = tqdm(
            total=size,
            desc=f"saving {os.path.basename(path)}",
            unit="B",
            unit_scale=True,
            delay=1,
            disable=not progress,
        )
        with bar, ThreadPoolExecutor(_threads()) as pool:
            copier = _Copier(file, pool, bar)
            start = len(header)
            for name, tensor in tensors.items():
                sums[name] = copier.write(start, tensor)
                start += tensor.nbytes
        _write(file, 0, memoryview(_header(document, tensors, sums, sequence)))


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str], size: int | None = None) -> Iterator[int]:
    """A new file, open for writing, that takes the place of the one at ``path`` when the block ends
    without an error, as one step that has happened or not. Its folder is made if it is missing. It
    has the permissions of the file that it replaces. ``size`` is for the message.

    Raises:
        OSError: the system refuses, or what is at ``path`` is no file; the message says what became
            of the old file and what to do.
        StateFileError: another process or thread is writing this file.
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


def _replaceable(path: str) -> os.stat_result | None:
    """What is known of the file that will be replaced, if there is one."""
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
        with contextlib.suppress(FileExistsError):  # by another process; if it is a file, see below
            os.mkdir(made)
        _sync_folder(os.path.dirname(made))


def _keep_permissions(file: int, old: os.stat_result | None) -> None:
    """Gives a new file the mode, and where that is allowed the owners, of the one it replaces."""
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


def _next_sequence(folder: str) -> int:
    """A number higher than that of any state file in a folder."""
    highest = 0
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if not entry.name.startswith("."):
                highest = max(highest, _stored_sequence(entry.path))
    return min(highest + 1, 10**SEQUENCE_DIGITS - 1)


def _stored_sequence(path: str) -> int:
    """The number in a header, whose checksum is not looked at: a number that is too high does no
    harm here, and this is done for every file of the folder."""
    begin = b""
    with contextlib.suppress(OSError):
        if os.path.isfile(path):
            with open(path, "rb", buffering=0) as file:
                begin = file.read(8 + len(PREFIX) + 8 + len(BEFORE_SEQUENCE) + SEQUENCE_DIGITS)
    if begin[8:].startswith(PREFIX) and begin[8 + len(PREFIX) + 8 :].startswith(BEFORE_SEQUENCE):
        digits = begin[-SEQUENCE_DIGITS:]
        return int(digits) if digits.isdigit() else 0
    return 0


def _header(
    document: dict[str, Any],
    tensors: dict[str, Tensor],
    sums: dict[str, list[int]],
    sequence: int,
) -> bytes:
    """Length and header. Its length does not depend on the sums, nor on the number."""
    notes: dict[str, dict[str, Any]] = {}
    entries: dict[str, dict[str, Any]] = {}
    start = 0
    for name, tensor in tensors.items():
        notes[name] = {"crc32": [f"{crc:08x}" for crc in sums[name]]}
        if order := _order(tensor):
            notes[name]["stride"] = order
        entries[name] = {
            "dtype": NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, start + tensor.nbytes],
        }
        start += tensor.nbytes
    whole = {"format": FORMAT, **document, "piece": PIECE, "tensors": notes}
    metadata = {
        "crc32": ZEROS.decode(),
        "sequence": f"{sequence:0{SEQUENCE_DIGITS}d}",
        "format": "pt",
        "headroom": _dumps(whole),
    }
    text = _dumps({"__metadata__": metadata, **entries}).encode()
    text += b" " * (-len(text) % 8)
    header = bytearray(struct.pack("<Q", len(text)) + text)
    field = 8 + len(PREFIX)
    header[field : field + 8] = f"{crc32(header):08x}".encode()
    return bytes(header)


def _dumps(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def _rough_count(text: bytes) -> int:
    """At least as many as there are values in a JSON text."""
    return 1 + sum(map(text.count, (b",", b":", b"[", b"{")))


def _parsed(header: bytes) -> tuple[dict[str, Any], dict[str, Any]]:
    """The entries of a header and its document. A few bytes of JSON can make hundreds in memory, so
    the values and brackets are counted before they are made.

    Raises:
        ValueError: it is malformed, or has more values than a header may have.
        RecursionError: the interpreter's stack is nearly full.
    """
    entries = _parsed_object(header)
    metadata = entries.pop("__metadata__")
    if not isinstance(metadata, dict) or not isinstance(metadata.get("headroom"), str):
        raise ValueError("'__metadata__' has no 'headroom'")
    document = _parsed_object(metadata["headroom"].encode("utf-8", "surrogatepass"))
    sequence = metadata.get("sequence", "0")
    if not isinstance(sequence, str) or not re.fullmatch(r"[0-9]{1,16}", sequence):
        raise ValueError("'sequence' is no number")
    return entries, document | {"sequence": int(sequence)}


def _parsed_object(text: bytes) -> dict[str, Any]:
    # The text without its strings. Escapes go first, so that a quote then is the end of a string.
    bare = text.replace(rb"\\", b"").replace(rb"\"", b"")
    count = bare.count(b'"') // 2  # before each string is a comma, a colon or a bracket
    if count <= MOST_VALUES:
        bare = re.sub(rb'"[^"]*"', b"", bare)
        count = _rough_count(bare)
    if count > MOST_VALUES:
        raise ValueError(f"it has {count:,} values, and {MOST_VALUES:,} are allowed")
    brackets = bare.translate(None, bytes(set(range(256)) - set(b"[]{}")))
    for _ in range(DEEPEST):
        inner = brackets.replace(b"[]", b"").replace(b"{}", b"")
        if len(inner) == len(brackets):
            break
        brackets = inner
    if brackets:
        raise ValueError(f"its brackets do not match, or more than {DEEPEST} are in each other")
    found = json.loads(text.decode("utf-8", "surrogatepass"), parse_constant=_no_constant)
    if not isinstance(found, dict):
        raise ValueError("it is no object")
    return found


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


class _Copier:
    """Writes tensors from copies of their pieces, and sums the copies: what is written is what the
    checksum is of, also while another thread changes the tensor. The next pieces are copied and
    summed by threads while one is written."""

    def __init__(self, file: int, pool: ThreadPoolExecutor, bar: tqdm) -> None:
        self._file, self._pool, self._bar = file, pool, bar
        self._free: list[Any] = []
        self._ahead = min(_threads(), 3)

    def write(self, offset: int, tensor: Tensor) -> list[int]:
        """Writes the values and returns the sums of their pieces."""
        if not tensor.nbytes:
            return []
        values = _in_order(tensor)  # held until all of it is copied
        start, stop = values.data_ptr(), values.data_ptr() + values.nbytes
        sums: list[int] = []
        ahead: deque[Future[tuple[Any, memoryview, int]]] = deque()
        try:
            for piece in range(start, stop, PIECE):
                ahead.append(self._copied(piece, min(PIECE, stop - piece)))
                if len(ahead) > self._ahead:
                    sums.append(self._written(offset + len(sums) * PIECE, ahead.popleft()))
            while ahead:
                sums.append(self._written(offset + len(sums) * PIECE, ahead.popleft()))
        finally:
            wait(ahead)
            del values
        return sums

    def _copied(self, address: int, size: int) -> Future[tuple[Any, memoryview, int]]:
        buffer = (self._free or [(ctypes.c_char * min(size, PIECE))()]).pop()
        if len(buffer) < size:
            buffer = (ctypes.c_char * size)()
        if size > SMALL:
            with contextlib.suppress(RuntimeError):  # the interpreter is about to end, as in atexit
                return self._pool.submit(_copy, buffer, address, size)
        future: Future[tuple[Any, memoryview, int]] = Future()
        future.set_result(_copy(buffer, address, size))
        return future

    def _written(self, offset: int, future: Future[tuple[Any, memoryview, int]]) -> int:
        buffer, copy, crc = future.result()
        _write(self._file, offset, copy)
        self._bar.update(len(copy))
        self._free.append(buffer)
        return crc


def _copy(buffer: Any, address: int, size: int) -> tuple[Any, memoryview, int]:
    """The buffer, the part of it that the bytes at an address were copied to, and their sum."""
    copy, crc = memoryview(buffer).cast("B")[:size], 0
    for start in range(0, size, BLOCK):
        block = copy[start : start + BLOCK]
        ctypes.memmove(ctypes.addressof(buffer) + start, address + start, len(block))
        crc = crc32(block, crc)
    return buffer, copy, crc


def _write(file: int, offset: int, data: memoryview) -> None:
    while data:
        count = os.pwrite(file, data, offset)
        data, offset = data[count:], offset + count


@contextlib.contextmanager
def _partial(path: str, old: os.stat_result | None) -> Iterator[tuple[int, str]]:
    """A new file beside ``path``, as descriptor and name, which is gone afterwards unless it was
    renamed. Its name is always the same, so that what a killed process left is found and removed,
    and a lock tells that from a file that is being written: locks end with their process."""
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


def partial_of(name: str) -> str:
    """The name of a file while it is written."""
    return f".{name}.partial"


def _created(partial: str, mode: int, path: str) -> tuple[int, str]:
    """A file that did not exist, locked. Nothing that has this name already is ever written to, be
    it a link to another file, a pipe, or a file that someone else has open."""
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
                if _is_at(file, partial):  # else another writer took it for one that was left
                    return file, partial
            except BaseException as error:
                with contextlib.suppress(OSError):
                    if not isinstance(error, BlockingIOError) and _is_at(file, partial):
                        os.unlink(partial)
                os.close(file)
                raise
            os.close(file)
    except BlockingIOError:
        raise StateFileError(
            f"{path} is being written by another process or thread; it stays as it is until "
            "then. Let only one save (with several ranks: rank 0), or give each a name of its "
            "own"
        ) from None
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
    # A file system without locks, where only the name can keep writers apart.
    name = f"{partial}.{secrets.token_hex(4)}"
    return os.open(name, flags, mode), name


def _remove_left(partial: str) -> None:
    """Removes what a killed process left under this name.

    Raises:
        BlockingIOError: it is being written.
        FileExistsError: it is no file of ours.
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


def remove_partial(path: str | os.PathLike[str]) -> None:
    """Removes what a killed process left of a file, but nothing that is being written."""
    with contextlib.suppress(OSError):
        _remove_left(os.fspath(path))


def _sync_folder(folder: str) -> None:
    file = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(file)
    except OSError as error:
        if error.errno not in (
            errno.EINVAL,
            errno.ENOTSUP,
        ):  # no such thing there
            raise
    finally:
        os.close(file)


# ---- reading -------------------------------------------------------------------------------------


def is_state_file(path: str | os.PathLike[str]) -> bool:
    """Whether a file begins as a state file does, be it in order or not.

    Raises:
        OSError: there is something that cannot be looked at.
    """
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            return False
        with open(path, "rb", buffering=0) as file:
            return file.read(8 + len(PREFIX))[8:] == PREFIX
    except (FileNotFoundError, NotADirectoryError):
        return False


@dataclass(frozen=True)
class Entry:
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int  # in the file
    size: int
    sums: tuple[int, ...]
    stride: tuple[int, ...] | None


class StateFile:
    """An open state file whose header is in order. :meth:`read` checks the rest.

    Attributes:
        path: as given.
        document: what was written with it.
        entries: what there is to know of each tensor, by name.
        sequence: its number among the files of its folder; 0 if it is of format 1.

    Raises:
        OSError: it cannot be opened or read.
        StateFileError: it is cut off or damaged, no state file, or of a later version.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        self._file = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe would block
        try:
            status = os.fstat(self._file)
            if not stat.S_ISREG(status.st_mode):
                raise StateFileError(f"{self.path} is not a file")
            self._size, self._changed_ns = status.st_size, status.st_mtime_ns
            header, self._data = self._read_header()
            try:
                self.document, self.entries = self._parse(header)
            except StateFileError:
                raise
            except MALFORMED as error:
                raise StateFileError(
                    f"the header of {self.path} is malformed: {shortened(error)}"
                ) from error
            self.sequence: int = self.document["sequence"]
        except BaseException:
            os.close(self._file)
            raise

    def __enter__(self) -> StateFile:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._file)

    def _read_header(self) -> tuple[bytes, int]:
        """The header, and where the data begin."""
        begin = os.pread(self._file, 8 + len(PREFIX), 0)
        if begin[8:] != PREFIX[: len(begin[8:])] or not begin:
            if begin[:1] == b"\x80" or begin[:2] == b"PK":
                raise StateFileError(
                    f"{self.path} is a pickle or a file of torch.save, which is not opened: "
                    "pickles run code. If you trust it, read it with torch.load(weights_only=True) "
                    "and save what is in it with headroom.save_state"
                )
            raise StateFileError(
                f"{self.path} is no state file of headroom.save_state, or its beginning is "
                "damaged, or another program has written it anew; safetensors.safe_open may read it"
            )
        length = struct.unpack("<Q", begin[:8])[0] if len(begin) >= 8 else 0
        if len(begin) < 8 + len(PREFIX) or length > self._size - 8 or length > LONGEST_HEADER:
            raise StateFileError(
                f"the header of {self.path} is damaged or cut off: the file has {self._size:,} "
                f"bytes. {self.advice}"
            )
        header = bytearray(os.pread(self._file, 8 + length, 0))
        field = 8 + len(PREFIX)
        stored = bytes(header[field : field + 8])
        header[field : field + 8] = ZEROS
        if stored != f"{crc32(header):08x}".encode():
            raise StateFileError(
                f"the header of {self.path} is damaged: its checksum is wrong. {self.advice}"
            )
        return bytes(header[8:]), 8 + length

    def _parse(self, header: bytes) -> tuple[dict[str, Any], dict[str, Entry]]:
        entries, document = _parsed(header)
        if type(document["format"]) is not int or document["format"] < 1:
            raise ValueError("'format' is no number")
        if document["format"] > FORMAT:
            raise StateFileError(
                f"{self.path} has format {document['format']} and this version of Headroom reads "
                f"up to {FORMAT}; it was written by {document.get('headroom', 'a later one')}: "
                "upgrade"
            )
        for key, kind in DOCUMENT.items():
            if type(document[key]) is not kind:
                raise TypeError(f"'{key}' is a {type(document[key]).__name__}")
        self._piece, found, end = document["piece"], {}, 0
        if self._piece <= 0:
            raise ValueError(f"pieces of {self._piece} bytes")
        for name, entry in sorted(entries.items(), key=lambda item: item[1]["data_offsets"]):
            notes, (start, stop) = document["tensors"][name], entry["data_offsets"]
            dtype, shape = DTYPES[entry["dtype"]], tuple(entry["shape"])
            stride = tuple(notes["stride"]) if "stride" in notes else None
            for number in (start, stop, *shape, *(stride or ())):
                if type(number) is not int or not 0 <= number < 2**63:
                    raise ValueError(f"'{name}' has a size or an offset that is none")
            if len(shape) > MOST_DIMS:
                raise ValueError(f"'{name}' has {len(shape)} dimensions")
            if start != end:
                raise ValueError(f"'{name}' does not follow the tensor before it")
            if stop - start != prod(shape) * dtype.itemsize:
                raise ValueError(f"'{name}' has {stop - start:,} bytes, but shape {shape}")
            sums = tuple(int(crc, 16) for crc in notes["crc32"])
            if len(sums) != -(-(stop - start) // self._piece):
                raise ValueError(f"'{name}' has {len(sums)} checksums")
            if stride is not None:
                dense = torch.empty_strided(shape, stride, device="meta")
                if not torch.ops.aten.is_non_overlapping_and_dense(dense):
                    raise ValueError(f"'{name}' has strides {stride}")
            elif start == stop:
                torch.empty(shape, dtype=dtype, device="meta")  # raises for sizes too large
            found[name] = Entry(dtype, shape, self._data + start, stop - start, sums, stride)
            end = stop
        if self._size != self._data + end:
            what = "cut off" if self._size < self._data + end else "longer than it was"
            cut = [name for name, e in found.items() if e.start + e.size > self._size]
            where = f" in '{cut[0]}'" if cut else ""
            raise StateFileError(
                f"{self.path} is {what}{where}: it has {self._size:,} bytes, wanted "
                f"{self._data + end:,}. {self.advice}"
            )
        return document, found

    @property
    def advice(self) -> str:
        """What to do if it is damaged."""
        folder = os.path.dirname(self.path) or "."
        return f"Load another one: headroom.latest({folder!r}) finds the newest that is whole"

    def read(
        self, names: Iterable[str] = (), *, but: Collection[str] = (), progress: bool = True
    ) -> dict[str, Tensor]:
        """Reads the file once, checks all of it, and returns the tensors of these names, in memory
        of their own. Tensors named in ``but`` are neither read nor checked.

        Raises:
            StateFileError: a tensor, whichever, is not what was saved.
        """
        found = {}
        for name in names:
            entry = self.check_has(name)
            found[name] = self._empty([name], entry.shape, entry.dtype)
        targets = {name: _memory(tensor) for name, tensor in found.items() if tensor.nbytes}
        others = [name for name in self.entries if name not in but]
        with self._bar("reading", others, progress) as bar:
            self._verify(others, targets, bar, "Nothing was loaded. " + self.advice)
        return {name: self.strided(name, tensor) for name, tensor in found.items()}

    def batches(
        self, names: Iterable[str], effect: Callable[[], str], *, progress: bool = True
    ) -> Iterator[dict[str, Tensor]]:
        """Yields tensors of these names, each checked as it is read, in memory that is overwritten
        by the next: one, or as many as fit in a piece. They are in the order of their indices.

        Raises:
            StateFileError: a tensor is not what was saved; ``effect`` returns what the error says
                of the consequences.
        """
        batches: list[dict[str, int]] = []  # names, and where they begin in the buffer
        end, longest = 0, 0
        for name in (names := list(names)):
            size = self.check_has(name).size
            if not batches or end + size > PIECE:
                batches.append({})
                end = 0
            batches[-1][name] = end
            end += -(-size // 64) * 64  # aligned, for vectors
            longest = max(longest, end)
        buffer = self._empty(names[:1], (longest,), torch.uint8)
        with self._bar("loading", names, progress) as bar:
            for batch in batches:
                found, targets = {}, {}
                for name, start in batch.items():
                    entry = self.entries[name]
                    span = buffer[start : start + entry.size]
                    targets[name] = _memory(span) if entry.size else memoryview(b"")
                    found[name] = span.view(entry.dtype).view(entry.shape)
                self._verify(batch, targets, bar, effect)
                yield found

    def check_unchanged(self) -> None:
        """Raises StateFileError if someone has written to the file since it was opened."""
        status = os.fstat(self._file)
        if (status.st_size, status.st_mtime_ns) != (self._size, self._changed_ns):
            raise StateFileError(
                f"{self.path} was changed while it was read. Nothing was loaded. {self.advice}"
            )

    def strided(self, name: str, tensor: Tensor) -> Tensor:
        """A tensor that was read, in the memory order in which it was saved."""
        stride = self.entries[name].stride
        if stride is None:
            return tensor
        return torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype).copy_(tensor)

    def check_has(self, name: str) -> Entry:
        """Returns the entry of a tensor that the document refers to."""
        if name not in self.entries:
            raise StateFileError(f"{self.path} refers to '{name}', which is not in it")
        return self.entries[name]

    def _empty(self, names: list[str], shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        try:
            return torch.empty(shape, dtype=dtype)
        except RuntimeError as error:  # a file with holes can be of any size
            raise StateFileError(f"no memory for {names} of {self.path}: {error}") from error

    def _bar(self, what: str, names: Iterable[str], progress: bool) -> tqdm:
        return tqdm(
            total=sum(self.entries[name].size for name in names),
            desc=f"{what} {os.path.basename(self.path)}",
            unit="B",
            unit_scale=True,
            delay=1,
            disable=not progress,
        )

    def _verify(
        self,
        names: Iterable[str],
        targets: dict[str, memoryview],
        bar: tqdm,
        effect: str | Callable[[], str],
    ) -> None:
        """Reads tensors, into their targets where they have one, and checks what was read."""
        local = threading.local()

        def check(span: list[tuple[str, int, int, int]]) -> tuple[int, str | None]:
            if not hasattr(local, "buffer"):
                local.buffer = memoryview(bytearray(BLOCK))
            total = 0
            for name, offset, size, wanted in span:
                crc, done = 0, 0
                while done < size:
                    if name in targets:
                        block = targets[name][offset + done : offset + min(done + BLOCK, size)]
                    else:
                        block = local.buffer[: min(BLOCK, size - done)]
                    start = self.entries[name].start + offset + done
                    count = os.preadv(self._file, [block], start)
                    if not count:
                        return total, name
                    crc, done = crc32(block[:count], crc), done + count
                if crc != wanted:
                    return total, name
                total += size
            return total, None

        spans = self._spans(names)
        pool = ThreadPoolExecutor(_threads()) if len(spans) > 1 else None
        try:
            for size, damaged in pool.map(check, spans) if pool else map(check, spans):
                if damaged is not None:
                    raise StateFileError(
                        f"'{damaged}' is damaged in {self.path}: its checksum is wrong. "
                        f"{effect if isinstance(effect, str) else effect()}"
                    )
                bar.update(size)
        finally:
            if pool:
                pool.shutdown(cancel_futures=True)

    def _spans(self, names: Iterable[str]) -> list[list[tuple[str, int, int, int]]]:
        """Name, offset, size and sum of all pieces, in lists of about as many bytes."""
        spans: list[list[tuple[str, int, int, int]]] = []
        total = PIECE
        for name in names:
            entry = self.entries[name]
            for i, crc in enumerate(entry.sums):
                if total >= PIECE:
                    spans.append([])
                    total = 0
                offset = i * self._piece
                size = min(self._piece, entry.size - offset)
                spans[-1].append((name, offset, size, crc))
                total += size
        return spans


def shortened(value: object, length: int = 200) -> str:
    """What is said of a value that comes from a file, and may be long."""
    text = str(value)
    return text if len(text) <= length else text[:length] + "..."
