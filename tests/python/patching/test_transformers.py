"""Models of transformers with the dial: the same results in fewer bytes, and everything that is
usually done to such models works."""

from __future__ import annotations

import copy
import functools
import pickle
import sys

import headroom
import pytest
import torch
from headroom.nn import LEVELS
from torch.utils.flop_counter import FlopCounterMode

from helpers.bits import assert_same_bits
from helpers.hf_models import MODELS, TOKENS, config_of, inputs_of, model_of
from helpers.kept import kept_bytes

transformers = pytest.importorskip("transformers")

DROPS = [level for level in LEVELS if level != "L0"]


@pytest.fixture(autouse=True)
def _quiet():
    transformers.utils.logging.set_verbosity_error()


def step(model, inputs, seed=7):
    """The loss, the logits and the gradients, by name."""
    torch.manual_seed(seed)
    out = model(**inputs)
    out.loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    mask = inputs.get("attention_mask")
    logits = out.logits.detach()
    logits = logits if mask is None else logits[mask.bool()]  # what padding sees is undefined
    return {"loss": out.loss.detach(), "logits": logits} | grads


def patched(model, save, **options):
    copied = copy.deepcopy(model)
    headroom.patch(copied, save, **options)
    return copied


def error(got, exact):
    return ((got.double() - exact).norm() / exact.norm().clamp_min(1e-12)).item()


def assert_same_step(got, want):
    """The bits of the loss and the logits. Those of gradients are the same too, but on some CPUs,
    such as AMD's Zen, whose products in float32 are rounded by the strides of a key."""
    assert_same_bits([got["loss"], got["logits"]], [want["loss"], want["logits"]])
    for key, x in want.items():
        if x.dtype == torch.float32:
            assert (got[key] - x).norm() <= 1e-6 * x.norm(), key
        else:
            assert_same_bits([got[key]], [x])


def kept_by(model, inputs):
    inputs = {name: x for name, x in inputs.items() if name != "labels"}
    return kept_bytes(lambda: model(**inputs).logits, list(model.parameters()))


def assert_close(got, want):
    assert got.keys() == want.keys()
    for key in want:
        torch.testing.assert_close(got[key], want[key])


def assert_tolerance_rule(got, theirs, exact):
    """The error against float64 is at most twice that of transformers' own arithmetic."""
    assert got.keys() == theirs.keys() == exact.keys()
    few = []  # of a few numbers, the error is chance
    for name in exact:
        assert got[name].dtype == theirs[name].dtype
        errors = error(got[name], exact[name]), error(theirs[name], exact[name])
        if exact[name].dim() < 2:
            few.append(torch.tensor(errors))
            continue
        assert errors[0] <= 2 * max(errors[1], torch.finfo(got[name].dtype).eps / 4), name
    ours, others = torch.stack(few).norm(dim=0)
    assert ours <= 2 * others


@pytest.mark.parametrize("name", MODELS)
def test_results_and_gradients_are_those_of_transformers(name):
    model = model_of(name)
    inputs = inputs_of(padded=name not in ("Llama", "GPT2"))
    exact = step(copy.deepcopy(model).double(), inputs)
    theirs = step(model, inputs)
    got = step(patched(model, "L1"), inputs)
    assert_tolerance_rule(got, theirs, exact)
    assert any(not torch.equal(got[key], theirs[key]) for key in got)  # it was patched


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MODELS)
def test_results_in_every_dtype_with_every_attention(name, dtype, padded, attention):
    if name == "Gemma2" and attention == "sdpa":
        pytest.skip("transformers refuses softcap with sdpa")
    model = model_of(name, attn_implementation=attention).to(dtype)
    inputs = inputs_of(padded)
    exact = step(copy.deepcopy(model).double(), inputs)
    theirs = step(model, inputs)
    levels = [step(patched(model, level), inputs) for level in LEVELS]
    assert_tolerance_rule(levels[0], theirs, exact)
    for other in levels[1:]:
        assert_same_step(other, levels[0])


@pytest.mark.parametrize("name", MODELS)
def test_levels_give_the_same_bits_in_fewer_bytes(name):
    model = model_of(name)
    inputs = inputs_of(padded=True, tokens=16)
    kept, want = [], None
    for level in LEVELS:
        one = patched(model, level)
        got = step(one, inputs)
        want = want or got
        assert got.keys() == want.keys()
        assert_same_bits(got.values(), want.values())
        kept.append(kept_by(one, inputs))
    eager = name == "Gemma2"  # which copies q, k and v, and keeps the copies
    assert sorted(kept, reverse=True) == kept
    assert len(set(kept)) == (5 if eager else 6), kept


