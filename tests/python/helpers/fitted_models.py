"""Small models with repeated blocks, and what computes their loss, for tests of fitting."""

from __future__ import annotations

import headroom
import torch
import torch.nn.functional as F
from torch import nn

VOCAB, WIDTH, ROWS, TOKENS = 211, 72, 3, 56


def ids() -> torch.Tensor:
    return torch.randint(VOCAB, (ROWS, TOKENS))


class Half(nn.Module):
    """A block that is called with a keyword and returns a tuple, of which one part is not used."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.first, self.second = nn.Linear(WIDTH, features), nn.Linear(features, WIDTH)

    def forward(self, x, *, scale=1.0):
        hidden = self.first(self.norm(x))
        return x + self.second(F.gelu(hidden)) * scale, hidden.mean()


class Plain(nn.Module):
    """A model of nobody's architecture.

    Args:
        features: of each block.
        frozen: the embedding and so many blocks are not trained.
    """

    def __init__(self, features=(150,) * 4, frozen: int = 0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Half(each) for each in features)
        self.head = nn.Linear(WIDTH, VOCAB)
        if frozen:
            for part in (self.embedding, *self.blocks[:frozen]):
                part.requires_grad_(False)

    def forward(self, ids, labels):
        x = self.embedding(ids)
        for block in self.blocks:
            x, _ = block(x, scale=0.5)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class Images(nn.Module):
    """Convolutions with BatchNorm and dropout."""

    def __init__(self, channels: int = 10, depth: int = 3) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, padding=1)
        self.blocks = nn.Sequential(*(self._block(channels) for _ in range(depth)))
        self.head = nn.Linear(channels, 5)

    @staticmethod
    def _block(channels: int) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.Dropout(0.2),
        )

    def forward(self, images):
        return self.head(self.blocks(self.stem(images)).mean((2, 3)))


def ours(**options):
    shape = {"vocab_size": VOCAB, "hidden_size": 64, "features": 176, "layers": 4, "heads": 4}
    return headroom.nn.Transformer(headroom.nn.TransformerConfig(**{**shape, **options}))


def batch_of_ours():
    tokens = ids()
    return {"ids": tokens, "labels": tokens}


def plain_batch():
    return {"ids": ids(), "labels": ids()}


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=64,
            intermediate_size=176,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
    )


def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    ends = {"bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCAB, n_embd=64, n_layer=3, n_head=4, n_positions=64, **ends)
    )


def transformers_batch():
    tokens = ids()
    return {"input_ids": tokens, "labels": tokens}
