"""Matrices of 4 bits: quantizing a weight when a model is loaded, and decoding it in each step."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ._layers import held_bytes
from .harness import Bar, Case, Contender, Rotation, Share, Unavailable, by_level, sets_needed
from .instructions.row import FACTOR, Row, evenly

BF16 = torch.bfloat16
TRANSIENT = "transient bytes"


def bitsandbytes() -> Any:
    try:
        import bitsandbytes.functional
    except ImportError as error:
        raise Unavailable(str(error)) from error
    return bitsandbytes.functional


def quantized(data: Rotation, quantize: Callable[[Tensor], Any]) -> Contender:
    def counts() -> dict[str, float]:
        x = data.next()
        held, peak = held_bytes(lambda: quantize(x), x.device)
        return {TRANSIENT: peak - held}

    return Contender(lambda: quantize(data.next()), counts=counts)


def headroom_quantize(data: Rotation, **options: Any) -> Contender:
    from headroom.functional import quantize_matrix

    return quantized(data, lambda x: quantize_matrix(x, **options))


def their_quantize(data: Rotation) -> Contender:
    theirs = bitsandbytes()
    return quantized(
        data, lambda x: theirs.quantize_4bit(x, quant_type="nf4", compress_statistics=True)
    )


class Matrix(ctypes.Structure):
    """hr_matrix."""

    _fields_ = (
        *(("size", ctypes.c_size_t), ("format", ctypes.c_int32), ("dtype", ctypes.c_int32)),
        *((name, ctypes.c_int64) for name in ("rows", "cols", "stride")),
        *(("data", ctypes.c_void_p), ("block_size", ctypes.c_int32), ("reserved", ctypes.c_int32)),
        *((n, ctypes.c_void_p) for n in ("absmax", "absmax_codes", "absmax_scales", "offset")),
    )


class Rows(ctypes.Structure):
    _fields_ = (("data", ctypes.c_void_p), ("stride", ctypes.c_int64))


class Exec(ctypes.Structure):
    _fields_ = (("device", ctypes.c_int32), ("stream", ctypes.c_void_p))


def decoder(q: Any, out: Tensor) -> Callable[[], None]:
    """Returns a call of hr_dequantize_matrix, as linear layers make it with their workspace."""
    import headroom

    library = ctypes.CDLL(str(next(Path(headroom.get_library_dir()).glob("libheadroom.so.*"))))
    rows, cols = q.shape
    first_scale = -(-rows * cols // (4 * q.block_size)) * 4
    part = [ctypes.c_int64(n) for n in (0, rows, 0, cols)]

    def call() -> None:
        codes = q.scales.data_ptr()
        scales, end = codes + first_scale, codes + q.scales.numel()
        form = {"nf4": 1, "mxfp4": 4}[q.format]
        matrix = Matrix(ctypes.sizeof(Matrix), form, 1, rows, cols, 0, q.codes.data_ptr())
        matrix.block_size, matrix.absmax_codes = q.block_size, codes
        if q.nested:
            matrix.absmax_scales, matrix.offset = scales, end - 4
        to, where = Rows(out.data_ptr(), cols), Exec(-1, None)
        if out.is_cuda:
            where = Exec(out.device.index, torch.cuda.current_stream(out.device).cuda_stream)
        given = ctypes.byref(to), ctypes.byref(matrix), *part, ctypes.byref(where)
        if library.hr_dequantize_matrix(*given) != 0:
            raise RuntimeError("hr_dequantize_matrix failed")

    return call


def cases(device: torch.device, quick: bool) -> list[Case]:
    rows, cols = (64, 64) if quick else (4096, 4096)

    def quantizing(device):
        sets = range(sets_needed(rows * cols * 2, device))
        data = Rotation([torch.randn(rows, cols, device=device).to(BF16) for _ in sets])
        return {
            "headroom": lambda: headroom_quantize(data),
            "headroom, search": lambda: headroom_quantize(data, search=True),
            "bitsandbytes": lambda: their_quantize(data),
        }

    out, inner = (64, 128) if quick else (4096, 14336)

    def decoding(device):
        from headroom.functional import dequantize_matrix, quantize_matrix

        x = torch.randn(out, inner, device=device).to(BF16)
        q, space = quantize_matrix(x), torch.empty_like(x)

        def theirs():
            module = bitsandbytes()
            codes, state = module.quantize_4bit(x, quant_type="nf4", compress_statistics=True)
            return Contender(lambda: module.dequantize_4bit(codes, state))

        return {
            "headroom": lambda: Contender(decoder(q, space)),
            "headroom, new output": lambda: Contender(lambda: dequantize_matrix(q)),
            "bitsandbytes": theirs,
        }

    def reading(device):
        from headroom.functional import mxfp4_matrix, quantize_matrix

        blocks = torch.randint(256, (out, inner // 32, 16), dtype=torch.uint8, device=device)
        scales = torch.randint(112, 124, blocks.shape[:2], dtype=torch.uint8, device=device)
        space = torch.empty(out, inner, dtype=BF16, device=device)

        def theirs():
            try:
                from transformers.integrations.mxfp4 import convert_moe_packed_tensors as convert
            except ImportError as error:
                raise Unavailable(str(error)) from error
            return Contender(lambda: convert(blocks[None], scales[None]))

        return {
            "headroom": lambda: Contender(decoder(mxfp4_matrix(blocks, scales), space)),
            "headroom, nf4": lambda: Contender(decoder(quantize_matrix(space.zero_()), space)),
            "memory": lambda: Contender(space.zero_),
            "transformers": theirs,
        }

    nested = 0.5 + 1 / 64 + 4 / 64 / 256  # bytes of a weight
    return [
        Case(
            "quantize-bf16",
            f"{rows:,} x {cols:,}, bf16 to NF4 in blocks of 64 with nested scales",
            quantizing,
            "bitsandbytes",
            int(rows * cols * (2 + nested)),
            bars=[
                Bar("ratio", 10, "cpu"),
                Share(TRANSIENT, "headroom", "bitsandbytes", 0.1, "cpu"),
            ],
        ),
        Case(
            "decode-bf16",
            f"{out:,} x {inner:,}, NF4 in blocks of 64 with nested scales to bf16",
            decoding,
            "bitsandbytes",
            int(out * inner * (2 + nested)),
            bars=[Bar("ratio", by_level(4, 2), "cpu"), Bar("fraction", 0.8, "cuda")],
        ),
        Case(
            "decode-mxfp4",
            f"{out:,} x {inner:,}, MXFP4 to bf16; transformers transposes it, too",
            reading,
            "transformers",
            int(out * inner * (2 + 17 / 32)),
            bars=[Bar("ratio", 4, "cpu"), Bar("fraction", 0.8, "cuda")],
        ),
    ]


KERNEL, SIXTEEN, TABLE = "dequantize_matrix_kernel", evenly(9.4), ("LDS",)
BUDGETS = [
    # A thread reads 4 bytes of codes and what their scale needs; 8 threads share the latter.
    Row(KERNEL, "nf4, nested, to f32", 4.516, 1.125, 4, FACTOR, 1.125, evenly(11)),
    Row(KERNEL, "nf4, nested, to bf16", 2.516, 1.125, 2, FACTOR, 1.125, SIXTEEN | {"75": 15.6}),
    Row(KERNEL, "nf4, nested, to f16", 2.516, 1.125, 2, FACTOR, 1.125, SIXTEEN, f16=True),
    Row(KERNEL, "nf4 to bf16", 2.5625, 1, 2, FACTOR, 1, evenly(7.5) | {"75": 14.5}),
    # 4 threads share the exponent of a block. Turns of int8 have as many products and bytes.
    Row(KERNEL, "mxfp4 to f32", 4.53125, 0.625, 4, TABLE, 1, evenly(10)),
    Row(KERNEL, "mxfp4 to bf16", 2.53125, 0.625, 2, TABLE, 1, evenly(8.1) | {"75": 15}),
    Row(KERNEL, "mxfp4 to f16", 2.53125, 0.625, 2, TABLE, 1, evenly(8.1) | {"75": 8.7}, f16=True),
    Row(KERNEL, "int8 to bf16", 3, 1.125, 2, FACTOR, 2, evenly(6.2) | {"75": 13.5}),
]
