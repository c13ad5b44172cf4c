"""Calls that are interrupted leave a model as it was, and can be repeated."""

import sys

import headroom
import pytest
import safetensors.torch
import torch
from headroom import adapters
from headroom.nn import Linear4bit
from headroom.state import load_adapter, save_adapter
from torch import nn

from helpers.bits import assert_same_bits
from helpers.interrupting import Interrupting


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 20, bias=False)
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)

    def forward(self, ids):
        x = self.encoder(self.embedding(ids))
        return self.head(self.norm(x + self.down(self.up(x).relu())))


def model_of(kind=None):
    torch.manual_seed(5)
    model = Model()
    for stage in (kind or "").split():
        if stage in ("nf4", "int8"):
            headroom.quantize(model, stage)
        elif stage == "merged":
            headroom.merge(model)
        else:
            options = dict(targets=["up", "down", "embedding"], modules_to_save=["norm"])
            headroom.lora(model, 2, name=stage, **options)
            for p in model.parameters():
                if p.requires_grad:
                    nn.init.normal_(p)
    return model.eval()


def state_of(model):
    """What a model is: its modules and their attributes, parameters, flags and values."""
    modules = {
        name: (id(one), type(one), sorted(vars(one)), one.training, getattr(one, "_active", None))
        for name, one in model.named_modules()
    }
    own = {name: vars(one).get("adapters", {}).copy() for name, one in model.named_modules()}
    values = {
        name: (id(x), x.requires_grad, x.detach().view(torch.uint8).flatten().tolist())
        for name, x in model.state_dict(keep_vars=True).items()
        if x.device.type != "meta" and isinstance(x, nn.Parameter)
    }
    # Of torch's encoder layers.
    flags = [vars(module).get("activation_relu_or_gelu") for module in model.modules()]
    return modules, own, values, flags, [*model.state_dict()]


CALLS = {
    "lora": ("", lambda m, _: headroom.lora(m, 2, dora=True, modules_to_save=["norm"])),
    "another": ("first", lambda m, _: headroom.lora(m, 2, modules_to_save=["norm"])),
    "over codes": ("nf4", lambda m, _: headroom.lora(m, 2, dora=True)),
    "load_adapter": ("", lambda m, path: load_adapter(m, path / "adapter")),
    "load another": ("int8 first", lambda m, path: load_adapter(m, path / "adapter")),
    "merge": ("nf4 default", lambda m, _: headroom.merge(m)),
    "requantize": ("nf4 default", lambda m, _: headroom.merge(m, requantize=True)),
    "load_quantized": ("", lambda m, path: headroom.load_quantized(m, path / "wide.safetensors")),
    "codes": ("", lambda m, path: headroom.load_quantized(m, path / "packed.safetensors")),
}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    path = tmp_path_factory.mktemp("files")
    save_adapter(model_of("default"), path / "adapter")
    tensors = safetensors.torch.load_file(path / "adapter" / "adapter_model.safetensors")
    key = "base_model.model.embedding.base_layer.weight"  # as PEFT saves it, and another
    tensors[key] = torch.randn(20, 8)
    safetensors.torch.save_file(tensors, path / "adapter" / "adapter_model.safetensors")
    safetensors.torch.save_file(model_of().state_dict(), path / "wide.safetensors")
    safetensors.torch.save_file(model_of("nf4").state_dict(), path / "packed.safetensors")
    return path


