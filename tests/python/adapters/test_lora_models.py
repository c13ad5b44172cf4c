"""Models whose linear layers are given adapters, in place: targets, names, levels and refusals."""

import copy
import pickle

import headroom
import pytest
import torch
import torch.nn.functional as F
from headroom.adapters import adapters_disabled, delete_adapter, use_adapters
from headroom.nn import LEVELS, LoRAEmbedding, LoRALinear, Transformer, TransformerConfig
from torch import nn
from torch.nn.utils import prune

from helpers.bits import assert_same_bits
from helpers.few_bits import error, gradients
from helpers.hf_models import inputs_of, model_of

transformers = pytest.importorskip("transformers")


@pytest.fixture(autouse=True)
def _quiet():
    transformers.utils.logging.set_verbosity_error()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(20, 32)
        self.up = nn.Linear(32, 72)
        self.down = headroom.nn.Linear(72, 32, bias=False)
        self.norm = nn.LayerNorm(32)
        self.head = nn.Linear(32, 20)

    def forward(self, ids):
        x = self.embedding(ids)
        return self.head(self.norm(x + self.down(self.up(x).relu())))


def names(report):
    return [one.name for one in report.adapted]


def shake(model):
    """Gives every B other values than zero, and returns the model."""
    torch.manual_seed(4)
    for name, p in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(p, std=0.05)
    return model


def layers_of(model):
    return {name: m for name, m in model.named_modules() if isinstance(m, LoRALinear)}


def test_layers_are_wrapped_and_all_else_is_frozen():
    model, before = Model(), None
    before = model(torch.arange(5))
    up = model.up
    report = headroom.lora(model, 4, alpha=8)
    assert names(report) == ["up", "down"] and [*layers_of(model)] == names(report)
    assert model.up.base_layer is up and model.up.adapters["default"].scale == 2
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert {*trained} == {f"{n}.lora_{k}.default.weight" for n in names(report) for k in "AB"}
    assert report.trained == sum(p.numel() for p in trained.values()) == 2 * 4 * (32 + 72)
    assert report.trained_bytes == 4 * report.trained
    whole = sum(p.nbytes for p in model.parameters())
    assert report.trained_bytes + report.frozen_bytes == whole
    assert_same_bits(model(torch.arange(5)), before)
    shake(model)(torch.arange(5)).sum().backward()
    assert all(p.grad is not None for p in trained.values())
    assert headroom.lora(Model()).adapted[0].rank == 16


def test_the_report_can_be_read():
    report = headroom.lora(Model(), 4)
    assert str(report).splitlines() == [
        "headroom.lora: Model, 832 parameters train: 3.25 KiB, beside 23.6 KiB that are frozen",
        "  2 Linear have an adapter of rank 4: 832",
        "  left: 1 Linear (head): an output head",
    ]
    assert repr(report) == "LoRAReport(Model: 2 adapted, 1 left, 832 parameters train)"


@pytest.mark.parametrize(
    ("targets", "wanted"),
    [
        (["up"], ["0.up", "1.up"]),
        (["0.up", "down"], ["0.up", "0.down", "1.down"]),
        (("head",), ["0.head", "1.head"]),
        (r"1\.(up|down|head)", ["1.up", "1.down", "1.head"]),
        (r".*\.(up|head)", ["0.up", "0.head", "1.up", "1.head"]),
        ("all-linear", ["0.up", "0.down", "0.head", "1.up", "1.down"]),
    ],
)
def test_targets_are_matched_as_peft_matches_them(targets, wanted):
    peft = pytest.importorskip("peft")
    model = nn.Sequential(Model(), Model())
    report = headroom.lora(copy.deepcopy(model), targets=targets)
    assert names(report) == wanted
    assert len(report.left) == 6 - len(wanted)
    if targets != "all-linear":
        targets = targets if isinstance(targets, str) else [*targets]
        theirs = peft.get_peft_model(model, peft.LoraConfig(target_modules=targets))
        assert sorted(theirs.base_model.targeted_module_names) == sorted(wanted)


