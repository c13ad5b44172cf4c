"""The demo: every rung trains, resumes to the same bits, and its bytes are counted right."""

import errno
import gc
import json
import math
import os
import runpy
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import headroom
import pytest
import torch
from headroom.state.file import StateFile
from headroom.state.tree import decode

import convergence
import data
import experts
import ladder
import qlora
import train as examples_train
from helpers.empty_host import empty_host
from model import GPT, SIZES, HeadroomGPT, Size, renamed
from run import Run
from rungs import BETAS, RUNGS, size_of
from train import train

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A folder of small text files: quicker to read than the standard library."""
    folder = tmp_path_factory.mktemp("text")
    for i in range(40):
        lines = (f"def f{i}_{j}(x): return x + {i * j}\n" for j in range(40))
        (folder / f"part{i:02}.txt").write_text("".join(lines))
    return str(folder)


def tiny(rung, out, text, **kwargs):
    return train(RUNGS[rung], out, size="tiny", path=text, **kwargs)


def state_bytes(rung, shape, in_f32):
    """Of a parameter, without its step."""
    numel = shape.numel()
    if "Adafactor" in rung.optimizer:
        return 4 * (sum(shape) if len(shape) > 1 else numel)
    # 4,096 elements and more, which are whole blocks of 256 here, may have 8-bit moments.
    is_8bit = "8bit" in rung.optimizer and numel >= 4096
    moments = 2 * numel + numel // 256 * 8 if is_8bit else 8 * numel
    return moments + (2 * numel if "master" in rung.options and not in_f32 else 0)


@pytest.fixture(scope="module")
def whole(tmp_path_factory, text):
    """Trains a rung for six steps, once for all tests: its folder and its result."""
    runs = {}

    def run(rung):
        if rung not in runs:
            folder = tmp_path_factory.mktemp(rung)
            with empty_host():
                runs[rung] = folder, tiny(rung, folder, text, steps=6)
        return runs[rung]

    return run


def made(rung, result):
    """The rung that was trained, with what headroom.fit chose if it did."""
    return replace(RUNGS[rung], **(result["fit"] or {"changes": {}})["changes"])


# One of each model, of each kind of weights, and of each way to step.
QUICK = ("torch", "L0", "L5", "everything", "host", "release", "fp16", "words-loss", "fit")
SHOWN = (*QUICK, "qlora")


@pytest.mark.parametrize(
    "rung", [r if r in SHOWN else pytest.param(r, marks=pytest.mark.slow) for r in RUNGS]
)
def test_every_rung_trains_and_counts(rung, whole):
    folder, result = whole(rung)
    assert json.loads((folder / "result.json").read_text()) == result
    assert len(result["losses"]) == 6 and all(0 < loss < 10 for loss in result["losses"])
    assert 0 < result["held_out_bits_per_byte"] < 10
    assert result["tokens_per_second"] > 0 and result["process_peak_bytes"] > 0
    used, counted = made(rung, result), result["most_bytes"]
    size = SIZES[size_of(used, "tiny")]
    shapes = {name: p.shape for name, p in GPT(size).named_parameters()}
    if used.adapters is not None:
        return counts_of_adapters(result, shapes, used.adapters)
    in_f32 = dict.fromkeys(shapes, used.weights == "float32")
    if used.save is None:
        in_f32 |= dict.fromkeys((name for name in shapes if "norm" in name), True)
    weights = [shapes[name].numel() * (4 if in_f32[name] else 2) for name in shapes]
    total = sum(shape.numel() for shape in shapes.values())
    sums = 4 * total if used.sum_in_f32 else 0  # beside the gradients of a micro-batch
    assert counted["parameters"] == sum(weights)
    gradients = sum(weights) + sums
    if used.release and used.bucket_bytes == 0:
        # one at a time, beside what has been summed of the shared position weights
        assert max(weights) <= counted["gradients"] < sum(weights) / 4
    elif used.release:  # a bucket at a time, which may hold all of them
        assert max(weights) <= counted["gradients"] <= 1.3 * gradients
    else:
        assert gradients <= counted["gradients"] <= 1.3 * gradients
    states = sum(state_bytes(used, shapes[name], in_f32[name]) for name in shapes)
    found = counted["optimizer_state"] + counted["master_weights"]
    if used.offload:  # the ring is on the device, and all the rest in a file
        assert found % 512 == 0 and 0 < found < states <= result["host_bytes"]
        assert result["host_bytes"] <= states + 6 * 64 * len(shapes)
    else:
        assert states < found <= states + 8 * len(shapes) and result["host_bytes"] == 0
    assert result["host_bytes"] == result["predicted_host_bytes"]
    held = found + counted["parameters"] + counted["gradients"]
    assert result["bytes_per_parameter"] == held / total
    assert sum(result["bytes"].values()) == result["peak_bytes"]
    error = result["predicted_peak_bytes"] / result["peak_bytes"] - 1
    assert abs(error) <= ladder.PREDICTION_ERROR
    assert sum(result["predicted_bytes"].values()) == result["predicted_peak_bytes"]
    blocks = used.save is not None and not used.release
    assert result["gradients_of_L0"] is (True if blocks else None)


def counts_of_adapters(result, shapes, rank):
    """Of matrices in blocks, codes and scales are held, and adapters have gradients and moments."""
    matrices = {n: s for n, s in shapes.items() if n.startswith("blocks") and len(s) == 2}
    trained = sum(4 * rank * sum(shape) for shape in matrices.values())
    packed = sum(math.prod(s) // 2 + math.prod(s) // 64 for s in matrices.values())
    others = sum(4 * math.prod(shapes[name]) for name in shapes if name not in matrices)
    held = result["most_bytes"]["parameters"] - trained - others - packed
    assert 0 <= held <= len(matrices) * 64  # offsets and the scales of scales
    assert trained <= result["most_bytes"]["gradients"] <= 1.3 * trained
    assert result["most_bytes"]["optimizer_state"] <= 2.1 * trained
    error = result["predicted_peak_bytes"] / result["peak_bytes"] - 1
    assert abs(error) <= 0.001 and result["gradients_of_L0"]
    assert max(result["losses"]) < 6.5  # it goes on from the base: a new model has 8


def test_rungs_reach_the_same_loss(whole):
    results = {rung: whole(rung)[1] | {"title": rung} for rung in QUICK}
    passed, verdict = ladder.same_loss(list(results.values()))
    assert passed, verdict
    assert verdict.count("same bits as L0") == 1  # L5


@pytest.mark.slow
def test_all_rungs_reach_the_same_loss_and_save_less(whole):
    results = {rung: whole(rung)[1] | {"title": rung} for rung in RUNGS}
    passed, verdict = ladder.same_loss(list(results.values()))
    assert passed, verdict
    assert verdict.count("same bits as L0") == 3  # L1, L2 and L5
    for result in [results.pop(rung) for rung in ("words", "words-loss")]:
        assert result["losses"] == pytest.approx(whole("words")[1]["losses"], abs=1e-4)
    for other in ("adafactor", "qlora"):  # which are another training
        del results[other]
    for result in results.values():  # AdamW would hide a wrong scale of the loss from the above
        assert result["losses"] == pytest.approx(results["torch"]["losses"], abs=0.02)
    saved = {rung: result["most_bytes"]["activations"] for rung, result in results.items()}
    assert saved["headroom"] == saved["torch"]
    assert saved["torch"] > saved["L1"] > saved["L2"] > saved["L5"] > saved["everything"]
    assert 3.5 < saved["bf16"] / saved["everything"] <= 4  # in four micro-batches at this size
    assert saved["checkpoint"] < 0.8 * saved["torch"] / 4


def test_both_models_are_one_function():
    size = replace(SIZES["tiny"], heads=4)
    torch.manual_seed(3)
    plain = GPT(size)
    torch.manual_seed(3)
    blocks = HeadroomGPT(size, "L1")
    weights = blocks.state_dict()
    for name, value in plain.state_dict().items():
        assert torch.equal(value, weights.pop(renamed(name)))
    assert not weights
    text = torch.randint(256, (2, size.context + 1))
    losses = [model(text[:, :-1], text[:, 1:]) for model in (plain, blocks)]
    torch.testing.assert_close(*losses)
    for loss in losses:
        loss.backward()
    gradients = {name: p.grad for name, p in blocks.named_parameters()}
    for name, p in plain.named_parameters():
        torch.testing.assert_close(gradients[renamed(name)], p.grad, rtol=1e-4, atol=1e-6)


def assert_same_run(one, two):
    assert two["optimizer"]["param_groups"] == one["optimizer"]["param_groups"]
    assert two["scaler"] == one["scaler"]
    assert two["extra"]["losses"] == one["extra"]["losses"]
    got, wanted = ([r["model"], r["optimizer"]["state"], r["rng"]["torch"]] for r in (two, one))
    torch.testing.assert_close(got, wanted, rtol=0, atol=0)


def load(folder):
    with StateFile(folder / "checkpoint.safetensors") as file:
        return decode(file.document["tree"], file.read(file.entries, progress=False).__getitem__)


# Those that save a bit of everything: what each optimizer saves is asked in state/test_resume.py.
RESUMED = ("everything", "fp16", "fit", "qlora")


@pytest.mark.parametrize(
    "rung", [r if r in RESUMED else pytest.param(r, marks=pytest.mark.slow) for r in RUNGS]
)
def test_resume_continues_to_the_same_bits(rung, whole, tmp_path, text, monkeypatch):
    folder, result = whole(rung)
    choices = [result["fit"]]  # one for the first part, and none for the second
    monkeypatch.setattr(examples_train, "choose", lambda *_: choices.pop())
    tiny(rung, tmp_path, text, steps=3)
    parts = tiny(rung, tmp_path, text, steps=6, resume=True)
    assert_same_run(load(folder), load(tmp_path))
    for key in ("losses", "held_out_bits_per_byte", "bytes", "predicted_bytes"):
        assert parts[key] == result[key]


def test_resume_after_an_interruption(whole, tmp_path, text, monkeypatch):
    folder, _ = whole("headroom")
    step = Run.step

    def interrupted(self, text):
        if len(self.losses) == 5:
            raise KeyboardInterrupt
        step(self, text)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Run, "step", interrupted)
        tiny("headroom", tmp_path / "parts", text, steps=6, save_every=2)
    assert len(load(tmp_path / "parts")["extra"]["losses"]) == 4
    tiny("headroom", tmp_path / "parts", text, steps=6, resume=True)
    assert_same_run(load(folder), load(tmp_path / "parts"))


def test_resume_refuses_what_it_cannot_continue(tmp_path, text):
    tiny("headroom", tmp_path, text, steps=2)
    with pytest.raises(ValueError, match="differs in seed"):
        tiny("headroom", tmp_path, text, steps=4, seed=1, resume=True)
    with pytest.raises(ValueError, match="step 2, past --steps 1"):
        tiny("headroom", tmp_path, text, steps=1, resume=True)


def test_a_crash_while_saving_leaves_the_old_checkpoint(tmp_path, text, monkeypatch):
    tiny("headroom", tmp_path, text, steps=2)

    def crash(file):
        raise OSError(errno.ENOSPC, "disk full")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="disk full"):
        patch.setattr(os, "fsync", crash)
        tiny("headroom", tmp_path, text, steps=4, resume=True)
    assert len(load(tmp_path)["extra"]["losses"]) == 2


# Elements per token and block in multiples of the width, by the table of `headroom.nn.Block`, with
# four features per unit of width; and those that L5 computes again before it lets go of any: the
# norm's result, q, k and v, and the result of attention.
KEPT = {"L1": 2 + 2 + 2 + 4, "L2": 2 + 2 + 2, "L3": 2 + 1, "L4": 1 + 1, "L5": 1}
AGAIN_AT_L5 = 1 + 3 + 1


@pytest.mark.parametrize("level", KEPT)
def test_activations_of_blocks_are_those_of_their_documentation(level):
    size = Size(layers=6, width=128, heads=2, context=64, batch=2, lr=1e-3)
    model = HeadroomGPT(size, level)
    tokens = torch.randint(256, (size.batch, size.context))
    with headroom.memory.track(model, batch=tokens) as tracked:
        model(tokens, tokens).backward()
    saved = tracked.timeline.most_by_kind["activations"]
    widths = size.layers * KEPT[level]
    behind = 2 + 256 / size.width  # the inputs of the last norm and of the head, and the logits
    most = widths + max(behind, AGAIN_AT_L5 if level == "L5" else 0)
    statistics = 12 * (size.layers + 2) / 4 / size.width  # of norms, attention and loss
    found = saved / tokens.numel() / 4 / size.width
    assert most < found < most + 2 * statistics


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the resident peak is read from /proc")
def test_peak_memory_sees_a_passing_allocation():
    """In a process of its own, as every rung has: what other tests did to the allocator counts."""
    code = """
