"""What is known of an aten operation before it is called: its schema, and how it is computed."""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from . import _draws
from ._memory import Raw, host
from .kernels import KERNELS

NUMBERS = {int, float, bool, complex}  # what torch wraps as tensors arrives as a number
_CPU_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
_CPU = torch.device("cpu")
_HALF = {
    d
    for d in vars(torch).values()
    if isinstance(d, torch.dtype) and d.is_floating_point and d.itemsize <= 2
}
# Of a number beside a tensor with dimensions, whose dtype the result has: no bit is lost.
_EXACT = {(float, True): torch.float64, (int, True): torch.float64, (int, False): torch.int64}
EMPTIES = {
    name: torch.library.get_kernel(f"aten::{name}", "CUDA")
    for name in ("empty.memory_format", "empty_strided", "resize_")
}

_eval_frame = torch._C._dynamo.eval_frame
_PASSED_OVER = _eval_frame._FrameExecStrategy(
    _eval_frame._FrameAction.SKIP, _eval_frame._FrameAction.SKIP
)

HOST_KERNELS: dict = {}
"""The CPU's own kernels of operations for which others were registered, by their names."""

# What allocates, makes views, or asks about a tensor stays torch's own.
KEPT = {
    *EMPTIES,
    *"""_reshape_alias as_strided unfold view view_as_complex view_as_real alias record_stream set_
    set_.source_Storage set_.source_Storage_storage_offset set_.source_Tensor is_set_to is_pinned
    _pin_memory _efficientzerotensor _fused_sdp_choice cudnn_is_acceptable _use_cudnn_ctc_loss
    _use_cudnn_ctc_loss.Tensor _use_miopen_ctc_loss _use_miopen_ctc_loss.Tensor _to_sparse
    _to_sparse.sparse_dim""".split(),
}
# Made of other operations and of kernels that are no operations.
COMPOSITE = ("convolution_backward", "copy_")
# Their CUDA code reads values of the device to know the sizes of results, or returns such a value.
_SIZES_FROM_VALUES = set(
    """nonzero nonzero.out masked_select masked_select.out _unique _unique2 unique_consecutive
    unique_dim unique_dim_consecutive bincount repeat_interleave.Tensor equal""".split()
)
# They take masks, of which their CUDA code asks what is not zero.
_TAKES_MASKS = set("index index_put index_put_ _index_put_impl_".split())
# Which shapes results have if so many elements of a tensor of so many dimensions are not zero.
_SHAPES = {
    "nonzero": lambda count, dims: (count, dims),
    "masked_select": lambda count, dims: (count,),
}
# Their CUDA code reads results of operations within it, which therefore are computed.
_READS = set("multinomial multinomial.out segment_reduce".split())
# Their CUDA code calls cuFFT or cuSOLVER, reads what kernels within it counted (``mode``), or makes
# what cannot be passed to Python (``pow``: a number that is wrapped as a tensor of the device).
_WITHOUT_HOST_CODE = set(
    """_fft_c2c _fft_c2r _fft_r2c _cholesky_solve_helper _linalg_det _linalg_eigh _linalg_eigvals
    _linalg_slogdet _linalg_solve_ex _linalg_svd cholesky_inverse geqrf linalg_cholesky_ex
    linalg_eig linalg_eigvals linalg_householder_product linalg_inv_ex linalg_ldl_factor_ex
    linalg_ldl_solve linalg_lstsq linalg_lu linalg_lu_factor_ex linalg_lu_solve linalg_matrix_exp
    linalg_matrix_sqrth linalg_polar linalg_qr linalg_solve_triangular ormqr triangular_solve
    mode pow.Scalar pow.Scalar_out""".split()
)
# They write each element of their first argument, whatever it was.
_FILLS = set(
    """zero_ fill_ normal_ uniform_ random_ bernoulli_ exponential_ log_normal_ cauchy_ geometric_
    _foreach_zero_""".split()
)
# Their CUDA kernels keep statistics and results in f32 where the CPU's do not.
_WIDENED = set(
    """native_layer_norm native_layer_norm_backward native_group_norm native_group_norm_backward
    native_batch_norm native_batch_norm_backward _native_batch_norm_legit _fused_rms_norm
    _slow_conv2d_forward slow_conv_transpose2d slow_conv_transpose3d slow_conv_dilated2d
    slow_conv_dilated3d convolution_backward""".split()
)


def cannot_compute(name: str, why: object) -> NotImplementedError:
    """Returns the error of an operation whose values the software device cannot give."""
    return NotImplementedError(f"The software device cannot compute {name}: {why}.")