@pytest.mark.parametrize("name", ["Llama", "GPT2", "Bert", "Phi3"])
def test_all_linear_is_what_peft_takes_it_for(name):
    peft = pytest.importorskip("peft")
    model = model_of(name)
    report = headroom.lora(copy.deepcopy(model))
    theirs = peft.get_peft_model(model, peft.LoraConfig(target_modules="all-linear"))
    mine = set(names(report))
    others = set(theirs.base_model.targeted_module_names) - mine
    assert mine <= set(theirs.base_model.targeted_module_names)
    assert all(name.startswith("cls.") for name in others)  # outside of the base model of Bert


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("to", [None, "nf4", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["Llama", "Gemma2", "Phi3", "GPT2", "Bert"])
def test_levels_of_patched_models_give_equal_gradients(name, dtype, to, dora):
    model, inputs = model_of(name).to(dtype), inputs_of(padded=True, tokens=16)
    if to is not None:
        headroom.quantize(model, to)
    headroom.lora(model, 3, alpha=5, dora=dora)
    shake(model)
    theirs = gradients(copy.deepcopy(model), **inputs)
    exact = headroom.dequantize(copy.deepcopy(model)).double()
    for key, p in exact.named_parameters():
        p.requires_grad_("lora_" in key)
    exact, wanted = gradients(exact, **inputs), None
    for level in (*LEVELS, "L1@host"):
        headroom.patch(model, level)
        got = gradients(model, **inputs)
        wanted = wanted or got
        assert_same_bits(got.values(), wanted.values())
    for found in (wanted, theirs, exact):
        del found["loss"]  # whose last bit would outweigh the gradients
    assert error(wanted, exact) <= 2 * error(theirs, exact)


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("to", [None, "nf4"])
def test_levels_of_our_blocks_and_checkpoints(to, dropout, dora):
    sizes = dict(vocab_size=40, hidden_size=32, features=48, layers=2, heads=4)
    torch.manual_seed(3)
    model = Transformer(TransformerConfig(**sizes))
    if to is not None:
        headroom.quantize(model, to)
    assert len(headroom.lora(model, 3, dropout=dropout, dora=dora).adapted) == 8
    shake(model)
    ids = torch.randint(40, (2, 8))

    def step(model):
        torch.manual_seed(9)
        F.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()
        found = [p.grad for p in model.parameters() if p.grad is not None]
        model.zero_grad()
        return found

    wanted = step(model)
    assert len(wanted) == 16 + 8 * dora
    for level in (*LEVELS, "L2@host"):
        headroom.patch(model, level)
        assert_same_bits(step(model), wanted)
    headroom.unpatch(model)
    headroom.checkpoint_every(model, 1)
    assert_same_bits(step(model), wanted)


def test_adapters_after_a_patch_and_quantizing_after_adapters():
    model, inputs = model_of("Llama"), inputs_of()
    headroom.patch(model, "L1")
    headroom.lora(model, 3)
    wanted = gradients(shake(model), **inputs)
    assert len(wanted) == 1 + 2 * 14
    headroom.unpatch(model)
    got = gradients(model, **inputs)
    assert got.keys() == wanted.keys() and error(got, wanted) < 1e-5
    report = headroom.quantize(model, "int8")
    assert [one.name for one in report.quantized] == [f"{n}.base_layer" for n in layers_of(model)]
    low = gradients(model, **inputs)
    assert 0 < error(low, wanted) < 0.1


def test_copies_that_train_and_what_they_are_made_of_are_not_quantized():
    model, inputs = model_of("Llama"), inputs_of()
    headroom.lora(model, 2, modules_to_save=["lm_head"])
    headroom.lora(model, 2, modules_to_save=["lm_head"], name="second")
    report = headroom.quantize(shake(model))
    assert len(report.quantized) == 14
    assert {one.name for one in report.left if "lm_head" in one.name} == {
        "lm_head.original_module.weight",
        "lm_head.modules_to_save.default.weight",
        "lm_head.modules_to_save.second.weight",
    }
    use_adapters(model, "default")
    assert "lm_head.modules_to_save.default.weight" in gradients(model, **inputs)


def test_several_adapters_are_switched_summed_and_disabled():
    model, ids = Model().eval(), torch.arange(5)
    plain = model(ids)
    headroom.lora(model, 2)
    first = shake(model)(ids)
    report = headroom.lora(model, 3, targets=["up"], name="second")
    assert [(one.name, one.was) for one in report.adapted] == [("up", "Linear")]
    assert [(one.name, one.reason) for one in report.left] == [
        ("down", "it is no target"),
        ("head", "it is no target"),
    ]
    assert_same_bits(model(ids), plain)  # the new one alone is active, and is zero
    nn.init.normal_(model.up.lora_B["second"].weight)
    assert not model.down.active and not model.up.lora_A["default"].weight.requires_grad
    second = model(ids)
    use_adapters(model, "default")
    assert_same_bits(model(ids), first)
    assert model.down.lora_B["default"].weight.requires_grad
    assert not model.up.lora_B["second"].weight.requires_grad
    use_adapters(model, "default", "second")
    both = model(ids)
    assert not any(torch.equal(both, one) for one in (plain, first, second))
    with adapters_disabled(model):
        assert_same_bits(model(ids), plain)
        with adapters_disabled(model):
            pass
        assert_same_bits(model(ids), plain)
    assert_same_bits(model(ids), both)
    use_adapters(model, "default", "default", "second", "default")  # each once
    assert_same_bits(model(ids), both)
    use_adapters(model)
    assert_same_bits(model(ids), plain)
    use_adapters(model, "default", "second")
    delete_adapter(model, "second")
    assert_same_bits(model(ids), first)
    for call in (use_adapters, delete_adapter):
        with pytest.raises(ValueError, match=r"no adapter 'second'; it has \['default'\]"):
            call(model, "second")


def test_embeddings_that_are_named_have_adapters():
    model, ids = Model(), torch.tensor([[1, 4, 4], [0, 19, 1]])
    assert "embedding" not in names(headroom.lora(copy.deepcopy(model)))
    plain = model(ids)
    report = headroom.lora(model, 3, targets=["embedding", "up"])
    assert [(one.name, one.was, one.numel) for one in report.adapted] == [
        ("embedding", "Embedding", 3 * (20 + 32)),
        ("up", "Linear", 3 * (32 + 72)),
    ]
    assert isinstance(model.embedding, LoRAEmbedding)
    assert_same_bits(model(ids), plain)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert {"embedding.lora_embedding_A.default", "embedding.lora_embedding_B.default"} < trained
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)
    for _ in range(2):  # of which the first moves the one of two factors that is zero
        model(ids).square().sum().backward()
        optimizer.step()
    changed = model(ids)
    assert not torch.allclose(changed, plain)
    with adapters_disabled(model):
        assert_same_bits(model(ids), plain)
    headroom.lora(model, 2, targets="embedding", name="second")
    assert model.embedding.active == ("second",) and not model.up.active
    use_adapters(model, "default", "second")
    torch.testing.assert_close(model(ids), changed)
    scaled = model_of("Llama")  # as in Gemma 3
    scaled.model.embed_tokens.max_norm = 1.0
    with pytest.raises(ValueError, match="no linear layer or embedding with the name 'embed_tok"):
        headroom.lora(scaled, targets=["embed_tokens"])


