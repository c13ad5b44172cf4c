"""Files of adapters: PEFT loads ours and we load PEFT's, and what is not done is refused."""

import copy
import json

import headroom
import pytest
import safetensors.torch
import torch
from headroom.adapters.files import DEFAULTS
from headroom.state import load_adapter, save_adapter
from torch import nn

from helpers.bits import assert_same_bits
from helpers.hf_models import model_of, outputs, shaken

peft = pytest.importorskip("peft")
TENSORS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


def config_in(folder):
    return json.loads((folder / CONFIG).read_text())


OPTIONS = {
    "plain": dict(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"]),
    "all": dict(r=3, target_modules="all-linear", lora_dropout=0.1),
    "regex": dict(target_modules=r".*1\.mlp\..*_proj"),
    "rslora": dict(r=4, lora_alpha=3, use_rslora=True, target_modules=["v_proj"]),
    "patterns": dict(
        target_modules="all-linear",
        rank_pattern={"layers.0.self_attn.q_proj": 2, "up_proj": 5},
        alpha_pattern={"down_proj": 3, "^model.layers.1.self_attn.k_proj": 1},
    ),
    "saved": dict(target_modules=["q_proj"], modules_to_save=["lm_head", "norm"]),
    "dora": dict(r=4, lora_alpha=3, use_dora=True, target_modules="all-linear"),
    "embedding": dict(r=4, lora_alpha=3, target_modules=["q_proj", "embed_tokens"]),
    "embedding and dora": dict(r=2, use_dora=True, target_modules=["embed_tokens", "lm_head"]),
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_files_of_peft_load_and_ours_are_the_same(options, tmp_path):
    theirs = peft.get_peft_model(model_of("Llama"), peft.LoraConfig(**options))
    shaken(theirs).save_pretrained(tmp_path / "theirs")
    ours = model_of("Llama").eval()
    load_adapter(ours, tmp_path / "theirs")
    wanted = outputs(theirs)
    torch.testing.assert_close(outputs(ours), wanted, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(outputs(model_of("Llama").eval()), wanted, atol=1e-2)
    save_adapter(ours, tmp_path / "ours")
    files = [safetensors.torch.load_file(tmp_path / one / TENSORS) for one in ("ours", "theirs")]
    # With an adapter of an embedding PEFT saves the weights of embedding and head, too.
    weights = {key for key in files[1] if key.endswith("base_layer.weight")}
    assert files[0].keys() == files[1].keys() - weights
    assert bool(weights) == ("embed_tokens" in options["target_modules"])
    assert all(torch.equal(files[0][key], files[1][key]) for key in files[0])
    again = peft.PeftModel.from_pretrained(model_of("Llama"), tmp_path / "ours").eval()
    assert_same_bits(outputs(again), wanted)
    mine, other = config_in(tmp_path / "ours"), config_in(tmp_path / "theirs")
    for key in ("r", "lora_alpha", "use_rslora", "use_dora", "lora_dropout", "peft_version"):
        assert mine[key] == other[key] or "pattern" in str(options)


def test_ours_is_what_peft_writes(tmp_path):
    """Every key of the settings, their order, and the bytes of the tensors."""
    theirs = peft.get_peft_model(
        model_of("Llama"), peft.LoraConfig(r=4, lora_alpha=4, target_modules=["q_proj"])
    )
    theirs.save_pretrained(tmp_path / "theirs")
    model = model_of("Llama")
    headroom.lora(model, 4, targets=["q_proj"])
    for key, p in theirs.named_parameters():
        if "lora_" in key:
            model.get_parameter(key.removeprefix("base_model.model.")).data.copy_(p.data)
    save_adapter(model, tmp_path / "ours")
    for file in (TENSORS, CONFIG):
        assert (tmp_path / "ours" / file).read_bytes() == (tmp_path / "theirs" / file).read_bytes()


def test_settings_without_effect_are_those_that_peft_writes():
    written = peft.LoraConfig().to_dict()
    assert DEFAULTS.keys() == written.keys()
    changed = {k for k in DEFAULTS if DEFAULTS[k] != written[k]}
    assert changed <= {"inference_mode", "peft_version", "peft_type", "auto_mapping"}
    assert DEFAULTS["peft_type"] == written["peft_type"].value


@pytest.mark.parametrize("to", ["nf4", "int8"])
def test_over_quantized_layers_and_other_names(to, tmp_path):
    model = model_of("Llama")
    headroom.quantize(model, to)
    other = copy.deepcopy(model)
    headroom.lora(model, 3, alpha=5, name="mine")
    wanted = outputs(shaken(model))
    save_adapter(model, tmp_path, "mine")
    assert (tmp_path / "mine" / CONFIG).exists() and not (tmp_path / CONFIG).exists()
    load_adapter(other, tmp_path, "mine")
    assert_same_bits(outputs(other.eval()), wanted)
    load_adapter(other, tmp_path / "mine")  # a second one, under another name
    assert_same_bits(outputs(other), wanted)
    headroom.adapters.use_adapters(other, "mine", "default")
    assert not torch.equal(outputs(other), wanted)
    assert {n for n, p in other.named_parameters() if p.requires_grad} == {
        n for n, _ in other.named_parameters() if "lora_" in n
    }


def test_a_model_of_no_library(tmp_path):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6), nn.Linear(6, 2))
    base = copy.deepcopy(model)
    headroom.lora(model, 2, dtype=torch.bfloat16)
    shaken(model)
    save_adapter(model, tmp_path)
    again = peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path).eval()
    load_adapter(base, tmp_path)
    assert base[0].lora_A["default"].weight.dtype == torch.float32
    x = torch.randn(5, 6)
    torch.testing.assert_close(base(x), again(x))


