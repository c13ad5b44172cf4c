"""torch.compile, torch.export, fakes, torch.func, the profiler, inference and dispatch modes."""

import io

import headroom
import pytest
import torch
from torch._dynamo.exc import TorchRuntimeError
from torch._dynamo.utils import counters
from torch._inductor.utils import run_and_get_code
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from helpers.bits import assert_same_bits
from helpers.compiled import compile_step
from helpers.samples import DEFAULTS, FLOATS, sample

INDUCTOR = pytest.param("inductor", marks=pytest.mark.slow)
BACKENDS = pytest.mark.parametrize("backend", ["aot_eager", INDUCTOR])
EIGHT_BIT = {"cls": headroom.optim.AdamW8bit, "min_8bit_size": 5}  # of one parameter of four


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def graphs():
    """How many graphs this test has compiled."""
    return counters["stats"]["unique_graphs"]


def pair(
    cls=headroom.optim.AdamW, dtype=torch.float32, shapes=((5, 7), (3,), (), (0, 2)), **options
):
    """Two optimizers on equal parameters, for an eager and a compiled run."""
    both = []
    for _ in range(2):
        torch.manual_seed(3)
        params = [torch.nn.Parameter(torch.randn(shape).to(dtype)) for shape in shapes]
        copies = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in options.items()}
        both.append((params, cls(params, **copies)))
    return both


def set_grads(*lists, seed):
    for params in lists:
        generator = torch.Generator().manual_seed(seed)
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)


def assert_same_run(eager, compiled):
    assert_same_bits(eager[0], compiled[0])
    for p, q in zip(eager[0], compiled[0]):
        assert_same_bits(eager[1].state[p].values(), compiled[1].state[q].values())
        assert eager[1].state[p].keys() == compiled[1].state[q].keys()


# ---- optimizer.step() ----------------------------------------------------------------------------


@BACKENDS
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"amsgrad": True, "maximize": True},
        {"dtype": torch.bfloat16},
        {"dtype": torch.bfloat16, "master": "remainder16", "count_stalled": True},
        {"dtype": torch.bfloat16, "rounding": "stochastic"},
        {"state_dtype": torch.bfloat16, "cls": headroom.optim.Adam, "weight_decay": 0.1},
        EIGHT_BIT,
        EIGHT_BIT | {"nonfinite": "skip_step"},
        EIGHT_BIT | {"nonfinite": "skip_element", "code_rounding": "stochastic"},
        EIGHT_BIT | {"dtype": torch.bfloat16, "max_grad_norm": 1.0},
    ],
    ids=[
        "default",
        "amsgrad",
        "bf16",
        "remainder16",
        "stochastic",
        "state_dtype",
        "8-bit",
        "8-bit skip_step",
        "8-bit stochastic",
        "8-bit clipped",
    ],
)
def test_compiled_step_has_the_bits_of_the_eager_one(backend, options):
    eager, compiled = pair(**options)
    step = compile_step(compiled[1], backend)
    for k in range(6):
        set_grads(eager[0], compiled[0], seed=k)
        eager[1].step()
        step()
        assert_same_run(eager, compiled)
    assert graphs() == 1  # however many steps


@BACKENDS
@pytest.mark.parametrize("options", [{}, EIGHT_BIT], ids=["", "8-bit"])
def test_compilation_between_eager_steps(options, backend):
    """Eager steps before and after leave nothing behind that a compiled one would not see."""
    eager, compiled = pair(**options)
    step = compile_step(compiled[1], backend)
    for k, run in enumerate([compiled[1].step, step, step, compiled[1].step, step]):
        set_grads(eager[0], compiled[0], seed=k)
        eager[1].step()
        run()
        assert_same_run(eager, compiled)
    assert graphs() == 1


