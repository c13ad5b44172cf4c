"""What ``headroom.patch`` recognizes in a model of any kind, and what it leaves alone."""

from __future__ import annotations

import copy

import headroom
import pytest
import torch
import torch.nn.functional as F
from headroom.patching.gated import recognized_glu
from headroom.patching.norms import is_norm, recognized_norm
from torch import nn
from torch.autograd import forward_ad
from torch.nn.utils import parametrize

from helpers import foreign_models as models

HIDDEN, FEATURES = models.HIDDEN, models.FEATURES


def kinds(report):
    return sorted(swap.kind for swaps in report.swapped.values() for swap in swaps)


class TestModels:
    CASES = {
        "llama": (models.llama, models.tokens, 5 * ["RMSNorm"] + 2 * ["SwiGLU"]),
        "nano_gpt": (models.nano_gpt, models.tokens, 5 * ["LayerNorm"]),
        "vision": (models.Vision, models.images, 5 * ["LayerNorm"]),
        "convolutions": (models.Convolutions, models.images, []),
    }

    @pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16), ids=str)
    @pytest.mark.parametrize("case", CASES)
    def test_values_and_gradients(self, case, dtype):
        make, inputs, wanted = self.CASES[case]
        model, x = make().to(dtype), inputs()
        x = x.to(dtype) if x.is_floating_point() else x
        exact, theirs = models.in_float64(model, x), models.outputs_and_gradients(model, x)
        keys = list(model.state_dict())
        report = headroom.patch(model)
        assert kinds(report) == wanted and report.changed == bool(wanted)
        assert list(model.state_dict()) == keys and report.architecture is None
        models.assert_as_good(models.outputs_and_gradients(model, x), theirs, exact)
        headroom.unpatch(model)
        again = models.outputs_and_gradients(model, x)
        assert all(map(torch.equal, again, theirs))

    def test_fewer_bytes_are_kept(self):
        def kept(model):
            seen = {}

            def pack(t):
                seen[t.untyped_storage()._cdata] = t.untyped_storage().nbytes()
                return t

            with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
                y = model(x)
            del y
            return sum(seen.values())

        model, x = models.llama(), torch.randint(0, 40, (4, 64))
        before = kept(model)
        headroom.patch(model)
        rows, width = x.numel(), torch.float32.itemsize
        # Of each gated unit the result of the activation, and of each norm all but its input.
        assert before - kept(model) >= 2 * rows * FEATURES * width + 5 * rows * HIDDEN * width

    def test_dropout_behind_a_gated_unit_draws_the_same(self):
        model, x = models.llama(dropout=0.3), models.tokens()
        exact, theirs = models.in_float64(model, x), models.outputs_and_gradients(model, x)
        assert "SwiGLU" in kinds(headroom.patch(model))
        models.assert_as_good(models.outputs_and_gradients(model, x), theirs, exact)

    @pytest.mark.parametrize("training", (True, False))
    def test_transformer_encoder_of_torch(self, training):
        layer = nn.TransformerEncoderLayer(
            HIDDEN, 4, FEATURES, dropout=0.0, batch_first=True, norm_first=True
        )
        model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).train(training)
        for p in model.parameters():
            nn.init.normal_(p, std=0.3)
        x = torch.randn(2, 5, HIDDEN)
        exact, theirs = models.in_float64(model, x), models.outputs_and_gradients(model, x)
        report = headroom.patch(model, "L5")
        assert kinds(report) == 4 * ["LayerNorm"] and [*report.levels.values()] == ["L5", "L5"]
        models.assert_as_good(models.outputs_and_gradients(model, x), theirs, exact)

    def test_the_fast_path_of_torch_gets_nested_tensors(self):
        layer = nn.TransformerEncoderLayer(HIDDEN, 4, FEATURES, batch_first=True)
        model = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(HIDDEN)).eval()
        x, padding = torch.randn(2, 5, HIDDEN), torch.zeros(2, 5, dtype=torch.bool)
        padding[1, 3:] = True
        with torch.no_grad():
            wanted = model(x, src_key_padding_mask=padding)
            headroom.patch(model, "L5")
            assert torch.allclose(model(x, src_key_padding_mask=padding), wanted, atol=1e-5)

    @pytest.mark.slow  # imports transformers
    def test_models_of_transformers_that_are_not_known(self):
        transformers = pytest.importorskip("transformers")
        config = transformers.T5Config(
            vocab_size=40, d_model=HIDDEN, d_ff=FEATURES, d_kv=8, num_layers=2, num_heads=4,
            feed_forward_proj="gated-gelu", dropout_rate=0.1,
        )  # fmt: skip
        config.use_cache = True  # which a second run of a decoder block must not write to
        model = transformers.T5ForConditionalGeneration(config)
        x = models.tokens()
        options = {"decoder_input_ids": x}
        exact = models.in_float64(model, x, **options)
        theirs = models.outputs_and_gradients(model, x, **options)
        before = model.encoder.block[0].gradient_checkpointing
        report = headroom.patch(model, "L5")
        assert kinds(report) == 4 * ["GeGLU"] + 12 * ["RMSNorm"]
        assert list(report.levels) == [
            f"{p}.block.{k}" for p in ("encoder", "decoder") for k in (0, 1)
        ]
        models.assert_as_good(models.outputs_and_gradients(model, x, **options), theirs, exact)
        calls = []
        model.decoder.block[0].layer[0].register_forward_hook(lambda *_: calls.append(1))
        model(x, **options).logits.sum().backward()
        assert len(calls) == 2
        headroom.unpatch(model)
        assert model.encoder.block[0].gradient_checkpointing == before
        assert "_gradient_checkpointing_func" not in vars(model.encoder.block[0])


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
            nn.LayerNorm(HIDDEN, device="meta"),
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
        if isinstance(module, Float32LayerNorm) and dtype != torch.float32:
            assert "computes something else" in found
            return
        assert not isinstance(found, str), found
        assert (found.kind, found.eps, found.offset, found.casting) == rule

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
        report = headroom.patch(nn.Sequential(norm))
        assert not report.changed
        if what == "replaced":
            assert "replaced its forward" in report.left[0].reason

    def test_hooks_run_as_before(self):
        model, x = models.llama(), models.tokens()
        calls = []
        model.norm.register_forward_pre_hook(lambda *_: calls.append("before"))
        model.norm.register_forward_hook(lambda *_: calls.append("after"))
        model.norm.register_full_backward_hook(lambda *_: calls.append("backward"))
        model.layers[0].mlp.w2.register_forward_hook(lambda *_: calls.append("w2"))
        report = headroom.patch(model)
        assert not calls, "a trial called a hook"
        assert "norm" in report.swapped and "layers.1.mlp" in report.swapped
        assert [(left.name, "has hooks" in left.reason) for left in report.left] == [
            ("layers.0.mlp", True)
        ]
        model(x).sum().backward()
        assert calls == ["w2", "before", "after", "backward"]

    def test_models_of_cast_model(self):
        model, x = models.llama(), models.tokens()
        headroom.cast_model(model, torch.bfloat16)
        wanted = model(x)
        report = headroom.patch(model)
        assert len(report.swapped) == 7
        got = model(x)
        assert got.dtype == wanted.dtype
        assert (got - wanted).abs().max() <= 0.02 * wanted.abs().max()


