"""Lists what a forward pass keeps for the backward pass: the table to read before checkpointing."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .._core.sizes import format_bytes
from .._core.text import shortened
from ..step.before import Before
from ..step.trees import plain_tensors, tensors_in
from ..step.watch import listening, watching_modules
from .track import device_of

__all__ = ["Saved", "SavedTensor", "saved"]

_LEVEL = 'a headroom.nn block, save="{}": {} computed again'
_HELD = "held by a hook"
_CHECKPOINT = "headroom.checkpoint of the module"
_STAYS = "no one: a checkpoint or a block keeps this to drop the rest"
_PRODUCTS = r"^(Addmm|Mm|Bmm|Baddbmm|MklLinear|Linear)"
_ACTIVATIONS = r"(Gelu|Silu|Relu|Tanh|Sigmoid|Glu|Mul)"
_NORMS = r"(Layer|RMS|Rms|rms_|layer_)[Nn]orm"
_VIEWS = r"^(Unsafe)?(View|Reshape|Transpose|T|Permute|Expand|Squeeze|Unsqueeze|Clone|Slice|Select)"
_DROPPED_BY = (  # by what keeps it: the first that matches all of them
    (r"Attention.*(query|key|value)", _LEVEL.format("L3", "q, k and v are")),
    (r"Attention", _LEVEL.format("L5", "attention is")),
    (r"LogSoftmax|NllLoss", "headroom.functional.cross_entropy: keeps the logits instead"),
    (r"(Gelu|Silu|Relu|Tanh|Sigmoid|Glu)", _LEVEL.format("L2", "a product is")),
)
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
    droppable: str
    """Who could drop it."""


@dataclass
class Saved:
    """What :func:`saved` returns; ``print`` it."""

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

    def by_drop(self) -> dict[str, int]:
        """Returns the bytes that each technique could drop, the largest first."""
        found: dict[str, int] = {}
        for t in self.tensors:
            found[t.droppable] = found.get(t.droppable, 0) + t.bytes
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    def table(self, top: int = 20) -> str:
        """Returns text of at most 80 columns. Modules that differ in a number are one row."""
        groups: dict[tuple[str, ...], list[SavedTensor]] = {}
        drops = list(self.by_drop())
        for t in self.tensors:
            module = re.sub(r"(?<![^.])\d+(?![^.])", "*", t.module) or "(model)"
            shape = f"{_dtype(t.dtype)}{list(t.shape)}".replace(" ", "")
            key = module, _plain(t.op), shape, str(drops.index(t.droppable) + 1)
            groups.setdefault(key, []).append(t)
        ordered = sorted(groups.items(), key=lambda item: -sum(t.bytes for t in item[1]))
        lines = [
            f"{format_bytes(self.bytes)} saved for the backward pass on {self.device}, in "
            f"{len(self.tensors)} pieces",
            "",
            f"{'bytes':>9}{'n':>4}  {'module':<19}{'saved by':<26}{'shape':<17} by",
        ]
        for (module, op, shape, drop), group in ordered[:top]:
            size = format_bytes(sum(t.bytes for t in group))
            cells = f"{shortened(module, 18):<19}{_start(op, 25):<26}{_start(shape, 16):<17}"
            lines.append(f"{size:>9}{len(group):>4}  {cells}{drop:>3}")
        if rest := ordered[top:]:
            size = format_bytes(sum(t.bytes for _, group in rest for t in group))
            lines.append(f"{size:>9}{sum(len(g) for _, g in rest):>4}  {len(rest)} more rows")
        lines += ["", "who could drop it"]
        for number, (drop, size) in enumerate(self.by_drop().items(), start=1):
            lines.append(f"{format_bytes(size):>9}{number:>4}  {_start(drop, 64)}")
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


_start = functools.partial(shortened, keep="beginning")


class _Token:
    """What autograd keeps, where, and which nodes of the graph have it."""

    __slots__ = ("tensor", "module", "ops", "producer")

    def __init__(self, tensor: Tensor, module: str) -> None:
        self.tensor, self.module = tensor.detach(), module
        self.ops: list[str] = []
        self.producer = _producer(tensor)


def _producer(tensor: Tensor) -> str:
    """Returns the node that computed a tensor, behind views."""
    node = tensor.grad_fn
    while node is not None:
        name = node.name()
        if not re.match(_VIEWS, name) or not node.next_functions:
            return name
        node = node.next_functions[0][0]
    return ""


class _Listener:
    """Collects tokens in a forward pass, and asks the graph afterwards which node has which."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._modules: list[str] = [""]
        self._asking: str | None = None
        self.tokens: list[_Token] = []

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            begin, end = self._modules.append, self._modules.pop
            stack.enter_context(watching_modules(self._model, begin, end))
            last, asks = lambda: self.tokens[-1], lambda: self._asking is not None
            stack.enter_context(listening(self._keep, last, self._asked, asks))
            yield

    def _keep(self, tensor: Tensor) -> None:
        self.tokens.append(_Token(tensor, self._modules[-1]))

    def _asked(self, token: _Token) -> None:
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
    operation, with who could drop it.

    Example::

        model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU())
        table = headroom.memory.saved(model, torch.randn(8, 64))
        print(table)
        print(table.bytes, table.by_module(depth=1), table.by_drop())

    Views and tensors that share a storage are counted once, with all operations that keep them.
    Parameters, buffers and the batch are left out, because they exist anyway. Within a checkpoint
    what counts is what stays after the forward pass. Buffers and random numbers are put back, no
    gradient is computed.

    Args:
        model: called in its present mode, as ``model(batch)``, ``model(*batch)`` for a tuple or
            list, or ``model(**batch)`` for a mapping.
        loss: its saved tensors count as well. Called as ``loss(model(*inputs), target)``, where the
            last of a tuple is the target; as ``loss(output, batch)`` for a mapping, and as
            ``loss(output)`` for a single tensor. Without it, what the model returns is kept.
        device: to look at, if the model is on several.

    Raises:
        ValueError: a model on the meta device or on several devices, a loss that is no scalar, or
            an output that requires no gradient.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is {type(model).__name__}, wanted a torch.nn.Module")
    if loss is not None and not callable(loss):
        raise TypeError(f"loss is {type(loss).__name__}, wanted a function of the output")
    place = device_of(model, device)
    listener = _Listener(model)
    with Before(model) as before, torch.enable_grad():
        before.keep(model.parameters())
        before.callback(before.restore)
        with listener.listening():
            result = _forward(model, batch, loss)
            if not any(t.requires_grad for t in tensors_in(result)):
                raise ValueError(
                    "the output requires no gradient, so that nothing is saved for one"
                )
            listener.ask(result)
    existing = [*model.parameters(), *model.buffers(), *tensors_in(batch)]
    return Saved(_pieces(listener.tokens, existing, place), place)


