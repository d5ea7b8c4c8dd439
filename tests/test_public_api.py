"""The public API: every name resolves, is documented, and costs nothing until it is used."""

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
