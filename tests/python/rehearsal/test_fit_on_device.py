"""``headroom.fit`` for drawn budgets: what torch's allocator reaches is never above them.

Each test runs this file as a program on a device of its own, on which nothing large is computed, so
that models have real sizes.
"""

import gc
import itertools
import json
import random
import subprocess
import sys
import time
from pathlib import Path

import headroom
import pytest
import torch
from headroom.fitting.arguments import MARGINS
from headroom.fitting.search import candidates
from headroom.planning.device import context_bytes
from headroom.step.clock import Stopwatch
from headroom.step.micro_batches import SAMPLES
from torch import nn

from helpers.software_device import command_there

pytestmark = pytest.mark.cuda
STEPS = 3
WORDS, WIDTH, ROWS, TOKENS = 8192, 768, 8, 256
# The largest slab: the thread of a backward pass may give its last one back after the next step has
# begun, which has taken another by then.
LATE = ROWS * TOKENS * 4 * WIDTH * 4


class Plain(nn.Module):
    """Blocks of torch, between embeddings and logits."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 12, 4 * WIDTH, batch_first=True) for _ in range(4)
        )

    def forward(self, ids, labels):
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def ours():
    config = headroom.nn.TransformerConfig(
        vocab_size=WORDS, hidden_size=WIDTH, layers=4, heads=12, kv_heads=4, features=2048
    )
    return headroom.nn.Transformer(config)


MODELS = {"plain": Plain, "ours": ours}
ALLOWED = [[], ["8bit"], ["8bit", "bf16"], ["adafactor"]]


def not_measured(rng):
    """Draws times, so that what is chosen does not depend on the machine, and says that gradients
    of micro-batches add up, whose values are not computed."""
    time.perf_counter = itertools.count().__next__
    Stopwatch.seconds = lambda self: [rng.random() for _ in self._laps[1:]]
    candidates.rule_of = lambda *args, **options: SAMPLES


def empty():
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    headroom.host.trim()


def moving(choice):
    """Returns how many techniques of a choice free memory beside the computation. Where several do,
    it is a matter of time which is first, and up to 4 % more have been reached than planned."""
    saved = any("@host" in level for level in choice.levels)
    return bool(choice.offload) + bool(choice.weights_host) + choice.release + saved


def fitted(seed, budgets):
    """Yields what becomes of budgets for a model, all of which is drawn."""
    rng = random.Random(seed)
    not_measured(rng)
    name, allow = rng.choice(sorted(MODELS)), rng.choice(ALLOWED)
    amp, host_budget = rng.choice([None, torch.bfloat16]), rng.choice([None, 8 << 30])
    ids = torch.randint(WORDS, (ROWS, TOKENS), device="cuda")
    batch, options = {"ids": ids, "labels": ids}, {"allow": allow, "amp": amp}
    model = MODELS[name]().cuda()
    points = [
        point
        for point in headroom.ladder(model, batch, host_budget=host_budget, **options).points
        if moving(point.choice) <= 1
    ]
    del model
    for point in rng.choices(points, k=budgets) if points else []:
        empty()
        model = MODELS[name]().cuda()
        most = {"budget": 1 << 40, "host_budget": host_budget}
        found = headroom.fit(model, batch, choice=point.choice, **most, **options)
        empty()
        arena = headroom.host.default_arena()
        arena.reset_peak()
        torch.cuda.reset_peak_memory_stats()
        for _ in range(STEPS):
            found.step(batch)
        yield {
            "what": f"{name}, {allow}, {amp}: {found.choice}",
            "reached": torch.cuda.max_memory_reserved() + context_bytes(torch.device("cuda")),
            "planned": found.predicted_peak,
            # The least that this is chosen for.
            "budget": int(found.predicted_peak / (1 - MARGINS["cuda"])),
            "host": arena.peak,
            "host_budget": found.predicted_host,
        }
        del found, model


@pytest.mark.parametrize(
    "gpu, budgets, seeds",
    [
        ("RTX 3090", 3, [2]),
        pytest.param("RTX 4090", 8, range(10), marks=pytest.mark.slow),
    ],
)
def test_budgets_are_kept(runtime, gpu, budgets, seeds):
    (*_, library) = sorted(Path.cwd().glob("build/cmake-*/tests/rehearsal/libheadroom.so.*"))
    options = {"gpu": gpu, "headroom": str(library), "computed": 4096}
    command = command_there(__file__, budgets, *seeds, **options)
    ran = subprocess.run(command, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-4000:]
    rows = [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("{")]
    assert len(rows) > budgets * len(seeds) // 2
    for row in rows:
        assert row["reached"] <= row["budget"], row
        assert row["host"] <= row["host_budget"] + LATE, row


if __name__ == "__main__":
    count, *seeds = map(int, sys.argv[1:])
    for seed in seeds:
        for row in fitted(seed, count):
            print(json.dumps(row), flush=True)
