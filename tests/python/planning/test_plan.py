"""``headroom.plan``: what it predicts, against bytes counted by hand and by the real counter."""

import json

import headroom
import pytest
import torch
import torch.nn.functional as F
from headroom.memory import track
from headroom.planning import Plan
from headroom.planning.trace import trace
from headroom.step.description import Step
from torch import nn
from torch.utils.checkpoint import checkpoint

ROWS, IN, HIDDEN, OUT = 128, 64, 256, 10
PARAMETERS = 4 * (HIDDEN * IN + HIDDEN + OUT * HIDDEN + OUT)
BATCH = 4 * ROWS * IN + 8 * ROWS
WIDE = 4 * ROWS * HIDDEN  # an activation of the hidden layer


def mlp():
    return nn.Sequential(nn.Linear(IN, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, OUT))


def batch():
    return torch.randn(ROWS, IN), torch.randint(OUT, (ROWS,))


def planned(model, optimizer, sample=None, loss=F.cross_entropy, **options):
    return headroom.plan(
        model, optimizer, batch() if sample is None else sample, loss=loss, **options
    )


def test_an_mlp_is_what_a_hand_counts():
    model = mlp()
    model[0].register_buffer("table", torch.zeros(100))
    plan = planned(model, torch.optim.AdamW(model.parameters()))
    steps = 4 * 4  # counters of the four parameters
    kinds = plan.peak_by_kind
    assert kinds["parameters"] == PARAMETERS and kinds["buffers"] == 400
    owners = {(owner.kind, owner.module, owner.op): owner.bytes for owner in plan.peak_owners}
    assert owners["buffers", "0", "0.table"] == 400 and owners["batch", None, "batch"] == BATCH
    assert owners["parameters", "2", "2.weight"] == 4 * OUT * HIDDEN
    assert kinds["optimizer_state"] == 2 * PARAMETERS + steps
    # At the peak the ReLU goes backward: its result and two gradients of that size exist.
    assert kinds["gradients"] == 4 * (OUT * HIDDEN + OUT)
    assert kinds["activations"] + kinds["batch"] == WIDE + BATCH
    assert kinds["temporaries"] == 2 * WIDE + 8  # the loss, and its gradient
    assert plan.peak_bytes == sum(kinds.values())
    assert plan.timeline.most_by_kind["gradients"] == PARAMETERS
    assert plan.timeline.span(plan.timeline.peak_index)[1:] == (1, "backward")


def test_the_first_step_has_no_state_before_it():
    model = mlp()
    plan = planned(model, torch.optim.AdamW(model.parameters()))
    assert plan.steady - plan.first_step == 2 * PARAMETERS + 16


