"""`python -m moeflux_mlx.chat`: a conversation in the terminal, or line by line from a pipe.

Answers go to stdout, everything else to stderr. Each turn renders the whole conversation through the
model's template and computes only what the session does not know yet.
"""

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from .cli.command import (
    Interruption,
    Progress,
    add_model_options,
    add_prompt_cache_options,
    add_sampling_options,
    beyond_plan,
    execute,
    expert_statistics,
    fingerprint_of,
    load_named,
    note,
    open_store,
    parse_template_config,
    sampling,
    unsafe_letters,
    why_cut,
    within_limit,
)
from .errors import MoefluxError, PromptCacheError, RequestError, TokenizerError
from .files import user_path

if TYPE_CHECKING:
    from .engine.session import Session
    from .text.tokenizer import TokenizerWrapper

HELP = """\
/reset          forget the conversation (the system message stays)
/system [TEXT]  set the system message; without TEXT, remove it
/save FILE      save the conversation and the model's state
/load FILE      go on with a saved conversation
/stats          tokens, speed and expert reads of the last answer
/help           this list
/exit           leave (also Ctrl-D)
A message that begins with / is written with two. Alt-Enter begins a new line. Ctrl-C stops an answer."""

Message = dict[str, str]


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m moeflux_mlx.chat",
        description="Chat with a packed Mixture-of-Experts model. /help lists the commands inside.",
    )
    add = made.add_argument_group("chat").add_argument
    add("--system-prompt", help="system message")
    add("--hide-thinking", action="store_true", help="do not show the model's reasoning")
    add("--history-file", metavar="FILE", help="remember typed lines in FILE (default: only while running)")
    add("--verbose", action="store_true", help="also print the time to load and statistics of every answer")
    add_sampling_options(made)
    add_model_options(made)
    add_prompt_cache_options(made, with_file=False)
    made.set_defaults(max_tokens=4096)
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    return execute(run, parser().parse_args(argv))


def run(options: argparse.Namespace) -> int:
    from .engine.session import Session

    template_config = parse_template_config(options.chat_template_config)
    generation = sampling(options)
    path, model, tokenizer = load_named(options)
    if tokenizer.chat_template is None:
        raise TokenizerError("the model has no chat template; add chat_template.jinja to its directory")
    store = open_store(options, path, model)
    session = Session(model, tokenizer, store=store, prefill_step_size=options.prefill_step_size)
    conversation = Conversation(session, tokenizer, template_config, options.system_prompt)
    chat = Chat(conversation, path, generation, hide_thinking=options.hide_thinking, verbose=options.verbose)
    note("/help lists the commands.")
    for line in lines(options.history_file):
        if not chat.take(line):
            break
    return 0


def lines(history_file: str | None) -> Iterator[str]:
    """What the user enters, edited in a terminal, or the lines of stdin."""
    if not sys.stdin.isatty():
        sys.stdin.reconfigure(errors="surrogateescape")  # type: ignore[union-attr]
        yield from (line.rstrip("\n") for line in sys.stdin)
        return
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import WordCompleter
    from prompt_toolkit.history import FileHistory, History, InMemoryHistory
    from prompt_toolkit.output import create_output

    history: History = InMemoryHistory() if history_file is None else FileHistory(str(user_path(history_file)))
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


