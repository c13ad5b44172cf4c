"""What a profile counts is what was done: FLOPs by hand and by torch's counter, modules by name,
phases that add up, recomputation told apart; and the steps compute the same bits."""

import copy
import time

import headroom
import pytest
import torch
from headroom.nn import LEVELS, Transformer, TransformerConfig
from headroom.profiling import work
from torch import nn
from torch.nn import functional as F
from torch.profiler import schedule
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader
from torch.utils.flop_counter import FlopCounterMode, flop_registry

pytestmark = pytest.mark.filterwarnings("ignore:Profiler won't be using warmup")
PEAK = 1e12


def _all(steps):
    """A schedule that records every step, once."""
    return schedule(wait=0, warmup=0, active=steps, repeat=1)


def _mlp():
    return nn.Sequential(nn.Linear(37, 53), nn.ReLU(), nn.Linear(53, 11))


def _profiled(model, *steps, optimizer=None, **options):
    """The profile of steps, which are functions."""
    options = {"peak_flops": PEAK, "schedule": _all(len(steps))} | options
    with headroom.profile(model=model, optimizer=optimizer, **options) as prof:
        for step in steps:
            step()
            prof.step()
    return prof


def _row(prof, name):
    return next(row for row in prof.result.modules if row.name == name)


def _op(prof, name):
    return next(row for row in prof.result.ops if row.name == name)


def test_flops_are_those_counted_by_hand():
    model, x = _mlp(), torch.randn(5, 37)
    prof = _profiled(model, *[lambda: model(x).sum().backward()] * 2)
    first, second = 2 * 5 * 37 * 53, 2 * 5 * 53 * 11
    assert [s.model_flops for s in prof.result.steps] == [2 * first + 3 * second] * 2
    assert _row(prof, "0").total.model_flops == 2 * 2 * first  # no gradient of the batch
    assert _row(prof, "2").total.model_flops == 2 * 3 * second
    assert _row(prof, "").total.model_flops == 2 * (2 * first + 3 * second)
    totals = prof.result.totals
    assert totals["recomputed_flops"] == 0 == prof.result.outside.model_flops
    assert totals["flops_by_dtype"] == {"float32": 2 * (2 * first + 3 * second)}
    wanted = totals["model_flops"] / PEAK / (totals["wall_us"] * 1e-6)
    assert totals["mfu"] == totals["hfu"] == pytest.approx(wanted)
    assert prof.result.peak_rate.source == "given"


