"""Headroom: train bigger models on the GPU you have.

Importing the package registers the ops ``torch.ops.headroom.*``, which :mod:`headroom.functional`
calls. Everything else is imported when it is first used: :mod:`headroom.optim` holds optimizers
with the names and arguments of :mod:`torch.optim`, :mod:`headroom.amp` loss scaling and 16-bit
models, :mod:`headroom.host` memory for what a device has no room for, :mod:`headroom.loss` losses
that never make their logits, :mod:`headroom.nn` blocks that decide what they keep,
:mod:`headroom.checkpointing` recomputed activations, :mod:`headroom.patching` the same for models
that exist, :mod:`headroom.quantizing` frozen weights in few bits, :mod:`headroom.adapters`
low-rank adapters beside them,
:mod:`headroom.release` steps inside the backward pass, :mod:`headroom.memory` where
bytes go, :mod:`headroom.planning` where they will go, :mod:`headroom.profiling` where time goes,
:mod:`headroom.fitting` the fastest way to train within a budget, :mod:`headroom.retrying` steps
that are repeated when memory runs out, :mod:`headroom.data` batches that are there in time,
:mod:`headroom.reports` pictures of these,
:mod:`headroom.state` files of a run's state, and :mod:`headroom.integrations` what other libraries'
training loops need.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

# The binaries come first: what keeps them from being loaded is said in a sentence.
from ._core import binaries
from ._core.lazy import advisers, lazy, reexported

# isort: split
from . import functional  # registers the ops

if TYPE_CHECKING:
    from . import (
        adapters,
        amp,
        checkpointing,
        data,
        fitting,
        host,
        integrations,
        loss,
        memory,
        nn,
        optim,
        patching,
        planning,
        profiling,
        quantizing,
        release,
        reports,
        retrying,
        state,
    )
    from .adapters import lora, merge, unmerge
    from .amp.cast_model import cast_model, cast_report
    from .checkpointing import checkpoint, checkpoint_every, checkpoint_sequential
    from .data.forecast import forecast
    from .fitting import fit
    from .fitting.ladder import ladder
    from .grad.accumulate import GradAccumulator
    from .grad.clip import clip_grad_norm_, clip_grad_value_
    from .grad.norm import grad_norm
    from .host import HostArena
    from .loss import linear_cross_entropy, linear_distillation_loss, linear_log_prob
    from .patching import patch, unpatch
    from .planning import fits, max_batch, plan
    from .profiling import profile
    from .quantizing import dequantize, load_quantized, quantize
    from .release import release_gradients
    from .retrying import retry_on_oom
    from .state import StateFileError, latest, load_state, save_state
    from .step.micro_batches import micro_batches
else:
    __getattr__, _ = lazy(
        __name__,
        {
            ".adapters": ("lora", "merge", "unmerge"),
            ".amp.cast_model": ("cast_model", "cast_report"),
            ".checkpointing": ("checkpoint", "checkpoint_every", "checkpoint_sequential"),
            ".data.forecast": ("forecast",),
            ".fitting": ("fit",),
            ".fitting.ladder": ("ladder",),
            ".grad.accumulate": ("GradAccumulator",),
            ".grad.clip": ("clip_grad_norm_", "clip_grad_value_"),
            ".grad.norm": ("grad_norm",),
            ".host": ("HostArena",),
            ".loss": ("linear_cross_entropy", "linear_distillation_loss", "linear_log_prob"),
            ".patching": ("patch", "unpatch"),
            ".planning": ("fits", "max_batch", "plan"),
            ".profiling": ("profile",),
            ".quantizing": ("dequantize", "load_quantized", "quantize"),
            ".release": ("release_gradients",),
            ".retrying": ("retry_on_oom",),
            ".step.micro_batches": ("micro_batches",),
            ".state": ("StateFileError", "latest", "load_state", "save_state"),
        },
        """adapters amp checkpointing data fitting grad host integrations loss memory nn optim
        patching planning profiling quantizing release reports retrying state""".split(),
    )
    # Names that belong to a package for its users, and are in one that needs it.
    reexported["headroom.optim"] = {
        "ReleaseHandle": "headroom.release",
        "check_same_state": "headroom.state",
        "convert_state": "headroom.state",
        "load_sharded": "headroom.state",
        "release_gradients": "headroom.release",
    }
    reexported["headroom.state"] = {
        "load_adapter": "headroom.adapters",
        "save_adapter": "headroom.adapters",
    }
    advisers.append(lambda *seen: import_module(".planning.oom_advice", __name__).oom_advice(*seen))

__all__ = [
    "GradAccumulator",
    "HostArena",
    "StateFileError",
    "adapters",
    "amp",
    "build_info",
    "cast_model",
    "cast_report",
    "checkpoint",
    "checkpoint_every",
    "checkpoint_sequential",
    "checkpointing",
    "clip_grad_norm_",
    "clip_grad_value_",
    "data",
    "dequantize",
    "fit",
    "fits",
    "fitting",
    "forecast",
    "functional",
    "get_include",
    "get_library_dir",
    "grad_norm",
    "host",
    "integrations",
    "ladder",
    "latest",
    "linear_cross_entropy",
    "linear_distillation_loss",
    "linear_log_prob",
    "load_quantized",
    "load_state",
    "lora",
    "loss",
    "max_batch",
    "memory",
    "merge",
    "micro_batches",
    "nn",
    "optim",
    "patch",
    "patching",
    "plan",
    "planning",
    "profile",
    "profiling",
    "quantize",
    "quantizing",
    "release",
    "release_gradients",
    "reports",
    "retry_on_oom",
    "retrying",
    "save_state",
    "state",
    "unmerge",
    "unpatch",
]
__version__ = binaries.VERSION


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


def build_info() -> dict[str, str]:
    """Returns what the C library was built with and for: version, compiler, cuda, archs, cublas,
    and the instruction set in use, cpu."""
    return binaries.build_info()


def get_include() -> str:
    """Returns the folder of ``headroom.h``."""
    return str(binaries.INCLUDE_DIR)


def get_library_dir() -> str:
    """Returns the folder of ``libheadroom.so`` and ``libheadroom_torch.so``."""
    return str(binaries.LIBRARY_DIR)
