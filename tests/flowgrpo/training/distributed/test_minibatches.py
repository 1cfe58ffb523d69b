"""The parts of an update: how samples and edges are dealt, and that every step trains on its own share."""

import re
import shutil
from collections import Counter
from dataclasses import dataclass

import pytest
import torch
from field import credit, lines, step_in_place, trainer, weights_of

from flowgrpo import config
from flowgrpo.errors import InputError
from flowgrpo.flow.planning.iteration_forecast import predict_cost
from flowgrpo.schema.sections import Train
from flowgrpo.training.distributed import minibatches
from flowgrpo.training.distributed.assignment import Assignment, assign_members
from samplers.growth import grow
from samplers.kernels import Kernel
from samplers.trees import TRUNK, Move, Root


def settings(folder, preset, tree=None, steps=6, **train):
    numbers = {"iterations": 1, "groups": 2, "group_size": 12, "micro_batch": 7, "learning_rate": 0.01}
    return config.validate(
        {
            "model": {"path": "field", "lora": None},
            "algorithm": {"preset": preset, **({"tree": tree} if tree else {})},
            "train": {**numbers, **train},
            "run": {"name": "r", "dir": str(folder), "checkpoint": {"every": 1}},
        }
    )


@dataclass
class Method:
    """What the dealing asks of a method: how many roots a group has, and what keeps its samples together."""

    of_group: int
    keeps_groups_whole: str | None = None

    def roots(self, group_size):
        return self.of_group


def dealt_to(train, method, processes, iteration=3):
    """The part of each root, and what each process grows."""
    method_roots = method.roots(train.group_size)
    of_roots = minibatches.of_roots(train, method_roots, [method_roots] * train.groups, seed=0, iteration=iteration)
    return of_roots, assign_members(train, method, of_roots, processes)


