"""NumPy is no dependency: where it is not installed, everything public is imported, and a model is
planned, tracked and fitted."""

import subprocess
import sys

# Finds everything but NumPy, as where it is not installed: torch asks whether it is there, too.
WITHOUT_NUMPY = """
import sys
from importlib.machinery import PathFinder

class WithoutNumPy(PathFinder):
    @classmethod
    def find_spec(cls, name, *given):
        return None if name.partition(".")[0] == "numpy" else super().find_spec(name, *given)

sys.meta_path[:] = [WithoutNumPy if one is PathFinder else one for one in sys.meta_path]
"""

TRAINING = """
import headroom, headroom.fitting, torch
from torch import nn

public = [getattr(headroom, name) for name in headroom.__all__]
model = nn.Sequential(*(nn.Sequential(nn.Linear(7, 13), nn.Linear(13, 7)) for _ in range(3)))
batch, loss = (torch.randn(11, 7), torch.randn(11, 7)), nn.functional.mse_loss
with headroom.memory.track(model, batch=batch) as tracked:
    loss(model(batch[0]), batch[1]).backward()
model.zero_grad()
plan = headroom.plan(model, torch.optim.AdamW, batch, loss=loss)
ladder = headroom.ladder(model, batch, loss=loss)
fitted = headroom.fit(model, batch, budget="1 MiB", loss=loss, ladder=ladder)
step, seen = headroom.retry_on_oom(fitted.step), []
for _ in range(2):
    seen.append(step(batch))
print(tracked.peak_bytes, plan.total_bytes, fitted.measured_peak, ladder, fitted, sep="\\n")
assert seen[1] < seen[0]
try:
    import numpy
except ModuleNotFoundError:
    print("without NumPy")
"""


def test_a_model_is_fitted_without_numpy():
    found = subprocess.run(
        [sys.executable, "-c", WITHOUT_NUMPY + TRAINING], capture_output=True, text=True
    )
    assert found.returncode == 0, found.stderr
    lines = found.stdout.splitlines()
    assert lines[-1] == "without NumPy"
    tracked, planned, measured = map(int, lines[:3])
    weights = 4 * 3 * (2 * 7 * 13 + 7 + 13)
    assert tracked > 2 * weights and planned > 4 * weights and measured > 4 * weights
    assert any(line.startswith("as it is") for line in lines)
    assert any(line.startswith("measured") for line in lines)
