"""The demo: every rung trains, resumes to the same bits, and its bytes are counted right."""

import errno
import gc
import json
import math
import os
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import headroom
import pytest
import torch
from headroom.state.file import StateFile
from headroom.state.tree import decode

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
sys.path.insert(0, str(EXAMPLES))

import chart  # noqa: E402
import convergence  # noqa: E402
import data  # noqa: E402
import ladder  # noqa: E402
import train as examples_train  # noqa: E402
from model import GPT, SIZES, HeadroomGPT, Size, renamed  # noqa: E402
from run import Run  # noqa: E402
from rungs import BETAS, RUNGS, chosen, size_of  # noqa: E402
from train import train  # noqa: E402


@pytest.fixture(autouse=True)
def torch_settings():
    """`train` is a program's main function and changes torch's settings for the whole process."""
    fill = torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = fill


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
            runs[rung] = folder, tiny(rung, folder, text, steps=6)
        return runs[rung]

    return run


def made(rung, result):
    """The rung that was trained, with what headroom.fit chose if it did."""
    return replace(RUNGS[rung], **(result["fit"] or {"changes": {}})["changes"])


@pytest.mark.parametrize("rung", RUNGS)
def test_every_rung_trains_and_counts(rung, whole):
    folder, result = whole(rung)
    assert json.loads((folder / "result.json").read_text()) == result
    assert len(result["losses"]) == 6 and all(0 < loss < 10 for loss in result["losses"])
    assert 0 < result["held_out_bits_per_byte"] < 10
    assert result["tokens_per_second"] > 0 and result["process_peak_bytes"] > 0
    used, counted = made(rung, result), result["most_bytes"]
    size = SIZES[size_of(used, "tiny")]
    shapes = {name: p.shape for name, p in GPT(size).named_parameters()}
    in_f32 = dict.fromkeys(shapes, used.weights == "float32")
    if used.save is None:
        in_f32 |= dict.fromkeys((name for name in shapes if "norm" in name), True)
    weights = [shapes[name].numel() * (4 if in_f32[name] else 2) for name in shapes]
    total = sum(shape.numel() for shape in shapes.values())
    sums = 4 * total if used.sum_in_f32 else 0  # beside the gradients of a micro-batch
    assert counted["parameters"] == sum(weights)
    gradients = sum(weights) + sums
    if (
        used.release and used.bucket_bytes == 0
    ):  # one at a time, beside what has been summed of the shared position weights
        assert max(weights) <= counted["gradients"] < sum(weights) / 4
    else:
        assert gradients <= counted["gradients"] <= 1.3 * gradients
    states = sum(state_bytes(used, shapes[name], in_f32[name]) for name in shapes)
    found = counted["optimizer_state"] + counted["master_weights"]
    assert states < found <= states + 8 * len(shapes)  # the steps
    held = found + counted["parameters"] + counted["gradients"]
    assert result["bytes_per_parameter"] == held / total
    assert sum(result["bytes"].values()) == result["peak_bytes"]
    error = result["predicted_peak_bytes"] / result["peak_bytes"] - 1
    assert abs(error) <= ladder.PREDICTION_ERROR
    assert sum(result["predicted_bytes"].values()) == result["predicted_peak_bytes"]
    blocks = used.save is not None and not used.release
    assert result["gradients_of_L0"] is (True if blocks else None)


def test_rungs_reach_the_same_loss_and_save_less(whole):
    results = {rung: whole(rung)[1] | {"title": rung} for rung in RUNGS}
    passed, verdict = ladder.same_loss(list(results.values()))
    assert passed, verdict
    assert verdict.count("same bits as L0") == 3  # L1, L2 and L5
    for result in [results.pop(rung) for rung in ("words", "words-loss")]:
        assert result["losses"] == pytest.approx(whole("words")[1]["losses"], abs=1e-4)
    del results["adafactor"]  # which is another training
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


# Of the rungs whose saved states are alike, one is quick.
RESUMED = ("torch", "L1", "everything", "release", "remainder", "adafactor", "fp16", "f32-sums")
RESUMED += ("fit",)


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


def test_data_is_split_by_file_and_repeats(tmp_path):
    for i in range(40):
        (tmp_path / f"{i}.txt").write_bytes(bytes([i + 1]) * 100)
    (tmp_path / "binary").write_bytes(b"\0\1" * 100)
    train_text, test_text = data.load(str(tmp_path), 16)
    sides = [set(t.tokens.tolist()) - {ord("\n")} for t in (train_text, test_text)]
    assert len(sides[0] - {ord("\n")}) == 37 and len(sides[1]) == 2  # file 9 is all line ends
    assert not sides[0] & sides[1]
    first, again = (data.batch(train_text, 0, 7, 4, 16) for _ in range(2))
    assert torch.equal(first[0], again[0]) and torch.equal(first[0][:, 1:], first[1][:, :-1])
    assert not torch.equal(first[0], data.batch(train_text, 0, 8, 4, 16)[0])
    assert not torch.equal(first[0], data.batch(train_text, 1, 7, 4, 16)[0])


