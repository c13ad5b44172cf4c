"""The matrices in a parameter: what of it is made orthogonal as one, and what lies together in a
batch of products."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.distributed.tensor import DTensor

from ..._core.dtensor import sharded_dim
from ...functional.newton_schulz import newton_schulz_flops

Split = int | tuple[int, ...] | None


class Part(NamedTuple):
    """A block of rows and columns of each matrix of a parameter."""

    row: int
    rows: int
    col: int
    cols: int

    def of(self, matrix: Tensor) -> Tensor:
        """Returns the block of a matrix."""
        if (self.rows, self.cols) == tuple(matrix.shape):
            return matrix
        return matrix.narrow(0, self.row, self.rows).narrow(1, self.col, self.cols)

    def within(self, row: int, rows: int, cols: int) -> Part:
        """Returns the block of the ``rows`` rows from ``row`` that is in this one, counted from
        there."""
        first = max(self.row - row, 0)
        last = max(min(self.row + self.rows - row, rows), first)
        return Part(first, last - first, self.col, self.cols)

    @property
    def size(self) -> tuple[int, int]:
        """Returns rows and columns of the block as a matrix with no more rows than columns."""
        return min(self.rows, self.cols), max(self.rows, self.cols)


def matrix_shape(shape: Sequence[int]) -> tuple[int, int, int]:
    """Returns the number, the rows and the columns of the matrices of a parameter: one of two
    dimensions is a matrix, one of three a batch of matrices, and one of four or more, a
    convolution's, is ``[out, everything else]``."""
    if len(shape) == 3:
        return int(shape[0]), int(shape[1]), int(shape[2])
    cols = 1
    for size in shape[1:]:
        cols *= int(size)
    return 1, int(shape[0]), cols


def as_matrices(tensor: Tensor, like: Tensor) -> Sequence[Tensor]:
    """Returns a parameter, or a tensor of its shape, as matrices. A convolution's columns are in
    the memory order of ``like``; a tensor in another order is copied."""
    if tensor.dim() == 3:
        return tensor.unbind(0)
    if tensor.dim() > 3:
        return [in_order(tensor, like).flatten(1)]
    return [tensor]


def in_order(tensor: Tensor, like: Tensor) -> Tensor:
    """Returns a convolution's weight, or a tensor of its shape, with the columns of its matrix in
    the memory order of ``like``."""
    return tensor.permute(0, *sorted(range(1, like.dim()), key=like.stride, reverse=True))


def parts_of(shape: Sequence[int], split: Split) -> list[Part]:
    """Returns the blocks into which a packed matrix is split.

    Args:
        split: a number of equal parts of the rows; or the sizes of the parts, which add up to the
            rows or else to the columns; or None.

    Raises:
        ValueError: it does not fit the shape.
    """
    _, rows, cols = matrix_shape(shape)
    if split is None:
        return [Part(0, rows, 0, cols)]
    if isinstance(split, int):
        if split < 1 or rows % split:
            raise ValueError(f"split={split} does not divide the {rows} rows of {list(shape)}")
        split = (rows // split,) * split
    if any(size < 1 for size in split) or sum(split) not in (rows, cols):
        raise ValueError(
            f"split={tuple(split)} adds up to {sum(split)}, neither the {rows} rows nor the {cols} "
            f"columns of {list(shape)}"
        )
    by_rows, first, parts = sum(split) == rows, 0, []
    for size in split:
        parts.append(Part(first, size, 0, cols) if by_rows else Part(0, rows, first, size))
        first += size
    return parts


def column_parts(shape: Sequence[int], split: Split) -> int:
    """Returns how many parts have each row of a matrix: more than one if its columns are split."""
    parts = parts_of(shape, split)
    return len(parts) if parts[0].cols < matrix_shape(shape)[2] else 1


def keeps_blocks(param: Tensor, split: Split, block_size: int) -> bool:
    """Returns whether every matrix of a parameter, or its rows on a rank, has 8-bit blocks of its
    own: the same on all ranks."""
    number, rows, cols = matrix_shape(param.shape)
    parts = parts_of(param.shape, split)
    if number == len(parts) == 1 and param.dim() != 3:
        return True
    if isinstance(param, DTensor):
        dims = {sharded_dim(placement) for placement in param.placements}
        return dims <= {None, 0} and cols % block_size == 0
    return rows * cols % block_size == 0 and all(
        part.cols == cols and part.row * cols % block_size == 0 for part in parts
    )


def blocks_of(scales: Tensor, block_size: int, first: int, numel: int) -> Tensor:
    """Returns the scales of the blocks of ``numel`` elements of a parameter from ``first``."""
    return scales.flatten()[first // block_size : -(-(first + numel) // block_size)]


def newton_schulz_work(groups: Iterable[dict[str, Any]]) -> tuple[int, int]:
    """Returns the operations of Newton-Schulz in a step of groups of Muon, of Headroom or torch,
    and those of forward and backward of the same matrices for each token, which are 6 for each
    element. Frozen ones and other groups are left out."""
    iterations = products = 0
    for group in groups:
        if "ns_steps" not in group or not group.get("use_muon", True):
            continue
        gram = group.get("variant") == "gram"
        for param in group["params"]:
            if not param.requires_grad:
                continue
            number, rows, cols = matrix_shape(param.shape)
            for part in parts_of(param.shape, group.get("split")):
                iterations += newton_schulz_flops(number, *part.size, group["ns_steps"], gram)
            products += 6 * number * rows * cols
    return iterations, products
