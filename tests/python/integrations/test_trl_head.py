"""The fused head that TRL gives to a model, by ``headroom.linear_log_prob``; the trainers run in
tests/loops."""

import copy
import sys
import types
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from headroom.integrations import trl
from torch import nn

transformers = pytest.importorskip("transformers")

NAMES = ("log_probs", "entropy", "is_top1", "mean_logits", "log_sum_sq_probs")


@dataclass
class Output:
    """The fields of what TRL's head returns."""

    loss: Any = None
    log_probs: Any = None
    entropy: Any = None
    is_top1: Any = None
    mean_logits: Any = None
    log_sum_sq_probs: Any = None
    label_mask: Any = None
    aux_loss: Any = None


def add_fused_lm_head(model, temperature=1.0, cast_lm_head_to_fp32=False, outputs=("log_probs",)):
    """TRL's function, as far as ours calls it."""
    original = model.forward

    def forward(self, *args, fused_lm_head=False, labels=None, **kwargs):
        return "theirs" if fused_lm_head else original(*args, **kwargs)

    model.forward = types.MethodType(forward, model)


@pytest.fixture(autouse=True)
def package(monkeypatch):
    """The modules of a release of trl."""
    utils = SimpleNamespace(FusedCausalLMOutput=Output, add_fused_lm_head=add_fused_lm_head)
    trainer = types.ModuleType("trl.trainer")
    trainer.utils = utils
    importer = types.ModuleType("trl.trainer.sft_trainer")
    importer.add_fused_lm_head = add_fused_lm_head
    for name, module in {
        "trl": types.ModuleType("trl"),
        "trl.trainer": trainer,
        "trl.trainer.utils": types.ModuleType("trl.trainer.utils"),
        "trl.trainer.sft_trainer": importer,
    }.items():
        monkeypatch.setitem(sys.modules, name, module)
    vars(sys.modules["trl.trainer.utils"]).update(vars(utils))
    trainer.utils = sys.modules["trl.trainer.utils"]
    return trainer.utils


SIZES = dict(
    vocab_size=67,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=2,
)


def llama(**options):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES, **options)
    model = transformers.LlamaForCausalLM(config)
    model.lm_head.weight.data *= 20
    return model


def batch():
    torch.manual_seed(1)
    ids = torch.randint(67, (3, 9))
    labels = ids.clone()
    labels[0, :4] = labels[2, 6:] = -100
    return ids, labels


def expected(model, ids, target, temperature=1.0, shift=True):
    """What TRL's head returns, from logits."""
    z = model(input_ids=ids).logits / temperature
    if shift:
        z, target = z[:, :-1], target[:, 1:]
    counts, logp = target != -100, z.log_softmax(-1)
    found = {
        "log_probs": logp.gather(-1, target.clamp(min=0)[..., None])[..., 0],
        "entropy": -(logp.exp() * logp).sum(-1),
        "is_top1": z.argmax(-1) == target,
        "mean_logits": z.mean(-1),
        "log_sum_sq_probs": (2 * logp).logsumexp(-1),
    }
    return {name: value * counts for name, value in found.items()} | {"label_mask": counts}


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("shift", [True, False])
def test_results_and_gradients_are_those_of_logits(package, shift, temperature):
    trl.register()
    model, plain = llama(), llama()
    package.add_fused_lm_head(model, temperature, outputs=NAMES)
    ids, labels = batch()
    given = {"labels" if shift else "shift_labels": labels}
    found = model(input_ids=ids, fused_lm_head=True, **given)
    want = expected(plain, ids, labels, temperature, shift)
    for name, value in want.items():
        torch.testing.assert_close(getattr(found, name), value, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(
        found.loss, -want["log_probs"].sum() / want["label_mask"].sum(), rtol=1e-5, atol=1e-6
    )
    (found.loss - 0.1 * found.entropy.sum()).backward()
    (-want["log_probs"].sum() / want["label_mask"].sum() - 0.1 * want["entropy"].sum()).backward()
    for mine, theirs in zip(model.parameters(), plain.parameters()):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-3, atol=1e-5)


def test_only_what_was_asked_for_is_returned(package):
    trl.register()
    model = llama()
    package.add_fused_lm_head(model)
    ids, labels = batch()
    found = model(input_ids=ids, labels=labels, fused_lm_head=True, num_items_in_batch=4)
    assert found.entropy is None and found.aux_loss is None
    torch.testing.assert_close(found.loss, -found.log_probs.sum() / 4)
    none = model(input_ids=ids, labels=torch.full_like(labels, -100), fused_lm_head=True)
    none.loss.backward()
    assert none.loss == 0 and not any(p.grad.any() for p in model.parameters())


def test_a_call_without_the_head_is_the_models_own(package):
    trl.register()
    model, (ids, _) = llama(), batch()
    want = model(input_ids=ids).logits
    package.add_fused_lm_head(model)
    torch.testing.assert_close(model(input_ids=ids).logits, want)


