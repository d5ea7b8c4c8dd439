"""A job's command line, read as Megatron-LM's own parsers read it; and YAML files of three kinds."""

import json
from typing import Any

import pytest

from ckpt_tools.commands.check.launch import launch
from ckpt_tools.commands.check.preflight import run_rule
from ckpt_tools.errors import UsageError
from ckpt_tools.verify.readiness.facts import Facts, Stored, checked_settings
from ckpt_tools.verify.readiness.job import (
    VERSIONS,
    Job,
    command_words,
    defaults_of,
    flag_words,
    flags_of,
    merge,
    parse_command,
    parse_flags,
    parse_yaml,
    pattern,
    versions_with,
)
from ckpt_tools.verify.readiness.rules import RULES
from tests.verify.megatron_flags import TABLE


@pytest.mark.parametrize(
    ("words", "given"),
    [
        ("--num-layers 2", {"num_layers": 2}),
        ("--num-layers=2 --lr=1e-4", {"num_layers": 2, "lr": 1e-4}),
        ("--swiglu", {"swiglu": True}),
        ("--disable-bias-linear", {"add_bias_linear": False}),
        ("--no-gradient-accumulation-fusion", {"gradient_accumulation_fusion": False}),
        ("--no-strict-fsdp-dtensor-load", {"strict_fsdp_dtensor_load": False}),
        ("--disable-strict-fsdp-dtensor-load", {"strict_fsdp_dtensor_load": False}),
        ("--norm-epsilon 1e-6", {"layernorm_epsilon": 1e-6}),
        ("--use-nccl-ub", {"nccl_ub": True}),
        ("--no-load-rng", {"no_load_rng": True}),
        ("--recompute-modules mla_up_proj mlp moe_act", {"recompute_modules": ["mla_up_proj", "mlp", "moe_act"]}),
        ("--moe-layer-freq ([0]*3+[1]*2)", {"moe_layer_freq": [0, 0, 0, 1, 1]}),
        ("--moe-layer-freq 2", {"moe_layer_freq": 2}),
        ("--window-size (128,0)", {"window_size": (128, 0)}),
        ("--attention-backend flash", {"attention_backend": "flash"}),
        ("--seed 1 --seed 2", {"seed": 2}),  # the last one counts
        ("--min-lr -1", {"min_lr": -1.0}),
        ("--rl-partial-rollouts --no-rl-partial-rollouts", {"rl_partial_rollouts": False}),
    ],
)  # fmt: skip
def test_flags(words, given):
    parsed = parse_flags(words.split(), "main")
    assert parsed == (given, (), None)


@pytest.mark.parametrize(
    ("words", "unknown", "refused"),
    [
        ("--num-layer 2", ("--num-layer", "2"), None),  # abbreviations are refused there too
        ("--use-custom-fsdp", ("--use-custom-fsdp",), None),
        ("--no-swiglu", ("--no-swiglu",), None),
        ("--gradient-accumulation-fusion", ("--gradient-accumulation-fusion",), None),
        ("stray --swiglu", ("stray",), None),
        ("--num-layers", (), "argument --num-layers: expected one argument"),
        ("--num-layers two", (), "argument --num-layers: invalid int value: 'two'"),
        ("--swiglu=true", (), "argument --swiglu: ignored explicit argument 'true'"),
        ("--ckpt-format zarr", (), "argument --ckpt-format: invalid choice: 'zarr'"),
        ("--moe-layer-freq [0,x]", (), "argument --moe-layer-freq: invalid pattern value: '[0,x]'"),
    ],
)
def test_what_the_parser_does_not_take(words, unknown, refused):
    parsed = parse_flags(words.split(), "main")
    assert parsed.unknown == unknown
    assert (parsed.refused is None) == (refused is None)
    assert refused is None or (parsed.refused or "").startswith(refused)


@pytest.mark.parametrize(
    ("text", "value"),
    [("3", 3), ("[0]*3+[1]*2", [0, 0, 0, 1, 1]), ("([1]*2+[0])*2", [1, 1, 0, 1, 1, 0]), ("2*[0,1]", [0, 1, 0, 1]),
     ("[]", [])],
)  # fmt: skip
def test_patterns(text, value):
    assert pattern(text) == value


@pytest.mark.parametrize(
    "text",
    ["", "x", "[0, 1]", "[0]*9999999999", "([0]*99999)*99999", "[0]**2", "__import__('os')[0]", "[[0]]*2+1",
     "(" * 9999 + "[", "[0],[1]", "[0]*[1]", "[0]-[1]", "1+1[0]"],
)  # fmt: skip
def test_what_is_not_a_pattern(text):
    with pytest.raises(ValueError):
        pattern(text)


