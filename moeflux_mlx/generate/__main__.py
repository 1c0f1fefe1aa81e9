"""`python -m moeflux_mlx.generate`: a prompt in, text out, statistics on stderr."""

import argparse
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from typing import cast

from ..cli.opening import add_rank_options, check_store, load_named, local_model, open_store, together
from ..cli.options import (
    add_model_options,
    add_prompt_cache_options,
    add_sampling_options,
    parse_template_config,
    sampling,
)
from ..cli.remarks import beyond_plan, draft_statistics, expert_statistics, why_cut, worth_converting
from ..cli.run import Parser, main_of
from ..cli.terminal import INTERRUPTED, Interruption, ProgressLine, note, peak_memory_gb, unsafe_letters
from ..driving.generation import GenerationResponse, within_limit
from ..driving.prompt import places_of, prompt_with_images, read_images
from ..driving.session import AnswerOptions, Session
from ..errors import RequestError
from ..files import JsonDict
from ..planning.awake import Awake
from ..text.boundaries import Rendering
from ..text.chat_template import with_places
from ..text.tokenizer import TokenizerWrapper

DEFAULT_PROMPT = "Tell me a story about Mira, who can talk to owls."
WORTH_SAYING = 32  # tokens out of reach: two prompts of one template always share a few


def run(options: argparse.Namespace) -> int:
    prompt = read_prompt(options.words, options.prompt)
    template_config = parse_template_config(options.chat_template_config)
    answer_options = sampling(options)
    check_store(options)
    engine = load_named(options, local_model(options))
    model, tokenizer = engine.model, engine.tokenizer
    generation = answer_options(tokenizer)
    store = open_store(options, engine)
    images = read_images(options.image, model) if options.image else []
    asked = encode(tokenizer, prompt, options, template_config)
    tokens: Sequence[int] = prompt_with_images(asked, images, model) if images else asked
    if options.verbose:
        note(f"prompt tokens: {tokens}")
    limit = model.args.max_position_embeddings
    if len(tokens) >= limit:
        note(f"warning: the prompt has {len(tokens)} tokens and the model was made for {limit}")
    else:
        generation["max_tokens"] = within_limit(model.args, len(tokens), generation["max_tokens"])
        if warning := beyond_plan(engine, len(tokens)):
            note(warning)
    session = engine.session(store=store)
    boundaries = []
    if options.prompt_cache_dir is not None and options.system_prompt is not None and not options.ignore_chat_template:
        shared = Rendering(tokenizer, template_config).before_question(messages_of(prompt, options), asked)
        boundaries = [places_of(tokens)[shared], len(tokens) - 1]
    start = time.perf_counter()
    code = stream(session, tokens, boundaries, generation, options.verbose)
    if advice := worth_converting(engine, time.perf_counter() - start):
        note(advice)
    return code


def stream(
    session: Session, tokens: Sequence[int], boundaries: list[int], generation: AnswerOptions, verbose: bool
) -> int:
    """Prints the text as it comes, then the statistics, also after Ctrl-C."""
    progress = ProgressLine("prompt")
    last, code, dropped = None, 0, unsafe_letters(sys.stdout)
    with Interruption(at_once=True) as interruption, Awake():

        def update(done: int, total: int) -> None:
            progress.update(done, total)
            interruption.check()

        responses = session.respond(tokens, boundaries=boundaries, prompt_progress_callback=update, **generation)
        try:
            with closing(responses):
                for last in responses:
                    progress.close()
                    print(last.text.translate(dropped), end="", flush=True)
                    interruption.check()
        except KeyboardInterrupt:
            code = INTERRUPTED
        finally:
            progress.close()
    print(flush=True)
    print_statistics(last, session, verbose)
    return code


def read_prompt(words: list[str], option: str | None) -> str:
    """The prompt, in words or in the option, or all of stdin where that is '-'."""
    if words and option is not None:
        more = "; --verbose takes no value here" if words[0] in ("True", "False") else ""
        raise RequestError(
            f"the prompt is given twice, as {' '.join(words)!r} and with --prompt; leave one of them out{more}"
        )
    value = " ".join(words) if words else DEFAULT_PROMPT if option is None else option
    if value == "-":
        try:
            value = sys.stdin.buffer.read().decode("utf-8")
        except UnicodeDecodeError as error:
            raise RequestError(f"the prompt on stdin is not UTF-8: byte {error.start} is invalid") from None
    if not value.strip():
        raise RequestError("the prompt is empty; give some text, or --prompt - and text on stdin")
    return value


