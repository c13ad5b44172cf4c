"""Which parameters Muon takes: the matrices of linear layers, and of packed ones the parts where
their layout is known."""

import headroom
import pytest
import torch
from headroom.optim import Muon
from torch import nn

transformers = pytest.importorskip("transformers")


def names_of(optimizer, use_muon):
    groups = [group for group in optimizer.param_groups if group["use_muon"] is use_muon]
    return {name for group in groups for name in group["param_names"]}


class Odd(nn.Module):
    """A layer with matrices that are no weights of linear layers."""

    def __init__(self):
        super().__init__()
        self.A_log = nn.Parameter(torch.randn(32, 16))
        self.relative_position_bias_table = nn.Parameter(torch.randn(49, 4))
        self.query = nn.Parameter(torch.randn(1, 8, 32))
        self.pos_embed = nn.Parameter(torch.randn(1, 10, 32))
        self.queries = nn.ParameterList([nn.Parameter(torch.randn(8, 32))])
        self.dt_proj_weight = nn.Parameter(torch.randn(2, 32, 4))
        self.relative_attention_bias = nn.Embedding(32, 4)
        self.conv1d = nn.Conv1d(32, 32, 4, groups=32)
        self.patches = nn.Conv1d(32, 32, 4)
        self.router = nn.Bilinear(4, 4, 2)
        self.out = nn.Linear(32, 16)


@pytest.mark.parametrize("by_names", [False, True])
def test_what_no_linear_layer_has_is_of_adamw(by_names):
    model = nn.ModuleDict({"layers": nn.ModuleList([Odd()])})
    if by_names:  # which tell less
        del model["layers"][0].router, model["layers"][0].dt_proj_weight
    optimizer = Muon(
        list(model.named_parameters()) if by_names else model, convolutions=not by_names
    )
    assert names_of(optimizer, True) == {"layers.0.out.weight"}
    assert "A_log" in str(optimizer.choice) and "of no known linear layer" in str(optimizer.choice)


def test_what_the_user_names_is_of_muon():
    optimizer = Muon(Odd(), split={"A_log": 2, "query": None})
    assert names_of(optimizer, True) == {"A_log", "query", "out.weight"}


def small(kind, **sizes):
    sizes = {"vocab_size": 50, "num_hidden_layers": 1} | sizes
    config = getattr(transformers, f"{kind}Config")(**sizes, pad_token_id=0)
    return transformers.AutoModel.from_config(config)


HEADS = {"hidden_size": 32, "num_attention_heads": 4}
MODELS = {
    "CodeGen": (dict(n_embd=64, n_layer=1, n_head=8, rotary_dim=4), "qkv_proj", (4, (16, 16, 16))),
    "GPTBigCode": (
        dict(n_embd=32, n_layer=1, n_head=4, multi_query=False),
        "c_attn",
        (4, (8, 8, 8)),
    ),
    "MiniMax": (
        HEADS
        | {"layer_types": ["linear_attention"], "num_local_experts": 2, "head_dim": 8}
        | {"intermediate_size": 16, "num_key_value_heads": 4},
        "qkv_proj",
        (4, (8, 8, 8)),
    ),
    "GPT2": (dict(n_embd=32, n_layer=1, n_head=4), "c_attn", (32, 32, 32)),
    "Mpt": (dict(d_model=32, n_layers=1, n_heads=4), "Wqkv", 3),
    "ModernBert": (HEADS | {"intermediate_size": 16}, "Wqkv", (32, 32, 32)),
    "Phi3": (HEADS | {"num_key_value_heads": 2}, "qkv_proj", (32, 16, 16)),
}


@pytest.mark.parametrize("kind", MODELS)
def test_packed_matrices_are_split_where_their_layout_is_known(kind):
    """CodeGen, GPTBigCode and MiniMax pack queries, keys and values by head, or by a part of the
    heads."""
    sizes, packed, parts = MODELS[kind]
    optimizer = Muon(small(kind, **sizes))
    (split,) = {
        group["split"]
        for group in optimizer.param_groups
        for name in group["param_names"]
        if name.endswith(f"{packed}.weight")
    }
    assert split == parts
    assert f"packed matrices are split: {packed} in 3" in str(optimizer.choice)
    assert "not known" not in str(optimizer.choice)


