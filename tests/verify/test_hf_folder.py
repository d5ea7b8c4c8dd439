"""`verify` of a Hugging Face folder: whatever a loader reads first of it is a finding when it cannot be read."""

import json
import re
import shutil
import struct
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from ckpt_tools.cli.app import run
from ckpt_tools.commands.check.verify import verify_checkpoint
from ckpt_tools.commands.huggingface.folder import without_frequencies
from ckpt_tools.formats.safetensors import read_safetensors_catalog
from ckpt_tools.formats.storage.files import LocalFiles
from ckpt_tools.megatron.huggingface.families.identify import NUMBER
from ckpt_tools.model.catalog import TensorEntry
from ckpt_tools.verify.checkpoint.hf_folder import check_hf_names
from ckpt_tools.verify.report import Finding, VerifyOptions
from tests.megatron.huggingface import vision_language
from tests.megatron.huggingface.by_rules import DEEPSEEK, LLAMA, QWEN3_MOE, directory
from tests.megatron.huggingface.quantized_models import fp8_blocks, fp8_tensors, gpt_oss, mixed
from tests.megatron.huggingface.vision_language import KINDS, save

ONE, TWO, INDEX = "model-1.safetensors", "model-2.safetensors", "model.safetensors.index.json"
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 9\n"
JSON = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "vocab.json")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A sound model in two files."""
    save_file({"a": np.ones(3, np.float32), "b": np.ones(2, np.float32)}, tmp_path / ONE)
    save_file({"c": np.ones(4, np.float32)}, tmp_path / TWO)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": ONE, "b": ONE, "c": TWO}}))
    for name in JSON:
        (tmp_path / name).write_text('{"model_type": "llama"}')
    (tmp_path / "eval.json").write_text("of somebody else's program")
    return tmp_path


def errors(model: Path) -> str:
    found = [one for one in verify_checkpoint(model).findings if one.check != "names"]
    return "\n".join(f"{one.severity} {one.check} {one.where}: {one.message}" for one in found)


def test_a_sound_model_has_no_finding(model):
    assert errors(model) == ""
    checks = {check.name: check.looked_at for check in verify_checkpoint(model).checks}
    assert checks["model"] == len(JSON)


@pytest.mark.parametrize("name", JSON)
@pytest.mark.parametrize(("text", "told"), [
    ("{", "it is not JSON"), ("", "it is not JSON"), ("\udcff", "it is not JSON"), ("[1]", "no object: list"),
    ("null", "no object: NoneType"), ("[" * 100_000, "nested too deep"), (POINTER, "Git LFS pointer"),
])  # fmt: skip
def test_a_settings_file_that_cannot_be_read_is_an_error(model, name, text, told):
    (model / name).write_text(text, errors="surrogateescape")
    found = errors(model)
    assert found.startswith(f"error model {name}: ") and told in found
    assert run(["verify", str(model), "-q"]) == 1


def test_an_empty_config_and_none_are_findings(model):
    (model / "config.json").write_text("{}")
    assert errors(model).startswith("error model config.json: it is an empty object")
    (model / "config.json").unlink()
    assert errors(model).startswith("warning model config.json: it is missing")
    (model / "generation_config.json").unlink()
    assert "generation_config" not in errors(model)


def index(model: Path, **places: object) -> None:
    (model / INDEX).write_text(json.dumps({"weight_map": {"a": ONE, "b": ONE, "c": TWO} | places}))


def empty(name: str) -> Callable[[Path], object]:
    return lambda model: (model / name).write_bytes(struct.pack("<Q", 2) + b"{}")


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "index not JSON": (lambda m: (m / INDEX).write_text("{"), "not a safetensors index"),
    "index a list": (lambda m: (m / INDEX).write_text("[]"), "not a safetensors index"),
    "index empty": (lambda m: (m / INDEX).write_text(""), "not a safetensors index"),
    "no weight_map": (lambda m: (m / INDEX).write_text("{}"), "not a safetensors index"),
    "weight_map a list": (lambda m: (m / INDEX).write_text('{"weight_map": []}'), "weight_map is not a map"),
    "absent file": (lambda m: index(m, d="model-3.safetensors"), "shard model-3.safetensors is missing"),
    "file elsewhere": (lambda m: index(m, d="../x.safetensors"), "is not a file name"),
    "absent tensor": (lambda m: index(m, d=TWO), f"{TWO} lacks d, which the index places there"),
    "in another file": (lambda m: index(m, a=TWO), f"{ONE} holds a, which the index places in {TWO}"),
    "in two files": (lambda m: save_file({n: np.ones(4, np.float32) for n in "ac"}, m / TWO),
                     f"{TWO} holds a, which the index places in {ONE}"),
    "named twice": (lambda m: (m / INDEX).write_text(f'{{"weight_map": {{"a": "{ONE}", "a": "{TWO}"}}}}'),
                    "duplicate name 'a'"),
    "nothing named": (lambda m: (m / INDEX).write_text('{"weight_map": {}}'), "hold no tensor at all"),
    "nothing in one": (empty(TWO), f"{TWO} lacks c, which the index places there"),
}  # fmt: skip


@pytest.mark.parametrize("case", DAMAGE)
def test_an_index_that_is_not_that_of_the_files_is_an_error(model, case):
    damage, told = DAMAGE[case]
    damage(model)
    assert told in errors(model) and "error" in errors(model)
    assert run(["verify", str(model), "-q"]) == 1


def test_a_single_file_without_tensors_is_no_model(model):
    for name in (ONE, TWO, INDEX):
        (model / name).unlink()
    empty("model.safetensors")(model)
    assert "hold no tensor at all" in errors(model)


def test_a_file_that_the_index_does_not_name_is_a_warning(model):
    save_file({"a": np.ones(3, np.float32)}, model / "consolidated.safetensors")
    assert errors(model).startswith("warning files consolidated.safetensors: no item lies in this file")


PARTS = re.compile("_(blocks|scales|scale|scale_inv|packed|shape)$")  # of quantized weights


def names(folder: Path, **tensors: TensorEntry | None) -> list[Finding]:
    """What the check of names finds in a folder that has other tensors, or not one of them."""
    catalog = read_safetensors_catalog(folder)
    held = {key: entry for key, entry in {**catalog.tensors, **tensors}.items() if entry is not None}
    kept, _ = without_frequencies(replace(catalog, tensors=held))
    config = json.loads((folder / "config.json").read_text())
    return list(check_hf_names(LocalFiles(str(folder)), kept, config).findings)


def check_names(folder: Path, free: Sequence[str] = ()) -> None:
    """A whole model has no finding; the loss of a tensor of each kind, another shape and a strange name are named.

    `free` are tensors that may be absent.
    """
    assert names(folder) == []
    tensors = without_frequencies(read_safetensors_catalog(folder))[0].tensors
    for name in {NUMBER.sub("N", name): name for name in tensors}.values():
        entry = tensors[name]
        lost = names(folder, **{name: None})
        weight = PARTS.sub("", name)
        assert name in free or any(weight in f"{one.where} {one.message}" for one in lost), name
        assert {one.severity for one in lost} <= {"error"}
        shape = (*entry.shape[:-1], entry.shape[-1] + 1) if entry.shape else (2, 3)
        other = names(folder, **{name: replace(entry, shape=shape)})
        assert name in free or any(weight in f"{one.where} {one.message}" for one in other), name
        assert {one.severity for one in other} <= {"error"}
    last = max(tensors, key=lambda name: (bool(NUMBER.search(name)), name.endswith("norm.weight"), name))
    more = {NUMBER.sub("77", last, count=1): tensors[last]}
    assert [one.where for one in names(folder, **more)] == list(more)


@pytest.mark.parametrize("config", [
    LLAMA, {**LLAMA, "tie_word_embeddings": True}, QWEN3_MOE, DEEPSEEK, {**DEEPSEEK, "q_lora_rank": None},
    {**DEEPSEEK, "num_nextn_predict_layers": 0},
], ids=lambda c: c["model_type"])  # fmt: skip
def test_names_follow_from_config_json(config, tmp_path):
    check_names(save(tmp_path / "hf", config, directory(config)))


@pytest.mark.parametrize("make", [fp8_blocks, fp8_tensors, gpt_oss, mixed], ids=lambda make: make.__name__)
def test_names_of_quantized_models(make, tmp_path):
    folder = make().save(tmp_path / "hf")
    check_names(folder, [key for key in make().stored if key.endswith("activation_scale")])


@pytest.mark.parametrize("kind", KINDS)
def test_names_of_vision_language_models(kind, tmp_path):
    check_names(vision_language.directory(tmp_path / "hf", kind))


def test_half_models_that_users_met(user_cases):
    for case, named in (
        ("hf_incomplete_is_valid/experts_lost", "model.layers.1.mlp.experts.3.up_proj.weight"),
        ("hf_incomplete_is_valid/expert_names", "model.layers.1.mlp.experts.up_proj.weight3"),
        ("messages/wrapped_inside", "config.json"),
    ):
        assert named in {one.where for one in names(user_cases / case)}
        assert run(["verify", str(user_cases / case), "-q"]) == 1
    lacking = user_cases / "messages" / "index_lacks_a_tensor"
    assert "model.layers.0.mlp.down_proj.weight, which the index does not name" in errors(lacking)
    folder = user_cases / "classification_heads" / "hf_reward_model"
    assert names(folder) == []  # the body of the family, and a head of its own
    (lost,) = names(folder, **{"model.norm.weight": None})
    assert lost.where == "model.norm.weight"


ENTRY = TensorEntry("x", "int32", (2, 3), ())


@pytest.mark.parametrize(("config", "tensors", "severity", "said"), [
    ({"model_type": "own"}, {}, "warning", "were not compared: config.json has model_type 'own'"),
    ({"hidden_size": None}, {}, "error", "hidden_size is null; a number of 1 or more is expected"),
    ({"quantization_config": {"quant_method": "awq"}}, {}, "warning", "not compared: config.json says"),
    ({"quantization": {"bits": 4}}, {}, "warning", "not compared: config.json has 'quantization'"),
    ({"architectures": {"x": 1}, "text_config": 3}, {}, "", ""),
    ({"architectures": ["LlamaForSomething"]}, {"score.weight": ENTRY, "lm_head.weight": None}, "", ""),
    ({"architectures": ["LlamaForCausalLM"]}, {"v_head.weight": replace(ENTRY, dtype="float32")}, "error", "no mod"),
    ({}, {"model.norm.qweight": ENTRY, "model.norm.weight": None}, "warning", "norm.qweight is int32: codes"),
    ({}, {"model.norm.qweight": ENTRY}, "error", "is of no module"),
    ({}, {"model.norm.weight": replace(ENTRY, shape=(12,))}, "error", "is int32, which no weight can be"),
    ({"torch_dtype": "bfloat16"}, {}, "warning", "21 of 21 tensors, this the first, are float32; config.json"),
    ({}, {"model.rotary_emb.inv_freq": ENTRY, "model.layers.0.self_attn.rotary_emb.inv_freq": ENTRY}, "", ""),
    ({"tie_word_embeddings": True}, {"lm_head.weight": None}, "", ""),
    ({"tie_word_embeddings": True}, {"lm_head.weight": replace(ENTRY, dtype="float32")}, "error", "has shape [2, 3]"),
])  # fmt: skip
def test_what_is_compared(config, tensors, severity, said, tmp_path):
    folder = save(tmp_path / "hf", {**LLAMA, **config}, directory(LLAMA))
    found = names(folder, **tensors)
    assert [one.severity for one in found] == ([severity] if severity else [])
    assert said in "".join(one.message for one in found)


@pytest.mark.parametrize("config", [LLAMA, QWEN3_MOE], ids=lambda c: c["model_type"])
def test_names_of_a_model_without_its_head(config, tmp_path):
    """As `AutoModel` saves it: no first segment, and no head."""
    tensors = dict(directory(config))
    del tensors["lm_head.weight"]
    bare = {key.removeprefix("model."): tensor for key, tensor in tensors.items()}
    folder = save(tmp_path / "hf", {**config, "architectures": ["SomeModel"]}, bare)
    assert names(folder) == []
    assert [one.where for one in names(folder, **{"norm.weight": None})] == ["norm.weight"]


TIED = {**LLAMA, "tie_word_embeddings": True}
CLASSIFIER = {**LLAMA, "architectures": ["LlamaForSequenceClassification"], "id2label": {"0": "a"}}
TAGGER = {**LLAMA, "architectures": ["Qwen2ForTokenClassification"]}
REWARD = {**LLAMA, "architectures": ["Qwen2ForRewardModel"]}
OWN_CODE = {**CLASSIFIER, "auto_map": {"AutoModel": "modeling.Model"}}


@pytest.mark.parametrize(("config", "head", "said"), [
    (CLASSIFIER, {}, "score.weight is missing; config.json asks for [1, 12]"),
    (CLASSIFIER, {"score.weight": (2, 12)}, "score.weight has shape [2, 12]; config.json asks for [1, 12]"),
    (CLASSIFIER, {"score.weight": (1, 12)}, ""),
    (TAGGER, {"classifier.weight": (2, 12)}, "classifier.bias is missing; config.json asks for [2]"),
    (TAGGER, {"score.weight": (2, 12), "score.bias": (2,)}, ""),
    (REWARD, {}, "config.json no tensor of the head that a Qwen2ForRewardModel has is stored"),
    (REWARD, {"lm_head.weight": (11, 12)}, "config.json no tensor of the head"),
    (REWARD, {"score.0.weight": (9, 12)}, ""),
    (OWN_CODE, {}, "config.json no tensor of the head that a LlamaForSequenceClassification has is stored"),
    (OWN_CODE, {"pooler.weight": (3, 4)}, ""),
])  # fmt: skip
def test_the_head_of_a_classifier(config, head, said, tmp_path):
    """transformers gives a head that is not stored random weights."""
    tensors = {name: tensor for name, tensor in directory(LLAMA).items() if name != "lm_head.weight"}
    tensors |= {name: np.ones(shape, np.float32) for name, shape in head.items()}
    found = [f"{one.where} {one.message}" for one in names(save(tmp_path / "hf", config, tensors))]
    assert [line[: len(said)] for line in found] == ([said] if said else [])


@pytest.mark.parametrize(("config", "head"), [
    (LLAMA, "lm_head.weight"), (TIED, "lm_head.weight"), (CLASSIFIER, "score.weight"),
])  # fmt: skip
def test_names_of_the_model_inside_next_to_a_head(config, head, tmp_path):
    """transformers 4.57.6 calls such a folder corrupted, 5.24.0 loads all of it."""
    bare = {key.removeprefix("model."): tensor for key, tensor in directory(TIED).items()}
    bare[head] = bare["embed_tokens.weight"][: 11 if head == "lm_head.weight" else 1]
    (found,) = names(save(tmp_path / "hf", config, bare))
    assert (found.severity, found.where) == ("warning", head)
    assert "lack 'model.', which a class with this head saves: transformers 4 refuses" in found.message


@pytest.mark.parametrize(("config", "copy"), [
    (TIED, "lm_head.weight"), (DEEPSEEK, "model.layers.3.embed_tokens.weight"),
])  # fmt: skip
def test_a_stored_copy_holds_the_same_values(config, copy, tmp_path):
    """transformers 5 takes a tied head that differs, 4 drops it; import-hf refuses it."""
    tensors = dict(directory(config))
    tensors[copy] = tensors["model.embed_tokens.weight"].copy()
    folder, content = save(tmp_path / "hf", config, tensors), VerifyOptions(content=True)
    assert verify_checkpoint(folder, options=content).findings == []
    tensors[copy][3, 5] += 1
    save_file(tensors, folder / "model.safetensors")
    assert verify_checkpoint(folder).findings == []
    (found,) = verify_checkpoint(folder, options=content).findings
    assert (found.severity, found.check, found.where) == ("error", "names", "config.json")
    assert f"{copy} differs from model.embed_tokens.weight at " in found.message
    assert run(["import-hf", str(folder), str(tmp_path / "out"), "-q"]) == 5


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:1000])


def cut_data(folder: Path) -> None:
    cut(folder / "iter_0000020" / "__0_0.distcp")


def zarr(folder: Path) -> None:
    (folder / "iter_0000020" / "metadata.json").write_text('{"sharded_backend": "zarr"}')


@pytest.mark.parametrize(
    ("harm", "errors"),
    [
        (lambda folder: None, 0),
        (cut_data, 1),
        (lambda folder: (folder / "iter_0000020" / ".metadata").unlink(), 1),
        (lambda folder: (folder / "latest_checkpointed_iteration.txt").write_text("30"), 1),
        (lambda folder: (folder / "latest_checkpointed_iteration.txt").write_text("?"), 1),
        (lambda folder: cut(folder / "model.safetensors"), 1),
        (zarr, 0),
    ],
)
@pytest.mark.parametrize("content", [False, True])
def test_both_of_a_folder_that_holds_the_model_twice_are_checked(harm, errors, content, user_cases, tmp_path):
    folder = tmp_path / "checkpoint-20"
    shutil.copytree(user_cases / "swift_checkpoint_folder" / "checkpoint-20", folder)
    harm(folder)
    report = verify_checkpoint(folder, options=VerifyOptions(content=content))
    assert report.is_valid == (errors == 0)
    assert any(f.check == "other copy" for f in report.findings)
    assert not any("not read" in f.message for f in report.findings)


def test_a_model_in_an_iterations_folder_is_checked(user_cases, tmp_path):
    swift = user_cases / "swift_checkpoint_folder" / "checkpoint-20"
    for place in ("", "hf"):
        folder = tmp_path / f"run{place}" / "iter_0000020"
        shutil.copytree(swift / "iter_0000020", folder)
        (folder / place).mkdir(exist_ok=True)
        for name in ("model.safetensors", "config.json"):
            shutil.copy(swift / name, folder / place)
        assert verify_checkpoint(folder).is_valid
        cut(folder / place / "model.safetensors")
        assert not verify_checkpoint(folder).is_valid


NO_COUNT = "a number of 1 or more is expected"


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [("num_hidden_layers", value, NO_COUNT) for value in (0, -1, "2", None, [2], 10**30, 2.0, True, "missing")]
    + [("num_attention_heads", 0, NO_COUNT), ("head_dim", 0, NO_COUNT), ("hidden_size", 32.5, NO_COUNT)]
    + [("hidden_size", "missing", NO_COUNT), ("decoder_sparse_step", 0, NO_COUNT)]
    + [("rope_theta", value, "a number above 0 is expected") for value in ("1e4", [1])]
    + [("num_experts", value, "a number of 0 or more is expected") for value in (-1, "4", 4.0, True, 1 << 40)]
    + [("num_key_value_heads", 3, "num_attention_heads is 4, num_key_value_heads is 3: a multiple")]
    + [("num_experts_per_tok", 9, "num_experts_per_tok is 9, num_experts "), ("layer_types", ["full_attention"],
       "layer_types has 1 entries, num_hidden_layers is ")],
)  # fmt: skip
def test_a_config_that_no_model_can_have_is_an_error(field, value, said, tmp_path):
    config = {**QWEN3_MOE, field: value}
    if value == "missing":
        del config[field]
    save_file(dict(directory(QWEN3_MOE)), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    wrong = [one for one in verify_checkpoint(tmp_path).findings if one.severity == "error"]
    assert any(field in one.message and said in one.message for one in wrong), wrong
    assert run(["verify", str(tmp_path), "-q"]) == 1


@pytest.mark.parametrize(
    "changed", [{"hidden_act": "relu6"}, {"model_type": "unknown", "num_hidden_layers": 0}]
)
def test_a_config_that_has_no_rules_is_no_error(changed, tmp_path):
    save_file(dict(directory(QWEN3_MOE)), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({**QWEN3_MOE, **changed}))
    report = verify_checkpoint(tmp_path)
    assert report.is_valid and any("were not compared" in one.message for one in report.findings)
