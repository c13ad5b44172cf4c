"""A small GPT, the model that every rung trains: in plain torch, and of Headroom's blocks."""

from dataclasses import dataclass

import headroom
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class Size:
    layers: int
    width: int
    heads: int
    context: int  # tokens of one sequence
    batch: int  # sequences of one optimizer step
    lr: float
    vocab: int = 256  # number of tokens: one per byte, or with more, one per common word as well


SIZES = {
    "tiny": Size(layers=2, width=32, heads=2, context=64, batch=4, lr=1e-2),
    "small": Size(layers=4, width=192, heads=4, context=256, batch=16, lr=1e-3),
    "medium": Size(layers=8, width=512, heads=8, context=512, batch=32, lr=1e-3),
    "large": Size(layers=24, width=1024, heads=16, context=1024, batch=32, lr=3e-4),
    "xl": Size(layers=48, width=1600, heads=25, context=1024, batch=32, lr=2e-4),
    "words": Size(layers=2, width=128, heads=4, context=128, batch=16, lr=1e-3, vocab=16_384),
    "words-tiny": Size(layers=2, width=32, heads=2, context=32, batch=4, lr=1e-2, vocab=600),
}


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)), on [batch, context, width]."""

    def __init__(self, size: Size):
        super().__init__()
        self.heads = size.heads
        self.norm1 = nn.LayerNorm(size.width)
        self.qkv = nn.Linear(size.width, 3 * size.width)
        self.out = nn.Linear(size.width, size.width)
        self.norm2 = nn.LayerNorm(size.width)
        self.up = nn.Linear(size.width, 4 * size.width)
        self.down = nn.Linear(4 * size.width, size.width)

    def attention(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).transpose(1, 3).unbind(2)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class GPT(nn.Module):
    def __init__(self, size: Size, checkpoint_blocks: bool = False):
        super().__init__()
        self.checkpoint_blocks = checkpoint_blocks
        self.token = nn.Embedding(size.vocab, size.width)
        self.position = nn.Embedding(size.context, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, size.vocab, bias=False)
        self.apply(self._init)
        # The residual stream sums 2 * layers branches: scaled, its variance stays the same.
        for block in self.blocks:
            for branch in (block.out, block.down):
                nn.init.normal_(branch.weight, std=0.02 / (2 * size.layers) ** 0.5)

    @staticmethod
    def _init(module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean cross entropy in nats per token; tokens and targets are int64 [batch, context]."""
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            if self.checkpoint_blocks and self.training:
                x = checkpoint(block, x, use_reentrant=False)
            else:
                x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


# What a parameter of GPT is called in HeadroomGPT, in which `blocks.3`, `norm` and `head` are too.
RENAMED = {
    "token": "embedding.tokens",
    "position": "embedding.positions",
    "norm1": "attention_norm",
    "qkv": "attention.qkv",
    "out": "attention.out",
    "norm2": "mlp_norm",
    "up": "mlp.up",
    "down": "mlp.down",
}


class HeadroomGPT(headroom.nn.Transformer):
    """The same function of the same weights, which keeps for the backward pass what `save` says,
    and makes no logits if the loss is fused with the head."""

    def __init__(self, size: Size, save: str, fused_loss: bool = False):
        config = headroom.nn.TransformerConfig(
            vocab_size=size.vocab,
            hidden_size=size.width,
            layers=size.layers,
            heads=size.heads,
            features=4 * size.width,
            norm="layer",
            norm_eps=1e-5,
            activation="gelu_tanh",
            gated=False,
            qkv_bias=True,
            out_bias=True,
            mlp_bias=True,
            positions="learned",
            max_positions=size.context,
        )
        super().__init__(config, save=save, device="meta")  # the weights come from the other model
        weights = GPT(size).state_dict()
        self.load_state_dict({renamed(name): weights[name] for name in weights}, assign=True)
        self.fused_loss = fused_loss

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """As that of GPT. The gradient of the logits takes their place in memory."""
        if self.fused_loss:  # the targets are those of their own places
            return super().forward(tokens, labels=targets, loss_options={"shift": False})
        logits = super().forward(tokens)
        in_place = torch.is_grad_enabled()
        return headroom.functional.cross_entropy(logits, targets, inplace_backward=in_place)


def renamed(name: str) -> str:
    return ".".join(RENAMED.get(part, part) for part in name.split("."))
