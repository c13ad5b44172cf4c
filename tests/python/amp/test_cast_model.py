"""headroom.cast_model: 16-bit models with float32 norms, which train, save and resume exactly."""

import copy
import io

import headroom
import pytest
import torch
from torch import nn

from helpers.bits import assert_same_bits
from helpers.interrupting import Interrupting

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


class RMSNorm(nn.Module):
    """As libraries write it, with a buffer and an input by keyword."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
        self.register_buffer("eps", torch.tensor(1e-6))
        self.seen = []

    def forward(self, x, *, residual):
        self.seen.append((x.dtype, residual.dtype))
        return self.weight * x * (x.square().mean(-1, True) + self.eps).rsqrt(), residual


class MyRMSNorm(RMSNorm):
    pass


class Net(nn.Module):
    """A tied head, norms of three kinds, a module with parameters inside of it, an odd buffer."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.embed = nn.Embedding(11, 8)
        self.norm = nn.LayerNorm(8)
        self.rms = MyRMSNorm()
        self.batch = nn.BatchNorm1d(8)
        self.block = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("table", torch.randn(3))
        self.register_buffer("count", torch.tensor(7))

    def forward(self, tokens):
        x = self.norm(self.embed(tokens))
        x, _ = self.rms(x, residual=x)
        return self.head(self.block(self.batch(x)))


def tokens(step=0):
    return torch.randint(11, (6,), generator=torch.Generator().manual_seed(step))


def dtypes(net):
    return {name: tensor.dtype for name, tensor in net.state_dict().items()}


NORMS = ("norm.", "rms.", "batch.")


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_norms_stay_in_float32(dtype):
    net, exact = Net(), Net()
    params = list(net.parameters())
    assert headroom.cast_model(net, dtype) is net
    for name, got in dtypes(net).items():
        integer = name in ("count", "batch.num_batches_tracked")
        want = torch.int64 if integer else F32 if name.startswith(NORMS) else dtype
        assert got == want, name
    assert all(p is q for p, q in zip(params, net.parameters()))
    assert net.head.weight is net.embed.weight
    out = net(tokens())
    assert out.dtype == dtype and net.rms.seen[0] == (F32, F32)
    torch.testing.assert_close(out.float(), exact(tokens()), rtol=0.05, atol=0.05)
    out.float().square().mean().backward()
    assert all(p.grad.dtype == p.dtype for p in net.parameters())


@pytest.mark.parametrize(
    "keep, names, extra",
    [
        (lambda net: [net.block], ["block"], {"block.0.weight", "block.0.bias", "block.2.bias"}),
        (lambda net: ["block.2"], ["block.2"], {"block.2.weight", "block.2.bias"}),
        (lambda net: "bl?ck.*", ["block.0", "block.1", "block.2"], {"block.0.bias"}),
        (lambda net: [nn.Linear], ["block.0", "block.2", "head", "embed"], {"embed.weight"}),
        (lambda net: nn.Embedding, ["embed", "head"], {"embed.weight", "head.weight"}),
        (lambda net: ["table"], [], {"table"}),
    ],
)
def test_what_is_kept(keep, names, extra):
    """A tied module is kept with the other, so that the weight has one dtype."""
    net = Net()
    headroom.cast_model(net, BF16, keep=keep(net))
    got = dtypes(net)
    assert all(got[name] == F32 for name in extra)
    cast = {name for name, m in net.named_modules() if m._forward_pre_hooks}
    assert cast == {"norm", "rms", "batch", *names}
    assert net.head.weight is net.embed.weight
    assert net(tokens()).dtype == BF16


def test_a_module_of_two_names_is_kept_by_either():
    for name in ("first", "again", "ag*.0"):
        net = nn.ModuleDict({"first": nn.Sequential(nn.Linear(2, 2)), "other": nn.Linear(2, 2)})
        net["again"] = net.first
        headroom.cast_model(net, BF16, keep=[name])
        assert net.first[0].weight.dtype == F32 and net.other.weight.dtype == BF16