class Operation:
    """An operation: its schema, torch's own code for a device, and what computes its values."""

    def __init__(self, name: str, key: str = "CUDA"):
        self.name, self.bytes = name, name.encode()
        self.native = torch.library.get_kernel(name, key)

    def __getattr__(self, attribute: str):
        # The rest is found out at the first call: there are 1,200 operations, and few are called.
        if "_sizes" in self.__dict__:
            raise AttributeError(attribute)
        self._prepare()
        return getattr(self, attribute)

    def _prepare(self) -> None:
        base, _, overload = self.name.partition(".")
        namespace, _, packet = base.partition("::")
        short = self.name.removeprefix("aten::")
        self.op = getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")
        schema = self.op._schema
        at, named, self._generator = [], [], None
        for i, a in enumerate(schema.arguments):
            kind = str(a.type)
            if "Generator" in kind:
                self._generator = (i, a.name)
            if "Tensor" not in kind:
                continue
            writes = a.alias_info is not None and a.alias_info.is_write
            place = ("List" in kind, writes, bool(a.is_out))
            named.append((a.name, *place)) if a.kwarg_only else at.append((i, *place))
        self._at, self._named = tuple(at), tuple(named)
        self._single = tuple(i for i, many, *_ in at if not many)
        self._writes = any(writes for *_, writes, _ in at + named)
        self._names = [a.name for a in schema.arguments]
        self._returns = len(schema.returns)
        self._aliases = [self._alias(schema, r) for r in schema.returns]
        self._new = tuple(
            i
            for i, r in enumerate(schema.returns)
            if self._aliases[i] is None and "Tensor" in str(r.type)
        )
        self.random = torch.Tag.nondeterministic_seeded in self.op.tags
        self.sizes_from_values = short in _SIZES_FROM_VALUES
        self.takes_masks = short.partition(".")[0] in _TAKES_MASKS
        self.reads = short in _READS
        self._written_here = KERNELS.get(short)
        self.host_code = not (
            self.sizes_from_values
            or short in _WITHOUT_HOST_CODE
            or short.partition(".")[0] in _WITHOUT_HOST_CODE
            or getattr(self._written_here, "absent_library", False)
        )
        # The bytes that a library takes which is not there.
        self.workspace = getattr(self._written_here, "workspace", None)
        self._cpu = None
        if self._written_here is None:
            with contextlib.suppress(RuntimeError):
                own = HOST_KERNELS.get(self.name)
                self._cpu = own or torch.library.get_kernel(self.name, "CPU")
        else:
            self._takes_state = "state" in inspect.signature(self._written_here).parameters
            self.random = self._takes_state
        self.computable = self._cpu is not None or self._written_here is not None
        self.makes_tensors = bool(self._new)
        self._numbers = torch._C._should_allow_numbers_as_tensors(packet)
        self._widen = short.partition(".")[0] in _WIDENED
        self.fills = short.partition(".")[0] in _FILLS or any(out for *_, out in at + named)
        self._sizes: dict = {}

    @staticmethod
    def _alias(schema, returned) -> int | None:
        """Returns which argument is returned, if one is."""
        info = returned.alias_info
        if info is None or not info.is_write:
            return None
        for i, a in enumerate(schema.arguments):
            if a.alias_info is not None and a.alias_info.before_set == info.before_set:
                return i
        return None

    # ---- Arguments ------------------------------------------------------------------------------

    def _values(self, args, kwargs) -> Iterator[tuple[object, bool]]:
        """Yields each argument that is a tensor or a list of them, and whether it is written."""
        for i, _, writes, _ in self._at:
            if i >= len(args):
                break
            yield args[i], writes
        if kwargs:
            for name, _, writes, _ in self._named:
                yield kwargs.get(name), writes

    def tensors(self, args, kwargs) -> list[Tensor]:
        """Returns all tensors of a call."""
        found = []
        for v, _ in self._values(args, kwargs):
            if isinstance(v, Tensor):
                found.append(v)
            elif isinstance(v, (list, tuple)):
                found += [t for t in v if t is not None]
        return found

    def written(self, args, kwargs) -> list[Tensor]:
        """Returns the tensors that a call writes."""
        if not self._writes:
            return []
        found = []
        for v, writes in self._values(args, kwargs):
            if writes and v is not None:
                found += v if isinstance(v, (list, tuple)) else [v]
        return found

    def mapped(self, args, kwargs, f: Callable) -> tuple[list, dict]:
        """Returns the arguments with each tensor ``t`` replaced by ``f(t, written, out)``."""
        args = list(args)
        for i, many, writes, out in self._at:
            if i >= len(args):
                break
            v = args[i]
            if many:
                args[i] = [None if t is None else f(t, writes, out) for t in v]
            elif v is not None:
                args[i] = f(v, writes, out)
        kwargs = dict(kwargs)
        if kwargs:
            for name, many, writes, out in self._named:
                v = kwargs.get(name)
                if v is not None:
                    kwargs[name] = [f(t, writes, out) for t in v] if many else f(v, writes, out)
        return args, kwargs

    def without_numbers(self, args):
        """Returns the arguments with numbers that torch had wrapped as tensors again, of dtypes
        with which results have the dtype that they have with the number."""
        for i in self._single:
            if i < len(args) and type(args[i]) in NUMBERS:
                args = list(args)
                args[i] = self._wrapped(args, i)
        return args

    def _wrapped(self, args, i: int) -> Tensor:
        first = 1 if self.name.startswith("aten::where") else 0  # not the condition
        others = [args[k] for k in self._single[first:] if k != i and k < len(args)]
        others = [v for v in others if v is not None] or [args[i]]
        dtype = torch.result_type(others[0], args[i])
        if isinstance(others[0], Tensor) and others[0].dtype == dtype and others[0].dim():
            dtype = _EXACT.get((type(args[i]), dtype.is_floating_point), dtype)
        return _number(args[i], dtype)

    # ---- Values ---------------------------------------------------------------------------------

    def state(self, args, kwargs, index: int, captured: bool):
        """Returns a function that returns the state from which a call draws, or None."""
        if not self.random:
            return None
        given = None
        if self._generator is not None:
            i, name = self._generator
            given = args[i] if i < len(args) else kwargs.get(name)
            if given is not None and given.device.type != "cuda":
                return None  # its CUDA code says what is wrong
        return _draws.state_of(given, index, captured)

    def compute(self, args, kwargs, state) -> tuple[object, list[Tensor]]:
        """Returns the results of the CPU's kernel, and the copies into which it wrote."""
        try:
            return self._compute(args, kwargs, state, self._widen)
        except (RuntimeError, TypeError) as e:
            first = e.with_traceback(None)
        lacks = isinstance(first, NotImplementedError) or "not implemented for" in str(first)
        if not self._widen and any(t.dtype in _HALF for t in self._all(args, kwargs)):
            with contextlib.suppress(RuntimeError, TypeError):
                found = self._compute(args, kwargs, state, True)
                self._widen = True
                return found
        raise cannot_compute(self.name, first) if lacks else first

    def _all(self, args, kwargs) -> list:
        found: list = []
        self.mapped(args, kwargs, lambda t, *_: type(t) in NUMBERS or found.append(t))
        return found

    def _compute(self, args, kwargs, state, widen: bool):
        copies: list[Tensor] = []
        argument = functools.partial(_argument, copies, widen)
        args, kwargs = self.mapped(args, kwargs, argument)
        if "device" in kwargs:
            kwargs["device"] = _CPU
        draws = state() if state is not None else None
        with torch._C._AutoDispatchBelowAutograd():
            if self._written_here is not None:
                if self._takes_state:
                    kwargs["state"] = draws
                return self._written_here(*args, **kwargs), copies
            if draws is None:
                return self._run(args, kwargs), copies
            if self._generator is not None:
                i, name = self._generator
                if i < len(args):
                    args[i] = _draws.generator(draws)
                else:
                    kwargs[name] = _draws.generator(draws)
                return self._run(args, kwargs), copies
            with _draws.Seeded(draws):
                return self._run(args, kwargs), copies

    def _run(self, args, kwargs):
        for i in self._single:
            if i < len(args) and type(args[i]) in NUMBERS:
                if self._numbers:
                    return self.op(*args, **kwargs)
                args[i] = self._wrapped(args, i)
        return self._cpu.call_boxed(_CPU_KEYS, *args, **kwargs)

    # ---- Results --------------------------------------------------------------------------------

    def fresh(self, result, computed) -> Iterator[tuple]:
        """Yields each tensor that the CUDA code made, and its values."""
        if self._returns == 1:
            result, computed = (result,), (computed,)
        for i in self._new:
            t, values = result[i], computed[i]
            if isinstance(t, (list, tuple)):
                yield from zip(t, values, strict=True)
            elif t is not None and values is not None:
                yield t, values

    def fresh_tensors(self, result) -> list[Tensor]:
        """Returns the tensors that a call made."""
        return [t for t, _ in self.fresh(result, result) if isinstance(t, Tensor)]

    def raw(self, result):
        """Returns where the tensors that a call made lie."""
        if isinstance(result, Tensor):
            return Raw(result) if result.is_cuda else result
        if isinstance(result, (list, tuple)):
            return [self.raw(v) for v in result]
        return result

    def returned(self, args, kwargs, make: Callable, computed):
        """Returns what a call returns: new tensors are made, written arguments are themselves."""
        if not self._returns:
            return None
        found = []
        for i, v in enumerate((computed,) if self._returns == 1 else computed):
            a = self._aliases[i]
            if a is None:
                found.append(make(v))
            else:
                found.append(args[a] if a < len(args) else kwargs[self._names[a]])
        return found[0] if self._returns == 1 else tuple(found)

    # ---- Sizes ----------------------------------------------------------------------------------

    def is_large(self, tensors: list[Tensor], args, kwargs, limit: int) -> bool:
        """Returns whether a tensor of the device that a call reads, writes or makes is large."""
        for t in tensors:
            if t.nbytes > limit and t.is_cuda:
                return True
        if len(tensors) < 2 or not self._new or len(self._single) < len(self._at):
            return False
        if all(t.shape == tensors[0].shape for t in tensors[1:]):
            return False
        if math.prod(sorted(t.numel() for t in tensors)[-2:]) * tensors[0].itemsize <= limit:
            return False
        key = str([v.shape if isinstance(v, Tensor) else v for v in args])
        if key not in self._sizes:
            self._sizes[key] = self._makes_large(args, kwargs, limit)
        return self._sizes[key]

    def with_share(self, share: float | None, args, kwargs) -> Tensor | None:
        """Returns the result of a call whose size depends on what was not computed, as a tensor of
        meta, or None where zeros do as well as other values.

        Args:
            share: which part of the elements is not zero.

        Raises:
            RuntimeError: the size is not known; says what to do.
        """
        short = self.op._schema.name.removeprefix("aten::")
        if short == "equal" or (short == "bincount" and self._has_length(args, kwargs)):
            return None
        if short not in _SHAPES:
            raise RuntimeError(
                f"{self.name} returns as many elements as values say that a rehearsal does not "
                "compute; call it on the CPU, or on tensors of at most 1 MiB"
            )
        if share is None:
            raise RuntimeError(
                f"{self.name} returns as many elements as are not zero among values that a "
                "rehearsal does not compute; say with --nonzero which part of them that is, such "
                "as --nonzero 0.1"
            )
        shape = torch.broadcast_shapes(*(t.shape for t in args))
        of = _SHAPES[short](round(share * math.prod(shape)), len(shape))
        dtype = torch.int64 if short == "nonzero" else args[0].dtype
        return torch.empty(of, dtype=dtype, device="meta")

    @staticmethod
    def _has_length(args, kwargs) -> bool:
        """Returns whether ``bincount`` was called with ``minlength``."""
        return bool(args[2] if len(args) > 2 else kwargs.get("minlength", 0))

    def on_meta(self, args, kwargs):
        """Returns the results of a call as tensors of meta."""
        args, kwargs = self.mapped(args, kwargs, _meta)
        with torch._C._AutoDispatchBelowAutograd():
            return self.op(*args, **kwargs)

    def _makes_large(self, args, kwargs, limit: int) -> bool:
        try:
            result = self.on_meta(args, kwargs)
        except Exception:  # its CUDA code says what is wrong
            return False
        return any(t.nbytes > limit for t in self.fresh_tensors(result))


