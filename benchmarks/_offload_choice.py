"""Prints which use of the host wins when, for the table of docs/offloading-internals.md: bytes by
`headroom.plan`, and the seconds that copies add by a simulation of the device and its link:
`python -m benchmarks._offload_choice`. Needs no GPU and no weights; takes some minutes.

What is assumed stands here. A link copies 25, 50 or 300 GB/s each way (PCIe 4.0 and 5.0 x16, and
NVLink-C2C across what its measurements say), and begins a copy in 10 us. A GPU reaches the FLOP/s
below in matrix products, and reads and writes its memory at the given rate. The host has 16 cores
whose step was measured in the file below, and reads and writes 164 GB/s.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from headroom.host.schedule import exposed_seconds, hosted_step, paged_step, streamed_step
from headroom.host.simulation import Link

from ._llama_8b import GIB, llama, llama_8b

LINKS = {"25 GB/s": 25e9, "50 GB/s": 50e9, "300 GB/s": 300e9}
LATENCY = 10e-6
CORES = 16
DRAM = 164e9  # bytes/s
DRAM_BYTES = 18  # that a step on the host reads and writes for each parameter, copies included
PIECE = 16 << 20  # bytes of state, and of gradients, that are copied at once
STATE = 4.03  # bytes per parameter: moments of 8 bits with their scales, and remainders of 16
MEASURED = Path(__file__).parent / "results" / "weights-cpu-2cores-avx512.json"


class Setting(NamedTuple):
    """A model on a GPU, and what it is trained on."""

    name: str
    model: Callable[[], Any]
    samples: int
    flops: float  # per second
    memory: float  # bytes/s of the device
    release: bool = False  # gradients within the backward pass, which nothing clips then
    tokens: int = 4096  # of each sample


def llama_1b() -> torch.nn.Module:
    """The shape of https://huggingface.co/meta-llama/Llama-3.2-1B, config.json."""
    return llama(
        hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, tie_word_embeddings=True
    )


SETTINGS = [
    Setting("Llama-3.2-1B, 8 GiB", llama_1b, 1, 30e12, 0.27e12),
    Setting("Llama-3-8B, 24 GiB", llama_8b, 1, 120e12, 1.0e12, release=True),
    Setting("Llama-3-8B, 80 GiB", llama_8b, 4, 400e12, 3.3e12),
]


def rate_of_host() -> float:
    """Returns how many parameters a second the host steps: with 8-bit moments and remainders, as
    far as its cores and its memory go."""
    results = json.loads(MEASURED.read_text())
    case = next(case for case in results["cases"] if case["name"] == "remainder16-8bit")
    seconds = case["contenders"]["headroom"]["seconds"]["median"]
    count = int(case["what"].partition(" parameters")[0].rpartition(" ")[2].replace(",", ""))
    return min(CORES * count / seconds / results["machine"]["cores"], DRAM / DRAM_BYTES)