@pytest.mark.parametrize("name", MODELS)
def test_with_the_arithmetic_of_transformers_bits_are_the_same(name):
    model = model_of(name)
    want = step(model, inputs_of(padded=True))
    for level in ("L0", "L3"):
        one = patched(model, level, norms=False, glu=False, rope=False)
        got = step(one, inputs_of(padded=True))
        assert_close(got, want)  # heads are in another order in memory, and so are sums over them
        names = [key for key in want if "q_norm" not in key and "k_norm" not in key]
        assert_same_bits([got[key] for key in names], [want[key] for key in names])


@pytest.mark.parametrize("level", DROPS)
def test_bytes_are_those_of_a_block(level):
    """Per token, what the table of docs/blocks.md says, also where tokens are padding."""
    h, a, k, f, heads = 32, 32, 16, 48, 4
    elements = {
        "L1": 2 * h + 2 * a + 2 * k + 2 * f,
        "L2": 2 * h + 2 * a + 2 * k,
        "L3": 2 * h + a,
        "L4": h + a,
        "L5": h,
    }[level]
    # Also 4 bytes per head of attention, and 4 of mlp_block for its norm.
    wanted = 4 * elements + 4 + (4 * heads if level != "L5" else 0)
    for padded in (False, True):
        kept = []
        for layers in (1, 3):
            model = patched(model_of("Llama", num_hidden_layers=layers), level)
            kept.append(kept_by(model, inputs_of(padded)))
        assert (kept[1] - kept[0]) / (2 * 2 * TOKENS) == wanted


def test_levels_by_list_and_by_number():
    model = model_of("Llama", num_hidden_layers=3)
    report = headroom.patch(model, ["L5", "L0", "L2"])
    assert report.levels == {
        "model.layers.0": "L5",
        "model.layers.1": "L0",
        "model.layers.2": "L2",
    }
    want = step(patched(model, "L1"), inputs_of())
    assert_same_bits(step(model, inputs_of()).values(), want.values())
    report = headroom.patch(model, {1: "L3", "model.layers.2": "L4"})
    assert list(report.levels.values()) == ["L1", "L3", "L4"]
    assert headroom.patch(model).levels == dict.fromkeys(report.levels, "L1")


@pytest.mark.parametrize("name", ["Llama", "GPT2", "Bert"])
def test_unpatch_to_the_bit(name):
    model = model_of(name)
    before = {path: dict(vars(m)) for path, m in model.named_modules()}
    keys = list(model.state_dict())
    want = step(model, inputs_of())
    headroom.patch(model, "L2")
    assert list(model.state_dict()) == keys
    step(model, inputs_of())
    headroom.unpatch(model)
    assert {path: vars(m).keys() for path, m in model.named_modules()} == {
        path: attributes.keys() for path, attributes in before.items()
    }
    assert_same_bits(step(model, inputs_of()).values(), want.values())


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_is_bound_to_itself(copied):
    model = model_of("Llama")
    headroom.patch(model, "L3")
    other = copied(model)
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(1.5)
    plain = copy.deepcopy(other)
    headroom.unpatch(plain)
    got, want = step(other, inputs_of()), step(plain, inputs_of())
    for key in want:
        torch.testing.assert_close(got[key], want[key])


@pytest.mark.parametrize("name", ["Llama", "Gemma3", "Phi3", "GPT2"])
def test_generation_with_a_cache(name):
    model = model_of(name).eval()
    ids = inputs_of(padded=True)
    prompt = dict(input_ids=ids["input_ids"], attention_mask=ids["attention_mask"].flip(1))
    generate = functools.partial(torch.no_grad()(type(model).generate), **prompt, do_sample=False)
    want = generate(model, max_new_tokens=4)
    other = patched(model, "L5")
    assert torch.equal(generate(other, max_new_tokens=4), want)
    # With and without a cache, the same numbers.
    with torch.no_grad():
        whole = other(ids["input_ids"]).logits
        first = other(ids["input_ids"][:, :7], use_cache=True)
        rest = other(ids["input_ids"][:, 7:], past_key_values=first.past_key_values)
    torch.testing.assert_close(rest.logits, whole[:, 7:])


