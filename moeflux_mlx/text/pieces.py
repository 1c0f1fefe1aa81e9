"""`tokenizer.model`: a vocabulary of sentencepiece."""

import math
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import TokenizerError

if TYPE_CHECKING:
    from sentencepiece import SentencePieceProcessor

SPACE = "\u2581"  # how sentencepiece writes a space


class SentencePieceVocabulary:
    """`tokenizer.model`, read by sentencepiece, with the attributes and methods of `BytePairVocabulary`.

    User-defined symbols are found in text; control pieces such as `<s>` are not, so a chat template needs its
    markers to be user-defined symbols.
    """

    def __init__(self, file: Path):
        self._pieces = _open_sentencepiece(file)
        count = self._pieces.get_piece_size()
        self._vocab = {self._pieces.id_to_piece(i): i for i in range(count)}
        self.special_ids = frozenset(
            i for i in range(count) if self._pieces.is_control(i) or self._pieces.is_unknown(i)
        )
        self.special_tokens = self._named_tokens()
        self.trim = self._measure_trim()
        # The Python package does not say which pieces are user-defined symbols; chat markers look like this.
        self.markers = frozenset(
            piece
            for piece, i in self._vocab.items()
            if len(piece) > 2 and piece[0] + piece[-1] == "<>" and i not in self.special_ids
            if not self._pieces.is_byte(i)
        )

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return self._pieces.encode(text)

    def encode_after(self, text: str) -> list[int]:
        # sentencepiece puts a space before what it takes for the beginning, but not after a marker.
        if self.markers:
            marker = min(self.markers)
            ids = self.encode(marker + text, False)
            return ids[ids.index(self._vocab[marker]) + 1 :]
        ids = self.encode(text, False)
        if b"".join(self.token_bytes(i) for i in ids) == b" " + text.encode():
            ids[:1] = self._spelled(self._pieces.id_to_piece(ids[0])[1:])
        return ids

    def get_vocab(self) -> dict[str, int]:
        return dict(self._vocab)

    def token_to_id(self, token: str) -> int | None:
        return self._vocab.get(token)

    def token_bytes(self, token_id: int) -> bytes:
        if not 0 <= token_id < len(self._vocab) or self._pieces.is_control(token_id):
            return b""
        if self._pieces.is_unknown(token_id):
            return self._pieces.decode([token_id]).encode()
        piece = self._pieces.id_to_piece(token_id)
        if self._pieces.is_byte(token_id):
            return bytes([int(piece[3:5], 16)])  # <0x0A>
        return piece.replace(SPACE, " ").encode()

    def is_spaced(self, token_id: int) -> bool:
        return self._pieces.id_to_piece(token_id).startswith(SPACE)

    def _spelled(self, piece: str) -> list[int]:
        """One token for these characters, or else one for each, or for each of their bytes."""
        if not piece:
            return []
        if piece in self._vocab:
            return [self._vocab[piece]]
        if len(piece) > 1:
            return [token for char in piece for token in self._spelled(char)]
        return [self._vocab.get(f"<0x{byte:02X}>", self._pieces.unk_id()) for byte in piece.encode()]

    def _named_tokens(self) -> dict[str, str]:
        ids = {"bos_token": self._pieces.bos_id(), "eos_token": self._pieces.eos_id()}
        return {name: self._pieces.id_to_piece(i) for name, i in ids.items() if i >= 0}

    def _measure_trim(self) -> float:
        # The Python package does not show the normalizer's settings, but decoding reveals them.
        probe = self._vocab.get(SPACE) or next((i for t, i in self._vocab.items() if t.startswith(SPACE)), None)
        if probe is None:
            return 0
        whole = 2 * self._pieces.id_to_piece(probe)
        lost = len(whole) - len(self._pieces.decode([probe, probe]))
        return math.inf if lost == 2 else lost


def _open_sentencepiece(file: Path) -> "SentencePieceProcessor":
    from sentencepiece import SentencePieceProcessor

    try:
        model = file.read_bytes()
        if not model:  # sentencepiece would accept it, and fail at its first use
            raise OSError("the file is empty")
        return SentencePieceProcessor(model_proto=model)
    except (OSError, RuntimeError) as error:
        raise TokenizerError(f"{file} is not a sentencepiece model: {error}; fetch it again") from error
