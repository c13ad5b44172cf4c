"""torchtitan: its small Llama 3, whose weights FSDP2 shards over two ranks."""

# /// script
# dependencies = ["torchtitan==0.3.0"]
# environment = ["torchtitan"]
# ///

import json
import sys
from pathlib import Path

# With torch 2.15's Triton torchao 0.18 stops when it finds a GPU. torchtitan goes on without it.
sys.modules["torchao"] = None

from _text import text, tokenizer  # noqa: E402
from torchtitan.models.llama3.config_registry import llama3_debugmodel_varlen_attn  # noqa: E402

tokenizer().save_pretrained("tokenizer")
data = Path("tests/assets/c4_test/data.json")  # where its dataset for tests lies
data.parent.mkdir(parents=True, exist_ok=True)
data.write_text("\n".join(json.dumps({"text": text(k, 300)}) for k in range(200)))
config = llama3_debugmodel_varlen_attn()
config.hf_assets_path = "tokenizer"
config.training.local_batch_size = 2
config.training.seq_len = 256
config.training.steps = 4
trainer = config.build()
shards = [p.to_local() for part in trainer.model_parts for p in part.parameters()]
print("parameters", sum(p.nbytes for p in shards))
trainer.train()