def test_a_cache_while_training():
    """Transformers hands a cache to layers even in training: it is dropped if it is empty, as where
    it checkpoints, and used at L0 if it is not."""
    model = model_of("Llama")
    ids = inputs_of()["input_ids"]
    dropped = patched(model, "L1")(ids, use_cache=True)
    assert dropped.past_key_values.get_seq_length() == 0
    filled = patched(model, "L0")(ids, use_cache=True)
    assert filled.past_key_values.get_seq_length() == TOKENS
    with torch.no_grad():
        cache = model(ids[:, :5], use_cache=True).past_key_values
    want = model(ids[:, 5:], past_key_values=copy.deepcopy(cache)).logits
    other = patched(model, "L5")
    kept = [
        kept_by(one, {"input_ids": ids[:, 5:], "past_key_values": copy.deepcopy(cache)})
        for one in (other, patched(model, "L0"), patched(model, "L1"))
    ]
    assert kept[0] == kept[1] == kept[2]
    got = other(ids[:, 5:], past_key_values=cache).logits
    torch.testing.assert_close(got, want)
    evaluated = patched(model, "L3").eval()(ids, use_cache=True)
    assert evaluated.past_key_values.get_seq_length() == TOKENS


def test_attention_functions_of_ones_own_hear_of_no_cache_that_was_dropped(monkeypatch):
    heard = []

    def noted(*args, **kwargs):
        heard.append(kwargs["use_cache"])
        return transformers.integrations.sdpa_attention.sdpa_attention_forward(*args, **kwargs)

    functions = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS
    monkeypatch.setitem(functions._global_mapping, "noted", noted)
    model = patched(model_of("Llama"), "L1")
    model.config._attn_implementation = "noted"
    model(inputs_of()["input_ids"], use_cache=True)
    assert heard and not any(heard)


def products(run):
    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


@pytest.mark.parametrize(
    "name", ["Llama", *(pytest.param(name, marks=pytest.mark.slow) for name in ("GPT2", "Bert"))]
)
def test_within_checkpoints_nothing_is_computed_a_third_time(name):
    model = model_of(name, num_hidden_layers=3)
    want = step(patched(model, "L0"), inputs_of())
    once = products(lambda: step(patched(model, "L0"), inputs_of()))

    def checkpointed(one, n):
        one.activation_checkpointing_enable({"use_reentrant": False}, every_n_layers=n)
        return one

    theirs = products(lambda: step(checkpointed(copy.deepcopy(model), 1), inputs_of()))
    assert theirs > once
    for level in ("L1", "L3", "L5"):
        one = checkpointed(patched(model, level), 1)
        assert products(functools.partial(step, one, inputs_of())) == theirs
        assert_close(step(one, inputs_of()), want)
    # The layers that are not checkpointed have their level: layer 1 of three.
    one = checkpointed(patched(model, "L2"), 2)
    assert_close(step(one, inputs_of()), want)
    some = [layer.gradient_checkpointing for layer in headroom_layers(one)]
    assert some == [True, False, True]
    one.activation_checkpointing_disable()
    assert_same_bits(step(one, inputs_of()).values(), want.values())


def headroom_layers(model):
    return [m for m in model.modules() if hasattr(m, "_headroom_dial")]


def test_reentrant_checkpoints():
    model = model_of("Llama")
    want = step(patched(model, "L0"), inputs_of())
    one = patched(model, "L2")
    one.activation_checkpointing_enable({"use_reentrant": True})
    assert_close(step(one, inputs_of()), want)


def test_attentions_and_hidden_states_are_still_collected():
    model = model_of("Llama", attn_implementation="eager")
    ids = inputs_of()["input_ids"]
    want = model(ids, output_attentions=True, output_hidden_states=True)
    one = patched(model, "L2")
    got = one(ids, output_attentions=True, output_hidden_states=True)
    for mine, theirs in (
        (got.attentions, want.attentions),
        (got.hidden_states, want.hidden_states),
    ):
        assert len(mine) == len(theirs) > 1
        for a, b in zip(mine, theirs):
            torch.testing.assert_close(a, b)
    # The hooks that transformers installs for it stay, and do not turn the dial off.
    assert kept_by(one, inputs_of()) == kept_by(patched(model, "L2"), inputs_of())


def test_hooks_of_halves_run():
    model = patched(model_of("Llama"), "L2")
    seen = []
    model.model.layers[0].self_attn.register_forward_hook(lambda *_: seen.append("attention"))
    model.model.layers[1].mlp.register_forward_pre_hook(lambda *_: seen.append("mlp"))
    model.model.layers[1].mlp.up_proj.register_forward_hook(lambda *_: seen.append("up"))
    step(model, inputs_of())
    assert seen == ["attention", "mlp", "up"]


