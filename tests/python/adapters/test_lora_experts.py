"""Experts of mixtures with adapters: gradients, levels, which stacks get one and of which rank."""

import copy
import pickle

import headroom
import pytest
import torch
from headroom.adapters import adapters_disabled, delete_adapter, use_adapters
from headroom.nn import LoRAExperts
from torch import nn

from helpers.bits import assert_same_bits
from helpers.hf_models import outputs, shaken, transformers
from helpers.interrupting import Interrupting
from helpers.kept import kept_bytes
from helpers.moe_models import (
    CHOSEN,
    EXPERTS,
    FAMILIES,
    FEATURES,
    HIDDEN,
    TOKENS,
    experts_of,
    moe_of,
    step,
    tokens_of,
)

LEVELS = "L0", "L1", "L2", "L5"


@pytest.fixture(autouse=True)
def _quiet():
    transformers.utils.logging.set_verbosity_error()


def adapted(name, rank=4, seed=3, **options):
    """Returns a model whose adapters are not zero."""
    model = moe_of(name)
    headroom.lora(model, rank, **({"experts": True} | options))
    torch.manual_seed(seed)
    for p in model.parameters():
        if p.requires_grad:
            nn.init.normal_(p, std=0.1)
    return model


def lora_of(model):
    return {name: one for name, one in model.named_modules() if isinstance(one, LoRAExperts)}


def left(report):
    return {one.name: one.reason for one in report.left}


def rows_of(module, tokens=40, dtype=torch.float32):
    g = torch.Generator().manual_seed(0)
    x, dy = (torch.randn(tokens, HIDDEN, generator=g).to(dtype) for _ in range(2))
    index = torch.rand(tokens, EXPERTS - 1, generator=g).topk(2).indices  # one has no token
    return x, index, torch.rand(tokens, 2, generator=g).to(dtype), dy


def call(module, x, index, weight, dy):
    """Returns the result of a module of experts, and the gradients of the input and of A and B."""
    x = x.clone().requires_grad_()
    module.zero_grad()
    y = module(x, index, weight)
    y.backward(dy.to(y.dtype))
    grads = {name: p.grad for name, p in module.named_parameters() if p.requires_grad}
    return {"y": y.detach(), "x": x.grad} | grads


class WholeStacks(nn.Module):
    """The experts of transformers, one after another, with stacks to which products of A and B were
    added."""

    def __init__(self, module):
        super().__init__()
        self.base = copy.deepcopy(module.base_layer)
        self.lora_A, self.lora_B = copy.deepcopy(module.lora_A), copy.deepcopy(module.lora_B)
        self.scale = {k: one.scale for k, one in module.adapters["default"].items()}

    def forward(self, x, index, weight):
        given = dict(self.base.named_parameters())
        for name, scale in self.scale.items():
            a, b = self.lora_A["default"][name], self.lora_B["default"][name]
            product = "eor,eri->eio" if self.base.is_transposed else "eor,eri->eoi"
            given[name] = given[name] + torch.einsum(product, b, a).to(given[name].dtype) * scale
        return torch.func.functional_call(self.base, given, (x, index, weight))


def error(got, exact):
    return ((got.double() - exact).norm() / exact.norm().clamp_min(1e-12)).item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["Mixtral", "GptOss", "Gemma4Text", "NemotronH"])
def test_gradients_are_those_of_whole_stacks(name, dtype):
    model = adapted(name, alpha=6).to(dtype)
    module = next(iter(lora_of(model).values()))
    args = rows_of(module, dtype=dtype)
    whole = WholeStacks(module)
    theirs = call(whole, *args)
    double = copy.deepcopy(whole).double()
    eager = type(double.base).forward.__wrapped__
    double.base.forward = lambda *given: eager(double.base, *given)
    exact = call(double, *(t if t.dtype == torch.int64 else t.double() for t in args))
    got = call(module, *args)
    assert {*got} == {*theirs} and len(got) == 2 + 4
    for key, value in got.items():
        assert value.dtype == theirs[key].dtype == dtype
        least = 5e-7 if dtype == torch.float32 else 0.0
        assert error(value, exact[key]) <= max(2 * error(theirs[key], exact[key]), least), key
        if "lora" in key:
            assert not value[EXPERTS - 1].any() and value[:-1].any()


