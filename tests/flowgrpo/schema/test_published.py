"""What a source says of the loop, beside the run."""

from flowgrpo.schema.published import compared, line, plan_lines

RUN = {"train": {"groups": 12, "ema": {"decay": 0.9, "every": 8, "warmup": 40}, "draft": {"pool": 4, "cache": None}}}


def test_values_that_differ_stand_beside_the_run_s_and_what_is_not_said_at_the_end():
    stated = {"train.groups": 48, "train.ema": {"decay": 0.9, "warmup": 10}}
    assert line(compared(stated, RUN), ["train.updates", "model.call.num_inference_steps"]) == (
        "groups 48 (here 12), ema decay 0.9 warmup 10 (here decay 0.9 every 8 warmup 40); "
        "not said: updates, num_inference_steps"
    )


def test_of_a_map_only_what_is_stated_is_compared():
    assert line(compared({"train.draft": {"pool": 4}}, RUN)) == "draft pool 4"


def test_the_plan_names_the_source_and_its_model():
    planned = {"preset": "flow_grpo", "published": compared({"train.groups": 48}, RUN)}
    for models, model in (({"flow_grpo": "SD3.5"}, "for SD3.5"), ({}, "perhaps for another model")):
        text = f"of flow_grpo's source, {model}: groups 48 (here 12)"
        assert plan_lines(planned, models) == [("published", text)]
    assert plan_lines({"preset": "awm_fast", "published": {}}, {}) == []
