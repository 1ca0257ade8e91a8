"""What is saved is loaded again, number for number; what is no vector is one sentence."""

import json
import pickle
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from vectors.naive import IDS, additive, feature, noise, operation, tiny_shared, vector_of

from mechtv.errors import InvalidInput, MechtvError
from mechtv.forward import last_logits
from mechtv.tasks.prompts import Prompts
from mechtv.vectors import Add, Affine, Card, Edit, Linear, Replace, Site, TaskVector
from mechtv.vectors.edits import ResidualMLP

CARD = Card(
    method="learned",
    settings={"layer": 1, "steps": 250, "schedule": "cosine", "nested": {"a": [1, 2.5, None]}},
    model="some/model",
    model_revision="0123abcd",
    task="présent→passé",
    template="{input} -> {answer}\n",
    seed=3,
    dtype="float64",
    sources=(Card(method="hidden_state", sources=(Card(method="scaled", seed=5),)),),
    curve=({"step": 10.0, "loss": 0.125}, {"step": 20.0, "loss": 1 / 3}),
)


def everything() -> TaskVector:
    """All operations, components and kinds of positions."""
    edits = (
        Edit(site=Site(layer=0, positions="all"), operation=operation("add", (32,))),
        Edit(site=Site(layer=1, component="resid_post", positions=(-3, -1)),
             operation=operation("replace", (2, 32))),
        Edit(site=Site(layer=1, component="attn_out"), operation=operation("affine", (32,))),
        Edit(site=Site(layer=2, component="mlp_out"), operation=operation("linear", ())),
        Edit(site=Site(layer=2, component="z", positions=(-2, -1)),
             operation=operation("add", (2, 4, 16))),
    )  # fmt: skip
    return TaskVector(edits=edits, card=CARD, acts_on="both")


def assert_same(loaded: TaskVector, saved: TaskVector) -> None:
    """The same edits, bit by bit."""
    assert loaded.sites == saved.sites
    assert loaded.acts_on == saved.acts_on
    assert loaded.card == saved.card
    for mine, theirs in zip(loaded.edits, saved.edits, strict=True):
        assert type(mine.operation) is type(theirs.operation)
        ours, others = mine.operation.tensors(), theirs.operation.tensors()
        assert ours.keys() == others.keys()
        for name, tensor in ours.items():
            assert tensor.dtype == others[name].dtype
            assert tensor.device.type == "cpu"
            assert tensor.is_contiguous()
            assert bits(tensor) == bits(others[name])


def bits(tensor: Tensor) -> bytes:
    return tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()


# --- the same numbers ---


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_a_loaded_vector_is_the_saved_one_bit_by_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    vector = everything().to(dtype)
    path = vector.save(tmp_path / "vector.safetensors")
    assert path == tmp_path / "vector.safetensors"
    assert_same(TaskVector.load(path), vector)
    assert_same(TaskVector.load(str(path)), vector)


@pytest.mark.parametrize("acts_on", ["prompt", "new", "both"])
def test_a_loaded_vector_acts_as_the_saved_one(tmp_path: Path, acts_on: str) -> None:
    model = tiny_shared("llama")
    vector = everything().acting_on(acts_on)
    loaded = TaskVector.load(vector.save(tmp_path / "vector"))
    answers = ((7, 8), (9, 10), (11, 12))
    prompts = Prompts.from_ids(model, IDS, answers=answers).with_answers()
    with torch.no_grad():
        wanted = last_logits(model, prompts, vector)
        assert torch.equal(last_logits(model, prompts, loaded), wanted)


def test_numbers_that_are_no_ordinary_numbers_are_kept(tmp_path: Path) -> None:
    odd = torch.tensor([0.0, -0.0, float("inf"), float("-inf"), float("nan"), 5e-324])
    vector = vector_of(Edit(site=Site(layer=0), operation=Add(value=odd.double())))
    assert_same(TaskVector.load(vector.save(tmp_path / "odd")), vector)


