"""Hugging Face folders as they are published and cached, and what is said of those that cannot be imported."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from ckpt_tools import ExportOptions, export_hf, import_hf, inspect_checkpoint
from ckpt_tools.commands.huggingface.folder import pack_shards, shard_index
from ckpt_tools.errors import MappingError, UnsupportedCheckpointError, UsageError
from tests.commands import oracle

LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 7\n"


def there_and_back(source: Path, tmp_path: Path) -> dict[str, torch.Tensor]:
    import_hf(source, tmp_path / "run")
    export_hf(tmp_path / "run", tmp_path / "back")
    return oracle.model(tmp_path / "back")


def test_adapters_are_named_with_the_way_out(cases, tmp_path):
    with pytest.raises(MappingError) as caught:
        import_hf(cases / "peft_names", tmp_path / "out")
    text = str(caught.value)
    assert text.startswith("12 tensors belong to an adapter (LoRA or similar)")
    assert "merge_and_unload" in text and text.count("\n") == 4
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "name",
    [
        "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight",
        "model.layers.0.self_attn.q_proj.lora_magnitude_vector.default.weight",
        "model.embed_tokens.lora_embedding_B.default",
        "model.layers.0.mlp.down_proj.ia3_l.default",
        "lm_head.modules_to_save.default.weight",
    ],
)
def test_every_kind_of_adapter_is_known_by_its_names(name, cases, tmp_path):
    source = cases / "mixed_dtype_rounded" / "hf"
    folder = tmp_path / "hf"
    shutil.copytree(source, folder)
    save_file(load_file(source / "model.safetensors") | {name: torch.ones(4)}, folder / "model.safetensors")
    with pytest.raises(MappingError, match="1 tensors belong to an adapter"):
        import_hf(folder, tmp_path / "out")


def test_the_index_says_which_files_are_the_model(cases, tmp_path):
    source = cases / "mistral_consolidated" / "hf"
    report = import_hf(source, tmp_path / "out")
    assert "not in the index and not read: consolidated.safetensors" in report.notes
    truth = oracle.model(source, "model-*.safetensors")
    oracle.assert_same(there_and_back(source, tmp_path), truth)


def test_stored_rotary_frequencies_are_left_out_and_said(cases, tmp_path):
    source = cases / "moonlight_inv_freq" / "hf"
    report = import_hf(source, tmp_path / "out")
    left_out = [f"model.layers.{n}.self_attn.rotary_emb.inv_freq" for n in range(3)]
    why = "rotary frequencies are computed from config.json, not loaded"
    assert [line for line in report.dropped if "inv_freq" in line] == [f"{name}: {why}" for name in left_out]
    truth = oracle.model(source)
    for name in left_out:
        del truth[name]
    biases = {key: tensor.float() for key, tensor in truth.items() if key.endswith("e_score_correction_bias")}
    truth |= biases  # which Megatron holds in fp32
    assert len(biases) == 2
    oracle.assert_same(there_and_back(source, tmp_path), truth)


def test_pointers_are_named_wherever_they_stand(cases, tmp_path):
    folder = tmp_path / "hf"
    shutil.copytree(cases / "mixed_dtype_rounded" / "hf", folder)
    (folder / "config.json").write_bytes(LFS)
    with pytest.raises(UnsupportedCheckpointError, match=r"Git LFS pointers.*\n  - config\.json"):
        import_hf(folder, tmp_path / "out")


def cache(folder: Path, source: Path, revisions: tuple[str, ...], main: str | None) -> Path:
    """A model in the hub's cache, its snapshots links to blobs."""
    root = folder / "models--some--model"
    (root / "blobs").mkdir(parents=True)
    (root / "refs").mkdir()
    for file in source.iterdir():
        if file.is_file():
            shutil.copyfile(file, root / "blobs" / file.name)
    for revision in revisions:
        snapshot = root / "snapshots" / revision
        snapshot.mkdir(parents=True)
        for blob in (root / "blobs").iterdir():
            (snapshot / blob.name).symlink_to(Path("..") / ".." / "blobs" / blob.name)
    if main is not None:
        (root / "refs" / "main").write_text(main)
    return root