def _forward(model: nn.Module, batch: Any, loss: Callable[..., Tensor] | None) -> Any:
    if isinstance(batch, Mapping):
        output, more = model(**batch), (batch,)
    elif isinstance(batch, (tuple, list)):
        inputs, more = (batch, ()) if loss is None else (batch[:-1], (batch[-1],))
        output = model(*inputs)
    else:
        output, more = model(batch), ()
    if loss is None:
        return output
    value = loss(output, *more)
    if not isinstance(value, Tensor) or value.numel() != 1:
        got = f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else repr(value)
        raise ValueError(f"loss returned {got}, wanted a scalar: take its mean() or sum()")
    return value


def _pieces(
    tokens: list[_Token], existing: list[Tensor], device: torch.device
) -> list[SavedTensor]:
    ignored = {
        part.untyped_storage().data_ptr()
        for tensor in existing
        for part in plain_tensors(tensor)
        if part.layout == torch.strided
    }
    groups: dict[int, list[tuple[_Token, Tensor]]] = {}
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
                droppable=_droppable(ops, token.producer),
            )
        )
    return sorted(found, key=lambda t: -t.bytes)


def _droppable(ops: list[str], producer: str) -> str:
    """Returns who could drop it. What an operation needs that no block computes again decides."""
    if any(op.startswith(_HELD) for op in ops):
        return _STAYS
    if all(re.match(_PRODUCTS, op) for op in ops):
        if re.search(_NORMS, producer):
            return _LEVEL.format("L1", "norms are")
        if re.search(_ACTIVATIONS, producer):
            return _LEVEL.format("L1", "activations are")
    for pattern, drop in _DROPPED_BY:
        if all(re.search(pattern, op) or re.match(_PRODUCTS, op) for op in ops):
            if any(re.search(pattern, op) for op in ops):
                return drop
    return _CHECKPOINT