class Vision(nn.Module):
    """Convolutions of several kinds, attention, and products of batches."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.back = nn.ConvTranspose2d(8, 4, 3, dilation=2)
        self.depth = nn.Conv1d(4, 4, 5, groups=2)

    def forward(self, x):
        x = self.back(self.conv(x)).flatten(2)
        q = self.depth(x).reshape(2, 2, -1, 1)[:, :, :14].repeat(1, 1, 1, 8)
        return torch.baddbmm(q[0], F.scaled_dot_product_attention(q, q, q)[0], q[1].mT @ q[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_flops_are_those_of_torchs_counter(dtype):
    model = Vision().to(dtype)
    x = torch.randn(2, 3, 13, 17, dtype=dtype, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        model(x).sum().backward()
    prof = _profiled(model, lambda: model(x).sum().backward())
    step = prof.result.steps[0]
    counted = counter.get_total_flops()
    scores = 2 * (2 * 2) * 14 * 14 * 8
    if torch.ops.aten._scaled_dot_product_flash_attention_for_cpu not in flop_registry:
        counted += 7 * scores
    assert step.model_flops + step.recomputed_flops == counted > 0
    assert step.recomputed_flops == scores  # attention multiplies queries and keys again
    assert set(prof.result.flops_by_dtype) == {str(dtype).removeprefix("torch.")}


def _without_attention(monkeypatch):
    """Torch as of releases that have no formula for attention on a CPU."""
    registry = {op: f for op, f in flop_registry.items() if "dot_product" not in str(op)}
    monkeypatch.setattr(work, "flop_registry", registry)


@pytest.mark.parametrize("has_formula", [True, False])
def test_attention_is_counted_by_hand(has_formula, monkeypatch):
    """With fewer heads of keys than of queries, and values of another size."""
    if not has_formula:
        _without_attention(monkeypatch)
    q, k, v = (torch.randn(2, 6, 7, 8), torch.randn(2, 3, 11, 8), torch.randn(2, 3, 11, 8))
    model = nn.ParameterList([q, k, v])
    prof = _profiled(
        model,
        lambda: F.scaled_dot_product_attention(*model, enable_gqa=True).sum().backward(),
    )
    scores = 2 * (2 * 6) * 7 * 11 * 8
    step = prof.result.steps[0]
    assert (step.model_flops, step.recomputed_flops) == (6 * scores, scores)
    assert _op(prof, "aten::_scaled_dot_product_flash_attention_for_cpu").model_flops == 2 * scores
    assert not any("FLOPs" in note for note in prof.result.notes)


def test_products_without_a_formula_are_named(monkeypatch):
    model, x = nn.LSTM(5, 7), torch.randn(3, 2, 5)
    prof = _profiled(model, lambda: model(x)[0].sum().backward())
    if any(row.name == "aten::mkldnn_rnn_layer" for row in prof.result.ops):  # of oneDNN
        assert any("leave out aten::mkldnn_rnn_layer, " in note for note in prof.result.notes)

    matrix, vector = torch.randn(5, 7, requires_grad=True), torch.randn(7)
    prof = _profiled(nn.ParameterList([matrix]), lambda: (matrix @ vector).sum().backward())
    assert "FLOPs leave out aten::mv: no formula is known." in prof.result.notes

    def fails(*args, **options):
        raise TypeError

    monkeypatch.setitem(flop_registry, torch.ops.aten.addmm, fails)
    model, x = _mlp(), torch.randn(5, 37)
    prof = _profiled(model, lambda: model(x).sum().backward())
    assert "FLOPs leave out aten::addmm: no formula is known." in prof.result.notes


def test_our_ops_are_counted():
    a, b = torch.randn(7, 19, requires_grad=True), torch.randn(23, 19, requires_grad=True)
    model = nn.ParameterList([a, b])
    prof = _profiled(
        model, lambda: headroom.functional.gemm(a, b, transpose_b=True).sum().backward()
    )
    assert prof.result.steps[0].model_flops == 3 * 2 * 7 * 19 * 23
    assert _op(prof, "headroom::gemm").model_flops == 3 * 2 * 7 * 19 * 23
    assert _op(prof, "headroom::gemm").calls == 3


@pytest.mark.parametrize("loss", ["mean", "none", "into_grad", "distillation"])
def test_losses_that_keep_no_logits_compute_them_again(loss):
    hidden, target = torch.randn(7, 19, requires_grad=True), torch.arange(7)
    model = nn.Linear(19, 23, bias=False)
    teacher, head = torch.randn(7, 11), torch.randn(23, 11)

    def step():
        if loss == "distillation":
            tensors = hidden, model.weight, teacher, head
            losses = headroom.linear_distillation_loss(*tensors, reduction="none")
        elif loss == "into_grad":
            losses = headroom.linear_cross_entropy(
                hidden, model.weight, target, accumulate_into_grad=True
            )
        else:
            losses = headroom.linear_cross_entropy(hidden, model.weight, target, reduction=loss)
        losses.sum().backward()

    result = _profiled(model, step).result.steps[0]
    logits = 2 * 7 * 19 * 23
    of_teacher = 2 * 7 * 11 * 23 if loss == "distillation" else 0
    assert result.model_flops == 3 * logits + of_teacher
    assert result.recomputed_flops == (0 if loss == "mean" else logits + of_teacher)


def _checkpointed(model, x, **options):
    hidden = checkpoint(lambda x: model[1](model[0](x)), x, **options)
    return model[2](hidden).sum()


@pytest.mark.parametrize("reentrant", [False, True], ids=["hooks", "reentrant"])
def test_what_a_checkpoint_computes_again_is_told_apart(reentrant):
    model, x = _mlp(), torch.randn(5, 37, requires_grad=True)
    prof = _profiled(model, lambda: _checkpointed(model, x, use_reentrant=reentrant).backward())
    first, second = 2 * 5 * 37 * 53, 2 * 5 * 53 * 11
    step = prof.result.steps[0]
    assert (step.model_flops, step.recomputed_flops) == (3 * first + 3 * second, first)
    row = _row(prof, "0")
    assert (row.calls, row.recomputed_calls) == (1, 1)
    assert row.total.recompute_us > 0 and row.total.recomputed_flops == first
    assert row.total.model_flops == 3 * first
    assert _row(prof, "2").recomputed_calls == 0 == _row(prof, "2").total.recompute_us
    assert 0 < step.recompute_us < step.phases_us["backward"]
    assert prof.result.totals["hfu"] > prof.result.totals["mfu"]


def test_levels_of_blocks_do_the_same_work_and_compute_more_again():
    config = TransformerConfig(hidden_size=24, layers=2, heads=2, features=40, vocab_size=61)
    model, ids = Transformer(config), torch.randint(61, (2, 9))
    model_flops, again = {}, {}
    for level in LEVELS:
        model.save = level

        def run():
            F.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()

        with FlopCounterMode(display=False) as counter:
            run()
        step = _profiled(model, run).result.steps[0]
        model_flops[level], again[level] = step.model_flops, step.recomputed_flops
        assert step.model_flops + step.recomputed_flops == counter.get_total_flops()
    assert len(set(model_flops.values())) == 1
    scores = 2 * (2 * 2 * 2 * 9 * 9 * 12)  # both layers; see attention above
    mlp = 2 * (2 * 18 * 24 * 80)
    assert again["L0"] == again["L1"] == scores
    assert again["L2"] == scores + mlp
    assert again["L5"] > again["L4"] >= again["L3"] > again["L2"]


def test_phases_add_up_to_the_step_and_waiting_is_seen():
    model = _mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with headroom.profile(model=model, schedule=_all(1), peak_flops=PEAK) as prof:
        time.sleep(0.02)
        x = torch.randn(5, 37)
        out = model(x)
        time.sleep(0.01)
        out.sum().backward()
        time.sleep(0.04)
        optimizer.step()
        optimizer.zero_grad()
        prof.step()
    step = prof.result.steps[0]
    assert sum(step.phases_us.values()) == pytest.approx(step.wall_us, abs=0.01)
    for phase, slept in {"data": 20e3, "forward": 10e3, "other": 40e3}.items():
        assert step.phases_us[phase] >= slept, phase
    assert min(step.phases_us["backward"], step.phases_us["optimizer"]) > 0
    assert step.complete and step.loader_us == 0


def test_between_two_passes_of_a_step():
    """The model runs twice for one loss, then micro-batches follow, whose making is data."""
    model, x = _mlp(), torch.randn(5, 37)
    with headroom.profile(model=model, schedule=_all(1), peak_flops=PEAK) as prof:
        first = model(x)
        time.sleep(0.02)
        (first + model(x)).sum().backward()
        time.sleep(0.03)
        model(x).sum().backward()
        prof.step()
    phases = prof.result.steps[0].phases_us
    assert phases["forward"] >= 20e3 and 30e3 <= phases["data"]
    assert sum(phases.values()) == pytest.approx(prof.result.steps[0].wall_us, abs=0.01)


def test_the_loader_is_seen_between_micro_batches():
    model = _mlp()
    loader = DataLoader(torch.randn(12, 37), batch_size=4)
    with headroom.profile(model=model, schedule=_all(1), peak_flops=PEAK) as prof:
        for x in loader:
            model(x).sum().backward()
        prof.step()
    step = prof.result.steps[0]
    loads = [row for row in prof.result.ops if row.name.startswith("enumerate(DataLoader)")]
    assert loads[0].calls == 4  # the last finds that there are no more
    assert 0 < step.loader_us <= step.phases_us["data"] + step.phases_us["other"]
    assert step.model_flops == 3 * (2 * 2 * 4 * 37 * 53 + 3 * 2 * 4 * 53 * 11)


class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(2)])
        self.unused = nn.Linear(3, 3)

    def forward(self, x):
        for block in self.blocks:
            x = block(block(x))
        return x


def test_modules_have_their_names_calls_bytes_and_times():
    model = Named()
    optimizer = torch.optim.Adam(model.parameters())

    def step():
        model(torch.randn(4, 6)).sum().backward()
        optimizer.step()

    prof = _profiled(model, step, step, optimizer=optimizer)
    rows = {row.name: row for row in prof.result.modules}
    assert list(rows) == [name for name, _ in model.named_modules()]  # in order
    assert {name: row.calls for name, row in rows.items() if row.calls} == (
        {"": 2} | {f"blocks.{k}{inner}": 4 for k in (0, 1) for inner in ("", ".0", ".1")}
    )
    assert rows["blocks.1.1"].type == "Tanh" and rows["blocks.1"].type == "Sequential"
    assert rows["unused"].total.host_us == 0 and rows["unused"].parameter_bytes == 4 * 12
    assert rows["blocks"].parameter_bytes == 2 * 4 * 42
    for name in ("", "blocks", "blocks.0", "blocks.1"):
        inner = [r for n, r in rows.items() if n.startswith(f"{name}.".lstrip("."))] if name else []
        inner = inner or list(rows.values())[1:]
        own = rows[name].self
        for figure in ("forward_us", "backward_us", "model_flops", "allocated_bytes"):
            total = getattr(own, figure) + sum(getattr(r.self, figure) for r in inner)
            assert getattr(rows[name].total, figure) == pytest.approx(total), (name, figure)
    for name in ("blocks.0.0", "blocks.0.1", "blocks.1.0", "blocks.1.1"):
        assert min(rows[name].self.forward_us, rows[name].self.backward_us) > 0, name


def test_bytes_of_modules_are_those_of_their_results():
    model, x = _mlp(), torch.randn(5, 37)
    prof = _profiled(model, lambda: model(x).sum().backward())
    kept = {row.name: row.self.kept_bytes for row in prof.result.modules}
    assert kept == {"": -4 * 5 * 53, "0": 4 * 5 * 53, "1": 4 * 5 * 53, "2": 4 * 5 * 11}
    assert _row(prof, "").total.kept_bytes == 4 * 5 * (53 + 11)
    assert _row(prof, "").peak_bytes <= prof.result.memory["cpu"]["peak_bytes"]
    points = prof.result.memory["cpu"]["points"]
    assert max(live for _, live in points) == prof.result.memory["cpu"]["peak_bytes"]
    without = _profiled(model, lambda: model(x).sum().backward(), profile_memory=False)
    assert without.result.memory == {} and _row(without, "0").self.kept_bytes is None


def test_bytes_of_operations():
    x, y = torch.randn(7, 13), torch.randn(13)
    half = torch.randn(6, 5, dtype=torch.bfloat16)
    spread = torch.randn(1, 1).expand(40, 40)
    model = nn.LayerNorm(13)

    def step():
        torch.add(x, y)
        half.mul_(2)
        torch.sigmoid(spread)
        torch._foreach_neg_([half, half])
        torch.gt(x, 0)
        headroom.functional.rms_norm(x, y)
        x.view(-1)

    prof = _profiled(model, step)
    wanted = {
        "aten::add": 4 * (7 * 13 + 13 + 7 * 13),
        "aten::mul_": 2 * 2 * 30,
        "aten::sigmoid": 4 * (1 + 1600),
        "aten::_foreach_neg_": 2 * 2 * 2 * 30,
        "aten::gt": (4 + 1) * 7 * 13,
    }
    for name, size in wanted.items():
        row = _op(prof, name)
        assert (row.bytes, row.bytes_are) == (size, "counted"), name
        assert row.bytes_per_s == pytest.approx(size / (row.total_us * 1e-6)), name
    norm = _op(prof, "headroom::rms_norm")
    assert norm.bytes_are == "estimate"
    assert norm.bytes == 4 * (2 * 7 * 13 + 13 + 7)  # y and one number per row
    assert _op(prof, "aten::view").bytes is None


@pytest.mark.parametrize("make", [torch.optim.AdamW, headroom.optim.AdamW], ids=["torch", "ours"])
def test_bytes_of_an_optimizer_are_estimated(make):
    model = _mlp()
    optimizer = make(model.parameters())

    def step():
        model(torch.randn(5, 37)).sum().backward()
        optimizer.step()

    prof = _profiled(model, step, step, optimizer=optimizer)
    row = _op(prof, "Optimizer.step#AdamW.step")
    count = sum(p.numel() for p in model.parameters())
    states = sum(
        t.numel() * t.element_size()
        for state in optimizer.state.values()
        for t in state.values()
        if isinstance(t, torch.Tensor)
    )
    assert (row.calls, row.bytes_are) == (2, "estimate")
    assert row.bytes == 2 * (3 * 4 * count + 2 * states)
    assert _row(prof, "").parameter_bytes == 4 * count
    assert _row(prof, "").optimizer_bytes == states


def test_steps_compute_the_same_bits():
    def trained(profiled):
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(37, 53), nn.Dropout(0.3), nn.Linear(53, 11))
        optimizer = headroom.optim.AdamW(model.parameters())

        def step():
            checkpoint(model, torch.randn(5, 37), use_reentrant=False).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        if profiled:
            _profiled(model, step, step, step)
        else:
            for _ in range(3):
                step()
        return list(model.parameters())

    assert all(map(torch.equal, trained(True), trained(False)))


def test_patched_models():
    class Root(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.head = nn.RMSNorm(24), nn.Linear(24, 5)

        def forward(self, x):
            return self.head(self.norm(x))

    model = Root()
    headroom.patch(model)
    prof = _profiled(model, lambda: model(torch.randn(3, 24)).sum().backward())
    assert _row(prof, "norm").type == type(model.norm).__name__
    assert _row(prof, "norm").calls == 1 and _row(prof, "norm").total.backward_us > 0
    assert _op(prof, "headroom::rms_norm").calls == 1


@pytest.mark.parametrize("whole", [True, False], ids=["wrapper given", "model given"])
def test_compiled_models_are_seen_as_a_whole(whole, recwarn):
    torch._dynamo.reset()
    model = _mlp()
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(model, backend=backend, fullgraph=True)
    x = torch.randn(5, 37)
    compiled(x)
    prof = _profiled(compiled if whole else model, lambda: compiled(x).sum().backward())
    compiled(x)
    assert len(graphs) == 1  # the profile compiled nothing
    assert [row.name for row in prof.result.modules if row.calls] == [""]
    assert prof.result.steps[0].model_flops == 2 * 2 * 5 * 37 * 53 + 3 * 2 * 5 * 53 * 11
    assert "Compiled regions" in prof.result.notes[0]
    assert not [w for w in recwarn if "global hooks" in str(w.message)]


def test_published_and_measured_rates(monkeypatch):
    from headroom.profiling import rates

    assert rates.peak_rate(torch.device("cpu"), ["float32"], None).by_dtype["float32"] > 1e6
    device = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H100 80GB HBM3")
    found = rates.peak_rate(device, ["bfloat16", "float32"], None)
    assert (found.source, found.by_dtype["bfloat16"]) == ("published", 989.5e12)
    assert found.by_dtype["float32"] == 67e12
    matmul = torch.backends.cuda.matmul
    before, matmul.fp32_precision = matmul.fp32_precision, "tf32"
    try:
        assert rates.peak_rate(device, ["float32"], None).by_dtype["float32"] == 494.5e12
    finally:
        matmul.fp32_precision = before
    assert found.seconds({"bfloat16": 10**12, "float32": 0}) == pytest.approx(1 / 989.5)
    assert found.seconds({"float64": 1}) is None


def test_the_table_fits_a_terminal():
    model = nn.Sequential(*[copy.deepcopy(_mlp()) for _ in range(3)])
    for k in (1, 2):
        model[k] = nn.Sequential(nn.Linear(11, 37), *model[k])
    prof = _profiled(model, lambda: model(torch.randn(5, 37)).sum().backward())
    for width in (80, 120):
        for merge in (True, False):
            text = prof.table(width=width, merge=merge)
            lines = text.splitlines()
            module_lines = lines[lines.index("") :]
            assert max(map(len, module_lines)) <= width
            names = {line.split()[0] for line in module_lines if line.startswith("  ")}
            assert ("*.*" in names) == merge and ("1.0" in names) == (not merge)
    assert "forward" in str(prof) and "aten::addmm" in str(prof)
    assert "smaller" in prof.table(rows=1)
    assert prof.table(width=80) == prof.table(width=80, merge=True)


def _one_step(model):
    model(torch.randn(3, 37)).sum().backward()


def test_a_profiler_within_another_is_refused():
    """Also while the outer one's schedule waits: torch ends the process where both record."""
    model = _mlp()
    late = schedule(wait=2, warmup=0, active=1, repeat=1)
    for outer in (
        headroom.profile(model=model, schedule=late),
        torch.profiler.profile(schedule=late),
    ):
        with outer:
            with pytest.raises(RuntimeError, match="another profiler runs already"):
                with headroom.profile(model=model, schedule=_all(1)):
                    pass
            for _ in range(3):
                _one_step(model)
                outer.step()
    assert _profiled(model, lambda: _one_step(model)).result.steps


@pytest.mark.parametrize("waits", [0, 2])
def test_a_recording_that_another_disturbs_is_dropped(waits, tmp_path):
    model = _mlp()
    plan = schedule(wait=waits, warmup=0, active=2, repeat=1)
    with pytest.raises(RuntimeError, match="began or ended its recording within headroom.profile"):
        with headroom.profile(tmp_path / "p", model=model, schedule=plan) as prof:
            if waits:
                with headroom.memory.track(model):
                    _one_step(model)
                    prof.step()
            torch.autograd._disable_profiler()
            _one_step(model)
            prof.step()
    assert prof.files == [] and not nn.modules.module._global_forward_hooks
    assert _profiled(model, lambda: _one_step(model)).result.steps
