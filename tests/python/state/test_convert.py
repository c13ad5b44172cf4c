"""convert_state: against the libraries themselves where they are installed, else by the layouts
that they document."""

import copy
import math

import headroom
import pytest
import torch
from headroom.state.convert import LIBRARIES
from headroom.state.convert.codes import encode

from helpers.bits import assert_same_bits, same_bits
from helpers.conversions import (
    ADAMW,
    ADAMW8BIT,
    LR,
    SHAPES,
    assert_same_entries,
    clones,
    convert,
    parameters,
    run,
    tensors,
)
from helpers.roundtrip import through_file
from helpers.samples import FLOATS

FLOAT_ADAMS = ["headroom", "torch", "bitsandbytes", "apex", "deepspeed"]
EIGHT_BIT_ADAMS = ["headroom-8bit", "bitsandbytes-8bit", "bitsandbytes-8bit-flat", "torchao-8bit"]
# Those that step on the CPU. DeepSpeed compiles when it is first made.
DEEPSPEED = pytest.param("deepspeed", marks=pytest.mark.slow)
STEPPING_ADAMS = ["headroom", "torch", "bitsandbytes", DEEPSPEED, *EIGHT_BIT_ADAMS]


def optimizer_of(name, params, monkeypatch):
    """AdamW of a library, or a skip."""
    if name in ("headroom", "headroom-8bit", "torch"):
        modules = {"headroom": ADAMW, "headroom-8bit": ADAMW8BIT, "torch": torch.optim.AdamW}
        return modules[name](params, lr=LR, weight_decay=0.1)
    if name.startswith("bitsandbytes"):
        optim = pytest.importorskip("bitsandbytes").optim
        cls = optim.AdamW8bit if "8bit" in name else optim.AdamW
    elif name == "torchao-8bit":
        cls = pytest.importorskip("torchao.optim").AdamW8bit
        # The same arithmetic without a compilation for each shape.
        monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    else:
        cls = pytest.importorskip("deepspeed.ops.adam").DeepSpeedCPUAdam
    return cls(params, lr=LR, weight_decay=0.1)


# ---- Codes ---------------------------------------------------------------------------------------


def stored_by_the_kernel(x, block_size):
    """Codes and scales of x as a first moment and of its square as a second: betas of 0."""
    n = x.numel()
    codes = [torch.zeros(n, dtype=torch.uint8) for _ in range(2)]
    absmaxs = [torch.zeros(-(-n // block_size)) for _ in range(2)]
    lists = [[codes[0]], [absmaxs[0]], [codes[1]], [absmaxs[1]], [torch.zeros(())]]
    options = dict(lr=0.0, beta1=0.0, beta2=0.0, weight_decay=0.0, eps=1.0, block_size=block_size)
    headroom.functional.adamw8bit_([torch.zeros(n)], [x], *lists, **options)
    return codes, absmaxs


@pytest.mark.parametrize("block_size", [64, 256, 512])
def test_codes_are_those_that_the_kernel_stores(block_size):
    """Ties, zeros, denormal and huge scales, what is not finite, and a short last block."""
    generator = torch.Generator().manual_seed(2)
    spread = 10.0 ** (-8 * torch.rand(8 * 512, generator=generator))
    x = torch.randn(spread.shape, generator=generator) * spread
    values = headroom.functional.dynamic_map(True)
    x[512:767], x[767] = (values[1:] + values[:-1]) / 2, 1.0
    x[1024:1536] = 0
    x[1536:2048] *= 1e-39
    x[2048:2560] *= 1e20
    x[2600], x[3100] = math.inf, math.nan
    x = x[:-5]
    codes, absmaxs = stored_by_the_kernel(x, block_size)
    for is_signed, moment in ((True, x), (False, x * x)):
        ours = encode(moment, block_size, is_signed)
        i = int(not is_signed)
        assert torch.equal(ours.codes, codes[i])
        assert same_bits(ours.absmax, absmaxs[i]) or torch.equal(
            ours.absmax.nan_to_num(-1.0), absmaxs[i].nan_to_num(-1.0)
        )


@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "transposed"])
def test_float32_moments_step_as_the_codes_would(layout):
    """The parameter sees new moments in float32, so one step is the same to the bit."""
    params = parameters(shapes=[(16, 32, 3, 4)])
    memory = {"channels_last": (0, 2, 3, 1), "transposed": (3, 2, 1, 0)}.get(layout, (0, 1, 2, 3))
    back = [memory.index(i) for i in range(4)]
    params[0].data = params[0].data.permute(memory).contiguous().permute(back)
    params, codes = run(params, ADAMW8BIT(params, lr=LR))
    others = [torch.nn.Parameter(params[0].detach().clone())]
    floats = ADAMW(others, lr=LR)
    state, report = convert(codes, "headroom")
    assert report.is_lossless
    floats.load_state_dict(state)
    run(params, codes, 1)
    run(others, floats, 1)
    assert same_bits(params[0], others[0])
    if layout != "contiguous":  # whose blocks are others than bitsandbytes has
        state, report = convert(codes, "bitsandbytes-8bit")
        assert not report.is_lossless and all(map(torch.Tensor.is_contiguous, tensors(state)))
        assert max(loss.relative for loss in report.losses) < 0.01


# ---- There and back ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "source, via",
    [
        *[(ADAMW, name) for name in FLOAT_ADAMS],
        *[(torch.optim.AdamW, name) for name in FLOAT_ADAMS],
        *[(ADAMW8BIT, name) for name in EIGHT_BIT_ADAMS],
    ],
)
def test_there_and_back_is_the_same_to_the_bit(source, via):
    shapes = SHAPES
    if via == "torchao-8bit":  # whose tensors in 8 bits are whole blocks
        pytest.importorskip("torchao")
        shapes = SHAPES[::2]
    _, optimizer = run(params := parameters(shapes=shapes), source(params, lr=LR))
    home = {ADAMW: "headroom", ADAMW8BIT: "headroom-8bit"}.get(source, "torch")
    there, first = convert(optimizer, via)
    back, second = convert(through_file(there), home)
    assert first.is_lossless and second.is_lossless, f"{first}\n{second}"
    assert_same_entries(back, optimizer.state_dict())
    assert back["param_groups"][0]["lr"] == LR
    assert not {t.data_ptr() for t in tensors(there)} & {t.data_ptr() for t in tensors(params)}


