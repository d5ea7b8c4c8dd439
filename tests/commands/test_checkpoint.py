"""`ckpt_tools.open`: an index shows what numpy shows of the whole tensor; any format; errors as data; paths."""

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch.distributed import checkpoint as dcp

import ckpt_tools
from ckpt_tools.commands.look import checkpoint
from ckpt_tools.errors import CkptError, MappingError, NoSuchKeyError, StorageError, UsageError
from ckpt_tools.execute.move.read_box import BoxReader
from ckpt_tools.model.box import Box
from ckpt_tools.model.dtypes import ITEMSIZE
from ckpt_tools.model.kernels.casts import Array
from tests.commands import oracle
from tests.conftest import FSDP, RUN, fixture_dir
from tests.damage import ITERATION

MOE = fixture_dir("core019_moe_ep2_fully_reshardable")
SHAPE = (5, 4, 3)


@pytest.fixture(scope="module")
def numbers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tensor of three dimensions, a scalar and an empty tensor."""
    folder = tmp_path_factory.mktemp("numbers")
    whole = torch.arange(60, dtype=torch.float32).reshape(SHAPE)
    save_file({"a": whole, "s": torch.tensor(7), "e": torch.zeros(0, 3)}, folder / "model.safetensors")
    return folder


def parts(length: int) -> st.SearchStrategy[Any]:
    bound = st.none() | st.integers(-length - 2, length + 2)
    return st.builds(slice, bound, bound, st.sampled_from([None, 1, 2, 3, -1, -2])) | st.integers(
        -length, length - 1
    )


@given(data=st.data())
@settings(max_examples=200, deadline=None)
def test_an_index_shows_what_numpy_shows(numbers, data):
    count = data.draw(st.integers(0, 3))
    index = [data.draw(parts(n)) for n in SHAPE[:count]]
    if data.draw(st.booleans()):
        index.insert(data.draw(st.integers(0, count)), ...)
        tail = data.draw(st.lists(parts(2), max_size=3 - count))
        index += tail
    if data.draw(st.booleans()):
        index.insert(data.draw(st.integers(0, len(index))), None)
    with ckpt_tools.open(numbers) as c:
        whole = np.asarray(c["a"])
        try:
            expected = whole[tuple(index)]
        except IndexError as error:
            with pytest.raises(IndexError, match=re.escape(str(error))):
                c["a"][tuple(index)]
            return
        found = c["a"][tuple(index)]
    assert np.shape(found) == expected.shape
    assert np.array_equal(found, expected)


def test_scalars_and_empty_tensors(numbers):
    with ckpt_tools.open(numbers) as c:
        assert (c["s"][()], c["s"][...].shape, c["s"].ndim) == (7, (), 0)
        assert c["e"][:].shape == (0, 3)
        assert (len(c["e"]), c["e"].nbytes, c["a"].nbytes) == (0, 0, 240)
        with pytest.raises(TypeError):
            len(c["s"])


def test_indices_that_numpy_refuses_too(numbers):
    with ckpt_tools.open(numbers) as c:
        for index in (5, (0, 0, 0, 0), (0, 9), (..., 3), "x", [0, 1], 1.5, True, (0, False), np.True_):
            with pytest.raises(IndexError):
                c["a"][index]
        with pytest.raises(IndexError, match="arrays and booleans"):  # numpy gives a new axis for True
            c["a"][True]


def test_names_are_text(numbers):
    with ckpt_tools.open(numbers) as c:
        for name in (3, None, b"a", ("a",), slice(2)):
            with pytest.raises(TypeError, match=r"keys are text such as '.*', not"):
                c[name]  # type: ignore[index]
    with ckpt_tools.open(RUN) as c:
        assert 3 not in c
        with pytest.raises(TypeError, match="names are text such as 'decoder"):
            c.parameters[0]  # type: ignore[index]
        parameter = next(iter(c.parameters.values()))
        with pytest.raises(TypeError, match="roles are text such as 'exp_avg', not int"):
            parameter[0]  # type: ignore[index]


def test_only_the_box_is_read(numbers, monkeypatch):
    boxes: list[Box] = []
    real = BoxReader.tensor

    def tensor(reader: Any, target: Any) -> Any:
        read = real(reader, target)

        def noted(box: Box) -> Any:
            boxes.append(box)
            return read(box)

        return noted

    monkeypatch.setattr(BoxReader, "tensor", tensor)
    with ckpt_tools.open(numbers) as c:
        assert c["a"][3, ::-2, 1].tolist() == [46.0, 40.0]
        assert boxes == [((3, 1, 1), (1, 3, 1))]
        monkeypatch.setattr(checkpoint, "_TILE_ELEMS", 4)
        boxes.clear()
        assert np.array_equal(c["a"][1:4], np.arange(12, 48).reshape(3, 4, 3))
        assert len(boxes) == 12
        assert max(box.volume for box in boxes) <= 4


@pytest.mark.parametrize("dtype", ITEMSIZE)
def test_every_element_type(dtype, tmp_path):
    raw: Array = np.arange(256, dtype=np.uint8)
    raw = raw & 1 if dtype == "bool" else np.tile(raw, ITEMSIZE[dtype])
    tensor = torch.frombuffer(bytearray(raw.tobytes()), dtype=getattr(torch, dtype))
    dcp.save({"t": tensor}, checkpoint_id=tmp_path, no_dist=True)
    with ckpt_tools.open(tmp_path) as c:
        found = np.asarray(c["t"])
    wide = dtype == "bfloat16" or dtype.startswith("float8")
    expected = (tensor.float() if wide else tensor).numpy()
    assert found.dtype == expected.dtype
    assert np.array_equal(
        found, expected, equal_nan=wide or tensor.is_floating_point() or tensor.is_complex()
    )


def test_ml_dtypes_are_used_where_they_are_installed(monkeypatch):
    """The bits are those that are stored; a stand-in of the same width shows it without the package."""
    monkeypatch.setitem(sys.modules, "ml_dtypes", SimpleNamespace(bfloat16=np.float16))
    key = "decoder.final_layernorm.weight"
    with ckpt_tools.open(RUN) as c:
        found = c[key][:]
    assert found.dtype == np.float16
    assert found.tobytes() == oracle.tensors(RUN / ITERATION)[key].view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("source", [RUN, MOE, FSDP], ids=lambda path: path.name)
def test_keys_hold_what_stock_torch_loads(source):
    expected = oracle.tensors(source / ITERATION)
    with ckpt_tools.open(source) as c:
        assert set(expected) <= set(c)
        for key, tensor in expected.items():
            value = tensor.float() if tensor.dtype == torch.bfloat16 else tensor
            assert np.array_equal(np.asarray(c[key]), value.numpy()), key
        assert c.iteration == 2
        assert (c.args["num_layers"], len(c)) == (2, len(list(c)))
        assert "nothing" not in c
        assert c.get("nothing") is None


@pytest.mark.parametrize("name", ["core016_llama_tp2_dp_reshardable", "core016_llama_tp2_fully_reshardable"])
def test_parameters_have_their_states_in_any_layout(name):
    """Layer by layer, from one tensor of all layers or from flat buckets: the values are those of stacked states."""
    plain = oracle.tensors(fixture_dir("core016_llama_tp2_fully_reshardable") / ITERATION)
    with ckpt_tools.open(fixture_dir(name)) as c:
        p = c.parameters["decoder.layers.1.mlp.linear_fc2.weight"]
        assert p.roles == ("weight", "master", "exp_avg", "exp_avg_sq")
        key = "optimizer.state.param.decoder.layers.mlp.linear_fc2.weight"
        if "fully" in name:
            assert np.array_equal(p.master[:], plain[key][1].numpy())
        rounded = torch.from_numpy(np.asarray(p.master)).bfloat16().float().numpy()
        assert np.array_equal(rounded, p.weight[:])
        assert p.main.dtype == "float32"
        with pytest.raises(AttributeError, match="has no adam, only weight, master, exp_avg"):
            _ = p.adam


def test_experts_are_parameters_of_their_own():
    stored = oracle.tensors(MOE / ITERATION)
    with ckpt_tools.open(MOE) as c:
        p = c.parameters["decoder.layers.1.mlp.experts.experts.3.linear_fc2.weight"]
        whole = stored["optimizer.state.exp_avg.decoder.layers.1.mlp.experts.experts.linear_fc2.weight"]
        assert np.array_equal(p.exp_avg[:], whole[3].numpy())
        assert len(c.parameters) == 25


def test_masters_in_the_place_of_weights():
    with ckpt_tools.open(FSDP) as c:
        p = c.parameters["decoder.final_layernorm.weight"]
        assert "weight" not in p.roles
        assert np.array_equal(p.main[:], c["model.module.decoder.final_layernorm.weight"][:])


def test_names_that_are_not_there():
    with ckpt_tools.open(RUN) as c:
        with pytest.raises(NoSuchKeyError, match=r"Did you mean .*final_layernorm\.weight"):
            c["decoder.final_layernorm"]
        with pytest.raises(KeyError) as caught:
            c.parameters["decoder.layers.9"]
        assert str(caught.value).startswith("there is no parameter 'decoder.layers.9'")
        assert isinstance(caught.value, MappingError)


def test_errors_carry_their_problems_as_data(tmp_path):
    """All of them, where the message lists some."""
    tensors = {f"decoder.layers.{i}.x": torch.ones(1) for i in range(40)}
    dcp.save(tensors, checkpoint_id=tmp_path / "a", no_dist=True)
    with pytest.raises(UsageError) as caught:
        ckpt_tools.modify_state_dict(
            tmp_path / "a", tmp_path / "b", [f"remove nothing{i}" for i in range(30)]
        )
    assert len(caught.value.problems) == 30
    assert "... and 27 more like these" in str(caught.value)
    assert all(one in str(caught.value) for one in caught.value.problems[:3])
    assert StorageError("one thing").problems == ("one thing",)
    assert CkptError("two", ["a", "b"]).problems == ("a", "b")


def test_every_listing_of_problems_is_also_data():
    """Who raises with a list in the message hands the list over."""
    import ast

    for file in Path(ckpt_tools.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if (
                isinstance(node, ast.Raise)
                and isinstance(node.exc, ast.Call)
                and "list_problems" in ast.dump(node.exc)
            ):
                assert len(node.exc.args) == 2, f"{file}:{node.lineno}"


def test_path_objects_everywhere(tmp_path):
    """Every function of the library takes them; reports name places as text."""
    out = tmp_path / "out"
    assert ckpt_tools.inspect_checkpoint(RUN).location.path == f"{RUN}/{ITERATION}"
    report = ckpt_tools.convert_to_fsdp_dtensor(RUN, out)
    json.dumps(report.as_json())
    json.dumps(ckpt_tools.convert_to_torch_dist(out, tmp_path / "back").as_json())
    ckpt_tools.export_hf(RUN, tmp_path / "hf")
    ckpt_tools.import_hf(tmp_path / "hf", tmp_path / "imported")
    assert ckpt_tools.diff_checkpoints(RUN, out).is_equal
    assert ckpt_tools.verify_checkpoint(out).is_valid
    assert ckpt_tools.preflight(out).report.is_valid
    assert ckpt_tools.print_tensor(RUN, "decoder.final_layernorm.weight").shape == (32,)
    assert ckpt_tools.plan_checkpoint(RUN, ckpt_tools.Layout(world=2)).source == str(RUN)
    assert ckpt_tools.slice_layers(RUN, tmp_path / "cut", "0:1").tensors
    assert ckpt_tools.strip_checkpoint(RUN, tmp_path / "bare").output == str(tmp_path / "bare")
    averaged = ckpt_tools.average_checkpoints([RUN, str(RUN)], tmp_path / "mean")
    assert averaged.sources == (str(RUN), str(RUN))
    assert ckpt_tools.build_group_map(RUN)
    assert ckpt_tools.list_run(RUN).iterations
    assert ckpt_tools.checkpoint_statistics(RUN).tensors
    assert ckpt_tools.checkpoint_change(RUN, out).tensors
