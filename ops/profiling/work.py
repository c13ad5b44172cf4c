"""Counts the work of recorded operations from their arguments: floating-point operations, and bytes
that must move.

**FLOPs** are those of the formulas of :mod:`torch.utils.flop_counter`, to which our ops add theirs:
products of matrices, convolutions and attention, two for a multiplication and an addition. What
multiplies and has no formula counts as none, and is named. FLOPs that compute something again are
told apart, inside fused operations too.

**Bytes** are those of the arguments and of the results, each element once, where several indices
share an element too. For element-wise operations and copies that is what a device must move, and
says "counted". For our other ops and for products it is the least that they could move: "estimate".
What an optimizer moves is estimated from its parameters and states.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from .._core.registration import AGAIN
from ..step.micro_batches import bytes_of
from ..step.pytree import tensors_in
from .arguments import Arguments, ListTypes, call_on_meta, op_of
from .events import Call

__all__ = ["Work", "Worker", "optimizer_bytes"]

_COPIES = {"aten::copy_", "aten::fill_", "aten::zero_", "aten::cat", "aten::_foreach_copy_"}
_FUNCTION = 0


class Work(NamedTuple):
    """The work of one call.

    Attributes:
        flops: all of them.
        again: those of them that compute something again.
        dtype: of the products.
        bytes: that must move, or None if unknown.
        counted: whether ``bytes`` is a count and not an estimate.
    """

    flops: int = 0
    again: int = 0
    dtype: str = ""
    bytes: int | None = None
    counted: bool = False


def _pairs(query: Tensor, key: Tensor) -> int:
    """Returns two for each pair of a query and a key, in all heads."""
    return 2 * query.shape[:-1].numel() * key.shape[-2]


def _attention(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    return _pairs(query, key) * (query.shape[-1] + value.shape[-1])


def _attention_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any
) -> int:
    return _pairs(query, key) * (3 * query.shape[-1] + 2 * value.shape[-1])


def _scores_again(grad: Tensor, query: Tensor, key: Tensor, *_: Any) -> int:
    """Returns the work of scores in the backward pass: attention keeps none, and multiplies queries
    and keys again."""
    return _pairs(query, key) * query.shape[-1]


# Of torch's fused operations; ours say it where they are registered. Torch itself has formulas for
# those of the CPU from 2.14 on, and for fewer heads of keys than of queries not in all releases.
_KINDS = ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention")
_ATTENTIONS = [f"aten::_scaled_dot_product_{kind}" for kind in _KINDS]
_FORMULAS: dict[str, Callable[..., int]] = {
    **dict.fromkeys(_ATTENTIONS, _attention),
    **{f"{name}_backward": _attention_backward for name in _ATTENTIONS},
}
_AGAIN_INSIDE = {f"{name}_backward": _scores_again for name in _ATTENTIONS}

# What multiplies, and has no formula in some release of torch.
_PRODUCTS = {
    *("aten::mkldnn_rnn_layer", "aten::mkldnn_rnn_layer_backward", "aten::_cudnn_rnn"),
    *("aten::_cudnn_rnn_backward", "aten::miopen_rnn", "aten::miopen_rnn_backward"),
    *("aten::mv", "aten::addmv", "aten::_cdist_forward", "aten::_cdist_backward"),
    *("aten::_grouped_mm", "aten::_scaled_grouped_mm", "aten::_int_mm", "aten::_sparse_mm"),
    *(
        "aten::_weight_int4pack_mm",
        "aten::_weight_int8pack_mm",
        "aten::_weight_int4pack_mm_for_cpu",
    ),
    *("aten::mkldnn_linear", "aten::mkldnn_convolution", "aten::_addmm_activation"),
    *("aten::_scaled_mm", "aten::_flash_attention_forward", "aten::_flash_attention_backward"),
    *("aten::_efficient_attention_forward", "aten::_efficient_attention_backward"),
    *("aten::_native_multi_head_attention", "aten::_transformer_encoder_layer_fwd"),
    *("torch_attn::_varlen_attn", "torch_attn::_varlen_attn_backward"),
    *("aten::_scaled_dot_product_fused_attention_overrideable",),
    *("aten::_scaled_dot_product_fused_attention_overrideable_backward",),
}


class Worker:
    """Finds the work of calls. Equal calls are looked at once.

    Attributes:
        uncounted: the names of calls that multiply, and whose FLOPs are not known.
    """

    def __init__(self, types: ListTypes) -> None:
        self._types = types
        self._formulas = {
            op._qualified_op_name: formula
            for op, formula in flop_registry.items()
            if hasattr(op, "_qualified_op_name")
        } | _FORMULAS
        self.uncounted: set[str] = set()
        self._looked: dict[Any, Work | None] = {}
        self._moves: dict[str, bool] = {}

    def of(self, calls: Iterable[Call]) -> Iterator[tuple[Call, Work]]:
        """Yields the calls that do work, which must be in the order of their starts, with their
        work. FLOPs and bytes are those of the outermost calls that have any."""
        flops_until: dict[int, int] = {}  # the end of the last one, by thread
        bytes_until: dict[int, int] = {}
        for call in calls:
            if call.event.scope() != _FUNCTION:
                continue
            multiplies = call.name in self._formulas
            if call.name in _PRODUCTS and not multiplies:
                if call.start >= flops_until.get(call.thread, 0):
                    self.uncounted.add(call.name)
            if not multiplies and not self._moved(call.name):
                continue
            multiplies = multiplies and call.start >= flops_until.get(call.thread, 0)
            moves = call.start >= bytes_until.get(call.thread, 0)
            work = self._of(call) if multiplies or moves else None
            if work is None:
                continue
            if multiplies:
                flops_until[call.thread] = call.end
            else:
                work = work._replace(flops=0, again=0)
            if moves and work.bytes is not None:
                bytes_until[call.thread] = call.end
            else:
                work = work._replace(bytes=None)
            yield call, work

    def _moved(self, name: str) -> bool:
        """Returns whether the bytes of an op are known, or can be estimated."""
        found = self._moves.get(name)
        if found is None:
            op = op_of(name)
            ours = name.startswith("headroom::") and "_table" not in name  # addresses in a tensor
            found = op is not None and (ours or name in _COPIES or _is_pointwise(op))
            self._moves[name] = found
        return found

    def _of(self, call: Call) -> Work | None:
        arguments = Arguments(call.event, self._types)
        key = arguments.key
        if key not in self._looked:
            self._looked[key] = self._looked_at(call.name, arguments)
        work = self._looked[key]
        if work is not None and call.again:
            return work._replace(again=work.flops)
        return work

    def _looked_at(self, name: str, arguments: Arguments) -> Work | None:
        op = op_of(name)
        try:
            values = arguments.values()
        except (ValueError, RuntimeError):
            if name in self._formulas:
                self.uncounted.add(name)
            return None
        schema, results = call_on_meta(op, values)
        flops = again = 0
        formula = self._formulas.get(name)
        if formula is not None:
            try:
                flops = formula(*values, out_val=results)
                if inside := _AGAIN_INSIDE.get(name, AGAIN.get(name)):
                    again = inside(*values)
            except Exception:  # whatever a formula of someone else does with these arguments
                self.uncounted.add(name)
                return None
        size = None if schema is None else _bytes(schema, values, results)
        counted = size is not None and (name in _COPIES or _is_pointwise(op))
        dtype = str(arguments.dtype).removeprefix("torch.") if formula is not None else ""
        return Work(int(flops), int(again), dtype, size, counted)


def _is_pointwise(op: Any) -> bool:
    name = op._qualified_op_name
    if name.startswith("aten::_foreach_"):
        return name.removesuffix("_") not in ("aten::_foreach_norm", "aten::_foreach_max")
    overloads = [getattr(op, each) for each in op.overloads()]
    return any(torch.Tag.pointwise in each.tags for each in overloads)


def _bytes(schema: Any, values: list[Any], results: Any) -> int:
    """Returns the bytes of arguments and results. Written arguments count twice, unless they are
    not read."""
    given = [
        tensor for tensor in tensors_in(values) if tensor.dim()
    ]  # numbers are recorded as such
    addressed = {id(tensor) for tensor in tensors_in(values)}
    total = sum(map(_size, given))
    for value, argument in zip(values, schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            total += sum(map(_size, tensors_in(value)))
    if schema.name in ("aten::copy_", "aten::fill_", "aten::zero_"):
        total -= sum(map(_size, given[:1]))
    new = (tensor for tensor in tensors_in(results) if id(tensor) not in addressed)
    return total + sum(map(_size, new))


def _size(tensor: Tensor) -> int:
    """Returns the bytes of a tensor, whose expanded dimensions are read again and again from one
    place."""
    return tensor.element_size() * prod(
        n for n, s in zip(tensor.shape, tensor.stride()) if s or not n
    )


def optimizer_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Returns an estimate of the bytes that a step moves: gradients are read, parameters and states
    are read and written."""
    states = list(optimizer.state.items())
    return sum(3 * bytes_of(param) + 2 * bytes_of(state) for param, state in states)