@pytest.mark.parametrize(
    "kind, values, out",
    [("CodeGen", 1, "out_proj"), ("GPTBigCode", 2, "c_proj"), ("MiniMax", 2, "out_proj")],
)
def test_parts_by_head_are_queries_keys_and_values(kind, values, out):
    """Without the rows of the values attention gives nothing, and without others it gives some."""
    sizes, packed, (times, rows) = MODELS[kind]
    model, given = small(kind, **sizes).eval(), []
    (attention,) = [one for one in model.modules() if hasattr(one, packed)]
    getattr(attention, out).register_forward_pre_hook(lambda _, args: given.append(args[0]))
    layer = getattr(attention, packed)
    nn.init.normal_(layer.weight)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
    weight = layer.weight.detach().clone()
    for part in range(3):
        layer.weight.data.copy_(weight).view(times, 3, rows[0], -1)[:, part] = 0
        with torch.no_grad():
            model(torch.arange(1, 9)[None])
        is_nothing = not given.pop().any()
        assert is_nothing is (part == values) or (kind == "MiniMax" and part != values)


def test_one_key_for_all_heads():
    """That of GPTBigCode comes after all queries; what attends to an encoder has other parts."""
    sizes = dict(n_embd=32, n_layer=1, n_head=4)
    optimizer = Muon(small("GPTBigCode", **sizes, multi_query=True))
    assert (32, 8, 8) in [group["split"] for group in optimizer.param_groups]
    crossed = small("GPTBigCode", **sizes, multi_query=False, add_cross_attention=True)
    assert "layout is not known: c_attn" in str(Muon(crossed).choice)


def test_gates_and_ups_of_gpt_oss_alternate():
    sizes = HEADS | {"intermediate_size": 24, "num_local_experts": 2, "head_dim": 8}
    optimizer = Muon(small("GptOss", **sizes, num_key_value_heads=2))
    splits = {
        name.rpartition(".")[2]: (group["split"], group["transposed"])
        for group in optimizer.param_groups
        for name in group["param_names"]
    }
    assert splits["gate_up_proj"] == ((24, (1, 1)), True)
    assert splits["down_proj"] == (None, True)


def test_a_name_with_several_layouts_in_an_unknown_module_is_one_matrix():
    def chosen(name, **options):
        return Muon(nn.ModuleDict({"attn": nn.ModuleDict({name: nn.Linear(32, 96)})}), **options)

    assert chosen("qkv").choice.splits == {"attn.qkv.weight": 3}
    for name in ("qkv_proj", "c_attn"):
        assert chosen(name).choice.splits == {} and "not known: " + name in str(chosen(name).choice)
        assert chosen(name, split={name: 3}).choice.splits == {f"attn.{name}.weight": 3}
        assert "not known" not in str(chosen(name, split={name: None}).choice)


def test_factors_of_adapters_are_matrices():
    """As in the loops that offer Muon, whose rule takes each matrix but embeddings and heads."""
    model = nn.ModuleDict({"up": nn.Linear(32, 64), "down": nn.Linear(64, 32)})
    headroom.lora(model, rank=4, targets=["up", "down"])
    optimizer = Muon(model)
    factors = {f"{name}.lora_{one}.default.weight" for name in ("up", "down") for one in "AB"}
    assert factors <= names_of(optimizer, True)


def test_factors_of_adapters_of_experts_are_batches_of_matrices():
    pytest.importorskip("transformers")
    from helpers.moe_models import moe_of

    model = moe_of("Mixtral")
    headroom.lora(model, rank=4, experts=2, targets=[])
    factors = {name for name, param in model.named_parameters() if param.requires_grad}
    assert len(factors) == 8 and factors <= names_of(Muon(model), True)
