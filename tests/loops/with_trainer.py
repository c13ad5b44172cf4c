"""transformers' Trainer: names of optimizers in its arguments."""

# /// script
# dependencies = ["transformers==5.24.0", "accelerate==1.15.0"]
# ///

import headroom
import transformers
from _small import assert_same_losses, llama, sentences, state_bytes
from headroom.integrations.transformers import register

register()


def run(optim, optim_args=None):
    args = transformers.TrainingArguments(
        "out",
        optim=optim,
        optim_args=optim_args,
        learning_rate=3e-3,
        max_steps=6,
        logging_steps=1,
        save_strategy="no",
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
    )
    trainer = transformers.Trainer(llama(), args, train_dataset=sentences())
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return trainer.optimizer.optimizer, losses


theirs, reference = run("adamw_torch")
optimizer, losses = run("headroom_adamw")
assert type(optimizer) is headroom.optim.AdamW
assert_same_losses(losses, reference)
optimizer, losses = run("headroom_adamw_8bit", "min_8bit_size=256")
assert type(optimizer) is headroom.optim.AdamW8bit
assert state_bytes(optimizer) < 0.3 * state_bytes(theirs)
assert_same_losses(losses, reference, rtol=0.01)
