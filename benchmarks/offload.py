"""What the host costs: a step whose states are in the arena, and a GPT whose blocks keep what they
save there, each beside the same without it and plain copies of as many bytes; a step whose states
come over a slow link, beside what a simulation says; and a step on the host."""

from __future__ import annotations

import importlib
import os
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch

from ._link import Throttled
from ._model import GPT2_MEDIUM, Shapes, filled_like, model_for
from .harness import Bar, Case, Contender, Share, Unavailable

F32, BF16 = torch.float32, torch.bfloat16
COPIES = "without, then copies"
BNB, TORCHAO, DEEPSPEED = "bitsandbytes 8-bit", "torchao 8-bit", "DeepSpeed CPUAdam, f32"
FILES = "without, then reads and writes"
HIDDEN = "0.7 of it hidden"
SIMULATED = "simulated"
SLOWER = "the slower of both"
PIECE = 16 << 20
LINK = 2e9  # bytes/s
LAYERS = 24
SLOT = 4 << 20  # as 16 MiB, the default, are to a link of 8 GB/s


class Copies:
    """As many bytes, out of the cache, in pieces to a place and back."""

    def __init__(self, down: int, up: int) -> None:
        self._far = torch.zeros(max(down, up), dtype=torch.uint8)
        self._near = torch.zeros(PIECE, dtype=torch.uint8)
        self._down, self._up = down, up

    def __call__(self) -> None:
        for size, is_up in ((self._up, True), (self._down, False)):
            for first in range(0, size, PIECE):
                far = self._far[first : min(first + PIECE, size)]
                near = self._near[: far.numel()]
                (near if is_up else far).copy_(far if is_up else near)


# ---- States --------------------------------------------------------------------------------------


def _optimizer(
    kind: str, shapes: Shapes, dtype: torch.dtype, step: bool = True, **options: Any
) -> Any:
    import headroom

    params = [torch.nn.Parameter(x) for x in filled_like(shapes, dtype, torch.device("cpu"))]
    for param, grad in zip(params, filled_like(shapes, dtype, torch.device("cpu"))):
        param.grad = grad
    optimizer = getattr(headroom.optim, kind)(params, **options)
    if step:
        optimizer.step()
    return optimizer


def states(name: str, kind: str, dtype: torch.dtype, shapes: Shapes, **options: Any) -> Case:
    """`step()`, with the defaults but for the dtype."""

    def setup(device: torch.device) -> dict[str, Any]:
        def offloaded() -> Contender:
            optimizer = _optimizer(kind, shapes, dtype, offload="state", **options)
            return Contender(optimizer.step)

        def resident() -> Contender:
            return Contender(_optimizer(kind, shapes, dtype, **options).step)

        def resident_and_copies() -> Contender:
            paged = _optimizer(kind, shapes, dtype, offload="state", **options)
            size = paged._paging.memory(paged).host
            optimizer, copies = _optimizer(kind, shapes, dtype, **options), Copies(size, size)

            def call() -> None:
                optimizer.step()
                copies()

            return Contender(call)

        return {"headroom": offloaded, "without": resident, COPIES: resident_and_copies}

    what = f"{kind}, {str(dtype).removeprefix('torch.')}: step() with its states in the arena"
    return Case(name, what, setup, COPIES, bars=[Bar("ratio", 1 / 1.15, "cpu")])


def in_files(shapes: Shapes) -> Case:
    """`step()` with its states in files, beside plain reads and writes of as many bytes."""

    def setup(device: torch.device) -> dict[str, Any]:
        import headroom

        folder = tempfile.gettempdir()

        def offloaded() -> Contender:
            optimizer = _optimizer("AdamW", shapes, F32)
            headroom.optim.offload(optimizer, host=headroom.HostArena(file=folder))
            return Contender(optimizer.step)

        def resident() -> Contender:
            return Contender(_optimizer("AdamW", shapes, F32).step)

        def resident_and_files() -> Contender:
            optimizer = _optimizer("AdamW", shapes, F32)
            size = sum(x.nbytes for entry in optimizer.state.values() for x in entry.values())
            file = tempfile.TemporaryFile(dir=folder)
            os.posix_fallocate(file.fileno(), 0, size)
            memory = memoryview(torch.zeros(PIECE, dtype=torch.uint8).numpy())

            def call() -> None:
                optimizer.step()
                for first in range(0, size, PIECE):
                    piece = [memory[: min(PIECE, size - first)]]
                    os.preadv(file.fileno(), piece, first)
                    os.pwritev(file.fileno(), piece, first)

            return Contender(call)

        return {"headroom": offloaded, "without": resident, FILES: resident_and_files}

    what = "AdamW, float32: step() with its states in files"
    return Case("states-in-files", what, setup, FILES, bars=[Bar("ratio", 1 / 1.3, "cpu")])


