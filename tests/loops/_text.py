"""What the programs of this folder with TRL's trainers share: rows of text, and their tokenizer."""

import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

WORDS = [f"w{k}" for k in range(250)]
PAD = "<pad>"


def tokenizer():
    words = {word: k for k, word in enumerate([PAD, "<eos>", *WORDS])}
    made = Tokenizer(models.WordLevel(words, unk_token=PAD))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token=PAD, eos_token="<eos>"
    )


def text(start, count):
    return " ".join(WORDS[(start + 7 * k) % 250] for k in range(count))


ROWS = range(16)
SENTENCES = [{"text": text(k, 5 + k % 9)} for k in ROWS]
PAIRS = [
    {"prompt": text(k, 4), "chosen": " " + text(k, 5), "rejected": " " + text(k + 9, 3 + k % 3)}
    for k in ROWS
]
MARKED = [{"prompt": text(k, 4), "completion": " " + text(k, 5), "label": k % 2 == 0} for k in ROWS]
PROMPTS = [{"prompt": text(k, 4)} for k in ROWS]


def scores(completions, **_):
    return [float(len(set(text.split()))) for text in completions]
