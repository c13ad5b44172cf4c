"""Records memory while a run goes on, and writes snapshots of it."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_iter

from ...step.out_of_memory import add_note
from ...step.pytree import map_tensors
from ..collecting import no_collections
from ..cuda import CudaRecorder
from ..stream import Note
from ..track import Tracked, checked, device_of
from .explain import Called, asked_bytes, explain
from .history import History
from .loaded import Snapshot
from .write import save, snapshot_of_history, tagged

__all__ = ["snapshot"]

_PLAIN = (Tensor, bool, int, float, str, type(None), torch.dtype, torch.device)


class snapshot:  # noqa: N801
    """Records the memory of a run by kind, module and line, and writes it to files that torch's
    memory_viz page opens: at the end, when memory runs out, and on CUDA on request.

    Example::

        model = torch.nn.Linear(64, 64)
        optimizer = headroom.optim.AdamW(model.parameters())
        with headroom.memory.snapshot("run.pickle", model, optimizer):
            for step in range(3):
                model(torch.randn(8, 64)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        found = headroom.memory.load_snapshot("run.pickle")
        print(found.timeline, found.at_end())

    The file at ``path`` is written when the block ends, also by an error. If that is one of memory
    that ran out, its text then says what was asked for, what was live, and what to change; it is
    :attr:`explanation` too.

    The steps compute the same bits as without. On the CPU torch's profiler is the source, which
    keeps everything until the end: record some steps, not a run. On CUDA it is the trace of the
    caching allocator, which replaces one that the program records itself.

    Args:
        path: where to write; ``.pickle`` is what memory_viz expects.
        model: whose parameters, gradients, buffers and activations are named; with it all kinds
            are known.
        optimizer: or several; the last one ends a step.
        batch: tensors that count as "batch", besides those that the model is called with.
        max_entries: events that are kept on CUDA, 1,000,000 unless given, which counts each
            allocation, each free and each note; older ones are dropped, while what is live stays
            complete.
        stacks: keep the lines of Python of every allocation. Without, those of activations alone.
        advice: whether an error of memory gets advice, which takes seconds, because changes are
            planned, for the shapes that the model was called with last.
        device: to look at, if the model is on several, or without a model.
        oom_only: write a file only if the block ends because memory runs out.

    Raises:
        TypeError, ValueError: as :func:`headroom.memory.track`.
        RuntimeError: on entering, if a profiler or ``track`` runs already.
        OSError: on leaving, if the file cannot be written. Then no file is there, or the old one.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        model: nn.Module | None = None,
        optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None = None,
        *,
        batch: Any = None,
        max_entries: int | None = None,
        stacks: bool = True,
        advice: bool = True,
        device: torch.device | str | None = None,
        oom_only: bool = False,
    ) -> None:
        self.path = Path(path)
        """Where the last file goes."""
        self.files: list[Path] = []
        """What was written, in order."""
        self.explanation: str | None = None
        """Why memory ran out, if it did."""
        model = nn.Module() if model is None else model
        optimizers = checked(model, optimizer)
        nothing = device is None and not list(model.parameters()) and not list(model.buffers())
        place = device_of(model, "cpu" if nothing else device)
        if max_entries is not None and (type(max_entries) is not int or max_entries < 1):
            raise ValueError(f"max_entries is {max_entries!r}, wanted a number from 1 on")
        most = max_entries if place.type == "cuda" else None
        self._tracked = Tracked(model, optimizers, place, batch, stacks, most)
        self._model, self._optimizers, self._device = model, optimizers, place
        self._advice, self._oom_only = advice, oom_only
        self._batch: Any = None
        self._runs = ExitStack()

    def __enter__(self) -> snapshot:
        with ExitStack() as stack:
            keep = self._model.register_forward_pre_hook(self._keep_batch, with_kwargs=True)
            stack.callback(keep.remove)
            stack.enter_context(self._tracked)
            self._runs = stack.pop_all()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        asked = None if error is None else asked_bytes(error)
        try:
            self._runs.close()
            if self._oom_only and asked is None:
                return
            found = self._of_cpu(asked) if self._device.type == "cpu" else self._of_cuda()
            if error is not None and asked is not None:
                self._explain(found, error, asked)
            self._write(found, self.path)
            if error is not None and asked is not None:
                add_note(error, f"The snapshot is in {self.path}.")
        except Exception as failure:
            if error is None:
                raise
            add_note(error, f"headroom.memory.snapshot could not write {self.path}: {failure}")
        finally:
            self._batch = None

    def dump(self, path: str | os.PathLike[str]) -> Path:
        """Writes a snapshot of what CUDA's allocator did until now, and returns where. May be
        called anywhere in the block, also by the handler of a signal.

        Raises:
            RuntimeError: outside of the block, or on the CPU.
            OSError: the file cannot be written.
        """
        if not self._tracked.is_running:
            raise RuntimeError("dump() writes while its block runs: call it inside the with block")
        if self._device.type == "cpu":
            raise RuntimeError(
                "dump() writes on CUDA alone: on the CPU the source is torch's profiler, which can "
                "be read once it has ended; end the block where the file is wanted"
            )
        return self._write(self._of_cuda(), Path(path))

    def _write(self, found: dict[str, Any], path: Path) -> Path:
        save(found, path)
        self.files.append(path)
        return path

    @no_collections()
    def _of_cpu(self, asked: int | None) -> dict[str, Any]:
        """Returns the snapshot; ``asked`` is the size of a request that was refused."""
        events, notes = self._tracked._seen()
        history = History(notes)
        history.note(Note(self._tracked.before))
        for event in events:
            history.see(event)
        failed = None
        if asked is not None:
            free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
            failed = {"size": asked, "device_free": free}
        return snapshot_of_history(history, "cpu", failed)

    def _of_cuda(self) -> dict[str, Any]:
        """Returns the snapshot of now, or of the end. Failed requests are in torch's trace."""
        tracked, recorder = self._tracked, self._tracked.recorder
        assert isinstance(recorder, CudaRecorder)
        if tracked.is_running:
            found, after = recorder.read(), tracked.watch.present()
        else:
            found, after = recorder.found, tracked.after
        notes, row = tracked.watch.kept_notes(), self._device.index or 0
        return tagged(found, notes, tracked.before, after, row)

    def _keep_batch(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self._advice and torch._C._current_graph_task_id() == -1:
            self._batch = _shapes_of((args, kwargs))

    def _explain(self, found: dict[str, Any], error: BaseException, asked: int) -> None:
        read = Snapshot(found, str(self._device))
        called = None
        if self._batch is not None:
            called = Called(self._model, self._optimizers, self._batch)
        self.explanation = explain(read, error, asked, called)
        add_note(error, self.explanation)


def _shapes_of(value: Any) -> Any:
    """Returns nested values with tensors on the meta device in the place of theirs; None if there
    is anything else in them, whose memory would be kept."""
    if not all(isinstance(leaf, _PLAIN) for leaf in tree_iter(value)):
        return None
    return map_tensors(value, lambda x: torch.empty(x.shape, dtype=x.dtype, device="meta"))
