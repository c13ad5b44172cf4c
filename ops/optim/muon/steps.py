"""Steps matrices: momentum, Newton-Schulz and update, by batches of matrices of one size whose
workspace is bounded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..._core.dtensor import place_of
from ..._core.grouping import grouped
from ...functional.newton_schulz import newton_schulz_, newton_schulz_workspace
from ...param_states.block_scales import absmax_of
from ...param_states.plan import Bucket, Call
from .matrices import (
    Part,
    Split,
    as_matrices,
    blocks_among,
    blocks_of,
    column_parts,
    in_order,
    matrix_shape,
    parts_of,
)
from .rule import Triple, lr_scale

MOMENT = "momentum_buffer"
ABSMAX = absmax_of(MOMENT)
ROW_VAR = "row_var"
UPDATE_SCALARS = ("lr", "lr_tensor", "found_inf", "stalled", "weights_mode")
ALIGNED = 256  # bytes, at whose multiples matrices and workspaces begin


class Rule(NamedTuple):
    """Holds what a step takes for all matrices of a group."""

    momentum: float
    nesterov: bool
    maximize: bool
    coefficients: tuple[Triple, ...]
    eps: float
    variant: str
    dtype: torch.dtype
    adjust_lr_fn: str | None
    weight_decay: float
    normuon: float | None
    split: Split
    transposed: bool
    block_size: int


class Matrix(NamedTuple):
    """A matrix of a parameter, or the part of it on this rank, with what a step takes for it."""

    owner: int  # the position of the parameter in its bucket
    part: Part  # of the whole matrix
    param: Tensor
    grad: Tensor
    moment: Tensor
    absmax: Tensor | None
    row_var: Tensor | None
    residual: Tensor | None
    step: Tensor | None
    scale: float
    place: tuple[int, int, int]  # hr_place in headroom.h


class Workspace:
    """Memory that the calls of a step use one after another. All reserve what they need before the
    first of them runs."""

    def __init__(self, device: torch.device) -> None:
        self.memory = torch.empty(0, dtype=torch.uint8, device=device)

    @property
    def device(self) -> torch.device:
        return self.memory.device

    def reserve(self, size: int) -> None:
        if size > self.memory.numel():
            self.memory = self.memory.new_empty(0)  # the smaller one is freed first
            self.memory = self.memory.new_empty(size)

    def take(self, first: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Returns the memory from a byte as a tensor."""
        numel = 1
        for size in shape:
            numel *= size
        run = self.memory[first : first + numel * dtype.itemsize]
        return run.view(dtype).view(tuple(shape))


