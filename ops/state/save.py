"""Saves the state of a run to a file: :func:`save_state`."""

from __future__ import annotations

import os
import re
import time
from typing import Any

import torch
from torch import Tensor

from .._core import binaries
from ..optim.eight_bit import EightBit
from .file import check_tensor, identity, write
from .generators import saved_generators
from .newest import remove_older
from .parts import Part, encoded, maps_checksum, named_objects


def save_state(
    path: str | os.PathLike[str],
    *,
    model: Part = None,
    optimizer: Part = None,
    scaler: Part = None,
    scheduler: Part = None,
    loader: Part = None,
    extra: Any = None,
    rng: bool = True,
    keep: int | None = None,
    progress: bool = True,
) -> None:
    """Saves a run so that :func:`load_state` can go on with it to the same bits.

    The file appears at ``path`` whole or not at all: it is written beside it, synced and renamed,
    so a crash, a kill, a full disk or a power cut leaves the file that was there before. It has a
    checksum for every byte, and takes no more memory than a copy of the largest tensor and 32 MB.
    The checksums are of the bytes that are written, so that a file can be loaded even if another
    thread changed the weights meanwhile; it then holds some from before and some from after. It is
    a safetensors file (no pickle), which ``safetensors.safe_open`` and
    ``safetensors.torch.load_file`` read too; tensors are called ``model.KEY`` and
    ``optimizer.state.NUMBER.NAME``.

    Example::

        optimizer = headroom.optim.AdamW(model.parameters())
        headroom.save_state("step-100.safetensors", model=model, optimizer=optimizer, keep=3)

        extra = headroom.load_state(
            headroom.latest("."), model=model, optimizer=optimizer
        )

    Args:
        path: the file. Its folder is made if it is missing. An existing file is replaced, and its
            permissions are kept; anything else, such as a device or a pipe, is refused.
        model, optimizer, scaler, scheduler, loader: objects with ``state_dict()`` and
            ``load_state_dict()``, or lists of them. A loader is a data loader with a position, such
            as torchdata's ``StatefulDataLoader``.
        extra: whatever else the run needs: numbers, strings, bytes, None, paths of ``pathlib``,
            dtypes, devices, tensors, NumPy arrays, and lists, tuples, sets and dicts of those. They
            come back as they were, of the same classes, tensors on the CPU. Anything else is
            refused, subclasses too, and the error names the key (of a namespace, save ``vars()`` of
            it).
        rng: save the states of the random number generators of Python, torch, all CUDA devices in
            use, and NumPy if it is imported.
        keep: afterwards, keep this file and the ``keep - 1`` newest whose names differ from it in
            nothing but the last number, and remove older ones. Files that are not states stay. A
            number in the files tells which are older, as :func:`latest` says; clocks and names do
            not.
        progress: show a bar if it takes longer than a second.

    Tensors that share the same memory, such as tied weights, are saved once. Gradients are not
    saved.

    Raises:
        TypeError: something is of a kind that the file does not hold; the message names it.
            DTensors are refused: sharded states are for ``torch.distributed.checkpoint``.
        ValueError: ``keep`` is not positive, or there is no number in the name of the file; or the
            memory of a tensor has been freed, as by ``untyped_storage().resize_(0)``; or there are
            more values than a header may have.
        OSError: the disk is full, the folder is not writable, what is at ``path`` is not a file,
            ...: the message says what to do.
        StateFileError: another process or thread is writing this very file.

    After an error the file that was there before is as it was, unless the message says otherwise.
    """
    path = os.fspath(path)
    _check_keep(path, keep)
    found = _Tensors()
    parts = {
        "model": model,
        "optimizer": optimizer,
        "scaler": scaler,
        "scheduler": scheduler,
        "loader": loader,
    }
    tree: dict[str, Any] = {}
    versions: dict[str, Any] = {}
    for part, objects in parts.items():
        for name, one in named_objects(part, objects):
            state = one.state_dict()
            if (metadata := getattr(state, "_metadata", None)) is not None:
                versions[name] = encoded(dict(metadata), name, found.add)
            tree[name] = encoded(dict(state), name, found.add)
    if extra is not None:
        tree["extra"] = encoded(extra, "extra", found.add)
    if rng:
        tree["rng"] = encoded(saved_generators(), "rng", found.add)
    document = {
        "headroom": binaries.VERSION,
        "torch": str(torch.__version__),
        "saved_ns": time.time_ns(),
        "tree": tree,
        "module_versions": versions,
    }
    if any(isinstance(one, EightBit) for _, one in named_objects("optimizer", optimizer)):
        document["maps_crc32"] = maps_checksum()
    write(path, document, found.by_name, progress=progress)
    if keep is not None:
        remove_older(path, keep)


def _check_keep(path: str, keep: int | None) -> None:
    if keep is not None and keep < 1:
        raise ValueError(f"keep={keep}: at least 1, the file that is written, must be kept")
    if keep is not None and not re.search(r"\d", os.path.basename(path)):
        raise ValueError(
            f"keep={keep} needs a number in the name of the file, such as step-100.safetensors; "
            f"{os.path.basename(path)!r} has none"
        )


class _Tensors:
    """Collects the tensors of a file by their names; those that share the same memory have one."""

    def __init__(self) -> None:
        self.by_name: dict[str, Tensor] = {}
        self._names: dict[Any, str] = {}  # by identity

    def add(self, tensor: Tensor, name: str) -> str:
        """Adds a tensor unless it is there already, and returns its name."""
        check_tensor(tensor, name)
        name = name.encode("utf-8", "backslashreplace").decode()
        same = identity(tensor)
        if same not in self._names:
            while name in self.by_name:
                name += "'"
            self.by_name[name] = tensor
            self._names[same] = name
        return self._names[same]
