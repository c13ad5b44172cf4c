"""Plugins of loops that are not installed here, against the signatures of their documents."""

import dataclasses
import sys
import types
from pathlib import Path
from types import SimpleNamespace

import headroom
import pytest
import torch
from headroom.patching.patch import patch_call

tomllib = pytest.importorskip("tomllib")
transformers = pytest.importorskip("transformers")

ROOT = Path(__file__).resolve().parents[3]
MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB")


def modules(monkeypatch, **contents):
    """Makes modules of a package, by their names with ``__`` for dots."""
    for name, values in contents.items():
        parts = name.split("__")
        for k in range(1, len(parts) + 1):
            whole = ".".join(parts[:k])
            if whole not in sys.modules or k == len(parts):
                monkeypatch.setitem(sys.modules, whole, types.ModuleType(whole))
        vars(sys.modules[".".join(parts)]).update(values)


@pytest.fixture
def fresh(monkeypatch):
    """Imports a module of ours anew, and forgets it afterwards."""

    def imported(name):
        monkeypatch.delitem(sys.modules, f"headroom.integrations.{name}", raising=False)
        module = __import__(f"headroom.integrations.{name}", fromlist=["*"])
        monkeypatch.setitem(sys.modules, f"headroom.integrations.{name}", module)
        return module

    return imported


# ---- Lightning ---------------------------------------------------------------------------------


def test_lightning_gets_no_callback_unless_it_is_asked_for(monkeypatch):
    from headroom.integrations.from_environment import lightning_callbacks

    for name in ("HEADROOM_BUDGET", "HEADROOM_HOST_BUDGET", "HEADROOM_ALLOW"):
        monkeypatch.delenv(name, raising=False)
    assert lightning_callbacks() == []
    monkeypatch.setenv("HEADROOM_BUDGET", "")
    assert lightning_callbacks() == []


def test_lightning_gets_a_budget(monkeypatch):
    pytest.importorskip("lightning")
    from headroom.integrations.from_environment import lightning_callbacks
    from headroom.integrations.lightning import FitCallback

    monkeypatch.setenv("HEADROOM_BUDGET", "6 GiB")
    monkeypatch.setenv("HEADROOM_HOST_BUDGET", "1 GiB")
    monkeypatch.setenv("HEADROOM_ALLOW", "bf16,8bit")
    (callback,) = lightning_callbacks()
    assert isinstance(callback, FitCallback)
    assert (callback.budget, callback.host_budget) == ("6 GiB", "1 GiB")
    assert callback.allow == ("bf16", "8bit")


def test_the_entry_point_names_the_function():
    found = tomllib.loads((ROOT / "pyproject.toml").read_text())
    groups = found["project"]["entry-points"]
    place = groups["lightning.pytorch.callbacks_factory"]["headroom"]
    assert place == "headroom.integrations.from_environment:lightning_callbacks"


# ---- axolotl -----------------------------------------------------------------------------------


@pytest.fixture
def axolotl(monkeypatch, fresh):
    modules(monkeypatch, axolotl__integrations__base={"BasePlugin": type("BasePlugin", (), {})})
    return fresh("axolotl")


def configured(module, **given):
    """The configuration after axolotl has checked its keys."""
    return SimpleNamespace(**module.HeadroomArgs(**given).model_dump())


def test_axolotl_finds_keys_and_names(axolotl):
    plugin = axolotl.HeadroomPlugin()
    plugin.register({})
    assert transformers.training_args.OptimizerNames("headroom_adamw_8bit")
    assert plugin.get_input_args() == "headroom.integrations.axolotl.HeadroomArgs"
    cfg = configured(axolotl)
    assert vars(cfg) == {
        "headroom_budget": None,
        "headroom_allow": [],
        "headroom_patch": False,
        "headroom_snapshot": None,
    }


def llama():
    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    return transformers.LlamaForCausalLM(config)


def trainer(folder, model):
    args = transformers.TrainingArguments(
        folder, max_steps=2, use_cpu=True, report_to=[], disable_tqdm=True, save_strategy="no"
    )
    rows = [{"input_ids": row, "labels": row} for row in torch.arange(16).repeat(16, 1)]
    return transformers.Trainer(model, args, train_dataset=rows)


def test_axolotl_patches_the_model(axolotl, capsys):
    plugin = axolotl.HeadroomPlugin()
    for asked, level in ((True, "L1"), ("L3", "L3")):
        model = llama()
        plugin.post_model_build(configured(axolotl, headroom_patch=asked), model)
        assert set(patch_call(model)["save"].values()) == {level}
        assert "layers" in capsys.readouterr().out
    plain = llama()
    plugin.post_model_build(configured(axolotl), plain)
    assert patch_call(plain) is None


def test_axolotl_fits_into_a_budget(axolotl, tmp_path):
    made = trainer(tmp_path, llama())
    cfg = configured(axolotl, headroom_budget="1 GiB", headroom_allow=["8bit"])
    axolotl.HeadroomPlugin().post_trainer_create(cfg, made)
    made.train()
    found = [each for each in made.callback_handler.callbacks if hasattr(each, "fitted")]
    (callback,) = found
    assert callback.fitted is not None and callback.allow == ("8bit",)
    plain = trainer(tmp_path, llama())
    axolotl.HeadroomPlugin().post_trainer_create(configured(axolotl), plain)
    assert "train" not in vars(plain)


