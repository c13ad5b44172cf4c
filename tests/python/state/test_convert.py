"""convert_state: against the libraries themselves where they are installed, else by the layouts
that they document."""

import copy
import math

import headroom
import pytest
import torch
from headroom.__main__ import main
from headroom.state.convert import LIBRARIES
from headroom.state.convert.codes import encode

from helpers.bits import assert_same_bits, same_bits
from helpers.roundtrip import through_file
from helpers.samples import FLOATS

ADAMW, ADAMW8BIT = headroom.optim.AdamW, headroom.optim.AdamW8bit
convert = headroom.optim.convert_state

SHAPES = (
    (80, 64),
    (70, 60),
    (37,),
)  # whole blocks of 256, a short last block, too small for 8 bits
LR = 1e-2
FLOAT_ADAMS = ["headroom", "torch", "bitsandbytes", "apex", "deepspeed", "flashoptim-float"]
EIGHT_BIT_ADAMS = ["headroom-8bit", "bitsandbytes-8bit", "bitsandbytes-8bit-flat", "torchao-8bit"]
# Those that step on the CPU. DeepSpeed compiles when it is first made.
DEEPSPEED = pytest.param("deepspeed", marks=pytest.mark.slow)
STEPPING_ADAMS = ["headroom", "torch", "bitsandbytes", DEEPSPEED, *EIGHT_BIT_ADAMS]


def parameters(dtype=torch.float32, shapes=SHAPES, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in shapes]


