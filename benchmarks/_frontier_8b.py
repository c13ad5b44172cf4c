"""Plans full fine-tunes of Llama-3-8B, from all on the GPU to weights on the host, and predicts
their times: `python -m benchmarks._frontier_8b` writes the file of results and README's picture,
`--picture` the picture alone. Needs no GPU and no weights; takes some minutes.

Bytes are those of `headroom.plan`, and of the certificates for what others take. Times are those of
a roofline: products at 120 TFLOP/s, a step at 1 TB/s, and the copies at 25 GB/s that a simulation
of the link does not hide, beside a backward pass that computes blocks again (`_offload_choice.py`).
An RTX 4090 is meant, and none has run it.
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
from headroom.host.simulation import Link

from ._certificates import file_of, share_of_torch, taken
from ._llama_8b import llama_8b
from ._offload_choice import LATENCY, Setting, Times

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "frontier-llama-8b.json"
PICTURE = HERE.parent / "docs" / "frontier-llama-8b.png"
SETTING = Setting("Llama-3-8B", llama_8b, 1, 120e12, 1.0e12, release=True, tokens=2048)
LINK = Link(25e9, 25e9, LATENCY)
STATE = 2.03  # bytes per parameter: moments of 8 bits with their scales
WHERE: dict[str, dict[str, Any]] = {
    "all on the GPU": {},
    "states on the host": {"offload": "state"},
    "steps on the host": {"offload": "step"},
    "weights and steps on the host": {"offload": "state", "weights": "host"},
}
LEVELS = ("L1", "L2", "L3", "L5")


def again(times: Times, config: Any, level: str) -> float:
    """Returns the seconds of what a block computes again: products, and at L5 attention."""
    hidden, features = config.hidden_size, config.intermediate_size
    key_value = config.num_key_value_heads * hidden // config.num_attention_heads
    sizes = (0, 0, 2 * hidden * features, hidden * (hidden + 2 * key_value), hidden * hidden)
    tokens = times.setting.samples * times.setting.tokens
    attention = 2 * tokens * times.setting.tokens * hidden if level == "L5" else 0
    return (2 * tokens * sum(sizes[: int(level[1]) + 1]) + attention) / times.setting.flops


def seconds_of(times: Times, recomputed: float, added: float) -> float:
    """Returns the seconds of a step whose blocks compute so much again, and what comes with it."""
    return times.head + times.layers * (3 * times.forward + recomputed) + added


def point(where: str, level: str) -> dict[str, Any]:
    """Returns the bytes and the seconds of one way to train."""
    import headroom

    model, options = SETTING.model(), dict(WHERE[where])
    make = partial(headroom.optim.AdamW8bit, offload=options.pop("offload", None))
    times = Times(SETTING, model, STATE)
    recomputed = again(times, model.config, level)
    added = {
        "all on the GPU": times.resident,
        "states on the host": lambda: times.resident() + times.paged(LINK),
        "steps on the host": lambda: times.hosted(LINK),
        "weights and steps on the host": lambda: times.streamed(LINK),
    }[where]()
    headroom.patch(model, save=level, loss=True)
    ids = torch.zeros(1, SETTING.tokens, dtype=torch.int64)
    batch = {"input_ids": ids, "labels": ids}
    plan = headroom.plan(
        model, make, batch, device="cuda", capability=(8, 9), release=True, **options
    )
    return {
        "where": where,
        "level": level,
        "bytes": plan.total_bytes,
        "host_bytes": plan.host_peak_bytes,
        "seconds": seconds_of(times, recomputed, added),
    }


def others() -> list[tuple[int, float, str]]:
    """Returns the same of what others do: certified bytes, and times of the same roofline."""
    from headroom_rehearsal.certificate import verify

    times = Times(SETTING, SETTING.model(), STATE)
    params = sum(times.params)
    plain = seconds_of(times, 0.0, params * 14 / SETTING.memory)  # 16-bit moments
    checkpoints = seconds_of(times, times.forward, times.resident())
    rows = (
        ("full torch", plain, "transformers, AdamW of torch"),
        ("full others", checkpoints, "checkpoints, AdamW8bit of bitsandbytes"),
    )
    return [(taken(verify(file_of(way)).report), *rest) for way, *rest in rows]


def draw(points: list[dict[str, Any]], path: Path = PICTURE) -> None:
    from headroom.fitting.frontier_chart import Series, draw_frontier

    series = []
    for where in WHERE:
        found = [one for one in points if one["where"] == where]
        series.append(Series(where, [(p["bytes"], p["seconds"], p["level"]) for p in found]))
    title = "All weights of Llama-3-8B, 2,048 tokens: predicted, no GPU has run it"
    gpus = [(share_of_torch(gb), f"a GPU of {gb} GB") for gb in (8, 16, 24, 40, 48)]
    draw_frontier(path, title, [*series, Series("others", others())], gpus)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks._frontier_8b", description=__doc__)
    parser.add_argument("--picture", action="store_true")
    if not parser.parse_args().picture:
        points = []
        for where in WHERE:
            for level in LEVELS:
                points.append(point(where, level))
                print(points[-1], flush=True)
        RESULTS.write_text(json.dumps(points, indent=1) + "\n")
    draw(json.loads(RESULTS.read_text()))


if __name__ == "__main__":
    main()
