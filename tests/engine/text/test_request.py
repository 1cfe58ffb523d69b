"""What of a run an engine of texts cannot do is refused, and what it is told of the rest."""

import pytest

from flowgrpo.config import validate
from flowgrpo.errors import InputError
from flowgrpo.schema.engine import Engine
from flowgrpo_engine.text import door, request
from flowgrpo_engine.text.answer import Asked


def config(**sections):
    engine = sections.pop("engine", {})
    written = {"kind": "mdlm", "model": {"path": "digits"}, **sections}
    written["run"] = {"engine": {"url": "http://127.0.0.1:9", **engine}, **sections.get("run", {})}
    return validate(written)


def check(**sections):
    settings = config(**sections)
    request.check(settings, settings.algorithm.decoder.build(settings.model.length, 0, "algorithm.decoder"))


def test_a_run_of_adapters_by_a_plain_decoder_passes():
    check()
    check(algorithm={"preset": "cj_grpo", "decoder": {"name": "threshold"}}, engine={"log_probs": True, "truncate": 3})
    check(algorithm={"decoder": {"proposal": {"temperature": 0.7, "top_p": 0.9}}})


@pytest.mark.parametrize(
    ("sections", "why"),
    [
        (
            {"model": {"path": "digits", "lora": None}},
            "model.lora: an engine gets adapters, not whole networks; give it a rank",
        ),
        (
            {"run": {"sharding": "fsdp2", "processes": 2}},
            "run.sharding: an engine gets adapters from whole networks, not from shards; set it to none",
        ),
        (
            {"run": {"generators": 1, "processes": 2}},
            "run.generators: an engine always samples with the current weights; set it to 0",
        ),
        (
            {"algorithm": {"preset": "co_grpo"}},
            "algorithm.schedule: an engine cannot get other settings for each step; take none",
        ),
        (
            {"algorithm": {"hints": "inpainting"}},
            "algorithm.hints: an engine cannot start from given tokens of an answer; take none",
        ),
        (
            {"algorithm": {"decoder": {"cfg_scale": 1.5}}},
            "algorithm.decoder.cfg_scale: an engine has no guidance for texts; set it to 0",
        ),
        (
            {"algorithm": {"decoder": {"suppressed": [3]}}},
            "algorithm.decoder.suppressed: an engine cannot suppress tokens; remove it",
        ),
        (
            {"algorithm": {"decoder": {"cache": "prefix"}}},
            "algorithm.decoder.cache: an engine manages its own cache; remove it",
        ),
        (
            {"algorithm": {"decoder": "eoser"}},
            "algorithm.decoder.modifiers: an engine scores proposals itself; take a decoder without it",
        ),
        (
            {"engine": {"untold": ["x"]}},
            "run.engine.untold: it names arguments of model.call, which language models do not have; remove it",
        ),
        (
            {"engine": {"log_probs": True}, "algorithm": {"decoder": {"proposal": {"temperature": 0.7}}}},
            "run.engine.log_probs: an engine's log-probabilities are comparable only if tokens are drawn",
        ),
        ({"engine": {"truncate": 3}}, "run.engine.truncate: it bounds ratios to an engine's log-probabilities"),
        ({"engine": {"options": {"top_p": 0.9}}}, "run.engine.options: algorithm.decoder and model.length set top_p"),
    ],
)
def test_what_an_engine_cannot_do_is_refused_in_a_sentence(sections, why):
    with pytest.raises(InputError, match=f"^{why}"):
        check(**sections)


def test_a_run_and_its_plan_are_refused_by_the_same_check():
    with pytest.raises(
        InputError, match=r"^algorithm.decoder.cfg_scale: an engine has no guidance for texts; set it to 0"
    ):
        door.check(config(algorithm={"decoder": {"cfg_scale": 1.5}}))


def test_a_request_has_a_seed_for_each_completion_and_names_the_adapter():
    settings = config(algorithm={"decoder": {"proposal": {"temperature": 1, "top_k": 7}, "eos_early_stop": True}})
    decoder = settings.algorithm.decoder.build(20, 0, "algorithm.decoder")
    asked = [Asked(name=f"t-0-0-{i}", prompt=[1, 2], seed=7 + i) for i in range(2)]
    section = Engine(options={"min_p": 0.1})
    told = request.request_of(asked, decoder, section, "t-model-0")
    drawn = {"temperature": 1.0, "top_p": 1.0, "top_k": 7, "max_new_tokens": 20, "ignore_eos": False, "min_p": 0.1}
    assert told == {
        "rid": ["t-0-0-0", "t-0-0-1"],
        "input_ids": [[1, 2], [1, 2]],
        "sampling_params": [{**drawn, "sampling_seed": 7}, {**drawn, "sampling_seed": 8}],
        "return_step_maps": True,
        "lora_path": ["t-model-0", "t-model-0"],
    }
    bare = request.request_of(asked, settings.eval.decoder.build(20, 0, "d"), Engine(log_probs=True), None)
    assert "lora_path" not in bare
    assert bare["return_logprob"] is True
    assert (
        bare["sampling_params"][0] | {"top_k": -1, "ignore_eos": True, "temperature": 0.0} == bare["sampling_params"][0]
    )
