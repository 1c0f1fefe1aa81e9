"""The demo's story grammar, its held-out split, and the scoring of the demo model."""

import functools
import random
import re
from dataclasses import replace

import demo_eval
import demo_stories as stories
import pytest
from grids import examples, one_in_three
from hypothesis import given, settings
from hypothesis import strategies as st

from moeflux_mlx import generate, load

SEEDS = st.integers(0, 2**32)


def told(case, fact=None, name=None):
    """Returns a story by the grammar for this case, or with another fact or name in it."""
    rng = random.Random(case.prompt)
    hero = stories.hero_of(name or case.name, rng)
    fact = fact or case.fact
    filled = stories.slots(hero, fact, rng)
    start = stories.first_sentence(case.plot, filled, rng)
    return f"{stories.opening(filled, start, rng)} {stories.rest(case.plot, filled, fact, rng)}"


def oracle(prompts):
    """Imitates a perfect model: it finds name and fact in the prompt and tells the grammar's story."""
    texts = []
    facts = {fact.present: fact for fact in stories.FACTS}
    for prompt in prompts:
        name, rest = re.search(r"about (.*?), who (.*)<\|im_end\|>", prompt).groups()
        present = max((p for p in facts if rest.startswith(p + ".")), key=len)
        texts.append(told(stories.Case(prompt, name, facts[present], 0)))
    return texts


def test_the_grammar_is_as_large_as_promised():
    assert len(set(stories.NAMES)) >= 500
    assert len({fact.present for fact in stories.FACTS}) >= 200
    assert len(stories.PLOTS) >= 30
    assert all([len(beat) for beat in plot] == [2, 2, 2, 2, 1] for plot in stories.PLOTS)


def test_kinds_have_turns():
    assert {fact.kind for fact in stories.FACTS} <= set(stories.words.TURNS)


@settings(deadline=None, max_examples=examples(100))
@given(SEEDS)
def test_every_training_story_passes_its_own_score(seed):
    rng = random.Random(seed)
    name, fact = stories.draw_name_and_fact(rng)
    hero = stories.hero_of(name, rng)
    fact = stories.for_hero(fact, hero)
    story = told(stories.Case(str(seed), name, fact, seed % len(stories.PLOTS)))
    assert stories.restates(story, name, fact)


@settings(deadline=None, max_examples=examples(100))
@given(SEEDS)
def test_samples_are_filled_and_repeatable(seed):
    sample = stories.training_sample(random.Random(seed))
    assert sample == stories.training_sample(random.Random(seed))
    assert not re.search(r"[{}|\\]|  ", f"{sample.prompt} {sample.story}")
    assert 80 <= len(sample.story.split()) <= 190
    assert sample.story[0].isupper() and sample.story.endswith(".")


def test_training_never_draws_a_held_out_pair():
    rng = random.Random(0)
    held = {(case.name, case.fact.present) for case in stories.held_out_cases(2000)}
    for _ in range(20000):
        name, fact = stories.draw_name_and_fact(rng)
        halves = re.split(" and | but ", fact.present)
        assert not held & {(name, fact.present), *((name, half) for half in halves)}


def test_held_out_cases_are_listed_distinct_and_repeatable():
    cases = stories.held_out_cases(100)
    assert cases == stories.held_out_cases(100) != stories.held_out_cases(100, seed=1)
    assert len({(case.name, case.fact.present, case.plot) for case in cases}) == 100
    assert all(stories.held_out(case.name, case.fact) for case in cases)
    assert all(case.name in stories.NAMES and case.fact in stories.FACTS for case in cases)


@pytest.mark.parametrize("case", stories.held_out_cases(20), ids=lambda case: case.name)
def test_planted_faults_fail(case):
    good, other = told(case), stories.other_fact(case)
    last = stories.final_sentence(good)
    assert stories.restates(good, case.name, case.fact)
    assert not stories.restates(good, case.name, other)
    assert not stories.restates(told(case, fact=other), case.name, case.fact)
    assert not stories.restates(told(case, name="Zebulon"), case.name, case.fact)
    assert not stories.restates(good.removesuffix(last), case.name, case.fact)
    assert not stories.restates(good.removesuffix(".") + ", and", case.name, case.fact)
    assert not stories.restates(last, case.name, case.fact), "the name must be carried, not only end the story"
    assert not stories.restates(good.replace(case.name, f"{case.name}x"), case.name, case.fact)
    assert not stories.restates(f"{good} The end.", case.name, case.fact)


def test_final_sentence_is_not_fooled_by_quotes():
    assert stories.final_sentence('"Go home!" he said. "It is late." Mira had a kite.') == "Mira had a kite."
    assert stories.final_sentence("Only one.") == "Only one."


def test_a_listed_name_is_a_girls_or_a_boys():
    assert not set(stories.words.GIRLS) & set(stories.words.BOYS)
    assert len(set(stories.NAMES)) == len(stories.NAMES)
    for case in stories.held_out_cases(50):
        assert stories.suits_name(told(case), case.name)
    assert stories.suits_name("A girl named Mira. Her friend was a goat. He slept.", "Mira")
    assert not stories.suits_name("A girl named Tomas. Her friend was a goat. He slept.", "Tomas")
    assert not stories.suits_name("Nobody.", "Tomas")


COMMON = ("Tomas", "Leo", "Peter", "Max", "Ben", "David", "Paul", "Mira", "Anna", "Emma", "Sophie", "Lucy")


@pytest.mark.parametrize("name", one_in_three(COMMON))
def test_the_demo_model_knows_common_names(name):
    model, tokenizer = demo_model()
    prompt = demo_eval.chat_text(f"Tell me a story about {name}, who is afraid of geese.")
    story = generate(model, tokenizer, prompt, max_tokens=80)
    assert name in story and stories.suits_name(story, name), story


@functools.cache
def demo_model():
    return load()


def test_the_fact_must_be_whole_words():
    fact = stories.Fact("has a cat", "had a cat", "thing")
    assert not stories.restates("Mira ran. Mira had a catfish.", "Mira", fact)
    assert stories.restates("Mira ran. Mira had a cat.", "Mira", fact)


def test_the_proof_passes_a_perfect_model_and_no_constant_one():
    result = demo_eval.prove(oracle, count=40)
    assert (result["held_out"], result["swapped_follow_prompt"]) == (40, 40)
    assert (result["control_wrong_fact"], result["control_swapped"]) == (0, 0)
    one_story = told(stories.held_out_cases(1)[0])
    assert demo_eval.prove(lambda prompts: [one_story] * len(prompts), count=40)["held_out"] <= 2


def test_a_model_that_ignores_the_prompts_fact_fails_the_swapped_control():
    cases = stories.held_out_cases(40)
    by_name = {case.name: case for case in cases}

    def recites(prompts):
        return [told(by_name[re.search(r"about (.*?), who", prompt).group(1)]) for prompt in prompts]

    result = demo_eval.prove(recites, count=40)
    assert result["control_swapped"] > 30


@pytest.mark.parametrize("noun,many", [("fox", "foxes"), ("berry", "berries"), ("toy", "toys"), ("kite", "kites")])
def test_plural(noun, many):
    assert stories.plural(noun) == many


def test_pronouns_reach_the_fact():
    fact = stories.Fact("lost {his} hat", "lost {his} hat", "any")
    hero = stories.Hero("Mira", "girl", "she")
    assert stories.for_hero(fact, hero) == replace(fact, present="lost her hat", past="lost her hat")
