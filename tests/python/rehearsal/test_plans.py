"""Plans beside torch's allocator: what ``headroom.plan`` says of steps, and what the same steps
reach on the software device. The sizes are such that what is forgotten is above the tolerance."""

import gc
import random
from contextlib import contextmanager
from functools import partial

import headroom
import pytest
import torch
import torch.nn.functional as F
from headroom.optim import AdamW8bit
from headroom.planning.allocator import Allocator
from headroom.planning.allocator_settings import current_settings
from torch import nn

pytestmark = pytest.mark.cuda
MiB = 1 << 20
WIDTH, WORDS, TOKENS, STEPS = 256, 4096, 128, 3


class Layer(nn.Module):
    """A block of GPT-2, of torch's own operations."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = self.qkv(self.first(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.second(x))))


class Words(nn.Module):
    """Blocks between embeddings and logits."""

    def __init__(self, layers):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(WORDS, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.layers = nn.ModuleList(layers)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, ids):
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def bert():
    layer = partial(nn.TransformerEncoderLayer, WIDTH, 4, 4 * WIDTH, batch_first=True)
    return Words([layer(activation="gelu") for _ in range(3)])


def llama():
    config = headroom.nn.TransformerConfig(
        vocab_size=WORDS, hidden_size=WIDTH, layers=3, heads=4, kv_heads=2, features=688
    )
    return headroom.nn.Transformer(config)


def mlp():
    layers = [nn.Sequential(nn.Linear(1024, 1024), nn.GELU()) for _ in range(4)]
    return nn.Sequential(nn.Embedding(WORDS, 1024), *layers, nn.Linear(1024, 512))


MODELS = {
    "mlp": mlp,
    "gpt2": lambda: Words(Layer() for _ in range(3)),
    "llama": llama,
    "bert": bert,
}
DTYPES = ["f32", "bf16", "autocast"]


def loss(model, ids):
    return F.cross_entropy(model(ids).flatten(0, 1).float(), ids.flatten() % 512)


def fused(model, ids):
    return model(ids, labels=ids)


def adapters(model):
    headroom.quantize(model)
    headroom.lora(model, 8)


remainders = partial(AdamW8bit, master="remainder16")
TECHNIQUES = {
    "plain": {},
    "8-bit": {"optimizer": AdamW8bit},
    "remainders": {"optimizer": remainders, "dtypes": ["bf16"]},
    "release": {"optimizer": AdamW8bit, "release": True},
    "state": {"optimizer": AdamW8bit, "offload": "state"},
    "step": {"optimizer": AdamW8bit, "offload": "step"},
    "saved on the host": {"save": "L0@host", "models": ["llama"]},
    "of each block": {"own": "L2@host", "models": ["llama"]},
    "weights": {"optimizer": AdamW8bit, "weights": "host", "models": ["gpt2", "llama", "bert"]},
    "weights and state": {
        "optimizer": AdamW8bit,
        "weights": "host",
        "offload": "state",
        "models": ["gpt2", "llama", "bert"],
    },
    "adapters": {"change": adapters, "models": ["gpt2", "llama"]},
    "accumulation": {"accumulation": 4},
    "accumulator": {"optimizer": AdamW8bit, "accumulation": 2, "accumulator": True},
    "scaler": {"scaler": True, "dtypes": ["f32", "autocast"]},
    "clipping": {"max_grad_norm": 1.0},
    "fused loss": {"forward": fused, "models": ["llama"]},
    "checkpoints": {"checkpoint_every": 1, "models": ["gpt2", "llama", "bert"]},
    "late": {"save": "L5", "models": ["llama"]},
}


def steps(model, optimizer, ids, forward=loss, **options):
    """Trains as the options of :func:`headroom.plan` say."""
    amp, count = options.get("amp"), options.get("accumulation", 1)
    scaler = torch.amp.GradScaler("cuda") if options.get("scaler") else None
    accumulator = headroom.GradAccumulator(model) if options.get("accumulator") else None
    if options.get("release"):
        headroom.release_gradients(model, optimizer)
    for _ in range(STEPS):
        for _ in range(count):
            with torch.autocast("cuda", amp, enabled=amp is not None):
                found = forward(model, ids)
            if accumulator is not None:
                with accumulator.micro_batch():
                    found.backward()
            else:
                found = found / count if count > 1 else found
                (found if scaler is None else scaler.scale(found)).backward()
            del found
        if accumulator is not None:
            accumulator.finish()
        if scaler is not None:
            scaler.unscale_(optimizer)
        if norm := options.get("max_grad_norm"):
            headroom.clip_grad_norm_(model.parameters(), norm)
        optimizer.step() if scaler is None else scaler.step(optimizer)
        if scaler is not None:
            scaler.update()
        optimizer.zero_grad()


def empty():
    """Gives all memory back. The engine's thread holds what it ran last until it runs another."""
    nothing = torch.zeros(0, device="cuda", requires_grad=True)
    nothing.backward(torch.zeros_like(nothing))
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


