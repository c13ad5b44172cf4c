"""Does training with 8-bit moments end where training with float32 moments does?

    python examples/convergence.py [--steps N] [--seeds N] [--out FILE.json]

Trains the demo's model on the demo's text with AdamW, with AdamW8bit, and with AdamW8bit under the
rule that lets a small second moment round to zero (`bnb_exact`). Each once as it is and once with
heavy-tailed gradients: every element is multiplied by exp(2 z), z standard normal, anew each step.
That changes no sign, and AdamW takes it; a second moment of zero does not.
"""

import argparse
import json
import math
import platform
import sys
from dataclasses import replace
from pathlib import Path
from statistics import mean

import torch
from tqdm import tqdm

import data
import rungs
from model import SIZES
from run import Run

SIZE = replace(SIZES["small"], batch=4)
SIGMA = 2.0
OPTIMIZERS = {
    "AdamW, f32 moments": rungs.headroom_adamw,
    "AdamW8bit": replace(rungs.headroom_adamw, optimizer="headroom.optim.AdamW8bit"),
    "8-bit, code 0 allowed": replace(
        rungs.headroom_adamw,
        optimizer="headroom.optim.AdamW8bit",
        options={"bnb_exact": True},
    ),
}
GRADIENTS = {"as they are": 0.0, "heavy-tailed": SIGMA}


class HeavyTailedRun(Run):
    """A run whose optimizer sees gradients of a wider distribution."""

    def __init__(self, *args: object, sigma: float):
        super().__init__(*args)
        self.noise = torch.Generator().manual_seed(self.seed)
        if sigma:
            self.optimizer.register_step_pre_hook(lambda *_: self.widen(sigma))

    def widen(self, sigma: float) -> None:
        for param in self.model.parameters():
            z = torch.randn(param.shape, generator=self.noise)
            param.grad.mul_(torch.exp(sigma * z))


def held_out(
    rung: rungs.Rung, sigma: float, seed: int, steps: int, path: str | None = None
) -> float:
    """Held-out bits per byte after training; infinite if it diverged to NaN."""
    text, unseen = data.load(path, SIZE.context)
    run = HeavyTailedRun(rung, SIZE, torch.device("cpu"), seed, sigma=sigma)
    for _ in range(steps):
        run.step(text)
    loss = run.held_out_loss(unseen)
    return loss if math.isfinite(loss) else math.inf


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", help="text file or folder; default: the standard library")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    cells = [(g, o, s) for g in GRADIENTS for o in OPTIMIZERS for s in range(args.seeds)]
    losses: dict[str, dict[str, list[float]]] = {g: {o: [] for o in OPTIMIZERS} for g in GRADIENTS}
    for gradients, name, seed in tqdm(cells, unit="run"):
        loss = held_out(OPTIMIZERS[name], GRADIENTS[gradients], seed, args.steps, args.data)
        losses[gradients][name].append(loss)

    print(f"held-out bits per byte after {args.steps} steps, {args.seeds} seeds")
    passed = True
    for gradients, by_optimizer in losses.items():
        exact, ours, broken = by_optimizer.values()
        spread = max(exact) - min(exact)
        close = abs(mean(ours) - mean(exact)) <= spread
        passed = passed and close
        print(f"\ngradients {gradients}; seeds of f32 differ by {spread:.3f}")
        for name, values in by_optimizer.items():
            each = "  ".join(f"{value:.3f}" for value in values)
            print(f"  {name:22} {mean(values):7.3f}   ({each})")
        print(f"  8-bit {'within' if close else 'NOT WITHIN'} the spread of f32")
        if GRADIENTS[gradients]:
            worse = mean(broken) - mean(exact) > spread
            passed = passed and worse
            print(f"  code 0 allowed: {'visibly worse' if worse else 'NOT WORSE'}")
    if args.out:
        about = {"cpu": platform.processor() or platform.machine(), "torch": torch.__version__}
        finite = {  # JSON has no infinity: null is a run that diverged
            g: {o: [v if math.isfinite(v) else None for v in vs] for o, vs in row.items()}
            for g, row in losses.items()
        }
        report = {"steps": args.steps, "bits_per_byte": finite, "about": about}
        args.out.write_text(json.dumps(report, indent=1) + "\n")
    sys.exit(not passed)


if __name__ == "__main__":
    main()
