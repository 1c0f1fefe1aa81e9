"""The texts for people: links lead somewhere, Python compiles, and commands, options, names and files exist."""

import contextlib
import functools
import importlib
import io
import re
import shlex
from pathlib import Path

import pytest

from moeflux_mlx.cli.main import COMMANDS, main
from moeflux_mlx.families.registry import FAMILIES, GGUF
from moeflux_mlx.files import read_json
from moeflux_mlx.opening.reach import Mac, Reach
from moeflux_mlx.spec import family_name, variants

ROOT = Path(__file__).resolve().parent.parent
KERNEL_TEXTS = [file for folder in ("metal", "native") for file in (ROOT / folder).iterdir() if file.is_file()]
TEXTS = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "metal/README.md")]
TEXTS += sorted((ROOT / "docs").glob("*.md"))
NAMES = [str(text.relative_to(ROOT)) for text in TEXTS]
KERNELS = ROOT / "metal"
BLOCK = re.compile(r"^( *)```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(<?([^)\s>]+)|(?:src|href)=\"([^\"]+)\"")
SOURCES = [
    file
    for name in ("moeflux_mlx", "native", "metal", "scripts", "tests")
    for file in (ROOT / name).rglob("*")
    if file.suffix in (".py", ".h", ".c", ".metal", ".html") and file != Path(__file__).resolve()
]
PLACES = ("", "moeflux_mlx", "scripts", "scripts/bench", "tests", "tests/fixtures")  # the folders at which paths begin
ELSEWHERE = {"conversion_mapping.py", "gate_up_proj_bias", "max_kv_size", "host.docker.internal"}  # not our names
ENDS = re.compile(r"\|\|?|&&?|;|[0-9]?>>?|<")


def prose(text):
    """Returns the text without code."""
    return re.sub(r"`[^`\n]*`", "", BLOCK.sub("", text))


def blocks(text, language):
    return [body for _, name, body in BLOCK.findall(text) if name == language]


def anchors(text):
    """Returns GitHub's anchors of headings: lower case, hyphens for spaces, no other signs, repeated ones numbered."""
    slugs, seen = set(), {}
    for heading in re.findall(r"^#+ +(.*?) *$", BLOCK.sub("", text), re.MULTILINE):
        heading = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        slug = re.sub(r"[^\w\- ]", "", heading).replace(" ", "-")
        count = seen[slug] = seen.get(slug, -1) + 1
        slugs.add(f"{slug}-{count}" if count else slug)
    return slugs


def broken_links(text, folder, own):
    """Returns the broken relative links of `text`, the content of the file `own` in `folder`."""
    wrong = []
    for link in ("".join(pair) for pair in LINK.findall(prose(text))):
        if re.match(r"[a-z]+:", link) or (own.name == "README.md" and link.startswith("../../issues")):  # as on GitHub
            continue
        path, _, anchor = link.partition("#")
        target = folder / path if path else own
        if not target.exists() or (anchor and anchor not in anchors(target.read_text(encoding="utf-8"))):
            wrong.append(link)
    return wrong


def calls(script):
    """Returns (command, arguments) of every call of one of our commands in lines of a shell."""
    for line in script.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;<>")
        lexer.whitespace_split = True
        words, parts = list(lexer), [[]]
        for word in words:
            if ENDS.fullmatch(word):
                parts.append([])
            else:
                parts[-1].append(word)
        for part in parts:
            while part and re.fullmatch(r"\$|\w+=.*", part[0]):
                part = part[1:]
            if part[:1] == ["moeflux"]:
                yield part[1], part[2:]
            elif part[:2] == ["python", "-m"] and part[2] == "moeflux_mlx":
                yield part[3], part[4:]
            elif part[:2] == ["python", "-m"] and part[2].startswith("moeflux_mlx."):
                yield part[2].split(".")[1], part[3:]


