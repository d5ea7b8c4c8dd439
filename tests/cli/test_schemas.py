"""Every JSON output keeps to its schema in `ckpt_tools/schemas`, and every schema is one and has its output."""

import json
import shutil
from pathlib import Path
from typing import Any

import jsonschema
import pytest

import ckpt_tools
from ckpt_tools.cli.app import run
from tests.cli import schema_fields
from tests.commands.rewritten import saved
from tests.commands.test_repair import as_nvidias_converter_writes, parts
from tests.conftest import DATA, FSDP, RUN, fixture_dir
from tests.damage import flip_bit, payload_of
from tests.megatron.adapter_checkpoints import lora

SCHEMAS = Path(ckpt_tools.__file__).parent / "schemas"
MOE = fixture_dir("core019_moe_ep2_fully_reshardable")
NORM = "model.module.decoder.final_layernorm.weight"

OUTPUTS = [  # (schema, exit code, words)
    ("inspect", 0, "inspect RUN --json"),
    ("inspect", 0, "inspect FSDP --json --keys '*norm*'"),
    ("inspect", 0, "inspect HF --json"),
    ("inspect", 0, "inspect MOE --by role --by layer --by rank --by dtype --by file --json"),
    ("print-tensor", 0, "print-tensor RUN embedding.word_embeddings.weight --stats --json"),
    ("print-tensor", 0, "print-tensor FSDP args --json"),
    ("print-tensor", 0, f"print-tensor BAD {NORM} --slice 0:2 --stats --json"),
    ("print-torch-dcp-in-json", 0, "print-torch-dcp-in-json RUN/iter_0000002 --values"),
    ("print-torch-dcp-in-json", 0, "print-torch-dcp-in-json FSDP/iter_0000002"),
    ("ls", 0, "ls RUN --json"),
    ("ls", 0, "ls HF --json"),
    ("ls", 0, "ls RUNS --json"),
    ("stats", 0, "stats MOE --json"),
    ("stats", 0, "stats BAD --by keys --json --svg OUT"),
    ("stats-change", 0, "stats RUN FSDP --json"),
    ("stats-change", 0, "stats HF RUN --json"),
    ("stats-change", 0, "stats FSDP BAD --json"),
    ("plan", 0, "plan MOE --dp-shard 4 --ep 2 --json"),
    ("plan", 0, "plan FSDP --world-size 3 --rank 1 --json"),
    ("conversion", 0, "convert RUN OUT --json"),
    ("conversion", 0, "convert MOE OUT --dry-run --dp-shard 2 --json"),
    ("conversion", 0, "convert RUN OUT --iteration all --json"),
    ("conversion", 0, "convert FSDP OUT --to torch_dist --json"),
    ("conversion", 0, "export-hf RUN OUT --json"),
    ("conversion", 0, "import-hf HF OUT --json"),
    ("conversion", 0, "merge-adapter RUN LORA OUT --json"),
    ("conversion", 0, "export-hf LORA OUT --peft --hf-config HF --json"),
    ("edit", 0, "slice RUN OUT --layers 0:1 --json"),
    ("edit", 0, "modify-state-dict FSDP OUT --op 'remove optimizer' --json"),
    ("average", 0, "average RUN RUN OUT --json"),
    ("average", 0, "average HF HF OUT --weights 3,1 --json"),
    ("copy", 0, "copy RUN OUT --json"),
    ("copy", 4, "copy BAD OUT --iteration all --json"),
    ("conversion", 0, "export-hf RUN OUT --iteration all --json"),
    ("strip", 0, "strip RUN OUT --json"),
    ("strip", 0, "strip FSDP OUT --dtype bfloat16 --json"),
    ("strip", 0, "strip RUN OUT --dry-run --json"),
    ("strip", 4, "strip BAD OUT --iteration all --json"),
    ("edit", 0, "slice RUN OUT --layers 0:1 --iteration all --json"),
    ("edit", 0, "modify-state-dict RUN OUT --op 'remove rng' --dry-run --json"),
    ("average", 0, "average RUN RUN OUT --dry-run --json"),
    ("repair", 0, "repair HURT OUT --json"),
    ("repair", 0, "repair HURT OUT --dry-run --json"),
    ("repair", 1, "repair FSDP OUT --json"),
    ("verify", 0, "verify RUN --content --json"),
    ("verify", 1, "verify BAD --content --json"),
    ("verify-several", 1, "verify RUN BAD OUT --content --json"),
    ("preflight", 0, "preflight FSDP --json"),
    ("preflight", 1, "preflight RUN --json"),
    ("preflight", 0, "preflight FSDP --json --target core-0.16"),
    ("preflight", 1, "preflight FSDP --json -- pretrain_gpt.py --num-layers 3 --swigl"),
    ("preflight", 1, "preflight RUN --json -- --use-megatron-fsdp --use-torch-fsdp2"),
    ("diff", 1, "diff RUN FSDP --json"),
    ("diff", 1, "diff FSDP BAD --json"),
    ("diff", 0, "diff HF RUN --headers --json"),
    ("diff", 0, "diff RUN RUN --rtol 1e-3 --ulp 4 --nan equal --json"),
    ("group-map", 0, "build-param-group-map RUN"),
]

