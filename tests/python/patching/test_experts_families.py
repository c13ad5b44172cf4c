"""Mixtures of experts of transformers with Headroom's experts: the same losses and gradients, of
which less is kept."""

import copy

import headroom
import pytest
import torch

from helpers.bits import assert_same_bits
from helpers.kept import kept_bytes
from helpers.moe_models import (
    CHOSEN,
    FAMILIES,
    FEATURES,
    HIDDEN,
    TOKENS,
    experts_of,
    in_float64,
    moe_of,
    step,
    tokens_of,
    transformers,
)

LEVELS = "L0", "L1", "L2", "L5"
OURS = "headroom.functional.experts"


@pytest.fixture(autouse=True)
def _quiet():
    transformers.utils.logging.set_verbosity_error()


def patched(model, save=None, **options):
    copied = copy.deepcopy(model)
    report = headroom.patch(copied, save, norms=False, **options)
    swapped = {name for name, (one,) in report.swapped.items() if one.now == OURS}
    assert swapped == experts_of(model).keys()
    assert all("it cannot be at" in one.reason for one in report.left)
    return copied


def errors(got, exact):
    return {
        key: ((got[key].double() - x).norm() / x.norm().clamp_min(1e-12)).item()
        for key, x in exact.items()
    }


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
def test_losses_and_gradients_are_those_of_transformers(name, frozen):
    model, inputs = moe_of(name), tokens_of()
    for module in experts_of(model).values():
        module.requires_grad_(not frozen)
    exact = step(in_float64(model), inputs)
    theirs = errors(step(model, inputs), exact)
    got = step(patched(model), inputs)
    assert got.keys() == exact.keys()
    ours = errors(got, exact)
    worst = max(max(theirs.values()), 1e-6)
    assert max(ours.values()) <= 2 * worst
    for key in experts_of(model):
        for kind in ("gate_up_proj", "up_proj", "down_proj"):
            if (one := f"{key}.{kind}") in ours:
                assert ours[one] <= 2 * max(theirs[one], 2e-7), one


@pytest.mark.parametrize("name", FAMILIES)
def test_levels_give_the_same_bits_in_fewer_bytes(name):
    model, inputs = moe_of(name), tokens_of()
    ids = {key: x for key, x in inputs.items() if key != "labels"}
    layers = len(experts_of(model))
    kept, want = [], None
    for level in LEVELS:
        one = patched(model, level)
        got = step(one, inputs)
        want = want or got
        assert got.keys() == want.keys()
        assert_same_bits(got.values(), want.values())
        torch.manual_seed(7)
        kept.append(kept_bytes(lambda one=one: one(**ids).logits, list(one.parameters())))
    rows = layers * 2 * TOKENS * CHOSEN * FEATURES * 4  # of h, in float32
    width = 1 if name == "NemotronH" else 2  # of gates and what they multiply
    assert kept[0] - kept[1] == rows
    assert kept[1] - kept[2] == width * rows
    assert kept[3] < kept[2]
    torch.manual_seed(7)
    theirs = kept_bytes(lambda: model(**ids).logits, list(model.parameters()))
    # Gathered rows, results of the products, and what the activation keeps besides.
    per_row = 2 * HIDDEN + (1 + width) * FEATURES
    assert theirs - kept[2] >= layers * 2 * TOKENS * CHOSEN * per_row * 4


@pytest.mark.parametrize("name", ["Mixtral", "GptOss", "Gemma4Text"])
def test_unpatch_to_the_bit(name):
    model, inputs = moe_of(name), tokens_of()
    before = {path: dict(vars(m)) for path, m in model.named_modules()}
    keys = list(model.state_dict())
    want = step(model, inputs)
    for level in ("L2", "L5"):
        headroom.patch(model, level)
        assert list(model.state_dict()) == keys
        step(model, inputs)
    headroom.unpatch(model)
    assert {path: vars(m).keys() for path, m in model.named_modules()} == {
        path: attributes.keys() for path, attributes in before.items()
    }
    assert_same_bits(step(model, inputs).values(), want.values())


def test_without_levels_they_are_at_l1_and_experts_false_leaves_them():
    model = moe_of("Mixtral")
    report = headroom.patch(model)
    assert set(report.levels.values()) == {"L1"}
    assert "2 experts (MixtralExperts) -> headroom.functional.experts" in str(report)
    assert "2 blocks (MixtralDecoderLayer) at L1: model.layers.0 to model.layers.1" in str(report)
    report = headroom.patch(model, experts=False)
    assert not report.levels and OURS not in str(report)
    with pytest.raises(ValueError, match="at L0 or L5; .* L1 and L2 for blocks with experts"):
        headroom.patch(model, "L2", experts=False)
    with pytest.raises(ValueError, match="which can be at L0 or L5"):
        headroom.patch(model, "L1", experts=False)
    with pytest.raises(ValueError, match="which can be at L0 or L1 or L2 or L5"):
        headroom.patch(model, "L3")


def test_blocks_without_experts_keep_their_two_levels():
    model = moe_of("DeepseekV3")
    report = headroom.patch(model, "L2")
    assert report.levels == {"model.layers.1": "L2"}
    assert [one.name for one in report.left] == ["model.layers.0"]
    assert "it cannot be at L2, only at L0 or L5" in str(report)


def test_experts_outside_of_repeated_blocks():
    model, inputs = moe_of("Mixtral", num_hidden_layers=1), tokens_of()
    want = step(model, inputs)
    report = headroom.patch(model, norms=False)
    assert not report.levels and len(report.swapped) == 1
    torch.testing.assert_close(step(model, inputs), want)