def test_tensors_that_share_memory_are_written_out_in_full(tmp_path: Path) -> None:
    shared = noise(32)
    whole = noise(2, 32)
    edits = (
        Edit(site=Site(layer=0), operation=Add(value=shared)),
        Edit(site=Site(layer=1), operation=Replace(value=shared)),
        Edit(site=Site(layer=2, positions=(-2, -1)), operation=Add(value=whole)),
        Edit(site=Site(layer=2, component="mlp_out"), operation=Add(value=whole[1])),
    )
    loaded = TaskVector.load(vector_of(*edits).save(tmp_path / "shared"))
    assert_same(loaded, TaskVector(edits=edits, card=loaded.card))
    loaded.edits[0].operation.value.zero_()
    assert torch.equal(loaded.edits[1].operation.value, shared), "each has its own memory"


def test_tensors_that_are_not_contiguous_are_written_as_they_read(tmp_path: Path) -> None:
    edits = (
        Edit(site=Site(layer=0), operation=Linear(matrix=noise(32, 32).T)),
        Edit(site=Site(layer=1), operation=Add(value=noise(64)[::2])),
        Edit(site=Site(layer=1, positions=(-2, -1)), operation=Add(value=noise(32, 2).T)),
        Edit(site=Site(layer=2, positions=(-2, -1)), operation=Add(value=noise(32).expand(2, 32))),
        Edit(site=Site(layer=2, component="z"), operation=Add(value=noise(16, 4).T)),
    )
    assert not any(t.is_contiguous() for e in edits for t in e.operation.tensors().values())
    vector = vector_of(*edits)
    assert_same(TaskVector.load(vector.save(tmp_path / "strided")), vector)


def test_a_vector_in_training_is_saved_without_its_graph(tmp_path: Path) -> None:
    value = noise(32).requires_grad_()
    vector = vector_of(Edit(site=Site(layer=0), operation=Add(value=2 * value)))
    loaded = TaskVector.load(vector.save(tmp_path / "trained"))
    assert torch.equal(loaded.value(), 2 * value.detach())
    assert not loaded.value().requires_grad


def test_a_sum_keeps_the_cards_of_its_sources(tmp_path: Path) -> None:
    theta = vector_of(Edit(site=Site(layer=0), operation=Add(value=noise(32))))
    total = theta + 0.5 * theta
    assert TaskVector.load(total.save(tmp_path / "sum")).card == total.card


@pytest.mark.usefixtures("unchecked")
def test_a_card_of_other_json_values_reads_as_it_is_read_back(tmp_path: Path) -> None:
    card = Card(method="x", settings={"layers": (1, 2), 3: "three"}, curve=({"step": 1},))
    edit = Edit(site=Site(layer=0), operation=Add(value=noise(4)))
    loaded = TaskVector.load(TaskVector(edits=(edit,), card=card).save(tmp_path / "card"))
    assert loaded.card == card
    assert card.settings == {"layers": [1, 2], "3": "three"}


# --- what a file says about itself ---


def test_the_header_says_where_a_vector_came_from(tmp_path: Path) -> None:
    with safe_open(everything().save(tmp_path / "vector"), framework="pt") as file:
        header = file.metadata()
        names = sorted(file.keys())
    assert header["schema"] == "mechtv.task_vector/2"
    assert header["acts_on"] == "both"
    edits = json.loads(header["edits"])
    assert edits[1] == {
        "component": "resid_post",
        "layer": 1,
        "positions": [-3, -1],
        "heads": None,
        "operation": "replace",
    }
    assert [edit["operation"] for edit in edits] == ["add", "replace", "affine", "linear", "add"]
    assert [edit["layer"] for edit in edits] == [0, 1, 1, 2, 2]
    assert edits[0]["positions"] == "all"
    card = json.loads(header["card"])
    told = ("method", "model", "model_revision", "task", "template", "seed", "dtype", "weights")
    assert {name: card[name] for name in told} == {name: getattr(CARD, name) for name in told}
    assert card["settings"] == CARD.settings
    assert card["versions"] == {
        name: version(name) for name in ("mechtv", "torch", "transformers", "transformer-lens")
    }
    assert card["sources"][0]["sources"][0]["seed"] == 5
    assert names == [
        "0.value", "1.value", "2.scale", "2.value", "3.matrix", "4.value"
    ]  # fmt: skip


