import pytest
import tiny
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler

from flowgrpo.flow.methods import CHOICES
from samplers import FlowSDEScheduler
from samplers.kernels import KERNELS, log_prob

CONFIGS = [
    {"shift": 3.0},
    {"shift": 5.0, "use_karras_sigmas": True},
    {"use_dynamic_shifting": True, "base_shift": 0.3, "max_shift": 1.0},
    {"shift": 2.0, "shift_terminal": 0.1},
    {"shift": 3.0, "num_train_timesteps": 500},
]


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_the_table_is_the_parents_bit_for_bit(config):
    stock = FlowMatchEulerDiscreteScheduler(**config)
    ours = FlowSDEScheduler.from_config(stock.config, kernel="cps", noise_level=0.5)
    mu = {"mu": 0.7} if config.get("use_dynamic_shifting") else {}
    for steps in (2, 4, 10):
        stock.set_timesteps(steps, **mu)
        ours.set_timesteps(steps, **mu)
        assert torch.equal(stock.sigmas, ours.sigmas)
        assert torch.equal(stock.timesteps, ours.timesteps)
    assert {k: ours.config[k] for k in config} == config
    assert ours.shift == stock.shift


def test_a_begin_index_is_where_it_begins():
    """As image-to-image pipelines set it from their strength."""
    stock, ours = FlowMatchEulerDiscreteScheduler(shift=3.0), FlowSDEScheduler(shift=3.0, kernel="ode")
    x, v = torch.randn(1, 4), torch.randn(1, 4)
    moved = []
    for scheduler in (stock, ours):
        scheduler.set_timesteps(10)
        scheduler.set_begin_index(5)
        noised = scheduler.scale_noise(x, scheduler.timesteps[5:6], v)
        moved.append(scheduler.step(v, scheduler.timesteps[5], noised, return_dict=False)[0])
    torch.testing.assert_close(*moved)
    assert ours.history[0].sigma == pytest.approx(0.7072784900665283)


def test_a_slice_of_a_table_that_the_pipeline_cuts_counts_from_the_cut():
    ours = FlowSDEScheduler(shift=3.0, kernel="ode")
    ours.set_timesteps(10)
    table = ours.noise_levels
    ours.restrict(range(2, 4))
    ours.set_timesteps(10)
    kept = ours.recut(lambda timesteps: timesteps[5:])
    assert torch.equal(ours.noise_levels, table[5:])
    x, v = torch.randn(1, 4), torch.randn(1, 4)
    assert torch.equal(ours.scale_noise(x, kept[:1], v), table[5] * v + (1 - table[5]) * x)
    assert (len(kept), len(list(kept)), type(kept[1:])) == (5, 2, torch.Tensor)
    for t in kept:
        x = ours.step(v, t, x, return_dict=False)[0]
    assert [(s.sigma, s.sigma_next) for s in ours.history] == [(table[i].item(), table[i + 1].item()) for i in (7, 8)]


def test_the_sigmas_really_used_at_shift_3_and_the_shift_of_a_unipc_config():
    ours = FlowSDEScheduler(shift=3.0)
    ours.set_timesteps(10)
    # Diffusers shifts its last sigma twice; at these sigmas the reference steps of sde_steps.json were taken.
    known = [0.9601293206214905, 0.9133489727973938, 0.7072784900665283, 0.602150559425354, 0.008928571827709675]
    assert ours.sigmas[[1, 2, 5, 6, 9]].tolist() == pytest.approx(known, abs=1e-7)
    unipc = UniPCMultistepScheduler(use_flow_sigmas=True, prediction_type="flow_prediction", flow_shift=3.0)
    of_unipc = FlowSDEScheduler.from_config(unipc.config)
    of_unipc.set_timesteps(10)
    assert of_unipc.config.shift == 3.0
    assert torch.equal(of_unipc.sigmas, ours.sigmas)


@pytest.mark.parametrize(("option", "value"), [("kernel", "odd"), ("log_prob", "median")])
def test_an_unknown_choice_or_a_scheduler_of_no_flow_is_refused(option, value):
    with pytest.raises(ValueError, match="is not one of"):
        FlowSDEScheduler(**{option: value})
    with pytest.raises(ValueError, match="predicts 'epsilon', not a flow"):
        FlowSDEScheduler.from_config(UniPCMultistepScheduler().config)


