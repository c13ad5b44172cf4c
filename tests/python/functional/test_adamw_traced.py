"""The op headroom::adamw_ under torch.compile, torch.export, fakes, autograd and torch.func."""

import io

import headroom
import pytest
import torch
from torch._dynamo.exc import TorchRuntimeError
from torch._inductor.utils import run_and_get_code
from torch._subclasses import FakeTensorMode

from helpers.bits import assert_same_bits
from helpers.compiled import (
    BACKENDS,
    graphs,
    pair,
    set_grads,
)
from helpers.samples import DEFAULTS, FLOATS, sample

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


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
