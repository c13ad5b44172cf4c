"""Files of mixtures, whose experts are put into few bits one by one as they are read."""

import json

import headroom
import pytest
import torch
from headroom.nn import QuantizedExperts
from torch import nn

from helpers.bits import assert_same_bits
from helpers.fresh import run_fresh
from helpers.moe_models import experts_of, moe_of, transformers

safetensors = pytest.importorskip("safetensors.torch")

SPLIT = {  # how the files of a family name a matrix of an expert
    "Mixtral": "model.layers.0.block_sparse_moe.experts.0.w1.weight",
    "Qwen3Moe": "model.layers.0.mlp.experts.0.gate_proj.weight",
    "DeepseekV3": "model.layers.1.mlp.experts.0.gate_proj.weight",
    "NemotronH": "backbone.layers.1.mixer.experts.0.up_proj.weight",
}
MERGED = {
    "GptOss": "model.layers.0.mlp.experts.gate_up_proj",
    "Gemma4Text": "model.layers.0.experts.gate_up_proj",
    "GraniteMoe": "model.layers.0.block_sparse_moe.input_linear.weight",
}


def on_meta(model):
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(model.config)


def saved(model, folder, change=lambda state: None):
    """Saves a model, whose tensors may be changed, and returns the path of the file."""
    model.save_pretrained(folder)
    path = folder / "model.safetensors"
    state = safetensors.load_file(path)
    change(state)
    safetensors.save_file(state, path)
    return path


def assert_same_state(got, wanted):
    got, wanted = got.state_dict(), wanted.state_dict()
    assert got.keys() == wanted.keys()
    for key, value in wanted.items():
        assert got[key].dtype == value.dtype and torch.equal(got[key], value), key


@pytest.mark.parametrize(
    ("to", "options"),
    [
        ("nf4", {}),
        ("nf4", {"search": True, "block_size": 32}),
        # Blocks that begin in one expert and end in another, as those of no model do.
        ("nf4", {"block_size": 2048}),
        ("fp4", {"double": False}),
        ("int8", {}),
    ],
)
@pytest.mark.parametrize("name", SPLIT | MERGED)
def test_files_of_transformers(name, to, options, tmp_path):
    model = moe_of(name).bfloat16()
    path = saved(model, tmp_path)
    assert (SPLIT | MERGED)[name] in safetensors.load_file(path)
    loaded = on_meta(model)
    report = headroom.load_quantized(loaded, path, to, **options)
    wanted = headroom.quantize(model, to, **options)
    assert all(type(module) is QuantizedExperts for module in experts_of(loaded).values())
    assert_same_state(loaded, model)
    assert sorted(str(report).splitlines()) == sorted(str(wanted).splitlines())


@pytest.mark.parametrize("name", ["Mixtral", "GptOss"])
def test_experts_that_are_skipped_are_read_as_they_are(name, tmp_path):
    model = moe_of(name).bfloat16()
    path = saved(model, tmp_path)
    loaded = on_meta(model)
    headroom.load_quantized(loaded, path, skip=["experts", "lm_head"])
    headroom.quantize(model, skip=["experts", "lm_head"])
    assert not any(type(module) is QuantizedExperts for module in experts_of(loaded).values())
    assert_same_state(loaded, model)


@pytest.mark.parametrize("to", ["nf4", "fp4", "int8"])
@pytest.mark.parametrize("name", ["Mixtral", "GptOss", "NemotronH"])
def test_what_was_quantized_comes_as_it_is(name, to, tmp_path):
    model = moe_of(name).bfloat16()
    headroom.quantize(model, to, block_size=32)
    model.save_pretrained(tmp_path)
    loaded = on_meta(model)
    report = headroom.load_quantized(loaded, tmp_path)
    assert_same_state(loaded, model)
    assert experts_of(model).keys() <= {one.name for one in report.quantized}
    again = on_meta(model)
    headroom.quantize(again, to, block_size=32)  # without values
    headroom.load_quantized(again, tmp_path)
    assert_same_state(again, model)
    ids = torch.arange(8)[None]
    with torch.no_grad():
        # Not those of the model, whose rotary frequencies are in 16 bits.
        assert_same_bits(loaded.eval()(ids).logits, again.eval()(ids).logits)


def without(key):
    return lambda state: state.pop(key)


def with_other(key, change):
    return lambda state: state.update({key: change(state[key])})


def renamed(key, other):
    return lambda state: state.update({other: state.pop(key)})


