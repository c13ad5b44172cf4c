"""``headroom rehearse``: programs as people write them, with the libraries that they use."""

from importlib.util import find_spec

import pytest

from helpers.rehearsals import check_started, check_steps, rehearse_each
from helpers.software_device import CAN_REHEARSE

pytestmark = pytest.mark.skipif(not CAN_REHEARSE, reason="needs a torch for CUDA and no GPU")
GPT = """
import torch
from torch import nn
from torch.nn import functional as F

vocabulary, width, heads, length = 2048, 256, 4, 512

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        wider, back = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.mlp = nn.Sequential(wider, nn.GELU(), back)

    def forward(self, x):
        parts = self.qkv(self.norms[0](x)).chunk(3, -1)
        q, k, v = (t.unflatten(-1, (heads, -1)).transpose(1, 2) for t in parts)
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.1, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).flatten(2))
        return x + F.dropout(self.mlp(self.norms[1](x)), 0.1)

class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block() for _ in range(2)))
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids, targets):
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        return F.cross_entropy(self.head(self.blocks(x)).flatten(0, 1), targets.flatten())

def batch():
    ids = torch.stack([data[i : i + length + 1] for i in torch.randint(50000, (4,))])
    ids = ids.pin_memory().to("cuda", non_blocking=True)
    return ids[:, :-1], ids[:, 1:]

data = torch.randint(0, vocabulary, (60000,))
model = GPT().to("cuda")
print("parameters", sum(p.nbytes for p in model.parameters()))
COMPILE
scaler = torch.amp.GradScaler("cuda")
matrices = [p for p in model.parameters() if p.dim() > 1]
vectors = [p for p in model.parameters() if p.dim() == 1]
groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
optimizer = torch.optim.AdamW(groups, lr=6e-4, fused=True)
for step in range(10):
    for _ in range(2):
        with torch.amp.autocast("cuda", dtype=torch.float16):
            loss = model(*batch()) / 2
        scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
"""
RESIDUAL = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        layers = [nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2)]
        norms = [nn.BatchNorm2d(width) for _ in range(2)]
        self.layers = nn.Sequential(layers[0], norms[0], nn.ReLU(inplace=True), layers[1], norms[1])

    def forward(self, x):
        return torch.relu(x + self.layers(x))

model = nn.Sequential(
    nn.Conv2d(3, 64, 7, 2, 3), nn.MaxPool2d(3, 2, 1), Block(64), Block(64),
    nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10),
).cuda().to(memory_format=torch.channels_last)
print("parameters", sum(p.nbytes for p in model.parameters()))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
data = TensorDataset(torch.rand(32, 3, 128, 128), torch.randint(0, 10, (32,)))
for images, wanted in DataLoader(data, 8, shuffle=True, num_workers=1, pin_memory=True):
    images = images.to("cuda", non_blocking=True, memory_format=torch.channels_last)
    wanted = wanted.cuda(non_blocking=True)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        scores = model(images)
        loss = nn.functional.cross_entropy(scores, wanted, label_smoothing=0.1)
    right = (scores.topk(5, 1)[1] == wanted[:, None]).sum().item()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
"""
ONE_RANK = """
import os, torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("nccl")
place = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(place)
model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(4))).to(place)
print("parameters", sum(p.nbytes for p in model.parameters()))
model = DistributedDataParallel(model, device_ids=[place])
optimizer = torch.optim.AdamW(model.parameters())
for step in range(10):
    loss = model(torch.randn(64, 1024, device=place)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    dist.all_reduce(loss.detach(), dist.ReduceOp.AVG)
dist.destroy_process_group()
"""
ACCELERATE = """
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=2)
model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(4)))
print("parameters", sum(p.nbytes for p in model.parameters()))
optimizer = torch.optim.AdamW(model.parameters())
schedule = torch.optim.lr_scheduler.LinearLR(optimizer)
loader = DataLoader(torch.randn(64, 1024), batch_size=8, shuffle=True)
model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
for x in loader:
    with accelerator.accumulate(model):
        loss = (model(x) - x).square().mean()
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    accelerator.gather(loss.detach()).mean().item()
"""
LIGHTNING = """
import lightning, torch

class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(4)))

    def training_step(self, x, _):
        loss = (self.layers(x) - x).square().mean()
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())

