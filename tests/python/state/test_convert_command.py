"""The command `headroom convert`."""

import headroom
import pytest
import torch
from headroom.__main__ import main

from helpers.conversions import (
    ADAMW,
    ADAMW8BIT,
    LR,
    SHAPES,
    assert_same_entries,
    parameters,
    run,
    torch_sgd,
)


@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
@pytest.mark.parametrize("to", ["headroom-8bit", "bitsandbytes-8bit", "torchao-8bit", "torch"])
def test_the_command_converts_files(to, suffix, tmp_path, capsys):
    if to == "torchao-8bit":
        pytest.importorskip("torchao")
    _, optimizer = run(ps := parameters(shapes=SHAPES[::2]), ADAMW8BIT(ps, lr=LR))
    torch.save(optimizer.state_dict(), tmp_path / "in.pt")
    out = tmp_path / f"out.{suffix}"
    if to == "torchao-8bit" and suffix == "safetensors":
        assert main(["convert", str(tmp_path / "in.pt"), str(out), "--to", to]) == 1
        assert "'optimizer.state.0.exp_avg' is a OptimState8bit" in capsys.readouterr().err
        return
    assert main(["convert", str(tmp_path / "in.pt"), str(out), "--to", to]) == 0
    assert f"headroom-8bit to {to}:\n    step: 2 kept" in capsys.readouterr().out
    assert main(["convert", str(out), str(tmp_path / "back.pt"), "--to", "headroom-8bit"]) == 0
    back = torch.load(tmp_path / "back.pt", weights_only=True)
    if suffix == "safetensors" and to == "headroom-8bit":
        loaded = ADAMW8BIT(parameters(shapes=SHAPES[::2]))
        headroom.load_state(out, optimizer=loaded, rng=False)
        assert_same_entries(loaded.state_dict(), optimizer.state_dict())
    if to != "torch":
        assert_same_entries(back, optimizer.state_dict())
    ADAMW8BIT(parameters(shapes=SHAPES[::2])).load_state_dict(back)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["back.pt", "in.pt", out.name]


@pytest.mark.parametrize("key", [[], ["--key", "a.optimizer"]], ids=["found", "given"])
def test_the_rest_of_a_checkpoint_is_kept(key, tmp_path):
    _, optimizer = run(ps := parameters(), ADAMW(ps, lr=LR))
    checkpoint = {"optimizer": optimizer.state_dict(), "model": {"w": torch.ones(3)}, "epoch": 4}
    torch.save({"a": checkpoint, "b": 1} if key else checkpoint, tmp_path / "in.pt")
    arguments = [str(tmp_path / "in.pt"), str(tmp_path / "out.pt"), "--to", "torch", *key]
    assert main(["convert", *arguments]) == 0
    loaded = torch.load(tmp_path / "out.pt", weights_only=True)
    loaded = loaded["a"] if key else loaded
    assert loaded["epoch"] == 4 and torch.equal(loaded["model"]["w"], torch.ones(3))
    assert loaded["optimizer"]["state"][0]["step"].dtype == torch.float32


def test_a_command_that_fails_writes_nothing(tmp_path, capsys):
    (tmp_path / "garbage.pt").write_bytes(b"garbage")
    torch.save({"a": 1}, tmp_path / "empty.pt")
    torch.save(torch_sgd(), tmp_path / "sgd.pt")
    lion = {"state": {0: {"step": 1, "state1": torch.ones(3)}}, "param_groups": [{"params": [0]}]}
    torch.save(lion, tmp_path / "lion.pt")
    (tmp_path / "out.pt").write_bytes(b"precious")
    before = sorted(tmp_path.iterdir())
    for name, message in (
        ("missing", "there is no"),
        ("garbage", "cannot be loaded"),
        ("empty", "0 of the state of an optimizer"),
        ("sgd", "apex has no sgd"),
        ("lion", "give --rule as 'sgd' or 'lion'"),
    ):
        arguments = [str(tmp_path / f"{name}.pt"), str(tmp_path / "out.pt"), "--to", "apex"]
        assert main(["convert", *arguments]) == 1
        assert message in capsys.readouterr().err
    assert (tmp_path / "out.pt").read_bytes() == b"precious"
    assert sorted(tmp_path.iterdir()) == before