class Conversation:
    """Messages, and the session that knows the tokens of what has been said."""

    def __init__(
        self,
        session: "Session",
        tokenizer: "TokenizerWrapper",
        template_config: dict[str, Any],
        system: str | None = None,
    ):
        from .text.boundaries import Rendering

        self.session, self.tokenizer = session, tokenizer
        self.rendering = Rendering(tokenizer, template_config, self._encode)
        self.system = system
        self.turns: list[Message] = []

    @property
    def messages(self) -> list[Message]:
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*system, *self.turns]

    def ask(self, text: str, **generation: Any) -> Iterator[tuple[str, bool]]:
        """Yields the answer in pieces (text, whether it is reasoning).

        What was answered is part of the conversation also when the iterator is closed or fails; a message
        without any answer is taken back.
        """
        from .text.channels import ThinkingSplitter, opens_thinking

        self.turns.append({"role": "user", "content": text})
        said: dict[bool, str] = {False: "", True: ""}
        try:
            rendered = self.rendering.text(self.messages)
            prompt = self._encode(rendered)
            self._check_room(prompt)
            asked = generation.get("max_tokens", -1)
            generation["max_tokens"] = within_limit(self.session.model, len(prompt), asked)
            end = self.rendering.before_answer(self.messages, prompt)
            splitter = ThinkingSplitter(opens_thinking(rendered))
            for response in self.session.respond(prompt, boundaries=[end], **generation):
                pieces = splitter.feed(response.text)
                for piece, is_thinking in pieces + (splitter.finish() if response.finish_reason else []):
                    said[is_thinking] += piece
                    yield piece, is_thinking
        finally:
            self._keep(said[False], said[True])

    def _keep(self, answer: str, thinking: str) -> None:
        if not answer and not thinking:
            self.turns.pop()
            return
        message = {"role": "assistant", "content": answer.lstrip("\n")}
        if thinking:
            message["reasoning_content"] = thinking.strip("\n")
        self.turns.append(message)

    def save(self, path: Path, fingerprint: Any) -> None:
        """Raises PromptCacheError: among others, `path` is something else's file. SnapshotError."""
        from .state.prompt_file import read_prompt_header

        if path.exists():
            read_prompt_header(path)
        if self.turns:
            # A recurrent state of more than the next prompt begins with would be of no use to it.
            self.session.rewind(self.rendering.after_answer(self.messages, self.session.tokens))
        self.session.save(path, fingerprint, {"system": self.system, "turns": self.turns})

    def load(self, path: Path, fingerprint: Any) -> None:
        """Raises PromptCacheError: the file is damaged, foreign, or holds no conversation."""
        from .state.prompt_file import read_prompt_header

        extra = read_prompt_header(path).extra
        system, turns = extra.get("system"), extra.get("turns")
        if not isinstance(system, str | None) or not isinstance(turns, list) or not _are_messages(turns):
            raise PromptCacheError(f"{path} holds no conversation; give a file made by /save")
        self.session.load(path, fingerprint)
        self.system, self.turns = system, turns

    def _encode(self, rendered: str) -> list[int]:
        """Tokens of a rendered conversation: those that the session knows, as far as they spell its beginning.

        A model may write a text in other tokens than the tokenizer does; encoded anew, it would be computed anew.
        Where the texts part, tokens are known up to the last special one before: no other depends on what follows.
        """
        known, specials = self.session.tokens, self.tokenizer.all_special_ids
        speller, spelt, kept, kept_letters = self.tokenizer.detokenizer, 0, 0, 0
        for count, token in enumerate(known, start=1):
            speller.add_token(token)
            piece = speller.last_segment
            if not rendered.startswith(piece, spelt):
                break
            spelt += len(piece)
            if token in specials or count == len(known):
                kept, kept_letters = count, spelt
        return known[:kept] + self.tokenizer.encode(rendered[kept_letters:], add_special_tokens=False)

    def _check_room(self, prompt: list[int]) -> None:
        """Raises RequestError: the model takes no token after `prompt`."""
        limit = self.session.model.args.max_position_embeddings
        if len(prompt) >= limit:
            raise RequestError(
                f"the conversation has {len(prompt)} tokens and the model takes {limit}; begin anew with /reset"
            )


def _are_messages(turns: list[Any]) -> bool:
    """Whether all are dicts of strings with at least role and content."""
    dicts = [turn for turn in turns if isinstance(turn, dict) and {"role", "content"} <= set(turn)]
    return len(dicts) == len(turns) and all(isinstance(v, str) for turn in dicts for v in turn.values())