def test_data_from_one_file_and_from_none(tmp_path):
    file = tmp_path / "text"
    file.write_bytes(bytes(range(200)) * 10)
    train_text, test_text = data.load(str(file), 16)
    assert len(train_text.tokens) == 1900 and len(test_text.tokens) == 100
    library, held_out = data.load(None, 256)
    assert len(library.tokens) > 1 << 20 and len(held_out.tokens) > 1 << 14
    with pytest.raises(FileNotFoundError, match="no such file"):
        data.load(str(tmp_path / "absent"), 16)
    with pytest.raises(ValueError, match="100 tokens of held-out text, but one sequence needs 257"):
        data.load(str(file), 256)


def report(title, loss, tolerance=0.01, **others):
    kinds = ("parameters", "optimizer_state", "gradients", "activations")
    return asdict(RUNGS.get(title, RUNGS["torch"])) | {
        "title": title,
        "size": "tiny",
        "vocab": 256,
        "losses": [8.0, 7.0],
        "gradients_of_L0": None,
        "fit": None,
        "step_seconds": 0.1,
        "held_out_bits_per_byte": loss,
        "tolerance": tolerance,
        "tokens_per_second": 1234.5,
        "peak_bytes": 10 << 20,
        "predicted_peak_bytes": 10 << 20,
        "process_peak_bytes": 12 << 20,
        "bytes": dict.fromkeys(headroom.memory.KINDS, 0)
        | {kind: (i + 1) << 20 for i, kind in enumerate(kinds)},
        "bytes_per_parameter": 16.04,
        "model_parameters": 1000,
        "batch": 4,
        "context": 32,
        "steps": 2,
        "device": "cpu",
        "seconds": 3.2,
        **others,
    }


def test_a_rung_is_titled_with_what_is_left_out_before_it():
    titles = {rung.key: rung.title for rung in chosen(["torch", "L0", "L5", "everything", "fp16"])}
    assert titles["torch"] == RUNGS["torch"].title
    assert titles["L0"] == "+ Headroom's AdamW, its blocks"
    assert titles["everything"] == "+ 8-bit moments, bf16 weights, micro-batches"
    assert titles["fp16"] == RUNGS["fp16"].title
    assert chosen(list(RUNGS)) == list(RUNGS.values())


@pytest.mark.parametrize("loss", [2.02, 1.98, float("nan"), float("inf")])
def test_ladder_fails_when_a_rung_reaches_another_loss(loss, tmp_path, monkeypatch, capsys):
    losses = {"torch": 2.0, "headroom": 2.005, "8bit": loss}
    monkeypatch.setattr(ladder, "run_rung", lambda rung, args: report(rung.key, losses[rung.key]))
    argv = ["ladder.py", "--out", str(tmp_path), "--rungs"]
    monkeypatch.setattr(sys, "argv", [*argv, "torch,headroom"])
    assert ladder.main() == 0
    assert "PASSED" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", [*argv, "torch,headroom,8bit"])
    assert ladder.main() == 1
    out = capsys.readouterr().out
    assert "FAILED" in out and out.count("OTHER LOSS") == 1


def test_ladder_fails_when_the_first_rung_diverged():
    assert not ladder.same_loss([report("torch", float("nan"))])[0]


def test_a_rung_is_compared_with_the_first_of_its_size():
    """The second of two words rungs reaches the loss of the first, far from that of bytes."""
    sized = {"size": "words-tiny", "vocab": 600}
    results = [
        report("torch", 5.0),
        report("L5", 5.0, peak_bytes=4 << 20),
        report("words", 3.0, peak_bytes=20 << 20, **sized),
        report("words-loss", 3.005, peak_bytes=5 << 20, **sized),
    ]
    passed, verdict = ladder.same_loss(results)
    assert passed and "torch, 5.0000 bits per byte, and of words, 3.0000" in verdict
    for bad, loss in ((2, math.nan), (3, 3.02), (3, 5.0)):
        changed = [dict(result) for result in results]
        changed[bad]["held_out_bits_per_byte"] = loss
        assert not ladder.same_loss(changed)[0]
    assert chart.shares(results) == [1, 0.4, 1, 0.25]
    assert ladder.least_peaks(results) == "torch 10 MiB -> 4 MiB; words 20 MiB -> 5 MiB"
    assert chart.shares(results[3:]) == [1]