@pytest.mark.parametrize("name", STEPPING_ADAMS)
@pytest.mark.parametrize("source", [ADAMW, ADAMW8BIT])
def test_the_target_goes_on_as_headroom_would(source, name, monkeypatch):
    """The library loads what was written and its next update is that of AdamW on those moments."""
    params, optimizer = run(ps := parameters(), source(ps, lr=LR, weight_decay=0.1))
    theirs, ours = clones(params), clones(params)
    target = optimizer_of(name, theirs, monkeypatch)
    state, report = convert(optimizer, name)
    assert report.is_lossless == (source is ADAMW8BIT or name not in EIGHT_BIT_ADAMS)
    target.load_state_dict(through_file(state))
    reference = ADAMW(ours, lr=1.0)
    reference.load_state_dict(convert(state, "headroom").state_dict)
    assert reference.param_groups[0]["lr"] == LR
    run(theirs, target, 1, seed=7)
    run(ours, reference, 1, seed=7)
    for a, b in zip(theirs, ours):
        torch.testing.assert_close(a, b, rtol=2.0**-22, atol=1e-5 * LR)


@pytest.mark.parametrize("name", STEPPING_ADAMS)
def test_headroom_goes_on_as_the_source_would(name, monkeypatch):
    params, optimizer = run(ps := parameters(), optimizer_of(name, ps, monkeypatch))
    for source in (optimizer, optimizer.state_dict()):
        ours = clones(params)
        resumed = ADAMW(ours, lr=1.0)
        state, report = convert(source, "headroom")
        assert report.is_lossless
        assert LIBRARIES[report.source].read is LIBRARIES[name].read
        if source is optimizer:  # a state dict does not always say
            assert state["param_groups"][0]["decoupled_weight_decay"] and not report.notes
        resumed.load_state_dict(copy.deepcopy(state))
        run(ours, resumed, 1, seed=7)
    run(theirs := params, optimizer, 1, seed=7)
    for a, b in zip(theirs, ours):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-4 * LR)


