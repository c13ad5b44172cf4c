"""Plans of steps whose losses never make the logits, against what such steps allocate."""

import functools

import headroom
import headroom.memory
import pytest
import torch
from torch import nn

TOKENS, CLASSES, HIDDEN, TEACHER = 300, 1003, 40, 56


class Student(nn.Module):
    def __init__(self, dtype, is_frozen, bias):
        super().__init__()
        self.body = nn.Linear(24, HIDDEN, dtype=dtype)
        self.head = nn.Linear(HIDDEN, CLASSES, bias=bias, dtype=dtype)
        self.head.requires_grad_(not is_frozen)
        self.register_buffer("teacher", torch.randn(CLASSES, TEACHER).to(dtype))


def compare(forward, dtype, is_frozen=False, bias=False, **options):
    """Plans a step and runs two, and returns the plan."""
    model = Student(dtype, is_frozen, bias)
    batch = (
        torch.randn(TOKENS, 24).to(dtype),
        torch.randn(TOKENS, TEACHER).to(dtype),
        torch.arange(TOKENS),
    )
    plan = headroom.plan(model, None, batch, forward=forward, **options)
    with headroom.memory.track(model, batch=batch, stacks=False) as tracked:
        for _ in range(2):
            forward(model, batch).backward()
            model.zero_grad()
    assert plan.peak_bytes == pytest.approx(tracked.peak_bytes, rel=0.001)
    return plan


def distilled(model, batch, is_masked=False, **options):
    x, teacher, target = batch
    return headroom.linear_distillation_loss(
        model.body(x),
        model.head.weight,
        teacher,
        model.teacher,
        target if is_masked else None,
        student_bias=model.head.bias,
        **options,
    ).sum()


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize(
    "is_frozen, options",
    (
        (False, {"divergence": "forward_kl"}),
        (True, {"divergence": "forward_kl", "is_masked": True}),
        (False, {"divergence": "reverse_kl", "reduction": "none", "is_masked": True}),
        (True, {"divergence": "js", "reduction": "none"}),
        (False, {"divergence": "js", "reduction": "sum", "workspace": "400 KiB"}),
    ),
    ids=str,
)
def test_distillation(is_frozen, options, dtype):
    compare(functools.partial(distilled, **options), dtype, is_frozen, bias=True)


def test_the_chunks_of_a_plan_belong_to_the_loss():
    plan = compare(distilled, torch.float32)
    pitch = (CLASSES + 7) // 8 * 8
    # 300 tokens are two chunks of 150, each with the logits of student and teacher.
    buffers = [a for a in plan.timeline.allocations if a.bytes == 4 * 150 * pitch]
    assert len(buffers) == 2 * 2  # of two steps
    assert {a.op for a in buffers} == {"headroom::linear_divergence"}
    assert {a.kind for a in buffers} == {"temporaries"}


def test_distillation_on_a_gpu():
    """Its chunks are longer there, and nobody looks for the tokens that count."""
    model = Student(torch.bfloat16, False, True)
    batch = (
        torch.randn(2048, 24).bfloat16(),
        torch.randn(2048, TEACHER).bfloat16(),
        torch.arange(2048),
    )
    forward = functools.partial(distilled, is_masked=True)
    plan = headroom.plan(model, None, batch, forward=forward, device="cuda")
    pitch = (CLASSES + 7) // 8 * 8
    buffers = [a for a in plan.timeline.allocations if a.bytes == 4 * 1024 * pitch]
    assert len(buffers) == 2 * 2


@pytest.mark.parametrize(
    "dtype, is_frozen", ((torch.float32, False), (torch.bfloat16, True)), ids=str
)
def test_losses_of_targets(dtype, is_frozen):
    def entropy(model, batch):
        head = model.head
        return headroom.linear_cross_entropy(
            model.body(batch[0]), head.weight, batch[2], head.bias, workspace="200 KiB"
        )

    def log_prob(model, batch):
        head = model.head
        found = headroom.linear_log_prob(
            model.body(batch[0]), head.weight, batch[2], head.bias, return_entropy=True
        )
        return found[0].sum()

    for forward in (entropy, log_prob):
        compare(forward, dtype, is_frozen, bias=True)


def test_losses_of_targets_on_a_gpu_that_is_not_there(monkeypatch):
    """The order of computation, and with it the bytes, are those of the GPU that plans are for."""
    with torch.device("meta"):
        head = nn.Linear(2048, 60_000, bias=False, dtype=torch.bfloat16)
    batch = torch.empty(4096, 2048, dtype=torch.bfloat16, device="meta"), torch.arange(4096)

    def forward(model, batch):
        return headroom.linear_cross_entropy(batch[0], model.weight, batch[1])

    # A copy of the rows; 5 tiles of logits, or 4 chunks; what products may use. Sums over chunks
    # have a second half, and their addends are 32 MiB.
    vocabulary = 2 * 4096 * 2048 + 4 * 4096 * 12_032 + (32 << 20)
    tokens = 2 * 1024 * 2048 + 4 * 1024 * 60_032 + 2 * 60_000 * 2048 + (32 << 20) + (8320 << 10)
    for capability, expected in (((9, 0), vocabulary), ((8, 6), tokens)):
        monkeypatch.setattr(headroom.planning.device, "capability", lambda c=capability: c)
        monkeypatch.setattr(
            headroom.planning.headroom_workspaces, "capability", lambda c=capability: c
        )
        plan = headroom.plan(head, None, batch, forward=forward, device="cuda")
        ops = [a for a in plan.timeline.allocations if a.kind == "temporaries" and a.op]
        found = max(a.bytes for a in ops if a.op == "headroom::linear_cross_entropy")
        assert found == pytest.approx(expected, rel=0.003)


def test_gradients_that_a_loss_has_made_are_scaled_in_place():
    """The forward pass makes them. If the backward pass of a plan took others, it would have the
    peak, as the gradient of the head is large here."""
    model, batch = nn.Linear(400, CLASSES), (torch.randn(30, 400), torch.arange(30))

    def forward(model, batch):
        return headroom.linear_cross_entropy(batch[0], model.weight, batch[1], model.bias)

    plan = headroom.plan(model, None, batch, forward=forward)
    with headroom.memory.track(model, batch=batch, stacks=False) as tracked:
        forward(model, batch).backward()
    assert plan.peak_bytes == pytest.approx(tracked.peak_bytes, rel=0.001)


@pytest.mark.parametrize("reduction", ("mean", "sum"))
@pytest.mark.parametrize("name", ("mse_loss", "smooth_l1_loss", "huber_loss"))
def test_losses_that_are_reduced_in_memory_of_their_own(name, reduction):
    loss = functools.partial(getattr(nn.functional, name), reduction=reduction)

    def forward(model, batch):
        x = model.body(batch[0])
        return loss(x, torch.zeros_like(x))

    compare(forward, torch.float32)