@BACKENDS
@pytest.mark.parametrize("tensor_lr", [False, True], ids=["float", "tensor"])
def test_options_changed_between_compiled_steps_are_used_at_once(backend, tensor_lr):
    options = {"lr": torch.tensor(1e-2) if tensor_lr else 1e-2}
    (eager, compiled), theirs = pair(**options), pair(torch.optim.AdamW, **options)[0]
    step = compile_step(compiled[1], backend)
    changes = [("lr", v) for v in (1e-2, 0.5, 0.25, 1e-3, 0.0, 1e-2)]
    changes += [("weight_decay", 0.5), ("betas", (0.5, 0.6)), ("maximize", True), ("eps", 1e-2)]
    for k, (name, value) in enumerate(changes):
        set_grads(eager[0], compiled[0], theirs[0], seed=k)
        for _, optimizer in (eager, compiled, theirs):
            group = optimizer.param_groups[0]
            if name == "lr" and tensor_lr:
                group["lr"].fill_(value)
            else:
                group[name] = value
        eager[1].step()
        theirs[1].step()
        step()
        assert_same_run(eager, compiled)
        for p, q in zip(compiled[0], theirs[0]):
            torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
    # A changed float lr is an input of the second graph; other options are constants of theirs.
    assert graphs() == (1 if tensor_lr else 2) + 4


def test_a_scheduler_does_not_make_a_graph_per_step():
    for lr in (1e-2, torch.tensor(1e-2)):
        torch._dynamo.reset()
        counters.clear()
        eager, compiled = pair(lr=lr)
        # A scheduler wraps step() in a function that torch.compile does not trace.
        step = compile_step(compiled[1], "aot_eager", fullgraph=False)
        schedulers = [torch.optim.lr_scheduler.ExponentialLR(o, 0.8) for _, o in (eager, compiled)]
        for k in range(12):
            set_grads(eager[0], compiled[0], seed=k)
            eager[1].step()
            step()
            for scheduler in schedulers:
                scheduler.step()
            assert_same_run(eager, compiled)
        assert graphs() == (1 if isinstance(lr, torch.Tensor) else 2)


def test_a_compiled_step_on_codes_of_another_memory_order():
    """Of a parameter that was moved after its states were made."""
    eager, compiled = pair(**EIGHT_BIT, shapes=((300, 3), (2,)))
    for k, run in enumerate([compiled[1].step, *2 * [compile_step(compiled[1], "aot_eager")]]):
        set_grads(eager[0], compiled[0], seed=k)
        eager[1].step()
        run()
        assert_same_run(eager, compiled)
        if k == 0:
            compiled[0][0].data = compiled[0][0].data.t().contiguous().t()


def test_replaced_tensors_are_seen():
    """A loaded state, a parameter without gradient, moved data: nothing is baked into the graph."""
    eager, compiled = pair()
    step = compile_step(compiled[1], "aot_eager")
    for k in range(6):
        set_grads(eager[0], compiled[0], seed=k)
        if k == 2:
            for _, optimizer in (eager, compiled):
                state = optimizer.state_dict()
                for entry in state["state"].values():
                    entry["exp_avg"] = entry["exp_avg"] + 0.5
                    entry["step"] = torch.tensor(100.0, dtype=torch.float64)
                optimizer.load_state_dict(state)
        if k == 3:
            eager[0][1].grad = compiled[0][1].grad = None
        if k == 4:
            for params, _ in (eager, compiled):
                params[0].data = params[0].data.clone() * 2
        eager[1].step()
        step()
        assert_same_run(eager, compiled)


def test_two_groups_and_scalars_of_the_step():
    runs = []
    for _ in range(2):
        torch.manual_seed(3)
        params = [torch.nn.Parameter(torch.randn(4)) for _ in range(3)]
        groups = [{"params": params[:1]}, {"params": params[1:], "lr": 0.1, "weight_decay": 0.0}]
        runs.append((params, headroom.optim.AdamW(groups)))
    eager, compiled = runs
    for _, optimizer in runs:
        optimizer.grad_scale = torch.tensor(4.0)
        optimizer.found_inf = torch.tensor(0.0)
    step = compile_step(compiled[1], "aot_eager")
    for k in range(4):
        set_grads(eager[0], compiled[0], seed=k)
        before = [p.detach().clone() for p in compiled[0]]
        for _, optimizer in runs:
            optimizer.found_inf.fill_(k == 2)
        eager[1].step()
        step()
        assert_same_run(eager, compiled)
        if k == 2:
            assert_same_bits(before, compiled[0])
    assert compiled[1].state[compiled[0][0]]["step"] == 3


