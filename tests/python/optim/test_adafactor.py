"""Adafactor: the two rules against their originals and in float64, the op, torch.compile. Shards
are in test_adafactor_distributed.py."""

import headroom
import pytest
import torch
from headroom._core.table import table_of

from helpers.adafactors import (
    ADAFACTOR,
    BOTH,
    CASES,
    SHAPES,
    TORCH,
    make,
    set_grads,
    start,
    train,
)
from helpers.bad_inputs import assert_untouched, expanded, misaligned, snapshot
from helpers.bits import assert_same_bits, bits


def errors(params, exact):
    return [(p.double() - q.double()).norm().item() for p, q in zip(params, exact)]


SLOW = {"torch options", "hf warm-up", "hf fine-tuning"}  # which checkpoints are tested with too


# ---- The originals -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "semantics, options",
    [
        pytest.param(*case, id=name, marks=pytest.mark.slow if name in SLOW else ())
        for name, case in CASES.items()
    ],
)
def test_a_run_of_200_steps(semantics, options, device):
    """Closer to the rule in float64 than twice what the original is, or within a rounding a step,
    and with its states."""
    if semantics == "torch":  # whose default depends on the dtype
        options = {"eps": (torch.finfo(torch.float32).eps, 1e-3)} | options
    (params, ours), (theirs, other), (exact, _) = (
        train(params, make(semantics, params, mine, **options), range(200))
        for params, mine in (
            (start(device=device), True),
            (start(device=device), False),
            (start(dtype=torch.float64, device=device), False),
        )
    )
    for shape, p, mine, its in zip(SHAPES, exact, errors(params, exact), errors(theirs, exact)):
        rounding = 2**-24 * 200**0.5 * p.norm().item()
        assert mine <= max(2 * its, rounding), (shape, mine, its)
    for p, q in zip(params, theirs):
        mine, its = ours.state[p], other.state[q]
        assert mine.keys() == its.keys()
        for name, value in its.items():
            if name == "RMS" and not options.get("scale_parameter", True):
                continue  # which nobody asks for
            value = torch.as_tensor(value)
            torch.testing.assert_close(
                mine[name].double(), value.double(), rtol=1e-5, atol=1e-7, check_device=False
            )
            assert mine[name].shape == value.shape


def test_bfloat16_as_hf_has_it(device):
    """hf computes in float32 too: rounding may differ here and there by one."""
    (params, ours), (theirs, other) = (
        train(p, make("hf", p, mine), range(50))
        for p, mine in ((start(dtype=torch.bfloat16, device=device), m) for m in (True, False))
    )
    for p, q in zip(params, theirs):
        apart = (bits(p).int() - bits(q).int()).abs()
        assert apart.max() <= 2 and (apart > 0).float().mean() < 0.02


def test_bfloat16_statistics_are_float32(device):
    """Where torch has them in bfloat16, ours are those of a float32 run."""
    params = start(dtype=torch.bfloat16, device=device)
    optimizer = ADAFACTOR(params, eps=(1e-3, 1e-3))
    wide = [torch.nn.Parameter(p.detach().float()) for p in params]
    reference = TORCH(wide, eps=(1e-3, 1e-3))
    set_grads(params, 0)
    set_grads(wide, 0)
    optimizer.step()
    reference.step()
    for p, q in zip(params, wide):
        for name, value in reference.state[q].items():
            assert optimizer.state[p][name].dtype in (torch.float32, torch.float64)
            torch.testing.assert_close(optimizer.state[p][name].float(), value, check_device=False)
        torch.testing.assert_close(p, q.bfloat16(), rtol=2**-7, atol=0)


def test_the_epsilon_of_torch_is_that_of_the_dtype():
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        eps = torch.finfo(dtype).eps
        given, default = start(((3, 4), (5,)), dtype), start(((3, 4), (5,)), dtype)
        for params, optimizer in (
            (given, ADAFACTOR(given, eps=(eps, 1e-3))),
            (default, ADAFACTOR(default)),
        ):
            for p in params:
                p.grad = torch.full_like(p, eps / 4)  # so that epsilon decides
            optimizer.step()
        assert_same_bits(given, default)


# ---- The op --------------------------------------------------------------------------------------


OPTIONS = dict(
    hf=False,
    lr=1e-2,
    beta2_decay=-0.8,
    eps1=-1.0,
    eps2=1e-3,
    clip_threshold=1.0,
    weight_decay=0.1,
    beta1=0.9,
    scale_parameter=True,
    relative_step=True,
    warmup_init=False,
)
LISTS = "params grads row_vars col_vars variances exp_avgs rms_values state_steps residuals".split()


