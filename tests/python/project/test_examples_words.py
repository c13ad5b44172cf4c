"""The demo's vocabulary of words: what it holds, that it loses nothing, and the loss in bits."""

import math
import random
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import data
from model import GPT, SIZES, HeadroomGPT
from run import Run, predict
from rungs import RUNGS, size_of
from words import WORD, Vocabulary

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
CODE = b"def f(self, x_1):\n    return self.x_1 + 12 if x_1 else self\n"


def texts():
    """Code, letters of many alphabets, no UTF-8, and every byte beside every other."""
    rng = random.Random(5)
    yield b""
    yield CODE * 3
    yield "naïve façade, 東京 и Ωμέγα: 'ß'\t٣ 🙂\r\n".encode() * 2
    yield bytes(rng.randrange(256) for _ in range(5000))
    yield bytes(byte for pair in range(1 << 16) for byte in divmod(pair, 256))
    yield from (bytes(rng.choices(b" \n_aZ09.\x80\xff\x1c\x85", k=300)) for _ in range(20))


@pytest.mark.parametrize("size", [256, 257, 300, 100_000])
def test_encoding_loses_nothing(size):
    vocabulary = Vocabulary(CODE * 50 + "façade 東京 東京".encode(), size)
    assert len(set(vocabulary.words)) == len(vocabulary.words) <= size
    for text in texts():
        tokens = vocabulary.encode(text)
        assert vocabulary.decode(tokens) == text
        assert len(tokens) <= len(text)
        assert all(0 <= token < len(vocabulary.words) for token in tokens)


def test_words_of_a_line():
    words = WORD.findall("x_1 = näher(b,  12)+3a\n    if not_2:\r\n".encode())
    wanted = ["x_1", " =", " näher", "(", "b", ",", "  ", "12", ")+", "3", "a", "\n    "]
    assert [word.decode() for word in words] == [*wanted, "if", " not_2", ":", "\r\n"]
    assert WORD.findall(bytes(range(128, 256))) == [bytes(range(128, 256))]


def test_the_most_common_words_are_tokens():
    rng = random.Random(3)
    names = [f" {a}{b}" for a in "abcdef" for b in "uvwxyz"]
    text = "".join(rng.choices(names, weights=range(36), k=400)).encode()
    counts = Counter(text.split(b" ")[1:])
    # Ties go to the word that sorts first: sorting is stable.
    common = [b" " + word for word in sorted(sorted(counts), key=counts.get, reverse=True)]
    assert len({counts[word[1:]] for word in common[:20]}) < 20  # there are some
    vocabulary = Vocabulary(text, 256 + 20)
    assert vocabulary.words == [bytes([i]) for i in range(256)] + common[:20]
    for k, word in enumerate(common):
        assert list(vocabulary.encode(word)) == ([256 + k] if k < 20 else list(word))
    assert Vocabulary(text, 5000).words == Vocabulary(text, 256 + len(common)).words


def test_bits_per_byte_are_those_of_the_bytes(tmp_path):
    """A model that gives every token the same chance, on text whose bytes are counted by hand."""
    held_out = (b" zebra" * len(CODE))[: 2 * len(CODE)]  # its words are not in the vocabulary
    (tmp_path / "text").write_bytes(CODE * 38 + held_out)
    trained, unseen = data.load(str(tmp_path / "text"), 8, 270)
    words = Vocabulary(CODE * 38, 270).words
    whole = [words[token] for token in trained.tokens.tolist()]
    assert b"".join(whole) == CODE * 38
    assert unseen.tokens.tolist() == list(held_out)
    starts = torch.tensor([0, 3])
    _, targets = data.windows(trained, starts, 8)
    sizes = [len(b"".join(whole[start + 1 : start + 9])) for start in (0, 3)]
    nats = math.log(270)
    found = trained.bits_per_byte(nats, targets)
    assert found == pytest.approx(16 * math.log2(270) / sum(sizes), rel=1e-12)
    only_bytes, _ = data.load(str(tmp_path / "text"), 8)
    assert only_bytes.tokens.dtype == torch.uint8
    assert only_bytes.bits_per_byte(1.0, targets % 256) == 1 / math.log(2)
    assert torch.equal(unseen.bytes_of, trained.bytes_of)


