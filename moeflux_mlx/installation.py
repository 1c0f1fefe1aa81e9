"""How this package was installed, and the commands that install it again or add an extra.

The package is on no index, and somebody else may take its name there. So no command has this name: once it is
published, `install_command` may become `pip install 'moeflux-mlx[EXTRA]'`.
"""

import json
import shlex
from importlib import import_module, metadata
from pathlib import Path
from types import ModuleType
from urllib.parse import unquote, urlparse


def module_if_here(name: str) -> ModuleType | None:
    """A module that need not be here: a C extension that could not be built, or a package of an extra."""
    try:
        return import_module(name)
    except ImportError:
        return None


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


def install_command(extra: str) -> str:
    """The command that installs what an extra of this package needs, however the package itself was installed."""
    wanted = [one for found in metadata.distributions(name="moeflux-mlx") for one in found.requires or ()]
    packages = [
        package.strip() for package, _, marker in (one.partition(";") for one in wanted) if f'"{extra}"' in marker
    ]
    # None of them is known where a source tree is on the path but not installed, or was installed before the extra.
    tree = f"{Path(__file__).resolve().parents[1]}[{extra}]"
    return shlex.join(["pip", "install", *(dict.fromkeys(packages) or ["-e", tree])])
