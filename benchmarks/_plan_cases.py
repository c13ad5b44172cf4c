"""The cases of the benchmark of the planner: models, optimizers and techniques."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ._plan_models import MoE, ResNet, TiedMLP, ViT

BF16 = torch.bfloat16
VOCAB = 1000


@dataclass(frozen=True)
class Case:
    """A training step: what is given to the planner, and what is run.

    Attributes:
        model: makes the model, on the default device.
        optimizer: makes the optimizer of a model.
        batch: makes a batch.
        loss: of the model and the batch.
        amp: the dtype of autocast.
        accumulation: backward passes per step.
        shard: as the argument of the plan; None on one rank.
        needs: a package without which the case is left out.
    """

    name: str
    what: str
    model: Callable[[], nn.Module]
    optimizer: Callable[[nn.Module], Any]
    batch: Callable[[], Any]
    loss: Callable[[nn.Module, Any], Tensor]
    amp: torch.dtype | None = None
    accumulation: int = 1
    release: bool = False
    shard: Any = None
    needs: tuple[str, ...] = ()
    quick: bool = field(default=False)

    @property
    def is_sharded(self) -> bool:
        """Whether ``fully_shard`` trains the model on several ranks, and not DDP."""
        named = isinstance(self.shard, str) and self.shard.startswith("fsdp")
        return named or hasattr(self.shard, "mp_policy")


# Batches and losses


def tokens(rows: int = 4, length: int = 64, vocab: int = VOCAB) -> tuple[Tensor, Tensor]:
    return torch.randint(vocab, (rows, length)), torch.randint(vocab, (rows, length))


def images(rows: int = 8) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, 3, 32, 32), torch.randint(100, (rows,))


def classes(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    logits = model(batch[0])
    return F.cross_entropy(logits.flatten(0, -2).float(), batch[1].flatten())


def fused_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    from headroom.functional import cross_entropy

    loss = cross_entropy(model(batch[0]), batch[1], inplace_backward=True)
    assert isinstance(loss, Tensor)
    return loss


def own_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The loss of a model of transformers."""
    return model(input_ids=batch[0], labels=batch[1]).loss


# Models


def ours(
    shape: str = "llama", dtype: torch.dtype | None = None, every: int = 0, **options: Any
) -> nn.Module:
    """A headroom.nn.Transformer of a shape."""
    import headroom
    from headroom.nn import Transformer, TransformerConfig

    shared: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": 128, "layers": 4, "heads": 4}
    plain: dict[str, Any] = {
        "features": 512,
        "norm": "layer",
        "activation": "gelu",
        "gated": False,
        "qkv_bias": True,
        "out_bias": True,
        "mlp_bias": True,
        "positions": "learned",
        "max_positions": 64,
    }
    shapes: dict[str, dict[str, Any]] = {
        "llama": {"features": 320, "kv_heads": 2},
        "gpt": plain,
        "bert": plain | {"layout": "post", "causal": False, "final_norm": False},
    }
    model = Transformer(TransformerConfig(**shared | shapes[shape] | options))
    if every:
        headroom.checkpoint_every(model, every)
    return model if dtype is None else headroom.cast_model(model, dtype)