# ---- Frequencies and positions -------------------------------------------------------------------

POSITION = 8191  # the last of a context of 8,192


def llama(positions, **changes):
    """transformers' Llama with random weights, so large that attention looks at positions."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        **{"vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2},
        **{"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 8192},
        **{"attn_implementation": "sdpa", "initializer_range": 0.2, **changes},
    )
    torch.manual_seed(3)
    model = transformers.LlamaForCausalLM(config).eval()
    generator = torch.Generator().manual_seed(4)
    tokens = torch.randint(64, (1, len(positions)), generator=generator)

    @torch.no_grad()
    def outputs(model):
        return model(input_ids=tokens, position_ids=torch.tensor([positions])).logits.double()

    return model, outputs


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_the_angles_of_a_llama_stay_those_of_float32(dtype):
    """Against angles in float64, and outputs against those of the float32 model."""
    positions = list(range(0, 8192, 89))
    exact, outputs = llama(positions)
    model = headroom.cast_model(copy.deepcopy(exact), dtype)
    rope = model.model.rotary_emb
    assert rope.inv_freq.dtype == rope.original_inv_freq.dtype == F32
    power = torch.arange(0, 32, 2, dtype=torch.float64) / 32
    angles = POSITION * 10000.0**-power

    def phase_error(rope):
        cos, sin = rope(torch.zeros((), dtype=F32), torch.tensor([[POSITION]]))
        turned = torch.atan2(sin.double(), cos.double())[0, 0, :16] - angles
        return torch.atan2(turned.sin(), turned.cos()).abs().max().item()

    # float32 rounds the frequency and the angle, each by 2^-24 of an angle of 8,191.
    assert phase_error(rope) < 2 * POSITION * 2.0**-24
    plain = copy.deepcopy(exact).to(dtype)
    assert phase_error(plain.model.rotary_emb) > (1 if dtype == BF16 else 0.2)
    wanted = outputs(exact)

    def error(model):
        return ((outputs(model) - wanted).norm() / wanted.norm()).item()

    assert error(model) < (0.05 if dtype == BF16 else 0.006)
    assert error(model) < error(plain) / 4
    report = headroom.cast_report(model)
    assert report.buffers == {
        "model.rotary_emb.inv_freq": F32,
        "model.rotary_emb.original_inv_freq": F32,
    }
    assert "buffer model.rotary_emb.inv_freq: float32" in str(report)


class Odd(nn.Module):
    """Buffers as other libraries name them."""

    WIDE = ("inv_freq", "freqs", "theta", "bands", "cos_cached", "emb_sin", "sin", "alphas_cumprod")
    NARROW = ("pe", "positional_embedding", "running_mean", "e_score_correction_bias", "embed_pos")

    def __init__(self):
        super().__init__()
        for i, name in enumerate(self.WIDE + self.NARROW):
            self.register_buffer(name, torch.rand(3), persistent=i % 2 == 0)
        self.register_buffer("position_ids", torch.arange(3))
        self.register_buffer("freqs_cis", torch.ones(3, dtype=torch.complex64))
        self.register_buffer("sin_16", torch.ones(3, dtype=F16))
        self.slopes = nn.Parameter(torch.rand(3), requires_grad=False)
        self.sigmas = nn.Parameter(torch.rand(3))


def test_buffers_that_stay_by_their_names():
    net = nn.Sequential(Odd(), nn.BatchNorm1d(3), nn.Linear(3, 3))
    before = {name: getattr(net[0], name).clone() for name in Odd.WIDE}
    headroom.cast_model(net, BF16)
    for name in Odd.WIDE:
        assert_same_bits([getattr(net[0], name)], [before[name]])
    assert all(getattr(net[0], name).dtype == BF16 for name in (*Odd.NARROW, "sigmas", "sin_16"))
    assert net[0].slopes.dtype == F32
    assert net[0].position_ids.dtype == torch.int64
    assert net[0].freqs_cis.dtype == torch.complex64
    assert not net[0]._forward_hooks and not net[0]._forward_pre_hooks
    report = headroom.cast_report(net)
    wide, narrow = {f"0.{name}" for name in Odd.WIDE}, {f"0.{name}" for name in Odd.NARROW}
    statistics = {"1.running_mean", "1.running_var"}
    assert report.buffers == {
        **dict.fromkeys(wide | statistics, F32),
        **dict.fromkeys(narrow | {"0.sin_16"}, BF16),
    }
    assert report.modules == {"1": "BatchNorm1d"}
    assert report.parameters == {F32: 3 + 2 * 3, BF16: 3 + 3 * 3 + 3}
    text = str(report)
    assert text.startswith("parameters: 9 in float32, 15 in bfloat16\n")
    assert "in float32 behind casts: 1 BatchNorm1d\nbuffers of those modules: 2\n" in text
    assert "buffer 0.pe: bfloat16" in text and "running_var" not in text
    headroom.cast_model(net, BF16, cast=["0.*sin", "0.freqs"])
    wide -= (cast := {"0.emb_sin", "0.sin", "0.freqs"})
    got = headroom.cast_report(net).buffers
    assert {name for name, dtype in got.items() if dtype == F32} == wide | statistics
    assert all(got[name] == BF16 for name in cast)
    headroom.cast_model(net, F32)
    assert set(headroom.cast_report(net).buffers.values()) == {F32}


@pytest.mark.parametrize(
    "view", [lambda x: x[:16].view(4, 4).t(), lambda x: x[8:24].view(4, 4)], ids=["all", "a part"]
)
def test_memory_that_is_shared_without_being_one_parameter_is_refused(view):
    net = nn.ModuleDict({name: nn.Linear(4, 4, bias=False) for name in "abcd"})
    flat = torch.randn(40)
    net.a.weight = nn.Parameter(flat[:16].view(4, 4))
    net.b.weight = nn.Parameter(view(flat))
    net.d.weight = nn.Parameter(flat[24:].view(4, 4))  # of the same storage, and alone
    with pytest.raises(ValueError, match="'a.weight' and 'b.weight' share memory"):
        headroom.cast_model(net, BF16, keep=["d"])
    assert {p.dtype for p in net.parameters()} == {F32}
    net.b.weight = net.a.weight
    headroom.cast_model(net, BF16, keep=["d"])
    assert net.a.weight.dtype == BF16 and net.d.weight.dtype == F32
    headroom.cast_model(net, BF16, keep=["b"])
    assert net.a.weight.dtype == F32 and net.a._forward_hooks and net.d.weight.dtype == BF16


def test_a_further_call_starts_anew():
    net = Net()
    net(tokens()).sum().backward()
    headroom.cast_model(net, BF16, keep=["block"])
    headroom.cast_model(net, F16)
    assert all(p.grad.dtype == p.dtype for p in net.parameters())
    assert net.block[0].weight.dtype == F16 and not net.block._forward_hooks
    assert len(net.norm._forward_pre_hooks) == len(net.norm._forward_hooks) == 1
    assert net(tokens()).dtype == F16
    headroom.cast_model(net, F32)
    assert set(dtypes(net).values()) == {F32, torch.int64}
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in net.modules())


def test_copies_pickles_and_state_dicts():
    net = headroom.cast_model(Net(), keep=["block.2"])
    net(tokens())
    file = io.BytesIO()
    net.rms.seen.clear()
    torch.save(net, file)
    file.seek(0)
    plain = headroom.cast_model(Net(), keep=["block.2"])
    plain.load_state_dict(net.state_dict())
    for other in (copy.deepcopy(net), torch.load(file, weights_only=False), plain):
        assert dtypes(other) == dtypes(net)
        assert_same_bits([other.eval()(tokens())], [net.eval()(tokens())])


def test_torch_compile():
    net = headroom.cast_model(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8)))
    x = torch.randn(3, 8).to(BF16)
    compiled = torch.compile(net, backend="aot_eager", fullgraph=True)
    assert_same_bits([compiled(x)], [net(x)])


def test_torchs_transformer_without_and_with_its_fast_path():
    layer = headroom.cast_model(nn.TransformerEncoderLayer(8, 2, 16, dropout=0, batch_first=True))
    x = torch.randn(2, 3, 8).to(BF16)
    with torch.no_grad():
        torch.testing.assert_close(layer.eval()(x), layer.train()(x), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("name", ["AdamW", "AdamW8bit"])
def test_a_model_of_two_dtypes_resumes_with_the_same_bits(name):
    """Each state in its own dtype, through torch.save and weights_only=True."""
    small = {"min_8bit_size": 8} if name == "AdamW8bit" else {}

    def make():
        net = headroom.cast_model(Net(), keep=["block.2"])
        return net, getattr(headroom.optim, name)(net.parameters(), lr=1e-2, **small)

    def train(net, optimizer, steps):
        for step in steps:
            nn.functional.cross_entropy(net(tokens(step)).float(), tokens(step)).backward()
            optimizer.step()
            optimizer.zero_grad()

    net, optimizer = make()
    train(net, optimizer, range(3))
    file = io.BytesIO()
    torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict()}, file)
    train(net, optimizer, range(3, 6))
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    other, resumed = make()
    other.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["optimizer"])
    train(other, resumed, range(3, 6))
    assert_same_bits(net.state_dict().values(), other.state_dict().values())
    kinds = set()
    for p, q in zip(net.parameters(), other.parameters()):
        left, right = optimizer.state[p], resumed.state[q]
        assert_same_bits(left.values(), right.values())
        kinds.add((p.dtype, left["exp_avg"].dtype))
    moments = {torch.uint8} if name == "AdamW8bit" else {BF16}
    assert kinds >= {(BF16, dtype) for dtype in moments} and {p for p, _ in kinds} == {BF16, F32}


@pytest.mark.parametrize(
    "error, match, options",
    [
        (ValueError, "dtype must be one of", {"dtype": torch.float64}),
        (ValueError, "nothing with the name 'blocks.*'", {"keep": ["blocks.*"]}),
        (ValueError, "does not have this Linear", {"keep": [nn.Linear(1, 1)]}),
        (ValueError, "no module of the class Conv2d", {"keep": [nn.Linear, nn.Conv2d]}),
        (ValueError, "no parameter or buffer with the name 'x.freqs'", {"cast": "x.freqs"}),
        (TypeError, "keep wants modules", {"keep": [torch.float32]}),
        (TypeError, "cast wants names", {"cast": [nn.Linear]}),
    ],
)
def test_a_refused_call_changes_nothing(error, match, options):
    net = Net()
    before = dtypes(net)
    with pytest.raises(error, match=match):
        headroom.cast_model(net, **options)
    assert dtypes(net) == before and not net.norm._forward_hooks


def test_a_cast_that_is_interrupted_loses_no_gradient_and_can_be_repeated():
    def made():
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 2))
        model(torch.randn(3, 4)).square().sum().backward()
        return model

    wanted = made()
    with Interrupting() as counting:
        headroom.cast_model(wanted)
    for after in range(counting.count):
        model = made()
        with Interrupting(after), pytest.raises(KeyboardInterrupt):
            headroom.cast_model(model)
        assert all(p.grad is not None and p.grad.dtype == p.dtype for p in model.parameters())
        headroom.cast_model(model)
        for p, other in zip(model.parameters(), wanted.parameters()):
            assert_same_bits((p.data, p.grad), (other.data, other.grad))
