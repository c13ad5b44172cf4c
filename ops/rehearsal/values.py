"""Values on the software device: an operation's own CUDA code runs, the CPU's kernel computes.

A kernel of torch's CUDA code does nothing there, but the code of the host around it is the real
one: its allocations, temporaries, workspaces, checks and errors. So every aten operation with a
CUDA kernel gets one that first runs the CPU's kernel on the same memory, then that CUDA code, and
then copies the results into the tensors that the CUDA code returned or wrote.
"""

from __future__ import annotations

import collections
import ctypes
import functools
import itertools
import threading

import torch
from torch import Tensor

from ._memory import Lent, Raw, extent, write
from ._operations import COMPOSITE, EMPTIES, KEPT, NUMBERS, Operation, cannot_compute, register
from .lines import is_own_read, is_printing, line

libraries: list[torch.library.Library] = []
_EMPTY = "memory that no operation of torch has written"
_PART = "part of a tensor that was not computed"
_UNWRITTEN = (_EMPTY, _PART)
_CUDA_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)


class _Local(threading.local):
    nested = False  # whether the CUDA code of a computed operation is running
    made: list[tuple[int, int, int]] | None = None  # memory that a noted operation has allocated


_local = _Local()


class Device:
    """The software device as the operations see it: its runtime, and what was not computed."""

    def __init__(self, runtime: ctypes.CDLL, limit: int | None):
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        for function, types in (
            (runtime.rehearsal_begin, [pointer]),
            (runtime.rehearsal_touch, [pointer, pointer, size, ctypes.c_int, ctypes.c_char_p]),
            (runtime.rehearsal_enqueue, [pointer, _Callback, pointer]),
            (runtime.rehearsal_capturing, [pointer]),
            (runtime.rehearsal_poison, [pointer, pointer, size]),
            (runtime.cudaMemsetAsync, [pointer, ctypes.c_int, size, pointer]),
        ):
            function.argtypes = types
        self.runtime = runtime
        self.begin = runtime.rehearsal_begin
        self.capturing = runtime.rehearsal_capturing
        self.enqueue, self.take_dropped = runtime.rehearsal_enqueue, runtime.rehearsal_take_dropped
        self.report = runtime.rehearsal_report
        self._poison = runtime.rehearsal_poison
        self._memset, self._touch = runtime.cudaMemsetAsync, runtime.rehearsal_touch
        self.peak_bytes = runtime.rehearsal_peak  # of a device, without the context
        self.ordered = bool(runtime.rehearsal_ordered())
        self.limit = limit
        self.unknown: dict[int, str] = {}  # addresses of small results -> what did not compute them
        self.reads: collections.Counter[str] = collections.Counter()
        self.answer: float | None = None  # what a read of an unknown floating scalar returns
        self.share: float | None = None  # which part of what was not computed is nonzero

    def fill(self, t: Tensor, byte: int) -> None:
        """Sets each byte of ``t`` in the order of the current stream of its device."""
        begin, size = extent(t)
        if size:
            self._memset(begin, byte, size, torch._C._cuda_getCurrentRawStream(t.get_device()))

    def poison(self, device: int, begin: int, size: int) -> None:
        """Fills memory that nothing has written; that is no access."""
        if size:
            with torch.cuda.device(device):
                self._poison(torch._C._cuda_getCurrentRawStream(device), begin, size)

    def touch_new(self, made: list[tuple[int, int, int]], name: bytes) -> None:
        """Notes that an operation uses memory that it has allocated and may have freed."""
        for index, begin, size in made:
            with torch.cuda.device(index):
                self._touch(torch._C._cuda_getCurrentRawStream(index), begin, size, True, name)

    def touch(self, read: list[Tensor], written: list[Tensor], name: bytes) -> None:
        """Notes what an operation reads and writes, on the current streams of their devices."""
        for index in {t.get_device() for t in read + written} - {-1}:
            with torch.cuda.device(index):
                stream = torch._C._cuda_getCurrentRawStream(index)
                used = [t for t in read if t.get_device() == index and t.numel()]
                if self.capturing(stream):
                    run = functools.partial(_look, self, [Lent(t) for t in used], name)
                    _later(self, stream, run)
                for t in used:
                    self._touch(stream, *extent(t), False, name)
                for t in written:
                    if t.get_device() == index and t.numel():
                        self._touch(stream, *extent(t), True, name)

    def forget(self, t: Tensor, name: str) -> None:
        """Sets a small tensor that is not computed to zero, and remembers it."""
        if t.is_cuda and 0 < t.nbytes <= self.limit:
            self.fill(t, 0)
            self.unknown[t.data_ptr()] = name

    def source(self, t: Tensor) -> str | None:
        """Returns what has not computed a tensor, or None if its values are right."""
        name = self.unknown.get(t.data_ptr())
        if name is None and t.is_cuda and t.untyped_storage().nbytes() > self.limit:
            return _PART
        return name

    def read(self, t: Tensor) -> float | None:
        """Counts a read of a value that was not computed, with the line of the user's program, and
        returns the value that was given for it, if one was."""
        name = None if self.limit is None else self.source(t)
        if name is None:
            return None
        self.count(name)
        return self.answer if t.is_floating_point() and t.numel() == 1 else None

    def count(self, name: str) -> None:
        """Counts a read of what ``name`` has not computed, but of none by Headroom itself."""
        if not is_own_read():
            self.reads[f"{line()} ({name})"] += 1

    def follow(self, inputs: list[Tensor], results: list[Tensor]) -> None:
        """Remembers that results of what is not computed are not right either.

        Memory that nothing has written does not count as an input of what writes it.
        """
        unknown, written = self.unknown, {t.data_ptr() for t in results if t.numel()}
        names = [
            n
            for t in inputs
            if (n := self.source(t)) is not None
            and not (n in _UNWRITTEN and t.data_ptr() in written)
        ]
        for at in written:
            if names:
                unknown[at] = names[0]
            else:
                unknown.pop(at, None)


