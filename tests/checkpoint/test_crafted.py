"""Checkpoints that somebody made to do harm, or that are damaged in a way that their digests do not show: one sentence
results, nothing in them is executed, and nothing is believed before it has been checked."""

from __future__ import annotations

import json
import pickle
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from loopscale.checkpoint import store
from loopscale.checkpoint.restore import find, restore
from loopscale.diagnostics.memory import PeakMemory
from loopscale.errors import CheckpointError, LoopscaleError, UsageError
from loopscale.inference.load import LoopedModel
from loopscale.train import snapshot
from loopscale.train.snapshot import State
from tests.checkpoint.golden.make import TOKENS
from tests.checkpoint.sealed import changed, described, seal

GOLDEN = Path(__file__).parent / "golden" / "step-2"
PART, INDEX = "tensors/rank-00000-000.safetensors", "tensors/index.json"
Q = "weight/core.0.q"  # two boxes of 4 rows of 8


@pytest.fixture
def checkpoint(mesh, tmp_path) -> Path:
    shutil.copytree(GOLDEN, tmp_path / "step-2")
    return tmp_path / "step-2"


def use(checkpoint: Path) -> LoopedModel:
    """All that a run that goes on and a model that is used read of a checkpoint."""
    store.verify(checkpoint)
    model, state = LoopedModel(restore(checkpoint)), State.of(checkpoint)
    snapshot.changes(checkpoint, model.config, state.corpus, state.global_batch)
    index = json.loads((checkpoint / INDEX).read_text())
    assert same(store.load_whole(checkpoint), {n: t for n, t in WHOLE.items() if n in index})
    return model


def refused(checkpoint: Path, sentence: str, kind: type[LoopscaleError] = CheckpointError) -> bool:
    """Whether using it raises the ``sentence``, and that sentence can be printed."""
    with pytest.raises(kind, match=sentence) as raised:
        use(checkpoint)
    return str(raised.value).isprintable()


@contextmanager
def bounded(size: int = 2**26) -> Iterator[None]:
    """Takes less memory than so many bytes."""
    memory = PeakMemory(torch.device("cpu"))
    yield
    assert memory.read() < size


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[n], t) for n, t in expected.items())


WHOLE = store.load_whole(GOLDEN)


def test_sealed_again_it_is_the_golden_one(checkpoint):
    seal(checkpoint)
    expected = LoopedModel(restore(GOLDEN))(TOKENS).logits
    assert torch.equal(use(checkpoint)(TOKENS).logits, expected)


# ---- nothing is executed


class Payload:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


@pytest.mark.parametrize("padding", [0, 100_000])
@pytest.mark.parametrize("write", [pickle.dump, torch.save])
def test_a_pickle_in_the_place_of_a_part_is_not_unpickled(checkpoint, write, padding):
    trap = checkpoint.parent / "executed"
    with (checkpoint / PART).open("wb") as file:
        write(Payload(trap), file)
        file.write(bytes(padding))
    seal(checkpoint)
    assert refused(checkpoint, r"rank-00000-000\.safetensors (is too small|cannot be read)")
    assert not trap.exists()


def test_a_pickled_index_of_torch_is_not_looked_at(checkpoint):
    trap = checkpoint.parent / "executed"
    with (checkpoint / "tensors" / ".metadata").open("wb") as file:
        pickle.dump(Payload(trap), file)
    use(checkpoint)
    seal(checkpoint, **{"tensors/.metadata": described((checkpoint / "tensors" / ".metadata").read_bytes())})
    assert refused(checkpoint, r"lists 'tensors/\.metadata', which cannot be a file within the checkpoint")
    assert not trap.exists()


@pytest.mark.parametrize(
    "text",
    [
        "run: !!python/object/apply:os.system ['touch {trap}']",
        "run: !!python/object/new:os.system ['touch {trap}']",
        "!!python/name:os.system ''",
        "!!python/module:os ''",
        "- 1",
        "run: !!int ''",
        "run: !!timestamp 'x'",
        "run: [" * 3000,
        "\x00",
        "? [run]\n: 1",
        "run: 1\nrun: 2",
        "",
    ],
)
def test_a_configuration_is_plain_values(checkpoint, text):
    trap = checkpoint.parent / "executed"
    (checkpoint / "config.yaml").write_text(text.replace("{trap}", str(trap)))
    seal(checkpoint)
    with pytest.raises(CheckpointError, match=r"step-2 is damaged: config\.yaml"):
        use(checkpoint)
    assert not trap.exists()


