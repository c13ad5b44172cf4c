"""Frozen weights that ``headroom.fit`` quantizes where nothing fits otherwise, and gives back."""

import copy
import gc
import weakref

import headroom
import pytest
import torch
from headroom.fitting import DoesNotFit
from headroom.fitting.apply.applied import Applied
from headroom.fitting.choice import Choice
from headroom.functional import dequantize_matrix, quantize_matrix
from headroom.patching import generic
from headroom.patching.levels import set_levels
from headroom.quantizing import frozen
from torch import nn

from helpers.few_bits import freeze

NF4 = {"frozen": "nf4"}


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Stack(nn.Module):
    """Blocks whose matrices are frozen, and whose norms, biases and head train."""

    def __init__(self, width=72, depth=3):
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, 5)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def stack(dtype=torch.float32):
    torch.manual_seed(0)
    model = freeze(Stack()).to(dtype)
    model.head.weight.requires_grad_(True)
    return model, (torch.randn(12, 72, dtype=dtype), torch.randn(12, 5, dtype=dtype))


def llama():
    pytest.importorskip("transformers")
    from helpers.hf_models import model_of

    model = freeze(model_of("Llama", hidden_size=128, intermediate_size=256))
    tokens = torch.randint(3, 61, (4, 32))
    return model, {"input_ids": tokens, "labels": tokens}


def with_adapters():
    peft = pytest.importorskip("peft")
    model, batch = llama()
    settings = peft.LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.0)
    return peft.get_peft_model(model, settings), batch


def with_our_adapters():
    model, batch = llama()
    headroom.lora(model, 4)
    return model, batch


def fit(model, batch, budget="1 GiB", **options):
    if isinstance(batch, tuple):
        options["loss"] = nn.functional.mse_loss
    return headroom.fit(model, batch, budget=budget, **options)


def given(model, batch, choice, **options):
    """Fits with a choice, so that nothing is measured."""
    return fit(model, batch, choice={"optimizer": "headroom", **choice}, **options)


LEVELS = {"levels": ["L0", "L2"]}
CHOICES = {
    "plain": (stack, NF4),
    "int8": (stack, {"frozen": "int8", "levels": ["L0", "L5", "L5"]}),
    "micro-batches": (stack, NF4 | {"micro_batches": 4}),
    "release": (llama, NF4 | LEVELS | {"release": True, "fused_loss": True}),
    "bf16": (llama, NF4 | LEVELS | {"weights": "bf16"}),
    "8 bits": (llama, NF4 | LEVELS | {"optimizer": "8bit", "micro_batches": 2}),
    "host": (llama, NF4 | {"levels": ["L1@host", "L1"], "offload": "state"}),
    "adapters": (with_adapters, NF4 | {"levels": ["L1", "L1"], "micro_batches": 2}),
    "ours": (with_our_adapters, NF4 | LEVELS | {"micro_batches": 2}),
    "ours, 8 bits": (with_our_adapters, {"frozen": "int8", "optimizer": "8bit"}),
    "ours, release": (with_our_adapters, NF4 | {"levels": ["L5", "L1"], "release": True}),
    "ours, given": (with_our_adapters, LEVELS | {"frozen": "given", "optimizer": "8bit"}),
    "ours, host": (with_our_adapters, NF4 | {"levels": ["L1@host", "L1"], "offload": "state"}),
}


@pytest.mark.parametrize("name", CHOICES)
def test_a_plan_is_what_a_step_takes(name):
    make, choice = CHOICES[name]
    model, batch = make()
    fitted = given(model, batch, choice, host_budget="1 GiB")
    for _ in range(2):
        assert fitted.step(batch).isfinite()
    assert abs(fitted.predicted_peak / fitted.measured_peak - 1) <= 0.001
    assert fitted.predicted_host == fitted.measured_host or not choice.get("offload")
    layers = [m for m in model.modules() if isinstance(m, headroom.nn.Linear4bit)]
    assert bool(layers) == (choice["frozen"] == "nf4")
    held = {id(p) for group in fitted.optimizer.param_groups for p in group["params"]}
    assert not any(id(p) in held for p in model.parameters() if not p.requires_grad)


