"""Programs that use a server, and how each gets its address: in its environment, its options, or a file.

Nothing of a user's own configuration is changed.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

WAIT_MS = 3_000_000  # for an answer: a first prompt may take minutes when experts come from a disk
KEY = "MOEFLUX_API_KEY"  # the environment variable in which a program finds the server's key


@dataclass(frozen=True)
class Address:
    """The data that a program needs to use a server.

    Args:
        url: without /v1.
        key: that requests carry.
        model: the name to ask for; it has no slash.
        context: tokens of a prompt and its answer.
    """

    url: str
    key: str
    model: str
    context: int


@dataclass(frozen=True)
class AgentSetup:
    """The options of a program, placed before the user's own, and environment variables; None removes one."""

    arguments: tuple[str, ...] = ()
    variables: Mapping[str, str | None] = field(default_factory=dict)


@dataclass(frozen=True)
class AgentProgram:
    """One that `moeflux launch` starts.

    Args:
        command: its name on the PATH.
        install: what installs it.
        least_context: tokens below which it cannot work: what it sends first, and room for some turns.
        setup: how it is pointed at a server; files go to the folder.
        needs_tools: whether it sends tools with each request.
    """

    command: str
    install: str
    least_context: int
    setup: Callable[[Address, Path], AgentSetup]
    needs_tools: bool = True


def _aider(server: Address, folder: Path) -> AgentSetup:
    """https://aider.chat/docs/config/options.html: each option has a variable AIDER_NAME."""
    name = f"openai/{server.model}"
    limits = {"max_input_tokens": server.context, "max_tokens": server.context // 4}
    about = {"litellm_provider": "openai", "mode": "chat", "input_cost_per_token": 0, "output_cost_per_token": 0}
    metadata = _written(folder / "models.json", {name: {**limits, **about}})
    return AgentSetup(
        variables={
            "AIDER_MODEL": name,
            "AIDER_WEAK_MODEL": name,
            "AIDER_MODEL_METADATA_FILE": metadata,
            "AIDER_TIMEOUT": str(WAIT_MS // 1000),
            "OPENAI_API_BASE": f"{server.url}/v1",
            "OPENAI_API_KEY": server.key,
        }
    )


def _claude(server: Address, folder: Path) -> AgentSetup:
    """https://code.claude.com/docs/en/settings: environment variables."""
    kinds = ("", "SMALL_FAST_", "DEFAULT_OPUS_", "DEFAULT_SONNET_", "DEFAULT_HAIKU_")
    models = {f"ANTHROPIC_{kind}MODEL": server.model for kind in kinds}
    return AgentSetup(
        variables={
            **models,
            "ANTHROPIC_BASE_URL": server.url,
            "ANTHROPIC_AUTH_TOKEN": server.key,
            "ANTHROPIC_API_KEY": None,
            "API_TIMEOUT_MS": str(WAIT_MS),
            "CLAUDE_STREAM_IDLE_TIMEOUT_MS": str(WAIT_MS),
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        }
    )


def _codex(server: Address, folder: Path) -> AgentSetup:
    """`codex --help`: -c sets one value of its config.toml; a JSON text or number is one of TOML too."""
    provider = {
        "name": "moeflux",
        "base_url": f"{server.url}/v1",
        "wire_api": "responses",
        "env_key": KEY,
        "stream_idle_timeout_ms": WAIT_MS,
    }
    values = {f"model_providers.moeflux.{name}": value for name, value in provider.items()}
    values |= {"model_provider": "moeflux", "model": server.model, "model_context_window": server.context}
    words = [word for name, value in values.items() for word in ("-c", f"{name}={json.dumps(value)}")]
    return AgentSetup(tuple(words), {KEY: server.key})


def _goose(server: Address, folder: Path) -> AgentSetup:
    """https://block.github.io/goose/docs/guides/environment-variables."""
    return AgentSetup(
        variables={
            "GOOSE_PROVIDER": "openai",
            "GOOSE_MODEL": server.model,
            "GOOSE_CONTEXT_LIMIT": str(server.context),
            "OPENAI_HOST": server.url,
            "OPENAI_API_KEY": server.key,
            "OPENAI_TIMEOUT": str(WAIT_MS // 1000),
        }
    )


def _opencode(server: Address, folder: Path) -> AgentSetup:
    """https://opencode.ai/docs/config: OPENCODE_CONFIG names a file that is read after the user's own."""
    limit = {"context": server.context, "output": server.context // 4}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "moeflux",
        "options": {"baseURL": f"{server.url}/v1", "apiKey": f"{{env:{KEY}}}", "timeout": WAIT_MS},
        "models": {server.model: {"name": server.model, "limit": limit}},
    }
    name = f"moeflux/{server.model}"
    config = {"provider": {"moeflux": provider}, "model": name, "small_model": name}
    return AgentSetup(variables={"OPENCODE_CONFIG": _written(folder / "opencode.json", config), KEY: server.key})


def _qwen(server: Address, folder: Path) -> AgentSetup:
    """`qwen --help`, and the variables that its documentation names for servers of OpenAI's API."""
    return AgentSetup(
        ("--auth-type", "openai", "--model", server.model),
        {"OPENAI_BASE_URL": f"{server.url}/v1", "OPENAI_API_KEY": server.key, "OPENAI_MODEL": server.model},
    )


def _written(path: Path, value: object) -> str:
    path.write_text(json.dumps(value, indent=2))
    return str(path)


AGENT = 32768  # agents begin with up to 25,000 tokens
PROGRAMS = {
    "aider": AgentProgram("aider", "pip install aider-chat", 8192, _aider, needs_tools=False),
    "claude": AgentProgram("claude", "npm install -g @anthropic-ai/claude-code", AGENT, _claude),
    "codex": AgentProgram("codex", "npm install -g @openai/codex", AGENT, _codex),
    "goose": AgentProgram("goose", "brew install block-goose-cli", AGENT, _goose),
    "opencode": AgentProgram("opencode", "npm install -g opencode-ai", AGENT, _opencode),
    "qwen": AgentProgram("qwen", "npm install -g @qwen-code/qwen-code", AGENT, _qwen),
}
