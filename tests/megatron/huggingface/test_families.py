"""Every family against the real transformers: import, export, load, and compute the same logits.

Runs under whatever transformers is installed; `test_transformers.py` runs it under version 4 and under version 5.
"""

import json
import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckpt_tools.formats.safetensors import read_safetensors_catalog
from ckpt_tools.megatron.huggingface.config.codecs import REQUIRED
from ckpt_tools.megatron.huggingface.config.config import in_v4_form, read_config
from ckpt_tools.megatron.huggingface.families.families import FAMILIES, Families, load_rule_file
from ckpt_tools.megatron.huggingface.mapping.checks import Spec
from ckpt_tools.megatron.huggingface.mapping.targets import Exported, Imported, export_targets, import_targets
from tests.conftest import REPO
from tests.megatron.huggingface.by_rules import Arrays, assert_same, exported, materialise, specs
from tests.megatron.huggingface.models import (
    BASE,
    CONFIGS,
    LIKE,
    MLA,
    SCRIPTED,
    eager,
    installed,
    logits,
    make_model,
)
from tests.megatron.huggingface.test_rule_files import NESTED_LLAMA
from tests.verify.test_hf_folder import check_names

transformers = pytest.importorskip("transformers", reason="the optional peer transformers is not installed")
from safetensors.numpy import load_file, save_file  # noqa: E402  # after the skip

transformers.utils.logging.set_verbosity(logging.ERROR)
pytestmark = pytest.mark.filterwarnings(SCRIPTED)


@dataclass
class Case:
    """A model saved by transformers, imported and exported again by the rules."""

    directory: Path
    want: Any  # logits
    config: dict[str, Any]
    tensors: Arrays
    imported: Imported
    megatron: Arrays
    exported: Exported
    again: Arrays


def make_case(name: str, directory: Path) -> Case:
    model = make_model(name)
    want = logits(model)
    model.save_pretrained(directory)
    config = json.loads((directory / "config.json").read_text())
    catalog = read_safetensors_catalog(directory)
    tensors = load_file(directory / "model.safetensors")
    found = {key: Spec(entry.dtype, entry.shape) for key, entry in catalog.tensors.items()}
    assert found == specs(tensors)
    imported = import_targets(found, config, vocab_multiple=64)
    megatron = materialise(imported.tensors, tensors, source_shapes=imported.shapes, offsets=imported.offsets)
    args = imported.args
    open_rope = args.get("rotary_seq_len_interpolation_factor")  # Megatron-LM's args leave it open
    told = open_rope or name in LIKE
    made, again = exported(megatron, args, config if told else None)
    return Case(directory, want, config, tensors, imported, megatron, made, again)


@pytest.fixture(scope="module", params=sorted(installed()))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return make_case(request.param, tmp_path_factory.mktemp(request.param) / "original")


def load(directory: Path, tensors: Arrays, config: dict[str, Any]) -> Any:
    """The model that transformers makes of these files; every tensor found, none left over."""
    directory.mkdir()
    save_file({key: np.ascontiguousarray(value) for key, value in tensors.items()},
              directory / "model.safetensors", metadata={"format": "pt"})  # fmt: skip
    (directory / "config.json").write_text(json.dumps(config))
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        directory, output_loading_info=True, **eager()
    )
    assert not any(info.values()), info
    return model.eval()


def test_round_trip(case, tmp_path):
    """Same names and bits as transformers wrote; loads completely; logits exactly equal; config is v4-style."""
    assert case.again.keys() == case.tensors.keys()
    for key, array in case.tensors.items():
        assert array.tobytes() == case.again[key].tobytes(), key
    # Imports choose the side's own convention, so that no norm is computed on but those of a class that has both.
    assert all(name.endswith(".linear_attn.norm.weight") for name in case.exported.offsets)
    assert "rope_parameters" not in case.exported.config and "dtype" not in case.exported.config
    model = load(tmp_path / "exported", case.again, dict(case.exported.config))
    assert float((logits(model) - case.want).abs().max()) == 0.0


def test_config_says_what_transformers_said(case):
    """Every field both configs have is equal, so nothing was lost on the way through Megatron's args."""
    family = case.exported.family
    ours, theirs = read_config(family, case.exported.config), read_config(family, case.config)
    assert ours == replace(theirs, mtp_num_layers=0)  # transformers has no prediction layers
    assert {field.hf for field in family.fields} <= set(case.exported.config)


def test_verify_knows_what_the_class_has(case):
    check_names(case.directory)


def test_reference_config_agrees(case):
    """The original config.json as a reference changes no tensor and no architecture field."""
    exported = export_targets(specs(case.megatron), case.imported.args, case.config)
    assert exported.tensors == case.exported.tensors
    model_fields = {field.hf for field in exported.family.fields}
    assert {k: exported.config[k] for k in model_fields} == {k: case.exported.config[k] for k in model_fields}


QKV = "decoder.layers.1.self_attention.linear_qkv.weight"


