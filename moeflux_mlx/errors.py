"""Every error that this package raises on purpose.

    MoefluxError
    |-- ConfigError          config.json is missing a field or asks for something not implemented
    |-- ModelFileError       a model directory, layer file, layout or tensor is missing or wrong
    |   `-- NotPackedError   a checkpoint that has not been converted yet
    |-- ExpertIOError        reading routed experts failed while the model was running
    |-- DeviceError          memory was exhausted or the GPU timed out while a model was loaded or run
    |-- RankError            a process of several that run one model is gone, late, or computes something else
    |   `-- RankStopped      one of them was stopped
    |-- TokenizerError       tokenizer files or chat template are missing or cannot be used
    |-- SnapshotError        a state cannot be saved, or bytes are not a snapshot of this model's state
    |-- PromptCacheError     a prompt cache file cannot be written, or is damaged
    |   `-- FingerprintError       belongs to another model, tokenizer, cache dtype or rounding
    `-- RequestError         the caller asked for something impossible (sampler values, token counts, text)
        `-- BadRequestError        a body sent to the server; .param names the field, .status and .code the answer

A message names the value, the limit and the remedy in one line, so a command can print it as it is.
A problem that does not stop the work is a `MoefluxWarning`.
"""

import sys
import traceback
import warnings
from collections.abc import Iterable
from difflib import get_close_matches

SIMILAR = 0.7  # of 1: "servr" is 0.91 of "serve", "nonsense" 0.5 of "seed"


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The end of a message about the unknown `word`: the most similar known one, or one that begins like it."""
    names, word = {name.lstrip("-"): name for name in known}, word.lstrip("-")
    nearest = get_close_matches(word, names, n=1, cutoff=SIMILAR) or [
        name for name in names if min(len(name), len(word)) > 2 and (name.startswith(word) or word.startswith(name))
    ]
    return f"; did you mean {names[nearest[0]]}?" if nearest else ""


def counted(number: int, noun: str) -> str:
    """As in "1 request" and "2 requests"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


class MoefluxError(Exception):
    """Base of all errors raised on purpose; `str(error)` is one line meant for the user."""


class MoefluxWarning(RuntimeWarning):
    """Something is missing or has no effect; the message has the remedy."""


def warn(message: str) -> None:
    """Shows a `MoefluxWarning` at the line that has called this package."""
    frames = enumerate(traceback.walk_stack(sys._getframe()), 1)
    names = ((level, frame.f_globals.get("__name__", "")) for level, (frame, _) in frames)
    own = [level for level, name in names if name.partition(".")[0] == __package__]
    warnings.warn(message, MoefluxWarning, stacklevel=own[-1] + 1)


class ConfigError(MoefluxError, ValueError):
    """A configuration field is missing, has the wrong type, or asks for something not implemented."""


class ModelFileError(MoefluxError):
    """A file of the model directory is missing, has the wrong size, or contradicts the layout."""


class NotPackedError(ModelFileError):
    """The directory holds a checkpoint whose routed experts are not packed; the message has the command."""


class ExpertIOError(MoefluxError, OSError):
    """Reading routed experts failed: I/O error, file truncated while open, or loader closed."""


class DeviceError(MoefluxError):
    """An allocation failed, or the system ended what the GPU was computing; what was being computed is lost."""


class RankError(MoefluxError):
    """Several processes cannot go on with one model: one is gone, late, out of step, or failed."""


class RankStopped(RankError):
    """Another process of the group was stopped, so this one stops."""


class TokenizerError(MoefluxError):
    """Tokenizer files or the chat template are missing, malformed, or were refused."""


class SnapshotError(MoefluxError, ValueError):
    """A state that cannot be expressed as a snapshot, or bytes that are not a snapshot of this model."""


class PromptCacheError(MoefluxError):
    """A prompt cache file cannot be written or read, or its contents are damaged."""


class FingerprintError(PromptCacheError):
    """The file was made with another model, tokenizer, cache dtype or rounding of activations."""


class RequestError(MoefluxError, ValueError):
    """A request that cannot be served: sampler value out of range, empty prompt, bad token count."""


class BadRequestError(RequestError):
    """A client's request to the server cannot be read or served; `param` names the field.

    Args:
        message: one line for the client.
        param: the field at fault, as in "messages[0].content", None for the whole body.
        status: of the HTTP answer.
        code: a word for programs, such as "context_length_exceeded".
    """

    def __init__(self, message: str, param: str | None = None, status: int = 400, code: str = "invalid_value"):
        super().__init__(message)
        self.param, self.status, self.code = param, status, code