VERSIONS = {"conversion": 2, "average": 2, "plan": 2, "stats-change": 2}  # 1 for the others


def strict_json(text: str) -> Any:
    """JSON without what only Python reads: NaN, Infinity, a name given twice."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        assert len(dict(pairs)) == len(pairs), [name for name, _ in pairs]
        return dict(pairs)

    def refuse(constant: str) -> Any:
        raise AssertionError(f"{constant} is no JSON")

    return json.loads(text, object_pairs_hook=unique, parse_constant=refuse)


def validate(value: Any, name: str) -> None:
    schema = strict_json((SCHEMAS / f"{name}.json").read_text())
    jsonschema.Draft202012Validator(schema).validate(value)
    if name != "group-map":  # a file of Megatron's
        assert value["schema_version"] == VERSIONS.get(name, 1)


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("places")
    assert run(["export-hf", str(RUN), str(folder / "hf"), "-q"]) == 0
    bad = shutil.copytree(FSDP, folder / "bad")
    file, at, _ = payload_of(bad, NORM, (0,))
    for byte, bits in ((2, 0x80), (3, 0x7F)):  # make the first float32 an infinity or a NaN
        with open(file, "r+b") as f:
            f.seek(at + byte)
            f.write(bytes([bits]))
    flip_bit(file, at + 4)
    tensors, objects = as_nvidias_converter_writes(*parts(FSDP / "iter_0000002"))
    hurt = saved(folder / "hurt", tensors | objects)
    adapter = lora().save(folder / "lora")
    return {
        "RUN": RUN,
        "RUNS": DATA,
        "FSDP": FSDP,
        "MOE": MOE,
        "BAD": bad,
        "HURT": hurt,
        "HF": folder / "hf",
        "LORA": adapter,
    }


@pytest.mark.parametrize(("name", "code", "words"), OUTPUTS, ids=[words for *_, words in OUTPUTS])
def test_outputs_keep_to_their_schemas(name, code, words, places, tmp_path, capsys):
    import re
    import shlex

    known = {**places, "OUT": tmp_path / "out"}
    argv = shlex.split(re.sub("|".join(rf"\b{k}\b" for k in known), lambda m: str(known[m[0]]), words))
    assert run(argv) == code
    validate(strict_json(capsys.readouterr().out), name)


def test_written_reports_and_manifests(tmp_path):
    report, manifest = tmp_path / "report.json", tmp_path / "manifest.json"
    assert run(["convert", str(RUN), str(tmp_path / "out"), "-q", "--report", str(report)]) == 0
    validate(strict_json(report.read_text()), "conversion")
    assert run(["verify", str(RUN), "--write-manifest", str(manifest)]) == 0
    validate(strict_json(manifest.read_text()), "manifest")


def test_every_schema_is_one_and_is_used():
    used = {name for name, *_ in OUTPUTS} | {"manifest"}
    assert {path.stem for path in SCHEMAS.glob("*.json")} == used
    for name in used:
        schema = strict_json((SCHEMAS / f"{name}.json").read_text())
        jsonschema.Draft202012Validator.check_schema(schema)
        assert schema["$schema"] == jsonschema.Draft202012Validator.META_SCHEMA["$id"]
        assert schema["$id"] == f"urn:ckpt_tools:{name}:{VERSIONS.get(name, 1)}"
        text = (SCHEMAS / f"{name}.json").read_text()
        assert text == schema_fields.written(name), "python -m tests.cli.schema_fields"


def test_no_field_goes_without_a_higher_version():
    """What `.github/docs/limits.md` promises."""
    then, now = schema_fields.recorded(), schema_fields.present()
    assert schema_fields.gone(then, now) == [], "raise schema_version in the schema, the report and VERSIONS"
    assert then == now, "look at what is new, then: python -m tests.cli.schema_fields"
    assert {name for name in now if not name.endswith(":1")} == {f"{n}:{v}" for n, v in VERSIONS.items()}


def test_a_field_that_goes_or_changes_is_found():
    then = {"ls:1": {"a integer always", "b string"}, "gone:1": {"c any"}}
    now = {"ls:1": {"a number always", "b string", "d any"}, "gone:2": set[str]()}
    assert schema_fields.gone(then, now) == ["ls:1 a integer always"]


def test_a_field_more_or_less_is_seen():
    """The schemas are closed: an output cannot change without them."""
    found = {"schema_version": 1, "source": "a", "output": "b", "tensor_count": 1, "object_count": 0}
    found["source_format"] = "dcp"
    found |= {"removed": [], "renamed": {}, "bytes_written": 1, "seconds": 0.5}
    found |= {"check_source": "all", "payloads_proven": 1, "payloads_without_checksum": 0, "bytes_proven": 4}
    validate(found, "edit")
    for wrong in ({**found, "more": 1}, {k: v for k, v in found.items() if k != "seconds"}):
        with pytest.raises(jsonschema.ValidationError):
            validate(wrong, "edit")
