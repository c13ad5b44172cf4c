"""Models in 16 bits with some modules in float32: :func:`cast_model`."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._pytree import tree_map_only

from .._core.registration import FLOATS

__all__ = ["cast_model"]

CASTABLE = (*FLOATS, torch.float64)
# By name, because libraries write their own: LlamaRMSNorm, T5LayerNorm.
NORMS = ("*RMSNorm", "*LayerNorm", "*GroupNorm", "*BatchNorm?d", "*InstanceNorm?d")


def cast_model(
    model: nn.Module,
    dtype: torch.dtype = torch.bfloat16,
    keep: Iterable[nn.Module | type[nn.Module] | str] = (),
) -> nn.Module:
    """Casts a model's parameters and buffers in place, and keeps its norms in float32.

    Kept are BatchNorm, InstanceNorm, LayerNorm, GroupNorm and RMSNorm, classes of other libraries
    that are named so (``LlamaRMSNorm``), and what ``keep`` says, with all that is inside. A kept
    module computes in float32: its inputs are cast to float32 and its outputs to ``dtype``, so the
    modules around it need not know.

    Parameters stay the same objects, so an optimizer may have been made before; tensors that share
    memory go on sharing it, and if one of them is kept, all are, with their modules. Hooks do the
    casts: ``state_dict()`` has the same keys as before, in two dtypes, ``torch.compile`` sees
    through them, and copies and pickles of the model have them too. A further call starts anew, so
    ``cast_model(model, torch.float32)`` takes everything back, except the bits that 16 do not have.

    Call it before :func:`~headroom.optim.release_gradients` and other hooks on parameters.

    Example::

        headroom.cast_model(model, torch.bfloat16, keep=[torch.nn.Embedding])
        optimizer = headroom.optim.AdamW(model.parameters(), state_dtype=torch.float32)

    Args:
        model: any module. Shard it (FSDP2) and wrap it (DDP) afterwards; ``fully_shard`` wants one
            dtype at a time, so the kept modules come first and on their own.
        dtype: bfloat16, float16 or float32. Integer and complex tensors stay as they are.
        keep: modules, classes of modules, and names, with ``*``, ``?`` and ``[...]`` as in
            :mod:`fnmatch`. A name is that of a module, or of a parameter or buffer
            (``"*.inv_freq"``), which then stays in float32 without a cast around its module.

    Returns:
        The model.

    Raises:
        ValueError: a dtype that is not one of the three, or something to keep that the model does
            not have.
        TypeError: ``keep`` has something else, or the model has DTensors already.

    What it cannot do: the outputs of a kept last layer come in ``dtype``, too; a module that uses
    another's weight directly, as ``F.linear(x, self.embedding.weight)``, gets that in its dtype.
    """
    if dtype not in FLOATS:
        raise ValueError(f"dtype must be one of {FLOATS}, got {dtype}")
    keep = [keep] if isinstance(keep, (str, type, nn.Module)) else list(keep)
    tensors = list(_tensors(model))
    for _, name, tensor in tensors:
        if isinstance(tensor, DTensor):
            raise TypeError(f"'{name}' is a DTensor: call cast_model() before fully_shard()")
    kept, kept_tensors = _chosen(model, tensors, keep)
    shared = _shared(tensors)
    _spread(kept, shared)
    for users in shared:
        in_float32 = any(user in kept or tensor in kept_tensors for user, tensor in users)
        _cast([tensor for _, tensor in users], torch.float32 if in_float32 else dtype)
    _set_hooks(model, kept if dtype != torch.float32 else set(), dtype)
    return model


def _tensors(model: nn.Module) -> Iterator[tuple[nn.Module, str, Tensor]]:
    """Yields the tensors that may be cast, once for every module that holds them."""
    for prefix, module in model.named_modules():
        own = [*module.named_parameters(recurse=False, remove_duplicate=False)]
        own += module.named_buffers(recurse=False, remove_duplicate=False)
        for name, tensor in own:
            if tensor.dtype in CASTABLE and tensor.layout == torch.strided:
                yield module, f"{prefix}.{name}" if prefix else name, tensor


def _chosen(
    model: nn.Module,
    tensors: list[tuple[nn.Module, str, Tensor]],
    keep: list[nn.Module | type[nn.Module] | str],
) -> tuple[set[nn.Module], set[Tensor]]:
    """The modules that are kept, those inside of them too, and the tensors."""
    modules = list(model.named_modules(remove_duplicate=False))
    roots = {module for _, module in modules if _is_norm(module)}
    found = set()
    for one in keep:
        if isinstance(one, str):
            mine = {module for name, module in modules if fnmatchcase(name, one)}
            alone = {tensor for _, name, tensor in tensors if fnmatchcase(name, one)}
            found |= alone
            if not mine and not alone:
                raise ValueError(f"keep: the model has nothing with the name {one!r}")
        elif isinstance(one, type) and issubclass(one, nn.Module):
            mine = {module for _, module in modules if isinstance(module, one)}
        elif isinstance(one, nn.Module):
            mine = {module for _, module in modules if module is one}
            if not mine:
                raise ValueError(f"keep: the model does not have this {type(one).__name__}")
        else:
            raise TypeError(f"keep wants modules, their classes and names, got {one!r}")
        roots |= mine
    return {inner for root in roots for inner in root.modules()}, found


def _is_norm(module: nn.Module) -> bool:
    if isinstance(module, (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)):
        return True
    return any(fnmatchcase(type(module).__name__, pattern) for pattern in NORMS)


def _shared(tensors: list[tuple[nn.Module, str, Tensor]]) -> list[list[tuple[nn.Module, Tensor]]]:
    """Tensors that overlap in memory, with their modules. (Those of a file or of a flat buffer may
    have one storage and not overlap.)"""
    runs = sorted(
        (tensor.untyped_storage()._cdata, *_extent(tensor), index)
        for index, (_, _, tensor) in enumerate(tensors)
    )
    shared: list[list[tuple[nn.Module, Tensor]]] = []
    place = None, 0
    for storage, start, end, index in runs:
        if storage != place[0] or start >= place[1]:
            shared.append([])
            place = storage, end
        shared[-1].append((tensors[index][0], tensors[index][2]))
        place = storage, max(end, place[1])
    return shared


def _extent(tensor: Tensor) -> tuple[int, int]:
    """Returns its first byte in its storage, and the byte after its last one."""
    start = tensor.storage_offset()
    steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    end = start + (steps + 1 if tensor.numel() else 0)
    return start * tensor.element_size(), end * tensor.element_size()


def _spread(kept: set[nn.Module], shared: list[list[tuple[nn.Module, Tensor]]]) -> None:
    """Keeps the modules that share memory with a kept one."""
    grows = True
    while grows:
        grows = False
        for users in shared:
            if any(user in kept for user, _ in users):
                more = {inner for user, _ in users for inner in user.modules()} - kept
                kept |= more
                grows = grows or bool(more)


@torch.no_grad()
def _cast(tensors: list[Tensor], dtype: torch.dtype) -> None:
    """Casts tensors that overlap in memory so that they still overlap in the same way."""
    tensors = list(dict.fromkeys(tensors))
    if {tensor.dtype for tensor in tensors} == {dtype}:
        return
    if len(tensors) == 1:
        new = [tensors[0].data.to(dtype)]
    else:
        size = tensors[0].element_size()
        start = min(_extent(tensor)[0] for tensor in tensors) // size
        end = max(_extent(tensor)[1] for tensor in tensors) // size
        memory = tensors[0].data.as_strided((end - start,), (1,), start).to(dtype)
        new = [memory.as_strided(t.shape, t.stride(), t.storage_offset() - start) for t in tensors]
    for tensor, value in zip(tensors, new):
        grad, tensor.grad = tensor.grad, None
        tensor.data = value
        if grad is not None:
            tensor.grad = grad.to(dtype)


# ---- Hooks: functions of this module, so that copies and pickles of a model have them ------------


def _set_hooks(model: nn.Module, kept: set[nn.Module], dtype: torch.dtype) -> None:
    inner = {child for module in kept for child in module.modules() if child is not module}
    for module in model.modules():
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for key in [key for key, hook in hooks.items() if _is_ours(hook)]:
                del hooks[key]
        if module in kept and module not in inner:
            module.register_forward_pre_hook(_cast_inputs, with_kwargs=True)
            module.register_forward_hook(functools.partial(_cast_outputs, dtype))


def _is_ours(hook: Any) -> bool:
    return getattr(hook, "func", hook) in (_cast_inputs, _cast_outputs)


def _cast_inputs(module: nn.Module, args: Any, kwargs: Any) -> Any:
    return tree_map_only(Tensor, _to_float32, (args, kwargs))


def _to_float32(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in FLOATS else tensor


def _cast_outputs(dtype: torch.dtype, module: nn.Module, args: Any, outputs: Any) -> Any:
    return tree_map_only(Tensor, functools.partial(_from_float32, dtype), outputs)


def _from_float32(dtype: torch.dtype, tensor: Tensor) -> Tensor:
    return tensor.to(dtype) if tensor.dtype == torch.float32 else tensor