@pytest.mark.parametrize("first", ["lora", "patch"])
@pytest.mark.parametrize("name", ["Mixtral", "GptOss", "NemotronH"])
def test_levels_give_the_same_bits(name, first):
    plain = want = None
    for level in (None, *LEVELS):
        model = moe_of(name)
        if first == "patch" and level is not None:
            headroom.patch(model, level, norms=False)
        torch.manual_seed(1)
        headroom.lora(model, 4, experts=True)
        if first == "lora" and level is not None:
            report = headroom.patch(model, level, norms=False)
            assert {*report.swapped} >= {*experts_of(model)}  # and attention with sinks
            assert set(report.levels.values()) == {level}
        torch.manual_seed(2)
        for p in model.parameters():
            if p.requires_grad:
                nn.init.normal_(p, std=0.1)
        got = step(model, tokens_of())
        plain = plain or got
        if level is not None or name != "GptOss":  # whose attention patch computes, too
            want = want or got
            assert_same_bits(got.values(), want.values())
        assert got.keys() == plain.keys()
        assert all(error(got[key], plain[key].double()) < 1e-4 for key in plain)
        if level is not None:
            headroom.unpatch(model)
            assert not any("forward" in vars(module) for module in model.modules())
            assert_same_bits(step(model, tokens_of()).values(), plain.values())


def test_nothing_of_the_size_of_a_stack_is_kept():
    model = moe_of("Mixtral")
    headroom.lora(model, 4, experts=True, targets=[])
    rows = 2 * TOKENS * CHOSEN * FEATURES * 4
    kept = []
    for level in ("L0", "L1", "L2"):
        headroom.patch(model, level, norms=False)
        module = next(iter(lora_of(model).values()))
        x, index, weight, _ = rows_of(module, 2 * TOKENS)
        x.requires_grad_()
        kept.append(
            kept_bytes(lambda m=module, a=(x, index, weight): m(*a), [*model.parameters(), x])
        )
    assert kept[0] - kept[1] == rows and kept[1] - kept[2] == 2 * rows
    assert kept[2] < EXPERTS * HIDDEN * FEATURES * 4 / 4


def test_rank_is_divided_by_the_experts_of_a_token():
    report = headroom.lora(moe_of("Mixtral"), 5, alpha=15, experts=True)
    assert {one.rank for one in report.adapted if "experts" in one.name} == {5 // CHOSEN}
    for given, rank in ((True, 1), (3, 3), (1, 1)):
        model = moe_of("Mixtral")
        headroom.lora(model, 1, alpha=4, experts=given)
        for module in lora_of(model).values():
            for one in module.adapters["default"].values():
                assert one.rank == rank and one.scale == 4
    with pytest.raises(ValueError, match="experts is 0, wanted 1 or more"):
        headroom.lora(moe_of("Mixtral"), experts=0)
    with pytest.raises(TypeError, match="experts is 'all', wanted an integer"):
        headroom.lora(moe_of("Mixtral"), experts="all")
    model = moe_of("Mixtral")
    for module in experts_of(model).values():
        module.config = type("Config", (), {"_experts_implementation": "grouped_mm"})()
    with pytest.raises(ValueError, match="config of '.*experts' does not say how many experts a"):
        headroom.lora(model, experts=True)
    headroom.lora(model, experts=2)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family(name):
    model = moe_of(name).eval()
    before = outputs(model)
    frozen = sum(p.numel() for p in model.parameters())
    count = len(experts_of(model))
    report = headroom.lora(model, 4, experts=True)
    mine = [one for one in report.adapted if ".experts." in one.name]
    assert len(mine) == 2 * count == 2 * len(lora_of(model))
    assert all(p.requires_grad == ("lora_" in key) for key, p in model.named_parameters())
    assert report.frozen == frozen and not any("experts." in one.name for one in report.left)
    assert sum(one.numel for one in mine) == sum(
        p.numel() for module in lora_of(model).values() for p in module.trained("default")
    )
    torch.testing.assert_close(outputs(model), before)
    got = step(shaken(model).train(), tokens_of())
    assert got.keys() - {"loss"} == {k for k, p in model.named_parameters() if p.requires_grad}


def chosen(**options):
    model = moe_of("Qwen2Moe")
    report = headroom.lora(model, 4, **options)
    names = [one.name for one in report.adapted if one.name.startswith("model.layers.0.")]
    return [name.removeprefix("model.layers.0.") for name in names], report, model


def test_names_choose_stacks():
    both = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    q = "self_attn.q_proj"
    assert chosen(targets=["gate_up_proj"])[0] == both[:1]
    assert chosen(targets=["q_proj", "experts.down_proj"])[0] == [q, both[1]]
    assert chosen(targets=["q_proj", "mlp.experts.down_proj"], experts=2)[0] == [q, both[1]]
    assert chosen(targets=["q_proj"], experts=2)[0] == [q, *both]
    assert chosen(targets=[], experts=2)[0] == both
    assert chosen(targets=r".*\.experts\..*up_proj")[0] == both[:1]
    shared = "mlp.shared_expert.down_proj"
    assert chosen(targets=["down_proj"])[0] == [shared]
    assert chosen(targets=["down_proj"], experts=2)[0] == [shared, both[1]]
    names, report, model = chosen(targets=["experts.down_proj"])
    module = model.model.layers[0].mlp.experts
    assert [*module.adapters["default"]] == ["down_proj"]
    assert module.adapters["default"]["down_proj"].rank == 4
    reason = left(report)["model.layers.1.mlp.experts.gate_up_proj"]
    numel = 2 * EXPERTS * 2 * FEATURES * HIDDEN
    assert f"{numel:,} of " in reason and reason.endswith("as it is no target")
    with pytest.raises(ValueError, match="no linear layer or embedding with the name 'experts'"):
        chosen(targets=["experts"])


def test_experts_are_left_unless_they_are_asked_for():
    _, report, model = chosen()
    assert not lora_of(model)
    numel = sum(p.numel() for m in experts_of(model).values() for p in m.parameters())
    line = f"which get no adapter: {numel:,} of {report.frozen:,} parameters"
    assert left(report)["model.layers.0.mlp.experts.down_proj"].endswith(line)
    assert chosen(experts=False)[1].trained == report.trained
    model = moe_of("Qwen2Moe")
    headroom.quantize(model)  # of which fewer bytes are stored
    assert left(headroom.lora(model, 4))["model.layers.0.mlp.experts.down_proj"].endswith(line)


@pytest.mark.parametrize("option", [dict(dropout=0.1), dict(dora=True)])
def test_dropout_and_dora_are_refused(option):
    model = moe_of("Mixtral")
    before = {*dict(model.named_parameters())}
    with pytest.raises(ValueError, match=f"{[*option][0]} is .*, wanted .* where experts have"):
        headroom.lora(model, 4, experts=True, **option)
    assert {*dict(model.named_parameters())} == before
    assert all(p.requires_grad for p in model.parameters())
    headroom.lora(model, 4, **option)


def test_experts_that_cannot_have_adapters():
    with pytest.raises(ValueError, match="experts is True, but Linear has no experts that can"):
        headroom.lora(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))[0], experts=True)
    model = moe_of("Mixtral")
    first, second = experts_of(model).values()
    first.act_fn = nn.GELU()
    report = headroom.lora(model, 4, experts=True)
    assert [*lora_of(model)] == ["model.layers.1.mlp.experts"]
    reason = left(report)["model.layers.0.mlp.experts.down_proj"]
    assert "as it computes none of the activations" in reason
    model = moe_of("Mixtral")
    first, second = experts_of(model).values()
    first.down_proj = second.down_proj
    with pytest.raises(ValueError, match="'.*0.mlp.experts' and '.*1.mlp.experts' have the same w"):
        headroom.lora(model, 4, experts=True)


