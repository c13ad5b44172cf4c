"""Keeps the states of an optimizer's parameters in a host arena, and stages them for each step.

The states that the budget has room for stay on the device. The others lie in the arena, and a step
takes them through the slots of a ring: in pieces, whose copies run while others are stepped. Each
piece is one call of the optimizer's op, on states in a slot instead of those in ``state``.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor

from ..._core.capture import refuse_in_capture
from ..._core.dtensor import local_part, with_spec
from ..._core.grouping import grouped
from ..._core.names import name_of
from ..._core.overlap import laid_out, place_in_memory
from ..._core.sizes import format_bytes
from ..._core.table import table_of
from ...host.arena import HostArena, default_arena
from ...host.engine import Engine
from ...host.engines import engine_of
from ...host.files import let_pages_go
from ...host.ring import Ring, aligned, slots_with
from ...host.schedule import measured_link, paged_step_seconds
from ..errors import explained
from ..plan import Bucket, Calls, Plan, StepScalars, like_param
from ..states import Layout, dtype_refusal
from .homes import Field, Home, fields_of, is_cuttable, size_of, taken_by_ops
from .parts import Part, Staging, pieces_of, smallest_cut

BUCKET_BYTES = 16 << 20  # of state in a slot: a link reaches 0.95 of its rate with a third of it
INLINE_BYTES = 8 << 20  # the same where copies are the processor's: what it has a cache for
BUCKETS = 8  # or more, that the states of an optimizer fill
KIND = "optimizer state"


class PagingMemory(NamedTuple):
    """Bytes of the state of an optimizer, and of what it passes through."""

    host: int  # in the arena
    resident: int  # on devices
    ring: int  # on devices, for each step


class Place(NamedTuple):
    """A parameter whose state has, or will have, these fields."""

    param: Tensor
    group: dict[str, Any]
    layout: Layout
    fields: tuple[Field, ...]

    @property
    def size(self) -> int:
        return size_of(self.fields)

    @property
    def is_cuttable(self) -> bool:
        return is_cuttable(self.layout, self.param, self.group, self.fields)


class Paging:
    """The states of an optimizer that lie on the host.

    Attributes:
        arena: where they lie.
        budget: bytes of state that may stay on a device, with those of the ring; None or 0: those
            of the ring alone.
        resident: the parameters whose states stay.
    """

    def __init__(
        self, arena: HostArena, budget: int | None = None, bucket_bytes: int | None = None
    ) -> None:
        self.arena, self.budget, self.bucket_bytes = arena, budget, bucket_bytes
        self._forget()

    home_type = Home

    def engine_of(self, device: torch.device) -> Engine:
        """Returns what copies to and from a device."""
        return engine_of(device)

    def _forget(self) -> None:
        self._process = os.getpid()
        self.resident: set[Tensor] = set()
        self._resident_bytes = 0
        self._homes: dict[Tensor, Home] = {}
        self._rings: dict[torch.device, Ring] = {}
        self._replaced: list[Ring] = []  # in this step
        self._slots: dict[torch.device, int] = {}  # bytes of one
        # Of buckets, by their first parameter: what their pieces were made of, and these.
        self._pieces: dict[Tensor, tuple[Any, Any]] = {}
        self._has_adopted = False

    def __getstate__(self) -> dict[str, Any]:
        """Returns the settings: a copy adopts the states of its optimizer at the first step."""
        return {name: self.__dict__[name] for name in ("arena", "budget", "bucket_bytes")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()

    def __del__(self) -> None:
        # A forked process has neither the memory nor the threads, and when the interpreter ends,
        # the memory ends with the process.
        if getattr(self, "_process", None) == os.getpid() and not sys.is_finalizing():
            self._end()

    def _end(self) -> None:
        """Waits for what uses the memory that is about to be freed."""
        for home in self._homes.values():
            with contextlib.suppress(BaseException):  # nobody could catch what a finalizer raises
                home.wait()

    # ---- where states lie -----------------------------------------------------------------------

    def adopt(
        self,
        optimizer: Any,
        groups: list[dict[str, Any]] | None = None,
        state: dict[Any, Any] | None = None,
    ) -> None:
        """Chooses which states stay on the device, and moves all to where they belong.

        Args:
            groups, state: those that the optimizer is about to have; None: those that it has.

        Raises:
            ValueError: the budget is below the ring, or a parameter is not one of a plain tensor on
                a CPU or CUDA device. Nothing has been changed then.
            HostMemoryError: the arena has no room. Nothing has been changed then.
        """
        groups = optimizer.param_groups if groups is None else groups
        state = optimizer.state if state is None else state
        members = {param: group for group in groups for param in group["params"]}
        places = _places(optimizer, members, state)
        slots, resident = self._choice(places)
        with torch.no_grad():
            leaving = [p for param, p in places.items() if p.size and state.get(param)]
            self._house([p for p in leaving if p.param not in resident], state, optimizer)
            self._slots, self.resident, self._has_adopted = slots, resident, True
            self._resident_bytes = sum(places[param].size for param in resident)
            for place in leaving:
                if place.param in resident:
                    _bring(place, state[place.param], self._homes.get(place.param))
            for param in [*self._homes]:
                if param in resident or param not in members:
                    self._homes.pop(param).wait()
            self._pieces.clear()

    def _choice(
        self, places: Mapping[Tensor, Place]
    ) -> tuple[dict[torch.device, int], set[Tensor]]:
        """Returns the bytes of a slot on each device, and the parameters whose states stay: the
        first, as many as there is room for, so that more budget is never more to copy."""
        slots, resident = {}, set()
        for device, those in grouped(places.values(), lambda place: place.param.device).items():
            total = sum(place.size for place in those)
            engine = self.engine_of(device)
            slots[device] = slot = self._slot(those, total, engine)
            room, ring = 0, slots_with(engine) * slot
            if self.budget:
                room = total if self.budget >= total else self.budget - ring
                if room < 0:
                    raise ValueError(
                        f"budget is {format_bytes(self.budget)} ({self.budget:,} bytes), but the "
                        f"ring that the state passes through takes {format_bytes(ring)} "
                        f"({ring:,} bytes), {ring // slot} of {slot:,}"
                    )
            for place in those:
                room -= place.size
                if room < 0:
                    break
                if place.size:  # without momentum SGD has no state
                    resident.add(place.param)
        return slots, resident

    def _slot(self, places: Iterable[Place], total: int, engine: Engine) -> int:
        """Returns the bytes of a slot: what was asked for, or what the largest parameter needs that
        cannot be cut."""
        slot = self._usual_slot(total, engine)
        for place in places:
            size = place.size
            if size > slot and place.is_cuttable:
                size = min(size, smallest_cut(place.fields, block_size_of(place.group)))
            slot = max(slot, size)
        return aligned(slot, 512)

    def _usual_slot(self, total: int, engine: Engine) -> int:
        if self.bucket_bytes is not None:
            return self.bucket_bytes
        return min(BUCKET_BYTES if engine.is_asynchronous else INLINE_BYTES, total // BUCKETS)

    def _house(self, places: list[Place], state: dict[Any, Any], optimizer: Any) -> None:
        """Puts states into the arena: where they were there, or into one new slab for each device.
        Makes what they lack."""
        homes, new = {}, []
        for place in places:
            home = self._homes.get(place.param)
            if self._is_near(home, place.param) and home.fields == place.fields:
                homes[place.param] = home
            else:
                new.append(place)
        for device, those in grouped(new, lambda place: place.param.device).items():
            size, first = sum(place.size for place in those), 0
            owner = type(optimizer).__name__
            slab = self.arena.take(size, kind=KIND, owner=owner, device=device)
            engine = self.engine_of(device)
            for place in those:
                homes[place.param] = self.home_type(slab, first, place.fields, engine)
                first += place.size
        filled = 0
        for place in places:
            home, before = homes[place.param], self._homes.get(place.param)
            if before is not None:
                before.wait()
            home.fill(place.layout, place.param, state[place.param])
            self._homes[place.param] = home
            filled += home.size
            if filled >= BUCKET_BYTES or place is places[-1]:
                let_pages_go(home.slab)
                filled = 0

    def entry(self, optimizer: Any, param: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        """Returns the state of a parameter in the arena, after it has made what is missing."""
        self._house_missing(optimizer, [param], optimizer._layout(param, group), group)
        return optimizer.state[param]

    def _house_missing(
        self, optimizer: Any, params: Iterable[Tensor], layout: Layout, group: dict[str, Any]
    ) -> None:
        state, names, places = optimizer.state, layout.names, []
        for param in params:
            if not self._stays(param, layout) and not self._is_housed(param, state, names):
                check_param(optimizer, param)
                fields = fields_of(layout, param, state.get(param) or {})
                places.append(Place(param, group, layout, fields))
        if places:
            with torch.no_grad():
                self._house(places, state, optimizer)

    def _stays(self, param: Tensor, layout: Layout) -> bool:
        """Returns whether a parameter is stepped with the state that it has on its device, or with
        none."""
        return param in self.resident or not layout.names

    def _is_housed(self, param: Tensor, state: Mapping[Any, Any], names: tuple[str, ...]) -> bool:
        home = self._homes.get(param)
        return self._is_near(home, param) and home.holds(state.get(param), names)

    def _is_near(self, home: Home | None, param: Tensor) -> TypeGuard[Home]:
        """Returns whether there is a place, for the device that a parameter is on now."""
        return home is not None and home.engine is self.engine_of(param.device)

    def release(self, optimizer: Any) -> None:
        """Puts all states onto the devices of their parameters."""
        members = {p: group for group in optimizer.param_groups for p in group["params"]}
        with torch.no_grad():
            for param, home in self._homes.items():
                if param in members and param in optimizer.state:
                    group, entry = members[param], optimizer.state[param]
                    layout = optimizer._layout(param, group)
                    _bring(Place(param, group, layout, home.fields), entry, home)
        self.wait()
        self._forget()

    def wait(self) -> None:
        """Waits until the copies to the arena have ended: its tensors may be read then."""
        for home in self._homes.values():
            home.wait()

    @property
    def ring_bytes(self) -> int:
        """Returns the bytes of the largest ring that steps need."""
        return max((slots_with(self.engine_of(d)) * n for d, n in self._slots.items()), default=0)

    @property
    def rings(self) -> list[Tensor]:
        """Returns the memory of the rings that exist."""
        return [ring.memory for ring in self._rings.values()]

    def memory(self, optimizer: Any) -> PagingMemory:
        """Returns the bytes of the state, by where they are."""
        resident = sum(
            local_part(tensor).nbytes
            for param in self.resident
            for tensor in optimizer.state.get(param, {}).values()
            if isinstance(tensor, Tensor)
        )
        ring = sum(memory.nbytes for memory in self.rings)
        return PagingMemory(sum(home.size for home in self._homes.values()), resident, ring)

    # ---- a step ---------------------------------------------------------------------------------

    def calls(self, optimizer: Any, plan: Plan, scalars: StepScalars) -> Calls:
        """Returns the calls that step the parameters of a plan, with their buckets. All that they
        allocate has been made: missing states, the ring, and what the op needs."""
        refuse_in_capture("copies of states from the host")
        if not self._has_adopted:
            self.adopt(optimizer)
        found: Calls = []
        for bucket in plan.buckets:
            positions: dict[tuple[torch.device, bool], list[int]] = {}
            for i, owner in enumerate(bucket.owners):
                where = owner.device, self._stays(owner, bucket.layout)
                positions.setdefault(where, []).append(i)
            for (device, stays), chosen in positions.items():
                owners = [bucket.owners[i] for i in chosen]
                grads = [like_param(bucket.grads[i], bucket.owners[i]) for i in chosen]
                part = Bucket(
                    bucket.layout, owners, [*map(local_part, owners)], [*map(local_part, grads)]
                )
                try:
                    run, staged = self._staged(optimizer, plan.group, part, device, stays)
                except (RuntimeError, NotImplementedError) as error:
                    raise explained(optimizer, error, part.owners, part.grads) from error
                steps = optimizer._calls_on(plan.group, staged, self._given(run, scalars))
                found += self._with(run, steps)
        return found

    def _given(self, run: Any, scalars: StepScalars) -> StepScalars:
        """Returns the scalars as the ops of a run read them."""
        return scalars

    def _with(self, run: Any, steps: Calls) -> Calls:
        """Returns the calls of a run, each with its copies."""
        return steps if run is None else run.calls(steps)

    def finish(self) -> None:
        """Ends a step whose calls have run. What the device is given from now on finds it done."""
        for ring in self._replaced:  # which are freed when their copies have ended
            for ticket in ring.busy:
                ring.engine.wait(ticket)
        self._replaced.clear()

    def _staged(
        self,
        optimizer: Any,
        group: dict[str, Any],
        bucket: Bucket,
        device: torch.device,
        stays: bool,
    ) -> tuple[Staging | None, list[tuple[Bucket, Any]]]:
        """Returns what copies the states of a bucket, unless they stay on the device, and its
        pieces with their states."""
        if stays:
            for param in bucket.owners:
                entry, layout = optimizer.state[param], bucket.layout
                if any(name not in entry for name in layout.names):
                    optimizer._entry(param, group)
                elif any(entry[name].device != device for name in layout.names):  # it has moved
                    _bring(
                        Place(param, group, layout, fields_of(layout, param, entry)), entry, None
                    )
            entries = (optimizer.state[param] for param in bucket.owners)
            states = {
                param: taken_by_ops(entry, param, block_size_of(group))
                for param, entry in zip(bucket.params, entries)
            }
            return None, [(bucket, states_of(bucket, states))]
        self._house_missing(optimizer, bucket.owners, bucket.layout, group)
        ring = self._ring(device, group, bucket)
        staged = []
        pieces = self._pieces_of(bucket, ring, block_size_of(group))
        grads = [  # those of parameters that are cut, once for all parts
            laid_out(grad, param.stride()) if self._homes[owner].size > ring.slot_bytes else grad
            for owner, param, grad in zip(bucket.owners, bucket.params, bucket.grads)
        ]
        laid = bucket._replace(grads=grads)
        for piece in pieces:
            part = piece.bucket(laid)
            staged.append((part, states_of(part, piece.states)))
        return Staging(ring, pieces), staged

    def _pieces_of(self, bucket: Bucket, ring: Ring, block_size: int) -> list[Part]:
        """Returns the pieces of a bucket: those of the step before, if nothing has moved."""
        places = [(self._homes[owner], *place_in_memory(owner)) for owner in bucket.owners]
        made_of = ring, block_size, places
        make = partial(pieces_of, bucket, self._homes, ring, block_size)
        return self._pieces_made_of(made_of, bucket, make)

    def _pieces_made_of(self, made_of: Any, bucket: Bucket, make: Callable[[], Any]) -> Any:
        """Returns the pieces of a bucket: those of the step before, if they were made of the
        same."""
        before = self._pieces.get(bucket.owners[0])
        if before is None or before[0] != made_of:
            before = self._pieces[bucket.owners[0]] = made_of, make()
        return before[1]

    def _ring(self, device: torch.device, group: dict[str, Any], bucket: Bucket) -> Ring:
        """Returns the ring of a device, which is made anew if a parameter needs a larger slot."""
        slot = self._slots.get(device, 0)
        for param in bucket.owners:
            home = self._homes[param]
            if home.size <= slot:
                continue
            if not is_cuttable(bucket.layout, param, group, home.fields):
                slot = aligned(home.size, 512)
            elif (least := smallest_cut(home.fields, block_size_of(group))) > slot:
                slot = max(aligned(min(home.size, least), 512), self._later_slot(device))
        self._slots[device] = slot
        ring = self._rings.get(device)
        if ring is None or ring.slot_bytes < slot:
            self.wait()
            self._pieces.clear()  # which hold the memory of the ring
            # And of those where no parameter is any more. Prepared steps may still use it.
            left = self._rings.keys() - ({p.device for p in self._homes} - {device})
            self._replaced += [self._rings.pop(other) for other in left]
            ring = self._rings[device] = Ring(device, slot, self.engine_of(device))
        return ring

    def _later_slot(self, device: torch.device) -> int:
        """Returns the bytes of a slot, as far as the budget goes, where none was chosen for the
        parameters of a device: they were unfrozen, added or moved there later, or have more
        state."""
        engine = self.engine_of(device)
        on_host = sum(home.size for p, home in self._homes.items() if p.device == device)
        slot = self._usual_slot(on_host, engine)
        if self.budget:
            slot = min(slot, (self.budget - self._resident_bytes) // slots_with(engine) - 511)
        return aligned(slot, 512)

    # ---- what others see ------------------------------------------------------------------------

    def detached(self, optimizer: Any, state: Mapping[Any, Any]) -> dict[Any, Any]:
        """Returns a dict of states in which tensors of the arena are copies."""
        self.wait()
        homes = {id(optimizer.state.get(param)): home for param, home in self._homes.items()}
        found = {}
        for key, entry in state.items():
            views = homes[id(entry)].views if id(entry) in homes else {}
            copies = {n: entry[n].clone() for n, view in views.items() if entry.get(n) is view}
            found[key] = entry | copies if copies else entry
        return found


def planned_paging(
    optimizer: Any, budget: int | None, bucket_bytes: int | None = None
) -> PagingMemory:
    """Returns the bytes that the state of an optimizer would take with offload and a budget, by
    where they are, once all of it is there. Nothing is moved.

    Raises:
        ValueError: as :meth:`Paging.adopt` does.
    """
    members = {p: group for group in optimizer.param_groups for p in group["params"]}
    places = _places(optimizer, members, optimizer.state)
    slots, resident = Paging(default_arena(), budget, bucket_bytes)._choice(places)
    stays = sum(place.size for param, place in places.items() if param in resident)
    whole = sum(place.size for place in places.values())
    ring = sum(slots_with(engine_of(device)) * size for device, size in slots.items())
    return PagingMemory(whole - stays, stays, ring)


def paged_seconds(memory: PagingMemory, resident: float, device: torch.device) -> float:
    """Returns the seconds of a step whose states pass through the ring of a device, where it takes
    ``resident`` without."""
    slot = max(1, memory.ring // slots_with(engine_of(device)))
    pieces = [slot] * (memory.host // slot) + [memory.host % slot]
    share = memory.host / max(1, memory.host + memory.resident)
    paged = paged_step_seconds(pieces, share * resident, measured_link(device))
    return (1 - share) * resident + paged


def check_param(optimizer: Any, param: Tensor) -> None:
    """Refuses a parameter whose state cannot lie in an arena.

    Raises:
        ValueError: it is neither on a CPU nor on a CUDA device.
        RuntimeError: the optimizer does not step its dtype.
    """
    kind = type(optimizer).__name__
    name = name_of(optimizer.param_groups, param)
    if param.device.type not in ("cpu", "cuda", "meta"):  # a plan is made of parameters on meta
        raise ValueError(
            f"{name} is on {param.device}: states of parameters on CPU and CUDA devices are "
            "offloaded; move the model before"
        )
    if (words := dtype_refusal(param, kind, name)) is not None:
        raise RuntimeError(words)


def block_size_of(group: Mapping[str, Any]) -> int:
    """Returns the elements for each scale of 8-bit states; 1 where there are none."""
    return group.get("block_size", 1)


def _places(
    optimizer: Any, members: Mapping[Tensor, dict[str, Any]], state: Mapping[Tensor, Any]
) -> dict[Tensor, Place]:
    """Returns the places of all parameters that have a state, or will have one."""
    places = {}
    for param, group in members.items():
        entry = state.get(param)
        if param.requires_grad or entry:
            check_param(optimizer, param)
            layout = _layout(optimizer, param, group, entry)
            places[param] = Place(param, group, layout, fields_of(layout, param, entry or {}))
    return places


def _layout(optimizer: Any, param: Tensor, group: dict[str, Any], entry: Any) -> Layout:
    index = optimizer._layout_index_of_state(entry) if entry else None
    return optimizer._layout(param, group, index)


def states_of(bucket: Bucket, states: Mapping[Tensor, Mapping[str, Tensor]]) -> Any:
    """Returns the states that an op takes for a bucket: a table, or lists if there is none."""
    layout, lists = bucket.layout, (bucket.params, bucket.grads)
    if not layout.is_whole:
        table = table_of(lists, states, layout.param_like, layout.extra)
        if table is not None:
            return table
    return [[states[param][name] for param in bucket.params] for name in layout.names]


def _bring(place: Place, entry: dict[str, Any], home: Home | None) -> None:
    """Puts a state onto the device of its parameter."""
    if home is not None:
        home.wait()
    for field in place.fields:
        value = entry.get(field.name)
        if not isinstance(value, Tensor):
            continue
        is_here = home is not None and value is home.views.get(field.name)
        if is_here or value.device != place.param.device:
            local = field.on(place.param.device).copy_(local_part(value))
            entry[field.name] = with_spec(local, field.spec)
