"""Reports how many bytes the state of an optimizer takes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from .._core.dtensor import local_part
from .._core.names import param_names
from .states import StatefulOptimizer


@dataclass
class StateMemory:
    """Counts the bytes of state of the parameters whose states have the same dtypes."""

    dtypes: tuple[str, ...]  # of the state tensors of one parameter, each once
    names: list[str] = field(default_factory=list)  # of the parameters
    numel: int = 0  # elements of the parameters, on this rank
    bytes: dict[str, int] = field(default_factory=dict)  # by state name

    @property
    def bytes_per_parameter(self) -> float:
        return sum(self.bytes.values()) / max(self.numel, 1)

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {size:,}" for name, size in self.bytes.items())
        shown = ", ".join(self.names[:6]) + (", ..." if len(self.names) > 6 else "")
        owners = f"{self.numel:,} parameters in {len(self.names):,} tensors ({shown})"
        if not self.dtypes:
            return f"No state for {owners}"
        return (
            f"State in {' + '.join(self.dtypes)}: {self.bytes_per_parameter:.2f} bytes for each of "
            f"{owners}\n    bytes: {parts}"
        )


def state_memory(optimizer: StatefulOptimizer, without: Iterable[Tensor] = ()) -> list[StateMemory]:
    """Returns the bytes of the state on this rank. Parameters before their first step count with
    the state that they will have, but for those in ``without``, which will get no gradient."""
    never = {id(param) for param in without}
    rows: dict[tuple[str, ...], StateMemory] = {}
    names = param_names(optimizer.param_groups)
    for group in optimizer.param_groups:
        for param in group["params"]:
            will_step = param.requires_grad or param.grad is not None
            will_step = will_step and id(param) not in never
            if is_lazy(param) or not (optimizer.state.get(param) or will_step):
                continue
            layout = optimizer._layout(param, group)
            entry, local = optimizer.state.get(param, {}), local_part(param)
            tensors = {
                name: local_part(entry[name])
                if name in entry
                else layout.slot(name).new(torch.empty_like(local, device="meta"))
                for name in layout.names
            }
            dtypes = tuple(dict.fromkeys(str(tensor.dtype)[6:] for tensor in tensors.values()))
            row = rows.setdefault(dtypes, StateMemory(dtypes))
            row.names.append(names[param].removeprefix("parameter "))
            row.numel += local.numel()
            for name, tensor in tensors.items():
                row.bytes[name] = row.bytes.get(name, 0) + local_part(tensor).nbytes
    return list(rows.values())
