"""A Llama beside transformers': what a block keeps for the backward pass, and the time and the
memory of a step of the whole model, at the levels of `save`, patched, and with torch's checkpoint.

A step is forward, loss and backward. The optimizer's step, which is the same for all, is not in
it: with it, all ratios would be nearer to 1.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ._layers import held_bytes
from .harness import Case, Contender, Share, Unavailable

F32, BF16 = torch.float32, torch.bfloat16
LEVELS = {"headroom": "L1", **{f"headroom {level}": level for level in ("L0", "L2", "L5")}}
ALL_LEVELS = {"headroom": "L1", **{f"headroom L{k}": f"L{k}" for k in (0, 2, 3, 4, 5)}}
KEPT, PEAK = "bytes kept per token", "bytes at the peak"


class Shape(NamedTuple):
    hidden: int
    features: int
    heads: int
    kv_heads: int
    layers: int
    vocabulary: int
    sequences: int
    tokens: int  # of a sequence

    def model(self, dtype: torch.dtype, device: torch.device, attention: str = "sdpa") -> nn.Module:
        """Returns a Llama of transformers with random weights, the same for each call."""
        try:
            from transformers import LlamaConfig, LlamaForCausalLM
        except ImportError as error:
            raise Unavailable(str(error)) from error
        config = LlamaConfig(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=self.features,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            max_position_embeddings=self.tokens,
            attn_implementation=attention,
            use_cache=False,
        )
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            torch.manual_seed(0)
            made = LlamaForCausalLM(config)
        return made.to(device, dtype).train()

    def ids(self, device: torch.device) -> Tensor:
        generator = torch.Generator().manual_seed(1)
        size = self.sequences, self.tokens
        return torch.randint(self.vocabulary, size, generator=generator).to(device)


# ---- One block -----------------------------------------------------------------------------------


class OneBlock:
    """The same block in the models of the contenders, with an input and a gradient."""

    def __init__(self, shape: Shape, dtype: torch.dtype, device: torch.device) -> None:
        self.shape, self.dtype, self.device = shape, dtype, device
        size = shape.sequences, shape.tokens, shape.hidden
        generator = torch.Generator().manual_seed(2)
        self.x = torch.randn(size, generator=generator).to(device, dtype).requires_grad_()
        self.dy = torch.randn(size, generator=generator).to(device, dtype)

    def torch(
        self, attention: str, layer_of: Callable[[nn.Module], Any] | None = None
    ) -> Contender:
        model: Any = self.shape.model(self.dtype, self.device, attention).model
        positions = torch.arange(self.shape.tokens, device=self.device)[None]
        with torch.no_grad():
            rotation = model.rotary_emb(self.x, position_ids=positions)
        mask = None
        if attention == "eager":  # the others know by themselves that None is causal
            tokens = self.shape.tokens
            mask = torch.full((tokens, tokens), float("-inf"), device=self.device).triu(1)
            mask = mask.to(self.dtype)[None, None]
        layer = model.layers[0] if layer_of is None else layer_of(model)
        options = {"position_embeddings": rotation, "attention_mask": mask}
        return self._contender(lambda x: layer(x, **options), model)

    def torch_checkpoint(self) -> Contender:
        def checkpointed(model: Any) -> Callable[..., Tensor]:
            return functools.partial(checkpoint, model.layers[0], use_reentrant=False)

        return self.torch("sdpa", checkpointed)

    def headroom(self, level: str) -> Contender:
        from headroom.nn import Rotation, transformer_from_hf

        model = transformer_from_hf(self.shape.model(self.dtype, self.device))
        block = model.blocks[0]
        block.save = level
        rotation = Rotation(*model._rotation(False, self.shape.tokens, self.device))
        return self._contender(lambda x: block(x, rotation), block)

    def liger(self) -> Contender:
        try:
            from liger_kernel.transformers import apply_liger_kernel_to_llama
        except ImportError as error:
            raise Unavailable(str(error)) from error
        from transformers.models.llama import modeling_llama

        own = {name: getattr(modeling_llama, name) for name in dir(modeling_llama)}
        rotate: list[Any] = []

        def patched(model: nn.Module) -> Callable[..., Tensor]:
            apply_liger_kernel_to_llama(
                cross_entropy=False, fused_linear_cross_entropy=False, model=model
            )
            rotate.append(modeling_llama.apply_rotary_pos_emb)
            for name, value in own.items():  # it changes the module for the other contenders too
                setattr(modeling_llama, name, value)
            layer: Any = model.layers[0]

            def call(*args: Any, **options: Any) -> Tensor:
                with mock.patch.object(modeling_llama, "apply_rotary_pos_emb", rotate[0]):
                    return layer(*args, **options)

            return call

        return self.torch("sdpa", patched)

    def _contender(self, forward: Callable[[Tensor], Tensor], module: nn.Module) -> Contender:
        leaves = [self.x, *module.parameters()]
        tokens = self.shape.sequences * self.shape.tokens

        def call() -> None:
            forward(self.x).backward(self.dy)
            for leaf in leaves:
                leaf.grad = None

        def counts() -> dict[str, float]:
            # From a new tensor, which counts if it is kept.
            held, _ = held_bytes(lambda: forward(self.x.clone()), self.device)
            return {KEPT: (held - self.dy.nbytes) / tokens}  # without the result

        return Contender(call, counts=counts)


# ---- The whole model -----------------------------------------------------------------------------


class Model:
    """The same weights in the models of the contenders, and a batch. What is timed has the loss and
    the gradients of transformers' model, and the same bits at all levels: both are checked."""

    def __init__(self, shape: Shape, dtype: torch.dtype, device: torch.device) -> None:
        self.shape, self.dtype, self.device = shape, dtype, device
        self.ids = shape.ids(device)
        self.targets = nn.functional.pad(self.ids[:, 1:], (0, 1), value=-100)
        self._own: tuple[Tensor, ...] | None = None

    @functools.cached_property
    def origin(self) -> Any:
        return self.shape.model(self.dtype, self.device)

    @functools.cached_property
    def ours(self) -> Any:
        from headroom.nn import transformer_from_hf

        return transformer_from_hf(self.origin)

    @functools.cached_property
    def _expected(self) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """The values of a step of transformers' model in float64, and in the dtype."""
        exact = copy.deepcopy(self.origin).double()
        return self._values(*self._of(exact)), self._values(*self._of(self.origin))

    def torch(self) -> Contender:
        return self._contender(*self._of(self.origin))

    def torch_checkpoint(self) -> Contender:
        model = copy.deepcopy(self.origin)
        name = "activation_checkpointing_enable"  # before transformers 5.23, the other
        enable = getattr(model, name, model.gradient_checkpointing_enable)
        enable({"use_reentrant": False})
        return self._contender(*self._of(model))

    def patched(self, level: str, loss: bool = False) -> Contender:
        import headroom

        model = copy.deepcopy(self.origin)
        headroom.patch(model, level, loss=loss)
        return self._contender(*self._of(model))

    def headroom(self, level: str) -> Contender:
        from headroom.functional import cross_entropy

        model = self.ours

        def loss() -> Tensor:
            model.save = level
            return cross_entropy(model(self.ids), self.targets)

        values = self._values(loss, model)
        if self._own is None:
            self._own = values
        if not all(map(torch.equal, values, self._own)):
            raise AssertionError(f"gradients at {level} have other bits")
        return self._contender(loss, model, values)

    def products(self) -> Contender:
        """The matrix products and attention of a step and nothing else, without what has
        no part in either: a floor of all others."""
        shape, like = self.shape, {"dtype": self.dtype, "device": self.device}
        hidden, features, rows = shape.hidden, shape.features, self.ids.numel()
        dim = hidden // shape.heads

        def operands(outputs: int, inputs: int) -> tuple[Tensor, ...]:
            sizes = (rows, inputs), (outputs, inputs), (rows, outputs)
            return tuple(torch.randn(size, **like) for size in sizes)

        layer = [
            operands(hidden + 2 * shape.kv_heads * dim, hidden),
            operands(hidden, hidden),
            operands(2 * features, hidden),
            operands(hidden, features),
        ]
        head = operands(shape.vocabulary, hidden)
        q, k, v = (
            torch.randn(shape.sequences, heads, shape.tokens, dim, **like).requires_grad_()
            for heads in (shape.heads, shape.kv_heads, shape.kv_heads)
        )

        def multiply(x: Tensor, weight: Tensor, dy: Tensor) -> None:
            nn.functional.linear(x, weight)
            dy @ weight
            dy.t() @ x

        def call() -> None:
            for _ in range(shape.layers):
                for given in layer:
                    multiply(*given)
                o = nn.functional.scaled_dot_product_attention(
                    q, k, v, is_causal=True, enable_gqa=True
                )
                torch.autograd.grad(o, (q, k, v), o.detach())
            multiply(*head)

        return Contender(call)

    def _of(self, model: Any) -> tuple[Callable[[], Tensor], nn.Module]:
        return lambda: model(input_ids=self.ids, labels=self.ids).loss, model

    def _contender(
        self,
        loss: Callable[[], Tensor],
        model: nn.Module,
        values: tuple[Tensor, ...] | None = None,
    ) -> Contender:
        self._check(self._values(loss, model) if values is None else values)
        weights = [*model.parameters()]

        def call() -> None:
            loss().backward()
            for weight in weights:
                weight.grad = None

        def counts() -> dict[str, float]:
            kept, _ = held_bytes(loss, self.device)
            _, peak = held_bytes(call, self.device)
            return {KEPT: kept / self.ids.numel(), PEAK: peak}

        return Contender(call, counts=counts)

    @staticmethod
    def _values(loss: Callable[[], Tensor], model: nn.Module) -> tuple[Tensor, ...]:
        """The loss and the gradients that have the same layout in all models."""
        value = loss()
        value.backward()
        named = dict(model.named_parameters())
        first = next(k for k in named if "embed" in k)
        last = next(k for k in named if "head" in k)
        grads = [named[first].grad, named[last].grad]
        assert all(grad is not None for grad in grads)
        found = [value.detach(), *(grad for grad in grads if grad is not None)]
        for weight in named.values():
            weight.grad = None
        return tuple(found)

    def _check(self, values: tuple[Tensor, ...]) -> None:
        """Gradients are at most twice as far from float64 as transformers' own, and the loss, whose
        error is one number and may be small by chance, at most a rounding more."""
        names = "loss", "gradient of the embeddings", "gradient of the head"
        roundings = torch.finfo(self.dtype).eps, torch.finfo(F32).eps, torch.finfo(F32).eps
        for name, rounding, got, exact, rounded in zip(names, roundings, values, *self._expected):
            error, allowed = ((t.double() - exact).norm().item() for t in (got, rounded))
            if error > 2 * allowed + rounding * exact.norm().item():
                raise AssertionError(f"{name} is wrong by {error}, transformers' by {allowed}")


