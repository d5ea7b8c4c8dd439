"""Which keys of a plain PyTorch checkpoint are what, told from files that torch's own `fully_shard` wrote."""

import time
from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch

import ckpt_tools
from ckpt_tools.commands.job.opened import open_checkpoint
from ckpt_tools.errors import MappingError
from ckpt_tools.formats.locate.detect import locate
from ckpt_tools.megatron.dcp.read import OpenChoiceError, megatron_fields, name_numbers, owners
from ckpt_tools.megatron.dcp.state_dict import is_megatron, read_state_dict
from ckpt_tools.megatron.fsdp_dtensor.read import SmallValues
from ckpt_tools.model.box import full_box
from ckpt_tools.model.catalog import Catalog, Chunk, Item, ObjectEntry, TensorEntry
from tests.commands import oracle
from tests.conftest import fixture_dir

FORMS = {
    "titan": ("", "optimizer.", "flattened"),
    "app": ("app.model.", "app.optim.", "by_name"),
    "numbered": ("model.", "optimizer.", "by_number"),
}


@pytest.mark.parametrize("name", FORMS)
def test_the_three_forms_of_one_run(sharded, name):
    """Weights, states and their owners are those that the training process had under the same names."""
    truth = torch.load(sharded / "truth.pt", weights_only=True)
    root, optimizer_root, form = FORMS[name]
    with open_checkpoint(str(sharded / name)) as opened:
        found = read_state_dict(opened.catalog)
        (optimizer,) = found.optimizers
        named = owners(optimizer, found, opened.catalog, SmallValues(opened.files, False))
    assert (found.model, optimizer.root, optimizer.form) == (root, optimizer_root, form)
    assert set(found.weights) == {key for key in truth if not key.startswith("state.")}
    stored = oracle.tensors(sharded / name)
    assert all(oracle.same_bytes(stored[key], truth[n]) for n, key in found.weights.items())
    states = {key: f"state.{owner}.{key.rpartition('.')[2]}" for key, owner in named.items()}
    assert len(states) == 2 * 17
    assert all(oracle.same_bytes(stored[key], truth[of]) for key, of in states.items())
    roles = found.roles()
    assert {roles[key] for key in states} == {"exp_avg", "exp_avg_sq"}
    assert not is_megatron(found)
    assert "train_state.step" not in roles


@pytest.mark.parametrize("name", FORMS)
def test_keys_tell_nearly_as_much_without_planner_data(sharded, name):
    """Old writers and other programs leave the paths out: then dots are all there is."""
    with open_checkpoint(str(sharded / name)) as opened:
        told = read_state_dict(opened.catalog)
        found = read_state_dict(replace(opened.catalog, planner_paths={}))
    assert [o.form for o in found.optimizers] == [o.form for o in told.optimizers]
    assert found.optimizers[0].states == told.optimizers[0].states
    assert set(told.weights.values()) <= set(found.weights.values())


def catalog_of(
    *paths: tuple[str | int, ...],
    objects: tuple[tuple[str | int, ...], ...] = (),
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    dtypes: Mapping[str, str] | None = None,
) -> Catalog:
    def key(path: tuple[str | int, ...]) -> str:
        return ".".join(map(str, path))

    def entry(key: str) -> TensorEntry:
        shape, dtype = (shapes or {}).get(key, (2,)), (dtypes or {}).get(key, "float32")
        return TensorEntry(key, dtype, shape, (Chunk(full_box(shape), Item("f", 0, 1)),))

    entries = {key(p): entry(key(p)) for p in paths}
    return Catalog(
        "",
        entries,
        {key(p): ObjectEntry(key(p), Item("f", 0, 1)) for p in objects},
        {key(p): p for p in (*paths, *objects)},
    )


def test_a_module_that_is_called_state_is_no_optimizer():
    found = read_state_dict(catalog_of(("model", "layers.0.state.in.weight"), ("model", "state.weight")))
    assert found.optimizers == ()
    assert set(found.weights) == {"layers.0.state.in.weight", "state.weight"}


def test_weights_whose_own_names_begin_with_model():
    """As Hugging Face's modules name them: nested under `model`, and flat."""
    nested = read_state_dict(catalog_of(("model", "model.norm.weight"), ("model", "lm_head.weight")))
    assert (nested.model, set(nested.weights)) == ("model.", {"model.norm.weight", "lm_head.weight"})
    flat = read_state_dict(
        catalog_of(
            ("model.norm.weight",),
            ("lm_head.weight",),
            ("optimizer", "state.model.norm.weight.exp_avg"),
            ("optimizer", "state.lm_head.weight.exp_avg"),
        )
    )
    assert (flat.model, set(flat.weights)) == ("", {"model.norm.weight", "lm_head.weight"})


