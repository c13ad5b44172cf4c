"""Traces training steps on fakes: no memory is taken, and nothing is computed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)

from .._core.randomness import Random, generators_kept
from ..host.checksums import sums_of
from ..host.saved import fakes_on_host
from ..memory.collecting import no_collections
from ..memory.events import Timeline
from ..memory.watch import tensors_of_model, tensors_of_state
from ..optim.master_weights import headroom_optimizer
from ..param_states.paging import written
from ..param_states.paging.handle import is_stepped_there
from ..param_states.paging.hosted import Hosting
from ..patching.bitsandbytes import held_of, is_bitsandbytes
from ..patching.streaming import streamed_blocks
from ..step.description import Step
from ..step.errors import PlanError
from ..step.loss import autocast
from ..step.pytree import map_tensors, tensors_in
from .copies import Copier
from .cuda_view import HostTold, autocast_told, cuda_view, kernels
from .ddp import ReplicatedModel
from .fsdp import ShardedModel
from .headroom_workspaces import fakes_overwritten
from .masks import masks_of
from .on_host import PlannedHost, PlannedHosting, PlannedPaging
from .op_workspaces import left_out
from .probe import unasked
from .recorder import Recorder
from .recurrent import LAYERS, has_recurrent_layers
from .sharding import FSDP
from .states import move_to_shards
from .steps import Steps
from .streamed import Streamable, stream, streamable, streaming_on_fakes

__all__ = ["trace"]

NOT_EVALUATED = "evaluation is not counted"


def trace(step: Step, watch: Callable[[nn.Module, Recorder], None] | None = None) -> Timeline:
    """Returns the memory of the steps.

    Args:
        step: what is traced.
        watch: is called before the first step with the copy of the model that is stepped and with
            the recorder, whose ``now`` is the number of the next event. It may add hooks.

    Raises:
        PlanError: an operation cannot be followed on fakes. The message names it and its module.
    """
    device = torch.device("cuda", 0) if step.device.type == "cuda" else torch.device("cpu")
    _hold_bitsandbytes(step.model)
    mode = FakeTensorMode(allow_non_fake_inputs=False)
    masks, masks_of_evaluation = masks_of(step.batch), masks_of(step.evaluated)
    unasked.clear()
    with generators_kept(), no_collections(), ExitStack() as stack:
        if device.type == "cuda":
            stack.enter_context(cuda_view())
        copied = step.copied(Copier(mode, device).copy)
        recorder = Recorder(device, is_lying=device.type == "cuda")
        run = _Traced(recorder, copied, PlannedHost(recorder, mode))
        params = step.model.parameters()
        run.is_there = step.sharding is None and any(p.device.type == "cuda" for p in params)
        # Torch's optimizers choose for fakes as they choose for tensors.
        optimizer = sys.modules["torch.optim.optimizer"]
        kinds = [*optimizer._foreach_supported_types, FakeTensor]
        stack.enter_context(mock.patch.object(optimizer, "_foreach_supported_types", kinds))
        stack.enter_context(_random_states(recorder))
        stack.enter_context(fakes_overwritten())
        stack.enter_context(mock.patch.object(written, "checksums", sums_of))
        stack.enter_context(mode)
        stack.enter_context(streaming_on_fakes(recorder, run.host, mode))
        run.blocks = [] if step.weights is None else streamable(step.model, step.weights)
        with run.remembering():
            run.prepare()
        if watch is not None:
            watch(run.model, recorder)
        try:
            stack.enter_context(recorder.watching(copied.model))
            run.install()
            stack.enter_context(kernels(recorder))
            stack.enter_context(fakes_on_host(run.host.slabs))
            if device.type == "cuda":
                stack.enter_context(autocast_told(recorder))
                stack.enter_context(HostTold(recorder))
                stack.enter_context(run.host.saving())
            with masks:
                for number in range(step.steps):
                    run.step(number)
            if step.evaluates is not None:
                with masks_of_evaluation:
                    run.evaluate()
        except PlanError:
            raise
        except Exception as error:
            raise _explained(error, recorder) from error
        host = run.host
        return recorder.timeline(run.notes(), host.allocations, host.bytes_up + host.bytes_down)


def _hold_bitsandbytes(model: nn.Module) -> None:
    """Lets patched layers of bitsandbytes look for their matrices, which they cannot do on fakes.
    Raises for layers that compute by functions of bitsandbytes, which have no fakes."""
    for name, module in model.named_modules():
        if (held := held_of(module)) is not None:
            held.hold(module)
        elif is_bitsandbytes(module):
            raise PlanError(
                f"'{name}' is a {type(module).__name__} of bitsandbytes, whose functions cannot be "
                "followed on fakes: call headroom.patch(model) first, which reads its weight where "
                "it is, or plan with measure=True"
            )


class _Traced(Steps):
    """Steps on fakes."""

    def __init__(self, recorder: Recorder, copied: Step, host: PlannedHost) -> None:
        super().__init__(copied)
        self.recorder, self.host = recorder, host
        self._nodes: list[Any] = []
        self._why_not_evaluated: list[str] = []
        self._is_stepping = self._is_scaling = False
        self.blocks: list[Streamable] = []  # whose weights shall be on the host
        self.is_there = False  # whether the model is on the device of the plan already
        self._spread: ShardedModel | ReplicatedModel | None = None  # over ranks
        recorder.scalar = self._scalar

    def offload(self, what: str, budget: int) -> None:
        optimizer = headroom_optimizer(self.optimizer, "offload")
        kind = PlannedHosting if is_stepped_there(optimizer, what) else PlannedPaging
        optimizer._paging = kind(self.host, budget)

    def distribute(self) -> None:
        sharding = self.given.sharding
        if sharding is None:
            return
        kind = ShardedModel if isinstance(sharding.how, FSDP) else ReplicatedModel
        self._spread = kind(sharding, self.model, self.recorder)
        if hasattr(self.optimizer, "param_groups"):
            move_to_shards(self.optimizer, self._spread.replaced())

    def prepare(self) -> None:
        super().prepare()
        stream(self.model, self.blocks, self.host)
        for block in streamed_blocks(self.model):
            block.settle()
        if (paging := getattr(self.optimizer, "_paging", None)) is not None:
            kind = PlannedHosting if isinstance(paging, Hosting) else PlannedPaging
            planned = kind(self.host, paging.budget, paging.bucket_bytes)
            self.optimizer._paging = planned
            planned.adopt(self.optimizer)
        self._know_all()
        for x in tensors_in(self.given.batch):
            self.recorder.know(x, "batch", "batch")

    @contextmanager
    def remembering(self) -> Iterator[None]:
        """Notes, while the model is made what the steps find, what this frees of one that is on the
        device: the allocator serves others from the gaps."""
        if self.is_there:
            self._know_model()
            with self.recorder:
                yield
        else:
            yield
        self.recorder.begin_steps()

    def begin(self, phase: str) -> None:
        self.recorder.begin(phase)

    def evaluate(self) -> None:
        """Runs an evaluation as loops do between two steps. What cannot be followed in it is no
        reason to plan no training."""
        self.begin("other")
        self.model.eval()
        try:
            batch = map_tensors(self.given.evaluated, torch.empty_like)  # it comes from the host
            with torch.no_grad(), autocast(self.recorder.device.type, self.given.amp):
                self.given.evaluates(self.model, batch)
        except Exception as error:
            why = str(_explained(error, self.recorder)).partition("\n")[0]
            self._why_not_evaluated.append(f"{NOT_EVALUATED}: {why}")

    def notes(self) -> list[str]:
        """Returns the sentences that the plan ends with."""
        found = [] if self._spread is None else ["All bytes are those of one rank."]
        found += self._why_not_evaluated
        if self.recorder.device.type == "cuda" and has_recurrent_layers(self.model):
            found.append(
                "Recurrent layers are planned as on the CPU: what cuDNN takes for them is not "
                "known, so the measured peak may be above this."
            )
        if unasked & set(LAYERS):
            found.append("LSTMs were not run here: what they hold for themselves is an estimate.")
        if names := ", ".join(left_out()):
            found.append(f"What {names} hold inside was too large to see, and is left out.")
        return found

    def step(self, number: int) -> None:
        self.recorder.step = number
        self.host.begin_step()
        super().step(number)

    def fetched(self) -> Any:
        found = super().fetched()
        for x in tensors_in(found):
            self.recorder.know(x, "batch", "batch, prefetched")
        return found

    def step_optimizer(self) -> None:
        step = self.optimizer.step
        self._is_scaling = True
        try:
            with mock.patch.object(self.optimizer, "step", self._flagged(step)):
                super().step_optimizer()
        finally:
            self._is_scaling = False
        self._know_all()

    def _flagged(self, step: Callable[..., Any]) -> Callable[..., Any]:
        def flagged(*args: Any, **options: Any) -> Any:
            self._know_all()  # such as sums of micro-batches, which did not arrive from autograd
            self._is_stepping = True
            try:
                return step(*args, **options)
            finally:
                self._is_stepping = False

        return flagged

    def install(self) -> None:
        """Adds the hooks: to note gradients as they arrive, before they are added to others or
        kept, and those of the ranks."""
        leaves = self.model.named_parameters()
        if self._spread is not None:
            self._spread.install()
            leaves = self._spread.leaves()
        self.recorder.is_paused = True
        for name, param in leaves:
            if param.requires_grad:
                node: Any = param.view_as(param).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
                node.register_prehook(self._has_gradient(name))
                self._nodes.append(node)  # it lives as long as somebody holds it
        self.recorder.is_paused = False

    def _has_gradient(self, name: str) -> Callable[[Any], None]:
        recorder, module = self.recorder, name.rpartition(".")[0]

        def note(grads: Any) -> None:
            if isinstance(grads[0], FakeTensor):
                recorder.know(grads[0], "gradients", name, module)

        return note

    def _know_all(self) -> None:
        """Notes what parameters, gradients, buffers and states there are."""
        self._know_model()
        if self.optimizer is not None:
            for kind, name, x in tensors_of_state(self.optimizer, {}):
                self.recorder.know(x, kind, name.removeprefix("."))
            if self.host.is_asynchronous:  # states are where their parameters are
                states = (self.optimizer.state.get(param) for param in self.host.weights)
                for x in tensors_in([*states]):
                    self.host.move(x)

    def _know_model(self) -> None:
        places = {id(x): at for at, x in enumerate(_as_moved(self.model))}
        known = [*tensors_of_model(self.model)]
        for kind, name, x in sorted(known, key=lambda one: places.get(id(one[2]), -1)):
            self.recorder.know(x, kind, name, name.rpartition(".")[0])

    def _scalar(self, func: Any, x: Tensor) -> Any:
        """Answers for the value of a tensor, which fakes do not have."""
        if isinstance(x, FakeTensor) and x.constant is not None:
            return None
        if self._is_stepping:  # a count of steps: its value changes no size
            return 1.0 if x.is_floating_point() else 1
        if self._is_scaling:  # whether a gradient was infinite
            return 0.0
        is_flag = x.dtype == torch.bool and self.recorder.phase == "backward"
        if is_flag and self.given.release:  # the same of gradients that are released
            return False
        if self.recorder.phase == "forward" and x.dtype == torch.int64 and self._is_seed(x):
            return 1
        return None

    def _is_seed(self, x: Tensor) -> bool:
        """Returns whether a number was drawn for a generator: its value changes no size either."""
        at = self.recorder.allocation_of(x)
        is_drawn = at is not None and at.op in ("aten::randint", "aten::random_")
        return is_drawn or getattr(x, "drawn_on_host", False)


def _as_moved(module: nn.Module) -> Iterator[Tensor]:
    """Yields parameters and buffers in the order in which :meth:`torch.nn.Module.to` moves them to
    a device, where each takes the first place that fits."""
    for child in module.children():
        yield from _as_moved(child)
    yield from module.parameters(recurse=False)
    yield from module.buffers(recurse=False)


@contextmanager
def _random_states(recorder: Recorder) -> Iterator[None]:
    """Counts the states of the CPU's generator that are kept for what is computed again, and says
    whether that drew from it: on fakes nothing is drawn. The state of a GPU's is in C++."""
    is_cpu, state_of = recorder.device.type == "cpu", torch.get_rng_state

    def state() -> Tensor:
        found = state_of()
        recorder.know(found, "activations", "torch.get_rng_state", recorder.module)
        return found

    def begin(random: Random, tensors: Any) -> None:
        random._states = {"torch": torch.get_rng_state(), "cuda": {}}
        random._draws = recorder.draws  # type: ignore[attr-defined]

    def moved(random: Any) -> bool:
        return is_cpu and recorder.draws != random._draws

    with ExitStack() as stack:
        stack.enter_context(mock.patch.multiple(Random, __init__=begin, moved=moved))
        if is_cpu:
            stack.enter_context(mock.patch.object(torch, "get_rng_state", state))
        yield


_WHY = {
    DataDependentOutputException: "asks for the value of a tensor",
    DynamicOutputShapeException: "has results whose shapes depend on values",
    UnsupportedOperatorException: "has no fake kernel",
}


def _explained(error: Exception, recorder: Recorder) -> Exception:
    op, module = recorder.last
    where = f" in {module!r}" if module else " in the model" if module == "" else ""
    why = next((words for kind, words in _WHY.items() if isinstance(error, kind)), None)
    if why is not None:
        return PlanError(
            f"{op}{where} {why}, which a step without memory cannot know; headroom.plan(..., "
            "measure=True) runs real steps under the counter instead"
        )
    return PlanError(
        f"the step failed in its {recorder.phase} phase, at {op}{where}: "
        f"{type(error).__name__}: {error}"
    )
