"""Products in 16 bits beside torch's and beside float32, and a training step."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ._layers import trained
from .harness import Bar, Case, Contender, Rotation, Share, filled, sets_needed

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
NAMES = {F32: "f32", BF16: "bf16", F16: "f16"}
SIZES = ((512, 1024, 1024), (64, 512, 512), (4, 512, 512))  # rows, out, in


def layer(
    rows: int, out: int, width: int, dtype: torch.dtype, device: torch.device
) -> list[Tensor]:
    sizes = (rows, width), (out, width), (rows, out)
    x, weight, dy = (filled(m * n, dtype, device).view(m, n) for m, n in sizes)
    return [x.requires_grad_(), weight.requires_grad_(), dy]


def linear_case(
    dtype: torch.dtype, sizes: tuple[int, int, int], quick: bool, backward: bool
) -> Case:
    rows, out, width = (7, 24, 16) if quick else sizes

    def setup(device: torch.device) -> dict[str, Any]:
        def contender(dtype: torch.dtype, function: Any) -> Contender:
            held = (rows * width + out * width + 2 * rows * out) * dtype.itemsize
            count = sets_needed(held, device)
            data = Rotation([layer(rows, out, width, dtype, device) for _ in range(count)])
            if backward:
                return trained(data, lambda d: function(*d[:2]), lambda d: d[:2], lambda d: d[2])

            def call() -> None:
                with torch.no_grad():
                    function(*data.next()[:2])

            return Contender(call)

        def headroom() -> Contender:
            from headroom.functional import linear

            return contender(dtype, linear)

        return {
            "headroom": headroom,
            "torch": lambda: contender(dtype, F.linear),
            "torch f32": lambda: contender(F32, F.linear),
        }

    from headroom.functional.linear import SLOW_ON_CPU

    bars: list[Bar | Share] = [Share("time", "headroom", "torch f32", 2.0, "cpu")]
    if dtype in SLOW_ON_CPU:  # else it is torch's product
        bars.append(Bar("ratio", 1.0, "cpu"))
    name, passes = NAMES[dtype], "forward and backward" if backward else "forward"
    return Case(
        f"{name}-{sizes[0]}{'-backward' if backward else ''}",
        f"{rows:,} rows of {width:,} to {out:,}, {name}, {passes}",
        setup,
        "torch",
        2 * rows * out * width * (3 if backward else 1),
        "flop",
        F32,
        bars,
    )


def step_case(dtype: torch.dtype, quick: bool) -> Case:
    """A GPT of the size of the demo's."""
    layers, width, batch, tokens = (1, 32, 2, 16) if quick else (4, 192, 4, 256)

    def setup(device: torch.device) -> dict[str, Any]:
        import headroom

        ids = torch.randint(256, (batch, tokens), device=device)
        config = headroom.nn.TransformerConfig(
            vocab_size=256,
            hidden_size=width,
            layers=layers,
            heads=4,
            features=4 * width,
            norm="layer",
            activation="gelu_tanh",
            gated=False,
        )

        def trains(dtype: torch.dtype) -> Contender:
            model = headroom.nn.Transformer(config, device=device, dtype=dtype)
            optimizer = headroom.optim.AdamW(model.parameters(), lr=1e-4)

            def call() -> None:
                model(ids, labels=ids).backward()
                optimizer.step()
                optimizer.zero_grad()

            return Contender(call)

        return {"headroom": lambda: trains(dtype), "headroom f32": lambda: trains(F32)}

    from headroom.functional.linear import SLOW_ON_CPU

    bars = [Share("time", "headroom", "headroom f32", 1.6 if BF16 in SLOW_ON_CPU else 1.2, "cpu")]
    return Case(
        f"step-{NAMES[dtype]}",
        f"a training step of a GPT of {layers} layers of {width}, {NAMES[dtype]}",
        setup,
        "headroom f32",
        bars=bars if dtype == BF16 else (),
    )


def cases(device: torch.device, quick: bool) -> list[Case]:
    linears = [
        linear_case(dtype, sizes, quick, backward)
        for dtype in (BF16, F16)
        for sizes in SIZES
        for backward in (False, True)
    ]
    return linears + [step_case(dtype, quick) for dtype in (BF16, F16)]