def over_a_link(name: str, kind: str, dtype: torch.dtype, shapes: Shapes, **options: Any) -> Case:
    """A step on one core, while threads copy on another as a link would, until all is stored.

    The other contenders step with resident states, and then sleep for as long as the rest takes:
    where the copies, or 30 % of what they could run beside, come after it, and in a simulation
    with the rates and pieces of the link.
    """

    def setup(device: torch.device) -> dict[str, Any]:
        import headroom
        from headroom.host.schedule import measured, paged_step

        link = Throttled(LINK)
        paged = _optimizer(kind, shapes, dtype, step=False, **options)
        headroom.optim.offload(paged, bucket_bytes=SLOT)
        paged._paging.engine_of = lambda device: link
        paged.step()
        pieces = _pieces(paged)
        resident = _optimizer(kind, shapes, dtype, **options)
        rates, copying = measured(link, device), sum(pieces) / LINK

        def offloaded() -> None:
            paged.step()
            paged.offload_handle.wait()

        def until(end: Callable[[float], float]) -> Callable[[], Contender]:
            return lambda: Contender(_on_one_core(_then_asleep(resident.step, end)))

        return {
            "headroom": lambda: Contender(_on_one_core(offloaded)),
            "without": lambda: Contender(_on_one_core(resident.step)),
            COPIES: until(lambda step: step + copying),
            HIDDEN: until(lambda step: max(step, copying) + 0.3 * min(step, copying)),
            SIMULATED: until(lambda step: paged_step(pieces, step, rates).makespan),
        }

    what = f"{kind}, {str(dtype).removeprefix('torch.')}: step() on one core, over 2 GB/s each way"
    bars = [
        Share("time", "headroom", HIDDEN, 1.0, "cpu"),
        Share("time", "headroom", SIMULATED, 1.1, "cpu"),
    ]
    return Case(name, what, setup, COPIES, bars=bars)


def _on_one_core(call: Callable[[], object]) -> Callable[[], None]:
    """Leaves a core to the threads of a link."""

    def alone() -> None:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            call()
        finally:
            torch.set_num_threads(threads)

    return alone


def _pieces(optimizer: Any) -> list[int]:
    """Returns the bytes of the pieces that a step takes the states in."""
    from headroom.param_states.paging.parts import pieces_of

    paging, (group,) = optimizer._paging, optimizer.param_groups
    (ring,) = paging._rings.values()
    size = group.get("block_size", 1)
    return [
        sum(copy.size for copy in piece.up)
        for bucket in optimizer._plan(group).buckets
        for piece in pieces_of(bucket, paging._homes, ring, size)
    ]


# ---- The step on the host ------------------------------------------------------------------------


def _on_host(engine: Any, kind: str, shapes: Shapes, slot: int | None, **options: Any) -> Any:
    """Returns an optimizer that is stepped on the host although its parameters are there, too: they
    stand for those of a device, whose checksums take no time."""
    from headroom.host import HostArena
    from headroom.param_states.paging import Hosting, written

    def note(brought: Any) -> None:
        for local, home in brought:
            home.sums = local

    written.note, written.compare = note, lambda known, differs: differs.zero_()
    optimizer = _optimizer(kind, shapes, BF16, step=False, **options)
    hosting = optimizer._paging = Hosting(HostArena(), None, slot)
    hosting.engine_of = lambda device: engine
    hosting.adopt(optimizer)
    for _ in range(2):
        optimizer.step()
    return optimizer


