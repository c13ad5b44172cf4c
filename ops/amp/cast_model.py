"""Casts models to 16 bits with some modules in float32: :func:`cast_model`, :func:`cast_report`."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._pytree import tree_map_only

from .._core.grouping import grouped
from .._core.overlap import overlapping
from .._core.registration import FLOATS

CASTABLE = (*FLOATS, torch.float64)
# By name, because libraries have classes of their own: LlamaRMSNorm, T5LayerNorm.
NORMS = ("*RMSNorm", "*LayerNorm", "*GroupNorm", "*BatchNorm?d", "*InstanceNorm?d")
# Constants that are multiplied by a position, a distance or a time step of thousands, which
# multiplies their rounding errors too, and tables made from them. Tables of embeddings that are
# added to activations (``positional_embedding``, ``pe``) are not among them: 16 bits are as good
# for them as for activations, and a sum with float32 would turn the activations into float32.
WIDE = (
    *("*freq*", "*timescale*", "theta", "thetas", "omega", "omegas", "bands"),
    *("position", "positions", "position_ids", "*angles"),
    *("cos", "sin", "*_cos", "*_sin", "cos_*", "sin_*"),
    *("*alibi*", "slopes"),
    *("*timesteps*", "*alphas*", "betas", "sigmas"),
)


def cast_model(
    model: nn.Module,
    dtype: torch.dtype = torch.bfloat16,
    keep: Iterable[nn.Module | type[nn.Module] | str] = (),
    *,
    cast: Iterable[str] = (),
) -> nn.Module:
    """Casts a model's parameters and buffers in place, and keeps its norms in float32.

    It keeps BatchNorm, InstanceNorm, LayerNorm, GroupNorm and RMSNorm, classes of other libraries
    with such names (``LlamaRMSNorm``), and the modules that ``keep`` names, with all modules inside
    them. A kept module computes in float32: its inputs are cast to float32 and its outputs to
    ``dtype``, so that the modules around it work as before.

    Buffers that hold frequencies or positions stay in float32 too: a position of 8,191 times the
    ``inv_freq`` of RoPE in bfloat16 is an angle that is wrong by up to 1.46 rad. They are found by
    their names: ``*freq*``, ``*timescale*``, ``theta``, ``omega``, ``bands``, ``positions``,
    ``position_ids``, ``*angles``, ``cos`` and ``sin`` (also ``cos_*``, ``*_sin``, ...),
    ``*alibi*``, ``slopes``, and the noise schedules ``*timesteps*``, ``*alphas*``, ``betas`` and
    ``sigmas``. The same holds for parameters of these names that do not require gradients. Their
    modules do not change. :func:`cast_report` lists the buffers of a model, to find buffers with
    other names.

    Parameters stay the same objects, so the optimizer may already exist. If a tensor that several
    modules have is kept, all of these are kept. Hooks do the casts:
    ``state_dict()`` has the same keys as before, in two dtypes, ``torch.compile`` traces them, and
    copies and pickles of the model have them too. A further call starts anew, so that
    ``cast_model(model, torch.float32)`` undoes everything except the loss of bits, and that a call
    which was interrupted after some tensors can be repeated.

    Call it before :func:`~headroom.release_gradients` and other hooks on parameters.

    Example::

        headroom.cast_model(model, torch.bfloat16)  # keep=["lm_head", torch.nn.Embedding]
        optimizer = headroom.optim.AdamW(model.parameters(), state_dtype=torch.float32)

    Args:
        model: any module. Shard it (FSDP2) and wrap it (DDP) afterwards; ``fully_shard`` wants one
            dtype at a time, so the kept modules come first and on their own.
        dtype: bfloat16, float16 or float32. Integer and complex tensors stay as they are.
        keep: modules, classes of modules, and names, with ``*``, ``?`` and ``[...]`` as in
            :mod:`fnmatch`. A name is that of a module, or of a parameter or buffer
            (``"*.latent_mean"``), which then stays in float32 without a cast around its module.
        cast: names of buffers to cast although they are named like frequencies or positions. A
            model whose own code multiplies activations by a float32 buffer, and does not cast the
            product back, fails at the next matrix product; this is the way out.

    Returns:
        The model.

    Raises:
        ValueError: a dtype that is not one of the three, something to keep or to cast that the
            model does not have, or tensors that share memory without being one tensor.
        TypeError: ``keep`` or ``cast`` has something else, or the model has DTensors already.

    What it cannot do: the outputs of a kept last layer come in ``dtype``, too; a module that uses
    another's weight directly, as ``F.linear(x, self.embedding.weight)``, gets that in its dtype.
    """
    if dtype not in FLOATS:
        raise ValueError(f"dtype must be one of {FLOATS}, got {dtype}")
    keep = [keep] if isinstance(keep, (str, type, nn.Module)) else list(keep)
    cast = [cast] if isinstance(cast, str) else list(cast)
    tensors = list(_tensors(model))
    for _, name, tensor in tensors:
        if isinstance(tensor, DTensor):
            raise TypeError(f"'{name}' is a DTensor: call cast_model() before fully_shard()")
    kept_modules, kept_tensors = _chosen(model, tensors, keep)
    kept_tensors |= _wide(tensors, cast)
    owners = _owners(tensors)
    _spread(kept_modules, owners.values())
    for tensor, modules in owners.items():
        in_float32 = tensor in kept_tensors or not kept_modules.isdisjoint(modules)
        _cast(tensor, torch.float32 if in_float32 else dtype)
    _set_hooks(model, kept_modules if dtype != torch.float32 else set(), dtype)
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
    """Returns the modules that are kept, with the modules inside them, and the tensors."""
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
            if not mine:
                raise ValueError(f"keep: the model has no module of the class {one.__name__}")
        elif isinstance(one, nn.Module):
            mine = {module for _, module in modules if module is one}
            if not mine:
                raise ValueError(f"keep: the model does not have this {type(one).__name__}")
        else:
            raise TypeError(f"keep wants modules, their classes and names, got {one!r}")
        roots |= mine
    return {inner for root in roots for inner in root.modules()}, found


def _wide(tensors: list[tuple[nn.Module, str, Tensor]], cast: list[str]) -> set[Tensor]:
    """Returns the tensors that stay in float32 because they hold frequencies or positions."""
    named = {}
    for _, name, tensor in tensors:
        last = name.rpartition(".")[2]
        # A tensor in 16 bits has been rounded already, or is meant to be in 16 bits.
        wide = tensor.dtype in (torch.float32, torch.float64) and not tensor.requires_grad
        if wide and any(fnmatchcase(last, pattern) for pattern in WIDE):
            named[name] = tensor
    cast_too = set()
    for one in cast:
        if not isinstance(one, str):
            raise TypeError(f"cast wants names of buffers, got {one!r}")
        found = {name for name in named if fnmatchcase(name, one)}
        if not found and not any(fnmatchcase(name, one) for _, name, _ in tensors):
            raise ValueError(f"cast: the model has no parameter or buffer with the name {one!r}")
        cast_too |= found
    return {tensor for name, tensor in named.items() if name not in cast_too}


def _is_norm(module: nn.Module) -> bool:
    if isinstance(module, (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)):
        return True
    return any(fnmatchcase(type(module).__name__, pattern) for pattern in NORMS)


def _owners(tensors: list[tuple[nn.Module, str, Tensor]]) -> dict[Tensor, list[nn.Module]]:
    """Returns the modules that hold each tensor. Refuses different tensors that overlap in memory,
    which would do so no longer once they are cast. (Tensors of one file or flat buffer may have one
    storage and not overlap.)"""
    owners = grouped(tensors, lambda held: held[2])
    if (pair := overlapping(list(owners))) is not None:
        first, second = (owners[list(owners)[place]][0][1] for place in pair)
        raise ValueError(
            f"'{first}' and '{second}' share memory without being one tensor, which a cast would "
            "end: tie weights by giving both modules the same Parameter"
        )
    return {tensor: [module for module, *_ in held] for tensor, held in owners.items()}


def _spread(kept: set[nn.Module], owners: Iterable[list[nn.Module]]) -> None:
    """Keeps the modules that share a tensor with a kept one."""
    grows = True
    while grows:
        grows = False
        for modules in owners:
            if not kept.isdisjoint(modules):
                more = {inner for module in modules for inner in module.modules()} - kept
                kept |= more
                grows = grows or bool(more)


def _cast(tensor: Tensor, dtype: torch.dtype) -> None:
    """Casts a tensor and its gradient in place."""
    if tensor.dtype != dtype:
        data = tensor.data.to(dtype)
        grad = None if tensor.grad is None else tensor.grad.detach().to(dtype)
        tensor.grad, tensor.data = None, data
        if grad is not None:
            tensor.grad = grad


# ---- what a model is now -------------------------------------------------------------------------


@dataclass(frozen=True)
class CastReport:
    """Lists the dtypes of a model, as :func:`cast_report` found them."""

    parameters: dict[torch.dtype, int]
    """Elements of parameters in each dtype. A tied parameter counts once."""
    modules: dict[str, str]
    """Names and classes of the modules that compute in float32 behind casts."""
    buffers: dict[str, torch.dtype]
    """Every floating-point buffer, by its name."""

    def __str__(self) -> str:
        counts = (f"{count:,} in {_short(dtype)}" for dtype, count in self.parameters.items())
        lines = [f"parameters: {', '.join(counts) or 'none'}"]
        if self.modules:
            classes = (f"{n} {name}" for name, n in Counter(self.modules.values()).items())
            lines.append(f"in float32 behind casts: {', '.join(classes)}")
        inside = tuple(f"{name}." for name in self.modules)
        outside = {
            name: dtype for name, dtype in self.buffers.items() if not name.startswith(inside)
        }
        if len(outside) < len(self.buffers):
            lines.append(f"buffers of those modules: {len(self.buffers) - len(outside)}")
        lines += [f"buffer {name}: {_short(dtype)}" for name, dtype in outside.items()]
        return "\n".join(lines)


def cast_report(model: nn.Module) -> CastReport:
    """Returns the dtypes of a model's parameters and of each floating-point buffer, before or after
    :func:`cast_model`. Its text shows which buffers were cast and which stayed in float32.

    Example::

        headroom.cast_model(model, torch.bfloat16)
        print(headroom.cast_report(model))
    """
    parameters: Counter[torch.dtype] = Counter()
    for parameter in model.parameters():
        parameters[parameter.dtype] += parameter.numel()
    modules = {
        name: type(module).__name__
        for name, module in model.named_modules()
        if any(_is_ours(hook) for hook in module._forward_pre_hooks.values())
    }
    named = model.named_buffers(remove_duplicate=False)
    buffers = {name: buffer.dtype for name, buffer in named if buffer.is_floating_point()}
    return CastReport(dict(parameters), modules, buffers)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# ---- Hooks: functions of this module, so that copies and pickles of a model have them ------------


def _set_hooks(model: nn.Module, kept: set[nn.Module], dtype: torch.dtype) -> None:
    inner = {child for module in kept for child in module.modules() if child is not module}
    for module in model.modules():
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for key in [key for key, hook in hooks.items() if _is_ours(hook)]:
                del hooks[key]
                module._forward_pre_hooks_with_kwargs.pop(key, None)
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