@pytest.mark.parametrize("name", ["Qwen3", "Bert"])
def test_autocast(name):
    model = model_of(name)

    def cast(model, inputs):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return step(model, inputs)

    inputs = inputs_of(padded=True)
    exact = step(copy.deepcopy(model).double(), inputs)
    theirs = cast(model, inputs)
    got = [cast(patched(model, level), inputs) for level in LEVELS]
    assert_tolerance_rule(got[0], theirs, exact)
    for other in got[1:]:
        assert_same_bits(other.values(), got[0].values())


@pytest.mark.parametrize("name", ["GPT2", "Phi3", "Bert"])
def test_dropout_is_the_same_at_every_level(name):
    drops = {
        "GPT2": dict(resid_pdrop=0.2, attn_pdrop=0.1, embd_pdrop=0.1),
        "Phi3": dict(resid_pdrop=0.2, attention_dropout=0.1),
        "Bert": dict(hidden_dropout_prob=0.2, attention_probs_dropout_prob=0.1),
    }
    model = model_of(name, **drops[name])
    want = step(patched(model, "L0"), inputs_of())
    for level in DROPS:
        assert_same_step(step(patched(model, level), inputs_of()), want)
    other = step(patched(model, "L0"), inputs_of(), seed=8)
    assert not torch.equal(other["logits"], want["logits"])
    evaluated, theirs = patched(model, "L5").eval(), model.eval()
    ids = inputs_of()["input_ids"]
    torch.testing.assert_close(evaluated(ids).logits, theirs(ids).logits)


@pytest.mark.parametrize("first", ["peft", "patch"])
@pytest.mark.parametrize("name", ["Llama", "GPT2"])
def test_lora(name, first):
    peft = pytest.importorskip("peft")
    targets = {"Llama": ["q_proj", "v_proj", "down_proj"], "GPT2": ["c_attn", "c_fc"]}[name]
    options = peft.LoraConfig(
        r=2, target_modules=targets, lora_dropout=0.2, init_lora_weights=False
    )

    def lora(level):
        model = model_of(name)
        torch.manual_seed(2)
        if first == "peft":
            model = peft.get_peft_model(model, options)
            headroom.patch(model, level)
        else:
            headroom.patch(model, level)
            model = peft.get_peft_model(model, options)
        return model.train()

    want = step(lora("L0"), inputs_of())
    assert all("lora" in key or key in ("loss", "logits") for key in want)
    for level in ("L1", "L3", "L5"):
        assert_same_bits(step(lora(level), inputs_of()).values(), want.values())
    model = lora("L2")
    merged = model.eval().merge_and_unload()
    headroom.unpatch(merged)
    torch.testing.assert_close(
        merged(inputs_of()["input_ids"]).logits, model(inputs_of()["input_ids"]).logits
    )


@pytest.mark.parametrize(
    "name",
    ["Llama", *(pytest.param(name, marks=pytest.mark.slow) for name in MODELS if name != "Llama")],
)
def test_compiled_layers(name, fresh_dynamo):
    model = model_of(name, num_hidden_layers=1)
    one = patched(model, "L1")
    for layer in headroom_layers(one):
        layer.compile(fullgraph=True, backend="aot_eager")
    exact = step(copy.deepcopy(model).double(), inputs_of())
    assert_tolerance_rule(step(one, inputs_of()), step(model, inputs_of()), exact)


@pytest.mark.slow
@pytest.mark.parametrize("level", ["L1", "L5"])
def test_compiled(level, fresh_dynamo):
    model = model_of("Llama", use_cache=False)
    want = step(patched(model, level), inputs_of())
    one = patched(model, level)
    compiled = torch.compile(one, fullgraph=True, backend="aot_eager")
    out = compiled(**inputs_of())
    out.loss.backward()
    got = {name: p.grad for name, p in one.named_parameters()}
    for key, grad in got.items():
        torch.testing.assert_close(grad, want[key])


def test_float64_is_left_to_transformers():
    model = model_of("Llama").double()
    want = step(model, inputs_of())
    got = step(patched(model, "L2"), inputs_of())
    assert_same_bits(got.values(), want.values())