def test_a_configuration_reads_no_other_file_and_does_not_grow(checkpoint):
    secret = checkpoint.parent / "secret.yaml"
    secret.write_text("run: {name: secret}")
    (checkpoint / "config.yaml").write_text(f"base: {secret}")
    seal(checkpoint)
    with pytest.raises(LoopscaleError, match=r"base +unknown key"):
        use(checkpoint)
    levels = [f"a{i}: &a{i} {{{', '.join(f'k{j}: *a{i - 1}' for j in range(9))}}}" for i in range(1, 12)]
    (checkpoint / "config.yaml").write_text("\n".join(["a0: &a0 lol", *levels]))
    seal(checkpoint)
    assert refused(checkpoint, r"config\.yaml is not valid YAML: an alias")
    (checkpoint / "config.yaml").write_text("run: {}\n" * 40_000)
    seal(checkpoint)
    assert refused(checkpoint, r"its config\.yaml has more than 0\.3 MB")


PANIC = b'{"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}, "model": {"type": "WordLevel"}}'


@pytest.mark.parametrize(
    "content", [b"{}", b"[]", b"\x80\x04.", b'{"version": "1.0", "model": {"type": "BPE"}}', b"\xff" * 99, PANIC]
)
def test_a_tokenizer_that_is_none_is_refused(checkpoint, content):
    (checkpoint / "tokenizer.json").write_bytes(content)
    seal(checkpoint)
    with pytest.raises(LoopscaleError, match=r"is not a tokenizer\.json"):
        use(checkpoint)


# ---- nothing outside is read


@pytest.mark.parametrize(
    "name",
    ["/etc/passwd", "../secret", "tensors/../../secret", "tensors//etc/passwd", "./state.json", "", ".", "a/", "a\x00b", "a\nb"],
)  # fmt: skip
def test_a_manifest_names_files_of_its_checkpoint_only(checkpoint, name):
    (checkpoint.parent / "secret").write_text("x")
    seal(checkpoint, **{name: described(b"x")})
    assert refused(checkpoint, "which cannot be a file within the checkpoint")


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/passwd", "rank-00000-000.safetensors\x00", "index.json", ""])
def test_an_index_names_parts_only(checkpoint, name):
    with changed(checkpoint, INDEX) as index:
        index[Q]["boxes"][0]["file"] = name
    assert refused(checkpoint, r"index\.json cannot be read \(1 mistakes in it\)")


def test_a_part_that_nobody_verified_is_refused(checkpoint):
    shutil.copy(checkpoint / PART, checkpoint / "tensors" / "rank-00001-000.safetensors")
    manifest = (checkpoint / "manifest.json").read_text()
    with changed(checkpoint, INDEX) as index:
        index[Q]["boxes"][0]["file"] = "rank-00001-000.safetensors"
    listed = json.loads(manifest)
    listed["files"][INDEX] = described((checkpoint / INDEX).read_bytes())
    (checkpoint / "manifest.json").write_text(json.dumps(listed))
    assert refused(checkpoint, r"rank-00001-000\.safetensors, which the manifest does not list")


@pytest.mark.parametrize("link", [PART, "state.json", "tensors"])
def test_a_link_out_of_the_checkpoint_is_refused(checkpoint, link):
    outside = checkpoint.parent / "outside"
    (checkpoint / link).rename(outside)
    (checkpoint / link).symlink_to(outside)
    assert refused(checkpoint, f"{'tensors/' if link == 'tensors' else link}.* is a link to outside of it")


def test_a_link_within_the_checkpoint_and_one_to_it_are_followed(checkpoint):
    (checkpoint / PART).rename(checkpoint / "tensors" / "there")
    (checkpoint / PART).symlink_to("there")
    (checkpoint.parent / "best").symlink_to("step-2")
    use(checkpoint.parent / "best")
    (checkpoint / "tensors" / "there").unlink()
    assert refused(checkpoint, f"{PART} is missing")