FIRST = "model.layers.0.block_sparse_moe.experts."


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            without(f"{FIRST}2.w3.weight"),
            r"'model.layers.0.mlp.experts.gate_up_proj' is in the files matrix by matrix, without "
            r"'experts.2.w3.weight'",
        ),
        (
            renamed(f"{FIRST}5.w2.weight", f"{FIRST}6.w2.weight"),
            "down_proj' is in the files matrix by matrix, without 'experts.5.w2.weight'",
        ),
        (
            with_other(f"{FIRST}1.w1.weight", lambda x: x[:-1].clone()),
            r"and that of expert 1 is torch.bfloat16 \[15, 32\], others are torch.bfloat16 \[16, 3",
        ),
        (with_other(f"{FIRST}4.w1.weight", lambda x: x.float()), "expert 4 is torch.float32"),
        (
            with_other(f"{FIRST}4.w2.weight", lambda x: x * torch.inf),
            "'model.layers.0.mlp.experts.down_proj' cannot be quantized: an element is not finite",
        ),
        (
            lambda state: state.update({f"{FIRST}0.w1.weight.absmax": torch.ones(3)}),
            "1 of the files are not in the model .*w1.weight.absmax|is in few bits",
        ),
    ],
)  # fmt: skip
def test_files_that_do_not_fit(change, message, tmp_path):
    model = moe_of("Mixtral").bfloat16()
    path = saved(model, tmp_path, change)
    loaded = on_meta(model)
    with pytest.raises(ValueError, match=message):
        headroom.load_quantized(loaded, path)
    assert all(param.is_meta for param in loaded.parameters())
    assert not any(type(module) is QuantizedExperts for module in loaded.modules())


def test_what_only_transformers_makes(monkeypatch, tmp_path):
    """Of another map than that of stacks."""
    from transformers import conversion_mapping
    from transformers.core_model_loading import Transpose, WeightConverter

    model = moe_of("GptOss").bfloat16()
    key, other = MERGED["GptOss"], "model.layers.0.mlp.experts.turned"
    path = saved(model, tmp_path, renamed(key, other))
    steps = [WeightConverter("experts.turned", "experts.gate_up_proj", [Transpose(1, 2)])]
    monkeypatch.setattr(conversion_mapping, "get_model_conversion_mapping", lambda *_: steps)
    with pytest.raises(ValueError, match=f"'{other}' becomes '{key}' in transformers, by Transpo"):
        headroom.load_quantized(on_meta(model), path)


def test_experts_in_few_bits_that_are_not_known(tmp_path):
    model = moe_of("Mixtral").bfloat16()
    headroom.quantize(model)
    model.save_pretrained(tmp_path)
    loaded = on_meta(model)
    for module in experts_of(loaded).values():
        module.act_fn = nn.GELU()
    with pytest.raises(
        ValueError, match="experts' is in few bits in the files, and it computes no"
    ):
        headroom.load_quantized(loaded, tmp_path)


# ---- memory --------------------------------------------------------------------------------------


def big(device="cpu"):
    sizes = dict(hidden_size=1024, intermediate_size=1024, num_hidden_layers=1, vocab_size=64)
    sizes |= dict(num_attention_heads=4, num_key_value_heads=1, head_dim=64, num_local_experts=16)
    config = transformers.MixtralConfig(**sizes)
    with torch.device(device):
        return transformers.MixtralForCausalLM(config).bfloat16()


def measure(path, first, to):
    """Prints the peak of resident memory above that before, and the bytes of the result."""
    import headroom

    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    model = big("meta")
    headroom.load_quantized(on_meta(moe_of("Mixtral").bfloat16()), first, to)
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    before = resident("VmRSS")
    report = headroom.load_quantized(model, path, to)
    print(json.dumps([resident("VmHWM") - before, report.after]))


def resident(key):
    with open("/proc/self/status") as file:
        return next(1024 * int(line.split()[1]) for line in file if line.startswith(key))


@pytest.mark.parametrize("to", ["nf4", "int8"])
def test_the_peak_is_that_of_the_result_and_one_expert(to, memory_path, tmp_path):
    path = saved(big(), memory_path)
    first = saved(moe_of("Mixtral").bfloat16(), tmp_path)
    peaks = []
    for _ in range(2):  # other memory of the process only ever adds to a peak
        status, printed = run_fresh(tmp_path, measure, path, first, to)
        assert status == 0, printed
        peak, result = json.loads(printed.splitlines()[-1])
        peaks.append(peak)
    expert = 2 * 2048 * 1024
    allowed = 1.1 * expert + expert / 2 + (6 << 20)  # with its codes
    assert min(peaks) <= result + allowed, (peaks, result)
    assert allowed < 16 * expert / 4  # so a stack in 16 bits would be seen