# --- what is no vector ---


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return everything().save(tmp_path / "vector.safetensors")


def rewritten(path: Path, **changes: Any) -> Path:
    """The same file with other words in its header."""
    with safe_open(path, framework="pt") as file:
        header = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    kept = {k: v for k, v in {**header, **changes}.items() if v is not None}
    save_file(tensors, path, metadata=kept or None)
    return path


def refusal(path: Path) -> str:
    """The sentence with which a file is refused."""
    with pytest.raises(InvalidInput) as caught:
        TaskVector.load(path)
    assert isinstance(caught.value, MechtvError)
    sentence = str(caught.value)
    assert str(path) in sentence
    assert "\n" not in sentence
    return sentence


@pytest.mark.parametrize("kept", [0, 4, 8, 100, -1, -2000])
def test_a_truncated_file_is_one_sentence(saved: Path, kept: int) -> None:
    saved.write_bytes(saved.read_bytes()[:kept])
    assert "is truncated or no safetensors file" in refusal(saved)


@pytest.mark.parametrize(
    "content",
    [b"", b"hello", b"{}" * 100, b"\x00" * 64, b"\xff" * 64, "ÄÖÜ, and more text".encode() * 20],
    ids=["empty", "short text", "long text", "zeros", "ones", "unicode"],
)
def test_a_file_of_another_kind_is_one_sentence(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "other.safetensors"
    path.write_bytes(content)
    assert "is truncated or no safetensors file" in refusal(path)


class Trap:
    """An object that notices when it is unpickled."""

    sprung = False

    def __setstate__(self, state: object) -> None:
        Trap.sprung = True


def test_a_pickle_is_refused_and_never_read(tmp_path: Path) -> None:
    Trap.sprung = False
    trap = Trap()
    trap.bait = 1  # type: ignore[attr-defined]
    for name, write in (
        ("torch", lambda path: torch.save({"value": trap}, path)),
        ("old torch", lambda path: torch.save(trap, path, _use_new_zipfile_serialization=False)),
        ("pickle", lambda path: path.write_bytes(pickle.dumps(trap))),
    ):
        path = tmp_path / f"{name}.safetensors"
        write(path)
        assert "is truncated or no safetensors file" in refusal(path)
    assert not Trap.sprung
    pickle.loads(pickle.dumps(trap))
    assert Trap.sprung, "the trap works"


@pytest.mark.parametrize("schema", ["mechtv.task_vector/3", "other", "", None])
def test_an_unknown_schema_is_one_sentence(saved: Path, schema: str | None) -> None:
    sentence = refusal(rewritten(saved, schema=schema))
    assert f"has the schema {schema!r}; this version of mechtv reads" in sentence


def test_a_safetensors_file_of_somebody_else_is_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"weight": noise(2, 2)}, path)
    assert "has the schema None" in refusal(path)


