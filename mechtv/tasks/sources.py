"""Where the text data sets of the papers are, and what their columns and labels mean.

`TEXT_SOURCES` gives for each its hub id, columns, label words and template; `text` reads them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from mechtv.errors import InvalidInput
from mechtv.tasks.template import TEMPLATES

UNLABELLED = "-1"
"""The hub's integer for rows without a label; they are left out."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where a data set is and what its columns mean.

    Args:
        hub: the hub id; `config` and `revision` as in `datasets.load_dataset`.
        template: a name of `TEMPLATES`.
        fields: the template's field names, each with its column.
        labels: the hub's label names in the order of its integers, each with the papers' word, or
            None to leave rows of that label out.
        train: the splits that give the examples.
        test: the split that gives the test examples; None holds them out of the examples.

    Raises:
        InvalidInput: if `fields` are not the template's.
    """

    hub: str
    description: str
    template: str
    labels: Mapping[str, str | None]
    fields: Mapping[str, str]
    label_column: str = "label"
    config: str | None = None
    revision: str | None = None
    train: tuple[str, ...] = ("train",)
    test: str | None = "test"

    def __post_init__(self) -> None:
        expected = TEMPLATES[self.template].fields
        if expected != set(self.fields):
            raise InvalidInput(
                f"The source {self.hub!r} has the fields {sorted(self.fields)}, but its template "
                f"{self.template!r} reads {sorted(expected)}; name the same ones."
            )

    @property
    def words(self) -> tuple[str, ...]:
        """The papers' label words, in the order of the hub's integers."""
        return tuple(word for word in self.labels.values() if word is not None)

    @cached_property
    def meanings(self) -> dict[str, str | None]:
        """What the label column may hold (integer, the hub's name or the word), with its word."""
        numbered = {str(number): word for number, word in enumerate(self.labels.values())}
        return {UNLABELLED: None, **numbered, **self.labels, **{word: word for word in self.words}}


PARQUET = "refs/convert/parquet"
"""The hub's own copy of a repository whose main branch is a script, which `datasets` 4 refuses."""

NLI = {"premise": "premise", "hypothesis": "hypothesis"}

TEXT_SOURCES: dict[str, Source] = {
    "sst2": Source(
        hub="nyu-mll/glue",
        config="sst2",
        description="Sentences of film reviews: negative or positive (SST-2).",
        template="sentiment",
        fields={"text": "sentence"},
        labels={"negative": "negative", "positive": "positive"},
        test="validation",  # the labels of the test split are hidden
    ),
    "sst5": Source(
        hub="SetFit/sst5",
        description="Sentences of film reviews in five grades (SST-5).",
        template="sentence-sentiment",
        fields={"text": "text"},
        labels={
            "very negative": "terrible",
            "negative": "negative",
            "neutral": "neutral",
            "positive": "positive",
            "very positive": "great",
        },
        train=("train", "validation"),
    ),
    "mr": Source(
        hub="cornell-movie-review-data/rotten_tomatoes",
        description="Sentences of film reviews: negative or positive (MR).",
        template="sentiment",
        fields={"text": "text"},
        labels={"neg": "negative", "pos": "positive"},
        train=("train", "validation"),
    ),
    "subj": Source(
        hub="SetFit/subj",
        description="Sentences on films: objective (plot) or subjective (opinion) (SUBJ).",
        template="label",
        fields={"text": "text"},
        labels={"objective": "objective", "subjective": "subjective"},
    ),
    "trec": Source(
        hub="CogComp/trec",
        revision=PARQUET,
        description="Questions by the type of their answer (TREC, coarse).",
        template="question",
        fields={"text": "text"},
        label_column="coarse_label",
        labels={
            "ABBR": "Abbreviation",
            "ENTY": "Entity",
            "DESC": "Description",
            "HUM": "Person",
            "LOC": "Location",
            "NUM": "Number",
        },
    ),
    "hate-speech18": Source(
        hub="odegiber/hate_speech18",
        revision=PARQUET,
        description="Sentences of an extremist forum: neutral or hate (HateSpeech18).",
        template="text-label",
        fields={"text": "text"},
        labels={"noHate": "neutral", "hate": "hate", "idk/skip": None, "relation": None},
        test=None,
    ),
    "ag-news": Source(
        hub="fancyzhx/ag_news",
        description="News by topic (AG News).",
        template="topic",
        fields={"text": "text"},
        labels={
            "World": "World",
            "Sports": "Sports",
            "Business": "Business",
            "Sci/Tech": "Technology",
        },
    ),
    "dbpedia": Source(
        hub="fancyzhx/dbpedia_14",
        description="Starts of encyclopedia articles by the kind of their subject (DBPedia).",
        template="input-label",
        fields={"text": "content"},
        labels={
            "Company": "company",
            "EducationalInstitution": "school",
            "Artist": "artist",
            "Athlete": "athlete",
            "OfficeHolder": "politics",
            "MeanOfTransportation": "transportation",
            "Building": "building",
            "NaturalPlace": "nature",
            "Village": "village",
            "Animal": "animal",
            "Plant": "plant",
            "Album": "album",
            "Film": "film",
            "WrittenWork": "book",
        },
    ),
    "rte": Source(
        hub="nyu-mll/glue",
        config="rte",
        description="Whether a text entails a hypothesis (RTE).",
        template="entailment",
        fields={"premise": "sentence1", "hypothesis": "sentence2"},
        labels={"entailment": "true", "not_entailment": "false"},
        test="validation",
    ),
    "snli": Source(
        hub="stanfordnlp/snli",
        description="Whether a caption entails a hypothesis, contradicts it, or neither (SNLI).",
        template="entailment",
        fields=NLI,
        labels={"entailment": "true", "neutral": "maybe", "contradiction": "false"},
    ),
    "cb": Source(
        hub="aps/super_glue",
        config="cb",
        description="Whether a text commits its author to an embedded clause (CommitmentBank).",
        template="entailment",
        fields=NLI,
        labels={"entailment": "true", "contradiction": "false", "neutral": "maybe"},
        test="validation",
    ),
}
"""The data sets of the papers by name."""
