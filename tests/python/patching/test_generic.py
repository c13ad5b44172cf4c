"""``headroom.patch`` on models of any kind: values, gradients, and the ways to call them."""

from __future__ import annotations

import headroom
import pytest
import torch
from headroom.functional.linear import SLOW_ON_CPU
from torch import nn
from torch.autograd import forward_ad

from helpers import foreign_models as models
from helpers.foreign_models import FEATURES, HIDDEN


def kinds(report):
    return sorted(swap.kind for swaps in report.swapped.values() for swap in swaps)


class TestModels:
    CASES = {
        "llama": (models.llama, models.tokens, 5 * ["RMSNorm"]),
        "nano_gpt": (models.nano_gpt, models.tokens, 5 * ["LayerNorm"]),
        "vision": (models.Vision, models.images, 5 * ["LayerNorm"]),
        "convolutions": (models.Convolutions, models.images, []),
    }

    @pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16), ids=str)
    @pytest.mark.parametrize("case", CASES)
    def test_values_and_gradients(self, case, dtype):
        make, inputs, wanted = self.CASES[case]
        model, x = make().to(dtype), inputs()
        x = x.to(dtype) if x.is_floating_point() else x
        exact, theirs = models.in_float64(model, x), models.outputs_and_gradients(model, x)
        keys = list(model.state_dict())
        if dtype in SLOW_ON_CPU:
            wanted = sorted(wanted + ["Linear" for m in model.modules() if type(m) is nn.Linear])
        report = headroom.patch(model)
        assert kinds(report) == wanted and report.changed == bool(wanted)
        assert list(model.state_dict()) == keys and report.architecture is None
        models.assert_as_good(models.outputs_and_gradients(model, x), theirs, exact)
        headroom.unpatch(model)
        again = models.outputs_and_gradients(model, x)
        assert all(map(torch.equal, again, theirs))

    def test_fewer_bytes_are_kept(self):
        def kept(model):
            seen = {}

            def pack(t):
                seen[t.untyped_storage()._cdata] = t.untyped_storage().nbytes()
                return t

            with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
                y = model(x)
            del y
            return sum(seen.values())

        model, x = models.llama(), torch.randint(0, 40, (4, 64))
        before = kept(model)
        headroom.patch(model)
        rows, width = x.numel(), torch.float32.itemsize
        # Of each norm all but its input.
        assert before - kept(model) >= 5 * rows * HIDDEN * width

    @pytest.mark.parametrize("training", (True, False))
    def test_transformer_encoder_of_torch(self, training):
        layer = nn.TransformerEncoderLayer(
            HIDDEN, 4, FEATURES, dropout=0.0, batch_first=True, norm_first=True
        )
        model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).train(training)
        for p in model.parameters():
            nn.init.normal_(p, std=0.3)
        x = torch.randn(2, 5, HIDDEN)
        exact, theirs = models.in_float64(model, x), models.outputs_and_gradients(model, x)
        report = headroom.patch(model, "L5")
        assert kinds(report) == 4 * ["LayerNorm"] and [*report.levels.values()] == ["L5", "L5"]
        models.assert_as_good(models.outputs_and_gradients(model, x), theirs, exact)

    def test_the_fast_path_of_torch_gets_nested_tensors(self):
        layer = nn.TransformerEncoderLayer(HIDDEN, 4, FEATURES, batch_first=True)
        model = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(HIDDEN)).eval()
        x, padding = torch.randn(2, 5, HIDDEN), torch.zeros(2, 5, dtype=torch.bool)
        padding[1, 3:] = True
        with torch.no_grad():
            wanted = model(x, src_key_padding_mask=padding)
            headroom.patch(model, "L5")
            assert torch.allclose(model(x, src_key_padding_mask=padding), wanted, atol=1e-5)

    @pytest.mark.slow  # imports transformers
    def test_models_of_transformers_that_are_not_known(self):
        transformers = pytest.importorskip("transformers")
        config = transformers.T5Config(
            vocab_size=40, d_model=HIDDEN, d_ff=FEATURES, d_kv=8, num_layers=2, num_heads=4,
            feed_forward_proj="gated-gelu", dropout_rate=0.1,
        )  # fmt: skip
        config.use_cache = True  # which a second run of a decoder block must not write to
        model = transformers.T5ForConditionalGeneration(config)
        x = models.tokens()
        options = {"decoder_input_ids": x}
        exact = models.in_float64(model, x, **options)
        theirs = models.outputs_and_gradients(model, x, **options)
        before = model.encoder.block[0].gradient_checkpointing
        report = headroom.patch(model, "L5")
        assert kinds(report) == 12 * ["RMSNorm"]
        assert list(report.levels) == [
            f"{p}.block.{k}" for p in ("encoder", "decoder") for k in (0, 1)
        ]
        models.assert_as_good(models.outputs_and_gradients(model, x, **options), theirs, exact)
        calls = []
        model.decoder.block[0].layer[0].register_forward_hook(lambda *_: calls.append(1))
        model(x, **options).logits.sum().backward()
        assert len(calls) == 2
        headroom.unpatch(model)
        assert model.encoder.block[0].gradient_checkpointing == before
        assert "_gradient_checkpointing_func" not in vars(model.encoder.block[0])