def test_nested_states_keep_their_dots_and_two_optimizers_stay_two():
    found = read_state_dict(
        catalog_of(
            ("net", "a.weight"),
            ("net", "b.weight"),
            ("opt_a", "state.a.weight.preconditioner.0"),
            ("opt_b", "state", "b.weight", "exp_avg"),  # the groups of either say what it is
            objects=(("opt_a", "param_groups.a.weight.lr"), ("opt_b", "param_groups", 0, "lr")),
        )
    )
    first, second = found.optimizers
    assert (found.model, set(found.weights)) == ("net.", {"a.weight", "b.weight"})
    assert first.states == {"a.weight": {"preconditioner.0": "opt_a.state.a.weight.preconditioner.0"}}
    assert second.states == {"b.weight": {"exp_avg": "opt_b.state.b.weight.exp_avg"}}
    assert found.layout == "state_dict_mixed"


GROUPS = (("opt", "param_groups", 0, "params"),)
NAMED, NUMBERED = ("opt", "state", "a.w", "exp_avg"), ("opt", "state", 0, "exp_avg")


@pytest.mark.parametrize(
    ("paths", "objects", "model", "weights", "more"),
    [
        *(
            ((*optimizer, (root, "a.w"), *beside), GROUPS if optimizer else (), f"{root}.", {f"{root}.a.w"}, more)
            for root in ("net", "module", "state_dict", "state")
            for optimizer in ((), (NAMED,), (NUMBERED,))
            for beside, more in (
                ((("epoch",), ("rng",), ("lr_scheduler", "last")), set()),
                ((("best_loss",),), {"best_loss"}),
                ((("teacher", "other.w"), ("teacher", "count")), {"teacher.other.w", "teacher.count"}),
            )
        ),
        # an average has the same names: the optimizer's shapes tell, then the dict called model
        ((NAMED, ("small", "a.w"), ("net", "a.w")), GROUPS, "net.", {"net.a.w"}, {"small.a.w"}),
        ((NUMBERED, ("small", "a.w"), ("net", "a.w")), GROUPS, "net.", {"net.a.w"}, {"small.a.w"}),
        ((NAMED, ("ema", "a.w"), ("model", "a.w")), GROUPS, "model.", {"model.a.w"}, {"ema.a.w"}),
        ((NUMBERED, ("ema", "a.w"), ("model", "a.w")), GROUPS, "model.", {"model.a.w"}, {"ema.a.w"}),
        # a model in several dicts
        ((("model", "enc", "w"), ("model", "dec", "w"), ("opt", "state", "enc.w", "exp_avg"),
          ("opt", "state", "dec.w", "exp_avg")), GROUPS, "model.", {"model.enc.w", "model.dec.w"}, set()),
        ((("model", "enc", "w"), ("model", "dec", "w"), NUMBERED, ("opt", "state", 1, "exp_avg")),
         GROUPS, "model.", {"model.enc.w", "model.dec.w"}, set()),
        # all of it in one more dict, which may be called as a part of an optimizer is
        ((("state", "net", "a.w"), ("state", "opt", "state", 0, "exp_avg")),
         (("state", "opt", "param_groups", 0, "params"),), "state.net.", {"state.net.a.w"}, set()),
        # flat keys: what an optimizer knows is no run's, whatever its name
        ((("scheduler.w",), ("rng.x",), ("opt", "state", "scheduler.w", "exp_avg")), GROUPS, "",
         {"scheduler.w"}, set()),
    ],
)  # fmt: skip
def test_the_model_is_what_the_optimizer_trains_and_nothing_that_may_be_a_weight_is_lost(
    paths, objects, model, weights, more
):
    shapes = {"small.a.w": (3,), "teacher.other.w": (4, 4), "epoch": (), "best_loss": (), "teacher.count": ()}
    found = read_state_dict(
        catalog_of(
            *paths,
            objects=objects,
            shapes=shapes,
            dtypes={"epoch": "int64", "rng": "uint8", "teacher.count": "int64"},
        )
    )
    if not any(step == "opt" for path in paths for step in path) and any("teacher" in path for path in paths):
        model, weights, more = "teacher.", more, weights  # nothing tells, so the larger comes first
    assert (found.model, set(found.weights.values()), set(found.more)) == (model, weights, more)
    roles = found.roles()
    assert {key for key in roles if roles[key] == "weight"} == weights | more


@pytest.mark.parametrize("of_names", [True, False])
def test_two_models_with_an_optimizer_each(of_names):
    """As GANs are saved: owners are known, and two parameters of one name stay two."""
    names = ("w", "w") if of_names else (0, 0)
    catalog = catalog_of(
        ("G", "w"), ("D", "w"), ("optG", "state", names[0], "exp_avg"), ("optD", "state", names[1], "exp_avg"),
        objects=(("optG", "param_groups", 0, "lr"), ("optD", "param_groups", 0, "lr")),
        shapes={"D.w": (3,), f"optD.state.{names[1]}.exp_avg": (3,)},
    )  # fmt: skip
    found = read_state_dict(catalog)
    assert (found.model, found.weights, found.more) == ("", {"G.w": "G.w", "D.w": "D.w"}, ())
    assert [o.prefix for o in found.optimizers] == ["G.", "D."]
    if of_names:
        assert [set(o.states) for o in found.optimizers] == [{"G.w"}, {"D.w"}]