# ---- What a captured graph computes at each replay ----------------------------------------------

_Callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
# By keys, as long as there is the graph. What is kept names addresses, not tensors.
_captured: dict[int, functools.partial] = {}
_keys = itertools.count(1)


@_Callback
def _replay(key: int) -> None:
    with torch._C.DisableTorchFunction():
        _captured[key]()


def _later(device: Device, stream: int, run: functools.partial) -> None:
    """Puts ``run`` into the graph that is being captured."""
    while (dropped := device.take_dropped()) is not None:
        del _captured[dropped]
    key = next(_keys)
    _captured[key] = run
    device.enqueue(stream, _replay, key)


def _look(device: Device, lent: list[Lent], name: bytes) -> None:
    """Reports, in a replay, that what the graph was captured with is not there any more."""
    if any(one.is_gone() for one in lent):
        device.report(name + b" in a graph uses memory that was freed before the replay")


# ---- Calls --------------------------------------------------------------------------------------


def _host_code(o: Operation, keyset, args, kwargs, nested: bool = True):
    """Runs the operation's own CUDA code; operations within it are not computed if ``nested``."""
    before, _local.nested = _local.nested, nested
    try:
        return o.native.call_boxed(keyset, *o.without_numbers(args), **kwargs)
    finally:
        _local.nested = before


def _deliver(o: Operation, to: list, result: object, copies: list[Tensor], computed) -> None:
    """Copies what the CPU's kernel wrote and returned into the tensors of the device."""
    for t, copy in zip(to, copies, strict=True):
        write(t, copy, o.name)
    for t, values in o.fresh(result, computed):
        write(t, values, o.name)


def _without_library(o: Operation, device: int, args, kwargs, values: object):
    """Returns the results of an operation whose library is not there, and takes for a moment the
    workspace that it would have."""
    result = o.returned(args, kwargs, functools.partial(_on_device, o, device), values)
    if o.workspace is not None:
        _on_device(o, device, torch.empty(o.workspace(*args), dtype=torch.uint8, device="meta"))
    return result


def _on_device(o: Operation, device: int, values: object):
    """Returns tensors of the device with the values of tensors of the CPU; meta has none."""
    if isinstance(values, Tensor):
        place = torch.device("cuda", device)
        t = EMPTIES["empty_strided"].call_boxed(
            _CUDA_KEYS, values.shape, values.stride(), dtype=values.dtype, device=place
        )
        if not values.is_meta:
            write(t, values, o.name)
        return t
    if isinstance(values, (list, tuple)):
        return type(values)(_on_device(o, device, v) for v in values)
    return values


def _call(device: Device, o: Operation, keyset, args: tuple, kwargs: dict):
    if _local.nested and o.host_code:
        return o.native.call_boxed(keyset, *o.without_numbers(args), **kwargs)
    tensors = o.tensors(args, kwargs)
    indices = {t.get_device() for t in tensors}
    indices.discard(-1)
    if not indices:
        place = kwargs.get("device")
        indices = {
            torch._C._cuda_getDevice() if place is None or place.index is None else place.index
        }
    *others, index = indices
    for other in others:
        with torch.cuda.device(other):
            device.begin(torch._C._cuda_getCurrentRawStream(other))
    if index == torch._C._cuda_getDevice():
        return _run(device, o, keyset, args, kwargs, tensors, index)
    with torch.cuda.device(index):  # the runtime knows the default stream of the current device
        return _run(device, o, keyset, args, kwargs, tensors, index)


