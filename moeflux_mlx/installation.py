"""How this package was installed, and so how to install it again."""

import json
import shlex
from importlib import metadata
from pathlib import Path
from urllib.parse import unquote, urlparse


def reinstall_command() -> str:
    """The command that installs the package again from its source; it is on no index."""
    here = Path(__file__).resolve().parent
    installed = [one for one in metadata.distributions(name="moeflux-mlx") if one.read_text("direct_url.json")]
    origin = json.loads(installed[0].read_text("direct_url.json") or "") if installed else {}
    url = str(origin.get("url", ""))
    if (here.parent / "pyproject.toml").exists():  # the source tree, independent of other installations
        source = ["-e", str(here.parent)]
    elif "vcs_info" in origin:
        source = [f"{origin['vcs_info'].get('vcs', 'git')}+{url}"]
    elif url.startswith("file:"):
        source = [unquote(urlparse(url).path)]
    else:
        return "install moeflux-mlx again from where it came, with pip's --force-reinstall --no-deps --no-cache-dir"
    return shlex.join(["pip", "install", "--force-reinstall", "--no-deps", "--no-cache-dir", *source])
