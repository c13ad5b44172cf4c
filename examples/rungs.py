"""The rungs of the memory ladder. Each one is the rung above it with one thing changed."""

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Rung:
    key: str  # names the rung on the command line and its folder
    title: str  # names it in the table and the chart
    optimizer: str = "torch.optim.AdamW"  # imported by this name
    accumulate: int = 1  # micro-batches per optimizer step; the tokens of a step stay the same
    checkpoint: bool = False  # recompute each block in the backward pass, save only its input
    autocast: bool = False  # matrix products in bf16
    tolerance: float = 0.0  # allowed distance from the first rung's held-out loss, in bits per byte


# In float32 the rungs do the same sums in another order, and training amplifies the rounding:
# measured 0.00001 bits per byte. bf16 rounds 65,536 times coarser: 0.04 measured after 40 steps,
# 0.02 and 0.0001 (two seeds) after 100. Another seed moves the loss itself by 0.10.
F32, BF16 = 0.002, 0.05

torch_adamw = Rung("torch", "torch AdamW")
headroom_adamw = replace(
    torch_adamw,
    key="headroom",
    title="Headroom AdamW",
    optimizer="headroom.optim.AdamW",
    tolerance=F32,
)
accumulation = replace(
    headroom_adamw, key="accumulate", title="+ gradient accumulation", accumulate=4
)
checkpointing = replace(accumulation, key="checkpoint", title="+ checkpointing", checkpoint=True)
autocast = replace(
    checkpointing, key="bf16", title="+ bf16 autocast", autocast=True, tolerance=BF16
)

RUNGS = {r.key: r for r in (torch_adamw, headroom_adamw, accumulation, checkpointing, autocast)}
