"""The container of saved states: a safetensors file with a checksum for every byte.

The layout is that of safetensors, so any tool can read the tensors: the length of the header in 8
bytes, the header in JSON, the data of the tensors one after the other. ``__metadata__`` holds

- ``crc32``, first, so that it lies at a fixed place: the CRC-32 of length and header, with this
  field as zeros;
- ``headroom``, a JSON document (:data:`DOCUMENT`): ``format`` (:data:`FORMAT`), the ``tree`` that
  refers to tensors, ``piece`` (a number of bytes), and ``tensors``: for each the CRC-32 of each of
  its pieces, and its strides if it is dense in another order than the file, which has the order of
  indices.

CRC-32 finds every flipped bit and every burst of up to 32. It is in the standard library, keeps up
with disks, and lets go of the interpreter's lock, so that pieces are summed while others are
written or read. Where the package isal is installed, its CRC-32 keeps up with memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import json
import mmap
import os
import secrets
import stat
import struct
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from tqdm import tqdm

try:
    from isal.isal_zlib import crc32  # the same sums, several times as fast
except ImportError:
    from zlib import crc32

__all__ = [
    "StateFile",
    "StateFileError",
    "check_tensor",
    "identity",
    "is_state_file",
    "partial_of",
    "remove_partial",
    "write",
]

FORMAT = 1
PIECE = 8 << 20
BLOCK = 1 << 20  # read at a time: stays in the cache until it is summed
SMALL = 1 << 18  # summed where it is: handing it to a thread would take longer
LONGEST_HEADER = 100_000_000  # safetensors' own limit
PREFIX = b'{"__metadata__":{"crc32":"'
ZEROS = b"0" * 8
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
ADVICE = {
    errno.ENOSPC: "free space there, or save elsewhere; keep= removes old states",
    errno.EDQUOT: "free some of your quota, or save elsewhere; keep= removes old states",
    errno.EFBIG: "raise the limit on the size of files (ulimit -f), or save elsewhere",
    errno.EACCES: "save in a folder that you may write to",
    errno.EPERM: "save in a folder that you may write to",
    errno.EROFS: "save in a folder that you may write to",
    errno.ENOENT: "make the folder first",
    errno.ENOTDIR: "save in a folder",
    errno.EISDIR: "give the name of a file",
    errno.EIO: "the storage fails; save elsewhere, and look after it",
}


class StateFileError(RuntimeError):
    """A state file is damaged, is none, or is being written by someone else."""


# ---- tensors -------------------------------------------------------------------------------------


def check_tensor(tensor: Tensor, name: str) -> None:
    """Raises TypeError for a tensor that is not one run of plain numbers."""
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
    if tensor.layout != torch.strided:
        raise TypeError(f"'{name}' is sparse ({tensor.layout}); save tensor.to_dense()")
    if tensor.device.type == "meta":
        raise TypeError(f"'{name}' is on the meta device and has no values to save")
    if tensor.is_complex():
        raise TypeError(f"'{name}' is complex; save torch.view_as_real of it")
    if tensor.dtype not in NAMES:
        raise TypeError(f"'{name}' is {tensor.dtype}, which safetensors files do not hold")


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
    not, whatever fails. At no time is more than one tensor copied.

    Raises:
        OSError: the system refuses; the message says what became of the old file and what to do.
        StateFileError: another process or thread is writing this file.
        TypeError: a tensor is none that a file can hold.
        ValueError: too many tensors.
    """
    for name, tensor in tensors.items():
        check_tensor(tensor, name)
    path = os.path.realpath(path)  # a link goes on pointing to the file
    # Larger elements first: every tensor is then aligned to its elements.
    tensors = dict(sorted(tensors.items(), key=lambda item: -item[1].element_size()))
    sums = {name: [0] * -(-tensor.nbytes // PIECE) for name, tensor in tensors.items()}
    header = _header(document, tensors, sums)
    if len(header) > LONGEST_HEADER:
        raise ValueError(
            f"{len(tensors):,} tensors make a header of {len(header):,} bytes, and a safetensors "
            f"file allows {LONGEST_HEADER:,}; save the parts in several files"
        )
    size = len(header) + sum(tensor.nbytes for tensor in tensors.values())
    replaced = False
    try:
        with _partial(path) as (file, partial):
            bar = tqdm(
                total=size,
                desc=f"saving {os.path.basename(path)}",
                unit="B",
                unit_scale=True,
                delay=1,
                disable=not progress,
            )
            with bar, ThreadPoolExecutor(_threads()) as pool:
                start = len(header)
                for name, tensor in tensors.items():
                    sums[name] = _write_tensor(file, start, tensor, pool, bar)
                    start += tensor.nbytes
            _write(file, 0, memoryview(_header(document, tensors, sums)))
            os.fsync(file)
            os.replace(partial, path)
            replaced = True
            _sync_folder(os.path.dirname(path))
    except OSError as error:
        reason = error.strerror or str(error)
        if replaced:
            fate = "it is the new state, but might not survive a power cut; save again"
        else:
            old = "is as it was" if os.path.exists(path) else "does not exist"
            advice = ADVICE.get(error.errno, "save elsewhere")
            fate = f"not written ({size:,} bytes), so that it {old}; {advice}"
        raise OSError(error.errno, f"{reason}: {fate}", path) from error


def _header(
    document: dict[str, Any], tensors: dict[str, Tensor], sums: dict[str, list[int]]
) -> bytes:
    """Length and header. Its length does not depend on the sums."""
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
    metadata = {"crc32": ZEROS.decode(), "format": "pt", "headroom": _dumps(whole)}
    text = _dumps({"__metadata__": metadata, **entries}).encode()
    text += b" " * (-len(text) % 8)
    header = bytearray(struct.pack("<Q", len(text)) + text)
    field = 8 + len(PREFIX)
    header[field : field + 8] = f"{crc32(header):08x}".encode()
    return bytes(header)


def _dumps(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def _write_tensor(
    file: int, offset: int, tensor: Tensor, pool: ThreadPoolExecutor, bar: tqdm
) -> list[int]:
    """Writes the values and returns the sums of their pieces, made beside the writing."""
    if not tensor.nbytes:
        return []
    values = _in_order(tensor)  # held until the sums are there
    memory = _memory(values)
    pieces = [memory[start : start + PIECE] for start in range(0, len(memory), PIECE)]
    sums = [_sum(pool, piece) for piece in pieces if len(piece) > SMALL]
    try:
        for i, piece in enumerate(pieces):
            _write(file, offset + i * PIECE, piece)
            bar.update(len(piece))
    finally:
        wait(sums)
        found = [crc.result() for crc in sums] + [crc32(p) for p in pieces if len(p) <= SMALL]
        del values
    return found


def _sum(pool: ThreadPoolExecutor, piece: memoryview) -> Future[int]:
    try:
        return pool.submit(crc32, piece)
    except RuntimeError:  # the interpreter is about to end, as in a save by atexit
        future: Future[int] = Future()
        future.set_result(crc32(piece))
        return future


def _write(file: int, offset: int, data: memoryview) -> None:
    while data:
        count = os.pwrite(file, data, offset)
        data, offset = data[count:], offset + count


@contextlib.contextmanager
def _partial(path: str) -> Iterator[tuple[int, str]]:
    """An empty file beside ``path``, as descriptor and name, which is gone afterwards unless it was
    renamed. Its name is always the same, so that what a killed process left is used again, and its
    lock tells that from a file that is being written: locks end with their process."""
    folder, name = os.path.split(path)
    file, partial = _locked(os.path.join(folder, partial_of(name)), path)
    try:
        os.ftruncate(file, 0)
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


def _locked(partial: str, path: str) -> tuple[int, str]:
    while True:
        file = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(file, partial):  # else another writer has renamed it meanwhile
                return file, partial
        except BlockingIOError:
            os.close(file)
            raise StateFileError(
                f"{path} is being written by another process or thread; it stays as it is until "
                "then. Let only one save (with several ranks: rank 0), or give each a name of its "
                "own"
            ) from None
        except OSError as error:
            os.close(file)
            if error.errno not in NO_LOCKS:
                raise
            # A file system without locks, where only the name can keep writers apart.
            name = f"{partial}.{secrets.token_hex(4)}"
            return os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666), name
        os.close(file)


def _is_at(file: int, path: str | os.PathLike[str]) -> bool:
    try:
        return os.path.samestat(os.fstat(file), os.stat(path))
    except FileNotFoundError:
        return False


def remove_partial(path: str | os.PathLike[str]) -> None:
    """Removes what a killed process left of a file, but nothing that is being written."""
    with contextlib.suppress(OSError):
        file = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(file, path):
                os.unlink(path)
        finally:
            os.close(file)


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
    """Whether a file begins as a state file does, be it in order or not."""
    try:
        if not os.path.isfile(path):
            return False
        with open(path, "rb") as file:
            return file.read(8 + len(PREFIX))[8:] == PREFIX
    except OSError:
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

    Raises:
        OSError: it cannot be opened or read.
        StateFileError: it is cut off or damaged, no state file, or of a later version.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        self._map: mmap.mmap | None = None
        self._base = 0
        self._file = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe would block
        try:
            status = os.fstat(self._file)
            if not stat.S_ISREG(status.st_mode):
                raise StateFileError(f"{self.path} is not a file")
            self._size = status.st_size
            header, self._data = self._read_header()
            try:
                self.document, self.entries = self._parse(header)
            except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
                raise StateFileError(f"the header of {self.path} is malformed: {error}") from error
        except BaseException:
            os.close(self._file)
            raise

    def __enter__(self) -> StateFile:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._file)  # tensors keep the map that they lie in

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
                f"bytes. {self._advice()}"
            )
        header = bytearray(os.pread(self._file, 8 + length, 0))
        field = 8 + len(PREFIX)
        stored = bytes(header[field : field + 8])
        header[field : field + 8] = ZEROS
        if stored != f"{crc32(header):08x}".encode():
            raise StateFileError(
                f"the header of {self.path} is damaged: its checksum is wrong. {self._advice()}"
            )
        return bytes(header[8:]), 8 + length

    def _parse(self, header: bytes) -> tuple[dict[str, Any], dict[str, Entry]]:
        entries = json.loads(header)
        document = json.loads(entries.pop("__metadata__")["headroom"])
        if document["format"] > FORMAT:
            raise StateFileError(
                f"{self.path} has format {document['format']} and this version of Headroom reads "
                f"up to {FORMAT}; it was written by {document.get('headroom', 'a later one')}: "
                "upgrade"
            )
        for key, kind in DOCUMENT.items():
            if not isinstance(document[key], kind):
                raise TypeError(f"'{key}' is a {type(document[key]).__name__}")
        self._piece, found, end = document["piece"], {}, 0
        if self._piece <= 0:
            raise ValueError(f"pieces of {self._piece} bytes")
        for name, entry in sorted(entries.items(), key=lambda item: item[1]["data_offsets"]):
            notes, (start, stop) = document["tensors"][name], entry["data_offsets"]
            dtype, shape = DTYPES[entry["dtype"]], tuple(entry["shape"])
            if start != end or any(not isinstance(n, int) or n < 0 for n in shape):
                raise ValueError(f"'{name}' does not follow the tensor before it")
            if stop - start != prod(shape) * dtype.itemsize:
                raise ValueError(f"'{name}' has {stop - start:,} bytes, but shape {shape}")
            sums = tuple(int(crc, 16) for crc in notes["crc32"])
            if len(sums) != -(-(stop - start) // self._piece):
                raise ValueError(f"'{name}' has {len(sums)} checksums")
            stride = tuple(notes["stride"]) if "stride" in notes else None
            if stride is not None:
                dense = torch.empty_strided(shape, stride, device="meta")
                if not torch.ops.aten.is_non_overlapping_and_dense(dense):
                    raise ValueError(f"'{name}' has strides {stride}")
            found[name] = Entry(dtype, shape, self._data + start, stop - start, sums, stride)
            end = stop
        if self._size != self._data + end:
            what = "cut off" if self._size < self._data + end else "longer than it was"
            cut = [name for name, e in found.items() if e.start + e.size > self._size]
            where = f" in '{cut[0]}'" if cut else ""
            raise StateFileError(
                f"{self.path} is {what}{where}: it has {self._size:,} bytes, wanted "
                f"{self._data + end:,}. {self._advice()}"
            )
        return document, found

    def _advice(self) -> str:
        folder = os.path.dirname(self.path) or "."
        return f"Load another one: headroom.latest({folder!r}, verify=True) finds the newest whole"

    def read(self, names: Iterable[str] = (), *, progress: bool = True) -> dict[str, Tensor]:
        """Reads the file once, checks all of it, and returns the tensors of these names.

        Raises:
            StateFileError: a tensor, whichever, is not what was saved.
        """
        found = {name: torch.empty(e.shape, dtype=e.dtype) for name, e in self._only(names)}
        targets = {name: _memory(tensor) for name, tensor in found.items()}
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

        bar = tqdm(
            total=self._size - self._data,
            desc=f"reading {os.path.basename(self.path)}",
            unit="B",
            unit_scale=True,
            delay=1,
            disable=not progress,
        )
        pool = ThreadPoolExecutor(_threads())
        try:
            with bar:
                for size, damaged in pool.map(check, self._spans()):
                    if damaged is not None:
                        raise StateFileError(
                            f"'{damaged}' is damaged in {self.path}: its checksum is wrong. "
                            f"Nothing was loaded. {self._advice()}"
                        )
                    bar.update(size)
        finally:
            pool.shutdown(cancel_futures=True)
        return {name: self._strided(name, tensor) for name, tensor in found.items()}

    def _only(self, names: Iterable[str]) -> Iterator[tuple[str, Entry]]:
        for name in names:
            if name not in self.entries:
                raise StateFileError(f"{self.path} refers to '{name}', which is not in it")
            yield name, self.entries[name]

    def _spans(self) -> Iterator[list[tuple[str, int, int, int]]]:
        """Name, offset, size and sum of all pieces, in lists of about as many bytes."""
        span, total = [], 0
        for name, entry in self.entries.items():
            for i, crc in enumerate(entry.sums):
                offset = i * self._piece
                size = min(self._piece, entry.size - offset)
                span.append((name, offset, size, crc))
                total += size
                if total >= PIECE:
                    yield span
                    span, total = [], 0
        if span:
            yield span

    def view(self, name: str, *, strided: bool = True) -> Tensor:
        """A tensor that lies in the file and takes no memory of its own until it is written to.
        With ``strided``, one that was not in the order of its indices is a copy in its order."""
        entry = self.entries[name]
        if not entry.size:
            return torch.empty(entry.shape, dtype=entry.dtype)
        if self._map is None:
            self._map = mmap.mmap(self._file, 0, access=mmap.ACCESS_COPY)
            self._base = torch.frombuffer(self._map, dtype=torch.uint8).data_ptr()
        count = entry.size // entry.dtype.itemsize
        flat = torch.frombuffer(self._map, dtype=entry.dtype, count=count, offset=entry.start)
        tensor = flat.view(entry.shape)
        return self._strided(name, tensor) if strided else tensor

    def _strided(self, name: str, tensor: Tensor) -> Tensor:
        stride = self.entries[name].stride
        if stride is None:
            return tensor
        return torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype).copy_(tensor)

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor lies in the file."""
        return tensor.device.type == "cpu" and 0 <= tensor.data_ptr() - self._base < self._size
