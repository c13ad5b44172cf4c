"""The op headroom::muon_update_: the bits of torch.optim.Muon's last lines, NorMuon against
float64, modes of weights, registration, and what it refuses."""

import pytest
import torch
from headroom.functional import join_weights_, muon_update_

from helpers.bits import assert_same_bits
from helpers.muon import FLOATS, SHAPES, places, tensors

SCALES = [1.0, 2.5, 1.0, 0.2, 3.0]


def updates(dtype=torch.bfloat16, device="cpu", seed=3, gap=2):
    views = places(dtype, device, gap)
    for view, values in zip(views, tensors(dtype, device, seed)):
        view.copy_(values)
    return views


@pytest.mark.parametrize("gap", [0, 2])
def test_float32_has_the_bits_of_torch(gap, device):
    if device == "cpu" and torch.backends.cpu.get_cpu_capability() == "DEFAULT":
        pytest.skip("torch has other bits on this processor")
    params, twins, by = tensors(device=device), tensors(device=device), updates(device=device)
    for param, update, scale in zip(twins, by, SCALES):
        param.mul_(1 - 0.02 * 0.1).add_(update, alpha=-0.02 * scale)
    muon_update_(params, updates(device=device, gap=gap), lr=0.02, scales=SCALES)
    assert_same_bits(params, twins)


@pytest.mark.parametrize("dtype", FLOATS)
def test_against_float64(dtype, device):
    params, by = tensors(dtype, device), updates(device=device)
    lr = torch.tensor(0.05, device=device)
    exact = [p.double() * (1 - 0.05 * 0.2) - 0.05 * u.double() for p, u in zip(params, by)]
    muon_update_(params, by, lr=lr, weight_decay=0.2)
    eps = torch.finfo(dtype).eps
    for got, wanted in zip(params, exact):
        torch.testing.assert_close(got.double(), wanted, rtol=eps, atol=eps / 4)


def test_normalized_rows(device):
    """NorMuon, as its reference has it."""
    params, by = tensors(device=device), updates(device=device)
    row_vars = [torch.rand(shape[0], device=device) for shape in SHAPES]
    exact = []
    for param, update, var, scale in zip(params, by, row_vars, SCALES):
        u, v = update.double(), var.double()[:, None]
        v = v.lerp(u.square().mean(1, keepdim=True), 0.1)
        divided = u / (v.sqrt() + 1e-10)
        u = divided * (u.norm() / (divided.norm() + 1e-10))
        exact.append((param.double() * (1 - 0.02 * 0.1) - 0.02 * scale * u, v[:, 0]))
    muon_update_(params, by, lr=0.02, scales=SCALES, row_vars=row_vars, beta2=0.9)
    for (param, var), got, state in zip(exact, params, row_vars):
        torch.testing.assert_close(got.double(), param, rtol=2**-18, atol=2**-20)
        if param.numel():
            torch.testing.assert_close(state.double(), var, rtol=2**-20, atol=0)


@pytest.mark.parametrize("master", ["remainder16", "f32"])
def test_weights_that_keep_all_bits_take_the_steps_of_float32(master, device):
    params, twins = tensors(torch.bfloat16, device), tensors(torch.bfloat16, device)
    dtype = torch.int16 if master == "remainder16" else torch.float32
    wholes = [p.float() for p in params]
    residuals = [
        w.to(dtype) if master == "f32" else torch.zeros_like(w, dtype=dtype) for w in wholes
    ]
    for seed in range(3):
        by = updates(device=device, seed=seed)
        muon_update_(params, by, lr=1e-3, master=master, residuals=residuals)
        muon_update_(wholes, by, lr=1e-3)
    joined = [torch.empty_like(w) for w in wholes]
    join_weights_(joined, params, residuals, master=master)
    assert_same_bits(joined, wholes)
    assert not torch.equal(params[0], twins[0])


def test_stochastic_rounding_has_the_mean_of_float32(device):
    param, update = torch.ones(64, 512, device=device), torch.ones(64, 512, device=device)
    half, step = param.bfloat16(), torch.ones((), device=device)
    options = {"rounding": "stochastic", "weight_seeds": [5], "weight_decay": 0.0}
    muon_update_([half], [update], [step], lr=1e-3, **options)
    assert step.item() == 2
    assert half.unique().numel() == 2
    assert abs(half.double().mean().item() - 0.999) < 2e-4


def test_found_inf_changes_nothing(device):
    params, steps = tensors(device=device), [torch.ones((), device=device) for _ in SHAPES]
    row_vars = [torch.ones(shape[0], device=device) for shape in SHAPES]
    before = [t.clone() for t in (*params, *steps, *row_vars)]
    found = torch.ones((), device=device)
    muon_update_(params, updates(device=device), steps, lr=1.0, row_vars=row_vars, found_inf=found)
    assert_same_bits([*params, *steps, *row_vars], before)


def test_params_that_are_not_contiguous(device):
    params = tensors(device=device)
    turned = [p.T.contiguous().T for p in params]
    muon_update_(params, updates(device=device), lr=0.1)
    muon_update_(turned, updates(device=device), lr=0.1)
    assert_same_bits([p.contiguous() for p in turned], params)


def test_opcheck():
    op, options = torch.ops.headroom.muon_update_.default, {"lr": 0.1, "weight_decay": 0.1}
    options |= {"beta2": 0.95, "scales": SCALES}
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    row_vars, steps = [torch.ones(s[0]) for s in SHAPES], [torch.ones(()) for _ in SHAPES]
    for args in (
        (tensors(), updates(), [], [], []),
        (tensors(), updates(torch.float32), row_vars, steps, []),
    ):
        torch.library.opcheck(op, args, options, test_utils=checks)


def test_a_compiled_call_has_the_bits_of_the_eager_one(fresh_dynamo):
    def step(params, by):
        muon_update_(params, by, lr=0.1, scales=SCALES)

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    lists = [(tensors(), updates()) for _ in range(2)]
    step(*lists[0])
    compiled(*lists[1])
    assert_same_bits(lists[0][0], lists[1][0])


def bad(name, change):
    return pytest.param(change, name, id=name)


@pytest.mark.parametrize(
    "change, words",
    [
        bad("updates has 4 tensors", lambda a: a["updates"].pop()),
        bad(r"updates\[0\] has another shape", lambda a: a.update(updates=[torch.ones(2)] * 5)),
        bad("scales has 4 numbers", lambda a: a.update(scales=SCALES[1:])),
        bad(r"scales\[0\] is -1", lambda a: a.update(scales=[-1.0] * 5)),
        bad("lr is -1", lambda a: a.update(lr=-1.0)),
        bad("weight_decay is inf", lambda a: a.update(weight_decay=float("inf"))),
        bad("row_vars has 1 tensors", lambda a: a.update(row_vars=[torch.ones(31)])),
        bad("row_vars.0. has numel 2", lambda a: a.update(row_vars=[torch.ones(2)] * 5)),
        bad("beta2 is 1", lambda a: a.update(
            row_vars=[torch.ones(s[0]) for s in SHAPES], beta2=1.0)),
        bad("which HR_WEIGHTS_MASTER does not take", lambda a: a.update(master="f32")),
    ],
)  # fmt: skip
def test_what_it_refuses_changes_nothing(change, words):
    arguments = {"params": tensors(), "updates": updates(), "lr": 0.1}
    change(arguments)
    every = [*arguments["params"], *arguments["updates"]]
    before = [t.clone() for t in every]
    with pytest.raises(RuntimeError, match=words):
        muon_update_(**arguments)
    assert_same_bits(every, before)


def test_no_parameters():
    assert muon_update_([], [], lr=0.1) is None
