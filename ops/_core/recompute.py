"""Regions whose tensors are dropped after the forward pass and computed again in the backward pass.

A checkpoint keeps the inputs and the results of a region, and drops what its operations saved. A
region of :class:`Dropping` drops its results too, wherever operations behind it save them: q, k and
v, which only attention saves, need not be kept if a norm and a product give them again. The graph
of autograd stays as it is, so gradients are those without it, bit for bit.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from .randomness import Random
from .surroundings import Parameters, Settings, again, is_plain, is_trained, viewed


def inside_checkpoint() -> bool:
    """Returns whether a checkpoint's hooks are in force: it drops all that is saved, and runs its
    region again, so that dropping more would only compute some of it a third time."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    if hooks is not None:
        pack = hooks[0]
        names = ("_checkpoint_hook.", "_recomputation_hook.")
        if getattr(pack, "_checkpoint_internal", False) or pack.__qualname__.startswith(names):
            return True
        if getattr(pack, "in_checkpoint", False):  # hooks that give a checkpoint's the rest
            return True
    # A reentrant checkpoint has no hooks, but runs its region within a backward pass.
    return torch._C._current_graph_task_id() != -1


def can_drop() -> bool:
    """Returns whether dropping saves memory here, and is possible: gradients are on, nothing is
    traced or transformed by ``torch.func``, no checkpoint drops everything, and saved tensors can
    have hooks."""
    return (
        torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
        and torch._C._autograd._saved_tensors_hooks_is_enabled()
        and not torch._C._are_functorch_transforms_active()
        and not inside_checkpoint()
    )


class Saving:
    """Follows which operation saves tensors, and whether it may still have to write one of them.

    Most operations save what has been computed. RReLU saves its noise, beside its input, before it
    draws it, by which the version of the noise does not move.

    Attributes:
        may_write: whether the operation that saves now has saved a tensor of which
            :func:`may_be_written` is true.
        writes: whether it has also saved another tensor of that shape, as functions of elements do:
            a matrix product that saves frozen weights alone need not be waited for.
    """

    def __init__(self) -> None:
        self.may_write = self.writes = False
        self._operation = -1
        self._saved: list[tuple[torch.Size, bool]] = []

    def follow(self, x: Tensor) -> bool:
        """Returns whether the operations before the one that saves ``x`` have ended."""
        operation = torch.autograd._get_sequence_nr()  # which the next node will get
        ended = operation != self._operation
        if ended:
            self.may_write, self.writes = False, False
            self._operation, self._saved = operation, []
        late = may_be_written(x)
        self.may_write |= late
        if not x.is_nested and all(type(size) is int for size in x.shape):
            self.writes |= (x.shape, not late) in self._saved
            self._saved.append((x.shape, late))
        return ended


def may_be_written(x: Tensor) -> bool:
    """Returns whether the operation that saves ``x`` may still have to write it: neither a result
    with a gradient nor a parameter is such a tensor."""
    return not (x.requires_grad or _is_parameter(x))


def check_version(x: Tensor, version: int) -> None:
    """Raises if ``x`` has been written since it was saved at ``version``: with hooks autograd does
    not look by itself."""
    if x._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an "
            f"inplace operation: [{x.type()} {list(x.shape)}] is at version {x._version}; "
            f"expected version {version} instead"
        )


class Kept:
    """Stands in autograd in the place of a tensor that is kept.

    Hooks that were in force before get it, such as those that move tensors to the CPU. Without
    any, a change in place raises: autograd itself does not look when there are hooks.
    """

    def __init__(self, x: Tensor, hooks: tuple[Callable, Callable] | None) -> None:
        self._unpack = None if hooks is None else hooks[1]
        # The tensor itself would keep the node alive that saves it.
        self._held = x.detach() if hooks is None else hooks[0](x)
        self._version = x._version

    def tensor(self) -> Tensor:
        if self._unpack is not None:
            return self._unpack(self._held)
        check_version(self._held, self._version)
        return self._held


class _SavedHandle:
    """Stands in autograd in the place of a tensor that is dropped."""

    def __init__(self, region: _Region, index: int, x: Tensor) -> None:
        self._region, self.index = region, index
        self._view = (x.size(), x.stride(), x.storage_offset())
        self._dtype = x.dtype

    def tensor(self) -> Tensor:
        x = self._region.tensor(self.index)
        if x.dtype != self._dtype or (self.index >= 0 and x.size() != self._view[0]):
            raise RuntimeError(
                f"{self._region} computed a {x.dtype} tensor of shape {list(x.shape)} in the "
                f"backward pass, wanted {self._dtype} of shape {list(self._view[0])} as in the "
                "forward pass; its function must compute the same each time"
            )
        # A result is told by its memory, of which any view may have been saved.
        return x if self.index >= 0 else x.as_strided(*self._view)