@pytest.mark.parametrize("to", ["nf4", "int8"])
@pytest.mark.parametrize("make", [stack, llama, with_adapters, with_our_adapters])
def test_the_bits_are_those_of_quantizing_by_hand(make, to):
    model, batch = make()
    by_hand = copy.deepcopy(model)
    report = headroom.quantize(by_hand, to)
    fitted = given(model, batch, {"frozen": to})
    assert fitted.plan.peak_by_kind["parameters"] == report.after < report.before
    mine, theirs = model.state_dict(), by_hand.state_dict()
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[key], theirs[key]) for key in mine)
    config = getattr(model, "config", None)
    if config is not None:
        assert config.quantization_config == by_hand.config.quantization_config
    names = {name: level for name, level in zip(fitted.blocks, fitted.choice.levels)}
    set_levels(by_hand, names)
    optimizer = headroom.optim.AdamW([p for p in by_hand.parameters() if p.requires_grad])
    for _ in range(2):
        output = by_hand(**batch).loss if isinstance(batch, dict) else by_hand(batch[0])
        loss = output if output.dim() == 0 else nn.functional.mse_loss(output, batch[1])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert torch.equal(fitted.step(batch), loss.detach())


@pytest.mark.slow
@pytest.mark.parametrize("make", [llama, with_our_adapters])
def test_weights_are_quantized_only_where_nothing_fits_otherwise(make):
    model, batch = make()
    params = [p for p in model.parameters() if p.requires_grad]
    options = dict(optimizer=torch.optim.AdamW(params), allow=("nf4", "int8"))
    ladder = headroom.ladder(model, batch, **options)
    found = {}
    for to in ("given", "int8", "nf4"):
        leanest = ladder._search.leanest(to)[1].total_bytes
        budget = int(1.01 * leanest) + (32 << 10)  # which plans do not see
        found[to] = fit(model, batch, budget, ladder=ladder, dry_run=True, **options)
    # Of those that fit, that which changes the weights the least, however slow it is.
    assert [fitted.choice.frozen for fitted in found.values()] == [*found]
    four = found["nf4"]
    assert found["given"].choice.micro_batches > 1 and "frozen in nf4" in str(four.choice)
    layer = model.model.layers[0].mlp.up_proj
    assert type(getattr(layer, "base_layer", layer)) is nn.Linear
    rows = {change.technique: change for change in four.changes}
    assert rows["frozen weights"].after == "nf4" and rows["frozen weights"].bytes < 0
    assert sum(c.bytes for c in four.changes) == four.predicted_peak - four.before_peak
    assert any(p.choice.frozen != "given" for p in ladder.points)
    with pytest.raises(ValueError, match="ladder was made with another allow"):
        fit(model, batch, "1 GiB", ladder=ladder, optimizer=options["optimizer"])


def test_a_fit_that_must_quantize():
    """``only`` wants it, however much memory there is, and its blocks alone are measured."""
    model, batch = stack()
    fitted = fit(model, batch, allow="nf4", only={"frozen": ("nf4",)}, dry_run=True)
    assert fitted.choice.frozen == "nf4" and {p.choice.frozen for p in fitted.frontier} == {"nf4"}
    assert fitted.changes[0].technique == "frozen weights"
    assert sum(c.bytes for c in fitted.changes) == fitted.predicted_peak - fitted.before_peak
    assert "frozen weights" in str(fitted) and type(model.blocks[0].up) is nn.Linear
    with pytest.raises(ValueError, match='"nf4" is not in allow'):
        fit(model, batch, only={"frozen": ("nf4",)})


def test_nothing_is_quantized_for_a_plan(monkeypatch):
    model, batch = stack()
    before = {name: x.clone() for name, x in model.state_dict().items()}

    def refuse(*args, **options):
        raise AssertionError("a weight was quantized")

    for name in ("quantize_matrix", "quantized_weight"):
        monkeypatch.setattr(frozen, name, refuse)
    fitted = given(model, batch, NF4, dry_run=True)
    assert fitted.plan.peak_by_kind["parameters"] < 0.5 * sum(p.nbytes for p in model.parameters())
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    assert fitted.plan.advice() is not None  # plans of the same copy


def test_a_measurement_holds_the_codes_of_one_layer_of_each_shape():
    model, _ = stack()
    names, _ = frozen.frozen_layers(model, torch.optim.AdamW(model.head.parameters()))
    copied = copy.deepcopy(model)
    frozen.quantize_alike(copied, names, "nf4")
    codes = {copied.get_submodule(name).weight.untyped_storage()._cdata for name in names}
    assert len(names) == 6 and len(codes) == 2
    frozen.quantize_shapes(model, names, "int8")
    assert all(model.get_submodule(name).weight.is_meta for name in names)


