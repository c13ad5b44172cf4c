"""Finds out, while a model trains, which memory is what: by identity, through hooks that change
neither numbers nor which tensors are kept, and that are gone afterwards."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn

from .._core.running_modules import watching_modules
from ..host.arena import Slab, in_arena, listeners
from ..patching.bitsandbytes import held_of
from ..patching.streaming import streamed_blocks
from ..step.pytree import plain_tensors, tensors_in
from ..step.watch import listening, unseen
from .lines import Place, lines_at, place_here
from .stream import Label, Note

__all__ = ["Watch", "label_of", "tensors_of_model", "tensors_of_state"]

_MASTERS = ("master", "remainder", "compensation", "residual")


def label_of(
    tensor: Tensor,
    kind: str,
    device: torch.device,
    name: str | None = None,
    follow: Callable[[torch.UntypedStorage, int], None] | None = None,
) -> list[Label]:
    """Returns labels for the memory of a tensor; none for what is on other devices or has none.
    ``follow`` gets each storage and its address."""
    labels = []
    for part in plain_tensors(tensor):
        if part.device != device or part.layout != torch.strided or in_arena(part):
            continue
        storage = part.untyped_storage()
        if storage.nbytes() and (address := storage.data_ptr()):
            labels.append(_label(address, storage.nbytes(), kind, name))
            if follow is not None:
                follow(storage, address)
    return labels


def _label(address: int, size: int, kind: str, name: str | None) -> Label:
    module, _, own = (None, None, None) if name is None else name.rpartition(".")
    return Label(address, size, kind, module, own)


def tensors_of_model(model: nn.Module) -> Iterator[tuple[str, str, Tensor]]:
    """Yields the kind and the name of each parameter, gradient and buffer, and the tensor; among
    parameters scales of layers of bitsandbytes, which are none of theirs, and slots that weights
    on the host take turns in."""
    for stream in {id(block.stream): block.stream for block in streamed_blocks(model)}.values():
        for slot in stream.slots:
            yield "parameters", "slots", slot
    for name, p in model.named_parameters():
        yield "parameters", name, p
        if p.grad is not None:
            yield "gradients", name, p.grad
    for name, module in model.named_modules():
        held = held_of(module)
        for scales in [] if held is None else held.scales:
            yield "parameters", f"{name}.scales", scales
    for name, tensor in model.named_buffers():
        yield "buffers", name, tensor


def tensors_of_state(
    optimizer: torch.optim.Optimizer, names: Mapping[int, str]
) -> Iterator[tuple[str, str, Tensor]]:
    """Yields the kind and the name of each tensor of an optimizer's state, and the tensor; and the
    rings that states on the host pass through. ``names`` are those of the parameters, by their
    ids."""
    paging = getattr(optimizer, "_paging", None)
    for ring in [] if paging is None else paging.rings:
        yield "optimizer_state", "ring", ring
    for param, state in list(optimizer.state.items()):
        module = names.get(id(param), "").rpartition(".")[0]
        items = state.items() if isinstance(state, Mapping) else [("state", state)]
        for key, value in items:
            kind = "master_weights" if str(key) in _MASTERS else "optimizer_state"
            for tensor in tensors_in(value):
                yield kind, f"{module}.{key}", tensor


class _End(weakref.ref):
    """Tells when a storage ends."""

    __slots__ = ("address", "waits")

    address: int
    waits: bool
    """Whether its note may wait for the next one, because there are many."""


class Watch:
    """Takes notes of what memory is, from :meth:`install` to :meth:`remove`.

    Each note is given to ``mark``, with its number, at the moment at which it is taken. What runs
    within a step makes few calls, because recorders see every one.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Iterable[torch.optim.Optimizer],
        device: torch.device,
        mark: Callable[[int], None],
        batch: Any = None,
        unpacked: bool = False,
        places: bool = True,
        most: int | None = None,
    ) -> None:
        self.model, self.optimizers, self.device = model, list(optimizers), device
        self._modules: list[str] = []  # that run
        self._unpacks = unpacked  # whether to note which module the backward pass is in
        self._mark, self._batch = mark, batch
        self._notes: dict[int, tuple[Any, ...]] = {}  # arguments of Note or Label, by number
        self._count, self._most = 0, most  # notes that are kept, or None for all
        self._stack = ExitStack()
        named = list(model.named_parameters(remove_duplicate=False))
        self._places: dict[int, Place] = {}  # where what is saved is saved, by the note's number
        self._names = {id(p): name for name, p in named}
        self._params = list(model.parameters())
        self._sizes: dict[int, int] = {}  # of the optimizers' states, when they were last read
        self._keeps_places = places  # where what is saved is saved; some recorders know it
        self._thread = 0  # that recorders see
        self._sees_all = device.type != "cpu"  # else recorders see this thread alone
        self._ends: dict[int, _End] = {}  # of storages, by address
        self._slabs: list[tuple[int, Slab | None]] = []  # of arenas, that are not noted yet
        self._ended: list[tuple[int, bool]] = []  # of storages; whether on other threads
        self._addresses: dict[str, int] = {}  # of parameters and buffers, when they were labeled
        self._held = [
            (f"{name}.{key}".lstrip("."), kind, held, key)
            for name, module in model.named_modules()
            for kind, held in (("parameters", module._parameters), ("buffers", module._buffers))
            for key in held
        ]

    @property
    def modules(self) -> dict[int, str]:
        """Returns the numbers of the notes at which another module begins to run, with its name."""
        return {
            number: about[0]["module"]
            for number, (what, *about) in self._notes.items()
            if what == "note" and about[0].get("module") is not None
        }

    @property
    def notes(self) -> list[Note]:
        """Returns the notes, by their numbers."""
        kept = self.kept_notes()  # one is missing where Ctrl-C came between
        return [kept.get(number) or Note() for number in range(self._count)]

    def kept_notes(self) -> dict[int, Note]:
        """Returns the notes that were kept, by their numbers."""
        notes: dict[int, Note] = {}
        for number, (what, *about) in self._notes.items():
            if what == "label":
                label = _label(*about)
                stack = lines_at(self._places.get(number, ()))
                notes[number] = Note([label._replace(stack=stack)])
            else:
                notes[number] = Note(**about[0])
        return notes

    def begin_step(self) -> None:
        """Notes that a step begins, for what has no optimizer to tell them apart."""
        self._take("note", {"phase": "other", "ends_step": True})

    def _take(self, *note: Any) -> bool:
        """Takes a note, and returns whether its mark has a place: recorders of the CPU see one
        thread."""
        if not (self._sees_all or get_ident() == self._thread):
            return False
        if self._ended:
            self.catch_up()
        number = self._count
        self._count = number + 1
        self._notes[number] = note
        if self._most is not None:  # the recorder has no more marks either
            self._notes.pop(number - self._most, None)
            self._places.pop(number - self._most, None)
        self._mark(number)
        return True

    def catch_up(self) -> None:
        """Notes what has ended since the last note."""
        ended, self._ended = self._ended, []
        if ended:
            self._take("note", {"freed": ended})

    def _on_slab(self, address: int, slab: Slab | None) -> None:
        """Notes what an arena of the host takes and gives back, at the next note if that is on
        another thread."""
        self._slabs.append((address, slab))
        if self._is_here():
            slabs, self._slabs = self._slabs, []
            self._take("note", {"slabs": slabs})

    def _is_here(self) -> bool:
        return self._sees_all or get_ident() == self._thread

    # What exists

    def present(self) -> list[Label]:
        """Labels of everything that exists now and belongs to the model or the optimizers."""
        return [
            label
            for kind, name, tensor in self._owned()
            for label in label_of(tensor, kind, self.device, name)
        ]

    def _owned(self) -> Iterator[tuple[str, str | None, Tensor]]:
        yield from tensors_of_model(self.model)
        yield from self._state()
        for tensor in tensors_in(self._batch):
            yield "batch", None, tensor

    def _state(self) -> Iterator[tuple[str, str, Tensor]]:
        for optimizer in self.optimizers:
            yield from tensors_of_state(optimizer, self._names)

    def _new_state(self) -> list[Label]:
        """Labels of the states, if there are more of them than when they were last read. What
        replaces a state later is found at the end."""
        sizes = {id(o): sum(map(len, o.state.values())) for o in self.optimizers}
        if sizes == self._sizes:
            return []
        self._sizes = sizes
        return [
            label
            for kind, name, tensor in self._state()
            for label in self._labels(tensor, kind, name)
        ]

    def _labels(self, tensor: Tensor, kind: str, name: str | None = None) -> list[Label]:
        """Labels of memory that counts whoever allocated it, until its end."""
        return label_of(tensor, kind, self.device, name, self._follow)

    def _new_tensors(self) -> list[Label]:
        """Labels of parameters and buffers that are elsewhere than when they were last labeled,
        as after ``p.data = ...``."""
        found = []
        for name, kind, held, key in self._held:
            tensor = held.get(key)
            if type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided:
                address = tensor.untyped_storage().data_ptr()
                if self._addresses.get(name) != address:
                    self._addresses[name] = address
                    found += self._labels(tensor, kind, name)
        return found

    def _gradients(self) -> list[Label]:
        """Labels of gradients that did not arrive from autograd, such as sums of several."""
        named = [
            (part, self._names.get(id(p)))
            for p in self._params
            if p.grad is not None
            for part in plain_tensors(p.grad)  # of DTensors what is on this rank
        ]
        try:
            storages = list(map(Tensor.untyped_storage, [grad for grad, _ in named]))
            addresses = list(map(torch.UntypedStorage.data_ptr, storages))
        except (RuntimeError, NotImplementedError):  # sparse, or a subclass without memory
            return []
        seen = self._gradient_addresses
        self._gradient_addresses = set(addresses)
        return [
            label
            for (grad, name), address in zip(named, addresses)
            if address not in seen
            for label in self._labels(grad, "gradients", name)
        ]

    # Hooks

    def install(self) -> None:
        """Adds the hooks. Whatever raises here leaves none behind."""
        self._gradient_addresses: set[int] = set()
        self._thread = get_ident()
        # Recorders that keep lines of Python see every call.
        hidden = (lambda hook: hook) if self._keeps_places else unseen
        self._at_end = hidden(self._freed)
        with ExitStack() as stack:
            stack.callback(self._ends.clear)
            self._watch_ends()
            listeners.append(on_slab := hidden(self._on_slab))
            stack.callback(listeners.remove, on_slab)
            places = (self._place, self._unpacked) if self._unpacks else ()
            stack.enter_context(listening(self._saved, *places, hidden=hidden))
            stack.enter_context(watching_modules(self.model, self._begin, self._end, hidden))
            for p in self._params:
                if p.requires_grad and p.is_leaf:
                    stack.callback(_restore_hooks, p, p._backward_hooks)
                    arrived = functools.partial(self._arrived, self._names[id(p)])
                    stack.callback(p.register_hook(hidden(arrived)).remove)
            add = self.model.register_forward_pre_hook
            stack.callback(add(hidden(self._forward), with_kwargs=True, prepend=True).remove)
            begins, ends = hidden(self._step_begins), hidden(self._step_ends)
            for optimizer in self.optimizers:
                stack.callback(optimizer.register_step_pre_hook(begins).remove)
                stack.callback(optimizer.register_step_post_hook(ends).remove)
            self._stack = stack.pop_all()

    def remove(self) -> None:
        """Removes every hook."""
        self._stack.close()

    def _watch_ends(self) -> None:
        """Follows what is there already: recorders do not see its end."""
        for kind, name, tensor in self._owned():
            self._labels(tensor, kind, name)
        self._new_tensors()

    def _follow(self, storage: torch.UntypedStorage, address: int, waits: bool = False) -> None:
        """Notes the end of a storage, which recorders of the CPU do not see if it began or ends on
        another thread, or if its memory is not torch's."""
        self._ends[address] = end = _End(storage, self._at_end)
        end.address, end.waits = address, waits

    def _freed(self, end: _End) -> None:
        if self._ends.get(end.address) is end:
            del self._ends[end.address]
            self._gradient_addresses.discard(end.address)
            self._ended.append((end.address, not self._is_here()))
            if not end.waits and self._is_here():
                self.catch_up()

    def _begin(self, name: str) -> None:
        if self._take("note", {"module": name}):
            self._modules.append(name)

    def _end(self) -> None:
        if self._modules and self._is_here():
            self._modules.pop()
        self._take("note", {"module": self._place()})

    def _place(self) -> str:
        return self._modules[-1] if self._modules else ""

    def _unpacked(self, name: str) -> None:
        if torch._C._current_graph_task_id() != -1:
            self._take("note", {"phase": "backward", "module": name})

    def _saved(self, tensor: Tensor) -> None:
        whole = tensor if tensor._base is None else tensor._base
        if isinstance(whole, nn.Parameter):
            return  # of the model, or gathered by FSDP, which frees it while autograd holds it
        if self._is_here():
            if self._ended:
                self.catch_up()
            self._label(tensor, "activations", None, self._keeps_places)

    def _arrived(self, name: str, grad: Tensor) -> None:
        if self._is_here():
            self._label(grad, "gradients", name)

    def _label(self, tensor: Tensor, kind: str, name: str | None, places: bool = False) -> None:
        if tensor.device != self.device:
            return
        if tensor.layout is torch.strided and not hasattr(tensor, "__tensor_flatten__"):
            storage = tensor.untyped_storage()
            if (address := storage.data_ptr()) and not in_arena(tensor):
                if not (self._sees_all or address in self._ends):
                    self._follow(storage, address, waits=True)
                if places:
                    self._places[self._count] = place_here()
                if kind == "gradients":
                    self._gradient_addresses.add(address)
                self._take("label", address, storage.nbytes(), kind, name)
        elif labels := label_of(tensor, kind, self.device, name):
            self._take("note", {"labels": labels})

    def _forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if torch._C._current_graph_task_id() != -1:
            return  # computed again, within the backward pass
        labels = []
        for tensor in tensors_in((args, kwargs)):
            labels += self._labels(tensor, "batch")
        labels += self._new_tensors()
        self._take("note", {"labels": labels, "phase": "forward"})

    def _step_begins(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._take("note", {"labels": self._gradients(), "phase": "optimizer"})

    def _step_ends(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        ends = optimizer is self.optimizers[-1]
        self._take("note", {"labels": self._new_state(), "ends_step": ends})


def _restore_hooks(param: Tensor, hooks: Any) -> None:
    if hooks is None and not param._backward_hooks:
        param._backward_hooks = None
