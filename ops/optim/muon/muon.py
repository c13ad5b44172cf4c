"""Muon, fused and batched: a drop-in for torch's, with AdamW for what is no hidden matrix."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.optim.optimizer import ParamsT

from ..._core.dtensor import from_shard, sharded_dim
from ..._core.grouping import grouped
from ..._core.registration import FLOATS
from ..._core.sizes import parse_bytes
from ..._core.weight_modes import Master, Rounding, mode_of
from ...param_states.block_scales import unpadded
from ...param_states.plan import Bucket, Call, Options, States
from ...param_states.states import STEP, Layout, Slot
from ..adam import AdamW
from ..base import Optimizer
from ..options import of_groups, own_arguments
from .choice import FLAT, Chooser, MuonChoice, check_matrices
from .matrices import Split, as_split, column_parts
from .rule import JORDAN, AdjustLr, Precision, Triple, Variant, check_rule, dtype_of, iterations
from .sharded import check_even, prepared_sharded, sharding_of
from .steps import ABSMAX, MOMENT, ROW_VAR, Rule, Workspace, batched, matrices_of

OF_EVERY_OPTIMIZER = ("count_stalled", "offload", "budget")
OF_THE_WHOLE = ("params", "adamw", "convolutions", "workspace", "process_group")
ADAMW = {"betas": (0.9, 0.999), "eps": 1e-8, "amsgrad": False}
_printed: set[str] = set()  # reports
COMPATIBLE = {"capturable": False, "differentiable": False, "foreach": None, "fused": None}


class MatrixOptimizer(Optimizer):
    """Makes an AdamW step groups with ``use_muon`` by Muon; comes before it among the bases."""

    choice: MuonChoice | None = None  # what the default rule chose, if it was asked
    _refuses_host_step = (
        "Muon multiplies matrices in every step, and products of matrices belong on the device: "
        'use offload="state"'
    )
    takes_model = True  # and not a list of parameters, which do not say what they are
    _begins = False  # whether the constructor adds its groups

    def _begin(self, given: dict[str, Any], **more_defaults: Any) -> None:
        """Takes the arguments of a constructor; all but those of the whole optimizer are options of
        groups, beside the options that it does not have."""
        whole = {name: given.pop(name) for name in OF_THE_WHOLE}
        own = {name: given.pop(name) for name in OF_EVERY_OPTIMIZER}
        split = given.pop("split")
        given["ns_coefficients"] = _plain(given["ns_coefficients"])
        defaults = of_groups(ADAMW | COMPATIBLE | {"decoupled_weight_decay": True} | given)
        defaults |= {"use_muon": True, "split": None, "transposed": False} | more_defaults
        check_rule(defaults)
        self._workspace = parse_bytes(whole["workspace"], "workspace")
        self._process_group = whole["process_group"]
        self._memories: WeakValueDictionary[torch.device, Workspace] = WeakValueDictionary()
        self._adamw = ADAMW | dict(whole["adamw"] or {})
        if odd := self._adamw.keys() - {*ADAMW, "lr", "weight_decay"}:
            raise ValueError(f"adamw has {sorted(odd)[0]!r}, which is no option of AdamW's groups")
        self._split, self._convolutions = dict(split or {}), bool(whole["convolutions"])
        chooser = Chooser(self._split, self._convolutions)
        groups = chooser.groups_of(whole["params"])
        chooser.check_split()
        self.choice = chooser.choice if chooser.choice.names else None
        self._begins = True
        Optimizer.__init__(self, groups, defaults, **own)
        self._begins = False
        report = f"{type(self).__name__} chose:\n{self.choice}"
        first = not (dist.is_available() and dist.is_initialized() and dist.get_rank())
        if self.choice is not None and first and report not in _printed:  # plans make many
            _printed.add(report)
            print(report, file=sys.stderr)

    @property
    def _whole_arguments(self) -> dict[str, Any]:
        """Returns the arguments of the constructor that are options of no group."""
        return {name: getattr(self, f"_{name}") for name in (*OF_THE_WHOLE[1:], "split")}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group as other optimizers do. One without ``use_muon`` becomes several, by the
        rule that chooses hidden matrices, which needs names."""
        groups = [param_group]
        if not self._begins and isinstance(param_group, dict):
            groups = Chooser(self._split, self._convolutions).groups_of([param_group])
        for group in groups:
            if "split" in group:
                group["split"] = as_split(group["split"])
            if "ns_coefficients" in group:
                group["ns_coefficients"] = _plain(group["ns_coefficients"])
            super().add_param_group(group if group["use_muon"] else self._adamw | group)

    def _check_options(self, options: dict[str, Any]) -> None:
        super()._check_options(options)
        for name in ("use_muon", "transposed"):
            if not isinstance(options[name], bool):
                raise TypeError(f"{name} must be True or False, got {options[name]!r}")
        if options["use_muon"]:
            check_rule(options)
            check_matrices(options.get("params", ()), options["split"])

    def __setstate__(self, state: dict[str, Any]) -> None:
        groups = state["param_groups"]
        for group, own in zip(groups, self.__dict__.get("param_groups", groups)):
            for name, value in own.items():  # of torch's Muon
                if name not in ("params", "param_names"):
                    group.setdefault(name, value)
        super().__setstate__(state)
        self.__dict__.setdefault("_memories", WeakValueDictionary())

    def __getstate__(self) -> dict[str, Any]:
        names = ("_workspace", "_adamw", "_split", "_convolutions", "choice")
        own = {name: self.__dict__[name] for name in names}
        return super().__getstate__() | own | {"_process_group": None}

    # ---- states ---------------------------------------------------------------------------------

    def _matrix_layout(self, group: dict[str, Any]) -> Layout:
        """Returns the layout of states in a group of matrices, with moments that are numbers."""
        dtype = group.get("state_dtype") or (torch.float32 if group.get("master") else None)
        slots = [Slot(MOMENT, dtype=dtype, loads=FLOATS)]
        if group["normuon"] is not None:
            shape = partial(_row_shape, split=group["split"])
            first = partial(_zero_row_vars, split=group["split"])
            slots.append(Slot(ROW_VAR, shape, torch.float32, first=first))
        if mode_of(group).is_random:  # random numbers depend on the step, and nothing else does
            slots.append(STEP)
        return Layout(tuple(slots), is_whole=True)

    def _layouts(self, group: dict[str, Any]) -> tuple[Layout, ...]:
        return (self._matrix_layout(group),) if group["use_muon"] else super()._layouts(group)

    def _translated(
        self, param: Tensor, entry: dict[str, Any], group: dict[str, Any]
    ) -> dict[str, Any]:
        entry = super()._translated(param, entry, group)
        if group["use_muon"] and mode_of(group).is_random and "step" not in entry:
            entry = entry | {"step": 0.0}  # torch's Muon does not count
        return entry

    # ---- one step -------------------------------------------------------------------------------

    @torch._disable_dynamo  # batches depend on a bound in bytes: a compiled loop breaks here
    def _step(self, max_grad_norm: float | None) -> None:
        super()._step(max_grad_norm)

    def _options(self, group: dict[str, Any]) -> dict[str, Any]:
        return {} if group["use_muon"] else super()._options(group)

    def _prepared(self, group: Options, bucket: Bucket, states: States, options: Options) -> Call:
        if not group["use_muon"]:
            return super()._prepared(group, bucket, states, options)
        for param in bucket.owners:
            if param.dim() < 2:  # FSDP1 replaces the data of parameters
                raise RuntimeError(FLAT.format(f"a parameter has shape {list(param.shape)} now"))
        rule = _rule_of(group)
        columns = dict(zip(bucket.layout.names, states))
        if ABSMAX in columns:
            columns[ABSMAX] = unpadded(columns[ABSMAX], bucket.params, rule.block_size)
        device = bucket.params[0].device
        memory = self._memories.get(device) or Workspace(device)
        self._memories[device] = memory
        calls = []
        shardings = [sharding_of(owner) for owner in bucket.owners]
        whole = [not isinstance(owner, DTensor) for owner in bucket.owners]
        kinds = grouped(range(len(shardings)), lambda i: (shardings[i], whole[i]))
        for (sharding, is_plain), chosen in kinds.items():
            part = _chosen(bucket, chosen)
            own = {name: [column[i] for i in chosen] for name, column in columns.items()}
            given = dict(options)
            if "weight_seeds" in given:
                given["weight_seeds"] = [given["weight_seeds"][i] for i in chosen]
            if sharding is None:
                shapes = [param.shape for param in part.params]
                matrices, put_back = matrices_of(part, own, rule, shapes)
                ranks = self._process_group if is_plain else None
                run = batched(rule, matrices, given, self._workspace, memory, ranks)
                calls += [run, put_back]
            else:
                if self._paging is not None:
                    check_even(part.owners, sharding)
                run = prepared_sharded(rule, part, own, sharding, given, self._workspace, memory)
                calls.append(run)

        def call() -> None:
            for run in calls:
                run()

        return call


