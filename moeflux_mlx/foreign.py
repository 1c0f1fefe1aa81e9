"""Words of mlx-lm, llama.cpp, vLLM and Ollama that this package does not have, and what replaces each: arguments of
functions, options and names of commands, names to import, fields of requests. A wrong argument of a public function is
refused in the function's own name, with the nearest right one or with what replaces it here.

One word has one remedy wherever it is given. A setting in braces is spelt as the place spells it: `{kv_bits}` is
`load(kv_bits=8)` in the library and `--kv-bits 8` in a command. Fields of requests that only change the speed, or what
the reply says besides its text (`cache_prompt`, `id_slot`, `n_probs`), are ignored as unknown fields are, and so are
the parameters of a refused field (`mirostat_tau`, `dry_base`).
"""

import functools
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, ParamSpec, TypeVar

from .errors import did_you_mean
from .files import JsonDict, JsonValue

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")


class Replaced(NamedTuple):
    """An argument of mlx-lm that is missing here.

    Args:
        remedy: what replaces it.
        default: mlx-lm's value of it, which asks for nothing and is accepted.
    """

    remedy: str
    default: Any = None


Replacements = dict[str, Replaced]

IN_LIBRARY = {
    "kv_bits": "load(kv_bits=8)",
    "draft": "load(draft='auto')",
    "expert_io": "load(expert_io=)",
    "image": "image=",
}
IN_COMMANDS = {"kv_bits": "--kv-bits 8", "draft": "--draft auto", "expert_io": "--expert-io", "image": "--image"}
THINKING = """set the template's variable, as in --chat-template-config '{{"enable_thinking": false}}'"""

