"""Headroom's optimizers by name in TrainingArguments."""

import copy
import pickle
import subprocess
import sys

import headroom
import pytest
import torch

from helpers.bits import assert_same_bits
from helpers.modes import entries

transformers = pytest.importorskip("transformers")

from headroom.integrations.trainer_optimizers import NAMES  # noqa: E402
from headroom.integrations.transformers import register  # noqa: E402
from transformers.training_args import OptimizerNames  # noqa: E402

from helpers.trainers import losses_of, trainer_of  # noqa: E402

OPTIMIZERS = {
    "headroom_adamw": headroom.optim.AdamW,
    "headroom_adamw_8bit": headroom.optim.AdamW8bit,
    "headroom_adafactor": headroom.optim.Adafactor,
    "headroom_sgd": headroom.optim.SGD,
    "headroom_sgd_8bit": headroom.optim.SGD8bit,
    "headroom_lion": headroom.optim.Lion,
    "headroom_lion_8bit": headroom.optim.Lion8bit,
}


@pytest.fixture(autouse=True)
def registered():
    assert register() == tuple(NAMES)


def rows():
    config = transformers.GPT2Config(
        vocab_size=32,
        n_positions=16,
        n_embd=16,
        n_layer=1,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
    )
    tokens = torch.randint(0, 32, (16, 8), generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(config), [{"input_ids": t, "labels": t} for t in tokens]


def trainer(folder, **options):
    return trainer_of(*rows(), folder, **options)


def test_names_are_members_like_those_of_transformers():
    assert OPTIMIZERS.items() <= NAMES.items()
    before = len(OptimizerNames)
    register()
    assert len(OptimizerNames) == before == len(set(OptimizerNames))
    for text in NAMES:
        member = OptimizerNames(text)
        assert isinstance(member, OptimizerNames) and member == text == member.value
        assert member is OptimizerNames[text.upper()] is getattr(OptimizerNames, text.upper())
        assert member in OptimizerNames and repr(member).startswith("<OptimizerNames.HEADROOM_")
        assert pickle.loads(pickle.dumps(member)) is member is copy.deepcopy(member)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_trainer_makes_the_optimizer(name, tmp_path):
    made = trainer(
        tmp_path,
        optim=name,
        learning_rate=3e-3,
        weight_decay=0.1,
        adam_beta1=0.8,
        adam_beta2=0.95,
        adam_epsilon=1e-7,
    )
    found = made.create_optimizer()
    assert type(found) is OPTIMIZERS[name]
    decayed, others = found.param_groups
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    assert decayed["params"] and others["params"] and decayed["lr"] == 3e-3
    if "betas" in decayed:
        assert decayed["betas"] == (0.8, 0.95)
    if "adam" in name:
        assert decayed["eps"] == 1e-7
    made.train()
    assert made.state.global_step == 4


@pytest.mark.skipif("headroom_muon" not in NAMES, reason="there is no Muon")
@pytest.mark.parametrize("name", ["headroom_muon", "headroom_muon_8bit"])
def test_muon_gets_the_trainers_groups_with_names(name, tmp_path):
    options = {"weight_decay": 0.1, "adam_beta2": 0.95, "learning_rate": 3e-3}
    made = trainer(tmp_path, optim=name, optim_args="momentum=0.9", **options)
    found = made.create_optimizer()
    assert {(g["use_muon"], g["weight_decay"]) for g in found.param_groups} == {
        (True, 0.1),
        (False, 0.1),
        (False, 0.0),
    }
    for group in found.param_groups:
        assert group["lr"] == 3e-3
        if group["use_muon"]:
            assert (group["momentum"], group["adjust_lr_fn"]) == (0.9, "match_rms_adamw")
        else:
            assert group["betas"] == (0.9, 0.95)
    made.train()
    assert made.state.global_step == 4


def test_a_run_with_muon_resumes(tmp_path):
    """From a checkpoint of the Trainer, whose groups hold matrices in parts and in 8 bits."""
    options = {"optim": "headroom_muon_8bit", "save_strategy": "steps", "save_steps": 2, "seed": 0}
    options |= {"optim_args": "master=remainder16, min_8bit_size=256, block_size=64"}
    whole, resumed = (trainer(tmp_path, **options) for _ in range(2))
    for made in (whole, resumed):
        made.model.to(torch.bfloat16)
    whole.train()
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert_same_bits(*(made.model.parameters() for made in (whole, resumed)))
    one, other = (made.optimizer.optimizer for made in (whole, resumed))
    matrices = [group for group in one.param_groups if group["use_muon"]]
    codes = [one.state[p]["momentum_buffer"] for group in matrices for p in group["params"]]
    assert {tensor.dtype for tensor in codes} >= {torch.uint8}
    for left, right in zip(entries(one), entries(other), strict=True):
        assert left.keys() == right.keys()
        assert_same_bits(left.values(), right.values())


@pytest.mark.skipif("headroom_muon" not in NAMES, reason="there is no Muon")
def test_muon_knows_the_modules_of_the_trainers_model(tmp_path):
    """Embeddings are AdamW's, whatever their names."""
    sizes = {"vocab_size": 32, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1}
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(num_heads=2, **sizes))
    made = trainer_of(model, rows()[1], tmp_path, optim="headroom_muon")
    groups = made.create_optimizer().param_groups
    hidden = {name for group in groups if group["use_muon"] for name in group["param_names"]}
    assert "encoder.block.0.layer.0.SelfAttention.q.weight" in hidden
    assert not [name for name in hidden if "shared" in name or "relative_attention_bias" in name]


