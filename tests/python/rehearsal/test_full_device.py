"""Steps that run out of a device's memory for real, with drawn numbers of bytes left for them: they
leave everything as it was, and go on with the bits of a step that had enough."""

import contextlib
import ctypes
import functools
import gc
import random
import re
import traceback

import headroom
import pytest
import torch
from headroom.host import saved
from headroom.memory import format_bytes, load_snapshot, parse_bytes, snapshot
from headroom.retrying.retry import NONE_IS_LEFT

from helpers.retrying import Run, assert_same_state, quietly, said

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("runtime")]
KiB, MiB = 1 << 10, 1 << 20
BLOCK = 512  # bytes, of which torch's allocator gives multiples


def allocated():
    """Returns the bytes of all tensors that can be reached."""
    gc.collect()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


def gap():
    """Returns the most bytes that a small request would find without asking the device."""
    segments = (s for s in torch.cuda.memory_snapshot() if s["segment_type"] == "small")
    blocks = (b for s in segments for b in s["blocks"] if b["state"] == "inactive")
    return max((block["size"] for block in blocks), default=0)


@pytest.fixture
def held_to(runtime):
    @contextlib.contextmanager
    def held_to(room):
        """Leaves the allocator so many bytes, in one piece; others have the rest of the device."""
        allocated()
        torch.cuda.empty_cache()
        left = torch.empty(room, dtype=torch.uint8, device="cuda")
        others, free = ctypes.c_void_p(), torch.cuda.mem_get_info()[0]
        assert runtime.cudaMalloc(ctypes.byref(others), ctypes.c_size_t(free)) == 0
        filling = []
        while size := min(gap(), MiB):  # larger requests have segments of their own
            filling.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
        del left
        try:
            yield
        finally:
            filling.clear()
            assert runtime.cudaFree(others) == 0

    return held_to


@pytest.fixture(autouse=True)
def _small(runtime, monkeypatch):
    """Products take less scratch memory than there is in a small segment, and what is saved leaves
    for the host however small it is."""
    monkeypatch.setattr(saved, "MIN_BYTES", 64)
    sizes = torch.backends.cuda.cublas_workspace_size, torch.backends.cuda.cublaslt_workspace_size
    before = [size() for size in sizes]
    for size in sizes:
        size(KiB)
    yield
    for size, was in zip(sizes, before, strict=True):
        size(was)
    headroom.host.trim()


class Training(Run):
    """A language model with dropout, of which a subclass may have other sizes and optimizers."""

    optimizer_of = functools.partial(headroom.optim.AdamW, lr=0.01)
    features, rows = 12, 8
    can_be_leaner = True  # so that a step with a little less memory has enough

    def made(self, save):
        torch.manual_seed(1)
        config = headroom.nn.TransformerConfig(
            vocab_size=11, hidden_size=8, layers=3, heads=2, features=self.features, dropout=0.2
        )
        self.model = headroom.nn.Transformer(config, save=save, device="cuda")
        self.optimizer = self.optimizer_of(self.model.parameters())

    def plain(self, batch):
        self.model(batch).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def batch(self):
        generator = torch.Generator().manual_seed(5)
        return torch.randint(11, (self.rows, 7), generator=generator).cuda()

    def others(self):
        return {"cuda": torch.cuda.get_rng_state()}

    def state(self):
        return {name: value.cpu() for name, value in super().state().items()}


class EightBit(Training):
    """A step whose optimizer takes the most."""

    optimizer_of = functools.partial(headroom.optim.AdamW8bit, lr=0.01)
    features, rows = 512, 1
    can_be_leaner = False


class Scaled(Training):
    """Micro-batches in mixed precision."""

    more = ("scaler", "accumulator")

    def made(self, save):
        super().made(save)
        self.scaler = headroom.amp.GradScaler("cuda", init_scale=8.0, growth_interval=1)
        self.accumulator = headroom.GradAccumulator(self.model)

    def plain(self, batch):
        for part in batch.chunk(2):
            with torch.autocast("cuda", torch.float16):
                loss = self.model(part).square().mean()
            with self.accumulator.micro_batch():
                self.scaler.scale(loss).backward()
        self.accumulator.finish()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()

    def others(self):
        return super().others() | self.scaler.state_dict()


