"""Plans of recurrent layers, against what their steps allocate on the CPU."""

import headroom
import headroom.memory
import pytest
import torch
from headroom.planning import PlanError, probe
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.checkpoint import checkpoint

STEPS, ROWS, INPUTS, HIDDEN = 7, 5, 19, 37


class Recurrent(nn.Module):
    """Layers of one kind, and a loss of the last step and the states."""

    def __init__(self, kind="LSTM", inputs=INPUTS, hidden=HIDDEN, **options):
        super().__init__()
        self.layers = getattr(nn, kind)(inputs, hidden, **options)

    def forward(self, x):
        y, states = self.layers(x)
        states = states if isinstance(states, tuple) else (states,)
        return y.square().mean() + sum(state.mean() for state in states)


def compare(model, x, above=0.005, below=0.002, **options):
    """Plans a step, runs two, and returns the plan, which is at most so much above or below.

    Where oneDNN has no LSTM in 16 bits, autocast's steps raise: their plan says so.
    """
    optimizer = torch.optim.SGD(model.parameters())
    amp = options.get("amp")
    try:
        with headroom.memory.track(model, optimizer, batch=x, stacks=False) as tracked:
            for _ in range(2):
                with torch.autocast("cpu", dtype=amp, enabled=amp is not None):
                    loss = model(x)
                loss.backward()
                del loss
                optimizer.step()
                optimizer.zero_grad()
    except RuntimeError:
        assert amp is not None and not torch.ops.mkldnn._is_mkldnn_bf16_supported()
        with pytest.raises(PlanError, match="primitive descriptor for the LSTM"):
            headroom.plan(model, optimizer, x, **options)
        return None
    plan = headroom.plan(model, optimizer, x, **options)
    real = tracked.peak_bytes
    assert (1 - below) * real <= plan.peak_bytes <= (1 + above) * real
    return plan


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_layers": 2, "dropout": 0.3},
        {"num_layers": 2, "bidirectional": True, "batch_first": True},
        {"bias": False, "hidden": 64, "inputs": 250},
        {"hidden": 1},
        {"inputs": 1, "hidden": 65},
    ],
    ids=str,
)
@pytest.mark.parametrize("amp", [None, torch.bfloat16], ids=str)
def test_an_lstm(options, amp):
    model = Recurrent(**options)
    x = torch.randn(STEPS, ROWS, model.layers.input_size)
    exact = {"above": 0, "below": 0} if amp is None else {}
    compare(model, x, amp=amp, **exact)


class Watched(Recurrent):
    """An LSTM that trains nothing, so that its forward pass takes the most."""

    def __init__(self, inputs=INPUTS, hidden=HIDDEN):
        super().__init__(inputs=inputs, hidden=hidden)
        self.layers.requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return self.layers(x)[0][-1].mean() * self.scale


@pytest.mark.parametrize("rows, inputs", [(1, INPUTS), (127, INPUTS), (128, INPUTS), (3, 1)])
def test_a_forward_pass(rows, inputs):
    """How many rows there are decides whether all steps are one product."""
    compare(Watched(inputs), torch.randn(STEPS, rows, inputs), above=0, below=0)


def test_an_lstm_in_16_bits():
    compare(Recurrent(num_layers=2).bfloat16(), torch.randn(STEPS, ROWS, INPUTS).bfloat16())


def test_an_lstm_without_onednn(monkeypatch):
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    plan = compare(Recurrent(bidirectional=True), torch.randn(3, ROWS, INPUTS))
    assert "aten::mkldnn_rnn_layer" not in {a.op for a in plan.timeline.allocations}


@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.parametrize(
    "kind, options",
    [
        ("GRU", {"batch_first": True}),
        ("GRU", {"num_layers": 2}),
        ("RNN", {"bidirectional": True}),
        ("RNN", {"nonlinearity": "relu"}),
        ("LSTM", {"proj_size": 9}),
    ],
)
@pytest.mark.parametrize("amp", [None, torch.bfloat16], ids=str)
def test_layers_that_torch_makes_of_others(kind, options, amp):
    compare(Recurrent(kind, **options), torch.randn(3, ROWS, INPUTS), amp=amp)


