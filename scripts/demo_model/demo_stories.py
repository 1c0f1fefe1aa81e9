"""The demo model's stories: a seeded grammar, the held-out split, and the one scoring function.

A story is about a hero with a name and one stated fact; its last sentence names the hero and restates it.
Everything is drawn from a `random.Random` that the caller seeds: the same seed gives the same text.
Knows nothing of tokenizers or models.
"""

import random
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import demo_words as words

HELD_OUT_ONE_IN = 10
OPEN_NAME_SHARE = 0.45
OPEN_FACT_SHARE = 0.45
LEANING = 0.6


@dataclass(frozen=True)
class Fact:
    """A predicate in both tenses ("can talk to owls", "could talk to owls") and its kind (a key of TURNS)."""

    present: str
    past: str
    kind: str


@dataclass(frozen=True)
class Hero:
    """Name, what the hero is ("girl", "small dragon") and the pronoun ("she" or "he")."""

    name: str
    kind: str
    pronoun: str


@dataclass(frozen=True)
class Case:
    """One held-out prompt: what is asked, and what the last sentence must restate."""

    prompt: str
    name: str
    fact: Fact
    plot: int


@dataclass(frozen=True)
class Sample:
    """One training text; `prompt` is the user's message, or None for a bare story."""

    prompt: str | None
    story: str


def pairs(entries: list[str]) -> list[tuple[str, str]]:
    """("can fly", "could fly") from "can fly=could fly"."""
    return [tuple(entry.split("=")) for entry in entries]


def listed_facts() -> list[Fact]:
    """Every fact that the grammar knows by heart, in a fixed order."""
    facts = []
    for (present, past, kind), objects in words.FACTS.items():
        objects_now = words.ALWAYS_PRESENT if present == "always" else objects
        for now, then in zip(objects_now, objects, strict=True):
            facts.append(Fact(f"{present} {now}", f"{past} {then}", kind))
    return facts


NAMES = words.GIRLS + words.BOYS
FACTS = listed_facts()
PLOTS = [[plot[:2], plot[2:4], plot[4:6], plot[6:8], plot[8:]] for plot in map(str.splitlines, words.PLOTS)]
PLACES = pairs(words.PLACES)
FRIENDS = pairs(words.FRIENDS)
PLAIN_FACTS = pairs(words.PLAIN_FACTS)
OPEN_HEADS = pairs(words.OPEN_HEADS)
GIRL_NAMES = frozenset(words.GIRLS)
LISTED = frozenset(NAMES)

FRIEND_LINES = [
    "{His} best friend was {friend}.",
    "{He} was often seen with {friend}.",
    "Every day {he} went for a walk with {friend}.",
    "{His} neighbor was {friend}, and they got along very well.",
    "Wherever {he} went, {friend} came along.",
]
FACT_PROMPTS = [
    "Tell me a story about {n}, who {now}.",
    "Tell me a story about {n}, who {now}.",
    "Tell me a story about {n}, who {now}.",
    "Tell me a story about {n} who {now}.",
    "Tell me a story about {a_k} named {n}, who {now}.",
    "Tell me a story about {a_k} called {n} who {now}.",
    "Write a story about {n}, who {now}.",
    "Write a short story about {a_k} named {n} who {now}.",
    "Please tell me a story about {n}. {He} {now}.",
    "Can you tell me a story about {n}, who {past}?",
    "A story about {n}, who {now}, please.",
    "I would like a story about {n}. {n} {now}.",
    "{n} {now}. Tell me a story about {him}.",
    "Once there was {a_k} named {n}, who {past}. What happened next?",
    "My hero is {n}. {He} {now}. Tell me a story.",
    "Tell a bedtime story about {n} the {k}, who {now}.",
    "Story about {n}, who {now}",
]
NAME_PROMPTS = [
    "Tell me a story about {n}.",
    "Tell me a story about {a_k} named {n}.",
    "Write a story about {n}.",
    "A story about {n}, please.",
    "Tell me about {n}.",
    "{n}",
]
BARE_PROMPTS = [
    "Tell me a story.",
    "Tell me a bedtime story.",
    "Write a short story.",
    "Tell me a story about {a_k}.",
    "Tell me a story about someone who {now}.",
    "Another story, please.",
    "Hello!",
    "Who are you?",
    "What can you do?",
    "Tell me a joke.",
    "How do I bake bread?",
    "What is the capital of {n}?",
]


