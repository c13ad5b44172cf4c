"""A profile of :mod:`headroom.profiling` as a part of a report: steps, modules, operations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .._core.text import quoted
from .limits import checked, number, text

__all__ = ["described"]

VERSION = 1
STEPS, MODULES, OPS, POINTS = 400, 4000, 1500, 2000
LARGEST = 1e300
PHASES = ("data", "forward", "backward", "optimizer", "other")
TOTALS = ("wall_us", "loader_us", "recompute_us", "device_us", "model_flops", "recomputed_flops")
RATES = ("mfu", "hfu")
FIGURES = (
    *("forward_us", "backward_us", "recompute_us", "device_us"),
    *("model_flops", "recomputed_flops", "allocated_bytes", "kept_bytes"),
)
OF_MODULE = ("calls", "recomputed_calls", "parameter_bytes", "optimizer_bytes", "peak_bytes")
OF_OP = (
    *("calls", "total_us", "self_us", "device_us", "model_flops", "recomputed_flops", "bytes"),
    "bytes_per_s",
)


def described(value: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what a report shows of a profile.

    Raises:
        ValueError: it is of another version, or something in it is not what it should be.
    """
    if value.get("version") != VERSION:
        got = quoted(repr(value.get("version")), 40)
        raise ValueError(f"its version is {got}, wanted {VERSION}")
    device = checked(value.get("device"), Mapping, "device")
    totals = checked(value.get("totals"), Mapping, "totals")
    steps = [checked(one, Mapping, "a step") for one in checked(value.get("steps"), list, "steps")]
    modules = [_module(one) for one in checked(value.get("modules"), list, "modules")[:MODULES]]
    ops = [_op(one) for one in checked(value.get("ops"), list, "ops")[:OPS]]
    summary: dict[str, Any] = {
        "device": quoted(f"{text(device.get('type'), 'a device')} {device.get('name') or ''}"),
        "steps": len(steps),
        **_numbers(totals, (*TOTALS, *RATES), "totals"),
        "phases_us": _phases(totals),
    }
    return {
        "summary": summary,
        "steps": [
            _numbers(step, ("number", "wall_us"), "a step") | {"phases_us": _phases(step)}
            for step in steps[:STEPS]
        ],
        "modules": modules,
        "outside": _figures(value.get("outside") or {}),
        "ops": ops,
        "memory": _memory(value.get("memory") or {}),
        "notes": [
            quoted(text(note, "a note"), 400)
            for note in checked(value.get("notes") or [], list, "notes")[:50]
        ],
    }


def _numbers(value: Mapping[str, Any], names: tuple[str, ...], what: str) -> dict[str, Any]:
    """Returns the numbers of these names. What was not recorded is left out."""
    return {
        name: number(value[name], f"{name} of {what}", -LARGEST, LARGEST)
        for name in names
        if value.get(name) is not None
    }


def _figures(value: Any) -> dict[str, Any]:
    return _numbers(checked(value, Mapping, "figures"), FIGURES, "a module")


def _phases(value: Mapping[str, Any]) -> dict[str, Any]:
    return _numbers(checked(value.get("phases_us"), Mapping, "phases_us"), PHASES, "phases_us")


def _module(value: Any) -> dict[str, Any]:
    value = checked(value, Mapping, "a module")
    return {
        "name": quoted(text(value.get("name"), "the name of a module")),
        "type": quoted(text(value.get("type"), "the type of a module"), 60),
        **_numbers(value, OF_MODULE, "a module"),
        "self": _figures(value.get("self")),
        "total": _figures(value.get("total")),
    }


def _op(value: Any) -> dict[str, Any]:
    value = checked(value, Mapping, "an op")
    name = quoted(text(value.get("name"), "the name of an op"), 120)
    return {"name": name, **_numbers(value, OF_OP, "an op")}


def _memory(value: Any) -> list[dict[str, Any]]:
    found = []
    for device, one in list(checked(value, Mapping, "memory").items())[:16]:
        given = checked(one, Mapping, "memory of a device").get("points")
        points = checked(given, list, "points")[:POINTS]
        for point in points:
            if not isinstance(point, list) or len(point) != 2:
                raise ValueError(f"a point of memory is {repr(point)[:60]}, wanted [us, bytes]")
            for coordinate in point:
                number(coordinate, "a point of memory", -LARGEST, LARGEST)
        numbers = _numbers(one, ("peak_bytes",), "memory")
        found.append({"device": quoted(device, 40), **numbers, "points": points})
    return found
