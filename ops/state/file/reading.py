"""Reads state files, and checks every byte."""

from __future__ import annotations

import contextlib
import os
import stat
import struct
import threading
from collections.abc import Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from ..._core.progress import progress_bar
from ..._core.text import quoted
from . import layout
from .header import Entry, checked_entries, parsed, unsigned
from .layout import MALFORMED, StateFileError
from .tensors import memory_of


def is_state_file(path: str | os.PathLike[str]) -> bool:
    """Returns whether a file begins as a state file does, even if the rest is damaged.

    Raises:
        OSError: what is there cannot be looked at.
    """
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            return False
        with open(path, "rb", buffering=0) as file:
            return file.read(8 + len(layout.PREFIX))[8:] == layout.PREFIX
    except (FileNotFoundError, NotADirectoryError):
        return False


class Piece(NamedTuple):
    """Describes a run of bytes of a tensor that has a checksum."""

    name: str  # of the tensor
    offset: int  # in the tensor
    size: int
    sum: int


class StateFile:
    """Opens a state file, whose header is in order then. :meth:`read` checks the rest.

    Attributes:
        path: as given.
        document: the JSON document that was written with it.
        entries: what the header says of each tensor, by name.
        sequence: its number among the files of its folder; 0 if it is of format 1.

    Raises:
        OSError: it cannot be opened or read.
        StateFileError: it is cut off or damaged, not a state file, or of a later version.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        self._file = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe would block
        try:
            status = os.fstat(self._file)
            if not stat.S_ISREG(status.st_mode):
                raise StateFileError(f"{self.path} is not a file")
            self._size = status.st_size
            try:
                self.document, self.entries = self._parse(self._read_header())
            except StateFileError:
                raise
            except MALFORMED as error:
                raise StateFileError(
                    f"the header of {self.path} is malformed: {quoted(error)}"
                ) from error
            self.sequence: int = self.document["sequence"]
        except BaseException:
            os.close(self._file)
            raise

    def __enter__(self) -> StateFile:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._file)

    def _read_header(self) -> bytes:
        begin = os.pread(self._file, 8 + len(layout.PREFIX), 0)
        if begin[8:] != layout.PREFIX[: len(begin[8:])] or not begin:
            if begin[:1] == b"\x80" or begin[:2] == b"PK":
                raise StateFileError(
                    f"{self.path} is a pickle or a file of torch.save, which is not opened: "
                    "pickles run code. If you trust it, read it with torch.load(weights_only=True) "
                    "and save what is in it with headroom.save_state"
                )
            raise StateFileError(
                f"{self.path} is not a state file of headroom.save_state, or its beginning is "
                "damaged, or another program has written it anew; safetensors.safe_open may read it"
            )
        length = struct.unpack("<Q", begin[:8])[0] if len(begin) >= 8 else 0
        whole = len(begin) == 8 + len(layout.PREFIX)
        if not whole or length > self._size - 8 or length > layout.LONGEST_HEADER:
            raise StateFileError(
                f"the header of {self.path} is damaged or cut off: the file has {self._size:,} "
                f"bytes. {self.advice}"
            )
        header = unsigned(os.pread(self._file, 8 + length, 0))
        if header is None:
            raise StateFileError(
                f"the header of {self.path} is damaged: its checksum is wrong. {self.advice}"
            )
        return header

    def _parse(self, header: bytes) -> tuple[dict[str, Any], dict[str, Entry]]:
        entries, document = parsed(header)
        if type(document["format"]) is not int or document["format"] < 1:
            raise ValueError("'format' is not a number")
        if document["format"] > layout.FORMAT:
            raise StateFileError(
                f"{self.path} has format {document['format']} and this version of Headroom reads "
                f"up to {layout.FORMAT}; it was written by "
                f"{document.get('headroom', 'a later one')}: upgrade"
            )
        data = 8 + len(header)
        found, count = checked_entries(entries, document, data)
        if self._size != data + count:
            what = "cut off" if self._size < data + count else "longer than it was"
            cut = [name for name, e in found.items() if e.start + e.size > self._size]
            where = f" in '{cut[0]}'" if cut else ""
            raise StateFileError(
                f"{self.path} is {what}{where}: it has {self._size:,} bytes, wanted "
                f"{data + count:,}. {self.advice}"
            )
        return document, found

    @property
    def advice(self) -> str:
        """Says what to do if it is damaged."""
        folder = os.path.dirname(self.path) or "."
        return f"Load another one: headroom.latest({folder!r}) finds the newest that is whole"

    # ---- tensors ----------------------------------------------------------------------------

    def read(
        self, names: Iterable[str] = (), *, but: Collection[str] = (), progress: bool = True
    ) -> dict[str, Tensor]:
        """Reads the file once, checks all of it, and returns the tensors of these names, in memory
        of their own. Tensors named in ``but`` are neither read nor checked.

        Raises:
            StateFileError: any tensor of the file differs from what was saved.
        """
        found, targets = self._room_for(names)
        others = [name for name in self.entries if name not in but]
        with self._bar("reading", others, progress) as bar:
            self._verify(others, targets, bar)
        return {name: self._strided(name, tensor) for name, tensor in found.items()}

    def batches(
        self, names: Iterable[str], *, progress: bool = True
    ) -> Iterator[dict[str, Tensor]]:
        """Yields tensors of these names, each checked as it is read: one, or as many as fit in a
        piece.

        Raises:
            StateFileError: a tensor is not what was saved.
        """
        batches: list[list[str]] = []
        total = 0
        for name in (names := list(names)):
            size = self.check_has(name).size
            if not batches or total + size > layout.PIECE:
                batches.append([])
                total = 0
            batches[-1].append(name)
            total += size
        with self._bar("loading", names, progress) as bar:
            for batch in batches:
                found, targets = self._room_for(batch)
                self._verify(batch, targets, bar)
                yield {name: self._strided(name, tensor) for name, tensor in found.items()}

    def _room_for(self, names: Iterable[str]) -> tuple[dict[str, Tensor], dict[str, memoryview]]:
        """Returns new tensors for those of these names, in the order of their indices, and their
        memory."""
        found = {}
        for name in names:
            entry = self.check_has(name)
            try:
                found[name] = torch.empty(entry.shape, dtype=entry.dtype)
            except RuntimeError as error:  # a file with holes can be of any size
                what = f"no memory for {[name]} of {self.path}"
                raise StateFileError(f"{what}: {error}") from error
        return found, {name: memory_of(tensor) for name, tensor in found.items() if tensor.nbytes}

    def _strided(self, name: str, tensor: Tensor) -> Tensor:
        """Returns a tensor that was read, in the memory order in which it was saved."""
        stride = self.entries[name].stride
        if stride is None:
            return tensor
        return torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype).copy_(tensor)

    def check_has(self, name: str) -> Entry:
        """Returns the entry of a tensor that the document refers to."""
        if name not in self.entries:
            raise StateFileError(f"{self.path} refers to '{name}', which is not in it")
        return self.entries[name]

    def _bar(self, what: str, names: Iterable[str], progress: bool) -> tqdm:
        total = sum(self.entries[name].size for name in names)
        description = f"{what} {os.path.basename(self.path)}"
        return progress_bar(total, description, unit="B", shown=progress)

    # ---- checksums --------------------------------------------------------------------------

    def _verify(self, names: Iterable[str], targets: dict[str, memoryview], bar: tqdm) -> None:
        """Reads tensors, into their targets where they have one, and checks what was read."""
        local = threading.local()

        def check(span: list[Piece]) -> tuple[int, str | None]:
            """Returns the bytes that were read, and the name of a damaged tensor or None."""
            if not hasattr(local, "buffer"):
                local.buffer = memoryview(bytearray(layout.BLOCK))
            total = 0
            for piece in span:
                if not self._is_intact(piece, targets.get(piece.name), local.buffer):
                    return total, piece.name
                total += piece.size
            return total, None

        spans = self._spans(names)
        pool = ThreadPoolExecutor(layout.threads()) if len(spans) > 1 else None
        checked = map(check, spans)
        try:
            if pool:
                with contextlib.suppress(RuntimeError):  # no thread can be started: this one checks
                    checked = pool.map(check, spans)
            for size, damaged in checked:
                if damaged is not None:
                    raise StateFileError(
                        f"'{damaged}' is damaged in {self.path}: its checksum is wrong. Nothing "
                        f"was loaded. {self.advice}"
                    )
                bar.update(size)
        finally:
            if pool:
                pool.shutdown(cancel_futures=True)

    def _is_intact(self, piece: Piece, target: memoryview | None, buffer: memoryview) -> bool:
        """Reads a piece to its target, or else to a buffer, and compares its checksum."""
        crc, done = 0, 0
        while done < piece.size:
            count = min(layout.BLOCK, piece.size - done)
            offset = piece.offset + done
            block = buffer[:count] if target is None else target[offset : offset + count]
            read = os.preadv(self._file, [block], self.entries[piece.name].start + offset)
            if not read:
                return False
            crc, done = layout.crc32(block[:read], crc), done + read
        return crc == piece.sum

    def _spans(self, names: Iterable[str]) -> list[list[Piece]]:
        """Returns all pieces, in lists of about as many bytes."""
        step = self.document["piece"]
        spans: list[list[Piece]] = []
        total = layout.PIECE
        for name in names:
            entry = self.entries[name]
            for i, crc in enumerate(entry.sums):
                if total >= layout.PIECE:
                    spans.append([])
                    total = 0
                size = min(step, entry.size - i * step)
                spans[-1].append(Piece(name, i * step, size, crc))
                total += size
        return spans
