"""Quantized weights as bitsandbytes names and stores them in a ``state_dict``, and back.

Beside ``weight``, the codes, there are

- of 4 bits: ``weight.absmax``, ``weight.quant_map``, with quantized scales
  ``weight.nested_absmax`` and ``weight.nested_quant_map``, and
  ``weight.quant_state.bitsandbytes__nf4`` (or ``fp4``), the bytes of a JSON text;
- of 8 bits: ``SCB``, the largest magnitude of each row, and ``weight_format``, which is 0.

Stacks of experts in MXFP4, which bitsandbytes does not know, are stored as files of gpt-oss have
them: ``gate_up_proj_blocks`` and ``gate_up_proj_scales``, without ``gate_up_proj``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from .._core.registration import FLOATS
from .._core.surroundings import is_plain
from .._core.text import quoted
from ..functional.dynamic_map import dynamic_map
from ..functional.quantize_matrix import BLOCK_SIZES, MXFP4, QuantizedMatrix

NESTED_BLOCK = 256  # scales that share a scale
STATE = "weight.quant_state.bitsandbytes__"
KEYS_4BIT = ("weight.absmax", "weight.quant_map", "weight.nested_absmax", "weight.nested_quant_map")
KEYS_8BIT = ("SCB", "weight_format")
ROW_FORMAT = 0  # of weight_format: codes lie in the order of the rows
BLOCKS = "blocks"
STORAGES = (torch.uint8, torch.int8, torch.float16, torch.bfloat16, torch.float32)

# Codes 0 to 15: quantiles of the normal distribution (Dettmers et al., arXiv:2305.14314), and
# floats of a sign, two bits of exponent and one of mantissa.
_NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
_FP4 = tuple(sign * n / 192 for sign in (1.0, -1.0) for n in (0, 1, 128, 192, 64, 96, 32, 48))
TABLES = {"nf4": _NF4, "fp4": _FP4}


def is_bitsandbytes_key(key: str) -> bool:
    """Returns whether a key, without the name of its module, is one that only bitsandbytes has."""
    return key in KEYS_4BIT or key in KEYS_8BIT or key.startswith(STATE)


def canonical_key(name: str, key: str) -> str | None:
    """Returns the key that a layer has for what belongs to a stack, by the name of the stack and a
    key of its module: ``gate_up_proj.absmax`` is ``weight.absmax``, and ``gate_up_proj.SCB`` is
    ``SCB``; None for what belongs to something else."""
    if key == name:
        return "weight"
    for what in ("scales", BLOCKS):
        if key == f"{name}_{what}":
            return what
    if not key.startswith(f"{name}."):
        return None
    rest = key[len(name) + 1 :]
    return rest if rest in KEYS_8BIT else f"weight.{rest}"


def weight_behind(key: str, own: Collection[str]) -> str | None:
    """Returns the name of the weight or stack in few bits that a key belongs to; None for codes of
    bitsandbytes, which have the name itself, and for any other key.

    Args:
        own: all keys of its module.
    """
    stem, _, last = key.rpartition("_")
    if last in ("scales", BLOCKS) and f"{stem}_{BLOCKS}" in own:
        return stem
    name = "weight" if is_bitsandbytes_key(key) else key.partition(".")[0]
    found = key if name == "weight" else canonical_key(name, key)
    return name if found is not None and is_bitsandbytes_key(found) else None


def scales_name(name: str) -> str:
    """Returns the name of the parameter that holds the scales of a weight or of a stack."""
    return "scales" if name == "weight" else f"{name}_scales"


def stack_key(name: str, key: str) -> str:
    """Returns the key of a stack for one of a layer, the other way round."""
    return f"{name}.{key}" if key in KEYS_8BIT else f"{name}{key.removeprefix('weight')}"


def block_count(shape: tuple[int, ...], block_size: int) -> int:
    """Returns how many blocks a matrix has, which cross its rows."""
    return -(-math.prod(shape) // block_size)


def floats_of(q: QuantizedMatrix) -> Tensor:
    """Returns the float32 numbers among the scales of a matrix, in memory of their own: all of
    them, or the scales of nested ones and, as the last, what was subtracted from these."""
    codes = block_count(q.shape, q.block_size) if q.nested else 0
    return q.scales[codes + -codes % 4 :].clone().view(torch.float32)


def has_values(q: QuantizedMatrix) -> bool:
    """Returns whether the scales of a matrix can be read, as a whole: not those of shards, nor of
    tensors without values."""
    return is_plain(q.scales) and not (q.scales.is_meta or isinstance(q.scales, FakeTensor))


def is_finite(q: QuantizedMatrix) -> bool:
    """Returns whether all scales of a matrix are finite; True if they cannot be read. Reads a
    number from the device."""
    if not has_values(q) or not q.scales.numel():
        return True
    if q.format == MXFP4:
        return bool(q.scales.amax() < 255)
    ends = torch.stack(torch.aminmax(floats_of(q)))  # which are NaN where a scale is
    return bool(ends.isfinite().all())


# ---- writing -------------------------------------------------------------------------------------


def entries_of(q: QuantizedMatrix) -> dict[str, Tensor]:
    """Returns what bitsandbytes stores beside ``weight``, in its order, in memory of its own. Reads
    a number from the device where scales are quantized."""
    if q.format == "int8":
        scb = q.scales.clone().view(torch.float32)
        return {"SCB": scb, "weight_format": torch.tensor(ROW_FORMAT, dtype=torch.uint8)}
    device, blocks = q.scales.device, block_count(q.shape, q.block_size)
    quant_map = torch.tensor(TABLES[q.format], device=device)
    state = {
        "quant_type": q.format,
        "blocksize": q.block_size,
        "dtype": str(q.dtype).removeprefix("torch."),
        "shape": list(q.shape),
    }
    if q.nested:
        rest = floats_of(q)
        found = {
            "weight.absmax": q.scales[:blocks].clone(),
            "weight.quant_map": quant_map,
            "weight.nested_absmax": rest[:-1].clone(),
            "weight.nested_quant_map": dynamic_map(True).to(device),
        }
        state |= {"nested_blocksize": NESTED_BLOCK, "nested_dtype": "float32"}
        state["nested_offset"] = rest[-1].item()
    else:
        absmax = q.scales.clone().view(torch.float32)
        found = {"weight.absmax": absmax, "weight.quant_map": quant_map}
    text = torch.frombuffer(bytearray(json.dumps(state).encode()), dtype=torch.uint8)
    return found | {STATE + q.format: text.to(device)}


# ---- reading -------------------------------------------------------------------------------------


def matrix_of(
    entries: Mapping[str, Any], shape: tuple[int, ...], dtype: torch.dtype
) -> QuantizedMatrix:
    """Returns the matrix of a layer from ``weight`` and what bitsandbytes stores beside it, whose
    sizes are all compared before anything is read. The codes may lie in memory of the entries.

    Args:
        entries: by the key after the name of the module.
        shape: of the layer's weight, ``[out, in]``, or of a stack of matrices.
        dtype: of the matrix, where the entries do not tell it.

    Raises:
        ValueError: an entry is missing, unknown, or does not fit the others.
    """
    for key, value in entries.items():
        if not isinstance(value, Tensor) and key != "weight_format":
            raise ValueError(f"'{key}' is {type(value).__name__}, wanted a tensor")
    if "weight" not in entries:
        raise ValueError("'weight' is missing")
    if "SCB" in entries:
        return _matrix_of_8bit(entries, shape, dtype)
    return _matrix_of_4bit(entries, shape)


def _matrix_of_8bit(
    entries: Mapping[str, Any], shape: tuple[int, ...], dtype: torch.dtype
) -> QuantizedMatrix:
    codes, scb, layout = entries["weight"], entries["SCB"], entries.get("weight_format", "row")
    if isinstance(layout, Tensor):
        layout = layout.item() if layout.numel() == 1 else tuple(layout.shape)
    if layout not in (ROW_FORMAT, "row"):
        raise ValueError(f"'weight_format' is {quoted(layout)}, wanted 0, which stands for rows")
    rows = math.prod(shape[:-1])
    _check("weight", codes, torch.int8, (rows, shape[-1]))
    _check("SCB", scb, torch.float32, (rows,))
    return QuantizedMatrix(codes.contiguous(), _raw(scb), shape, dtype, "int8", 64, False)


def _matrix_of_4bit(entries: Mapping[str, Any], shape: tuple[int, ...]) -> QuantizedMatrix:
    kind, state = _state_of(entries)
    own = state.get("shape")
    if own is not None and own != list(shape):
        raise ValueError(f"the weight is {quoted(own)}, and the layer {list(shape)}")
    block_size, dtype = state.get("blocksize"), getattr(torch, str(state.get("dtype")), None)
    if type(block_size) is not int or block_size not in BLOCK_SIZES:
        raise ValueError(
            f"'blocksize' is {quoted(block_size)}, wanted a power of two from 32 to 4096"
        )
    if dtype not in FLOATS:
        raise ValueError(f"'dtype' is {quoted(state.get('dtype'))}, wanted one of {FLOATS}")
    codes, blocks = entries["weight"], block_count(shape, block_size)
    if codes.dtype not in STORAGES:
        raise ValueError(f"'weight' is {codes.dtype}, wanted one of {STORAGES}")
    if codes.dtype != torch.uint8:
        codes = codes.contiguous().view(-1).view(torch.uint8).view(-1, 1)
    _check("weight", codes, torch.uint8, ((math.prod(shape) + 1) // 2, 1))
    _check_map("weight.quant_map", entries, torch.tensor(TABLES[kind]))
    nested = "weight.nested_absmax" in entries
    if nested != ("nested_offset" in state):
        raise ValueError("'weight.nested_absmax' and 'nested_offset' must be there together")
    absmax = entries.get("weight.absmax")
    if absmax is None:
        raise ValueError("'weight.absmax' is missing")
    _check("weight.absmax", absmax, torch.uint8 if nested else torch.float32, (blocks,))
    scales = _raw(absmax)
    if nested:
        scales = torch.cat([scales, *_nested_parts(entries, state, blocks)])
    return QuantizedMatrix(codes.contiguous(), scales, shape, dtype, kind, block_size, nested)


def _state_of(entries: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Returns the format, and the numbers of the JSON text."""
    found = [key for key in entries if key.startswith(STATE)]
    if len(found) != 1 or found[0].removeprefix(STATE) not in TABLES:
        wanted = " or ".join(f"'{STATE}{kind}'" for kind in TABLES)
        raise ValueError(f"it has {quoted(found) if found else 'no scales'}, wanted {wanted}")
    kind, text = found[0].removeprefix(STATE), entries[found[0]]
    try:
        state = json.loads(bytes(text.flatten().tolist()).decode())
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"'{found[0]}' is not JSON: {quoted(error)}") from error
    known = {"quant_type", "blocksize", "dtype", "shape"}
    known |= {"nested_blocksize", "nested_dtype", "nested_offset"}
    if not isinstance(state, dict) or not state.keys() <= known:
        raise ValueError(f"'{found[0]}' has keys that are not known: {quoted(state)}")
    if state.get("quant_type", kind) != kind:
        raise ValueError(f"'{found[0]}' has the quant_type {quoted(state['quant_type'])}")
    return kind, state


