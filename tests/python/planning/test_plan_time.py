"""How long a plan of the demo's model takes, as seconds of CPU."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
LIMIT = 3.0

RUN = """
import sys, time
import torch, headroom
sys.path.insert(0, "examples")
from model import GPT, HeadroomGPT, SIZES

headroom.plan
size = SIZES["small"]
tokens = torch.randint(256, (size.batch, size.context))
for model in (GPT(size), HeadroomGPT(size, "L5")):
    optimizer = headroom.optim.AdamW8bit(model.parameters())
    start = time.process_time()
    headroom.plan(model, optimizer, (tokens, tokens))
    print(time.process_time() - start)
"""


@pytest.mark.slow
def test_the_demos_model_in_three_seconds():
    ran = subprocess.run(
        [sys.executable, "-c", RUN], cwd=ROOT, capture_output=True, text=True, check=True
    )
    seconds = [float(line) for line in ran.stdout.split()]
    assert len(seconds) == 2 and max(seconds) <= LIMIT, seconds