module = Module()
print("parameters", sum(p.nbytes for p in module.parameters()))
trainer = lightning.Trainer(
    accelerator="gpu", devices=1, precision="bf16-mixed", max_steps=10, gradient_clip_val=1.0,
    logger=False, enable_checkpointing=False,
)
trainer.fit(module, torch.utils.data.DataLoader(torch.randn(64, 1024), batch_size=8))
"""
QLORA = """
import bitsandbytes, torch, transformers
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training

transformers.LlamaConfig(
    vocab_size=2048, hidden_size=512, intermediate_size=1024, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, architectures=["LlamaForCausalLM"],
).save_pretrained("llama")
four_bits = transformers.BitsAndBytesConfig(
    load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16,
    bnb_4bit_use_double_quant=True,
)
model = transformers.AutoModelForCausalLM.from_pretrained(
    "llama", quantization_config=four_bits, device_map="auto"
)
model = prepare_model_for_kbit_training(model)
model = get_peft_model(model, LoraConfig(r=16, target_modules="all-linear"))
trained = [p for p in model.parameters() if p.requires_grad]
print("parameters", sum(p.nbytes for p in trained))
optimizer = bitsandbytes.optim.PagedAdamW8bit(trained, lr=1e-4)
for step in range(10):
    ids = torch.randint(0, 2048, (2, 512), device=model.device)
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
# Program, its arguments, and the options of its rehearsal.
PROGRAMS = {
    "gpt": (GPT.replace("COMPILE", ""), [], []),
    "residual": (RESIDUAL, [], []),
    "one rank": (ONE_RANK, [], ["--devices", "1"]),
    "with accelerate": (ACCELERATE, [], []),
    "with lightning": (LIGHTNING, [], []),
    "with bitsandbytes": (QLORA, [], ["--no-weights"]),
}
# Each also as `headroom run` starts it, with options that change no step.
RUN = ["headroom", "run"]
STARTED = [*RUN, "--register", "--snapshot-on-oom", "oom"]
BUDGET = [*RUN, "--budget", "3 GiB"]
FITTED, OWN_LOOP = "with lightning", "gpt"
DEVICE = {"memory": "4 GiB", "steps": 2}  # transformers takes it that there are 1.2 GiB
COMPILED = {"compiled": (GPT.replace("COMPILE", "model = torch.compile(model)"), [], [])}
NEEDED = {
    "with accelerate": ["accelerate"],
    "with lightning": ["lightning"],
    "with bitsandbytes": ["bitsandbytes", "peft", "transformers", "accelerate"],
}


def there(name):
    return all(find_spec(each) is not None for each in NEEDED.get(name, ()))


@pytest.fixture(scope="module")
def rehearsed(tmp_path_factory):
    programs = {name: program for name, program in PROGRAMS.items() if there(name)}
    programs |= {f"{name} started": (*program, STARTED) for name, program in programs.items()}
    for name in (FITTED, OWN_LOOP):
        programs |= {f"{name} fitted": (*PROGRAMS[name], BUDGET)} if there(name) else {}
    return rehearse_each(programs, tmp_path_factory.mktemp("rehearsed"), **DEVICE)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program(rehearsed, name):
    if not there(name):
        pytest.skip(f"needs {', '.join(NEEDED[name])}")
    plain, started = rehearsed[name], rehearsed[f"{name} started"]
    check_steps(*plain)
    check_steps(*started)
    check_started(plain, started)


def test_programs_with_a_budget(rehearsed):
    code, report, output = rehearsed[f"{OWN_LOOP} fitted"]
    assert code != 0 and report["error"] == "UnknownLoop" and "headroom.fit" in output
    if there(FITTED):
        code, report, output = rehearsed[f"{FITTED} fitted"]
        # Steps that it tries count too.
        assert code == 0 and report["fits"] is True and report["steps"] >= 2, output


@pytest.mark.slow
def test_a_compiled_program(tmp_path):
    """The hooks that snapshots set break its graphs: then parts of it run uncompiled."""
    compiled = COMPILED["compiled"]
    ways = {"registered": [*RUN, "--register"], "in parts": [*RUN, "--snapshot-on-oom", "oom"]}
    programs = COMPILED | {name: (*compiled, words) for name, words in ways.items()}
    found = rehearse_each(programs, tmp_path, **DEVICE)
    for one in found.values():
        check_steps(*one)
    check_started(found["compiled"], found["registered"])