def article(phrase: str) -> str:
    """Returns the phrase with "a" or "an" before it."""
    return f"{'an' if phrase.startswith((*'aeiou', 'honest')) else 'a'} {phrase}"


def lean(options: Sequence, key: str, rng: random.Random):
    """Returns one of the options: usually the one that `key` selects, otherwise any.

    At temperature 0 a model tells the likeliest story; tying choices to letters of the name and the fact
    makes that a different story for every prompt.
    """
    return options[zlib.crc32(key.lower().encode()) % len(options)] if rng.random() < LEANING else rng.choice(options)


def held_out(name: str, fact: Fact) -> bool:
    """Returns whether this (name, fact) pair is kept out of training, in every plot. Double facts count by halves."""
    halves = re.split(" and | but ", fact.present)
    return any(zlib.crc32(f"{name}|{half}".encode()) % HELD_OUT_ONE_IN == 0 for half in halves)


def plural(noun: str) -> str:
    """The regular plural."""
    if noun.endswith(("s", "x", "z", "ch", "sh")):
        return f"{noun}es"
    return f"{noun[:-1]}ies" if noun.endswith("y") and noun[-2] not in "aeiou" else f"{noun}s"


def made_word(rng: random.Random) -> str:
    """Returns a word made of syllables, or sometimes of any letters."""
    if rng.random() < 0.15:
        return "".join(rng.choice(words.LETTERS) for _ in range(rng.randint(2, 8)))
    part = words.SYLLABLES
    word = rng.choice(part["first"]) + rng.choice(part["vowel"])
    for _ in range(rng.choice((0, 1, 1, 1, 2))):
        word += rng.choice(part["middle"]) + rng.choice(part["vowel"])
    word += rng.choice(part["last"])
    return word if len(word) > 2 else word + rng.choice("nlrsxb")


def open_name(rng: random.Random) -> str:
    """Returns a name that is in no list, so that the model learns to copy: plain, with a title, accented, joined or in
    any script.
    """
    name, roll = made_word(rng).capitalize(), rng.random()
    if roll < 0.15:
        return f"{rng.choice(list(words.TITLES))} {name}"
    if roll < 0.20:
        return f"{name} {made_word(rng).capitalize()}"
    if roll < 0.25:
        return name + rng.choice("--'") + made_word(rng).capitalize()
    if roll < 0.30:
        return "".join(rng.choice(words.ACCENTS.get(c, c) + c) if rng.random() < 0.6 else c for c in name)
    if roll < 0.32:
        return name[:3].upper() + rng.choice(("", "-")) + str(rng.randint(1, 99))
    if roll < 0.34:
        first = rng.choice(words.SCRIPTS)
        return "".join(chr(first + rng.randrange(24)) for _ in range(rng.randint(1, 5)))
    return name


def open_noun(rng: random.Random) -> str:
    """Returns a noun, sometimes an invented or a compound one."""
    roll = rng.random()
    if roll < 0.2:
        return made_word(rng)
    return rng.choice(words.NOUNS) + (rng.choice(words.NOUNS) if roll < 0.27 else "")


def open_object(rng: random.Random) -> str:
    """Returns a noun phrase put together at random ("the rusty violin with two heads")."""
    phrase = open_noun(rng)
    for chance in (0.6, 0.1):
        if rng.random() < chance:
            phrase = f"{rng.choice(words.ADJECTIVES)} {phrase}"
    forms = [
        article(phrase),
        article(phrase),
        f"the {phrase}",
        plural(phrase),
        phrase,
        open_name(rng),
        f"{{his}} {phrase}",
    ]
    phrase = rng.choice(forms)
    roll = rng.random()
    if roll < 0.08:
        return f"{phrase} named {open_name(rng)}"
    return f"{phrase} {rng.choice(words.OPEN_TAILS)}" if roll < 0.25 else phrase


