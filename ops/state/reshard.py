"""Sharded optimizer states onto another number of ranks.

torch.distributed.checkpoint cuts tensors anew by itself. It cannot do so with the scales of 8-bit
moments whose blocks are local to a shard: other shards have other blocks. Here codes are read as
the new shards need them, with all old scales, and blocks that are none of the old ones are encoded
again.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint._nested_dict import unflatten_state_dict
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

from .._core.dtensor import first_row, local_part, sharded_dim, slices_of
from .._core.overlap import is_dense
from ..functional.dynamic_map import dynamic_map
from ..optim.adam8bit import ABSMAXS, _zero_absmaxs
from ..optim.base import Optimizer
from ..optim.master_weights import headroom_optimizer
from .convert.codes import encode, flattened, pieces

__all__ = ["Recut", "ReshardReport", "load_sharded"]


class Recut(NamedTuple):
    """An 8-bit moment that was cut into other blocks."""

    param: str
    name: str  # "exp_avg" or "exp_avg_sq"
    kept: int  # blocks that have the codes and the scale that were saved
    requantised: int  # blocks that were parts of several
    error: float = 0.0  # the largest of an element
    largest: float = 0.0  # the largest magnitude of an element before

    def merged(self, other: Recut) -> Recut:
        counts = self.kept + other.kept, self.requantised + other.requantised
        worst = max(self.error, other.error), max(self.largest, other.largest)
        return Recut(self.param, self.name, *counts, *worst)


@dataclass
class ReshardReport:
    """What became of 8-bit moments that were saved in other blocks, on all ranks together.
    Everything that it does not list has the bits that were saved."""

    moments: list[Recut] = field(default_factory=list)

    @property
    def kept(self) -> int:
        return sum(moment.kept for moment in self.moments)

    @property
    def requantised(self) -> int:
        return sum(moment.requantised for moment in self.moments)

    @property
    def is_lossless(self) -> bool:
        return not self.requantised

    def __str__(self) -> str:
        if not self.moments:
            return "All states have the bits that were saved"
        text = (
            f"{len(self.moments):,} 8-bit moments were cut into other blocks: {self.kept:,} blocks "
            "kept their bits"
        )
        if self.is_lossless:
            return text
        worst = max(self.moments, key=lambda moment: moment.error / (moment.largest or 1))
        return (
            f"{text}, {self.requantised:,} lie across old blocks and were quantised again, by up "
            f"to {worst.error / (worst.largest or 1):.2g} of the moment's largest element "
            f"('{worst.name}' of '{worst.param}')"
        )


# ---- What was saved ------------------------------------------------------------------------------


class Stored(NamedTuple):
    """A part of a parameter's state, as it was saved."""

    key: str  # in the checkpoint
    size: torch.Size | None = None  # None: not a tensor
    dtype: torch.dtype | None = None