import peak, torch
measured = peak.PeakMemory(torch.device("cpu"))
kept = torch.ones(8 << 20, dtype=torch.uint8)
torch.ones(64 << 20, dtype=torch.uint8)
print(measured.read())
measured.restart()
print(measured.read())
"""
    line = [sys.executable, "-c", code]
    env = os.environ | ladder.ENVIRONMENT
    done = subprocess.run(line, cwd=EXAMPLES, env=env, capture_output=True, text=True, check=True)
    passing, after = map(int, done.stdout.split())
    assert 70 << 20 < passing < 90 << 20
    assert after < 30 << 20


def live_bytes(known):
    """Of all tensors that Python knows of and their gradients, but those in `known`."""
    tensors = dense_tensors()
    tensors += [t.grad for t in tensors if t.is_leaf and t.grad is not None]
    storages = [t.untyped_storage() for t in tensors]
    return sum({s.data_ptr(): s.nbytes() for s in storages if s.data_ptr() not in known}.values())


def dense_tensors():
    """Other tests leave sparse and fake ones, which have no storage to ask."""
    plain = torch.Tensor, torch.nn.Parameter
    found = [t for t in gc.get_objects() if type(t) in plain]
    return [t for t in found if t.layout == torch.strided and t.device.type == "cpu"]


@pytest.mark.parametrize(
    ("rung", "options", "most"),
    [
        ("bf16", {"master": "remainder16"}, 8.1),
        ("bf16", {"rounding": "stochastic"}, 6.1),
        ("release", {"master": "remainder16"}, 6.1),
        pytest.param("bf16", {"master": "remainder8"}, 7.1, marks=pytest.mark.slow),
        pytest.param("release", {"rounding": "stochastic"}, 4.1, marks=pytest.mark.slow),
    ],
)
def test_bytes_per_parameter_in_training(rung, options, most, text):
    """Weights, gradients and state, at every moment of a backward pass and after it. Of these
    parameters no one is large beside the others together, and a sequence is short."""
    text, _ = data.load(text, 2)
    gc.collect()
    known = {t.untyped_storage().data_ptr() for t in dense_tensors()}
    size = Size(layers=16, width=256, heads=4, context=2, batch=1, lr=1e-3)
    rung = replace(RUNGS[rung], options=BETAS | options)
    run = Run(rung, size, torch.device("cpu"), 0)
    run.step(text)
    peak = 0

    def sample(_):
        nonlocal peak
        peak = max(peak, live_bytes(known))

    parameters = dict(run.model.named_parameters())
    for name in ("head", "blocks.15.up", "blocks.6.qkv", "token"):
        parameters[renamed(f"{name}.weight")].register_hook(sample)
    run.step(text)
    sample(None)
    per_parameter = peak / sum(p.numel() for p in parameters.values())
    assert most - 1 < per_parameter <= most


def run_example(name, *args):
    command = [sys.executable, str(EXAMPLES / name), *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
def test_ladder_from_the_command_line(tmp_path, text):
    args = ("--size", "tiny", "--device", "cpu", "--data", text, "--out", tmp_path)
    done = run_example("ladder.py", *args, "--rungs", "torch,headroom", "--steps", 2)
    assert done.returncode == 0, done.stderr
    written = json.loads((tmp_path / "ladder.json").read_text())
    assert [r["key"] for r in written["rungs"]] == ["torch", "headroom"]
    assert (tmp_path / "ladder.md").read_text() in done.stdout and "PASSED" in done.stdout
    assert (tmp_path / "ladder.png").read_bytes().startswith(b"\x89PNG")
    assert all(headroom.latest(tmp_path / rung, verify=True) for rung in ("torch", "headroom"))
    refused = run_example("train.py", *args, "--steps", 2, "--seed", 1, "--resume")
    assert refused.returncode == 1 and "differs in seed" in refused.stderr
    assert "Traceback" not in refused.stderr


@pytest.mark.slow
def test_before_and_after_reach_the_same_loss():
    done = run_example("before_after.py")
    assert done.returncode == 0, done.stderr
    before, after = (float(line.split()[1]) for line in done.stdout.splitlines())
    assert after == pytest.approx(before, rel=1e-3)


@pytest.mark.parametrize(
    "name, shown",
    [
        ("swap_optimizer.py", "headroom: 0.0"),
        ("patch_model.py", "kept for the backward pass: 8.1 MiB, patched 0.4 MiB"),
        ("will_it_fit.py", "fits in 16 GiB: False"),
    ],
)
def test_short_programs(name, shown, capsys):
    assert len((EXAMPLES / name).read_text().splitlines()) < 40
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    assert shown in capsys.readouterr().out


def test_convergence_tells_a_second_moment_of_zero_from_others(monkeypatch, text):
    """With weights of 32 x 32 and so 8-bit everywhere; a few steps are enough to blow up."""
    monkeypatch.setattr(convergence, "SIZE", SIZES["tiny"])
    setting = replace(convergence.SETTINGS["heavy-tailed"], lr=SIZES["tiny"].lr)
    exact, *others = convergence.BIT8.values()
    rungs = [exact] + [replace(r, options=r.options | {"min_8bit_size": 0}) for r in others]
    f32, eight_bit, code_0 = (convergence.held_out(setting, r, 0, 12, text) for r in rungs)
    assert abs(eight_bit - f32) < 0.3 < code_0 - f32
    as_they_are = replace(setting, sigma=0.0)  # the gradients were widened above
    assert convergence.held_out(as_they_are, exact, 0, 12, text) != f32


def test_convergence_of_muon_is_that_of_torchs(monkeypatch, text):
    monkeypatch.setattr(convergence, "SIZE", SIZES["tiny"])
    setting = replace(convergence.SETTINGS["Muon"], lr=SIZES["tiny"].lr)
    modes = setting.modes.items()
    losses = {mode: convergence.held_out(setting, rung, 0, 12, text) for mode, rung in modes}
    control = losses.pop(convergence.ONE_STEP)
    assert max(losses.values()) - min(losses.values()) < 0.1
    assert min(abs(control - loss) for loss in losses.values()) > 1e-3


@pytest.fixture
def small_qlora(monkeypatch, tmp_path, text):
    config = headroom.nn.TransformerConfig(256, hidden_size=32, layers=2, heads=2, features=64)
    values = dict(CONFIG=config, CONTEXT=32, BASE_STEPS=8, LR=2e-2)
    for name, value in values.items():
        monkeypatch.setattr(qlora, name, value)
    arguments = ["--data", text, "--steps", "40", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["qlora.py", *arguments])
    return tmp_path / "adapter"


def test_qlora_from_the_weights_to_a_file_and_back(small_qlora, capsys):
    assert qlora.main() == 0
    shown = capsys.readouterr().out
    assert shown.count("PASSED") == 6 and "FAILED" not in shown and "loaded by PEFT" in shown
    assert {path.name for path in small_qlora.iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }


def test_qlora_without_peft(small_qlora, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "peft", None)
    assert qlora.main() == 0
    shown = capsys.readouterr().out
    assert shown.count("PASSED") == 5 and "PEFT is not installed: it does not load" in shown


def test_qlora_fails_where_nothing_is_learned_or_loaded(small_qlora, monkeypatch, capsys):
    def frozen(model, *arguments, **options):
        report = headroom.adapters.lora(model, *arguments, **options)
        for name, param in model.named_parameters():
            if ".lora_B." in name:
                param.register_hook(torch.zeros_like)
        return report

    monkeypatch.setattr(qlora.headroom, "lora", frozen)
    assert qlora.main() == 1
    assert "FAILED: the loss falls" in capsys.readouterr().out


def test_a_merge_of_another_scale_fails(small_qlora, monkeypatch, capsys):
    delta = headroom.nn.LoRALinear.delta
    monkeypatch.setattr(headroom.nn.LoRALinear, "delta", lambda *args: 0.99 * delta(*args))
    assert qlora.main() == 1
    assert "FAILED: merged" in capsys.readouterr().out


@pytest.mark.slow
def test_a_mixture_trains_in_4_bits(monkeypatch, tmp_path, text, capsys):
    sizes = dict(hidden_size=64, head_dim=16, num_hidden_layers=2, moe_intermediate_size=64)
    for name, value in dict(CONTEXT=32, BASE_STEPS=8, LR=1e-2, FALLS=0.2, NEAR=0.1).items():
        monkeypatch.setattr(experts, name, value)
    monkeypatch.setattr(experts, "CONFIG", experts.CONFIG | sizes | {"num_experts": 8})
    arguments = ["--data", text, "--steps", "30", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["experts.py", *arguments])
    assert experts.main() == 0
    shown = capsys.readouterr().out
    assert shown.count("PASSED") == 5 and "PEFT reads the adapters" in shown


@pytest.mark.slow
def test_convergence_of_adapters_is_that_of_peft(monkeypatch, text):
    convergence_adapters = pytest.importorskip("convergence_adapters")
    pytest.importorskip("bitsandbytes")
    monkeypatch.setattr(convergence_adapters, "BASE_STEPS", 4)
    convergence_adapters.base.cache_clear()
    for setting in convergence_adapters.SETTINGS.values():
        theirs, ours, control = (
            convergence_adapters.held_out(setting, mode, 0, 12, text)
            for mode in setting.modes.values()
        )
        assert abs(theirs - ours) < 2e-3 < 0.05 < control - ours
    convergence_adapters.base.cache_clear()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="limits what Linux counts")
def test_a_model_larger_than_its_memory_trains_where_its_weights_stream():
    done = run_example("larger_than_memory.py", "--hidden", 384)  # asserts the same
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("out of memory") == 2 and done.stdout.count("stream ") == 2


@pytest.mark.slow
@pytest.mark.gloo
def test_two_ranks_train_a_small_70b_as_one_does():
    pytest.importorskip("transformers")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += [str(EXAMPLES / "qlora_70b.py"), "--small"]
    two = subprocess.run(command, capture_output=True, text=True, timeout=300)
    one = run_example("qlora_70b.py", "--small")
    assert one.returncode == two.returncode == 0, one.stderr + two.stderr
    losses = [[float(x.split()[-1]) for x in done.stdout.splitlines()] for done in (one, two)]
    assert len(losses[0]) == 3 and losses[0] == pytest.approx(losses[1], abs=2e-3)
    assert losses[0][0] != losses[0][2]
