"""Updates of trees whose branches are trained on once."""

import pytest
import torch
from runs import metrics
from safetensors.torch import load_file

from flowgrpo.commands.runs import train as run
from flowgrpo.errors import InputError
from flowgrpo.mdlm import update
from flowgrpo.mdlm.methods.likelihoods.answers import Answers
from flowgrpo.mdlm.methods.likelihoods.likelihood import trajectory
from flowgrpo.mdlm.methods.objectives.self_distillation import SelfDistillation
from flowgrpo.mdlm.methods.trees import grow
from flowgrpo.mdlm.update_batch import UpdateBatch

# Four answers of three tokens: two trees, each with a shared token and two of each answer alone.
BRANCH = torch.tensor([[0, 1, 1], [0, 2, 2], [3, 4, 4], [3, 5, 5]])
STEPS = torch.tensor([[0, 1, 2], [0, 2, 1], [0, 1, 2], [0, 1, 2]])


def batch(**changes):
    ids = torch.arange(12).reshape(4, 3)
    answers = Answers(
        ids=ids,
        attention_mask=torch.ones_like(ids, dtype=torch.bool),
        scored=torch.ones_like(ids, dtype=torch.bool),
        addresses=[("row", row) for row in range(4)],
        steps=STEPS,
    )
    views = trajectory(answers)
    once = views.once(BRANCH)
    old = (-0.1 * (1 + ids)).expand(3, -1, -1).where(once.scored, 0.0)
    made = UpdateBatch(
        rows=torch.arange(4),
        group=torch.zeros(4, dtype=torch.long),
        rank=torch.zeros(4),
        answers=answers,
        advantage=torch.arange(4.0)[:, None].expand(4, 3),
        weight=torch.ones(4, 3),
        step=views.first,
        branch=BRANCH,
        views=once,
        old=old,
        reference=old * 2,
    )
    for name, at in changes.items():
        getattr(made, name)[at] = torch.nan
    return made


def test_without_a_loss_of_a_completion_nothing_changes():
    made = batch()
    assert made.finite() is made


def test_tokens_that_a_dropped_completion_shared_are_scored_by_the_next_of_their_branch():
    left = batch(old=(1, 0, 1)).finite()
    assert left.rows.tolist() == [1, 2, 3]
    assert left.views.scored.any(0).tolist() == [[True] * 3, [True] * 3, [False, True, True]]
    # The shared token's is that of the dropped row: the branch has it on the same canvas.
    torch.testing.assert_close(left.old.sum(0), torch.tensor([[-0.1, -0.5, -0.6], [-0.7, -0.8, -0.9], [0, -1.1, -1.2]]))
    assert torch.equal(left.reference, 2 * left.old)
    assert left.views.first[0].tolist() == STEPS[1].tolist()
    carried = left.views.carried(torch.ones(3, 3), left.branch)
    assert carried.tolist() == [[1, 1, 1], [2, 1, 1], [0, 1, 1]]


def test_where_a_shared_token_is_broken_all_completions_of_its_branch_are_dropped():
    left = batch(reference=(0, 2, 0)).finite()
    assert left.rows.tolist() == [0, 1]
    assert torch.equal(left.views.scored, batch().views.scored[:, :2])


def test_entropies_move_with_the_tokens_and_nothing_may_be_left():
    made = batch(old=(1, 0, 1))
    entropy = torch.arange(1.0, 13).reshape(4, 3) * made.views.scored.any(0)
    left = UpdateBatch(**{**vars(made), "measure": entropy}).finite()
    assert left.measure.tolist() == [[1, 5, 6], [7, 8, 9], [0, 11, 12]]
    entropy[0, 0] = entropy[2, 0] = torch.nan
    none = UpdateBatch(**{**vars(made), "measure": entropy}).finite()
    assert len(none.rows) == 0
    assert none.views.carried(torch.ones(0, 3), none.branch).shape == (0, 3)