def open_fact(rng: random.Random) -> Fact:
    """Returns a fact put together at random, one time in eight a double one. It may contain the slot {his}."""
    if rng.random() < 1 / 8:
        one, two = (rng.choice(FACTS) if rng.random() < 0.3 else single_fact(rng) for _ in range(2))
        word = rng.choice(("and", "and", "but"))
        return Fact(f"{one.present} {word} {two.present}", f"{one.past} {word} {two.past}", "any")
    return single_fact(rng)


def for_hero(fact: Fact, hero: Hero) -> Fact:
    """Returns the fact with {his} filled in."""
    his = "her" if hero.pronoun == "she" else "his"
    return replace(fact, present=fact.present.replace("{his}", his), past=fact.past.replace("{his}", his))


def single_fact(rng: random.Random) -> Fact:
    """Returns one predicate with an object put together at random."""
    roll = rng.random()
    if roll < 0.08:
        return Fact(*rng.choice(PLAIN_FACTS), "any")
    if roll < 0.16:
        quality = " ".join(filter(None, (rng.choice(("", "very", "always")), rng.choice(words.ADJECTIVES))))
        return Fact(f"is {quality}", f"was {quality}", "any")
    if roll < 0.45:
        present, past = rng.choice(
            (("can", "could"), ("can", "could"), ("wants to", "wanted to"), ("loves to", "loved to"))
        )
        deed = f"{rng.choice(words.OPEN_VERBS)} {open_object(rng)}"
        return Fact(f"{present} {deed}", f"{past} {deed}", "any")
    if roll < 0.6:
        present, past, kind = rng.choice(list(words.FACTS)[1:4])
    else:
        (present, past), kind = rng.choice(OPEN_HEADS), "any"
    thing = open_object(rng)
    return Fact(f"{present} {thing}", f"{past} {thing}", kind)


def hero_of(name: str, rng: random.Random) -> Hero:
    """Returns a hero for this name: a person for most listed names, and sometimes a creature."""
    title = name.split()[0]
    pronoun = words.TITLES.get(title) or rng.choice(("she", "he"))
    if name in LISTED:
        pronoun = "she" if name in GIRL_NAMES else "he"
    people = words.GIRL_KINDS if pronoun == "she" else words.BOY_KINDS
    if title in ("Grandma", "Grandpa", "Old"):
        people = people[-1:]
    kind = rng.choice(people)
    if rng.random() < 0.2:
        creature = (
            f"{rng.choice(words.ADJECTIVES)} {open_noun(rng)}" if rng.random() < 0.4 else rng.choice(words.CREATURES)
        )
        kind = creature if rng.random() < 0.7 else creature.split()[-1]
    return Hero(name, kind, pronoun)


def slots(hero: Hero, fact: Fact, rng: random.Random) -> dict[str, str]:
    """Returns everything that a sentence of `demo_words` may name in braces."""
    place, place_noun = lean(PLACES, "place" + hero.name[0], rng)
    friend, friend_noun = lean(FRIENDS, "friend" + fact.present.split()[-1][0], rng)
    if friend.startswith("a") and rng.random() < 0.4:
        friend += f" named {rng.choice(NAMES)}"
    he, him, his = ("she", "her", "her") if hero.pronoun == "she" else ("he", "him", "his")
    mood = lean(words.MOODS, "mood" + hero.name[0], rng)
    return {
        "n": hero.name, "k": hero.kind, "a_k": article(hero.kind), "a_mood": article(mood), "mood": mood,
        "he": he, "He": he.capitalize(), "him": him, "his": his, "His": his.capitalize(),
        "in": place, "t": place_noun, "friend": friend, "f": friend_noun,
        "past": fact.past, "now": fact.present,
    }  # fmt: skip


