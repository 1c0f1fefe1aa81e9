"""What the commands share: options, loading what they name, and lines on stderr. Light to import."""

import argparse
import contextlib
import errno
import json
import os
import resource
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, cast

from ..errors import MoefluxError, MoefluxWarning, RequestError

if TYPE_CHECKING:
    from ..experts.source import ExpertLoader
    from ..model.decoder import Model
    from ..state.fingerprint import Fingerprint
    from ..state.prompt_store import PromptStore
    from ..text.tokenizer import TokenizerWrapper

DTYPES = ("float32", "bfloat16", "float16")
INTERRUPTED = 130  # 128 + SIGINT, as shells report it
PROMPT_CACHE_GB = 10.0
TEMPLATE_OPTIONS = ["--system-prompt", "--chat-template-config"]
NOT_GIVEN = {
    "top_p": 0.0,
    "top_k": 0,
    "min_p": 0.0,
    "chat_template_config": "{}",
    "prefetch": "auto",
    "prompt_cache_gb": PROMPT_CACHE_GB,
    "ignore_chat_template": False,
}  # what options are by default; None where it does not say
UNWRITABLE = (errno.ENOSPC, errno.EIO, errno.EBADF, errno.EFBIG, errno.EDQUOT)  # what writing to stdout ends in
# What would move a terminal's cursor or change its state; a model can be talked into writing it.
CONTROLS = dict.fromkeys({*range(0x20), *range(0x7F, 0xA0)} - {ord("\n"), ord("\t")})


def add_model_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("model").add_argument
    add("--model", help="directory, or Hugging Face repo id org/name; default: the demo model in the package")
    add("--revision", help="branch, tag or commit of the Hugging Face repo")
    add("--dtype", choices=DTYPES, help="of activations; default: bfloat16 on a GPU, float32 on CPU")
    add(
        "--chat-template-config",
        default="{}",
        metavar="JSON",
        help="variables for the template (%(default)s)",
    )
    add = parser.add_argument_group("memory and expert I/O").add_argument
    add_expert_io(add)
    add("--expert-cache-gb", type=float, metavar="GB", help="memory for experts that are read; default: what is left")
    add(
        "--prefetch",
        choices=("auto", "off"),
        default="auto",
        help="whether experts are read ahead (%(default)s)",
    )
    add(
        "--context",
        type=int,
        metavar="TOKENS",
        help="for which memory is planned; default: 8192, or the model's limit if less",
    )
    add(
        "--prefill-step-size",
        type=int,
        default=512,
        metavar="TOKENS",
        help="of a prompt that run at once (%(default)s)",
    )


def add_expert_io(add: Callable[..., Any]) -> None:
    add(
        "--expert-io",
        choices=("auto", "mmap", "pread"),
        default="auto",
        help="how experts are read (%(default)s, or what MOEFLUX_EXPERT_IO says)",
    )


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("answer").add_argument
    add(
        "--max-tokens",
        "-m",
        type=int,
        default=256,
        help="stop after this many tokens; -1: no limit (%(default)s)",
    )
    add("--temp", type=float, default=0.0, help="sampling temperature; 0: most likely token (%(default)s)")
    add(
        "--top-p",
        type=float,
        default=0.0,
        help="keep the smallest set of tokens with this probability; 0: off",
    )
    add("--top-k", type=int, default=0, help="keep this many tokens; 0: off")
    add(
        "--min-p",
        type=float,
        default=0.0,
        help="drop tokens less likely than this share of the best one; 0: off",
    )
    add("--repetition-penalty", type=float, help="divide the logits of recent tokens by this; default: off")
    add("--seed", type=int, help="makes sampling repeatable")


def add_prompt_cache_options(parser: argparse.ArgumentParser, with_file: bool) -> None:
    add = parser.add_argument_group("prompt cache").add_argument
    if with_file:
        add(
            "--prompt-cache-file",
            metavar="FILE",
            help="start from the prompt saved in FILE as far as it is the same, and save this one there",
        )
    add(
        "--prompt-cache-dir",
        metavar="DIR",
        help="start from the longest saved prompt in DIR that this one begins with, and save this one",
    )
    add(
        "--prompt-cache-gb",
        type=float,
        default=PROMPT_CACHE_GB,
        metavar="GB",
        help="least recently used prompts in DIR go beyond this size (%(default)s)",
    )


