"""Names the parameters of an optimizer in messages and reports."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

UNKNOWN = "a parameter that the optimizer does not have"


def named_params(
    groups: Sequence[dict[str, Any]], form: str = "parameter '{}'"
) -> Iterator[tuple[Tensor, str]]:
    """Yields each parameter with its name: ``parameter 'weight'`` if the optimizer was made with
    ``named_parameters()``, else ``parameter 3 of group 0``."""
    for i, group in enumerate(groups):
        names = group.get("param_names")
        for j, param in enumerate(group["params"]):
            yield param, form.format(names[j]) if names else f"parameter {j} of group {i}"


def param_names(groups: Sequence[dict[str, Any]]) -> dict[Tensor, str]:
    """Returns the names of all parameters, for a caller that needs many of them."""
    return dict(named_params(groups))


def name_of(groups: Sequence[dict[str, Any]], param: Tensor) -> str:
    """Returns the name of one parameter, for a message. Searches all groups for it."""
    return next((name for one, name in named_params(groups) if one is param), UNKNOWN)


def bare_name_of(groups: Sequence[dict[str, Any]], param: Tensor) -> str:
    """Returns the name as :func:`name_of` does, but ``weight`` for a parameter with a name."""
    return next((name for one, name in named_params(groups, "{}") if one is param), UNKNOWN)
