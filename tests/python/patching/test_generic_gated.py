"""Which gated units ``headroom.patch`` recognizes in a model of any kind, and which it leaves
alone."""

from __future__ import annotations

import headroom
import pytest
import torch
import torch.nn.functional as F
from headroom.patching.gated import recognized_glu
from torch import nn

from helpers import foreign_models as models
from helpers.generic_models import FEATURES, HIDDEN, Unit, kinds


class InnerDropout(Unit):
    def forward(self, x):
        return self.down_proj(self.drop(self.act(self.gate_proj(x)) * self.up_proj(x)))


class OuterDropout(Unit):
    def forward(self, x):
        return self.drop(super().forward(x))


class FunctionalDropout(Unit):
    def forward(self, x):
        return F.dropout(super().forward(x), 0.3, self.training)


class InputDropout(Unit):
    def forward(self, x):
        return super().forward(self.drop(x))


class Clamped(Unit):
    """As in GPT-OSS."""

    def forward(self, x):
        gate, up = self.gate_proj(x).clamp(max=7.0), self.up_proj(x).clamp(-7.0, 7.0)
        return self.down_proj(self.act(gate) * up)


class Scaled(Unit):
    def forward(self, x):
        return super().forward(x) * 0.5


class AddsInput(Unit):
    def forward(self, x):
        return x + super().forward(x)


class PlusOne(Unit):
    def forward(self, x):
        return self.down_proj(self.act(self.gate_proj(x)) * (self.up_proj(x) + 1))


class Swapped(Unit):
    def forward(self, x):
        return self.down_proj(self.gate_proj(x) * self.act(self.up_proj(x)))


class TwiceGated(Unit):
    def forward(self, x):
        return self.down_proj(self.act(self.gate_proj(x)) * self.gate_proj(x))


class EvalOnly(Unit):
    """Is a gated unit in one mode only."""

    def forward(self, x):
        y = super().forward(x)
        return y if self.training else y * 2


class Counts(Unit):
    calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x)


class LearnedActivation(Unit):
    """Is SiLU until it learns."""

    def __init__(self) -> None:
        super().__init__()
        self.beta = nn.Parameter(torch.ones(()))

    def forward(self, x):
        gate = self.gate_proj(x)
        return self.down_proj(gate * (gate * self.beta).sigmoid() * self.up_proj(x))


class Part(nn.Module):
    """A part that does nothing yet."""

    def __init__(self, scale: bool) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(())) if scale else 1

    def forward(self, x):
        return x * self.scale


class ScaledByAPart(Unit):
    def __init__(self, scale: bool) -> None:
        super().__init__()
        self.part = Part(scale)

    def forward(self, x):
        return self.part(super().forward(x))


class Packed(nn.Module):
    def __init__(self, gate_first: bool = True) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(HIDDEN, 2 * FEATURES)
        self.down_proj = nn.Linear(FEATURES, HIDDEN)
        self.gate_first = gate_first

    def forward(self, x):
        gate, up = self.gate_up_proj(x).chunk(2, -1)
        return self.down_proj(F.silu(gate) * up if self.gate_first else F.silu(up) * gate)


class TestGatedUnits:
    @pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16), ids=str)
    @pytest.mark.parametrize(
        "act, name",
        [
            (F.silu, "silu"),
            (F.gelu, "gelu"),
            (nn.GELU("tanh"), "gelu_tanh"),
            (nn.ReLU(), "relu"),
            (lambda x: F.relu(x) ** 2, "relu_squared"),
        ],
        ids=["silu", "gelu", "gelu_tanh", "relu", "relu_squared"],
    )
    def test_activations(self, act, name, dtype):
        rule = recognized_glu(Unit(act).to(dtype))
        assert not isinstance(rule, str), rule
        assert rule.activation == name

    @pytest.mark.parametrize(
        "act", [torch.tanh, torch.sigmoid, lambda x: x * (1.702 * x).sigmoid()]
    )
    @pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
    def test_other_activations(self, act, dtype):
        assert "activation" in recognized_glu(Unit(act).to(dtype))

    @pytest.mark.parametrize("p", [0.0, 0.4])
    @pytest.mark.parametrize("cls", [InnerDropout, OuterDropout])
    def test_dropout_modules(self, cls, p):
        unit, x = cls(drop=p), torch.randn(2, 3, HIDDEN)
        assert headroom.patch(unit).changed
        for later in (p, 0.7):
            unit.drop.p = later
            torch.manual_seed(1)
            got = unit(x)
            torch.manual_seed(1)
            assert torch.allclose(got, type(unit).forward(unit, x), rtol=1e-5, atol=1e-6)
            assert unit.eval()(x).count_nonzero() == got.numel() and unit.train()

    @pytest.mark.parametrize(
        "unit",
        [
            FunctionalDropout(),
            InputDropout(drop=0.0),
            Clamped(),
            Scaled(),
            AddsInput(),
            PlusOne(),
            Swapped(),
            TwiceGated(),
            EvalOnly(),
            Counts(),
            LearnedActivation(),
            ScaledByAPart(True),
            ScaledByAPart(False),
            Packed(gate_first=False),
            Unit().double(),
            Unit().to("meta"),
        ],
        ids=lambda unit: type(unit).__name__,
    )
    def test_left_alone(self, unit):
        before = dict(vars(unit))
        state = torch.get_rng_state()
        report = headroom.patch(unit)
        assert not report.changed and len(report.left) == 1
        assert vars(unit) == before and torch.equal(state, torch.get_rng_state())
        assert not any(m._forward_hooks for m in unit.modules())

    def test_packed(self):
        unit, x = Packed(), torch.randn(5, HIDDEN)
        exact, theirs = models.in_float64(unit, x), models.outputs_and_gradients(unit, x)
        assert kinds(headroom.patch(unit)) == ["SwiGLU"]
        models.assert_as_good(models.outputs_and_gradients(unit, x), theirs, exact)

    def test_a_part_that_is_shared_or_replaced_later(self):
        unit, x = Unit(), torch.randn(5, HIDDEN)
        assert headroom.patch(unit).changed
        unit.up_proj = unit.gate_proj
        assert torch.allclose(unit(x), Unit.forward(unit, x), rtol=1e-5, atol=1e-6)
        unit.down_proj = nn.Linear(FEATURES, 7)
        assert unit(x).shape == (5, 7)
