"""Fine-tunes a small mixture of experts in 4 bits: its experts get NF4 and adapters, too.

    python examples/experts.py [--data PATH] [--steps N] [--out DIR]

A model of the shape of Qwen3-MoE is trained a little on English, the topics of Python's `help()`.
Then its weights are put into NF4, experts and all, get adapters, and these are trained on the
demo's text by `headroom.quantize`, `headroom.lora` and `headroom.patch`, which decode one expert at
a time. Beside it, where it is installed, PEFT trains as many by `target_parameters`, over the same
numbers in 32 bits: it leaves out experts that bitsandbytes has put into 4 bits, and makes whole
stacks and keeps them. Takes three minutes on 2 cores.

Exits with 1 if the held-out loss does not fall by 0.4 bits per byte, if the peak of a step is not
what `headroom.plan` says, if PEFT does not read the adapters as they were saved, or if the other
way ends at another loss, or with less memory.
"""

import argparse
import copy
import pydoc_data.topics
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import headroom
import torch
from torch import Tensor, nn
from tqdm import trange
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import data

CONFIG: dict[str, Any] = dict(
    vocab_size=256,
    hidden_size=128,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    num_experts=32,
    num_experts_per_tok=4,
    moe_intermediate_size=128,
    norm_topk_prob=True,
)
CONTEXT, BATCH, RANK = 128, 4, 8
BASE_STEPS, LR = 40, 3e-3
FALLS = 0.4  # bits per byte, at least
NEAR = 0.05  # bits per byte: of the two ways
WINDOWS = 32  # of held-out text
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
STACKS = ["gate_up_proj", "down_proj"]


class Result(NamedTuple):
    loss: float  # held out, in bits per byte
    peak: int  # bytes of a step above the weights
    seconds: float  # of a step


def loss_of(model: nn.Module, pair: tuple[Tensor, Tensor]) -> Tensor:
    """Mean cross entropy in nats per token."""
    tokens, targets = pair
    logits = model(input_ids=tokens.long(), use_cache=False).logits
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.long().flatten())


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    trained = [param for param in model.parameters() if param.requires_grad]
    return headroom.optim.AdamW8bit(trained, lr=LR, weight_decay=0.0)


def train(model: nn.Module, text: data.Text, steps: int, what: str) -> float:
    """Returns the seconds of a step."""
    optimizer = optimizer_of(model)
    start = time.perf_counter()
    for step in trange(steps, desc=what, unit="step", mininterval=1):
        optimizer.param_groups[0]["lr"] = LR * min((step + 1) / 10, 1 - step / steps)
        loss_of(model, data.batch(text, 0, step, BATCH, CONTEXT)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return (time.perf_counter() - start) / steps


@torch.no_grad()
def held_out(model: nn.Module, text: data.Text) -> float:
    """Bits per byte."""
    pair = data.held_out(text, WINDOWS, CONTEXT)
    return text.bits_per_byte(loss_of(model, pair).item(), pair[1])


def peak_of(model: nn.Module, text: data.Text) -> int:
    """The bytes that a step takes, measured, with the weights."""
    optimizer, pair = optimizer_of(model), data.batch(text, 0, 0, BATCH, CONTEXT)
    with headroom.memory.track(model, optimizer, batch=pair) as tracked:
        for _ in range(2):
            loss_of(model, pair).backward()
            optimizer.step()
            optimizer.zero_grad()
    return tracked.peak_bytes


def by_headroom(model: nn.Module) -> nn.Module:
    print(headroom.quantize(model))
    print(headroom.lora(model, RANK, alpha=2 * RANK, experts=True))
    print(headroom.patch(model, save="L2"))
    return model


def by_peft(model: nn.Module) -> nn.Module | None:
    """The same adapters by PEFT, beside the numbers of NF4 in 32 bits."""
    try:
        import peft
    except ImportError:
        return None
    headroom.quantize(model)
    rank = RANK // CONFIG["num_experts_per_tok"]
    patterns = {rf".*\.{name}": rank for name in STACKS}
    config = peft.LoraConfig(
        r=RANK,
        lora_alpha=2 * RANK,
        target_modules=ATTENTION,
        target_parameters=[f"mlp.experts.{name}" for name in STACKS],
        rank_pattern=patterns,
        alpha_pattern={name: 2 * rank for name, rank in patterns.items()},
    )
    return peft.get_peft_model(headroom.dequantize(model), config)


def tuned(model: nn.Module, text: data.Text, unseen: data.Text, steps: int, who: str) -> Result:
    weights = sum(param.nbytes for param in model.parameters())
    seconds = train(model, text, steps, f"adapters, by {who}")
    return Result(held_out(model, unseen), peak_of(model, text) - weights, seconds)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", help="text file or folder; default: the standard library")
    parser.add_argument("--steps", type=int, default=60, help="of the adapters, default 60")
    parser.add_argument("--out", type=Path, default=Path("runs/experts"), help="default: there")
    args = parser.parse_args()
    english, _ = data.load(pydoc_data.topics.__file__, CONTEXT)
    text, unseen = data.load(args.data, CONTEXT)
    torch.manual_seed(0)
    base = Qwen3MoeForCausalLM(Qwen3MoeConfig(**CONFIG))
    train(base, english, BASE_STEPS, "all weights, on English")

    model = by_headroom(copy.deepcopy(base))
    before = held_out(model, unseen)
    pair = data.batch(text, 0, 0, BATCH, CONTEXT)
    plan = headroom.plan(model, optimizer_of(model), pair, forward=loss_of)
    measured = peak_of(copy.deepcopy(model), text)
    results = {"Headroom": tuned(model, text, unseen, args.steps, "Headroom")}
    folder = args.out / "adapter"
    headroom.state.save_adapter(model, folder)
    if (other := by_peft(copy.deepcopy(base))) is None:
        print("PEFT is not installed: there is nothing beside it.")
    else:
        results["PEFT"] = tuned(other, text, unseen, args.steps, "PEFT")

    ours = results["Headroom"]
    print(f"\nheld-out bits per byte: {before:.3f} before")
    for who, (loss, peak, seconds) in results.items():
        size = f"{peak / 2**20:.1f} MiB above the weights"
        print(f"{who:>9}: {loss:.3f} after; a step takes {size} and {seconds:.2f} s")
    checks = {
        f"the loss falls by {FALLS} bits per byte": ours.loss <= before - FALLS,
        "the peak is as planned": abs(plan.peak_bytes / measured - 1) <= 0.001,
    }
    if other is not None:
        theirs = results["PEFT"]
        checks[f"PEFT ends within {NEAR} bits per byte"] = abs(theirs.loss - ours.loss) <= NEAR
        checks["and takes more memory"] = theirs.peak > ours.peak
        checks["PEFT reads the adapters"] = reads_alike(base, folder, unseen)
    for name, good in checks.items():
        print(f"{'PASSED' if good else 'FAILED'}: {name}")
    return 0 if all(checks.values()) else 1


def reads_alike(base: nn.Module, folder: Path, text: data.Text) -> bool:
    """Returns whether Headroom and PEFT give weights of 32 bits the same adapters."""
    import peft

    ours = copy.deepcopy(base)
    headroom.state.load_adapter(ours, folder)
    theirs = peft.PeftModel.from_pretrained(copy.deepcopy(base), str(folder))
    pair = data.held_out(text, 4, CONTEXT)
    with torch.no_grad():
        mine, other = (loss_of(model, pair) for model in (ours, theirs))
    return abs(mine / other - 1).item() < 1e-5


if __name__ == "__main__":
    sys.exit(main())
