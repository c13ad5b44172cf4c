"""What users write, with the types they expect. A type checker reads it: nothing runs it."""

from pathlib import Path

import headroom
import torch
from headroom.optim import Optimizer, StateMemory
from headroom.state import Report, ReshardReport, convert_state, save_state
from torch import Tensor, nn


def train(model: nn.Module, batches: list[Tensor]) -> Tensor:
    optimizer: Optimizer = headroom.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
    scaler: torch.amp.GradScaler = headroom.amp.GradScaler("cuda")
    accumulator = headroom.GradAccumulator(model)
    for batch in batches:
        with accumulator.micro_batch(weight=len(batch)):
            model(batch).square().mean().backward()
    accumulator.finish()
    norm: Tensor = headroom.grad_norm(model.parameters())
    norm = headroom.grad_norm([p.grad for p in model.parameters() if p.grad is not None], "inf")
    norm = headroom.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    scaler.update()
    return norm


def release(model: nn.Module) -> bool:
    optimizer = headroom.optim.AdamW8bit(model.parameters(), block_size=128)
    handle: headroom.release.ReleaseHandle = headroom.release_gradients(model, optimizer)
    active: bool = handle.active
    handle.remove()
    return active


def release_in_two_passes(model: nn.Module, loss: Tensor) -> None:
    optimizer = headroom.optim.AdamW(model.parameters(), max_grad_norm=1.0)
    with headroom.release_gradients(model, optimizer, clip="two-pass") as handle:
        with handle.measure():
            loss.backward()


def every_optimizer(model: nn.Module) -> list[Optimizer]:
    groups = [{"params": list(model.parameters()), "lr": 1e-2}]
    return [
        headroom.optim.Adam(model.named_parameters(), amsgrad=True),
        headroom.optim.AdamW(groups, master="remainder16", lr=torch.tensor(1e-3)),
        headroom.optim.Adam8bit(model.parameters(), nonfinite="skip_step"),
        headroom.optim.AdamW8bit(
            model.parameters(), rounding="stochastic", code_rounding="stochastic", seed=3
        ),
        headroom.optim.Adafactor(model.parameters(), semantics="hf", relative_step=True),
    ]


def weights(model: nn.Module, optimizer: Optimizer) -> None:
    by_name: dict[str, Tensor] = headroom.optim.master_weights(optimizer, model)
    by_param: dict[Tensor, Tensor] = headroom.optim.master_weights(optimizer)
    headroom.optim.load_master_weights(optimizer, by_name, model)
    headroom.optim.load_master_weights(optimizer, by_param)


def sharded(path: Path, model: nn.Module, optimizer: Optimizer) -> bool:
    report: ReshardReport = headroom.state.load_sharded(path, model, optimizer)
    headroom.state.check_same_state(optimizer)
    return report.is_lossless


def memory(optimizer: Optimizer) -> list[StateMemory]:
    return optimizer.memory()


def convert(old: torch.optim.Optimizer, new: Optimizer) -> bool:
    state, report = convert_state(old, to="headroom-8bit")
    new.load_state_dict(state)
    checked: Report = report
    return checked.is_lossless


def save(path: Path, model: nn.Module, optimizer: Optimizer) -> Path | None:
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    save_state(path, model=model, optimizer=optimizer, keep=3)
    save_state(path, model=[model], optimizer=[optimizer], scheduler=scheduler)
    headroom.load_state(path, model=model, optimizer=optimizer)
    found: Path | None = headroom.latest(path.parent)
    return found


def step(params: list[Tensor], grads: list[Tensor], lists: list[list[Tensor]]) -> None:
    headroom.functional.adamw_(
        *(params, grads, *lists),
        lr=1e-3,
        beta1=0.9,
        beta2=0.999,
        eps=1e-8,
        weight_decay=0.0,
        amsgrad=False,
        maximize=False,
    )
    version: str = headroom.__version__
    info: dict[str, str] = headroom.build_info()
    print(version, info)


def wrong(model: nn.Module, optimizer: Optimizer) -> None:
    """Misspelled names and wrong arguments are found: each comment here would be one too many."""
    headroom.optim.AdamW([], lr="fast")  # pyright: ignore[reportArgumentType]
    headroom.optim.AdamW(3)  # pyright: ignore[reportArgumentType]
    headroom.optim.AdamW([], master="f16")  # pyright: ignore[reportArgumentType]
    headroom.optim.AdamW8bit([], code_rounding="up")  # pyright: ignore[reportArgumentType]
    headroom.optim.Adafactor([], semantics="paper")  # pyright: ignore[reportArgumentType]
    headroom.release_gradients(model, optimizer, clip="on")  # pyright: ignore[reportArgumentType]
    headroom.save_state("state-1", model=3)  # pyright: ignore[reportArgumentType]
    headroom.grad_norm(3)  # pyright: ignore[reportArgumentType]
    headroom.adamw_  # pyright: ignore[reportAttributeAccessIssue]  # noqa: B018
    headroom.optim.Adamw  # pyright: ignore[reportAttributeAccessIssue]  # noqa: B018
