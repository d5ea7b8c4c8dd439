"""A skip that nobody expects fails a run that must be whole (`.ci/run`, `tests/peers/run`)."""

import pytest

MODULES = {
    "test_module": 'import pytest\npytest.importorskip("no_such_package", reason="no such package")\n',
    "test_fixture": """
import pytest
@pytest.fixture
def store():
    pytest.skip("no store")
def test_of_it(store): ...
def test_itself(): pytest.skip("itself")
@pytest.mark.xfail(reason="known", strict=True)
def test_known(): assert False
def test_good(): ...
""",
}


@pytest.mark.parametrize(
    ("allowed", "counts"),
    [
        (None, {"passed": 1, "skipped": 3, "xfailed": 1}),
        ("no such|no store|itself", {"passed": 1, "skipped": 3, "xfailed": 1}),
        ("no such|no store", {"passed": 1, "skipped": 2, "xfailed": 1, "failed": 1}),
        ("no such|itself", {"passed": 1, "skipped": 2, "xfailed": 1, "errors": 1}),
        ("", {"errors": 1}),  # a module
    ],
)
def test_what_may_not_skip_fails(pytester, monkeypatch, allowed, counts):
    pytester.makepyfile(**MODULES)
    if allowed is None:
        monkeypatch.delenv("CKPT_TOOLS_MAY_SKIP", raising=False)
    else:
        monkeypatch.setenv("CKPT_TOOLS_MAY_SKIP", allowed)
    done = pytester.runpytest_inprocess("-p", "tests.conftest", "-p", "no:cacheprovider")
    assert done.parseoutcomes() == counts
    refused = not {"failed", "errors"}.isdisjoint(counts)
    assert (refused, refused) == ("it may not skip here" in done.stdout.str(), done.ret != 0)
