"""``headroom_varlen``: sequences that are packed into rows, in models of transformers."""

import copy
import functools
import io
import subprocess
import sys

import headroom
import pytest
import torch
from headroom.integrations.transformers import register_attention
from headroom.nn import Pattern
from headroom.patching import attention, generic

from helpers.hf_models import MODELS, model_of, transformers
from helpers.kept import kept_bytes

LENGTHS = (12, 3, 20, 5)
IDS = torch.randint(3, 61, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(3))
POSITIONS = torch.cat([torch.arange(n) for n in LENGTHS])[None]
ENDS = torch.tensor([0, 12, 15, 35, 40], dtype=torch.int32)
# Encoders tell sequences apart by their ends alone; Gemma2 has scores that sdpa does not know.
PACKED = {"Bert": dict(cu_seq_lens_q=ENDS, cu_seq_lens_k=ENDS, max_length_q=20, max_length_k=20)}
NAMES = [name for name in MODELS if name != "Gemma2"]


@pytest.fixture
def patterns(monkeypatch):
    """What the attention is given in the place of a mask."""
    seen = []
    for module in ("headroom.patching.attention", "headroom.patching.parts"):
        attend = sys.modules[module].attend

        def watched(q, k, v, pattern, attend=attend, **options):
            seen.append(pattern)
            return attend(q, k, v, pattern, **options)

        monkeypatch.setattr(sys.modules[module], "attend", watched)
    return seen


def run(model, name, **inputs):
    """Logits, and the gradients of a sum over them."""
    options = {} if name == "Bert" else {"use_cache": False}
    logits = model(**inputs, **options).logits
    trained = [p for p in model.parameters() if p.requires_grad]
    grads = torch.autograd.grad(logits.sin().sum(), trained, allow_unused=True)
    return logits.detach(), [torch.zeros(()) if g is None else g for g in grads]


def apart(model, name):
    found = [
        run(model, name, input_ids=ids, position_ids=torch.arange(ids.shape[1])[None])
        for ids in IDS.split(LENGTHS, 1)
    ]
    logits, grads = zip(*found)
    return torch.cat(logits, 1), [sum(each) for each in zip(*grads)]


def assert_close(got, wanted):
    for a, b in zip([got[0], *got[1]], [wanted[0], *wanted[1]], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=3e-5)


def take_varlen(model, save):
    """Lets attention go by sequences: of the model itself, or of the patched one."""
    if save is None:
        model.set_attn_implementation(register_attention())
    else:
        headroom.patch(model, save)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("save", [None, "L1", "L5"])
def test_sequences_do_not_see_each_other(name, save, patterns):
    model = model_of(name)
    wanted = apart(model, name)
    take_varlen(model, save)
    got = run(model, name, input_ids=IDS, position_ids=POSITIONS, **PACKED.get(name, {}))
    assert_close(got, wanted)
    assert len(patterns) >= 2
    assert all(p.mask is None and p.cu_seqlens.tolist() == ENDS.tolist() for p in patterns)
    assert {p.longest for p in patterns} == {20}
    windows = name in ("Mistral", "Gemma3")
    assert {p.window for p in patterns} == ({5} if windows else {None})
    assert {p.causal for p in patterns} == {name != "Bert"}


def test_rows_of_their_own(patterns):
    """Each row of a batch may hold other sequences."""
    model = model_of("Llama")
    positions = torch.cat([torch.arange(n) for n in (20, 12, 8, 30, 10)]).view(2, 40)
    ids = torch.randint(3, 61, (2, 40))
    wanted = run(model, "Llama", input_ids=ids, position_ids=positions)  # by a mask
    headroom.patch(model, "L1")
    assert_close(run(model, "Llama", input_ids=ids, position_ids=positions), wanted)
    assert patterns[0].cu_seqlens.tolist() == [0, 20, 32, 40, 70, 80]


ONES = {
    "int64": torch.ones_like(IDS),
    "bool": torch.ones_like(IDS).bool(),
    "float32": torch.ones(IDS.shape),
    "numbers of documents": torch.arange(1, 5).repeat_interleave(torch.tensor(LENGTHS))[None],
}