# ---- a whole training step -----------------------------------------------------------------------


@BACKENDS
def test_whole_training_step(backend):
    """Forward, backward and step in one compiled function. The graph breaks where torch breaks it,
    at backward(). Inductor rounds the gradients otherwise than eager mode, so the compiled run is
    compared with an eager step on the compiled run's own gradients."""
    runs = []
    for _ in range(2):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 2))
        runs.append((model, headroom.optim.AdamW(model.parameters(), lr=1e-2)))
    (reference, eager), (model, optimizer) = runs

    @torch.compile(backend=backend)
    def train(x, y):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    x, y = torch.randn(16, 4), torch.randn(16, 2)
    losses = []
    for _ in range(5):
        losses.append(train(x, y).item())
        for p, q in zip(model.parameters(), reference.parameters()):
            q.grad = p.grad.clone()
        eager.step()
    assert_same_bits(model.parameters(), reference.parameters())
    assert losses[-1] < losses[0]


@BACKENDS
def test_whole_training_step_as_one_graph(backend):
    """With functional gradients nothing breaks the graph, and the op writes to its inputs."""

    def train(params, exp_avgs, exp_avg_sqs, steps, x, y):
        def loss(params):
            return (torch.tanh(x @ params[0] + params[1]) - y).square().mean()

        grads, value = torch.func.grad_and_value(loss)(params)
        headroom.functional.adamw_(
            params, list(grads), exp_avgs, exp_avg_sqs, [], steps, **DEFAULTS
        )
        return value

    def lists():
        data = sample(((3, 2), (2,)))
        return [data.params, data.exp_avgs, data.exp_avg_sqs, data.steps]

    eager, compiled = lists(), lists()
    step = torch.compile(train, backend=backend, fullgraph=True)
    addresses = [t.data_ptr() for column in compiled for t in column]
    for _ in range(4):
        x, y = torch.randn(5, 3), torch.randn(5, 2)
        value = train(*eager, x, y)
        torch.testing.assert_close(step(*compiled, x, y), value)
    for left, right in zip(eager, compiled):
        torch.testing.assert_close(left, right)
    assert addresses == [t.data_ptr() for column in compiled for t in column]


# ---- the functional op ---------------------------------------------------------------------------


def step_op(*lists, **options):
    headroom.functional.adamw_(*lists, **(DEFAULTS | options))


def step_views(flat, grads, exp_avg, exp_avg_sq, steps):
    """Parameters and moments are slices of one tensor each, some not contiguous."""

    def views(tensor):
        return [tensor[:3], tensor[3:, ::2], tensor[3:, 1::2].t()]

    headroom.functional.adamw_(
        views(flat), grads, views(exp_avg), views(exp_avg_sq), [], steps, **DEFAULTS
    )
    return flat * 2


def view_inputs():
    torch.manual_seed(1)
    grads = [torch.randn(3, 8), torch.randn(3, 4), torch.randn(3, 4).t()]
    steps = [torch.zeros((), dtype=torch.float64) for _ in grads]
    return torch.randn(6, 8), grads, torch.randn(6, 8), torch.rand(6, 8), steps


def flat_list(arguments):
    return [t for a in arguments for t in (a if isinstance(a, list) else [a])]


@BACKENDS
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("amsgrad", [False, True])
def test_functional_op_compiled(backend, dtype, amsgrad):
    eager = sample(param=dtype, grad=torch.bfloat16, amsgrad=amsgrad)
    compiled = eager.clone()
    step = torch.compile(step_op, backend=backend, fullgraph=True)
    for _ in range(3):
        step_op(*eager.lists(), amsgrad=amsgrad)
        step(*compiled.lists(), amsgrad=amsgrad)
        assert_same_bits(eager, compiled)


