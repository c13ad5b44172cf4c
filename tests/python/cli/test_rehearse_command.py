"""``headroom rehearse``: programs for a GPU that is not there."""

import json
import os
import re
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest
from headroom._core.sizes import format_bytes
from headroom.cli import main

from helpers.rehearsals import rehearse_each
from helpers.software_device import CAN_REHEARSE

pytest_plugins = "pytester"
pytestmark = pytest.mark.skipif(not CAN_REHEARSE, reason="needs a torch for CUDA and no GPU")
MiB = 1 << 20
MEMORY = 1 << 30
LOOP = """
import sys, torch

width, batch = int(sys.argv[1]), int(sys.argv[2])
model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(4))).cuda()
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
for step in range(5):
    loss = model(torch.randn(batch, width, device="cuda")).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print("step", step, loss.item())
print("after the loop")
"""
PLANNED = """
import headroom, torch
from torch import nn

model = nn.Sequential(nn.Embedding(512, 512), *(nn.Linear(512, 512) for _ in range(4))).cuda()
loss = torch.nn.functional.cross_entropy
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
ids = torch.randint(512, (2048,), device="cuda")
found = headroom.plan(model, optimizer, (ids, ids), loss=loss)
torch.cuda.reset_peak_memory_stats()
for step in range(3):
    loss(model(ids), ids).backward()
    optimizer.step()
    optimizer.zero_grad()
print("planned", found.allocated_bytes)
"""
CAUGHT = """
import torch

def double(size):
    kept = []
    try:
        while True:
            kept.append(torch.empty(size, device="cuda"))
            size *= 2
    except torch.OutOfMemoryError:
        return len(kept)

assert double(1 << 20) > 3
torch.cuda.empty_cache()
torch.cuda.reset_peak_memory_stats()
print("went on with", torch.ones(2, device="cuda").sum().item())
"""
VALUES = """
import headroom, torch

large = torch.ones(1 << 20, device="cuda")
print("sum", large.sum().item())
zero = torch.zeros((), device="cuda")
print("mean", large.mean().cpu().item(), zero.item(), bool((large > 0).all()))
small = torch.ones(4, 3, device="cuda")
masks = (large > 0).view(1024, 1024), large.view(-1, 2)[:3].bool(), small > large.mean()
for ask in (
    lambda: masks[0].nonzero(), lambda: masks[1].nonzero(), lambda: large[large > 0],
    lambda: small[masks[2]], lambda: small.nonzero(), lambda: small.new_empty(9).sum().item(),
    lambda: large.masked_select(large > 0), lambda: large.unique(),
    lambda: torch.bincount(large.long(), minlength=7), lambda: torch.bincount(large.long()),
):
    try:
        found = ask()
        print("found", [*found.shape] if torch.is_tensor(found) else found)
    except RuntimeError as error:
        print("refused", error)
print("shown", large.view(1024, 1024))
check = compile("bool((large > 0).all())", headroom.__path__[0] + "/step/rules.py", "exec")
exec(check)  # a read by a check of Headroom's own, which does not count
model = headroom.nn.Transformer(headroom.nn.TransformerConfig(9, 512, 2, 8, 512))
headroom.patch(model, "L5", weights="host")
model.cuda()  # copies each weight back to the host, which does not count either
index, one = large.view(1024, 1024).argmax(1, keepdim=True), torch.ones(1024, 1, device="cuda")
stacks = [torch.ones(2, *size, device="cuda") for size in ((8, 1024), (1024, 4))]
headroom.functional.experts(large.view(1024, 1024), index, one, *stacks)  # nor its numbers of rows
order = torch.empty(9, dtype=torch.int64, device="cuda")
order[torch.randperm(9, device="cuda")] = torch.arange(9, device="cuda")
print("order", order.sum().item(), "torch.empty", small.new_empty(2).fill_(3).sum().item())
x, w = (torch.randn(8, 16, device="cuda", requires_grad=True) for _ in range(2))
loss = headroom.linear_cross_entropy(x, w, torch.arange(8, device="cuda"))
loss.backward()
wanted = torch.nn.functional.cross_entropy(x @ w.T, torch.arange(8, device="cuda"))
print("fused", abs(loss.item() - wanted.item()) < 1e-5, x.grad.abs().sum().item() > 0)
weight = torch.nn.Parameter(torch.ones(1 << 20, device="cuda"))
weight.grad = torch.ones_like(weight)
headroom.optim.AdamW8bit([weight]).step()
"""
THREADS = """
import os, sys, threading, torch

child = os.fork()
if child == 0:
    sys.exit(5)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 5

def train():
    weight = torch.ones(1 << 20, device="cuda", requires_grad=True)
    weight.square().sum().backward()
    torch.optim.SGD([weight]).step()

threads = [threading.Thread(target=train) for _ in range(2)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
sys.exit(7)
"""
BACKWARD = """
import torch

class Grow(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, dy):
        return dy.new_empty(1 << 30).sum() + dy

x = torch.ones(8, device="cuda", requires_grad=True)
Grow.apply(x).sum().backward()
"""
TRAINER = """
import sys, torch, transformers

config = transformers.GPT2Config(
    vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
)
rows = [{"input_ids": row, "labels": row} for row in torch.randint(0, 64, (16, 16))]
args = transformers.TrainingArguments(
    sys.argv[1], max_steps=2, report_to="none", save_strategy="no", disable_tqdm=True
)
trainer = transformers.Trainer(transformers.GPT2LMHeadModel(config), args, train_dataset=rows)
print("loss", trainer.train().training_loss > 3, args.device)
"""
TRIED = """
import torch

def trained(width, steps):
    model = torch.nn.Linear(width, width, bias=False).cuda()
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.5)
    for step in range(steps):
        model(torch.ones(2, width, device="cuda")).sum().backward()
        optimizer.step()

trained(256, 1)
trained(512, 2)
"""
STREAMS = """
import torch

model = torch.nn.Sequential(*(torch.nn.Linear(700, 700) for _ in range(4))).cuda()
optimizer = torch.optim.AdamW(model.parameters())
side, kept = torch.cuda.Stream(), []
for step in range(3):
    x = torch.randn(900, 700, device="cuda")
    with torch.cuda.stream(side):
        copy = torch.empty(3 << 20, device="cuda")
    copy.record_stream(torch.cuda.current_stream())
    x.record_stream(side)
    model(x).square().mean().backward()
    del copy, x
    kept.append(torch.empty(1000 * (step + 1), 333, device="cuda"))
    optimizer.step()
    torch.cuda.empty_cache()
    try:
        torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    except torch.OutOfMemoryError:
        optimizer.zero_grad()
"""
RAW = """
import ctypes, torch

torch.ones(8, device="cuda")
ctypes.CDLL(None).cudaMalloc(ctypes.byref(ctypes.c_void_p()), ctypes.c_size_t(1 << 22))
"""
ON_HOST = """
import resource, headroom, psutil, torch

def numbers():
    half, whole = torch.tensor([0.1, 3.0], dtype=torch.bfloat16), torch.arange(3, dtype=torch.int16)
    for a, b in ((half, 0.3), (whole, 2), (whole, 2.5), (torch.tensor(2), 0.3), (half > 1, 2)):
        yield a * b, b - a if a.dtype != torch.bool else b + a, a == b, torch.where(a > 1, a, b)

print("small", [[(t.dtype, t.tolist()) for t in row] for row in numbers()])
large = torch.randn(1 << 27) * 0.02
large.add_(1).sqrt_()
copy, original = (torch.empty(3 << 28, dtype=torch.uint8) for _ in range(2))
copy.copy_(original)
del copy, original
mask = large > 0
print("large", large[:2].tolist(), mask.any().item(), torch.arange(1 << 18)[-1].item())
pinned = torch.empty(1 << 28, dtype=torch.uint8, pin_memory=True)
arena = headroom.HostArena()
slab = arena.take(1 << 29, kind="states", owner="a test")
optimizer = torch.optim.AdamW([torch.nn.Parameter(large)], fused=True)
optimizer.param_groups[0]["params"][0].grad = torch.zeros_like(large)
optimizer.step()
left = psutil.virtual_memory().available
del optimizer
try:
    torch.empty(4 << 30, dtype=torch.uint8)
except RuntimeError as error:
    print("refused", "can't allocate memory" in str(error), left < 4 << 30)
print("resident", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10)
arena.take(5 << 30, kind="states", owner="a test")
"""
RANKS = """
import os, torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

dist.init_process_group("nccl" if os.environ["LOCAL_RANK"] == "0" else None)
whole = dist.new_group(backend="gloo")
sums, found = torch.ones(2, device="cuda"), [None] * dist.get_world_size()
dist.all_reduce(sums)
dist.all_gather_object(found, {"rank": dist.get_rank()}, group=whole)
print("ranks", dist.get_rank(), dist.get_world_size(), sums.tolist(), len(found), found[3])
with torch.device("cuda"):
    layers = [nn.Linear(1024, 1024, bias=False) for _ in range(8)]
copied = nn.parallel.DistributedDataParallel(nn.Sequential(*layers[:2]))
copied(torch.ones(4, 1024, device="cuda")).sum().backward()
sharded = nn.Sequential(*layers[2:])
for layer in sharded:
    fully_shard(layer)
fully_shard(sharded)
optimizer = torch.optim.AdamW(sharded.parameters(), fused=True)
for _ in range(2):
    sharded(torch.ones(4, 1024, device="cuda")).sum().backward()
    optimizer.step()
"""
SHARDS_ON_THE_HOST = """
import functools, headroom, torch
import torch.distributed as dist
from headroom import optim
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

dist.init_process_group("nccl")
torch.cuda.set_device(0)
clipped = functools.partial(optim.AdamW8bit, max_grad_norm=1.0)
muon = functools.partial(optim.Muon, normuon=0.95)
for make in (optim.AdamW, optim.AdamW8bit, clipped, optim.Adafactor, optim.Lion8bit, muon):
    model = torch.nn.Sequential(*(torch.nn.Linear(96, 96) for _ in range(3)))
    for layer in model[:2]:
        fully_shard(layer, offload_policy=CPUOffloadPolicy())
    model[2].cuda()
    fully_shard(model)
    optimizer = make(model if make is muon else model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.ones(4, 96, device="cuda")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    for place, p in zip(["cpu"] * 4 + ["cuda"] * 2, model.parameters(), strict=True):
        states = [p, *(x for x in optimizer.state[p].values() if torch.is_tensor(x))]
        assert {getattr(x, "_local_tensor", x).device.type for x in states} == {place}, make
    print("stepped", len(states) > 1)
"""
NO_WEIGHTS = """
import sys, torch, transformers
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig

small = dict(
    vocab_size=512, hidden_size=512, intermediate_size=1024, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2,
)
LlamaConfig(**small, dtype="bfloat16", architectures=["LlamaForCausalLM"]).save_pretrained("llama")
MixtralConfig(**small, num_local_experts=4, tie_word_embeddings=True).save_pretrained("mixtral")
model, told = AutoModelForCausalLM.from_pretrained(
    "llama", dtype="auto", output_loading_info=True
)
print("llama", told["missing_keys"], model.dtype, model.config.name_or_path)
model.cuda()
model, told = AutoModelForCausalLM.from_pretrained("mixtral", output_loading_info=True)
print("mixtral", told["missing_keys"], told["unexpected_keys"], model.dtype)
model = transformers.LlamaForSequenceClassification.from_pretrained("llama", num_labels=5)
print("labels", model.score.weight.shape[0])
try:
    torch.hub.load_state_dict_from_url("https://example.invalid/weights.pth")
except RuntimeError as error:
    print("refused", error)
"""
# Program, its arguments, and the options of its rehearsal.
PROGRAMS = {
    "fits": (LOOP, [512, 64], ["--certificate", "fits.certificate"]),
    "again": (LOOP, [512, 64], ["--certificate", "again.certificate"]),
    "on a GPU": (LOOP, [512, 64], ["--on-gpu", "--compare", "earlier.json"]),
    "one step": (LOOP, [512, 64], ["--steps", "1", "--loss", "2.5", "--fail-above", "8 MiB"]),
    "too large": (
        LOOP,
        [4096, 64],
        ["--snapshot", "too large.pickle", "--certificate", "too large.certificate"],
    ),
    "streams": (STREAMS, [], ["--certificate", "streams.certificate"]),
    "raw": (RAW, [], ["--certificate", "raw.certificate"]),
    "tried": (TRIED, [], ["--compare", "earlier.json"]),
    "planned": (PLANNED, [], []),
    "caught": (CAUGHT, [], []),
    "values": (VALUES, [], []),
    "answered": (VALUES, [], ["--loss", "3", "--nonzero", "0.25"]),
    "threads": (THREADS, [], []),
    "backward": (BACKWARD, [], []),
    "trainer": (TRAINER, ["made"], []),
    "on the host": (ON_HOST, [], ["--host-memory", "5 GiB"]),
    "ranks": (RANKS, [], ["--devices", "4"]),
    "shards on the host": (SHARDS_ON_THE_HOST, [], ["--devices", "2", "--steps", "9"]),
    "no weights": (NO_WEIGHTS, [], ["--no-weights"]),
}
CERTIFIED = ("fits", "again", "too large", "streams")
# What --compare is given: a report of before, with a line that has moved since.
EARLIER = {
    "format": "headroom.rehearsal/1",
    "program": ["tried.py"],
    "device": {"name": "H100", "memory": 80 << 30},
    "fits": True,
    "versions": {"python": "2.7"},
    "peak_allocated": 5 * MiB,
    "peak_reserved": 8 * MiB,
    "host": {"peak": 9 * MiB},
    "at_peak": [{"kind": None, "stack": ["a/b.py:3 f"], "bytes": 6 * MiB, "count": 2}],
}


