"""convert_state: old forms, weights of 16 bits, FlashOptim, Adafactor."""

import copy

import headroom
import pytest
import torch

from helpers.bits import assert_same_bits, same_bits
from helpers.conversions import (
    ADAMW,
    ADAMW8BIT,
    LR,
    assert_same_entries,
    clones,
    convert,
    old_bitsandbytes,
    parameters,
    run,
)
from helpers.samples import FLOATS

# ---- Old forms -----------------------------------------------------------------------------------


@pytest.mark.parametrize("qmap", [None, torch.linspace(-1, 1, 256)], ids=["", "other map"])
@pytest.mark.parametrize("block_size", [256, 2048])
def test_old_states_of_bitsandbytes(block_size, qmap):
    """Blocks and maps that are not ours are decoded by what they are."""
    source = old_bitsandbytes(parameters(shapes=[(90, 100)]), block_size, qmap)
    entry = source["state"][0]
    state, report = convert(source, "torch")
    for name, j, is_signed in (("exp_avg", 1, True), ("exp_avg_sq", 2, False)):
        values = headroom.functional.dynamic_map(is_signed) if qmap is None else qmap
        scales = entry[f"absmax{j}"].repeat_interleave(block_size)[:9000].view(90, 100)
        wanted = values[entry[f"state{j}"].int()] * scales
        assert same_bits(state["state"][0][name], wanted)
    _, report = convert(source, "headroom-8bit")
    assert report.is_lossless == (block_size == 256 and qmap is None)


# ---- Weights of 16 bits, and FlashOptim ----------------------------------------------------------