def refusal(command, arguments):
    """Returns why the command would not accept these arguments; empty if it accepts them."""
    if command not in COMMANDS:
        return f"no command {command}"
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
            importlib.import_module(COMMANDS[command][0]).parser().parse_args(arguments)
    except SystemExit as end:
        return said.getvalue() if end.code else ""
    return ""


@pytest.mark.parametrize("text", TEXTS, ids=NAMES)
def test_links_lead_somewhere(text):
    assert broken_links(text.read_text(encoding="utf-8"), text.parent, text) == []


def test_the_folder_of_documents_is_a_site():
    """It is published alone: the index has every page in an order that the pages' last lines follow."""
    folder = ROOT / "docs"
    texts = {page.name: page.read_text(encoding="utf-8") for page in folder.glob("*.md")}
    order = re.findall(r"^\d+\. \[[^\]]*\]\((\S+)\)", texts["index.md"], re.MULTILINE)
    assert sorted(order) == sorted(texts.keys() - {"index.md"})
    last = {name: LINK.findall(text.splitlines()[-1]) for name, text in texts.items() if name in order}
    follow = [[name for name, _ in last[page]] for page in order]
    assert follow == [["index.md", page] for page in order[1:]] + [["index.md"]]
    links = [(name, link) for name, text in texts.items() for pair in LINK.findall(prose(text)) for link in pair]
    assert [(name, link) for name, link in links if link.startswith("../")] == []


@pytest.mark.parametrize("text", TEXTS, ids=NAMES)
def test_python_compiles(text):
    for i, block in enumerate(blocks(text.read_text(encoding="utf-8"), "python")):
        compile(block, f"{text.name}, block {i}", "exec")


@pytest.mark.parametrize("text", TEXTS, ids=NAMES)
def test_commands_exist(text):
    for block in blocks(text.read_text(encoding="utf-8"), "bash"):
        assert [(call, why) for call in calls(block) if (why := refusal(*call))] == []


def script_calls(text):
    """Yields (script, arguments) of every command with arguments in code that runs one of our scripts."""
    code = [" ".join(each.split()) for each in re.findall(r"`([^`]+)`", BLOCK.sub("", text))]
    for line in code + "\n".join(blocks(text, "bash")).replace("\\\n", " ").splitlines():
        if call := re.match(r"(?:python )?(scripts/\w+/\w+\.py) +([^#|;]+)", line):
            yield call[1], shlex.split(call[2])


@functools.cache
def words_of_script(name):
    """Returns the words of a script and of the scripts that it imports, options among them without their dashes."""
    text = next((ROOT / "scripts").rglob(f"{name}.py")).read_text(encoding="utf-8")
    others = re.findall(r"^(?:from|import) (\w+)", text, re.MULTILINE)
    mine = [other for other in others if any((ROOT / "scripts").rglob(f"{other}.py"))]
    return set(re.findall(r"[a-z][\w-]*", text)).union(*map(words_of_script, mine))


def unknown_options(path, arguments):
    words = words_of_script(Path(path).stem)
    options = [argument[2:] for argument in arguments if argument.startswith("--")]
    return [name for name in options if not {name, name.replace("-", "_")} & words]


@pytest.mark.parametrize("text", TEXTS, ids=NAMES)
def test_scripts_have_the_options(text):
    """Without importing them, which takes seconds."""
    found = list(script_calls(text.read_text(encoding="utf-8")))
    assert [(call, wrong) for call in found if (wrong := unknown_options(*call))] == []


def test_a_wrong_option_of_a_script_is_found():
    text = "`scripts/bench/bench_blocks.py` `scripts/bench/bench_drafts.py --depths\n0 --no-such 2 --layers 2`"
    ((path, arguments),) = script_calls(text)
    assert arguments == ["--depths", "0", "--no-such", "2", "--layers", "2"]
    assert unknown_options(path, arguments) == ["no-such"]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_a_parser(command):
    assert refusal(command, ["--help"]) == ""


@functools.cache
def words_of(file):
    return {file.name, *re.findall(r"\w+", file.read_text(encoding="utf-8"))}


