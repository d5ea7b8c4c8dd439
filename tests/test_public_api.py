"""The public API: every name resolves, is documented, and costs nothing until it is used."""

import dataclasses
import importlib
import inspect
import pkgutil
import subprocess
import sys

import pytest

import ckpt_tools


@pytest.mark.parametrize("name", [name for name in ckpt_tools.__all__ if name != "__version__"])
def test_every_public_name_resolves_and_is_documented(name):
    found = getattr(ckpt_tools, name)
    assert found.__name__ == name
    assert found.__doc__ and "." in found.__doc__


def test_unknown_names_are_attribute_errors():
    with pytest.raises(AttributeError, match="no_such_name"):
        ckpt_tools.no_such_name  # noqa: B018


def test_importing_the_package_imports_nothing_heavy():
    code = "import sys, ckpt_tools; print(sorted({'torch', 'numpy', 'rich', 'typer'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def _defaults(module):
    """(where, name, default) of every field and every argument that a module's own classes and functions have."""
    for owner in vars(module).values():
        if getattr(owner, "__module__", None) != module.__name__:
            continue
        if isinstance(owner, type) and dataclasses.is_dataclass(owner):
            yield from ((owner.__qualname__, f.name, f.default) for f in dataclasses.fields(owner))
        elif inspect.isfunction(owner):
            arguments = inspect.signature(owner).parameters.values()
            yield from ((owner.__qualname__, a.name, a.default) for a in arguments)


def test_what_lets_something_in_or_replaces_something_is_off_unless_asked_for():
    permits = {
        "trust_pickle",
        "allow_nonfinite",
        "overwrite",
        "follow_links",
        "weights_only",
        "with_code",
    }
    modules = [
        importlib.import_module(m.name)
        for m in pkgutil.walk_packages(ckpt_tools.__path__, "ckpt_tools.")
        if not m.name.endswith("__main__")
    ]
    found = [(w, name, default) for m in modules for w, name, default in _defaults(m) if name in permits]
    missing = (inspect.Parameter.empty, dataclasses.MISSING)
    assert [(where, name) for where, name, default in found if default not in (*missing, False)] == []
    assert {name for _, name, default in found if default is False} > {
        "trust_pickle",
        "allow_nonfinite",
        "overwrite",
    }
