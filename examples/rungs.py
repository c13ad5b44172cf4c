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
    save: str | list[str] | None = None  # the model of Headroom's blocks, and their level or the
    # level of each; None: plain torch
    fused_loss: bool = False  # Headroom's blocks: compute the loss without the logits
    accumulate: int = 1  # micro-batches per optimizer step; the tokens of a step stay the same
    checkpoint: bool = False  # plain torch: recompute each block from its input, by torch
    autocast: str | None = None  # matrix products in this dtype
    scaler: bool = False  # scale the loss, so that gradients survive in float16
    max_grad_norm: float | None = None  # clip inside the optimizer step, which writes no gradient
    weights: str = "float32"  # dtype of the parameters; in plain torch, norms stay float32
    offload: bool = False  # keep the optimizer's state in a file, and step it through a ring
    release: bool = False  # step each parameter in the backward pass, then free its gradient
    bucket_bytes: int = 0  # gradients wait until they are as many
    sum_in_f32: bool = False  # add micro-batches' gradients up in float32, whatever their dtype
    tolerance: float | None = 0.0  # allowed distance from the first rung's held-out loss, in bits
    # per byte; None where the training itself differs, so that the loss is shown but not judged
    size: str | None = None  # the size that this rung trains, whatever the command line says
    same_bits: str | None = None  # rungs with the same name here have the same losses to the bit
    adapters: int | None = (
        None  # train the model as long in full, on other batches, put its weights
    )
    # into NF4, and train adapters of this rank alone
    budget: float | None = None  # let headroom.fit choose how to train within this share of the
    # first rung's predicted peak


# In float32 the rungs compute the same sums in another order, and training amplifies the rounding:
# by 0.00001 bits per byte as measured. 16-bit products round 8,192 to 65,536 times more coarsely:
# 0.04 measured after 40 steps, 0.06 after 60, 0.02 and 0.0001 (two seeds) after 100. bf16 weights
# with 8-bit moments: 0.01 after 40 steps, 0.07 after 50, and 0.12 after 30, when the loss still
# falls too fast to judge. They may be as far off as another seed is, which moves the loss by 0.10.
F32, HALF = 0.002, 0.10

torch_adamw = Rung("torch", "torch alone")
headroom_adamw = replace(
    torch_adamw,
    key="headroom",
    title="+ Headroom's AdamW",
    optimizer="headroom.optim.AdamW",
    tolerance=F32,
)
level0 = replace(headroom_adamw, key="L0", title="+ its blocks", save="L0", same_bits="blocks")
level1 = replace(level0, key="L1", title="+ L1: no product again", save="L1")
level2 = replace(level0, key="L2", title="+ L2: one product again", save="L2")
level5 = replace(level0, key="L5", title="+ L5: whole blocks again", save="L5")
eight_bit = replace(
    level5,
    key="8bit",
    title="+ 8-bit moments",
    optimizer="headroom.optim.AdamW8bit",
    tolerance=HALF,
    same_bits=None,
)
bf16_weights = replace(
    eight_bit,
    key="bf16",
    title="+ bf16 weights",
    weights="bfloat16",
    options=BETAS | {"rounding": "stochastic"},
)
everything = replace(bf16_weights, key="everything", title="+ micro-batches", accumulate=8)
paged = replace(everything, key="host", title="+ state in a file", offload=True)
released = replace(
    bf16_weights, key="release", title="the same, gradient release instead", release=True
)
remainder = replace(
    everything,
    key="remainder",
    title="everything, weights with remainder",
    options=BETAS | {"master": "remainder16"},
)
# What torch can do by itself: beside the rungs above it shows what is Headroom's.
checkpointing = replace(
    torch_adamw,
    key="checkpoint",
    title="torch's checkpointing, micro-batches",
    checkpoint=True,
    accumulate=everything.accumulate,
    tolerance=F32,
)
# Headroom chooses among what changes no result but for the order of sums.
fit = replace(
    torch_adamw,
    key="fit",
    title="headroom.fit, to half of the first",
    save="L0",
    tolerance=F32,
    budget=0.5,
)
adafactor = replace(
    everything,
    key="adafactor",
    title="everything, Adafactor",
    optimizer="headroom.optim.Adafactor",
    options={"rounding": "stochastic"},
    lr_factor=30.0,  # relative to the size of weights, about 1/30
    tolerance=None,
)
qlora = replace(
    eight_bit, key="qlora", title="8-bit moments, adapters beside NF4", adapters=16, tolerance=None
)
fp16_scaled = replace(
    level5,
    key="fp16",
    title="L5, fp16 autocast, loss scaling",
    autocast="float16",
    scaler=True,
    tolerance=HALF,
    same_bits=None,
)
clipped = replace(
    headroom_adamw,
    key="clip",
    title="bf16 autocast, clipped to 1",
    autocast="bfloat16",
    max_grad_norm=1.0,
    tolerance=None,
)
summed_in_f32 = replace(
    headroom_adamw,
    key="f32-sums",
    title="bf16 weights, f32 sums",
    weights="bfloat16",
    accumulate=4,
    sum_in_f32=True,
    tolerance=None,
)
# A vocabulary of words, whose logits take most of the memory.
words = replace(torch_adamw, key="words", title="torch alone, words as tokens", size="words")
words_loss = replace(
    words,
    key="words-loss",
    title="+ Headroom's AdamW, its blocks, fused loss",
    optimizer="headroom.optim.AdamW",
    save="L1",
    fused_loss=True,
    tolerance=F32,
)

LADDER = (
    torch_adamw,
    headroom_adamw,
    level0,
    level1,
    level2,
    level5,
    eight_bit,
    bf16_weights,
    everything,
    paged,
    checkpointing,
    released,
    remainder,
    adafactor,
    qlora,
    fp16_scaled,
    clipped,
    summed_in_f32,
    fit,
    words,
    words_loss,
)
RUNGS = {rung.key: rung for rung in LADDER}
# What the demo shows by default.
STORY = ("torch", "L1", "L5", "host", "checkpoint", "fit", "words", "words-loss")


def size_of(rung: Rung, size: str) -> str:
    """Returns the name of the size that a rung trains where the command line asks for `size`. A
    size that belongs to a rung has a tiny one beside it."""
    if rung.size is None:
        return size
    return f"{rung.size}-tiny" if size.endswith("tiny") else rung.size


def firsts(results: Sequence[dict]) -> list[dict]:
    """Returns for each result of a rung the one that it is compared with: the first of its size,
    which also decides what the tokens are."""
    first: dict[str, dict] = {}
    return [first.setdefault(result["size"], result) for result in results]


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
