"""Compares the held-out loss of training with less memory with that of float32 AdamW.

    python examples/convergence.py [--steps N] [--seeds N] [--out FILE.json]

Trains the demo's model on the demo's text, in these settings:

8-bit moments, with ordinary and with heavy-tailed gradients: AdamW, AdamW8bit, and AdamW8bit under
the rule that lets a small second moment round to zero (`bnb_exact`). Heavy-tailed means that every
element is multiplied by exp(2 z), z standard normal, drawn anew each step. This changes no sign,
and AdamW trains on; with a second moment of zero the run diverges.

bf16 weights: every way to store them, with float32 and with 8-bit moments, at a learning rate of
1e-4, which is usual for models of billions of parameters. Three of four updates are then too small
for the weight they belong to, and rounding to nearest loses them. (At the demo's 1e-3 it is one of
four.)

Adafactor: by either rule, beside its original (`transformers` must be installed). Its loss is not
compared with AdamW's.

Muon: beside torch's, with AdamW for embeddings, head, norms and biases in every row, and packed
matrices left whole, as torch leaves them. Newton-Schulz makes all singular values about 1, so it
amplifies what rounding leaves in the weak directions of the momentum. The control has one step of
it in the place of five.

A mode is close if its mean over the seeds differs from that of the setting's first mode by no more
than the seeds of the first mode differ from each other. With --out, runs that the file has already
are not repeated.
"""

import argparse
import json
import math
import platform
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from tqdm import tqdm

import data
import rungs
from model import SIZES
from run import Run
from rungs import BETAS

SIZE = replace(SIZES["small"], batch=4)
F32 = rungs.headroom_adamw
EIGHT_BIT = replace(F32, optimizer="headroom.optim.AdamW8bit")
ADAFACTOR = replace(
    F32,
    optimizer=rungs.adafactor.optimizer,
    options={},
    lr_factor=rungs.adafactor.lr_factor,
)
HF = {"scale_parameter": False, "relative_step": False}
ADAFACTOR_HF = replace(ADAFACTOR, options=HF | {"semantics": "hf"}, lr_factor=1.0)


def bf16(rung: rungs.Rung, **options: object) -> rungs.Rung:
    return replace(rung, weights="bfloat16", options=rung.options | options)


@dataclass(frozen=True)
class Setting:
    modes: dict[str, Any]  # how a run trains; the first is what the others are compared with
    worse: tuple[str, ...] = ()  # modes that are expected to fail, which they must
    lr: float = SIZE.lr
    sigma: float = 0.0  # of the gradients' factors


BIT8 = {
    "AdamW, f32 moments": F32,
    "AdamW8bit": EIGHT_BIT,
    "8-bit, code 0 allowed": replace(EIGHT_BIT, options=BETAS | {"bnb_exact": True}),
}
NEAREST = "bf16, nearest"
WEIGHTS = {
    "AdamW, f32": F32,
    "bf16, master f32": bf16(F32, master="f32"),
    "bf16, remainder16": bf16(F32, master="remainder16"),
    "bf16, remainder8": bf16(F32, master="remainder8"),
    "bf16, remainder8, stochastic": bf16(F32, master="remainder8", rounding="stochastic"),
    "bf16, Kahan": bf16(F32, rounding="kahan"),
    "bf16, stochastic": bf16(F32, rounding="stochastic"),
    NEAREST: bf16(F32),
    "AdamW8bit, f32": EIGHT_BIT,
    "AdamW8bit, bf16, remainder16": bf16(EIGHT_BIT, master="remainder16"),
    "AdamW8bit, bf16, remainder8": bf16(EIGHT_BIT, master="remainder8"),
}
TORCH_RULE = {
    "torch's Adafactor, f32": replace(ADAFACTOR, optimizer="torch.optim.Adafactor"),
    "Adafactor, f32": ADAFACTOR,
    "Adafactor, bf16, remainder16": bf16(ADAFACTOR, master="remainder16"),
}
HF_RULE = {
    "transformers' Adafactor, f32": replace(
        F32, optimizer="transformers.optimization.Adafactor", options=HF
    ),
    "Adafactor, f32": ADAFACTOR_HF,
    "Adafactor, bf16, remainder16": bf16(ADAFACTOR_HF, master="remainder16"),
}