class TestCalls:
    """Ways to call a model in which an op cannot run, or should not be seen."""

    def test_torch_func(self, monkeypatch):
        monkeypatch.setattr(models.Attention, "forward", lambda self, x: self.out(x))
        model, x = models.llama(), models.tokens()
        params = {k: v.detach() for k, v in model.named_parameters()}

        def loss(params, x):
            return torch.func.functional_call(model, params, (x,)).square().mean()

        def per_sample(params, x):
            return loss(params, x[None])

        vmapped = torch.vmap(torch.func.grad(per_sample), (None, 0))
        tangents = {k: torch.ones_like(v) for k, v in params.items()}
        wanted = vmapped(params, x), torch.func.jvp(lambda p: loss(p, x), (params,), (tangents,))
        headroom.patch(model, "L5")
        for name, grad in vmapped(params, x).items():
            assert torch.equal(grad, wanted[0][name])
        assert torch.func.jvp(lambda p: loss(p, x), (params,), (tangents,)) == wanted[1]

    @pytest.mark.parametrize(
        "empty", [(0, HIDDEN), (2, 0, HIDDEN), (HIDDEN,), (1, 2, 3, 4, HIDDEN)]
    )
    def test_shapes_that_no_trial_had(self, empty):
        norm, x = nn.LayerNorm(HIDDEN), torch.randn(empty)
        wanted = norm(x)
        assert headroom.patch(norm).changed
        assert torch.allclose(norm(x), wanted, atol=1e-6)

    def test_fake_tensors_show_what_is_kept(self):
        from torch._subclasses.fake_tensor import FakeTensorMode

        model, x = models.llama(), models.tokens()
        headroom.patch(model)
        with FakeTensorMode() as mode:
            params = {name: mode.from_tensor(p) for name, p in model.named_parameters()}
            y = torch.func.functional_call(model, params, (mode.from_tensor(x),))
            names, nodes = set(), [y.grad_fn]
            while nodes:
                node = nodes.pop()
                names.add(node.name())
                nodes += [inner for inner, _ in node.next_functions if inner is not None]
        assert "headroom::rms_norm_backward" in names

    def test_nested_tensors(self):
        norm, rows = nn.LayerNorm(HIDDEN), [torch.randn(k, HIDDEN) for k in (2, 3)]
        x = torch.nested.nested_tensor(rows, layout=torch.jagged)
        headroom.patch(norm)
        for got, row in zip(norm(x).unbind(), rows):
            assert torch.allclose(got, norm(row), atol=1e-6)

    def test_forward_mode(self):
        model, x = models.RMSNorm(HIDDEN), torch.randn(3, HIDDEN)
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(x, torch.ones_like(x))
            wanted = forward_ad.unpack_dual(model(dual)).tangent
            headroom.patch(model)
            assert torch.equal(forward_ad.unpack_dual(model(dual)).tangent, wanted)

    def test_strides(self):
        model = models.llama()
        headroom.patch(model)
        x = torch.randn(HIDDEN, 6, 4).permute(2, 1, 0)
        assert torch.equal(model.norm(x), model.norm(x.contiguous()))

    def test_wrong_shapes_raise_as_before(self):
        norm = models.RMSNorm(HIDDEN)
        x = torch.randn(3, 1)  # which the module itself broadcasts
        wanted = norm(x)
        headroom.patch(norm)
        assert torch.equal(norm(x), wanted)
        with pytest.raises(RuntimeError, match="size"):
            norm(torch.randn(3, 5))

    @pytest.mark.slow
    def test_exported_programs_have_no_op_of_ours(self):
        model, x = models.llama(), models.tokens()
        headroom.patch(model, "L5")
        program = torch.export.export(model.eval(), (x,))
        assert "headroom" not in str(program.graph)