# ---- Cases ---------------------------------------------------------------------------------------

TINY = Shape(64, 96, 4, 2, 2, 64, 1, 16)
LLAMA_1B = Shape(2048, 8192, 32, 8, 1, 8, 1, 128)  # blocks of Llama-3.2-1B
LLAMA_8B = Shape(4096, 14336, 32, 8, 1, 8, 4, 2048)  # blocks of Llama-3-8B
STEP_BARS = {"headroom": 1.0, "headroom L2": 1.1, "headroom L5": 1.3}
LLAMA_20M = Shape(512, 1408, 8, 2, 6, 4096, 4, 256)  # 21.1M parameters


def _kept_bars(of: str) -> list[Share]:
    rows = {"headroom": 0.48, "headroom L2": 0.19, "headroom L5": 0.045}
    return [
        Share(KEPT, row, of, most, kind) for row, most in rows.items() for kind in ("cpu", "cuda")
    ]


def block_case(device: torch.device, quick: bool) -> Case:
    shape, name = (LLAMA_8B, "Llama-3-8B") if device.type == "cuda" else (LLAMA_1B, "Llama-3.2-1B")
    used = TINY if quick else shape

    def setup(device: torch.device) -> dict[str, Callable[[], Contender]]:
        one = OneBlock(used, BF16, device)
        return {
            **{row: functools.partial(one.headroom, level) for row, level in ALL_LEVELS.items()},
            "torch": functools.partial(one.torch, "sdpa"),
            **(
                {"torch, eager": functools.partial(one.torch, "eager")}
                if device.type == "cpu"
                else {}
            ),
            "torch, checkpoint": one.torch_checkpoint,
            **({"liger": one.liger} if device.type == "cuda" else {}),
        }

    what = (
        f"a block of {name}, forward and backward, {used.sequences} x {used.tokens} tokens, bf16; "
        "headroom is L1"
    )
    bars = [
        *_kept_bars("torch"),
        Share("time", "headroom", "headroom L0", 1.0, "cuda"),
        Share("time", "headroom L2", "headroom L0", 1.08, "cuda"),
    ]
    return Case("block-bf16", what, setup, "torch", bars=bars)