def on_host(name: str, shapes: Shapes, beside_peers: bool = False) -> Case:
    """What the host computes in a step, with copies that take no time: on one core beside a step
    on resident states, so that another is left to the thread that begins the copies, or on all
    cores beside other libraries' steps on the host."""
    on_cores = (lambda call: call) if beside_peers else _on_one_core

    def setup(device: torch.device) -> dict[str, Any]:
        from headroom.host.engine import Inline

        class Nothing(Inline):
            """Copies until it is ready: what is stepped then are gradients, and not zeros."""

            is_asynchronous = True  # as that of a device is
            is_ready = False

            def _copy(self, queue: str, target: Any, source: Any, after: Any) -> None:
                if not self.is_ready:
                    super()._copy(queue, target, source, after)

        def peer(module: str, kind: str, dtype: torch.dtype = BF16) -> Callable[[], Contender]:
            def make() -> Contender:
                tensors = filled_like(shapes, dtype, torch.device("cpu"))
                params = [torch.nn.Parameter(x) for x in tensors]
                for param in params:
                    param.grad = torch.randn_like(param)
                try:
                    optimizer = getattr(importlib.import_module(module), kind)(params)
                except (ImportError, RuntimeError) as error:  # DeepSpeed compiles its op
                    raise Unavailable(f"not usable: {error}") from error
                return Contender(optimizer.step)

            return make

        def hosted() -> Contender:
            engine = Nothing()
            optimizer = _on_host(engine, "AdamW8bit", shapes, None, master="remainder16")
            engine.is_ready = True
            return Contender(on_cores(optimizer.step))

        def resident() -> Contender:
            optimizer = _optimizer("AdamW8bit", shapes, BF16, master="remainder16")
            return Contender(_on_one_core(optimizer.step))

        others: dict[str, Callable[[], Contender]] = {"without": resident}
        if beside_peers:
            others = {
                BNB: peer("bitsandbytes.optim", "AdamW8bit"),
                TORCHAO: peer("torchao.optim", "AdamW8bit"),
                # What ZeRO-Offload steps: weights, moments and gradients of 32 bits.
                DEEPSPEED: peer("deepspeed.ops.adam", "DeepSpeedCPUAdam", F32),
            }
        return {"headroom": hosted, **others}

    what = "AdamW8bit, bfloat16 with remainders: step() on the host without its copies"
    if beside_peers:
        bars = [
            Bar("ratio", 20, "cpu"),
            Bar("ratio", 30, "cpu", against=TORCHAO),
            Bar("ratio", 1.0, "cpu", against=DEEPSPEED),
        ]
        return Case(name, what, setup, BNB, bars=bars)
    return Case(name, f"{what}, one core", setup, "without", bars=[Bar("ratio", 0.95, "cpu")])


def on_host_over_a_link(shapes: Shapes) -> Case:
    """A step on the host on one core, while threads copy on another as a link would. The other
    contenders step with resident states, and sleep for as long as the rest takes."""

    def setup(device: torch.device) -> dict[str, Any]:
        from headroom.host.schedule import hosted_step, measured

        link = Throttled(LINK)
        away = _on_host(link, "AdamW8bit", shapes, SLOT, master="remainder16")
        resident = _optimizer("AdamW8bit", shapes, BF16, master="remainder16")
        rates, sizes = measured(link, device), _sizes(away)
        copying, total = 2 * sum(sizes) / LINK, sum(sizes)

        def offloaded() -> None:
            away.step()
            away.offload_handle.wait()

        def until(end: Callable[[float], float]) -> Callable[[], Contender]:
            return lambda: Contender(_on_one_core(_then_asleep(resident.step, end)))

        def simulated(step: float) -> float:
            seconds = [step * size / total for size in sizes]
            return hosted_step([(size, size) for size in sizes], seconds, rates).makespan

        return {
            "headroom": lambda: Contender(_on_one_core(offloaded)),
            "without": lambda: Contender(_on_one_core(resident.step)),
            COPIES: until(lambda step: step + copying),
            HIDDEN: until(lambda step: max(step, copying) + 0.3 * min(step, copying)),
            SIMULATED: until(simulated),
        }

    what = "AdamW8bit, bfloat16 with remainders: step() on the host, one core, over 2 GB/s each way"
    bars = [
        Share("time", "headroom", HIDDEN, 1.0, "cpu"),
        Share("time", "headroom", SIMULATED, 1.1, "cpu"),
    ]
    return Case("step-8bit", what, setup, COPIES, bars=bars)


