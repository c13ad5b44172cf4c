"""Ops with a gradient: a small one, registered here, and what `differentiable` gives it."""

import sys
import threading

import headroom
import pytest
import torch
from headroom._core.registration import complete, differentiable
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

ROWS, INNER, COLS = 5, 7, 3


@pytest.fixture(scope="module")
def scaled_rows():
    """``scale[:, None] * (x @ weight)``, whose gradient is an op of its own."""
    library = torch.library.Library("headroom", "FRAGMENT")
    library.define("test_scaled_rows(Tensor x, Tensor weight, Tensor scale) -> Tensor y")
    library.define(
        "test_scaled_rows_backward(Tensor grad, Tensor x, Tensor weight, Tensor scale)"
        " -> (Tensor, Tensor, Tensor)"
    )

    def forward(x, weight, scale):
        return (x @ weight).mul_(scale[:, None])

    def backward_op(grad, x, weight, scale):
        scaled = grad * scale[:, None]
        return scaled @ weight.t(), x.t() @ scaled, ((x @ weight) * grad).sum(1)

    def save(ctx, given, results):
        assert list(results) == ["y"]
        ctx.save_for_backward(*given.values())

    def backward(ctx, grads, needs):
        op = torch.ops.headroom.test_scaled_rows_backward
        return dict(zip(needs, op(grads["y"], *ctx.saved_tensors)))

    def flops(x, weight, **_):
        return 2 * x[0] * x[1] * weight[1]

    library.impl("test_scaled_rows", forward, "CPU")
    library.impl("test_scaled_rows_backward", backward_op, "CPU")
    differentiable(
        "test_scaled_rows",
        fake=lambda x, weight, scale: x.new_empty(len(x), weight.shape[1]),
        save=save,
        backward=backward,
        flops=flops,
    )
    torch.library.register_fake(
        "headroom::test_scaled_rows_backward",
        lambda grad, *inputs: tuple(torch.empty_like(tensor) for tensor in inputs),
    )
    complete("test_scaled_rows_backward")
    yield torch.ops.headroom.test_scaled_rows
    library._destroy()


@pytest.fixture
def arguments():
    generator = torch.Generator().manual_seed(0)
    shapes = (ROWS, INNER), (INNER, COLS), (ROWS,)
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
        for shape in shapes
    ]


def test_opcheck_of_test_scaled_rows(scaled_rows, arguments):
    torch.library.opcheck(scaled_rows.default, arguments)


def test_opcheck_of_test_scaled_rows_backward(scaled_rows, arguments):
    grad = torch.ones(ROWS, COLS, dtype=torch.float64)
    arguments = [tensor.detach() for tensor in arguments]
    op = torch.ops.headroom.test_scaled_rows_backward.default
    torch.library.opcheck(op, (grad, *arguments))


def test_gradients_are_those_of_finite_differences(scaled_rows, arguments):
    assert torch.autograd.gradcheck(scaled_rows, arguments)


def test_the_profiler_shows_names_that_can_be_read(scaled_rows, arguments):
    scaled_rows(*arguments)
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        out = scaled_rows(*arguments)
        assert out.grad_fn.name() == "headroom::test_scaled_rows_backward"
        out.sum().backward()
    names = {event.key for event in profiled.key_averages()}
    name = "headroom::test_scaled_rows"
    evaluated = f"autograd::engine::evaluate_function: {name}_backward"
    assert {name, f"{name}_backward", evaluated} <= names
    assert not [shown for shown in names if "Generated" in shown]


def test_floating_point_operations_are_counted(scaled_rows, arguments):
    with FlopCounterMode(display=False) as counter:
        scaled_rows(*arguments)
    assert counter.get_total_flops() == 2 * ROWS * INNER * COLS


@pytest.mark.slow
def test_it_compiles_as_one_graph(scaled_rows, arguments):
    compiled = torch.compile(lambda *given: scaled_rows(*given).square().sum(), fullgraph=True)
    grads = [
        torch.autograd.grad(function(*arguments), arguments)
        for function in (lambda *given: scaled_rows(*given).square().sum(), compiled)
    ]
    for expected, got in zip(*grads):
        torch.testing.assert_close(got, expected)


def test_a_second_derivative_raises(scaled_rows, arguments):
    loss = scaled_rows(*arguments).square().sum()
    with pytest.raises(RuntimeError, match="test_scaled_rows_backward has no derivative"):
        torch.autograd.grad(loss, arguments, create_graph=True)


def test_threads_may_run_backward_through_one_graph():
    x = torch.randn(64, 8, requires_grad=True)
    weight = torch.ones(8, requires_grad=True)
    y = headroom.functional.rms_norm(x, weight).sum()
    wanted = torch.autograd.grad(y, (x, weight), retain_graph=True)
    wrong = []

    def run():
        for _ in range(100):
            try:
                got = torch.autograd.grad(y, (x, weight), retain_graph=True, allow_unused=True)
                assert all(map(torch.equal, got, wanted))
            except Exception as error:
                wrong.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=run) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not wrong
