"""Lists what a forward pass keeps for the backward pass: the table to read before checkpointing."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .._core.running_modules import watching_modules
from .._core.sizes import format_bytes
from .._core.text import shortened
from ..step.loss import loss_of, output_of
from ..step.pytree import plain_tensors, tensors_in
from ..step.watch import listening
from .track import device_of

__all__ = ["Saved", "SavedTensor", "saved"]

_HELD = "held by a hook"  # such as that of a checkpoint
_SHORT = {"float": "f", "bfloat": "bf", "int": "i", "uint": "u", "complex": "c", "bool": "bool"}


@dataclass
class SavedTensor:
    """Memory that is kept for the backward pass, with the tensor by which it was kept first."""

    module: str
    """Name of the innermost module that was running; "" is the model itself, or the loss."""
    op: str
    """The operations of the graph that keep it, such as ``"AddmmBackward0.mat1"``."""
    shape: tuple[int, ...]
    dtype: torch.dtype
    bytes: int
    """Of the storage, which views share."""
    uses: int
    """How often it is kept."""


@dataclass
class Saved:
    """The result of :func:`saved`; ``print`` it."""

    tensors: list[SavedTensor]
    """The largest first."""
    device: torch.device

    @property
    def bytes(self) -> int:
        return sum(t.bytes for t in self.tensors)

    def by_module(self, depth: int | None = None) -> dict[str, int]:
        """Returns the bytes of each module, the largest first, cut after ``depth`` names."""
        found: dict[str, int] = {}
        for t in self.tensors:
            name = ".".join(t.module.split(".")[:depth])
            found[name] = found.get(name, 0) + t.bytes
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    def table(self, top: int = 20) -> str:
        """Returns text of at most 80 columns. Modules that differ in a number are one row."""
        groups: dict[tuple[str, ...], list[SavedTensor]] = {}
        for t in self.tensors:
            module = re.sub(r"(?<![^.])\d+(?![^.])", "*", t.module) or "(model)"
            shape = f"{_dtype(t.dtype)}{list(t.shape)}".replace(" ", "")
            groups.setdefault((module, _plain(t.op), shape), []).append(t)
        ordered = sorted(groups.items(), key=lambda item: -sum(t.bytes for t in item[1]))
        lines = [
            f"{format_bytes(self.bytes)} saved for the backward pass on {self.device}, in "
            f"{len(self.tensors)} pieces",
            "",
            f"{'bytes':>9}{'n':>4}  {'module':<19}{'saved by':<28}shape",
        ]
        for (module, op, shape), group in ordered[:top]:
            size = format_bytes(sum(t.bytes for t in group))
            cells = f"{shortened(module, 18):<19}{_start(op, 27):<28}{_start(shape, 18)}"
            lines.append(f"{size:>9}{len(group):>4}  {cells}")
        if rest := ordered[top:]:
            size = format_bytes(sum(t.bytes for _, group in rest for t in group))
            lines.append(f"{size:>9}{sum(len(g) for _, g in rest):>4}  {len(rest)} more rows")
        return "\n".join(lines)

    __str__ = table


def _dtype(dtype: torch.dtype) -> str:
    name = str(dtype).removeprefix("torch.")
    word = name.rstrip("0123456789")
    return _SHORT.get(word, word) + name[len(word) :]


def _plain(op: str) -> str:
    for long, short in (("Backward0", ""), ("ScaledDotProduct", "SDP"), ("ForCpu", "")):
        op = op.replace(long, short)
    return op


_start = partial(shortened, keep="beginning")


class _SavedHandle:
    """A tensor that autograd keeps, its module, and the nodes of the graph that have it."""

    __slots__ = ("tensor", "module", "ops")

    def __init__(self, tensor: Tensor, module: str) -> None:
        self.tensor, self.module = tensor.detach(), module
        self.ops: list[str] = []


class _Listener:
    """Collects tokens in a forward pass, and asks the graph afterwards which node has which."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._modules: list[str] = [""]
        self._asking: str | None = None
        self.tokens: list[_SavedHandle] = []

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            begin, end = self._modules.append, self._modules.pop
            stack.enter_context(watching_modules(self._model, begin, end))
            last, asks = lambda: self.tokens[-1], lambda: self._asking is not None
            stack.enter_context(listening(self._keep, last, self._asked, asks))
            yield

    def _keep(self, tensor: Tensor) -> None:
        self.tokens.append(_SavedHandle(tensor, self._modules[-1]))

    def _asked(self, token: _SavedHandle) -> None:
        if self._asking is not None:
            token.ops.append(self._asking)

    def ask(self, outputs: Any) -> None:
        """Finds the node of each token by asking every node of the graph for what it saved."""
        nodes = [t.grad_fn for t in tensors_in(outputs) if t.grad_fn is not None]
        seen = set(nodes)
        while nodes:
            node = nodes.pop()
            for attribute in dir(node):
                if attribute == "saved_tensors" or attribute.startswith("_saved_"):
                    name = node.name().rpartition("::")[2]
                    self._asking = f"{name}.{attribute.removeprefix('_saved_')}"
                    with contextlib.suppress(Exception):
                        getattr(node, attribute)
                    self._asking = None
            for following, _ in node.next_functions:
                if following is not None and following not in seen:
                    seen.add(following)
                    nodes.append(following)


