"""torchrun: a program for the Trainer on two ranks, to which ``headroom run`` gives an optimizer by
name and a budget."""

# /// script
# dependencies = ["transformers==5.24.0", "accelerate==1.15.0"]
# ///

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import sys
sys.path.insert(0, sys.argv.pop(1))
import transformers
from _small import llama, sentences

parser = transformers.HfArgumentParser(transformers.TrainingArguments)
(args,) = parser.parse_args_into_dataclasses()
trainer = transformers.Trainer(llama(), args, train_dataset=sentences())
trainer.train()
made = type(trainer.optimizer.optimizer).__qualname__
sys.stdout.write(f"made {made} {args.world_size}\\n")  # in one piece, since both ranks write
"""
ARGUMENTS = """
--output_dir out --optim headroom_adamw_8bit --max_steps 4 --use_cpu true --ddp_backend gloo
--report_to none --save_strategy no --disable_tqdm true
"""

Path("train.py").write_text(PROGRAM)
launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "headroom"]
command = [*launcher, "run", "--register", "--budget", "1 GiB", "train.py", Path(__file__).parent]
done = subprocess.run(
    [sys.executable, *map(str, command), *ARGUMENTS.split()], stdout=subprocess.PIPE, text=True
)
assert done.returncode == 0
assert done.stdout.count("made AdamW8bit 2") == 2, done.stdout
assert "measured peak" in done.stdout, done.stdout