def call(module, x, index, weight, dy):
    """Returns the result of a module of experts and its gradients."""
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    y = module(x, index, weight)
    y.backward(dy.to(y.dtype))
    grads = [x.grad, weight.grad, *(p.grad for p in module.parameters())]
    module.zero_grad()
    return [y.detach(), *grads]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["Mixtral", "GptOss", "Gemma4Text", "NemotronH"])
def test_errors_are_not_larger_than_those_of_grouped_mm(name, dtype):
    model = moe_of(name).to(dtype)
    module = next(iter(experts_of(model).values()))
    g = torch.Generator().manual_seed(0)
    x = torch.randn(96, HIDDEN, generator=g).to(dtype)
    index = torch.rand(96, len(next(module.parameters())), generator=g).topk(2).indices
    weight = torch.rand(96, 2, generator=g).to(dtype)
    dy = torch.randn(96, HIDDEN, generator=g).to(dtype)
    exact_module = copy.deepcopy(module).double()
    eager = type(module).forward.__wrapped__
    exact_module.forward = lambda *args: eager(exact_module, *args)
    exact = call(exact_module, x.double(), index, weight.double(), dy.double())
    assert module.config._experts_implementation == "grouped_mm"
    theirs = call(module, x, index, weight, dy)
    headroom.patch(model, norms=False)
    ours = call(module, x, index, weight, dy)
    pairs = []
    for got, other, want in zip(ours, theirs, exact):
        assert got.dtype == other.dtype
        pairs.append([((y.double() - want).norm() / want.norm()).item() for y in (got, other)])
    # Of the few numbers of a gradient of routing weights, the error is chance.
    slack, least = (1.1, 0.0) if dtype == torch.bfloat16 else (2.0, 2e-7)
    assert all(error <= max(slack * allowed, least) for error, allowed in pairs)
    if dtype == torch.bfloat16:
        assert sum(error for error, _ in pairs) <= sum(allowed for _, allowed in pairs)


@pytest.mark.parametrize("case", ["no token", "one token", "one expert", "dropped"])
def test_uneven_routing(case):
    model = moe_of("Mixtral")
    module = next(iter(experts_of(model).values()))
    g = torch.Generator().manual_seed(0)
    tokens = {"no token": 0, "one token": 1}.get(case, 40)
    x, dy = (torch.randn(tokens, HIDDEN, generator=g) for _ in range(2))
    index = torch.rand(tokens, 6, generator=g).topk(2).indices
    weight = torch.rand(tokens, 2, generator=g)
    if case == "one expert":
        index = torch.tensor([[3, 1]]).expand(tokens, 2).contiguous()
    if case == "dropped":
        index[::3, 0] = 6
    eager = type(module).forward.__wrapped__
    module.forward = lambda *args: eager(module, *args)
    if tokens:
        want = call(module, x, index, weight, dy)
    del module.forward
    headroom.patch(model, norms=False)
    got = call(module, x, index, weight, dy)
    if not tokens:
        assert got[0].shape == (0, HIDDEN) and not any(t.any() for t in got[3:])
        return
    want[3:] = [torch.zeros_like(got[k + 3]) if t is None else t for k, t in enumerate(want[3:])]
    torch.testing.assert_close(got, want)
    assert torch.equal(got[2] == 0, want[2] == 0)


def test_under_autocast_and_in_several_dtypes():
    model, inputs = moe_of("Qwen3Moe"), tokens_of()
    other = patched(model, "L2")
    results = []
    for each in (model, other):
        with torch.autocast("cpu", torch.bfloat16):
            results.append(step(each, inputs))
    assert results[0].keys() == results[1].keys()
    exact = step(in_float64(model), inputs)
    theirs, ours = (errors(result, exact) for result in results)
    for key in exact:
        assert results[0][key].dtype == results[1][key].dtype
        assert ours[key] <= 1.5 * theirs[key] + 1e-3, key
    other.double()
    other.set_experts_implementation("eager")
    torch.testing.assert_close(step(other, inputs), exact)  # float64: transformers' own code


def test_whoever_has_a_copy_or_a_file_of_a_patched_model():
    model, inputs = moe_of("Olmoe"), tokens_of()
    headroom.patch(model, "L5", norms=False)
    want = step(model, inputs)
    copied = copy.deepcopy(model)
    assert_same_bits(step(copied, inputs).values(), want.values())
    model.load_state_dict({k: torch.zeros_like(v) for k, v in model.state_dict().items()})
    assert_same_bits(step(copied, inputs).values(), want.values())  # which reads its own stacks
    headroom.unpatch(copied)
    assert not any("forward" in vars(module) for module in copied.modules())


@pytest.mark.parametrize("level", ["L1@host", "L5@host"])
def test_levels_on_the_host(level):
    model, inputs = moe_of("Mixtral", num_hidden_layers=3), tokens_of()
    want = step(patched(model, "L1"), inputs)
    other = copy.deepcopy(model)
    report = headroom.patch(other, level, norms=False)
    assert report.levels["model.layers.0"] == level
    assert_same_bits(step(other, inputs).values(), want.values())


def test_generate():
    model = moe_of("Mixtral").eval()
    ids = tokens_of()["input_ids"]
    want = model.generate(ids, max_new_tokens=4, do_sample=False)
    headroom.patch(model, "L5", norms=False)
    assert torch.equal(model.generate(ids, max_new_tokens=4, do_sample=False), want)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", ["Mixtral", "GptOss"])
def test_on_a_device(name, level):
    model, inputs = moe_of(name), tokens_of()
    want = step(patched(model, "L1"), inputs)
    other = patched(model, level).cuda()
    got = step(other, {key: x.cuda() for key, x in inputs.items()})
    torch.testing.assert_close({key: x.cpu() for key, x in got.items()}, want)
