"""convert_state: states of Muon, whose other parameters have those of AdamW."""

import copy

import headroom
import pytest
import torch
from headroom.__main__ import main
from headroom.optim import Muon, Muon8bit
from torch import nn

from helpers.conversions import LR, clones, convert, parameters, run

MATRICES = ((80, 64), (70, 60), (33, 129))
COEFFICIENTS = (3.0, -4.0, 2.0)


class Experts(nn.Module):
    def __init__(self, stack):
        super().__init__()
        self.down_proj = nn.Parameter(stack)


def mixed(cls=Muon, dtype=torch.float32, **options):
    """An optimizer of matrices, one of them packed, of experts, of a convolution and of vectors,
    after a few steps."""
    torch.manual_seed(0)
    model = nn.ModuleDict(
        {
            "up": nn.Linear(64, 80),
            "qkv": nn.Linear(32, 99, bias=False),  # parts that do not begin at a block of 256
            "gate_up": nn.Linear(64, 128, bias=False),
            "conv": nn.Conv2d(8, 16, 3),
        }
    ).to(dtype)
    model["conv"].to(memory_format=torch.channels_last)
    model["experts"] = Experts(torch.randn(3, 16, 48).to(dtype))
    options |= {"min_8bit_size": 512} if cls is Muon8bit else {}
    optimizer = cls(model, lr=LR, split={"qkv": 3}, convolutions=True, **options)
    run(list(model.parameters()), optimizer)
    return model, optimizer


def resumed(model, cls, state, **options):
    """A fresh optimizer on copies of the parameters, with a state."""
    again = copy.deepcopy(model)
    options |= {"min_8bit_size": 512} if cls is Muon8bit else {}
    optimizer = cls(again, lr=1.0, split={"qkv": 3}, convolutions=True, **options)
    optimizer.load_state_dict(state)
    return again, optimizer


def same_steps(one, other):
    for model, optimizer in (one, other):
        run(list(model.parameters()), optimizer, 2, seed=7)
    for a, b in zip(one[0].parameters(), other[0].parameters(), strict=True):
        assert torch.equal(a, b)


def test_torch_and_back_is_the_same_to_the_bit():
    params = parameters(shapes=MATRICES)
    theirs = torch.optim.Muon(params, lr=LR, ns_coefficients=COEFFICIENTS, nesterov=False)
    run(params, theirs)
    source = theirs.state_dict()
    state, report = convert(source, "headroom")
    assert report.is_lossless and (report.source, report.target) == ("torch", "headroom")
    own = {k: v["momentum_buffer"].data_ptr() for k, v in source["state"].items()}
    assert {k: v["momentum_buffer"].data_ptr() for k, v in state["state"].items()} == own  # no copy
    optimizer = Muon(clones(params), lr=1.0, weight_decay=0.9)
    optimizer.load_state_dict(copy.deepcopy(state))
    (group,) = optimizer.param_groups
    assert (group["lr"], group["weight_decay"], group["nesterov"]) == (LR, 0.1, False)
    assert group["ns_coefficients"] == COEFFICIENTS and group["use_muon"]
    back, report = convert(optimizer, "torch")
    assert report.is_lossless and not report.notes
    again = torch.optim.Muon(clones(params), lr=1.0)
    again.load_state_dict(back)
    run(params, theirs, 2, seed=7)
    run(again.param_groups[0]["params"], again, 2, seed=7)
    for a, b in zip(params, again.param_groups[0]["params"], strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    "cls, dtype, options",
    [
        (Muon, torch.float32, {"normuon": 0.9}),
        (Muon, torch.bfloat16, {"master": "remainder16", "state_dtype": torch.bfloat16}),
        (Muon8bit, torch.float32, {}),
        (Muon8bit, torch.bfloat16, {"master": "remainder16", "normuon": 0.9}),
        (Muon8bit, torch.bfloat16, {"rounding": "stochastic", "block_size": 64}),
    ],
)
def test_to_the_same_class_nothing_changes(cls, dtype, options):
    model, optimizer = mixed(cls, dtype, **options)
    home = "headroom-8bit" if cls is Muon8bit else "headroom"
    state, report = convert(optimizer, home, min_8bit_size=512)
    assert report.is_lossless and not report.notes and report.source == home
    for name, value in optimizer.state_dict()["state"].items():
        for key, tensor in value.items():
            assert torch.equal(state["state"][name][key], tensor)
    same_steps((model, optimizer), resumed(model, cls, copy.deepcopy(state), **options))


def test_8_bits_are_those_of_a_step_and_lose_nothing_on_the_way_back():
    """Codes where Muon8bit has them: not of parts that do not begin at a block."""
    model, optimizer = mixed(normuon=0.9)
    state, report = convert(optimizer, "headroom-8bit", min_8bit_size=512)
    rounded = {loss.param for loss in report.losses if loss.kind == "rounded"}
    assert max(loss.relative for loss in report.losses) < 0.0072
    assert not [loss.name for loss in report.losses if loss.kind == "dropped"]
    again, resumed_8bit = resumed(model, Muon8bit, copy.deepcopy(state), normuon=0.9)
    native = mixed(Muon8bit, normuon=0.9)[1]
    for param, other in zip(
        (p for group in resumed_8bit.param_groups for p in group["params"]),
        (p for group in native.param_groups for p in group["params"]),
    ):
        wanted = {k: v.dtype for k, v in native.state[other].items()}
        assert {k: resumed_8bit.state[param][k].dtype for k in wanted} == wanted
    run(list(again.parameters()), resumed_8bit, 2)
    names = [n for group in optimizer.param_groups for n in group["param_names"]]
    assert "qkv.weight" not in {names[key] for key in rounded} >= {"up.weight", "conv.weight"}
    back, report = convert(state, "headroom")
    assert report.is_lossless
    for key, entry in optimizer.state_dict()["state"].items():
        for name, value in entry.items():
            largest = float(value.abs().max())
            torch.testing.assert_close(back["state"][key][name], value, rtol=0, atol=largest / 128)