def sample(shapes=((6, 7), (5,), (4, 3, 3)), dtype=torch.float32, device="cpu"):
    """The lists of one call, by name, with everything given."""
    params = [p.detach() for p in start(shapes, dtype, device)]
    lists = {name: [] for name in LISTS} | {"params": params}
    for p in params:
        factored = p.dim() >= 2
        row = torch.zeros(p.shape[:-1] if factored else 0, device=device)
        col = torch.zeros((*p.shape[:-2], *p.shape[-1:]) if factored else 0, device=device)
        variance = torch.zeros(0 if factored else p.shape, device=device)
        values = torch.randn_like(p), row, col, variance, torch.zeros_like(p).float()
        for name, value in zip(LISTS[1:6], values):
            lists[name].append(value)
        lists["rms_values"].append(torch.zeros((), device=device))
        lists["state_steps"].append(torch.zeros((), device=device))
    return lists


def run(lists, **options):
    torch.ops.headroom.adafactor_(*lists.values(), **(OPTIONS | options))


@BOTH
def test_opcheck(semantics, device):
    lists = sample(device=device)
    torch.library.opcheck(
        torch.ops.headroom.adafactor_,
        tuple(lists.values()),
        OPTIONS | {"hf": semantics == "hf", "eps1": 1e-30},
    )


def table_of_sample(lists):
    """Of one that is all factored, as the optimizer makes it of its states."""
    names = "exp_avg", "row", "col", "rms", "step"
    columns = (lists[name] for name in LISTS[5:6] + LISTS[2:4] + LISTS[6:8])
    state = {p: dict(zip(names, values)) for p, *values in zip(lists["params"], *columns)}
    return table_of((lists["params"], lists["grads"]), state, names[:1], names[1:])


def test_the_op_on_a_table(device):
    lists, others, checked = (
        sample(((6, 7), (4, 3, 3), (70, 90)), device=device) for _ in range(3)
    )
    others["grads"] = lists["grads"]
    shape = dict(factored=True, momentum=True, with_rms=True)
    options = shape | OPTIONS
    for op, arguments, more in (  # a table lets the check write to its tensors
        ("_adafactor_table_", (checked["params"][0], table_of_sample(checked)), options),
        ("_adafactor_workspace", (checked["params"],), {}),
        ("_adafactor_table_workspace", (table_of_sample(checked),), shape),
    ):
        torch.library.opcheck(
            getattr(torch.ops.headroom, op).default,
            arguments,
            more,
            test_utils=("test_schema", "test_autograd_registration"),
        )
    ops, table = torch.ops.headroom, table_of_sample(lists)
    size = ops._adafactor_table_workspace(table, **shape)
    assert size == ops._adafactor_workspace(lists["params"])
    for wrong in (torch.empty(size - 1, dtype=torch.float64), torch.empty(size)):
        with pytest.raises(RuntimeError, match="workspace"):
            workspace = wrong.to(device)
            ops._adafactor_table_(lists["params"][0], table, workspace=workspace, **options)
    workspace = torch.empty(size, dtype=torch.float64, device=device)
    ops._adafactor_table_(lists["params"][0], table, workspace=workspace, **options)
    run({name: [] if name == "variances" else column for name, column in others.items()})
    for name in LISTS[:4] + LISTS[5:]:
        assert_same_bits(lists[name], others[name])
    with pytest.raises(RuntimeError, match="table must be"):
        wrong = table_of_sample(lists)[:-1]
        torch.ops.headroom._adafactor_table_(lists["params"][0], wrong, **options)


def test_the_functional_form(device):
    lists = sample(device=device)
    others = {name: [tensor.clone() for tensor in column] for name, column in lists.items()}
    run(lists)
    headroom.functional.adafactor_(
        *list(others.values())[:-1], lr=1e-2, weight_decay=0.1, beta1=0.9
    )
    for column, other in zip(lists.values(), others.values()):
        assert_same_bits(column, other)


def put(name, k, change):
    return lambda lists, options: lists[name].__setitem__(k, change(lists[name][k]))


