"""Makes a GGUF a model directory like any other: with config.json and the tokenizer's files, but without weights.

    ~/.cache/moeflux/gguf/NAME-DIGEST/config.json   what the metadata say, and under "gguf" the paths of the files
                                      tokenizer.json, ...   copied from the base model's files, or made from metadata

Everything that reads a model's small files finds them there; tensors are read from the files themselves. The directory
is written anew whenever its GGUF is opened, and may be deleted at any time.

The metadata name too few of the tokens that end an answer. llama.cpp finds ends by their texts too
(`llama_vocab::impl::load`), and its converters rely on it. A template shows one more: what it writes behind an answer
is what the model writes there.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..errors import ConfigError, ModelFileError, RequestError, TokenizerError
from ..families.gguf import GgufFamily, Metadata, renamed_tensor
from ..families.gguf_keys import SLOWED
from ..families.registry import FAMILIES, GGUF
from ..files import JsonDict, kept_files, read_json, replace_file, user_path
from ..formats.checkpoint import COPIED, Checkpoint, Tensor
from ..formats.gguf_file import Blocks, GgufFile, gguf_file, open_gguf, open_parts
from ..formats.gguf_names import HEAD_ALONE, SUFFIX, heads_of
from ..formats.hub import Repository, cached_snapshot, looks_like_repo
from ..kinds.limits import WIDEST_HEAD
from ..text.channels import closes_messages
from ..text.gguf_tokens import TAG, generation_file, template_of, tokenizer_files
from ..text.tokenizer import VOCABULARY_FILES, TokenizerWrapper, load_tokenizer, stated_ends
from .gguf_tensors import as_tensor, dequantized, joined

KEY = "gguf"  # in config.json
HUB = re.compile(r"https://huggingface\.co/([\w.-]+/[\w.-]+)/?")
TEMPLATE, GENERATION = "chat_template.jinja", "generation_config.json"


def describe(path: Path, tokenizer: Path | None = None, elsewhere: Sequence[Path] = ()) -> Path | None:
    """The model directory of the GGUF that `path` is or holds; None: there is none.

    Args:
        elsewhere: as for `open_gguf`.
        tokenizer: the directory of the tokenizer's files; None: that of the GGUF, if it has some, else its metadata.

    Raises:
        ConfigError, ModelFileError: the file is damaged, or of a model that is not read. TokenizerError: it has no
            usable tokenizer.
    """
    first = gguf_file(path)
    if first is None:
        return None
    whole = open_gguf(first.absolute(), [one.absolute() for one in elsewhere])
    named = hashlib.sha256(f"{whole.files[0]}\n{tokenizer or ''}".encode()).hexdigest()[:16]
    folder = kept_files() / "gguf" / f"{first.stem}-{named}"
    config = {**_config(whole), KEY: list(map(str, whole.files))}
    beside = tokenizer or base_tokenizer(first, elsewhere=elsewhere) or first.parent
    files = dict(_small_files(whole, beside, is_given=tokenizer is not None))
    files["config.json"] = (json.dumps(config, indent=2) + "\n").encode()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in (*(name for name in COPIED if name != GENERATION), "config.json"):
            _keep(folder / name, files.get(name))
        _keep(folder / GENERATION, _generation(whole, beside, folder))
    except OSError as error:
        raise ModelFileError(f"{folder} cannot be written: {error.strerror or error}") from None
    return folder


def _keep(file: Path, data: bytes | None) -> None:
    """Gives a file this content; None: there is no such file."""
    if data is None:
        file.unlink(missing_ok=True)
    elif not file.is_file() or file.read_bytes() != data:
        replace_file(file, [data])


def _generation(whole: GgufFile, beside: Path, folder: Path) -> bytes | None:
    """generation_config.json with every token that ends an answer; None: there is none.

    Args:
        beside: the directory of the tokenizer's files, if they are not made from the metadata.
        folder: has the tokenizer's files.
    """
    file = beside / GENERATION
    config = read_json(file) if file.is_file() and _has_vocabulary(beside) else {}
    named = json.loads(generation_file(whole.metadata).get(GENERATION, b"{}"))
    ends = stated_ends(named, whole.files[0]) + stated_ends(config, file)
    with suppress(TokenizerError):  # whoever needs the tokenizer gets the error
        ends = all_ends(ends, load_tokenizer(folder))
    made = {**config, "eos_token_id": ends} if ends else config
    return json.dumps(made).encode() if made else None


def _has_vocabulary(path: Path) -> bool:
    return any((path / name).is_file() for name in VOCABULARY_FILES)


def tokenizer_folder(tokenizer: str | Path | None) -> Path | None:
    """The directory of a tokenizer's files, which are downloaded from a repository if need be."""
    if tokenizer is None or user_path(tokenizer).is_dir():
        return None if tokenizer is None else user_path(tokenizer)
    if not looks_like_repo(str(tokenizer)):
        raise ModelFileError(f"{tokenizer} does not exist; --tokenizer takes a directory or a repo id org/name")
    return Repository.look_up(str(tokenizer)).snapshot(list(COPIED))