class Unit(nn.Module):
    """A gated unit whose parts a test chooses."""

    def __init__(self, act=F.silu, drop: float | None = None) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(HIDDEN, FEATURES)
        self.up_proj = nn.Linear(HIDDEN, FEATURES)
        self.down_proj = nn.Linear(FEATURES, HIDDEN)
        self.act = act
        if drop is not None:
            self.drop = nn.Dropout(drop)

    def forward(self, x):
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))


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


class TestCalls:
    """Ways to call a model in which an op cannot run, or should not be seen."""

    def test_torch_func(self, monkeypatch):
        monkeypatch.setattr(models.Attention, "forward", lambda self, x: self.out(x))
        model, x = models.llama(), models.tokens()
        params = {k: v.detach() for k, v in model.named_parameters()}

        def loss(params, x):
            return torch.func.functional_call(model, params, (x,)).square().mean()

        def per_sample(params, x):
            return loss(params, x[None])

        vmapped = torch.vmap(torch.func.grad(per_sample), (None, 0))
        tangents = {k: torch.ones_like(v) for k, v in params.items()}
        wanted = vmapped(params, x), torch.func.jvp(lambda p: loss(p, x), (params,), (tangents,))
        headroom.patch(model, "L5")
        for name, grad in vmapped(params, x).items():
            assert torch.equal(grad, wanted[0][name])
        assert torch.func.jvp(lambda p: loss(p, x), (params,), (tangents,)) == wanted[1]

    @pytest.mark.parametrize(
        "empty", [(0, HIDDEN), (2, 0, HIDDEN), (HIDDEN,), (1, 2, 3, 4, HIDDEN)]
    )
    def test_shapes_that_no_trial_had(self, empty):
        norm, unit, x = nn.LayerNorm(HIDDEN), Unit(), torch.randn(empty)
        wanted = norm(x), unit(x)
        assert headroom.patch(norm).changed and headroom.patch(unit).changed
        assert torch.allclose(norm(x), wanted[0], atol=1e-6)
        assert torch.allclose(unit(x), wanted[1], atol=1e-6)

    def test_fake_tensors_show_what_is_kept(self):
        from torch._subclasses.fake_tensor import FakeTensorMode

        model, x = models.llama(), models.tokens()
        headroom.patch(model)
        with FakeTensorMode() as mode:
            params = {name: mode.from_tensor(p) for name, p in model.named_parameters()}
            y = torch.func.functional_call(model, params, (mode.from_tensor(x),))
            names, nodes = set(), [y.grad_fn]
            while nodes:
                node = nodes.pop()
                names.add(node.name())
                nodes += [inner for inner, _ in node.next_functions if inner is not None]
        assert {"headroom::rms_norm_backward", "headroom::glu_backward"} <= names

    def test_nested_tensors(self):
        norm, rows = nn.LayerNorm(HIDDEN), [torch.randn(k, HIDDEN) for k in (2, 3)]
        x = torch.nested.nested_tensor(rows, layout=torch.jagged)
        headroom.patch(norm)
        for got, row in zip(norm(x).unbind(), rows):
            assert torch.allclose(got, norm(row), atol=1e-6)

    def test_forward_mode(self):
        norm, unit, x = models.RMSNorm(HIDDEN), Unit(), torch.randn(3, HIDDEN)
        model = nn.Sequential(norm, unit)
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(x, torch.ones_like(x))
            wanted = forward_ad.unpack_dual(model(dual)).tangent
            headroom.patch(model)
            assert torch.equal(forward_ad.unpack_dual(model(dual)).tangent, wanted)

    def test_strides(self):
        model = models.llama()
        headroom.patch(model)
        x = torch.randn(HIDDEN, 6, 4).permute(2, 1, 0)
        for module in (model.norm, model.layers[0].mlp):
            assert torch.equal(module(x), module(x.contiguous()))

    def test_wrong_shapes_raise_as_before(self):
        norm = models.RMSNorm(HIDDEN)
        x = torch.randn(3, 1)  # which the module itself broadcasts
        wanted = norm(x)
        headroom.patch(norm)
        assert torch.equal(norm(x), wanted)
        with pytest.raises(RuntimeError, match="size"):
            norm(torch.randn(3, 5))

    @pytest.mark.slow
    def test_exported_programs_have_no_op_of_ours(self):
        model, x = models.llama(), models.tokens()
        headroom.patch(model, "L5")
        program = torch.export.export(model.eval(), (x,))
        assert "headroom" not in str(program.graph)