@BACKENDS
def test_functional_op_compiled_on_views_of_inputs(backend):
    eager, compiled = view_inputs(), view_inputs()
    before = eager[0].clone()
    step = torch.compile(step_views, backend=backend, fullgraph=True)
    for _ in range(3):
        assert torch.equal(step_views(*eager), step(*compiled))
        assert_same_bits(flat_list(eager), flat_list(compiled))
    assert (eager[0] != before).all()


@BACKENDS
def test_functional_op_compiled_with_dynamic_shapes(backend):
    step = torch.compile(step_op, backend=backend, fullgraph=True, dynamic=True)
    for n in (5, 9, 17, 33):
        eager = sample([(n, 3), (n,)])
        compiled = eager.clone()
        step_op(*eager.lists())
        step(*compiled.lists())
        assert_same_bits(eager, compiled)
    assert graphs() == 1


@pytest.mark.slow
@pytest.mark.parametrize("what", ["step", "op", "views"])
def test_inductor_calls_the_op_once_and_copies_nothing(what):
    """Functionalization clones what an op mutates; inductor must take every clone out again."""
    if what == "step":
        _, (params, optimizer) = pair(shapes=((5, 7), (3,), (4,)))
        set_grads(params, seed=0)
        _, (code, *more) = run_and_get_code(
            torch.compile(optimizer.step, backend="inductor", fullgraph=True)
        )
    elif what == "op":
        step = torch.compile(step_op, backend="inductor", fullgraph=True)
        _, (code, *more) = run_and_get_code(step, *sample().lists())
    else:
        step = torch.compile(step_views, backend="inductor", fullgraph=True)
        _, (code, *more) = run_and_get_code(step, *view_inputs())
    assert not more
    assert code.count("torch.ops.headroom.adamw_.default(") == 1
    body = code[code.index("def call(") : code.index("def get_args")]
    allocations = body.count("empty_strided_cpu(")
    assert allocations == (2 if what == "views" else 1)  # the lr, and the output flat * 2
    assert "copy_" not in body and "clone" not in body


# ---- fakes and export ----------------------------------------------------------------------------


def changed(**columns):
    """Arguments with one thing wrong: a list or an option replaced."""
    data, options = sample(((4, 3),)), dict(DEFAULTS)
    for name, value in columns.items():
        if hasattr(data, name):
            setattr(data, name, value)
        else:
            options[name] = value
    return data.lists(), options