def test_several_adapters_are_added_up():
    model = adapted("GptOss", alpha=6)
    headroom.lora(model, 3, experts=2, targets=["experts.down_proj"], name="second")
    second = {k: p for k, p in model.named_parameters() if p.requires_grad}
    assert {*second} == {
        f"{name}.lora_{x}.second.down_proj" for name in lora_of(model) for x in "AB"
    }
    shaken(model)
    base, alone = outputs(moe_of("GptOss").eval()), outputs(model)
    use_adapters(model, "default", "second")
    module = next(iter(lora_of(model).values()))
    x, index, weight, dy = rows_of(module)
    got = module(x, index, weight)
    whole = copy.deepcopy(module.base_layer)
    with torch.no_grad():
        for name in module.active:
            for stack, one in module.adapters[name].items():
                a, b = module.matrices(name, stack)
                getattr(whole, stack).add_((b @ a).mT, alpha=one.scale)
    torch.testing.assert_close(got, whole(x, index, weight), rtol=1e-4, atol=1e-4)
    with adapters_disabled(model):
        torch.testing.assert_close(outputs(model), base)
    use_adapters(model, "second")
    assert_same_bits(outputs(model), alone)
    delete_adapter(model, "default")
    assert_same_bits(outputs(model), alone)
    with pytest.raises(ValueError, match="has an adapter 'second' already"):
        headroom.lora(model, 2, experts=1, targets=[], name="second")
    assert "second: down_proj rank=2, active=['second']" in repr(module)