def encode(
    tokenizer: TokenizerWrapper, prompt: str, options: argparse.Namespace, template_config: JsonDict
) -> list[int]:
    """Token ids of the prompt, through the chat template unless it is ignored."""
    if options.ignore_chat_template:
        return tokenizer.encode(prompt)
    messages = messages_of(prompt, options)
    return cast(list[int], tokenizer.apply_chat_template(messages, add_generation_prompt=True, **template_config))


def messages_of(prompt: str, options: argparse.Namespace) -> list[JsonDict]:
    messages: list[JsonDict] = [{"role": "user", "content": with_places(prompt, len(options.image))}]
    if options.system_prompt is not None:
        messages.insert(0, {"role": "system", "content": options.system_prompt})
    return messages


def print_statistics(last: GenerationResponse | None, session: Session, verbose: bool) -> None:
    if session.save_error is not None:
        note(f"warning: the prompt was not saved: {session.save_error}")
    if last is None:
        return
    experts, reuse = session.model.experts, session.reuse
    assert experts is not None  # as in every model that was loaded
    if session.store is not None:
        note(f"prompt cache: {reuse.disk} of {last.prompt_tokens} tokens")
    if reuse.out_of_reach >= WORTH_SAYING:
        note(
            f"prompt cache: {reuse.out_of_reach} more tokens match a saved prompt, but this model's "
            "state can be reused only where it was kept: at the end of a prompt and of --system-prompt; "
            "put the text that prompts share into --system-prompt"
        )
    if reuse.computed < reuse.prompt:
        waited = f"{session.first_token_seconds:.2f} s"
        note(f"prompt: {reuse.prompt} tokens, {reuse.computed} of them computed, first token after {waited}")
    else:
        note(f"prompt: {last.prompt_tokens} tokens, {last.prompt_tps:.1f} tokens-per-sec")
    if verbose and session.prompt_bytes:
        note(f"prompt: {session.prompt_bytes / 1e9:.3f} GB of experts read in {session.first_token_seconds:.2f} s")
    note(f"generation: {last.generation_tokens} tokens, {last.generation_tps:.1f} tokens-per-sec")
    if last.finish_reason == "length":
        note(why_cut(session.model.args, last.prompt_tokens, last.generation_tokens))
    arrays = f"{last.peak_memory:.3f} GB of it MLX's arrays"
    note(f"peak memory: {peak_memory_gb():.3f} GB with pages of mapped files, {arrays}")
    for line in [*(draft_statistics(session.model.drafting) if verbose else []), *expert_statistics(experts, verbose)]:
        note(line)
    if verbose and last.expert_bytes_per_token:
        note(f"expert I/O: {last.expert_bytes_per_token / 1e6:.1f} MB a token, hit rate {last.expert_hit_rate:.1%}")


def parser() -> argparse.ArgumentParser:
    made = Parser(
        "generate",
        "Generate text with a Mixture-of-Experts model.",
    )
    add = made.add_argument_group("prompt").add_argument
    add("words", nargs="*", metavar="PROMPT", help=f"the user's message (default: {DEFAULT_PROMPT!r})")
    add("--prompt", "-p", metavar="TEXT", help="the same; '-' reads stdin")
    add("--image", nargs="+", default=(), metavar="FILE", help="images, placed before the prompt")
    add("--system-prompt", metavar="TEXT", help="system message for the chat template")
    add("--ignore-chat-template", action="store_true", help="give the prompt to the model without a template")
    made.add_argument(
        "--verbose", action="store_true", help="also print the prompt's tokens, the time to load and details of I/O"
    )
    add_sampling_options(made)
    add_model_options(made)
    add_rank_options(made)
    add_prompt_cache_options(made)
    return made


main = main_of(together(run), parser)


if __name__ == "__main__":
    sys.exit(main())