WRONG = {
    "shape of a gradient": lambda: changed(grads=[torch.ones(3, 4)]),
    "shape of a moment": lambda: changed(exp_avgs=[torch.ones(12)]),
    "too many gradients": lambda: changed(grads=[torch.ones(4, 3)] * 2),
    "no counters": lambda: changed(steps=[]),
    "counter of two elements": lambda: changed(steps=[torch.zeros(2)]),
    "integer counter": lambda: changed(steps=[torch.zeros((), dtype=torch.int64)]),
    "f64 parameter": lambda: changed(params=[torch.ones(4, 3, dtype=torch.float64)]),
    "integer gradient": lambda: changed(grads=[torch.ones(4, 3, dtype=torch.int32)]),
    "fp8 gradient": lambda: changed(grads=[torch.ones(4, 3).to(torch.float8_e4m3fn)]),
    "moments of two dtypes": lambda: changed(exp_avg_sqs=[torch.ones(4, 3).bfloat16()]),
    "maxima without amsgrad": lambda: changed(max_exp_avg_sqs=[torch.ones(4, 3)]),
    "amsgrad without maxima": lambda: changed(amsgrad=True),
    "lr of two elements": lambda: changed(lr=torch.ones(2)),
    "integer lr": lambda: changed(lr=torch.ones((), dtype=torch.int64)),
    "bf16 lr": lambda: changed(lr=torch.ones((), dtype=torch.bfloat16)),
    "grad_scale of two elements": lambda: changed(grad_scale=torch.ones(2)),
    "f64 found_inf": lambda: changed(found_inf=torch.ones((), dtype=torch.float64)),
    "integer clip_coef": lambda: changed(clip_coef=torch.ones((), dtype=torch.int32)),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_eager_mode_refuses_is_refused_while_tracing(wrong):
    lists, options = WRONG[wrong]()
    with pytest.raises(RuntimeError) as eager:
        headroom.functional.adamw_(*lists, **options)
    with FakeTensorMode() as mode, pytest.raises(RuntimeError) as fake:
        lists, options = torch.utils._pytree.tree_map_only(
            torch.Tensor, mode.from_tensor, (lists, options)
        )
        headroom.functional.adamw_(*lists, **options)
    assert type(fake.value) is type(eager.value)
    lists, options = WRONG[wrong]()
    with pytest.raises(TorchRuntimeError):
        torch.compile(
            lambda: headroom.functional.adamw_(*lists, **options),
            backend="aot_eager",
            fullgraph=True,
        )()


def test_fakes_on_another_device():
    with FakeTensorMode():
        lists, options = changed()
        lists = [[t.to("cuda") for t in column] for column in lists]
        headroom.functional.adamw_(*lists, **options)  # needs no GPU
        lists[1] = [lists[1][0].cpu()]
        with pytest.raises(RuntimeError, match=r"grads\[0\] is on cpu"):
            headroom.functional.adamw_(*lists, **options)


def test_a_step_on_fake_tensors():
    """What a run will need can be asked before it: states appear, with shapes and dtypes."""
    with FakeTensorMode():
        params = [torch.nn.Parameter(torch.randn(4, 3)), torch.nn.Parameter(torch.randn(3))]
        optimizer = headroom.optim.AdamW(params, state_dtype=torch.bfloat16, amsgrad=True)
        for _ in range(2):
            for p in params:
                p.grad = torch.zeros_like(p)
            optimizer.step()
        for p in params:
            for name in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"):
                state = optimizer.state[p][name]
                assert (state.shape, state.dtype) == (p.shape, torch.bfloat16)


class Stepper(torch.nn.Module):
    """An update whose parameters and states are buffers."""

    def __init__(self):
        super().__init__()
        for name, data in zip(("p", "m", "v"), torch.rand(3, 4, 3)):
            self.register_buffer(name, data)
        self.register_buffer("t", torch.zeros((), dtype=torch.float64))

    def forward(self, grad):
        headroom.functional.adamw_([self.p], [grad], [self.m], [self.v], [], [self.t], **DEFAULTS)
        return self.p * 2


@pytest.mark.parametrize("decomposed", [False, True])
def test_export(decomposed):
    torch.manual_seed(0)
    module = Stepper()
    program = torch.export.export(module, (torch.ones(4, 3),))
    if decomposed:
        program = program.run_decompositions()
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    exported = torch.export.load(file).module()
    for _ in range(3):
        grad = torch.randn(4, 3)
        assert torch.equal(module(grad), exported(grad))
    assert_same_bits(module.buffers(), exported.buffers())
    assert module.t == 3


def test_export_refuses_a_wrong_shape():
    with pytest.raises(RuntimeError, match=r"grads\[0\] has another shape"):
        torch.export.export(Stepper(), (torch.ones(3, 4),))


# ---- derivatives, torch.func ---------------------------------------------------------------------


def op_on(param, grad, steps=None):
    like = torch.zeros_like(param)
    steps = torch.zeros(()) if steps is None else steps
    headroom.functional.adamw_([param], [grad], [like], [like.clone()], [], [steps], **DEFAULTS)
    return param


def test_a_derivative_is_refused_and_nothing_is_written():
    leaf, grad = torch.ones(3, requires_grad=True), torch.ones(3)
    differentiable = torch.ones(3, requires_grad=True)
    for param, gradient in ((leaf, grad), (leaf * 2, grad), (torch.ones(3), differentiable)):
        before = param.detach().clone()
        with pytest.raises(RuntimeError, match="no derivative.*no_grad"):
            op_on(param, gradient)
        assert torch.equal(param, before) and param._version == 0
        with torch.no_grad():
            op_on(param, gradient)
        assert not torch.equal(param, before)


def test_a_graph_that_needs_the_old_parameter_notices():
    """The version counters go up, so backward() does not use overwritten values in silence."""
    param = torch.ones(3, requires_grad=True)
    loss = param.square().sum()
    with torch.no_grad():
        op_on(param, torch.ones(3))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_torch_func_is_refused():
    with pytest.raises(RuntimeError, match="no derivative"):
        torch.func.grad(lambda g: op_on(torch.ones(3), g).sum())(torch.ones(3))
    with pytest.raises(RuntimeError, match="no derivative"):
        torch.func.grad(lambda p: op_on(p * 1, torch.ones(3)).sum())(torch.ones(3))
    batch = torch.ones(5, 3)
    with pytest.raises(RuntimeError, match="headroom::adamw_"):
        torch.vmap(op_on)(batch.clone(), batch.clone(), torch.zeros(5))


# ---- profiler and modes --------------------------------------------------------------------------


def test_profiler_shows_the_step_and_the_op():
    (params, optimizer), _ = pair()
    set_grads(params, seed=0)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        optimizer.step()
        optimizer.step()
        step_op(*sample().lists())
    (record,) = [e for e in profile.key_averages() if e.key == "Optimizer.step#AdamW.step"]
    assert record.count == 2
    ours = {e.key: e.count for e in profile.key_averages() if e.key.startswith("headroom::")}
    assert ours == {"headroom::_adamw_table_": 2, "headroom::adamw_": 1}
    inside = [e for e in profile.events() if e.name == "headroom::_adamw_table_"]
    assert all(e.cpu_parent.name == "Optimizer.step#AdamW.step" for e in inside)


def test_inference_mode():
    """As torch: parameters may be stepped in inference mode. States made there are inference
    tensors, which torch then refuses to step outside; here the step goes on."""
    eager, other = pair()
    theirs = pair(torch.optim.AdamW)[0]
    set_grads(eager[0], other[0], theirs[0], seed=0)
    with torch.inference_mode():
        other[1].step()
        theirs[1].step()
    eager[1].step()
    assert_same_run(eager, other)
    assert other[1].state[other[0][0]]["exp_avg"].is_inference()
    with pytest.raises(RuntimeError, match="Inplace update to inference tensor"):
        theirs[1].step()
    eager[1].step()
    other[1].step()
    assert_same_run(eager, other)


def test_inference_mode_between_steps():
    eager, other = pair()
    for k in range(3):
        set_grads(eager[0], other[0], seed=k)
        eager[1].step()
        with torch.inference_mode(k == 1):
            other[1].step()
        assert_same_run(eager, other)
    assert [p._version for p in other[0]] == [p._version for p in eager[0]]


class Log(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.calls.append((str(function), args))
        return function(*args, **(kwargs or {}))


def test_dispatch_modes_see_every_tensor():
    """Memory trackers and flop counters work on such modes: the op they see must hand over the
    states, not their addresses."""
    eager, logged = pair()
    for k in range(4):
        set_grads(eager[0], logged[0], seed=k)
        eager[1].step()
        with Log() as log:
            logged[1].step()
        ((_, args),) = [call for call in log.calls if call[0].startswith("headroom")]
        states = logged[1].state[logged[0][0]]
        assert args[2][0] is states["exp_avg"] and args[5][0] is states["step"]
        assert log.calls[-2][0] == "headroom.adamw_.default" or k == 0
        assert_same_run(eager, logged)
    set_grads(eager[0], logged[0], seed=9)
    eager[1].step()
    logged[1].step()
    assert_same_run(eager, logged)
