"""Plans of blocks whose weights lie on the host: their slots, and what is copied for them."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from .._core.overlap import is_dense
from ..host.ring import aligned
from ..host.streaming import Stream, StreamedBlock, block, fields, slots
from ..host.streaming.fields import ALIGNMENT, Field
from ..patching.patch import repeated_layers
from ..patching.report import PatchReport
from ..patching.streaming import STREAM, chosen_blocks, forward_of, places_of, staying
from .on_host import PlannedHost
from .recorder import Recorder


class Streamable(NamedTuple):
    """A block whose weights shall stream, by its name.

    Attributes:
        stay: the names of those that do not, each behind that of its module.
    """

    name: str
    stay: tuple[tuple[str, str], ...]


def streamable(model: nn.Module, which: Any) -> list[Streamable]:
    """Returns the blocks whose weights shall stream, as :func:`headroom.patch` chooses them.

    Raises:
        ValueError: ``which`` does not fit the blocks.
    """
    layers = chosen_blocks(which, repeated_layers(model)[1], model)
    places, report = places_of(model), PatchReport(model)
    names = {id(module): name for name, module in model.named_modules()}
    return [
        Streamable(
            layer.name,
            tuple((names[id(module)], name) for module, name in staying(layer, places, report)),
        )
        for layer in layers
    ]


def stream(model: nn.Module, blocks: Sequence[Streamable], host: PlannedHost) -> None:
    """Lets the weights of blocks of a model of fakes stream."""
    made = Stream(host, 1)
    for name, stay in blocks:
        module = model.get_submodule(name)
        kept = [(model.get_submodule(path), own) for path, own in stay]
        vars(module)[STREAM] = StreamedBlock(module, name, made, kept)
        run = functools.partial(forward_of, module, vars(module).get("forward"))
        vars(module)["forward"] = run


@contextmanager
def streaming_on_fakes(recorder: Recorder, host: PlannedHost, mode: Any) -> Iterator[None]:
    """Lets weights of fakes stream, while it lasts: those on the host take no memory of the
    device."""

    def on_memory(memory: Any, device: Any, dtype: torch.dtype, *view: Any) -> Tensor:
        with torch.no_grad(), _disable_current_modes():
            on_meta = torch.empty(0, dtype=dtype, device="meta").set_(memory, *view)
        return FakeTensor(mode, on_meta, recorder.device)

    def away(size: int) -> Tensor:
        """Returns bytes that are not on the device."""
        with _disable_current_modes():
            storage = torch.UntypedStorage(size, device="meta")
        found = on_memory(storage, None, torch.uint8, 0, (size,), (1,))
        recorder.manage(found)
        return found

    def host_memory(self: Stream, size: int, device: torch.device) -> Tensor:
        slab, run = self._slabs.take(size, device), away(size)
        weakref.finalize(run.untyped_storage(), self._slabs.give, slab, device)
        return run

    def settle(self: StreamedBlock) -> None:
        if self.is_lent or self.fields:
            return
        fields, size = list[Field](), 0
        for p, places in self._found().items():
            recorder.vanish(p)  # from the device, where it may have been
            recorder.manage(p)
            host.weights.add(p)
            stride = p.stride() if is_dense(p) else torch.empty(p.shape, device="meta").stride()
            fields.append(Field(places, size, p.shape, stride, p.dtype))
            size = aligned(size + fields[-1].size, ALIGNMENT)
        if self.stream.arena is not host:  # but that of what was copied
            self.stream.arena = host
            self.stream._begin()
        self.join(self.stream, self.stay)  # the first pass knows which is next
        self.device = recorder.device
        self.params, self.fields, self.slab = [*self._found()], fields, away(size)
        # The bytes that the host has as long as the block does.
        slab = host.take(size, kind="weights", owner="blocks", device=recorder.device)
        vars(self)["_taken"] = slab

    with ExitStack() as stack:
        for target, name, value in (
            (fields, "on_memory", on_memory),
            (Stream, "engine_of", staticmethod(lambda device: host)),
            (block, "let_pages_go", lambda slab: None),
            (slots.Memory, "_uses", lambda self: 0),
            (Stream, "host_memory", host_memory),
            (StreamedBlock, "settle", settle),
        ):
            stack.enter_context(mock.patch.object(target, name, value))
        yield