def test_the_losses_of_a_run_are_bits_per_byte():
    """Of one model, in steps of one micro-batch and of several, beside torch in float64."""
    trained, unseen = data.load(str(EXAMPLES / "ladder.py"), 32, 600)
    size = SIZES["words-tiny"]
    for accumulate in (1, 4):
        rung = replace(RUNGS["words"], accumulate=accumulate)
        run = Run(rung, size, torch.device("cpu"), 0)
        tokens, targets = data.batch(trained, 0, 0, size.batch, size.context)
        model = GPT(size).double()
        model.load_state_dict(run.model.state_dict())

        def bits_per_byte(tokens, targets, model=model):
            bits = model(tokens, targets).item() * targets.numel() / math.log(2)
            words = [trained.bytes_of[token].item() for token in targets.flatten().tolist()]
            return bits / sum(words)

        wanted = bits_per_byte(tokens, targets), bits_per_byte(*data.held_out(unseen, 64, 32))
        assert run.held_out_loss(unseen) == pytest.approx(wanted[1], rel=1e-5)
        run.step(trained)
        assert run.losses == [pytest.approx(wanted[0], rel=1e-5)]


def test_sizes_of_words_are_those_of_their_rungs():
    assert SIZES["words"].vocab >= 16_000
    for rung in ("words", "words-loss"):
        assert size_of(RUNGS[rung], "small") == size_of(RUNGS[rung], "xl") == "words"
        assert size_of(RUNGS[rung], "tiny") == size_of(RUNGS[rung], "words-tiny") == "words-tiny"
    assert size_of(RUNGS["torch"], "medium") == "medium"
    assert size_of(RUNGS["torch"], "words") == "words"


def test_the_fused_loss_is_the_same_function():
    size = replace(SIZES["words-tiny"], vocab=1027)
    torch.manual_seed(3)
    plain = GPT(size)
    torch.manual_seed(3)
    fused = HeadroomGPT(size, "L1", fused_loss=True)
    tokens, targets = torch.randint(size.vocab, (2, 3, size.context))
    losses = [model(tokens, targets) for model in (plain, fused)]
    torch.testing.assert_close(*losses)
    for loss in losses:
        loss.backward()
    for name in ("head.weight", "norm.weight", "blocks.0.norm1.weight"):
        got = fused.get_parameter(name.replace("norm1", "attention_norm")).grad
        torch.testing.assert_close(got, plain.get_parameter(name).grad, rtol=1e-4, atol=1e-6)


def test_the_fused_loss_keeps_no_logits():
    """At the demo's size, whose plan needs no memory; a run compares it with what was measured."""
    size = SIZES["words"]
    rungs = RUNGS["words"], RUNGS["words-loss"]
    peaks = [predict(rung, size, torch.device("cpu")).peak_bytes for rung in rungs]
    logits = 4 * size.vocab * size.batch * size.context
    assert 3 * logits < peaks[0] < 4 * logits  # of which logits are the most
    assert peaks[1] < min(logits, 0.3 * peaks[0])


def test_the_library_in_words_is_quick():
    size = SIZES["words"]
    started = time.process_time()
    trained, unseen = data.load(None, size.context, size.vocab)
    assert time.process_time() - started < 15  # 2 on an idle machine
    assert len(trained.bytes_of) == size.vocab
    per_token = [t.bytes_of[t.tokens.long()].double().mean() for t in (trained, unseen)]
    assert all(2.5 < mean < 5 for mean in per_token)


def test_the_peak_of_both_rungs_is_as_predicted():
    """`test_examples.py` runs them on made-up text. Here a step of each on many words."""
    trained, _ = data.load(str(EXAMPLES), 32, 600)
    assert len(trained.bytes_of) == 600
    size = replace(SIZES["words-tiny"], width=64, vocab=3001)
    for rung in (RUNGS["words"], RUNGS["words-loss"]):
        run = Run(rung, size, torch.device("cpu"), 0)
        run.step(trained)
        measured = run.count_bytes(trained)
        predicted = predict(rung, size, torch.device("cpu"))
        assert predicted.peak_bytes == pytest.approx(measured.peak_bytes, rel=0.01)