@pytest.mark.parametrize("name", [name for name in NAMES if name != "Bert"])
@pytest.mark.parametrize("save", [None, "L1"])
def test_a_mask_of_ones_says_nothing(name, save, patterns):
    """As for flash attention. Nor does a cache, which a model makes for itself."""
    model = model_of(name)
    wanted = apart(model, name)
    take_varlen(model, save)
    for mask in ONES.values():
        got = run(model, name, input_ids=IDS, position_ids=POSITIONS, attention_mask=mask)
        assert_close(got, wanted)
    with torch.no_grad():
        for mask in (None, ONES["int64"]):
            logits = model(input_ids=IDS, position_ids=POSITIONS, attention_mask=mask).logits
            torch.testing.assert_close(logits, wanted[0], rtol=1e-4, atol=3e-5)
    assert patterns and all(p.cu_seqlens.tolist() == ENDS.tolist() for p in patterns)


@pytest.mark.parametrize("name", ["Llama", "Mistral", "GPT2"])
@pytest.mark.parametrize("fill", [0, 1, 7])
def test_padding_beside_sequences(name, fill, patterns):
    """At the left and at the right, in rows of their own; the positions of padding say nothing."""
    model = model_of(name)
    wanted = apart(model, name)[0][0]
    headroom.patch(model, "L1")
    positions = torch.full((2, 46), fill)
    mask, ids = torch.zeros(2, 46), torch.zeros(2, 46).long()
    for row, at in ((0, slice(6, 46)), (1, slice(0, 40))):
        positions[row, at], ids[row, at], mask[row, at] = POSITIONS[0], IDS[0], 1
    with torch.no_grad():
        got = model(
            input_ids=ids, position_ids=positions, attention_mask=mask, use_cache=False
        ).logits
    torch.testing.assert_close(got[0, 6:], wanted, rtol=1e-4, atol=3e-5)
    torch.testing.assert_close(got[1, :40], wanted, rtol=1e-4, atol=3e-5)
    assert not patterns


def test_masks_of_pairs_say_all():
    """Whatever the positions are, as those of sequences that share their beginning."""
    model = model_of("Llama")
    pairs = torch.ones(40, 40).tril().bool()[None, None]
    batch = dict(input_ids=IDS, position_ids=POSITIONS, attention_mask=pairs)
    wanted = run(model, "Llama", **batch)
    model.set_attn_implementation(register_attention())
    assert torch.equal(run(model, "Llama", **batch)[0], wanted[0])


@pytest.mark.parametrize(
    "positions, mask, wanted",
    [
        ([0, 1, 2, 0, 1], None, [0, 0, 0, 1, 1]),
        ([5, 6, 0, 1, 2], None, [0, 0, 1, 1, 1]),  # the rest of a sequence that was cut
        ([2, 3, 2, 3, 4], None, [0, 0, 1, 1, 1]),  # RoBERTa's begin at 2
        ([0, 1, 7, 8, 9], None, None),  # a context that is stretched
        ([3, 4, 5, 6, 7], None, None),
        ([1, 1, 0, 1, 2], [0, 0, 1, 1, 1], None),
        ([0, 1, 2, 0, 0], [1, 1, 1, 0, 0], None),
        ([1, 0, 1, 0, 1], [0, 1, 1, 1, 1], [0, 0, 0, 1, 1]),
        ([], None, None),
    ],
)
def test_where_positions_begin_anew(positions, mask, wanted):
    mask = None if mask is None else torch.tensor([mask])
    found = attention.sequences_of(torch.tensor([positions]), mask)
    assert (None if found is None else found[0].tolist()) == wanted


@pytest.mark.parametrize("name", ["Mistral", "Gemma3"])
@pytest.mark.parametrize("patched", [False, True])
def test_windows_take_no_mask(name, patched, patterns):
    model = model_of(name)
    wanted = run(model, name, input_ids=IDS)
    if patched:
        headroom.patch(model, "L1")
    else:
        model.set_attn_implementation(register_attention())
    assert_close(run(model, name, input_ids=IDS), wanted)
    assert patterns and set(patterns) == {Pattern(None, True, 5)}


@pytest.mark.parametrize("name", ["Llama", "Bert", "Mistral"])
def test_other_batches_are_those_of_sdpa(name, patterns):
    """To the bit: rows that are one sequence, with padding, with a mask of all pairs."""
    model = model_of(name)
    ids = IDS[:, :4].repeat(2, 1)  # less than a window
    padding = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    pairs = torch.zeros(2, 1, 4, 4).masked_fill_(torch.ones(4, 4).triu(1).bool(), -9.0)
    batches = [{}, {"attention_mask": torch.ones_like(ids)}, {"attention_mask": padding}]
    batches += [{"attention_mask": pairs}]
    wanted = [run(model, name, input_ids=ids, **batch) for batch in batches]
    model.set_attn_implementation(register_attention())
    for batch, (logits, grads) in zip(batches, wanted):
        got = run(model, name, input_ids=ids, **batch)
        assert torch.equal(got[0], logits)
        assert all(map(torch.equal, got[1], grads))
    assert not patterns


