"""Predicts what `linear_cross_entropy` takes at sizes that others have published, on the same GPUs,
and prints both: `python -m benchmarks._published_heads`, a minute on a machine without a GPU.

Milliseconds are counted (`benchmarks.instructions.head`). Bytes are the peak that torch's allocator
reaches on a software device, with the factors and their gradients, in bfloat16.
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parent
FILE = HERE / "results" / "published-heads.json"


class Head(NamedTuple):
    """Holds a shape, a GPU, and what is published of it.

    Attributes:
        sizes: tokens, features, classes.
        published: milliseconds and bytes by name, None where they are not said.
    """

    sizes: tuple[int, int, int]
    gpu: str
    source: str
    published: dict[str, tuple[float, float | None]]


GB, MIB = 1e9, 1 << 20
TRL = "https://github.com/huggingface/trl/pull/6858"
LIGER = "https://github.com/linkedin/Liger-Kernel/pull/1339"
LIGER_README = "https://pypi.org/project/liger-kernel/0.8.5/"
HEADS = [
    Head(
        (16384, 2048, 248320),
        "H100",
        TRL,
        {
            "cut-cross-entropy": (92.55, 3.09 * GB),
            "logits, one product": (137.0, 47.55 * GB),
            "TRL, chunked": (224.39, 19.67 * GB),
            "Liger, Triton": (321.16, 6.05 * GB),
        },
    ),
    Head((8192, 4096, 131072), "H100", LIGER_README, {"Liger, CuTe DSL": (50.39, None)}),
    Head((16384, 4096, 131072), "H100", LIGER_README, {"Liger, CuTe DSL": (104.77, None)}),
    Head(
        (8192, 4096, 128256),
        "B200",
        LIGER,
        {"Liger, CuTe DSL": (17.51, 2415 * MIB), "Liger, Triton": (121.78, 5233 * MIB)},
    ),
]


def peak(gpu: str, sizes: tuple[int, int, int]) -> int:
    """Returns the peak of a call and its backward pass, of this file as a program."""
    from headroom_rehearsal import run

    report = run([__file__, *map(str, sizes)], gpu=gpu)
    if report["error"] is not None:
        raise RuntimeError(report["message"])
    return report["peak_allocated"]


def call(tokens: int, features: int, classes: int) -> None:
    """Computes the loss and its gradients."""
    import torch
    from headroom.loss import linear_cross_entropy

    options: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16, "requires_grad": True}
    hidden = torch.zeros(tokens, features, **options)
    weight = torch.zeros(classes, features, **options)
    target = torch.zeros(tokens, dtype=torch.int64, device="cuda")
    loss = linear_cross_entropy(hidden, weight, target)
    assert isinstance(loss, torch.Tensor)
    loss.backward()


def milliseconds(head: Head) -> float:
    """Returns what a call is predicted to take."""
    import headroom

    from .instructions.gpus import GPUS
    from .instructions.head import predicted

    library = next(Path(headroom.get_library_dir()).glob("libheadroom.so.*"))
    return 1e3 * predicted(library, GPUS[head.gpu], head.sizes, 0)[2]


def compared(head: Head) -> dict[str, Any]:
    """Returns what is kept of a shape."""
    return {
        "sizes": head.sizes,
        "gpu": head.gpu,
        "source": head.source,
        "published": {
            name: {"ms": ms, "bytes": size} for name, (ms, size) in head.published.items()
        },
        "predicted": {"ms": milliseconds(head), "bytes": peak(head.gpu, head.sizes)},
        "versions": {name: importlib.metadata.version(name) for name in ("headroom", "torch")},
    }


def rows_of_table(found: dict[str, Any]) -> list[str]:
    """Returns the rows of the table of docs/comparison.md."""
    tokens, features, classes = found["sizes"]
    shape = f"[{tokens:,} x {features:,} x {classes:,}]({found['source']})"
    ours = found["predicted"]
    rows = []
    for name, theirs in found["published"].items():
        size = "-" if theirs["bytes"] is None else f"{theirs['bytes'] / GB:.2f}"
        ratio = theirs["ms"] / ours["ms"]
        rows.append(
            f"| {shape} | {found['gpu']} | {name} | {theirs['ms']:.1f} | {size} | {ours['ms']:.1f} "
            f"| {ours['bytes'] / GB:.2f} | {ratio:.2f}{', a loss' * (ratio < 1)} |"
        )
    return rows


def main() -> None:
    if sizes := sys.argv[1:]:
        return call(*map(int, sizes))
    found = [compared(head) for head in HEADS]
    for one in found:
        print("\n".join(rows_of_table(one)))
    FILE.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
