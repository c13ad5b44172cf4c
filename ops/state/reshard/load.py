"""Loads optimizer states that any number of ranks saved: :func:`load_sharded`."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from ..._core.dtensor import local_part
from ..._core.ownership import given_up
from ...optim.base import Optimizer
from ...optim.master_weights import headroom_optimizer
from ...param_states.block_scales import ABSMAXS, zero_absmaxs
from .blocks import first_element, has_these_blocks, recut
from .report import Recut, ReshardReport, gathered_report
from .sources import Checkpoint, Stored


@torch.no_grad()
def load_sharded(
    checkpoint: str | os.PathLike[str] | dcp.StorageReader,
    model: nn.Module,
    optimizer: Optimizer,
    *,
    key: str = "optimizer",
    options: StateDictOptions | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> ReshardReport:
    """Loads the states of an optimizer that were saved by any number of ranks.

    Takes what ``dcp.save({"optimizer": get_optimizer_state_dict(model, optimizer)}, ...)`` saved,
    flattened or not, with other things beside it or not, where ``dcp`` is
    ``torch.distributed.checkpoint``. Every rank must call. Without a process group one process
    loads the whole. The model's weights are loaded separately, as always.

    ``dcp.load`` reshards all states except 8-bit moments whose rows are not whole blocks: their
    blocks are local to a shard, and it refuses them. This function takes them too. A new block that
    lies in one old block keeps its codes and its scale, bit for bit; one that lies across several
    is dequantized and quantized again, to the nearest codes, which costs at most the largest step
    of the map (see :func:`headroom.functional.dynamic_map`) times the new scale, and makes no
    second moment zero. The report counts these blocks, and the first rank warns if there are any.

    Options that the groups of the checkpoint lack, as those of older versions may, are those of
    ``optimizer``; ``dcp.load`` would raise for each.

    Args:
        checkpoint: the folder, or a reader of another storage.
        model: the module whose parameters ``optimizer`` has, sharded by FSDP2 or by hand, or not.
        optimizer: one of :mod:`headroom.optim`, with or without states, or accelerate's wrapper of
            it.
        key: the name under which the states were saved, with dots between nested names.
        options: those of ``set_optimizer_state_dict``. ``strict=False`` takes parameters that have
            no saved state.
        process_group: the ranks that load. None: all.

    Returns:
        What became of 8-bit moments that were saved in other blocks: :class:`ReshardReport`.

    Raises:
        TypeError: the optimizer is not one of :mod:`headroom.optim`, or the checkpoint is a state
            dict that was gathered; torch's ``set_optimizer_state_dict`` loads one.
        KeyError: the checkpoint has no states under ``key``.
        ValueError: a state does not fit; or an 8-bit moment whose blocks would change is, or was,
            sharded by other than rows, or by several dimensions of a mesh. The message names the
            parameter.
        torch.distributed.checkpoint.CheckpointException: a file is missing or broken.

    After an error the optimizer is as it was.

    Example::

        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

        optimizer = headroom.optim.AdamW8bit(model.parameters(), lr=1e-3)
        state = get_optimizer_state_dict(model, optimizer)
        dcp.save({"optimizer": state}, checkpoint_id="checkpoint", no_dist=True)
        print(headroom.state.load_sharded("checkpoint", model, optimizer))
    """
    optimizer = headroom_optimizer(optimizer, "load_sharded")
    if isinstance(checkpoint, Mapping):
        raise TypeError(
            "load_sharded() reads a checkpoint of torch.distributed.checkpoint, got a state dict; "
            "set_optimizer_state_dict() of torch.distributed.checkpoint.state_dict loads a full one"
        )
    is_fresh = not optimizer.state
    try:
        is_reader = isinstance(checkpoint, dcp.StorageReader)
        reader = checkpoint if is_reader else dcp.FileSystemReader(checkpoint)
        saved = Checkpoint(reader, key, process_group)
        own = get_optimizer_state_dict(model, optimizer)
        params = {
            fqn: (param, group)
            for named, group in zip(own["param_groups"], optimizer.param_groups)
            for fqn, param in zip(named["params"], group["params"])
        }
        # A fresh optimizer's zeros are read into; a state is left alone until all is there.
        entries, recuts = _read(saved, params, optimizer, own["state"] if is_fresh else {})
        fixed = dict.fromkeys(("full_state_dict", "cpu_offload", "broadcast_from_rank0"), False)
        fixed["flatten_optimizer_state_dict"] = False
        with given_up():
            set_optimizer_state_dict(
                model,
                optimizer,
                {"state": entries, "param_groups": saved.groups},
                options=replace(options or StateDictOptions(), **fixed),
            )
    except BaseException:
        if is_fresh:
            optimizer.state.clear()
        raise
    report = gathered_report(recuts, process_group)
    if not report.is_lossless and (not dist.is_initialized() or dist.get_rank() == 0):
        warnings.warn(str(report), stacklevel=3)
    return report


def _read(
    saved: Checkpoint,
    params: dict[str, tuple[Tensor, dict[str, Any]]],
    optimizer: Optimizer,
    own: Mapping[str, dict[str, Any]],
) -> tuple[dict[str, dict[str, Any]], dict[tuple[str, str, int], Recut]]:
    """Returns the saved states on the shards of this rank, and what became of moments that were cut
    into other blocks. ``own`` are tensors that may be written."""
    groups = {fqn: group for group in saved.groups for fqn in group["params"]}
    targets: dict[str, Any] = {}
    moved: list[tuple[str, str]] = []
    for fqn, parts in saved.parts.items():
        if fqn not in params:
            continue
        param, group = params[fqn]
        options = group | groups.get(fqn, {})
        for name, part in parts.items():
            moment = name.removesuffix("_absmax")
            if name in ABSMAXS and not has_these_blocks(
                saved, fqn, moment, param, options["block_size"]
            ):
                moved.append((fqn, moment))
                targets[part.key] = torch.empty(part.size, dtype=part.dtype, device=param.device)
                continue
            there = own.get(fqn, {}).get(name)
            if part.size is None:
                targets[part.key] = None
            elif isinstance(there, Tensor) and (there.shape, there.dtype) == part[1:]:
                targets[part.key] = there
            else:
                targets[part.key] = _target(fqn, name, parts, param, optimizer, options)
    saved.read(targets)
    entries = {
        fqn: {name: targets[part.key] for name, part in parts.items()}
        for fqn, parts in saved.parts.items()
        if fqn in params
    }
    recuts = {}
    for fqn, moment in moved:
        param, group = params[fqn]
        size = (group | groups.get(fqn, {}))["block_size"]
        entry, scales = entries[fqn], zero_absmaxs(param, size)
        codes, old = entry[moment], entry[f"{moment}_absmax"]
        changed = recut(fqn, moment, codes, old, scales, size)
        entry[f"{moment}_absmax"] = scales
        if local_part(codes).numel():
            recuts[fqn, moment, first_element(codes)] = changed
    return entries, recuts


def _target(
    fqn: str,
    name: str,
    parts: dict[str, Stored],
    param: Tensor,
    optimizer: Optimizer,
    options: dict[str, Any],
) -> Tensor:
    """Returns a tensor for a part of a state, sharded as in this optimizer, with the dtype that it
    has in the checkpoint: torch would cast even remainders and codes."""
    part = parts[name]
    if name == "step":
        return torch.empty(part.size, dtype=part.dtype)
    if part.size == param.shape and name not in ABSMAXS:
        return torch.zeros_like(param, dtype=part.dtype, memory_format=torch.preserve_format)
    if name in ABSMAXS:
        zeros = zero_absmaxs(param, options["block_size"])
    else:
        layout = optimizer._layout(param, options, optimizer._layout_index_of_state(parts))
        zeros = layout.slot(name).new(param)
    if zeros.shape != part.size:
        raise ValueError(
            f"the saved '{name}' of '{fqn}' has shape {tuple(part.size)}, wanted "
            f"{tuple(zeros.shape)}"
        )
    return torch.zeros_like(zeros, dtype=part.dtype)
