"""Completes ops that are registered from C++.

:func:`complete` is for ops without a derivative: it bumps version counters, and raises where a
gradient would be lost. :func:`differentiable` is for ops with one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad

from . import binaries  # noqa: F401  (registers the ops)

FLOATS = (torch.float32, torch.bfloat16, torch.float16)  # what the kernels read and write

_library = torch.library.Library("headroom", "IMPL")


def require(condition: bool, message: str) -> None:
    """Raises in a fake, while an op is traced, the error that the op would raise when it runs."""
    if not condition:
        raise RuntimeError(message)


def binder(name: str) -> Callable[[tuple, dict[str, Any]], dict[str, Any]]:
    """Returns a function that names the arguments of a call of ``headroom::name`` as its schema
    does. The dispatcher leaves out arguments at the end that have their default values."""
    arguments = getattr(torch.ops.headroom, name).default._schema.arguments
    names = [a.name for a in arguments]
    defaults = {a.name: a.default_value for a in arguments if a.has_default_value()}
    return lambda args, options: defaults | dict(zip(names, args)) | options


def by_name(name: str) -> Callable[..., Any]:
    """Returns ``headroom::name`` as a function of named arguments, which ignores those that are not
    in its schema."""
    op = getattr(torch.ops.headroom, name)
    names = tuple(argument.name for argument in op.default._schema.arguments)
    return lambda **given: op(*[given[each] for each in names])


def register_fake(name: str, fake: Callable[..., Any], on_host: Collection[str] = ()) -> None:
    """Gives ``headroom::name`` its fake, which takes arguments by their names in the schema, and
    refuses tensors on several devices, as the op does, but for those that it wants on the host.

    A tensor on "meta" would else let the fake run on real ones, and return memory that nobody
    wrote.
    """
    bound = binder(name)

    def on_one_device(*args: Any, **options: Any) -> Any:
        named = bound(args, options)
        given = {key: x for key, x in named.items() if isinstance(x, Tensor) and key not in on_host}
        first = next(iter(given), "")
        for key, tensor in given.items():
            device = given[first].device
            require(
                tensor.device == device,
                f"{key} is on {tensor.device}, but {first} is on {device}",
            )
        return fake(**named)

    torch.library.register_fake(f"headroom::{name}", on_one_device)


def _check_required(required: list[tuple[int, str]], args: tuple) -> None:
    """Raises where an argument that must be a tensor is None, which the dispatcher lets pass."""
    for k, name in required:
        if k < len(args) and args[k] is None:
            raise TypeError(f"{name} is None, wanted a tensor")


def _required_tensors(op: Any) -> list[tuple[int, str]]:
    arguments = enumerate(op._schema.arguments)
    return [(k, a.name) for k, a in arguments if str(a.type) == "Tensor" and not a.kwarg_only]


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        yield from (item for item in value if isinstance(item, Tensor))


def complete(name: str, spared: Callable[[dict[str, Any]], set[str]] = lambda given: set()) -> None:
    """Makes ``headroom::name`` bump the version counters of the tensors that its schema marks as
    written, and refuse tensors that require grad outside ``torch.no_grad()``.

    ``spared`` gets the arguments of a call and returns the names of those that this call does not
    write although the schema marks them.
    """
    op = getattr(torch.ops.headroom, name).default
    arguments = op._schema.arguments
    positional = [argument.name for argument in arguments if not argument.kwarg_only]
    required = _required_tensors(op)
    written = [a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write]

    def before(keyset: torch._C.DispatchKeySet, *args: Any, **options: Any) -> Any:
        _check_required(required, args)
        given = dict(zip(positional, args)) | options
        if torch.is_grad_enabled() and any(
            tensor.requires_grad for value in given.values() for tensor in _tensors(value)
        ):
            raise RuntimeError(
                f"headroom::{name} has no derivative, but one of its tensors requires grad; call "
                "it under torch.no_grad(), or detach the tensor"
            )
        skipped = spared(given)
        torch.autograd.graph.increment_version(
            [t for key in written if key not in skipped for t in _tensors(given.get(key))]
        )
        return op.redispatch(keyset & torch._C._after_ADInplaceOrView_keyset, *args, **options)

    _library.impl(name, before, "ADInplaceOrView", with_keyset=True)


@contextlib.contextmanager
def _outer_gradients() -> Iterator[None]:
    """Lets the outer of nested transforms of ``torch.func`` differentiate what runs in here, where
    an autograd function has turned gradients off.
    """
    if torch._C._are_functorch_transforms_active():
        with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True):
            yield
    else:
        yield


def _is_dual(tensor: Tensor) -> bool:
    return forward_ad.unpack_dual(tensor).tangent is not None


def _autograd_kernel(
    name: str, save: Callable[..., None], backward: Callable[..., dict[str, Any]]
) -> Callable[..., Any]:
    """Returns the kernel of ``headroom::name`` that records its gradient.

    ``torch.library.register_autograd`` makes one too, but it does not work under the transforms of
    ``torch.func``, drops tangents silently, and names its nodes after itself.
    """
    op = getattr(torch.ops.headroom, name).default
    positional = [argument for argument in op._schema.arguments if not argument.kwarg_only]
    names = [argument.name for argument in positional]
    results = [result.name for result in op._schema.returns]
    required, bound = _required_tensors(op), binder(name)

    def run(keyset: torch._C.DispatchKeySet, args: tuple, options: dict[str, Any]) -> Any:
        return op.redispatch(keyset & torch._C._after_autograd_keyset, *args, **options)

    # What is not an argument of the op comes last, so that ctx.needs_input_grad counts the op's.
    # A backward pass never changes the context: several threads may run through one graph.
    def forward(ctx: Any, *given: Any) -> Any:
        *args, keyset, options = given
        with torch._C._AutoDispatchBelowAutograd():
            with _outer_gradients():
                output = run(keyset, tuple(args), options)
        every = output if isinstance(output, tuple) else (output,)
        save(ctx, bound(tuple(args), options), dict(zip(results, every)))
        return output

    def backward_of_all(ctx: Any, *grads: Any) -> tuple:
        needs = dict(zip(names, ctx.needs_input_grad))
        found = backward(ctx, dict(zip(results, grads)), needs)
        wanted = (found.get(each) if needs[each] else None for each in names)
        return *wanted, None, None

    # A function of a single level sees tensors as this level of torch.func wraps them; `run` hands
    # them to the level below, as the kernels of torch's own ops do.
    function = type(
        f"headroom::{name}_forward",
        (torch.autograd.function._SingleLevelFunction,),
        {"forward": staticmethod(forward), "backward": staticmethod(backward_of_all)},
    )
    function._backward_cls.__name__ = f"headroom::{name}_backward"  # what a profile shows

    def kernel(keyset: torch._C.DispatchKeySet, *args: Any, **options: Any) -> Any:
        _check_required(required, args)
        if forward_ad._current_level >= 0 and any(map(_is_dual, _tensors([*args]))):
            raise NotImplementedError(
                f"headroom::{name} has no forward-mode derivative; use torch.func.vjp or .grad, "
                "or torch's own op"
            )
        if not (torch.is_grad_enabled() and torch._C._any_requires_grad(*args)):
            with torch._C._AutoDispatchBelowAutograd():
                return run(keyset, args, options)
        args += tuple(argument.default_value for argument in positional[len(args) :])
        if not torch._C._are_functorch_transforms_active():
            return function.apply(*args, keyset, options)
        with enable_single_level_autograd_function():
            return function.apply(*args, keyset, options)

    return kernel


def register_flops(
    name: str, flops: Callable[..., int], again: Callable[..., int] | None = None
) -> None:
    """Tells :class:`torch.utils.flop_counter.FlopCounterMode` and the profiler how many operations
    ``headroom::name`` does, and how many of them compute something again. The functions take the
    shapes of tensors and the other arguments by their names."""
    from torch.utils.flop_counter import register_flop_formula, shape_wrapper  # heavy

    bound = binder(name)

    def named(function: Callable[..., int]) -> Callable[..., int]:
        return lambda *args, out_shape=None, **options: function(**bound(args, options))

    register_flop_formula(getattr(torch.ops.headroom, name))(named(flops))
    if again is not None:
        AGAIN[f"headroom::{name}"] = shape_wrapper(named(again))


# By the name of an op: its operations that compute something again, from its arguments.
AGAIN: dict[str, Callable[..., int]] = {}


def differentiable(
    name: str,
    *,
    fake: Callable[..., Any],
    save: Callable[[Any, dict[str, Any], dict[str, Tensor]], None],
    backward: Callable[[Any, dict[str, Tensor | None], dict[str, bool]], dict[str, Tensor | None]],
    flops: Callable[..., int] | None = None,
    on_host: Collection[str] = (),
) -> None:
    """Gives ``headroom::name`` its fake, its gradient and its count of floating-point operations.
    Arguments and results are known by their names in the schema.

    The gradient works in ``backward()``, ``torch.autograd.grad`` and under ``torch.func.grad``,
    ``vjp``, ``jacrev`` and ``vmap`` of them (one call per sample); ``jvp`` raises. The profiler
    shows it as ``headroom::name_backward``. If ``backward`` calls an op of its own, give that op to
    :func:`refuse_derivative`, so that a second derivative raises.

    Args:
        name: an op that writes none of its arguments and takes no lists of tensors.
        fake: takes the op's arguments and returns empty tensors of the shapes, dtypes and strides
            of its results.
        save: ``save(ctx, given, results)`` saves what ``backward`` needs. Tensors are saved with
            ``ctx.save_for_backward`` alone, so that hooks and checkpoints see them.
        backward: ``backward(ctx, grads, needs)`` gets the gradients of the results, and which
            arguments need one, and returns these. It reads ``ctx.saved_tensors`` once, because each
            reading unpacks them again.
        flops: as in :func:`register_flops`. None for ops that multiply no matrices.
        on_host: as in :func:`register_fake`.
    """
    register_fake(name, fake, on_host)
    kernel = _autograd_kernel(name, save, backward)
    _library.impl(name, kernel, "Autograd", with_keyset=True)
    if flops is not None:
        register_flops(name, flops)


def no_second_derivative(name: str) -> RuntimeError:
    """Returns the error of ``headroom::name``, which computes a gradient, where its derivative is
    asked for."""
    return RuntimeError(
        f"headroom::{name} has no derivative, so a second derivative cannot be computed; use "
        "torch's own op where one is needed"
    )


def refuse_derivative(
    name: str, *, fake: Callable[..., Any], on_host: Collection[str] = ()
) -> None:
    """Gives ``headroom::name``, which computes a gradient, its fake and, as its own derivative, an
    error. So ``create_graph=True`` works until someone asks for the second derivative.
    ``on_host`` is as in :func:`register_fake`.
    """

    def backward(*_: Any) -> Any:
        raise no_second_derivative(name)

    differentiable(name, fake=fake, save=lambda *_: None, backward=backward, on_host=on_host)
