"""Lets the weights of a model's blocks stream: which blocks, which of their parameters, and what
takes the place of their forward."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from .._core.ranks import fsdp_class
from ..host.arena import HostArena, default_arena, in_arena
from ..host.streaming import Stream, StreamedBlock
from .blocks import PatchedLayer, by_block
from .changes import Changes
from .report import PatchReport

STREAM = "_headroom_streamed"  # the attribute of a block whose weights stream
Places = dict[int, list[tuple[nn.Module, str, Tensor]]]


def streamed_blocks(model: nn.Module) -> list[StreamedBlock]:
    """Returns the blocks of a model whose weights stream."""
    found = (vars(module).get(STREAM) for module in model.modules())
    return [block for block in found if block is not None]


def chosen_blocks(
    weights: str | Mapping[str | int, str] | None, layers: Sequence[PatchedLayer], model: nn.Module
) -> list[PatchedLayer]:
    """Returns the blocks whose weights shall stream.

    Raises:
        ValueError: ``weights`` does not fit the blocks, or the model.
    """
    if weights is None:
        return []
    if isinstance(weights, str):
        where: list[str | None] = [weights] * len(layers)
    elif isinstance(weights, Mapping):
        where = by_block("weights", weights, layers, model)
    else:
        raise ValueError(f'headroom.patch: weights is {weights!r}, wanted "host" or a dict of it')
    for value in where:
        if value not in (None, "host"):
            raise ValueError(f'headroom.patch: weights is {value!r}, wanted "host"')
    if not layers:
        raise ValueError(
            f"headroom.patch: weights is {weights!r}, but {type(model).__name__} has no repeated "
            "blocks: no ModuleList or Sequential of two or more modules of one class"
        )
    _check_model(model)
    return [layer for layer, value in zip(layers, where) if value is not None]


def _check_model(model: nn.Module) -> None:
    sharded = (*fsdp_class("FullyShardedDataParallel"), *fsdp_class("FSDPModule"))
    compiled = sys.modules.get("torch._dynamo")  # which takes long to import
    for name, module in model.named_modules():
        what = f"{name or 'the model'} is a {type(module).__name__}"
        if isinstance(module, (DistributedDataParallel, *sharded)):
            raise ValueError(
                f"headroom.patch: {what}; patch the model with weights= before "
                "DistributedDataParallel is around it; FSDP has a CPUOffloadPolicy instead"
            )
        if module._compiled_call_impl is not None or (
            compiled is not None and isinstance(module, compiled.OptimizedModule)
        ):
            raise ValueError(
                f"headroom.patch: {what} that is compiled, and torch.compile cannot trace weights "
                "that stream; patch the model that is not"
            )


def stream_weights(
    model: nn.Module,
    layers: Sequence[PatchedLayer],
    prefetch: int,
    arena: HostArena | None,
    before: Sequence[StreamedBlock],
    changes: Changes,
    report: PatchReport,
) -> list[StreamedBlock]:
    """Puts what fetches the weights of some blocks around their ``forward``, and returns the
    blocks. Nothing has been moved then.

    Args:
        before: the blocks whose weights streamed until now, which need not move.

    Raises:
        ValueError: a block cannot stream.
    """
    if not isinstance(prefetch, int) or prefetch < 1:
        raise ValueError(f"headroom.patch: prefetch is {prefetch!r}, wanted 1 or more blocks")
    if arena is not None and not isinstance(arena, HostArena):
        raise TypeError(f"headroom.patch: host is {arena!r}, wanted a headroom.HostArena")
    arena = default_arena() if arena is None else arena
    stream, there = Stream(arena, prefetch), {id(block.module): block for block in before}
    places = places_of(model)
    found = []
    stream.root = weakref.ref(model)
    for layer in layers:
        stay = staying(layer, places, report)
        block = there.get(id(layer.module))
        if block is None or block.stream.arena is not arena:
            block = StreamedBlock(layer.module, layer.name, stream, stay)
        block.join(stream, stay)
        size = _check_params(layer, {(id(module), name) for module, name in stay})
        if not size:
            report._leave(layer.name, layer.module, "none of its weights can stream")
            continue
        module, own = layer.module, vars(layer.module).get("forward")
        changes.set(module, STREAM, block)
        changes.set(module, "forward", functools.partial(forward_of, module, own))
        changes.set(module, "_apply", functools.partial(_applied, module))
        report._stream(layer.name, module, size)
        found.append(block)
    return found


def move_weights(blocks: Sequence[StreamedBlock], before: Sequence[StreamedBlock]) -> None:
    """Moves the weights of blocks to the arena, but of those that were there ``before``; all of
    them, or none if one raises."""
    try:
        for block in blocks:
            block.settle()
    except BaseException:
        for block in blocks:
            if block not in before:
                block.bring_back()
        raise


def forward_of(
    module: nn.Module, own: Callable[..., Any] | None, /, *args: Any, **kwargs: Any
) -> Any:
    """Takes the place of the forward of a block whose weights stream."""
    run = functools.partial(type(module).forward, module) if own is None else own
    block: StreamedBlock = vars(module)[STREAM]
    return block.call(run, *args, **kwargs)


def _applied(
    module: nn.Module, /, fn: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any
) -> nn.Module:
    """Takes the place of ``_apply``, by which modules are cast and moved: what becomes of this
    block goes back to the arena before the next block is moved."""
    result = type(module)._apply(module, fn, *args, **kwargs)
    vars(module)[STREAM].follow(fn)
    return result


def places_of(model: nn.Module) -> Places:
    """Returns where each memory of parameters and buffers is held, and by which tensors."""
    found: Places = {}
    for module in model.modules():
        for name, x in [*module._parameters.items(), *module._buffers.items()]:
            if x is not None:
                found.setdefault(_memory(x), []).append((module, name, x))
    return found


def _memory(x: Tensor) -> int:
    """Returns a number that tells memory apart. Weights that stream share that of their block."""
    if type(x) not in (Tensor, nn.Parameter, nn.Buffer) or x.is_meta or not x.numel():
        return id(x)
    return x.data_ptr() if in_arena(x) else x.untyped_storage().data_ptr()


def staying(
    layer: PatchedLayer, places: Places, report: PatchReport
) -> list[tuple[nn.Module, str]]:
    """Returns the parameters of a block that stay where they are, and reports them."""
    inside = {id(module) for module in layer.module.modules()}
    stay = []
    for path, module in layer.module.named_modules(prefix=layer.name):
        for name, p in module._parameters.items():
            if p is None:
                continue
            if isinstance(module, nn.RNNBase):
                reason = "its module keeps a list of them"
            elif type(p) is not nn.Parameter or p.layout is not torch.strided:
                reason = f"it is a {type(p).__name__}"
            elif any(id(other) not in inside for other, _, _ in places[_memory(p)]):
                reason = "it is tied to one outside of the block"
            elif any(other is not p for _, _, other in places[_memory(p)]):
                reason = "it shares memory with another"
            else:
                continue
            stay.append((module, name))
            report._leave(f"{path}.{name}", module, f"weights that stay: {reason}")
    return stay


def _check_params(layer: PatchedLayer, stay: set[tuple[int, str]]) -> int:
    """Returns the bytes of the parameters of a block that stream, once."""
    found = {
        p: f"{path}.{name}"
        for path, module in layer.module.named_modules(prefix=layer.name)
        for name, p in module._parameters.items()
        if p is not None and (id(module), name) not in stay
    }
    devices = {p.device: name for p, name in found.items()}
    for device, name in devices.items():
        if device.type not in ("cpu", "cuda"):
            raise ValueError(
                f"headroom.patch: {name} is on {device}, and weights stream to CUDA devices and to "
                "the CPU; give the model its weights before, on the CPU if the device has no room"
            )
    if len(devices) > 1:
        raise ValueError(
            f"headroom.patch: the weights of {layer.name} are on several devices, "
            f"{' and '.join(map(str, devices))}; wanted one for each block"
        )
    return sum(p.nbytes for p in found)