def test_a_file_in_the_place_of_a_checkpoint_is_none(mesh, tmp_path):
    (tmp_path / "step-2").write_bytes(b"\x80\x04.")
    with pytest.raises(CheckpointError, match=r"is not a whole checkpoint: it has no manifest\.json"):
        store.verify(tmp_path / "step-2")
    with pytest.raises(UsageError, match="neither a run folder nor a checkpoint"):
        find(tmp_path / "step-2", tmp_path)


# ---- nothing is believed


def _shape(index: Any) -> None:
    index[Q]["shape"] = [10**9, 10**6]


def _huge_box(index: Any) -> None:
    index[Q]["shape"] = [10**9, 10**6]
    index[Q]["boxes"] = [{**index[Q]["boxes"][0], "sizes": [10**9, 10**6]}]


def _beyond_int64(index: Any) -> None:
    index[Q]["shape"] = [10**30, 8]
    index[Q]["boxes"][1]["offsets"] = [10**30 - 4, 0]


def _outside(index: Any) -> None:
    index[Q]["boxes"][1]["offsets"] = [5, 0]


def _negative(index: Any) -> None:
    index[Q]["boxes"][1]["offsets"] = [-4, 0]


def _empty(index: Any) -> None:
    index[Q]["boxes"][1]["sizes"] = [0, 8]


def _overlapping(index: Any) -> None:
    index[Q]["boxes"][1]["offsets"] = [0, 0]


def _partly_overlapping(index: Any) -> None:
    index[Q]["boxes"][1]["offsets"] = [2, 0]


def _missing(index: Any) -> None:
    del index[Q]["boxes"][1]


def _other_axes(index: Any) -> None:
    index[Q]["boxes"][1].update(offsets=[32], sizes=[32])


def _three_axes(index: Any) -> None:
    index[Q]["shape"] = [2, 4, 8]


def _no_axes(index: Any) -> None:
    index[Q].update(shape=[], boxes=[])


def _flat_box(index: Any) -> None:  # as many bytes, another shape
    index[Q]["boxes"][1].update(offsets=[4, 0], sizes=[2, 8])
    index[Q]["boxes"].append({**index[Q]["boxes"][1], "offsets": [6, 0]})


def _other_digest(index: Any) -> None:
    index[Q]["digest"] = "0" * 16


def _renamed(name: str) -> Callable[[Any], None]:
    def rename(index: Any) -> None:
        index[name] = index.pop(Q)

    return rename


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (_shape, r"have 64 of 1000000000000000 elements"),
        (_huge_box, r"rank-00000-000\.safetensors is too small for the boxes in it"),
        (_beyond_int64, r"have 64 of 8000000000000000000000000000000 elements"),
        (_outside, r"a box of weight/core\.0\.q lies outside of it"),
        (_negative, r"1 mistakes in it"),
        (_empty, r"1 mistakes in it"),
        (_overlapping, r"boxes of weight/core\.0\.q overlap"),
        (_partly_overlapping, r"boxes of weight/core\.0\.q overlap"),
        (_missing, r"have 32 of 64 elements"),
        (_other_axes, r"a box of weight/core\.0\.q has other axes"),
        (_three_axes, r"1 mistakes in it"),
        (_no_axes, r"1 mistakes in it"),
        (_flat_box, r"does not have weight/core\.0\.q\[4:6,0:8\], which tensors/index\.json promises"),
        (_other_digest, r"weight/core\.0\.q is not what .*step-2 holds"),
        (_renamed("weight/../x"), r"1 mistakes in it"),
        (_renamed("weight/core.0.q\x00"), r"1 mistakes in it"),
        (_renamed("/weight"), r"1 mistakes in it"),
        (_renamed("weight/" + "x" * 10_000), r"1 mistakes in it"),
        (_renamed("weight/core.1.q"), r"weight/core\.0\.q is missing; weight/core\.1\.q is not in the model"),
    ],
)
def test_an_index_that_lies_is_refused(checkpoint, change, sentence):
    with changed(checkpoint, INDEX) as index:
        change(index)
    assert refused(checkpoint, sentence)