def naive_qkv(case: Case) -> dict[str, Any]:
    """q, k, v cut as if Megatron stored them one after another."""
    dims = [case.tensors[f"model.layers.1.self_attn.{x}_proj.weight"].shape[0] for x in "qkv"]
    parts = np.split(case.megatron[QKV], np.cumsum(dims)[:-1])
    return {f"model.layers.1.self_attn.{x}_proj.weight": part for x, part in zip("qkv", parts, strict=True)}


def swapped_gate_up(case: Case) -> dict[str, Any]:
    gate, up = "model.layers.1.mlp.gate_proj.weight", "model.layers.1.mlp.up_proj.weight"
    return {gate: case.tensors[up], up: case.tensors[gate]}


@pytest.mark.parametrize("name", ["llama3", "qwen2", "qwen3"])
@pytest.mark.parametrize("wrong", [naive_qkv, swapped_gate_up])
def test_wrong_layouts_fail_the_same_comparison(name, wrong, tmp_path):
    case = make_case(name, tmp_path / "original")
    model = load(tmp_path / "wrong", {**case.again, **wrong(case)}, dict(case.exported.config))
    assert float((logits(model) - case.want).abs().max()) > 1e-2


LATENT = {key: MLA[key] for key in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")}
MINIMAL = {**LATENT, "vocab_size": 97, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
           "intermediate_size": 37, "max_position_embeddings": 64, "n_embd": 24, "n_layer": 2, "n_head": 4,
           "n_positions": 64, "rope_theta": 500.0, "use_parallel_residual": False, "num_layers": 2}  # fmt: skip


DENSE = ("nemotron", "jais2", "persimmon", "arcee", "starcoder2", "gpt_neox", "gpt_bigcode", "stablelm", "glm",
         "helium", "ministral", "cwm", "youtu", "internlm3", "iquestcoder", "exaone", "exaone4",
         "falcon_h1")  # fmt: skip
WITH_EXPERTS = ("deepseek_v3", "deepseek_v32", "glm_moe_dsa", "glm4_moe_lite", "dots1", "minimax_m2", "olmoe",
                "exaone_moe", "hy_v3", "solar_open", "sarvam_moe", "sarvam_mla")  # fmt: skip


@pytest.mark.parametrize("name", [n for n in (*DENSE, *WITH_EXPERTS) if n in transformers.CONFIG_MAPPING])
def test_what_is_not_said_is_what_the_class_takes(name):
    """The defaults of the fields are those of the class, all together."""
    family, settings = FAMILIES[name], MINIMAL if name in DENSE else CONFIGS[name][1]
    needed = [one for one in family.fields if one.default is REQUIRED]
    must = {key for one in needed for key in (one.hf, one.also) if key is not None} | {
        "max_position_embeddings"
    }
    must |= {"use_parallel_residual"} if name in DENSE else {"num_key_value_heads"}
    must |= {"norm_topk_prob"} if name == "dots1" else set()
    said = {key: value for key, value in settings.items() if key in must}
    whole = transformers.AutoConfig.for_model(name, **said).to_dict()
    given = {
        **said,
        "model_type": name,
        "torch_dtype": whole.get("dtype"),
        **{key: whole[key] for key in must & whole.keys()},
    }
    if name == "dots1":  # its own is refused
        given, whole = (one | {"n_shared_experts": 1} for one in (given, whole))
    ours, theirs = read_config(family, given), read_config(family, whole)
    assert ours == replace(theirs, mtp_num_layers=0)  # transformers has no prediction layers


def test_a_family_by_a_rule_file_alone(tmp_path):
    """Arcee by example-scripts/huggingface_family.yaml: every tensor comes back, and the class computes the same."""
    config = transformers.ArceeConfig(**BASE, head_dim=10, mlp_bias=True, attention_bias=True)
    model = transformers.AutoModelForCausalLM.from_config(config, **eager()).eval()
    for number, tensor in enumerate(model.state_dict().values()):
        tensor.copy_(0.3 + 0.2 * (tensor + number % 3))
    model.save_pretrained(tmp_path / "original")
    said = json.loads((tmp_path / "original" / "config.json").read_text())
    tensors = load_file(tmp_path / "original" / "model.safetensors")
    families = Families(load_rule_file(REPO / "example-scripts" / "huggingface_family.yaml"))
    imported = import_targets(specs(tensors), said, vocab_multiple=64, families=families)
    megatron = materialise(imported.tensors, tensors)
    made, again = exported(megatron, imported.args, said, families=families)
    assert_same(again, tensors)
    loaded = load(tmp_path / "again", again, dict(made.config))
    assert float((logits(loaded) - logits(model)).abs().max()) == 0.0


IS_5 = not transformers.__version__.startswith("4.")  # a skip in a peer's run is a failure


if IS_5:  # 4 does not read rope_parameters

    @pytest.mark.parametrize("name", ["llama3", "llama_yarn", "llama2"])
    def test_rope_parameters_by_a_rule_file(name, tmp_path):
        """config.json says it as the class saves it, every number comes back, and the class computes the same."""
        rules = tmp_path / "rules.yaml"
        rules.write_text(NESTED_LLAMA)
        families = Families(load_rule_file(rules))
        case = make_case(name, tmp_path / "original")
        imported = import_targets(specs(case.tensors), case.config, families=families)
        made, again = exported(
            materialise(imported.tensors, case.tensors), imported.args, case.config, families=families
        )
        assert_same(again, case.tensors)
        said = case.config["rope_parameters"]
        assert {
            key: made.config["rope_parameters"][key] for key in said
        } == said and "rope_theta" not in made.config
        loaded = load(tmp_path / "again", again, dict(made.config))
        assert float((logits(loaded) - case.want).abs().max()) == 0.0


CLASSES = transformers.models.auto.configuration_auto.CONFIG_MAPPING
KINDS = {name: family.model_type or name for name, family in FAMILIES.items()}


@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if kind in CLASSES])
def test_a_class_takes_without_a_field_what_its_family_takes(name):
    """A config.json without a field is the model that it is with the class's own value of it."""
    family = FAMILIES[name]
    config = in_v4_form(CLASSES[KINDS[name]]().to_dict())
    config["num_experts_per_tok"] = config.get("num_experts_per_tok") or 2  # DeepSeek-V2's class has none
    if config.get("use_parallel_residual"):
        config["use_parallel_residual"] = False  # which GPT-NeoX's class has, and no Megatron
    whole = read_config(family, config)
    for field in family.fields:
        if field.wins == "either" or field.arg == "mtp_num_layers" or field.hf == "use_parallel_residual":
            continue  # refused without; proven by the tensors
        if name.endswith("_vl_moe_text") and field.hf == "tie_word_embeddings":
            continue  # transformers 4 and 5 have each its own; what is stored decides (towers.py)
        if field.default is not REQUIRED:
            less = {key: value for key, value in config.items() if key not in (field.hf, field.also)}
            assert read_config(family, less) == whole, field.hf