@pytest.mark.parametrize("to", EIGHT_BIT_ADAMS)
def test_blocks_of_another_size(to):
    """Stay what they are where they can, else are made anew; those asked for are made."""
    if to == "torchao-8bit":
        pytest.importorskip("torchao")
    _, optimizer = run(ps := parameters(shapes=SHAPES[::2]), ADAMW8BIT(ps, block_size=64))
    state, report = convert(optimizer, to)
    assert report.is_lossless == ("bitsandbytes" not in to)
    assert 5120 // (256 if "bitsandbytes" in to else 64) in {t.numel() for t in tensors(state)}
    if to == "headroom-8bit":
        state, report = convert(optimizer, to, block_size=512)
        assert state["param_groups"][0]["block_size"] == 512
        ADAMW8BIT(parameters(shapes=SHAPES[::2])).load_state_dict(state)
    assert max(loss.relative for loss in report.losses) < 0.01


def test_torch_adamw_resumes_in_8_bits_and_says_what_it_lost():
    params, optimizer = run(ps := parameters(), torch.optim.AdamW(ps, lr=LR))
    state, report = convert(optimizer, "headroom-8bit")
    kinds = {(loss.param, loss.name): loss.kind for loss in report.losses}
    assert kinds[0, "exp_avg"] == "rounded" and kinds[2, "exp_avg"] == kinds[0, "step"] == "none"
    for loss in report.losses:  # half the largest gap of the maps
        assert loss.relative <= {"exp_avg": 0.0071, "exp_avg_sq": 0.0036, "step": 0}[loss.name]
    moment = optimizer.state[params[0]]["exp_avg"]
    decoded = convert(state, "torch").state_dict["state"][0]["exp_avg"]
    worst = next(loss for loss in report.losses if loss.name == "exp_avg")
    assert worst.error == pytest.approx((decoded - moment).abs().max().item())
    assert "exp_avg: 1 kept; 2 rounded, by up to" in str(report)
    resumed = ADAMW8BIT(clones(params), lr=LR)
    resumed.load_state_dict(state)
    assert (state["state"][0]["exp_avg_sq"] == 0).sum() <= (
        optimizer.state[params[0]]["exp_avg_sq"] == 0
    ).sum()


@pytest.mark.parametrize("source", [torch.optim.AdamW, ADAMW8BIT])
def test_a_live_optimizer_shares_nothing_with_what_was_converted(source):
    params, optimizer = run(ps := parameters(), source(ps, lr=LR))
    state, _ = convert(optimizer, "headroom-8bit")
    before = copy.deepcopy(state)
    run(params, optimizer)
    assert_same_entries(state, before)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_what_a_loader_casts_is_in_the_report(dtype):
    params, optimizer = run(ps := parameters(dtype), ADAMW(ps, state_dtype=torch.float32))
    _, report = convert(optimizer, "torch")
    assert report.is_lossless == (dtype == torch.float32)
    state, again = convert(optimizer.state_dict(), "torch", param_dtype=dtype)
    assert again.losses == report.losses
    loaded = torch.optim.AdamW(clones(params))
    loaded.load_state_dict(state)
    assert_same_entries(loaded.state_dict(), state)


def test_options_of_groups():
    first, second = parameters(), parameters(seed=3)
    groups = [{"params": first, "lr": 0.5}, {"params": second, "weight_decay": 0.2}]
    optimizer = torch.optim.Adam(groups, lr=LR, betas=(0.8, 0.9), maximize=True)
    run([*first, *second], optimizer)
    optimizer.param_groups[0]["initial_lr"] = 0.7
    state, report = convert(optimizer, "bitsandbytes-8bit")
    assert (
        report.notes == ["bitsandbytes-8bit has no maximize, and the source was run with True"] * 2
    )
    assert state["param_groups"] == [
        dict(
            lr=lr,
            betas=(0.8, 0.9),
            eps=1e-8,
            weight_decay=decay,
            alpha=0.0,
            t_alpha=None,
            t_beta3=None,
            params=names,
            **more,
        )
        for lr, decay, names, more in (
            (0.5, 0, [0, 1, 2], {"initial_lr": 0.7}),
            (LR, 0.2, [3, 4, 5], {}),
        )
    ]
    back, report = convert(state, "torch")
    assert report.notes == ["the state does not say whether weight decay is Adam's or AdamW's"]
    assert back["param_groups"][0]["amsgrad"] is False