@pytest.mark.parametrize("name", CALLS)
def test_an_interrupted_call_changes_nothing(name, files):
    kind, call = CALLS[name]
    wanted = model_of(kind)
    with Interrupting() as counting:
        torch.manual_seed(2)
        call(wanted, files)
    ids, last = torch.arange(6).view(2, 3), counting.count - 1
    for after in sorted({*range(0, last, 1 + last // 5), last}):
        model = model_of(kind)
        before, output = state_of(model), model(ids)
        with Interrupting(after), pytest.raises(KeyboardInterrupt):
            call(model, files)
        assert state_of(model) == before
        assert_same_bits(model(ids), output)
        torch.manual_seed(2)
        call(model, files)
        assert_same_bits(model(ids), wanted(ids))
        assert [*model.state_dict()] == [*wanted.state_dict()]


LAST = {
    "lora": ("attach", "activate"),
    "another": ("attach", "call_linears"),
    "load_adapter": ("files", "_write"),
    "merge": ("merge", "describe"),
    "unmerge": ("merge", "describe"),
    "load_quantized": ("load", "describe"),
}


@pytest.mark.parametrize("name", LAST)
def test_an_error_in_the_last_step_changes_nothing(name, files, monkeypatch):
    def fail(*_):
        raise RuntimeError("stopped")

    unmerge = "nf4 default merged", lambda m, _: headroom.unmerge(m)
    kind, call = CALLS.get(name, unmerge)
    file, last = LAST[name]
    package = "quantizing" if file == "load" else "adapters"
    model = model_of(kind)
    before = state_of(model)
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="stopped"):
        patch.setattr(sys.modules[f"headroom.{package}.{file}"], last, fail)
        call(model, files)
    assert state_of(model) == before
    call(model, files)


def test_what_dora_cannot_read_is_no_half_adapter():
    layer = headroom.nn.LoRALinear(nn.Linear(4, 4))
    layer.base_matrix = lambda: 1 / 0
    with pytest.raises(ZeroDivisionError):
        layer.add_adapter("default", headroom.nn.Adapter(2, 2.0, dora=True))
    assert not layer.names and [*layer.state_dict()] == ["base_layer.weight", "base_layer.bias"]


@pytest.mark.parametrize("to", ["nf4", "int8"])
def test_quantizing_that_is_interrupted_goes_on(to):
    """It frees weights as it goes, so that layers are whole, and the rest follows."""
    wanted, ids = model_of(), torch.arange(6).view(2, 3)
    with Interrupting() as counting:
        headroom.quantize(wanted, to)
    for after in range(0, counting.count, 1 + counting.count // 6):
        model = model_of()
        with Interrupting(after), pytest.raises(KeyboardInterrupt):
            headroom.quantize(model, to)
        assert model(ids).isfinite().all()
        left = [m for m in model.modules() if type(m) is nn.Linear and m is not model.head]
        if left:
            headroom.quantize(model, to)
        assert_same_bits(model(ids), wanted(ids))


def test_models_without_values_stay_without(files):
    with torch.device("meta"):
        model = Model()
    weights = safetensors.torch.load_file(files / "wide.safetensors")
    weights["down.weight"][3, 4] = torch.nan
    path = files / "nan.safetensors"
    safetensors.torch.save_file(weights, path)
    params = dict(model.named_parameters())
    with pytest.raises(
        ValueError, match="'down.weight' cannot be quantized: an element is not fin"
    ):
        headroom.load_quantized(model, path)
    assert not any(isinstance(one, Linear4bit) for one in model.modules())
    assert all(x.is_meta for x in model.parameters())
    assert all(model.get_parameter(name) is x for name, x in params.items())
    headroom.load_quantized(model, files / "wide.safetensors")
    assert_same_bits(model.eval()(torch.arange(3)[None]), model_of("nf4")(torch.arange(3)[None]))


def test_adapters_that_are_switched_or_deleted(monkeypatch):
    model = model_of("first second")
    one = model.embedding  # the last of those below in no order of names
    for call in (
        lambda m: adapters.delete_adapter(m, "second"),
        lambda m: adapters.use_adapters(m, "first"),
    ):
        before = state_of(model)
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(type(model.norm), "delete_adapter", _interrupt)
            patch.setattr(type(model.norm), "trained", _interrupt)
            call(model)
        assert state_of(model) == before
        call(model)
    assert one.active == ("first",)


def _interrupt(*_):
    raise KeyboardInterrupt
