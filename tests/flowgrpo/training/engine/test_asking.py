"""What ends a run that asks engines."""

from types import SimpleNamespace

import pytest

from flowgrpo.training.distributed import replay_journal
from flowgrpo.training.engine.asking import answered
from flowgrpo.training.engine.service import EngineError
from flowgrpo.training.run.stop_reasons import EngineLostAlone


def test_an_engine_that_fails_where_its_rollout_is_made_again_ends_the_run():
    """What the others said the first time tells nothing of it."""
    collectives = SimpleNamespace(gather=lambda own: replay_journal.told(lambda: own))
    loop = SimpleNamespace(done=3, collectives=collectives, rest=lambda: "go on", keep_what_is_done=lambda: None)

    def fails():
        raise EngineError("is gone")

    with replay_journal.kept() as notes:
        assert answered(loop, lambda: 7) == 7
        notes.met = 0
        with pytest.raises(EngineLostAlone, match="stopped after step 3: is gone"):
            answered(loop, fails)