@pytest.mark.parametrize(
    ("save", "message"),
    [
        ("L6", "save is 'L6' for model.layers.0, wanted one of L0, L1"),
        (["L1"], "save has 1 levels, wanted 2"),
        ({2: "L1"}, "save has 2, which is no block of LlamaForCausalLM"),
    ],
)
def test_bad_levels_change_nothing(save, message):
    model = model_of("Llama")
    before = {path: dict(vars(m)) for path, m in model.named_modules()}
    with pytest.raises(ValueError, match=message):
        headroom.patch(model, save)
    assert {path: dict(vars(m)) for path, m in model.named_modules()} == before


def test_other_forwards_are_left_alone():
    model = model_of("Llama")
    layer = model.model.layers[0]
    layer.forward = functools.partial(type(layer).forward, layer)
    report = headroom.patch(model, "L2")
    assert list(report.levels) == ["model.layers.1"]
    assert any(left.name == "model.layers.0" for left in report.left)


@pytest.mark.parametrize("name", ["LlamaMLP", "LlamaAttention", "LlamaDecoderLayer"])
def test_a_forward_that_was_set_on_a_class_is_run(name, monkeypatch):
    model, other = model_of("Llama"), model_of("Llama")
    kind = getattr(sys.modules[type(model).__module__], name)
    own = kind.forward

    def doubled(self, *args, **kwargs):
        out = own(self, *args, **kwargs)
        return (2 * out[0], *out[1:]) if isinstance(out, tuple) else 2 * out

    monkeypatch.setattr(kind, "forward", doubled)
    headroom.patch(other, None if name == "LlamaDecoderLayer" else "L2")
    torch.testing.assert_close(other(**inputs_of()).loss, model(**inputs_of()).loss)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_trainer(tmp_path):
    pytest.importorskip("accelerate")
    data = [{"input_ids": row, "labels": row} for row in inputs_of()["input_ids"]] * 4

    def train(level, **options):
        model = model_of("Llama")
        if level is not None:
            headroom.patch(model, level)
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path / f"{level}"),
            max_steps=2,
            per_device_train_batch_size=2,
            report_to=[],
            use_cpu=True,
            save_strategy="no",
            disable_tqdm=True,
            learning_rate=1e-3,
            **options,
        )
        transformers.Trainer(model, arguments, train_dataset=data).train()
        return [p.detach() for p in model.parameters()]

    want = train(None)
    for level, options in {"L1": {}, "L5": {}, "L2": {"gradient_checkpointing": True}}.items():
        for a, b in zip(train(level, **options), want):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


class TestVisionTowers:
    """Blocks of a class that is not known, beside those of a language model that is."""

    @staticmethod
    def made():
        sizes = dict(hidden_size=32, intermediate_size=48, num_attention_heads=4)
        vision = transformers.CLIPVisionConfig(
            **sizes, num_hidden_layers=3, image_size=8, patch_size=4, projection_dim=32
        )
        config = transformers.LlavaConfig(
            vision_config=vision,
            text_config=config_of("Llama"),
            image_token_index=5,
            vision_feature_layer=-1,
        )
        torch.manual_seed(7)
        model = transformers.LlavaForConditionalGeneration(config).train()
        ids = torch.randint(6, 61, (2, 9))
        ids[:, 1:5] = 5  # one for each patch of an image
        inputs = dict(input_ids=ids, labels=ids, pixel_values=torch.randn(2, 3, 8, 8))
        return model, inputs

    def test_levels(self):
        model, inputs = self.made()
        report = headroom.patch(model, "L5")
        layers = [*model.model.vision_tower.encoder.layers, *model.model.language_model.layers]
        assert len(report.levels) == 5 and {*report.levels.values()} == {"L5"}
        assert all("forward" in vars(layer) for layer in layers) and not report.left
        runs = []
        layers[0].mlp.fc1.register_forward_hook(lambda *_: runs.append(1))
        got = step(model, inputs)
        assert len(runs) == 2
        headroom.unpatch(model)
        assert_close(got, step(model, inputs))

    def test_a_level_that_only_known_blocks_have(self):
        model, _ = self.made()
        report = headroom.patch(model, "L2")
        assert len(report.levels) == 2
        assert "left alone: 3 CLIPEncoderLayer" in str(report)
        assert "it cannot be at L2, only at L0 or L5" in str(report)
        with pytest.raises(ValueError, match="save is L2 for model.vision_tower.encoder.layers.0"):
            headroom.patch(model, {"model.vision_tower.encoder.layers.0": "L2"})
        assert len(headroom.patch(model).levels) == 2  # the others stay as they are