def base_tokenizer(first: Path, download: bool = False, elsewhere: Sequence[Path] = ()) -> Path | None:
    """The directory in the Hub's cache with the tokenizer's files of the model that a GGUF was made from; None: there
    are files beside the GGUF, it does not name the model, or they are not in the cache.

    Args:
        first: the first file of the GGUF.
        download: whether they are downloaded, if the Hub has them.
        elsewhere: as for `open_gguf`.
    """
    url = open_gguf(first, elsewhere).metadata.get("general.base_model.0.repo_url")
    match = HUB.fullmatch(url) if isinstance(url, str) else None
    if match is None or _has_vocabulary(first.parent):
        return None
    folder = cached_snapshot(match[1], None, list(COPIED))
    if folder is None and download:
        with suppress(ModelFileError):  # its metadata have a tokenizer too
            folder = Repository.look_up(match[1]).snapshot(list(COPIED))
    return folder if folder is not None and _has_vocabulary(folder) else None


def described_files(folder: Path) -> tuple[Path, ...]:
    """The files of the GGUF that a directory describes; none: it is another kind of model."""
    config = folder / "config.json"
    stated = read_json(config).get(KEY) if config.is_file() else None
    if not isinstance(stated, list) or not all(isinstance(one, str) for one in stated):
        return ()
    return tuple(map(Path, stated))


def open_described(folder: Path, paths: Sequence[Path], config: JsonDict) -> Checkpoint:
    """The GGUF in these files, by the directory that describes it; `config` is that of a model that runs."""
    whole = open_parts(paths)
    tensors = _by_name(_tensors(whole, config))
    read, family = _family(whole)
    stated = {name: value for name, value in config.items() if name != KEY}
    return Checkpoint(folder, stated, _with_joined(tensors, family, read.layers), whole.files)


def draft_tensors(whole: GgufFile) -> dict[str, Tensor]:
    """{name in a checkpoint: tensor} of the draft heads in a GGUF, or else in the one `mtp-*.gguf` beside it.

    Raises:
        ConfigError, ModelFileError: there are several such files, or one is damaged, or of a model that is not read.
    """
    path = whole.files[0]
    tensors = _by_name(_tensors(whole, _config(whole), of_heads=True))
    if tensors or HEAD_ALONE.match(path.name):
        return tensors
    sizes = {one.name: one.stat().st_size for one in path.parent.glob(f"*{SUFFIX}")}
    beside = [files[0] for files in heads_of([file.name for file in whole.files], sizes)]
    if len(beside) > 1:
        raise ModelFileError(f"{path.parent} holds several draft heads: {', '.join(beside)}; give one as --draft FILE")
    return draft_tensors(open_gguf(path.parent / beside[0])) if beside else {}


def lacks_head(whole: GgufFile) -> bool:
    """Whether draft heads of its family are read, and it has none; as `draft_tensors`."""
    config = _config(whole)
    return FAMILIES[config["model_type"]].head is not None and not any(_tensors(whole, config, of_heads=True))


def _family(whole: GgufFile) -> tuple[Metadata, GgufFamily]:
    blocks = slowed_blocks(whole)
    slowed = dequantized(blocks).tolist() if blocks is not None else []
    read = Metadata(whole.metadata, whole.tensors, slowed)
    if read.architecture not in GGUF:
        raise ConfigError(
            f"{whole.files[0]}: GGUF files of the architecture {read.architecture[:60]!a} are not read; read are "
            f"{', '.join(GGUF)}"
        )
    return read, GGUF[read.architecture]


def slowed_blocks(whole: GgufFile) -> Blocks | None:
    """The tensor `rope_freqs.weight`, if there is one, whose values are part of the configuration."""
    blocks = whole.tensors.get(SLOWED)
    if blocks is not None and (blocks.shape[-1] > WIDEST_HEAD or len(blocks.shape) > 1):
        raise ModelFileError(f"{blocks.file}: tensor {SLOWED} has the shape {blocks.shape}, more than any head has")
    return blocks


def _config(whole: GgufFile) -> dict[str, Any]:
    read, family = _family(whole)
    config = family.config(read)
    embedding = whole.tensors.get("token_embd.weight")
    if embedding is not None:
        config["vocab_size"] = embedding.shape[0]
    return {**config, "tie_word_embeddings": "output.weight" not in whole.tensors}