GOOD = {"component": "resid_pre", "layer": 0, "positions": [-1], "operation": "add"}


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    "damage",
    [
        {"edits": None},
        {"card": None},
        {"acts_on": None},
        {"acts_on": "elsewhere"},
        {"edits": "[{"},
        {"card": "{"},
        {"edits": "null"},
        {"edits": "5"},
        {"edits": '"text"'},
        {"edits": "[]"},
        {"edits": "[1]"},
        {"edits": "[[]]"},
        {"edits": "{}"},
        {"edits": json.dumps([{**GOOD, "operation": "rotate"}])},
        {"edits": json.dumps([{**GOOD, "operation": []}])},
        {"edits": json.dumps([{**GOOD, "operation": "linear"}])},
        {"edits": json.dumps([{**GOOD, "operation": "affine"}])},
        {"edits": json.dumps([{**GOOD, "component": "elsewhere"}])},
        {"edits": json.dumps([{**GOOD, "layer": "one"}])},
        {"edits": json.dumps([{**GOOD, "layer": None}])},
        {"edits": json.dumps([{**GOOD, "layer": -1}])},
        {"edits": json.dumps([{**GOOD, "positions": 5}])},
        {"edits": json.dumps([{**GOOD, "positions": [0]}])},
        {"edits": json.dumps([{**GOOD, "positions": "some"}])},
        {"edits": json.dumps([{"component": "z"}])},
        {"edits": json.dumps([{**GOOD, "component": "z"}])},
        {"edits": json.dumps([GOOD] * 7)},
        {"card": "[]"},
        {"card": "[1]"},
        {"card": "5"},
        {"card": '"text"'},
        {"card": "null"},
        {"card": "{}"},
        {"card": '{"method": "x", "mood": "good"}'},
        {"card": '{"method": "x", "sources": [5]}'},
        {"card": '{"method": "x", "sources": 5}'},
        {"card": '{"method": "x", "curve": 5}'},
    ],
    ids=lambda damage: json.dumps(damage)[:60],
)
def test_a_damaged_header_is_one_sentence(saved: Path, damage: dict[str, str | None]) -> None:
    assert "has a damaged header" in refusal(rewritten(saved, **damage))


def test_a_file_that_is_not_there_is_one_sentence(tmp_path: Path) -> None:
    assert "There is no file" in refusal(tmp_path / "nowhere.safetensors")
    assert "There is no file" in refusal(tmp_path / "no folder" / "vector.safetensors")
    assert "There is no file" in refusal(tmp_path)


@pytest.mark.parametrize("component", ["resid_pre", "z"])
def test_a_file_for_another_width_is_refused_by_the_model(tmp_path: Path, component: str) -> None:
    shape = (4, 20) if component == "z" else (40,)
    site = Site(layer=1, component=component)
    other = vector_of(Edit(site=site, operation=Add(value=noise(*shape))))
    loaded = TaskVector.load(other.save(tmp_path / "other"))
    model = tiny_shared("llama")
    widths = {"z": (20, "d_head", 16), "resid_pre": (40, "d_model", 32)}
    mine, name, theirs = widths[component]
    sentence = f"This vector has width {mine} but the model's {name} is {theirs}"
    with pytest.raises(InvalidInput, match=sentence), loaded.applied(model):
        pass
    with pytest.raises(InvalidInput, match=sentence):
        last_logits(model, Prompts.from_ids(model, IDS), loaded)


# --- saving ---


def test_a_missing_folder_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"There is no folder .*nowhere.* to write 'v' into"):
        everything().save(tmp_path / "nowhere" / "v")
    assert list(tmp_path.iterdir()) == []


def test_saving_over_a_folder_is_one_sentence_and_leaves_it(tmp_path: Path) -> None:
    (tmp_path / "v").mkdir()
    with pytest.raises(InvalidInput, match="cannot be written"):
        everything().save(tmp_path / "v")
    assert [path.name for path in tmp_path.iterdir()] == ["v"]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