@pytest.mark.parametrize("main", ["b2", None])
def test_the_root_of_a_cache_means_its_snapshot(main, cases, tmp_path):
    source = cases / "mixed_dtype_rounded" / "hf"
    root = cache(tmp_path, source, ("a1", "b2") if main else ("b2",), main)
    oracle.assert_same(there_and_back(root, tmp_path), oracle.model(source))
    reference = ExportOptions(hf_config=str(root))
    export_hf(tmp_path / "run", tmp_path / "again", reference)
    for place in (root, root / "snapshots", f"{root}/snapshots/"):
        assert inspect_checkpoint(str(place)).location.path == f"{root}/snapshots/b2"


def test_several_snapshots_without_a_main_one_are_named(cases, tmp_path):
    root = cache(tmp_path, cases / "mixed_dtype_rounded" / "hf", ("a1", "b2"), "gone")
    for command in (lambda: import_hf(root, tmp_path / "out"), lambda: inspect_checkpoint(str(root))):
        with pytest.raises(UsageError, match=f"2 snapshots.*{root}/snapshots/a1, {root}/snapshots/b2"):
            command()


def test_a_folder_of_caches_and_one_of_pickles_say_what_to_give(cases, tmp_path):
    cache(tmp_path / "hub", cases / "mixed_dtype_rounded" / "hf", ("a1",), None)
    with pytest.raises(UnsupportedCheckpointError, match=r"a Hugging Face cache.*hub/models--some--model\."):
        inspect_checkpoint(str(tmp_path / "hub"))
    pickles = tmp_path / "pickles"
    pickles.mkdir()
    for name in ("config.json", "pytorch_model.bin"):
        (pickles / name).write_text("{}")
    with pytest.raises(UnsupportedCheckpointError, match=r"without safetensors.* may run code"):
        inspect_checkpoint(str(pickles))


CARRIED = [
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "tokenizer.model.v3", "tokenizer.model.v11",
    "tiktoken.model", "qwen.tiktoken", "tekken.json", "tekken_v13.json", "spiece.model",
    "sentencepiece.bpe.model", "source.spm", "vocab.json", "vocab.txt", "merges.txt", "added_tokens.json",
    "special_tokens_map.json", "normalizer.json", "chat_template.jinja", "chat_template.json",
    "preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json",
    "generation_config.json", "LICENSE", "LICENSE.txt", "LICENSE-MODEL", "NOTICE", "USE_POLICY.md",
    "additional_chat_templates/tool_use.jinja",
]  # fmt: skip
LEFT = [
    "README.md", "modeling_own.py", "tokenization_own.py", "figures.png", "params.json", "quant_log.csv",
    "mm_grid_pinpoints.npy", "original",
]  # fmt: skip
WEIGHTS = [
    "pytorch_model.bin", "consolidated.00.pth", "model-q4.gguf", "tf_model.h5", "flax_model.msgpack",
    ".gitattributes",
]  # fmt: skip


def with_files(cases: Path, folder: Path, names: list[str]) -> Path:
    """A model with such files beside it, all of other bytes."""
    shutil.copytree(cases / "mixed_dtype_rounded" / "hf", folder)
    for name in names:
        if name == "original":
            (folder / name).mkdir()
            continue
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"\x00 as it is: " + name.encode())
    return folder


def test_tokenizers_of_every_kind_are_carried_and_what_is_not_is_said(cases, tmp_path):
    source = with_files(cases, tmp_path / "hf", [*CARRIED, *LEFT, *WEIGHTS])
    import_hf(source, tmp_path / "run")
    report = export_hf(
        tmp_path / "run", tmp_path / "back", ExportOptions(hf_config=str(source), overwrite=True)
    )
    made = {str(p.relative_to(tmp_path / "back")) for p in (tmp_path / "back").rglob("*") if p.is_file()}
    assert made == {*CARRIED, "config.json", "model.safetensors"}
    for name in CARRIED:
        assert (tmp_path / "back" / name).read_bytes() == (source / name).read_bytes()
    assert f"not copied from --hf-config: {', '.join(sorted(LEFT)[:8])}" in report.notes
    assert not any("no tokenizer" in note for note in report.notes)