@functools.lru_cache(4096, typed=True)
def _number(value: object, dtype: torch.dtype) -> Tensor:
    """Returns a number as a tensor, which nothing may write."""
    try:
        return torch.scalar_tensor(value, dtype=dtype)
    except RuntimeError:  # too large for it, and kernels that do nothing do not care
        return torch.ones((), dtype=dtype)


def _meta(t, *_: bool):
    if type(t) in NUMBERS:
        return t
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")


def _argument(copies: list[Tensor], widen: bool, t, writes: bool, out: bool):
    """Returns an argument for the CPU's kernel: a view, or a copy of what the kernel writes."""
    if type(t) in NUMBERS:
        return t
    if type(t) is Raw or t.is_cuda:
        t = host(t)
    if writes:
        t = torch.empty_like(t) if out else t.clone()
    if widen and t.dtype in _HALF:
        t = t.float()
    if writes:
        copies.append(t)
    return t


def register(library: torch.library.Library, short: str, kernel: Callable, key: str) -> None:
    """Registers the kernel of an operation. torch.compile passes over it and all that it calls, and
    would trace these where a part of a program that it cannot compile calls the operation."""
    _eval_frame.set_code_exec_strategy(kernel.__code__, _PASSED_OVER)
    library.impl(short, kernel, key, with_keyset=True, allow_override=True)