class Given(nn.Module):
    """Two LSTMs: state and cell of the first are one tensor, and the second trains nothing."""

    def __init__(self):
        super().__init__()
        self.first = nn.LSTM(INPUTS, HIDDEN)
        self.second = nn.LSTM(HIDDEN, INPUTS).requires_grad_(False)

    def forward(self, x):
        zeros = torch.zeros(1, x.shape[1], HIDDEN)
        y, _ = self.first(x, (zeros, zeros))
        return self.second(y)[0][-1].mean()


class InTwoPasses(nn.Module):
    """LSTMs that are computed twice."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.LSTM(INPUTS, HIDDEN), nn.LSTM(HIDDEN, HIDDEN)

    def forward(self, x):
        for layer in (self.first, self.second):
            x, _ = checkpoint(layer, x, use_reentrant=False)
        return x.mean()


class Frozen(Watched):
    """An LSTM under ``no_grad``: it has no workspace."""

    def forward(self, x):
        with torch.no_grad():
            x, _ = self.layers(x)
        return x[-1].mean() * self.scale


@pytest.mark.parametrize("kind", [Given, InTwoPasses, Frozen])
@pytest.mark.parametrize("amp", [None, torch.bfloat16], ids=str)
def test_lstms_that_keep_less(kind, amp):
    compare(kind(), torch.randn(STEPS, ROWS, INPUTS), amp=amp)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", [Recurrent, Frozen])
def test_large_layers_are_not_run(kind, dtype, monkeypatch):
    """What is then estimated is near what a layer takes, and the plan says so."""
    model, x = kind(inputs=200, hidden=150).to(dtype), torch.randn(STEPS, 200, 200).to(dtype)
    plan = compare(model, x)
    assert "estimate" not in str(plan)
    monkeypatch.setattr(probe, "LIMIT", 0)
    monkeypatch.setattr(probe, "_measured", None)  # which would raise
    monkeypatch.setattr(probe, "_found", {})
    plan = compare(model, x, above=0.3, below=0.1)
    is_onednn = "aten::mkldnn_rnn_layer" in {a.op for a in plan.timeline.allocations}
    assert ("an estimate" in str(plan)) is is_onednn


def test_a_pass_without_gradients_is_asked_of_by_itself():
    """It has no workspace, and its states in the scratch memory instead."""
    x, state = torch.randn(STEPS, ROWS, INPUTS), torch.randn(ROWS, HIDDEN)
    weights = [torch.randn(4 * HIDDEN, n) for n in (INPUTS, HIDDEN)] + [torch.randn(4 * HIDDEN)] * 2
    options = False, [], 2, HIDDEN, 1, True, False, False, True
    found = {}
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            args = x, *weights, state, state.clone(), *options
            found[grad] = probe.asked(torch.ops.aten.mkldnn_rnn_layer.default, args, {})[0]
    assert found[True] != found[False] > 2 * 4 * (STEPS + 1) * ROWS * HIDDEN


def test_packed_sequences_are_refused_by_name():
    class Packed(Recurrent):
        def forward(self, x):
            lengths = [STEPS, STEPS - 2, 4, 4, 1]
            return self.layers(pack_padded_sequence(x, lengths))[0].data.mean()

    x = torch.randn(STEPS, ROWS, INPUTS)
    with pytest.raises(PlanError, match="_pack_padded_sequence"):
        headroom.plan(Packed(), None, x)
    packed = pack_padded_sequence(x, [STEPS, 6, 6, 6, 2])
    with pytest.raises(PlanError, match="_local_scalar_dense.* in 'layers'"):
        headroom.plan(Packed(), None, packed, forward=lambda m, b: m.layers(b)[0].data.mean())


def test_a_plan_for_cuda_says_that_cudnn_is_not_known():
    x = torch.randn(2, ROWS, INPUTS)
    assert "cuDNN" in str(headroom.plan(Recurrent("GRU"), None, x, device="cuda"))
    assert "cuDNN" not in str(headroom.plan(Recurrent("GRU"), None, x))