def saved(
    model: nn.Module,
    batch: Any,
    loss: Callable[..., Tensor] | None = None,
    *,
    device: torch.device | str | None = None,
) -> Saved:
    """Runs one forward pass and returns what it keeps for the backward pass, by module and
    operation. ``headroom.plan(...).advice()`` says what would drop it.

    Example::

        model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU())
        table = headroom.memory.saved(model, torch.randn(8, 64))
        print(table)
        print(table.bytes, table.by_module(depth=1))

    Views and tensors that share a storage are counted once, with all operations that keep them.
    Parameters, buffers and the batch are left out, because they exist anyway. Within a checkpoint
    what counts is what stays after the forward pass. Buffers, attributes of modules and random
    numbers are put back, no gradient is computed.

    Args:
        model: called in its present mode, as ``model(batch)``, ``model(*batch)`` for a tuple or
            list, or ``model(**batch)`` for a mapping.
        loss: its saved tensors count as well. Called as ``loss(model(*inputs), target)``, where the
            last of a tuple is the target; as ``loss(output, batch)`` for a mapping, and as
            ``loss(output)`` for a single tensor. Without it, what the model returns is kept.
        device: to look at, if the model is on several.

    Raises:
        ValueError: a model on the meta device or on several devices, or an output that requires no
            gradient.
        PlanError: a loss that is no tensor of one element.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is {type(model).__name__}, wanted a torch.nn.Module")
    if loss is not None and not callable(loss):
        raise TypeError(f"loss is {type(loss).__name__}, wanted a function of the output")
    from ..step.restoring import ModelBefore  # which imports much

    place = device_of(model, device)
    listener = _Listener(model)
    with ModelBefore(model) as before:
        before.keep()
        before.callback(before.restore)
        with torch.enable_grad(), listener.listening():
            if loss is None:
                result = output_of(model, batch)
            else:
                result = loss_of(model, batch, loss, trains=False)
            if not any(t.requires_grad for t in tensors_in(result)):
                raise ValueError(
                    "the output requires no gradient, so that nothing is saved for one"
                )
            listener.ask(result)
    existing = [*model.parameters(), *model.buffers(), *tensors_in(batch)]
    return Saved(_pieces(listener.tokens, existing, place), place)


def _pieces(
    tokens: list[_SavedHandle], existing: list[Tensor], device: torch.device
) -> list[SavedTensor]:
    ignored = {
        part.untyped_storage().data_ptr()
        for tensor in existing
        for part in plain_tensors(tensor)
        if part.layout == torch.strided
    }
    groups: dict[int, list[tuple[_SavedHandle, Tensor]]] = {}
    for token in tokens:
        for part in plain_tensors(token.tensor):
            if part.layout == torch.strided and part.device == device:
                address = part.untyped_storage().data_ptr()
                if address and address not in ignored:
                    groups.setdefault(address, []).append((token, part))
    found = []
    for group in groups.values():
        token, part = group[0]
        ops = list(dict.fromkeys(op for each, _ in group for op in each.ops)) or [_HELD]
        found.append(
            SavedTensor(
                module=token.module,
                op=", ".join(ops),
                shape=tuple(part.shape),
                dtype=part.dtype,
                bytes=part.untyped_storage().nbytes(),
                uses=len(group),
            )
        )
    return sorted(found, key=lambda t: -t.bytes)
