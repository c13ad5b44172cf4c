"""Adam and AdamW with 8-bit moments."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from .._core.dtensor import shard_number
from .._core.weight_modes import Master, Rounding, weights_mode
from ..functional.adamw8bit import signed
from ..param_states.plan import Bucket, Call, Options, States, places_in, table_call
from .adam import Adam, decoupling
from .eight_bit import EIGHT_BIT, EightBit, Nonfinite, in_code_order
from .options import own_arguments

CodeRounding = Literal["nearest", "stochastic"]


class Adam8bit(EightBit, Adam):
    r"""Adam with moments of one byte: :class:`Adam` with 2 bytes of state per parameter instead of
    8.

    A moment is a code of the dynamic map per element and a float32 scale per block of consecutive
    elements (Dettmers et al., arXiv:2110.02861), bitsandbytes' format. One op updates all
    parameters of a group and device. Rounding never makes a nonzero second moment zero, so that no
    update can blow up; see ``hr_adamw8bit`` in ``headroom.h``.

    Args:
        params, lr, betas, eps, weight_decay, decoupled_weight_decay: as in :class:`Adam`.
        maximize, foreach, capturable, differentiable, fused, max_grad_norm: as in :class:`Adam`.
        master, rounding, count_stalled, offload, budget: as in :class:`Adam`. A bfloat16 parameter
            with ``master="remainder16"`` takes 6 bytes with its state.
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

    _code_names = ("exp_avg", "exp_avg_sq")
    _own_options = (*EightBit._own_options, "bnb_exact", "code_rounding", "seed")
    _choices = EightBit._choices | {"code_rounding": get_args(CodeRounding)}

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
        offload: Literal["state", "step"] | None = None,
        budget: int | str | None = None,
        min_8bit_size: int = 4096,
        block_size: int = 256,
        bnb_exact: bool = False,
        code_rounding: CodeRounding = "nearest",
        nonfinite: Nonfinite = "propagate",
    ) -> None:
        given = own_arguments(locals())
        self._overrides: dict[Tensor, int] = {}
        names = [name for name in self._own_options if name in given and name != "seed"]
        own = {name: given.pop(name) for name in names}
        self._more_defaults = {"optim_bits": 8, "seed": seed} | own
        super().__init__(**given)

    def __setstate__(self, state: dict[str, Any]) -> None:
        for group in state["param_groups"]:
            if (old := group.pop("stochastic_rounding", None)) is not None:  # of Headroom 0.1.0
                group.setdefault("code_rounding", "stochastic" if old else "nearest")
        super().__setstate__(state)

    def _check_loaded(self, index: int, group: dict[str, Any]) -> None:
        # A checkpoint of Adam may bring amsgrad: its parameters then stay at float32 moments.
        super()._check_loaded(index, group | {"amsgrad": False})

    def _check_options(self, options: dict[str, Any]) -> None:
        if options["bnb_exact"]:
            if options["block_size"] != 256 or options["code_rounding"] != "nearest":
                raise ValueError("bnb_exact=True needs block_size=256, code_rounding='nearest'")
            if weights_mode(options.get("master"), options.get("rounding", "nearest")).number:
                raise ValueError("bnb_exact=True has a rounding of its own for weights")
            if options["nonfinite"] == "skip_element":
                raise ValueError("bnb_exact=True has a rule of its own for nonfinite elements")
        super()._check_options(options)
        if options["amsgrad"]:
            raise ValueError(f"{type(self).__qualname__} does not support amsgrad=True")

    # ---- one step -------------------------------------------------------------------------------

    def _layout_index(self, param: Tensor, group: dict[str, Any]) -> int:
        chosen = super()._layout_index(param, group)
        # A checkpoint may bring amsgrad: what has no state then gets float32 moments.
        is_free = not self.state.get(param) and param not in self._overrides
        return 0 if group["amsgrad"] and is_free else chosen

    def _prepared(self, group: Options, bucket: Bucket, states: States, options: Options) -> Call:
        options["decoupled"] |= group["bnb_exact"]
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
        lists, scales, put_back = in_code_order(
            [bucket.params, bucket.grads, exp_avgs, exp_avg_sqs, *residuals],
            2,
            [absmaxs, sq_absmaxs],
            group["block_size"],
        )
        params, grads, exp_avgs, exp_avg_sqs, *residuals = lists
        run = partial(
            torch.ops.headroom.adamw8bit_,
            params,
            grads,
            exp_avgs,
            scales[0],
            exp_avg_sqs,
            scales[1],
            steps,
            residuals[0] if residuals else [],
            **options,
        )

        def call() -> None:
            run()
            put_back()

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
