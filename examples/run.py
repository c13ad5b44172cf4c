"""A training run: model, optimizer and history, one step after the other, saved and resumed."""

import copy
import tempfile
import time
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import headroom
import torch
from torch import Tensor

import data
from data import Text
from model import GPT, HeadroomGPT, Size
from rungs import Rung

WARMUP_STEPS = 20
BASE_STEPS = 16  # in full, before adapters are trained
HELD_OUT_WINDOWS = 64
HISTORY = ("losses", "seconds", "peak_bytes")  # what a run remembers of its steps


def micro_batches_of(rung: Rung, size: Size) -> int:
    return min(rung.accumulate, size.batch)


def model_of(rung: Rung, size: Size, base: dict[str, Tensor] | None = None) -> GPT | HeadroomGPT:
    """The model with new weights, or with those of a base that adapters are trained beside."""
    dtype = getattr(torch, rung.weights)
    if rung.save is None:
        return headroom.cast_model(GPT(size, checkpoint_blocks=rung.checkpoint), dtype)
    model = HeadroomGPT(size, rung.save, rung.fused_loss)
    if base is not None:
        model.load_state_dict(base)
    if rung.adapters is not None:
        headroom.quantize(model)
        headroom.lora(model, rung.adapters)
    return model.to(dtype)  # its norms compute in float32 in any case


def base_of(
    rung: Rung, size: Size, device: torch.device, seed: int, text: Text
) -> dict[str, Tensor]:
    """Weights that were trained in full, on other batches than those of the rung."""
    run = Run(replace(rung, adapters=None), size, device, seed + 1)
    for _ in range(BASE_STEPS):
        run.step(text)
    return run.model.state_dict()


def optimizer_of(rung: Rung, size: Size, model: GPT | HeadroomGPT) -> torch.optim.Optimizer:
    options = dict(rung.options)
    if rung.max_grad_norm is not None:
        options["max_grad_norm"] = rung.max_grad_norm
    if rung.weights != "float32" and rung.optimizer == "headroom.optim.AdamW":
        options.setdefault("state_dtype", None if "master" in options else torch.float32)
    module, name = rung.optimizer.rsplit(".", 1)
    kind = getattr(import_module(module), name)
    trained = [param for param in model.parameters() if param.requires_grad]
    # Some optimizers choose by the modules which parameters they step how.
    params = model if getattr(kind, "takes_model", False) else trained
    optimizer = kind(params, lr=size.lr, weight_decay=0.1, **options)
    if rung.offload:
        headroom.optim.offload(optimizer, host=headroom.HostArena(file=tempfile.gettempdir()))
    return optimizer