def test_an_embedding_that_scales_scales_its_adapters():
    kind = transformers.models.gemma3.modeling_gemma3.Gemma3TextScaledWordEmbedding
    torch.manual_seed(0)
    model = nn.Sequential(kind(10, 6, padding_idx=0, embed_scale=3.0))
    headroom.lora(model, 2, targets=["0"])
    layer, ids = model[0], torch.tensor([2, 5])
    nn.init.normal_(layer.lora_embedding_A["default"])
    a, b = layer.matrices("default")
    weight = layer.weight + (b @ a).T
    torch.testing.assert_close(layer(ids), 3 * F.embedding(ids, weight))
    wanted = layer(ids)
    headroom.merge(model)
    assert type(model[0]) is kind
    torch.testing.assert_close(model(ids), wanted)


def test_copies_of_modules_are_switched_with_their_adapters():
    model, ids = Model(), torch.arange(5)
    plain = model(ids)
    report = headroom.lora(model, 2, modules_to_save=["head", "norm"])
    assert names(report) == ["up", "down"] and not report.left
    assert [(one.name, one.was, one.numel) for one in report.copied] == [
        ("norm", "LayerNorm", 64),
        ("head", "Linear", 33 * 20),
    ]
    assert "  a copy of head (Linear): 660" in str(report)
    assert_same_bits(model(ids), plain)
    assert model.head.out_features == 20 and model.head.weight.requires_grad
    state = set(model.state_dict())
    assert {"head.original_module.weight", "head.modules_to_save.default.weight"} < state
    nn.init.normal_(model.head.modules_to_save["default"].weight)
    first = model(ids)
    assert not torch.allclose(first, plain)
    headroom.lora(model, 2, name="second", targets=["up"])
    assert_same_bits(model(ids), plain)
    assert not model.head.modules_to_save["default"].weight.requires_grad
    headroom.lora(model, 2, name="third", targets=["up"], modules_to_save=["head"])
    nn.init.zeros_(model.head.modules_to_save["third"].weight)
    third = model(ids)
    use_adapters(model, "default", "second")
    assert_same_bits(model(ids), first)
    with pytest.raises(ValueError, match=r"'head': \['default', 'third'\] have a copy of it each"):
        use_adapters(model, "default", "third")
    assert_same_bits(model(ids), first)
    with adapters_disabled(model):
        assert_same_bits(model(ids), plain)
    use_adapters(model, "third")
    assert_same_bits(model(ids), third)
    for one in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert_same_bits(one(ids), third)
    delete_adapter(model, "third")
    assert_same_bits(model(ids), plain)
    assert model.head.names == ["default"]