def test_the_chart_has_a_panel_for_each_size(tmp_path, monkeypatch):
    figures, close = [], chart.plt.close
    monkeypatch.setattr(chart.plt, "close", figures.append)
    sized = {"size": "words-tiny", "vocab": 600}
    results = [report("torch", 5.0), report("L5", 5.0, peak_bytes=4 << 20)]
    results += [report("words", 3.0, peak_bytes=40 << 20, **sized)]
    for some in (results, results[:2], results[2:]):
        chart.draw(some, tmp_path / "chart.png")
    wide = [[axes.get_xlim()[1] for axes in figure.axes] for figure in figures]
    assert wide == [pytest.approx([10.4, 41.6]), [pytest.approx(10.4)], [pytest.approx(41.6)]]
    texts = [[text.get_text() for text in axes.texts] for axes in figures[0].axes]
    assert texts[0].count("100%") == 1 and "40%" in texts[0] and "100%" in texts[1]
    assert any("2 steps of 4 x 32 words (vocabulary: 600)" in text for text in texts[1])
    top = [text.get_text() for text in figures[2].texts]
    assert any("words (vocabulary: 600)" in text for text in top)
    for figure in figures:
        close(figure)


def test_ladder_fails_where_levels_differ_in_a_bit():
    exact = [report("torch", 2.0), report("L1", 2.0), report("L5", 2.0, gradients_of_L0=True)]
    passed, verdict = ladder.same_loss(exact)
    assert passed and "same bits as L1, the gradients of L0" in verdict
    for change in (
        {"losses": [8.0, 7.000001]},
        {"held_out_bits_per_byte": 2.000001},
        {"gradients_of_L0": False},
    ):
        passed, verdict = ladder.same_loss([*exact[:2], exact[2] | change])
        assert not passed and ("OTHER BITS" in verdict or "NOT the gradients of L0" in verdict)


@pytest.mark.parametrize("predicted", [10.4, 9.6, 10.6, 9.4])
def test_ladder_fails_when_a_peak_is_not_as_predicted(predicted, tmp_path, monkeypatch, capsys):
    made = {"torch": {}, "headroom": {"predicted_peak_bytes": int(predicted * 2**20)}}
    monkeypatch.setattr(
        ladder, "run_rung", lambda rung, args: report(rung.key, 2.0, **made[rung.key])
    )
    monkeypatch.setattr(
        sys, "argv", ["ladder.py", "--out", str(tmp_path), "--rungs", ",".join(made)]
    )
    wrong = predicted in (10.6, 9.4)
    assert ladder.main() == (1 if wrong else 0)
    out = capsys.readouterr().out
    assert ("OTHER PEAK THAN PREDICTED: headroom" in out) == wrong
    assert ("2 peaks are as predicted" in out) == (not wrong)


def test_table_holds_the_numbers():
    rows = ladder.table([report("torch", 2.0), report("a longer title", 1.5)]).splitlines()
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    assert len({len(row) for row in rows}) == 1  # aligned
    assert cells[0][:3] == ["rung", "time s", "held-out bits/byte"]
    numbers = ["3", "2.0000", "1,234", "16.04", "10.0", "10.0", "1.0", "2.0", "3.0", "4.0", "12.0"]
    assert cells[2][1:] == numbers
    assert cells[3][0] == "a longer title"


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
def test_short_programs(name, shown):
    assert len((EXAMPLES / name).read_text().splitlines()) < 40
    done = run_example(name)
    assert done.returncode == 0, done.stderr
    assert shown in done.stdout


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


@pytest.mark.parametrize("fails", [None, "bf16, Kahan", convergence.NEAREST])
def test_convergence_judges_every_mode_and_goes_on(fails, monkeypatch, tmp_path, capsys):
    """Modes that should fail diverge, those that should not are exact; one may do the opposite."""
    out, calls = tmp_path / "table.json", []

    def held_out(setting, rung, seed, *_):
        mode = next(m for m, r in setting.modes.items() if r is rung)
        calls.append(seed)
        return math.inf if (mode in setting.worse) != (mode == fails) else 2.0 + seed

    monkeypatch.setattr(convergence, "held_out", held_out)
    modes = sum(len(setting.modes) for setting in convergence.SETTINGS.values())
    for seeds in (1, 3):
        arguments = ["--steps", "2", "--seeds", str(seeds), "--out", str(out)]
        monkeypatch.setattr(sys, "argv", ["convergence.py", *arguments])
        with pytest.raises(SystemExit) as exit:
            convergence.main()
        assert exit.value.code == (fails is not None)
    assert sorted(calls) == [0] * modes + [1] * modes + [2] * modes  # none twice
    table = json.loads(out.read_text())["bits_per_byte"]
    assert table["heavy-tailed"]["AdamW8bit"] == [2.0, 3.0, 4.0]
    assert table["heavy-tailed"]["8-bit, code 0 allowed"] == [None] * 3
    text = capsys.readouterr().out
    assert "seeds of f32 differ by 2.000" in text
    assert ("NOT CLOSE" in text or "NOT VISIBLY WORSE" in text) == (fails is not None)
