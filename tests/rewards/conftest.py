"""What several tests of rewards start from."""

import pytest

from rewards.sandbox import sandbox


@pytest.fixture(scope="session")
def protected():
    """A machine with all protections of the sandbox, or the tests that ask for one are skipped."""
    try:
        lacking = sandbox.find_missing()
    except sandbox.SandboxError as error:
        pytest.skip(str(error))
    if lacking:
        pytest.skip(f"this machine lacks protections: {lacking}")