def _run(device: Device, o: Operation, keyset, args, kwargs, tensors: list[Tensor], index: int):
    stream = torch._C._cuda_getCurrentRawStream(index)
    if device.limit is not None and (
        not o.computable
        or o.is_large(tensors, args, kwargs, device.limit)
        or (o.takes_masks and any(t.dtype == torch.bool and device.source(t) for t in tensors[1:]))
        or (o.sizes_from_values and any(map(device.source, tensors)))
    ):
        return _not_computed(device, o, keyset, args, kwargs, tensors, stream)
    if not o.computable:
        raise cannot_compute(o.name, "the CPU has no kernel for it")
    if not o.host_code:
        return _values_first(device, o, args, kwargs, tensors, index, stream)
    captured = device.capturing(stream)
    state = o.state(args, kwargs, index, captured)
    failed = computed = None
    if captured:
        raw_args, raw_kwargs = o.mapped(args, kwargs, _frozen)
        slot: list = []
        run = functools.partial(_compute_into, o, slot, raw_args, raw_kwargs, state)
        _later(device, stream, run)
    else:
        device.begin(stream)
        try:
            computed, copies = o.compute(args, kwargs, state)
        except Exception as e:  # kept without frames, which hold tensors
            failed = e.with_traceback(None)
            failed.__context__ = None
    result = _host_code(o, keyset, args, kwargs, not o.reads)
    if failed is not None:
        raise failed
    written = o.written(args, kwargs)
    if captured:
        raw = [Raw(t) if t.is_cuda else t for t in written]
        run = functools.partial(_deliver_from, o, slot, raw, o.raw(result))
        _later(device, stream, run)
    else:
        device.begin(stream)  # after the copies and fills that its CUDA code queued
        _deliver(o, written, result, copies, computed)
    if device.limit is not None or device.ordered:
        written += o.fresh_tensors(result)
        _note(device, o, tensors, written)
    return result


def _note(device: Device, o: Operation, tensors: list, written: list) -> None:
    if device.limit is not None:
        read = [t for t in tensors if all(t is not w for w in written)] if o.fills else tensors
        device.follow(read, written)
    if device.ordered:
        device.touch(tensors, written, o.bytes)


def _frozen(t, *_: bool):
    """Returns what a captured operation keeps of an argument."""
    if type(t) in NUMBERS:
        return t
    return Raw(t) if t.is_cuda else t.clone()


def _compute_into(o: Operation, slot: list, args, kwargs, state) -> None:
    slot[:] = [o.compute(args, kwargs, state)]


def _deliver_from(o: Operation, slot: list, to: list, result) -> None:
    computed, copies = slot.pop()
    _deliver(o, to, result, copies, computed)


def _not_computed(device: Device, o: Operation, keyset, args, kwargs, tensors, stream: int):
    """Runs only the CUDA code of an operation on large tensors: its small results are zero."""
    if o.sizes_from_values or o.reads:
        device.count(o.name)
        if o.sizes_from_values:
            torch.cuda.current_stream(tensors[0].get_device()).synchronize()  # as CUDA's code does
            sized = None if is_printing() else o.with_share(device.share, args, kwargs)
            if sized is not None:
                return _of_size(device, o, args, kwargs, sized)
        # A tensor that was not computed counts as zeros (as probabilities: as ones), since the
        # operation's CUDA code would read anything.
        stand_in = functools.partial(
            _stand_in, device.limit, torch.ones if o.reads else torch.zeros
        )
        args, kwargs = o.mapped(args, kwargs, stand_in)
        return _values_first(device, o, args, kwargs, tensors, tensors[0].get_device(), stream)
    if device.ordered:
        device.begin(stream)
    if o.host_code:
        result = o.native.call_boxed(keyset, *o.without_numbers(args), **kwargs)
    else:
        values = o.on_meta(args, kwargs)
        result = _without_library(o, tensors[0].get_device(), args, kwargs, values)
    fresh = o.fresh_tensors(result)
    for t in fresh:
        device.forget(t, o.name)
    if device.ordered:
        device.touch(tensors, o.written(args, kwargs) + fresh, o.bytes)
    return result


def _of_size(device: Device, o: Operation, args, kwargs, sized: Tensor):
    """Returns the result of an operation whose size was told, without values."""
    out = o.written(args, kwargs)
    result = out[0].resize_(sized.shape) if out else _on_device(o, args[0].get_device(), sized)
    device.forget(result, o.name)
    return result


