"""Plans of models whose frozen weights are in few bits, against the counter of real bytes."""

import copy

import headroom
import pytest
import torch
from headroom.functional import QuantizedMatrix, linear_quantized, quantize_matrix
from headroom.memory.cpu import CpuRecorder
from headroom.planning.op_workspaces import workspaces_of
from torch._subclasses.fake_tensor import FakeTensorMode

from helpers.few_bits import freeze, with_bitsandbytes
from helpers.hf_models import model_of

pytest.importorskip("transformers")


@pytest.mark.parametrize("level", ["L1", "L5"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("to", ["nf4", "int8"])
def test_a_plan_is_what_a_run_takes(to, dtype, level):
    wide = dict(hidden_size=128, intermediate_size=256)
    model = freeze(model_of("Llama", **wide).to(dtype))
    before = sum(p.nbytes for p in model.parameters())
    report = headroom.quantize(model, to)
    headroom.patch(model, level)
    ids = torch.randint(3, 61, (2, 32))
    batch = dict(input_ids=ids, labels=ids)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained)
    plan = headroom.plan(model, optimizer, batch)
    assert plan.peak_by_kind["parameters"] == report.after < before
    assert plan.peak_by_kind["optimizer_state"] < 9 * sum(4 * p.numel() for p in trained)
    with headroom.memory.track(model, optimizer) as timeline:
        for _ in range(2):
            model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert abs(plan.total_bytes / timeline.peak_bytes - 1) <= 0.001
    kinds = timeline.peak_by_kind
    assert kinds["parameters"] == report.after


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_plan_knows_the_loss_of_a_head_of_few_bits(dtype):
    model = model_of("Llama", hidden_size=256, vocab_size=6000, tie_word_embeddings=False)
    freeze(model.to(dtype))
    headroom.quantize(model, skip=())
    headroom.patch(model, loss=True)
    ids = torch.randint(3, 61, (2, 64))
    batch = dict(input_ids=ids, labels=ids)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    plan = headroom.plan(model, optimizer, batch)
    with headroom.memory.track(model, optimizer) as timeline:
        for _ in range(2):
            model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert abs(plan.total_bytes / timeline.peak_bytes - 1) <= 0.001


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize("to", ["nf4", "int8"])
def test_the_workspace_of_a_product_in_parts(to, rows, dtype):
    q = quantize_matrix(torch.randn(1536, 1024), to)  # 6 MiB in float32
    x = torch.randn(rows, 1024).to(dtype)
    ops = torch.ops.headroom
    numbers = {"nf4": 1, "int8": 3}[to], q.block_size, q.nested, 0
    calls = (
        (ops.linear_quantized.default, (x, q.codes, q.scales, None, 1536, *numbers)),
        (
            ops.linear_quantized_backward.default,
            (torch.randn(rows, 1536).to(dtype), q.codes, q.scales, 1024, *numbers),
        ),
    )
    assert isinstance(q, QuantizedMatrix) and linear_quantized(x, q).shape == (rows, 1536)
    for op, given in calls:
        op(*given)
        recorder = CpuRecorder(stacks=False)
        recorder.start()
        result = op(*given)
        recorder.stop()
        live = most = 0
        for event in recorder.events():
            live += event.bytes if event.action == "alloc" else -event.bytes
            most = max(most, live)
        with FakeTensorMode() as mode:
            fakes = [mode.from_tensor(v) if isinstance(v, torch.Tensor) else v for v in given]
            found = sum(size for size, _ in workspaces_of(op, fakes, {}, "cpu"))
        assert found == most - result.nbytes
        assert rows == 1 or 1 << 20 < found <= 5 << 20


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("to", [1, 2, 3])
def test_few_rows_are_planned_for_codes_that_lie_as_torch_lays_them(to):
    """They take no workspace on CUDA, where the codes can be read 16 bytes at a time."""
    ops, numbers = torch.ops.headroom, (to, 64, False)
    assert ops.linear_quantized_workspace(16, 512, 256, 1, *numbers, False, True, 0) == 0
    of_lora = ops.lora_linear_workspace(16, 512, 256, 4, 1, 1, *numbers, 0.0, False, True, 0)
    dense = ops.lora_linear_workspace(16, 512, 256, 4, 1, 1, 0, 0, False, 0.0, False, True, 0)
    assert of_lora == dense  # what a product takes


# ---- models that bitsandbytes has built ----------------------------------------------------------


def built(kind, **options):
    """A model of bitsandbytes, what trains it, and a batch."""
    pytest.importorskip("bitsandbytes")
    wide = dict(hidden_size=128, intermediate_size=256)
    model = freeze(with_bitsandbytes(model_of("Llama", **wide), kind, **options))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    ids = torch.randint(3, 61, (4, 32))
    return model, optimizer, dict(input_ids=ids, labels=ids)


@pytest.mark.parametrize(
    "kind, options, level",
    [
        ("nf4", {}, "L1"),
        ("nf4", dict(nested=False), "L5"),
        ("fp4", dict(storage=torch.bfloat16), "L5"),
        ("int8", {}, "L1"),
    ],
    ids=str,
)
def test_a_plan_of_patched_layers_of_bitsandbytes(kind, options, level):
    model, optimizer, batch = built(kind, **options)
    headroom.patch(model, level)
    weight = model.model.layers[0].mlp.up_proj.weight
    plan = headroom.plan(model, optimizer, batch)
    with headroom.memory.track(model, optimizer) as timeline:
        for _ in range(2):
            model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert plan.total_bytes == timeline.peak_bytes
    kinds = plan.peak_by_kind
    assert kinds == timeline.peak_by_kind
    assert kinds["parameters"] > sum(p.nbytes for p in model.parameters())  # scales, too
    assert model.model.layers[0].mlp.up_proj.weight is weight
    copied = headroom.plan(copy.deepcopy(model), None, batch)  # which was not called yet
    assert copied.peak_by_kind["parameters"] == kinds["parameters"]
    on_gpu = headroom.plan(model, optimizer, batch, device="cuda")
    assert on_gpu.peak_by_kind["parameters"] == kinds["parameters"]


def test_a_model_of_bitsandbytes_is_fitted():
    model, optimizer, batch = built("nf4")
    with pytest.raises(headroom.planning.PlanError, match=r"headroom.patch\(model\) first"):
        headroom.plan(model, optimizer, batch)
    choice = {"levels": ["L1", "L3"], "micro_batches": 2, "optimizer": "headroom"}
    given = dict(optimizer=optimizer, budget="1 GiB")
    fitted = headroom.fit(model, batch, choice=choice, **given)
    for _ in range(2):
        assert fitted.step(batch).isfinite()
    assert abs(fitted.predicted_peak - fitted.measured_peak) <= 16  # of losses
    note = headroom.fit(model, batch, allow="int8", dry_run=True, **given).notes[0]
    assert note.startswith("int8: no layer is left: 1 are skipped, such as 'lm_head'")