class Muon(MatrixOptimizer, AdamW):
    r"""Muon, fused and batched: a drop-in for :class:`torch.optim.Muon` that steps a whole model.

    Hidden matrices are updated by Muon (Jordan et al., kellerjordan.github.io/posts/muon): by their
    momentum, of which Newton-Schulz's iteration made all singular values about 1. All other
    parameters are updated by AdamW, in the same object. One op gathers the momentum of a batch of
    matrices, batched products of matrices of one size iterate, and one op updates the weights;
    nothing waits for the device, and a step can be captured in a CUDA graph.

    Args:
        params: a model, or its ``named_parameters()``: the hidden matrices are chosen by their
            modules or names, and :attr:`choice`, which is also printed, says which: the weights of
            linear layers, of experts, and what ``split`` names. Embeddings, heads, norms, biases,
            convolutions and all other parameters are AdamW's. Or parameters of two or three
            dimensions, which are all Muon's; or groups, with ``use_muon`` True or False, or without
            it and with names, beside which ``"model"`` may be the model that has them.
        lr, weight_decay, momentum, nesterov, eps, ns_steps, adjust_lr_fn: as in
            :class:`torch.optim.Muon`. With ``"match_rms_adamw"`` the learning rate is one of AdamW,
            so that one serves both.
        ns_coefficients: of the polynomials a x + b x^3 + c x^5: a name (``"jordan"``, torch's;
            ``"you_jiacheng"``; ``"polar_express"``), three numbers, or three for each iteration.
            The last are repeated where ``ns_steps`` is more.
        adamw: options of groups that AdamW steps: ``lr``, ``weight_decay``, ``betas``, ``eps``;
            ``{"lr": 3e-4}``. What is not given is the ``lr`` and ``weight_decay`` of this optimizer
            and the default of :class:`AdamW`.
        split: parts of packed matrices, each of which is made orthogonal by itself: from the end of
            a name to a number of equal parts of the rows, or to their sizes, which add up to the
            rows or else to the columns: ``{"qkv": (1024, 256, 256)}``. Of parts that lie by turns,
            as queries, keys and values of each of 16 heads, how often and their sizes of one turn:
            ``{"qkv": (16, (64, 64, 64))}``. Without it, known layouts are split: ``gate_up`` and
            ``gate_up_proj`` in 2, ``qkv``, ``Wqkv``, ``in_proj_weight``, ``c_attn`` of GPT-2 and
            GPTBigCode and ``qkv_proj`` of Phi, CodeGen and MiniMax in queries, keys and values,
            and the gates of recurrent layers and cells. In a group, ``split`` is that of all its
            matrices, and ``transposed`` says that their rows are inputs, as known for ``Conv1D``
            of transformers.
        convolutions: whether convolutions of two dimensions or more, and of more than one channel,
            are Muon's, too, as matrices ``[out, everything else]``.
        variant: ``"standard"``, or ``"gram"``, which iterates on square matrices: fewer operations
            where one side is several times the other.
        ns_dtype: of the products: ``"bfloat16"``, torch's; ``"float16"``, the default of
            ``"gram"``; or ``"float32"``, for processors without 16-bit products.
        normuon: NorMuon's row scaling (arXiv:2510.05491): the weight of old mean squares of rows,
            0.95 in the paper. None: rows are not scaled.
        workspace: bytes, or text, that a step may take for its matrices; at least what one takes.
        process_group: of ranks that have the same weights and gradients, as under DDP: each makes
            its share of the matrices orthogonal and gets the others'. None: each makes all.
        maximize: go up the gradient.
        state_dtype: dtype of the moments. None: the parameter's, as in torch, or float32 with
            ``master``.
        max_grad_norm, master, rounding, seed, count_stalled, offload, budget: as in :class:`Adam`.

    A parameter of three dimensions is a batch of matrices. Of DTensors (FSDP2) momentum and update
    are sharded, and whole matrices are made orthogonal: their rows are gathered, as many as the
    workspace has room for, and each rank does its share. A shard alone is never taken for the
    matrix: flat parameters of FSDP1 are refused.

    The state of a matrix is ``momentum_buffer``, with ``normuon`` ``row_var``, and ``step`` where
    weights are rounded at random; ``master`` and ``rounding`` add what they add in :class:`Adam`.
    States of other parameters are :class:`AdamW`'s. A checkpoint of :class:`torch.optim.Muon`
    loads, and torch's loads this one.

    Raises:
        ValueError: parameters without names are not all matrices, a split does not fit or has a
            name that no matrix has, or an option is out of range.

    Example::

        model = torch.nn.Sequential(torch.nn.Embedding(10, 16), torch.nn.Linear(16, 16))
        optimizer = headroom.optim.Muon(model, lr=0.02, adamw={"lr": 3e-4})
    """

    def __init__(
        self,
        params: ParamsT | nn.Module,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: str | Triple | Sequence[Triple] = JORDAN,
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: AdjustLr | None = None,
        *,
        adamw: Mapping[str, Any] | None = None,
        split: Mapping[str, Split] | None = None,
        convolutions: bool = False,
        variant: Variant = "standard",
        ns_dtype: Precision | None = None,
        normuon: float | None = None,
        workspace: int | str = "256 MiB",
        process_group: Any = None,
        maximize: bool = False,
        state_dtype: torch.dtype | None = None,
        max_grad_norm: float | None = None,
        master: Master | None = None,
        rounding: Rounding = "nearest",
        seed: int = 0,
        count_stalled: bool = False,
        offload: Literal["state", "step"] | None = None,
        budget: int | str | None = None,
    ) -> None:
        self._begin(own_arguments(locals()))


