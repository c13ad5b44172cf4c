"""The place of the advice that an error of memory ends with. The root of the package puts it here:
it is planned, and what explains the error knows nothing of plans."""

from collections.abc import Callable

__all__ = ["advisers"]

advisers: list[Callable[..., list[str]]] = []
"""Each returns lines that say what would have made a step smaller, of the model, its optimizers,
the shapes of its arguments, and the bytes that were asked for."""
