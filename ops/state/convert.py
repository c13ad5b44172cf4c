"""Optimizer states from one library to another: what a checkpoint needs to resume elsewhere.

A reader for each library takes the state of one parameter to a neutral form, a writer takes it from
there. What the target cannot keep is measured by reading back what was written.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from tqdm import tqdm

from .._core.registration import FLOATS
from .._core.weight_modes import HALVES, RESIDUALS
from ..functional.adamw8bit import BLOCK_SIZES
from ..functional.dynamic_map import dynamic_map
from ..functional.weights import join_weights_
from ..optim.adam8bit import ABSMAXS, OPTIONS, _is_dense, _zero_absmaxs

__all__ = ["LIBRARIES", "Converted", "Loss", "Report", "convert_state"]

BNB_WRAPPER = "__bnb_optimizer_quant_state__"
BNB_BLOCK_SIZES = (256, 2048, 4096, 1024, 512, 128, 64)  # 2048 before 0.44
FLASH_GROUP = 32
PIECE = 2**20  # elements worked on at a time
MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
SQUARES = ("exp_avg_sq", "max_exp_avg_sq", "row", "col", "variance")  # which are not negative
STEPS = 2.0**53  # the largest counter that Headroom steps from, and that a float64 counts exactly


# ---- 8-bit moments -------------------------------------------------------------------------------


@dataclass
class Codes:
    """A moment in 8 bits: a code per element, a scale per block of elements in memory order."""

    codes: Tensor  # uint8
    absmax: Tensor  # float32, flat
    block_size: int
    is_signed: bool
    values: Tensor | None = None  # the map; None: dynamic_map()

    def __post_init__(self) -> None:
        if type(self.block_size) is not int or self.block_size < 1:
            raise ValueError(f"has blocks of {_shown(self.block_size)} elements, wanted 1 or more")
        blocks = -(-self.codes.numel() // self.block_size)
        if self.absmax.numel() != blocks or self.codes.dtype != torch.uint8:
            raise ValueError(
                f"has {self.absmax.numel()} scales and codes of {self.codes.dtype}, wanted "
                f"{blocks} and torch.uint8"
            )
        if self.values is not None and self.values.shape != (256,):
            raise ValueError(f"has a map of shape {tuple(self.values.shape)}, wanted (256,)")

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    def clone(self) -> Codes:
        return replace(self, codes=self.codes.clone(), absmax=self.absmax.clone())

    def decode(self) -> Tensor:
        values = dynamic_map(self.is_signed) if self.values is None else self.values
        values, codes = values.to(self.codes.device), _flat(self.codes)
        out = torch.empty(codes.shape, dtype=torch.float32, device=codes.device)
        for part, blocks in _pieces(codes.numel(), self.block_size):
            scales = self.absmax[blocks].repeat_interleave(self.block_size)
            part_codes = codes[part].int()
            out[part] = values.index_select(0, part_codes) * scales[: part_codes.numel()]
        return _shaped(out, self.codes)


def encode(moment: Tensor, block_size: int, is_signed: bool) -> Codes:
    """The codes and scales that the kernels store for a moment: see hr_adamw8bit in headroom.h."""
    moment = moment.float()
    flat, zero = _flat(moment), 127 if is_signed else 0
    thresholds = _thresholds(is_signed).to(flat.device)
    codes = torch.empty(flat.shape, dtype=torch.uint8, device=flat.device)
    absmax = torch.empty(-(-flat.numel() // block_size), dtype=torch.float32, device=flat.device)
    for part, blocks in _pieces(flat.numel(), block_size):
        x = flat[part]
        rows = torch.nn.functional.pad(x, (0, -x.numel() % block_size)).view(-1, block_size)
        largest = rows.abs().amax(1)
        largest = largest.masked_fill(~largest.isfinite(), math.nan)
        first = torch.ones_like(largest)
        first = first.masked_fill(largest < 2.0**-64, 2.0**64)
        first = first.masked_fill(largest > 2.0**64, 2.0**-64)
        second = (1 / (largest * first)).masked_fill(largest == 0, 0)
        y = (rows * first[:, None] * second[:, None]).flatten()[: x.numel()]
        nearest = torch.searchsorted(thresholds, y, out_int32=True)
        nearest[y.isnan()] = zero
        if not is_signed:  # what is positive never becomes zero
            nearest[(x > 0) & (nearest == 0)] = 1
        codes[part], absmax[blocks] = nearest.to(torch.uint8), largest
    return Codes(_shaped(codes, moment), absmax, block_size, is_signed)


def _is_finite(numbers: Tensor, is_signed: bool) -> bool:
    """Whether all are finite, and not negative unless signed."""
    if not numbers.numel():
        return True
    low, high = (number.item() for number in torch.aminmax(numbers))  # a NaN spreads to both
    return (low > -math.inf if is_signed else low >= 0) and high < math.inf


def _thresholds(is_signed: bool) -> Tensor:
    """The largest number that gets each code but the last: a midpoint goes to the lower code."""
    values = dynamic_map(is_signed).double()
    midpoints = (values[:-1] + values[1:]) / 2  # exact
    rounded = midpoints.float()
    below = torch.nextafter(rounded, torch.full_like(rounded, -math.inf))
    return torch.where(rounded > midpoints, below, rounded)


def _pieces(numel: int, block_size: int) -> Iterable[tuple[slice, slice]]:
    """Slices of the elements, and of the blocks that they are."""
    step = max(1, PIECE // block_size)
    for first in range(0, -(-numel // block_size), step):
        elements = slice(first * block_size, min(numel, (first + step) * block_size))
        yield elements, slice(first, first + step)


def _flat(tensor: Tensor) -> Tensor:
    """The elements in memory order, or in that of their indices if there are gaps."""
    if not _is_dense(tensor):
        tensor = tensor.contiguous()
    return tensor.as_strided((tensor.numel(),), (1,))


def _shaped(flat: Tensor, like: Tensor) -> Tensor:
    """The way back of :func:`_flat`."""
    return flat.as_strided(like.shape, like.stride()) if _is_dense(like) else flat.view(like.shape)


# ---- FlashOptim's moments and weights (arXiv:2602.23349) -----------------------------------------


def _decode_flash(codes: Tensor, scales: Tensor, is_signed: bool) -> Tensor:
    y = _flat(codes).float() / (127.0 if is_signed else 255.0)
    y = y / (2.0 - y.abs()) if is_signed else y
    if scales.dtype == torch.bfloat16:  # the bits of float16, which a loader would cast
        scales = scales.view(torch.float16)
    x = y * scales.float().repeat_interleave(FLASH_GROUP)[: y.numel()]
    return _shaped(x if is_signed else x * x, codes)


def _encode_flash(moment: Tensor, is_signed: bool) -> tuple[Tensor, Tensor]:
    moment = moment.float()
    x = _flat(moment if is_signed else moment.sqrt())
    rows = torch.nn.functional.pad(x, (0, -x.numel() % FLASH_GROUP)).view(-1, FLASH_GROUP)
    scales = rows.abs().amax(1).clamp(min=1e-12)
    y = rows / scales[:, None]
    y = 127.0 * (2.0 * y / (1.0 + y.abs())) if is_signed else 255.0 * y
    codes = (y + 0.5).floor().flatten()[: x.numel()]
    if not is_signed:  # FlashOptim's own rounding lets small ones become zero
        codes = torch.where((x > 0) & (codes == 0), 1.0, codes)
    codes = codes.to(torch.int8 if is_signed else torch.uint8)
    return _shaped(codes, moment), scales.to(torch.float16)


def _half_ulp(param: Tensor) -> Tensor:
    """Half the distance to a 16-bit number's neighbours, in float64."""
    mantissa, bias, mask = (7, 127, 0xFF) if param.dtype == torch.bfloat16 else (10, 15, 0x1F)
    exponent = ((param.view(torch.int16).int() >> mantissa) & mask).clamp(min=1)
    one = torch.ones_like(exponent, dtype=torch.float64)
    return torch.ldexp(one, exponent - bias - mantissa - 1)


