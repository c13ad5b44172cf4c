"""Headroom: train bigger models on the GPU you have.

Importing the package registers the ops ``torch.ops.headroom.*``. :mod:`headroom.optim` holds
optimizers with the names and arguments of :mod:`torch.optim`.
"""

from . import amp, optim
from ._core import binaries
from .amp.cast_model import cast_model, cast_report
from .functional.unscale_norm import grad_norm, unscale_norm_
from .functional.update_scale import update_scale_
from .grad.accumulate import GradAccumulator, accumulate_
from .grad.clip import clip_grad_norm_, clip_grad_value_
from .optim.adafactor import adafactor_
from .optim.adam import adamw_
from .optim.adam8bit import adamw8bit_, dynamic_map
from .optim.master_weights import join_weights_, split_weights_
from .state.save import StateFileError, latest, load_state, save_state

__all__ = [
    "GradAccumulator",
    "StateFileError",
    "accumulate_",
    "adafactor_",
    "adamw8bit_",
    "adamw_",
    "amp",
    "build_info",
    "cast_model",
    "cast_report",
    "clip_grad_norm_",
    "clip_grad_value_",
    "dynamic_map",
    "get_include",
    "get_library_dir",
    "grad_norm",
    "join_weights_",
    "latest",
    "load_state",
    "optim",
    "save_state",
    "split_weights_",
    "unscale_norm_",
    "update_scale_",
]
__version__ = binaries.VERSION


def build_info() -> dict[str, str]:
    """What the C library was built with and for: version, compiler, cuda, archs, cpu."""
    if binaries._C is None:
        raise RuntimeError("headroom._C is missing: the package was built without pybind11")
    return binaries._C.build_info()


def get_include() -> str:
    """The folder of ``headroom.h``."""
    return str(binaries.INCLUDE_DIR)


def get_library_dir() -> str:
    """The folder of ``libheadroom.so`` and ``libheadroom_torch.so``."""
    return str(binaries.LIBRARY_DIR)