@pytest.mark.parametrize("name", tiny.PIPELINES)
def test_the_ode_kernel_is_the_stock_pipeline_bit_for_bit(name):
    call = {**tiny.CALLS[name], "prompt": ["a red circle"], "output_type": "pt"}
    pipe = tiny.PIPELINES[name]()
    stock = pipe(**call, generator=torch.Generator().manual_seed(3)).images
    pipe.scheduler = FlowSDEScheduler.from_config(pipe.scheduler.config, kernel="ode")
    assert torch.equal(pipe(**call, generator=torch.Generator().manual_seed(3)).images, stock)


def pipeline(**options):
    pipe = tiny.sd3()
    pipe.scheduler = FlowSDEScheduler.from_config(pipe.scheduler.config, **options)
    return pipe


def test_slices_add_up_to_the_whole():
    pipe = pipeline(kernel="ode")
    call = {**tiny.CALLS["sd3"], "prompt": ["a red circle"], "output_type": "latent"}
    whole = pipe(**call, generator=torch.Generator().manual_seed(3)).images
    pipe.scheduler.restrict(range(0))
    latents = pipe(**call, generator=torch.Generator().manual_seed(3)).images
    for steps in (range(1), range(1, 3), range(3, 4)):
        pipe.scheduler.restrict(steps)
        latents = pipe(**call, latents=latents).images
        levels = pipe.scheduler.noise_levels.tolist()
        assert [step.sigma for step in pipe.scheduler.history] == levels[steps.start : steps.stop]
        assert pipe.scheduler.sigmas.tolist() == levels[steps.start :]
    assert torch.equal(latents, whole)


def test_own_sigmas_are_walked_when_given():
    pipe = pipeline(kernel="ode")
    pipe.scheduler.restrict((0.75, 0.5, 0.0))
    pipe(**tiny.CALLS["sd3"], prompt=["a red circle"], output_type="latent")
    assert [(step.sigma, step.sigma_next) for step in pipe.scheduler.history] == [(0.75, 0.5), (0.5, 0.0)]
    assert pipe.scheduler.timesteps.tolist() == [750.0, 500.0]


@pytest.mark.parametrize("kernel", ["flow_sde", "dance_sde", "cps"])
def test_history_holds_what_was_drawn_and_the_last_step_is_ode(kernel):
    pipe = pipeline(kernel=kernel)
    pipe.scheduler.generator = torch.Generator().manual_seed(1)
    image = pipe(**tiny.CALLS["sd3"], prompt=["a red circle"], output_type="latent").images
    history = pipe.scheduler.history
    assert len(history) == 4
    assert torch.equal(history[-1].next_sample, image)
    assert history[-1].std == 0
    assert history[-1].log_prob.item() == 0
    for step in history[:-1]:
        assert step.std > 0
        form = pipe.scheduler.kernel.log_prob
        assert torch.equal(log_prob((step.next_sample,), (step.mean,), step.std, form), step.log_prob)


def test_the_noise_level_and_the_generator_rule_the_noise():
    pipe, call = tiny.sd3(), {**tiny.CALLS["sd3"], "prompt": ["a red circle"], "output_type": "latent"}

    def image(level, seed):
        pipe.scheduler = FlowSDEScheduler.from_config(pipe.scheduler.config, kernel="cps", noise_level=level)
        pipe.scheduler.generator = torch.Generator().manual_seed(seed)
        return pipe(**call, generator=torch.Generator().manual_seed(0)).images

    first = image(0.8, 1)
    assert torch.equal(first, image(0.8, 1))
    assert not torch.equal(first, image(0.8, 2))
    assert not torch.equal(first, image(0.4, 1))
    assert torch.equal(image(0.0, 1), image(0.0, 2))


def test_tokens_at_time_zero_are_conditions_and_stay():
    torch.manual_seed(0)
    scheduler, parent = FlowSDEScheduler(shift=3.0, kernel="ode"), FlowMatchEulerDiscreteScheduler(shift=3.0)
    scheduler.set_timesteps(4)
    parent.set_timesteps(4)
    x, out = torch.randn(2, 3, 5), torch.randn(2, 3, 5)
    times = scheduler.timesteps[0].expand(2, 3).clone()
    times[:, 1] = 0
    expected = parent.step(out, parent.timesteps[0], x, per_token_timesteps=times).prev_sample
    stepped = scheduler.step(out, scheduler.timesteps[0], x, per_token_timesteps=times).prev_sample
    torch.testing.assert_close(stepped, expected, rtol=0, atol=1e-6)
    assert torch.equal(stepped[:, 1], x[:, 1])
    assert torch.equal(scheduler.history[0].sample, x[:, [0, 2]])
    assert torch.equal(scheduler.history[0].velocity, -out[:, [0, 2]])
    times[:, 1] = 300.0
    with pytest.raises(ValueError, match="per_token_timesteps: a condition of partial strength"):
        scheduler.step(out, scheduler.timesteps[0], x, per_token_timesteps=times)