def step_case(dtype: torch.dtype, quick: bool) -> Case:
    shape = TINY if quick else LLAMA_20M

    def setup(device: torch.device) -> dict[str, Callable[[], Contender]]:
        model = Model(shape, dtype, device)
        return {
            **{row: functools.partial(model.headroom, level) for row, level in LEVELS.items()},
            "patch L1": functools.partial(model.patched, "L1"),
            "patch L1, loss": functools.partial(model.patched, "L1", True),
            "torch": model.torch,
            "torch, checkpoint": model.torch_checkpoint,
            "products and attention": model.products,
        }

    name = "f32" if dtype == F32 else "bf16"
    what = (
        f"a step of a 21.1M Llama, {shape.sequences} x {shape.tokens} tokens, {name}; "
        "headroom is L1"
    )
    bars = [Share("time", row, "torch", most, "cpu") for row, most in STEP_BARS.items()]
    for row in ("patch L1", "patch L1, loss"):
        if dtype == BF16:  # in f32 products and attention alone take nearly as long as that
            bars.append(Share("time", row, "torch", 1 / 1.15, "cpu"))
        bars.append(Share(PEAK, row, "torch", 0.6, "cpu"))
    return Case(f"step-{name}", what, setup, "torch", bars=bars)


def cases(device: torch.device, quick: bool) -> list[Case]:
    found = [block_case(device, quick)]
    return found + [step_case(dtype, quick) for dtype in (F32, BF16)]
