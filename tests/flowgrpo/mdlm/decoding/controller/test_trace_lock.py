from dataclasses import dataclass, replace

import pytest
import torch
from predictors import MASK, PAD

from flowgrpo.errors import InputError
from flowgrpo.mdlm.decoding.controller.trace_lock import (
    Controller,
    Learned,
    f_half,
    load_controller,
    loss,
    save_controller,
    train_controller,
)
from flowgrpo.mdlm.decoding.controller.traces import END, LOCKED, OPEN, PROMPT, Replay, Scene, Trace, trace, window
from flowgrpo.mdlm.decoding.decode import decode
from flowgrpo.mdlm.decoding.decoders import build
from flowgrpo.mdlm.decoding.network.predictor import MaskPredictor

EOS, LENGTH = 13, 8
PROMPT_IDS = torch.tensor([[PAD, 3, 1], [PAD, 5, 9], [7, 5, 3]])
SEEN = PROMPT_IDS != PAD
SEEDS = [(0, "decode", group) for group in range(3)]


def traces(predictor, rollout):
    """A trace for each step, of the rows that took it."""
    rows = [(rollout.steps > s).nonzero()[:, 0] for s in range(int(rollout.steps.max()))]
    options = {"layers": 3, "end_ids": [EOS]}
    return [trace(predictor, rollout, row=row, step=torch.full_like(row, s), **options) for s, row in enumerate(rows)]


@pytest.fixture
def controller():
    torch.manual_seed(0)
    return Controller(32, width=16, layers=1, heads=2, end_ids=(EOS,)).eval()


def decoded(predictor, spec="random", **changes):
    return decode(predictor, PROMPT_IDS, replace(build(spec, LENGTH, EOS), **changes), SEEDS, attention_mask=SEEN)


def test_labels_are_the_proposals_that_the_finished_answer_holds(predictor):
    rollout = decoded(predictor, {"name": "random", "steps": 4})
    found = traces(predictor, rollout)
    assert len(found) == 4
    for s, each in enumerate(found):
        canvas = rollout.canvas(s, MASK)
        logits = predictor.logits(canvas, rollout.attention_mask)
        masked = canvas == MASK
        assert torch.equal(each.label, masked & (logits.argmax(-1) == rollout.ids))
        assert torch.equal(each.scene.state == PROMPT, torch.arange(11).expand(3, -1) < 3)
        assert torch.equal(each.scene.state[:, 3:] == LOCKED, rollout.step_map < s)
        assert torch.equal(each.scene.state == END, masked & (logits.argmax(-1) == EOS))
        assert len(each.scene.hidden) == 3
    assert found[-1].label[rollout.canvas(3, MASK) == MASK].all()  # what the last step commits are its proposals


def test_a_decode_shows_its_saved_controller_what_training_showed(predictor, controller, tmp_path):
    seen = []

    @dataclass(frozen=True)
    class Watched:
        learned: Learned

        hidden_layers = 3

        def __call__(self, step, proposed):
            scores = self.learned(step, proposed)
            seen.append((step, scores))
            return scores

    save_controller(controller, tmp_path / "controller", {"model": "a llama"})
    spec = {"name": "trace_lock", "region": {"window": 3}, "committer": {"threshold": 0.5, "most": 2}}
    spec["scorer"] = {"name": "learned", "controller": str(tmp_path / "controller")}
    decoder = build(spec, LENGTH, EOS)
    assert isinstance(decoder.scorer, Learned)
    decoder = replace(decoder, scorer=Watched(decoder.scorer))
    rollout = decode(predictor, PROMPT_IDS, decoder, attention_mask=SEEN)
    assert not (rollout.ids == MASK).any()
    found = traces(predictor, rollout)
    assert len(seen) == len(found)
    for (step, scores), each in zip(seen, found, strict=True):
        within = window(each.scene, torch.full((len(step.row),), 3)) & each.scene.visible
        logits, _ = controller(replace(each.scene, visible=within))
        expected = logits.sigmoid()[:, 3:][step.open]
        torch.testing.assert_close(scores, expected, rtol=0, atol=1e-5)
    assert len({round(float(x), 4) for _, scores in seen for x in scores}) > 5


def test_every_step_of_every_row_is_replayed_once(predictor):
    rollouts = [decoded(predictor), decoded(predictor, {"name": "random", "steps": 4})]
    replay = Replay(predictor, rollouts, batch=5, layers=3, end_ids=[EOS], run_seed=1)
    assert len(replay) == 5 + 3  # 24 and 12 steps, five in a trace

    def rows(found):
        """What tells a row's step: its tokens and masks, as labels and states, and the confidence of its proposals."""
        return sorted(
            [tuple(row) for t in found for row in torch.cat([t.label, t.scene.state, t.scene.confidence], 1).tolist()]
        )

    apart = [each for rollout in rollouts for each in traces(predictor, rollout)]
    torch.testing.assert_close(torch.tensor(rows(replay)), torch.tensor(rows(apart)))
    again = Replay(predictor, rollouts, batch=5, layers=3, end_ids=[EOS], run_seed=1)
    assert torch.equal(replay[2].label, again[2].label)
    assert len(Replay(predictor, rollouts, batch=5, layers=3, most=2)) == 2


def test_training_learns_which_proposals_last(predictor, controller):
    rollout = decoded(predictor, {"name": "low_confidence", "steps": 8})
    found = traces(predictor, rollout)
    before = f_half(controller, found, threshold=0.5)
    losses = train_controller(controller, found, steps=60, window_length=LENGTH, learning_rate=3e-3)
    assert sum(losses[-10:]) < 0.6 * sum(losses[:10])
    assert f_half(controller, found, threshold=0.5) > before + 0.2
    torch.manual_seed(0)
    again = Controller(32, width=16, layers=1, heads=2, end_ids=(EOS,))
    assert losses[:10] == train_controller(again, found, steps=10, window_length=LENGTH, learning_rate=3e-3)