class Attending(nn.Module):
    """Convolution, attention, norms, dropout, an embedding whose weights are tied."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(64, 32)
        self.norm, self.out = nn.LayerNorm(32), nn.Linear(32, 64, bias=False)
        self.qkv, self.drop = nn.Linear(32, 96), nn.Dropout(0.1)
        self.out.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        rows, length, _ = x.shape
        q, k, v = self.qkv(self.norm(x)).view(rows, length, 3, 4, 8).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(x + self.drop(y.transpose(1, 2).reshape(x.shape))).flatten(0, 1)


def tokens():
    x = torch.randint(64, (4, 16))
    return x, x.flatten()


def measured(model, optimizer, sample, loss, accumulation=1):
    with track(model, optimizer, batch=sample, stacks=False) as tracked:
        for _ in range(2):
            for _ in range(accumulation):
                found = loss(model(sample[0]), sample[1])
                (found / accumulation if accumulation > 1 else found).backward()
                del found
            optimizer.step()
            optimizer.zero_grad()
    return tracked.timeline


@pytest.mark.parametrize(
    "make",
    [
        torch.optim.AdamW,
        lambda params: torch.optim.SGD(params, momentum=0.9),
        headroom.optim.AdamW,
        headroom.optim.AdamW8bit,
        headroom.optim.Adafactor,
    ],
)
@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_plan_is_what_a_run_takes(make, accumulation):
    torch.manual_seed(0)
    model, sample = Attending(), tokens()
    plan = planned(model, make(model.parameters()), sample, accumulation=accumulation)
    real = measured(model, make(model.parameters()), sample, F.cross_entropy, accumulation)
    assert plan.peak_bytes == pytest.approx(real.peak_bytes, rel=0.01)
    for kind in ("parameters", "optimizer_state", "gradients"):
        assert plan.timeline.most_by_kind[kind] == real.most_by_kind[kind], kind


class Narrow(nn.Module):
    """Blocks, and a Linear that is patched where its products are slow."""

    def __init__(self, dtype):
        super().__init__()
        config = headroom.nn.TransformerConfig(
            vocab_size=64, hidden_size=64, layers=2, heads=4, features=128, dropout=0.0, head=False
        )
        self.body = headroom.nn.Transformer(config, save="L1", dtype=dtype)
        self.out = nn.Linear(64, 64, dtype=dtype)
        headroom.patch(self.out)

    def forward(self, tokens):
        return self.out(self.body(tokens)).flatten(0, 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_in_16_bits_have_no_scratch_memory_of_their_own(dtype):
    """Nor has the gradient of attention, which is computed in float32 where they are slow, any that
    a plan does not know."""
    model, sample = Narrow(dtype), tokens()
    plan = planned(model, headroom.optim.AdamW(model.parameters()), sample)
    real = measured(model, headroom.optim.AdamW(model.parameters()), sample, F.cross_entropy)
    assert plan.peak_bytes == pytest.approx(real.peak_bytes, rel=0.01)


def test_checkpoints_and_save_levels_keep_fewer_activations():
    config = headroom.nn.TransformerConfig(
        vocab_size=64, hidden_size=32, features=64, layers=3, heads=4
    )
    model = headroom.nn.Transformer(config)
    sample = torch.randint(64, (2, 32))

    def most(**options):
        plan = headroom.plan(model, None, sample, forward=summed, **options)
        return plan.timeline.peaks_by_phase()["forward"]

    def summed(model, sample):
        return model(sample).float().mean()

    levels = [most(save=level) for level in ("L0", "L1", "L2", "L3", "L4", "L5")]
    assert levels == sorted(levels, reverse=True) and len(set(levels)) >= 4
    assert most(checkpoint_every=1) < most(checkpoint_every=2) < most()


class Dropping(nn.Module):
    """Small blocks that torch checkpoints: the states of generators are most of what they keep."""

    def __init__(self, drop):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 16), nn.Dropout(drop), nn.Tanh(), nn.Linear(16, 16))
            for _ in range(6)
        )

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x.square().mean()


class DroppingMLP(headroom.nn.MLP):
    """An MLP of which a block does not know that it draws."""

    drop = 0.0

    def activate(self, *parts):
        x = super().activate(*parts)
        return F.dropout(x, self.drop) if self.drop else x


def dropping_transformer(drop):
    config = headroom.nn.TransformerConfig(
        vocab_size=20, hidden_size=16, features=24, layers=5, heads=2, save="L5"
    )
    model = headroom.nn.Transformer(config)
    for block in model.blocks:
        block.mlp.__class__, block.mlp.drop = DroppingMLP, drop
    return model


@pytest.mark.parametrize("make", [Dropping, dropping_transformer])
@pytest.mark.parametrize("drop", [0.0, 0.3])
def test_states_of_generators_that_are_kept(make, drop):
    """Torch's checkpoints keep one each, Headroom's where something was drawn."""
    model = make(drop)
    x = torch.randn(9, 16) if make is Dropping else torch.randint(20, (2, 5))

    def loss(model, x):
        return model(x).float().mean()

    plan = headroom.plan(model, None, x, forward=loss)
    with track(model, batch=x, stacks=False) as tracked:
        for _ in range(2):
            loss(model, x).backward()
            model.zero_grad()
    assert plan.peak_bytes == tracked.peak_bytes


def test_blocks_that_draw_a_seed_are_planned():
    """Its value is asked for, which fakes do not have and which changes no size."""
    config = headroom.nn.TransformerConfig(
        vocab_size=64, hidden_size=32, features=64, layers=2, heads=4, dropout=0.1
    )
    model, ids = headroom.nn.Transformer(config), torch.randint(64, (2, 32))
    plan = headroom.plan(model, None, ids, forward=lambda model, ids: model(ids).square().mean())
    with track(model, batch=ids, stacks=False) as tracked:
        for _ in range(2):
            model(ids).square().mean().backward()
            model.zero_grad()
    assert plan.peak_bytes == pytest.approx(tracked.peak_bytes, rel=0.01)


def test_release_gives_gradients_back_within_backward():
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
    optimizer = headroom.optim.AdamW(model.parameters())
    step = Step(
        model,
        optimizer,
        torch.randn(4, 64),
        forward=lambda m, x: m(x).mean(),
        device=torch.device("cpu"),
    )
    all_of_them = trace(step).most_by_kind["gradients"]
    assert all_of_them == 4 * 8 * (64 * 64 + 64)
    assert trace(step.but(release=1 << 14)).most_by_kind["gradients"] <= all_of_them / 2


def test_autocast_keeps_copies_of_weights_in_16_bits():
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters())
    for device in ("cpu", "cuda"):
        plan = planned(model, optimizer, device=device, amp=torch.bfloat16)
        saved = [a for a in plan.timeline.allocations if a.kind == "activations"]
        assert 2 * OUT * HIDDEN in [a.bytes for a in saved], device
        assert plan.timeline.device == device


def test_cuda_is_planned_without_a_gpu():
    model = Attending().bfloat16()
    plan = planned(model, torch.optim.AdamW(model.parameters()), tokens(), device="cuda")
    ops = {a.op for a in plan.timeline.allocations}
    assert "aten::_scaled_dot_product_flash_attention" in ops
    assert "aten::_foreach_sqrt" in ops  # what torch chooses on CUDA
    assert plan.device_share.context > 0 and plan.device_share.fragmentation >= 0
    assert plan.total_bytes == plan.peak_bytes + plan.device_share.bytes


def test_a_model_on_the_meta_device():
    with torch.device("meta"):
        model = mlp()
    plan = planned(model, torch.optim.AdamW, device="cpu")
    assert plan.peak_by_kind["parameters"] == PARAMETERS


def test_as_text_and_as_json(tmp_path):
    model = mlp()
    plan = planned(model, torch.optim.AdamW(model.parameters()), device="cuda")
    text = str(plan)
    assert max(map(len, text.splitlines())) <= 80
    assert "parameters" in text and "CUDA context" in text
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert str(loaded) == text and loaded.total_bytes == plan.total_bytes
    assert loaded.to_json() == json.loads(json.dumps(plan.to_json()))
    with pytest.raises(ValueError, match="loaded from a file"):
        loaded.advice()
    with pytest.raises(ValueError, match="not a plan"):
        Plan.from_json({"format": "other"})


def test_advice_is_planned_again_and_can_be_pasted():
    layers = [nn.Embedding(8, 256), *(nn.Linear(256, 256) for _ in range(4)), nn.Linear(256, 10)]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    plan = planned(model, optimizer, (torch.tensor([7, 5]), torch.tensor([1, 2])))
    advice = plan.advice()
    assert [a.bytes for a in advice] == sorted((a.bytes for a in advice), reverse=True)
    found = {a.name: a for a in advice}
    eight = found["headroom.optim.AdamW8bit"]
    assert eight.bytes == plan.total_bytes - eight.plan.total_bytes > 0
    made = {"headroom": headroom, "model": model}
    exec(eight.code, made)
    assert type(made["optimizer"]) is headroom.optim.AdamW8bit
    assert made["optimizer"].param_groups[0]["lr"] == 1e-2
    assert any("bfloat16" in name for name in found)
    assert len(plan.advice(top=1)) == 1


def test_gradients_that_stay_between_steps():
    """They exist in the forward pass of the second step, and are written in place."""
    model, sample = Attending(), tokens()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    with track(model, optimizer, batch=sample, stacks=False) as tracked:
        for _ in range(2):
            F.cross_entropy(model(sample[0]), sample[1]).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
    kept = planned(model, optimizer, sample, set_to_none=False)
    assert kept.peak_bytes == pytest.approx(tracked.peak_bytes, rel=0.01)
    plain = planned(model, optimizer, sample)
    gradients = plain.timeline.most_by_kind["gradients"]
    peaks = [plan.timeline.peaks()[1, "forward"] for plan in (plain, kept)]
    assert peaks[1] - peaks[0] == gradients and "set to none off" in str(kept)
    for name in ("release", "accumulator"):
        with pytest.raises(ValueError, match=f"set_to_none=False keeps gradients, which {name}"):
            planned(model, optimizer, sample, set_to_none=False, **{name: True})


def test_fits_and_max_batch():
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters())
    most = headroom.max_batch(model, optimizer, batch(), loss=F.cross_entropy, budget="1 MiB")

    def sized(rows):
        return torch.randn(rows, IN), torch.randint(OUT, (rows,))

    def fits(rows):
        return headroom.fits(model, optimizer, sized(rows), loss=F.cross_entropy, budget=1 << 20)

    assert fits(most) and not fits(most + 1)
    assert headroom.max_batch(model, optimizer, batch(), loss=F.cross_entropy, budget=1) == 0
    with pytest.raises(ValueError, match="no tensor"):
        headroom.max_batch(model, optimizer, {"n": 1}, budget="1 MiB")


def test_a_prefetcher_holds_the_next_batch_on_a_gpu():
    def kinds(**options):
        model = mlp()
        plan = planned(model, torch.optim.AdamW(model.parameters()), **options)
        return plan.peak_by_kind["batch"], plan.timeline.most_by_kind["batch"], plan.options

    assert kinds(device="cpu", prefetch=True)[:2] == kinds(device="cpu")[:2]
    alone, most, _ = kinds(device="cuda")
    ahead, most_ahead, options = kinds(device="cuda", prefetch=True)
    assert alone == most == BATCH and options["prefetch"] == "on"
    assert ahead == 2 * BATCH  # while a step runs
    assert most_ahead == 3 * BATCH  # in front of it, until the loop lets go of the last one
