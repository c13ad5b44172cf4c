"""Files of adapters of experts: PEFT's are loaded and ours are the same, also those of earlier PEFT
and of Unsloth, which have A and B in other ways."""

import copy
import json

import headroom
import pytest
import safetensors.torch
import torch
from headroom.nn import LoRAExperts
from headroom.state import load_adapter, save_adapter

from helpers.bits import assert_same_bits
from helpers.hf_models import outputs, shaken, transformers
from helpers.moe_models import EXPERTS, HIDDEN, step, tokens_of
from helpers.moe_models import moe_of as of_any_size

peft = pytest.importorskip("peft")
TENSORS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
FEATURES = 24
SQUARE = dict(intermediate_size=HIDDEN // 2, moe_intermediate_size=HIDDEN // 2)  # gate and up
BOTH = ["experts.down_proj", "experts.gate_up_proj"]


def moe_of(name, **options):
    """A model whose stacks have no square matrices."""
    sizes = dict(intermediate_size=FEATURES, moe_intermediate_size=FEATURES)
    return of_any_size(name, **(sizes | options))


@pytest.fixture(autouse=True)
def _quiet():
    transformers.utils.logging.set_verbosity_error()


def config_in(folder):
    return json.loads((folder / CONFIG).read_text())


def written(folder, tensors=None, **settings):
    """Changes the files of an adapter: tensors, and settings, of which None are removed."""
    if tensors is not None:
        safetensors.torch.save_file(
            {key: t.contiguous() for key, t in tensors.items()}, folder / TENSORS
        )
    config = config_in(folder) | settings
    config = {key: value for key, value in config.items() if value is not None}
    (folder / CONFIG).write_text(json.dumps(config))


OPTIONS = {
    "both": dict(target_modules=["q_proj"], target_parameters=BOTH),
    "gate and up": dict(target_modules=[], target_parameters=["mlp.experts.gate_up_proj"]),
    "down": dict(target_modules=["q_proj"], target_parameters=BOTH[:1]),
    "patterns": dict(
        target_modules=["q_proj", "v_proj"],
        target_parameters=BOTH,
        rank_pattern={"experts.gate_up_proj": 2, "q_proj": 3},
        alpha_pattern={r".*1\.mlp\.experts\.down_proj": 5},
    ),
    "rslora": dict(target_modules=[], target_parameters=BOTH, use_rslora=True),
    "all-linear": dict(target_modules="all-linear"),
}


@pytest.mark.parametrize("name", ["Mixtral", "Qwen3Moe", "GptOss"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.filterwarnings("ignore:The following .*_pattern keys did not match")
def test_files_of_peft_load_and_ours_are_the_same(options, name, tmp_path):
    model = moe_of(name).eval()
    config = peft.LoraConfig(r=4, lora_alpha=6, **options)
    theirs = peft.get_peft_model(copy.deepcopy(model), config)
    shaken(theirs).save_pretrained(tmp_path / "theirs")
    wanted, ours = outputs(theirs), copy.deepcopy(model)
    load_adapter(ours, tmp_path / "theirs")
    assert all(p.requires_grad == ("lora_" in key) for key, p in ours.named_parameters())
    torch.testing.assert_close(outputs(ours.eval()), wanted, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(outputs(model), wanted, atol=0.1)
    save_adapter(ours, tmp_path / "ours")
    mine, other = (safetensors.torch.load_file(tmp_path / x / TENSORS) for x in ("ours", "theirs"))
    assert mine.keys() == other.keys()
    assert all(torch.equal(mine[key], other[key]) for key in mine)
    again = peft.PeftModel.from_pretrained(copy.deepcopy(model), tmp_path / "ours").eval()
    assert_same_bits(outputs(again), wanted)
    settings = [config_in(tmp_path / x) for x in ("ours", "theirs")]
    assert settings[0].keys() == settings[1].keys()
    if options.get("target_parameters") in (BOTH, BOTH[:1]) and "rank_pattern" not in options:
        for one in settings:
            one["target_parameters"].sort()
        assert settings[0] == settings[1]


def test_all_linear_of_peft_has_twice_the_rank_for_gate_and_up_and_adapters_of_routers(tmp_path):
    config = peft.LoraConfig(r=4, lora_alpha=6, target_modules="all-linear")
    theirs = peft.get_peft_model(moe_of("Mixtral"), config)
    shaken(theirs).save_pretrained(tmp_path)
    model = moe_of("Mixtral").eval()
    plain = outputs(model)
    load_adapter(model, tmp_path)
    block = model.model.layers[0].mlp
    ranks = {stack: one.rank for stack, one in block.experts.adapters["default"].items()}
    assert ranks == {"gate_up_proj": 8, "down_proj": 4}
    assert {one.scale for one in block.experts.adapters["default"].values()} == {1.5}
    assert (
        block.gate.adapters["default"].rank == 4
        and "Router" in type(block.gate.base_layer).__name__
    )
    router = block.gate.base_layer
    exact = router.weight + 1.5 * block.gate.lora_B["default"] @ block.gate.lora_A["default"]
    wanted, before = outputs(model), copy.deepcopy(model.state_dict())
    headroom.merge(model)
    assert type(model.model.layers[0].mlp.gate) is type(router)
    torch.testing.assert_close(model.model.layers[0].mlp.gate.weight, exact)
    torch.testing.assert_close(outputs(model), wanted, rtol=1e-4, atol=1e-4)
    headroom.unmerge(model)
    assert_same_bits(list(model.state_dict().values()), list(before.values()))
    with headroom.adapters.adapters_disabled(model):
        torch.testing.assert_close(outputs(model), plain)


def test_ours_with_several_ranks_load_in_peft(tmp_path):
    for name, targets in (("Qwen3Moe", "all-linear"), ("GptOss", ["q_proj", "experts.down_proj"])):
        model = moe_of(name)
        base = copy.deepcopy(model).eval()
        headroom.lora(model, 4, alpha=6, targets=targets, experts=True, name="mine")
        wanted = outputs(shaken(model))
        save_adapter(model, tmp_path / name, "mine")
        again = peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path / name / "mine").eval()
        torch.testing.assert_close(outputs(again), wanted, rtol=1e-5, atol=1e-5)
        load_adapter(base, tmp_path / name, "mine")
        assert_same_bits(outputs(base), wanted)


def test_over_stacks_of_few_bits(tmp_path):
    model = moe_of("Mixtral")
    headroom.quantize(model)
    other = copy.deepcopy(model)
    headroom.lora(model, 4, experts=True)
    wanted = outputs(shaken(model))
    save_adapter(model, tmp_path)
    load_adapter(other, tmp_path)
    assert_same_bits(outputs(other.eval()), wanted)


def test_losses_of_50_steps_are_those_of_peft(tmp_path):
    options = dict(target_modules=["q_proj", "v_proj"], target_parameters=BOTH)
    theirs = peft.get_peft_model(moe_of("Mixtral"), peft.LoraConfig(r=4, **options))
    theirs.save_pretrained(tmp_path)
    ours = moe_of("Mixtral")
    load_adapter(ours, tmp_path)
    headroom.patch(ours, "L2", norms=False)
    losses = []
    for model in (theirs, ours):
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer, found = torch.optim.SGD(trained, lr=0.1, momentum=0.9), []
        for _ in range(50):
            optimizer.zero_grad()
            loss = model(**tokens_of()).loss
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        losses.append(found)
    assert losses[0][-1] < 0.8 * losses[0][0]
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-4, atol=1e-4)


# ---- other layouts -------------------------------------------------------------------------------


def exchanged(tensors, count):
    """What PEFT 0.17 has of the same adapter: A of its B, transposed, and B of its A."""
    found = {}
    for key, tensor in tensors.items():
        stem, which = key.rsplit(".lora_", 1)
        if ".experts" not in stem:
            found[key] = tensor
        elif which == "A.weight":
            b = tensors[f"{stem}.lora_B.weight"]
            found[key] = b.view(len(b), -1, count).permute(2, 1, 0).flatten(0, 1)
        else:
            a = tensors[f"{stem}.lora_A.weight"]
            found[key] = a.view(count, -1, a.shape[1]).permute(2, 1, 0).flatten(1)
    return found


def by_expert(tensors, count):
    """What Unsloth has: columns of B of one expert after another."""
    found = dict(tensors)
    for key, b in tensors.items():
        if ".experts" in key and "lora_B" in key:
            found[key] = b.view(len(b), -1, count).transpose(1, 2).flatten(1)
    return found


def in_earlier_peft(module, tensors, stack):
    """The sum that PEFT 0.17 computes: of stacks that it takes for ``[experts, in, out]``."""
    a, b = (tensors[f"lora_{which}"] for which in "AB")
    count = getattr(module, stack).shape[0]
    a = a.reshape(count, -1, a.shape[-1])
    b = b.reshape(b.shape[0], -1, count)
    return torch.einsum("o r e, e r i -> e i o", b, a)


def saved(folder, name="Mixtral", targets=("q_proj", "gate_up_proj", "down_proj"), **options):
    model = moe_of(name, **options)
    headroom.lora(model, 4, alpha=6, targets=targets, experts=3)
    wanted = outputs(shaken(model))
    save_adapter(model, folder)
    return wanted, safetensors.torch.load_file(folder / TENSORS)


def loaded(folder, name="Mixtral", options=None, **layout):
    model = moe_of(name, **(options or {})).eval()
    load_adapter(model, folder, **layout)
    return model


@pytest.mark.parametrize("version", ["0.17.1", None])
def test_earlier_files_of_peft_are_told_by_their_shapes(version, tmp_path):
    wanted, tensors = saved(tmp_path)
    written(tmp_path, exchanged(tensors, EXPERTS), peft_version=version)
    model = loaded(tmp_path)
    assert_same_bits(outputs(model), wanted)
    assert_same_bits(outputs(loaded(tmp_path, experts_layout="peft-0.17")), wanted)
    with pytest.raises(ValueError, match="does not fit experts_layout='peft'"):
        loaded(tmp_path, experts_layout="peft")
    base = moe_of("Mixtral").model.layers[1].mlp.experts
    prefix = "base_model.model.model.layers.1.mlp.experts.lora_"
    found = safetensors.torch.load_file(tmp_path / TENSORS)
    parts = {f"lora_{x}": found[f"{prefix}{x}.weight"] for x in "AB"}
    a, b = model.model.layers[1].mlp.experts.matrices("default", "down_proj")
    torch.testing.assert_close(b @ a, in_earlier_peft(base, parts, "down_proj"))


def test_stacks_that_peft_has_never_exchanged(tmp_path):
    wanted, tensors = saved(tmp_path, "GptOss")
    written(tmp_path, peft_version=None)
    for layout in (None, "peft", "peft-0.17"):
        assert_same_bits(outputs(loaded(tmp_path, "GptOss", experts_layout=layout)), wanted)
    written(tmp_path, exchanged(tensors, EXPERTS))
    with pytest.raises(ValueError, match="do not fit '.*experts.*'"):
        loaded(tmp_path, "GptOss")


@pytest.mark.parametrize("is_old", [False, True])
def test_square_stacks_are_refused_where_nothing_tells(is_old, tmp_path):
    targets = ["experts.gate_up_proj"]  # [32, 32]
    wanted, tensors = saved(tmp_path, targets=targets, **SQUARE)
    version, name = ("0.18.0", "peft-0.17") if is_old else ("0.19.1", "peft")
    tensors = exchanged(tensors, EXPERTS) if is_old else tensors
    written(tmp_path, tensors, peft_version=version)
    assert_same_bits(outputs(loaded(tmp_path, options=SQUARE)), wanted)
    written(tmp_path, peft_version=None)
    with pytest.raises(ValueError, match="0.mlp.experts.gate_up_proj' has as many rows as columns"):
        loaded(tmp_path, options=SQUARE)
    assert_same_bits(outputs(loaded(tmp_path, options=SQUARE, experts_layout=name)), wanted)
    other = "peft" if is_old else "peft-0.17"
    got = outputs(loaded(tmp_path, options=SQUARE, experts_layout=other))
    assert not torch.allclose(got, wanted, atol=1e-2)


def test_square_stacks_beside_others_are_told_by_these(tmp_path):
    wanted, tensors = saved(tmp_path, **SQUARE)
    written(tmp_path, exchanged(tensors, EXPERTS), peft_version=None)
    assert_same_bits(outputs(loaded(tmp_path, options=SQUARE)), wanted)


@pytest.mark.parametrize("is_old", [False, True])
def test_files_of_unsloth_by_the_option(is_old, tmp_path):
    wanted, tensors = saved(tmp_path)
    tensors = exchanged(tensors, EXPERTS) if is_old else tensors
    written(tmp_path, by_expert(tensors, EXPERTS))
    assert_same_bits(outputs(loaded(tmp_path, experts_layout="unsloth")), wanted)
    assert not torch.allclose(outputs(loaded(tmp_path)), wanted, atol=1e-2)
    with pytest.raises(ValueError, match="experts_layout is 'old', wanted one of peft, peft-0.17"):
        loaded(tmp_path, experts_layout="old")


# ---- what is refused -----------------------------------------------------------------------------

STEM = "base_model.model.model.layers.0.mlp.experts"


def refused(folder, message):
    model = moe_of("Mixtral")
    before = dict(model.named_parameters())
    with pytest.raises(ValueError, match=message):
        load_adapter(model, folder)
    now = dict(model.named_parameters())
    assert now.keys() == before.keys() and all(now[key] is before[key] for key in now)
    assert all(p.requires_grad for p in now.values())


def changed(tensors, key, shape):
    return tensors | {f"{STEM}.{key}": torch.ones(shape)}


def test_tensors_that_do_not_fit(tmp_path):
    _, tensors = saved(tmp_path)
    for key, shape, message in (
        ("lora_A.weight", (17, FEATURES), r"\[17, 24\] and lora_B \[32, 18\] do not fit '.*down"),
        ("lora_A.weight", (18, FEATURES + 1), "do not fit '.*0.mlp.experts.down_proj', 6 matrices"),
        ("base_layer.lora_B.weight", (HIDDEN, 18), "do not fit '.*0.mlp.experts.gate_up_proj'"),
    ):
        written(tmp_path, changed(tensors, key, shape))
        refused(tmp_path, message)
    one = {k: t for k, t in tensors.items() if not k.startswith(f"{STEM}.lora_")}
    written(tmp_path, one)
    refused(tmp_path, "has adapters of 1 parameters of '.*0.mlp.experts', and 'target_parameters'")
    written(tmp_path, tensors | {f"{STEM}.lora_magnitude_vector": torch.ones(HIDDEN)})
    refused(tmp_path, "do not fit '.*0.mlp.experts.down_proj'")
    written(tmp_path, {k: t.int() if "experts" in k else t for k, t in tensors.items()})
    refused(tmp_path, "has torch.int32 and torch.int32, wanted floats")
    mixed = exchanged(tensors, EXPERTS)
    written(tmp_path, {k: (mixed if ".1." in k else tensors)[k] for k in tensors})
    refused(tmp_path, "do not fit '.*1.mlp.experts.*'")


def test_settings_that_do_not_fit(tmp_path):
    _, tensors = saved(tmp_path)
    for settings, message in (
        (dict(target_parameters="gate_up_proj"), "'target_parameters' is .*, wanted a list"),
        (
            dict(target_parameters=["down_proj"]),
            r"names \['down_proj'\] of them, wanted as",
        ),
        (dict(lora_dropout=0.1), "dropout is 0.1, wanted 0 where experts have adapters"),
    ):
        before = config_in(tmp_path)
        written(tmp_path, **settings)
        refused(tmp_path, message)
        (tmp_path / CONFIG).write_text(json.dumps(before))
    written(tmp_path, target_parameters=None)
    assert isinstance(loaded(tmp_path).model.layers[0].mlp.experts, LoRAExperts)  # both: no doubt
    saved(tmp_path, targets=["experts.down_proj"])
    written(tmp_path, target_parameters=None)
    refused(tmp_path, r"names \[\] of them, wanted as many of \['gate_up_proj', 'down_proj'\]")
    model = moe_of("Mixtral")
    model.model.layers[0].mlp.experts.act_fn = torch.nn.GELU()
    with pytest.raises(ValueError, match="0.mlp.experts' can have no adapters: it computes"):
        load_adapter(model, tmp_path)


def test_what_else_has_a_matrix_is_no_router(tmp_path):
    """Its adapter is loaded if ``target_parameters`` name it."""
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], target_parameters=["gate.weight"])
    theirs = peft.get_peft_model(moe_of("Mixtral"), config)
    shaken(theirs).save_pretrained(tmp_path)
    ours = loaded(tmp_path).train()
    torch.testing.assert_close(
        step(ours, tokens_of())["loss"], step(theirs.train(), tokens_of())["loss"]
    )
    written(tmp_path, target_parameters=["other.weight"])
    refused(tmp_path, "mlp.gate' is a MixtralTopKRouter, no linear layer or embedding")