def test_the_loss_reads_the_copy_of_a_head():
    """Without logits, as of a head that has no copy."""
    model, inputs = model_of("Llama"), inputs_of()
    headroom.lora(model, 2, modules_to_save=["lm_head"])
    shake(model).lm_head.weight.data += 0.1
    wanted = gradients(model, **inputs)
    headroom.patch(model, loss=True)
    assert model(**inputs).logits is None
    assert error(gradients(model, **inputs), wanted) < 1e-5
    model.lm_head.register_forward_hook(lambda *_: None)
    assert model(**inputs).logits is not None


def test_what_cannot_be_trained_by_a_copy():
    model = model_of("Llama")
    with pytest.raises(ValueError, match="is a ModuleList, which is never called"):
        headroom.lora(model, targets=["lm_head"], modules_to_save=["layers"])
    with pytest.raises(
        ValueError, match="mlp' is to train as a whole, and .*_proj' has an adapter"
    ):
        headroom.lora(model, targets=["up_proj"], modules_to_save=["mlp"])
    with pytest.raises(TypeError, match="modules_to_save is 'mlp', wanted a list of names"):
        headroom.lora(model, modules_to_save="mlp")
    headroom.quantize(model, skip=[])
    with pytest.raises(ValueError, match="'lm_head' has a weight in few bits"):
        headroom.lora(model, targets=["q_proj"], modules_to_save=["lm_head"])
    assert not layers_of(model)