# ---- the way back --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_was_quantized_comes_back_with_the_numbers_of_its_codes(dtype):
    model, batch = stack(dtype)
    layer = model.blocks[0].up
    weight, was = layer.weight, layer.weight.clone()
    model.blocks[0].norm.bias.requires_grad_(False)
    fitted = given(model, batch, NF4)
    assert type(layer) is headroom.nn.Linear4bit and layer.weight is not weight
    assert weight.numel() == 0  # whoever holds it
    fitted.step(batch)
    bias = layer.bias.clone()
    fitted.undo()
    assert type(layer) is nn.Linear and layer.weight is weight and not weight.requires_grad
    assert weight.dtype == dtype and torch.equal(weight, dequantize_matrix(quantize_matrix(was)))
    assert not torch.equal(weight, was) and torch.equal(layer.bias, bias)
    assert not any("scales" in name for name in model.state_dict())
    fitted.undo()
    assert torch.equal(weight, dequantize_matrix(quantize_matrix(was)))
    assert given(model, batch, NF4).step(batch).isfinite()  # and again


def test_layers_of_transformers_come_back_transposed():
    pytest.importorskip("transformers")
    from helpers.hf_models import inputs_of, model_of

    model = freeze(model_of("GPT2"))
    shapes = {name: x.shape for name, x in model.state_dict().items()}
    layer = model.transformer.h[0].mlp.c_fc
    was, kind = layer.weight.clone(), type(layer)
    fitted = given(model, inputs_of(), NF4)
    assert isinstance(layer, headroom.nn.Linear4bit) and model.config.quantization_config
    fitted.undo()
    assert type(layer) is kind and not hasattr(model.config, "quantization_config")
    assert {name: x.shape for name, x in model.state_dict().items()} == shapes
    codes = quantize_matrix(was.t().contiguous())
    assert torch.equal(layer.weight, dequantize_matrix(codes).t())
    assert model(**inputs_of()).loss.isfinite()


def test_the_memory_of_the_weights_is_given_back():
    model, batch = stack()
    weight = model.blocks[1].down.weight
    gone = []
    weakref.finalize(weight.untyped_storage(), gone.append, True)
    options = dict(allow="nf4", only={"frozen": ("nf4",)})
    ladder = headroom.ladder(model, batch, loss=nn.functional.mse_loss, allow="nf4")
    gc.collect()
    assert not gone
    fitted = fit(model, batch, **options)
    gc.collect()
    assert fitted.choice.frozen == "nf4" and weight.numel() == 0
    assert gone and ladder.points  # whose plans had the Parameter
    assert fitted.reduce_memory() and fitted.step(batch).isfinite()


def test_a_failure_gives_the_layers_back(monkeypatch):
    model, _ = stack()
    optimizer = headroom.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    names, _ = frozen.frozen_layers(model, optimizer)
    own, calls = frozen.quantized_weight, []

    def fails(*args, **options):
        calls.append(args)
        if len(calls) == 3:
            raise MemoryError("no memory")
        return own(*args, **options)

    monkeypatch.setattr(frozen, "quantized_weight", fails)
    was = {name: x.clone() for name, x in model.state_dict().items()}
    with pytest.raises(MemoryError):
        Applied(model, [], optimizer, Choice(frozen="nf4"), names)
    kinds = {type(model.get_submodule(name)) for name in names}
    assert kinds == {nn.Linear}
    changed = [name for name, x in model.state_dict().items() if not torch.equal(x, was[name])]
    assert changed == [f"{name}.weight" for name in names[:2]]


def test_a_patched_forward_of_a_layer_does_not_read_codes(monkeypatch):
    """Of a processor without fast products in 16 bits."""
    monkeypatch.setattr(generic, "SLOW_ON_CPU", {torch.bfloat16})
    model, batch = stack(torch.bfloat16)
    headroom.patch(model)
    layer = model.blocks[0].up
    assert "forward" in vars(layer)
    fitted = given(model, batch, NF4)
    assert "forward" not in vars(layer) and fitted.step(batch).isfinite()
    fitted.undo()
    assert vars(layer)["forward"].args == (layer,) and model(batch[0]).isfinite().all()