# Remedy -> the words, as arguments are written; an option has dashes in the place of underscores.
REMEDIES = {
    "fuse the adapter into the checkpoint, with mlx_lm.fuse": "adapter_path lora lora_base lora_scaled adapters",
    "caches keep every position; {kv_bits} makes them about half as large": "max_kv_size context_shift keep",
    "the bits of cached keys and values are set when the model is loaded; use {kv_bits}": "kv_bits",
    "use --set cpu_activations=8": "qa quantize_activations",
    "use {kv_bits}": "ctk cache_type_k ctv cache_type_v",
    "groups have 64 values; use {kv_bits}": "kv_group_size",
    "every position is rounded when it arrives; use {kv_bits}": "quantized_kv_start",
    "drafts come from lookup in the text or from a draft head; use {draft}": (
        "draft_model md model_draft spec_draft_model"
    ),
    "the number of drafts follows from their measured gain; use {draft}": (
        "num_draft_tokens draft_max draft_min draft_n"
    ),
    "{expert_io} says how experts are read; the other weights are always read at once": (
        "lazy mmap no_mmap mlock load_mode lm direct_io dio"
    ),
    "the model's class follows from its config.json": "get_model_classes",
    "change config.json in the model's directory": (
        "model_config override_kv rope_scaling rope_scale rope_freq_base rope_freq_scale yarn_orig_ctx yarn_ext_factor"
    ),
    "the configuration is model.args": "return_config",
    "tensors that are missing or not known are always refused": "strict check_tensors",
    "change tokenizer_config.json in the model's directory": "tokenizer_config",
    "code of a repository is never run": "trust_remote_code",
    "the model computes on MLX's default stream": "stream",
    "prompts are computed one after the other": "prefill_batch_size",
    "give token ids, and images with {image}": "input_embeddings",
    # Of commands alone.
    "add the token's id to eos_token_id in generation_config.json of the model's directory": (
        "extra_eos_token eos_token"
    ),
    "upload the finished directory with: hf upload ORG/NAME DIR": "upload_repo",
    "leave it out: weights get 4 bits; --q-bits, --q-mode and --recipe choose others": "q quantize",
    "quantised weights stay so; convert the checkpoint that they were made from": "d dequantize",
    "change chat_template.jinja in the model's directory; --chat-template-config sets its variables": (
        "chat_template chat_template_file use_default_chat_template"
    ),
    "leave it out: the experts that fit stay in memory; --memory-gb and --expert-cache-gb set how much they take": (
        "ngl gpu_layers n_gpu_layers fit fitt fit_target cmoe cpu_moe ncmoe n_cpu_moe ot override_tensor moe_cache_mib"
    ),
    "leave it out: one GPU computes; moeflux ranks prepares several machines to run one model": (
        "dev device sm split_mode ts tensor_split mg main_gpu rpc pipeline tensor_parallel_size"
    ),
    "leave it out: all cores compute": "t threads tb threads_batch numa prio",
    "leave it out: this is always so": (
        "fa flash_attn jinja cb cont_batching cnv conversation i interactive metrics ui webui kvu kv_unified "
        "cache_prompt"
    ),
    "leave it out: nothing here needs it": (
        "color co e escape slots warmup no_warmup repack perf swa_full fit_ctx delay b batch_size ub ubatch_size"
    ),
    "leave it out: weights that are not quantised keep their dtype": "dtype",
    "only moeflux generate and chat, and requests to moeflux serve, set it": "seed s",
    "set the environment variable HF_TOKEN": "hft hf_token",
    "name the quantisation behind the repo id, as in --model org/name:Q4_K_M": "hff hf_file",
    "leave it out: the encoder is found beside the model": "mm mmproj",
    "give --model several times; one is loaded at a time": "models_dir models_max",
    "rename the model's directory, whose name clients see": "a alias served_model_name",
    "write the key into a file and give --api-key-file FILE, so that no list of processes shows it": "api_key",
    "put a proxy with TLS in front of the server": "ssl_key_file ssl_cert_file",
    "this package only generates text": "embedding embeddings rerank reranking pooling",
    "there is no such sampler": (
        "typical typical_p mirostat mirostat_lr mirostat_ent dynatemp_range dynatemp_exp dry_multiplier dry_base "
        "samplers sampler_seq top_nsigma top_n_sigma min_tokens_to_keep"
    ),
    "only a request to moeflux serve sets it": "presence_penalty frequency_penalty max_tokens n predict n_predict",
    "end the prompt with it, and give --ignore-chat-template": "prefill_response",
    "an answer ends with the model's turn, or at the limit of tokens": "ignore_eos",
    "send a JSON schema as response_format to moeflux serve": (
        "grammar grammar_file j json_schema jf json_schema_file format"
    ),
    THINKING: "think rea reasoning reasoning_budget reasoning_effort reasoning_format",
}
# An option here -> the options that mean the same.
RENAMED = {
    "--context": "c ctx_size n_ctx num_ctx max_model_len",
    "--model": "m hf hfr hf_repo",
    "--hf-path": "m model hf hfr hf_repo",
    "--max-tokens": "n predict n_predict num_predict n_gen g generation_tokens",
    "--prompt-tokens": "p n_prompt",
    "--parallel": "np decode_concurrency prompt_concurrency max_num_seqs",
    "--prefill-step-size": "b batch_size ub ubatch_size",
    "--text": "f file data_path",
    "--tokens": "num_samples",
    "--window": "sequence_length",
    "--rounds": "r repetitions num_trials",
    "--system-prompt": "sys system system_message",
    "--seed": "s",
    "--verbose": "v log_verbose lv verbosity log_level",
    "--quiet": "log_disable",
    "--repetition-penalty": "repeat_penalty",
    "--repetition-context-size": "repeat_last_n",
    "--chat-template-config": "chat_template_args chat_template_kwargs default_chat_template_kwargs",
    "--cors-origin": "allowed_origins cors_origins",
    "--sessions": "prompt_cache_size",
    "--prompt-cache-dir": "prompt_cache prompt_cache_file slot_save_path",
    "--memory-gb": "gpu_memory_utilization cram cache_ram prompt_cache_bytes",
    "--idle-minutes": "keepalive keep_alive sleep_idle_seconds",
    "--no-vision": "no_mmproj",
    "--image-tokens": "image_max_tokens",
    "--hide-thinking": "hidethinking",
    "--recipe": "quant_predicate",
    "--q-type": "type ftype tensor_type",
    "--yes": "y",
}
# Commands -> what is typed here. MODEL is what followed.
COMMANDS = {
    "moeflux chat --model MODEL": "run cli",
    "moeflux serve --model MODEL": "server api",
    "moeflux plan --model MODEL": "show info fit-params",
    "moeflux pull MODEL": "download get",
    "moeflux list": "ls manage scan",
    "moeflux remove MODEL": "rm delete",
    "moeflux benchmark --model MODEL": "bench",
    "moeflux evaluate --model MODEL --text FILE": "perplexity",
    "moeflux convert --hf-path MODEL --mlx-path OUT": "create quantize",
    "moeflux convert --hf-path MODEL --mlx-path OUT --calibrate default": "awq dwq dynamic_quant imatrix",
    "moeflux convert --hf-path MODEL --mlx-path OUT --calibrate default --method gptq": "gptq",
    "moeflux generate --model MODEL --prompt-cache-dir DIR": "cache_prompt",
    "curl http://127.0.0.1:8080/v1/models, which says of each model of moeflux serve whether it is loaded": "ps",
    "Ctrl-C where moeflux serve runs; its --idle-minutes unloads a model that nobody uses": "stop",
    "hf upload ORG/NAME MODEL": "push upload",
    "ln -s MODEL NAME, of the model's directory, whose name clients see": "cp",
    "hf auth login, or set HF_TOKEN": "signin login",
    "mlx_lm.lora and mlx_lm.fuse, then moeflux convert; this package does not train": "lora fuse train finetune",
}
# Functions of mlx-lm for caches.
REPLACED_NAMES = {
    "can_trim_prompt_cache": "ask is_trimmable() of each cache",
    "load_prompt_cache": "use PromptDirectory with reuse_prefix, or load_state(model, cache, data)",
    "save_prompt_cache": "use PromptDirectory, or save_state(model, cache), which returns bytes",
    "trim_prompt_cache": "call trim(n) of each cache",
}