def test_names_are_those_of_the_model_inside_of_wrappers(saved):
    before = (saved / TENSORS).read_bytes()
    model = model_of("Llama")
    load_adapter(model, saved)
    save_adapter(torch.compile(model), saved)
    assert (saved / TENSORS).read_bytes() == before


def test_what_trains_beside_adapters_is_saved(tmp_path):
    model = model_of("Llama")
    headroom.lora(model, 2, targets=["q_proj"])
    model.lm_head.requires_grad_()
    save_adapter(shaken(model), tmp_path)
    assert config_in(tmp_path)["modules_to_save"] == ["lm_head"]
    other = model_of("Llama").eval()
    load_adapter(other, tmp_path)
    assert other.lm_head.weight.requires_grad  # of the copy, which is called
    assert not other.lm_head.original_module.weight.requires_grad
    assert_same_bits(outputs(other), outputs(model))


def test_copies_of_modules_are_saved_with_their_adapter(tmp_path):
    model = model_of("Llama").eval()
    plain = outputs(model)
    head = dict(targets=["q_proj"], modules_to_save=["lm_head"])
    headroom.lora(model, 2, **head)
    first = outputs(shaken(model))
    headroom.lora(model, 2, **head, name="second")
    for p in shaken(model).parameters():
        p.data.mul_(2 if p.requires_grad else 1)
    second = outputs(model)
    for name in ("default", "second"):
        save_adapter(model, tmp_path, name)
    theirs = peft.PeftModel.from_pretrained(model_of("Llama"), tmp_path).eval()
    theirs.load_adapter(tmp_path / "second", "second")
    ours = model_of("Llama").eval()
    load_adapter(ours, tmp_path)
    load_adapter(ours, tmp_path / "second", "second")
    for name, wanted in (("default", first), ("second", second)):
        theirs.set_adapter(name)
        headroom.adapters.use_adapters(ours, name)
        for one in (theirs, ours):
            torch.testing.assert_close(outputs(one), wanted)
    with headroom.adapters.adapters_disabled(ours):
        assert_same_bits(outputs(ours), plain)
    assert not torch.allclose(first, second, atol=1e-2)