def test_amsgrad_is_kept_where_it_is_known():
    _, optimizer = run(ps := parameters(), torch.optim.AdamW(ps, lr=LR, amsgrad=True))
    for name in ("headroom", "headroom-8bit"):
        state, report = convert(optimizer, name)
        assert report.is_lossless and state["param_groups"][0]["amsgrad"]
        (ADAMW if name == "headroom" else ADAMW8BIT)(parameters()).load_state_dict(state)
    _, report = convert(optimizer, "bitsandbytes")
    dropped = [loss.name for loss in report.losses if loss.kind == "dropped"]
    assert dropped == ["amsgrad"] + ["max_exp_avg_sq"] * 3 and "amsgrad" in report.notes[0]


def test_apex_has_one_step_for_a_group():
    params = parameters()
    optimizer = torch.optim.AdamW(params, lr=LR)
    run(params, optimizer, 2)
    params[2].grad = None
    run(params[:2], optimizer, 1)
    state, report = convert(optimizer, "apex")
    assert [loss.kind for loss in report.losses if loss.name == "step"] == ["none"] * 2 + [
        "rounded"
    ]
    assert state["param_groups"][0]["step"] == 3 and set(state["state"][0]) == {
        "exp_avg",
        "exp_avg_sq",
    }


def test_steps_that_float32_cannot_count_and_parts_that_nobody_has():
    _, optimizer = run(ps := parameters(shapes=[(3,), (0, 5)]), ADAMW(ps))
    state = optimizer.state_dict()
    state["state"][0] |= {"step": torch.tensor(2.0**24 + 1, dtype=torch.float64), "mu_product": 0.5}
    losses = [loss for loss in convert(state, "torch")[1].losses if loss.kind != "none"]
    assert [(loss.name, loss.kind, loss.error) for loss in losses] == [
        ("step", "rounded", 1.0),
        ("mu_product", "dropped", 0.0),
    ]
    there, report = convert(state, "headroom-8bit", min_8bit_size=0)
    assert there["state"][1]["exp_avg_absmax"].numel() == 0
    assert there["state"][0]["step"] == 2**24 + 1


@pytest.mark.parametrize(
    "cls, options, to",
    [
        (headroom.optim.AdamW, {"maximize": True}, "apex"),
        (headroom.optim.AdamW, {"state_dtype": torch.bfloat16}, "torch"),
        (headroom.optim.AdamW, {"max_grad_norm": 1.0}, "torch"),
        (headroom.optim.AdamW8bit, {"min_8bit_size": 10}, "bitsandbytes-8bit"),
        (headroom.optim.AdamW8bit, {"nonfinite": "skip_step"}, "torchao-8bit"),
    ],
)
def test_options_that_the_target_lacks_are_a_loss(cls, options, to):
    if to.startswith("torchao"):
        pytest.importorskip("torchao")
    for given in (options, {}):
        param = torch.nn.Parameter(torch.ones(5000))
        optimizer = cls([param], **given)
        param.grad = torch.ones(5000)
        optimizer.step()
        for source in (optimizer, optimizer.state_dict()):
            report = headroom.state.convert_state(source, to).report
            dropped = [loss.name for loss in report.losses if loss.kind == "dropped"]
            assert dropped == list(given)
            assert report.is_lossless == (not given)
            assert all(f"{name}: 1 dropped" in str(report) for name in given)


@pytest.mark.parametrize("to", [*FLOAT_ADAMS, *EIGHT_BIT_ADAMS])
@pytest.mark.parametrize("cls, name", [(ADAMW, "headroom"), (ADAMW8BIT, "headroom-8bit")])
def test_states_on_the_host_are_converted_like_others(cls, name, to):
    """Into the form of another library, and what comes from it into a state on the host."""
    if to.startswith("torchao"):
        pytest.importorskip("torchao")
    found = []
    for offload in (None, "state"):
        torch.manual_seed(0)
        params, optimizer = run(ps := parameters(), cls(ps, lr=LR, offload=offload), 2)
        there = convert(optimizer, to).state_dict
        first = [x.clone() for x in tensors(there)]
        optimizer.load_state_dict(copy.deepcopy(convert(there, name).state_dict))
        run(params, optimizer, 1)
        found.append((first, params, optimizer.state_dict()))
    assert optimizer.offload_handle.memory().host > 0
    assert_same_bits(*(first + params for first, params, _ in found))
    assert_same_entries(*(state for _, _, state in found))
