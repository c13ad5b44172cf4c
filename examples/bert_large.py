"""Prints the ladder of transformers' guide to training on a single GPU, for bert-large.

    python examples/bert_large.py [--layers 24] [--twin 2] [--steps 2] [--json PATH]

The guide trains `bert-large-uncased` on 4 sequences of 512 tokens a step, and prints samples per
second and MB after each technique, from gradient accumulation to 8-bit Adam, measured on a V100:
https://huggingface.co/docs/transformers/v4.19.2/en/performance. Beside its numbers stand the MB
that `headroom.plan` predicts for the same step on a GPU, which is not needed, and a twin of a few
layers that trains on this CPU: its samples per second, and its MB, predicted and measured. The
last row is what Headroom adds. Needs transformers; takes some minutes on 2 cores.

Exits with 1 if a peak of the twin is not what was predicted, or what saves memory does not.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import headroom
import torch
from headroom.planning import Plan
from torch import nn

SEQUENCES = 4
MB = 1 << 20  # as the guide and nvidia-smi count
CONTEXT = 1343  # MB of the guide's process on its GPU, before the model
PREDICTION_ERROR = 0.01  # of the twin's measured peak, which is allowed


@dataclass(frozen=True)
class Rung:
    """A technique of the guide, or several.

    Attributes:
        guide: what the guide printed: samples per second and MB; None for what it does not have.
        micro_batches: of a step, between which the sequences are divided.
        checkpoints: every layer keeps its input and is computed again.
        half: the forward pass is in 16 bits, by autocast.
        optimizer: makes one from the parameters.
        ours: the model is Headroom's in all it can be: weights, blocks, gradients.
    """

    name: str
    guide: tuple[float, int] | None = None
    micro_batches: int = 1
    checkpoints: bool = False
    half: bool = False
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW
    ours: bool = False


def remainders(params: Any) -> torch.optim.Optimizer:
    """AdamW in 8 bits on weights in bfloat16, which keeps what rounding takes off."""
    return headroom.optim.AdamW8bit(params, master="remainder16")


SMALL: dict[str, Any] = {"micro_batches": SEQUENCES, "checkpoints": True}
RUNGS = [
    Rung("vanilla", (8.86, 14949)),
    Rung("gradient accumulation", (7.75, 8681), micro_batches=SEQUENCES),
    Rung("and checkpointing", (5.99, 6775), **SMALL),
    Rung("fp16", (18.64, 13939), half=True),
    Rung("fp16, accumulation, checkpointing", (10.09, 7275), half=True, **SMALL),
    Rung("Adafactor", (7.96, 12295), optimizer=headroom.optim.Adafactor),
    Rung("and all of these", (9.06, 4847), half=True, optimizer=headroom.optim.Adafactor, **SMALL),
    Rung("8-bit Adam", (9.15, 13085), optimizer=headroom.optim.Adam8bit),
    Rung("and all of these", (10.35, 5363), half=True, optimizer=headroom.optim.Adam8bit, **SMALL),
    Rung("all of Headroom, in one batch", optimizer=remainders, ours=True),
]


def bert(layers: int, width: int, rung: Rung) -> nn.Module:
    """Returns bert-large with a classifier, of so many layers and of another width."""
    from transformers import BertConfig, BertForSequenceClassification

    heads = max(1, width // 64)
    config = BertConfig(
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=4 * width,
        # The guide's transformers kept the probabilities of attention; torch's kernels do not.
        attn_implementation="sdpa" if rung.ours else "eager",
    )
    model = BertForSequenceClassification(config).train()
    if rung.checkpoints:
        model.activation_checkpointing_enable()
    if rung.ours:
        headroom.cast_model(model, torch.bfloat16)
        headroom.patch(model, save="L5")
    return model


def batch_of(rung: Rung, tokens: int) -> dict[str, torch.Tensor]:
    """Returns a micro-batch of random tokens and classes, as the guide has them."""
    sequences = SEQUENCES // rung.micro_batches
    return {
        "input_ids": torch.randint(100, 30000, (sequences, tokens)),
        "labels": torch.randint(0, 2, (sequences,)),
    }


def plan(rung: Rung, model: nn.Module, tokens: int, device: str, **options: Any) -> Plan:
    """Returns the plan of a rung's step: the CPU has no fp16 worth its name, so bfloat16 there."""
    half = torch.float16 if device == "cuda" else torch.bfloat16
    return headroom.plan(
        model,
        rung.optimizer,
        batch_of(rung, tokens),
        device=device,
        amp=half if rung.half else None,
        scaler=rung.half and device == "cuda",
        accumulation=rung.micro_batches,
        release=rung.ours,
        **options,
    )