class Chat:
    """Carries out the lines a user enters, one at a time."""

    def __init__(
        self,
        conversation: Conversation,
        path: Path,
        generation: dict[str, Any],
        *,
        hide_thinking: bool = False,
        verbose: bool = False,
    ):
        self.conversation, self.path, self.generation = conversation, path, generation
        self.hide_thinking, self.verbose = hide_thinking, verbose
        self.has_outgrown_plan = False
        self.commands: dict[str, Callable[[str], None]] = {
            "/reset": self.reset,
            "/system": self.system,
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
        from .engine.session import Stopped

        progress, show = Progress("prompt"), Display(sys.stdout, self.hide_thinking)
        session = self.conversation.session
        with Interruption() as interruption:

            def update(done: int, total: int) -> None:
                self._note_plan(total)
                progress.update(done, total)
                if interruption.wanted:
                    raise Stopped

            pieces = self.conversation.ask(text, prompt_progress_callback=update, **self.generation)
            try:
                with contextlib.closing(pieces):  # type: ignore[type-var]
                    for piece, is_thinking in pieces:
                        progress.close()
                        show.piece(piece, is_thinking)
                        if interruption.wanted:
                            break
            except Stopped:
                pass
            finally:
                progress.close()
                show.finish()
        if interruption.wanted:
            note("(stopped)")
        elif session.last is not None and session.last.finish_reason == "length":
            why = why_cut(session.model, session.last.prompt_tokens, session.last.generation_tokens)
            note(f"({why})")
        if session.save_error is not None:
            note(f"warning: the prompt was not saved: {session.save_error}")
        if self.verbose:
            self.stats("")

    def _note_plan(self, tokens: int) -> None:
        """Says once that the conversation has outgrown what memory was planned for."""
        warning = beyond_plan(self.conversation.session.model, tokens)
        if warning and not self.has_outgrown_plan:
            self.has_outgrown_plan = True
            note(warning)

    def reset(self, argument: str) -> None:
        self.conversation.turns, self.has_outgrown_plan = [], False
        note("The conversation is forgotten.")

    def system(self, argument: str) -> None:
        self.conversation.system = argument or None
        note("The system message is set." if argument else "The system message is removed.")

    def save(self, argument: str) -> None:
        self.conversation.save(_file(argument, "/save"), self._fingerprint())
        note(f"Saved {len(self.conversation.turns)} messages in {argument}.")

    def load(self, argument: str) -> None:
        self.conversation.load(_file(argument, "/load"), self._fingerprint())
        note(f"Loaded {len(self.conversation.turns)} messages from {argument}.")

    def stats(self, argument: str) -> None:
        session = self.conversation.session
        reuse, experts = session.reuse, session.model.experts
        note(f"context: {len(session.tokens)} of {session.model.args.max_position_embeddings} tokens")
        note(
            f"last prompt: {reuse.prompt} tokens, {reuse.memory} known, {reuse.disk} from disk, "
            f"{reuse.computed} computed; first token after {session.first_token_seconds:.2f} s"
        )
        if session.last is not None:
            last = session.last
            note(f"last answer: {last.generation_tokens} tokens, {last.generation_tps:.1f} tokens-per-sec")
        note(f"kept states: {len(session.points.positions)}, {session.points.nbytes / 1e9:.3f} GB")
        for line in expert_statistics(experts, verbose=True):
            note(line)

    def _fingerprint(self) -> Any:
        return fingerprint_of(self.path, self.conversation.session.model)


def _file(argument: str, command: str) -> Path:
    if not argument:
        raise RequestError(f"{command} needs the name of a file")
    return user_path(argument)


class Display:
    """Writes an answer to `out`, reasoning dimmed on a terminal, between its tags elsewhere, or not at all."""

    def __init__(self, out: TextIO, hide_thinking: bool):
        self.out, self.hide = out, hide_thinking
        self.dropped = unsafe_letters(out)
        self.marks = ("\033[2m", "\033[0m\n") if out.isatty() else ("<think>", "</think>\n")
        self.thinking = False

    def piece(self, text: str, is_thinking: bool) -> None:
        if self.hide:
            text = "" if is_thinking else text
        elif is_thinking != self.thinking:
            self._switch(is_thinking)
        self.out.write(text.translate(self.dropped))
        self.out.flush()

    def finish(self) -> None:
        """Ends the line."""
        if self.thinking:
            self._switch(False)
        self.out.write("\n")
        self.out.flush()

    def _switch(self, is_thinking: bool) -> None:
        self.out.write(self.marks[0] if is_thinking else self.marks[1])
        self.thinking = is_thinking


if __name__ == "__main__":
    sys.exit(main())