def run(params, optimizer, steps=3, seed=1):
    """Steps with gradients that spread over three powers of ten."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for param in params:
            scale = 10.0 ** -(3 * torch.rand(param.shape, generator=generator))
            grad = torch.randn(param.shape, generator=generator) * scale
            param.grad = torch.empty_like(param).copy_(grad)
        optimizer.step()
    return params, optimizer


def clones(params):
    return [torch.nn.Parameter(p.detach().clone()) for p in params]


def tensors(value):
    """All tensors in a state dict."""
    if isinstance(value, torch.Tensor):
        parts = [getattr(value, name) for name in getattr(value, "tensor_attrs", ())]
        return [part for part in parts if isinstance(part, torch.Tensor)] or [value]
    if isinstance(value, (dict, list, tuple)):
        inner = [value[key] for key in sorted(value)] if isinstance(value, dict) else value
        return [tensor for each in inner for tensor in tensors(each)]
    return []


def assert_same_entries(left, right):
    """Of two state dicts, to the bit."""
    assert left["state"].keys() == right["state"].keys()
    for key, entry in left["state"].items():
        assert entry.keys() == right["state"][key].keys()
    assert_same_bits(tensors(left["state"]), tensors(right["state"]))


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
    assert report.notes == ["bitsandbytes-8bit has no maximize, which the source was run with"] * 2
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
    assert dropped == ["max_exp_avg_sq"] * 3 and "amsgrad" in report.notes[0]


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


# ---- Old forms -----------------------------------------------------------------------------------


def old_bitsandbytes(params, block_size, qmap=None):
    """A state as bitsandbytes wrote it before 0.44: flat, with blocks of 2048."""
    generator = torch.Generator().manual_seed(0)
    state = {}
    for i, param in enumerate(params):
        blocks = -(-param.numel() // block_size)
        state[i] = {"step": 5}
        for j, is_signed in ((1, True), (2, False)):
            state[i][f"state{j}"] = torch.randint(
                1, 256, param.shape, dtype=torch.uint8, generator=generator
            )
            state[i][f"absmax{j}"] = torch.rand(blocks, generator=generator)
            state[i][f"qmap{j}"] = (
                headroom.functional.dynamic_map(is_signed) if qmap is None else qmap
            )
    group = dict(
        lr=LR, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, params=[*range(len(params))]
    )
    return {"state": state, "param_groups": [group]}


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


# ---- Bad inputs ----------------------------------------------------------------------------------


def without(name, index=0):
    def change(state):
        del state["state"][index][name]

    return change


def with_value(name, value):
    def change(state):
        state["state"][1][name] = value

    return change


BAD = [
    ("headroom-8bit", "nowhere", None, "there is no 'nowhere'; the libraries are headroom"),
    ("headroom-8bit", "torch-adafactor", None, "Adam is not Adafactor"),
    ("headroom-8bit", "torch", without("step"), "parameter 0 has no 'step'"),
    (
        "headroom-8bit",
        "torch",
        without("exp_avg_absmax"),
        "parameter 0 has an 'exp_avg' of torch.uint8, without scales",
    ),
    ("headroom", "torch", without("exp_avg", 2), "parameter 2 has moments ['exp_avg_sq']"),
    ("headroom", "torch", with_value("exp_avg", torch.zeros(3)), "of shapes [(3,), (70, 60)]"),
    ("headroom-8bit", "torch", with_value("exp_avg_absmax", torch.zeros(3)), "has 3 scales"),
    ("bitsandbytes-8bit", "torch", without("step"), "parameter 0 has no 'step'"),
    ("headroom", "torch", with_value("step", torch.tensor(-1.0)), "parameter 1 has a step of -1.0"),
    ("headroom", "torch", with_value("step", 1e300), "a step of 1e+300, wanted a whole number"),
    ("headroom", "torch", with_value("step", 2.5), "a step of 2.5, wanted a whole number"),
    ("headroom", "torch", with_value("step", math.nan), "a step of nan, wanted a whole number"),
    ("headroom", "torch", with_value("step", True), "a step of True, wanted a number"),
    ("headroom", "torch", with_value("step", torch.ones(2)), "parameter 1 a Tensor"),
    ("headroom", "torch", with_value("exp_avg", "x"), "an 'exp_avg' of str, without scales"),
    ("headroom", "torch", with_value("exp_avg_sq", torch.full((70, 60), -1.0)), "with negative"),
    ("headroom", "torch", with_value("exp_avg_sq", torch.full((70, 60), math.nan)), "or NaN"),
    ("headroom", "headroom-8bit", with_value("exp_avg", torch.full((70, 60), math.inf)), "8 bits"),
    ("headroom-8bit", "torch", with_value("exp_avg_absmax", torch.full((17,), math.nan)), "scales"),
    ("headroom-8bit", "torch", lambda s: s["param_groups"][0].update(block_size=0), "blocks of 0"),
    ("headroom", "torch", lambda s: s["param_groups"][0].pop("lr"), "group 0 has no 'lr'"),
    ("headroom", "torch", lambda s: s["param_groups"][0].update(lr=math.nan), "an lr of nan"),
    ("headroom", "torch", lambda s: s["param_groups"][0].pop("params"), "with a list 'params'"),
    ("headroom", "torch", lambda s: s["param_groups"].append(3), "group 1 must be a dict"),
    ("headroom", "torch", lambda s: s["param_groups"][0]["params"].append(0), "0 is in the groups"),
    ("headroom", "torch", lambda s: s["state"].update({9: {"step": 1}}), "a state of 9"),
    ("headroom", "torch", lambda s: s.pop("param_groups"), "'state' and 'param_groups'"),
]


@pytest.mark.parametrize("name, to, change, message", BAD)
def test_bad_states_are_named_and_left_as_they_are(name, to, change, message):
    _, optimizer = run(ps := parameters(), ADAMW8BIT(ps) if "8bit" in name else ADAMW(ps))
    state = convert(optimizer, name).state_dict
    if change:
        change(state)
    before = copy.deepcopy(state)
    with pytest.raises(ValueError) as error:
        convert(state, to)
    assert message in str(error.value)
    assert state.keys() == before.keys()
    assert_same_entries(state, before)


def test_other_bad_inputs():
    _, optimizer = run(ps := parameters(), ADAMW(ps))
    state = optimizer.state_dict()
    with pytest.raises(ValueError, match="block_size must be one of"):
        convert(state, "headroom-8bit", block_size=100)
    for wrong in ("256", 256.0, torch.tensor(256), [256]):
        with pytest.raises(ValueError, match="block_size must be one of"):
            convert(state, "headroom-8bit", block_size=wrong)
    for wrong in (-1, 0.5, None):
        with pytest.raises(ValueError, match="min_8bit_size must be a number of elements"):
            convert(state, "headroom-8bit", min_8bit_size=wrong)
    for wrong in ("bfloat16", torch.int8):
        with pytest.raises(ValueError, match="param_dtype must be a floating-point dtype"):
            convert(state, "torch", param_dtype=wrong)
    for wrong in (3, ps[0]):
        with pytest.raises(ValueError, match="params must be parameters"):
            convert(state, "torch", params=wrong)
    with pytest.raises(ValueError, match="params: 1 is a str, not a tensor"):
        convert(state, "torch", params=[ps[0], "x", ps[2]])
    for wrong in (None, [], 3, {"state": {}, "param_groups": None}):
        with pytest.raises(ValueError, match="'state'"):
            convert(wrong, "torch")
    with pytest.raises(ValueError, match="parameter 1 is a int, not a dict"):
        convert(state | {"state": state["state"] | {1: 7}}, "torch")
    for wrong in (["torch"], None, {}):
        with pytest.raises(ValueError, match="there is no .*; the libraries are"):
            convert(state, wrong)
    with pytest.raises(ValueError, match="there is no 'x'"):
        convert(state, "torch", from_="x")
    with pytest.raises(
        ValueError, match=r"parameter 0 has moments of shape \(80, 64\), the parameter \(37,\)"
    ):
        convert(state, "torch", params=ps[::-1])
    with pytest.raises(ValueError, match="the groups have 3 parameters, params 2"):
        convert(state, "torch", params=ps[:2])
    with pytest.raises(ValueError, match="no known library has states with the keys"):
        convert(torch_sgd(), "torch")
    lion = old_bitsandbytes(ps, 256)
    del lion["state"][0]["state2"]
    with pytest.raises(ValueError, match="not Adam or AdamW"):
        convert(lion, "torch")


def test_memory_that_has_been_freed_is_refused():
    """As FSDP frees it. (Reading it, or printing it, ends the process.)"""
    _, optimizer = run(ps := parameters(), ADAMW(ps))
    freed = torch.ones(70, 60)
    counter = freed[0, 0]
    freed.untyped_storage().resize_(0)
    for change in (with_value("exp_avg", freed), with_value("step", counter)):
        state = optimizer.state_dict()
        state["state"] = {key: dict(entry) for key, entry in state["state"].items()}
        change(state)
        with pytest.raises(ValueError, match="parameter 1 has a tensor whose memory has been fr"):
            convert(state, "torch")


def torch_sgd():
    _, optimizer = run(ps := parameters(), torch.optim.SGD(ps, lr=1, momentum=0.9))
    return optimizer.state_dict()


def test_an_optimizer_without_states_gives_its_options():
    state, report = convert(torch.optim.AdamW(parameters(), lr=LR), "headroom-8bit")
    assert state["state"] == {} and report.is_lossless
    optimizer = ADAMW8BIT(parameters())
    optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["lr"] == LR


# ---- The command line ----------------------------------------------------------------------------


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
    (tmp_path / "out.pt").write_bytes(b"precious")
    before = sorted(tmp_path.iterdir())
    for name, message in (
        ("missing", "there is no"),
        ("garbage", "cannot be loaded"),
        ("empty", "0 of the state of an optimizer"),
        ("sgd", "no known library has states"),
    ):
        arguments = [str(tmp_path / f"{name}.pt"), str(tmp_path / "out.pt"), "--to", "torch"]
        assert main(["convert", *arguments]) == 1
        assert message in capsys.readouterr().err
    assert (tmp_path / "out.pt").read_bytes() == b"precious"
    assert sorted(tmp_path.iterdir()) == before
