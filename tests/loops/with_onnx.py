"""ONNX: what the page on export says, whose outputs onnxruntime gives too."""

# /// script
# dependencies = ["onnx==1.23.2", "onnxscript==0.7.2", "onnxruntime==1.32.0"]
# ///

import re
from pathlib import Path

page = (Path(__file__).parents[2] / "docs/export.md").read_text()
(program,) = re.search(r"^## ONNX\n+```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL).groups()
exec(compile(program, "docs/export.md", "exec"), {"__name__": "__main__"})
