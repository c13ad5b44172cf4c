"""Ops on rows ``[..., cols]``: their fakes and gradients, from what each says of its tensors.

An op ``name`` and the op of its gradient, ``name_backward``, know each other by the names in their
schemas. ``name_backward`` takes ``dy`` for the gradient of a result ``y``, arguments and results of
``name`` under their own names, and ``want_dx`` for whether ``dx`` is wanted; it returns ``dx`` for
the gradient of an argument ``x``. ``name_backward_``, if there is one, writes the gradient over the
op's first tensor, where ``name`` was called with ``in_place``. What a call does not ask for is
returned as a tensor without elements, because a schema has no optional results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor

from .registration import (
    FLOATS,
    complete,
    differentiable,
    refuse_derivative,
    register_fake,
    register_flops,
    require,
)

FLOAT32 = (torch.float32,)
Given = Mapping[str, Any]  # arguments and results by name


@dataclass(frozen=True)
class Kind:
    """Describes a tensor of an op, measured against the op's first tensor ``[..., cols]``.

    Attributes:
        shapes: those that it may have, in words: "rows" are all dimensions of the first tensor but
            the last, "count" is their product, "cols" is the last; others are numbers, and sizes
            that are the same wherever their name occurs.
        dtypes: those that it may have; none stands for that of the first tensor.
        where: the argument without which a result has the second of the shapes, or no elements.
        bit: that this argument must have, if it is a sum of bits; 0: it is a flag.
    """

    shapes: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...] = ()
    where: str = ""
    bit: int = 0

    def is_absent(self, given: Given) -> bool:
        """Returns whether a result of a call has no elements, because it is not asked for."""
        if not self.where or len(self.shapes) != 1:
            return False
        asked = given[self.where]
        return not (asked & self.bit if self.bit else _is_given(asked))


def kind(*shapes: str, dtypes: tuple[torch.dtype, ...] = (), where: str = "", bit: int = 0) -> Kind:
    """Returns a :class:`Kind` of these shapes."""
    return Kind(shapes, dtypes, where, bit)


MATRIX = kind("rows cols")


def _is_given(value: Any) -> bool:
    return value is not None if value is None or isinstance(value, Tensor) else bool(value)


Sizes = dict[str, tuple[Any, ...]]


@dataclass(frozen=True)
class RowOp:
    """Describes an op on rows and the ops of its gradient. ``kinds`` has arguments and results by
    name, the first of which leads; a gradient is of the kind of what it is the gradient of."""

    name: str
    kinds: dict[str, Kind]
    sizes: Callable[..., dict[str, Any]] | None = None  # of names in shapes, from the arguments
    ops: list[str] = field(default_factory=list)  # which are registered, it among them

    def kind_of(self, name: str) -> Kind | None:
        return self.kinds.get(name) or self.kinds.get(name.removeprefix("d"))

    def leader_of(self, given: Given) -> str:
        """Returns the name of the tensor that others are measured against."""
        first = next(iter(self.kinds))
        if given.get(first) is not None:
            return first
        return next(n for n, x in given.items() if x is not None and self.kind_of(n) == MATRIX)

    def sizes_of(self, given: Given) -> Sizes:
        shape = tuple(given[self.leader_of(given)].shape)
        known = {"rows": shape[:-1], "count": (prod(shape[:-1]),), "cols": shape[-1:]}
        own = {} if self.sizes is None else self.sizes(**given)
        return known | {n: x if isinstance(x, tuple) else (x,) for n, x in own.items()}

    def check(self, given: Given) -> Sizes:
        """Raises, while a call is traced, what the op would raise when it runs, and returns the
        sizes that shapes name; devices are compared by :func:`register_fake`."""
        leader = self.leader_of(given)
        first = given[leader]
        require(first.dim() > 0, f"{leader} has no dimensions, wanted [..., cols]")
        require(first.dtype in FLOATS, f"{leader} has dtype {first.dtype}, wanted one of {FLOATS}")
        sizes = self.sizes_of(given)
        for name, tensor in given.items():
            found = self.kind_of(name)
            if name == leader or found is None or not isinstance(tensor, Tensor):
                continue
            dtypes = found.dtypes or (first.dtype,)
            require(
                tensor.dtype in dtypes,
                f"{name} has dtype {tensor.dtype}, wanted "
                + (f"one of {dtypes}" if found.dtypes else f"that of {leader}, {first.dtype}"),
            )
            require(
                any(_fits(shape, tensor, sizes) for shape in found.shapes),
                f"{name} has shape {[*tensor.shape]}, wanted "
                + " or ".join(f"[{', '.join(map(str, _shape(s, sizes)))}]" for s in found.shapes),
            )
        return sizes

    def empty(self, name: str, given: Given, sizes: Sizes) -> Tensor:
        """Returns a result of a call, without its values."""
        first = given[self.leader_of(given)]
        result = self.kinds[name]
        shape = result.shapes[0]
        if result.where and not _is_given(given[result.where]):
            shape = result.shapes[1] if len(result.shapes) > 1 else "0"
        dtype = result.dtypes[0] if result.dtypes else first.dtype
        return first.new_empty(_shape(shape, sizes), dtype=dtype)

    def empty_gradient(self, name: str, given: Given, sizes: Sizes) -> Tensor:
        """Returns a result of the backward op, without its values."""
        first = given[self.leader_of(given)]
        own = name.removeprefix("d")
        result = self.kinds[own if own in self.kinds else name]
        like = given.get(own)
        is_wanted = given.get(f"want_{name}", like is not None)
        if like is None:  # of the dtype of its siblings, if there are any
            same = (x for n, x in given.items() if x is not None and self.kinds.get(n) == result)
            like = next(same, first) if result.dtypes else first
        shape = _shape(result.shapes[0], sizes) if is_wanted else (0,)
        return first.new_empty(shape, dtype=like.dtype if is_wanted else first.dtype)


def _shape(words: str, sizes: Sizes) -> tuple[Any, ...]:
    return sum(((int(w),) if w.isdigit() else sizes.get(w, (w,)) for w in words.split()), ())


def _fits(words: str, tensor: Tensor, sizes: Sizes) -> bool:
    """Returns whether a tensor has a shape, and takes sizes that are not known from it."""
    wanted = _shape(words, sizes)
    if len(wanted) != tensor.dim():
        return False
    found = {w: (n,) for w, n in zip(wanted, tensor.shape) if isinstance(w, str)}
    if any(n != w for w, n in zip(wanted, tensor.shape) if not isinstance(w, str)):
        return False
    sizes |= found
    return True


def _names(arguments: Iterable[Any]) -> list[str]:
    return [argument.name for argument in arguments]


class Gradient:
    """Computes the gradient of an op by ``headroom::name_backward``, from their schemas.

    Args:
        op: the op.
        saved: takes the arguments and the results of a call, and returns what is saved in the place
            of some of them.
        scalars: takes the numbers of the call and which arguments need gradients, and returns those
            arguments of the backward op that these decide.
        also: arguments whose gradient is that of another.
        alone: gradients of results, and the arguments that they pass on to unchanged where they are
            the only ones.
    """

    def __init__(
        self,
        op: RowOp,
        saved: Callable[[Given, Given], dict[str, Tensor | None]] | None = None,
        scalars: Callable[[Given, Mapping[str, bool]], dict[str, Any]] | None = None,
        also: Mapping[str, str] | None = None,
        alone: Mapping[str, tuple[str, ...]] | None = None,
    ) -> None:
        self._op, self._also, self._alone = op, also or {}, alone or {}
        self._instead, self._scalars = saved, scalars
        forward = getattr(torch.ops.headroom, op.name).default._schema
        self.name = f"{op.name}_backward"
        self._backward = getattr(torch.ops.headroom, self.name)
        schema = self._backward.default._schema
        given, results = _names(forward.arguments), _names(forward.returns)
        self._arguments, self._results = _names(schema.arguments), _names(schema.returns)
        own = {*given, *results}
        self._tensors = [a.name for a in schema.arguments if "Tensor" in str(a.type)]
        self._saved = [n for n in self._tensors if n in own]
        self._numbers = [n for n in self._arguments if n in own and n not in self._tensors]
        self._incoming = [n for n in results if f"d{n}" in self._arguments]
        self._constant = [n for n in results if n not in self._incoming]
        self._required = f"d{results[0]}"
        # Of each result of the backward op, the arguments whose gradient it is.
        self._owners = {
            result: [n for n in given if f"d{self._also.get(n, n)}" == result]
            for result in self._results
        }

    def save(self, ctx: Any, given: dict[str, Any], results: dict[str, Tensor]) -> None:
        """Saves what the backward op takes."""
        own = given | results
        if self._instead is not None:
            own |= self._instead(given, results)
        ctx.save_for_backward(*(own[name] for name in self._saved))
        kinds = self._op.kinds
        absent = [n for n in self._incoming if n in kinds and kinds[n].is_absent(given)]
        ctx.mark_non_differentiable(*(results[name] for name in (*self._constant, *absent)))
        ctx.set_materialize_grads(False)
        ctx.numbers = {name: given[name] for name in self._numbers}
        ctx.in_place, ctx.is_spent = given.get("in_place", False), False

    def backward(
        self, ctx: Any, grads: dict[str, Tensor | None], needs: dict[str, bool]
    ) -> dict[str, Tensor | None]:
        """Calls the backward op, and returns the gradients by the names of the arguments."""
        if ctx.is_spent:
            raise RuntimeError(
                f"a second backward of {self._op.name} with inplace_backward=True: the first wrote "
                "the gradient over the logits; use inplace_backward=False"
            )
        incoming = {f"d{name}": grads[name] for name in self._incoming}
        if incoming[self._required] is None and not self._alone:
            # A gradient of other results alone: that of the first is 0.
            some = next((grad for grad in incoming.values() if grad is not None), None)
            incoming[self._required] = None if some is None else some.new_zeros(())
        if incoming[self._required] is None:
            passed = ((incoming[grad], names) for grad, names in self._alone.items())
            return {name: grad for grad, names in passed for name in names}
        wanted = {
            result: any(needs[name] for name in owners) for result, owners in self._owners.items()
        }
        if not any(wanted.values()):
            return {}
        if ctx.in_place and torch.is_grad_enabled():
            raise RuntimeError(
                f"{self._op.name} with inplace_backward=True writes the gradient over the logits, "
                "which create_graph=True and torch.func may still need; use inplace_backward=False"
            )
        named = incoming | dict(zip(self._saved, ctx.saved_tensors)) | ctx.numbers
        if ctx.in_place:
            return self._over_the_first(ctx, named)
        named |= {f"want_{result}": is_wanted for result, is_wanted in wanted.items()}
        if self._scalars is not None:
            named |= self._scalars(ctx.numbers, needs)
        found = self._backward(*(named[name] for name in self._arguments))
        found = found if isinstance(found, tuple) else (found,)
        return {
            name: grad
            for result, grad in zip(self._results, found)
            for name in self._owners[result]
        }

    def _over_the_first(self, ctx: Any, named: dict[str, Any]) -> dict[str, Tensor | None]:
        ctx.is_spent = True
        name = next(iter(self._op.kinds))
        op = getattr(torch.ops.headroom, f"{self._op.name}_backward_")
        named["grad"] = named[name]
        op(*(named[each] for each in _names(op.default._schema.arguments)))
        return {name: named[name].detach()}


ROW_OPS: dict[str, RowOp] = {}  # the tests call each of them, and the ops of its gradient


def row_op(
    name: str,
    kinds: dict[str, Kind],
    *,
    sizes: Callable[..., dict[str, Any]] | None = None,
    check: Callable[..., None] = lambda **given: None,
    results: Callable[..., Any] | None = None,
    gradients: Callable[..., Any] | None = None,
    gradient: Callable[[Gradient], Any] = lambda derived: derived,
    flops: Callable[..., int] | None = None,
    backward_flops: Callable[..., int] | None = None,
    again: Callable[..., int] | None = None,
    **rules: Any,
) -> RowOp:
    """Registers the fake, the gradient and the FLOPs of ``headroom::name`` and of the ops of its
    gradient. Functions take arguments by their names in the schema.

    Args:
        name: the op.
        kinds: its tensors, results too.
        sizes: returns sizes that shapes of ``kinds`` name.
        check: raises what ``kinds`` does not say.
        results, gradients: return the empty results of the op and of its backward op, where they do
            not follow from ``kinds``.
        gradient: returns what has ``save`` and ``backward``, from the :class:`Gradient` that
            follows from the schemas.
        flops, backward_flops, again: of the op, of its backward op, and of what that computes
            again: see :func:`register_flops`.
        rules: of :class:`Gradient`.
    """
    op = RowOp(name, kinds, sizes)

    def checked(given: Given) -> Sizes:
        found = op.check(given)
        check(**given)
        return found

    def fake_of(name: str, empty: Callable[..., Tensor], own: Callable[..., Any] | None) -> Any:
        names = _names(getattr(torch.ops.headroom, name).default._schema.returns)

        def fake(**given: Any) -> Any:
            found = checked(given)
            if own is not None:
                return own(**given)
            tensors = tuple(empty(each, given, found) for each in names)
            return tensors if len(tensors) > 1 else tensors[0] if tensors else None

        op.ops.append(name)
        return fake

    derived = gradient(Gradient(op, **rules))
    fake = fake_of(name, op.empty, results)
    differentiable(name, fake=fake, save=derived.save, backward=derived.backward, flops=flops)
    backward = f"{name}_backward"
    refuse_derivative(backward, fake=fake_of(backward, op.empty_gradient, gradients))
    if backward_flops is not None:
        register_flops(backward, backward_flops, again)
    if hasattr(torch.ops.headroom, f"{backward}_"):
        register_fake(f"{backward}_", fake_of(f"{backward}_", op.empty_gradient, gradients))
        complete(f"{backward}_")
    ROW_OPS[name] = op
    return op