def theirs(
    shape: str = "llama", recompute: bool = False, lora: bool = False, **options: Any
) -> nn.Module:
    """A model of transformers."""
    import transformers as tf

    made: nn.Module
    if shape == "llama":
        sizes = {"intermediate_size": 320, "num_key_value_heads": 2}
        shared = {"vocab_size": VOCAB, "hidden_size": 128, "num_hidden_layers": 4}
        heads = {"num_attention_heads": 4, "max_position_embeddings": 64}
        made = tf.LlamaForCausalLM(tf.LlamaConfig(**shared, **sizes, **heads, **options))
    elif shape == "gpt2":
        sizes = {"vocab_size": VOCAB, "n_embd": 128, "n_layer": 4, "n_head": 4, "n_positions": 64}
        ends = {"bos_token_id": 1, "eos_token_id": 2}
        made = tf.GPT2LMHeadModel(tf.GPT2Config(**sizes, **ends, **options))
    else:
        sizes = {"vocab_size": VOCAB, "hidden_size": 128, "num_hidden_layers": 4}
        heads = {"num_attention_heads": 4, "intermediate_size": 512, "max_position_embeddings": 64}
        made = tf.BertForMaskedLM(tf.BertConfig(**sizes, **heads, **options))
    if lora:
        import peft

        config = peft.LoraConfig(r=8, target_modules=["q_proj", "v_proj", "down_proj"])
        made = peft.get_peft_model(made, config)  # pyright: ignore[reportArgumentType]
    if recompute:
        made.config.use_cache = False  # pyright: ignore[reportAttributeAccessIssue]
        options = {"use_reentrant": False}
        made.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)  # pyright: ignore
        if lora:
            made.enable_input_require_grads()  # pyright: ignore
    return made.train()


# Optimizers


def adamw(model: nn.Module, **options: Any) -> Any:
    return torch.optim.AdamW(_trained(model), 1e-3, **options)


def sgd(model: nn.Module, momentum: float = 0.9) -> Any:
    return torch.optim.SGD(_trained(model), 1e-3, momentum=momentum)


def adafactor(model: nn.Module) -> Any:
    return torch.optim.Adafactor(_trained(model), 1e-3)


def own(model: nn.Module, name: str = "AdamW", **options: Any) -> Any:
    import headroom

    return getattr(headroom.optim, name)(_trained(model), 1e-3, **options)


def _trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def cases() -> list[Case]:
    fused, loop = partial(adamw, fused=True), partial(adamw, foreach=False)
    each = partial(adamw, foreach=True)
    bits, factor = partial(own, name="AdamW8bit"), partial(own, name="Adafactor")
    hf, lora = ("transformers",), ("transformers", "peft")
    longer = partial(tokens, 4, 128)
    return [
        Case("gpt-adamw", "ours, GPT", partial(ours, "gpt"), each, tokens, classes, quick=True),
        Case("gpt-sgd", "ours, GPT, SGD", partial(ours, "gpt"), sgd, tokens, classes),
        Case(
            "gpt-release",
            "gradients released",
            partial(ours, "gpt"),
            own,
            tokens,
            classes,
            release=True,
        ),
        Case("llama-fused", "ours, Llama, fused AdamW", ours, fused, tokens, classes),
        Case(
            "llama-8bit-L2",
            "save='L2', 8-bit AdamW",
            partial(ours, save="L2"),
            bits,
            tokens,
            classes,
        ),
        Case(
            "llama-8bit-L3",
            "save='L3', 8-bit AdamW",
            partial(ours, save="L3"),
            bits,
            longer,
            classes,
        ),
        Case(
            "llama-every", "every block checkpointed", partial(ours, every=1), own, longer, classes
        ),
        Case("llama-every2", "every second block", partial(ours, every=2), own, longer, fused_loss),
        Case(
            "llama-remainder",
            "bfloat16 and remainders",
            partial(ours, dtype=BF16),
            partial(own, master="remainder16"),
            tokens,
            fused_loss,
        ),
        Case(
            "llama-master",
            "bfloat16, master weights",
            partial(ours, dtype=BF16),
            partial(own, master="f32"),
            tokens,
            classes,
        ),
        Case("llama-adafactor", "ours, Adafactor", ours, factor, tokens, classes),
        Case("llama-amp", "autocast, 8-bit AdamW", ours, bits, tokens, classes, amp=BF16),
        Case("bert-sgd", "ours, BERT", partial(ours, "bert"), sgd, tokens, classes),
        Case(
            "bert-accumulate",
            "4 backward passes",
            partial(ours, "bert"),
            loop,
            tokens,
            classes,
            accumulation=4,
        ),
        Case("hf-gpt2", "GPT-2, AdamW", partial(theirs, "gpt2"), each, tokens, own_loss, needs=hf),
        Case(
            "hf-gpt2-eager",
            "GPT-2, attention of its own",
            partial(theirs, "gpt2", attn_implementation="eager"),
            fused,
            tokens,
            own_loss,
            needs=hf,
        ),
        Case(
            "hf-llama", "Llama, fused AdamW", theirs, fused, tokens, own_loss, needs=hf, quick=True
        ),
        Case(
            "hf-llama-recompute",
            "its checkpointing",
            partial(theirs, recompute=True),
            fused,
            longer,
            own_loss,
            needs=hf,
        ),
        Case(
            "hf-bert-amp",
            "BERT, autocast",
            partial(theirs, "bert"),
            each,
            tokens,
            own_loss,
            amp=BF16,
            needs=hf,
        ),
        Case("hf-lora", "LoRA", partial(theirs, lora=True), each, tokens, own_loss, needs=lora),
        Case(
            "hf-lora-recompute",
            "LoRA, 8-bit AdamW",
            partial(theirs, lora=True, recompute=True),
            bits,
            longer,
            own_loss,
            needs=lora,
        ),
        Case("resnet-sgd", "ResNet, momentum", ResNet, sgd, images, classes, quick=True),
        Case("resnet-amp", "ResNet, autocast", ResNet, sgd, images, classes, amp=BF16),
        Case(
            "resnet-accumulate", "2 backward passes", ResNet, each, images, classes, accumulation=2
        ),
        Case("vit-adamw", "ViT with dropout", partial(ViT, dropout=0.1), each, images, classes),
        Case(
            "vit-recompute",
            "ViT, torch's checkpoint",
            partial(ViT, recompute=True),
            fused,
            images,
            classes,
        ),
        Case("tied-gpt", "tied head", partial(ours, "gpt", tied=True), each, tokens, classes),
        Case(
            "tied-mlp",
            "tied head, plain SGD",
            TiedMLP,
            partial(sgd, momentum=0.0),
            partial(tokens, vocab=4000),
            classes,
        ),
        *_of_ranks(),
        Case("moe", "experts", MoE, each, tokens, classes),
        Case(
            "moe-adafactor", "experts, torch's Adafactor", MoE, adafactor, tokens, classes, amp=BF16
        ),
    ]


