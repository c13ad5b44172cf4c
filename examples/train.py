"""Trains a small GPT on one rung of the memory ladder.

    python examples/train.py --rung headroom --steps 200 --out runs/mine

Writes OUT/RUNG/checkpoint.safetensors as it goes and OUT/RUNG/result.json at the end. With --resume
it continues from the checkpoint to the same bits as a run that was never stopped (same machine,
same number of threads).
"""

import argparse
import json
import os
import sys
import time
import zlib
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median

import headroom
import torch
from tqdm import tqdm

import data
from choose import choose
from model import GPT, SIZES
from peak import PeakMemory
from run import Run, base_of, predict
from rungs import RUNGS, Rung, size_of

HELD = ("parameters", "master_weights", "optimizer_state", "gradients")  # for each parameter


def train(
    rung: Rung,
    out: Path,
    *,
    size: str = "small",
    steps: int = 16,
    device: str = "cpu",
    path: str | None = None,
    seed: int = 0,
    resume: bool = False,
    save_every: int = 25,
) -> dict:
    """Train one rung up to `steps` optimizer steps; returns what `result.json` holds."""
    if steps < 1:
        raise ValueError(f"--steps {steps}: at least one is needed")
    # cuBLAS repeats its bits only with a fixed workspace.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # slow, and nothing here reads it
    size = size_of(rung, size)
    place, shape = torch.device(device), SIZES[size]
    text, unseen = data.load(path, shape.context, shape.vocab)
    checkpoint = out / "checkpoint.safetensors"
    saved = None
    if resume and checkpoint.exists():
        saved = headroom.load_state(checkpoint, rng=False)["identity"]
    fit = None
    if rung.budget is not None:
        # Other measurements might choose otherwise: a run that goes on keeps what it began with.
        fit = (saved or {}).get("fit") or choose(rung, shape, place, text, seed)
        rung = replace(rung, **fit["changes"])
    identity = asdict(rung) | {"size": size, "seed": seed, "device": place.type, "fit": fit}
    identity["text"] = f"{len(text.tokens)} tokens, crc32 {zlib.crc32(text.tokens.numpy()):08x}"
    if saved is not None:
        changed = [key for key in identity if saved.get(key) != identity[key]]
        if changed:
            raise ValueError(f"{checkpoint} is of another run: it differs in {', '.join(changed)}")

    # One step to throw away: what libraries load, compile and cache once per process is not counted
    # as memory of the training.
    Run(rung, shape, place, seed).step(text)
    base = None
    if rung.adapters is not None and saved is None:
        base = base_of(rung, shape, place, seed, text)
    peak = PeakMemory(place)
    run = Run(rung, shape, place, seed, base)
    del base

    out.mkdir(parents=True, exist_ok=True)
    if saved is not None:
        run.load(checkpoint)
        if len(run.losses) > steps:
            raise ValueError(f"{checkpoint} is at step {len(run.losses)}, past --steps {steps}")

    peak.restart()
    tokens = shape.batch * shape.context
    with tqdm(
        total=steps,
        initial=len(run.losses),
        desc=rung.title,
        unit="step",
        mininterval=0.1 if sys.stderr.isatty() else 10,
    ) as bar:
        while len(run.losses) < steps:
            run.step(text)
            run.peak_bytes = max(run.peak_bytes, peak.read())
            speed = f"{tokens / run.seconds[-1]:,.0f} tokens/s"
            bar.set_postfix_str(f"{run.losses[-1]:.3f} bits/byte, {speed}", refresh=False)
            bar.update()
            if len(run.losses) % save_every == 0 or len(run.losses) == steps:
                run.save(checkpoint, identity)

    with torch.device("meta"):
        numel = sum(p.numel() for p in GPT(shape).parameters())  # not of packed ones
    held_out_loss = run.held_out_loss(unseen)
    measured, predicted = run.count_bytes(text), predict(rung, shape, place)
    most = measured.most_by_kind
    held = sum(most[kind] for kind in HELD)
    result = identity | {
        "steps": steps,
        "batch": shape.batch,
        "context": shape.context,
        "vocab": shape.vocab,
        "model_parameters": numel,
        "held_out_bits_per_byte": held_out_loss,
        "tokens_per_second": tokens / median(run.seconds),
        "step_seconds": median(run.seconds),
        "peak_bytes": measured.peak_bytes,  # of all that torch allocates in a step
        "bytes": measured.peak_by_kind,  # which add up to it
        "most_bytes": most,  # each kind at its own peak
        "predicted_peak_bytes": predicted.peak_bytes,
        "predicted_bytes": predicted.peak_by_kind,
        "host_bytes": 0 if measured.host is None else measured.host.peak_bytes,  # in files
        "predicted_host_bytes": predicted.host_peak_bytes,
        "process_peak_bytes": run.peak_bytes,
        "gradients_of_L0": run.gradients_of_l0(text),
        "bytes_per_parameter": held / numel,
        "cpu_seconds": time.process_time(),
        "losses": run.losses,
    }
    (out / "result.json").write_text(json.dumps(result, indent=1))
    return result


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data", help="text file or folder; default: the standard library")
    parser.add_argument("--size", choices=SIZES, help="default: small on the CPU, medium on CUDA")
    parser.add_argument("--device", help="cpu, cuda, cuda:1; default: cuda where there is a GPU")
    parser.add_argument("--steps", type=int, default=16, help="optimizer steps, default 16")
    parser.add_argument("--seed", type=int, default=0, help="of weights and batches, default 0")
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="default: runs/demo")
    parser.add_argument("--resume", action="store_true", help="continue from a checkpoint in OUT")


def settings(args: argparse.Namespace) -> dict:
    """The arguments as keywords of `train`, with the defaults that depend on the machine."""
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    size = args.size or ("medium" if device.startswith("cuda") else "small")
    return {
        "size": size,
        "steps": args.steps,
        "device": device,
        "path": args.data,
        "seed": args.seed,
        "resume": args.resume,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rung", choices=RUNGS, default="headroom", help="default: headroom")
    add_arguments(parser)
    args = parser.parse_args()
    train_rung(args.rung, args.out, settings(args))


def train_rung(key: str, out: Path, options: dict) -> None:
    """Trains a rung as a program does: exits with a message where an argument is wrong."""
    try:
        train(RUNGS[key], out / key, **options)
    except (FileNotFoundError, ValueError) as error:  # the user's arguments, not our fault
        sys.exit(f"train.py: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