def _decode_error(error: Tensor, param: Tensor) -> Tensor:
    most = float(torch.iinfo(error.dtype).max)
    return param.float() + ((error.float() / most).double() * _half_ulp(param)).float()


def _encode_error(weights: Tensor, param: Tensor, dtype: torch.dtype) -> Tensor:
    most = float(torch.iinfo(dtype).max)
    share = ((weights - param.float()).double() / _half_ulp(param)).clamp(-1, 1).float() * most
    return ((share.abs() + 0.5).floor() * share.sign()).to(dtype)


# ---- The neutral form ----------------------------------------------------------------------------


@dataclass
class State:
    """The state of one parameter, whoever's it was."""

    step: float
    moments: dict[str, Tensor | Codes]  # MOMENTS, or Adafactor's exp_avg, row, col, variance
    residual: dict[str, Tensor] = field(default_factory=dict)  # beside 16-bit weights, our form
    weights: Tensor | None = None  # in float32, with the residual, if it is known
    others: list[str] = field(default_factory=list)  # parts that nobody else has

    def copied(self) -> State:
        moments = {name: moment.clone() for name, moment in self.moments.items()}
        residual = {name: tensor.clone() for name, tensor in self.residual.items()}
        return replace(self, moments=moments, residual=residual)


@dataclass
class Context:
    """What a reader or writer may need beside the state."""

    group: dict[str, Any]
    param: Tensor | None
    dtype: torch.dtype | None  # of the parameter
    block_size: int = 256
    min_8bit_size: int = 4096
    casts: bool = False  # the target's loader casts to the parameter's dtype

    def is_8bit(self, moment: Tensor | Codes) -> bool:
        return isinstance(moment, Codes) or moment.numel() >= self.min_8bit_size

    def with_param(self, weights: Tensor | None) -> Context:
        """A 16-bit parameter is the rounding of its float32 weights."""
        if self.param is None and weights is not None and self.dtype in HALVES:
            self.param = weights.to(self.dtype)
        return self


def _float(moment: Tensor | Codes) -> Tensor:
    return moment.decode() if isinstance(moment, Codes) else moment


def _number(value: Any) -> Any:
    """A number from a tensor of one element: of float32, the shortest that it is."""
    if not isinstance(value, Tensor):
        return value
    number = value.item()
    short = float(f"{number:.7g}") if isinstance(number, float) else number
    return short if torch.tensor(short, dtype=value.dtype).item() == number else number


# ---- Readers -------------------------------------------------------------------------------------


def _read_adam(entry: dict[str, Any], context: Context) -> State:
    """torch's keys: torch, Headroom, torchao, DeepSpeed, and apex, whose step is in the group."""
    moments: dict[str, Tensor | Codes] = {}
    for name in MOMENTS:
        value = entry.get(name)
        if value is None:
            continue
        is_signed = name == "exp_avg"
        if f"{name}_absmax" in entry:
            absmax = entry[f"{name}_absmax"].flatten()
            size = context.group.get("block_size", 256)
            moments[name] = Codes(value, absmax, size, is_signed)
        elif hasattr(value, "codes"):
            if type(value).__name__ != "OptimState8bit":
                raise ValueError(f"has an {type(value).__name__}, which is not of 8 bits")
            size = value.codes.numel() // max(1, value.scale.numel())
            moments[name] = Codes(
                value.codes, value.scale, size, is_signed, _other_map(value.qmap, is_signed)
            )
        else:
            moments[name] = value
    step = entry.get("step", context.group.get("step"))
    residual = {name: entry[name] for name in RESIDUALS if name in entry}
    weights = residual.get("master")
    if weights is None and residual and context.param is not None:
        weights = torch.empty_like(context.param, dtype=torch.float32)
        mode = {name: context.group[name] for name in ("master", "rounding")}
        join_weights_([weights], [context.param.detach()], list(residual.values()), **mode)
    return State(step, moments, residual, weights)