def _of_ranks() -> list[Case]:
    """Steps of one of two ranks."""
    from headroom.planning import DDP, FSDP
    from torch.distributed.fsdp import MixedPrecisionPolicy

    each, bits = partial(adamw, foreach=True), partial(own, name="AdamW8bit")
    hf = ("transformers",)
    mixed = FSDP(mp_policy=MixedPrecisionPolicy(BF16, torch.float32))
    view = DDP(gradient_as_bucket_view=True)
    return [
        Case("ddp-gpt", "DDP", partial(ours, "gpt"), own, tokens, classes, shard="ddp"),
        Case("ddp-view", "DDP, buckets hold gradients", ours, bits, tokens, classes, shard=view),
        Case(
            "ddp-hf",
            "DDP, GPT-2",
            partial(theirs, "gpt2"),
            each,
            tokens,
            own_loss,
            shard="ddp",
            needs=hf,
        ),
        Case("fsdp-llama", "FSDP2", ours, own, tokens, classes, shard="fsdp"),
        Case(
            "fsdp-8bit-L3",
            "FSDP2, save='L3', 8-bit",
            partial(ours, save="L3"),
            bits,
            tokens,
            classes,
            shard="fsdp",
        ),
        Case(
            "fsdp-keep",
            "FSDP2, no reshard",
            partial(ours, "gpt"),
            own,
            tokens,
            classes,
            shard="fsdp-no-reshard",
        ),
        Case("fsdp-mixed", "FSDP2, bfloat16 products", ours, own, tokens, classes, shard=mixed),
        Case(
            "fsdp-accumulate",
            "FSDP2, 2 backward passes",
            ours,
            own,
            tokens,
            classes,
            accumulation=2,
            shard="fsdp",
        ),
        Case("fsdp-hf", "FSDP2, Llama", theirs, own, tokens, own_loss, shard="fsdp", needs=hf),
    ]
