"""Optimizer steps under torch.compile."""

import headroom
import pytest
import torch
from torch._dynamo.utils import counters

from helpers.bits import assert_same_bits
from helpers.compiled import (
    BACKENDS,
    EIGHT_BIT,
    assert_same_run,
    compile_step,
    graphs,
    pair,
    set_grads,
)

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


# ---- optimizer.step() ----------------------------------------------------------------------------


OPTIONS = {
    "default": {},
    "amsgrad": {"amsgrad": True, "maximize": True},
    "bf16": {"dtype": torch.bfloat16},
    "remainder16": {"dtype": torch.bfloat16, "master": "remainder16", "count_stalled": True},
    "stochastic": {"dtype": torch.bfloat16, "rounding": "stochastic"},
    "state_dtype": {
        "state_dtype": torch.bfloat16,
        "cls": headroom.optim.Adam,
        "weight_decay": 0.1,
    },
    "8-bit": EIGHT_BIT,
    "8-bit skip_step": EIGHT_BIT | {"nonfinite": "skip_step"},
    "8-bit stochastic": EIGHT_BIT | {"nonfinite": "skip_element", "code_rounding": "stochastic"},
    "8-bit clipped": EIGHT_BIT | {"dtype": torch.bfloat16, "max_grad_norm": 1.0},
}
# What is traced of these is traced of others too.
SLOW = {"amsgrad", "bf16", "state_dtype", "8-bit", "8-bit skip_step"}


@BACKENDS
@pytest.mark.parametrize(
    "options",
    [
        pytest.param(options, id=name, marks=pytest.mark.slow if name in SLOW else ())
        for name, options in OPTIONS.items()
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
@pytest.mark.parametrize(
    "tensor_lr",
    [pytest.param(True, id="tensor", marks=pytest.mark.slow), pytest.param(False, id="float")],
)
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
