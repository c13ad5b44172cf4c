"""Finds out, while a model trains, which memory is what: by identity, through hooks that change
neither numbers nor which tensors are kept, and that are gone afterwards."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import _enable_record_function
from torch.autograd.graph import saved_tensors_hooks

from .lines import Place, lines_at, place_here
from .modules import watching_modules
from .stream import Label, Note

__all__ = ["Watch", "label_of", "listening", "plain_tensors", "tensors_in"]

_MASTERS = ("master", "remainder", "compensation", "residual")


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yields every tensor in nested dicts, lists, tuples and objects with fields."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (list, tuple, set)):
        for item in value:
            yield from tensors_in(item)
    elif hasattr(value, "__dataclass_fields__"):
        for name in value.__dataclass_fields__:
            yield from tensors_in(getattr(value, name, None))


def plain_tensors(tensor: Tensor) -> list[Tensor]:
    """Returns the tensors with memory that a tensor consists of: itself, or what a subclass
    wraps."""
    if type(tensor) in (Tensor, nn.Parameter, nn.Buffer) or not hasattr(
        tensor, "__tensor_flatten__"
    ):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    parts = [getattr(tensor, name) for name in names]  # a DTensor names its mesh among them
    return [plain for part in parts if isinstance(part, Tensor) for plain in plain_tensors(part)]


def label_of(
    tensor: Tensor, kind: str, device: torch.device, name: str | None = None
) -> list[Label]:
    """Labels for the memory of a tensor; none for what is on other devices or has none."""
    labels = []
    for part in plain_tensors(tensor):
        if part.device != device or part.layout != torch.strided:
            continue
        storage = part.untyped_storage()
        if storage.nbytes() and (address := storage.data_ptr()):
            labels.append(_label(address, storage.nbytes(), kind, name))
    return labels


def _label(address: int, size: int, kind: str, name: str | None) -> Label:
    module, _, own = (None, None, None) if name is None else name.rpartition(".")
    return Label(address, size, kind, module, own)


def _given_back(tensor: Tensor, version: int) -> Tensor:
    """Checks what is given back for changes in place: with hooks autograd does not do so by
    itself."""
    if tensor._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an "
            f"inplace operation: [{tensor.type()} {list(tensor.shape)}] is at version "
            f"{tensor._version}; expected version {version} instead"
        )
    return tensor


def listening(
    note: Callable[[Tensor], None],
    place: Callable[[], str | None] = lambda: None,
    unpacked: Callable[[str], None] = lambda _: None,
) -> ExitStack:
    """Returns a context in which ``note`` gets every tensor that autograd keeps for the backward
    pass, also within the hooks of others, such as checkpoints. If ``place`` names where the model
    is when a tensor is kept, ``unpacked`` gets the name when the backward pass asks for it.

    Of those, what counts is what their hooks return, because that is kept, and within a backward
    pass what is computed again.
    """
    enter = saved_tensors_hooks.__enter__

    def wrapped(pack: Callable) -> Callable:
        @functools.wraps(pack)  # a checkpoint is told by the name and the marks of its hook
        def listening_pack(tensor: Tensor) -> Any:
            if torch._C._current_graph_task_id() != -1:
                note(tensor)
            packed = pack(tensor)
            for kept in tensors_in(packed):
                note(kept)
            return packed

        return listening_pack

    def listening_enter(self: saved_tensors_hooks) -> None:
        given = self.pack_hook
        self.pack_hook = wrapped(given)
        try:
            enter(self)
        finally:
            self.pack_hook = given

    def pack(tensor: Tensor) -> tuple[Tensor, int, str | None]:
        note(tensor)
        if tensor.is_leaf:
            return tensor, tensor._version, place()
        # An output that kept its node would keep itself alive. Recorders need not see this.
        _enable_record_function(False)
        try:
            return tensor.detach(), tensor._version, place()
        finally:
            _enable_record_function(True)

    def unpack(kept: tuple[Tensor, int, str | None]) -> Tensor:
        tensor, version, name = kept
        if name is not None:
            unpacked(name)
        return _given_back(tensor, version)

    stack = ExitStack()
    with ExitStack() as undo:
        undo.enter_context(saved_tensors_hooks(pack, unpack))
        undo.callback(setattr, saved_tensors_hooks, "__enter__", enter)
        saved_tensors_hooks.__enter__ = listening_enter
        stack = undo.pop_all()
    return stack


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
    ) -> None:
        self.model, self.optimizers, self.device = model, list(optimizers), device
        self._modules: list[str] = []  # that run
        self._unpacks = unpacked  # whether to note which module the backward pass is in
        self._mark, self._batch = mark, batch
        self._notes: dict[int, tuple[Any, ...]] = {}  # arguments of Note or Label, by number
        self._count = self._forgotten = 0
        self._stack = ExitStack()
        named = list(model.named_parameters(remove_duplicate=False))
        self._places: dict[int, Place] = {}  # where what is saved is saved, by the note's number
        self._names = {id(p): name for name, p in named}
        self._params = list(model.parameters())
        self._sizes: dict[int, int] = {}  # of the optimizers' states, when they were last read

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
        """Returns the notes that were not forgotten, by their numbers."""
        notes: dict[int, Note] = {}
        for number, (what, *about) in self._notes.items():
            if what == "label":
                label = _label(*about)
                stack = lines_at(self._places.get(number, ()))
                notes[number] = Note([label._replace(stack=stack)])
            else:
                notes[number] = Note(**about[0])
        return notes

    def take_notes(self) -> tuple[list[Note], dict[int, str]]:
        """Returns the notes and :attr:`modules` until now, and begins to number anew."""
        taken = self.notes, self.modules
        self._notes, self._places, self._count = {}, {}, 0
        return taken

    def go_on(self) -> None:
        """Notes again which module runs, for a recorder that begins anew."""
        if self._modules:
            self._take("note", {"module": self._place()})

    def forget(self, number: int) -> None:
        """Drops the notes before a number, whose marks no recorder has any more."""
        for old in range(self._forgotten, number):
            self._notes.pop(old, None)
            self._places.pop(old, None)
        self._forgotten = max(self._forgotten, number)

    def note(self, labels: list[Label]) -> None:
        """Notes what some memory is."""
        self._take("note", {"labels": labels})

    @property
    def count(self) -> int:
        """Returns how many notes were taken since they began to be numbered."""
        return self._count

    def _take(self, *note: Any) -> None:
        number = self._count
        self._count = number + 1
        self._notes[number] = note
        self._mark(number)

    # What exists

    def present(self) -> list[Label]:
        """Labels of everything that exists now and belongs to the model or the optimizers."""
        return [
            label
            for kind, name, tensor in self._owned()
            for label in label_of(tensor, kind, self.device, name)
        ]

    def _owned(self) -> Iterator[tuple[str, str | None, Tensor]]:
        for name, p in self.model.named_parameters():
            yield "parameters", name, p
            if p.grad is not None:
                yield "gradients", name, p.grad
        for name, tensor in self.model.named_buffers():
            yield "buffers", name, tensor
        yield from self._state()
        for tensor in tensors_in(self._batch):
            yield "batch", None, tensor

    def _state(self) -> Iterator[tuple[str, str, Tensor]]:
        for optimizer in self.optimizers:
            for param, state in list(optimizer.state.items()):
                module = self._names.get(id(param), "").rpartition(".")[0]
                items = state.items() if isinstance(state, Mapping) else [("state", state)]
                for key, value in items:
                    kind = "master_weights" if str(key) in _MASTERS else "optimizer_state"
                    for tensor in tensors_in(value):
                        yield kind, f"{module}.{key}", tensor

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
            for label in label_of(tensor, kind, self.device, name)
        ]

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
            for label in label_of(grad, "gradients", self.device, name)
        ]

    # Hooks

    def install(self) -> None:
        """Adds the hooks. Whatever raises here leaves none behind."""
        self._gradient_addresses: set[int] = set()
        with ExitStack() as stack:
            self._watch_ends(stack)
            places = (self._place, self._unpacked) if self._unpacks else ()
            stack.enter_context(listening(self._saved, *places))
            stack.enter_context(watching_modules(self.model, self._begin, self._end))
            for p in self._params:
                if p.requires_grad and p.is_leaf:
                    stack.callback(_restore_hooks, p, p._backward_hooks)
                    arrived = functools.partial(self._arrived, self._names[id(p)])
                    stack.callback(p.register_hook(arrived).remove)
            add = self.model.register_forward_pre_hook
            stack.callback(add(self._forward, with_kwargs=True, prepend=True).remove)
            for optimizer in self.optimizers:
                stack.callback(optimizer.register_step_pre_hook(self._step_begins).remove)
                stack.callback(optimizer.register_step_post_hook(self._step_ends).remove)
            self._stack = stack.pop_all()

    def remove(self) -> None:
        """Removes every hook."""
        self._stack.close()

    def _watch_ends(self, stack: ExitStack) -> None:
        """Notes the ends of what was there before: recorders do not see them."""
        seen = set()
        for _, _, tensor in self._owned():
            for part in plain_tensors(tensor):
                if part.device == self.device and part.layout == torch.strided:
                    storage = part.untyped_storage()
                    address = storage.data_ptr()
                    if address and address not in seen:
                        seen.add(address)
                        end = weakref.finalize(storage, self._freed, address)
                        end.atexit = False
                        stack.callback(end.detach)

    def _begin(self, name: str) -> None:
        self._modules.append(name)
        self._take("note", {"module": name})

    def _end(self) -> None:
        if self._modules:
            self._modules.pop()
        self._take("note", {"module": self._place()})

    def _place(self) -> str:
        return self._modules[-1] if self._modules else ""

    def _unpacked(self, name: str) -> None:
        if torch._C._current_graph_task_id() != -1:
            self._take("note", {"phase": "backward", "module": name})

    def _freed(self, address: int) -> None:
        self._take("note", {"freed": address})

    def _saved(self, tensor: Tensor) -> None:
        whole = tensor if tensor._base is None else tensor._base
        if isinstance(whole, nn.Parameter):
            return  # of the model, or gathered by FSDP, which frees it while autograd holds it
        self._places[self._count] = place_here()
        self._label(tensor, "activations", None)

    def _arrived(self, name: str, grad: Tensor) -> None:
        self._label(grad, "gradients", name)

    def _label(self, tensor: Tensor, kind: str, name: str | None) -> None:
        if tensor.device != self.device:
            return
        if tensor.layout is torch.strided and not hasattr(tensor, "__tensor_flatten__"):
            storage = tensor.untyped_storage()
            if address := storage.data_ptr():
                self._take("label", address, storage.nbytes(), kind, name)
        elif labels := label_of(tensor, kind, self.device, name):
            self._take("note", {"labels": labels})

    def _forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if torch._C._current_graph_task_id() != -1:
            return  # computed again, within the backward pass
        labels = []
        for tensor in tensors_in((args, kwargs)):
            labels += label_of(tensor, "batch", self.device)
        self._take("note", {"labels": labels, "phase": "forward"})

    def _step_begins(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._take("note", {"labels": self._gradients(), "phase": "optimizer"})

    def _step_ends(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        ends = optimizer is self.optimizers[-1]
        self._take("note", {"labels": self._new_state(), "ends_step": ends})


def _restore_hooks(param: Tensor, hooks: Any) -> None:
    if hooks is None and not param._backward_hooks:
        param._backward_hooks = None
