"""Lists the names that `tests/data/megatron_arguments.txt` holds, from clones of the sources; run by hand.

python -m tests.megatron.huggingface.harvest_arguments MEGATRON_LM MEGATRON_BRIDGE > tests/data/megatron_arguments.txt
"""

import ast
import subprocess
import sys
import textwrap
from collections.abc import Iterator

VERSIONS = ["core_v0.8.0", "core_v0.9.0", "core_v0.10.0", "core_v0.11.0", "core_v0.12.3", "core_v0.13.1",
            "core_v0.14.0", "core_v0.15.3", "core_v0.16.1", "core_v0.17.1", "core_v0.18.2", "core_v0.19.0",
            "HEAD"]  # fmt: skip
PARSERS = ("megatron/training/arguments.py", "megatron/post_training/arguments.py", "megatron/training/training.py",
           "megatron/elastification/arguments.py", "megatron/training/initialize.py", "pretrain_gpt.py",
           "megatron/training/checkpointing.py", "megatron/training/argument_utils.py")  # fmt: skip
CLASSES = ("transformer_config.py", "core/model_parallel_config.py", "core/optimizer/optimizer_config.py",
           "core/distributed/distributed_data_parallel_config.py", "training/config/training_config.py",
           "training/config/common_config.py", "training/config/resilience_config.py",
           "training/config/inference_config.py")  # fmt: skip
NOT_ARGUMENTS = {"attr", "fn", "name", "predicate", "with_name_predicate"}  # of selectors of parameters
PROVIDERS = (
    "gpt_provider.py",
    "mla_provider.py",
    "gemma/gemma_provider.py",
    "gemma/gemma2_provider.py",
    "gemma/gemma3_provider.py",
    "models/transformer_config.py",
    "gpt_oss",
    "mistral/mistral_provider.py",
)


def arguments(source: str) -> Iterator[str]:
    """Destinations of `add_argument`, and what is set on `args` afterwards."""
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "add_argument"
        ):
            given = [k.value for k in node.keywords if k.arg == "dest"]
            flags = [a.value for a in node.args if isinstance(a, ast.Constant)]
            long = [f[2:].replace("-", "_") for f in flags if isinstance(f, str) and f.startswith("--")]
            yield from [str(d.value) for d in given if isinstance(d, ast.Constant)] or long[:1]
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Attribute) and ast.unparse(target.value) == "args":
                    yield target.attr


def fields(source: str) -> Iterator[str]:
    """Fields of dataclasses."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef) and any("dataclass" in ast.unparse(d) for d in node.decorator_list):
            for item in node.body:
                if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
                    private = item.target.id.startswith("_") or "ClassVar" in ast.unparse(item.annotation)
                    yield from () if private else (item.target.id,)


def git(repository: str, *words: str) -> str:
    return subprocess.run(
        ["git", "-C", repository, *words], capture_output=True, text=True, check=True
    ).stdout


def of_version(repository: str, version: str) -> set[str]:
    found: set[str] = set()
    for path in git(
        repository, "ls-tree", "-r", "--name-only", version, "megatron", "pretrain_gpt.py"
    ).split():
        if path in PARSERS:
            found |= set(arguments(git(repository, "show", f"{version}:{path}")))
        elif path.endswith(CLASSES) and "retro" not in path and "/src/" not in path:
            found |= set(fields(git(repository, "show", f"{version}:{path}")))
    return found - NOT_ARGUMENTS


def of_bridge(repository: str) -> set[str]:
    paths = git(repository, "ls-tree", "-r", "--name-only", "HEAD", "src/megatron/bridge/models").split()
    wanted = [path for path in paths if any(part in path for part in PROVIDERS) and path.endswith(".py")]
    return {name for path in wanted for name in fields(git(repository, "show", f"HEAD:{path}"))}


def main(megatron: str, bridge: str) -> None:
    print("# Names of arguments, each under the first version that has it; by harvest_arguments.py. HEAD is")
    print(
        f"# {git(megatron, 'rev-parse', 'HEAD').strip()}, Megatron-Bridge {git(bridge, 'rev-parse', 'HEAD').strip()}."
    )
    known: set[str] = set()
    for version in [*VERSIONS, "bridge"]:
        new = (of_bridge(bridge) if version == "bridge" else of_version(megatron, version)) - known
        known |= new
        print(f"\n{version}:\n" + textwrap.indent(textwrap.fill(" ".join(sorted(new)), 112), "  "))


if __name__ == "__main__":
    main(*sys.argv[1:])