def load_named(options: argparse.Namespace) -> "tuple[Path, Model, TokenizerWrapper]":
    """The model and tokenizer of the options, and the directory they came from."""
    import mlx.core as mx

    from ..engine.load import load, resolve

    start = time.perf_counter()
    with Progress("loading"):
        path = resolve(options.model, options.revision)
        model, tokenizer = load(
            path,
            dtype=getattr(mx, options.dtype) if options.dtype else None,
            expert_io=options.expert_io,
            expert_cache_bytes=gigabytes("--expert-cache-gb", options.expert_cache_gb),
            prefetch=options.prefetch,
            context=options.context,
            prefill_step_size=options.prefill_step_size,
        )
    note(model.experts.decision)
    if options.verbose:
        note(f"loaded in {time.perf_counter() - start:.2f} s")
    for line in idle_options(options, model.experts.slots == 0):
        note(line)
    return path, model, tokenizer


def idle_options(options: argparse.Namespace, is_mapped: bool) -> list[str]:
    """A line for each reason why something that was asked for has no effect."""
    given = {f"--{name.replace('_', '-')}" for name, value in vars(options).items() if value != NOT_GIVEN.get(name)}
    is_local = options.model is None or Path(options.model).exists()
    idle = {
        "at --temp 0": ["--top-p", "--top-k", "--min-p", "--seed"] if options.temp == 0 else [],
        "where experts are mapped": ["--expert-cache-gb", "--prefetch"] if is_mapped else [],
        "with --ignore-chat-template": TEMPLATE_OPTIONS if "--ignore-chat-template" in given else [],
        "without --prompt-cache-dir": ["--prompt-cache-gb"] if options.prompt_cache_dir is None else [],
        "where --model is a directory": ["--revision"] if is_local else [],
    }
    found = {reason: [name for name in names if name in given] for reason, names in idle.items()}
    return [
        f"note: {', '.join(names)} {'have' if len(names) > 1 else 'has'} no effect {reason}"
        for reason, names in found.items()
        if names
    ]


def beyond_plan(model: "Model", tokens: int) -> str:
    """What to say of a prompt for which no memory was planned, if it is one."""
    planned, limit = model.plan.demand.context, model.args.max_position_embeddings
    if tokens <= planned:
        return ""
    return (
        f"warning: the prompt has {tokens} tokens and memory was planned for {planned}; "
        f"--context {min(2 * tokens, limit)} leaves room for an answer"
    )


def within_limit(model: "Model", prompt_tokens: int, max_tokens: int) -> int:
    """`max_tokens`, or what the model takes after the prompt if that is less; at least 1."""
    room = max(model.args.max_position_embeddings - prompt_tokens, 1)
    return room if max_tokens == -1 else min(max_tokens, room)


def why_cut(model: "Model", prompt_tokens: int, answer_tokens: int) -> str:
    """Why an answer ended without an end."""
    limit = model.args.max_position_embeddings
    if prompt_tokens + answer_tokens >= limit:
        return f"the text has the {limit} tokens that the model takes"
    return f"cut after {answer_tokens} tokens; --max-tokens -1 has no limit"


def execute(run: Callable[[argparse.Namespace], int], options: argparse.Namespace, writes: bool = True) -> int:
    """Runs a command, which `writes` to stdout or does not; returns its exit code.

    Our own errors and warnings become one line each on stderr.
    """
    configure_mlx()
    with warnings.catch_warnings():
        warnings.simplefilter("always", MoefluxWarning)
        warnings.showwarning = _show_warning
        try:
            prepare_streams(writes)
            code = run(options)
            if writes:
                sys.stdout.flush()
            return code
        except MoefluxError as error:
            note(f"error: {error}")
        except BrokenPipeError:  # whoever read the text has gone
            _give_up_stdout()
        except OSError as error:
            is_output = error.errno in UNWRITABLE and error.filename is None
            if is_output:
                _give_up_stdout()
            note(f"error: the output cannot be written: {error.strerror}" if is_output else f"error: {error}")
        except KeyboardInterrupt:
            return INTERRUPTED
    return 1


