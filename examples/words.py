"""Cuts text into words: a vocabulary of the 256 bytes and of the most common words of a text.

A word is a run of letters, digits and _ that begins with none of the digits, a number, or a run of
other signs, each with the space before it if there is one; or a run of white space. Bytes above 127
count as letters, so that a word in UTF-8 is one whatever its language.
"""

import re
from array import array
from collections import Counter
from collections.abc import Iterable

BYTES = 256
LETTER = rb"A-Za-z_\x80-\xff"
WORD = re.compile(
    rb" ?[%b][0-9%b]*| ?[0-9]+| ?[^\s0-9%b]+|\s+" % (LETTER, LETTER, LETTER)
)  # every byte begins one of them, so that words cover the text


class Vocabulary:
    """Tokens 0 to 255 are the bytes, the others the most common words of `text`: `size` in all, or
    fewer if there are not that many words. Of words that are equally common, the one that sorts
    first is more common."""

    def __init__(self, text: bytes, size: int):
        counts = Counter(WORD.findall(text)) if size > BYTES else Counter()
        longer = [word for word in counts if len(word) > 1]
        longer.sort(key=lambda word: (-counts[word], word))
        self.words = [bytes([byte]) for byte in range(BYTES)] + longer[: size - BYTES]
        self.tokens = {word: token for token, word in enumerate(self.words)}

    def encode(self, text: bytes) -> array:
        """Tokens as integers of 8 bits if there are no others than the bytes, else of 32. A word
        that the vocabulary does not have is spelled in bytes."""
        if len(self.words) == BYTES:
            return array("B", text)
        tokens = array("i")
        for word in WORD.findall(text):
            token = self.tokens.get(word)
            if token is None:
                tokens.extend(word)
            else:
                tokens.append(token)
        return tokens

    def decode(self, tokens: Iterable[int]) -> bytes:
        return b"".join(self.words[token] for token in tokens)