def bad_calls():
    for name in LISTS[1:-1]:
        yield f"{name} too short", lambda lists, _, n=name: lists[n].pop(), f"{name} has 2 tensors"
    for name in LISTS[:7]:
        yield f"{name} int", put(name, 0, lambda t: t.int()), rf"{name}\[0\]"
    for name in ("row_vars", "col_vars", "exp_avgs"):
        yield f"{name} bf16", put(name, 0, lambda t: t.bfloat16()), rf"{name}\[0\] has dtype bf16"
    yield "grads of another shape", put("grads", 0, lambda t: t.t()), r"grads\[0\] has another"
    yield (
        "row_vars long",
        put("row_vars", 0, lambda t: torch.zeros(7)),
        r"row_vars\[0\] has numel 7",
    )
    yield "variances", put("variances", 1, lambda t: torch.zeros(4)), r"variances\[1\] has numel 4"
    yield "no variances", lambda lists, _: lists["variances"].clear(), r"variances is NULL"
    yield "no rows", lambda lists, _: lists["row_vars"].clear(), r"row_vars is NULL"
    yield "params expanded", put("params", 0, expanded), r"params\[0\] has elements that share"
    yield "params misaligned", put("params", 0, misaligned), r"params\[0\] is at"
    yield "step", put("state_steps", 1, lambda t: torch.tensor(-1.0)), r"steps\[1\] holds -1"
    for name, value in (
        ("lr", -1.0),
        ("beta2_decay", 0.5),
        ("eps2", -1.0),
        ("clip_threshold", 0.0),
        ("weight_decay", -1.0),
        ("beta1", 1.0),
        ("phases", 0),
        ("phases", 16),
    ):
        yield (
            f"{name} {value}",
            lambda _, o, n=name, v=value: o.update({n: v}),
            rf"{name} is {value:g}".replace(".", r"\."),
        )
    yield "a phase", lambda _, o: o.update(phases=1), "needs a workspace"
    small = torch.zeros(3, dtype=torch.float64)
    yield "workspace", lambda _, o: o.update(workspace=small), "workspace_bytes is 24, wanted"
    yield "f32 workspace", lambda _, o: o.update(workspace=small.float()), "workspace must be"
    yield "wholes", lambda _, o: o.update(wholes=[1]), "wholes has 1 numbers, wanted 9"
    yield "small wholes", lambda _, o: o.update(wholes=[1] * 9), r"shapes\[0\] is larger"


BAD_CALLS = list(bad_calls())


@pytest.mark.parametrize(
    "change, words", [case[1:] for case in BAD_CALLS], ids=[c[0] for c in BAD_CALLS]
)
def test_the_op_refuses(change, words):
    lists, options = sample(), {}
    change(lists, options)
    kept = snapshot([t for column in lists.values() for t in column])
    with pytest.raises(RuntimeError, match=words):
        run(lists, **options)
    assert_untouched(kept)


def test_errors_of_a_step_name_the_parameter():
    params = start(((2, 2), (3,)))
    optimizer = ADAFACTOR([("weight", params[0]), ("bias", params[1])])
    set_grads(params, 0)
    optimizer.step()
    optimizer.state[params[0]]["row_var"] = torch.zeros(2, 1, dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match="row_vars.*dtype bf16.*'weight'"):
        optimizer.step()


# ---- torch.compile -------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("case", ["torch", "hf momentum"])
def test_compiled(case):
    """By inductor; test_every_mode.py has what is traced."""
    torch._dynamo.reset()
    semantics, options = CASES[case]
    params, others = start(SHAPES[:8]), start(SHAPES[:8])
    optimizer, other = (make(semantics, p, **options) for p in (params, others))
    step = torch.compile(other.step, backend="inductor", fullgraph=True)
    for i in range(3):
        set_grads(params, i)
        set_grads(others, i)
        optimizer.step()
        step()
    assert_same_bits(params, others)
    for p, q in zip(params, others):
        assert_same_bits(optimizer.state[p].values(), other.state[q].values())
    torch._dynamo.reset()


# ---- Layouts, states, weights in 16 bits ---------------------------------------------------------


def moved(p, how):
    """The values of a parameter in other memory."""
    if how == "channels_last":
        return p.contiguous(memory_format=torch.channels_last)
    if how == "transposed":
        return p.transpose(0, 1).contiguous().transpose(0, 1)
    room = torch.empty(*p.shape[:-1], 2 * p.shape[-1], dtype=p.dtype)
    return room[..., ::2].copy_(p)


