"""The cases of the benchmark of ``headroom.fit``: models, their batches, and budgets."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

EXAMPLES = str(Path(__file__).resolve().parents[1] / "examples")
VOCAB = 1000
SHARES = (0.1, 0.4, 0.7, 0.95)  # of the way from the least peak to that of the fastest choice


@dataclass(frozen=True)
class Training:
    """What is trained.

    Attributes:
        model: makes the model.
        batch: makes what it is called with: a dict, or a tuple whose last is the target.
        loss: of the output and the target; None where the model computes it.
        blocks: the name of the list of its repeated blocks.
        needs: a package without which it is left out.
    """

    name: str
    what: str
    model: Callable[[], nn.Module]
    batch: Callable[[], Any]
    blocks: str
    loss: Callable[[Tensor, Tensor], Tensor] | None = None
    needs: tuple[str, ...] = ()


@dataclass(frozen=True)
class Case:
    """A training and a budget; without one, all the budgets that torch's checkpoint needs. With
    ``host`` it is a share of the way from the least peak with state and activations on the host to
    the least without."""

    name: str
    what: str
    training: Training
    share: float | None = None
    host: bool = False

    @property
    def needs(self) -> tuple[str, ...]:
        return self.training.needs


class MixerBlock(nn.Module):
    """A block of an MLP-Mixer (Tolstikhin et al., 2021): mixes places, and then channels."""

    def __init__(self, places: int, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.places = nn.Sequential(
            nn.Linear(places, 2 * places), nn.GELU(), nn.Linear(2 * places, places)
        )
        self.channels = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.places(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.norm2(x))


class Mixer(nn.Module):
    """An MLP-Mixer on images of 32 x 32."""

    def __init__(self, width: int, depth: int, classes: int = 100) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.blocks = nn.ModuleList(MixerBlock(64, width) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


def classes(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, -2).float(), target.flatten())


def ours(width: int, layers: int) -> nn.Module:
    from headroom.nn import Transformer, TransformerConfig

    return Transformer(
        TransformerConfig(
            vocab_size=VOCAB, hidden_size=width, layers=layers, heads=4, features=4 * width,
            norm="layer", activation="gelu", gated=False, qkv_bias=True, out_bias=True,
            mlp_bias=True, positions="learned", max_positions=128,
        )
    )  # fmt: skip


def demo(size: str, layers: int) -> nn.Module:
    """The model of the demo, in plain torch, with so many layers."""
    if EXAMPLES not in sys.path:
        sys.path.insert(0, EXAMPLES)
    from model import GPT, SIZES  # pyright: ignore[reportMissingImports]

    return GPT(replace(SIZES[size], layers=layers))


def theirs(name: str, width: int, layers: int) -> nn.Module:
    """A model of transformers."""
    import transformers as tf

    made: nn.Module
    shared: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": width,
        "num_hidden_layers": layers,
    }
    shared |= {"num_attention_heads": 4, "max_position_embeddings": 128}
    if name == "llama":
        sizes: dict[str, Any] = {"intermediate_size": 5 * width // 2, "num_key_value_heads": 2}
        made = tf.LlamaForCausalLM(tf.LlamaConfig(**shared, **sizes, use_cache=False))
    elif name == "gpt2":
        named: dict[str, Any] = {
            "n_embd": width,
            "n_layer": layers,
            "n_head": 4,
            "n_positions": 128,
        }
        ends: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 2}
        made = tf.GPT2LMHeadModel(tf.GPT2Config(vocab_size=VOCAB, use_cache=False, **named, **ends))
    else:
        made = tf.BertForMaskedLM(tf.BertConfig(**shared, intermediate_size=4 * width))
    return made.train()


def ids(rows: int, length: int, vocab: int = VOCAB) -> tuple[Tensor, Tensor]:
    return torch.randint(vocab, (rows, length)), torch.randint(vocab, (rows, length))


def named_ids(rows: int, length: int) -> dict[str, Tensor]:
    return dict(zip(("input_ids", "labels"), ids(rows, length), strict=True))


def images(rows: int) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, 3, 32, 32), torch.randint(100, (rows,))


def trainings(quick: bool) -> list[Training]:
    width, layers, rows, length = (32, 3, 4, 16) if quick else (256, 8, 16, 128)
    size, context = ("tiny", 32) if quick else ("small", 256)
    hf, tokens = ("transformers",), partial(named_ids, rows, length)
    return [
        Training(
            "gpt", "the demo's GPT, plain torch", partial(demo, size, layers),
            partial(ids, rows, context, 256), "blocks",
        ),
        Training(
            "llama", "transformers' Llama", partial(theirs, "llama", width, layers), tokens,
            "model.layers", needs=hf,
        ),
        Training(
            "ours", "headroom.nn's GPT", partial(ours, width, layers), partial(ids, rows, length),
            "blocks", classes,
        ),
        Training(
            "gpt2", "transformers' GPT-2", partial(theirs, "gpt2", width, layers), tokens,
            "transformer.h", needs=hf,
        ),
        Training(
            "bert", "transformers' BERT", partial(theirs, "bert", width, layers), tokens,
            "bert.encoder.layer", needs=hf,
        ),
        Training(
            "mixer", "an MLP-Mixer, plain torch", partial(Mixer, width, layers),
            partial(images, 4 * rows), "blocks", F.cross_entropy,
        ),
    ]  # fmt: skip


def cases(quick: bool) -> list[Case]:
    """The budgets of every training, those that need the host, and then the two that are compared
    with torch."""
    found = trainings(quick)
    made = [
        Case(f"{training.name}-{100 * share:.0f}", f"{training.what}", training, share)
        for training in found
        for share in (SHARES[1:2] if quick else SHARES)
    ]
    against = [
        Case(f"{training.name}-torch", f"{training.what}, beside torch's checkpoint", training)
        for training in found[:2]
    ]
    on_host = [
        Case(
            f"{training.name}-host-50", f"{training.what}, with a host budget", training, 0.5, True
        )
        for training in found[: 1 if quick else 3]
    ]
    return made + on_host + against