def test_the_head_in_float32_of_a_model_in_bfloat16(package):
    trl.register()
    model = llama().bfloat16()
    package.add_fused_lm_head(model, 1.0, True, NAMES)
    ids, labels = batch()
    with torch.autocast("cpu", torch.bfloat16):
        found = model(input_ids=ids, labels=labels, fused_lm_head=True)
    hidden = model.model(ids).last_hidden_state.float()[:, :-1]
    logp = (hidden @ model.lm_head.weight.float().T).log_softmax(-1)
    want = logp.gather(-1, labels[:, 1:].clamp(min=0)[..., None])[..., 0] * found.label_mask
    torch.testing.assert_close(found.log_probs, want, rtol=2e-2, atol=2e-2)
    found.loss.backward()
    assert model.lm_head.weight.grad.dtype == torch.bfloat16


def test_heads_that_are_more_than_a_linear_are_theirs(package):
    trl.register()
    ids, labels = batch()

    class Head(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    model = llama()
    model.lm_head = Head(32, 67, bias=False)
    package.add_fused_lm_head(model)
    assert model(input_ids=ids, labels=labels, fused_lm_head=True) == "theirs"
    model = llama()
    package.add_fused_lm_head(model)
    routed = model(input_ids=ids, labels=labels, fused_lm_head=True, output_router_logits=True)
    assert routed == "theirs"
    scaled = llama(logit_scale=0.5)
    package.add_fused_lm_head(scaled)
    assert scaled(input_ids=ids, labels=labels, fused_lm_head=True) == "theirs"


def small(kind, **options):
    config = getattr(transformers, f"{kind}Config")(**SIZES | options)
    torch.manual_seed(0)
    return getattr(transformers, f"{kind}ForCausalLM")(config).train()


# Models that do something else to their logits, by whatever name; the last is of one's own.
class Halves(transformers.LlamaForCausalLM):
    def forward(self, *args, **kwargs):
        out = super().forward(*args, **kwargs)
        out.logits = out.logits / 2
        return out


OTHERS = {
    "RecurrentGemma": dict(logits_soft_cap=2.0, lru_width=32, block_types=["recurrent"]),
    "Cohere": dict(logit_scale=0.1),
    "Granite": dict(logits_scaling=4.0),
    "xLSTM": dict(output_logit_soft_cap=5.0, num_heads=2),
    "HyperCLOVAX": dict(logits_scaling=0.3),
    "Halves": dict(),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_logits_that_are_changed_by_any_name_are_theirs(package, kind):
    trl.register()
    if kind == "Halves":
        model = Halves(llama().config)
    else:
        model = small(kind, **OTHERS[kind])
    ids, labels = batch()
    package.add_fused_lm_head(model)
    assert model(input_ids=ids, labels=labels, fused_lm_head=True) == "theirs"


@pytest.mark.parametrize(
    "kind, options",
    [
        ("Gemma2", dict(final_logit_softcapping=0.5, head_dim=16)),
        ("Granite", dict(logits_scaling=1.0)),
        ("Cohere", dict(logit_scale=1.0)),
        ("OPT", dict(dropout=0.0, ffn_dim=48, word_embed_proj_dim=32, max_position_embeddings=32)),
        (
            "Qwen3Moe",
            dict(num_experts=2, num_experts_per_tok=1, moe_intermediate_size=16, head_dim=16),
        ),
    ],
)
def test_logits_that_are_those_of_the_head_are_ours(package, kind, options):
    trl.register()
    model = small(kind, **options)
    ids, labels = batch()
    want = expected(model, ids, labels)
    package.add_fused_lm_head(model)
    found = model(input_ids=ids, labels=labels, fused_lm_head=True)
    torch.testing.assert_close(found.log_probs, want["log_probs"], rtol=1e-4, atol=1e-5)


def test_the_probe_leaves_the_model_and_generators_as_they_were(package):
    trl.register()
    model = llama().to("meta")
    model.lm_head.register_forward_pre_hook(lambda *_: 1 / 0)
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    state = torch.get_rng_state()
    assert trl.returns_logits(model, model.model, model.lm_head, None)
    assert not trl.returns_logits(model, model.model, model.lm_head, 30.0)
    assert {name: dict(vars(module)) for name, module in model.named_modules()} == before
    assert torch.equal(torch.get_rng_state(), state)


def test_a_copy_calls_its_own_weights(package):
    trl.register()
    model, (ids, labels) = llama(), batch()
    package.add_fused_lm_head(model)
    made = copy.deepcopy(model)
    made.lm_head.weight.data.zero_()
    found = made(input_ids=ids, labels=labels, fused_lm_head=True)
    torch.testing.assert_close(found.loss, torch.tensor(67.0).log())


def test_a_second_call_changes_nothing(package):
    trl.register()
    ours = package.add_fused_lm_head
    trl.register()
    assert package.add_fused_lm_head is ours
    assert sys.modules["trl.trainer.sft_trainer"].add_fused_lm_head is ours


def test_an_older_release_is_refused(package):
    del package.add_fused_lm_head
    with pytest.raises(ImportError, match="no add_fused_lm_head, wanted 1.16 or newer; without"):
        trl.register()
