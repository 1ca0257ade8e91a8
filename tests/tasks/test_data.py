"""The built-in tasks: enough examples, clean text, right answers, no side door to the answer."""

import json
from collections import Counter
from importlib.resources import files
from itertools import pairwise

import pytest

from mechtv.tasks.builtin import builtin_names, load_builtin
from mechtv.tasks.template import TEMPLATES

LEAST = {
    "animal-object": 200,
    "antonym": 400,
    "capitalize": 400,
    "country-capital": 150,
    "country-currency": 100,
    "delayed-reward": 100,
    "english-french": 400,
    "english-spanish": 400,
    "entailment": 240,
    "first-letter": 400,
    "landmark-country": 150,
    "lower-case": 400,
    "masculine-feminine": 80,
    "masculine-feminine-french": 60,
    "next-item": 100,
    "number-word": 100,
    "present-gerund": 300,
    "present-past": 400,
    "question-type": 300,
    "sentiment": 300,
    "singular-plural": 400,
    "subjectivity": 200,
    "synonym": 300,
    "topic": 240,
}
LABELS = {
    "animal-object": ("animal", "object"),
    "entailment": ("true", "maybe", "false"),
    "question-type": ("Abbreviation", "Entity", "Description", "Person", "Location", "Number"),
    "sentiment": ("negative", "positive"),
    "subjectivity": ("objective", "subjective"),
    "topic": ("World", "Sports", "Business", "Technology"),
}
CHOICES = ("delayed-reward", "delayed-reward-open")
FOLDER = files("mechtv.tasks") / "data"
FILE = pytest.mark.parametrize("name", sorted(LEAST))
TASK = pytest.mark.parametrize("name", builtin_names())


def read(name):
    return json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))


def words(text):
    return text.split()


def rows(name):
    return [tuple(row) for row in read(name)["rows"]]


def test_these_are_the_files():
    assert {file.name for file in FOLDER.iterdir()} == {f"{name}.json" for name in LEAST}
    assert set(builtin_names()) == {*LEAST, "delayed-reward-open"}


@FILE
def test_a_file_says_what_it_is(name):
    plain = read(name)
    assert plain["name"] == name
    assert plain["description"].endswith(".")
    assert plain["labels"] == (list(LABELS[name]) if name in LABELS else None)
    assert plain["template"] in TEMPLATES


@FILE
def test_there_are_enough_rows_and_no_input_twice(name):
    every = rows(name)
    inputs = [row if name == "delayed-reward" else row[:-1] for row in every]
    assert len(every) >= LEAST[name]
    assert len(set(inputs)) == len(inputs)


@FILE
def test_no_two_inputs_differ_only_in_case_or_final_stop(name):
    if name == "next-item":  # letters in both cases are two sequences
        return
    plain = [tuple(text.casefold().rstrip(".!?") for text in row[:-1]) for row in rows(name)]
    if name != "delayed-reward":
        assert len(set(plain)) == len(plain)


@FILE
def test_the_text_is_clean(name):
    columns = read(name)["columns"]
    for row in rows(name):
        assert len(row) == len(columns)
        for text in row:
            assert text
            assert text == " ".join(text.split()), row
            assert text.isprintable(), row


@FILE
def test_no_braces_that_a_template_could_mistake(name):
    assert not [row for row in rows(name) for text in row if "{" in text or "}" in text]


@pytest.mark.parametrize("name", sorted(LABELS))
def test_labels_are_nearly_balanced(name):
    counts = Counter(row[-1] for row in rows(name))
    assert set(counts) == set(LABELS[name])
    assert max(counts.values()) <= 1.05 * min(counts.values())


@FILE
def test_the_order_of_the_rows_gives_no_label_away(name):
    answers = [row[-1] for row in rows(name)]
    if name in LABELS:
        changes = sum(first != second for first, second in pairwise(answers))
        assert 0.8 <= changes / (len(answers) * (1 - 1 / len(LABELS[name]))) <= 1.2


@TASK
def test_every_task_loads_under_its_template_and_all_others_that_fit(name):
    task = load_builtin(name)
    assert task.name == name
    assert task.splits().train
    fields = set(task.examples[0].fields)
    fitting = [template for template in TEMPLATES.values() if template.fields <= fields]
    assert task.template in fitting
    assert len(fitting) >= 2
    for template in fitting:
        other = task.with_template(template)
        example = other.examples[0]
        assert all(text in template.query(example) for text in example.fields.values())


@TASK
def test_the_answer_is_no_input(name):
    task = load_builtin(name)
    equal = [e for e in task.examples if e.answer in e.fields.values()]
    assert name == "delayed-reward-open" or not equal


def test_capitals_first_letters_and_lower_case_follow_their_rules():
    assert all(word[:1].upper() + word[1:] == answer for word, answer in rows("capitalize"))
    assert all(word.islower() and word[0] == answer for word, answer in rows("first-letter"))
    assert all(word.isupper() and word.lower() == answer for word, answer in rows("lower-case"))