def _other_map(values: Tensor, is_signed: bool) -> Tensor | None:
    """A map that is not ours: bitsandbytes 0.36 to 0.41 had such."""
    return None if torch.equal(values.cpu(), dynamic_map(is_signed)) else values


def _read_bitsandbytes(entry: dict[str, Any], context: Context) -> State:
    entry = entry | entry.get(BNB_WRAPPER, {})
    if "state2" not in entry or entry["state1"].shape != entry["state2"].shape:
        raise ValueError("is of an optimizer of bitsandbytes that is not Adam or AdamW")
    moments: dict[str, Tensor | Codes] = {}
    for name, i in (("exp_avg", 1), ("exp_avg_sq", 2)):
        moment = moments[name] = entry[f"state{i}"]
        if moment.dtype == torch.uint8:
            absmax = entry[f"absmax{i}"]
            numel, blocks = moment.numel(), absmax.numel()
            size = next((b for b in BNB_BLOCK_SIZES if -(-numel // b) == blocks), 256)
            values = _other_map(entry[f"qmap{i}"], i == 1)
            moments[name] = Codes(moment.contiguous(), absmax, size, i == 1, values)
    return State(entry["step"], moments)


def _read_flashoptim(entry: dict[str, Any], context: Context) -> State:
    moments: dict[str, Tensor | Codes] = {}
    for name in MOMENTS[:2]:
        is_signed = name == "exp_avg"
        if f"{name}::quantized" in entry:
            # A loader may have cast the codes to a float type, which holds them exactly.
            codes = entry[f"{name}::quantized"].to(torch.int8 if is_signed else torch.uint8)
            moments[name] = _decode_flash(codes, entry[f"{name}::scales"], is_signed)
        elif name in entry:
            moments[name] = entry[name]
    error, state = entry.get("error_bits"), State(entry["step"], moments)
    if error is not None:
        if error.dtype in HALVES:  # stored so that a loader leaves it as it is
            is_byte = int(context.group["master_bytewidth"]) == 3
            error = error.to(torch.int8) if is_byte else error.view(torch.int16)
        state.residual = {"error_bits": error}
        if context.param is not None:
            state.weights = _decode_error(error, context.param.detach())
    return state


def _read_torch_adafactor(entry: dict[str, Any], context: Context) -> State:
    moments = {name: entry[name + "_var"] for name in ("row", "col") if name + "_var" in entry}
    if moments:
        row, col = moments["row"], moments["col"]
        if row.shape[-1:] != (1,) or col.shape[-2:-1] != (1,):
            raise ValueError(f"has row_var of {tuple(row.shape)} and col_var of {tuple(col.shape)}")
        moments = {"row": row.squeeze(-1), "col": col.squeeze(-2)}
    else:
        moments = {"variance": entry["variance"]}
    return State(entry["step"], moments)


def _read_hf_adafactor(entry: dict[str, Any], context: Context) -> State:
    names = {
        "exp_avg": "exp_avg",
        "row": "exp_avg_sq_row",
        "col": "exp_avg_sq_col",
        "variance": "exp_avg_sq",
    }
    return State(entry["step"], {a: entry[b] for a, b in names.items() if b in entry})


# ---- Writers -------------------------------------------------------------------------------------


def _write_torch(state: State, context: Context) -> dict[str, Any]:
    moments = {name: _cast(_float(moment), context) for name, moment in state.moments.items()}
    return {"step": torch.tensor(float(state.step)), **moments}


def _cast(moment: Tensor, context: Context) -> Tensor:
    return moment.to(context.dtype) if context.casts and context.dtype else moment


def _write_headroom(state: State, context: Context) -> dict[str, Any]:
    moments = {name: _float(moment) for name, moment in state.moments.items()}
    return {"step": _step64(state), **moments, **_our_residual(state)}


def _step64(state: State) -> Tensor:
    return torch.tensor(float(state.step), dtype=torch.float64)


def _our_residual(state: State) -> dict[str, Tensor]:
    if "error_bits" not in state.residual:
        return state.residual
    return {} if state.weights is None else {"master": state.weights}


def _write_headroom_8bit(state: State, context: Context) -> dict[str, Any]:
    # With amsgrad, which has no form of 8 bits, the moments stay in float32.
    if "max_exp_avg_sq" in state.moments or not context.is_8bit(state.moments["exp_avg"]):
        return _write_headroom(state, context)
    entry: dict[str, Any] = {"step": _step64(state)}
    for name, absmax in zip(MOMENTS, ABSMAXS):
        codes = _codes(state.moments[name], context.block_size, name == "exp_avg", any_order=True)
        entry[name] = codes.codes
        shape = _zero_absmaxs(codes.codes, context.block_size).shape
        entry[absmax] = codes.absmax.view(shape)
    return entry | _our_residual(state)


def _codes(
    moment: Tensor | Codes, block_size: int, is_signed: bool, any_order: bool = False
) -> Codes:
    """As they are, if that is possible."""
    if (
        isinstance(moment, Codes)
        and (moment.block_size == block_size)
        and moment.values is None
        and (any_order or moment.codes.is_contiguous())
    ):
        return moment
    value = _float(moment)
    codes = encode(value if any_order else value.contiguous(), block_size, is_signed)
    if not _is_finite(codes.absmax, False):
        raise ValueError("has a moment that is not finite, which 8 bits cannot hold")
    return codes


def _write_bitsandbytes(state: State, context: Context) -> dict[str, Any]:
    names = ("exp_avg", "exp_avg_sq")
    moments = {f"state{i}": _float(state.moments[n]).float() for i, n in enumerate(names, 1)}
    return {"step": int(state.step), BNB_WRAPPER: moments}


def _write_bitsandbytes_8bit(state: State, context: Context) -> dict[str, Any]:
    if not context.is_8bit(state.moments["exp_avg"]):
        return _write_bitsandbytes(state, context)
    inner: dict[str, Any] = {}
    for i, name in enumerate(("exp_avg", "exp_avg_sq"), 1):
        codes = _codes(state.moments[name], 256, i == 1)
        inner[f"state{i}"], inner[f"absmax{i}"] = codes.codes, codes.absmax
        inner[f"qmap{i}"] = dynamic_map(i == 1).to(codes.codes.device)
    return {"step": int(state.step), BNB_WRAPPER: inner}


def _write_bitsandbytes_flat(state: State, context: Context) -> dict[str, Any]:
    entry = _write_bitsandbytes_8bit(state, context)
    return {"step": entry["step"], **entry[BNB_WRAPPER]}


def _write_torchao_8bit(state: State, context: Context) -> dict[str, Any]:
    try:
        from torchao.optim.subclass_8bit import OptimState8bit
    except ImportError as error:
        raise ImportError("to='torchao-8bit' needs the package torchao") from error
    entry = _write_torch(State(state.step, {}), context)
    for name, moment in state.moments.items():
        is_signed, size = name == "exp_avg", context.block_size
        if not context.is_8bit(moment) or math.prod(moment.shape) % size:
            entry[name] = _cast(_float(moment), context)
            continue
        codes = _codes(moment, size, is_signed)
        values = dynamic_map(is_signed).to(codes.codes.device)
        entry[name] = OptimState8bit(
            codes.codes, codes.absmax, values, is_signed, context.dtype or torch.float32
        )
    return entry


def _write_apex(state: State, context: Context) -> dict[str, Any]:
    # The step is the group's.
    entry = _write_torch(state, context)
    return {name: entry[name] for name in MOMENTS[:2]}


def _write_deepspeed(state: State, context: Context) -> dict[str, Any]:
    return {"step": int(state.step), **_write_apex(state, context)}


def _write_flashoptim(state: State, context: Context) -> dict[str, Any]:
    entry: dict[str, Any] = {"step": torch.tensor(int(state.step), dtype=torch.int64)}
    for name in MOMENTS[:2]:
        codes, scales = _encode_flash(_float(state.moments[name]).contiguous(), name == "exp_avg")
        entry[f"{name}::quantized"] = codes
        is_bf16 = context.dtype == torch.bfloat16
        entry[f"{name}::scales"] = scales.view(torch.bfloat16) if is_bf16 else scales
    return entry | _flash_error(state, context)


def _write_flashoptim_float(state: State, context: Context) -> dict[str, Any]:
    moments = {name: _float(state.moments[name]).float() for name in MOMENTS[:2]}
    step = torch.tensor(int(state.step), dtype=torch.int64)
    return {"step": step, **moments, **_flash_error(state, context)}


def _flash_error(state: State, context: Context) -> dict[str, Tensor]:
    error = state.residual.get("error_bits")
    if error is None:
        if state.weights is None or context.with_param(state.weights).param is None:
            return {}
        dtype = torch.int8 if _is_byte(state.residual) else torch.int16
        error = _encode_error(state.weights, context.param.detach(), dtype)
    dtype = context.dtype or torch.bfloat16
    return {"error_bits": error.to(dtype) if error.dtype == torch.int8 else error.view(dtype)}


def _is_byte(residual: dict[str, Tensor]) -> bool:
    return any(tensor.dtype == torch.int8 for tensor in residual.values())


def _write_torch_adafactor(state: State, context: Context) -> dict[str, Any]:
    entry: dict[str, Any] = {"step": torch.tensor(float(state.step))}
    if "row" in state.moments:
        entry["row_var"] = _cast(state.moments["row"].unsqueeze(-1), context)
        entry["col_var"] = _cast(state.moments["col"].unsqueeze(-2), context)
    else:
        entry["variance"] = _cast(state.moments["variance"], context)
    return entry


def _write_hf_adafactor(state: State, context: Context) -> dict[str, Any]:
    entry: dict[str, Any] = {"step": int(state.step)}
    if "exp_avg" in state.moments and context.group["beta1"] is not None:
        entry["exp_avg"] = _cast(state.moments["exp_avg"], context)
    if "row" in state.moments:
        entry["exp_avg_sq_row"] = _cast(state.moments["row"], context)
        entry["exp_avg_sq_col"] = _cast(state.moments["col"], context)
    else:
        entry["exp_avg_sq"] = _cast(state.moments["variance"], context)
    return entry | {"RMS": 0}  # which every step sets before it is used


# ---- Libraries -----------------------------------------------------------------------------------

TORCH_OPTIONS = {
    "amsgrad": False,
    "maximize": False,
    "foreach": None,
    "capturable": False,
    "differentiable": False,
    "fused": None,
}
OUR_OPTIONS = (
    "decoupled_weight_decay",
    "state_dtype",
    "max_grad_norm",
    "master",
    "rounding",
    "seed",
)
FLASH_OPTIONS = ("master_bytewidth", "quantize")
BNB_OPTIONS = {"alpha": 0.0, "t_alpha": None, "t_beta3": None}
HF_OPTIONS = {
    "clip_threshold": 1.0,
    "decay_rate": -0.8,
    "beta1": None,
    "scale_parameter": True,
    "relative_step": True,
    "warmup_init": False,
}


class Library(NamedTuple):
    """Where states come from and go to."""

    read: Callable[[dict[str, Any], Context], State]
    write: Callable[[State, Context], dict[str, Any]]
    options: dict[str, Any]  # of a group, beside what all have, with defaults
    more: tuple[str, ...] = ()  # options that are carried over if there are any
    casts: bool = False  # the loader casts states to the parameter's dtype
    is_adafactor: bool = False


LIBRARIES = {
    "headroom": Library(_read_adam, _write_headroom, TORCH_OPTIONS, OUR_OPTIONS),
    "headroom-8bit": Library(
        _read_adam, _write_headroom_8bit, TORCH_OPTIONS, (*OUR_OPTIONS, *OPTIONS)
    ),
    "torch": Library(_read_adam, _write_torch, TORCH_OPTIONS, ("decoupled_weight_decay",), True),
    "bitsandbytes": Library(_read_bitsandbytes, _write_bitsandbytes, BNB_OPTIONS),
    "bitsandbytes-8bit": Library(_read_bitsandbytes, _write_bitsandbytes_8bit, BNB_OPTIONS),
    "bitsandbytes-8bit-flat": Library(_read_bitsandbytes, _write_bitsandbytes_flat, BNB_OPTIONS),
    "torchao-8bit": Library(_read_adam, _write_torchao_8bit, {"amsgrad": False}, casts=True),
    "apex": Library(_read_adam, _write_apex, {"bias_correction": True}, ("step",), True),
    "deepspeed": Library(
        _read_adam, _write_deepspeed, {"bias_correction": True, "amsgrad": False}, casts=True
    ),
    "flashoptim": Library(_read_flashoptim, _write_flashoptim, {}, FLASH_OPTIONS),
    "flashoptim-float": Library(_read_flashoptim, _write_flashoptim_float, {}, FLASH_OPTIONS),
    "torch-adafactor": Library(
        _read_torch_adafactor,
        _write_torch_adafactor,
        {"beta2_decay": -0.8, "d": 1.0, "foreach": None, "maximize": False},
        casts=True,
        is_adafactor=True,
    ),
    "transformers-adafactor": Library(
        _read_hf_adafactor, _write_hf_adafactor, HF_OPTIONS, casts=True, is_adafactor=True
    ),
}
# The parts of states that readers know, and options that somebody has and others do not know.
KEYS = {
    *("step", "RMS", "error_bits", BNB_WRAPPER, *MOMENTS, *ABSMAXS, *RESIDUALS),
    *(f"{name}{i}" for name in ("state", "absmax", "qmap") for i in (1, 2)),
    *(f"{name}::{part}" for name in MOMENTS for part in ("quantized", "scales")),
    *("row_var", "col_var", "variance", "exp_avg_sq_row", "exp_avg_sq_col"),
}
PRIVATE = {key for library in LIBRARIES.values() for key in (*library.options, *library.more)}


def detect(state_dict: dict[str, Any]) -> str:
    """The name of the library that a state dict is from, by its keys."""
    entries = [entry for entry in state_dict["state"].values() if entry]
    keys = {key for entry in entries for key in entry}
    options = {key for group in state_dict["param_groups"] for key in group}
    if BNB_WRAPPER in keys or "state1" in keys or "t_alpha" in options:
        return "bitsandbytes"
    if "exp_avg::quantized" in keys or "master_bytewidth" in options:
        return "flashoptim"
    if {"row_var", "variance"} & keys or "beta2_decay" in options:
        return "torch-adafactor"
    if {"exp_avg_sq_row", "RMS"} & keys or "decay_rate" in options:
        return "transformers-adafactor"
    if "exp_avg_absmax" in keys:
        return "headroom-8bit"
    if any(hasattr(entry.get("exp_avg"), "codes") for entry in entries):
        return "torchao-8bit"
    if entries and not {"exp_avg", "exp_avg_sq"} <= keys:
        raise ValueError(
            f"no library is known that has states of the keys {sorted(map(str, keys))}; the "
            f"libraries are {', '.join(LIBRARIES)}"
        )
    return "apex" if entries and "step" not in keys and "step" in options else "torch"


# ---- What was lost -------------------------------------------------------------------------------


@dataclass
class Loss:
    """What the conversion did to one part of the state of one parameter."""

    param: Any  # its key in the state dict
    name: str  # "exp_avg", "step", ...
    kind: str  # "none", "rounded" or "dropped"
    error: float = 0.0  # the largest of an element
    largest: float = 0.0  # the largest magnitude of an element before

    @property
    def relative(self) -> float:
        """The error, in units of the largest element."""
        return self.error / self.largest if self.largest else self.error


@dataclass
class Report:
    """What a conversion lost, part by part, and what else to know."""

    source: str
    target: str
    losses: list[Loss] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def is_lossless(self) -> bool:
        """Whether every part of every state was kept to the bit."""
        return all(loss.kind == "none" for loss in self.losses)

    def __str__(self) -> str:
        lines = [f"{self.source} to {self.target}:"]
        for name in dict.fromkeys(loss.name for loss in self.losses):
            mine = [loss for loss in self.losses if loss.name == name]
            parts = []
            for kind, said in (("none", "kept"), ("rounded", "rounded"), ("dropped", "dropped")):
                some = [loss for loss in mine if loss.kind == kind]
                if some:
                    parts.append(f"{len(some):,} {said}")
                if some and kind == "rounded":
                    worst = max(some, key=lambda loss: loss.relative)
                    parts[-1] += (
                        f", by up to {worst.error:.2g}, {worst.relative:.2g} of the tensor's "
                        f"largest (parameter {worst.param})"
                    )
            lines.append(f"    {name}: {'; '.join(parts)}")
        return "\n".join(lines + [f"    {note}" for note in self.notes])


def _losses(key: Any, before: State, after: State) -> Iterable[Loss]:
    yield _loss(key, "step", _step64(before), _step64(after))
    for name, moment in before.moments.items():
        yield _loss(key, name, moment, after.moments.get(name))
    for name, residual in before.residual.items():
        if name in after.residual:
            yield _loss(key, name, residual, after.residual[name])
        else:
            yield _loss(key, name, before.weights, after.weights)
    yield from (Loss(key, name, "dropped") for name in before.others)


def _loss(key: Any, name: str, before: Any, after: Any) -> Loss:
    if before is None or after is None:
        return Loss(key, name, "dropped")
    pairs = (before, after), (getattr(before, "codes", 0), getattr(after, "codes", 1))
    if any(a is b for a, b in pairs):
        return Loss(key, name, "none")
    wide = torch.float64 if name == "step" else torch.float32
    before, after = _float(before).to(wide), _float(after).to(wide)
    if torch.allclose(before, after, rtol=0, atol=0, equal_nan=True):
        return Loss(key, name, "none")
    error = (before - after).abs().max().item()
    return Loss(key, name, "rounded", error, before.abs().max().item())


# ---- The conversion ------------------------------------------------------------------------------


class Converted(NamedTuple):
    """What :func:`convert_state` returns."""

    state_dict: dict[str, Any]
    report: Report


@torch.no_grad()
def convert_state(
    source: dict[str, Any] | torch.optim.Optimizer,
    to: str,
    *,
    from_: str | None = None,
    params: Iterable[Tensor] | Mapping[Any, Tensor] | None = None,
    param_dtype: torch.dtype | None = None,
    block_size: int | None = None,
    min_8bit_size: int = 4096,
    progress: bool = False,
) -> Converted:
    """The state of an optimizer in the form of another library, to resume training there.

    Args:
        source: an optimizer, or what its ``state_dict()`` returned. Not changed.
        to: for whom. ``"headroom"`` and ``"headroom-8bit"``: Adam and AdamW of
            :mod:`headroom.optim`, and their 8-bit forms. ``"torch"``. ``"bitsandbytes"``: 32-bit;
            ``"bitsandbytes-8bit"``, and ``"bitsandbytes-8bit-flat"`` for releases before 2026.
            ``"torchao-8bit"``. ``"apex"``: FusedAdam. ``"deepspeed"``: DeepSpeedCPUAdam.
            ``"flashoptim"``, with its 8-bit moments, and ``"flashoptim-float"``.
            ``"torch-adafactor"`` and ``"transformers-adafactor"``, which
            Headroom's Adafactor loads too. Adam's state is none of Adafactor's.
        from_: one of these, if the keys of ``source`` do not tell.
        params: the parameters, in the order of the groups, or by their keys in the state; an
            optimizer has them. They are needed to carry over what is kept beside 16-bit weights,
            except for a float32 master copy.
        param_dtype: their dtype, if they are not there. Many loaders cast states to it: with it,
            the report says what that loses. FlashOptim's states depend on it.
        block_size: of 8-bit moments. None: that of the source if the target has it, else 256.
        min_8bit_size: tensors with fewer elements get moments of 32 bits; codes stay codes.
        progress: show a progress bar.

    Returns:
        The state dict, for ``load_state_dict`` of the target, and a :class:`Report` of what was
        lost. Parts that are the same in both libraries are those of a ``source`` that is a state
        dict, not copies.

        Nothing is lost between Headroom, torch, bitsandbytes 32-bit, apex, DeepSpeed and
        ``"flashoptim-float"`` if parameters are float32; nor between the 8-bit forms of Headroom,
        bitsandbytes and torchao with equal blocks; nor from 8 bits to float32. From float32 to 8
        bits, codes are those that :func:`headroom.functional.adamw8bit_` would store.

    Raises:
        ValueError: an argument is not one of those above, or the state is of no known library,
            cannot be that of ``to``, or is malformed: its counters must be whole numbers from 0 to
            2^53, its second moments and scales not negative and no NaN. The message names the
            parameter. Nothing is changed.
        NotImplementedError: a state is a DTensor; gather it first, with ``full_state_dict=True`` of
            torch.distributed.checkpoint.
        ImportError: ``to="torchao-8bit"`` without torchao.

    Example::

        old = torch.optim.AdamW(model.parameters(), lr=1e-3)
        new = headroom.optim.AdamW8bit(model.parameters(), lr=1e-3)
        state, report = headroom.optim.convert_state(old, to="headroom-8bit")
        new.load_state_dict(state)
        print(report)
    """
    decoupled, is_live = None, isinstance(source, torch.optim.Optimizer)
    if isinstance(source, torch.optim.Optimizer):
        decoupled = _decouples(source)
        if params is None:
            params = [param for group in source.param_groups for param in group["params"]]
        source = source.state_dict()
    keys = _keys(source)
    from_ = detect(source) if from_ is None else from_
    for name in (from_, to):
        if not isinstance(name, str) or name not in LIBRARIES:
            raise ValueError(
                f"there is no {_shown(name)}; the libraries are {', '.join(LIBRARIES)}"
            )
    if LIBRARIES[from_].is_adafactor != LIBRARIES[to].is_adafactor:
        raise ValueError(f"a state of {from_} cannot be that of {to}: Adam is not Adafactor")
    if block_size is not None and (type(block_size) is not int or block_size not in BLOCK_SIZES):
        raise ValueError(f"block_size must be one of {BLOCK_SIZES}, got {_shown(block_size)}")
    if type(min_8bit_size) is not int or min_8bit_size < 0:
        raise ValueError(f"min_8bit_size must be a number of elements, got {_shown(min_8bit_size)}")
    if param_dtype is not None and param_dtype not in (*FLOATS, torch.float64):
        raise ValueError(f"param_dtype must be a floating-point dtype, got {_shown(param_dtype)}")
    named = _named_params(params, keys)
    reader, target, report = LIBRARIES[from_], LIBRARIES[to], Report(from_, to)
    entries, groups = {}, []
    with tqdm(total=len(source["state"]), unit="state", disable=not progress) as bar:
        for index, group in enumerate(source["param_groups"]):
            contexts = {}
            for key in group["params"]:
                param = named.get(key)
                dtype = param_dtype if param is None else param.dtype
                contexts[key] = Context(group, param, dtype, casts=target.casts)
            states = {
                key: _state(key, source["state"][key], reader, contexts[key])
                for key in group["params"]
                if source["state"].get(key)
            }
            if is_live:
                states = {key: state.copied() for key, state in states.items()}
            with _described(f"the options of group {index}", group):
                _check_options(group, target.is_adafactor)
                new = _target_group(group, to, states, report.notes, decoupled)
            size = block_size or _block_size(states)
            if to == "headroom-8bit":
                new["block_size"] = size
            for key, state in states.items():
                context = contexts[key]
                context.group, context.min_8bit_size, context.block_size = new, min_8bit_size, size
                with _described(f"the state of parameter {key}", source["state"][key]):
                    entries[key] = target.write(state, context)
                    report.losses += _losses(key, state, target.read(entries[key], context))
                bar.update()
            groups.append(new)
    return Converted({"state": entries, "param_groups": groups}, report)


# ---- Checks --------------------------------------------------------------------------------------


@contextmanager
def _described(what: str, held: dict[Any, Any]) -> Iterator[None]:
    """Turns an error into a ValueError that says where it was. Values of any kind can stand where
    numbers and tensors belong, and each fails in a way of its own."""
    try:
        yield
    except (ImportError, NotImplementedError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        if isinstance(error, KeyError):
            said = f"has no {error}"
        elif isinstance(error, (ValueError, RuntimeError)):
            said = str(error)
        else:
            said = f"cannot be read: {type(error).__name__}: {error}"
        raise ValueError(f"{what} {said}; it has {sorted(map(str, held))}") from error


def _keys(source: Any) -> list[Any]:
    """The parameters' keys of a state dict, in order, if it has the form of one."""
    if not isinstance(source, Mapping) or not {"state", "param_groups"} <= source.keys():
        found = sorted(map(str, source)) if isinstance(source, Mapping) else type(source).__name__
        raise ValueError(f"a state dict has 'state' and 'param_groups', this {found}")
    state, groups = source["state"], source["param_groups"]
    if not isinstance(state, Mapping) or not isinstance(groups, (list, tuple)):
        raise ValueError(
            "'state' must be a dict and 'param_groups' a list, got "
            f"{type(state).__name__} and {type(groups).__name__}"
        )
    keys: list[Any] = []
    for index, group in enumerate(groups):
        if not isinstance(group, Mapping) or not isinstance(group.get("params"), (list, tuple)):
            raise ValueError(f"group {index} must be a dict with a list 'params'")
        keys += group["params"]
    for key in keys:
        if not isinstance(key, (int, str)):
            raise ValueError(
                f"the key of a parameter must be a number or a name, got {_shown(key)}"
            )
    if len(set(keys)) < len(keys):
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"parameter {twice!r} is in the groups twice")
    for key in state.keys() - set(keys):
        raise ValueError(f"there is a state of {key!r}, which is in no group")
    for key, entry in state.items():
        if not isinstance(entry, Mapping):
            raise ValueError(f"the state of parameter {key} is a {type(entry).__name__}, no dict")
    return keys


def _named_params(params: Any, keys: list[Any]) -> Mapping[Any, Tensor]:
    """The parameters by their keys."""
    if params is None:
        return {}
    if not isinstance(params, Mapping):
        if isinstance(params, Tensor) or not isinstance(params, Iterable):
            raise ValueError(f"params must be parameters, got a {type(params).__name__}")
        params = list(params)
        if len(params) != len(keys):
            raise ValueError(f"the groups have {len(keys)} parameters, params {len(params)}")
        params = dict(zip(keys, params))
    for key, param in params.items():
        if not isinstance(param, Tensor):
            raise ValueError(f"params: that of {key!r} is a {type(param).__name__}, no tensor")
    return params


def _shown(value: Any) -> str:
    """A value for a message: what is long, or has no memory to print, by its type."""
    is_short = value is None or isinstance(value, (bool, int, float, str, torch.dtype))
    return repr(value) if is_short else f"a {type(value).__name__}"


def _check_options(group: Mapping[str, Any], is_adafactor: bool) -> None:
    _check_tensors(group)
    lr = group["lr"]
    if lr is None and is_adafactor:
        return
    number = _number(lr)
    if isinstance(number, bool) or not isinstance(number, (int, float)):
        raise ValueError(f"have an lr of {_shown(lr)}, wanted a number")
    if not 0 <= number < math.inf:
        raise ValueError(f"have an lr of {number}, wanted a finite number >= 0")


def _check_tensors(value: Any) -> None:
    """Every tensor in an entry has memory that can be read."""
    if isinstance(value, Mapping):
        for inner in value.values():
            _check_tensors(inner)
    elif hasattr(value, "codes"):  # torchao's, of several tensors
        for name in ("codes", "scale", "qmap"):
            _check_tensors(getattr(value, name, None))
    elif isinstance(value, Tensor):
        if value.layout != torch.strided or value.is_meta:
            raise ValueError(f"has a tensor without data: {value.layout} on {value.device}")
        last = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride()))
        needed = (value.storage_offset() + last + 1) * value.element_size()
        if value.numel() and value.untyped_storage().nbytes() < needed:
            raise ValueError("has a tensor whose memory has been freed")


def _checked_step(step: Any) -> float:
    number = _number(step)
    if isinstance(number, bool) or not isinstance(number, (int, float)):
        raise ValueError(f"has a step of {_shown(step)}, wanted a number")
    if not 0 <= number <= STEPS or number != int(number):
        raise ValueError(f"has a step of {number}, wanted a whole number from 0 to 2^53")
    return number


def _check_moments(moments: dict[str, Tensor | Codes]) -> None:
    for name, moment in moments.items():
        if isinstance(moment, Codes):
            if not _is_finite(moment.absmax, False):
                raise ValueError(f"has scales of '{name}' that are negative or not finite")
            if moment.values is not None and not _is_finite(moment.values, True):
                raise ValueError(f"has a map of '{name}' with values that are not finite")
            continue
        if not isinstance(moment, Tensor) or not moment.is_floating_point():
            kind = moment.dtype if isinstance(moment, Tensor) else type(moment).__name__
            raise ValueError(f"has an '{name}' of {kind}, without scales")
        # A NaN is the smallest for min(). Infinity is an overflow, and gives updates of 0.
        if name in SQUARES and moment.numel() and not moment.min() >= 0:
            raise ValueError(f"has an '{name}' with negative elements, or NaN")


def _check_adam_shapes(moments: dict[str, Tensor | Codes], param: Tensor | None) -> None:
    shapes = {moment.shape for moment in moments.values()}
    if not set(moments) >= set(MOMENTS[:2]) or len(shapes) != 1:
        raise ValueError(
            f"has moments {sorted(moments)}, of shapes {sorted(map(tuple, shapes))}; wanted "
            f"{MOMENTS[:2]} of one shape"
        )
    if param is not None and shapes != {param.shape}:
        raise ValueError(
            f"has moments of shape {tuple(shapes.pop())}, the parameter {tuple(param.shape)}"
        )


def _check_adafactor_shapes(moments: dict[str, Tensor | Codes], param: Tensor | None) -> None:
    found = {name: tuple(moment.shape) for name, moment in moments.items()}
    row, col = found.get("row"), found.get("col")
    if row is not None or col is not None:
        if not row or not col or row[:-1] != col[:-1]:
            raise ValueError(f"has statistics of rows {row} and of columns {col}")
        found["variance"] = (*row, col[-1])
    if "variance" not in found:
        raise ValueError("has neither a 'variance' nor statistics of rows and columns")
    if param is not None and found["variance"] != tuple(param.shape):
        raise ValueError(
            f"is of a parameter of shape {found['variance']}, this one has {tuple(param.shape)}"
        )


def _decouples(optimizer: torch.optim.Optimizer) -> bool | None:
    """Whether an optimizer decouples weight decay, if it does not say so in its groups."""
    # DeepSpeed and apex, torchao, FlashOptim.
    for name in ("adam_w_mode", "is_adamw", "_decoupled"):
        if hasattr(optimizer, name):
            return bool(getattr(optimizer, name))
    return True if type(optimizer).__module__.startswith("bitsandbytes") else None


def _state(key: Any, entry: Any, reader: Library, context: Context) -> State:
    if any(isinstance(value, DTensor) for value in entry.values()):
        raise NotImplementedError(
            f"the state of parameter {key} is a DTensor; gather it first, with "
            "torch.distributed.checkpoint.state_dict.get_optimizer_state_dict and "
            "StateDictOptions(full_state_dict=True)"
        )
    with _described(f"the state of parameter {key}", entry):
        _check_tensors(entry)
        if {*RESIDUALS, "error_bits"} & entry.keys():
            _check_tensors(context.param)
        state = reader.read(entry, context)
        if state.step is None:
            raise KeyError("step")
        state.step = _checked_step(state.step)
        _check_moments(state.moments)
        check = _check_adafactor_shapes if reader.is_adafactor else _check_adam_shapes
        check(state.moments, context.param)
    state.others = [name for name in entry if name not in KEYS]
    return state


def _block_size(states: dict[Any, State]) -> int:
    """That of the codes of a group, if it is one that Headroom has."""
    moments = [moment for state in states.values() for moment in state.moments.values()]
    sizes = {moment.block_size for moment in moments if isinstance(moment, Codes)}
    return sizes.pop() if len(sizes) == 1 and sizes <= set(BLOCK_SIZES) else 256


def _target_group(
    group: dict[str, Any],
    to: str,
    states: dict[Any, State],
    notes: list[str],
    decoupled: bool | None,
) -> dict[str, Any]:
    """The options of a group, as the target has them."""
    target, source = LIBRARIES[to], dict(group)
    if decoupled is not None:
        source.setdefault("decoupled_weight_decay", decoupled)
    own = (*target.options, *target.more)
    new = {**target.options, **{k: v for k, v in source.items() if k not in PRIVATE or k in own}}
    new["lr"] = _number(source["lr"])
    if target.is_adafactor:
        _translate_adafactor(source, new, to, notes)
    for name in ("maximize", "amsgrad"):
        if source.get(name) and name not in own:
            notes.append(f"{to} has no {name}, which the source was run with")
    if source.get("bias_correction", True) is False and "bias_correction" not in own:
        notes.append(f"{to} corrects the bias of moments, which the source did not")
    if "decoupled_weight_decay" in own and "decoupled_weight_decay" not in source:
        if source.get("weight_decay"):
            notes.append("the state does not say whether weight decay is Adam's or AdamW's")
    if to == "torchao-8bit":
        new["lr"] = torch.tensor(new["lr"], dtype=torch.float32)
    if to == "apex":
        new["step"] = max((int(state.step) for state in states.values()), default=0)
    _say_what_completes_weights(new, own, [s for s in states.values() if s.weights is not None])
    return new


def _say_what_completes_weights(
    new: dict[str, Any], own: tuple[str, ...], states: list[State]
) -> None:
    """``states`` are those with known float32 weights beside 16-bit ones."""
    if "master" in own and any("error_bits" in state.residual for state in states):
        new |= {"master": "f32", "rounding": "nearest", "seed": 0}
    if "master_bytewidth" in own and "master_bytewidth" not in new and states:
        new["master_bytewidth"] = 3 if any(_is_byte(state.residual) for state in states) else 4


def _translate_adafactor(
    source: dict[str, Any], new: dict[str, Any], to: str, notes: list[str]
) -> None:
    """Between the two rules. Their first epsilons mean different things."""
    is_hf = "decay_rate" in source
    if is_hf == (to == "transformers-adafactor"):
        return
    if is_hf:
        new |= {"beta2_decay": source["decay_rate"], "d": source["clip_threshold"]}
        new |= {"eps": (None, source["eps"][1]), "lr": 1e-2 if new["lr"] is None else new["lr"]}
        if not source["relative_step"] or not source["scale_parameter"] or source["warmup_init"]:
            notes.append("torch's rule always has relative steps, scaled, and no warm-up")
    else:
        new |= {"decay_rate": source["beta2_decay"], "clip_threshold": source["d"]}
        new["eps"] = (1e-30, source["eps"][1])
        if new["lr"] == 1e-2:  # what relative steps begin with
            new["lr"] = None
        else:
            new["relative_step"] = False
            notes.append("the learning rate is constant, where torch's rule bounds it by 1/sqrt(t)")
    if source.get("weight_decay"):
        notes.append("the two rules of Adafactor scale weight decay differently")