# The usual settings of the allocator, each of which stays until it is set again.
USUAL = (
    "expandable_segments:False,max_split_size_mb:1048576,max_non_split_rounding_mb:20,"
    "roundup_power2_divisions:[1:0,>:0]"
)


@contextmanager
def allocator_with(settings):
    """Changes the settings of the allocator, while it lasts, and limits it if memory is to be
    collected."""
    torch._C._accelerator_setAllocatorSettings(",".join(filter(None, (USUAL, settings))))
    if "garbage" in settings:
        torch.cuda.set_per_process_memory_fraction(0.3)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        empty()
        torch._C._accelerator_setAllocatorSettings(USUAL)


@pytest.fixture(autouse=True)
def _on_the_device(runtime):
    empty()  # what other tests have left would be a place for the model
    yield
    headroom.host.trim()


CASES = [  # only those that mean something, since a sample takes the first of each
    (name, dtype, technique)
    for name in MODELS
    for dtype in DTYPES
    for technique, options in TECHNIQUES.items()
    if name in options.get("models", MODELS) and dtype in options.get("dtypes", DTYPES)
]


def planned_and_reached(name, dtype, technique):
    """Returns a plan of steps, and the most bytes that are allocated and reserved in them."""
    options = {k: v for k, v in TECHNIQUES[technique].items() if k not in ("models", "dtypes")}
    make = partial(options.pop("optimizer", torch.optim.AdamW), lr=1e-3)
    if dtype == "autocast":
        options["amp"] = torch.float16 if "scaler" in options else torch.bfloat16
    torch.manual_seed(0)
    model = MODELS[name]()
    options.pop("change", lambda model: None)(model)
    model.to("cuda", torch.bfloat16 if dtype == "bf16" else None)
    if own := options.pop("own", ""):
        for block in model.blocks:  # the last one, too
            block.save = own
    ids = torch.randint(WORDS, (4, TOKENS), device="cuda")
    options.setdefault("forward", loss)
    plan = headroom.plan(model, make, ids, **options)

    if "weights" in options:
        headroom.patch(model, weights="host")
    if "save" in options:
        model.save = options["save"]
    if "checkpoint_every" in options:
        headroom.checkpoint_every(model, options["checkpoint_every"])
    empty()
    torch.cuda.reset_peak_memory_stats()
    params = [p for p in model.parameters() if p.requires_grad]
    offload = options.get("offload")
    optimizer = make(params, **({} if offload is None else {"offload": offload}))
    steps(model, optimizer, ids, **options)
    return plan, torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()


def check(plan, *reached):
    for planned, most in zip((plan.allocated_bytes, plan.reserved_bytes), reached, strict=True):
        assert planned == pytest.approx(most, rel=1e-3, abs=MiB)


@pytest.mark.parametrize("name, dtype, technique", CASES)
def test_a_plan_is_what_the_allocator_reaches(name, dtype, technique):
    check(*planned_and_reached(name, dtype, technique))


SETTINGS = [
    "expandable_segments:True",
    "expandable_segments:True,roundup_power2_divisions:8",
    "max_split_size_mb:24",
    "max_split_size_mb:32,max_non_split_rounding_mb:40",
    "garbage_collection_threshold:0.02",
    "roundup_power2_divisions:[2:1,4:2,8:4,>:8]",
]


@pytest.mark.parametrize("settings", SETTINGS[1:3])
def test_a_plan_follows_the_settings_of_the_allocator(settings):
    with allocator_with(settings):
        check(*planned_and_reached("gpt2", "autocast", "plain"))


@pytest.mark.parametrize("settings", ["", *SETTINGS])
def test_drawn_requests_are_served_as_torch_serves_them(settings):
    draw, live = random.Random(0), []
    with allocator_with(settings):
        ours = Allocator(current_settings())
        before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        for _ in range(1000):
            turn = draw.random()
            if turn < 0.02:
                torch.cuda.empty_cache()
                ours.empty_cache()
            elif live and turn < 0.5:
                theirs, block = live.pop(draw.randrange(len(live)))
                torch.cuda.caching_allocator_delete(theirs)
                ours.free(block)
            else:
                size = draw.randint(1, draw.choice([3000, 2 * MiB, 12 * MiB, 40 * MiB]))
                live.append((torch.cuda.caching_allocator_alloc(size), ours.allocate(size)))
            there = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
            assert tuple(n - m for n, m in zip(there, before)) == (ours.allocated, ours.reserved)
        for theirs, _ in live:
            torch.cuda.caching_allocator_delete(theirs)