def test_it_is_the_optimizer_that_one_would_give(tmp_path):
    """The same bits as with ``optimizer_cls_and_kwargs``."""
    own = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8}
    own |= {"master": "remainder16", "min_8bit_size": 16}
    runs = []
    for options in (
        {"optim": "headroom_adamw_8bit", "optim_args": "master=remainder16, min_8bit_size=16"},
        {"optimizer_cls_and_kwargs": (headroom.optim.AdamW8bit, own)},
    ):
        made = trainer(tmp_path, weight_decay=0.1, **options)
        made.model.to(torch.bfloat16)
        made.train()
        runs.append(made)
    assert_same_bits(*(made.model.parameters() for made in runs))
    group = runs[0].optimizer.optimizer.param_groups[0]
    assert (group["master"], group["min_8bit_size"]) == ("remainder16", 16)


def test_adafactor_follows_the_trainers_own(tmp_path):
    losses = []
    for name in ("headroom_adafactor", "adafactor"):
        made = trainer(tmp_path, optim=name, max_steps=12)
        made.train()
        losses.append(torch.tensor(losses_of(made)))
    torch.testing.assert_close(*losses, rtol=3e-4, atol=0)
    other = trainer(tmp_path, optim="headroom_adafactor", optim_args="semantics=torch,d=2.0")
    assert other.create_optimizer().param_groups[0]["d"] == 2.0


@pytest.mark.parametrize(
    "name, text, value",
    [
        ("sgd", "momentum=0.9,nesterov=true", {"momentum": 0.9, "nesterov": True}),
        ("adamw", "state_dtype=bfloat16", {"state_dtype": torch.bfloat16}),
        ("adamw_8bit", "block_size=64,nonfinite=skip_step", {"block_size": 64}),
    ],
)
def test_options_have_their_types(name, text, value, tmp_path):
    made = trainer(tmp_path, optim=f"headroom_{name}", optim_args=text)
    assert value.items() <= made.create_optimizer().param_groups[0].items()


@pytest.mark.parametrize(
    "name, text, words",
    [
        ("adamw", "mastr=f32", "'mastr', which headroom.optim.AdamW does not take; wanted of"),
        ("lion", "eps=1e-6", "'eps', which headroom.optim.Lion does not take"),
        ("adamw", "betas=0.9", "'betas', which the argument adam_beta1 and adam_beta2 sets"),
        ("sgd", "lr=0.1", "'lr', which the argument learning_rate sets"),
        ("sgd", "fused=true", "'fused', which headroom.optim.SGD does not take"),
        ("adamw_8bit", "master=f64", "master"),
    ],
)
def test_wrong_options_are_refused(name, text, words, tmp_path):
    with pytest.raises(ValueError, match=words):
        trainer(tmp_path, optim=f"headroom_{name}", optim_args=text).create_optimizer()


def test_the_command_line_and_yaml_take_the_names(tmp_path):
    parser = transformers.HfArgumentParser(transformers.TrainingArguments)
    words = ["--optim", "headroom_lion_8bit", "--optim_args", "block_size=64", "--use_cpu", "true"]
    (found,) = parser.parse_args_into_dataclasses(["--output_dir", str(tmp_path), *words])
    assert found.optim is OptimizerNames("headroom_lion_8bit")
    file = tmp_path / "train.yaml"
    file.write_text(f"output_dir: {tmp_path}\noptim: headroom_sgd\nuse_cpu: true\n")
    (found,) = parser.parse_yaml_file(str(file))
    assert found.optim == "headroom_sgd"
    assert found.to_dict()["optim"] == "headroom_sgd"


@pytest.mark.slow
def test_without_transformers_the_error_names_it():
    code = (
        "import sys; sys.modules['transformers'] = None\n"
        "from headroom.integrations.transformers import register\n"
        "try: register()\n"
        "except ImportError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "needs the package transformers, of 5.2 or newer" in done.stdout
