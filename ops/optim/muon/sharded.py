"""Steps matrices whose rows are sharded over ranks: momentum and update run on the shards, and each
rank makes its share of the matrices orthogonal as a whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from ..._core.dtensor import place_of, sharded_dim
from ..._core.grouping import grouped
from ...param_states.plan import Bucket, Call
from .matrices import Lines, Part, as_matrices, blocks_among, matrix_shape, parts_of
from .steps import (
    Batch,
    Copies,
    Matrix,
    Rule,
    Updates,
    Workspace,
    aligned,
    as_gathered,
    as_shaped,
    gather_momentum,
    largest_count,
    matrices_of,
)


class Sharding(NamedTuple):
    """Says how the matrices of DTensors are spread over ranks."""

    mesh: Any
    placements: tuple[Any, ...]
    dim: int | None  # of the mesh, over which rows are sharded; None: they are sharded otherwise


def sharding_of(param: Tensor) -> Sharding | None:
    """Returns how the matrices of a parameter are sharded, or None if those that this rank has are
    whole: experts that are sharded by expert are."""
    if not isinstance(param, DTensor):
        return None
    first = int(param.dim() == 3)  # the first dimension of a matrix
    cut = [
        (dim, placement)
        for dim, placement in enumerate(param.placements)
        if sharded_dim(placement) is not None and sharded_dim(placement) >= first
    ]
    if not cut:
        return None
    rows = len(cut) == 1 and type(cut[0][1]) is Shard and cut[0][1].dim == 0 and not first
    return Sharding(param.device_mesh, tuple(param.placements), cut[0][0] if rows else None)


def check_even(owners: Sequence[Tensor], sharding: Sharding) -> None:
    """Refuses shards of several sizes, whose states on the host pass in other pieces on each rank,
    where all ranks must step the same matrices together.

    Raises:
        RuntimeError: a dimension does not divide by the ranks that it is sharded over.
    """
    for owner in owners:
        for ranks, placement in zip(sharding.mesh.shape, sharding.placements):
            dim = sharded_dim(placement)
            if dim is not None and owner.shape[dim] % ranks:
                raise RuntimeError(
                    f"states of Muon are offloaded where shards are alike, and {owner.shape[dim]} "
                    f"of shape {list(owner.shape)} does not divide by {ranks} ranks"
                )


def prepared_sharded(
    rule: Rule,
    bucket: Bucket,
    columns: dict[str, list[Tensor]],
    sharding: Sharding,
    options: dict[str, Any],
    limit: int,
    memory: Workspace,
) -> Call:
    """Returns the call that steps matrices of one sharding, after it has reserved memory. All ranks
    run it together."""
    if rule.normuon is not None and sharding.dim is None:
        raise RuntimeError(
            "normuon normalizes whole rows, and these matrices are sharded by other than rows: "
            "leave it out, or use fully_shard(), or DDP with process_group"
        )
    matrices, put_back = matrices_of(
        bucket, columns, rule, [owner.shape for owner in bucket.owners]
    )
    updates = Updates(rule, matrices, options)
    by_owner = grouped(matrices, lambda one: one.owner)
    positions = range(len(bucket.owners))
    runs: list[Any] = []
    if sharding.dim is None:
        runs = [
            _Gathered(rule, bucket.owners[i], sharding, by_owner.get(i, []), memory)
            for i in positions
        ]
    else:
        group = sharding.mesh.get_group(sharding.dim)
        shapes = grouped(positions, lambda i: matrix_shape(bucket.owners[i].shape)[1:])
        for shape, alike in shapes.items():

            def exchange_of(count: int, shape: tuple[int, int] = shape) -> _Exchange:
                return _Exchange(rule, shape, count, group, memory.device)

            count = largest_count(len(alike), limit, lambda n: exchange_of(n).end)
            for first in range(0, len(alike), count):
                chosen = alike[first : first + count]
                run = exchange_of(len(chosen))
                run.begin([by_owner.get(i, []) for i in chosen], memory)
                runs.append(run)

    def call() -> None:
        for run in runs:
            run.run(options, updates)
        put_back()

    return call


class _Exchange:
    """A batch of parameters of one shape, each of which one rank makes orthogonal.

    Rows go to that rank and come back, by one exchange of all ranks each way. The parameters of a
    rank are consecutive: as many for each, but for the last ranks. Of each parameter a rank's rows
    lie part after part, or if columns are split its columns do.
    """

    def __init__(
        self, rule: Rule, shape: tuple[int, int], count: int, group: Any, device: torch.device
    ) -> None:
        self._rule, self._group, self._count = rule, group, count
        rows, self._cols = shape
        ranks, self._rank = group.size(), group.rank()
        share, chunk = -(-count // ranks), -(-rows // ranks)
        firsts = [min(rank * chunk, rows) for rank in range(ranks + 1)]
        self._rows = [(first, last - first) for first, last in zip(firsts, firsts[1:])]
        self._first = min(self._rank * share, count)
        own = [min((rank + 1) * share, count) - min(rank * share, count) for rank in range(ranks)]
        self._own, mine = own[self._rank], self._rows[self._rank][1]
        self._there = [n * mine * self._cols for n in own]  # elements of the shards here, by owner
        self._here = [self._own * n * self._cols for _, n in self._rows]  # of own, by their rank
        self._parts = parts_of(shape, rule.split)
        size = rule.dtype.itemsize
        self._shape = count, mine, self._cols
        self._received = aligned(sum(self._there) * size)
        self._sums = self._received + aligned(sum(self._here) * size)
        self._local_sums = self._sums + aligned(4 * count * len(self._parts))
        self._blocks = self._packed(*self._rows[self._rank])
        self.end = self._local_sums + aligned(4 * count * len(self._blocks))
        self._batches: list[tuple[Batch, list[int]]] = []
        for size, alike in grouped(range(len(self._parts)), lambda p: self._parts[p].size).items():
            batch = Batch(rule, self._own * len(alike), size, device, self.end)
            self._batches.append((batch, alike))
            self.end = batch.end

    def begin(self, matrices: Sequence[Sequence[Matrix]], memory: Workspace) -> None:
        """Takes the rows that this rank has of each parameter."""
        self._memory = memory
        memory.reserve(self.end)
        given = [one for each in matrices for one in each]
        self._row_vars = [one.row_var for one in given]  # which the op takes of whole matrices
        self._matrices = [one._replace(row_var=None) for one in given]
        # All have the same blocks of each parameter: none if there are no rows on this rank.
        self._places = [(k, block) for k, _ in enumerate(matrices) for block in self._blocks]

    def _packed(self, first: int, rows: int) -> list[tuple[int, Part, int]]:
        """Returns the blocks of a rank that has these rows, as :func:`blocks_among`, where they lie
        in an exchange."""
        packed, row, col = [], 0, 0
        for p, here, begin in blocks_among(self._parts, first, rows, self._cols):
            packed.append((p, Part(Lines(row, here.rows), Lines(col, here.cols)), begin))
            if here.cols == self._cols:
                row += here.rows
            else:
                col += here.cols
        return packed

    def _pieces(self, received: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Returns pairs of rows of own matrices: in the memory of the exchange and in a batch."""
        wholes: dict[int, Tensor] = {}
        for batch, alike in self._batches:
            x = batch.x(self._memory).unflatten(0, (self._own, len(alike)))
            for j, p in enumerate(alike):
                part = self._parts[p]
                wholes[p] = x[:, j].transpose(1, 2) if part.rows > part.cols else x[:, j]
        pairs = []
        for (first, rows), source in zip(self._rows, received.split(self._here)):
            matrices = source.view(self._own, rows, self._cols)
            for p, block, begin in self._packed(first, rows):
                if block.rows:
                    piece = matrices.narrow(1, block.row.first, block.rows)
                    piece = piece.narrow(2, block.col.first, block.cols)
                    pairs.append((piece, wholes[p].narrow(1, begin, block.rows)))
        return pairs

    def run(self, options: dict[str, Any], updates: Updates) -> None:
        memory, dtype, parts = self._memory, self._rule.dtype, len(self._parts)
        local = memory.take(0, self._shape, dtype)
        received = memory.take(self._received, (sum(self._here),), dtype)
        sums = memory.take(self._sums, (self._count * parts,), torch.float32)
        views = [block.of(local[k]) for k, (_, block, _) in self._places]
        sums.zero_()
        if views:
            own = memory.take(self._local_sums, (len(views),), torch.float32)
            gather_momentum(self._rule, self._matrices, views, own, options)
            of_blocks = own.view(self._count, len(self._blocks))
            for j, (p, _, _) in enumerate(self._blocks):
                sums.view(self._count, parts)[:, p].add_(of_blocks[:, j])
        dist.all_reduce(sums, group=self._group)
        flat = local.view(-1)
        self._exchange(received, flat, self._here, self._there)
        if self._own:
            squares = sums.view(self._count, parts)[self._first : self._first + self._own]
            for batch, alike in self._batches:
                own = batch.squares(memory).view(self._own, len(alike))
                for j, p in enumerate(alike):
                    own[:, j].copy_(squares[:, p])
            for piece, rows in self._pieces(received):
                rows.copy_(piece)
            for batch, _ in self._batches:
                batch.orthogonalize(memory)
            for piece, rows in self._pieces(received):
                piece.copy_(rows)
        self._exchange(flat, received, self._there, self._here)
        if self._rule.normuon is not None:
            self._scale_rows(views, self._rule.normuon, options.get("found_inf"))
        if views:
            updates.run(self._matrices, views)

    def _scale_rows(self, views: list[Tensor], beta2: float, found_inf: Tensor | None) -> None:
        """Scales rows as ``hr_muon_update`` does. Their mean squares are of this rank, and norms of
        matrices, which stay as they are, of all."""
        places = [k * len(self._parts) + p for k, (p, _, _) in self._places]
        sums = torch.zeros(2, self._count * len(self._parts), device=self._memory.device)
        factors = []
        for place, view, row_var in zip(places, views, self._row_vars):
            assert row_var is not None
            squares = torch.linalg.vector_norm(view, dim=1, dtype=torch.float32).square_()
            old = row_var.flatten()  # runs that repeat are copied
            new = old.lerp(squares / view.shape[1], 1 - beta2)
            new = new if found_inf is None else new.where(found_inf == 0, old)
            row_var.copy_(new.view(row_var.shape))
            factors.append(1 / (new.sqrt() + 1e-10))
            after = squares * factors[-1].square()
            sums[:, place] += torch.stack((squares.sum(), after.sum()))
        dist.all_reduce(sums, group=self._group)
        before, after = sums.sqrt_()
        for place, view, factor in zip(places, views, factors):
            view.mul_((factor * before[place] / (after[place] + 1e-10))[:, None])

    def _exchange(self, out: Tensor, given: Tensor, here: list[int], there: list[int]) -> None:
        size = out.element_size()  # collectives of the CPU do not have all dtypes
        dist.all_to_all_single(
            out.view(torch.uint8),
            given.view(torch.uint8),
            [n * size for n in here],
            [n * size for n in there],
            group=self._group,
        )