def unknown_names(text):
    """Returns names in code that no source has."""
    words = ELSEWHERE.union(*map(words_of, SOURCES))
    named = re.findall(r"`([A-Za-z_][\w.]*)`", BLOCK.sub("", text))
    return [name for name in named if name not in words and not words.issuperset(name.split("."))]


def missing_files(text):
    """Returns paths of sources, alone or in a command, that exist in none of `PLACES`."""
    code = " ".join(re.findall(r"`([^`\n]+)`", text))
    paths = re.findall(r"(?<![\w./-])[\w./-]*/[\w.-]+\.(?:py|h|c|metal|html|tsv)\b", code)
    return [path for path in paths if not any((ROOT / place / path).exists() for place in PLACES)]


def misplaced_names(text):
    """Returns (path, name) for each "`path`: `name`, `name`" whose file does not have that name."""
    pairs = re.findall(r"`([\w/.]+\.(?:py|h|c|metal|html))`:((?:,? `\w+`)+)", text)
    files = [(path, (ROOT / "moeflux_mlx" / path, ROOT / path), re.findall(r"\w+", names)) for path, names in pairs]
    return [
        (path, name)
        for path, places, names in files
        for name in names
        if not any(place.exists() and name in words_of(place) for place in places)
    ]


@pytest.mark.parametrize("text", TEXTS, ids=NAMES)
def test_names_and_files_are_what_there_is(text):
    text = text.read_text(encoding="utf-8")
    assert (unknown_names(text), missing_files(text), misplaced_names(text)) == ([], [], [])


def test_paths_in_kernels_exist():
    """Comments of kernels name the operations that run them."""
    found = [path for file in KERNEL_TEXTS for path in re.findall(r"[\w./-]+/[\w-]+\.py\b", file.read_text("utf-8"))]
    assert (
        len(found) > 3 and [path for path in found if not any((ROOT / place / path).exists() for place in PLACES)] == []
    )


def test_the_architecture_names_every_command():
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    modules = [module.split(".")[1:] for module, _ in COMMANDS.values()]
    assert [name for name, *rest in modules if f"`{name}/`" not in text and f"`{name}.py`" not in text] == []


def test_the_manual_names_every_family():
    families = re.search(r"The families are ([^.]+)\.", (ROOT / "docs" / "models.md").read_text(encoding="utf-8"))
    assert set(re.findall(r"`(\w+)`", families[1])) == set(FAMILIES)


