"""TRL: SFT, with packing too, DPO, KTO, GRPO and rewards, with a patched model, our optimizer and
head, and a budget where that can be planned."""

# /// script
# dependencies = ["trl==1.16.0", "transformers==5.24.0"]
# ///

import warnings

import headroom
import torch
import transformers
import trl
from _small import llama
from _text import MARKED, PAIRS, PROMPTS, SENTENCES, scores, tokenizer
from datasets import Dataset
from headroom.integrations.transformers import HeadroomCallback, register_attention
from headroom.integrations.trl import fused_forward, register
from headroom.step.errors import PlanError


class Scorer(transformers.LlamaForSequenceClassification):
    """Scores of sequences, as rewards are trained."""


def scorer():
    torch.manual_seed(0)
    config = llama().config
    config.num_labels, config.pad_token_id = 1, 0
    return Scorer(config)


TRAINERS = {
    "SFT": (trl.SFTTrainer, trl.SFTConfig, SENTENCES, {}),
    "packed SFT": (
        trl.SFTTrainer,
        trl.SFTConfig,
        SENTENCES,
        {"packing": True, "max_length": 32, "packing_strategy": "bfd"},
    ),
    "DPO": (trl.DPOTrainer, trl.DPOConfig, PAIRS, {}),
    "KTO": (trl.KTOTrainer, trl.KTOConfig, MARKED, {}),
    "GRPO": (
        trl.GRPOTrainer,
        trl.GRPOConfig,
        PROMPTS,
        {"num_generations": 4, "max_completion_length": 6, "entropy_coef": 0.01},
    ),
    "rewards": (trl.RewardTrainer, trl.RewardConfig, PAIRS, {}),
}


def losses(name, *, ours, callbacks=()):
    """The losses of some steps of a trainer, of TRL alone or with all that is ours."""
    trainer_class, config, rows, options = TRAINERS[name]
    model = scorer() if name == "rewards" else llama()
    if name == "packed SFT":
        model.set_attn_implementation(register_attention() if ours else "sdpa")
    if ours:
        headroom.patch(model)
    optimizer = headroom.optim.AdamW if ours else torch.optim.AdamW
    args = config(
        "out",
        max_steps=3,
        per_device_train_batch_size=4,
        logging_steps=1,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        gradient_checkpointing=False,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        bf16=False,
        disable_tqdm=True,
        seed=0,
        **options,
    )
    given = {"reward_funcs": scores} if name == "GRPO" else {}
    if name in ("DPO", "KTO"):
        given = {"ref_model": llama()}
    trainer = trainer_class(
        model,
        args=args,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer(),
        optimizers=(optimizer(model.parameters(), lr=1e-2), None),
        callbacks=list(callbacks),
        **given,
    )
    is_ours = getattr(vars(model).get("forward"), "func", None) is fused_forward
    assert is_ours == (ours and name != "rewards"), name
    trainer.train()
    return [entry for entry in trainer.state.log_history if "loss" in entry]


def numbers(entries):
    same = ("loss", "grad_norm", "entropy", "mean_token_accuracy", "logits/chosen")
    return torch.tensor([[entry[key] for key in same if key in entry] for entry in entries])


warnings.simplefilter("ignore")
references = {name: losses(name, ours=False) for name in TRAINERS}
register()
for name in TRAINERS:
    torch.testing.assert_close(
        numbers(losses(name, ours=True)), numbers(references[name]), rtol=2e-3, atol=2e-4
    )
for name in ("SFT", "packed SFT", "DPO", "rewards"):
    callback = HeadroomCallback("64 MiB", tell=lambda text: None)
    found = losses(name, ours=True, callbacks=[callback])
    assert callback.fitted is not None, name
    torch.testing.assert_close(
        numbers(found)[:, 0], numbers(references[name])[:, 0], rtol=2e-3, atol=2e-4
    )
for name, way_out in (("KTO", "headroom.patch(model"), ("GRPO", "sample_batch=")):
    try:
        losses(name, ours=True, callbacks=[HeadroomCallback("64 MiB")])
    except (PlanError, TypeError) as error:
        assert way_out in str(error), error
    else:
        raise AssertionError(f"{name} was planned")