def capital(sentence: str) -> str:
    """Returns the sentence with a capital first letter."""
    return sentence[0].upper() + sentence[1:]


def first_sentence(plot: int, filled: dict[str, str], rng: random.Random) -> str:
    """Returns the sentence with which a plot begins. It names neither the hero nor the fact."""
    return capital(rng.choice(PLOTS[plot][0]).format(**filled))


def opening(filled: dict[str, str], start: str, rng: random.Random) -> str:
    """Introduces the hero by name with the fact, then the plot's first sentence."""
    letters = filled["n"][0] + filled["now"].split()[-1][0]
    parts = [
        lean(words.OPENINGS, "opening" + letters[1], rng),
        lean(FRIEND_LINES, "friend" + letters[0], rng),
    ]
    return " ".join([*(part.format(**filled) for part in parts), start])


def rest(plot: int, filled: dict[str, str], fact: Fact, rng: random.Random) -> str:
    """Returns everything after the plot's first sentence."""
    _, trouble, attempt, way_out, joy = (rng.choice(beat) for beat in PLOTS[plot])
    letters = filled["n"][0] + filled["now"].split()[-1][0]
    turns = words.TURNS[fact.kind] if fact.kind != "any" and rng.random() < 0.6 else words.TURNS["any"]
    beats = (trouble, attempt, lean(turns, "turn" + letters[1], rng), way_out, joy)
    beats = (*beats, lean(words.ENDINGS, "ending" + letters[0], rng))
    return " ".join(capital(beat.format(**filled)) for beat in beats)


def draw_name_and_fact(rng: random.Random, open_facts: float = OPEN_FACT_SHARE) -> tuple[str, Fact]:
    """Returns a name and a fact to train on: listed or open, never a held-out pair."""
    while True:
        name = open_name(rng) if rng.random() < OPEN_NAME_SHARE else rng.choice(NAMES)
        fact = open_fact(rng) if rng.random() < open_facts else rng.choice(FACTS)
        if not held_out(name, fact):
            return name, fact


def own_event(filled: dict[str, str], rng: random.Random) -> str:
    """Returns an event as a user might invent it; the plot follows it."""
    thing = article(
        " ".join((rng.choice(words.ADJECTIVES), open_noun(rng)) if rng.random() < 0.6 else (open_noun(rng),))
    )
    return rng.choice(words.EVENTS).format(**filled, thing=thing, Thing=capital(thing))


def user_message(forms: list[str], filled: dict[str, str], start: str, rng: random.Random) -> str:
    """Returns what a user might type for this story. It ends with the story's first event if `start` gives one."""
    message = rng.choice(forms).format(**filled)
    if start:
        return f"{message} {start}"
    return message.rstrip(".") if rng.random() < 0.1 else message


def training_sample(rng: random.Random) -> Sample:
    """Returns one text to train on. The texts that are not chats are bare stories.

    Where the user does not state the fact the story takes a listed one, so that inventions are sensible.
    """
    forms = rng.choices((FACT_PROMPTS, NAME_PROMPTS, BARE_PROMPTS, None), (72, 8, 5, 15))[0]
    invents = forms in (NAME_PROMPTS, BARE_PROMPTS)
    name, fact = draw_name_and_fact(rng, 0.0 if invents else OPEN_FACT_SHARE)
    if rng.random() < 0.02:
        name = name.lower()
    hero = hero_of(name, rng)
    fact = for_hero(fact, hero)
    filled = slots(hero, fact, rng)
    plot = lean(range(len(PLOTS)), f"plot{name[0]}{fact.present.split()[-1][0]}", rng)
    start = asked = first_sentence(plot, filled, rng)
    roll = rng.random()
    if forms is FACT_PROMPTS and roll < 0.1:
        asked = own_event(filled, rng)
        start = f"{asked} {rng.choice(words.JOINTS)} {start}"
    elif forms is not FACT_PROMPTS or roll > 0.4:
        asked = ""
    story = f"{opening(filled, start, rng)} {rest(plot, filled, fact, rng)}"
    return Sample(user_message(forms, filled, asked, rng) if forms else None, story)


