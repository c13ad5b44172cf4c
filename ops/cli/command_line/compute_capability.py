"""The option that names a compute capability."""

import argparse

__all__ = ["compute_capability"]


def compute_capability(text: str) -> int:
    """Returns 86 of "8.6"."""
    try:
        number = round(float(text) * 10)
    except ValueError:
        number = 0
    if not 50 <= number < 200:
        raise argparse.ArgumentTypeError(f"got {text!r}, wanted a number such as 8.6")
    return number
