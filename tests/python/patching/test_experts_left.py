"""Experts that are left as they are, and why; and those of other classes behind the interface."""

import copy

import headroom
import pytest
import torch
from torch import nn

from helpers.bits import assert_same_bits
from helpers.moe_models import HIDDEN, experts_of, moe_of, step, tokens_of, transformers

moe = pytest.importorskip("transformers.integrations.moe")
OURS = "headroom.functional.experts"


class Config:
    _experts_implementation = "grouped_mm"


class Base(nn.Module):
    """Experts as transformers writes them, whose activation is ``act_fn``."""

    def __init__(self, config, count=4, features=16):
        super().__init__()
        self.num_experts = count
        self.gate_up_proj = nn.Parameter(torch.randn(count, 2 * features, HIDDEN) / 4)
        self.down_proj = nn.Parameter(torch.randn(count, HIDDEN, features) / 4)
        self.act_fn = nn.SiLU()

    def forward(self, rows, chosen, weights):
        y = torch.zeros_like(rows)
        for e in range(self.num_experts):
            token, slot = torch.where(chosen == e)
            z = self._apply_gate(rows[token] @ self.gate_up_proj[e].T)
            z = self.after(z @ self.down_proj[e].T) * weights[token, slot, None]
            y.index_add_(0, token, z.to(y.dtype))
        return y

    def after(self, y):
        return y


def behind_the_interface(**members):
    layout = members.pop("layout", {})
    return moe.use_experts_implementation(type("Experts", (Base,), members), **layout)(Config())


def report_of(module):
    model = nn.ModuleDict({"experts": module})
    return headroom.patch(model)


class TestRecognized:
    def test_any_class_behind_the_interface(self):
        module = behind_the_interface()
        assert [one.now for one in report_of(module).swapped["experts"]] == [OURS]
        args = torch.randn(5, HIDDEN), torch.tensor([[0, 1]] * 5), torch.rand(5, 2)
        got = module(*args)
        headroom.unpatch(module)
        torch.testing.assert_close(got, type(module).forward.__wrapped__(module, *args))

    def test_an_activation_that_computes_in_float32(self):
        def gate(self, z):
            a, b = z.chunk(2, -1)
            return (torch.nn.functional.silu(a.float()) * b.float()).to(z.dtype)

        assert report_of(behind_the_interface(_apply_gate=gate)).swapped

    @pytest.mark.parametrize("limit", [1.5, 7.0, 200.0])
    def test_clamps_by_their_attributes(self, limit):
        def gate(self, z):
            a, b = z[..., ::2].clamp(max=self.limit), z[..., 1::2].clamp(-self.limit, self.limit)
            return (b + 1) * a * torch.sigmoid(a * self.alpha)

        module = behind_the_interface(_apply_gate=gate, layout={"is_concatenated": False})
        module.alpha, module.limit = 1.3, limit
        assert report_of(module).swapped
        args = 30 * torch.randn(5, HIDDEN), torch.tensor([[0, 1]] * 5), torch.rand(5, 2)
        got = module(*args)
        headroom.unpatch(module)
        want = type(module).forward.__wrapped__(module, *args)
        assert (got - want).norm() <= 1e-5 * want.norm()

    def test_arguments_by_name(self):
        module = behind_the_interface()
        report_of(module)
        rows, chosen, weights = torch.randn(5, HIDDEN), torch.tensor([[0]] * 5), torch.rand(5, 1)
        want = module(rows, chosen, weights)
        assert torch.equal(module(rows, weights=weights, chosen=chosen), want)


def limited(self, z):
    a, b = z.chunk(2, -1)
    return self.act_fn(a.clamp(max=10.0)) * b.clamp(-10.0, 10.0)


def plus_one(self, z):
    a, b = z.chunk(2, -1)
    return self.act_fn(a) * (b + 1)


UNKNOWN = "none of the activations that headroom.functional has"
CASES = {
    "another activation": (dict(), lambda m: setattr(m, "act_fn", nn.GELU()), UNKNOWN),
    "clamps of silu": (dict(_apply_gate=limited), None, UNKNOWN),
    "one more": (dict(_apply_gate=plus_one), None, UNKNOWN),
    "a scale behind": (dict(after=lambda self, y: 1.001 * y), None, UNKNOWN),
    "raises": (dict(after=lambda self, y: y.no_such()), None, UNKNOWN),
    "the other layout": (dict(layout={"is_transposed": True}), None, UNKNOWN),
    "interleaved": (dict(layout={"is_concatenated": False}), None, UNKNOWN),
    "a norm": (dict(layout={"has_post_expert_norm": True}), None, "a norm behind each expert"),
    "biases": (dict(layout={"has_bias": True}), None, "not those of the interface"),
    "a parameter besides": (
        dict(),
        lambda m: m.register_parameter("scale", nn.Parameter(torch.ones(4))),
        "not those of the interface",
    ),
    "a hook inside": (
        dict(),
        lambda m: m.act_fn.register_forward_hook(lambda *_: None),
        "its activation has hooks",
    ),
    "a forward of its own": (
        dict(),
        lambda m: setattr(m, "forward", lambda *args: args[0]),
        "something else has replaced its forward",
    ),
    "ranks": (dict(), lambda m: setattr(m, "_is_expert_parallel", True), "spread over ranks"),
    "parametrized": (
        dict(),
        lambda m: nn.utils.parametrize.register_parametrization(m, "down_proj", nn.Identity()),
        "parametrized, and not by bitsandbytes alone",
    ),
    "of a subclass": (
        dict(),
        lambda m: m._parameters.update(down_proj=nn.Parameter(Odd(m.down_proj.detach()))),
        "tensors of another class",
    ),
}


