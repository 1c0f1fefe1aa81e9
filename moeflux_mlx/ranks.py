"""`python -m moeflux_mlx.ranks`: prepares several machines to run one model."""

import argparse
import json
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .cli.options import file_to_write
from .cli.run import Parser, main_of
from .cli.terminal import note
from .errors import RequestError

PROBE = """
import importlib.metadata as metadata, json, os, platform, sys
facts = {"machine": platform.machine(), "system": platform.system(), "python": platform.python_version()}
for name in ("moeflux-mlx", "mlx"):
    try:
        facts[name] = metadata.version(name)
    except metadata.PackageNotFoundError:
        facts[name] = None
path = os.path.expanduser(sys.argv[1]) if len(sys.argv) > 1 else ""
files = {}
for folder, _, names in os.walk(path):
    for name in names:
        files[os.path.relpath(os.path.join(folder, name), path)] = os.path.getsize(os.path.join(folder, name))
facts["files"] = files
print(json.dumps(facts))
"""
SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10")
SECONDS = 60.0
MUST_AGREE = ("moeflux-mlx",)
SHOULD_AGREE = ("mlx", "machine", "system")


@dataclass(frozen=True)
class HostReport:
    """What a host reported about itself."""

    host: str
    facts: dict[str, str | None]
    files: dict[str, int]


def run(options: argparse.Namespace) -> int:
    """Checks every host, writes the file and prints the command.

    Raises:
        RequestError: a host cannot be reached, or cannot run the model with the others.
    """
    path = file_to_write("--output", options.output)
    hosts = [host for host in options.hosts.split(",") if host]
    if len(hosts) < 2 or len(set(hosts)) != len(hosts):
        raise RequestError(f"--hosts {options.hosts} must name at least two machines, each once")
    reports = [look(host, options) for host in hosts]
    check(reports, options.model)
    addresses = options.ips.split(",") if options.ips else [host.rpartition("@")[2] for host in hosts]
    if len(addresses) != len(hosts):
        raise RequestError(f"--ips names {len(addresses)} addresses for {len(hosts)} hosts")
    rows = [{"ssh": host, "ips": [address]} for host, address in zip(hosts, addresses, strict=True)]
    path.write_text(json.dumps(rows, indent=1) + "\n")
    note(f"{path} has {len(hosts)} hosts; traffic between them is neither authenticated nor encrypted")
    print(command(path, options))
    return 0


def look(host: str, options: argparse.Namespace) -> HostReport:
    """Asks one host. Raises RequestError: it does not answer, or not as it should."""
    remote = shlex.join([options.python, "-c", PROBE, *([options.model] if options.model else [])])
    try:
        done = subprocess.run([*SSH, host, remote], capture_output=True, text=True, timeout=SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RequestError(f"{host} cannot be reached by ssh: {error}") from None
    if done.returncode:
        why = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise RequestError(f"{host}: {why}; it must let you in by ssh without a password and have {options.python}")
    try:
        facts = json.loads(done.stdout.strip().splitlines()[-1])
        files = {str(name): int(size) for name, size in facts.pop("files").items()}
    except (ValueError, IndexError, KeyError, AttributeError, TypeError):
        raise RequestError(f"{host} gave an unexpected answer: {done.stdout[-80:]!r}") from None
    return HostReport(host, facts, files)


def check(reports: Sequence[HostReport], model: str | None) -> None:
    """Raises RequestError: the hosts cannot run one model."""
    first = reports[0]
    for one in reports:
        for name in MUST_AGREE:
            if one.facts.get(name) is None or one.facts.get(name) != first.facts.get(name):
                theirs = one.facts.get(name) or "none"
                raise RequestError(
                    f"{one.host} has {name} {theirs}, {first.host} {first.facts.get(name) or 'none'}; install the same"
                )
        for name in SHOULD_AGREE:
            if one.facts.get(name) != first.facts.get(name):
                note(f"note: {one.host} has {name} {one.facts.get(name)}, {first.host} {first.facts.get(name)}")
        if model is not None and not one.files:
            raise RequestError(f"{one.host} has no files in {model}; copy the model there, at the same path")
        differing = sorted({name for name, _ in set(one.files.items()) ^ set(first.files.items())})
        if differing:
            raise RequestError(f"{model}/{differing[0]} is not the same on {one.host} and {first.host}; copy it again")


def command(hostfile: Path, options: argparse.Namespace) -> str:
    """The command that starts all ranks; run it on the machine where rank 0 should print."""
    model = ["--model", options.model] if options.model else []
    launch = ["mlx.launch", "--backend", options.backend, "--hostfile", str(hostfile), "--python", options.python]
    return shlex.join([*launch, "--", "-m", "moeflux_mlx.chat", *model])


def parser() -> argparse.ArgumentParser:
    made = Parser(
        "ranks",
        "Check by ssh that machines have the same versions and model, write a host file for mlx.launch "
        "and print the command that starts all ranks.",
    )
    add = made.add_argument
    add("--hosts", required=True, metavar="A,B,C", help="host names for ssh; the first is rank 0")
    add("--ips", metavar="A,B,C", help="addresses at which the machines reach each other; default: the host names")
    add("--model", metavar="DIR", help="directory of the model, at the same path on all machines")
    add("--output", default="hosts.json", metavar="FILE", help="host file to write (%(default)s)")
    add("--backend", choices=("ring", "jaccl"), default="ring", help="transport between ranks (%(default)s)")
    add("--python", default=sys.executable, help="interpreter on all machines (%(default)s)")
    return made


main = main_of(run, parser)


if __name__ == "__main__":
    sys.exit(main())
