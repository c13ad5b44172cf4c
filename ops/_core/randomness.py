"""Takes, compares and gives back the states of random generators."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor


def generator_states(
    devices: Iterable[torch.device] | None = None, *, host: bool = True
) -> dict[str, Any]:
    """Returns the states of torch's generators and of those of Python and, if it is imported,
    NumPy.

    Args:
        devices: whose generators of CUDA count beside that of the CPU; None: all, if CUDA is used.
        host: whether Python and NumPy count.
    """
    states: dict[str, Any] = {"torch": torch.get_rng_state()}
    if devices is not None:
        states["cuda"] = {d: torch.cuda.get_rng_state(d) for d in devices if d.type == "cuda"}
    elif torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = dict(enumerate(torch.cuda.get_rng_state_all()))
    if host:
        states["python"] = random.getstate()
        if (numpy := sys.modules.get("numpy")) is not None:
            states["numpy"] = numpy.random.get_state(legacy=False)
    return states


def restore_generators(states: dict[str, Any]) -> None:
    """Gives generators the states that :func:`generator_states` returned."""
    torch.set_rng_state(states["torch"])
    for device, state in states.get("cuda", {}).items():
        torch.cuda.set_rng_state(state, device)
    if "python" in states:
        random.setstate(states["python"])
    if "numpy" in states and (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.set_state(states["numpy"])


@contextmanager
def generators_kept(
    *devices: torch.device | None, own: Iterable[torch.Generator] = ()
) -> Iterator[None]:
    """Runs a block after which the random numbers of torch, on the CPU and on ``devices``, of
    Python, of NumPy and of generators of one's ``own`` go on as if it had not run."""
    states = generator_states(device for device in devices if device is not None)
    own_states = [(generator, generator.get_state()) for generator in own]
    try:
        yield
    finally:
        restore_generators(states)
        for generator, state in own_states:
            generator.set_state(state)


def loader_kept(loader: Any) -> AbstractContextManager[None]:
    """Returns a context that reads from a DataLoader, after which all random numbers, also those of
    the generators that it, its samplers and its dataset draw from, go on as if it had not run."""
    return generators_kept(own=generators_in(loader))


def generators_in(loader: Any) -> list[torch.Generator]:
    """Returns the generators that a DataLoader, or a sampler, its samplers and its dataset hold."""
    found: dict[int, torch.Generator] = {}
    seen: set[int] = set()
    parts = [loader]
    while parts:
        part = parts.pop()
        if id(part) in seen or not hasattr(part, "__dict__"):
            continue
        seen.add(id(part))
        for name, value in vars(part).items():
            if isinstance(value, torch.Generator):
                found[id(value)] = value
            elif name.endswith(("sampler", "base_dataloader", "dataset")):
                parts.append(value)
    return list(found.values())


class Random:
    """Keeps the states of the generators of torch that a function may draw from, now."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._states = generator_states({x.device for x in tensors}, host=False)

    def moved(self) -> bool:
        """Returns whether something may have been drawn since."""
        cuda = self._states["cuda"]
        if cuda and torch.cuda.is_current_stream_capturing():
            return True  # while a graph is captured, the state does not show it
        return not torch.equal(self._states["torch"], torch.get_rng_state()) or any(
            not torch.equal(state, torch.cuda.get_rng_state(device))
            for device, state in cuda.items()
        )

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Lets a block draw the same numbers again."""
        with generators_kept(*self._states["cuda"]):
            restore_generators(self._states)
            yield