@pytest.mark.parametrize(
    "text", ["", "[]", "{", "[" * 10**6, '{"a":' * 10**5, "\x00", '{"weight/a": {"shape": [1e400]}}', "9" * 10**5]
)
@pytest.mark.parametrize("file", [INDEX, "state.json", "manifest.json"])
def test_json_that_is_none_or_nested_beyond_reason_is_damage(checkpoint, file, text):
    (checkpoint / file).write_text(text)
    if file != "manifest.json":
        seal(checkpoint)
    assert refused(checkpoint, "step-2 is damaged: .*(cannot be read|does not hold|does not have)")


@pytest.mark.parametrize(
    "change",
    [
        lambda part: part.__setitem__(f"{Q}[0:4,0:8]", part[f"{Q}[0:4,0:8]"].double()),
        lambda part: part.__setitem__(f"{Q}[0:4,0:8]", part[f"{Q}[0:4,0:8]"].view(torch.int32)),
        lambda part: part.__setitem__(f"{Q}[0:4,0:8]", part[f"{Q}[0:4,0:8]"].view(8, 4)),
        lambda part: part.__setitem__(f"{Q}[0:4,0:8]", torch.zeros(5, 8)),
    ],
    ids=["double", "int", "turned", "larger"],
)
def test_a_part_that_has_another_type_or_shape_is_refused(checkpoint, change):
    part = load_file(checkpoint / PART)
    change(part)
    save_file(part, checkpoint / PART)
    seal(checkpoint)
    assert refused(checkpoint, r"has weight/core\.0\.q\[0:4,0:8\] as [FI]\d\d \[\d, \d\], tensors/index\.json says F32 \[4, 8\]")


@pytest.mark.parametrize("length", [2**63 - 1, 2**40, 10**6, 3])
def test_a_part_whose_header_is_longer_or_shorter_than_it_says_is_refused(checkpoint, length):
    content = (checkpoint / PART).read_bytes()
    (checkpoint / PART).write_bytes(length.to_bytes(8, "little") + content[8:])
    seal(checkpoint)
    assert refused(checkpoint, f"step-2 is damaged: {PART} cannot be read")


def test_a_file_of_a_size_that_none_has_is_not_read(checkpoint):
    for file, size in (("manifest.json", 10**8), (INDEX, 10**8), ("state.json", 10**8)):
        shutil.rmtree(checkpoint)
        shutil.copytree(GOLDEN, checkpoint)
        with (checkpoint / file).open("ab") as out:
            out.truncate(size)
        if file != "manifest.json":
            seal(checkpoint)
        with bounded(2**27):
            assert refused(checkpoint, f"step-2 is refused: its {file} has more than")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("step", "x"), ("step", 1e400), ("step", -1), ("step", 2.5), ("step", None), ("step", True), ("step", 10**40),
        ("consumed", [8]), ("elapsed", float("nan")), ("elapsed", "1"), ("law", []), ("corpus", 1), ("corpus", None),
        ("global_batch", 0), ("applied_steps", {}), ("run_id", ["x"]),
    ],
)  # fmt: skip
def test_counters_that_cannot_be_are_named(checkpoint, key, value):
    with changed(checkpoint, "state.json") as state:
        state[key] = value
    assert refused(checkpoint, rf"state\.json has {key} ")


def test_counters_that_are_missing_are_named(checkpoint):
    for key in json.loads((GOLDEN / "state.json").read_text()):
        shutil.copy(GOLDEN / "state.json", checkpoint / "state.json")
        with changed(checkpoint, "state.json") as state:
            del state[key]
        assert refused(checkpoint, f"state.json does not have {key}")


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("model", "hidden_size", 10**9), ("model", "core_layers", 10**9), ("model", "vocab_size", 10**12),
        ("model", "vocab_size", None), ("model", "ffn_size", 10**15), ("model", "head_dim", 10**9),
        ("model", "inject", "os:system"), ("corpus", "sequence_length", 10**12), ("depth", "cap", 10**9),
    ],
)  # fmt: skip
def test_a_model_larger_than_its_tensors_is_refused_before_it_is_made(checkpoint, section, key, value):
    with changed(checkpoint, "config.yaml") as config:
        config[section][key] = value
    with bounded(), pytest.raises(LoopscaleError, match=rf"{key}|does not fit the model"):
        use(checkpoint)


