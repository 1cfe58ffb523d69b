from importlib.metadata import version

from flowgrpo.schema.imports.packages import installed


def test_a_package_has_its_version_and_one_that_is_not_installed_has_words():
    assert installed("torch") == version("torch")
    assert installed("flowgrpo-that-nobody-installed") == "not installed"
