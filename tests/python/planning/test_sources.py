"""Models from objects, functions and configurations, without memory and without a network."""

import json
import os

import pytest
import torch
from headroom.planning.sources import model_from
from headroom.step.errors import PlanError
from torch import nn

LLAMA = {
    "model_type": "llama",
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def linear() -> nn.Module:
    return nn.Linear(3, 5)


def test_objects_and_functions(tmp_path, monkeypatch):
    model = linear()
    assert model_from(model) is model
    built = model_from(linear)
    assert built.weight.is_meta and built.weight.shape == (5, 3)
    (tmp_path / "mine_to_plan.py").write_text(
        "from torch import nn\n"
        "class Nested:\n    @staticmethod\n    def make():\n        return nn.Linear(2, 7)\n"
        "def number():\n    return 7\n"
        "value = 7\n"
    )
    monkeypatch.chdir(tmp_path)
    assert model_from("mine_to_plan:Nested.make").weight.shape == (7, 2)
    for text, message in {
        "mine_to_plan:other": "module 'mine_to_plan' has no attribute 'other'",
        "mine_to_plan:number": "returned a int, wanted a torch.nn.Module",
        "mine_to_plan:value": "is a int, wanted a function",
        "no_such_module:make": "No module named 'no_such_module'",
    }.items():
        with pytest.raises(PlanError, match=message):
            model_from(text)


def test_configurations(tmp_path):
    transformers = pytest.importorskip("transformers")
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA | {"torch_dtype": "bfloat16"}))
    environment = {k: v for k, v in os.environ.items() if "OFFLINE" in k}
    models = [
        model_from(LLAMA),
        model_from(transformers.LlamaConfig(**LLAMA)),
        model_from(tmp_path),
        model_from(str(file)),
        model_from(LLAMA | {"architectures": ["LlamaModel"], "dtype": "float16"}),
    ]
    assert {k: v for k, v in os.environ.items() if "OFFLINE" in k} == environment
    assert torch.get_default_dtype() == torch.float32
    for model in models:
        assert all(p.is_meta for p in model.parameters())
        assert sum(b.numel() for b in model.buffers()) < 100
    kinds = [type(model).__name__ for model in models]
    assert kinds == [*["LlamaForCausalLM"] * 4, "LlamaModel"]
    dtypes = [next(model.parameters()).dtype for model in models]
    assert dtypes == [torch.float32] * 2 + [torch.bfloat16] * 2 + [torch.float16]


def test_a_large_configuration_takes_no_memory():
    pytest.importorskip("transformers")
    sizes = {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64}
    model = model_from(LLAMA | sizes)
    assert sum(p.numel() for p in model.parameters()) > 1e9


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("meta-llama/Llama-2-7b-hf", "Names on the Hugging Face hub are not looked up"),
        ("gpt2", "Names on the Hugging Face hub are not looked up"),
        ("./missing/config.json", "there is no file './missing/config.json'"),
        (7, "the model is a int"),
        ({"hidden_size": 3}, "has no 'model_type'"),
        ({"model_type": "of tomorrow"}, "knows no model type 'of tomorrow'"),
        ({"model_type": "mine", "auto_map": {}}, "code of its own"),
    ],
)
def test_bad_sources(source, message):
    if isinstance(source, dict):
        pytest.importorskip("transformers")
    with pytest.raises(PlanError, match=message):
        model_from(source)


def test_bad_files(tmp_path):
    with pytest.raises(PlanError, match="there is no file"):
        model_from(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(PlanError, match="is no JSON"):
        model_from(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(PlanError, match="holds a list"):
        model_from(tmp_path)