def test_dora_measures_rows_that_it_can_read():
    bitsandbytes = pytest.importorskip("bitsandbytes")
    model = nn.Sequential(bitsandbytes.nn.Linear4bit(64, 8, quant_type="nf4"), nn.Linear(8, 2))
    model.to("cpu")
    with pytest.raises(ValueError, match="'0': its weight is in bits of bitsandbytes"):
        headroom.lora(model, 2, dora=True, targets=["0"])
    assert not layers_of(model)
    model = Model()
    headroom.lora(model, 2, dora=True)
    headroom.lora(model, 2, name="second")
    with pytest.raises(ValueError, match="'up': .* cannot be added up, because one has DoRA"):
        use_adapters(model, "default", "second")
    assert model.up.active == ("second",) and model.down.active == ("second",)
    shapes = {name: p.shape for name, p in model.named_parameters() if "magnitude" in name}
    assert shapes == {
        "up.lora_magnitude_vector.default.weight": (72,),
        "down.lora_magnitude_vector.default.weight": (32,),
    }


def test_a_module_that_is_used_twice_has_one_adapter():
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 2))
    model[2] = model[0]
    assert names(headroom.lora(model, 2)) == ["0"]
    assert model[2] is model[0] and isinstance(model[0], LoRALinear)


def test_a_weight_of_two_modules_is_refused():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 2))
    model[1].weight = model[0].weight
    with pytest.raises(ValueError, match="'0' and '1' have the same weight"):
        headroom.lora(model)
    assert not layers_of(model) and all(p.requires_grad for p in model.parameters())
    tied = model_of("Llama", tie_word_embeddings=True)
    assert "lm_head" not in names(headroom.lora(tied))


def test_what_uses_its_weight_itself_is_left():
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    model = nn.Sequential(layer, nn.Linear(16, 4))
    report = headroom.lora(model, 2)
    assert names(report) == ["0.linear1", "0.linear2"]
    assert [one.name for one in report.left] == ["1", "0.self_attn.out_proj"]
    assert report.left[1].reason.startswith("a subclass of Linear")


@pytest.mark.parametrize("padded", [False, True])
def test_encoder_layers_of_torch_call_adapters_in_eval(padded):
    """Their fast path reads the weight of a layer past it, and takes nested tensors."""
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2)
    headroom.lora(model, 2)
    padding = torch.arange(5) > torch.tensor([[2], [4]]) if padded else None
    x = torch.randn(2, 5, 16)
    wanted = shake(model).train()(x, src_key_padding_mask=padding)
    with torch.no_grad():
        got = model.eval()(x, src_key_padding_mask=padding)
    there = slice(None) if padding is None else ~padding
    torch.testing.assert_close(got[there], wanted[there], rtol=1e-4, atol=1e-5)


def test_a_pruned_layer_is_called():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
    prune.l1_unstructured(model[0], "weight", 0.5)
    x = torch.randn(3, 8)
    wanted = model(x)
    assert names(headroom.lora(model, 2)) == ["0"]
    assert_same_bits(model(x), wanted)
    headroom.merge(shake(model))
    merged = model(x)
    torch.testing.assert_close(merged, headroom.unmerge(model)(x))