def prepare_streams(writes: bool) -> None:
    """Lets text be written that a terminal has no letters for, a question mark each, and closed streams be used.

    Raises:
        RequestError: stdout is closed, and the command `writes` to it.
    """
    is_closed = sys.stdout is None
    for descriptor in (0, 1, 2):  # a file that is opened in the place of a stream is taken for it: MLX reads none at 0
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    sys.stdin, sys.stdout, sys.stderr = (
        stream or _nowhere(mode) for stream, mode in ((sys.stdin, "r"), (sys.stdout, "w"), (sys.stderr, "w"))
    )
    if is_closed and writes:
        raise RequestError("stdout is closed, so there is nowhere to write to")
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")


def _nowhere(mode: str) -> TextIO:
    """The null device, at the lowest descriptor that is free; it stays open."""
    return cast(TextIO, os.fdopen(os.open(os.devnull, os.O_RDWR), mode, closefd=False))


def _give_up_stdout() -> None:
    """Keeps the interpreter from flushing to nobody at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _show_warning(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
    """As one line, without the place in the code that a MoefluxWarning is not about."""
    note(f"warning: {message}" if issubclass(category, MoefluxWarning) else f"{category.__name__}: {message}")


def configure_mlx() -> None:
    """Says how much MLX gathers before it hands work to the GPU, unless the user decided.

    MLX counts the elements of whole input arrays; a layer of experts alone is above its limit. CUDA's graphs run
    a launch faster the fewer there are in one, down to what the host can keep up with: on an H200 decode of
    Qwen3.6-35B-A3B's shapes reaches 200 tokens a second with 40, 185 with MLX's 100. MLX reads the variables
    when the device is first used, so this comes before the first array.
    """
    os.environ.setdefault("MLX_MAX_MB_PER_BUFFER", "1000000")
    if sys.platform == "linux":
        os.environ.setdefault("MLX_MAX_OPS_PER_BUFFER", "40")


def gigabytes(option: str, value: float | None) -> int | None:
    """Bytes of an option given in units of 1e9 bytes.

    Raises:
        RequestError: not a positive, finite number.
    """
    if value is not None and not 1e-9 <= value < 1e9:
        raise RequestError(f"{option} is {value}; it must be positive and below 1e9, in units of 1e9 bytes")
    return None if value is None else int(value * 1e9)


def expert_statistics(experts: "ExpertLoader", verbose: bool) -> list[str]:
    """Lines on what reading experts took."""
    stats = experts.stats
    if experts.slots == 0:
        return [f"expert I/O: {experts.mode.value}"] if verbose else []
    read = f"{stats.hits} hits, {stats.misses} misses, {stats.bytes_read / 1e9:.3f} GB read"
    lines = [f"expert I/O: {experts.mode.value}, {read}"]
    lines += [f"expert I/O: {experts.note}"] if experts.note else []
    if verbose and stats.bytes_read:
        lines.append(
            f"expert I/O: hit rate {stats.hit_rate:.1%}, {stats.gb_per_second:.2f} GB/s, "
            f"{stats.wait_seconds:.2f} s waited, {experts.slots} slots; read ahead: {stats.prefetched}, "
            f"{stats.prefetch_hits} in time, {stats.late} late, {stats.wasted} unused"
        )
    return lines


def peak_memory_gb() -> float:
    """The most memory that this process has held, in units of 1e9 bytes, mapped files included."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak * (1 if sys.platform == "darwin" else 1024) / 1e9


def unsafe_letters(out: TextIO) -> dict[int, None]:
    """What to leave out of a model's text for `out`, as `str.translate` takes it."""
    return CONTROLS if out.isatty() else {}


