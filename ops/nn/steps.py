"""The steps of a transformer block, between which it decides what is kept for the backward pass."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .._core.capture import is_capturing
from .._core.recompute import Dropping, can_drop
from .._core.rows import autocast_dtype
from ..checkpointing.in_8_bits import saved_in_8_bits
from ..host.saved import saved_on_host
from .fused import is_known

LEVELS = ("L0", "L1", "L2", "L3", "L4", "L5")
ON_HOST = "@host"
IN_8_BITS = ":8bit"
LEVELS_IN_8_BITS = {"L5": "L5" + IN_8_BITS}  # by the same without it
MLP_SAVES = ("all", "gate_up", "input", "input", "input", "input")  # per level

Run = Callable[..., Any]
Drop = Callable[[Tensor, Run], Tensor]


class SaveLevel(NamedTuple):
    """Says how much a block keeps, 0 to 5, whether that is rounded to 8 bits, and whether it is
    held on the host. Of those on the host, and of those that are not, a greater one keeps less."""

    number: int
    in_8_bits: bool = False
    on_host: bool = False

    @property
    def exact(self) -> str:
        """Returns the name of the level at which nothing is rounded or leaves the device."""
        return LEVELS[self.number]

    def __str__(self) -> str:
        return self.exact + IN_8_BITS * self.in_8_bits + ON_HOST * self.on_host


def save_level(name: Any, block: str = "") -> SaveLevel:
    """Returns what the name of a save level means.

    Args:
        block: its name, which an error says.

    Raises:
        ValueError: there is no such level.
    """
    block = block and f" for {block}"
    where = name.removesuffix(ON_HOST) if isinstance(name, str) else ""
    level = where.removesuffix(IN_8_BITS)
    rounded = ", ".join(LEVELS_IN_8_BITS.values())
    if level not in LEVELS:
        raise ValueError(
            f"save is {name!r}{block}, wanted one of {', '.join(LEVELS)}, {rounded}, or one of "
            f"these with {ON_HOST!r} behind it"
        )
    if level != where and level not in LEVELS_IN_8_BITS:
        raise ValueError(
            f"save is {name!r}{block}, but in 8 bits there is only {rounded}: what attention keeps "
            "must be that of the same q and k, and without it a level in 8 bits keeps hardly less "
            "than the next exact one"
        )
    return SaveLevel(LEVELS.index(level), level != where, where != name)


def levels_for_all(name: str, blocks: int) -> list[str]:
    """Returns the level of each of some blocks that run one after another, given one for all. The
    last block's tensors are wanted back as soon as they would have left, so they stay as they
    are."""
    return [name] * (blocks - 1) + [save_level(name).exact] * min(blocks, 1)


class AttentionSteps(NamedTuple):
    """Holds the steps of attention in one call.

    Attributes:
        linears: modules that take the input of attention.
        split: returns q, k and v as ``attend`` takes them, given the results of ``linears`` and the
            tables of the rotation.
        norms: the modules that ``split`` calls, or None.
        attend: returns the result of attention, given what runs its regions, and q, k and v.
        merge: returns the input of ``out``, given that result.
        out: the module behind attention.
        random: whether ``split`` may draw random numbers.
        draws: whether ``attend`` may.
    """

    linears: tuple[nn.Module, ...]
    split: Callable[..., tuple[Tensor, Tensor, Tensor]]
    norms: tuple[nn.Module | None, ...]
    attend: Callable[[Run, Tensor, Tensor, Tensor], Tensor]
    merge: Callable[[Tensor], Tensor] | None
    out: nn.Module
    random: bool = False
    draws: bool = False


class MLPSteps(NamedTuple):
    """Holds the steps of the feed-forward half.

    Attributes:
        linears: modules that take its input.
        activate: returns the input of ``down``, given the results of ``linears``.
        down: the module behind the activation.
        random: whether ``activate`` may draw random numbers.
        fused: returns ``x + mlp(norm(x))``, given x and what ``mlp_block`` calls ``save``; or None.
    """

    linears: tuple[nn.Module, ...]
    activate: Callable[..., Tensor]
    down: nn.Module
    random: bool = False
    fused: Callable[[Tensor, str], Tensor] | None = None


class BlockSteps(NamedTuple):
    """Holds the steps of a block in one call. Layouts and norms are those of
    :class:`headroom.nn.Block`; dropout is the probability behind the halves, 0 if not in training.
    """

    layout: str
    attention: AttentionSteps
    mlp: MLPSteps
    attention_norm: nn.Module
    mlp_norm: nn.Module | None = None
    attention_post_norm: nn.Module | None = None
    mlp_post_norm: nn.Module | None = None
    attention_dropout: float = 0.0
    mlp_dropout: float = 0.0


def run_steps(
    steps: Callable[[], BlockSteps], save: SaveLevel, x: Tensor, *tables: Tensor | None
) -> Tensor:
    """Returns the result of a block.

    Args:
        steps: returns the steps. It is a function, because torch.compile does not take modules
            through the boundary of a checkpoint.
        save: what is kept, and where.
        x: the input.
        *tables: of the rotation.
    """
    level = save.number
    if save.on_host and not (level == 5 and torch.compiler.is_compiling()):
        with saved_on_host(stay=tables):
            return run_steps(steps, save._replace(on_host=False), x, *tables)
    if save.in_8_bits:
        with saved_in_8_bits((x,)):
            return run_steps(steps, SaveLevel(level), x, *tables)
    if torch.compiler.is_compiling():
        if level == 5 and torch.is_grad_enabled():

            def whole(x: Tensor, *tables: Tensor | None) -> Tensor:
                return _run(steps(), 0, _plain, MLP_SAVES[0], x, *tables)

            return checkpoint(whole, x, *tables, use_reentrant=False)
        # What an op returns for its gradient is kept in a traced graph too.
        return _run(steps(), 0, _plain, MLP_SAVES[level if level < 5 else 0], x, *tables)
    if level == 0 or not can_drop():
        return _run(steps(), 0, _plain, MLP_SAVES[0], x, *tables)
    with Dropping() as dropping:
        return _run(steps(), level, dropping.run, MLP_SAVES[level], x, *tables)


def _plain(
    function: Callable[..., Any], *inputs: Tensor | None, random: bool = False, **_: Any
) -> Any:
    """Takes the place of :meth:`Dropping.run` where nothing is dropped."""
    return function(*inputs)


def _lowered(x: Tensor, run: Run) -> Tensor:
    """Returns ``x`` in the dtype of autocast, as a Linear would cast it, so that this copy, which
    the Linear keeps, is dropped too."""
    dtype = autocast_dtype(x.device.type)
    if dtype is None or x.dtype != torch.float32:
        return x
    return run(lambda x: x.to(dtype), x)


def _reading(run: Run, *modules: nn.Module | None, random: bool = False) -> Run:
    """Returns ``run`` for a function that calls these modules. Some may have taken the place of
    others, and draw random numbers, as adapters with dropout do."""
    if run is _plain:
        return run
    random = random or not all(map(is_known, modules))
    return functools.partial(run, reads=modules, random=random)


class _Dropout:
    """Drops elements in one call, the same again if asked: a seed is kept in place of a mask."""

    def __init__(self, p: float) -> None:
        self.p = p
        # From torch's generator, so that torch.manual_seed decides, and a checkpoint restores it.
        self._seed = int(torch.randint(2**62, (), device="cpu"))
        self._kept: Tensor | None = None

    def _mask(self, shape: torch.Size, device: torch.device) -> Tensor:
        generator = torch.Generator(device).manual_seed(self._seed)
        mask = torch.empty(shape, dtype=torch.bool, device=device)
        return mask.bernoulli_(self.p, generator=generator)

    def __call__(self, x: Tensor, run: Run) -> Tensor:
        if self._kept is None and x.is_cuda and is_capturing():
            # A seed would drop the same elements in every replay, and a generator cannot be made.
            # torch's own draws others in each; it cannot repeat them, so that the mask is kept.
            mask = torch.empty(x.shape, dtype=torch.bool, device=x.device)
            self._kept = mask.bernoulli_(self.p)
        dropped = self._kept
        if dropped is None:
            dropped = run(functools.partial(self._mask, x.shape, x.device))
        scale = 1 / (1 - self.p) if self.p < 1 else 0.0
        return x.masked_fill(dropped, 0.0) * scale


def _drop(p: float) -> Drop:
    if p == 0:
        return lambda x, run: x
    if torch.compiler.is_compiling():
        return lambda x, run: F.dropout(x, p)
    return _Dropout(p)


def _run(
    steps: BlockSteps, level: int, run: Run, mlp_save: str, x: Tensor, *tables: Tensor | None
) -> Tensor:
    """Runs a block; what ``run`` runs is dropped."""
    layout, attention, mlp = steps.layout, steps.attention, steps.mlp
    behind_attention = functools.partial(_add_attention, steps, _drop(steps.attention_dropout))
    behind_mlp = functools.partial(_add_mlp, steps, _drop(steps.mlp_dropout))

    attention_norm = functools.partial(_reading(run, steps.attention_norm), steps.attention_norm)
    normed = x if layout == "post" else attention_norm(x)
    rows = _attend(attention, level, run, normed, *tables)
    if layout == "parallel":
        inner = _inner(mlp, level, run, normed)
        return behind_mlp(run, behind_attention(run, x, rows), inner)
    del normed  # what is dropped shall not live on in this frame
    if level < 4:
        x = behind_attention(run, x, rows)
    else:
        again = _reading(run, attention.out, steps.attention_post_norm)
        x = again(functools.partial(behind_attention, _plain), x, rows)
    del rows
    if layout == "pre" and mlp.fused is not None and steps.mlp_dropout == 0:
        return mlp.fused(x, mlp_save)
    if layout == "post":
        x = attention_norm(x)
        inner = _inner(mlp, level, run, x)
    else:
        assert steps.mlp_norm is not None
        normed = _reading(run, steps.mlp_norm)(steps.mlp_norm, x)
        inner = _inner(mlp, level, run, normed)
        del normed
    if level < 5 or layout == "pre":
        return behind_mlp(run, x, inner)
    # A norm behind the sum, or in front of it, keeps its input: hence the product again.
    norm = steps.mlp_norm if layout == "post" else steps.mlp_post_norm
    again = _reading(run, mlp.down, norm)
    return again(functools.partial(behind_mlp, _plain), x, inner, keep_results=True)


def _attend(
    attention: AttentionSteps, level: int, run: Run, x: Tensor, *tables: Tensor | None
) -> Tensor:
    linears, norms, merge = attention.linears, attention.norms, attention.merge

    def project(x: Tensor, *tables: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        x = _lowered(x, _plain)  # once, so that gradients are added in the same dtype at each level
        return attention.split(*[linear(x) for linear in linears], *tables)

    def whole(x: Tensor, *tables: Tensor | None) -> Tensor:
        rows = attention.attend(_plain, *project(x, *tables))
        return rows if merge is None else merge(rows)

    if level == 5:
        random = attention.random or attention.draws
        return _reading(run, *linears, *norms, random=random)(whole, x, *tables)
    if level < 3:
        # v is one of the results, or a part of one. So all are kept, and q and k rotated again.
        x = _lowered(x, run)
        packed = [linear(x) for linear in linears]
        split = _reading(run, *norms, random=attention.random)
        heads = split(attention.split, *packed, *tables)
        del packed
    else:
        heads = _reading(run, *linears, *norms, random=attention.random)(project, x, *tables)
    rows = attention.attend(run, *heads)
    return rows if merge is None else run(merge, rows)


def _inner(mlp: MLPSteps, level: int, run: Run, x: Tensor) -> Tensor:
    if level < 2:
        x = _lowered(x, run)
        return _reading(run, random=mlp.random)(mlp.activate, *[first(x) for first in mlp.linears])

    def whole(x: Tensor) -> Tensor:
        x = _lowered(x, _plain)
        return mlp.activate(*[first(x) for first in mlp.linears])

    return _reading(run, *mlp.linears, random=mlp.random)(whole, x)


def _add_attention(steps: BlockSteps, drop: Drop, run: Run, x: Tensor, rows: Tensor) -> Tensor:
    out = drop(steps.attention.out(rows), run)
    norm = steps.attention_post_norm
    return x + (out if norm is None else norm(out))


def _add_mlp(steps: BlockSteps, drop: Drop, run: Run, x: Tensor, inner: Tensor) -> Tensor:
    out = drop(steps.mlp.down(inner), run)
    norm = steps.mlp_post_norm
    x = x + (out if norm is None else norm(out))
    if steps.layout != "post":
        return x
    assert steps.mlp_norm is not None
    return steps.mlp_norm(x)