def test_kept_bytes_grow_with_the_tokens():
    """As those of transformers' own attention do not."""
    model = model_of("Llama", max_position_embeddings=1024)

    def kept(tokens):
        positions = torch.arange(tokens)[None] % 64
        inputs = dict(input_ids=torch.ones_like(positions), position_ids=positions)
        run = functools.partial(model, use_cache=False, **inputs)
        return kept_bytes(run, model.parameters())

    def beyond_linear():
        return kept(1024) - 2 * kept(512)

    assert beyond_linear() >= 2 * 512 * 512  # a mask of bools
    model.set_attn_implementation(register_attention())
    assert beyond_linear() <= 0


def test_collator():
    """As transformers' Trainer calls it, with and without the ends for flash-attn."""
    model = model_of("Llama")
    rows = [{"input_ids": ids[0].tolist()} for ids in IDS.split(LENGTHS, 1)]
    wanted = apart(model, "Llama")[0]
    headroom.patch(model, "L2")
    for ends in (False, True):
        collator = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=ends)
        batch = collator(rows)
        assert ("cu_seq_lens_q" in batch) == ends
        with torch.no_grad():
            got = model(use_cache=False, **batch)
        torch.testing.assert_close(got.logits, wanted, rtol=1e-4, atol=3e-5)


def test_ends_without_positions(patterns):
    """Where models hand them on, as they do for flash-attn."""
    model = model_of("GPT2")
    headroom.patch(model, "L0")
    model.transformer.wpe.weight.data.zero_()  # no position matters
    wanted = apart(model, "GPT2")[0]
    del patterns[:]
    ends = dict(cu_seq_lens_q=ENDS.long(), cu_seq_lens_k=ENDS.long(), max_length_q=20)
    got = run(model, "GPT2", input_ids=IDS, **ends)[0]
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=3e-5)
    assert {p.longest for p in patterns} == {20}


def test_generation_and_caches(patterns):
    model = model_of("Mistral").eval()
    options = dict(max_new_tokens=6, do_sample=False)
    wanted = model.generate(IDS[:, :9], **options)
    model.set_attn_implementation(register_attention())
    assert torch.equal(model.generate(IDS[:, :9], **options), wanted)
    assert len({p.window for p in patterns}) == 1  # of the prompt, which is longer than a window


def test_traces():
    """Under torch.compile transformers makes a mask, whatever the positions are."""
    model = model_of("Llama")
    wanted = apart(model, "Llama")[0]
    model.set_attn_implementation(register_attention())
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    got = compiled(input_ids=IDS, position_ids=POSITIONS, use_cache=False).logits
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=3e-5)


@pytest.mark.parametrize("option", ["softcap", "s_aux"])
def test_scores_that_change_are_refused(option):
    model = model_of("Llama")
    model.set_attn_implementation(register_attention())
    with pytest.raises(ValueError, match=f"'headroom_varlen' has no {option}, .*'eager'"):
        model(input_ids=IDS, **{option: torch.ones(4)})


def test_gemma2_is_refused():
    model = model_of("Gemma2")
    model.set_attn_implementation(register_attention())
    with pytest.raises(ValueError, match="has no softcap, which Gemma2Attention uses"):
        model(input_ids=IDS)


def test_biases_of_positions_get_a_mask():
    """In a window, whose pattern says nothing of them."""
    q, k, v = torch.randn(3, 1, 4, 9, 8)
    bias = torch.randn(1, 4, 9, 9)
    pattern = Pattern(None, True, 3)
    module = torch.nn.Module()
    got, _ = attention.varlen_attention(module, q, k, v, pattern, position_bias=bias)
    distance = torch.arange(9)[:, None] - torch.arange(9)
    seen = (distance >= 0) & (distance < 3)
    mask = bias.masked_fill(~seen, float("-inf"))
    wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    torch.testing.assert_close(got, wanted.transpose(1, 2))


# ---- What the mask functions of transformers hide --------------------------------------------


def masks():
    return pytest.importorskip("transformers.masking_utils")


def rule_of(*functions):
    return attention._rule(masks().and_masks(*functions))


