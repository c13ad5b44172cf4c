"""The benchmarks: that they run, and that contenders do the same work."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import headroom
import pytest
import torch

ROOT = Path(__file__).resolve().parents[3]
sys.path.append(str(ROOT))

from benchmarks import __main__ as command  # noqa: E402
from benchmarks import adamw, adamw8bit, linear_cross_entropy, unscale_norm  # noqa: E402
from benchmarks._limits import Rotation  # noqa: E402
from benchmarks.harness import Unavailable  # noqa: E402

# Without those that compare bytes, or settings.
TIMED = [stem for stem in command.STEMS if stem not in ("fit", "forecast", "loader", "plan")]
# Whose peers or cases take long.
SLOW = {"adafactor", "adamw8bit", "block", "gemm", "offload", "profile", "snapshot", "weights"}


@pytest.fixture
def one_thread():
    """The command sets how many threads torch uses."""
    threads = torch.get_num_threads()
    yield ["--threads", "1"]
    torch.set_num_threads(threads)


@pytest.mark.slow
def test_the_command_runs_by_itself(tmp_path):
    line = [sys.executable, "-m", "benchmarks", "update_scale", "--quick"]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_memory_of_losses_is_saved_where_no_folder_is(tmp_path, monkeypatch):
    def risen(dtype):
        return {"name": str(dtype), "gradients": 1, "bytes": {"headroom": 1}, "bars": []}

    path = tmp_path / "results" / "memory.json"
    monkeypatch.setattr(linear_cross_entropy, "risen", risen)
    monkeypatch.setattr(sys, "argv", ["linear_cross_entropy", "--json", str(path)])
    linear_cross_entropy.main()
    assert [case["name"] for case in json.loads(path.read_text())["cases"]] == [
        "torch.float32",
        "torch.bfloat16",
    ]


@pytest.mark.parametrize(
    "stem", [pytest.param(s, marks=pytest.mark.slow) if s in SLOW else s for s in TIMED]
)
def test_quick_run_covers_every_case(stem, device, tmp_path, one_thread, capsys, monkeypatch):
    # torchao compiles for a minute.
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    path = tmp_path / "results.json"
    line = [stem, "--quick", "--device", device, "--json", str(path), *one_thread]
    assert command.main(line) == 0
    printed = capsys.readouterr().out
    saved = json.loads(path.read_text())
    cases = importlib.import_module(f"benchmarks.{stem}").cases
    expected = [case.name for case in cases(torch.device(device), quick=True)]
    assert [case["name"] for case in saved["cases"]] == expected
    for case in saved["cases"]:
        assert f"\n{case['name']}: " in printed
        for name, result in case["contenders"].items():
            assert "unavailable" in result or result["seconds"]["median"] > 0, (case["name"], name)
        rival = case["contenders"][case["against"]]
        assert rival["ratio"]["median"] > 0
        if case["work"]:
            ours = case["contenders"][case["subject"]]
            assert ours["rate"] == pytest.approx(case["work"] / ours["seconds"]["median"])
            assert ours["fraction"] == pytest.approx(ours["rate"] / case["limit"]["rate"])
    assert saved["machine"]["threads"] == 1
    assert saved["versions"]["torch"] == torch.__version__
    assert isinstance(saved["versions"]["build_info"], dict)


def reference(data, step):
    """One AdamW step in float64."""
    h = adamw.HYPER
    p, g, m, v = (t[0].double() for t in (data.params, data.grads, data.exp_avgs, data.exp_avg_sqs))
    m, v = m.lerp(g, 1 - h["beta1"]), v * h["beta2"] + g * g * (1 - h["beta2"])
    update = m / (1 - h["beta1"] ** step) / ((v / (1 - h["beta2"] ** step)).sqrt() + h["eps"])
    return p * (1 - h["lr"] * h["weight_decay"]) - h["lr"] * update


@pytest.mark.parametrize(
    "contender",
    [
        adamw.headroom_op,
        adamw.torch_fused,
        adamw.deepspeed_cpu,
        adamw.torch_foreach,
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_contenders_do_the_same_work(contender, dtype, device, monkeypatch):
    monkeypatch.setitem(adamw.HYPER, "lr", 0.1)  # moves bf16 parameters by more than a rounding
    data = adamw.Layout(((1000,),), dtype, dtype).allocate(torch.device(device))
    before, expected = data.params[0].clone(), reference(data, step=2)
    try:
        contender(Rotation([data])).call()
    except Unavailable as reason:
        pytest.skip(str(reason))
    moved = (data.params[0] - before).abs().max().item()
    assert moved > 0.01
    error = (data.params[0].double() - expected).abs().max().item()
    # Values below 1.5: two roundings; DeepSpeed's loop rounds more often.
    roundings = 8 if contender is adamw.deepspeed_cpu else 2
    assert error <= roundings * torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_8bit_op_does_the_work_of_adamw(dtype, device, monkeypatch):
    """On the moments that codes and scales stand for."""
    monkeypatch.setitem(adamw8bit.HYPER, "lr", 0.1)
    monkeypatch.setitem(adamw.HYPER, "lr", 0.1)
    data = adamw8bit.Layout(((1000,),), dtype).allocate(torch.device(device))
    scales = [absmax[0].repeat_interleave(256)[:1000].double() for absmax in (data[3], data[5])]
    maps = [headroom.functional.dynamic_map(signed).to(device).double() for signed in (True, False)]
    codes = data.exp_avgs[0], data.exp_avg_sqs[0]
    m, v = (values[c.int()] * scale for values, c, scale in zip(maps, codes, scales))
    wide = adamw.Data(data.params, data.grads, [m], [v], [], [])
    before, expected = data.params[0].clone(), reference(wide, step=2)
    adamw8bit.headroom_op(Rotation([data])).call()
    assert (data.params[0] - before).abs().max() > 0.01
    error = (data.params[0].double() - expected).abs() / (expected - before).abs().clamp(min=1)
    assert error.max() <= 2 * torch.finfo(dtype).eps


@pytest.mark.parametrize(
    "contender",
    [
        adamw.headroom_step,
        lambda data: adamw.torch_step(data, fused=True),
        lambda data: adamw.torch_step(data, foreach=True),
        adamw8bit.headroom_step,
        pytest.param(adamw8bit.torchao_step, marks=pytest.mark.slow),  # compiles
        adamw8bit.bitsandbytes_step,
    ],
)
def test_steps_move_parameters_by_their_defaults(contender, device):
    """From moments of zero: by lr against the sign of the gradient, less the decay."""
    lr, decay = 1e-3, 1e-2  # the defaults of all
    data = adamw8bit.Layout(((5000,),) * 2, torch.float32).allocate(torch.device(device))
    before = [param.detach().clone() for param in data.params]
    try:
        contender(Rotation([data])).call()
    except Unavailable as reason:
        pytest.skip(str(reason))
    for param, grad, old in zip(data.params, data.grads, before):
        wanted = old * (1 - lr * decay) - lr * grad.sign()
        assert (param.detach() - wanted).abs().max() < 1e-3 * lr


NORM_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


@pytest.mark.parametrize("dtype", NORM_TOLERANCE)
@pytest.mark.parametrize(
    "contender",
    [
        unscale_norm.headroom_norm,
        unscale_norm.torch_norm,
        unscale_norm.headroom_clip,
        unscale_norm.torch_clip,
        unscale_norm.torch_clip_loop,
    ],
)
def test_contenders_measure_the_same_norm(contender, dtype, device):
    data = unscale_norm.Layout(((1000,),) * 3, dtype).allocate(torch.device(device))
    before = [grad.double().clone() for grad in data.grads]
    expected = torch.cat(before).norm().item()
    norm = contender(Rotation([data])).call().item()
    assert norm == pytest.approx(expected, rel=NORM_TOLERANCE[dtype])
    if "clip" in contender.__name__ and dtype == torch.float32:
        for grad, old in zip(data.grads, before):
            ratio = grad.double() / old
            assert (ratio - unscale_norm.SHRINK).abs().max() < 1e-6


@pytest.mark.parametrize("contender", [unscale_norm.headroom_unscale, unscale_norm.torch_unscale])
def test_unscaling_contenders_write(contender, device):
    data = unscale_norm.Layout(((1000,),) * 3, torch.float32).allocate(torch.device(device))
    before = [grad.clone() for grad in data.grads]
    contender(Rotation([data])).call()
    for grad, old in zip(data.grads, before):
        torch.testing.assert_close(grad, old / unscale_norm.SCALE, rtol=1e-6, atol=0)
        assert (grad != old).any()


@pytest.mark.parametrize(
    "contender, written",
    [
        (unscale_norm.headroom_step, False),
        (unscale_norm.headroom_explicit_step, True),
        (lambda data: unscale_norm.torch_step(data, fused=True), True),
    ],
)
def test_steps_move_parameters(contender, written, device):
    data = unscale_norm.Layout(((1000,),) * 3, torch.float32).allocate(torch.device(device))
    call = contender(Rotation([data])).call
    params = [param.detach().clone() for param in data.params]
    grads = [grad.clone() for grad in data.grads]
    call()
    for param, old in zip(data.params, params):
        moved = old * (1 - unscale_norm.LR * 1e-2) - param.detach()
        assert moved.min() > 0.9 * unscale_norm.LR  # an early step of Adam, all gradients > 0
    assert all((grad != old).any().item() == written for grad, old in zip(data.grads, grads))


def same_work():
    for stem in TIMED:
        work = getattr(importlib.import_module(f"benchmarks.{stem}"), "SAME_WORK", None)
        for contender in work.contenders if work else ():
            for k in range(len(work.layouts)):
                yield pytest.param(work, contender, k, id=f"{stem}-{contender.__name__}-{k}")


@pytest.mark.parametrize("work, contender, k", list(same_work()))
def test_contenders_of_a_stem_do_the_same_work(work, contender, k, device):
    data = work.layouts[k].allocate(torch.device(device))
    before = [tensor.clone() for tensor in work.left(data)]
    expected = work.expected(data)
    try:
        contender(Rotation([data])).call()
    except Unavailable as reason:
        pytest.skip(str(reason))
    for got, wanted, old in zip(work.left(data), expected, before):
        assert (got.double() - wanted).abs().max() <= work.tolerance
        assert (got != old).any()


@pytest.mark.parametrize("stem", TIMED)
def test_what_is_compared_first_is_what_a_user_calls(stem):
    """A row of an op alone is named so, and stands beside the call, or in a case of ops alone."""
    for case in importlib.import_module(f"benchmarks.{stem}").cases(
        torch.device("cpu"), quick=True
    ):
        names = list(case.setup(torch.device("cpu")))
        alone = [name for name in names if name.endswith("op only")]
        if case.subject == "headroom":
            assert names[0] == "headroom" and not case.against.endswith("op only"), case.name
        elif alone:
            assert alone == names == [case.subject, case.against], case.name
        else:  # a model at each level
            assert {case.subject, case.against} < set(names), case.name
