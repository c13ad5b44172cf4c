"""Attention with sinks in models of transformers, which have none but eager attention for it, or
libraries that have to be installed."""

from __future__ import annotations

from typing import NamedTuple

from torch import nn

from .attention import register_attention
from .changes import Changes
from .classes import entry_of
from .report import PatchReport


class _Model(NamedTuple):
    module: str


# Those whose attention is that of the formula, and whose masks are what transformers makes. Of the
# others with sinks, DeepSeek-V4 and Hunyuan V4 change masks, values of MiMo-V2 have another size
# than its keys, and Inkling 2 has a sink for each token.
_MODELS = {
    f"{prefix}Attention": _Model(f"transformers.models.{model}.modeling_{model}")
    for prefix, model in {
        "GptOss": "gpt_oss",
        "GraniteSWA": "granite_swa",
        "GraniteMoeSWA": "granitemoe_swa",
        "Flint": "flint",
        "OpenAIPrivacyFilter": "openai_privacy_filter",
    }.items()
}


def swap_sinks(model: nn.Module, changes: Changes, report: PatchReport) -> None:
    """Lets :func:`headroom.functional.sink_attention` compute what is eager attention with sinks.
    Another attention was chosen by someone, and stays."""
    swapped: list[object] = []
    for name, module in model.named_modules():
        if entry_of(module, _MODELS) is None:
            continue
        config = module.config
        if config._attn_implementation == "eager":
            function = register_attention()
            changes.set_shared(module, config, "_attn_implementation_internal", function)
            swapped.append(config)
        if any(config is each for each in swapped):
            report._swap(name, module, "attention", "headroom.functional.sink_attention")