def _stand_in(limit: int, make, t, written: bool, out: bool):
    large = type(t) not in NUMBERS and not written and t.is_cuda and t.nbytes > limit
    return make(t.shape, dtype=t.dtype) if large else t


def _values_first(device: Device, o: Operation, args, kwargs, tensors, index: int, stream: int):
    """Makes the results of an operation whose own CUDA code cannot run."""
    if o.sizes_from_values:
        torch.cuda.current_stream(index).synchronize()  # as its CUDA code does
    elif device.capturing(stream):
        raise cannot_compute(o.name, "it calls a library that is not there, in a captured graph")
    device.begin(stream)
    state = o.state(args, kwargs, index, False)
    computed, copies = o.compute(args, kwargs, state)
    written = o.written(args, kwargs)
    for t, copy in zip(written, copies, strict=True):
        if t.shape != copy.shape:
            t.resize_(copy.shape)
        write(t, copy, o.name)
    result = _without_library(o, index, args, kwargs, computed)
    _note(device, o, tensors, written + o.fresh_tensors(result))
    if o.sizes_from_values:
        for t in tensors:
            device.read(t)
    return result


def _kernel(device: Device, o: Operation):
    def kernel(keyset, *args, **kwargs):
        try:
            with torch._C.DisableTorchFunction():
                return _call(device, o, keyset, args, kwargs)
        except BaseException as error:
            # The frames of a traceback hold tensors; torch's own C++ frames do not.
            args = kwargs = None
            raise error.with_traceback(None)  # noqa: B904

    return kernel


# ---- Copies, reads and memory that nothing has written ------------------------------------------


def _copy_kernel(device: Device, o: Operation):
    compute = functools.partial(_call, device, o)

    def copy(keyset, to: Tensor, source: Tensor, non_blocking: bool):
        if to.is_cuda and source.is_cuda and not _local.nested:
            same = to.dtype == source.dtype and to.shape == source.shape
            lazy = to.is_conj() or source.is_conj() or to.is_neg() or source.is_neg()
            plain = same and not lazy and to.is_contiguous() and source.is_contiguous()
            pair = to.get_device(), source.get_device()
            if not plain and (pair[0] == pair[1] or torch.cuda.can_device_access_peer(*pair)):
                return compute(keyset, (to, source, non_blocking), {})
        elif device.limit is not None and to.nbytes > device.limit and to.dtype != source.dtype:
            # Between host and device: no conversion on the host of what is not computed.
            if source.is_cuda:
                to_host = torch.empty_like(to, dtype=source.dtype)
                _host_code(o, keyset, (to_host, source, non_blocking), {}, False)
                return to
            source = torch.empty_like(source, dtype=to.dtype)
        if device.limit is not None:
            device.follow([source], [to] if to.is_cuda else [])
            if not to.is_cuda and not to.is_pinned():
                value = device.read(source)
                if value is not None:
                    return to.fill_(value)
        # What it is made of are copies of bytes, which the runtime does, and operations.
        return _host_code(o, keyset, (to, source, non_blocking), {}, _local.nested)

    def kernel(keyset, to, source, non_blocking=False):
        try:
            with torch._C.DisableTorchFunction():
                if type(source) in NUMBERS:
                    source = torch.scalar_tensor(source, dtype=torch.result_type(to, source))
                return copy(keyset, to, source, non_blocking)
        except BaseException as error:
            to = source = None
            raise error.with_traceback(None)  # noqa: B904

    return kernel


def _read_kernel(device: Device, o: Operation):
    def kernel(keyset, t):
        value = device.read(t)
        return o.native.call_boxed(keyset, t) if value is None else value

    return kernel


def _poisoning(device: Device, cuda):
    """Returns a kernel of ``empty`` whose memory is not what was there before."""

    def kernel(keyset, *args, **kwargs):
        t = cuda.call_boxed(keyset, *args, **kwargs)
        if not _local.nested:
            with torch._C.DisableTorchFunction():
                device.poison(t.get_device(), *extent(t))
                if _local.made is not None:
                    _local.made.append((t.get_device(), *extent(t)))
        return t

    return kernel


def _forgetting(device: Device, cuda):
    """Returns a kernel of ``empty`` whose memory counts as not computed until torch writes it.

    So what only kernels of other libraries write, such as Triton's, is not computed.
    """

    def kernel(keyset, *args, **kwargs):
        t = cuda.call_boxed(keyset, *args, **kwargs)
        if _local.nested:
            if device.unknown:
                device.unknown.pop(t.data_ptr(), None)
        else:
            with torch._C.DisableTorchFunction():
                device.forget(t, _EMPTY)
        return t

    return kernel