# ---- at random: what passes verification either has the right values or is refused in a sentence

SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from([10**30, "..", "\x00"])
JSON = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3))


@st.composite
def damaged(draw: st.DrawFn, content: bytes) -> bytes:
    """Bytes flipped, put in or cut off."""
    found = bytearray(content)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(found) - 1))
        match draw(st.sampled_from(["flip", "digit", "insert", "delete"])):
            case "flip":
                found[at] ^= 1 << draw(st.integers(0, 7))
            case "digit":
                found[at] = draw(st.sampled_from(b'0123456789-."[]{},: e'))
            case "insert":
                found[at:at] = draw(st.binary(min_size=1, max_size=4))
            case "delete":
                del found[at : at + draw(st.integers(1, 40))]
    return bytes(found[: draw(st.just(len(found)) | st.integers(0, len(found)))])


@st.composite
def odd(draw: st.DrawFn, content: bytes) -> bytes:
    """One value somewhere in JSON or YAML replaced, or removed."""
    whole = place = yaml.safe_load(content)
    while True:
        key = draw(st.sampled_from(list(place) if isinstance(place, dict) else range(len(place))))
        if isinstance(place[key], dict | list) and place[key] and draw(st.integers(0, 3)):
            place = place[key]
            continue
        if draw(st.booleans()):
            place[key] = draw(JSON)
        else:
            del place[key]
        return json.dumps(whole).encode()


def with_changes(file: str) -> st.SearchStrategy[bytes]:
    content = (GOLDEN / file).read_bytes()
    return damaged(content) | odd(content)


@contextmanager
def holding(file: str, content: bytes) -> Iterator[Path]:
    """The golden checkpoint with another ``file``, which its manifest has as it is."""
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder) / "step-2"
        shutil.copytree(GOLDEN, checkpoint)
        (checkpoint / file).write_bytes(content)
        if file != "manifest.json":
            seal(checkpoint)
        yield checkpoint


fuzz = settings(deadline=None, max_examples=150, suppress_health_check=list(HealthCheck))


@fuzz
@given(with_changes(INDEX))
def test_an_index_with_random_changes_gives_the_right_tensors_or_a_sentence(mesh, content):
    with holding(INDEX, content) as checkpoint, bounded():
        try:
            store.verify(checkpoint)
            restore(checkpoint)
            loaded = store.load_whole(checkpoint)
        except LoopscaleError:
            pass
        else:
            assert all(torch.equal(WHOLE[name], value) for name, value in loaded.items())


@fuzz
@given(with_changes("manifest.json"))
def test_a_manifest_with_random_changes_gives_the_right_model_or_a_sentence(mesh, content):
    with holding("manifest.json", content) as checkpoint, bounded(), suppress(LoopscaleError):
        use(checkpoint)


@fuzz
@given(with_changes("state.json"))
def test_a_state_with_random_changes_gives_counters_or_a_sentence(mesh, content):
    with holding("state.json", content) as checkpoint, bounded():
        store.verify(checkpoint)
        try:
            state = State.of(checkpoint)
        except LoopscaleError:
            pass
        else:
            counts = (state.step, state.consumed, state.tokens, state.skipped, state.bad_in_a_row, state.applied_steps)
            assert all(type(count) is int and 0 <= count <= 2**53 for count in counts)
            assert 0 <= state.elapsed < float("inf")
            assert (type(state.law), type(state.corpus), type(state.run_id)) == (dict, str, str)
            assert state.global_batch >= 1


@fuzz
@given(with_changes("config.yaml"))
def test_a_configuration_with_random_changes_gives_the_right_weights_or_a_sentence(mesh, content):
    """Another number of heads would fit the same tensors: what a configuration says otherwise is its own business."""
    with holding("config.yaml", content) as checkpoint, bounded():
        try:
            stage = use(checkpoint)._stage
        except LoopscaleError:
            pass
        else:
            for holder, parameter in stage.held():
                for box, here in holder.views(parameter.detach()):
                    spans = tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))
                    assert torch.equal(here, WHOLE[f"weight/{box.weight.name}"][spans])
