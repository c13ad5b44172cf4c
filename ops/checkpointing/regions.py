"""Checkpointed regions: torch's, with a check of what is recomputed."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import _StopRecomputationError, noop_context_fn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from .._core.recompute import Saving, check_version
from .._core.surroundings import again, later_calls
from ..host.saved import saved_on_host
from .in_8_bits import saved_in_8_bits
from .verify import verified_region, verified_results


def checkpoint(
    function: Callable[..., Any] | None = None,
    *args: Any,
    use_reentrant: bool = False,
    preserve_rng_state: bool = True,
    context_fn: Callable[[], tuple[Any, Any]] = noop_context_fn,
    determinism_check: str = "default",
    debug: bool = False,
    early_stop: bool = True,
    verify: bool = False,
    host: bool = False,
    in_8_bits: bool = False,
    **kwargs: Any,
) -> Any:
    """Returns ``function(*args, **kwargs)``, and keeps its inputs instead of its activations.

    The backward pass calls the function again. All but ``verify``, ``host`` and
    ``in_8_bits`` goes to :func:`torch.utils.checkpoint.checkpoint`, whose documentation says the
    rest.

    Args:
        function: the region; with None the result is a decorator.
        use_reentrant: torch's older way, which drops everything and has more limits. Unlike in
            torch, False unless given.
        preserve_rng_state: restores the generators for the second call, so that dropout drops the
            same elements.
        context_fn: returns two context managers, for the first and for the second call.
        determinism_check: "default" compares shapes, dtypes and devices, "none" nothing.
        debug: has an error show the operators of both calls.
        early_stop: ends the second call as soon as everything needed has been computed.
        verify: also compares values. Every tensor that is dropped is read once for its checksums,
            and once more when it has been recomputed; what differs raises in the backward pass.
            With ``use_reentrant`` the results are compared. Costs 0.1 % of the bytes that are
            dropped, and waits for the device in the backward pass.
        host: holds the inputs that require a gradient in the host arena until the backward pass
            calls the function; while torch.compile traces it, they stay on the device.
        in_8_bits: holds those that are given by position in 8 bits, so that what is computed
            again, and gradients with it, are those of inputs that were rounded by
            :func:`headroom.functional.quantize_blocks` in blocks of 64. With ``host`` it is the
            codes that leave the device.

    Raises:
        HostMemoryError: with ``host``, when the arena has no room.
        RecomputeError: with ``verify``, in the backward pass: names the module whose operation
            saved the tensor, the tensor, and the elements among which the first difference is.
        RuntimeError: with ``verify`` or ``in_8_bits``, while torch.compile traces the call; with
            ``in_8_bits``, in a backward pass with ``create_graph=True``.
        ValueError: ``verify`` and ``in_8_bits`` are both set.
    """
    options: dict[str, Any] = {
        "use_reentrant": use_reentrant,
        "preserve_rng_state": preserve_rng_state,
        "determinism_check": determinism_check,
        "debug": debug,
        "early_stop": early_stop,
    }
    if context_fn is not noop_context_fn:
        options["context_fn"] = context_fn
    if function is None:
        options |= {"verify": verify, "host": host, "in_8_bits": in_8_bits} | kwargs
        return lambda f: functools.wraps(f)(functools.partial(checkpointed, f, options))
    if not torch.compiler.is_compiling():
        function = again(function)
    if host and not torch.compiler.is_compiling():
        with saved_on_host(stay=(*args, *kwargs.values())):
            options |= {"verify": verify, "in_8_bits": in_8_bits}
            return checkpoint(function, *args, **options, **kwargs)
    if in_8_bits:
        if verify:
            raise ValueError(
                "checkpoint: verify and in_8_bits are both set, but what is computed again from "
                "rounded inputs always differs; verify with inputs as they are"
            )
        with saved_in_8_bits(x for x in args if isinstance(x, Tensor) and x.requires_grad):
            return checkpoint(function, *args, **options, **kwargs)
    run = function
    if not (use_reentrant or torch.compiler.is_compiling()):
        run = later_calls(function, _completed)
    if not verify:
        return torch_checkpoint(run, *args, **options, **kwargs)
    if torch.compiler.is_compiling():
        raise RuntimeError(
            "checkpoint: verify=True compares values, which torch.compile does not trace; use it "
            "in eager mode, and verify=False in the compiled function"
        )
    if use_reentrant:
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        return torch_checkpoint(verified_results(function), *args, **options, **kwargs)
    options["context_fn"] = functools.partial(_verified_contexts, function, context_fn)
    return torch_checkpoint(run, *args, **options, **kwargs)


OPTIONS = frozenset(inspect.signature(checkpoint).parameters)


def checkpointed(
    function: Callable[..., Any], options: Mapping[str, Any], /, *args: Any, **kwargs: Any
) -> Any:
    """Returns ``checkpoint(function, *args, **options, **kwargs)``, for a function that may have
    keywords of the same names as options."""
    if own := {name: kwargs.pop(name) for name in OPTIONS & kwargs.keys()}:
        function = functools.partial(function, **own)
    return checkpoint(function, *args, **options, **kwargs)


def _verified_contexts(
    function: Callable[..., Any], context_fn: Callable[[], tuple[Any, Any]]
) -> tuple[Any, Any]:
    first, second = context_fn()

    @contextmanager
    def verified() -> Iterator[None]:
        with verified_region(function), first:
            yield

    return verified(), second


@contextmanager
def _completed() -> Iterator[None]:
    """Lets the operation that saves the last tensor end before torch ends the run in which tensors
    are computed again, if it may still have to write what it saves.

    Raises:
        RuntimeError: a tensor has been changed in place since it was saved.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    if hooks is None:
        yield
        return
    inner_pack, inner_unpack = hooks
    saving, seen = Saving(), []
    last: Tensor | None = None

    def pack(x: Tensor) -> Any:
        nonlocal last
        if saving.follow(x) and last is not None:
            raise _StopRecomputationError
        version = x._version
        try:
            packed = inner_pack(x)
        except _StopRecomputationError:
            if not saving.writes:
                raise
            packed = last = x.detach()
        if isinstance(packed, Tensor):
            seen.append((weakref.ref(packed), version))
        return packed

    functools.update_wrapper(pack, inner_pack)  # checkpoints are recognized by their pack hook
    try:
        with saved_tensors_hooks(pack, inner_unpack):
            yield
    except _StopRecomputationError:
        _check_versions(seen)
        raise
    _check_versions(seen)