def test_parts_of_muon_that_torch_lacks():
    _, optimizer = mixed(normuon=0.9)
    with pytest.raises(ValueError, match="torch.optim.Muon has no AdamW: convert two state dicts"):
        convert(optimizer, "torch")
    whole = optimizer.state_dict()
    parts = []
    for is_muon in (True, False):
        groups = [group for group in whole["param_groups"] if group["use_muon"] is is_muon]
        keys = {key for group in groups for key in group["params"]}
        state = {key: whole["state"][key] for key in keys}
        parts.append(convert({"state": state, "param_groups": groups}, "torch"))
    (matrices, report), (others, _) = parts
    dropped = {loss.name for loss in report.losses if loss.kind == "dropped"}
    assert dropped == {"row_var", "normuon", "split"}
    assert "torch has no normuon, and the source was run with 0.9" in report.notes
    params = [nn.Parameter(torch.ones(value["momentum_buffer"].shape).flatten(1))
              for value in matrices["state"].values()]  # fmt: skip
    assert len(params) == 5 and all("use_muon" not in g for g in matrices["param_groups"])
    adamw = torch.optim.AdamW([nn.Parameter(torch.ones_like(e["exp_avg"]))
                               for e in others["state"].values()])  # fmt: skip
    adamw.load_state_dict(others)
    for library in ("bitsandbytes", "apex", "torchao-8bit"):
        with pytest.raises(ValueError, match=f"{library} has no muon: states of it convert betwe"):
            convert(optimizer, library)


@pytest.mark.parametrize(
    "given, wanted, names",
    [
        ("jordan", (3.4445, -4.7750, 2.0315), set()),
        ([COEFFICIENTS] * 5, COEFFICIENTS, set()),
        ("you_jiacheng", (4.0848, -6.8946, 2.9270), {"ns_coefficients"}),
    ],
)
def test_torch_has_three_coefficients(given, wanted, names):
    params = parameters(shapes=MATRICES)
    _, optimizer = run(params, Muon(params, lr=LR, ns_coefficients=given))
    state, report = convert(optimizer, "torch")
    assert state["param_groups"][0]["ns_coefficients"] == wanted
    assert {loss.name for loss in report.losses if loss.kind == "dropped"} == names
    assert bool(report.notes) == bool(names)


def test_checkpoints_of_keller_jordans_muon():
    """Groups of ``SingleDeviceMuonWithAuxAdam`` have few options, and states the same keys."""
    params = parameters(shapes=MATRICES)
    _, theirs = run(params, torch.optim.Muon(params, lr=LR))
    vector = nn.Parameter(torch.ones(5))
    _, adam = run([vector], torch.optim.AdamW([vector], lr=0.5))
    state = dict(theirs.state_dict()["state"]) | {3: dict(adam.state_dict()["state"][0], step=3)}
    groups = [
        {"lr": LR, "momentum": 0.95, "weight_decay": 0.0, "use_muon": True, "params": [0, 1, 2]},
        {"lr": 0.5, "betas": (0.9, 0.95), "eps": 1e-10, "weight_decay": 0.0, "use_muon": False,
         "params": [3]},
    ]  # fmt: skip
    made, report = convert({"state": state, "param_groups": groups}, "headroom-8bit")
    assert {loss.kind for loss in report.losses} == {"none", "rounded"}
    ours, own = clones(params), nn.Parameter(torch.ones(5))
    optimizer = Muon8bit(
        [{"params": ours, "use_muon": True}, {"params": [own], "use_muon": False}], lr=1.0
    )
    optimizer.load_state_dict(made)
    assert [group["lr"] for group in optimizer.param_groups] == [LR, 0.5]
    assert optimizer.param_groups[1]["eps"] == 1e-10 and optimizer.state[own]["step"] == 3
    assert optimizer.state[ours[0]]["momentum_buffer"].dtype == torch.uint8


def test_the_command_converts_a_state_file(tmp_path, capsys):
    model, optimizer = mixed()
    headroom.save_state(tmp_path / "in.safetensors", optimizer=optimizer, rng=False)
    out = tmp_path / "out.safetensors"
    command = ["convert", str(tmp_path / "in.safetensors"), str(out), "--to", "headroom-8bit"]
    assert main([*command, "--min-8bit-size", "512"]) == 0
    assert "headroom to headroom-8bit:" in capsys.readouterr().out
    made = Muon8bit(model, lr=1.0, split={"qkv": 3}, convolutions=True)
    headroom.load_state(out, optimizer=made, rng=False)
    assert made.state[model["up"].weight]["momentum_buffer"].dtype == torch.uint8
    assert made.param_groups[0]["lr"] == LR