def test_an_output_with_a_folder_of_templates_is_replaced_and_found_finished(cases, tmp_path):
    name = "additional_chat_templates/tool_use.jinja"
    source = with_files(cases, tmp_path / "hf", [name])
    import_hf(source, tmp_path / "run")
    out = tmp_path / "back"
    again: tuple[dict[str, Any], ...] = ({}, {"overwrite": True}, {"resume": True})
    for number, more in enumerate(again):
        if number < 2:
            (source / name).write_text(f"template {number}")
        export_hf(tmp_path / "run", out, ExportOptions(hf_config=str(source), **more))
        assert (out / name).read_text() == f"template {min(number, 1)}"
    assert [p.name for p in out.parent.iterdir() if "partial" in p.name] == []


@pytest.mark.parametrize(
    "names_code", ["config.json", "tokenizer_config.json", "processor_config.json", None]
)
def test_code_goes_along_where_something_names_it(names_code, cases, tmp_path):
    """Kimi's tokenizer is a Python file that tokenizer_config.json names; its model is one that config.json names."""
    source = with_files(cases, tmp_path / "hf", ["modeling_own.py", "tokenization_own.py"])
    if names_code is not None:
        file = source / names_code
        settings = json.loads(file.read_text()) if file.exists() else {}
        file.chmod(0o644) if file.exists() else None
        file.write_text(json.dumps(settings | {"auto_map": {"AutoTokenizer": "tokenization_own.Own"}}))
    import_hf(source, tmp_path / "run")
    report = export_hf(tmp_path / "run", tmp_path / "back", ExportOptions(hf_config=str(source)))
    code = {path.name for path in (tmp_path / "back").glob("*.py")}
    assert code == ({"modeling_own.py", "tokenization_own.py"} if names_code else set())
    said = [note for note in report.notes if "not copied" in note]
    assert len(said) == (names_code is None)


def test_a_pointer_is_not_taken_for_a_tokenizer(cases, tmp_path):
    """`tokenizer.json` of a large vocabulary is in LFS like weights, and a clone without them has its pointer."""
    source = with_files(cases, tmp_path / "hf", ["tokenizer.json"])
    import_hf(source, tmp_path / "run")
    (source / "tokenizer.json").write_bytes(LFS)
    with pytest.raises(UnsupportedCheckpointError, match=r"Git LFS pointers.*\n  - tokenizer\.json"):
        export_hf(tmp_path / "run", tmp_path / "back", ExportOptions(hf_config=str(source)))
    assert not (tmp_path / "back").exists()


def test_a_model_without_a_tokenizer_says_which_way_out_there_is(cases, tmp_path):
    source = with_files(cases, tmp_path / "hf", ["LICENSE"])
    import_hf(source, tmp_path / "run")
    notes = export_hf(tmp_path / "run", tmp_path / "a").notes
    assert "no tokenizer was written; pass --hf-config DIR to copy one" in notes
    reference = ExportOptions(hf_config=str(source))
    assert (
        "no tokenizer was written; --hf-config has none"
        in export_hf(tmp_path / "run", tmp_path / "b", reference).notes
    )


@given(st.lists(st.integers(0, 40), min_size=1, max_size=30), st.integers(1, 50))
def test_same_cuts_as_huggingface_hub(sizes, limit):
    hub = pytest.importorskip("huggingface_hub", reason="the optional peer huggingface_hub is not installed")
    from huggingface_hub.serialization._base import split_state_dict_into_shards_factory

    assert hub
    names = {f"t{i}": size for i, size in enumerate(sizes)}
    theirs = split_state_dict_into_shards_factory(
        names, get_storage_size=lambda t: t, get_storage_id=lambda t: None,
        filename_pattern="model{suffix}.safetensors", max_shard_size=limit,
    )  # fmt: skip
    ours = pack_shards(names.items(), limit)
    assert {shard.file: list(shard.keys) for shard in ours} == theirs.filename_to_tensors
    index = shard_index(ours, names)
    assert index["metadata"] == {"total_size": sum(sizes)} == theirs.metadata
    if theirs.is_sharded:
        assert index["weight_map"] == theirs.tensor_to_filename