def _tensors(whole: GgufFile, config: JsonDict, of_heads: bool = False) -> Iterator[Tensor]:
    """The tensors of the model, or those of its draft heads, under their names in a checkpoint."""
    read, family = _family(whole)
    for blocks in whole.tensors.values():
        layer, name = renamed_tensor(blocks.name, family, whole.tensors)
        if blocks.name == SLOWED or (layer is not None and layer >= read.layers) != of_heads:
            continue
        inner = name.removeprefix(f"{family.stem}{layer}.")
        yield as_tensor(blocks, name, family.change(config, inner, blocks.shape))
        if (ones := family.ones(name, blocks.shape[-1])) is not None:
            yield as_tensor(blocks, *ones)


def _by_name(tensors: Iterator[Tensor]) -> dict[str, Tensor]:
    """{name: tensor}. Raises ModelFileError: two have one name."""
    made: dict[str, Tensor] = {}
    for tensor in tensors:
        if tensor.name in made:
            raise ModelFileError(f"{tensor.file}: two tensors are {tensor.name}")
        made[tensor.name] = tensor
    return made


def _with_joined(tensors: dict[str, Tensor], family: GgufFamily, layers: int) -> dict[str, Tensor]:
    """The tensors, with those that the model has as one joined."""
    made = dict(tensors)
    for stem in (f"model.layers.{layer}." for layer in range(layers if family.joined else 0)):
        for name, parts in family.joined:
            if all(stem + part in made for part in parts):
                made[stem + name] = joined(stem + name, [made.pop(stem + part) for part in parts])
    return made


def _small_files(whole: GgufFile, beside: Path, is_given: bool) -> Iterator[tuple[str, bytes]]:
    """The tokenizer's files with their contents: those of the directory `beside`, or what the metadata say."""
    of_base = {name: beside / name for name in COPIED if (beside / name).is_file()}
    template, settings = template_of(whole.metadata), of_base.get("tokenizer_config.json")
    if template is not None and (settings is None or "chat_template" not in read_json(settings)):
        yield TEMPLATE, template
    if _has_vocabulary(beside):
        yield from ((name, file.read_bytes()) for name, file in of_base.items())
    elif is_given:
        raise ModelFileError(f"{beside} has no {' or '.join(VOCABULARY_FILES)}; --tokenizer takes a directory with one")
    else:
        yield from tokenizer_files(whole.metadata).items()


# Texts of tokens that end an answer, a document, or a file of a repository.
END_TEXTS = frozenset(
    {
        *("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>"),
        *("<|endoftext|>", "<|end_of_text|>", "<end_of_turn>", "<end_of_utterance>", "<|observation|>", "<eos>"),
        *("<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<turn|>", "<|tool_response>", "[e~[", "<｜end▁of▁sentence｜>"),
        *("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]", "<|fim_repo|>", "<|repo_name|>", "<fim-repo>"),
        *("<REPO>", "<reponame>", "<|file_sep|>"),
    }
)
OF_CONTROL = "</s>"  # an end only as a control token; elsewhere it is HTML
ANSWER, NEXT = "\ue000", "\ue001"  # texts that no template has


def all_ends(stated: Iterable[int], tokenizer: TokenizerWrapper) -> list[int]:
    """Every token that ends an answer: those of `stated`, and those that the vocabulary and the template show.

    What closes a message of an answer that has several is left out, also where it is stated.
    """
    tokens = _marks(tokenizer)
    texts = {*END_TEXTS, *tokenizer.channels.ends, _closing(tokenizer, tokens)}
    if tokens.get(OF_CONTROL) in tokenizer.vocabulary.special_ids:
        texts.add(OF_CONTROL)
    ends = dict.fromkeys((*stated, *sorted(tokens[text] for text in texts if text in tokens)))
    inner = {tokens.get(text) for text in closes_messages(tokens.keys())}
    return [end for end in ends if end not in inner]


def _marks(tokenizer: TokenizerWrapper) -> dict[str, int]:
    """The tokens that are no ordinary text."""
    special = tokenizer.all_special_ids
    return {token: i for token, i in tokenizer.get_vocab().items() if i in special or token in tokenizer.markers}


def _closing(tokenizer: TokenizerWrapper, tokens: Mapping[str, int]) -> str | None:
    """The token that the template writes behind an answer; None: no token, or the template fails."""
    chat = [{"role": role, "content": text} for role, text in (("user", "?"), ("assistant", ANSWER), ("user", NEXT))]
    try:
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=False)
    except (RequestError, TokenizerError):
        return None
    behind = str(text).rpartition(ANSWER)[2].partition(NEXT)[0].lstrip()
    first = max((token for token in tokens if token and behind.startswith(token)), key=len, default=None)
    return None if first is None or first == tokenizer.bos_token or TAG.fullmatch(first) else first
