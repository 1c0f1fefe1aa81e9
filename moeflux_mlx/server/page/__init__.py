"""The page at the server's root: one file that loads nothing from other sites, and the policy that enforces this.

The policy names the script and the style sheet by their hashes, so a browser runs no other script, and the script may
not turn text into markup.
"""

import base64
import functools
import hashlib
from pathlib import Path

_FILE = Path(__file__).resolve().parent / "index.html"
_POLICY = (
    "default-src 'none'; script-src '{script}'; style-src '{style}'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)


@functools.cache
def content() -> bytes:
    """The page, UTF-8."""
    return _FILE.read_bytes()


@functools.cache
def csp() -> str:
    """The value of the header `Content-Security-Policy` with which the page must be sent."""
    return _POLICY.format(script=_hash_of("script"), style=_hash_of("style"))


def _hash_of(tag: str) -> str:
    """The hash of the text between the only pair of these tags, in the form that the policy uses."""
    inner = content().split(f"<{tag}>".encode())[1].split(f"</{tag}>".encode())[0]
    return "sha256-" + base64.b64encode(hashlib.sha256(inner).digest()).decode()
