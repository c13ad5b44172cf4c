"""Rows times an NF4 matrix, beside bitsandbytes and torch with the matrix in full precision."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ._layers import held_bytes, trained
from .harness import Bar, Case, Contender, Rotation, Share, Unavailable, filled, sets_needed

F32, BF16 = torch.float32, torch.bfloat16
PEAK = "peak bytes"


@dataclass
class Layer:
    x: Tensor
    weight: Tensor
    dy: Tensor
    packed: Any = None


def layer(sizes: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> Layer:
    rows, out, width = sizes
    shapes = (rows, width), (out, width), (rows, out)
    x, weight, dy = (filled(m * n, dtype, device).view(m, n) for m, n in shapes)
    return Layer(x, weight, dy)


def headroom_pack(d: Layer) -> Any:
    from headroom.functional import quantize_matrix

    return quantize_matrix(d.weight)


def headroom_product(d: Layer) -> Tensor:
    from headroom.functional import linear_quantized

    return linear_quantized(d.x, d.packed)


def bnb_pack(d: Layer) -> Any:
    try:
        from bitsandbytes.functional import quantize_4bit
    except ImportError as error:
        raise Unavailable("not installed") from error
    return quantize_4bit(d.weight, quant_type="nf4", compress_statistics=True)


def bnb_product(d: Layer) -> Tensor:
    import bitsandbytes

    codes, state = d.packed
    return bitsandbytes.matmul_4bit(d.x, codes.t(), quant_state=state)


def case(
    sizes: tuple[int, int, int], dtype: torch.dtype, quick: bool, backward: bool = False
) -> Case:
    rows, out, width = (sizes[0], 24, 64) if quick else sizes

    def setup(device: torch.device) -> dict[str, Any]:
        def contender(
            pack: Callable[[Layer], Any], product: Callable[[Layer], Tensor]
        ) -> Contender:
            keeps = pack is torch_pack
            held = rows * (width + 2 * out) * dtype.itemsize
            held += out * width * dtype.itemsize if keeps else out * width // 2
            layers = []
            for _ in range(sets_needed(held, device)):
                made = layer((rows, out, width), dtype, device)
                made.packed = pack(made)
                if not keeps:
                    made.weight = made.weight[:0]
                made.x.requires_grad_(backward)
                layers.append(made)
            data = Rotation(layers)

            def once() -> Tensor:
                with torch.no_grad():
                    return product(data.next())

            call = trained(data, product, lambda d: d.x, lambda d: d.dy).call if backward else once
            return Contender(call, counts=lambda: {PEAK: held_bytes(call, device)[1]})

        return {
            "headroom": lambda: contender(headroom_pack, headroom_product),
            "bitsandbytes": lambda: contender(bnb_pack, bnb_product),
            "torch, not quantized": lambda: contender(
                torch_pack, lambda d: F.linear(d.x, d.weight)
            ),
        }

    few = sizes[0] <= 32
    bars: list[Bar | Share] = [] if backward or not few else [Bar("ratio", 2.0, "cpu")]
    name, passes = (
        "f32" if dtype == F32 else "bf16",
        "forward and backward" if backward else "forward",
    )
    return Case(
        f"{name}-{sizes[0]}-{sizes[2]}{'-backward' if backward else ''}",
        f"{sizes[0]:,} rows of {sizes[2]:,} to {sizes[1]:,}, {name}, {passes}",
        setup,
        "bitsandbytes",
        2 * rows * out * width * (2 if backward else 1),
        "flop",
        dtype,
        bars,
    )


def torch_pack(d: Layer) -> None:
    return None


def cases(device: torch.device, quick: bool) -> list[Case]:
    forward = [
        case((rows, 4096, width), dtype, quick)
        for dtype in (F32, BF16)
        for width in (4096, 14336)
        for rows in (1, 32)
    ]
    return forward + [case((512, 4096, 4096), dtype, quick, backward=True) for dtype in (F32, BF16)]
