"""Cases of a parametrised test, of which a plain run tries some and `make test-all` all."""

from collections.abc import Collection, Iterable

import pytest


def cases(every: Iterable, plain: Collection) -> list:
    """Mark those that are not in `plain`; a tuple holds the values of several names."""
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=() if case in plain else pytest.mark.zoo)
        for case in every
    ]
