"""torch.export: a model that was patched and trained, after ``unpatch``."""

# /// script
# dependencies = ["torch==2.15.0", "transformers==5.24.0"]
# ///

import headroom
import torch
from _small import llama, sentences

model = llama()
model.config.use_cache = False
handle = headroom.patch(model, save="L2")
ids = torch.stack([row["input_ids"] for row in sentences(4)])
optimizer = headroom.optim.AdamW8bit(model.parameters(), lr=1e-3)
for _ in range(2):
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
headroom.unpatch(model)
model.eval()
with torch.no_grad():
    expected = model(input_ids=ids).logits
    program = torch.export.export(model, (), {"input_ids": ids})
    found = program.module()(input_ids=ids).logits
assert not [n for n in program.graph.nodes if "headroom" in str(n.target)]
torch.testing.assert_close(found, expected)