class _Tensors:
    """Holds what one backward pass has computed again, and how often it will still be asked for."""

    def __init__(self, task: int, found: dict[int, tuple[Tensor, int]]) -> None:
        self.task, self.found = task, found

    def clear(self) -> None:
        self.found = {}


class _Enough(Exception):
    """Ends a region once everything wanted has been computed again."""


class _Region:
    """Runs one call of a function again."""

    def __init__(
        self,
        function: Callable[..., Any],
        inputs: tuple[Tensor | None, ...],
        pack: Callable[[Tensor], Kept | _SavedHandle],
        settings: Settings,
        parameters: Parameters | None,
    ) -> None:
        self._function, self._pack = again(function), pack
        self._given = [(x, 0 if x is None else x._version) for x in inputs]
        self._inputs: list[tuple[Kept | _SavedHandle, bool] | None] | None = None
        self.settings = settings
        self._parameters = parameters
        self.random: Random | None = None
        self.count = 0  # of the tensors that it has saved
        self._tokens: list[weakref.ref[_SavedHandle]] = []
        # Owned by the backward pass, so that nothing stays when it ends early or raises.
        self._tensors: Callable[[], _Tensors | None] = lambda: None

    def __repr__(self) -> str:
        name = getattr(self._function, "__qualname__", type(self._function).__name__)
        return f"the recomputed region {name}"

    def is_ready(self) -> bool:
        """Returns whether the region can be run again. The first call packs the inputs, because a
        region of which nothing is saved keeps none."""
        if self._inputs is None:
            if any(x is not None and x._version != version for x, version in self._given):
                return False
            self._inputs = [
                None if x is None else (self._pack(x), x.requires_grad) for x, _ in self._given
            ]
            self._given = []
        return True

    def token(self, index: int, x: Tensor) -> _SavedHandle:
        token = _SavedHandle(self, index, x)
        self._tokens.append(weakref.ref(token))
        return token

    def tensor(self, index: int) -> Tensor:
        task = torch._C._current_graph_task_id()
        tensors = self._tensors()
        if tensors is None or tensors.task != task or index not in tensors.found:
            if tensors is not None and tensors.task == task:
                tensors.clear()  # a node asked twice
            tensors = _Tensors(task, self._computed())
            if task != -1:
                self._tensors = weakref.ref(tensors)
                torch.autograd.Variable._execution_engine.queue_callback(tensors.clear)
        x, uses = tensors.found.pop(index)
        if uses > 1:
            tensors.found[index] = x, uses - 1
        return x

    def _computed(self) -> dict[int, tuple[Tensor, int]]:
        if self._parameters is not None and (changed := self._parameters.changed()):
            raise RuntimeError(
                f"{self} cannot compute again what was dropped: since the forward pass, "
                f"{changed}; run the backward pass before parameters change, and within "
                "torch.func.functional_call, or drop nothing (save='L0')"
            )
        tokens = [token for ref in self._tokens if (token := ref()) is not None]
        wanted: dict[int, int] = {}
        for token in tokens:
            wanted[token.index] = wanted.get(token.index, 0) + 1
        results_wanted = min(wanted) < 0
        found: dict[int, Tensor] = {}
        versions: dict[int, int] = {}
        saving, count = Saving(), 0

        def has_all() -> bool:
            return not results_wanted and len(found) == len(wanted)

        def pack(x: Tensor) -> None:
            nonlocal count
            if saving.follow(x) and has_all():
                raise _Enough
            if count in wanted:
                found[count], versions[count] = x.detach(), x._version
            count += 1
            may_write = saving.may_write if count < self.count else saving.writes
            if has_all() and not may_write:
                raise _Enough

        inputs = [
            None if held is None else held[0].tensor().detach().requires_grad_(held[1])
            for held in self._inputs or ()
        ]
        with ExitStack() as stack:
            if self.random is not None:
                stack.enter_context(self.random.restored())
            if not self.settings.hold():
                stack.enter_context(self.settings.restored())
            with torch.enable_grad(), saved_tensors_hooks(pack, lambda _: None):
                try:
                    for k, x in enumerate(_results(self._function(*inputs))):
                        if ~k in wanted:
                            found[~k] = x.detach()
                except _Enough:
                    pass
        for index, version in versions.items():
            check_version(found[index], version)
        if len(found) < len(wanted):
            raise RuntimeError(
                f"{self} saved {count} tensors in the backward pass, wanted at least "
                f"{max(wanted) + 1} as in the forward pass; its function must compute the same "
                "each time, with parameters that require gradients as they did"
            )
        return {index: (found[index], uses) for index, uses in wanted.items()}