def _plain(coefficients: Any) -> Any:
    """Returns coefficients as a name or tuples, which files of states hold."""
    if isinstance(coefficients, str) or not isinstance(coefficients, Sequence):
        return coefficients
    return tuple(tuple(one) if isinstance(one, Sequence) else one for one in coefficients)


def _rule_of(group: dict[str, Any]) -> Rule:
    return Rule(
        coefficients=iterations(group["ns_coefficients"], group["ns_steps"]),
        dtype=dtype_of(group),
        block_size=group.get("block_size", 256),
        **{name: group[name] for name in Rule._fields if name in group and name != "block_size"},
    )


def _chosen(bucket: Bucket, chosen: list[int]) -> Bucket:
    """Returns some of the parameters of a bucket."""
    lists = (bucket.owners, bucket.params, bucket.grads)
    return Bucket(bucket.layout, *([column[i] for i in chosen] for column in lists))


def _row_shape(param: Tensor, split: Split, here: Tensor | None = None) -> Sequence[int]:
    """Returns the shape of the mean squares of rows: those of a parameter, or of a shard of it, or
    where its columns are split those of each part."""
    shape = (param if here is None else here).shape[: 2 if param.dim() == 3 else 1]
    parts = column_parts(param.shape, split)
    return shape if parts == 1 else (*shape[:-1], parts, shape[-1])


def _zero_row_vars(param: Tensor, split: Split) -> Tensor:
    """Returns zeros for the mean squares of the rows of a parameter's matrices."""
    local = param.to_local() if isinstance(param, DTensor) else param
    shape = _row_shape(param, split, local)
    zeros = torch.zeros(shape, dtype=torch.float32, device=local.device)
    if not isinstance(param, DTensor):
        return zeros
    shape = torch.Size(_row_shape(param, split))
    stride = torch.empty(shape, device="meta").stride()
    rows, last = int(param.dim() == 3), len(shape) - 1  # where a parameter has rows, and they do

    def placed(one: Any) -> Any:
        dim = sharded_dim(one)
        if dim is None or dim > rows:
            return Replicate()
        return one if dim < rows or rows == last else Shard(last)

    placements = [placed(one) for one in param.placements]
    return from_shard(zeros, param.device_mesh, placements, shape=shape, stride=stride)