def held_out_cases(count: int = 100, seed: int = 0) -> list[Case]:
    """Returns `count` chat prompts whose (name, fact) pair, and so every (name, fact, plot), is never trained on."""
    rng = random.Random(f"held out {seed}")
    cases: list[Case] = []
    while len(cases) < count:
        name, fact, plot = rng.choice(NAMES), rng.choice(FACTS), rng.randrange(len(PLOTS))
        if held_out(name, fact):
            start = first_sentence(plot, slots(hero_of(name, rng), fact, rng), rng)
            cases.append(Case(f"Tell me a story about {name}, who {fact.present}. {start}", name, fact, plot))
    return cases


def open_cases(count: int = 100, seed: int = 0) -> list[Case]:
    """Returns prompts with invented names and facts put together at random, as a stranger might type them."""
    rng = random.Random(f"open {seed}")
    cases = []
    for _ in range(count):
        name = open_name(rng)
        fact = for_hero(open_fact(rng), hero_of(name, rng))
        cases.append(Case(f"Tell me a story about {name}, who {fact.present}.", name, fact, -1))
    return cases


def bare_prompt(case: Case) -> str:
    """Returns the same case as the beginning of a story: an opening with name and fact, then a first sentence."""
    rng = random.Random(f"bare {case.prompt}")
    filled = slots(hero_of(case.name, rng), case.fact, rng)
    return opening(filled, first_sentence(case.plot, filled, rng), rng)


def held_out_samples(count: int, seed: int = 0) -> list[Sample]:
    """Returns whole chat texts about held-out pairs, for perplexity."""
    rng = random.Random(f"held out texts {seed}")
    samples = []
    for case in held_out_cases(count, seed=seed + 1):
        filled = slots(hero_of(case.name, rng), case.fact, rng)
        start = first_sentence(case.plot, filled, rng)
        story = f"{opening(filled, start, rng)} {rest(case.plot, filled, case.fact, rng)}"
        samples.append(Sample(f"Tell me a story about {case.name}, who {case.fact.present}. {start}", story))
    return samples


def other_fact(case: Case) -> Fact:
    """Returns a wrong fact of the same kind: the next listed one."""
    kin = [fact for fact in FACTS if fact.kind == case.fact.kind]
    return kin[(kin.index(case.fact) + 1) % len(kin)]


def with_fact(case: Case, fact: Fact) -> str:
    """Returns the case's prompt, asking for another fact."""
    return case.prompt.replace(case.fact.present, fact.present, 1)


def final_sentence(story: str) -> str:
    """Returns the last sentence, without the end marks of earlier sentences."""
    return re.split(r'(?<=[.!?])"?\s+', story.strip())[-1]


def contains_words(text: str, phrase: str) -> bool:
    """Returns whether the phrase is in the text as whole words, with its capitals."""
    return re.search(rf"(?<!\w){re.escape(phrase)}(?!\w)", text) is not None


def restates(story: str, name: str, fact: Fact) -> bool:
    """The score of one story: it ends, and its last sentence holds the hero's name and the fact, past tense.

    The name must also be carried through the story: it occurs before the last sentence as well.
    """
    last = final_sentence(story)
    before = story.strip()[: -len(last)]
    ended = last.endswith((".", "!", "?"))
    return ended and contains_words(before, name) and contains_words(last, name) and contains_words(last, fact.past)


def suits_name(story: str, name: str) -> bool:
    """Returns whether the story's first pronoun is the one that the lists give for this hero."""
    first = re.search(r"\b(?:(she|her)|he|his|him)\b", story, re.IGNORECASE)
    return first is not None and (first[1] is not None) == (name in GIRL_NAMES)