@pytest.mark.parametrize("kernel", [name for name in KERNELS if name != "ode"])
def test_a_kernel_has_one_default_form_of_its_log_probability(kernel):
    released = "constant_free" if kernel in ("cps", "ddim_sde") else "mean"
    assert FlowSDEScheduler(kernel=kernel).kernel.log_prob == released
    assert CHOICES["kernel"][kernel]().log_prob == released
    assert FlowSDEScheduler(kernel=kernel, log_prob="sum").kernel.log_prob == "sum"


def test_a_step_draws_its_noise_by_its_std():
    scheduler = FlowSDEScheduler(kernel="dance_sde", noise_level=0.3)
    scheduler.set_timesteps(4)
    scheduler.generator = torch.Generator().manual_seed(3)
    x = torch.linspace(-1, 1, 6).reshape(2, 3)
    moved = scheduler.step(torch.zeros(2, 3), scheduler.timesteps[0], x).prev_sample
    (step,) = scheduler.history
    drawn = torch.randn(2, 3, generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(moved, step.mean + 0.3 * (step.sigma - step.sigma_next) ** 0.5 * drawn)


def test_a_pipeline_whose_time_runs_the_other_way_has_its_table_and_we_have_ours():
    """Its sigmas are 0 to 1 and its velocity points to the data: x moves by the output times the step either way."""
    scheduler = FlowSDEScheduler(kernel="ode", invert_sigmas=True)
    scheduler.set_timesteps(4)
    levels = scheduler.noise_levels.tolist()
    assert scheduler.sigmas.tolist() == pytest.approx([1 - level for level in levels])
    assert levels == sorted(levels, reverse=True)
    assert levels[-1] == 0
    x, toward = torch.tensor([[0.5, -2.0]]), torch.tensor([[3.0, 1.0]])
    moved = scheduler.step(toward, scheduler.timesteps[0], x).prev_sample
    torch.testing.assert_close(moved, x + (levels[0] - levels[1]) * toward)
    assert torch.equal(scheduler.history[0].velocity, -toward)


@pytest.mark.parametrize("config", [*CONFIGS, {"shift": 3.0, "invert_sigmas": True}], ids=str)
def test_rows_at_their_own_sigmas_have_the_times_of_the_table_or_of_its_scale(config):
    ours = FlowSDEScheduler(**config)
    mu = {"mu": 0.7} if config.get("use_dynamic_shifting") else {}
    ours.set_timesteps(10, **mu)
    table, times, scale = ours.noise_levels, ours.timesteps, ours.config.num_train_timesteps
    seen = []
    ours.restrict(torch.stack([table[3], torch.tensor(0.123), table[0]]), onward=lambda v: seen.append(v) or v)
    ours.set_timesteps(10, **mu)
    (own,) = ours.timesteps
    assert (own[0], own[2]) == (times[3], times[0])
    assert float(own[1]) == pytest.approx(scale * (0.877 if config.get("invert_sigmas") else 0.123))
    assert ours.sigmas.isnan().all()  # nothing else may be read of such a step
    v = torch.randn(3, 4)
    assert ours.step(v, own, v, return_dict=False)[0] is seen[0]
    assert torch.equal(seen[0], -v if config.get("invert_sigmas") else v)
    assert not ours.history
    ours.restrict(range(2))
    ours.set_timesteps(10, **mu)
    assert torch.equal(ours.noise_levels, table)


def test_rows_at_sigmas_of_a_table_have_its_times_if_they_are_others_than_its_sigmas():
    """CogView 4 shifts sigmas, not times."""
    ours, given = FlowSDEScheduler(shift=3.0), {"sigmas": [1.0, 0.6, 0.2], "timesteps": [999.0, 600.0, 200.0]}
    ours.set_timesteps(**given)
    levels = ours.noise_levels[[2, 0]]
    ours.restrict(levels, onward=lambda v: v)
    ours.set_timesteps(**given)
    assert ours.timesteps.tolist() == [[200.0, 999.0]]
    assert float(levels[0]) == pytest.approx(3 * 0.2 / 1.4)


def test_rows_at_their_own_sigmas_take_no_step_of_a_kernel():
    with pytest.raises(ValueError, match="need `onward`"):
        FlowSDEScheduler().restrict(torch.tensor([0.5, 0.2]))