def test_rules():
    m = masks()
    sequences = torch.tensor([[0, 0, 1]])
    packed = m.packed_sequence_mask_function(sequences)
    causal = m.remap_positions_for_packed_sequence(m.causal_mask_function, torch.arange(3)[None])
    assert rule_of(causal, packed) == (True, None, None, sequences)
    window = m.sliding_window_causal_mask_function(7)
    assert attention._rule(window) == (True, 7, None, None)
    both = m.sliding_window_bidirectional_mask_function(7)
    assert attention._rule(both) == (False, None, 8, None)
    assert attention._rule(m.bidirectional_mask_function) == (False, None, None, None)


def test_rules_that_are_not_known():
    m = masks()
    window = m.sliding_window_overlay(7)
    blocks = m.blockwise_overlay(torch.zeros(1, 3))
    assert rule_of(window, m.sliding_window_overlay(3)) is None
    assert rule_of(m.causal_mask_function, blocks) is None
    assert attention._rule(m.or_masks(m.causal_mask_function, blocks)) is None
    assert attention._rule(m.chunked_overlay(4, torch.zeros(1))) is None
    assert attention._rule(lambda *indices: indices[2] >= indices[3]) is None


def given(function, **options):
    sizes = dict(batch_size=1, q_length=9, kv_length=9, device="cpu", local_size=3)
    return attention.varlen_mask(mask_function=function, **sizes | options)


def test_masks_that_sdpa_makes():
    """Whatever else than sequences and windows hides tokens, or who wants a mask."""
    m = masks()
    window = m.sliding_window_causal_mask_function(3)
    assert given(window) == Pattern(None, True, 3)
    assert given(window, attention_mask=torch.ones(1, 9).bool()) == Pattern(None, True, 3)
    both = m.sliding_window_bidirectional_mask_function(3)
    may = dict(allow_is_causal_skip=False, allow_is_bidirectional_skip=True)
    assert given(both, **may) == Pattern(None, False, 4)
    padding = torch.ones(1, 9).bool()
    padding[0, 0] = False
    for options in (
        dict(attention_mask=padding),
        dict(kv_length=12),
        dict(q_offset=1),
        dict(q_offset=torch.tensor(0)),
        dict(use_vmap=True),
        dict(allow_is_causal_skip=False),
    ):
        made = given(window, **options)
        assert isinstance(made, torch.Tensor) and made.dtype == torch.bool, options
    assert isinstance(given(both, allow_is_causal_skip=True), torch.Tensor)
    assert isinstance(given(m.sliding_window_overlay(3)), torch.Tensor)  # sees what comes later
    assert given(m.causal_mask_function, local_size=None) is None
    assert given(m.sliding_window_causal_mask_function(9)) is not None


# ---- The name in the config ------------------------------------------------------------------


def test_patch_and_its_undoing():
    model = model_of("Llama")
    before = model.config.to_dict()
    report = headroom.patch(model, "L1")
    assert model.config._attn_implementation == attention.NAME
    assert model.config.to_dict() == before  # nothing of it is saved
    headroom.patch(model, "L2")
    other = copy.deepcopy(model)
    headroom.unpatch(other)
    assert other.config._attn_implementation == "sdpa"
    assert model.config._attn_implementation == attention.NAME
    report.undo()
    assert model.config._attn_implementation == "sdpa"
    assert model.config.to_dict() == before


def test_what_was_chosen_stays():
    model = model_of("Llama", attn_implementation="eager")
    headroom.patch(model, "L1")
    assert model.config._attn_implementation == "eager"
    model = model_of("Llama")
    headroom.patch(model, "L1")
    model.set_attn_implementation("eager")
    headroom.unpatch(model)
    assert model.config._attn_implementation == "eager"


def test_a_patch_that_fails_changes_no_config(monkeypatch):
    model = model_of("Llama")
    monkeypatch.setattr(generic, "swap_norms", None)
    with pytest.raises(TypeError):
        headroom.patch(model, "L1")
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.slow  # imports
def test_a_patched_model_that_another_process_loads():
    model = model_of("Llama")
    headroom.patch(model, "L1")
    buffer = io.BytesIO()
    torch.save(model, buffer)
    code = (
        "import io, sys, torch; "
        "model = torch.load(io.BytesIO(sys.stdin.buffer.read()), weights_only=False); "
        "print(model(input_ids=torch.ones(1, 8).long(), use_cache=False).logits.shape)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], input=buffer.getvalue(), capture_output=True, check=False
    )
    assert done.stdout.decode().strip() == "torch.Size([1, 8, 61])", done.stderr.decode()