# ---- what cannot be ------------------------------------------------------------------------------


def trained(model):
    model.requires_grad_(True)


def few_bits(model):
    headroom.quantize(model, "int8")


def held(model):
    return torch.optim.AdamW(model.parameters())


def held_in_part(model):
    params = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW([*params, model.blocks[0].up.weight])


def in_one_storage(model):
    both = torch.randn(2, 216, 72)
    model.blocks[0].up.weight.data, model.blocks[1].up.weight.data = both


REASONS = {
    "no weight of a linear layer is frozen, and packed ones cannot train: 6 train, such as "
    "'blocks.0.up.weight'; call requires_grad_(False) of those that need not": trained,
    "no layer is left: 6, such as 'blocks.0.up', are quantized already": few_bits,
    "the optimizer has 6 frozen weights, such as 'blocks.0.up.weight', which are left: make it of "
    "parameters that require gradients": held,
    "'blocks.0.up.weight' and 'blocks.1.up.weight' lie in one storage": in_one_storage,
}


@pytest.mark.parametrize("reason", REASONS)
def test_why_no_weight_can_be_quantized(reason):
    model, batch = stack()
    optimizer = REASONS[reason](model)
    fitted = fit(model, batch, optimizer=optimizer, allow=("int8", "nf4"), dry_run=True)
    assert fitted.choice.frozen == "given"
    assert [note for note in fitted.notes if note.startswith(f"int8, nf4: {reason}")]
    with pytest.raises(ValueError, match=r"choice has frozen='nf4', wanted one of given; nf4: "):
        given(model, batch, NF4 | {"optimizer": "given"}, optimizer=optimizer)


def test_weights_that_the_optimizer_has_are_left():
    model, batch = stack()
    fitted = given(model, batch, NF4, optimizer=held_in_part(model))
    assert type(model.blocks[0].up) is nn.Linear
    assert type(model.blocks[0].down) is headroom.nn.Linear4bit
    assert any("has 1 frozen weights" in note for note in fitted.notes)
    assert fitted.step(batch).isfinite()


def test_a_weight_that_is_not_finite():
    model, batch = stack()
    model.blocks[2].down.weight.data[3, 5] = torch.inf
    before = {name: x.clone() for name, x in model.state_dict().items()}
    with pytest.raises(ValueError, match=r"'blocks.2.down.weight' has an element that is not fin"):
        given(model, batch, NF4)
    assert {type(m) for m in model.modules()} == {
        Stack,
        Block,
        nn.ModuleList,
        nn.LayerNorm,
        nn.Linear,
    }
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())


def test_what_to_allow_is_said():
    model, batch = stack(torch.bfloat16)
    need = given(model, batch, NF4 | {"micro_batches": 12}, dry_run=True).predicted_peak
    budget = need + (48 << 10)  # which plans do not see
    with pytest.raises(DoesNotFit, match=r'allow=\("(int8|nf4)",\)'):
        fit(model, batch, budget)
    model.requires_grad_(True)
    with pytest.raises(DoesNotFit) as refused:
        fit(model, batch, budget)
    assert "int8" not in str(refused.value) and "nf4" not in str(refused.value)


@pytest.mark.slow
@pytest.mark.release
def test_adapters_in_place_of_all_weights_are_named():
    model, batch = llama()
    model.requires_grad_(True)
    few_bits, dense = r"headroom\.quantize\(model\), then headroom\.lora", r"headroom\.lora\(model"
    found = {}
    for name in (dense, few_bits):
        adapted, _ = llama()
        if name is few_bits:
            headroom.quantize(adapted)
        headroom.lora(adapted, 16)
        plan = given(adapted, batch, {"levels": ["L4", "L4"], "release": True}, dry_run=True)
        budget = plan.predicted_peak + (64 << 10)  # which plans do not see
        with pytest.raises(
            DoesNotFit, match=rf"or {name}.*, which trains adapters alone"
        ) as refused:
            fit(model, batch, budget)
        found[name] = str(refused.value)
    assert all(p.requires_grad for p in model.parameters())
    with pytest.raises(DoesNotFit) as refused:
        fit(model, batch, "1 MiB")
    assert "lora" not in str(refused.value)
