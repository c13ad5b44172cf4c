"""Which norms ``headroom.patch`` recognizes in a model of any kind, and which it leaves alone."""

from __future__ import annotations

import copy

import headroom
import pytest
import torch
import torch.nn.functional as F
from headroom.patching.norms import is_norm, recognized_norm
from torch import nn
from torch.nn.utils import parametrize

from helpers import foreign_models as models
from helpers.foreign_models import HIDDEN


class WrongRMSNorm(models.RMSNorm):
    """Divides by the length of the row, which is not its root mean square."""

    def forward(self, x):
        return x / (x.norm(dim=-1, keepdim=True) + self.eps) * self.weight


class GatedRMSNorm(models.RMSNorm):
    def forward(self, x, gate=None):
        y = super().forward(x)
        return y if gate is None else y * F.silu(gate)


class ColumnRMSNorm(models.RMSNorm):
    """Normalizes the last dimension but one, which has the same size in some inputs."""

    def forward(self, x):
        return super().forward(x.transpose(-1, -2)).transpose(-1, -2)


class DeviationLayerNorm(models.LayerNorm):
    """As in the Annotated Transformer: the unbiased deviation, to which eps is added."""

    def forward(self, x):
        return self.weight * (x - x.mean(-1, True)) / (x.std(-1, keepdim=True) + 1e-6) + self.bias


class ClampedRMSNorm(models.RMSNorm):
    def forward(self, x):
        return super().forward(x).clamp(-3, 3)


class Float32LayerNorm(nn.LayerNorm):
    def forward(self, x):
        return super().forward(x.float()).type_as(x)


class LayerNorm2d(nn.LayerNorm):
    """Of images whose channels come first."""

    def forward(self, x):
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class T5LayerNorm(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.rand(dim)), 1e-6

    def forward(self, hidden_states):
        variance = hidden_states.to(torch.float32).pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
        if self.weight.dtype in [torch.float16, torch.bfloat16]:
            hidden_states = hidden_states.to(self.weight.dtype)
        return self.weight * hidden_states


class OffsetRMSNorm(models.RMSNorm):
    def forward(self, x):
        return (self._norm(x.float()) * (1.0 + self.weight.float())).type_as(x)


class WideRMSNorm(models.RMSNorm):
    """Gives float32 under autocast, as torch's norms do on a GPU."""

    def forward(self, x):
        y = super().forward(x)
        return y.float() if torch.is_autocast_enabled("cpu") else y


class CountingRMSNorm(models.RMSNorm):
    calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x)


