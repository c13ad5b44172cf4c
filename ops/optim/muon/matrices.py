"""The matrices in a parameter: what of it is made orthogonal as one, and what lies together in a
batch of products."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.distributed.tensor import DTensor

from ..._core.dtensor import sharded_dim
from ...functional.newton_schulz import newton_schulz_flops

Split = int | tuple[int, ...] | tuple[int, tuple[int, ...]] | None


class Lines(NamedTuple):
    """Rows or columns of a matrix: a run of them, or several as long and ``period`` apart."""

    first: int
    run: int
    times: int = 1
    period: int = 0

    @property
    def total(self) -> int:
        return self.run * self.times

    def times_of(self, factor: int) -> Lines:
        """Returns the elements of lines that have ``factor`` of them each."""
        return Lines(self.first * factor, self.run * factor, self.times, self.period * factor)

    def of(self, tensor: Tensor, dim: int) -> Tensor:
        """Returns a view of the lines of a dimension. Runs of several lines have two dimensions,
        ``[times, run]``."""
        if self.times == 1:
            return tensor.narrow(dim, self.first, self.run)
        span = tensor.narrow(dim, self.first, (self.times - 1) * self.period + self.run)
        runs = span.unfold(dim, self.run, self.period).movedim(-1, dim + 1)
        return runs.squeeze(dim + 1) if self.run == 1 else runs

    def within(self, first: int, size: int) -> list[tuple[Lines, int]]:
        """Returns the lines that are among ``size`` lines from ``first``, counted from there, each
        with how many lines of these lie before it: runs that an end of that range cuts are by
        themselves."""
        last, step = first + size, max(self.period, 1)
        low = max((first - self.first - self.run) // step + 1, 0)  # ends after `first`
        high = min(-(-(last - self.first) // step), self.times)  # those before begin before `last`
        if not size or low >= high:
            return []

        def piece(k: int, times: int) -> tuple[Lines, int]:
            begin = self.first + k * step
            start, stop = max(begin, first), min(begin + self.run, last)
            period = self.period if times > 1 else 0
            return Lines(start - first, stop - start, times, period), k * self.run + start - begin

        pieces, end = [], high
        if self.first + low * step < first:
            pieces.append(piece(low, 1))
            low += 1
        if low < high and self.first + (high - 1) * step + self.run > last:
            end -= 1
        if low < end:
            pieces.append(piece(low, end - low))
        return pieces + [piece(k, 1) for k in range(end, high)]


class Part(NamedTuple):
    """The rows and columns of each matrix of a parameter that are made orthogonal as one."""

    row: Lines
    col: Lines

    @property
    def rows(self) -> int:
        return self.row.total

    @property
    def cols(self) -> int:
        return self.col.total

    @property
    def size(self) -> tuple[int, int]:
        """Returns rows and columns of the block as a matrix with no more rows than columns."""
        return min(self.rows, self.cols), max(self.rows, self.cols)

    def of(self, matrix: Tensor) -> Tensor:
        """Returns a view of the block of a matrix, of three dimensions where runs of several rows
        or columns repeat."""
        if (self.rows, self.cols) == tuple(matrix.shape):
            return matrix
        return self.row.of(self.col.of(matrix, 1), 0)


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


def as_split(given: Any) -> Split:
    """Returns the parts of packed matrices as tuples, which may be given as lists."""
    if not isinstance(given, Sequence):
        return given
    plain: Any = tuple(tuple(one) if isinstance(one, Sequence) else one for one in given)
    return plain


def parts_of(shape: Sequence[int], split: Split) -> list[Part]:
    """Returns the blocks into which a packed matrix is split.

    Args:
        split: a number of equal parts of the rows; or the sizes of the parts, which add up to the
            rows or else to the columns; or ``(times, sizes)``, sizes which do so when they are
            repeated: part k has the k-th run of each repetition; or None.

    Raises:
        ValueError: it does not fit the shape.
    """
    _, rows, cols = matrix_shape(shape)
    all_rows, all_cols = Lines(0, rows), Lines(0, cols)
    if split is None:
        return [Part(all_rows, all_cols)]
    if isinstance(split, int):
        if split < 1 or rows % split:
            raise ValueError(f"split={split} does not divide the {rows} rows of {list(shape)}")
        split = (rows // split,) * split
    given: Any = as_split(split)
    takes_turns = len(given) == 2 and isinstance(given[1], tuple)
    times, sizes = given if takes_turns else (1, given)
    numbers = [times, *sizes]
    if len(numbers) < 2 or not all(isinstance(one, int) and one > 0 for one in numbers):
        raise ValueError(
            f"split={split} is wanted as a number of parts, their sizes, or (times, sizes)"
        )
    period = sum(sizes)
    if times * period not in (rows, cols):
        raise ValueError(
            f"split={tuple(split)} adds up to {times * period}, neither the {rows} rows nor the "
            f"{cols} columns of {list(shape)}"
        )
    first, parts = 0, []
    for size in sizes:
        repeats = times > 1 and size < period
        lines = Lines(first, size, times, period) if repeats else Lines(first, size * times)
        parts.append(Part(lines, all_cols) if times * period == rows else Part(all_rows, lines))
        first += size
    return parts


def blocks_among(
    parts: Sequence[Part], row: int, rows: int, cols: int
) -> list[tuple[int, Part, int]]:
    """Returns the blocks that ``rows`` rows from ``row`` have of each part, counted from there: the
    position of the part, the block, and the first of its rows in the part. A matrix that is not
    split has one block, whatever of it is there."""
    if len(parts) == 1:
        return [(0, Part(Lines(0, rows), Lines(0, cols)), row)]
    return [
        (p, Part(lines, part.col), first)
        for p, part in enumerate(parts)
        for lines, first in part.row.within(row, rows)
    ]


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
    if any(part.cols < cols for part in parts):
        return False
    if isinstance(param, DTensor):
        dims = {sharded_dim(placement) for placement in param.placements}
        return dims <= {None, 0} and cols % block_size == 0
    return rows * cols % block_size == 0 and all(
        part.row.first * cols % block_size == 0 and part.row.period * cols % block_size == 0
        for part in parts
    )


def blocks_of(scales: Tensor, block_size: int, elements: Lines) -> Tensor:
    """Returns a view of the scales of the blocks of some elements of a parameter."""
    first, last = elements.first // block_size, -(-(elements.first + elements.run) // block_size)
    if elements.times == 1:
        return scales.flatten()[first:last]
    period = elements.period // block_size
    return Lines(first, last - first, elements.times, period).of(scales.flatten(), 0)


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