class Run:
    def __init__(
        self,
        rung: Rung,
        size: Size,
        device: torch.device,
        seed: int,
        base: dict[str, Tensor] | None = None,
    ):
        torch.manual_seed(seed)
        self.rung, self.size, self.device, self.seed = rung, size, device, seed
        self.accumulate = micro_batches_of(rung, size)
        self.model = model_of(rung, size, base).to(device)
        self.optimizer = optimizer_of(rung, size, self.model)
        if rung.release:
            headroom.release_gradients(self.model, self.optimizer, bucket_bytes=rung.bucket_bytes)
        self.accumulator = headroom.GradAccumulator(self.model) if rung.sum_in_f32 else None
        self.scaler = headroom.amp.GradScaler(
            device.type, init_scale=2.0**12, enabled=rung.scaler, max_consecutive_skips=10
        )
        self.losses: list[float] = []  # bits per byte of each step so far
        self.seconds: list[float] = []  # duration of each step so far
        self.peak_bytes = 0

    def learning_rate(self) -> float:
        """Warm-up, then 1/sqrt. It does not depend on --steps, so 50 steps resumed to 100 are the
        same as 100 steps."""
        step = len(self.losses) + 1
        lr = self.rung.lr_factor * self.size.lr
        return lr * min(step / WARMUP_STEPS, (WARMUP_STEPS / step) ** 0.5)

    def micro_batches(self, text: Text, step: int) -> list[tuple[Tensor, Tensor]]:
        pair = data.batch(text, self.seed, step, self.size.batch, self.size.context)
        return list(zip(*(t.to(self.device).chunk(self.accumulate) for t in pair)))

    def forward_backward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        dtype = getattr(torch, self.rung.autocast or "bfloat16")
        with torch.autocast(self.device.type, dtype, enabled=self.rung.autocast is not None):
            loss = self.model(tokens, targets)
        part = loss.detach() / self.accumulate
        if self.accumulator:  # it computes the mean over micro-batches by itself
            with self.accumulator.micro_batch():
                loss.backward()
        else:
            self.scaler.scale(loss / self.accumulate).backward()
        return part

    def step(self, text: Text) -> None:
        start = time.perf_counter()
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate()
        micro_batches = self.micro_batches(text, len(self.losses))
        loss = self.train_on(micro_batches).item()
        targets = torch.cat([targets for _, targets in micro_batches])
        self.losses.append(text.bits_per_byte(loss, targets))
        self.seconds.append(time.perf_counter() - start)

    def train_on(self, micro_batches: list[tuple[Tensor, Tensor]]) -> Tensor:
        loss = sum(self.forward_backward(*pair) for pair in micro_batches)
        if self.accumulator:
            self.accumulator.finish()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        return loss

    @torch.no_grad()
    def held_out_loss(self, text: Text) -> float:
        """Bits per byte on held-out text, in float32 on every rung: only the training differs."""
        model = headroom.cast_model(copy.deepcopy(self.model), torch.float32).eval()
        if self.rung.options.get("master"):  # evaluate with all the bits that are trained
            model.load_state_dict(headroom.optim.master_weights(self.optimizer, self.model))
        tokens, targets = data.held_out(text, HELD_OUT_WINDOWS, self.size.context)
        pairs = zip(*(t.to(self.device).split(4) for t in (tokens, targets)))
        losses = [model(*pair).item() for pair in pairs]
        return text.bits_per_byte(sum(losses) / len(losses), targets)

    def gradients_of_l0(self, text: Text) -> bool | None:
        """Whether the gradients of a micro-batch have the bits that they have where blocks keep
        everything; None for a model without a level, or without gradients after backward."""
        if self.rung.save is None or self.rung.release:
            return None
        gradients = []
        for level in ("L0", self.rung.save):
            self.model.save = level
            self.forward_backward(*self.micro_batches(text, 0)[0])
            gradients.append([p.grad for p in self.model.parameters() if p.requires_grad])
            self.optimizer.zero_grad()
        return all(map(torch.equal, *gradients))

    def count_bytes(self, text: Text) -> headroom.memory.Timeline:
        """Trains one more step, and returns every allocation in it."""
        micro_batches = self.micro_batches(text, 0)
        with headroom.memory.track(self.model, self.optimizer, batch=micro_batches) as tracked:
            self.train_on(micro_batches)
        return tracked.timeline

    def save(self, path: Path, identity: dict) -> None:
        history = {key: getattr(self, key) for key in HISTORY}
        headroom.save_state(path, **self.parts(), extra=history | {"identity": identity})

    def load(self, path: Path) -> None:
        saved = headroom.load_state(path, **self.parts())
        for key in HISTORY:
            setattr(self, key, saved[key])

    def parts(self) -> dict:
        return dict(model=self.model, optimizer=self.optimizer, scaler=self.scaler)


def predict(rung: Rung, size: Size, device: torch.device) -> headroom.planning.Plan:
    """Returns what `headroom.plan` says of such a run, which it need not see."""
    with torch.device("meta"):
        model = model_of(rung, size)
        optimizer = optimizer_of(rung, size, model)
        count = micro_batches_of(rung, size)
        rows = torch.zeros(size.batch, size.context, dtype=torch.int64).chunk(count)[0]
        others = torch.zeros(size.batch, size.context, dtype=torch.int64).chunk(count)[0]
    return headroom.plan(
        model,
        optimizer,
        (rows, others),
        forward=lambda model, batch: model(*batch),
        device=device.type,
        amp=rung.autocast and getattr(torch, rung.autocast),
        accumulation=count,
        accumulator=rung.sum_in_f32,
        release=rung.release and max(1, rung.bucket_bytes),
        scaler=rung.scaler,
    )