def aligned(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED


class Batch:
    """A batch of matrices ``[count, m, n]`` in a workspace, with the workspace of its products.

    Attributes:
        end: the byte after the last that it uses.
    """

    def __init__(
        self, rule: Rule, count: int, size: tuple[int, int], device: torch.device, first: int = 0
    ) -> None:
        self.rule, self.count, self.size, self.first = rule, count, size, first
        own = newton_schulz_workspace(count, *size, rule.dtype, rule.variant, device)
        self._squares = first + aligned(count * size[0] * size[1] * rule.dtype.itemsize)
        self._space = self._squares + aligned(4 * count)
        self.end = self._space + aligned(own)

    def x(self, memory: Workspace) -> Tensor:
        return memory.take(self.first, (self.count, *self.size), self.rule.dtype)

    def squares(self, memory: Workspace) -> Tensor:
        return memory.take(self._squares, (self.count,), torch.float32)

    def orthogonalize(self, memory: Workspace, first: int = 0, last: int | None = None) -> None:
        """Makes the matrices from ``first`` to ``last`` orthogonal, by their squares."""
        x, squares = self.x(memory)[first:last], self.squares(memory)[first:last]
        if x.numel():
            if x.dtype == torch.float16:
                _to_float16(x, squares, self.rule.eps)
            space = memory.memory[self._space : self.end]
            rule = self.rule
            newton_schulz_(
                x,
                squares,
                coefficients=rule.coefficients,
                eps=rule.eps,
                variant=rule.variant,
                workspace=space,
            )


def as_gathered(x: Tensor) -> Tensor:
    """Returns matrices in the dtype that they have before they are made orthogonal: those in
    float16, whose range is too small for gradients, as bfloat16 in the same memory."""
    return x.view(torch.bfloat16) if x.dtype == torch.float16 else x


def _to_float16(x: Tensor, squares: Tensor, eps: float) -> None:
    """Turns gathered matrices into float16 in their place. They and the sums of their squares are
    divided, by a power of two near the norm or ``eps``."""
    norms = squares.sqrt().clamp_(eps, torch.finfo(torch.float32).max)
    factors = torch.ldexp(torch.ones_like(norms), -torch.frexp(norms).exponent)
    squares.copy_(norms.mul_(factors).square_())
    x.copy_(as_gathered(x).mul_(factors.to(torch.bfloat16)[:, None, None]))


def as_shaped(x: Tensor, part: Part) -> Tensor:
    """Returns a matrix of a batch with the rows and columns of the parameter."""
    return x.T if part.rows > part.cols else x


def largest_count(count: int, limit: int, bytes_of: Callable[[int], int]) -> int:
    """Returns how many of ``count`` matrices a batch has whose bytes are within the limit, and at
    least 1."""
    low, high = 1, count
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if bytes_of(middle) <= limit else (low, middle - 1)
    return low


def matrices_of(
    bucket: Bucket, columns: dict[str, list[Tensor]], rule: Rule, shapes: Iterable[Sequence[int]]
) -> tuple[list[Matrix], Call]:
    """Returns the matrices of the parameters of a bucket, or the rows of them that this rank has,
    and what to call after their step: it puts back convolutions whose memory order is not that of
    their columns, that of codes if there are any, which were copied.

    Args:
        columns: the states by name.
        shapes: of the whole parameters.

    Raises:
        NotImplementedError: a matrix is split that is sharded by other than rows.
    """
    found, copies = [], []
    residuals = columns.get(bucket.layout.weights.residual or "")
    for i, (param, shape) in enumerate(zip(bucket.params, shapes)):
        number, rows, cols = matrix_shape(param.shape)
        parts = parts_of(shape, rule.split)
        place, row = place_of(bucket.owners[i]), 0
        if len(parts) > 1 and tuple(param.shape) != tuple(shape):
            if cols != matrix_shape(shape)[2]:
                raise NotImplementedError(
                    "matrices that are split may be sharded by rows, and "
                    f"one of shape {list(shape)} is sharded otherwise"
                )
            row = place[0] // cols
        like = columns[MOMENT][i] if ABSMAX in columns else param
        kept = [param, columns[MOMENT][i], *([] if residuals is None else [residuals[i]])]
        if param.dim() > 3:
            views = [in_order(tensor, like) for tensor in kept]
            kept = [view.contiguous().flatten(1) for view in views]
            copies += [pair for pair in zip(views, kept) if not pair[0].is_contiguous()]
        params, moments, *rests = (as_matrices(tensor, like) for tensor in kept)
        grads = as_matrices(bucket.grads[i], like)
        absmax = columns[ABSMAX][i] if ABSMAX in columns else None
        row_vars, times = None, column_parts(shape, rule.split)
        if ROW_VAR in columns:
            row_vars = columns[ROW_VAR][i].view(number, times, rows)
        blocks = blocks_among(parts, row, rows, cols)
        for k, matrix in enumerate(params):
            for p, here, _ in blocks:
                outputs, inputs = parts[p].rows, parts[p].cols
                if rule.transposed:
                    outputs, inputs = inputs, outputs
                elements = here.row.times_of(cols)
                elements = elements._replace(first=elements.first + k * rows * cols)
                own = absmax
                if absmax is not None and here.rows * here.cols < param.numel():
                    own = blocks_of(absmax, rule.block_size, elements)
                row_var = None
                if row_vars is not None:
                    row_var = here.row.of(row_vars[k, p % times], 0)
                first = elements.first + here.col.first
                found.append(
                    Matrix(
                        owner=i,
                        part=parts[p],
                        param=here.of(matrix),
                        grad=here.of(grads[k]),
                        moment=here.of(moments[k]),
                        absmax=own,
                        row_var=row_var,
                        residual=here.of(rests[0][k]) if rests else None,
                        step=columns["step"][i] if "step" in columns else None,
                        scale=lr_scale(rule.adjust_lr_fn, outputs, inputs),
                        place=_place(place, param.numel(), first, here, cols),
                    )
                )

    def put_back() -> None:
        for view, copy in copies:
            view.copy_(copy.view(view.shape))

    return found, put_back


def _place(
    whole: tuple[int, int, int], numel: int, first: int, here: Part, cols: int
) -> tuple[int, int, int]:
    """Returns where the elements of a block lie in the whole parameter, which has ``numel`` of them
    here, in places ``whole``; ``first`` is that of the block's first one."""
    size, (start, length, stride) = here.rows * here.cols, whole
    if size == numel:
        return whole
    start += first // length * stride + first % length
    if length < size:  # columns are sharded
        return start, length, stride
    if here.row.times > 1:
        return start, here.row.run * cols, here.row.period * cols
    if here.col.times > 1:  # of which each row has as many runs
        return start, here.col.run, here.col.period
    return (start, size, 0) if here.cols == cols else (start, here.cols, cols)


class Copies:
    """Gives an op runs of rows or columns that repeat as one matrix, which is a copy, and puts it
    back after the op."""

    def __init__(self) -> None:
        self._pairs: list[tuple[Tensor, Tensor]] = []

    def matrix(self, view: Tensor, shape: Sequence[int]) -> Tensor:
        """Returns a block of a matrix, which has one dimension more if its runs repeat."""
        return view if view.dim() == 2 else self._kept(view, view.reshape(tuple(shape)))

    def dense(self, view: Tensor) -> Tensor:
        """Returns what rows or blocks of 8-bit codes have, as a contiguous tensor."""
        return view if view.is_contiguous() else self._kept(view, view.contiguous())

    def _kept(self, view: Tensor, copy: Tensor) -> Tensor:
        self._pairs.append((view, copy))
        return copy

    def put_back(self) -> None:
        for view, copy in self._pairs:
            view.copy_(copy.view(view.shape))


def gather_momentum(
    rule: Rule,
    matrices: Sequence[Matrix],
    updates: list[Tensor],
    squares: Tensor,
    options: dict[str, Any],
) -> None:
    """Updates the moments, and writes what is to be made orthogonal with its sums of squares: to
    the memory of ``updates``, :func:`as_gathered`."""
    copies, shapes = Copies(), [update.shape for update in updates]
    torch.ops.headroom.muon_momentum_(
        [one.grad.reshape(shape) for one, shape in zip(matrices, shapes)],
        [copies.matrix(one.moment, shape) for one, shape in zip(matrices, shapes)],
        [copies.dense(one.absmax) for one in matrices if one.absmax is not None],
        [as_gathered(one) for one in updates],
        squares,
        momentum=rule.momentum,
        nesterov=rule.nesterov,
        maximize=rule.maximize,
        block_size=rule.block_size,
        **{name: options.get(name) for name in ("grad_scale", "found_inf", "clip_coef")},
    )
    copies.put_back()


class Updates:
    """Updates parameters by orthogonal matrices. The counters of steps, which random rounding
    reads, grow once, however many matrices a parameter has."""

    def __init__(self, rule: Rule, matrices: Sequence[Matrix], options: dict[str, Any]) -> None:
        self._rule = rule
        self._options = {name: options[name] for name in UPDATE_SCALARS if name in options}
        self._seeds = options.get("weight_seeds")
        self._left: dict[int, int] = {}  # matrices of parameters that are not updated yet
        for one in matrices:
            self._left[one.owner] = self._left.get(one.owner, 0) + 1
        # Of matrices that are not the last of their parameter: counters that nobody reads again.
        counted = [one for one in matrices if one.step is not None]
        extra = len(counted) - len({one.owner for one in counted})
        self._counters = [torch.empty_like(one.step) for one in counted[:extra]]

    def run(self, matrices: Sequence[Matrix], updates: list[Tensor]) -> None:
        rule, options = self._rule, dict(self._options)
        steps = []
        for one in matrices:
            self._left[one.owner] -= 1
            if one.step is not None:
                is_last = not self._left[one.owner]
                steps.append(one.step if is_last else self._counters.pop().copy_(one.step))
        if self._seeds is not None:
            options["weight_seeds"] = [self._seeds[one.owner] for one in matrices]
            options["places"] = [number for one in matrices for number in one.place]
        copies, shapes = Copies(), [update.shape for update in updates]
        torch.ops.headroom.muon_update_(
            [copies.matrix(one.param, shape) for one, shape in zip(matrices, shapes)],
            updates,
            [copies.dense(one.row_var) for one in matrices if one.row_var is not None],
            steps,
            [
                copies.matrix(one.residual, shape)
                for one, shape in zip(matrices, shapes)
                if one.residual is not None
            ],
            scales=[one.scale for one in matrices],
            weight_decay=rule.weight_decay,
            beta2=0.95 if rule.normuon is None else rule.normuon,
            **options,
        )
        copies.put_back()


def batched(
    rule: Rule,
    matrices: list[Matrix],
    options: dict[str, Any],
    limit: int,
    memory: Workspace,
    group: Any = None,
) -> Call:
    """Returns the call that steps matrices which are whole on this rank, after it has reserved
    memory.

    Args:
        limit: bytes of workspace, unless one matrix alone needs more.
        group: of ranks with the same matrices, each of which makes its share of a batch orthogonal;
            None: this one makes all.
    """
    ranks, rank = (1, 0) if group is None else (group.size(), group.rank())

    def batch_of(count: int, size: tuple[int, int]) -> Batch:
        return Batch(rule, -(-count // ranks) * ranks, size, memory.device)

    batches = []
    for size, alike in grouped(matrices, lambda one: one.part.size).items():
        count = largest_count(len(alike), limit, lambda n, size=size: batch_of(n, size).end)
        for first in range(0, len(alike), count):
            chosen = alike[first : first + count]
            batches.append((batch_of(len(chosen), size), chosen))
            memory.reserve(batches[-1][0].end)
    updates = Updates(rule, matrices, options)

    def call() -> None:
        for batch, chosen in batches:
            x, squares = batch.x(memory), batch.squares(memory)
            views = [as_shaped(x[k], one.part) for k, one in enumerate(chosen)]
            gather_momentum(rule, chosen, views, squares[: len(chosen)], options)
            share = batch.count // ranks
            first, last = (min(k * share, len(chosen)) for k in (rank, rank + 1))
            batch.orthogonalize(memory, first, last)
            if group is not None:
                as_bytes = x.view(torch.uint8)
                own = as_bytes[rank * share : (rank + 1) * share]
                dist.all_gather_into_tensor(as_bytes, own, group=group)
            updates.run(chosen, views)

    return call
