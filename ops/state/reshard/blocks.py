"""The blocks of 8-bit moments: whether shards here have the saved ones, and how to cut others."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..._core.dtensor import first_row, local_part, sharded_dim
from ..._core.overlap import is_dense
from ...functional.dynamic_map import dynamic_map
from ...param_states.block_scales import zero_absmaxs
from ..convert.codes import encode, flattened, pieces
from .report import Recut
from .sources import Checkpoint, Stored


def _shards(size: int, ranks: int) -> list[tuple[int, int]]:
    """Returns the offsets and sizes of the shards of a dimension that are not empty, by the rule of
    torch.chunk."""
    step = max(1, -(-size // ranks))
    return [(offset, min(step, size - offset)) for offset in range(0, size, step)]


def has_these_blocks(
    saved: Checkpoint, fqn: str, moment: str, param: Tensor, block_size: int
) -> bool:
    """Returns whether the saved blocks of a moment are those that its shards have here.

    Raises:
        ValueError: they are not, and are not those of shards of rows.
    """
    absmax = saved.parts[fqn][f"{moment}_absmax"]
    codes = saved.parts[fqn].get(moment)
    wanted, got = zero_absmaxs(param, block_size).shape, absmax.size
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
    # See zero_absmaxs: [blocks], [rows, blocks] or [ranks, 1, ..., blocks].
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
    saved: Checkpoint, codes: Stored, absmax: Stored, what: str, dim: int, ranks: int
) -> None:
    """Refuses codes that were not saved as torch's shards of one dimension, in the order of the
    ranks. The scales alone would not show it."""
    chunks = saved.chunks(codes)
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


def first_element(tensor: Tensor) -> int:
    """Returns the number in the whole tensor of the first element on this rank."""
    return first_row(tensor) * math.prod(tensor.shape[1:])


def recut(
    param: str, name: str, codes: Tensor, saved: Tensor, scales: Tensor, block_size: int
) -> Recut:
    """Changes the codes of a moment in place from the blocks whose scales are ``saved``, of all old
    shards, to the blocks of this shard, and writes their scales to ``scales``, which holds zeros.
    Returns what became of the blocks of this shard."""
    is_signed = name != "exp_avg_sq"
    first, local = first_element(codes), flattened(local_part(codes))
    row = math.prod(codes.shape[1:])
    ranks, blocks = (saved.shape[0], saved.shape[-1]) if saved.dim() > 2 else (1, saved.numel())
    shard = max(1, -(-codes.shape[0] // ranks) * row)  # elements of an old one
    saved, out = saved.flatten(), local_part(scales).view(-1)
    values = dynamic_map(is_signed).to(local.device)
    pad = torch.nn.functional.pad
    kept, requantized, error, largest = 0, 0, 0.0, 0.0
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
        kept, requantized = kept + len(rows) - count, requantized + count
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
    return Recut(param, name, kept, requantized, error, largest)
