"""Every error that this package raises on purpose.

    MoefluxError
    |-- ConfigError          config.json is missing a field or asks for something not implemented
    |-- ModelFileError       a model directory, layer file, layout or tensor is missing or wrong
    |   `-- NotPackedError   a checkpoint that has not been converted yet
    |-- ExpertIOError        reading routed experts failed while the model was running
    |-- TokenizerError       tokenizer files or chat template are missing or cannot be used
    `-- RequestError         the caller asked for something impossible (sampler values, token counts, text)

A message names the value, the limit and the remedy in one line, so a command can print it as it is.
"""


class MoefluxError(Exception):
    """Base of all errors raised on purpose; `str(error)` is one line meant for the user."""


class ConfigError(MoefluxError, ValueError):
    """A configuration field is missing, has the wrong type, or asks for something not implemented."""


class ModelFileError(MoefluxError):
    """A file of the model directory is missing, has the wrong size, or contradicts the layout."""


class NotPackedError(ModelFileError):
    """The directory holds a checkpoint whose routed experts are not packed; the message has the command."""


class ExpertIOError(MoefluxError, OSError):
    """Reading routed experts failed: I/O error, file truncated while open, or loader closed."""


class TokenizerError(MoefluxError):
    """Tokenizer files or the chat template are missing, malformed, or were refused."""


class RequestError(MoefluxError, ValueError):
    """A request that cannot be served: sampler value out of range, empty prompt, bad token count."""