@pytest.fixture(scope="module")
def rehearsed(tmp_path_factory):
    """Returns of each program its exit code, its report and what it printed."""
    folder = tmp_path_factory.mktemp("rehearsed")
    (folder / "earlier.json").write_text(json.dumps(EARLIER))
    there = {
        name: program
        for name, program in PROGRAMS.items()
        if "transformers" not in program[0] or find_spec("transformers") is not None
    }
    return {"folder": folder} | rehearse_each(there, folder)


def line_of(text, part):
    """Returns the number of the first line of a program with ``part`` in it."""
    return 1 + next(i for i, line in enumerate(text.splitlines()) if part in line)


def test_a_program_that_fits(rehearsed):
    code, report, output = rehearsed["fits"]
    assert code == 0 and report["fits"] is True and report["steps"] == 3
    assert "step 1" in output and "step 2" not in output and "after the loop" not in output
    # Weights, gradients and two moments; cuBLAS takes 8 MiB, activations less than one.
    state = 4 * 4 * 4 * (512 * 512 + 512)
    assert state < report["peak_allocated"] < state + 10 * MiB
    assert report["peak_allocated"] < report["peak_reserved"] < MEMORY
    assert report["step_seconds"] > 0 and "it fits" in output


def test_what_is_live_at_the_peak(rehearsed):
    _, report, output = rehearsed["fits"]
    sizes = dict.fromkeys(("parameters", "gradients", "optimizer_state", None), 0)
    for row in report["at_peak"]:
        sizes[row["kind"]] += row["bytes"]
    weights = 4 * (512 * 512 + 512) * 4
    counters = 8 * 4  # steps of the fused optimizer
    assert sizes["parameters"] == weights and sizes["optimizer_state"] == 2 * weights + counters
    assert weights - 4 * (512 + 512) <= sizes["gradients"] <= weights
    total = sum(sizes.values())
    assert (
        total
        <= report["peak_allocated"]
        <= total + 512 * sum(r["count"] for r in report["at_peak"])
    )
    (row,) = [row for row in report["at_peak"] if row["kind"] == "parameters"]
    assert row["count"] == 8 and len(row["stack"]) == 1
    assert row["stack"][0].endswith(f"/fits.py:{line_of(LOOP, 'Linear')} <module>")
    shown = [format_bytes(sizes[kind]) for kind in ("optimizer_state", "parameters")]
    assert "optimizer state {}, parameters {}".format(*shown) in output