# One learning rate for both: matrices are stepped as far as AdamW would.
MUON = replace(
    F32,
    optimizer="headroom.optim.Muon",
    options={"adamw": BETAS, "adjust_lr_fn": "match_rms_adamw", "split": {"qkv": None}},
)
MUON8BIT = replace(MUON, optimizer="headroom.optim.Muon8bit")
TORCH_MUON = replace(
    MUON,
    optimizer="torch_muon.TorchMuon",
    options={"adamw": BETAS, "adjust_lr_fn": "match_rms_adamw"},
)
ONE_STEP = "Muon, one step of Newton-Schulz"
MUONS = {
    "torch's Muon, f32": TORCH_MUON,
    "Muon, f32": MUON,
    "Muon8bit, f32": MUON8BIT,
    "Muon, bf16, remainder16": bf16(MUON, master="remainder16"),
    "Muon8bit, bf16, remainder16": bf16(MUON8BIT, master="remainder16"),
    ONE_STEP: replace(MUON, options=MUON.options | {"ns_steps": 1}),
}
SETTINGS = {
    "as they are": Setting(BIT8),
    "heavy-tailed": Setting(BIT8, worse=("8-bit, code 0 allowed",), sigma=2.0),
    "bf16 weights, lr 1e-4": Setting(WEIGHTS, worse=(NEAREST,), lr=1e-4),
    "Adafactor, torch's rule, lr 3e-3": Setting(TORCH_RULE, lr=1e-4),
    "Adafactor, transformers' rule, lr 1e-4": Setting(HF_RULE, lr=1e-4),
    "Muon": Setting(MUONS, worse=(ONE_STEP,)),
}


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
    setting: Setting, rung: rungs.Rung, seed: int, steps: int, path: str | None = None
) -> float:
    """Held-out bits per byte after training; infinite if it diverged to NaN."""
    text, unseen = data.load(path, SIZE.context)
    size = replace(SIZE, lr=setting.lr)
    run = HeavyTailedRun(rung, size, torch.device("cpu"), seed, sigma=setting.sigma)
    for _ in range(steps):
        run.step(text)
    loss = run.held_out_loss(unseen)
    return loss if math.isfinite(loss) else math.inf


class Results:
    """Losses by setting, mode and seed, kept in a file."""

    def __init__(self, steps: int, path: Path | None):
        self.steps, self.path = steps, path
        self.losses: dict[str, dict[str, list[float]]] = {}
        if path and path.exists():
            kept = json.loads(path.read_text())
            if kept["steps"] != steps:
                raise ValueError(f"{path} is of {kept['steps']} steps, not {steps}")
            self.losses = each(lambda v: math.inf if v is None else v, kept["bits_per_byte"])

    def of(self, setting: str, mode: str) -> list[float]:
        return self.losses.setdefault(setting, {}).setdefault(mode, [])

    def save(self) -> None:
        if self.path:
            about = {"cpu": platform.processor() or platform.machine(), "torch": torch.__version__}
            # JSON has no infinity: null is a run that diverged
            losses = each(lambda v: v if math.isfinite(v) else None, self.losses)
            report = {"steps": self.steps, "bits_per_byte": losses, "about": about}
            self.path.write_text(json.dumps(report, indent=1) + "\n")


def each(function: Callable, losses: dict) -> dict:
    return {s: {m: [*map(function, row[m])] for m in row} for s, row in losses.items()}


def judge(name: str, setting: Setting, losses: dict[str, list[float]]) -> bool:
    """Prints the table of a setting and whether every mode does what it should."""
    passed = True
    exact, *_ = (losses[mode] for mode in setting.modes)
    spread = max(exact) - min(exact)
    print(f"\n{name}; seeds of the first differ by {spread:.3f}")
    for mode in setting.modes:
        off = mean(losses[mode]) - mean(exact)
        if mode in setting.worse:
            good, verdict = off > spread, "visibly worse"
        else:
            good, verdict = abs(off) <= spread, "close"
        passed = passed and good
        values = "  ".join(f"{value:.3f}" for value in losses[mode])
        verdict = verdict if good else f"NOT {verdict.upper()}"
        print(f"  {mode:30} {mean(losses[mode]):7.3f}   ({values})  {verdict}")
    return passed


def compare(
    about: str | None,
    settings: dict[str, Setting],
    steps: int,
    train: Callable[[Setting, Any, int, int, str | None], float],
) -> None:
    """Runs what the command line asks for, prints a table for each setting, and exits with 1 if a
    mode does not do what it should.

    Args:
        about: what the program does.
        steps: of a run, if the command line does not say.
        train: of a setting, a mode, a seed, steps and a path of the text; returns the held-out bits
            per byte.
    """
    parser = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", help="text file or folder; default: the standard library")
    parser.add_argument("--steps", type=int, default=steps, help="optimizer steps of a run")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each mode")
    parser.add_argument("--out", type=Path, help="file that keeps the losses")
    args = parser.parse_args()
    results = Results(args.steps, args.out)
    cells = [(s, m, k) for s in settings for m in settings[s].modes for k in range(args.seeds)]
    for name, mode, seed in tqdm(cells, unit="run"):
        setting, losses = settings[name], results.of(name, mode)
        if len(losses) == seed:
            losses.append(train(setting, setting.modes[mode], seed, args.steps, args.data))
            results.save()

    print(f"held-out bits per byte after {args.steps} steps, {args.seeds} seeds")
    verdicts = [judge(name, settings[name], results.losses[name]) for name in settings]
    sys.exit(not all(verdicts))


if __name__ == "__main__":
    compare(__doc__, SETTINGS, 150, held_out)