class Paged(EightBit):
    """States that are on the device as long as there is room."""

    optimizer_of = functools.partial(headroom.optim.AdamW, lr=0.01, offload="state", budget=MiB)
    can_be_leaner = True


class SavedOnHost(Training):
    """Saved tensors that leave the device."""

    def made(self, save):
        super().made(f"{save}@host")


KINDS = [Training, EightBit, Scaled, Paged, SavedOnHost]


def begun(kind, save="L0", step=0):
    """Returns a run before this step."""
    run = kind(save)
    torch.cuda.manual_seed(7)
    for _ in range(step):
        run.step(run.batch())
    return run


def bytes_of_step(run):
    """Does a step, and returns how many bytes it takes beyond what is there."""
    before = allocated()
    torch.cuda.reset_peak_memory_stats()
    run.step(run.batch())
    return torch.cuda.max_memory_allocated() - before


def rooms(run, name):
    """Draws numbers of bytes that the next step of a run, which is done, does not get by with:
    mostly a few less than it takes, where a leaner one may have enough."""
    before = allocated()
    torch.cuda.reset_peak_memory_stats()
    run.step(run.batch())
    most = (torch.cuda.max_memory_allocated() - before) // BLOCK
    rng = random.Random(name)
    return [BLOCK * rng.randrange(int(share * most), most) for share in (0, 0.7, 0.85, 0.95)]


@pytest.mark.parametrize("step", [0, 1], ids=["first", "second"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_with_too_little_room_is_repeated_or_undone(kind, step, held_to):
    start = allocated()
    run = begun(kind, step=step)
    drawn = rooms(run, f"{kind.__name__} {step}")
    wanted, held = run.state(), allocated() - start
    del run
    repeated = 0
    for room in drawn:
        run = begun(kind, step=step)
        batch, before = run.batch(), run.state()
        try:
            with held_to(room):
                quietly(run.step, batch)
            assert run.step.retries
            repeated += 1
        except RuntimeError as error:
            assert NONE_IS_LEFT in said(error)
            assert_same_state(run.state(), before)
            run.step(batch)  # which has enough now
        assert_same_state(run.state(), wanted)
        del batch
        assert allocated() - start <= held  # less if states have left
        del run
        assert allocated() == start
    assert bool(repeated) == kind.can_be_leaner


def phase_of(error):
    """Returns which part of a step an error came from."""
    places = traceback.extract_tb(error.__traceback__)
    (line,) = (place.line for place in places if place.name == "plain")
    if "optimizer.step" in line:
        return "optimizer"
    return "backward" if any(place.name == "backward" for place in places) else "forward"


BY_TORCH = (
    r"Of the allocated memory (.*) is allocated by PyTorch, and (.*) is reserved by PyTorch but"
)


@pytest.mark.parametrize("kind", [Training, EightBit])
def test_the_explanation_of_a_step_that_has_too_little_room(kind, held_to, tmp_path):
    phases = set()
    for room in rooms(begun(kind, "L5"), kind.__name__):
        run = begun(kind, "L5")
        batch, before = run.batch(), run.state()
        path, options = tmp_path / "oom.pickle", {"oom_only": True, "advice": False}
        recording = snapshot(path, run.model, run.optimizer, **options)
        with pytest.raises(torch.OutOfMemoryError) as raised, recording, held_to(room):
            run.step(batch)
        found = load_snapshot(path)
        failure = found.out_of_memory[-1]
        live = sum(-(-a.bytes // BLOCK) * BLOCK for a in found.timeline.live(failure.event))
        in_use, unused = re.search(BY_TORCH, str(raised.value).replace("bytes", "B")).groups()
        assert live == pytest.approx(parse_bytes(in_use), abs=0.006 * MiB)
        free = re.search(r"held 2.00 MiB, of which (.*) were free;", recording.explanation)
        assert parse_bytes(free[1]) == pytest.approx(parse_bytes(unused), rel=0.01)
        phases.add(phase_of(raised.value))
        for text in (
            f"{format_bytes(failure.bytes)} were asked for",
            f"in step 0, {phase_of(raised.value)}.",
        ):
            assert text in recording.explanation
        assert "headroom_rehearsal/" not in recording.explanation  # no line of the user's
        assert recording.explanation in said(raised.value)
        assert_same_state(run.state(), before)
    assert phases == ({"backward"} if kind is Training else {"backward", "optimizer"})
