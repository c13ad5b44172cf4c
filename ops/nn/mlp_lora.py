"""The feed-forward half of a transformer block over frozen matrices with adapters, as one function
of autograd. Users call :func:`headroom.nn.functional.mlp_block`.

Each step is an op that layers call too: the norm, products with a matrix and its adapter, and the
activation. What this function decides is what is kept between the passes, and that both take a tile
of tokens at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._core.registration import require
from .._core.rows import autocast_dtype, cast, check_tensors
from ..functional.gemm import matmul_precision
from ..functional.linear import linear
from ..functional.linear_quantized import linear_quantized
from ..functional.lora import check_dropout, lora_linear, seed_of
from ..functional.mlp import (
    DOWN,
    DOWN_BIAS,
    GATE_UP,
    GATE_UP_BIAS,
    NORM_BIAS,
    NORM_WEIGHT,
    NORMS,
    X,
    kept_for,
)
from ..functional.norm import CASTINGS, layer_norm, rms_norm
from ..functional.quantize_matrix import QuantizedMatrix, parts_of


@dataclass(frozen=True)
class LowRank:
    """Holds an adapter of a matrix ``[out, in]``, ``scale * b @ a``, whose product is of rows that
    drop some of their elements. Arguments are those of :func:`headroom.functional.lora_linear`."""

    a: Tensor
    b: Tensor
    scale: float = 1.0
    dropout: float = 0.0
    seed: int | Tensor | None = None

    def __post_init__(self) -> None:
        check_tensors(a=self.a, b=self.b)
        check_dropout(self.dropout)


class Factor(NamedTuple):
    """A matrix ``[out, in]`` that gets no gradient, its bias and its adapter."""

    weight: Tensor | QuantizedMatrix
    bias: Tensor | None = None
    adapter: LowRank | None = None

    def cast(self, dtype: torch.dtype) -> Factor:
        """Returns it as autocast casts a matrix and a bias."""
        weight, bias, adapter = self
        if isinstance(weight, Tensor):
            (weight,) = cast(dtype, weight)
        return Factor(weight, *cast(dtype, bias), adapter)


@dataclass(frozen=True)
class Numbers:
    """Holds the numbers of a call, as the op ``headroom::mlp_block`` takes them."""

    norm: int
    casting: int
    eps: float
    offset: float
    activation: int
    residual: bool
    tile_tokens: int
    save: int


def mlp_lora(
    x: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    factors: tuple[Factor, Factor | None, Factor],
    n: Numbers,
) -> Tensor:
    """Returns ``x + down(act(gate(normed)) * up(normed))``. ``factors`` are those of gate, up and
    down; without the one of ``up``, the first is of gate and up, or there is no gate.

    Raises:
        RuntimeError: an argument does not fit, or a matrix requires grad.
    """
    require(x.dim() > 0, "x has no dimensions, wanted [..., hidden]")
    require(n.tile_tokens >= 0, f"tile_tokens is {n.tile_tokens}, wanted 0 or more")
    is_rms = n.norm == NORMS["rms"]
    require(norm_bias is None or not is_rms, "norm_bias is given, but only norm='layer' has one")
    require(
        is_rms or n.casting == CASTINGS["once"],
        "casting is 'llama' or 'narrow', wanted 'once' with norm='layer'",
    )
    if n.offset and norm_weight is not None and not is_rms:  # to which the op of that adds nothing
        norm_weight = norm_weight.float() + n.offset
        norm_bias = None if norm_bias is None else norm_bias.float()
    dtype = autocast_dtype(x.device.type)
    if dtype is not None:
        (x,), factors = cast(dtype, x), tuple(each and each.cast(dtype) for each in factors)
    gate, up, down = factors
    hidden, features = x.shape[-1], _shape(down)[1]
    for name, factor, rows in (("gate_up", gate, 0), ("up", up, features), ("down", down, hidden)):
        if factor is None:
            continue
        wanted = [rows or _shape(gate)[0], features if name == "down" else hidden]
        found = [*_shape(factor)]
        require(found == wanted, f"{name}_weight is {found}, wanted {wanted}")
        trains = isinstance(factor.weight, Tensor) and factor.weight.requires_grad
        require(
            not (trains and torch.is_grad_enabled()),
            f"{name}_weight requires grad, but gets no gradient beside adapters; freeze it with "
            "requires_grad_(False)",
        )
    widths = (features,) if up is not None else (features, 2 * features)
    require(
        _shape(gate)[0] in widths,
        f"gate_up_weight has {_shape(gate)[0]} rows, but down_weight has {features} columns",
    )
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return _composed(x, norm_weight, norm_bias, factors, n)
    matrices = [None if each is None else _matrix_of(each, x) for each in factors]
    tensors = [t for each in matrices for t in (_NO_TENSORS if each is None else each[:_TENSORS])]
    layouts = tuple(None if each is None else each.layout for each in matrices)
    return _MLP.apply(n, layouts, torch.is_grad_enabled(), x, norm_weight, norm_bias, *tensors)


def _shape(factor: Factor) -> tuple[int, ...]:
    return tuple(factor.weight.shape)


def times(x: Tensor, factor: Factor) -> Tensor:
    """Returns the product of rows with a matrix and its adapter, plus the bias."""
    weight, bias, one = factor
    if one is not None:
        own = {"scale": one.scale, "dropout": one.dropout, "seed": one.seed}
        return lora_linear(x, weight, bias, one.a, one.b, **own)
    if isinstance(weight, QuantizedMatrix):
        return linear_quantized(x, weight, bias)
    return linear(x, weight, bias)


def _composed(
    x: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    factors: tuple[Factor, Factor | None, Factor],
    n: Numbers,
) -> Tensor:
    """Returns the same from ops with gradients of their own: torch.compile decides by itself what
    is kept, and torch.func differentiates them."""
    if n.norm == NORMS["rms"]:
        casting = next(name for name, number in CASTINGS.items() if number == n.casting)
        normed = rms_norm(x, norm_weight, n.eps, offset=n.offset, casting=casting)
    else:
        normed = layer_norm(x, norm_weight, norm_bias, n.eps)
    assert isinstance(normed, Tensor)

    gate, up, down = factors
    gates = times(normed, gate)
    packed = up is None and gates.shape[-1] != _shape(down)[1]
    other = None if up is None else times(normed, up)
    inner = torch.ops.headroom.glu(gates, other, n.activation, packed)
    y = times(inner, down)
    return x + y if n.residual else y


# ---- Products ------------------------------------------------------------------------------------


class _Layout(NamedTuple):
    """Describes the tensors of a matrix and its adapter."""

    shape: tuple[int, ...]
    codes: tuple[int, int, bool]  # format, block size, and whether scales are codes
    scale: float
    dropout: float
    precision: int


class _Matrix(NamedTuple):
    """A factor of a call, whose rows are taken a tile at a time."""

    weight: Tensor
    scales: Tensor | None
    bias: Tensor | None
    a: Tensor | None
    b: Tensor | None
    seed: Tensor | None
    layout: _Layout

    def times(self, x: Tensor, tile: int) -> tuple[Tensor, Tensor | None]:
        """Returns the product, and what the adapter keeps for its gradient."""
        (rows, _), codes, scale, dropout, precision = self.layout
        weight, scales, bias, a, b, _, _ = self
        if a is not None:
            return torch.ops.headroom.lora_linear(
                *(x, weight, scales, bias, a, b, self._seed(tile)),
                *(rows, *codes, scale, dropout, precision),
            )
        if scales is not None:
            args = (x, weight, scales, bias, rows, *codes, precision)
            return torch.ops.headroom.linear_quantized(*args), None
        gemm = torch.ops.headroom.gemm
        return gemm(x, weight, None, bias, False, True, 1.0, 0.0, False, precision), None

    def gradients(
        self, dy: Tensor, x: Tensor | None, t: Tensor | None, tile: int, wants: tuple[bool, ...]
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Returns those of x, A and B, where they are wanted."""
        (_, cols), codes, scale, dropout, precision = self.layout
        if self.a is not None:
            found = torch.ops.headroom.lora_linear_backward(
                *(dy, x, t, self.weight, self.scales, self.a, self.b, self._seed(tile)),
                *(cols, *codes, scale, dropout, precision, *wants),
            )
            dx, da, db = (grad if wanted else None for grad, wanted in zip(found, wants))
            return dx, da, db
        if not wants[0]:
            return None, None, None
        if self.scales is not None:
            args = (dy, self.weight, self.scales, cols, *codes, precision)
            return torch.ops.headroom.linear_quantized_backward(*args), None, None
        gemm = torch.ops.headroom.gemm
        return (
            gemm(dy, self.weight, None, None, False, False, 1.0, 0.0, False, precision),
            None,
            None,
        )

    def _seed(self, tile: int) -> Tensor | None:
        """Returns the seed of the dropout of a tile, which counts its rows from 0."""
        return self.seed if self.seed is None or tile == 0 else self.seed + tile