def sampling(options: argparse.Namespace) -> dict[str, Any]:
    """Arguments of `stream_generate`; seeds the random numbers.

    Raises:
        RequestError: a value is out of range.
    """
    import mlx.core as mx

    from ..engine.generation import check_max_tokens
    from ..engine.sampling import make_logits_processors, make_sampler

    check_max_tokens(options.max_tokens)  # before a long prompt has been computed
    if options.seed is not None:
        mx.random.seed(check_seed(options.seed))
    return {
        "max_tokens": options.max_tokens,
        "sampler": make_sampler(options.temp, options.top_p, options.min_p, top_k=options.top_k),
        "logits_processors": make_logits_processors(repetition_penalty=options.repetition_penalty),
    }


def fingerprint_of(path: Path, model: "Model") -> "Fingerprint":
    from ..state.fingerprint import model_fingerprint
    from ..state.snapshot import activation_dtype

    return model_fingerprint(path, activation_dtype(model))


def open_store(options: argparse.Namespace, path: Path, model: "Model") -> "PromptStore | None":
    """Where the options want prompts to be kept, if anywhere.

    Raises:
        RequestError: two places, or a size that is none. PromptCacheError: the place cannot be used.
    """
    from ..state.prompt_store import PromptDirectory, PromptFile

    file = getattr(options, "prompt_cache_file", None)
    if file is not None and options.prompt_cache_dir is not None:
        raise RequestError("--prompt-cache-file and --prompt-cache-dir exclude each other; give one of them")
    if not options.prompt_cache_gb > 0:
        raise RequestError(f"--prompt-cache-gb is {options.prompt_cache_gb}; it must be positive")
    if file is not None:
        return PromptFile(file, fingerprint_of(path, model))
    if options.prompt_cache_dir is not None:
        size = min(options.prompt_cache_gb * 1e9, 2.0**62)
        return PromptDirectory(options.prompt_cache_dir, fingerprint_of(path, model), int(size))
    return None


def parse_template_config(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise RequestError(f"--chat-template-config is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise RequestError(f"--chat-template-config is a JSON {type(value).__name__}; expected an object")
    taken = sorted(set(value) & {"messages", "tools", "add_generation_prompt", "tokenize"})
    if taken:
        raise RequestError(f"--chat-template-config cannot set {', '.join(taken)}; only variables of the template")
    return value


def check_seed(seed: int) -> int:
    if not 0 <= seed < 2**64:
        raise RequestError(f"--seed {seed} is not between 0 and 2**64 - 1")
    return seed


def note(text: str) -> None:
    """One line or more on stderr; that nobody can read them is no reason to stop."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


class Progress:
    """One line on a terminal's stderr that is wiped when the work is done; nothing elsewhere."""

    def __init__(self, label: str):
        self.label, self.shown = label, False

    def __enter__(self) -> "Progress":
        self._show(f"{self.label} ...")
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def update(self, done: int, total: int) -> None:
        self._show(f"{self.label} {done}/{total} tokens")

    def close(self) -> None:
        if self.shown:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
            self.shown = False

    def _show(self, text: str) -> None:
        if sys.stderr.isatty():
            print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
            self.shown = True


class Interruption:
    """While entered, Ctrl-C sets `wanted`, and raises too if `at_once` is set or it is not the first.

    Raising alone is not enough: MLX drops errors that come up while it looks at a numpy array, so that about one
    Ctrl-C in two hundred would be lost. A process that ignores Ctrl-C (nohup) goes on ignoring it.
    """

    def __init__(self, at_once: bool = False) -> None:
        self.wanted, self._at_once = False, at_once

    def __enter__(self) -> "Interruption":
        self._before = signal.getsignal(signal.SIGINT)
        self._takes = callable(self._before) and threading.current_thread() is threading.main_thread()
        if self._takes:
            signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        if self._takes:
            signal.signal(signal.SIGINT, self._before)

    def check(self) -> None:
        """Raises the KeyboardInterrupt that is wanted."""
        if self.wanted:
            raise KeyboardInterrupt

    def _note(self, number: int, frame: Any) -> None:
        again, self.wanted = self.wanted, True
        if again or self._at_once:
            raise KeyboardInterrupt