def test_bad_arguments_change_nothing():
    model = Model()
    state = {name: p.requires_grad for name, p in model.named_parameters()}
    bad = [
        (dict(rank=0), "rank is 0"),
        (dict(dropout=1), "dropout is 1"),
        (
            dict(targets=["up", "left"]),
            "targets: the model has no linear layer or embedding with the name 'left'",
        ),
        (dict(targets=r"0\.up"), "Model has no such linear layer"),
        (dict(targets=[]), "Model has no such linear layer"),
        (dict(dtype=torch.float64), "dtype is torch.float64"),
        (dict(name="a.b"), "name is 'a.b'"),
        (dict(name=""), "name is ''"),
        (dict(name="keys"), "name is 'keys'"),
        (dict(name="copy"), "name is 'copy'"),  # of an embedding
        (dict(modules_to_save=["left"]), "modules_to_save: the model has no module with the name"),
        (dict(modules_to_save=["up"], targets=["up"]), "'up' is to train as a whole, and 'up' has"),
    ]
    for given, message in bad:
        with pytest.raises(ValueError, match=message.replace("(", r"\(")):
            headroom.lora(model, **given)
        assert {name: p.requires_grad for name, p in model.named_parameters()} == state
    for given, message in (
        (dict(targets="("), r"targets is '\(', wanted a regular expression"),
        (dict(targets=r"(?P<a>x)(?P<a>y)"), "wanted a regular expression"),
        (dict(alpha=10**400), "alpha is 1000.*, wanted a finite number"),
        (dict(alpha=-(10**400)), "alpha is -1000.*, wanted a finite number"),
        (dict(rank=1 << 70), "rank is 1180591620717411303424, wanted less"),
    ):
        with pytest.raises(ValueError, match=message):
            headroom.lora(model, **given)
    for key in ("targets", "modules_to_save"):
        with pytest.raises(TypeError, match=f"{key} is None, wanted a list of names"):
            headroom.lora(model, **{key: None})
    adapters = headroom.adapters
    for call in (headroom.lora, headroom.merge, headroom.unmerge, use_adapters, delete_adapter):
        with pytest.raises(TypeError, match="model is 'model', wanted an instance of nn.Module"):
            call("model")
    with pytest.raises(TypeError, match="wanted an instance of nn.Module"):
        adapters.save_adapter("model", "folder")
    with pytest.raises(TypeError, match="wanted an instance of nn.Module"):
        adapters.load_adapter("model", "folder")
    with pytest.raises(ValueError, match="the model is itself the layer"):
        headroom.lora(nn.Linear(3, 3), targets=".*")
    headroom.lora(model)
    with pytest.raises(ValueError, match="'up' has an adapter 'default' already"):
        headroom.lora(model)


def test_meta_copies_and_pickles():
    with torch.device("meta"):
        empty = Model()
    report = headroom.lora(empty, 4)
    assert report.trained == headroom.lora(model := Model(), 4).trained
    assert empty.up.lora_A["default"].weight.is_meta
    wanted = shake(model)(torch.arange(4))
    for one in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert_same_bits(one(torch.arange(4)), wanted)
    with torch.device("meta"):
        empty = Model()
    targets = ["embedding", "up", "down"]
    options = dict(targets=targets, dora=True, modules_to_save=["head"])
    assert (
        headroom.lora(empty, 4, **options).trained == headroom.lora(Model(), 4, **options).trained
    )


@pytest.mark.slow
@pytest.mark.parametrize("dora", [False, True])
def test_autocast_compilation_and_casts(dora):
    model, inputs = model_of("Llama"), inputs_of()
    headroom.quantize(model)
    targets = ["embed_tokens", "q_proj", "up_proj", "down_proj"] if dora else "all-linear"
    headroom.lora(model, 3, dora=dora, targets=targets, modules_to_save=["lm_head"] * dora)
    headroom.patch(model, "L2")
    wanted = gradients(shake(model), **inputs)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    got = gradients(compiled, **inputs)
    assert error({k.removeprefix("_orig_mod."): x for k, x in got.items()}, wanted) < 1e-6
    with torch.autocast("cpu", torch.bfloat16):
        low = gradients(model, **inputs)
        headroom.patch(model, "L5")
        assert_same_bits(gradients(model, **inputs).values(), low.values())
    assert 1e-4 < error(low, wanted) < 5e-2


def test_steps_with_optimizers_and_accumulation():
    """Only adapters move, with the optimizers and the accumulator of Headroom."""
    model, inputs = model_of("Llama"), inputs_of()
    headroom.quantize(model)
    headroom.lora(model, 3)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = headroom.optim.AdamW8bit(trained, lr=2e-2)
    accumulator = headroom.GradAccumulator(model)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    losses = []
    for _ in range(8):
        for _ in range(2):
            with accumulator.micro_batch(weight=1):
                loss = model(**inputs).loss
                loss.backward()
        accumulator.finish()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.1
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert moved == {name for name in before if "lora_" in name}