@pytest.mark.parametrize("step", ["write_bytes", "replace"])
def test_a_failed_save_keeps_the_old_file_and_leaves_no_other(
    saved: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, step: str
) -> None:
    before = saved.read_bytes()

    def fail(*args: object, **kwargs: object) -> None:
        raise error

    def half(path: Path, content: bytes) -> None:
        with path.open("wb") as file:
            file.write(content[: len(content) // 2])
        raise error

    if step == "replace":
        monkeypatch.setattr("os.replace", fail)
    else:
        monkeypatch.setattr(Path, "write_bytes", half)
    other = vector_of(Edit(site=Site(layer=0), operation=Add(value=noise(8))))
    expected = InvalidInput if isinstance(error, OSError) else KeyboardInterrupt
    for path in (saved, saved.with_name("new.safetensors")):
        with pytest.raises(expected):
            other.save(path)
    monkeypatch.undo()
    assert saved.read_bytes() == before
    assert list(saved.parent.iterdir()) == [saved]


def test_saving_again_replaces_the_file(saved: Path) -> None:
    other = vector_of(Edit(site=Site(layer=0), operation=Add(value=noise(8))))
    other.save(saved)
    assert_same(TaskVector.load(saved), other)
    assert list(saved.parent.iterdir()) == [saved]


def test_the_tests_of_files_use_every_component_of_a_model() -> None:
    """So that `everything` stays what it says."""
    model = tiny_shared("llama")
    vector = everything()
    assert {edit.site.component for edit in vector.edits} == {
        "resid_pre", "resid_post", "attn_out", "mlp_out", "z"
    }  # fmt: skip
    assert {type(edit.operation) for edit in vector.edits} == {Add, Replace, Affine, Linear}
    assert vector.edits[-1].operation.value.shape[1:] == feature(model, "z")
    assert additive(model).edits[0].width == vector.edits[0].width


def test_heads_are_saved_and_older_files_act_on_all(tmp_path: Path) -> None:
    site = Site(component="z", layer=1, heads=(2, 0))
    edit = Edit(site=site, operation=Replace(value=torch.ones(2, 4)))
    path = TaskVector(edits=(edit,), card=CARD).save(tmp_path / "heads.safetensors")
    assert TaskVector.load(path).sites == (site,)
    assert TaskVector.load(path).sites[0].heads == (0, 2)
    with safe_open(path, framework="pt") as file:
        edits = json.loads(file.metadata()["edits"])
    del edits[0]["heads"]
    old = rewritten(path, schema="mechtv.task_vector/1", edits=json.dumps(edits))
    assert TaskVector.load(old).sites[0].heads is None


def maps() -> TaskVector:
    """Maps with all their parts, and a `Linear` without a bias."""
    matrix = noise(32, 32)
    mlp = ResidualMLP(
        weights=noise(3, 32, 32, seed=1),
        biases=noise(3, 32, seed=2),
        centre=noise(32, seed=3),
        scale=torch.tensor(2.5, dtype=torch.float64),
        gain=torch.tensor(0.5, dtype=torch.float64),
    )
    operations = (Linear(matrix=matrix, bias=noise(32)), Linear(matrix=matrix), mlp)
    edits = [Edit(site=Site(layer=layer), operation=o) for layer, o in enumerate(operations)]
    return TaskVector(edits=tuple(edits), card=CARD)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_maps_are_loaded_as_saved_with_and_without_a_bias(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    vector = maps().to(dtype)
    path = vector.save(tmp_path / "maps")
    with safe_open(path, framework="pt") as file:
        assert sorted(file.keys()) == [
            "0.bias", "0.matrix", "1.matrix",
            "2.biases", "2.centre", "2.gain", "2.scale", "2.weights",
        ]  # fmt: skip
        names = [edit["operation"] for edit in json.loads(file.metadata()["edits"])]
    assert names == ["linear", "linear", "residual_mlp"]
    loaded = TaskVector.load(path)
    assert_same(loaded, vector)
    assert loaded.edits[1].operation.bias is None


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    "change",
    [
        {"0.bias": noise(31)},
        {"0.bias": noise(1, 32)},
        {"0.matrix": None},
        {"1.offset": noise(32)},
        {"2.gain": None},
        {"2.biases": noise(2, 32)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_file_whose_maps_lack_or_misfit_a_part_is_one_sentence(
    tmp_path: Path, change: dict[str, Tensor | None]
) -> None:
    path = maps().save(tmp_path / "maps")
    with safe_open(path, framework="pt") as file:
        header = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    kept = {k: v for k, v in {**tensors, **change}.items() if v is not None}
    save_file(kept, path, metadata=header)
    assert "has a damaged header" in refusal(path)