NOTHING: Sequence[JsonValue] = (None, "", [], {})
LLAMA_SAMPLERS: Sequence[JsonValue] = (
    None,
    "edskypmxt",
    "edkypmxt",
    ["dry", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"],
    ["penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"],
)  # llama.cpp's defaults
# Fields of requests that would change the answer: reason -> field -> its neutral values, of which the message names the
# first.
UNSERVED: Mapping[str, Mapping[str, Sequence[JsonValue]]] = {
    "this server has no such sampler": {
        "typical_p": (1,),
        "tfs_z": (1,),
        "top_n_sigma": (-1, 0),
        "dynatemp_range": (0,),
        "mirostat": (0,),
        "dry_multiplier": (0,),
        "adaptive_target": (-1,),
        "use_beam_search": (False,),
    },
    "the samplers and their order are fixed": {"samplers": LLAMA_SAMPLERS, "min_keep": (0, 1)},
    "send a logit_bias of -100 for each unwanted token": {
        "bad_words": NOTHING,
        "allowed_token_ids": NOTHING,
        "logits_processors": NOTHING,
    },
    "send a schema as response_format, text.format or output_config.format": dict.fromkeys(
        (
            *("grammar", "json_schema", "structured_outputs"),
            *("guided_json", "guided_regex", "guided_choice", "guided_grammar"),
        ),
        NOTHING,
    ),
    "an answer ends with the model's turn, a text of stop, or max_tokens": {
        "ignore_eos": (False,),
        "min_tokens": (0,),
        "n_indent": (0,),
        "t_max_predict_ms": (0, -1),
        "stop_token_ids": NOTHING,
        "include_stop_str_in_output": (False,),
    },
    "reasoning, calls and text are always told apart": {
        "reasoning_format": ("auto", "deepseek", "deepseek-legacy", "parsed"),
        "thinking_forced_open": (False,),
        "parse_tool_calls": (True,),
    },
    "reasoning_effort and enable_thinking set how much the model reasons": {
        "reasoning_budget_tokens": (-1,),
        "thinking_budget_tokens": (-1,),
    },
    "this API gives one answer to a request": {"n": (1,), "n_cmpl": (1,)},
    "every answer is returned; n sets their number": {"best_of": (1,)},
    "the prompt is not repeated": {"echo": (False,)},
    "a prompt is never cut": {"truncate_prompt_tokens": (None, -1)},
    "this server has no adapters": {"adapters": NOTHING, "lora": NOTHING},
}


def _by_word(words_of: Mapping[str, str]) -> dict[str, str]:
    return {word: value for value, words in words_of.items() for word in words.split()}


_REMEDIES, _COMMANDS = _by_word(REMEDIES), _by_word(COMMANDS)


def replaced(**defaults: int | None) -> Replacements:
    """Arguments of one of mlx-lm's functions that are missing here, given with mlx-lm's defaults."""
    return {name: Replaced(_REMEDIES[name].format(**IN_LIBRARY), value) for name, value in defaults.items()}


def remedy_of_option(option: str, known: Collection[str]) -> str | None:
    """What replaces an option in a command that has the options `known`; None: the word is not a foreign one."""
    if "_" in option:
        return None
    word = option.lstrip("-").replace("-", "_")
    same = next((ours for ours, words in RENAMED.items() if ours in known and word in words.split()), None)
    if same is not None:
        return f"use {same}"
    remedy = _REMEDIES.get(word)
    return None if remedy is None else remedy.format(**IN_COMMANDS)


def remedy_of_command(words: list[str]) -> str | None:
    """What is typed here in the place of a command and its arguments; None: the command is not a foreign one."""
    remedy, model = _COMMANDS.get(words[0]), next((word for word in words[1:] if not word.startswith("-")), "MODEL")
    return remedy and remedy.replace("MODEL", model.removeprefix("hf.co/").removeprefix("huggingface.co/"))


LOADING = replaced(
    adapter_path=None,
    get_model_classes=None,
    lazy=False,
    model_config=None,
    return_config=False,
    strict=True,
    tokenizer_config=None,
    trust_remote_code=False,
)
COMPUTING = replaced(max_kv_size=None, stream=None)
BATCHES = {**COMPUTING, **replaced(prefill_batch_size=8)}
GENERATION = {
    **COMPUTING,
    **replaced(
        draft_model=None,
        input_embeddings=None,
        kv_bits=None,
        kv_group_size=64,
        num_draft_tokens=2,
        quantized_kv_start=5000,
    ),
}


def public(
    *passed_to: Callable[..., object], replaced: Replacements | None = None
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorates a public function, whose calls then raise TypeError in its name for wrong arguments. If it passes its
    `**kwargs` to other functions, their parameters appear in its signature:

        def step(model, *, span=None): ...
        @public(step)
        def run(model, **kwargs): ...       # run(model, *, span=None)

    Args:
        passed_to: the other functions.
        replaced: arguments that are refused with their own remedies.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(function)
        own = [one for one in signature.parameters.values() if one.kind is not one.VAR_KEYWORD]
        theirs = {name: one for target in passed_to for name, one in inspect.signature(target).parameters.items()}
        more = [one.replace(kind=one.KEYWORD_ONLY) for name, one in theirs.items() if name not in signature.parameters]
        return with_signature(function, signature.replace(parameters=[*own, *more]), replaced or {})

    return decorate


def with_parameters_of(make: Callable[P, S], replaced: Replacements) -> "Callable[[Callable[[S], R]], Callable[P, R]]":
    """Decorates a function of one value, which then takes the parameters of `make`, the value's class:

        @with_parameters_of(Size, {})       # class Size has width and height
        def area(size): ...                 # area(width, height)

    Args:
        make: a class.
        replaced: arguments that are refused with their own remedies.
    """

    def decorate(use: Callable[[S], R]) -> Callable[P, R]:
        @functools.wraps(use)
        def make_and_use(*args: P.args, **kwargs: P.kwargs) -> R:
            return use(make(*args, **kwargs))

        signature = inspect.signature(make).replace(return_annotation=inspect.signature(use).return_annotation)
        return with_signature(make_and_use, signature, replaced)

    return decorate


def with_signature(function: Callable[P, R], signature: inspect.Signature, replaced: Replacements) -> Callable[P, R]:
    """`function` with this signature, to which the arguments of a call must fit."""
    name = function.__qualname__.removesuffix(".__init__")

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        return function(*args, **_checked(name, signature, replaced, args, kwargs))

    call.__signature__ = signature  # type: ignore[attr-defined]
    call.__annotations__ = {one.name: one.annotation for one in signature.parameters.values()}
    call.__annotations__["return"] = signature.return_annotation
    return call


def _checked(
    function: str,
    signature: inspect.Signature,
    replaced: Replacements,
    args: tuple[Any, ...],
    keywords: Mapping[str, Any],
) -> JsonDict:
    """The keywords of a call, without those of mlx-lm that ask for nothing, such as `max_kv_size=None`.

    Raises:
        TypeError: the arguments do not fit.
    """
    known = {name: value for name, value in keywords.items() if name in signature.parameters}
    for name in keywords.keys() - known:
        if name not in replaced:
            names = [one for one in signature.parameters if one != "self"]
            meant = did_you_mean(name, names) or f"; it takes {', '.join(names)}"
            raise TypeError(f"{function}() has no argument {name!r}{meant}")
        if not _is_equal(keywords[name], replaced[name].default):
            raise TypeError(f"{function}() has no argument {name!r}: {replaced[name].remedy}")
    try:
        signature.bind(*args, **known)
    except TypeError as error:
        raise TypeError(f"{function}(): {error}") from None
    return known


def _is_equal(value: Any, default: Any) -> bool:
    return type(value) is type(default) and value == default  # an array would be compared by element
