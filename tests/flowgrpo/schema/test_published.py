"""What a source says of the loop, beside the run."""

from flowgrpo.schema.published import compared, line

RUN = {"train": {"groups": 12, "ema": {"decay": 0.9, "every": 8, "warmup": 40}, "draft": {"pool": 4, "cache": None}}}


def test_values_that_differ_stand_beside_the_run_s_and_what_is_not_said_at_the_end():
    stated = {"train.groups": 48, "train.ema": {"decay": 0.9, "warmup": 10}}
    assert line(compared(stated, RUN), ["train.updates", "model.call.num_inference_steps"]) == (
        "groups 48 (here 12), ema decay 0.9 warmup 10 (here decay 0.9 every 8 warmup 40); "
        "not said: updates, num_inference_steps"
    )


def test_of_a_map_only_what_is_stated_is_compared():
    assert line(compared({"train.draft": {"pool": 4}}, RUN)) == "draft pool 4"
