"""Adapters of experts that become part of their stacks, and the way back."""

import copy

import headroom
import pytest
import safetensors.torch
import torch
from headroom.nn import LoRAExperts

from helpers.bits import assert_same_bits
from helpers.hf_models import outputs, shaken, transformers
from helpers.interrupting import Interrupting
from helpers.moe_models import experts_of, moe_of

NAMES = "model.layers.0.mlp.experts", "model.layers.1.mlp.experts"


@pytest.fixture(autouse=True)
def _quiet():
    transformers.utils.logging.set_verbosity_error()


def adapted(name, to=None, dtype=torch.float32, **options):
    model = moe_of(name).to(dtype)
    if to is not None:
        headroom.quantize(model, to)
    headroom.lora(model, 4, alpha=6, **({"experts": True} | options))
    return shaken(model)


def with_the_same_adapters(model):
    """Returns a copy of a model with adapters, and quantizes the model and gives it these too."""
    other = copy.deepcopy(model)
    headroom.quantize(model)
    for one in (model, other):
        torch.manual_seed(1)
        headroom.lora(one, 4, experts=True)
        shaken(one)
    return other


def exact_stacks(model):
    """Returns the sums of stacks with adapters, in float64, by the names of parameters."""
    dense = headroom.dequantize(copy.deepcopy(model), torch.float32)
    found = {}
    for name in NAMES:
        module = dense.get_submodule(name)
        for stack in module.rule.stacks:
            total = getattr(module.base_layer, stack).detach().double()
            for one in module.active:
                if stack in module.adapters[one]:
                    a, b = (t.detach().double() for t in module.matrices(one, stack))
                    product = "eor,eri->eio" if module.base_layer.is_transposed else "eor,eri->eoi"
                    scale = module.adapters[one][stack].scale
                    total = total + scale * torch.einsum(product, b, a)
            found[f"{name}.{stack}"] = total
    return found


def load_folder(folder):
    return safetensors.torch.load_file(folder / "model.safetensors")


def values(model):
    state = model.state_dict(keep_vars=True)
    return {key: x.detach().clone() for key, x in state.items() if isinstance(x, torch.Tensor)}


