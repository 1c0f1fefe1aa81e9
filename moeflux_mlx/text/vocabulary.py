"""The interface of a tokenizer file in any format."""

from typing import Protocol


class Vocabulary(Protocol):
    """The interface of a tokenizer file; the wrapper adds what other files say."""

    trim: float  # how many leading spaces a decoded text loses: 0, 1 or inf
    special_tokens: dict[str, str]  # e.g. {"bos_token": "<s>"}, where the file names them itself
    special_ids: frozenset[int]

    markers: frozenset[str]  # tokens that are found in text as they are written, such as "<|im_end|>"

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Token ids of the text, with what the file's own post-processor adds if asked."""

    def encode_after(self, text: str) -> list[int]:
        """Token ids of text that other text stands before, so that it begins with no space of its own."""

    def get_vocab(self) -> dict[str, int]:
        """Token -> id, added tokens included."""

    def token_to_id(self, token: str) -> int | None:
        """Id of exactly this token, None where there is none."""

    def token_bytes(self, token_id: int) -> bytes:
        """The UTF-8 bytes, perhaps part of a character, that a token stands for; b"" for an unknown id."""

    def is_spaced(self, token_id: int) -> bool:
        """Whether the token begins with a space that `trim` may take."""