def _then_asleep(step: Callable[[], object], end: Callable[[float], float]) -> Callable[[], None]:
    """Steps, and sleeps until the time that ``end`` says for a step of so many seconds."""

    def call() -> None:
        start = time.perf_counter()
        step()
        wanted = start + end(time.perf_counter() - start)
        time.sleep(max(0, wanted - time.perf_counter()))

    return call


def _sizes(optimizer: Any) -> list[int]:
    """Returns the bytes of the gradients of each part that a step on the host takes."""
    made = optimizer._paging._pieces.values()
    return [sum(here.numel() for _, here in part.ups) for _, parts in made for part in parts]


# ---- What blocks keep ----------------------------------------------------------------------------


def blocks(level: str, quick: bool) -> Case:
    """Forward, loss and backward of a small GPT."""
    sizes = dict(hidden_size=64, features=256) if quick else dict(hidden_size=512, features=2048)
    tokens = 64 if quick else 512

    def setup(device: torch.device) -> dict[str, Any]:
        import headroom
        from headroom.host.engines import engine_of

        config = headroom.nn.TransformerConfig(
            vocab_size=512, layers=6, heads=4, norm="layer", activation="gelu", gated=False, **sizes
        )
        ids = torch.randint(512, (4, tokens))

        def step_at(save: str) -> Any:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                model = headroom.nn.Transformer(config, save=save)
            return lambda: model(ids, labels=ids).backward()

        def without_and_copies() -> Contender:
            engine, away = engine_of(device), step_at(f"{level}@host")
            before = engine.bytes_down, engine.bytes_up
            away()
            copies = Copies(engine.bytes_down - before[0], engine.bytes_up - before[1])
            step = step_at(level)

            def call() -> None:
                step()
                copies()

            return Contender(call)

        return {
            "headroom": lambda: Contender(step_at(f"{level}@host")),
            "without": lambda: Contender(step_at(level)),
            COPIES: without_and_copies,
        }

    what = f"a GPT of 6 blocks, f32, {4 * tokens} tokens, at {level}@host"
    return Case(f"{level}@host", what, setup, COPIES, bars=[Bar("ratio", 1 / 1.2, "cpu")])


# ---- Weights -------------------------------------------------------------------------------------


def _towers(width: int) -> Callable[[], Any]:
    def made() -> Any:
        blocks = (
            torch.nn.Sequential(
                torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)
            )
            for _ in range(LAYERS)
        )
        return torch.nn.Sequential(*blocks)

    return made


def _passes(model: Any, x: torch.Tensor) -> None:
    model(x).sum().backward()
    for p in model.parameters():
        p.grad = None


