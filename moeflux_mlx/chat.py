"""`python -m moeflux_mlx.chat`: a conversation with a model, in a terminal or through pipes."""

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

from .cli.opening import add_rank_options, check_store, load_named, local_model, open_store, together
from .cli.options import (
    add_model_options,
    add_prompt_cache_options,
    add_sampling_options,
    file_to_write,
    parse_template_config,
    sampling,
)
from .cli.remarks import beyond_plan, draft_statistics, expert_statistics, why_cut
from .cli.run import Parser, main_of
from .cli.terminal import Interruption, ProgressLine, WordWrap, note, unsafe_letters
from .driving.conversation import Conversation
from .driving.session import AnswerOptions
from .errors import MoefluxError, RequestError, TokenizerError
from .files import user_path
from .opening.engine import Engine
from .planning.awake import Awake
from .vision.sources import bytes_of

HELP = """\
/reset          forget the conversation (the system message stays)
/system [TEXT]  set the system message; without TEXT, remove it
/image FILE     send an image with the next message; several are sent together
/save FILE      save the conversation and the model's state
/load FILE      go on with a saved conversation
/stats          tokens, speed and expert reads of the last answer
/help           this list
/exit           leave (also Ctrl-D)
A message that begins with / is written with two. Alt-Enter begins a new line. Ctrl-C stops an answer."""


def run(options: argparse.Namespace) -> int:
    template_config = parse_template_config(options.chat_template_config)
    answer_options = sampling(options)
    check_store(options)
    history = None if options.history_file is None else file_to_write("--history-file", options.history_file)
    greeting = f"{options.model or 'The demo model'} is ready. /help lists the commands."
    engine = load_named(options, local_model(options), greeting)
    tokenizer = engine.tokenizer
    if tokenizer.chat_template is None:
        raise TokenizerError("the model has no chat template; add chat_template.jinja to its directory")
    session = engine.session(store=open_store(options, engine))
    conversation = Conversation(session, tokenizer, template_config, options.system_prompt)
    chat = Chat(
        conversation, engine, answer_options(tokenizer), hide_thinking=options.hide_thinking, verbose=options.verbose
    )
    for line in lines(history):
        if not chat.take(line):
            break
    return 0


def lines(history_file: Path | None) -> Iterator[str]:
    """Yields the user's lines, edited in a terminal or from stdin."""
    if not sys.stdin.isatty():
        sys.stdin.reconfigure(errors="surrogateescape")  # type: ignore[union-attr]
        yield from (line.rstrip("\n") for line in sys.stdin)
        return
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import WordCompleter
    from prompt_toolkit.history import FileHistory, History, InMemoryHistory
    from prompt_toolkit.output import create_output

    history: History = InMemoryHistory() if history_file is None else FileHistory(str(history_file))
    words = [line.split()[0] for line in HELP.splitlines() if line.startswith("/")]
    prompt: PromptSession[str] = PromptSession(
        history=history,
        completer=WordCompleter(words, sentence=True),
        complete_while_typing=False,
        key_bindings=_newline_keys(),
        output=create_output(sys.stderr),
    )
    while True:
        try:
            yield prompt.prompt("> ")
        except KeyboardInterrupt:
            note("Ctrl-D or /exit leaves.")
        except EOFError:
            return


def _newline_keys() -> Any:
    from prompt_toolkit.key_binding import KeyBindings

    keys = KeyBindings()
    keys.add("escape", "enter")(lambda event: event.current_buffer.insert_text("\n"))
    return keys


