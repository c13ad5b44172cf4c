"""Mixed precision: scales the loss, and casts models to 16 bits."""

from .cast_model import cast_model
from .scaler import GradScaler

__all__ = ["GradScaler", "cast_model"]
