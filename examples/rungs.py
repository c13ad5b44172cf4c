"""Lists the rungs of the memory ladder. A rung with a + is the rung above it with one change."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

BETAS = {"betas": [0.9, 0.95]}


@dataclass(frozen=True)
class Rung:
    key: str  # names the rung on the command line and its folder
    title: str  # names it in the table and the chart
    optimizer: str = "torch.optim.AdamW"  # imported by this name
    options: dict = field(default_factory=lambda: BETAS)  # beside those that every rung has
    lr_factor: float = 1.0  # times the learning rate of the size
    accumulate: int = 1  # micro-batches per optimizer step; the tokens of a step stay the same
    checkpoint: bool = False  # recompute each block in the backward pass, save only its input
    autocast: str | None = None  # matrix products in this dtype
    scaler: bool = False  # scale the loss, so that gradients survive in float16
    max_grad_norm: float | None = None  # clip inside the optimizer step, which writes no gradient
    weights: str = "float32"  # dtype of the parameters, but those of norms stay float32
    release: bool = False  # step each parameter in the backward pass, free its gradient at once
    sum_in_f32: bool = False  # add micro-batches' gradients up in float32, whatever their dtype
    tolerance: float | None = 0.0  # allowed distance from the first rung's held-out loss, in bits
    # per byte; None where the training itself differs, so that the loss is shown but not judged


# In float32 the rungs compute the same sums in another order, and training amplifies the rounding:
# by 0.00001 bits per byte as measured. 16-bit products round 8,192 to 65,536 times more coarsely:
# 0.04 measured after 40 steps, 0.06 after 60, 0.02 and 0.0001 (two seeds) after 100. bf16 weights
# with 8-bit moments: 0.07 after 50 steps, and 0.12 after 30, when the loss still falls too fast to
# judge. These rungs may be as far off as another seed is, which moves the loss by 0.10.
F32, HALF = 0.002, 0.10

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
bf16_autocast = replace(
    checkpointing, key="bf16", title="+ bf16 autocast", autocast="bfloat16", tolerance=HALF
)
fp16_scaled = replace(
    bf16_autocast,
    key="fp16",
    title="fp16 autocast, loss scaling",
    autocast="float16",
    scaler=True,
)
clipped = replace(
    bf16_autocast,
    key="clip",
    title="bf16 autocast, clipped to 1",
    max_grad_norm=1.0,
    tolerance=None,
)
eight_bit = replace(
    bf16_autocast,
    key="8bit",
    title="+ 8-bit AdamW",
    optimizer="headroom.optim.AdamW8bit",
)
remainder = replace(
    eight_bit,
    key="remainder",
    title="+ bf16 weights and remainder",
    options=BETAS | {"master": "remainder16"},
    weights="bfloat16",
    autocast=None,
)
adafactor = replace(
    bf16_autocast,
    key="adafactor",
    title="bf16 autocast, Adafactor",
    optimizer="headroom.optim.Adafactor",
    options={},
    lr_factor=30.0,  # relative to the size of weights, about 1/30
    tolerance=None,
)
# Gradient release steps in every backward pass, so a step cannot consist of several.
whole_batch = replace(remainder, key="whole-batch", title="+ whole batch at once", accumulate=1)
released = replace(whole_batch, key="release", title="+ gradient release", release=True)
bf16_weights = replace(
    checkpointing,
    key="bf16-weights",
    title="bf16 weights, f32 sums",
    weights="bfloat16",
    sum_in_f32=True,
    tolerance=None,
)

LADDER = (
    torch_adamw,
    headroom_adamw,
    accumulation,
    checkpointing,
    bf16_autocast,
    eight_bit,
    remainder,
    whole_batch,
    released,
    adafactor,
    fp16_scaled,
    clipped,
    bf16_weights,
)
RUNGS = {rung.key: rung for rung in LADDER}
STORY = ("torch", "headroom", "checkpoint", "8bit", "release")  # what the demo shows by default


def chosen(keys: Sequence[str]) -> list[Rung]:
    """Returns the rungs of these keys, in the order of the ladder. The title of one with a + also
    names what the rungs that are left out before it change."""
    rungs, skipped = [], []
    for rung in LADDER:
        added = rung.title.removeprefix("+ ")
        starts_anew = added == rung.title
        if rung.key in keys:
            title = rung.title if starts_anew else "+ " + ", ".join([*skipped, added])
            rungs.append(replace(rung, title=title))
            skipped = []
        else:
            skipped = [] if starts_anew else [*skipped, added]
    return rungs
