"""The workflows and issue templates: they are read as GitHub reads them, and the commands in them exist."""

import re
from pathlib import Path

import pytest
from test_docs import ROOT, calls, refusal

from moeflux_mlx.cli import reporting

yaml = pytest.importorskip("yaml")

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
TEMPLATES = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
KEYS = {"uses", "run", "with", "if", "env"}  # of a step
SCRIPTS = [*WORKFLOWS, ROOT / "scripts" / "try_wheel"]


def workflow(name):
    return yaml.safe_load((ROOT / ".github" / "workflows" / f"{name}.yml").read_text())


def steps_of(read):
    return [step for job in read["jobs"].values() for step in job["steps"]]


def commands_of(file):
    """Returns the lines of a shell that a workflow or a script runs, with our commands as a user writes them."""
    if file.suffix != ".yml":
        return "\n".join(re.findall(r"^moeflux [a-z].*", file.read_text(), re.MULTILINE))
    lines = "\n".join(step["run"] for step in steps_of(yaml.safe_load(file.read_text())) if "run" in step)
    return re.sub(r"\.venv/bin/(moeflux|python)", r"\1", lines)


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.name)
def test_a_workflow_has_the_parts_that_github_wants(file):
    read = yaml.safe_load(file.read_text())
    assert read["name"] == file.stem and True in read  # YAML reads the key `on` as true
    for job in read["jobs"].values():
        assert set(job.get("needs", "").split()) <= read["jobs"].keys() and job["runs-on"]
        used = set(re.findall(r"matrix\.(\w+)", str(job)))
        assert used <= set(job.get("strategy", {}).get("matrix", {}))
    for step in steps_of(read):
        assert ("uses" in step) != ("run" in step) and set(step) <= KEYS
        assert "uses" not in step or re.fullmatch(r"[\w.-]+/[\w./-]+@[\w./]+", step["uses"])


@pytest.mark.parametrize("file", SCRIPTS, ids=lambda file: file.name)
def test_the_commands_exist(file):
    lines = commands_of(file)
    assert [(call, why) for call in calls(lines) if (why := refusal(*call))] == []
    assert [name for name in re.findall(r"scripts/[\w./]+", lines) if not (ROOT / name).exists()] == []


def test_macs_make_the_report_and_keep_it():
    read = workflow("mac")
    runs = commands_of(ROOT / ".github" / "workflows" / "mac.yml")
    assert list(calls(runs)) == [("doctor", ["--report"])]
    kept = [step for step in steps_of(read) if "upload-artifact" in step.get("uses", "")]
    assert [step["with"]["path"] for step in kept] == [reporting.FILE, "kernels.txt"]
    assert kept[1] == steps_of(read)[-1] and all(step["if"] == "always()" for step in kept)
    assert re.search(r"set -o pipefail\n.*bench_kernels.py \| tee kernels.txt", runs)
    assert all(name.startswith("macos-") for name in read["jobs"]["mac"]["strategy"]["matrix"]["os"])
    assert not any("macos" in str(job) for job in workflow("test")["jobs"].values()), "Macs run once"


def test_a_release_makes_the_report_of_its_wheel():
    kept = [step for step in steps_of(workflow("release")) if step.get("env", {}).get("REPORT") == reporting.FILE]
    assert len(kept) == 1 and "scripts/try_wheel" in kept[0]["run"]
    jobs = workflow("release")["jobs"]
    systems = {name: set(jobs[name]["strategy"]["matrix"]["os"]) for name in ("wheels", "try")}
    macs = set(workflow("mac")["jobs"]["mac"]["strategy"]["matrix"]["os"])
    assert systems["try"] == systems["wheels"] | macs
    (taken,) = [step["with"]["name"] for step in jobs["try"]["steps"] if "download-artifact" in step.get("uses", "")]
    chosen = re.fullmatch(r"dist-\$\{\{ matrix.os == '(.*?)' && '(.*?)' \|\| matrix.os \}\}", taken)
    assert systems["try"] - systems["wheels"] == {chosen[1]} and chosen[2] in systems["wheels"]
    assert ("doctor", ["--no-disk", "--report", "report.txt"]) in list(calls(commands_of(SCRIPTS[-1])))


@pytest.mark.parametrize("name", ["release", "site"])
def test_what_is_published_is_asked_for(name):
    read = workflow(name)
    assert read[True].keys() == {"workflow_dispatch"}
    assert read[True]["workflow_dispatch"]["inputs"]["publish"]["default"] is False
    may_write = [job for job in read["jobs"].values() if "write" in str(job.get("permissions"))]
    assert may_write == [read["jobs"]["publish"]] and read["jobs"]["publish"]["if"] == "inputs.publish"


@pytest.mark.parametrize("file", TEMPLATES, ids=lambda file: file.name)
def test_an_issue_template_asks_for_commands_that_exist(file):
    read = yaml.safe_load(file.read_text())
    assert {"name", "description", "body"} <= set(read)
    assert len({field["id"] for field in read["body"]}) == len(read["body"])
    asked = "\n".join(re.findall(r"`(.*?)`", str(read)))
    said = list(calls(asked))
    assert said and [(call, why) for call in said if (why := refusal(*call))] == []
    assert Path(file).stem != "mac" or ("doctor", ["--report"]) in said