@BOTH
@pytest.mark.parametrize("how", ["channels_last", "transposed", "strided"])
def test_rows_and_columns_are_those_of_the_indices(how, semantics):
    plain = start(((6, 5, 3, 3), (4, 7, 1, 5)))
    others = [torch.nn.Parameter(moved(p.detach(), how)) for p in plain]
    assert not any(p.is_contiguous() for p in others)
    optimizers = make(semantics, plain), make(semantics, others)
    for step in range(3):
        set_grads(plain, step)
        for p, q in zip(plain, others):
            q.grad = moved(p.grad, how) if step else p.grad
        for optimizer in optimizers:
            optimizer.step()
    assert_same_bits(plain, [p.contiguous() for p in others])


@BOTH
def test_empty_tensors_and_tied_ones(semantics, device):
    params = start(((0, 4), (3, 0), (2, 3, 0, 5), (0,), (4, 4)), device=device)
    params[0].requires_grad_()
    optimizer = make(semantics, [*params, params[-1]])
    reference = start(((0, 4), (3, 0), (2, 3, 0, 5), (0,), (4, 4)), device=device)[-1:]
    train(params, optimizer, range(2))
    other = make(semantics, reference)
    for step in range(2):
        set_grads(params, step)
        reference[0].grad = params[-1].grad
        other.step()
    assert_same_bits(params[-1:], reference)
    assert all(optimizer.state[p]["step"] == 2 for p in params)


def test_the_schedule_of_transformers():
    from transformers.optimization import AdafactorSchedule

    rates = []
    for ours in (True, False):
        params = start()
        optimizer = make("hf", params, ours, warmup_init=True)
        schedule = AdafactorSchedule(optimizer)
        for step in range(3):
            train(params, optimizer, [step])
            schedule.step()
        rates.append([float(rate) for rate in schedule.get_lr()])
    assert rates[0] == pytest.approx(rates[1], rel=1e-6)


def test_memory_says_that_there_is_next_to_none():
    optimizer = ADAFACTOR([torch.nn.Parameter(torch.zeros(1000, 1000))])
    (row,) = optimizer.memory()
    assert row.bytes_per_parameter < 0.01
    assert "row_var 4,000" in repr(optimizer)


@BOTH
def test_states_widen_and_survive_a_change_of_precision(semantics):
    """Statistics that torch kept in bfloat16 become float32, and float32 ones stay."""
    params = start(dtype=torch.bfloat16)
    theirs = make(semantics, params, False)
    train(params, theirs, range(2))
    ours = make(semantics, params)
    ours.load_state_dict(theirs.state_dict())
    for p in params:
        for name, value in ours.state[p].items():
            assert value.dtype == (torch.float64 if name == "step" else torch.float32)
            assert torch.equal(value.float(), torch.as_tensor(theirs.state[p][name]).float())
    wide = [torch.nn.Parameter(p.detach().float()) for p in params]
    again = make(semantics, wide)
    again.load_state_dict(ours.state_dict())
    for p, q in zip(params, wide):
        assert_same_bits(ours.state[p].values(), again.state[q].values())


@pytest.mark.parametrize("semantics", ["torch", "hf"])
@pytest.mark.parametrize(
    "before, after",
    [
        ((8, 4), (4, 8)),
        ((8, 4), (32,)),
        ((32,), (8, 4)),
        ((32,), (16,)),
        ((8, 8), (64,)),
        ((2, 3, 4), (6, 8)),  # as many rows and columns
        ((2, 3, 4), (4, 6, 2)),
    ],
    ids=str,
)
@pytest.mark.parametrize("transposed", [False, True], ids=["table", "lists"])
def test_statistics_of_another_shape_are_refused(before, after, semantics, transposed, device):
    """After ``weight.data`` was replaced. AdamW raises, too."""
    other = torch.nn.Parameter(torch.randn(5, 3, device=device))
    param = torch.nn.Parameter(torch.randn(before, device=device))
    optimizer = ADAFACTOR([("other", other), ("weight", param)], semantics=semantics)
    other.grad, param.grad = torch.randn_like(other), torch.randn_like(param)
    optimizer.step()
    param.grad = None
    param.data = torch.randn(after, device=device)
    if transposed:
        other.data = other.data.t().contiguous().t()
    other.grad, param.grad = torch.randn_like(other), torch.randn_like(param)
    tensors = [other, param, *(t for entry in optimizer.state.values() for t in entry.values())]
    kept = [tensor.detach().clone() for tensor in tensors]
    with pytest.raises(RuntimeError, match=r"parameter 'weight'.*shape"):
        optimizer.step()
    assert all(map(torch.equal, tensors, kept))
    assert sum(map(len, optimizer.state.values())) == len(kept) - 2  # nothing was made
    del optimizer.state[param]
    optimizer.step()
    assert optimizer.state[param]["step"] == 1
