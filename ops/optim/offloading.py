"""The function that keeps the state of an optimizer that exists on the host."""

from __future__ import annotations

from typing import Literal

import torch

from ..host.arena import HostArena
from ..param_states.paging.handle import OffloadHandle, begin
from .master_weights import headroom_optimizer


def offload(
    optimizer: torch.optim.Optimizer,
    what: Literal["state", "step"] = "state",
    *,
    budget: int | str | None = None,
    host: HostArena | None = None,
    bucket_bytes: int | None = None,
) -> OffloadHandle:
    """Keeps the state of an optimizer on the host: moments, float32 copies and remainders. Steps
    run on the device of the parameters, as before, or on the host, and have the same bits.

    With ``what="state"`` a step takes the state through a ring of three slots on the device, one
    piece after the other: while one is stepped, the next is copied up and the one before down. On
    the CPU there is one. That costs the time of copying the state both ways, where it is longer
    than the step itself. The training loop stays as it is: groups, schedulers, clipping, scalers,
    gradient release, state dicts and files. States are read in ``optimizer.state`` as tensors on
    the CPU, after ``handle.wait()``, and what is written to them counts in the next step.

    With ``what="step"`` gradients go down to the host, the processor steps there, and weights go
    up, part by part: while one is stepped, the gradients of the next and the weights of the one
    before are copied. The arena has a copy of the weights, too, so the device needs neither states
    nor a ring, and gradients of 16 bits are all that leaves it. With
    :func:`headroom.release_gradients` this runs beside the backward pass. Clipping and a scaler's
    skipped steps are exact there, for which gradients wait on the host, and steps come after the
    backward pass. Weights that are written between steps are noticed by checksums, and fetched.

    On the CPU, where host and device are one, ``"step"`` is ``"state"``, which makes sense with an
    arena in a file: the state is then on the disk.

    Example::

        model = torch.nn.Linear(512, 512)
        optimizer = headroom.optim.AdamW8bit(model.parameters(), lr=1e-3)
        handle = headroom.optim.offload(optimizer)
        model(torch.randn(4, 512)).square().mean().backward()
        optimizer.step()
        print(handle.memory())
        handle.remove()

    Args:
        optimizer: one of Headroom's with moments, with or without a state, or accelerate's wrapper
            of it. ``offload="state"`` or ``"step"`` of its constructor does the same.
        what: ``"state"`` or ``"step"``.
        budget: the bytes of state, or text such as ``"2 GiB"``, that may stay on the device, with
            those of the ring. The parameters that come first keep theirs. None or 0: only the ring.
            Not with ``"step"``, which leaves no state there.
        host: the arena; None: that of the process, ``headroom.host.default_arena()``.
        bucket_bytes: of a slot, for states on the device, or for gradients on the host; None:
            16 MiB, on the CPU 8, or an eighth of all of it if that is less. A parameter with more
            is cut, but with stochastic rounding, whose random numbers follow its elements, it makes
            the slots larger.

    Returns:
        A handle with ``memory()``, ``wait()``, ``reduce_memory()``, which moves more to the host,
        and ``remove()``; a context manager. It is ``optimizer.offload_handle``, too.

    Raises:
        TypeError: the optimizer is not one of Headroom's.
        ValueError: the budget is below the ring; the optimizer has factored states, which are small
            already, or is offloaded already; it is Muon, whose products belong on the device, with
            ``"step"``; or a parameter is on neither a CPU nor a CUDA device.
        HostMemoryError: the host has no room for the state that exists.

    An optimizer step raises HostMemoryError where the host has no room for new state; nothing has
    been written then.
    """
    inner = headroom_optimizer(optimizer, "offload")
    begin(inner, what, budget, host, bucket_bytes)
    return OffloadHandle(inner)
