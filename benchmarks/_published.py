"""Rehearses programs whose peaks on GPUs others have published, and prints both with their ratio:
`python -m benchmarks._published [NAME...]`, some minutes on a machine without a GPU. Rows named
torchtune need torchtune 0.6.1 and torchao 0.10.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parent
FILE = HERE / "results" / "published.json"
PROGRAM = HERE.parent / "examples" / "published_peaks.py"
GIB = 1 << 30
MIB = 1 << 20
AT_STEP_END, LOSS = r"allocated after the step (\d+)", r"loss (\d+)"


class Row(NamedTuple):
    """Holds a published peak, and what rehearses the same program.

    Attributes:
        words: of the program.
        published: bytes.
        what: of the report is compared: a key, or a pattern of what the program prints.
        gpu: whose capability is rehearsed.
        source: where it is published.
        says: the program in words.
        options: more of the rehearsal.
    """

    words: tuple[str, ...]
    published: float
    what: str
    gpu: str
    source: str
    says: str
    options: dict[str, Any] = {}


UNSLOTH = "https://unsloth.ai/blog/llama3-3"
GUIDE = "https://huggingface.co/docs/transformers/v4.19.2/en/performance"
PEFT = "https://github.com/huggingface/peft/tree/main/method_comparison/MetaMathQA/results"
TUNE = (
    "https://github.com/pytorch/torchtune/blob/0031bfb080bd35ec533c412df883cf2bf7bf7fe4/README.md"
)
TITAN = (
    "https://github.com/pytorch/torchtitan/blob/main/benchmarks/llama3_h100_202412_torchtitan.md"
)
CUT = "https://arxiv.org/abs/2411.09009"
CONTEXT = 1343  # MiB, of the guide's GPU before the model


def qlora(length: int, gb: int) -> Row:
    says = f"the longest sequence on {gb} GB: QLoRA of an 8B, PEFT, {length:,} tokens"
    more = {"no_weights": True}
    words = ("qlora", str(length))
    return Row(words, gb * GIB, "with context", "RTX 3090", UNSLOTH, says, more)


def bert(mb: int, says: str, *words: str) -> Row:
    # A V100 has no bfloat16, and torch 2.15 no code for it: the next generation.
    says = f"bert-large: {says}"
    return Row(("bert", *words), (mb - CONTEXT) * MIB, "peak_reserved", "T4", GUIDE, says)


def metamath(way: str, published: float, says: str) -> Row:
    says = f"Llama 3.2 3B, {says}, after a step"
    return Row(("metamath", way, "230"), published, AT_STEP_END, "RTX 4090", PEFT, says)


def torchtune(way: str, gib: float, says: str) -> Row:
    says = f"torchtune's 8B, {says}, compiled"
    return Row(("torchtune", way), gib * GIB, "peak_allocated", "RTX 4090", TUNE, says)


SMALL = ("accumulation", "checkpoints")
ROWS = [
    Row(("logits",), 24000 * MIB, LOSS, "A100", CUT, "loss of Gemma 2 2B, 8,192 tokens"),
    metamath("full", 26.0657e9, "all weights"),
    metamath("lora", 6.9218e9, "LoRA"),
    bert(14949, "f32"),
    bert(8681, "accumulation", "accumulation"),
    bert(6775, "accumulation, checkpoints", *SMALL),
    bert(13939, "fp16", "fp16"),
    bert(7275, "fp16, accumulation, checkpoints", "fp16", *SMALL),
    bert(12295, "Adafactor", "adafactor"),
    bert(4847, "Adafactor, fp16, accumulation, checkpoints", "adafactor", "fp16", *SMALL),
    *(qlora(*row) for row in ((932, 12), (2551, 16), (5789, 24), (12264, 40), (28454, 80))),
    Row(
        ("torchtitan",),
        82.4 * GIB,
        "peak_reserved",
        "H100",
        TITAN,
        "Llama 3.1 8B, FSDP2 on 8 ranks, 2 x 8,192 tokens",
        {"devices": 8},
    ),
    torchtune("full", 18.9, "all weights, steps in the backward pass"),
    torchtune("lora", 16.2, "LoRA"),
    torchtune("qlora", 7.4, "QLoRA"),
]


def row_of_table(row: Row, found: dict[str, Any]) -> str:
    """Returns the row of the table of docs/rehearse.md."""
    sizes = f"{found['published'] / GIB:.1f} | {found['rehearsed'] / GIB:.1f}"
    return f"| [{row.says}]({row.source}) | {sizes} | {found['ratio']:.2f} |"


def rehearse(row: Row) -> dict[str, Any]:
    """Returns what is kept of a row."""
    from headroom_rehearsal import gpus, run

    capability = gpus()[row.gpu][1] / 10
    program = [str(PROGRAM), *row.words]
    options = {"memory": "200 GiB", "capability": capability, "steps": 9} | row.options
    report = run(program, **options)
    if report["error"] is not None:
        print(f"{' '.join(row.words)} failed: {report['message']}", file=sys.stderr)
        return {}
    if row.what == "with context":
        size = report["peak_allocated"] + report["device"]["context"]
    elif row.what in report:
        size = report[row.what]
    else:
        size = int(re.findall(row.what, report["output"])[-1])
    return {
        "program": " ".join(row.words),
        "published": row.published,
        "rehearsed": size,
        "ratio": size / row.published,
        "source": row.source,
        "versions": {name: report["versions"].get(name) for name in ("torch", "transformers")},
    }


def main() -> None:
    wanted = sys.argv[1:]
    kept = {one["program"]: one for one in json.loads(FILE.read_text())}
    for row in ROWS:
        name = " ".join(row.words)
        if not wanted or row.words[0] in wanted:
            kept[name] = rehearse(row) or kept[name]
        print(row_of_table(row, kept[name]), flush=True)
    FILE.write_text(json.dumps([kept[" ".join(row.words)] for row in ROWS], indent=1) + "\n")


if __name__ == "__main__":
    main()