class _Gathered:
    """A parameter that is sharded by more than rows: every rank gathers it and makes it
    orthogonal."""

    def __init__(
        self,
        rule: Rule,
        owner: Tensor,
        sharding: Sharding,
        matrices: Sequence[Matrix],
        memory: Workspace,
    ) -> None:
        self._rule, self._owner, self._sharding = rule, owner, sharding
        self._matrices, self._memory = matrices, memory
        self._row = place_of(owner)[0] // max(owner.shape[-1], 1)
        number, _, _ = matrix_shape(owner.shape)
        self._parts = parts_of(owner.shape, rule.split)
        self._batches = []
        for size, alike in grouped(self._parts, lambda part: part.size).items():
            batch = Batch(rule, number * len(alike), size, memory.device)
            memory.reserve(batch.end)
            self._batches.append((batch, alike))

    def run(self, options: dict[str, Any], updates: Updates) -> None:
        rule, owner, memory = self._rule, self._owner, self._memory
        mesh, placements = self._sharding.mesh, self._sharding.placements
        local = torch.empty(owner.to_local().shape, dtype=rule.dtype, device=memory.device)
        copies = Copies()
        views = self._views(local, copies)
        if views:
            sums = torch.empty(len(views), dtype=torch.float32, device=memory.device)
            gather_momentum(rule, self._matrices, views, sums, options)
            copies.put_back()
        form = {"shape": owner.shape, "stride": torch.empty(owner.shape, device="meta").stride()}
        sharded = DTensor.from_local(local, mesh, placements, run_check=False, **form)
        whole = sharded.full_tensor()
        for batch, alike in self._batches:
            x, squares = batch.x(memory), batch.squares(memory)
            blocks = [part.of(one) for one in as_matrices(whole, whole) for part in alike]
            parts: list[Part] = [part for _ in as_matrices(whole, whole) for part in alike]
            for k, (block, part) in enumerate(zip(blocks, parts)):
                as_shaped(x[k], part).copy_(block.reshape(part.rows, part.cols))
            norms = torch.linalg.vector_norm(as_gathered(x), dim=(1, 2), dtype=torch.float32)
            squares.copy_(norms.square())
            batch.orthogonalize(memory)
            for k, (block, part) in enumerate(zip(blocks, parts)):
                block.copy_(as_shaped(x[k], part).reshape(block.shape))
        everywhere = [Replicate()] * mesh.ndim
        spread = DTensor.from_local(whole, mesh, everywhere, run_check=False)
        local = spread.redistribute(placements=placements).to_local()
        if views:
            updates.run(self._matrices, self._views(local.contiguous(), Copies()))

    def _views(self, local: Tensor, copies: Copies) -> list[Tensor]:
        """Returns the parts of a shard that belong to the matrices here."""
        views = []
        for one in as_matrices(local, local):
            for _, here, _ in blocks_among(self._parts, self._row, *one.shape):
                views.append(copies.matrix(here.of(one), (here.rows, here.cols)))
        return views
