"""Plans of models of real sizes beside what torch's allocator reached, where nothing is computed.

Each is a program on a software device, which takes no memory but the address space; this file is
also that program.
"""

import json
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import headroom
import pytest
import torch
import transformers
from headroom.nn import Transformer, TransformerConfig
from headroom.optim import AdamW8bit

from helpers.software_device import command_there

ROOT = Path(__file__).parents[3]
KERNELS = sorted(ROOT.glob("build/cmake-*/tests/rehearsal/libheadroom.so.*"))
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.version.cuda is None, reason="torch is built without CUDA"),
    pytest.mark.skipif(not KERNELS, reason="needs the target headroom_on_software_device"),
]
MiB, GiB = 1 << 20, 1 << 30
STEPS = 3
TOKENS = 512

llama = partial(TransformerConfig, vocab_size=128256, kv_heads=8)


def llama_8b():
    config = llama(hidden_size=4096, layers=32, heads=32, features=14336)
    return Transformer(config, device="cuda", dtype=torch.bfloat16)


def llama_8b_of_transformers():
    config = transformers.LlamaConfig(
        vocab_size=128256, num_key_value_heads=8, intermediate_size=14336, num_hidden_layers=32
    )
    return of_transformers(transformers.LlamaForCausalLM, config)


def llama_70b_in_4_bits_with_adapters():
    config = llama(hidden_size=8192, layers=80, heads=64, features=28672)
    model = Transformer(config, device="meta", dtype=torch.bfloat16)
    headroom.quantize(model)
    headroom.lora(model, 16)
    return model.to_empty(device="cuda")


def mixtral_of_8_layers():
    config = transformers.MixtralConfig(num_hidden_layers=8)
    return of_transformers(transformers.MixtralForCausalLM, config)


def bert_large():
    config = transformers.BertConfig(
        hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096
    )
    return of_transformers(transformers.BertForMaskedLM, config)


def of_transformers(kind, config):
    config.use_cache, config.dtype = False, torch.bfloat16
    with torch.device("cuda"):
        return kind._from_config(config)


MODELS = {
    make.__name__: make
    for make in (
        llama_8b,
        llama_8b_of_transformers,
        llama_70b_in_4_bits_with_adapters,
        mixtral_of_8_layers,
        bert_large,
    )
}


def loss(model, ids):
    found = model(ids, labels=ids)
    return found if torch.is_tensor(found) else found.loss


def peak_bytes():
    """Returns the most memory that this program had. What getrusage says includes its parent's."""
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))


def reached(name):
    """Returns what a plan of the model says and what steps of it reach, and what they cost here."""
    model, ids = MODELS[name](), torch.randint(1000, (1, TOKENS), device="cuda")
    make = partial(AdamW8bit, lr=1e-4)
    plan = headroom.plan(model, make, ids, forward=loss)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    optimizer = make([p for p in model.parameters() if p.requires_grad])
    seconds = []
    for _ in range(STEPS):
        begin = time.process_time()
        loss(model, ids).backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.process_time() - begin)
    return {
        "allocated": (plan.allocated_bytes, torch.cuda.max_memory_allocated()),
        "reserved": (plan.reserved_bytes, torch.cuda.max_memory_reserved()),
        "seconds": min(seconds),
        "bytes": peak_bytes(),
    }


@pytest.mark.parametrize("name", MODELS)
def test_a_plan_is_what_the_allocator_reaches(name):
    options = {"gpu": "B200", "headroom": str(KERNELS[-1]), "computed": 65536}
    command = command_there(__file__, name, **options)
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout.splitlines()[-1])
    for what in "allocated", "reserved":
        planned, most = found[what]
        assert most > GiB and -MiB <= planned - most <= 1e-3 * most, (what, planned, most)
    assert found["bytes"] <= 2 * GiB
    assert found["seconds"] <= 1 or "8b" not in name


if __name__ == "__main__":
    print(json.dumps(reached(sys.argv[1])))