def test_flashoptims_moments_follow_its_formulas():
    """Groups of 32, softsign codes, square roots, scales of float16 (arXiv:2602.23349)."""
    _, optimizer = run(ps := parameters(shapes=[(80, 64), (37,)]), ADAMW(ps, lr=LR))
    state, report = convert(optimizer, "flashoptim")
    for entry, ours in zip(state["state"].values(), optimizer.state.values()):
        assert entry["step"].dtype == torch.int64
        m, v = entry["exp_avg::quantized"], entry["exp_avg_sq::quantized"]
        assert (m.dtype, v.dtype) == (torch.int8, torch.uint8)
        for codes, name, most in ((m, "exp_avg", 127), (v, "exp_avg_sq", 255)):
            scales = entry[f"{name}::scales"]
            assert scales.dtype == torch.float16
            assert scales.numel() == -(-codes.numel() // 32)
            scale = scales.double().repeat_interleave(32)[: codes.numel()].view(codes.shape)
            x = ours[name].double() if name == "exp_avg" else ours[name].double().sqrt()
            y = codes.double() / most
            wanted = x / scale
            wanted = 2 * wanted / (1 + wanted.abs()) if name == "exp_avg" else wanted
            assert ((y - wanted).abs() <= (0.5 + 1e-3 * most) / most).all() or name != "exp_avg"
            assert not ((codes == 0) & (x > 0) & (name == "exp_avg_sq")).any()
    back, again = convert(state, "headroom")
    assert again.source == "flashoptim" and again.is_lossless
    assert_same_entries(convert(back, "flashoptim").state_dict, state)
    assert max(loss.relative for loss in report.losses) < 0.02


@pytest.mark.parametrize("dtype", FLOATS[1:], ids=str)
@pytest.mark.parametrize("name", ["flashoptim", "flashoptim-float"])
def test_flashoptims_states_pass_through_its_loader(name, dtype):
    """Which is torch's and casts all that is not an integer to the parameter's dtype."""
    params, optimizer = run(ps := parameters(dtype), ADAMW(ps, master="f32"))
    state, report = convert(optimizer, name)
    assert state["param_groups"][0]["master_bytewidth"] == 4
    loader = torch.optim.Optimizer(clones(params), {"lr": LR})
    loader.load_state_dict(state)
    passed = convert(loader.state_dict(), "headroom", params=params, from_=name).state_dict
    masters = [loss for loss in report.losses if loss.name == "master"]
    assert len(masters) == 3 and all(loss.relative <= 2.0**-23 for loss in masters)
    back, report = convert(state, "headroom", params=params)
    assert back["param_groups"][0]["master"] == "f32"
    if name == "flashoptim":  # which does not let the loader cast moments of float32 either
        assert_same_entries(passed, back)
    loaded = ADAMW(clones(params))
    loaded.load_state_dict(back)
    for p, q in zip(params, loaded.param_groups[0]["params"]):
        torch.testing.assert_close(
            optimizer.state[p]["master"], loaded.state[q]["master"], rtol=2.0**-22, atol=0
        )


@pytest.mark.parametrize("mode", ["remainder16", "remainder8", "kahan"])
def test_what_completes_weights_goes_along(mode):
    options = {"rounding": "kahan"} if mode == "kahan" else {"master": mode}
    params, optimizer = run(ps := parameters(torch.bfloat16), ADAMW(ps, lr=LR, **options))
    weights = headroom.optim.master_weights(optimizer)
    state, report = convert(optimizer, "headroom-8bit")
    assert all(loss.kind == "none" for loss in report.losses if "exp_avg" not in loss.name)
    loaded = ADAMW8BIT(clones(params))
    loaded.load_state_dict(state)
    assert_same_bits(
        headroom.optim.master_weights(loaded).values(),
        headroom.optim.master_weights(optimizer).values(),
    )
    state, report = convert(optimizer, "flashoptim-float")
    assert state["param_groups"][0]["master_bytewidth"] == (3 if mode == "remainder8" else 4)
    back, _ = convert(state, "headroom", params=params)
    for i, param in enumerate(params):
        torch.testing.assert_close(
            back["state"][i]["master"], weights[param], rtol=2.0**-15, atol=0
        )
    _, report = convert(optimizer, "torch")
    assert [loss.kind for loss in report.losses].count("dropped") == 3
    _, report = convert(optimizer.state_dict(), "flashoptim")
    assert [loss.kind for loss in report.losses].count("dropped") == 3  # without the parameters


# ---- Adafactor -----------------------------------------------------------------------------------


def test_adafactor_goes_on_in_the_other_library():
    """With the same rule but for the epsilons, torch's bounding what transformers' adds."""
    optimization = pytest.importorskip("transformers.optimization")
    params, optimizer = run(ps := parameters(), torch.optim.Adafactor(ps))
    before = copy.deepcopy(optimizer.state_dict())
    state, report = convert(optimizer, "transformers-adafactor")
    assert report.is_lossless and not report.notes
    theirs = clones(params)
    other = optimization.Adafactor(theirs)
    other.load_state_dict(copy.deepcopy(state))
    ours = clones(params)
    mine = headroom.optim.Adafactor(ours, semantics="hf")
    mine.load_state_dict(copy.deepcopy(state))
    back, report = convert(mine, "torch-adafactor")
    assert report.is_lossless
    assert_same_entries(back, before)
    assert back["param_groups"] == before["param_groups"]
    run(params, optimizer, 1, seed=7)
    run(theirs, other, 1, seed=7)
    run(ours, mine, 1, seed=7)
    for a, b, c in zip(params, theirs, ours):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(c, b, rtol=1e-5, atol=1e-6)
    back, report = convert(other, "torch-adafactor")
    torch.testing.assert_close(back["state"], optimizer.state_dict()["state"], rtol=1e-5, atol=1e-9)


def test_adafactors_options_that_one_does_not_have():
    source = torch.optim.Adafactor(parameters(), lr=1e-3, weight_decay=0.1)
    run(source.param_groups[0]["params"], source, 1)
    state, report = convert(source, "transformers-adafactor")
    group = state["param_groups"][0]
    assert (group["lr"], group["relative_step"], group["eps"]) == (1e-3, False, (1e-30, 1e-3))
    assert len(report.notes) == 2
    group["beta1"] = 0.9
    for entry in state["state"].values():
        entry["exp_avg"] = torch.zeros(1)
    _, report = convert(state, "torch-adafactor")
    assert [loss.name for loss in report.losses if loss.kind == "dropped"] == ["exp_avg"] * 3