def test_an_update_without_a_broken_completion_is_that_of_tokens_trained_in_every_answer(settings, monkeypatch):
    real, lost = update.log_probs, []

    def log_probs(*arguments):
        found = real(*arguments)
        own = int(arguments[1].views.first[0].argmax())  # the last token that the first answer decoded is its own
        lost.append(bool(found[:, 0, own].any()))
        found[:, 0, own] = torch.nan
        return found

    monkeypatch.setattr(update, "log_probs", log_probs)
    chosen = {
        "algorithm__preset": "cj_grpo",
        "algorithm__tree": {"name": "branch", "factor": 2, "splits": [0.25, 0.5]},
        "algorithm__credit": "nested",
        "algorithm__baseline": "leave_one_out",
        "algorithm__objective__kl__beta": 0.1,
        "train__iterations": 1,
        "train__updates": 1,
        "eval__prompts": 1,
    }
    done = {}
    for name in ("once", "often"):
        done[name] = run.train_config(settings(run__name=name, **chosen))
        monkeypatch.setattr(update, "_branches", lambda config, batch: None)
    assert lost == [True, True]
    (one,), (other,) = (metrics(done[name].folder)[:1] for name in done)
    assert one["policy/grad_norm"] == pytest.approx(other["policy/grad_norm"], rel=1e-4)
    one, other = (
        load_file(max((each.folder / "checkpoints").iterdir()) / "weights.safetensors") for each in done.values()
    )
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, other[name], rtol=0, atol=1e-5)


def test_good_siblings_are_learnt_in_later_iterations(settings, monkeypatch):
    pulls, real = [], update.backward

    def backward(*arguments, **options):
        pulls.append(options["pull"])
        assert not options["pull"][~arguments[2].scored.any(0)].any()
        assert not options["pull"][options["advantage"] <= 0].any()
        return real(*arguments, **options)

    monkeypatch.setattr(update, "backward", backward)
    chosen = {"algorithm__preset": "d_tree_rpo", "train__group_size": 16, "train__iterations": 3, "train__updates": 1}
    norms = []
    for name, distillation in (("with", {"weight": 10.0}), ("without", None)):
        done = run.train_config(settings(run__name=name, algorithm__objective__distillation=distillation, **chosen))
        norms.append([line["policy/grad_norm"] for line in metrics(done.folder) if "policy/grad_norm" in line])
        monkeypatch.setattr(update, "backward", real)
    assert norms[0][0] == norms[1][0]
    assert norms[0][1] != norms[1][1]
    rule = SelfDistillation(weight=10.0)
    for number, pull in enumerate(pulls):  # at each place the siblings' weights sum to 1
        assert pull.sum().item() == pytest.approx(rule.weight_at(number / 2), rel=1e-5)


def test_the_canvases_that_branches_leave_are_the_same_on_all_processes():
    members = [(group, index) for group in (4, 7) for index in range(8)]
    whole, part = grow(members, 2, 2), grow(members[12:], 2, 2)  # the second tree of group 7
    assert whole.origins[whole.edge][12:].tolist() == part.origins[part.edge].tolist()
    first, second, third = whole.origins[whole.edge].unbind(1)
    assert len(first.unique(dim=0)) == 2  # the prompts
    assert len(second.unique(dim=0)) == 4
    assert len(third.unique(dim=0)) == 8


@pytest.mark.parametrize(
    "changes",
    [
        {"algorithm__likelihood__shrink": 1},
        {"algorithm__likelihood": "one_step"},
        {"algorithm__credit": "terminal"},
        {"algorithm__objective__kl": {"form": "k2", "level": "sequence", "beta": 0.1}},
    ],
)
def test_siblings_that_share_no_canvas_teach_nothing(settings, changes):
    with pytest.raises(
        InputError, match="distillation: it compares what branches wrote on one canvas, take likelihood"
    ):
        settings(algorithm__preset="d_tree_rpo", **changes)