class Chat:
    """Carries out the lines a user enters, one at a time."""

    def __init__(
        self,
        conversation: Conversation,
        engine: Engine,
        generation: AnswerOptions,
        *,
        hide_thinking: bool = False,
        verbose: bool = False,
    ):
        self.conversation, self.engine, self.generation = conversation, engine, generation
        self.hide_thinking, self.verbose = hide_thinking, verbose
        self.has_outgrown_plan = False
        self.images: list[bytes] = []  # images for the next message
        self.commands: dict[str, Callable[[str], None]] = {
            "/reset": self.reset,
            "/system": self.system,
            "/image": self.image,
            "/save": self.save,
            "/load": self.load,
            "/stats": self.stats,
            "/help": lambda argument: note(HELP),
        }

    def take(self, line: str) -> bool:
        """Does what the line says; False when it ends the chat. Errors are printed, and the chat goes on."""
        command, _, argument = line.strip().partition(" ")
        if command in ("/exit", "/quit"):
            return False
        try:
            if command.startswith("/") and not command.startswith("//"):
                self._command(command, argument.strip())
            elif line.strip():
                self.answer(line[1:] if command.startswith("//") else line)
        except MoefluxError as error:
            note(f"error: {error}")
        return True

    def _command(self, name: str, argument: str) -> None:
        if name not in self.commands:
            raise RequestError(f"no command {name}; /help lists them; write // for a message that begins with /")
        self.commands[name](argument)

    def answer(self, text: str) -> None:
        """Prints the model's answer as it comes; Ctrl-C stops it."""
        progress, show = ProgressLine("prompt"), Display(sys.stdout, self.hide_thinking)
        session = self.conversation.session
        with Interruption() as interruption, Awake():

            def update(done: int, total: int) -> None:
                self._note_plan(total)
                progress.update(done, total)
                if interruption.wanted:
                    raise KeyboardInterrupt

            images, self.images = self.images, []
            pieces = self.conversation.ask(text, images, prompt_progress_callback=update, **self.generation)
            try:
                with contextlib.closing(pieces):
                    for piece, is_thinking in pieces:
                        progress.close()
                        show.piece(piece, is_thinking)
                        if interruption.wanted:
                            break
            except KeyboardInterrupt:
                pass
            finally:
                progress.close()
                show.finish()
        if interruption.wanted:
            note("(stopped)")
        elif session.last is not None and session.last.finish_reason == "length":
            why = why_cut(session.model.args, session.last.prompt_tokens, session.last.generation_tokens)
            note(f"({why})")
        if session.save_error is not None:
            note(f"warning: the prompt was not saved: {session.save_error}")
        if self.verbose:
            self.stats("")

    def _note_plan(self, tokens: int) -> None:
        """Prints once that the conversation has become longer than planned."""
        warning = beyond_plan(self.engine, tokens)
        if warning and not self.has_outgrown_plan:
            self.has_outgrown_plan = True
            note(warning)

    def reset(self, argument: str) -> None:
        self.conversation.turns, self.has_outgrown_plan, self.images = [], False, []
        note("The conversation is forgotten.")

    def system(self, argument: str) -> None:
        self.conversation.system = argument or None
        note("The system message is set." if argument else "The system message is removed.")

    def image(self, argument: str) -> None:
        vision, file = self.engine.model.vision, _file(argument, "/image")
        if vision is not None:
            vision.image(file)  # so that one that cannot be read is refused now
        self.images.append(bytes_of(file))
        note(f"The next message has {len(self.images)} {'image' if len(self.images) == 1 else 'images'}.")

    def save(self, argument: str) -> None:
        self.conversation.save(_file(argument, "/save"), self.engine.fingerprint)
        note(f"Saved {len(self.conversation.turns)} messages in {argument}.")

    def load(self, argument: str) -> None:
        self.conversation.load(_file(argument, "/load"), self.engine.fingerprint)
        note(f"Loaded {len(self.conversation.turns)} messages from {argument}.")

    def stats(self, argument: str) -> None:
        session = self.conversation.session
        reuse, experts = session.reuse, self.engine.experts
        note(f"context: {len(session.tokens)} of {session.model.args.max_position_embeddings} tokens")
        note(
            f"last prompt: {reuse.prompt} tokens, {reuse.memory} known, {reuse.disk} from disk, "
            f"{reuse.computed} computed; first token after {session.first_token_seconds:.2f} s"
        )
        if session.last is not None:
            last = session.last
            note(f"last answer: {last.generation_tokens} tokens, {last.generation_tps:.1f} tokens-per-sec")
        note(f"kept states: {len(session.points.positions)}, {session.points.nbytes / 1e9:.3f} GB")
        for line in [*draft_statistics(session.model.drafting), *expert_statistics(experts, verbose=True)]:
            note(line)


def _file(argument: str, command: str) -> Path:
    if not argument:
        raise RequestError(f"{command} needs the name of a file")
    return user_path(argument)


class Display:
    """Writes an answer to `out`, reasoning dimmed on a terminal, between its tags elsewhere, or not at all."""

    def __init__(self, out: TextIO, hide_thinking: bool):
        self.out, self.hide = out, hide_thinking
        self.dropped = unsafe_letters(out)
        self.wrapped = WordWrap().feed if out.isatty() else str
        self.marks = ("\033[2m", "\033[0m\n") if out.isatty() else ("<think>", "</think>\n")
        self.thinking = False

    def piece(self, text: str, is_thinking: bool) -> None:
        if self.hide:
            text = "" if is_thinking else text
        elif is_thinking != self.thinking:
            self._switch(is_thinking)
        self.out.write(self.wrapped(text.translate(self.dropped)))
        self.out.flush()

    def finish(self) -> None:
        """Ends the line."""
        if self.thinking:
            self._switch(False)
        self.out.write("\n")
        self.out.flush()

    def _switch(self, is_thinking: bool) -> None:
        if not is_thinking:
            self.wrapped("\n")  # its mark ends the line
        self.out.write(self.marks[0] if is_thinking else self.marks[1])
        self.thinking = is_thinking


def parser() -> argparse.ArgumentParser:
    made = Parser(
        "chat",
        "Chat with a Mixture-of-Experts model. In the chat, /help lists the commands.",
    )
    add = made.add_argument_group("chat").add_argument
    add("--system-prompt", metavar="TEXT", help="system message")
    add("--hide-thinking", action="store_true", help="do not show the model's reasoning")
    add("--history-file", metavar="FILE", help="save typed lines in FILE; default: keep them until the chat ends")
    add("--verbose", action="store_true", help="also print the time to load and statistics of every answer")
    add_sampling_options(made)
    add_model_options(made)
    add_rank_options(made)
    add_prompt_cache_options(made)
    made.set_defaults(max_tokens=4096)
    return made


main = main_of(together(run), parser)


if __name__ == "__main__":
    sys.exit(main())