def _poisoning_resize(device: Device, cuda):
    def kernel(keyset, t, *args, **kwargs):
        before = t.untyped_storage().nbytes()
        cuda.call_boxed(keyset, t, *args, **kwargs)
        storage = t.untyped_storage()
        grown = storage.nbytes() - before
        if grown > 0 and not _local.nested:
            device.poison(t.get_device(), storage.data_ptr() + before, grown)
        return t

    return kernel


def _coalesce(t: Tensor) -> Tensor:
    """Returns a sparse tensor with each index once: CUDA's code reads what its kernels counted."""
    indices, values = (x.cpu() for x in (t._indices(), t._values()))
    found = torch.sparse_coo_tensor(indices, values, t.shape, check_invariants=False).coalesce()
    parts = found.indices().to(t.device), found.values().to(t.device)
    return torch.sparse_coo_tensor(*parts, t.shape, check_invariants=False, is_coalesced=True)


# ---- Installation -------------------------------------------------------------------------------


def install(runtime: ctypes.CDLL, limit: int | None = None) -> Device:
    """Gives each aten operation with a CUDA kernel one that computes its values on the CPU.

    Args:
        runtime: the library of the software device.
        limit: compute only operations whose tensors of the device all have at most so many bytes;
            None computes all, and fills memory that nothing has written with 0xFF.

    Returns what counts reads of values that were not computed (``reads``).
    """
    device = Device(runtime, limit)
    library = torch.library.Library("aten", "IMPL")
    libraries.append(library)
    names = [n for n in torch._C._dispatch_get_registrations_for_dispatch_key("CUDA")]
    for name in [n for n in names if n.startswith("aten::")] + [f"aten::{n}" for n in COMPOSITE]:
        short = name.removeprefix("aten::")
        if short in KEPT or short.startswith("_nested_"):
            continue
        o = Operation(name)
        if short == "copy_":
            kernel = _copy_kernel(device, o)
        elif short == "_local_scalar_dense":
            kernel = _read_kernel(device, o)
        else:
            kernel = _kernel(device, o)
        register(library, short, kernel, "CUDA")
    library.impl("_coalesce", _coalesce, "SparseCUDA", allow_override=True)
    for short, cuda in EMPTIES.items():
        if limit is None:
            make = _poisoning_resize if short == "resize_" else _poisoning
        elif short == "resize_":
            continue
        else:
            make = _forgetting
        register(library, short, make(device, cuda), "CUDA")
    if limit is not None:
        # What torch.compile makes allocates by this, past the operations.
        torch._C._dynamo.guards._empty_strided_cuda = _empty_strided
    return device


def _empty_strided(size, stride, dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device="cuda")


def compute(device: Device, namespace: str) -> None:
    """Computes what the operations of a library make of small tensors, as those of aten.

    Of those that take tables of addresses, which may be of large tensors, and of those that return
    sizes of workspaces, the CUDA code alone runs.
    """
    library = torch.library.Library(namespace, "IMPL")
    libraries.append(library)
    for name in torch._C._dispatch_get_registrations_for_dispatch_key("CUDA"):
        if name.startswith(namespace + "::") and "_table" not in name:
            o = Operation(name)
            if all("Tensor" in str(returned.type) for returned in o.op._schema.returns):
                short = name.partition("::")[2]
                kernel = _kernel(device, o)
                register(library, short, kernel, "CUDA")


def note(device: Device, namespace: str) -> None:
    """Notes what the operations of a library with CUDA kernels of its own read and write.

    Args:
        device: what :func:`install` returned.
        namespace: of the library's operations, "headroom".
    """
    if not device.ordered:
        return
    library = torch.library.Library(namespace, "IMPL")
    libraries.append(library)
    for name in torch._C._dispatch_get_registrations_for_dispatch_key("CUDA"):
        if name.startswith(namespace + "::"):
            kernel = _noting(device, Operation(name))
            short = name.partition("::")[2]
            register(library, short, kernel, "CUDA")


def _noting(device: Device, o: Operation):
    def kernel(keyset, *args, **kwargs):
        # Afterwards, since its kernels count as operations of the stream themselves. An operation
        # that calls others of the library goes on with its own list.
        of_caller, _local.made = _local.made, []
        try:
            result = o.native.call_boxed(keyset, *o.without_numbers(args), **kwargs)
        finally:
            made, _local.made = _local.made, of_caller
        written = o.written(args, kwargs) + o.fresh_tensors(result)
        device.touch(o.tensors(args, kwargs), written, o.bytes)
        device.touch_new(made, o.bytes)
        return result

    return kernel