def _nested_parts(
    entries: Mapping[str, Any], state: Mapping[str, Any], blocks: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the bytes behind the codes of scales: those up to a multiple of 4, scales of scales,
    and what was subtracted from scales."""
    nested_absmax, offset = entries["weight.nested_absmax"], state["nested_offset"]
    if state.get("nested_blocksize") != NESTED_BLOCK or state.get("nested_dtype") != "float32":
        raise ValueError(
            f"scales are quantized in blocks of {quoted(state.get('nested_blocksize'))} to "
            f"{quoted(state.get('nested_dtype'))}, wanted blocks of {NESTED_BLOCK} to float32"
        )
    largest = torch.finfo(torch.float32).max
    if type(offset) not in (float, int) or not abs(offset) <= largest:  # which no NaN is
        raise ValueError(f"'nested_offset' is {quoted(offset)}, wanted a finite number")
    _check_map("weight.nested_quant_map", entries, dynamic_map(True))
    shape = (-(-blocks // NESTED_BLOCK),)
    _check("weight.nested_absmax", nested_absmax, torch.float32, shape)
    last = torch.tensor([offset], dtype=torch.float32, device=nested_absmax.device)
    return nested_absmax.new_zeros(-blocks % 4, dtype=torch.uint8), _raw(nested_absmax), _raw(last)


def _raw(x: Tensor) -> Tensor:
    """Returns the bytes of a vector."""
    return x.contiguous().view(torch.uint8)


def _check(key: str, x: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    if x.layout != torch.strided:
        raise ValueError(f"'{key}' is {x.layout}, wanted a dense tensor")
    if x.dtype != dtype or tuple(x.shape) != shape:
        raise ValueError(f"'{key}' is {x.dtype} {[*x.shape]}, wanted {dtype} {[*shape]}")


def _check_map(key: str, entries: Mapping[str, Any], wanted: Tensor) -> None:
    """Refuses codes that stand for other numbers. Files may have no map, which formats fix."""
    found = entries.get(key)
    if found is None or found.device.type == "meta":
        return
    if found.shape != wanted.shape or not torch.allclose(
        found.to("cpu", torch.float32), wanted, rtol=1e-5, atol=0
    ):
        raise ValueError(f"'{key}' is not the map of this format: its codes mean other numbers")