@pytest.mark.parametrize("to", ["nf4", "int8"])
@pytest.mark.parametrize("name", ["Mixtral", "GptOss"])
def test_over_stacks_of_few_bits(name, to):
    model = moe_of(name)
    headroom.quantize(model, to)
    headroom.lora(model, 4, experts=True)
    shaken(model).train()
    dense = headroom.dequantize(copy.deepcopy(model))
    for module in experts_of(dense).values():
        module.requires_grad_(False)
    want, codes = step(dense, tokens_of()), dict(model.named_parameters())
    for level in LEVELS:
        report = headroom.patch(model, level, norms=False)
        assert "2 experts (QuantizedExperts) -> headroom.functional.experts" in str(report)
        got = step(model, tokens_of())
        for key, value in got.items():
            torch.testing.assert_close(value, want[key], rtol=1e-4, atol=1e-5, msg=key)
    assert all(codes[key] is p for key, p in model.named_parameters())
    report = headroom.quantize(other := adapted(name), to)  # afterwards
    assert {one.was for one in report.quantized} > {
        type(next(iter(experts_of(moe_of(name)).values()))).__name__
    }
    assert all(one.reason == "a part of an adapter" for one in report.left if "lora_" in one.name)
    assert lora_of(other) and step(other, tokens_of())["loss"].isfinite()


def test_dtypes_and_autocast():
    model = adapted("Qwen3Moe", dtype=torch.bfloat16)
    module = next(iter(lora_of(model).values()))
    assert all(p.dtype == torch.bfloat16 for p in module.trained("default"))
    x, index, weight, dy = rows_of(module)
    got = call(module, x, index, weight, dy)
    wide = copy.deepcopy(module).float()
    torch.testing.assert_close(got["y"], call(wide, x, index, weight, dy)["y"])
    assert got["lora_A.default.down_proj"].dtype == torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16):
        lowered = wide(x.bfloat16(), index, weight)
    assert lowered.dtype == torch.bfloat16
    torch.testing.assert_close(lowered.float(), got["y"], rtol=0.1, atol=0.1)
    half = copy.deepcopy(wide)
    half.base_layer.bfloat16()
    narrow = call(half, x.bfloat16(), index, weight.bfloat16(), dy)
    assert narrow["y"].dtype == torch.bfloat16
    assert narrow["lora_B.default.gate_up_proj"].dtype == torch.float32


def test_copies_hooks_and_calls_that_the_op_does_not_take():
    model = adapted("Mixtral")
    headroom.patch(model, "L2", norms=False)
    want = step(model, tokens_of())
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert_same_bits(step(other, tokens_of()).values(), want.values())
        assert other.model.layers[0].mlp.experts.base_layer is not experts_of(model)
    module = next(iter(lora_of(model).values()))
    seen = []
    handle = module.base_layer.register_forward_hook(lambda *_: seen.append(1))
    torch.testing.assert_close(step(model, tokens_of()), want)
    assert seen == [1]
    handle.remove()
    x, index, weight, _ = rows_of(module)
    y = module(x, index, weight)
    double = copy.deepcopy(model).double()
    double.set_experts_implementation("eager")
    module = next(iter(lora_of(double).values()))
    torch.testing.assert_close(module(x.double(), index, weight.double()).float(), y)


def test_an_interrupted_call_changes_nothing():
    wanted = moe_of("Mixtral")
    with Interrupting() as counting:
        headroom.lora(wanted, 4, experts=True)
    for after in range(0, counting.count, 1 + counting.count // 6):
        model = moe_of("Mixtral")
        before = dict(model.named_parameters())
        with Interrupting(after), pytest.raises(KeyboardInterrupt):
            headroom.lora(model, 4, experts=True)
        now = dict(model.named_parameters())
        assert now.keys() == before.keys() and all(now[key] is before[key] for key in now)
        assert all(p.requires_grad for p in now.values()) and not lora_of(model)


@pytest.mark.parametrize("level", LEVELS)
def test_a_plan_is_what_a_step_takes(level):
    model, batch = adapted("Mixtral"), tokens_of(64)
    headroom.patch(model, level, norms=False)
    plan = headroom.plan(model, None, batch)
    with headroom.memory.track(model, batch=batch, stacks=False) as tracked:
        for _ in range(2):
            model(**batch).loss.backward()
            model.zero_grad()
    assert plan.total_bytes == pytest.approx(tracked.peak_bytes, rel=5e-4)


def test_stacks_that_bitsandbytes_holds_are_left():
    parametrize = pytest.importorskip("bitsandbytes.nn.parametrize")
    model = moe_of("Mixtral")
    for module in experts_of(model).values():
        for name in ("gate_up_proj", "down_proj"):
            parametrize.replace_parameter_4bit(module, name)
    with pytest.raises(ValueError, match="experts is 2, but .*: bitsandbytes has put its s"):
        headroom.lora(model, 4, experts=2)
    assert headroom.lora(model, 4).adapted