class _Checkpoint:
    """An optimizer's states in a distributed checkpoint, nested or flattened."""

    def __init__(self, reader: dcp.StorageReader, key: str, group: Any) -> None:
        self._reader, self._group = reader, group
        self._metadata = reader.read_metadata()
        prefix = f"{key}." if key else ""
        self.parts: dict[str, dict[str, Stored]] = {}
        options: dict[str, Any] = {}
        for name, saved in self._metadata.state_dict_metadata.items():
            what, _, path = name.removeprefix(prefix).partition(".")
            if not name.startswith(prefix) or what not in ("state", "param_groups"):
                continue
            if what == "param_groups":
                options[name] = None
                continue
            fqn, _, part = path.rpartition(".")
            size = getattr(saved, "size", None)
            dtype = None if size is None else saved.properties.dtype
            self.parts.setdefault(fqn, {})[part] = Stored(name, size, dtype)
        if not self.parts:
            some = sorted({name.partition(".")[0] for name in self._metadata.state_dict_metadata})
            raise KeyError(f"the checkpoint has no states under {key!r}; it has {some}")
        self.read(options)
        self.groups = self._groups(options, prefix)

    def _groups(self, options: dict[str, Any], prefix: str) -> list[dict[str, Any]]:
        paths = self._metadata.planner_data
        if all("param_groups" in paths[name] for name in options):
            tails = {name: paths[name][paths[name].index("param_groups") :] for name in options}
            return unflatten_state_dict(options, tails)["param_groups"]
        groups: dict[str, dict[str, Any]] = {}  # flattened: of each parameter
        for name, value in options.items():
            fqn, _, option = name.removeprefix(f"{prefix}param_groups.").rpartition(".")
            groups.setdefault(fqn, {"params": [fqn]})[option] = value
        return list(groups.values())

    def read(self, targets: dict[str, Any]) -> None:
        """Fills tensors, and sets what is not a tensor. Collective."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            dcp.load(targets, storage_reader=self._reader, process_group=self._group)

    def chunks(self, part: Stored) -> list[tuple[tuple[int, ...], tuple[int, ...], str | None]]:
        """The offsets and sizes of the pieces that ranks wrote, in order, and who wrote each."""
        if not hasattr(self, "_writers"):
            self._writers: dict[Any, str] = {}
            for index, info in (self._metadata.storage_data or {}).items():
                file = getattr(info, "relative_path", None)  # __RANK_NUMBER.distcp
                if index.offset is not None and file:
                    self._writers[index.fqn, tuple(index.offset)] = file.rpartition("_")[0]
        return sorted(
            (offset, tuple(chunk.sizes), self._writers.get((part.key, offset)))
            for chunk in self._metadata.state_dict_metadata[part.key].chunks
            if math.prod(chunk.sizes)
            for offset in [tuple(chunk.offsets)]
        )


class _Gathered:
    """A full state dict of an optimizer, on every rank, nested or flattened."""

    def __init__(self, state_dict: Mapping[str, Any]) -> None:
        if "state" in state_dict:
            states, self.groups = state_dict["state"], state_dict["param_groups"]
            self._values = {
                f"{fqn}.{name}": value
                for fqn, entry in states.items()
                for name, value in entry.items()
            }
        else:
            self._values, groups = {}, {}
            for key, value in state_dict.items():
                what, _, path = key.partition(".")
                fqn, _, option = path.rpartition(".")
                if what == "state":
                    self._values[path] = value
                else:
                    groups.setdefault(fqn, {"params": [fqn]})[option] = value
            self.groups = list(groups.values())
        if not self._values:
            raise ValueError(
                "the state dict is empty on this rank; gather it on all: full_state_dict=True "
                "without cpu_offload"
            )
        self.parts: dict[str, dict[str, Stored]] = {}
        for key, value in self._values.items():
            fqn, _, name = key.rpartition(".")
            part = (
                Stored(key, value.shape, value.dtype) if isinstance(value, Tensor) else Stored(key)
            )
            if isinstance(value, DTensor):
                raise ValueError(f"'{key}' is a DTensor; gather it first: full_state_dict=True")
            self.parts.setdefault(fqn, {})[name] = part

    def read(self, targets: dict[str, Any]) -> None:
        for key, target in targets.items():
            value = self._values[key]
            if target is None:
                targets[key] = value
            elif isinstance(target, DTensor):
                target.to_local().copy_(value[slices_of(target)])
            else:
                target.copy_(value)

    def chunks(self, part: Stored) -> None:
        return None  # are not known


# ---- Blocks --------------------------------------------------------------------------------------


def _shards(size: int, ranks: int) -> list[tuple[int, int]]:
    """Offsets and sizes of the shards of a dimension that are not empty: torch.chunk's rule."""
    step = max(1, -(-size // ranks))
    return [(offset, min(step, size - offset)) for offset in range(0, size, step)]


def _has_these_blocks(
    saved: _Checkpoint | _Gathered, fqn: str, moment: str, param: Tensor, block_size: int
) -> bool:
    """Whether the saved blocks of a moment are those that its shards have here.

    Raises:
        ValueError: they are not, and are none of shards of rows.
    """
    absmax = saved.parts[fqn][f"{moment}_absmax"]
    codes = saved.parts[fqn].get(moment)
    wanted, got = _zero_absmaxs(param, block_size).shape, absmax.size
    if codes is None or codes.size != param.shape or not got:
        return True  # the optimizer says what does not fit
    if len(got) == 2 and got == wanted:
        return True  # rows are whole blocks
    what = f"the '{moment}' of '{fqn}'"
    dims = []  # the sharded one here
    if isinstance(param, DTensor):
        sizes = param.device_mesh.shape
        cut = [p for p, size in zip(param.placements, sizes) if size > 1]
        dims = [dim for dim in map(sharded_dim, cut) if dim is not None]
        if len(dims) > 1:
            raise ValueError(
                f"{what} has 8-bit blocks that are local to a shard, and {param.placements} shard "
                "it by several dimensions of the mesh, which load_sharded() does not take; load it "
                "on the mesh that it was saved on with torch.distributed.checkpoint.load"
            )
    # See _zero_absmaxs: [blocks], [rows, blocks] or [ranks, 1, ..., blocks].
    ranks = got[0] if len(got) > 2 else 1
    saved_dims = [len(got) - 3] if ranks > 1 else []
    both = {*dims, *saved_dims}
    if len(both) > 1 or (saved_dims and saved_dims[0] >= param.dim()):
        raise ValueError(
            f"{what} was saved with shards of dimension {saved_dims[0]}, and here has shards of "
            f"dimension {dims}; its 8-bit blocks reshard from rows to rows only"
        )
    dim = max(both, default=0)
    _check_shards(saved, codes, absmax, what, dim, ranks)
    if got == wanted:
        return True
    if dim != 0 or len(got) == 2 or len(wanted) == 2:
        raise ValueError(
            f"{what} was saved in 8-bit blocks with scales of shape {tuple(got)}, and here has "
            f"scales of shape {tuple(wanted)}; blocks reshard from rows to rows only"
        )
    row = math.prod(param.shape[1:])
    if param.shape[0] > 1 and (param.stride(0) != row or not is_dense(param)):
        raise ValueError(
            f"{what} was saved in other 8-bit blocks, and '{fqn}' has strides {param.stride()}: "
            "blocks reshard where rows lie one after another in memory"
        )
    blocks = -(-_shards(param.shape[0], ranks)[0][1] * row // block_size)
    if math.prod(got) != ranks * blocks:
        raise ValueError(
            f"{what} was saved with scales of shape {tuple(got)}, wanted {blocks} for each of "
            f"{ranks} shards in blocks of {block_size}"
        )
    return False


def _check_shards(
    saved: _Checkpoint | _Gathered, codes: Stored, absmax: Stored, what: str, dim: int, ranks: int
) -> None:
    """Refuses codes that were not saved as torch's shards of one dimension, in the order of the
    ranks: scales do not tell."""
    chunks = saved.chunks(codes)
    if chunks is None:
        return
    wanted = [
        (tuple(offset * (d == dim) for d in range(len(codes.size))), (*codes.size[:dim], size))
        for offset, size in _shards(codes.size[dim], ranks)
        if math.prod(codes.size)
    ]
    pieces = [(offset, sizes[: dim + 1]) for offset, sizes, _ in chunks]
    places = {writer: place for place, (*_, writer) in enumerate(chunks) if writer}
    in_order = ranks == 1 or all(
        places.get(writer, offset[0]) == offset[0]
        for offset, _, writer in saved.chunks(absmax)
        if offset[0] < len(chunks)
    )
    if pieces != wanted or not in_order:
        raise ValueError(
            f"{what} was saved by {ranks} ranks in 8-bit blocks of other shards than those of one "
            "dimension of a mesh, which load_sharded() does not take; load it on the mesh that it "
            "was saved on with torch.distributed.checkpoint.load"
        )


def _first_element(tensor: Tensor) -> int:
    """Where the local rows of a tensor begin in the whole one."""
    return first_row(tensor) * math.prod(tensor.shape[1:])


def _recut(
    codes: Tensor, saved: Tensor, scales: Tensor, block_size: int, is_signed: bool
) -> tuple[int, int, float, float]:
    """Changes codes in place from the blocks whose scales are ``saved``, of all old shards, to the
    blocks of this shard, and writes ``scales`` of these, zeros before. The numbers of a Recut."""
    first, local = _first_element(codes), flattened(local_part(codes))
    row = math.prod(codes.shape[1:])
    ranks, blocks = (saved.shape[0], saved.shape[-1]) if saved.dim() > 2 else (1, saved.numel())
    shard = max(1, -(-codes.shape[0] // ranks) * row)  # elements of an old one
    saved, out = saved.flatten(), local_part(scales).view(-1)
    values = dynamic_map(is_signed).to(local.device)
    pad = torch.nn.functional.pad
    kept, requantised, error, largest = 0, 0, 0.0, 0.0
    for part, places in pieces(local.numel(), block_size):
        place = torch.arange(first + part.start, first + part.stop, device=local.device)
        old = place // shard
        scale = saved[old * blocks + (place - old * shard) // block_size]
        padding = (0, -scale.numel() % block_size)
        rows = pad(scale[None], padding, "replicate").view(-1, block_size)
        # A block with one scale is an old one, or lies in one: its codes are right as they are.
        low, high = rows.view(torch.int32).aminmax(dim=1)
        several = low != high
        out[places][: len(rows)] = rows[:, 0]
        count = int(several.sum())
        kept, requantised = kept + len(rows) - count, requantised + count
        if count == 0:
            continue
        in_rows = pad(local[part], padding).view(-1, block_size)
        none = pad(torch.zeros_like(scale, dtype=torch.bool), padding, value=True)
        none = none.view(-1, block_size)[several]
        before = (values[in_rows[several].int()] * rows[several]).masked_fill(none, 0)
        new = encode(before.flatten(), block_size, is_signed)
        in_rows[several] = new.codes.view(-1, block_size)
        local[part] = in_rows.flatten()[: scale.numel()]
        out[places][: len(rows)][several] = new.absmax
        off = (new.decode().view_as(before) - before).abs().masked_fill(none | before.isnan(), 0)
        error = max(error, off.nan_to_num(math.inf).max().item())
        largest = max(largest, before.nan_to_num(0.0).abs().max().item())
    return kept, requantised, error, largest


# ---- Loading -------------------------------------------------------------------------------------


@torch.no_grad()
def load_sharded(
    checkpoint: str | os.PathLike[str] | dcp.StorageReader | Mapping[str, Any],
    model: nn.Module,
    optimizer: Optimizer,
    *,
    key: str = "optimizer",
    options: StateDictOptions | None = None,
    process_group: Any = None,
) -> ReshardReport:
    """Loads the states of an optimizer that were saved by any number of ranks.

    For what was saved as ``dcp.save({"optimizer": get_optimizer_state_dict(model, optimizer)},
    ...)``, flattened or not, with other things beside it or not, where ``dcp`` is
    ``torch.distributed.checkpoint``. Every rank calls it. Without a process group one process loads
    the whole. The model's weights are loaded apart, as always.

    ``dcp.load`` reshards all states but 8-bit moments whose rows are not whole blocks, because
    their blocks are local to a shard, and refuses these. This takes them too. A new block that lies
    in one old block keeps its codes and its scale, bit for bit; one that lies across several is
    dequantised and quantised again, to the nearest codes, which costs at most the largest step of
    the map (see :func:`headroom.functional.dynamic_map`) times the new scale, and makes no second
    moment zero. The report says how many there were, and a warning on the first rank if any.

    Args:
        checkpoint: the folder, or a reader of what is elsewhere; or the full state dict that
            ``get_optimizer_state_dict`` gathers with ``full_state_dict=True``, on every rank.
        model: whose parameters ``optimizer`` has; plain, or sharded by FSDP2 or by hand.
        optimizer: one of :mod:`headroom.optim`, fresh or not, or accelerate's wrapper of it.
        key: under which name the states were saved, with dots between nested ones.
        options: of ``set_optimizer_state_dict``. ``strict=False`` takes parameters that have no
            saved state.
        process_group: of the ranks that load. None: all.

    Returns:
        What became of 8-bit moments that were saved in other blocks: :class:`ReshardReport`.

    Raises:
        TypeError: the optimizer is none of :mod:`headroom.optim`.
        KeyError: the checkpoint has no states under ``key``.
        ValueError: a state does not fit; or an 8-bit moment whose blocks would change is, or was,
            sharded by other than rows, or by several dimensions of a mesh. The message names the
            parameter.
        torch.distributed.checkpoint.CheckpointException: a file is missing or broken.

        The optimizer stays as it was then.

    Example::

        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

        optimizer = headroom.optim.AdamW8bit(model.parameters(), lr=1e-3)
        state = get_optimizer_state_dict(model, optimizer)
        dcp.save({"optimizer": state}, checkpoint_id="checkpoint", no_dist=True)
        print(headroom.optim.load_sharded("checkpoint", model, optimizer))
    """
    optimizer = headroom_optimizer(optimizer, "load_sharded")
    is_fresh = not optimizer.state
    try:
        saved: _Checkpoint | _Gathered
        if isinstance(checkpoint, Mapping):
            saved = _Gathered(checkpoint)
        else:
            is_reader = isinstance(checkpoint, dcp.StorageReader)
            reader = checkpoint if is_reader else dcp.FileSystemReader(checkpoint)
            saved = _Checkpoint(reader, key, process_group)
        own = get_optimizer_state_dict(model, optimizer)
        params = {
            fqn: (param, group)
            for named, group in zip(own["param_groups"], optimizer.param_groups)
            for fqn, param in zip(named["params"], group["params"])
        }
        # A fresh optimizer's zeros are read into; a state is left alone until all is there.
        entries, recuts = _read(saved, params, optimizer, own["state"] if is_fresh else {})
        fixed = dict.fromkeys(
            (
                "full_state_dict",
                "cpu_offload",
                "broadcast_from_rank0",
                "flatten_optimizer_state_dict",
            ),
            False,
        )
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
    report = _report(recuts, process_group)
    if not report.is_lossless and (not dist.is_initialized() or dist.get_rank() == 0):
        warnings.warn(str(report), stacklevel=3)
    return report


def _read(
    saved: _Checkpoint | _Gathered,
    params: dict[str, tuple[Tensor, dict[str, Any]]],
    optimizer: Optimizer,
    own: Mapping[str, dict[str, Any]],
) -> tuple[dict[str, dict[str, Any]], dict[tuple[str, str, int], Recut]]:
    """The saved states on the shards of this rank. ``own`` are tensors that may be written."""
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
            if name in ABSMAXS and not _has_these_blocks(
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
        entry, scales = entries[fqn], _zero_absmaxs(param, size)
        codes, old = entry[moment], entry[f"{moment}_absmax"]
        counts = _recut(codes, old, scales, size, moment == "exp_avg")
        entry[f"{moment}_absmax"] = scales
        if local_part(codes).numel():
            recuts[fqn, moment, _first_element(codes)] = Recut(fqn, moment, *counts)
    return entries, recuts


def _target(
    fqn: str,
    name: str,
    parts: dict[str, Stored],
    param: Tensor,
    optimizer: Optimizer,
    options: dict[str, Any],
) -> Tensor:
    """A tensor for a part of a state, sharded as this optimizer has it, of the dtype it has in the
    checkpoint: torch would cast, remainders and codes too."""
    part = parts[name]
    if name == "step":
        return torch.empty(part.size, dtype=part.dtype)
    if part.size == param.shape and name not in ABSMAXS:
        return torch.zeros_like(param, dtype=part.dtype, memory_format=torch.preserve_format)
    if name in ABSMAXS:
        zeros = _zero_absmaxs(param, options["block_size"])
    else:
        layout = optimizer._layout(param, options, optimizer._layout_index_of_state(parts))
        zeros = layout.slot(name).new(param)
    if zeros.shape != part.size:
        raise ValueError(
            f"the saved '{name}' of '{fqn}' has shape {tuple(part.size)}, wanted "
            f"{tuple(zeros.shape)}"
        )
    return torch.zeros_like(zeros, dtype=part.dtype)


def _report(recuts: dict[tuple[str, str, int], Recut], group: Any) -> ReshardReport:
    every: list[dict[tuple[str, str, int], Recut]] = [recuts]
    if dist.is_available() and dist.is_initialized():
        every = [{}] * dist.get_world_size(group)
        dist.all_gather_object(every, recuts, group=group)
    # Ranks with the same shard say the same.
    shards = {where: recut for each in every for where, recut in each.items()}
    moments: dict[tuple[str, str], Recut] = {}
    for (fqn, name, _), recut in sorted(shards.items()):
        at = fqn, name
        moments[at] = moments[at].merged(recut) if at in moments else recut
    return ReshardReport(list(moments.values()))
