"""The GPT-2 byte alphabet: how tokenizer files write arbitrary bytes as printable text.

A byte-level vocabulary holds byte strings, and most of them are not valid UTF-8 by themselves:
one character of Chinese may be cut across two tokens. Its files are JSON or plain text, though,
so GPT-2 gave each of the 256 bytes a printable character of its own, and everybody kept that:

    bytes 0x21-0x7E, 0xA1-0xAC, 0xAE-0xFF   stand for themselves (printable in Latin-1)
    the other 68, in rising order           become U+0100, U+0101, ... U+0143

That is why vocabularies are full of U+0120 (the space, byte 0x20) and U+010A (the line feed, 0x0A).

Source: the encoder of GPT-2 (Radford et al. 2019, "Language Models are Unsupervised Multitask
Learners", section 2.2, describes byte-level BPE; the alphabet is in its published code).
"""

from __future__ import annotations

from minserve.errors import TokenizerError

_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_UNPRINTABLE = [byte for byte in range(256) if byte not in _PRINTABLE]

# byte -> its character: 256 characters, in the order of the bytes.
ALPHABET = "".join(chr(byte if byte in _PRINTABLE else 0x100 + _UNPRINTABLE.index(byte)) for byte in range(256))


class _CharacterToByte(dict[int, int]):
    """A table for str.translate: the character's number -> its byte."""

    def __missing__(self, character: int) -> int:
        raise TokenizerError(f"U+{character:04X} is not in the byte alphabet of byte-level tokenizers")


# str.translate is as fast as Python gets: a whole vocabulary takes a few hundredths of a second.
_CHARACTER_TO_BYTE = _CharacterToByte((ord(character), byte) for byte, character in enumerate(ALPHABET))
_BYTE_TO_CHARACTER = dict(enumerate(ALPHABET))


def to_bytes(text: str) -> bytes:
    """The bytes that a string in the byte alphabet stands for.

    Raises TokenizerError if a character is not one of the 256.
    """
    try:
        return text.translate(_CHARACTER_TO_BYTE).encode("latin-1")  # Latin-1 writes U+0041 as byte 0x41
    except TokenizerError as error:
        raise TokenizerError(f"{text!r:.80}: {error}; the vocabulary is of another kind, or damaged") from None


def to_text(data: bytes) -> str:
    """The printable string that stands for these bytes, one character a byte. Inverse of to_bytes."""
    return data.decode("latin-1").translate(_BYTE_TO_CHARACTER)