_TENSORS = 6  # of a _Matrix
_NO_TENSORS = (None,) * _TENSORS


def _matrix_of(factor: Factor, x: Tensor) -> _Matrix:
    weight, scales, shape, codes = parts_of(factor.weight)
    one = factor.adapter
    scale, dropout = (1.0, 0.0) if one is None else (one.scale, one.dropout)
    layout = _Layout(
        *(tuple(shape), codes, scale, dropout),
        matmul_precision(x.dtype) if x.device.type == "cuda" else 0,
    )
    if one is None:
        return _Matrix(weight, scales, factor.bias, None, None, None, layout)
    seed = seed_of(one.seed, x.device) if dropout else None
    return _Matrix(weight, scales, factor.bias, one.a, one.b, seed, layout)


# ---- Tiles ---------------------------------------------------------------------------------------


class _Rows:
    """Collects rows by name: those of the only tile, or of all tiles in one tensor each."""

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens
        self.found: dict[str, Tensor] = {}

    def put(self, name: str, first: int, part: Tensor | None) -> None:
        if part is None:
            return
        if len(part) == self._tokens:
            self.found[name] = part
            return
        if name not in self.found:
            self.found[name] = part.new_empty((self._tokens, *part.shape[1:]))
        self.found[name][first : first + len(part)] = part