@pytest.mark.parametrize("whole", [None, "a rule"])
@pytest.mark.parametrize("split", ["groups", "samples", "edges"])
@pytest.mark.parametrize(
    ("groups", "roots", "updates"), [(6, 4, 3), (4, 12, 4), (8, 1, 4), (4, 6, 4), (8, 5, 2), (1, 8, 1)]
)
def test_every_process_has_as_many_samples_of_every_part(groups, roots, updates, split, whole):
    train = Train(groups=groups, group_size=max(2, roots), updates=updates, split=split)
    method = Method(roots, whole)
    for processes in (1, 2, 3, 4, 8):
        try:
            minibatches.check_geometry(train, method, processes)
        except InputError:
            continue
        of_roots, by_process = dealt_to(train, method, processes)
        assert sorted(member for members in by_process for member in members) == [
            (g, i) for g in range(groups) for i in range(roots)
        ]
        for members in by_process:
            assert members == sorted(members)
            own = Counter(of_roots[group][index] for group, index in members)
            kinds = 1 if split == "edges" else updates
            assert own == dict.fromkeys(range(kinds), groups * roots // processes // kinds)
        if whole or split == "edges" or groups % (processes * updates) == 0:  # no group is divided that need not be
            assert sum(len({group for group, _ in members}) for members in by_process) == groups


def test_one_group_lies_on_as_many_processes_as_it_has_samples():
    train, method = Train(groups=1, group_size=8, updates=2, split="samples"), Method(8)
    minibatches.check_geometry(train, method, 4)
    _, by_process = dealt_to(train, method, 4)
    assert [len(members) for members in by_process] == [2, 2, 2, 2]
    assert Assignment(by_process, 0).divided == {0: [0, 1, 2, 3]}


def test_groups_of_unequal_sizes_are_shared_out_as_evenly_as_can_be():
    train, method = Train(groups=3, group_size=4, updates=1), Method(4)
    of_roots = minibatches.of_roots(train, 4, [2, 7, 3], seed=0, iteration=0)
    assert [len(members) for members in assign_members(train, method, of_roots, 4)] == [3, 3, 3, 3]
    assert sorted(len(members) for members in assign_members(train, Method(4, "a rule"), of_roots, 3)) == [2, 3, 7]


def test_no_part_is_favoured_where_the_roots_of_a_group_do_not_divide():
    """Each of 1,600 single roots of four parts has a part by chance: 400 of each, give or take 5 standard deviations."""
    train = Train(groups=4, group_size=8, updates=4, split="samples")
    counts = Counter(
        part
        for iteration in range(400)
        for of_group in minibatches.of_roots(train, 8, [1, 1, 1, 1], seed=0, iteration=iteration)
        for part in of_group
    )
    assert all(abs(counts[part] - 400) < 5 * (1600 * 3 / 16) ** 0.5 for part in range(4))


def test_parts_differ_between_iterations_and_seeds():
    train = Train(groups=4, group_size=12, updates=4, split="samples")
    one, later, other = (
        minibatches.of_roots(train, 12, [12] * 4, seed=seed, iteration=iteration)
        for seed, iteration in ((0, 3), (0, 4), (1, 3))
    )
    assert one not in (later, other)


@pytest.mark.parametrize(
    ("split", "numbers", "whole", "said"),
    [
        ("groups", (7, 4, 2, 1), None, "7 groups do not divide into {} = 2 parts on 1 {}, take 6 or 8"),
        ("samples", (2, 4, 3, 1), None, "2 groups of 4 samples do not divide into {} = 3 parts on 1 {}, take 3"),
        ("samples", (4, 6, 4, 8), None, "4 groups of 6 samples do not divide into {} = 4 parts on 8 {}, take 16"),
        ("groups", (3, 4, 1, 8), None, "3 groups of 4 samples do not divide into {} = 1 parts on 8 {}, take 2 or 4"),
        ("groups", (3, 4, 1, 2), "x", "3 groups, whole because of x, do not divide into {} = 1 parts on 2 {}, take 2 or 4"),
        ("edges", (3, 4, 9, 2), None, "groups, whole because of train.split=edges, do not divide among 2 {1}, take 2 or 4"),
    ],
)  # fmt: skip
def test_what_cannot_be_dealt_evenly_is_refused_with_the_nearest_numbers(split, numbers, whole, said):
    groups, size, updates, processes = numbers
    train = Train(groups=groups, group_size=size, updates=updates, split=split)
    with pytest.raises(
        InputError, match=re.escape(said.format("train.updates", "processes" if processes > 1 else "process"))
    ):
        minibatches.check_geometry(train, Method(size, whole), processes)


def test_roots_are_dealt_to_processes_that_work_together():
    train, method = Train(groups=4, group_size=4, updates=2, split="groups"), Method(4, "a rule")
    minibatches.check_geometry(train, method, 8, sharing=4)
    said = "do not divide into train.updates = 2 parts on 12 processes of which each 4 work together, take 6"
    for processes, sentence in (
        (12, f"train.groups: 4 groups, whole because of a rule, {said}"),
        (1, "run.context_parallel: 1 process does not divide into groups of 4, take run.processes=4$"),
        (6, "run.context_parallel: 6 processes do not divide into groups of 4, take run.processes=4 or 8"),
    ):
        with pytest.raises(InputError, match=sentence):
            minibatches.check_geometry(train, method, processes, sharing=4)


def test_more_parts_than_states_are_refused(tmp_path):
    chosen = settings(tmp_path, "mix_grpo", split="edges", updates=49)  # 12 chains, a window of 4
    said = "train.updates: 49 parts, but the trained edges of a group leave 48 states, take 48"
    with pytest.raises(InputError, match=said):
        predict_cost(chosen, 6)


def forked(role, step):
    """Two children of each kind at the first step, of which some are trained, then chains."""
    sde = Kernel("flow_sde", 0.7)
    if step == 0:
        return (Move(sde, TRUNK, 2, trained=True), Move(sde, "side", 2, trained=True))
    return (Move(sde, role, trained=role == TRUNK),) if step < 3 else (Move(),)


def grown(groups, micro_batch):
    roots = [Root(group, index, None) for group in groups for index in range(3)]
    start, sigmas = (torch.zeros(len(roots), 1),), torch.linspace(1, 0, 5).tolist()
    still, noiseless = lambda state, *_: state, lambda shape, *_: torch.zeros(shape)
    return grow(forked, sigmas, roots, start, still, noiseless, micro_batch)


def dealt(groups, micro_batch, updates=4):
    """Of each state with trained edges, by its place, the part; one for all edges that leave it."""
    tree = grown(groups, micro_batch)
    keep = torch.ones(len(tree.nodes), dtype=torch.bool)
    found = minibatches.of_edges(tree, keep, updates=updates, seed=0, iteration=5)
    by_state = {}
    for evaluation in tree.evaluations:
        for edges in evaluation.trained:
            for node in edges.nodes.tolist():
                state = tree.nodes[tree.nodes[node].parent]
                by_state.setdefault((state.root.group, state.path, state.step), set()).add(int(found[node]))
    assert all(len(own) == 1 for own in by_state.values())
    return {place: own.pop() for place, own in by_state.items()}


def test_edges_are_dealt_alike_on_any_number_of_processes_and_in_any_batches():
    whole = dealt(range(4), 64)
    assert len(whole) == 4 * 3 * (1 + 2 + 2)  # of each root itself and its two trained children at two steps
    assert {**dealt(range(0, 4, 2), 5), **dealt(range(1, 4, 2), 3)} == whole
    for group in range(4):
        own = Counter(part for (of, _, _), part in whole.items() if of == group)
        assert sorted(own.values()) == [3, 4, 4, 4]


def gradients(run):
    """Of each part of the first iteration without moving, and how many edges it has."""
    credited = credit(run, run.rollout(0, run.groups(0)))
    found = []
    for part in range(run.config.train.updates):
        measured = step_in_place(run, credited, part)
        found.append((measured.edges, torch.cat([p.grad.flatten() for p in run.weights.parameters])))
    return found


@pytest.mark.parametrize(("split", "updates"), [("samples", 4), ("edges", 7)])
def test_the_parts_together_are_the_whole(tmp_path, split, updates):
    """A mean over all edges is the mean over parts of their means, weighted by their sizes."""
    ((count, whole),) = gradients(trainer(settings(tmp_path / "whole", "mix_grpo", updates=1), held_out=0))
    own = gradients(trainer(settings(tmp_path / "parts", "mix_grpo", updates=updates, split=split), held_out=0))
    assert sum(edges for edges, _ in own) == count == 2 * 12 * 4
    assert max(edges for edges, _ in own) - min(edges for edges, _ in own) <= (0 if split == "samples" else 2)
    torch.testing.assert_close(sum(edges * gradient for edges, gradient in own) / count, whole, rtol=1e-4, atol=1e-6)
    assert not torch.allclose(own[0][1], whole, rtol=0.1)


# What the released codes do in an iteration of a process: MixGRPO 12 samples, a step for each 3; DanceGRPO 12, for each 4;
# BranchGRPO two trees of 16 leaves in 20 steps, for each 12 of their 436 edges, shuffled.
PUBLISHED = [
    ("mix_grpo", 12, 6, 1, "samples", 4, 0.0),
    ("dance_grpo", 12, 6, 1, "samples", 3, 0.0),
    ("branch_grpo", 16, 20, 2, "edges", 36, 1e-6),
]


@pytest.mark.parametrize(("preset", "size", "steps", "groups", "split", "updates", "drift"), PUBLISHED)
def test_the_published_numbers_of_steps_run(tmp_path, preset, size, steps, groups, split, updates, drift):
    chosen = settings(tmp_path, preset, group_size=size, groups=groups, split=split, updates=updates)
    run = trainer(chosen, held_out=0, steps=steps)
    run.run()
    (line,), cost = lines(run), predict_cost(chosen, steps)
    assert run.weights.updates == updates
    assert line["policy/max_abs_log_ratio"] <= drift
    assert line["cost/trained_edges"] == cost.trained_edges
    assert line["cost/rollout_evaluations"] == cost.rollout
    assert line["cost/update_evaluations"] == cost.update - cost.graphs


@pytest.mark.parametrize("split", [pytest.param("samples", marks=pytest.mark.zoo), "edges"])
def test_a_resume_deals_as_the_run_would_have(tmp_path, split):
    def begin():
        return trainer(settings(tmp_path, "branch_grpo", split=split, updates=2, iterations=3), held_out=0)

    whole = begin()
    whole.run()
    shutil.rmtree(tmp_path / "r" / "checkpoints" / "step-000003")
    rest = begin()
    rest.resume()
    assert rest.done == 2
    rest.run()
    assert all(torch.equal(tensor, weights_of(rest)[name]) for name, tensor in weights_of(whole).items())
