"""Numbers as blocks of 8-bit codes, and back: what resharding and converting a state cost."""

from __future__ import annotations

import torch

from .harness import Case, Contender, Rotation, filled, sets_needed

F32 = torch.float32


def headroom_quantize(data: Rotation) -> Contender:
    from headroom.functional import quantize_blocks

    return Contender(lambda: quantize_blocks(data.next(), is_signed=True))


def torch_quantize(data: Rotation) -> Contender:
    """A search in the borders between the codes, as one would write it in torch."""
    import headroom

    table = headroom.functional.dynamic_map(True)
    borders = ((table[1:] + table[:-1]) / 2).to(data.next().device)

    def call():
        rows = data.next().view(-1, 256)
        absmax = rows.abs().amax(1, keepdim=True)
        torch.searchsorted(borders, rows / absmax, out_int32=True).to(torch.uint8)

    return Contender(call)


def case(name: str, numel: int) -> Case:
    def setup(device):
        sets = range(sets_needed(numel * 4, device))
        data = Rotation([filled(numel, F32, device) for _ in sets])
        return {
            "headroom": lambda: headroom_quantize(data),
            "torch": lambda: torch_quantize(data),
        }

    # Reads the numbers and writes a byte each, and a scale per 256.
    return Case(name, f"{numel:,} numbers, f32", setup, "torch", numel * 5 + numel // 64)


def cases(device: torch.device, quick: bool) -> list[Case]:
    return [case("f32", 1 << 12 if quick else 1 << 22)]
