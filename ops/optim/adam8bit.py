"""Adam and AdamW with 8-bit moments."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import ParamsT

from .._core.checks import check_number
from .._core.dtensor import shard_number
from .._core.names import name_of
from .._core.overlap import is_dense
from .._core.weight_modes import Master, Rounding, weights_mode
from ..functional.adamw8bit import BLOCK_SIZES, signed
from .adam import Adam, decoupling
from .block_scales import ABSMAXS, unpadded, zero_absmaxs
from .options import own_arguments
from .plan import Bucket, Call, Options, States, places_in, table_call
from .states import STEP, Layout, Slot

Nonfinite = Literal["skip_step", "skip_element", "propagate"]
CodeRounding = Literal["nearest", "stochastic"]
CHOICES = {
    "block_size": BLOCK_SIZES,
    "code_rounding": get_args(CodeRounding),
    "nonfinite": get_args(Nonfinite),
}
EIGHT_BIT = 1  # among an optimizer's layouts; the other is Adam's
OPTIONS = (  # which Adam lacks
    "optim_bits",
    "min_8bit_size",
    "block_size",
    "bnb_exact",
    "code_rounding",
    "seed",
    "nonfinite",
)


class Adam8bit(Adam):
    r"""Adam with moments of one byte: :class:`Adam` with 2 bytes of state per parameter instead of
    8.

    A moment is a code of the dynamic map per element and a float32 scale per block of consecutive
    elements (Dettmers et al., arXiv:2110.02861), bitsandbytes' format. One op updates all
    parameters of a group and device. Rounding never makes a nonzero second moment zero, so that no
    update can blow up; see ``hr_adamw8bit`` in ``headroom.h``.

    Args:
        params, lr, betas, eps, weight_decay, maximize, foreach, capturable, differentiable, fused,
            decoupled_weight_decay, max_grad_norm, master, rounding, count_stalled, offload, budget:
            as in :class:`Adam`. A bfloat16 parameter with ``master="remainder16"`` takes 6 bytes
            with its state.
        amsgrad: must be False.
        min_8bit_size: parameters with fewer elements than this have float32 moments. The elements
            of a DTensor are counted on all ranks together.
        block_size: elements per scale: 64, 128, 256 or 512. Blocks follow the order in memory at
            the first step, and the blocks of a DTensor are local to its shard.
        bnb_exact: the rule of bitsandbytes' CUDA kernels step for step, which lets updates blow up
            and always decouples the weight decay. (On a CPU bitsandbytes quantizes more coarsely:
            of the squares of 65,536 normal numbers about 2,000 get another code.)
        code_rounding: ``"nearest"``, or ``"stochastic"``: round codes up or down at random, without
            bias. The random numbers depend on ``seed``, step, parameter and element alone.
        seed: the seed of random rounding, of codes and of weights, from 0 to 2^32 - 1.
        nonfinite: what an infinite or NaN gradient does. ``"propagate"``: the weight becomes NaN,
            as in torch, and so do the moments of its block. ``"skip_element"``: the element and its
            moments stay as they are. ``"skip_step"``: the step changes nothing, which costs a pass
            over the gradients. With ``max_grad_norm`` or a scaler, which read the gradients anyway,
            the step changes nothing in each of the three.

    ``optim_bits=32`` in a parameter group, or :meth:`override`, chooses float32 moments for
    parameters. An existing state keeps its format.

    The state of a parameter is ``step`` (float64); ``exp_avg`` and ``exp_avg_sq``, uint8 of its
    shape; ``exp_avg_absmax`` and ``exp_avg_sq_absmax``, float32, the scales of the blocks. A state
    with float32 moments is that of :class:`Adam`. Checkpoints of ``torch.optim.Adam`` and AdamW
    load. In the other direction, :class:`Adam` refuses 8-bit moments, but torch's classes take the
    codes for numbers without an error: do not load such a checkpoint into them.

    ``torch.distributed.checkpoint.load`` refuses 8-bit moments that another number of ranks saved
    if the blocks of their shards differ ("Size mismatch" of an ``absmax``);
    :func:`headroom.state.load_sharded` loads them.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = False,
        max_grad_norm: float | None = None,
        master: Master | None = None,
        rounding: Rounding = "nearest",
        seed: int = 0,
        count_stalled: bool = False,
        offload: Literal["state"] | None = None,
        budget: int | str | None = None,
        min_8bit_size: int = 4096,
        block_size: int = 256,
        bnb_exact: bool = False,
        code_rounding: CodeRounding = "nearest",
        nonfinite: Nonfinite = "propagate",
    ) -> None:
        given = own_arguments(locals())
        self._overrides: dict[Tensor, int] = {}
        own = {name: given.pop(name) for name in OPTIONS if name in given and name != "seed"}
        self._more_defaults = {"optim_bits": 8, "seed": seed} | own
        super().__init__(**given)

    def override(self, target: Tensor | nn.Module, name: str | None = None, *, bits: int) -> None:
        """Chooses 8-bit or float32 moments for a parameter of any size, before its first step. The
        target is a tensor, a module and the name of a parameter in it, or a module with all its
        parameters.

        Raises:
            ValueError: ``bits`` is neither 8 nor 32, the optimizer does not have the parameter, or
                the parameter has a state already.
        """
        if bits not in (8, 32):
            raise ValueError(f"bits must be 8 or 32, got {bits}")
        if isinstance(target, nn.Module):
            chosen = [target.get_parameter(name)] if name else list(target.parameters())
        else:
            chosen = [target]
        mine = {param for group in self.param_groups for param in group["params"]}
        for param in chosen:
            if param not in mine:
                raise ValueError("override() got a parameter that this optimizer does not have")
            if self.state.get(param):
                raise ValueError(
                    f"{name_of(self.param_groups, param)} has a state already; call override() "
                    "before its first step"
                )
        self._overrides.update(dict.fromkeys(chosen, bits))

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_overrides": self._overrides}

    def __setstate__(self, state: dict[str, Any]) -> None:
        defaults = state.get("defaults") or self.defaults
        for group in state["param_groups"]:
            if (old := group.pop("stochastic_rounding", None)) is not None:  # of Headroom 0.1.0
                group.setdefault("code_rounding", "stochastic" if old else "nearest")
            for key in OPTIONS:
                group.setdefault(key, defaults[key])
            group["nonfinite"] = defaults["nonfinite"]  # which is the same in all groups
        super().__setstate__(state)

    def _check_loaded(self, index: int, group: dict[str, Any]) -> None:
        # A checkpoint of Adam may bring amsgrad: its parameters then stay at float32 moments.
        super()._check_loaded(index, group | {"amsgrad": False})

    def _check_options(self, options: dict[str, Any]) -> None:
        super()._check_options(options)
        if options["amsgrad"]:
            raise ValueError(f"{type(self).__qualname__} does not support amsgrad=True")
        if options["optim_bits"] not in (8, 32):
            raise ValueError(f"optim_bits must be 8 or 32, got {options['optim_bits']}")
        check_number("min_8bit_size", options["min_8bit_size"])
        if not options["min_8bit_size"] >= 0:
            raise ValueError(f"min_8bit_size must be >= 0, got {options['min_8bit_size']}")
        for name, allowed in CHOICES.items():
            value = options[name]
            if type(value) is not type(allowed[0]) or value not in allowed:
                kind = ", as an int" if isinstance(allowed[0], int) else ""
                raise ValueError(f"{name} must be one of {allowed}{kind}, got {value!r}")
        if options["bnb_exact"]:
            if options["block_size"] != 256 or options["code_rounding"] != "nearest":
                raise ValueError("bnb_exact=True needs block_size=256, code_rounding='nearest'")
            if weights_mode(options.get("master"), options.get("rounding", "nearest")).number:
                raise ValueError("bnb_exact=True has a rounding of its own for weights")
            if options["nonfinite"] == "skip_element":
                raise ValueError("bnb_exact=True has a rule of its own for nonfinite elements")
        if options["nonfinite"] != getattr(self, "defaults", options)["nonfinite"]:
            raise ValueError("nonfinite holds for all groups: give it to the constructor")

    # ---- one step -------------------------------------------------------------------------------

    @property
    def skips_nonfinite(self) -> bool:
        return self.defaults["nonfinite"] == "skip_step"

    def layouts(self, group: dict[str, Any]) -> tuple[Layout, ...]:
        as_adam = Layout(
            tuple(
                slot if slot is STEP else slot._replace(dtype=torch.float32)
                for slot in super().layouts(group)[0].slots
            )
        )
        codes = (Slot(name, dtype=torch.uint8) for name in ("exp_avg", "exp_avg_sq"))
        zeros = partial(zero_absmaxs, block_size=group["block_size"])
        absmaxs = (
            Slot(name, lambda param: zeros(param).shape, torch.float32, first=zeros)
            for name in ABSMAXS
        )
        return as_adam, Layout((*codes, *absmaxs, STEP))

    def layout_index(self, param: Tensor, group: dict[str, Any]) -> int:
        entry = self.state.get(param)
        if entry and "exp_avg" in entry:
            return self.layout_index_of_state(entry)
        if param in self._overrides:
            return int(self._overrides[param] == 8)
        wanted = group["optim_bits"] == 8 and not group["amsgrad"]  # which a checkpoint may bring
        return int(wanted and param.numel() >= group["min_8bit_size"])

    def layout_indices(self, params: list[Tensor], group: dict[str, Any]) -> list[int]:
        # Most have a state. Every step asks for thousands of small parameters.
        return [
            int(entry["exp_avg"].dtype is torch.uint8)
            if entry and "exp_avg" in entry
            else self.layout_index(param, group)
            for param, entry in zip(params, map(self.state.get, params))
        ]

    def layout_index_of_state(self, entry: dict[str, Any]) -> int:
        return int(getattr(entry.get("exp_avg"), "dtype", None) == torch.uint8)

    def translated(
        self, param: Tensor, entry: dict[str, Any], group: dict[str, Any]
    ) -> dict[str, Any]:
        entry = dict(entry)
        for name in ABSMAXS:
            scales = entry.get(name)
            if not isinstance(scales, Tensor) or isinstance(scales, DTensor):
                continue
            if scales.layout == torch.strided:  # others are refused later
                shape = zero_absmaxs(param, group["block_size"]).shape
                if scales.shape == (shape.numel(),):  # bitsandbytes has no rows
                    scales = scales.reshape(shape)
                entry[name] = scales.contiguous()
        return entry

    def _options(self, group: dict[str, Any]) -> dict[str, Any]:
        options = super()._options(group)
        options["skip_nonfinite"] = self.defaults["nonfinite"] == "skip_element"
        options["decoupled"] |= group["bnb_exact"]
        return options

    def _prepared(self, group: Options, bucket: Bucket, states: States, options: Options) -> Call:
        if bucket.layout.index != EIGHT_BIT:
            return super()._prepared(group, bucket, states, options)
        del options["amsgrad"]
        is_random = group["code_rounding"] == "stochastic"
        options |= {
            "block_size": group["block_size"],
            "bnb_exact": group["bnb_exact"],
            "seeds": self._seeds(group, bucket.owners) if is_random else None,
        }
        if isinstance(states, Tensor):
            return table_call(torch.ops.headroom._adamw8bit_table_, bucket, states, options)
        exp_avgs, exp_avg_sqs, *residuals, absmaxs, sq_absmaxs, steps = states
        columns = bucket.params, bucket.grads, exp_avgs, exp_avg_sqs, *residuals
        lists = [list(column) for column in columns]
        views = {}
        for k, tensors in enumerate(zip(*lists)):
            if _is_moved(*tensors):
                order = sorted(range(tensors[0].dim()), key=tensors[2].stride, reverse=True)
                for column, tensor in zip(lists, tensors):
                    column[k] = tensor.permute(order)
                views[k] = lists[0][k]
                lists[0][k] = views[k].contiguous()
        params, grads, exp_avgs, exp_avg_sqs, *residuals = lists
        run = partial(
            torch.ops.headroom.adamw8bit_,
            params,
            grads,
            exp_avgs,
            unpadded(absmaxs, params, group["block_size"]),
            exp_avg_sqs,
            unpadded(sq_absmaxs, params, group["block_size"]),
            steps,
            residuals[0] if residuals else [],
            **options,
        )

        def call() -> None:
            run()
            for k, view in views.items():
                view.copy_(params[k])

        return call

    def _seeds(self, group: dict[str, Any], params: list[Tensor]) -> list[int]:
        """Returns a seed for every parameter, distinct for each shard of one."""
        places = places_in(self.param_groups)
        keys = [(shard_number(param) << 20) + places[param] for param in params]
        return [signed((group["seed"] << 32) + key % 2**32) for key in keys]


class AdamW8bit(Adam8bit):
    r"""AdamW with moments of one byte: :class:`Adam8bit` with decoupled weight decay.

    Example::

        optimizer = headroom.optim.AdamW8bit(model.parameters(), lr=3e-4, weight_decay=0.1)
        optimizer.override(model, "weight", bits=32)  # float32 moments for one, if you like
    """

    _always_decoupled = True
    __init__ = decoupling(Adam8bit.__init__)


def _is_moved(param: Tensor, *others: Tensor) -> bool:
    """Returns whether a parameter's memory order is no longer that of its codes. The op's blocks
    follow the parameter's order, and the state's blocks the order in which the codes were made."""
    return (
        others[2].stride() != param.stride()
        and is_dense(param)
        and all(other.shape == param.shape for other in others)
    )