def test_defaults_differ_between_versions():
    assert defaults_of("core-0.16")["data_parallel_sharding_strategy"] == "no_shard"
    assert defaults_of("main")["data_parallel_sharding_strategy"] == "optim_grads_params"
    assert "megatron_fsdp_version" not in defaults_of("core-0.19")
    assert defaults_of("main")["yarn_correction_range_round_to_int"] is None  # two flags: the first decides
    assert parse_command([]).get("position_embedding_type") == "learned_absolute"
    assert versions_with("--megatron-fsdp-version") == ("main",)
    assert versions_with("--swiglu") == VERSIONS
    assert versions_with("--swigl") == ()


def test_the_table_is_whole():
    table = json.loads(TABLE.read_text())
    assert tuple(table["versions"]) == VERSIONS
    for version in VERSIONS:
        assert len(flags_of(version)) > 600
        spelled = [option for flag in flags_of(version) for option in flag.options]
        assert len(set(spelled)) == len(spelled)


@pytest.mark.parametrize("version", VERSIONS)
def test_every_setting_can_be_said_and_is_read_back(version):
    samples: dict[str, Any] = {"int": 3, "float": 0.25, "str": "x", "tuple": (1, 2), "pattern": [0, 0, 1]}
    for flag in flags_of(version):
        if flag.kind != "store":
            values: list[Any] = [True, False] if flag.kind == "bool" else [flag.kind == "true"]
        elif flag.type == "bool":
            continue  # a flag for which every word is true
        else:
            values = [flag.choices[-1] if flag.choices else samples[flag.type]]
        for value in values:
            wanted = (
                value if flag.nargs is None else [value] * (flag.nargs if isinstance(flag.nargs, int) else 1)
            )
            words = flag_words(flag.name, wanted, version, always=True)
            assert words is not None
            assert parse_flags(words, version).given == {flag.name: wanted}
    assert flag_words("num_layers", None, version) == []
    assert flag_words("swiglu", False, version) == []
    assert flag_words("swiglu", None, version) is None
    assert flag_words("nothing", 1, version) is None


def test_words_of_a_command_line():
    job = parse_command(["A=1", "srun", "--x", "y", "x.py", "--swiglu", "--lr", "1e-4", "B=2"])
    assert (dict(job.environment), job.script, job.given) == ({"A": "1"}, "x.py", {"swiglu", "lr"})
    assert job.unknown == ("B=2",)
    assert not Job()
    assert not parse_command([])
    alone = parse_command(["A=1", "--swiglu"])
    assert (dict(alone.environment), alone.script, alone.unknown) == ({"A": "1"}, None, ())
    text = "A='1 2' python pretrain_gpt.py --data-path 'a b' c --moe-layer-freq \"([0]*1+[1]*1)\""
    one = parse_command(command_words([text]))
    assert (one.settings["data_path"], one.settings["moe_layer_freq"]) == (["a b", "c"], [0, 1])
    assert dict(one.environment) == {"A": "1 2"}
    with pytest.raises(UsageError, match="No closing quotation"):
        command_words(["--data-path 'a"])


def test_yaml_files_of_three_kinds():
    flat = parse_yaml("num_layers: 1\nb: {num_layers: 2, c: null}")
    assert (flat.settings["num_layers"], flat.settings["swiglu"], flat.given) == (
        1,
        False,
        {"num_layers", "c"},
    )
    recipe = parse_yaml(
        "ENV_VARS: {A: 1}\nMODEL_ARGS: {--swiglu: true, --num-layers: 2, --bf16: false, --data-path: a b}"
    )
    assert recipe.given == {"swiglu", "num_layers", "data_path"}
    assert recipe.settings["data_path"] == ["a", "b"]
    assert dict(recipe.environment) == {"A": "1"}
    bridge = parse_yaml("model: {num_layers: 2}\ndist: {use_megatron_fsdp: true}")
    assert (bridge.program, bridge.settings["num_layers"]) == ("bridge", 2)
    assert bridge.settings["strict_fsdp_dtensor_load"] is False  # Bridge's own default


def test_a_command_line_wins_over_a_file():
    both = merge(parse_yaml("num_layers: 1\nlr: 2.0"), parse_command(["--num-layers", "3"]))
    assert (both.settings["num_layers"], both.settings["lr"], both.settings["swiglu"]) == (3, 2.0, False)
    assert both.given == {"num_layers", "lr"}


