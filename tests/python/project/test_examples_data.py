"""The text that the examples train on: split by file, repeatable, refused where it is too short."""

import pytest
import torch

import data


def test_data_is_split_by_file_and_repeats(tmp_path):
    for i in range(40):
        (tmp_path / f"{i}.txt").write_bytes(bytes([i + 1]) * 100)
    (tmp_path / "binary").write_bytes(b"\0\1" * 100)
    train_text, test_text = data.load(str(tmp_path), 16)
    sides = [set(t.tokens.tolist()) - {ord("\n")} for t in (train_text, test_text)]
    assert len(sides[0] - {ord("\n")}) == 37 and len(sides[1]) == 2  # file 9 is all line ends
    assert not sides[0] & sides[1]
    first, again = (data.batch(train_text, 0, 7, 4, 16) for _ in range(2))
    assert torch.equal(first[0], again[0]) and torch.equal(first[0][:, 1:], first[1][:, :-1])
    assert not torch.equal(first[0], data.batch(train_text, 0, 8, 4, 16)[0])
    assert not torch.equal(first[0], data.batch(train_text, 1, 7, 4, 16)[0])


@pytest.mark.slow
def test_data_from_one_file_and_from_none(tmp_path):
    file = tmp_path / "text"
    file.write_bytes(bytes(range(200)) * 10)
    train_text, test_text = data.load(str(file), 16)
    assert len(train_text.tokens) == 1900 and len(test_text.tokens) == 100
    library, held_out = data.load(None, 256)
    assert len(library.tokens) > 1 << 20 and len(held_out.tokens) > 1 << 14
    with pytest.raises(FileNotFoundError, match="no such file"):
        data.load(str(tmp_path / "absent"), 16)
    with pytest.raises(ValueError, match="100 tokens of held-out text, but one sequence needs 257"):
        data.load(str(file), 256)