class Around(nn.Module):
    """Has a parameter of its own, and modules inside."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6))
        self.inner, self.other = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        return self.scale * self.other(self.inner(x))


def test_what_trains_with_modules_inside_is_saved_as_a_whole(tmp_path):
    model = nn.Sequential(nn.Linear(6, 6), Around(), nn.Linear(6, 2))
    base = copy.deepcopy(model)
    headroom.lora(model, 2, targets=["0"])
    model[1].requires_grad_()
    save_adapter(shaken(model), tmp_path)
    assert config_in(tmp_path)["modules_to_save"] == ["1"]
    again = peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path).eval()
    load_adapter(base, tmp_path)
    x = torch.randn(5, 6)
    for one in (base, again):
        torch.testing.assert_close(one(x), model(x))


def test_what_trains_around_adapters_is_refused(tmp_path):
    model = nn.Sequential(Around(), nn.Linear(6, 2))
    headroom.lora(model, 2, targets=["inner"])
    model[0].scale.requires_grad_()
    with pytest.raises(ValueError, match="'0' trains, and the files of an adapter have no place"):
        save_adapter(model, tmp_path)


def test_what_no_file_says_is_refused(tmp_path):
    model = model_of("Llama")
    with pytest.raises(ValueError, match="no adapter 'default'"):
        save_adapter(model, tmp_path)
    headroom.lora(model, 2, targets=["q_proj"])
    first, second = (one.mlp.down_proj for one in model.model.layers)
    own, second.weight = second.weight, first.weight.requires_grad_()
    with pytest.raises(ValueError, match="'.*0.mlp.down_proj' and '.*1.*' have the same weight"):
        save_adapter(model, tmp_path)
    second.weight = own
    first.weight.requires_grad_(False)
    layer = model.model.layers[0].self_attn.q_proj
    layer.base_layer.weight.requires_grad_()
    with pytest.raises(ValueError, match="q_proj.base_layer' trains, and the files of an adapter"):
        save_adapter(model, tmp_path)
    layer.base_layer.weight.requires_grad_(False)
    layer.delete_adapter("default")
    layer.add_adapter("default", headroom.nn.Adapter(2, 2.0, 0.5))
    with pytest.raises(ValueError, match="layers have a dropout of 0.5 and others"):
        save_adapter(model, tmp_path)
    assert not (tmp_path / TENSORS).exists()


@pytest.fixture
def saved(tmp_path):
    model = model_of("Llama")
    headroom.lora(model, 2, targets=["q_proj", "up_proj"])
    save_adapter(shaken(model), tmp_path)
    return tmp_path


def refused(folder, message):
    model = model_of("Llama")
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=message):
        load_adapter(model, folder)
    assert model.state_dict().keys() == before.keys()
    assert_same_bits(list(model.state_dict().values()), list(before.values()))
    assert all(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("peft_type", "IA3"),
        ("bias", "all"),
        ("lora_bias", True),
        ("use_qalora", True),
        ("layer_replication", [[0, 1]]),
        ("trainable_token_indices", [1]),
        ("alora_invocation_tokens", [1]),
        ("init_lora_weights", "pissa"),
        ("init_lora_weights", "loftq"),
        ("megatron_config", {"a": 1}),
        ("a_key_of_tomorrow", 2),
    ],
)
def test_settings_that_change_numbers_are_refused(key, value, saved):
    (saved / CONFIG).write_text(json.dumps(config_in(saved) | {key: value}))
    refused(saved, f"'{key}' is")


@pytest.mark.parametrize("lengths", [None, torch.ones(31)])
def test_lengths_of_dora_must_be_there_and_fit(lengths, saved):
    (saved / CONFIG).write_text(json.dumps(config_in(saved) | {"use_dora": True}))
    if lengths is not None:
        tensors = safetensors.torch.load_file(saved / TENSORS)
        tensors |= {f"{PATH}.lora_magnitude_vector": lengths}
        safetensors.torch.save_file(tensors, saved / TENSORS)
    refused(saved, r"with use_dora=True there should be \[\[(32|48)\]\]")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("init_lora_weights", "gaussian"),
        ("task_type", "CAUSAL_LM"),
        ("loftq_config", {"loftq_bits": 4}),
        ("a_key_of_tomorrow", None),
        ("another", False),
    ],
)
def test_settings_that_say_nothing_are_taken(key, value, saved):
    (saved / CONFIG).write_text(json.dumps(config_in(saved) | {key: value}))
    load_adapter(model_of("Llama"), saved)


def test_settings_of_old_files_may_lack_keys(saved):
    config = {k: v for k, v in config_in(saved).items() if k in ("peft_type", "r", "lora_alpha")}
    (saved / CONFIG).write_text(json.dumps(config))
    load_adapter(model_of("Llama"), saved)
    for text, message in (("{", "is malformed"), ("[]", "it is no object")):
        (saved / CONFIG).write_text(text)
        refused(saved, message)
    (saved / CONFIG).write_text(json.dumps(config | {"lora_alpha": "8"}))
    refused(saved, "alpha must be a number")


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("alpha_pattern", [], r"'alpha_pattern' is \[\], wanted an object of expressions"),
        ("alpha_pattern", {"(": 2}, "'alpha_pattern' has '\\(', which is no regular expression"),
        ("alpha_pattern", {"q_proj": "2"}, "alpha must be a number"),
        ("alpha_pattern", {"q_proj": 10**400}, "alpha is 1000.*, wanted a finite number"),
        ("lora_alpha", 10**400, "alpha is 1000.*, wanted a finite number"),
        ("lora_alpha", None, "alpha must be a number"),
        ("lora_dropout", float("nan"), "dropout is nan"),
        ("modules_to_save", "lm_head", "'modules_to_save' is 'lm_head', wanted a list of names"),
        ("modules_to_save", [3], r"'modules_to_save' is \[3\], wanted a list of names"),
        ("modules_to_save", [""], r"'modules_to_save' is \[''\], wanted a list of names"),
        ("use_dora", "yes", "'use_dora' is 'yes', wanted true or false"),
        ("use_rslora", None, "'use_rslora' is None, wanted true or false"),
        ("peft_type", ["LORA"] * 999, "'peft_type' is"),
    ],
)
def test_malformed_settings_are_refused(key, value, message, saved):
    (saved / CONFIG).write_text(json.dumps(config_in(saved) | {key: value}))
    refused(saved, message)


def test_settings_that_are_too_deep_are_refused(saved):
    (saved / CONFIG).write_text('{"peft_type": ' + "[" * 100_000)
    refused(saved, "adapter_config.json is malformed: maximum recursion depth exceeded")


def test_modules_that_were_saved_must_be_there(saved):
    """PEFT lists names of heads that a model does not have; all else was trained and is missing."""
    for names, missing in (
        (["lm_head"], "has no tensors of 'lm_head'"),
        (["nowhere"], "no tensors of 'nowh"),
    ):
        config = config_in(saved) | {"modules_to_save": names}
        (saved / CONFIG).write_text(json.dumps(config))
        refused(saved, missing)
    config = config_in(saved) | {"modules_to_save": ["classifier", "score"]}
    (saved / CONFIG).write_text(json.dumps(config))
    load_adapter(model_of("Llama"), saved)


def test_a_module_that_was_saved_in_part_is_refused(tmp_path):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    base = copy.deepcopy(model)
    headroom.lora(model, 2, targets=["0"], modules_to_save=["1"])
    save_adapter(model, tmp_path)
    tensors = safetensors.torch.load_file(tmp_path / TENSORS)
    del tensors["base_model.model.1.bias"]
    safetensors.torch.save_file(tensors, tmp_path / TENSORS)
    with pytest.raises(ValueError, match="'1' was saved without 'bias'"):
        load_adapter(base, tmp_path)


PATH = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.pop(f"{PATH}.lora_A.weight"), "has only one of lora_A and lora_B"),
        (lambda d: d.update({f"{PATH}.lora_A.weight": torch.ones(2, 31)}), "do not fit its weight"),
        (lambda d: d.update({f"{PATH}.lora_A.weight": torch.ones(3, 32)}), "do not fit its weight"),
        (lambda d: d.update({f"{PATH}.lora_B.weight": torch.ones(32)}), "do not fit its weight"),
        (lambda d: d.update({"other.weight": torch.ones(1)}), "does not begin with 'base_model"),
        (
            lambda d: d.update({f"{PATH}.lora_B.bias": torch.ones(32)}),
            "lora_B.bias' is not support",
        ),
        (
            lambda d: d.update({f"{PATH}.lora_magnitude_vector": torch.ones(32)}),
            r"has shapes \[\[32\]\], and with use_dora=False there should be \[\]",
        ),
        (
            lambda d: d.update({f"{PATH}.base_layer.weight": torch.ones(32, 31)}),
            r"base_layer.weight' is \[32, 31\], and no layer with an adapter has such a weight",
        ),
        (lambda d: d.clear(), "has no adapter"),
        (
            lambda d: d.update({f"{PATH}.lora_A.weight": torch.ones(2, 32, dtype=torch.int8)}),
            "q_proj' has torch.int8, wanted floats",
        ),
        (
            lambda d: d.update({f"{PATH}s.lora_{k}.weight": torch.ones(1, 1) for k in "AB"}),
            "the model has no 'model.layers.0.self_attn.q_projs'",
        ),
        (
            lambda d: d.update(
                {f"base_model.model.model.norm.lora_{k}.weight": torch.ones(1, 1) for k in "AB"}
            ),
            "'model.norm' is a LlamaRMSNorm, no linear layer",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_refused(change, message, saved):
    tensors = safetensors.torch.load_file(saved / TENSORS)
    change(tensors)
    safetensors.torch.save_file(tensors, saved / TENSORS)
    refused(saved, message)


def test_weights_beside_adapters_are_not_written_over_codes(saved):
    tensors = safetensors.torch.load_file(saved / TENSORS)
    key = f"{PATH}.base_layer.weight"
    safetensors.torch.save_file(tensors | {key: torch.ones(32, 32)}, saved / TENSORS)
    model = model_of("Llama")
    headroom.quantize(model, "int8")
    with pytest.raises(ValueError, match="no layer with an adapter has such a weight of floats"):
        load_adapter(model, saved)


def test_modules_that_were_saved_must_fit(saved):
    config = config_in(saved) | {"modules_to_save": ["lm_head"]}
    (saved / CONFIG).write_text(json.dumps(config))
    tensors = safetensors.torch.load_file(saved / TENSORS)
    key = "base_model.model.lm_head.weight"
    safetensors.torch.save_file(tensors | {key: torch.ones(61, 31)}, saved / TENSORS)
    refused(saved, r"'lm_head.weight' is \[61, 31\], and the model has no such")
    safetensors.torch.save_file(tensors | {key: torch.ones(61, 32)}, saved / TENSORS)
    model = model_of("Llama")
    load_adapter(model, saved)
    assert bool((model.lm_head.weight == 1).all())
    assert not bool((model.lm_head.original_module.weight == 1).any())


def test_adapters_inside_of_adapters_are_refused(saved):
    tensors = safetensors.torch.load_file(saved / TENSORS)
    inside = {
        key.replace(".lora_", ".base_layer.lora_"): value
        for key, value in tensors.items()
        if key.startswith(PATH)
    }
    safetensors.torch.save_file(inside, saved / TENSORS)
    model = model_of("Llama")
    headroom.lora(model, 2)
    with pytest.raises(ValueError, match="q_proj.base_layer' is inside of a module that has adap"):
        load_adapter(model, saved, "other")


def test_files_that_are_missing(tmp_path):
    with pytest.raises(FileNotFoundError):
        load_adapter(model_of("Llama"), tmp_path)