class TestNorms:
    @pytest.mark.parametrize(
        "module",
        [
            WrongRMSNorm(HIDDEN),
            ColumnRMSNorm(HIDDEN),
            DeviationLayerNorm(HIDDEN, True),
            ClampedRMSNorm(HIDDEN),
            CountingRMSNorm(HIDDEN),
            LayerNorm2d(HIDDEN),
            nn.LayerNorm((4, HIDDEN)),
            nn.LayerNorm(HIDDEN).double(),
        ],
        ids=lambda module: type(module).__name__,
    )
    def test_left_alone(self, module):
        model = nn.Sequential(nn.Linear(3, HIDDEN), module)
        before = dict(vars(module))
        report = headroom.patch(model)
        assert not report.changed and vars(module) == before
        assert not is_norm(module) or [left.name for left in report.left] == ["1"]

    @pytest.mark.parametrize(
        "module, rule",
        [
            (models.RMSNorm(HIDDEN), ("RMSNorm", "eps", 0.0, "llama")),
            (OffsetRMSNorm(HIDDEN, 1e-3), ("RMSNorm", "eps", 1.0, "once")),
            (T5LayerNorm(HIDDEN), ("RMSNorm", "variance_epsilon", 0.0, "llama")),
            (nn.RMSNorm(HIDDEN, 1e-5), ("RMSNorm", "eps", 0.0, "once")),
            (nn.RMSNorm(HIDDEN), ("RMSNorm", 2.0**-23, 0.0, "once")),
            (nn.RMSNorm(HIDDEN, 1e-5, False), ("RMSNorm", "eps", 0.0, "once")),
            (nn.LayerNorm(HIDDEN), ("LayerNorm", "eps", 0.0, "once")),
            (nn.LayerNorm(HIDDEN, bias=False), ("LayerNorm", "eps", 0.0, "once")),
            (models.LayerNorm(HIDDEN, True), ("LayerNorm", 1e-5, 0.0, "once")),
            (Float32LayerNorm(HIDDEN), ("LayerNorm", "eps", 0.0, "once")),
        ],
        ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
    )
    @pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16), ids=str)
    def test_rules(self, module, rule, dtype):
        module = copy.deepcopy(module).to(dtype)
        found = recognized_norm(module)
        assert recognized_norm(copy.deepcopy(module).to("meta")) == found
        if isinstance(module, Float32LayerNorm) and dtype != torch.float32:
            assert "computes something else" in found
            return
        assert not isinstance(found, str), found
        assert (found.kind, found.eps, found.offset, found.casting) == rule

    @pytest.mark.parametrize("eps", [1e-5, 1e-6, 1e-12, 1e-8, 1e-3, 0.0])
    @pytest.mark.parametrize("columns", [HIDDEN, 500])
    def test_eps_in_the_code(self, eps, columns):
        """Rows of the trial tell each from the others; nobody's random numbers are drawn for it."""

        class HiddenRMSNorm(nn.Module):
            def __init__(self):
                super().__init__()
                self.weight = nn.Parameter(torch.rand(columns))

            def forward(self, x):
                return x * (x.square().mean(-1, True) + eps).rsqrt() * self.weight

        module, state = HiddenRMSNorm(), torch.get_rng_state()
        found = recognized_norm(module)
        assert torch.equal(torch.get_rng_state(), state)
        assert (found.kind, found.eps) == ("RMSNorm", eps)

    def test_ranks_and_dtypes_that_a_norm_takes(self):
        class RowsOfTokensRMSNorm(models.RMSNorm):
            def forward(self, x):
                if x.dim() != 3:
                    raise ValueError("wanted [batch, tokens, columns]")
                return super().forward(x)

        class MultipliedRMSNorm(models.RMSNorm):
            """Takes the mean by a product, which autocast lowers."""

            def forward(self, x):
                mean = x.square() @ x.new_full((x.shape[-1], 1), 1 / x.shape[-1])
                return x * (mean + self.eps).rsqrt() * self.weight

        found = recognized_norm(RowsOfTokensRMSNorm(HIDDEN))
        assert found.ranks == (3,) and torch.bfloat16 in found.dtypes
        assert found.autocast == ("cpu",)
        wide = recognized_norm(WideRMSNorm(HIDDEN))
        assert torch.bfloat16 in wide.dtypes and wide.autocast == ()
        plain = recognized_norm(models.RMSNorm(HIDDEN))
        assert plain.ranks == (2, 3, 4) and plain.autocast == ("cpu",)
        with torch.autocast("cpu", torch.bfloat16):
            found = recognized_norm(MultipliedRMSNorm(HIDDEN))
        assert found.kind == "RMSNorm" and found == recognized_norm(MultipliedRMSNorm(HIDDEN))

    def test_a_norm_of_several_dimensions_is_left_alone(self):
        norm = nn.LayerNorm((4, HIDDEN), elementwise_affine=False)
        (left,) = headroom.patch(norm).left
        assert left.reason == "it normalizes more than the last dimension"

    def test_a_gate_beside_the_input_is_passed_on(self):
        module = GatedRMSNorm(HIDDEN)
        x, gate = torch.randn(4, HIDDEN), torch.randn(4, HIDDEN)
        wanted = module(x, gate), module(x, gate=gate), module(x=x)
        assert headroom.patch(module).changed
        assert torch.equal(module(x, gate), wanted[0])
        assert torch.equal(module(x, gate=gate), wanted[1])
        assert torch.equal(module(x=x), wanted[2])

    def test_dtypes_of_results_stay(self):
        """Where dtypes differ, and under autocast, modules differ in theirs."""
        norms = [models.RMSNorm(HIDDEN), OffsetRMSNorm(HIDDEN), nn.LayerNorm(HIDDEN)]
        norms.append(WideRMSNorm(HIDDEN))
        for norm in norms:
            for weight_dtype in (torch.float32, torch.bfloat16):
                for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
                    for autocast in (False, True):
                        own, ours = (copy.deepcopy(norm).to(weight_dtype) for _ in range(2))
                        assert headroom.patch(ours).changed
                        x = torch.randn(3, HIDDEN).to(dtype)
                        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                            try:
                                wanted = own(x)
                            except RuntimeError:  # LayerNorm takes few pairs of dtypes
                                with pytest.raises(RuntimeError):
                                    ours(x)
                                continue
                            got = ours(x)
                        assert got.dtype == wanted.dtype
                        eps = torch.finfo(wanted.dtype).eps if dtype != torch.float64 else 0
                        assert (got - wanted).abs().max() <= 2 * eps * wanted.abs().max()

    def test_moved_to_float64_and_back(self):
        model, x = models.llama(), models.tokens()
        exact = models.in_float64(model, x)
        headroom.patch(model)
        assert all(map(torch.equal, models.outputs_and_gradients(model.double(), x), exact))
        model.float()(x).sum().backward()

    @pytest.mark.parametrize("what", ["parametrized", "replaced", "scripted"])
    def test_what_has_been_changed_is_left_alone(self, what):
        norm = nn.LayerNorm(HIDDEN)
        if what == "parametrized":
            parametrize.register_parametrization(norm, "weight", nn.Identity())
        elif what == "replaced":
            norm.forward = lambda x: x  # type: ignore[method-assign]
        else:
            norm = torch.jit.script(norm)
        report = headroom.patch(nn.Sequential(norm, nn.LayerNorm(HIDDEN)))
        assert list(report.swapped) == ["1"]
        reasons = {"replaced": "replaced its forward", "scripted": "compiled by torch.jit"}
        assert reasons.get(what, "") in "".join(left.reason for left in report.left)

    def test_hooks_run_as_before(self):
        model, x = models.llama(), models.tokens()
        calls = []
        model.norm.register_forward_pre_hook(lambda *_: calls.append("before"))
        model.norm.register_forward_hook(lambda *_: calls.append("after"))
        model.norm.register_full_backward_hook(lambda *_: calls.append("backward"))
        report = headroom.patch(model)
        assert not calls, "a trial called a hook"
        assert "norm" in report.swapped and not report.left
        model(x).sum().backward()
        assert calls == ["before", "after", "backward"]

    def test_models_of_cast_model(self):
        model, x = models.llama(), models.tokens()
        headroom.cast_model(model, torch.bfloat16)
        wanted = model(x)
        report = headroom.patch(model)
        swaps = [swap for one in report.swapped.values() for swap in one]
        # Processors that multiply slowly in 16 bits get other layers for that too.
        assert sum(swap.kind != "Linear" for swap in swaps) == 5
        got = model(x)
        assert got.dtype == wanted.dtype
        assert (got - wanted).abs().max() <= 0.02 * wanted.abs().max()