@pytest.mark.parametrize("dtype", [None, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("to", [None, "nf4", "int8"])
@pytest.mark.parametrize("name", ["Mixtral", "GptOss"])
def test_stacks_are_the_sums_rounded_once(name, to, dtype):
    model = adapted(name, to, torch.bfloat16 if dtype is None else torch.float32)
    headroom.patch(model, "L2", norms=False)
    exact, before, wanted = exact_stacks(model), values(model), outputs(model)
    kinds = {path: type(module) for path, module in experts_of(moe_of(name)).items()}
    report = headroom.merge(model, dtype)
    assert {*NAMES} <= {one.name for one in report.merged}
    want_dtype = dtype or torch.bfloat16
    for path in NAMES:
        module = model.get_submodule(path)
        assert type(module) is kinds[path] and not any(p.requires_grad for p in module.parameters())
        assert {p.dtype for p in module.parameters()} == {want_dtype}
        assert "headroom" in getattr(module.forward.func, "__module__", "")  # it is patched still
        for stack in ("gate_up_proj", "down_proj"):
            total = exact[f"{path}.{stack}"]
            eps = torch.finfo(want_dtype).eps
            off = (getattr(module, stack).double() - total).abs()
            assert (off <= 0.501 * eps * total.abs() + 1e-6).all()
    if dtype == torch.float32:
        torch.testing.assert_close(outputs(model), wanted, rtol=1e-4, atol=1e-4)
        assert report.lost < 1e-5
    headroom.unpatch(model)
    assert not any("forward" in vars(module) for module in model.modules())
    headroom.unmerge(model)
    assert all(isinstance(model.get_submodule(path), LoRAExperts) for path in NAMES)
    after = values(model)
    assert after.keys() == before.keys()
    assert_same_bits(list(after.values()), list(before.values()))


def test_of_one_stack_the_other_stays():
    model = adapted("Mixtral", targets=["q_proj", "experts.down_proj"])
    stacks = {path: one.gate_up_proj for path, one in experts_of(model).items()}
    wanted = outputs(model)
    headroom.merge(model)
    assert all(
        one.gate_up_proj is stacks[f"{p}.base_layer"] for p, one in experts_of(model).items()
    )
    torch.testing.assert_close(outputs(model), wanted, rtol=1e-4, atol=1e-4)
    headroom.unmerge(model)
    assert_same_bits(outputs(model), wanted)


def test_only_experts_have_adapters_and_what_was_is_freed():
    model = adapted("Mixtral", targets=[])
    wanted = outputs(model)
    report = headroom.merge(model, keep=False)
    assert [one.name for one in report.merged] == [*NAMES]
    assert repr(report).startswith("MergeReport(MixtralForCausalLM: 2 merged")
    torch.testing.assert_close(outputs(model), wanted, rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="no layer that headroom.merge has kept"):
        headroom.unmerge(model)
    with pytest.raises(ValueError, match="no active adapter to merge"):
        headroom.merge(model)


@pytest.mark.parametrize("to", ["nf4", "int8"])
def test_in_few_bits_again(to):
    model = adapted("GptOss", to, targets=["experts.down_proj"])
    exact, wanted, before = exact_stacks(model), outputs(model), values(model)
    report = headroom.merge(model, requantize=True)
    for one in report.merged:
        module, old = model.get_submodule(one.name), before
        assert type(module).__name__ == "QuantizedExperts"
        key = f"{one.name}.base_layer.gate_up_proj"
        assert torch.equal(module.gate_up_proj, old[key])
        got = headroom.functional.dequantize_matrix(module.stacks()[1], torch.float32).double()
        again = headroom.functional.quantize_matrix(
            exact[f"{one.name}.down_proj"].float(), to, double=True
        )
        torch.testing.assert_close(
            got.float(), headroom.functional.dequantize_matrix(again), rtol=1e-3, atol=1e-5
        )
    assert 0 < report.lost < 1
    headroom.unmerge(model)
    assert_same_bits(outputs(model), wanted)


def test_what_is_lost_is_what_rounding_took():
    model = adapted("Mixtral", dtype=torch.bfloat16, targets=[])
    for p in model.parameters():
        p.data.mul_(0.1 if p.requires_grad else 1.0)
    exact = exact_stacks(model)
    base = {key.replace(".base_layer", ""): x.double() for key, x in values(model).items()}
    report = headroom.merge(model)
    for one in report.merged:
        off = added = 0.0
        for stack in ("gate_up_proj", "down_proj"):
            key = f"{one.name}.{stack}"
            off += (model.get_parameter(key).double() - exact[key]).square().sum()
            added += (exact[key] - base[key]).square().sum()
        assert one.lost == pytest.approx((off / added).sqrt().item(), rel=1e-3) and one.lost > 0.01


def test_stacks_of_files_before_they_were_quantized(tmp_path):
    model = moe_of("GptOss")
    state, key = {k: x.clone() for k, x in model.state_dict().items()}, f"{NAMES[1]}.down_proj"
    safetensors.torch.save_file(state, tmp_path / "base.safetensors")
    other = with_the_same_adapters(model)
    headroom.merge(model, base=tmp_path / "base.safetensors")
    headroom.merge(other)
    torch.testing.assert_close(model.state_dict(), other.state_dict(), rtol=1e-6, atol=1e-6)
    headroom.unmerge(model)
    for stack, message in (
        (state[key][1:].clone(), "1.mlp.experts.down_proj' in base is .* wanted floats of"),
        (state[key] * torch.inf, "down_proj' in base has an element that is not finite"),
        (None, "base has no '.*1.mlp.experts.down_proj', as one tensor or expert by"),
    ):
        changed = state | {key: stack}
        changed = {name: x for name, x in changed.items() if x is not None}
        safetensors.torch.save_file(changed, tmp_path / "base.safetensors")
        with pytest.raises(ValueError, match=message):
            headroom.merge(model, base=tmp_path / "base.safetensors")
        assert isinstance(model.get_submodule(NAMES[1]), LoRAExperts)


@pytest.mark.parametrize("name", ["Mixtral", "NemotronH"])
def test_files_of_transformers(name, tmp_path):
    """In which each expert has matrices of its own, and names may be others."""
    model = moe_of(name)
    model.save_pretrained(tmp_path)
    assert not any(key.endswith("experts.down_proj") for key in load_folder(tmp_path))
    other = with_the_same_adapters(model)
    headroom.merge(model, base=tmp_path)
    headroom.merge(other)
    torch.testing.assert_close(model.state_dict(), other.state_dict(), rtol=1e-6, atol=1e-6)


def test_adapters_of_merged_experts():
    model = adapted("Mixtral", targets=[])
    merged = outputs(model)
    headroom.merge(model)
    headroom.lora(model, 4, experts=True, targets=[], name="second")
    torch.testing.assert_close(outputs(model), merged, rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="has got adapters .*'second'.* since it was merged"):
        headroom.unmerge(model)
    headroom.adapters.delete_adapter(model, "second")
    headroom.unmerge(model)
    assert_same_bits(outputs(model), merged)


def test_what_a_merge_has_kept_is_not_copied_by_a_second_one(monkeypatch):
    model = adapted("Mixtral", targets=[])
    headroom.merge(model)
    headroom.lora(model, 4, experts=True, targets=[], name="second")
    monkeypatch.setattr(
        LoRAExperts, "__deepcopy__", lambda *_: pytest.fail("copied"), raising=False
    )
    headroom.merge(model)


def test_an_interrupted_call_changes_nothing():
    model = adapted("Mixtral", "nf4")
    before, modules = values(model), {*model.modules()}
    with Interrupting() as counting:
        headroom.merge(copy.deepcopy(model))
    for after in range(0, counting.count, 1 + counting.count // 6):
        with Interrupting(after), pytest.raises(KeyboardInterrupt):
            headroom.merge(model)
        assert {*model.modules()} == modules
        assert_same_bits(list(values(model).values()), list(before.values()))