def test_axolotl_writes_a_snapshot_where_memory_runs_out(axolotl, tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    folder = tmp_path / "snapshots"
    cfg = configured(axolotl, headroom_snapshot=str(folder))
    for error, files in ((ValueError("no"), []), (MEMORY, ["rank1.pickle"])):
        made = trainer(tmp_path, llama())

        def fails(*args, error=error, **options):
            raise error

        made.training_step = fails
        axolotl.HeadroomPlugin().post_trainer_create(cfg, made)
        with pytest.raises(type(error)):
            made.train()
        assert [path.name for path in folder.iterdir()] == files


# ---- torchtitan --------------------------------------------------------------------------------


@dataclasses.dataclass(kw_only=True)
class Group:
    """torchtitan's ParamGroupConfig."""

    pattern: str
    optimizer_name: str
    optimizer_kwargs: dict = dataclasses.field(default_factory=dict)


class Container:
    """torchtitan's OptimizersContainer, as far as an override sees it."""

    @dataclasses.dataclass(kw_only=True)
    class Config:
        param_groups: list = dataclasses.field(default_factory=list)
        implementation: str = "fused"
        optimizer_factory_kwargs_by_name: dict = dataclasses.field(default_factory=dict)

    @staticmethod
    def _resolve_optimizer_factory(name):
        return {"AdamW": torch.optim.AdamW}[name]


@pytest.fixture
def torchtitan(monkeypatch, fresh):
    def override(*, target, fqns=None, description="", exact=False):
        assert target is Container.Config
        return lambda function: function

    def derive(source, target_cls, **deltas):
        return target_cls(**{**vars(source), **deltas})

    modules(
        monkeypatch,
        torchtitan__components__optimizer={"OptimizersContainer": Container},
        torchtitan__config__override={"override": override, "derive": derive},
    )
    return fresh("torchtitan")


def test_torchtitan_makes_our_optimizers(torchtitan):
    groups = [
        Group(pattern="bias$", optimizer_name="AdamW", optimizer_kwargs={"lr": 1e-3}),
        Group(pattern=".*", optimizer_name="DistMuon"),
    ]
    cfg = Container.Config(param_groups=groups, implementation="foreach")
    found = torchtitan.adamw8bit(cfg, min_8bit_size=64)
    assert isinstance(found, torchtitan.HeadroomOptimizers.Config)
    names = [group.optimizer_name for group in found.param_groups]
    assert names == ["headroom.AdamW8bit", "DistMuon"] and found.implementation == "foreach"
    assert [group.optimizer_name for group in groups] == ["AdamW", "DistMuon"]
    resolve = torchtitan.HeadroomOptimizers._resolve_optimizer_factory
    assert resolve("AdamW") is torch.optim.AdamW
    # As torchtitan makes it: with names, and words about kernels of torch's in the groups.
    model = torch.nn.Linear(16, 16)
    group = {
        "params": [model.bias],
        "param_names": ["bias"],
        "fused": True,
        "foreach": False,
        "lr": 1e-3,
    }
    own = found.optimizer_factory_kwargs_by_name["headroom.AdamW8bit"]
    optimizer = resolve(names[0])([group], **own)
    assert isinstance(optimizer, headroom.optim.AdamW8bit) and own == {"min_8bit_size": 64}
    model(torch.ones(2, 16)).sum().backward()
    optimizer.step()
    assert optimizer.param_groups[0]["param_names"] == ["bias"]


def test_torchtitan_keeps_adam_and_what_was_given(torchtitan):
    cfg = Container.Config(
        param_groups=[Group(pattern=".*", optimizer_name="Adam")],
        optimizer_factory_kwargs_by_name={"Adam": {"betas": (0.8, 0.9)}},
    )
    found = torchtitan.adamw(cfg)
    assert found.param_groups[0].optimizer_name == "headroom.Adam"
    own = found.optimizer_factory_kwargs_by_name
    assert own["headroom.Adam"] == {"betas": (0.8, 0.9)}
    with pytest.raises(ValueError, match="makes states in bfloat16; wanted 'fused', or no"):
        torchtitan.adamw(Container.Config(implementation="fused_opt_states_bf16"))


# ---- ms-swift ----------------------------------------------------------------------------------


def test_swift_makes_the_optimizer(monkeypatch, fresh, tmp_path):
    class OptimizerCallback:
        def __init__(self, args, trainer):
            self.args, self.trainer = args, trainer

        def create_optimizer(self, model=None):
            return transformers.Trainer.create_optimizer(self.trainer)

    table = {}
    modules(
        monkeypatch,
        swift__optimizers={"OptimizerCallback": OptimizerCallback, "optimizers_map": table},
    )
    fresh("ms_swift")
    made = trainer(tmp_path, llama())
    made.args.weight_decay = 0.1
    optimizer = table["headroom"](made.args, made).create_optimizer()
    assert isinstance(optimizer, headroom.optim.AdamW8bit)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    assert optimizer.param_groups[0]["lr"] == made.args.learning_rate