class Times:
    """The seconds of the parts of a step, and what the simulation says of copies beside them."""

    def __init__(self, setting: Setting, model: torch.nn.Module, state: float = STATE) -> None:
        config: Any = model.config
        self.setting, self.layers, self.state = setting, config.num_hidden_layers, state
        layer = model.get_submodule("model.layers.0")
        self.block = sum(p.numel() for p in layer.parameters())
        rest = sum(p.numel() for p in model.parameters()) - self.layers * self.block
        self.rest = rest  # of the embedding and the head
        tokens = setting.samples * setting.tokens
        attention = 2 * tokens * setting.tokens * config.hidden_size  # of the causal half
        self.forward = (2 * self.block * tokens + attention) / setting.flops
        self.head = 3 * 2 * config.vocab_size * config.hidden_size * tokens / setting.flops

    def backward(self, again: bool = True) -> list[float]:
        """Returns the seconds of what gradients come from, of the head and of each block, last to
        first, and of the embedding."""
        return [self.head, *[(3 if again else 2) * self.forward] * self.layers, 0.0]

    @property
    def params(self) -> list[int]:
        """Returns the parameters of which the gradients come then."""
        half = self.rest // 2
        return [self.rest - half, *[self.block] * self.layers, half]

    def pieces(self, size: float) -> Iterator[tuple[int, float]]:
        """Yields the parameters of each piece in which ``size`` bytes for each parameter are
        copied, and the seconds of the backward pass before it."""
        each = int(PIECE / size)
        for count, seconds in zip(self.params, self.backward()):
            for first in range(0, count, each):
                yield min(each, count - first), 0.0 if first else seconds

    def resident(self) -> float:
        """Returns the seconds of a step whose states are on the device, which its memory takes."""
        return sum(self.params) * (2 + 2 * (2 + self.state)) / self.setting.memory

    def paged(self, link: Link) -> float:
        """Returns the seconds that states add which pass through the device."""
        counts, before = zip(*self.pieces(self.state))
        sizes, seconds = [round(self.state * count) for count in counts], self.resident()
        return paged_step(
            sizes, seconds, link, before=before if self.setting.release else ()
        ).exposed

    def hosted(self, link: Link) -> float:
        """Returns the seconds that a step on the host adds."""
        counts, before = zip(*self.pieces(2))
        ready, now = [], 0.0
        for seconds in before:
            now += seconds
            ready.append(now)
        rate = rate_of_host()
        sizes = [(2 * count, 2 * count) for count in counts]
        seconds = [count / rate for count in counts]
        return hosted_step(sizes, seconds, link, ready if self.setting.release else ()).exposed

    def streamed(self, link: Link) -> float:
        """Returns the seconds that weights of blocks add which are fetched for each pass, and
        stepped on the host, behind the backward pass."""
        layers, size = self.layers, 2 * self.block
        forward, backward = [self.forward] * layers, [3 * self.forward] * layers
        copies = streamed_step([size] * layers, [size] * layers, forward, backward, link)
        return copies.exposed + layers * self.block / rate_of_host()

    def kept(self, size: int, link: Link) -> float:
        """Returns the seconds that copies add of what blocks keep, but for the last."""
        layers = self.layers
        sizes = [size // (layers - 1)] * (layers - 1) + [0]
        forward, backward = [self.forward] * layers, [2 * self.forward] * layers
        return exposed_seconds(sizes, forward, backward, link)


class Way(NamedTuple):
    """A use of the host."""

    name: str
    save: str = "L5"
    offload: str | None = None
    weights: str | None = None


WAYS = [
    Way("none"),
    Way("activations: `L2@host`", save="L2@host"),
    Way('state: `offload="state"`', offload="state"),
    Way('step: `offload="step"`', offload="step"),
    Way('weights: `weights="host"`, `offload="state"`', offload="state", weights="host"),
]


def row(setting: Setting, way: Way) -> str:
    """Returns a row of the table."""
    import headroom

    model = setting.model()
    times = Times(setting, model)
    headroom.patch(model, save=way.save, loss=True)
    make = partial(headroom.optim.AdamW8bit, master="remainder16", offload=way.offload)
    ids = torch.zeros(setting.samples, setting.tokens, dtype=torch.int64)
    batch = {"input_ids": ids, "labels": ids}
    how: dict[str, Any] = {"release": True} if setting.release else {"max_grad_norm": 1.0}
    plan = headroom.plan(model, make, batch, device="cuda", weights=way.weights, **how)
    cells = [
        way.name,
        f"{plan.total_bytes / GIB:.1f} GiB",
        f"{plan.host_peak_bytes / GIB:.1f} GiB",
        f"{plan.link_bytes / 1e9:.1f} GB",
    ]
    for rate in LINKS.values():
        seconds, link = 0.0, Link(rate, rate, LATENCY)
        if way.save.endswith("@host"):
            seconds = times.kept(plan.link_bytes // 2, link)
        elif way.weights is not None:
            seconds = times.streamed(link)
        elif way.offload is not None:
            seconds = times.paged(link) if way.offload == "state" else times.hosted(link)
        cells.append(f"{seconds:.2f} s")
    return f"| {setting.name} | {' | '.join(cells)} |"


def table(settings: list[Setting]) -> Iterator[str]:
    """Yields the lines of the table."""
    yield f"| model, GPU | on the host | GPU | host | copied | {' | '.join(LINKS)} |"
    yield "|---|---|---:|---:|---:|" + "---:|" * len(LINKS)
    for setting in settings:
        for way in WAYS:
            yield row(setting, way)


def main() -> None:
    print(f"a host of {CORES} cores steps {rate_of_host() / 1e9:.1f} G parameters/s")
    for line in table(SETTINGS):
        print(line, flush=True)


if __name__ == "__main__":
    main()