def scene(*states):
    """A canvas of these states."""
    blank = torch.zeros(1, len(states))
    return Scene(hidden=(), confidence=blank, state=torch.tensor([states]), position=blank.long(), visible=blank == 0)


def given(logits, threshold):
    """A controller that says the same of every canvas."""
    return lambda scene: (torch.tensor([logits]), torch.tensor([threshold]))


def test_the_f_score_weighs_precision_twice():
    """Of four that would last two are accepted, and one beside them: (1 + 1/4) 2 / (3 + 4/4)."""
    controller = given([9.0, 8.0, -2.0, 7.0, -1.0, 6.0], 0.0)
    lasting = Trace(scene(LOCKED, OPEN, OPEN, OPEN, OPEN, OPEN), torch.tensor([[0, 1, 1, 1, 1, 0]]).bool())
    assert f_half(controller, [lasting], threshold=0.9) == pytest.approx(1.25 * 2 / (3 + 1))
    assert f_half(controller, [lasting], threshold=1.1) == 0


def test_the_loss_weighs_labels_and_ends():
    label = torch.tensor([[False, True, False, True, False, True]])
    case = Trace(scene(PROMPT, OPEN, OPEN, END, END, OPEN), label)
    # window of 4 from column 1: the last column is outside; weights 1, 2, (1 - .5 x 2/4) / 2, 2 / 2
    x = torch.tensor([1.0, -2.0, 0.5, 0.5])
    each = torch.log1p(torch.exp(torch.tensor([-1.0, 1.0, -1.0, 1.0]) * x))
    weight = torch.tensor([1.0, 2.0, 0.375, 1.0])
    expected = (weight * each).sum() / weight.sum() + 1e-3 * 9
    found = loss(given([9.0, 1.0, -2.0, 0.5, 0.5, 7.0], 3.0), case, torch.tensor([4]))
    torch.testing.assert_close(found, expected)


def test_the_end_is_held_back_until_there_is_one(predictor):
    decoder = build({"name": "low_confidence", "modifiers": ["held_back"]}, LENGTH, EOS)
    bias = torch.zeros(16, dtype=torch.float64)
    bias[EOS] = 4.0
    eager = MaskPredictor(lambda ids: predictor.logits(ids).masked_fill(torch.arange(16) == MASK, -30.0) + bias, MASK)
    plain, held = (decode(eager, PROMPT_IDS[2:], each) for each in (build("low_confidence", LENGTH), decoder))
    assert plain.step_map[plain.completion == EOS].min() == 0
    assert held.step_map[held.completion != EOS].min() == 0


def test_padding_is_held_back_like_the_end(predictor):
    spec = {"name": "low_confidence", "modifiers": [{"name": "held_back", "tokens": [3]}]}
    for known, tokens in ((predictor, (EOS, PAD, 3)), (None, (EOS, 3))):
        decoder = build(spec, LENGTH, EOS, known)
        assert decoder.modifiers[0].tokens_held(decoder.frame) == tokens


@pytest.mark.parametrize(
    ("break_it", "said"),
    [
        (lambda folder: (folder / "controller.json").unlink(), "no trained controller in .*lock, flowgrpo mdlm tracelock"),
        (lambda folder: folder.rename(folder.with_name("lock2")), "no trained controller in .*lock, did you mean .*lock2'"),
        (lambda folder: (folder / "controller.json").write_text("{}"), "lock does not hold what flowgrpo mdlm"),
        (lambda folder: (folder / "controller.safetensors").unlink(), "lock does not hold what flowgrpo mdlm"),
        (lambda folder: (folder / "controller.safetensors").write_text("?"), "lock does not hold what flowgrpo mdlm"),
        (
            lambda folder: save_controller(Controller(32), folder.with_name("x"), {})
            or (folder.with_name("x") / "controller.safetensors").replace(folder / "controller.safetensors"),
            "lock does not hold what flowgrpo mdlm tracelock",
        ),
        (lambda folder: save_controller(Controller(48), folder, {}), "of width 48, those of this model have 32"),
    ],
)  # fmt: skip
def test_a_controller_that_does_not_fit_is_refused_in_a_sentence(predictor, controller, tmp_path, break_it, said):
    folder = tmp_path / "lock"
    save_controller(controller, folder, {})
    spec = {"name": "low_confidence", "scorer": {"name": "learned", "controller": str(folder)}}
    assert build(spec, LENGTH, EOS, predictor).scorer.controller.sizes == controller.sizes
    break_it(folder)
    with pytest.raises(InputError, match=f"^decoder.scorer.controller: .*{said}") as refused:
        build(spec, LENGTH, EOS, predictor)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("controller", "said"),
    [
        (Controller(48), r"^decoder.scorer.controller: .* width 48, those of this model have 32"),
        (Controller(32, hidden_layers=9), "^model: it returns 3 hidden states, a learned commitment takes 9"),
    ],
)
def test_where_the_width_was_not_known_the_first_step_refuses(predictor, tmp_path, controller, said):
    save_controller(controller, tmp_path, {})
    assert load_controller(tmp_path).hidden_layers == controller.hidden_layers
    decoder = build({"name": "trace_lock", "scorer": {"controller": str(tmp_path)}}, LENGTH, EOS)
    with pytest.raises(InputError, match=said):
        decode(predictor, PROMPT_IDS, decoder, attention_mask=SEEN)