def test_the_manual_names_every_architecture_of_gguf():
    text = (ROOT / "docs" / "formats.md").read_text(encoding="utf-8").split("| architecture | models |")[1]
    assert set(re.findall(r"^\| `([\w-]+)`", text.split("\n\n")[0], re.MULTILINE)) == set(GGUF)
    assert f"of {len(GGUF)} architectures run too" in (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("text", TEXTS, ids=NAMES)
def test_a_list_of_contents_is_complete(text):
    content = text.read_text(encoding="utf-8")
    listed = re.findall(r"^- \[[^\]]*\]\(#([^)]+)\)$", content, re.MULTILINE)
    assert not listed or set(listed) == anchors("\n".join(re.findall(r"^## .*$", content, re.MULTILINE)))


def test_a_wrong_name_is_found():
    text = "`unknown_names` `pool.py` `SlotPool.gone_since` `ops/tiles.py`: `MAX_TOKENS`, `SlotPool`; `ops/no_such.py`"
    assert unknown_names(text) == ["unknown_names", "SlotPool.gone_since"]
    assert missing_files(text) == ["ops/no_such.py"]
    assert misplaced_names(text) == [("ops/tiles.py", "SlotPool")]


def table(text):
    """Returns the cells of all rows that begin with a model's name and end with its shares at four sizes of memory."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:2] == "| "]
    return [row for row in rows if len(row) >= 8 and row[-1].endswith(("%", "all"))]


@pytest.mark.usefixtures("cpu_device")
def test_the_table_of_models_is_what_plan_says(capsys):
    rows = table((ROOT / "docs" / "models.md").read_text(encoding="utf-8"))
    assert sorted(variant.strip("`") for _, variant, *_ in rows) == variants()
    for _, variant, family, disk, *figures in rows:
        variant = variant.strip("`")
        assert family.strip("`") == family_name(read_json(ROOT / "configs" / f"{variant}.json"))
        assert (
            main(["plan", "--variant", variant, "--ram-gb", "512", "--expert-io", "pread", "--dtype", "float32"]) == 0
        )
        said = capsys.readouterr().out
        rates = [rf" {rate}%: .*? ([\d.]+) +\S+$" for rate in (0, 50)]  # for the middle one of three disks
        patterns = (r"experts ([\d.]+) GB", r"weights +([\d.]+)", r" 0%: ([\d.]+)", *rates)
        sizes = [round(float(re.search(pattern, said, re.MULTILINE)[1]), 1) for pattern in patterns]
        assert [float(n) for n in re.findall(r"[\d.]+", " ".join([disk, *figures[:2]]))] == sizes, variant


MACS = [("M4", 16), ("M4", 32), ("M4 Max", 64), ("M4 Max", 128)]  # of the table's last columns: chip, and GB


def shares_of(variant):
    """Returns the shares of the experts in memory on `MACS`, as the table writes them."""
    reach = Reach(variant)
    shares = [reach.share(Mac.of(chip, gigabytes << 30)) for chip, gigabytes in MACS]
    return ["no" if share is None else "all" if share == 1 else written_share(100 * share) for share in shares]


def written_share(percent):
    return f"{percent:.0f} %" if percent >= 0.95 else f"{percent:.1f} %"


def test_the_table_of_models_is_that_of_macs():
    """By the rule of `plan --chip`: a Mac allows its GPU less memory than Linux allows a process."""
    rows = table((ROOT / "docs" / "models.md").read_text(encoding="utf-8"))
    assert {variant: shares_of(variant.strip("`")) for _, variant, *_ in rows} == {row[1]: row[-4:] for row in rows}


def test_the_manual_and_the_readme_agree_about_models():
    manual = [row[:1] + row[3:] for row in table((ROOT / "docs" / "models.md").read_text(encoding="utf-8"))]
    short = table((ROOT / "README.md").read_text(encoding="utf-8"))
    assert len(short) > 5 and [row for row in short if row not in manual] == []


def test_a_wrong_link_is_found(tmp_path):
    own = tmp_path / "own.md"
    text = (
        "# One `word`\n## Two\n## Two\n[a](own.md) [b](gone.md) [c](#one-word) [d](own.md#two-1) [e](#three) `[f](x)`"
    )
    text += '[![g](one.svg)](own.md) <img alt="h" src="two.svg">'
    own.write_text(text)
    assert broken_links(text, tmp_path, own) == ["gone.md", "#three", "one.svg", "two.svg"]


def test_a_wrong_call_is_found():
    script = (
        "X=1 moeflux generate -p 'a | b' --temp 0.5 | tee out # said\npython -m moeflux_mlx.chat --no-such \\\n  1\n"
    )
    commands = list(calls(script + "ls && moeflux nothing"))
    assert commands[0] == ("generate", ["-p", "a | b", "--temp", "0.5"])
    assert refusal(*commands[0]) == ""
    assert "--no-such" in refusal(*commands[1])
    assert refusal(*commands[2]) == "no command nothing"


def test_the_map_of_kernels_names_every_file_and_no_other():
    """Headers are named in full, kernels without their ending."""
    files = {file.name.removesuffix(".metal") if ".h." not in file.name else file.name for file in KERNELS.iterdir()}
    named = set(re.findall(r"`([a-z][a-z0-9_]*(?:\.h(?:\.metal)?)?)`", (KERNELS / "README.md").read_text()))
    assert files - {"README.md"} <= named
    assert {name for name in named if name.endswith((".h", ".metal"))} <= files