def _check_versions(seen: Sequence[tuple[weakref.ref[Tensor], int]]) -> None:
    for ref, version in seen:
        if (x := ref()) is not None:  # else nobody wants it
            check_version(x, version)


def _run(modules: Sequence[Callable[[Any], Any]], x: Any) -> Any:
    for module in modules:
        x = module(x)
    return x


def checkpoint_sequential(
    functions: nn.Sequential | Sequence[Callable[[Any], Any]],
    segments: int,
    input: Any,
    use_reentrant: bool = False,
    **options: Any,
) -> Any:
    """Returns the result of ``functions`` called one after the other, checkpointed in segments.

    Args:
        functions: a Sequential, or a list of functions of one argument.
        segments: how many segments of ``len(functions) // segments`` functions there are. The
            last has the rest too, and keeps its activations, because the backward pass starts
            with it.
        input: the argument of the first function.
        use_reentrant: as in :func:`checkpoint`.
        **options: options of :func:`checkpoint`, ``verify`` among them.

    Raises:
        ValueError: ``segments`` is not from 1 to the number of functions.
        RecomputeError: as in :func:`checkpoint`.
    """
    modules = list(functions.children()) if isinstance(functions, nn.Sequential) else [*functions]
    if not 1 <= segments <= max(1, len(modules)):
        raise ValueError(
            f"segments is {segments}, wanted 1 to {max(1, len(modules))}, the number of functions"
        )
    size = max(1, len(modules)) // segments
    options["use_reentrant"] = use_reentrant
    for start in range(0, size * (segments - 1), size):
        run = functools.partial(_run, modules[start : start + size])
        input = checkpoint(run, input, **options)
    return _run(modules[size * (segments - 1) :], input)
