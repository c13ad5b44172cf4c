"""The README's snippets with model and batch on a GPU."""

import re
from pathlib import Path

import pytest
import torch

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("runtime")]
README = Path(__file__).resolve().parents[3] / "README.md"
SNIPPETS = re.findall(r"^```python\n(import.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)
WHOLE = [text for text in SNIPPETS if "import headroom" in text]
BUDGET = '"5 MiB"', '"600 MiB"'  # the context of CUDA counts, and cuBLAS' workspaces


@pytest.mark.parametrize("text", WHOLE, ids=("a budget", "an import"))
def test_a_snippet_runs_on_a_gpu(text):
    names = {}
    before = torch.cuda.memory_allocated()
    with torch.device("cuda"):
        exec(compile(text.replace(*BUDGET), README, "exec"), names)
    assert all(p.is_cuda for p in names["model"].parameters())
    assert torch.cuda.max_memory_allocated() > before
    if "fitted" in names:
        assert names["fitted"].measured_peak <= 600 << 20