def streamed(quick: bool) -> Case:
    """Forward and backward of blocks on one core, whose weights and gradients a thread for each
    direction copies at 2 GB/s. The others compute with resident weights, and then sleep for as long
    as the slower of computation and copies takes, or both, or a simulation says."""
    width, rows = (64, 64) if quick else (640, 128)

    def setup(device: torch.device) -> dict[str, Any]:
        import headroom
        from headroom.host.schedule import measured, streamed_step
        from headroom.host.streaming import Stream

        link, x, made = Throttled(LINK), torch.randn(rows, width), _towers(width)
        away, resident = made(), made()
        whole = Stream.engine_of

        def step_away() -> None:
            Stream.engine_of = staticmethod(lambda device: link)
            try:
                _passes(away, x)
            finally:
                Stream.engine_of = staticmethod(whole)

        headroom.patch(away, weights="host", norms=False)
        step_away()
        before = link.bytes_up, link.bytes_down
        step_away()
        copying = max(link.bytes_up - before[0], link.bytes_down - before[1]) / LINK

        sizes, rates = (
            [sum(p.nbytes for p in block.parameters()) for block in away],
            measured(link, device),
        )

        def simulated(computed: float) -> float:
            forward, backward = [computed / 3 / LAYERS] * LAYERS, [computed / 1.5 / LAYERS] * LAYERS
            return streamed_step(sizes, sizes, forward, backward, rates).makespan

        def until(end: Callable[[float], float]) -> Callable[[], Contender]:
            def call() -> None:
                start = time.perf_counter()
                _passes(resident, x)
                wanted = start + end(time.perf_counter() - start)
                time.sleep(max(0, wanted - time.perf_counter()))

            return lambda: Contender(_on_one_core(call))

        return {
            "headroom": lambda: Contender(_on_one_core(step_away)),
            "without": lambda: Contender(_on_one_core(lambda: _passes(resident, x))),
            COPIES: until(lambda computed: computed + copying),
            SLOWER: until(lambda computed: max(computed, copying)),
            SIMULATED: until(simulated),
        }

    what = f"{LAYERS} blocks, f32, whose weights stream over 2 GB/s each way: forward and backward"
    bars = [
        Share("time", "headroom", SLOWER, 1.15, "cpu"),
        Share("time", "headroom", SIMULATED, 1.1, "cpu"),
    ]
    return Case("weights", what, setup, COPIES, bars=bars)


def streamed_from_files(quick: bool) -> Case:
    """Forward and backward of blocks whose weights are in files, to which the gradients go, beside
    plain reads and writes of as many bytes."""
    width, rows = (64, 64) if quick else (640, 64)

    def setup(device: torch.device) -> dict[str, Any]:
        import headroom
        from headroom.host.engines import engine_of

        folder, x, made = tempfile.gettempdir(), torch.randn(rows, width), _towers(width)
        away, resident = made(), made()
        headroom.patch(away, weights="host", norms=False, host=headroom.HostArena(file=folder))
        engine = engine_of(device)
        before = engine.bytes_up, engine.bytes_down
        _passes(away, x)
        reads, writes = engine.bytes_up - before[0], engine.bytes_down - before[1]

        def resident_and_files() -> Contender:
            size = sum(p.nbytes for p in resident.parameters())
            file = tempfile.TemporaryFile(dir=folder)
            os.posix_fallocate(file.fileno(), 0, size)
            memory = memoryview(torch.zeros(PIECE, dtype=torch.uint8).numpy())

            def call() -> None:
                _passes(resident, x)
                for copy, total in ((os.preadv, reads), (os.pwritev, writes)):
                    for first in range(0, total, PIECE):
                        copy(file.fileno(), [memory[: min(PIECE, total - first)]], first % size)

            return Contender(call)

        return {
            "headroom": lambda: Contender(lambda: _passes(away, x)),
            "without": lambda: Contender(lambda: _passes(resident, x)),
            FILES: resident_and_files,
        }

    what = f"{LAYERS} blocks, f32, whose weights are in files: forward and backward"
    return Case("weights-in-files", what, setup, FILES, bars=[Bar("ratio", 1 / 1.3, "cpu")])


def cases(device: torch.device, quick: bool) -> list[Case]:
    shapes = model_for(device, quick).shapes
    return [
        in_files(shapes),
        states("states-8bit", "AdamW8bit", BF16, shapes),
        states("states-8bit-remainder", "AdamW8bit", BF16, shapes, master="remainder16"),
        states("states-f32", "AdamW", F32, shapes),
        over_a_link("link-8bit", "AdamW8bit", BF16, shapes if quick else GPT2_MEDIUM.shapes),
        on_host("host-8bit", shapes if quick else GPT2_MEDIUM.shapes),
        on_host("host-8bit-peers", shapes, beside_peers=True),
        on_host_over_a_link(shapes if quick else GPT2_MEDIUM.shapes),
        *[blocks(level, quick) for level in ("L0", "L2", "L5")],
        streamed(quick),
        streamed_from_files(quick),
    ]