if IS_5:  # 4 leaves them as they are

    @pytest.mark.parametrize(
        ("name", "field", "changed"),
        [
            ("youtu", {"pad_token_id": 3}, "embed_tokens"),
            ("mamba2", {"rescale_prenorm_residual": True}, "out_proj"),
        ],
    )
    def test_fields_by_which_a_class_changes_what_it_loads(name, field, changed, tmp_path, monkeypatch):
        """An export does not say them, whatever the reference says, and what is loaded is what is stored."""
        kind, settings = CONFIGS[name]
        monkeypatch.setitem(CONFIGS, name, (kind, {**settings, **field}))
        case = make_case(name, tmp_path / "original")
        made, again = exported(case.megatron, case.imported.args, case.config)
        ((key, value),) = field.items()
        no_longer = {"pad_token_id": None, "rescale_prenorm_residual": False}
        for notes in (made.notes, case.imported.notes):
            assert any(
                f"{key} is {value!r} in config.json: transformers 5.24 changes" in note for note in notes
            )
        assert made.config[key] == no_longer[key]

        def differing(folder: Path, config: dict[str, Any]) -> list[str]:
            loaded = load(folder, again, config).state_dict()
            return [
                one for one, array in case.tensors.items() if loaded[one].numpy().tobytes() != array.tobytes()
            ]

        assert differing(tmp_path / "new", dict(made.config)) == []
        assert all(changed in one for one in differing(tmp_path / "as it was", {**made.config, **field}))
        assert differing(tmp_path / "once more", {**made.config, **field})


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize("kind", ["DeepseekV2Config", "DeepseekV3Config"])
def test_a_model_without_a_shared_expert(kind, tmp_path, monkeypatch):
    """The class has one without elements then; it is not written, and what loads computes the same."""
    monkeypatch.setitem(CONFIGS, "no_shared", (kind, {**BASE, **MLA, "n_shared_experts": 0}))
    model = make_model("no_shared")
    want = logits(model)
    model.save_pretrained(tmp_path / "original")
    config = json.loads((tmp_path / "original" / "config.json").read_text())
    tensors = load_file(tmp_path / "original" / "model.safetensors")
    imported = import_targets(specs(tensors), config)
    megatron = materialise(imported.tensors, tensors, source_shapes=imported.shapes)
    made, again = exported(megatron, imported.args)
    assert tensors.keys() - again.keys() == set(imported.dropped)
    (tmp_path / "new").mkdir()
    save_file(again, tmp_path / "new" / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "new" / "config.json").write_text(json.dumps(made.config))
    loaded, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "new", output_loading_info=True, **eager()
    )
    parts = {name: parameter.numel() for name, parameter in loaded.named_parameters()}
    assert all(parts[name] == 0 for name in info.pop("missing_keys")) and not any(info.values())
    assert float((logits(loaded.eval()) - want).abs().max()) == 0.0