class Odd(torch.Tensor):
    pass


@pytest.mark.parametrize("case", CASES)
def test_what_is_left_is_reported(case):
    members, change, reason = CASES[case]
    module = behind_the_interface(**copy.copy(members))
    if change is not None:
        change(module)
    attributes, seed = dict(vars(module)), torch.get_rng_state()
    report = report_of(module)
    assert not report.swapped and [one.name for one in report.left] == ["experts"]
    assert reason in report.left[0].reason
    assert vars(module) == attributes and torch.equal(seed, torch.get_rng_state())


def test_another_forward_of_a_class():
    parent = type(behind_the_interface())

    class Other(parent):
        def forward(self, *args):
            return super().forward(*args) * 2

    report = report_of(Other(Config()))
    assert "the forward of Other is not that of the interface" in str(report)


def test_an_implementation_that_somebody_has_registered(monkeypatch):
    module = behind_the_interface()
    functions = type(moe.ALL_EXPERTS_FUNCTIONS)._global_mapping
    monkeypatch.setitem(functions, "mine", lambda self, x, *_: x)
    module.config = Config()
    module.config._experts_implementation = "mine"
    assert "experts_implementation, mine, is not one of tr" in str(report_of(module))


def test_adapters_beside_experts():
    peft = pytest.importorskip("peft")
    model = moe_of("Mixtral")
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"]))
    want = step(adapted, tokens_of())
    assert OURS in str(headroom.patch(adapted, "L2", norms=False))
    torch.testing.assert_close(step(adapted, tokens_of()), want)


def test_calls_that_the_op_does_not_take():
    module = behind_the_interface()
    report_of(module)
    rows, chosen, weights = torch.randn(5, HIDDEN), torch.tensor([[0, 2]] * 5), torch.rand(5, 2)
    want = module(rows, chosen, weights)
    module.config._experts_implementation = "eager"
    with torch.no_grad():
        mapped = torch.func.vmap(lambda x: x * 1)(rows)
    torch.testing.assert_close(module(mapped, chosen, weights), want)
    got = module.double()(rows.double(), chosen, weights.double())
    assert got.dtype == torch.float64
    torch.testing.assert_close(got.float(), want)


def test_rows_in_another_dtype_than_the_stacks():
    module = behind_the_interface().bfloat16()
    rows, chosen, weights = torch.randn(5, HIDDEN), torch.tensor([[0, 2]] * 5), torch.rand(5, 2)
    want = module(rows, chosen, weights)
    report_of(module)
    got = module(rows, chosen, weights)
    assert got.dtype == want.dtype == torch.float32
    torch.testing.assert_close(got, want, rtol=0.05, atol=0.05)
    module.float()
    assert module(rows.bfloat16(), chosen, weights.bfloat16()).dtype == torch.bfloat16


def test_no_hook_of_the_experts_is_lost():
    model, inputs = moe_of("Mixtral"), tokens_of()
    seen = []
    module = next(iter(experts_of(model).values()))
    module.register_forward_hook(lambda *_: seen.append(1))
    headroom.patch(model, norms=False)
    step(model, inputs)
    assert seen == [1]


def test_no_later_hook_of_an_activation_is_lost():
    model, inputs = moe_of("Mixtral"), tokens_of()
    headroom.patch(model, norms=False)
    want = step(model, inputs)
    seen = []
    module = next(iter(experts_of(model).values()))
    handle = module.act_fn.register_forward_hook(lambda *_: seen.append(1))
    torch.testing.assert_close(step(model, inputs), want)
    assert seen
    handle.remove()
    assert_same_bits(step(model, inputs).values(), want.values())


def test_llama4_is_not_behind_the_interface():
    config = transformers.Llama4TextConfig(
        vocab_size=61, hidden_size=32, intermediate_size=16, intermediate_size_mlp=16, head_dim=8,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, num_local_experts=4,
    )  # fmt: skip
    model = transformers.Llama4ForCausalLM(config).train()
    want = step(model, tokens_of())
    report = headroom.patch(model, "L5", norms=False)
    assert OURS not in str(report)
    assert_same_bits(step(model, tokens_of()).values(), want.values())