def test_a_wrapped_module_with_a_numbering_optimizer_is_a_state_dict():
    """Megatron-FSDP on its own: `model.module.` in front of names, and torch's optimizer.state_dict()."""
    found = read_state_dict(
        catalog_of(("model", "module.fc.weight"), ("optimizer", "state", 0, "exp_avg"),
                   objects=(("optimizer", "param_groups", 0, "params"),))
    )  # fmt: skip
    assert set(found.weights) == {"module.fc.weight"}
    assert found.optimizers[0].states == {"0": {"exp_avg": "optimizer.state.0.exp_avg"}}


def test_megatrons_torch_dcp():
    with open_checkpoint(str(fixture_dir("tf2_dcp"))) as opened:
        found = read_state_dict(opened.catalog)
    (optimizer,) = found.optimizers
    assert is_megatron(found)
    assert (optimizer.root, optimizer.form, len(optimizer.masters)) == (
        "optimizer.optimizer.",
        "by_number",
        19,
    )
    assert locate(str(fixture_dir("tf2_dcp"))).kind == "dcp"


# ---- numbers


def test_groups_interleave_as_shapes_say():
    shapes = {"a": (2, 2), "buffer": (9,), "b": (2,), "c": (2, 2)}
    assert name_numbers([[0, 1], [2]], shapes, {0: (2, 2), 1: (2, 2), 2: (2,)}) == {0: "a", 1: "c", 2: "b"}


def test_where_shapes_leave_a_choice_content_decides_or_nobody_does():
    shapes, states = {"a": (2,), "b": (2,)}, {0: (2,), 1: (2,)}
    pairs = {("a", 1), ("b", 0)}
    assert name_numbers([[0], [1]], shapes, states, lambda *pair: pair in pairs) == {1: "a", 0: "b"}
    with pytest.raises(OpenChoiceError, match=r"parameter 1 may be b or a: nothing stored tells"):
        name_numbers([[0], [1]], shapes, states)
    with pytest.raises(OpenChoiceError):
        name_numbers([[0], [1]], shapes, states, lambda *_: True)


@pytest.mark.parametrize(
    ("groups", "states", "message"),
    [
        ([[0]], {0: (2,)}, "may be"),  # the other one may be frozen
        ([[0, 1]], {0: (2,), 1: (3,)}, "they belong to another model"),
        ([[0, 1, 2]], {0: (2,), 1: (2,), 2: (2,)}, "they belong to another model"),
    ],
)
def test_states_that_fit_several_ways_or_none_are_refused(groups, states, message):
    with pytest.raises(MappingError, match=message):
        name_numbers(groups, {"a": (2,), "b": (2,)}, states)


def test_many_layers_are_named_at_once():
    shapes = {f"{i}": (4, 4) if i % 2 else (4,) for i in range(4000)}
    states = {i: (4, 4) if i < 2000 else (4,) for i in range(4000)}
    found = name_numbers([list(range(2000)), list(range(2000, 4000))], shapes, states)
    assert found[0] == "1"
    assert found[3999] == "3998"


def test_what_was_filled_in_for_torchs_adam_is_taken_out():
    ours = {"lr": 1.0, "max_lr": 2.0, "bias_correction": True, "amsgrad": False, "initial_lr": 2.0}
    assert megatron_fields(ours, 3.0) == {"lr": 1.0, "max_lr": 2.0, "bias_correction": True, "step": 3}
    torchs = {"lr": 1.0, "amsgrad": False, "initial_lr": 2.0}
    assert megatron_fields(torchs, 3.0) == torchs


# ---- strangers


@pytest.mark.parametrize(
    "key", ["." * 300_000, "optim" * 60_000, "optim.state." * 30_000, "a." * 200_000 + "state.x.y"]
)
def test_keys_made_to_cost_time_cost_none(key):
    entry = TensorEntry(key, "float32", (2,), (Chunk(full_box((2,)), Item("f", 0, 1)),))
    many = {f"r{i}.optim.state.{i}.exp_avg": entry for i in range(3000)}
    for paths in ({}, {key: tuple(key.split(".")[:60_000])}):
        started = time.monotonic()
        read_state_dict(Catalog("", {key: entry, **many}, {}, paths))
        assert time.monotonic() - started < 30  # a cost that grows with the square takes minutes


def test_groups_that_list_something_else_are_refused(sharded, tmp_path):
    operations = [r"remove param_groups\.1\.params", r"rename param_groups\.1\.lr param_groups.1.params"]
    ckpt_tools.modify_state_dict(str(sharded / "numbered"), str(tmp_path / "x"), operations)
    found = ckpt_tools.verify_checkpoint(str(tmp_path / "x")).findings
    assert any("expected the numbers of parameters" in finding.message for finding in found)
