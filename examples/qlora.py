"""Fine-tunes a small model in 4 bits: QLoRA from the weights to a file, and back into the weights.

    python examples/qlora.py [--data PATH] [--steps N] [--out DIR]

A model of the shape of Llama is trained a little on English, the topics of Python's `help()`. Then
`headroom.quantize` puts its weights into NF4, `headroom.lora` gives it adapters, and these alone
are trained on the demo's text. The adapters are saved in PEFT's format, loaded again by Headroom
and, where it is installed, by PEFT, and merged into weights of 32 bits. Takes a minute on 2 cores.

Exits with 1 if the held-out loss does not fall by 0.5 bits per byte, if it falls in a control whose
B gets no gradient, if the peak of a step is not what `headroom.plan` says, or if one of the ways
back gives other outputs.
"""

import argparse
import copy
import pydoc_data.topics
import sys
from pathlib import Path

import headroom
import torch
from headroom.nn import Transformer, TransformerConfig
from torch import Tensor, nn
from tqdm import trange

import data

CONFIG = TransformerConfig(vocab_size=256, hidden_size=192, layers=4, heads=4, features=512)
CONTEXT, BATCH, RANK = 128, 4, 8
BASE_STEPS, LR = 60, 3e-3
FALLS = 0.5  # bits per byte, at least
WINDOWS = 32  # of held-out text


def loss_of(model: nn.Module, pair: tuple[Tensor, Tensor]) -> Tensor:
    """Mean cross entropy in nats per token."""
    tokens, targets = pair
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    trained = [param for param in model.parameters() if param.requires_grad]
    return headroom.optim.AdamW8bit(trained, lr=LR, weight_decay=0.0)


def train(model: nn.Module, text: data.Text, steps: int, what: str) -> None:
    optimizer = optimizer_of(model)
    for step in trange(steps, desc=what, unit="step", mininterval=1):
        optimizer.param_groups[0]["lr"] = LR * min((step + 1) / 10, 1 - step / steps)
        loss_of(model, data.batch(text, 0, step, BATCH, CONTEXT)).backward()
        optimizer.step()
        optimizer.zero_grad()


@torch.no_grad()
def held_out(model: nn.Module, text: data.Text) -> float:
    """Bits per byte."""
    pair = data.held_out(text, WINDOWS, CONTEXT)
    return text.bits_per_byte(loss_of(model, pair).item(), pair[1])


def as_planned(model: nn.Module, text: data.Text) -> tuple[int, int]:
    """The peak of a step by `headroom.plan`, and as measured."""
    optimizer, pair = optimizer_of(model), data.batch(text, 0, 0, BATCH, CONTEXT)
    plan = headroom.plan(model, optimizer, pair, forward=loss_of)
    with headroom.memory.track(model, optimizer, batch=pair) as tracked:
        for _ in range(2):
            loss_of(model, pair).backward()
            optimizer.step()
            optimizer.zero_grad()
    return plan.peak_bytes, tracked.peak_bytes


def by_peft(base: nn.Module, folder: Path) -> nn.Module | None:
    try:
        import peft
    except ImportError:
        return None
    return peft.PeftModel.from_pretrained(base, str(folder))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", help="text file or folder; default: the standard library")
    parser.add_argument("--steps", type=int, default=120, help="of the adapters, default 120")
    parser.add_argument("--out", type=Path, default=Path("runs/qlora"), help="default: runs/qlora")
    args = parser.parse_args()
    english, _ = data.load(pydoc_data.topics.__file__, CONTEXT)
    text, unseen = data.load(args.data, CONTEXT)
    torch.manual_seed(0)
    base = Transformer(CONFIG, save="L1")
    train(base, english, BASE_STEPS, "all weights, on English")

    print(headroom.quantize(base))  # in place
    model = copy.deepcopy(base)
    print(headroom.lora(model, RANK, alpha=2 * RANK))
    control = copy.deepcopy(model)
    before = held_out(model, unseen)
    planned, measured = as_planned(copy.deepcopy(model), text)
    train(model, text, args.steps, "adapters, on Python")
    after = held_out(model, unseen)
    for name, param in control.named_parameters():
        if ".lora_B." in name:
            param.register_hook(torch.zeros_like)
    train(control, text, args.steps // 10, "the control")
    without = held_out(control, unseen)

    folder = args.out / "adapter"
    headroom.state.save_adapter(model, folder)
    again = copy.deepcopy(base)
    headroom.state.load_adapter(again, folder)
    tokens = data.held_out(unseen, 4, CONTEXT)[0]
    with torch.no_grad():
        wanted = model(tokens)
        outputs = {"loaded by Headroom": again(tokens)}
        if (other := by_peft(copy.deepcopy(base), folder)) is None:
            print("PEFT is not installed: it does not load the adapters.")
        else:
            outputs["loaded by PEFT"] = other(tokens)
        print(headroom.merge(model))
        outputs["merged"] = model(tokens)

    size = sum(path.stat().st_size for path in folder.iterdir())
    print(f"\nheld-out bits per byte: {before:.3f} before, {after:.3f} after", end="")
    print(f", {without:.3f} where B has no gradient")
    print(f"peak of a step: {planned / 2**20:.1f} MiB planned, {measured / 2**20:.1f} MiB measured")
    print(f"adapters: {size / 2**10:,.0f} KiB in {folder}")
    checks = {
        f"the loss falls by {FALLS} bits per byte": after <= before - FALLS,
        "and does not where B has no gradient": abs(without - before) < 1e-6,
        "the peak is as planned": abs(planned / measured - 1) <= 0.001,
    }
    for name, output in outputs.items():
        off = (output - wanted).norm() / wanted.norm()
        checks[f"{name}, outputs are the same to {off:.0e}"] = off.item() < 1e-5
    for name, good in checks.items():
        print(f"{'PASSED' if good else 'FAILED'}: {name}")
    return 0 if all(checks.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