def test_what_grew_since_an_earlier_report(rehearsed):
    _, _, output = rehearsed["tried"]
    assert "-6.00 MiB  2 -> 0      gone, others: a/b.py:3 f" in output
    assert "python: 2.7 -> 3." in output and "device: H100 -> a GPU" in output


def test_a_gpu_beside_a_rehearsal(rehearsed):
    _, report, _ = rehearsed["fits"]
    code, found, output = rehearsed["on a GPU"]
    assert code == 0 and found["fits"] is True and found["device"]["memory"] == MEMORY
    for key in ("peak_allocated", "peak_reserved", "steps", "at_peak", "after_step"):
        told = json.dumps(found[key]).replace("on a GPU.py", "fits.py")
        assert told == json.dumps(report[key])
    assert found["device"]["context"] == report["device"]["context"] > 0
    assert 0 < found["host"]["peak"] == found["host"]["rest"]
    assert "with what other processes have" in output and "gone, others: a/b.py:3 f" in output


def test_certificates_of_two_rehearsals_are_the_same_trace(rehearsed, capsys):
    files = [rehearsed["folder"] / f"{name}.certificate" for name in CERTIFIED]
    assert main(["verify", *map(str, files), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["certificates"]
    for name, row in zip(CERTIFIED, found):
        _, report, _ = rehearsed[name]
        peaks = {key: report[key] for key in ("peak_allocated", "peak_reserved")}
        assert row["holds"] and row["replayed"] == peaks and row["fits"] == report["fits"]
    first, second, *_ = (json.loads(file.read_text()) for file in files)
    for key in ("sizes", "streams", "events", "expandable_segments"):
        assert first[key] == second[key]
    assert {0, 1} <= {*json.loads(files[-1].read_text())["streams"]}


def test_two_rehearsals_take_the_same_bytes(rehearsed):
    first, second = (rehearsed[name][1] for name in ("fits", "again"))
    for key in ("peak_allocated", "peak_reserved", "steps", "refused"):
        assert first[key] == second[key]


def test_steps_an_answer_and_a_limit(rehearsed):
    code, report, output = rehearsed["one step"]
    assert code == 1 and report["exit_code"] == 0 and report["steps"] == 1
    assert "more than 8.00 MiB" in output and "step 0" not in output


def test_what_is_held_after_a_step_is_that_of_optimizers_that_are_still_there(rehearsed):
    _, report, _ = rehearsed["tried"]
    held = {"parameters", "gradients", "optimizer_state"}
    assert report["after_step"] == dict.fromkeys(held, 512 * 512 * 4)


def test_a_program_that_does_not_fit(rehearsed):
    code, report, output = rehearsed["too large"]
    assert code == 1 and report["fits"] is False and report["error"] == "OutOfMemoryError"
    (refused,) = report["refused"]
    assert refused["line"].endswith(f"too large.py:{line_of(LOOP, 'optimizer.step()')}")
    assert refused["asked"] == 4096 * 4096 * 4
    assert "Traceback" in output and "it does not fit" in output
    assert "programs.py" not in output and "rehearsal/report.py" not in output
    assert report["snapshot"] == "too large.pickle"


def test_the_plan_of_the_same_steps(rehearsed):
    code, report, output = rehearsed["planned"]
    planned = int(output.split("planned ")[1].split()[0]) if "planned" in output else None
    assert code == 0 and planned == pytest.approx(report["peak_allocated"], rel=1e-3)


def test_a_program_that_catches_it_and_goes_on(rehearsed):
    code, report, output = rehearsed["caught"]
    assert code == 0 and "went on with 2.0" in output and report["fits"] is False
    assert report["refused"][0]["line"].endswith(f"caught.py:{line_of(CAUGHT, 'kept.append')}")
    assert report["peak_allocated"] > 252 * MiB  # which the program has forgotten


def test_values_of_small_tensors_and_reads_of_others(rehearsed):
    code, report, output = rehearsed["values"]
    assert code == 0, output
    assert "sum 0.0" in output and "mean 0.0 0.0 False" in output
    assert re.search(r"shown tensor\(\[\[0\., 0\., .*\n.*device='cuda:0'\)", output, re.DOTALL)
    assert "fused True True" in output and "order 36 torch.empty 6.0" in output
    told = [line.split()[:5] for line in output.splitlines() if line.startswith(("fou", "refused"))]
    assert told == [
        ["refused", "aten::nonzero", "returns", "as", "many"],
        ["refused", "aten::nonzero", "returns", "as", "many"],
        ["refused", "aten::nonzero", "returns", "as", "many"],
        ["refused", "aten::nonzero", "returns", "as", "many"],
        ["found", "[12,", "2]"],
        ["found", "0.0"],
        ["refused", "aten::masked_select", "returns", "as", "many"],
        ["refused", "aten::_unique2", "returns", "as", "many"],
        ["found", "[7]"],
        ["refused", "aten::bincount", "returns", "as", "many"],
    ]
    assert "such as --nonzero 0.1" in output and "call it on the CPU" in output
    lines = {place.split(" ")[0].rpartition(":")[2] for place in report["unknown_reads"]}
    parts = (
        '"sum"',
        '"mean"',
        "lambda: masks[0]",
        "lambda: small[",
        "masked_select",
        "minlength",
        "shown",
    )
    assert lines == {str(line_of(VALUES, part)) for part in parts}


def test_answers_to_reads(rehearsed):
    _, _, output = rehearsed["answered"]
    assert "sum 3.0" in output and "mean 3.0 0.0 False" in output and "fused True True" in output
    found = re.findall(r"^found (.*)$", output, re.MULTILINE)
    quarter = (1 << 20) // 4
    wanted = [quarter, 2], [2, 2], [quarter], [3], [12, 2], 3.0, [quarter], [7]
    assert found == [str(one) for one in wanted]


def test_no_certificate_of_memory_that_torch_does_not_know(rehearsed):
    code, report, output = rehearsed["raw"]
    assert code == 1 and report["exit_code"] == 0 and report["peak_reserved"] == 6 * MiB
    assert "there is no certificate: 512 B and 6.00 MiB were allocated and reserved" in output
    assert not (rehearsed["folder"] / "raw.certificate").exists()


def test_optimizers_of_shards_on_the_host(rehearsed):
    """Of FSDP2's CPUOffloadPolicy, for some of the modules."""
    code, _, output = rehearsed["shards on the host"]
    assert code == 0 and output.count("stepped True") == 6, output


def test_forks_threads_and_exit_codes(rehearsed):
    code, report, output = rehearsed["threads"]
    assert code == 7 and report["exit_code"] == 7 and report["steps"] == 1
    assert output.count("headroom rehearse: on") == 1


def test_memory_that_runs_out_in_a_backward_pass_has_the_line_that_began_it(rehearsed):
    code, report, _ = rehearsed["backward"]
    assert code == 1
    place = report["refused"][0]["line"]
    assert place.endswith(f"backward.py:{line_of(BACKWARD, 'new_empty')}")


def test_trainer(rehearsed):
    pytest.importorskip("transformers")
    code, report, output = rehearsed["trainer"]
    assert code == 0 and report["steps"] == 2 and "loss True cuda:0" in output, output
    assert report["versions"]["transformers"] == version("transformers")


def test_memory_of_the_host(rehearsed, capsys):
    code, report, output = rehearsed["on the host"]
    assert code == 1 and report["fits"] is False, output
    exec(ON_HOST.partition("\nlarge =")[0], {})  # by torch alone
    assert capsys.readouterr().out in output
    assert f"large [0.0, 0.0] False {(1 << 18) - 1}" in output
    assert "refused True True" in output and "0.8 of what is left of --host-memory" in output
    host = report["host"]
    # The weight, its mask, its gradient and two moments; the arena gives the grown step nothing.
    assert host["tensors"] == (4 * 4 + 1) << 27 and host["pinned"] == 1 << 28
    assert host["arena"] == 1 << 29 and host["limit"] == 5 << 30
    assert host["peak"] == sum(host[kind] for kind in ("tensors", "pinned", "arena", "rest"))
    assert int(output.split("resident ")[1].split()[0]) < 900
    for refused, kind, asked in zip(host["refused"], ("tensors", "arena"), (4, 5), strict=True):
        assert refused["kind"] == kind and refused["asked"] == asked << 30
        place = line_of(ON_HOST, f"({asked} << 30, ")
        assert refused["line"].endswith(f"on the host.py:{place}")
    assert "4.00 GiB asked for tensors on the CPU beside " in output


def test_one_of_several_ranks(rehearsed):
    code, report, output = rehearsed["ranks"]
    assert code == 0 and report["ranks"] == 4 and report["steps"] == 2, output
    assert "ranks 0 4 [4.0, 4.0] 4 {'rank': 0}" in output
    # Of six layers that are sharded a quarter each, with two moments.
    assert report["after_step"]["parameters"] == 6 * MiB
    assert 0 <= report["after_step"]["optimizer_state"] - 12 * MiB < 1024


def test_models_without_weights(rehearsed):
    pytest.importorskip("transformers")
    code, report, output = rehearsed["no weights"]
    assert code == 0, output
    assert "llama set() torch.bfloat16 llama" in output
    # Two layers, embeddings and head, of 2 bytes each; besides there are tables of positions.
    layer = 512 * 512 * 2 + 512 * 256 * 2 + 512 * 1024 * 3 + 2 * 512
    size = 2 * (2 * layer + 2 * 512 * 512 + 512)
    assert size <= report["peak_allocated"] < size + (1 << 16)
    assert "mixtral set() set() torch.float32" in output and "labels 5" in output
    assert "refused --no-weights knows from_pretrained of transformers alone" in output


TRAIN = """
import torch

layers = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(4))).cuda()
optimizer = torch.optim.AdamW(layers.parameters(), fused=True)
while True:
    layers(torch.randn(8, 1024, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_the_memory_test_of_the_documents(rehearse, tmp_path, monkeypatch):
    page = (Path(__file__).parents[3] / "docs/memory-ci.md").read_text()
    names, reports = {}, []
    exec(page.partition("```python\n")[2].partition("```")[0], names)
    (tmp_path / "train.py").write_text(TRAIN)
    monkeypatch.chdir(tmp_path)

    def kept(*arguments, **options):
        reports.append(rehearse(*arguments, **options))
        return reports[-1]

    names["test_training_fits"](kept, "RTX 4090", "22 GiB")
    (report,) = reports
    assert report.steps == 2 and report.device["capability"] == 89 and report.exit_code == 0
    assert report.peak_allocated > 4 * 4 * 4 * 1024 * 1025
    assert "headroom rehearse: on RTX 4090" in report.output
    with pytest.raises(AssertionError, match=r"tensors took .* MiB, more than 1.00 MiB; "):
        report.assert_fits("1 MiB")


def test_reports_that_say_no():
    from headroom_rehearsal import Report

    report = Report(fits=True, peak_allocated=MiB, output="all of it")
    report.assert_fits()
    report.assert_fits("1 MiB")
    with pytest.raises(ValueError, match="limit is '1 MiBs', wanted"):
        report.assert_fits("1 MiBs")
    with pytest.raises(AttributeError, match="no peak; it has fits, peak_allocated, output"):
        report.peak  # noqa: B018
    for fits, why in ((False, "it does not fit"), (None, "unknown whether it fits")):
        with pytest.raises(AssertionError, match=f"{why}; the rehearsal printed:\nall of it"):
            Report(report, fits=fits).assert_fits("1 GiB")


def test_the_fixture_skips_where_there_is_a_gpu(pytester, monkeypatch):
    from headroom_rehearsal import command

    def refuse():
        raise RuntimeError("this machine has a GPU")

    monkeypatch.setattr(command, "refuse_gpus", refuse)
    pytester.makepyfile("def test_fits(rehearse): rehearse(['train.py'], gpu='T4')")
    result = pytester.runpytest_inprocess("-rs", "-p", "no:cacheprovider")
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(["*this machine has a GPU*"])


def test_what_the_command_refuses(tmp_path, monkeypatch, capsys):
    from headroom_rehearsal import command, run

    with pytest.raises(RuntimeError, match="--gpu is 'RTX 1', wanted one of T4, "):
        run([str(tmp_path / "one.py")], gpu="RTX 1")
    monkeypatch.chdir(tmp_path)
    assert command.main(["--gpus"]) == 0 and "RTX 4090" in capsys.readouterr().out
    for words, said in (
        (["--gpu", "T4"], "PROGRAM is missing"),
        (["train.py"], "give --gpu"),
        (["--gpu=T4", "--advise", "headroom", "run", "a.py"], "without headroom run"),
        (["--on-gpu"], "PROGRAM is missing"),
        (["--on-gpu", "--loss=0", "a.py"], "and --loss is of what is rehearsed; leave it out"),
        (["--on-gpu", "--devices=2", "a.py"], "and --devices is of what is rehearsed"),
        (["--on-gpu", "--nonzero=0", "a.py"], "and --nonzero is of what is rehearsed"),
        (["--gpu=T4", "--nonzero=1.5", "a.py"], "got '1.5', wanted a number from 0 to 1"),
    ):
        with pytest.raises(SystemExit) as ended:
            command.main(words)
        assert ended.value.code == 2 and said in capsys.readouterr().err
    assert not os.listdir(tmp_path)
