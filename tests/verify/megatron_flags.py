"""Writes `ckpt_tools/verify/readiness/megatron_flags.json`: what Megatron-LM's own parsers take.

Run by hand, with checkouts of Megatron-LM and a Python that has torch:

    python tests/verify/megatron_flags.py core-0.16=/src/core_v0.16.1 core-0.17=/src/core_v0.17.1 \
        core-0.18=/src/core_v0.18.2 \
        core-0.19=/src/core_v0.19.0 main=/src/main

Facts alone are kept: spellings, names, kinds, types, defaults and choices. A checkout needs none of its GPU packages:
modules that only its kernels import are stood in for.
"""

import argparse
import enum
import importlib.abc
import importlib.machinery
import json
import subprocess
import sys
import types
import typing
from collections.abc import Iterable
from pathlib import Path
from typing import Any

TABLE = Path(__file__).resolve().parents[2] / "ckpt_tools" / "verify" / "readiness" / "megatron_flags.json"
_ABSENT = {"triton", "regex", "nvtx", "sentencepiece", "tiktoken", "ftfy"}
_KINDS = {"_StoreAction": "store", "_StoreTrueAction": "true", "_StoreFalseAction": "false",
          "BooleanOptionalAction": "bool"}  # fmt: skip
_TYPES = {"int": "int", "float": "float", "bool": "bool", "tuple_type": "tuple", "moe_freq_type": "pattern",
          "la_freq_type": "pattern", "no_rope_freq_type": "pattern"}  # fmt: skip


class _Anything(type):
    """A class that is every decorator and every attribute its user looks for."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything(name, (), {})

    def __call__(cls, *args: Any, **_: Any) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) else lambda function: function


class _StandIn(types.ModuleType):
    __version__ = "3.0.0"

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything(name, (), {})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        is_ours = name.partition(".")[0] in _ABSENT
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if is_ours else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def real_parser(checkout: str) -> argparse.ArgumentParser:
    """The parser of a checkout of Megatron-LM, imported from there into this process."""
    import torch._dynamo
    import torch._higher_order_ops.triton_kernel_wrap
    import torch._inductor  # noqa: F401  all three look for triton: before the stand-ins come
    import typing_extensions

    if not hasattr(typing, "override"):
        setattr(typing, "override", typing_extensions.override)  # noqa: B010
    sys.meta_path.append(_Finder())
    sys.path.insert(0, checkout)
    from megatron.post_training.arguments import add_modelopt_args
    from megatron.training import arguments

    return add_modelopt_args(arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False)))


def plain(value: Any) -> Any:
    """A default or a choice in JSON's types; an enum's member by its name, as it is typed."""
    if isinstance(value, enum.Enum):
        return value.name
    return [plain(v) for v in value] if isinstance(value, list | tuple) else value


def dump(checkout: str) -> list[dict[str, Any]]:
    """Every flag of a checkout."""
    parser = real_parser(checkout)
    defaults = vars(parser.parse_args([]))  # of two flags of one name the parser's first decides
    return [
        {
            "options": action.option_strings,
            "name": action.dest,
            "kind": _KINDS[type(action).__name__],
            "type": _TYPES.get(getattr(action.type, "__name__", ""), "str"),
            "nargs": action.nargs if type(action).__name__ == "_StoreAction" else None,
            "default": plain(defaults[action.dest]),
            "choices": plain(list(action.choices))
            if action.choices and action.dest != "exit_signal"
            else None,
        }
        for action in parser._actions
        if type(action).__name__ != "_HelpAction"
    ]


def merged(tables: dict[str, list[dict[str, Any]]]) -> str:
    """One line a flag: the versions that have it so (numbers in `versions`), and what it is."""
    lines: dict[str, list[int]] = {}
    for number, flags in enumerate(tables.values()):
        for flag in flags:
            lines.setdefault(json.dumps(list(flag.values())), []).append(number)
    rows = ",\n".join(f"[{json.dumps(numbers)}, {line[1:]}" for line, numbers in sorted(lines.items()))
    fields = json.dumps(["versions", *next(iter(tables.values()))[0]])
    return f'{{"versions": {json.dumps(list(tables))},\n"fields": {fields},\n"flags": [\n{rows}\n]}}\n'


def main(words: Iterable[str]) -> None:
    tables = {}
    for version, _, checkout in (word.partition("=") for word in words):
        done = subprocess.run(
            [sys.executable, __file__, "--dump", checkout], check=True, stdout=subprocess.PIPE
        )
        tables[version] = json.loads(done.stdout.splitlines()[-1])
    TABLE.write_text(merged(tables))


if __name__ == "__main__":
    if sys.argv[1] == "--dump":
        print(json.dumps(dump(sys.argv[2])))
    else:
        main(sys.argv[1:])