class _Sums:
    """Adds up the gradients of a parameter from several tiles, in float32."""

    def __init__(self) -> None:
        self.found: dict[str, Tensor] = {}

    def add(self, name: str, part: Tensor | None) -> None:
        if part is not None:
            known = self.found.get(name)
            self.found[name] = part if known is None else known.float().add_(part)

    def get(self, name: str, like: Tensor | None) -> Tensor | None:
        total = self.found.get(name)
        return total if total is None or like is None else total.to(like.dtype)


def _tiles(tokens: int, n: Numbers, device: torch.device) -> Iterator[tuple[int, slice]]:
    """Yields the number of each tile, and its rows; one of no rows where there are none."""
    step = n.tile_tokens or _TILE_TOKENS.get(device.type, _TILE_TOKENS["cuda"])
    for tile, first in enumerate(range(0, max(tokens, 1), step)):
        yield tile, slice(first, min(first + step, tokens))


# So many that products lose nothing by packing or decoding their matrices for each tile again: with
# AVX-512 a tile of 256 took 1.07 of the time.
_TILE_TOKENS = {"cpu": 512, "cuda": 4096}


class _Call(NamedTuple):
    """Holds the arguments of both passes."""

    numbers: Numbers
    norm_weight: Tensor | None
    norm_bias: Tensor | None
    gate: _Matrix
    up: _Matrix | None
    down: _Matrix

    def norm(self, x: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
        """Returns the normed rows, their means or None, and the reciprocals of their deviations."""
        n = self.numbers
        if n.norm == NORMS["rms"]:
            args = (x, self.norm_weight, None, n.eps, n.offset, n.casting)
            y, _, rstd = torch.ops.headroom.rms_norm(*args)
            return y, None, rstd
        args = (x, self.norm_weight, self.norm_bias, None, n.eps)
        y, _, mean, rstd = torch.ops.headroom.layer_norm(*args)
        return y, mean, rstd

    def norm_gradients(
        self,
        dnormed: Tensor,
        dy: Tensor,
        x: Tensor,
        mean: Tensor | None,
        rstd: Tensor,
        wants: tuple[bool, ...],
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Returns those of x, to which ``dy`` is added with a residual, of the weight and of the
        bias."""
        n, dsum = self.numbers, dy if self.numbers.residual else None
        if n.norm == NORMS["rms"]:
            dx, dweight, _ = torch.ops.headroom.rms_norm_backward(
                *(dnormed, dsum, x, self.norm_weight, rstd, n.offset, n.casting),
                *(True, wants[0], False),
            )
            return dx, dweight if wants[0] else None, None
        dx, dweight, dbias, _ = torch.ops.headroom.layer_norm_backward(
            *(dnormed, dsum, x, self.norm_weight, self.norm_bias, mean, rstd),
            *(True, *wants, False),
        )
        return dx, dweight if wants[0] else None, dbias if wants[1] else None

    def gates(self, normed: Tensor, tile: int) -> dict[str, Tensor | None]:
        """Returns gate and up, and what their adapters keep."""
        gate, gate_t = self.gate.times(normed, tile)
        up, up_t = (None, None) if self.up is None else self.up.times(normed, tile)
        return {"gate": gate, "up": up, "gate_t": gate_t, "up_t": up_t}

    def constant(self) -> _Call:
        """Returns the call without gradients."""
        plain, matrices = [], []
        for one in (self.norm_weight, self.norm_bias):
            plain.append(one if one is None else one.detach())
        for each in (self.gate, self.up, self.down):
            tensors = () if each is None else each[:_TENSORS]
            own = [t if t is None else t.detach() for t in tensors]
            matrices.append(None if each is None else _Matrix(*own, each.layout))
        return _Call(self.numbers, *plain, *matrices)

    def is_packed(self) -> bool:
        return self.up is None and self.gate.layout.shape[0] != self.down.layout.shape[1]

    def activated(self, gates: dict[str, Tensor | None]) -> Tensor:
        number, packed = self.numbers.activation, self.is_packed()
        return torch.ops.headroom.glu(gates["gate"], gates["up"], number, packed)


_GATES = ("gate", "up", "gate_t", "up_t")
_KEPT = ("x", "mean", "rstd", "normed", *_GATES, "activated", "down_t")
# The gradient of a bias passes through the activation, or not, as that of B does.
_BITS = {"x": X, "norm_weight": NORM_WEIGHT, "norm_bias": NORM_BIAS} | {
    f"{name}_{what}": bit
    for name, of_a, of_b in (
        ("gate", GATE_UP, GATE_UP_BIAS),
        ("up", GATE_UP, GATE_UP_BIAS),
        ("down", DOWN, DOWN_BIAS),
    )
    for what, bit in (("a", of_a), ("b", of_b), ("bias", of_b))
}
_ARGUMENTS = ("x", "norm_weight", "norm_bias") + tuple(
    f"{name}_{field}" for name in ("gate", "up", "down") for field in _Matrix._fields[:_TENSORS]
)

_OTHERS = 3  # arguments of the function that are no tensors, in front of those


def _call_of(numbers: Numbers, layouts: Any, given: tuple[Tensor | None, ...]) -> _Call:
    """Returns a call from all of ``_ARGUMENTS`` but x."""
    norm_weight, norm_bias, *tensors = given
    gate, up, down = (
        None if layout is None else _Matrix(*tensors[k * _TENSORS : (k + 1) * _TENSORS], layout)
        for k, layout in enumerate(layouts)
    )
    assert gate is not None and down is not None
    return _Call(numbers, norm_weight, norm_bias, gate, up, down)


class _MLP(torch.autograd.Function):
    """``mlp_lora`` and its gradient, whose own derivative the ops in it refuse."""

    @staticmethod
    def forward(
        ctx: Any, numbers: Numbers, layouts: Any, is_trained: bool, x: Tensor, *given: Any
    ) -> Tensor:
        needs = dict(zip(_ARGUMENTS, ctx.needs_input_grad[_OTHERS:]))
        wanted = 0
        for name, bit in _BITS.items():
            wanted |= bit if is_trained and needs[name] else 0
        kept = kept_for(numbers.save, wanted)
        call = _call_of(numbers, layouts, given)
        rows = x.reshape(-1, x.shape[-1])
        held, y = _Rows(len(rows)), _Rows(len(rows))
        for tile, at in _tiles(len(rows), numbers, x.device):
            normed, mean, rstd = call.norm(rows[at])
            gates = call.gates(normed, tile)
            activated = call.activated(gates)
            out, t = call.down.times(activated, tile)
            y.put("y", at.start, rows[at] + out if numbers.residual else out)
            keeps = {"normed": normed} if kept["normed"] else {}
            keeps |= {"mean": mean, "rstd": rstd} if kept["x"] else {}
            keeps |= gates if kept["gates"] else {}
            keeps |= {"activated": activated} if kept["activated"] else {}
            keeps |= {"down_t": t} if is_trained and needs["down_b"] else {}
            for name, part in keeps.items():
                held.put(name, at.start, part)
        if kept["x"]:
            held.found["x"] = x
        ctx.numbers, ctx.layouts, ctx.shape = numbers, layouts, x.shape
        ctx.save_for_backward(*given, *map(held.found.get, _KEPT))
        # No view: autograd lets nobody change one from here in place.
        return torch.ops.aten._unsafe_view(y.found["y"], x.shape)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        needs = dict(zip(_ARGUMENTS, ctx.needs_input_grad[_OTHERS:]))
        saved = ctx.saved_tensors
        call = _call_of(ctx.numbers, ctx.layouts, saved[: -len(_KEPT)])
        held = dict(zip(_KEPT, saved[-len(_KEPT) :]))
        del saved
        width = ctx.shape[-1]
        if held["x"] is not None:
            held["x"] = held["x"].reshape(-1, width)
        rows = dy.reshape(-1, width)
        dx, sums = _Rows(len(rows)), _Sums()
        for tile, at in _tiles(len(rows), ctx.numbers, dy.device):
            own = {name: None if part is None else part[at] for name, part in held.items()}
            dx.put("x", at.start, _backward_of_tile(call, needs, own, rows[at], tile, sums))
        named = dict(zip(_ARGUMENTS, (None, call.norm_weight, call.norm_bias)))
        for name, matrix in (("gate", call.gate), ("up", call.up), ("down", call.down)):
            if matrix is not None:
                named |= {f"{name}_{what}": getattr(matrix, what) for what in ("a", "b", "bias")}
        found = {name: sums.get(name, like) for name, like in named.items()}
        if needs["x"]:
            found["x"] = dx.found["x"].view(ctx.shape)
        return *(None,) * _OTHERS, *map(found.get, _ARGUMENTS)


def _backward_of_tile(
    call: _Call,
    needs: dict[str, bool],
    held: dict[str, Tensor | None],
    dy: Tensor,
    tile: int,
    sums: _Sums,
) -> Tensor | None:
    """Adds what a tile contributes to gradients of parameters, and returns that of its rows of
    x."""

    def add(name: str, matrix: _Matrix, dy: Tensor, x: Any, t: Any, wants_x: bool) -> Any:
        wants = wants_x, needs[f"{name}_a"], needs[f"{name}_b"]
        if needs[f"{name}_bias"]:
            sums.add(f"{name}_bias", dy.float().sum(0))
        if not any(wants):
            return None
        found, da, db = matrix.gradients(dy, x, t, tile, wants)
        sums.add(f"{name}_a", da)
        sums.add(f"{name}_b", db)
        return found

    def normed_again() -> Tensor:
        assert held["x"] is not None
        return call.constant().norm(held["x"].detach())[0]

    of_norm = needs["x"] or needs["norm_weight"] or needs["norm_bias"]
    first = [
        name for name in ("gate", "up") if any(needs[f"{name}_{w}"] for w in ("a", "b", "bias"))
    ]
    through = of_norm or bool(first)
    normed, gates = held["normed"], {name: held[name] for name in _GATES}
    activated = held["activated"]
    again = (through or (needs["down_a"] and activated is None)) and gates["gate"] is None
    with torch.enable_grad():  # by which a profile tells what is computed again
        if again:
            normed = normed_again() if normed is None else normed
            gates = call.constant().gates(normed, tile)
        if needs["down_a"] and activated is None:
            activated = call.activated(gates)
    dinner = add("down", call.down, dy, activated, held["down_t"], through)
    del activated
    if not through:
        return None
    dgate, dup, _ = torch.ops.headroom.glu_backward(
        *(dinner, gates["gate"], gates["up"], call.numbers.activation, call.is_packed(), False)
    )
    del dinner
    gate_t, up_t = gates["gate_t"], gates["up_t"]
    del gates
    if normed is None and (needs["gate_a"] or needs["up_a"]):
        with torch.enable_grad():
            normed = normed_again()
    dnormed = add("gate", call.gate, dgate, normed, gate_t, of_norm)
    if call.up is not None:
        more = add("up", call.up, dup, normed, up_t, of_norm)
        dnormed = None if dnormed is None else dnormed.add_(more)
    if not of_norm:
        return None
    wants = needs["norm_weight"], needs["norm_bias"]
    dx, dweight, dbias = call.norm_gradients(
        *(dnormed, dy, held["x"], held["mean"], held["rstd"], wants)
    )
    sums.add("norm_weight", dweight)
    sums.add("norm_bias", dbias)
    return dx