def samples_per_second(rung: Rung, model: nn.Module, tokens: int, steps: int) -> float:
    """Trains the model, and returns the rate of its fastest step: the first makes the states."""
    optimizer = rung.optimizer(model.parameters())
    release = headroom.release_gradients(model, optimizer) if rung.ours else None
    batch, seconds = batch_of(rung, tokens), []
    for _ in range(steps):
        started = time.perf_counter()
        for _ in range(rung.micro_batches):
            with torch.autocast("cpu", torch.bfloat16, enabled=rung.half):
                loss = model(**batch).loss / rung.micro_batches
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - started)
    if release is not None:
        release.remove()
    return SEQUENCES / min(seconds)


def measure(rung: Rung, args: argparse.Namespace) -> dict[str, Any]:
    """Returns the row of a rung, in MB and samples per second."""
    with torch.device("meta"):
        large = bert(args.layers, args.width, rung)
        gpu = plan(rung, large, args.tokens, "cuda")
    torch.manual_seed(0)
    twin = bert(args.twin, args.width, rung)
    planned = plan(rung, twin, args.tokens, "cpu").peak_bytes
    measured = plan(rung, twin, args.tokens, "cpu", measure=True).peak_bytes
    speed = samples_per_second(rung, twin, args.tokens, args.steps)
    return {
        "rung": rung.name,
        "guide": rung.guide,
        "gpu_mb": gpu.total_bytes / MB,
        "twin_planned_mb": planned / MB,
        "twin_mb": measured / MB,
        "twin_samples_per_second": speed,
    }


def table(rows: list[dict[str, Any]], twin: int) -> str:
    """Returns the rows as Markdown."""
    lines = [
        "| | guide, V100: samples/s | MB | predicted for a GPU: MB "
        f"| twin of {twin} layers, CPU: samples/s | MB, predicted | measured |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        speed, size = row["guide"] or ("", "")
        lines.append(
            f"| {row['rung']} | {speed} | {size and format(size, ',')} | {row['gpu_mb']:,.0f} "
            f"| {row['twin_samples_per_second']:.2f} | {row['twin_planned_mb']:,.0f} "
            f"| {row['twin_mb']:,.0f} |"
        )
    return "\n".join(lines)


def checks(rows: list[dict[str, Any]]) -> dict[str, bool]:
    """Returns what must hold, in words, and whether it does."""
    gpu = [row["gpu_mb"] for row in rows]
    off = max(abs(row["twin_planned_mb"] / row["twin_mb"] - 1) for row in rows)
    saving = [gpu[1] < gpu[0], gpu[2] < gpu[1], gpu[4] < gpu[3], gpu[5] < gpu[0], gpu[7] < gpu[0]]
    return {
        f"peaks of the twin are as predicted, to {off:.1%}": off <= PREDICTION_ERROR,
        "each technique that saves memory does": all(saving),
        "all of Headroom takes least": gpu[-1] == min(gpu),
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=24, help="of the model that is planned")
    parser.add_argument("--twin", type=int, default=2, help="layers of the model that is trained")
    parser.add_argument("--width", type=int, default=1024, help="of both")
    parser.add_argument("--tokens", type=int, default=512, help="of a sequence")
    parser.add_argument("--steps", type=int, default=2, help="that the twin trains, default 2")
    parser.add_argument("--json", type=Path, help="also writes the rows to this file")
    args = parser.parse_args(arguments)
    rows = []
    for rung in RUNGS:
        rows.append(measure(rung, args))
        print(f"{rung.name}: {rows[-1]['gpu_mb']:,.0f} MB predicted", file=sys.stderr)
    print(table(rows, args.twin))
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")
    found = checks(rows)
    for name, good in found.items():
        print(f"{'PASSED' if good else 'FAILED'}: {name}")
    return 0 if all(found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