UNITS = words(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen "
    "sixteen seventeen eighteen nineteen"
)
TENS = words("twenty thirty forty fifty sixty seventy eighty ninety")


def spelled(number):
    for size, word in ((1_000_000, "million"), (1000, "thousand"), (100, "hundred")):
        if number >= size:
            rest = number % size
            return f"{spelled(number // size)} {word}" + (f" {spelled(rest)}" if rest else "")
    if number < 20:
        return UNITS[number]
    tens, unit = divmod(number, 10)
    return TENS[tens - 2] + (f"-{UNITS[unit]}" if unit else "")


def test_numbers_are_spelled_right():
    assert spelled(1_234_515) == "one million two hundred thirty-four thousand five hundred fifteen"
    assert all(spelled(int(digits)) == answer for digits, answer in rows("number-word"))


SEQUENCES = [
    list("abcdefghijklmnopqrstuvwxyz"),
    list("ABCDEFGHIJKLMNOPQRSTUVWXYZ"),
    [*UNITS, "twenty"],
    words("first second third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth"),
    words("twelfth thirteenth"),
    words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday Monday"),
    words("Mon Tue Wed Thu Fri Sat Sun Mon"),
    words("January February March April May June July August September October November"),
    words("November December January"),
    words("Jan Feb Mar Apr May Jun Jul Aug Sep Oct Nov Dec Jan"),
    words("I II III IV V VI VII VIII IX X XI XII XIII XIV XV XVI XVII XVIII XIX XX"),
]


def test_the_next_item_follows_in_a_sequence():
    following = {pair for sequence in SEQUENCES for pair in pairwise(sequence)}
    for item, answer in rows("next-item"):
        assert (item, answer) in following or int(item) + 1 == int(answer)


def test_an_item_that_two_items_can_follow_is_not_asked():
    following = {pair for sequence in SEQUENCES for pair in pairwise(sequence)}
    answers = Counter(item for item, _ in following)
    asked = {item for item, _ in rows("next-item")}
    assert {item for item in asked if answers[item] > 1} <= {"May"}  # June, rarely Jun


def test_gerunds_and_plurals_have_a_known_ending():
    plurals = ("s", "men", "ren", "ae", "i", "a", "ce", "oxen", "people")
    others = {"geese", "feet", "teeth", "passersby", "mothers-in-law"}
    assert all(answer.endswith("ing") for _, answer in rows("present-gerund"))
    assert all(a.endswith(plurals) or a in others for _, a in rows("singular-plural"))


def test_regular_pasts_are_spelled_by_rule():
    vowels = "aeiou"
    for verb, past in rows("present-past"):
        if not past.endswith("ed") or past in ("fed", "led", "bled", "bred", "misled", "fled"):
            continue
        allowed = {verb + "ed", verb + verb[-1] + "ed", verb + "ked"}
        if verb.endswith("e"):
            allowed = {verb + "d"}
        elif verb.endswith("y") and verb[-2] not in vowels:
            allowed = {verb[:-1] + "ied"}
        assert past in allowed


@pytest.mark.parametrize("name", ["antonym", "synonym"])
def test_pairs_of_words_contradict_themselves_nowhere(name):
    other = dict(rows("synonym" if name == "antonym" else "antonym"))
    assert not [(word, answer) for word, answer in rows(name) if other.get(word) == answer]


@pytest.mark.parametrize("name", CHOICES)
def test_the_immediate_option_stands_first_in_exactly_half(name):
    plain = {tuple(row) for row in read("delayed-reward")["rows"]}
    examples = load_builtin(name).examples
    first = 0
    for example in examples:
        options = example.fields["option_a"], example.fields["option_b"]
        question = example.fields["question"]
        immediate_first = (question, *options) in plain
        assert immediate_first != ((question, *options[::-1]) in plain)
        first += immediate_first
    assert 2 * first == len(examples)


@pytest.mark.parametrize("name", CHOICES)
def test_the_answer_points_at_the_immediate_option(name):
    immediate = {row[1] for row in rows("delayed-reward")}
    delayed = {row[2] for row in rows("delayed-reward")}
    assert not immediate & delayed
    task = load_builtin(name)
    for example in task.examples:
        options = {"A": example.fields["option_a"], "B": example.fields["option_b"]}
        chosen = options.get(example.answer, example.answer)
        assert chosen in immediate
        assert chosen in options.values()
    assert task.labels == (("A", "B") if name == "delayed-reward" else None)


def test_neither_option_is_shorter_most_of_the_time():
    shorter = sum(len(immediate) < len(delayed) for _, immediate, delayed in rows("delayed-reward"))
    assert 0.3 <= shorter / len(rows("delayed-reward")) <= 0.7