def _results(results: Any) -> tuple[Tensor, ...]:
    return (results,) if isinstance(results, Tensor) else tuple(results)


class _Result:
    """Tells the memory of a result while operations behind its region may save it."""

    def __init__(self, region: _Region, index: int, x: Tensor) -> None:
        self.region, self.index = region, index
        self._memory = StorageWeakRef(x.untyped_storage())  # while it is held, no other memory
        self._dtype, self._version = x.dtype, x._version  # gets the same number

    def is_in(self, x: Tensor) -> bool:
        """Returns whether a view of the memory holds what the region wrote."""
        return not self._memory.expired() and x.dtype == self._dtype and x._version == self._version


class Dropping:
    """Encloses regions that are run, and later operations that save their results.

        with Dropping() as dropping:
            q, k, v = dropping.run(project, x)
            o = attention(q, k, v)   # keeps o alone

    Tensors are told by their memory, so a view of a result is dropped as well. Parameters, the
    inputs of regions and results that were changed in place are kept, as autograd keeps them.
    """

    def __init__(self) -> None:
        self._results: dict[int, _Result] = {}
        self._settings: dict[frozenset[str], Settings] = {}
        self._outer: tuple[Callable, Callable] | None = None
        self._hooks = saved_tensors_hooks(self._pack, _unpack)

    def __enter__(self) -> Dropping:
        self._outer = torch._C._autograd._top_saved_tensors_default_hooks(False)
        self._hooks.__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        self._hooks.__exit__(*raised)
        self._results = {}

    def run(
        self,
        function: Callable[..., Any],
        *inputs: Tensor | None,
        reads: Sequence[torch.nn.Module | None] = (),
        random: bool = False,
        keep_results: bool = False,
    ) -> Any:
        """Returns ``function(*inputs)``, whose saved tensors and results are dropped.

        The function must compute the same when it is called again. It takes what changes between
        calls as inputs, and reads parameters from their modules when it is called, because FSDP
        replaces them.

        Args:
            function: returns a tensor or a tuple of tensors, and changes nothing in place.
            inputs: are kept, unless they are results of an earlier region.
            reads: modules whose parameters the function reads. If they are replaced or changed
                before it is called again, that raises.
            random: the function may draw random numbers; it will draw the same again.
            keep_results: drops what the function saves alone, as a checkpoint does.
        """
        if not torch.is_grad_enabled():
            return function(*inputs)
        kinds = frozenset(x.device.type for x in inputs if x is not None) | {"cpu"}
        settings = self._settings.get(kinds)
        if settings is None or not settings.hold():
            settings = self._settings[kinds] = Settings(kinds)
        region = _Region(
            function, inputs, self._pack, settings, Parameters(reads) if reads else None
        )
        random_states = Random([x for x in inputs if x is not None]) if random else None
        own_memory = {_memory(x) for x in inputs if x is not None}
        count = 0

        def pack(x: Tensor) -> Kept | _SavedHandle:
            nonlocal count
            index, count = count, count + 1
            if _memory(x) in own_memory or _is_parameter(x) or not region.is_ready():
                return self._pack(x)
            return region.token(index, x)

        with saved_tensors_hooks(pack, _unpack):
            results = function(*inputs)
        region.settings, region.count = settings.settled(), count
        if random_states is not None and random_states.moved():
            region.random = random_states
        if not keep_results:
            for k, x in enumerate(_results(results)):
                if _memory(x) not in own_memory and type(x) in (Tensor, FakeTensor):
                    self._results[_memory(x)] = _Result(region, ~k, x)
        return results

    def _pack(self, x: Tensor) -> Kept | _SavedHandle:
        result = self._results.get(_memory(x))
        if result is None or not result.is_in(x) or not result.region.is_ready():
            return Kept(x, self._outer)
        return result.region.token(result.index, x)


def _unpack(packed: Kept | _SavedHandle) -> Tensor:
    return packed.tensor()


def _memory(x: Tensor) -> int:
    """Returns a number that tells memory apart; of a tensor without memory of its own, such as a
    DTensor, the tensor's."""
    return x.untyped_storage()._cdata if is_plain(x) else id(x)


def _is_parameter(x: Tensor) -> bool:
    return isinstance(viewed(x), torch.nn.Parameter) or is_trained(x)