def test_words_of_bridge():
    words = "run_recipe.py --recipe r -tp 2 model.num_layers=3 +model.x.y=[1,2] ddp.a={"
    job = parse_command(words.split(), "bridge")
    assert {name: job.settings[name] for name in job.given} == {
        "recipe": "r", "tp": 2, "num_layers": 3, "y": [1, 2], "a": "{"
    }  # fmt: skip


@pytest.mark.parametrize("version", VERSIONS)
def test_the_defaults_of_every_version_are_sound_settings(version):
    facts = Facts("fsdp_dtensor", Job(defaults_of(version), {}, version, frozenset()))
    sound, check = checked_settings(facts)
    assert check.findings == ()
    assert sound == facts


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_layers", "many"), ("num_layers", True), ("num_layers", 2.0), ("hidden_size", 10**400),
        ("expert_model_parallel_size", 0), ("tensor_model_parallel_size", -2), ("optimizer", 3),
        ("moe_layer_freq", "[1]"), ("moe_layer_freq", 0), ("moe_layer_freq", [1, "x"]), ("seq_length", [4]),
    ],
)  # fmt: skip
def test_a_setting_of_another_kind_is_named_and_left_out(name, value):
    facts = Facts("fsdp_dtensor", Job({name: value, "swiglu": True}, {}, "main", frozenset()), {name: value})
    sound, check = checked_settings(facts)
    (finding,) = check.findings
    assert finding.severity == "error"
    assert name in str(finding)
    assert (sound.job.settings, sound.args) == ({"swiglu": True}, {})


@pytest.mark.parametrize(
    ("value", "findings"), [("1e-05", 0), ("1.5E-6", 0), ("-1e-05", 1), ("small", 1), ("1e", 1)]
)
def test_a_number_that_yaml_takes_for_a_text(value, findings):
    facts = Facts("torch_dist", Job({"layernorm_epsilon": value}, {}, "bridge", frozenset()))
    assert len(checked_settings(facts)[1].findings) == findings


JUNK = [None, True, -1, 0, 10**30, 1e300, float("nan"), "x", "", "\x1b[1m", [], [1], {}, {"a": 1}, object()]


@pytest.mark.parametrize("program", ["core-0.16", "main", "bridge"])
def test_no_setting_and_no_argument_of_any_type_ends_in_a_crash(program):
    """YAML files and stored arguments are not typed by a parser."""
    shapes = {
        "embedding.word_embeddings.weight": (64, 8),
        "decoder.layers.0.self_attention.linear_qkv.weight": (24, 8),
        "decoder.layers.0.mlp.router.weight": (4, 8),
        "decoder.layers.1.self_attention.A_log": (2,),
        "decoder.layers.1.self_attention.in_proj.weight": (2,),
        "decoder.final_layernorm.weight": (),
    }
    names = {flag.name for flag in flags_of("main")} | {"num_moe_experts", "fp8", "should_pad_vocab"}
    for number, junk in enumerate(JUNK):
        junk_args = {name: JUNK[(index + number) % len(JUNK)] for index, name in enumerate(sorted(names))}
        for settings in ({**(defaults_of("main")), **dict.fromkeys(names, junk)}, junk_args):
            job = Job(settings, {}, program, frozenset(settings))
            facts = Facts("fsdp_dtensor", job, junk_args, Stored(shapes, 64, True, True, False, None, 0))
            for rule in RULES:
                if program in rule.programs:
                    run_rule(rule, checked_settings(facts)[0])
            start = launch(Facts("fsdp_dtensor", Job({}, {}, program), settings, facts.stored), "/x")
            assert start.words[0] == "torchrun"
            assert all(isinstance(word, str) for word in start.words)


@pytest.mark.parametrize(
    ("launcher", "world"),
    [
        ("torchrun --nnodes 8 --nproc-per-node 8", 64),
        ("torchrun --nproc_per_node=4", 4),
        ("torchrun", 1),
        ("srun -N 2 /opt/bin/torchrun --nnodes=2 --nproc-per-node 8 --rdzv-backend c10d", 16),
        ("python -m torch.distributed.run --nproc-per-node 2", 2),
        ("torchrun --nproc-per-node gpu", None),
        ("torchrun --nnodes 1:4 --nproc-per-node 8", None),
        ("torchrun --nnodes $NODES --nproc-per-node 8", None),
        ("torchrun --nproc-per-node 0", None),
        ("torchrun --nproc-per-node", None),
        ("srun -n 64 python", None),
        ("python", None),
    ],
)
@pytest.mark.parametrize("program", ["main", "bridge"])
def test_the_gpus_that_a_launcher_starts(launcher, world, program):
    assert parse_command([*launcher.split(), "run_recipe.py", "--seq-length", "32"], program).world == world
    assert parse_command(["--seq-length", "32"], program).world is None
