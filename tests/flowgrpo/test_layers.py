"""Imports point down only, by a table of packages; flow models and texts never meet, and no two files import each other."""

from collections import defaultdict

import pytest
from modules import MODULES, PROGRAMS, ROOT, imported, module_of

# Each package with those that it imports, no more and no fewer. What stands above a package is never imported by it.
BELOW = {
    "samplers": "",
    "rewards": "",
    "rewards.jail": "",
    "flowgrpo.errors": "",
    "flowgrpo.schema": "rewards errors",
    "flowgrpo.data": "samplers rewards errors schema",
    "flowgrpo.conditions": "data",
    "flowgrpo.training": "",
    "flowgrpo.training.advantages": "rewards errors schema",
    "flowgrpo.training.model_files": "rewards errors schema data",
    "flowgrpo.training.prompts": "samplers rewards errors schema data training.advantages",
    "flowgrpo.training.run": "rewards errors data",
    "flowgrpo.training.distributed": "samplers errors schema training.prompts training.run",
    "flowgrpo.training.weights": (
        "samplers errors schema training.model_files training.prompts training.run training.distributed"
    ),
    "flowgrpo.training.planning": (
        "rewards errors schema data training.model_files training.distributed training.weights"
    ),
    "flowgrpo.training.reports": (
        "rewards errors schema data training.advantages training.model_files training.run training.weights"
    ),
    "flowgrpo.training.scoring": (
        "samplers rewards schema data training.prompts training.run training.distributed training.reports"
    ),
    "flowgrpo.training.state": (
        "rewards errors schema data training.advantages training.prompts training.distributed training.weights "
        "training.reports"
    ),
    "flowgrpo.training.fitting": (
        "rewards errors schema data training.run training.distributed training.weights training.reports training.state"
    ),
    "flowgrpo.training.wing": (
        "training.advantages training.prompts training.weights training.reports training.scoring training.fitting"
    ),
    "flowgrpo.training.checkpoints": (
        "rewards errors schema data training.run training.distributed training.weights training.reports "
        "training.state training.wing"
    ),
    "flowgrpo.training.comparison": (
        "training.advantages training.reports training.scoring training.state training.wing"
    ),
    "flowgrpo.training.iteration_metrics": (
        "training.weights training.reports training.scoring training.state training.wing"
    ),
    "flowgrpo.training.out_of_memory_retry": (
        "rewards training.prompts training.run training.weights training.reports training.scoring "
        "training.state training.fitting training.wing"
    ),
    "flowgrpo.training.lora": "errors schema data training.model_files training.weights training.checkpoints",
    "flowgrpo.training.workers": (
        "training.run training.distributed training.reports training.scoring training.state training.wing "
        "training.checkpoints"
    ),
    "flowgrpo.training.loop": (
        "training.run training.reports training.scoring training.state training.fitting training.wing "
        "training.checkpoints training.comparison training.iteration_metrics training.out_of_memory_retry "
        "training.workers"
    ),
    "flowgrpo.training.assembly": (
        "training.run training.reports training.state training.fitting training.wing training.checkpoints "
        "training.out_of_memory_retry training.workers training.loop"
    ),
    "flowgrpo.flow": "",
    "flowgrpo.flow.pipeline.networks": "rewards errors",
    "flowgrpo.flow.methods.credit": "samplers errors schema training.advantages",
    "flowgrpo.flow.methods.objectives": "samplers errors schema training.advantages",
    "flowgrpo.flow.methods.trees": (
        "samplers rewards errors schema training.weights training.distributed flow.methods.credit"
    ),
    "flowgrpo.flow.methods": (
        "samplers errors schema training.advantages training.prompts training.weights flow.methods.credit "
        "flow.methods.objectives flow.methods.trees"
    ),
    "flowgrpo.flow.pipeline.inputs": (
        "samplers rewards errors data training.run training.reports flow.pipeline.networks"
    ),
    "flowgrpo.flow.pipeline": (
        "samplers rewards errors data training.run training.distributed flow.pipeline.networks flow.pipeline.inputs"
    ),
    "flowgrpo.flow.pipeline.loading": (
        "rewards errors schema data training.model_files training.weights training.planning "
        "flow.pipeline.networks flow.pipeline"
    ),
    "flowgrpo.flow.config": (
        "samplers errors schema training.advantages training.prompts training.distributed training.weights "
        "flow.pipeline.networks flow.methods.credit flow.methods.objectives flow.methods.trees flow.methods "
        "flow.pipeline.loading"
    ),
    "flowgrpo.flow.rollouts": (
        "samplers rewards errors data training.advantages training.prompts training.run training.distributed "
        "training.weights training.reports training.scoring training.state training.fitting "
        "flow.methods.credit flow.methods.trees flow.methods flow.pipeline flow.config"
    ),
    "flowgrpo.flow.model": (
        "rewards errors schema data training.model_files training.weights training.planning training.lora "
        "flow.pipeline.networks flow.pipeline.loading flow.config"
    ),
    "flowgrpo.flow.offline": (
        "samplers errors data training.advantages training.model_files training.prompts "
        "training.distributed training.scoring flow.pipeline flow.pipeline.loading flow.config flow.rollouts"
    ),
    "flowgrpo.flow.updates": (
        "samplers schema data training.advantages training.prompts training.distributed training.weights "
        "training.planning training.reports training.state training.fitting training.wing "
        "flow.methods.objectives flow.methods flow.pipeline flow.config flow.rollouts flow.offline"
    ),
    "flowgrpo.flow.planning": (
        "samplers rewards errors schema data training.advantages training.prompts training.run training.distributed "
        "training.weights training.planning training.reports training.scoring training.state training.fitting "
        "training.wing flow.pipeline.networks flow.methods.credit flow.methods.objectives flow.methods.trees "
        "flow.methods flow.pipeline.inputs flow.pipeline flow.pipeline.loading flow.config flow.rollouts flow.model "
        "flow.offline flow.updates"
    ),
    "flowgrpo.flow.trainer": (
        "samplers data training.advantages training.prompts training.run training.distributed "
        "training.weights training.reports training.scoring training.state training.fitting training.wing "
        "training.loop training.assembly flow.methods flow.pipeline flow.config flow.rollouts flow.offline "
        "flow.updates flow.planning"
    ),
    "flowgrpo.flow.setup": (
        "rewards errors schema data training.run training.distributed training.weights training.reports "
        "training.scoring training.checkpoints training.loop flow.pipeline.networks flow.pipeline.inputs "
        "flow.pipeline flow.pipeline.loading flow.config flow.rollouts flow.model flow.offline flow.planning "
        "flow.trainer"
    ),
    "flowgrpo.flow.outputs": (
        "samplers rewards errors schema data training.run training.weights training.reports training.scoring "
        "training.checkpoints training.lora flow.pipeline.networks flow.methods flow.pipeline.inputs "
        "flow.pipeline flow.pipeline.loading flow.config flow.rollouts flow.model flow.offline flow.planning "
        "flow.setup"
    ),
    "flowgrpo.flow.diagnostics": (
        "samplers rewards errors data training.advantages training.run training.weights training.reports "
        "training.scoring training.checkpoints training.lora flow.pipeline.networks flow.methods "
        "flow.pipeline.inputs flow.pipeline flow.pipeline.loading flow.config flow.rollouts flow.model "
        "flow.planning flow.setup flow.outputs"
    ),
    "flowgrpo.mdlm": "",
    "flowgrpo.mdlm.decoding": "",
    "flowgrpo.mdlm.decoding.tokens": "samplers errors schema",
    "flowgrpo.mdlm.decoding.network": "rewards errors schema training.distributed",
    "flowgrpo.mdlm.decoding.tree_growth": "schema mdlm.decoding.tokens mdlm.decoding.network",
    "flowgrpo.mdlm.decoding.decode": (
        "samplers errors schema mdlm.decoding.tokens mdlm.decoding.network mdlm.decoding.tree_growth"
    ),
    "flowgrpo.mdlm.decoding.controller": (
        "samplers rewards errors mdlm.decoding.tokens mdlm.decoding.network mdlm.decoding.decode"
    ),
    "flowgrpo.mdlm.decoding.step_maps": "samplers errors mdlm.decoding.network mdlm.decoding.decode",
    "flowgrpo.mdlm.methods.likelihoods": (
        "samplers schema mdlm.decoding.tokens mdlm.decoding.network mdlm.decoding.decode"
    ),
    "flowgrpo.mdlm.decoding.rules": "errors schema mdlm.decoding.tokens mdlm.decoding.controller",
    "flowgrpo.mdlm.methods.objectives": "errors schema training.advantages mdlm.methods.likelihoods",
    "flowgrpo.mdlm.decoding.decoders": (
        "rewards errors schema mdlm.decoding.tokens mdlm.decoding.network mdlm.decoding.decode mdlm.decoding.rules"
    ),
    "flowgrpo.mdlm.methods.schedules": (
        "samplers rewards errors schema mdlm.decoding.tokens mdlm.decoding.decode mdlm.decoding.rules"
    ),
    "flowgrpo.mdlm.decoders": "mdlm.decoding.decoders",
    "flowgrpo.mdlm.methods": (
        "samplers errors schema training.advantages training.distributed mdlm.decoding.network mdlm.decoding.tokens "
        "mdlm.decoding.rules mdlm.decoding.decode mdlm.methods.likelihoods mdlm.methods.objectives "
        "mdlm.decoding.decoders mdlm.methods.schedules"
    ),
    "flowgrpo.mdlm.policy": (
        "samplers errors training.reports mdlm.decoding.tokens mdlm.decoding.network mdlm.decoding.decode "
        "mdlm.decoding.decoders"
    ),
    "flowgrpo.mdlm.config": (
        "errors schema training.advantages training.prompts training.distributed mdlm.decoding.network "
        "mdlm.methods.likelihoods mdlm.methods.objectives mdlm.methods.schedules mdlm.methods"
    ),
    "flowgrpo.mdlm.models": (
        "rewards errors schema data training.model_files training.weights training.planning training.lora "
        "mdlm.decoding.network mdlm.config"
    ),
    "flowgrpo.mdlm.rollouts": (
        "rewards errors data training.advantages training.prompts training.run training.distributed training.weights "
        "training.reports training.scoring training.fitting mdlm.decoding.decode mdlm.methods.likelihoods "
        "mdlm.methods.schedules mdlm.methods mdlm.policy mdlm.config"
    ),
    "flowgrpo.mdlm.controller": (
        "samplers rewards errors data training.run mdlm.decoding.network mdlm.decoding.decode "
        "mdlm.decoding.controller mdlm.methods.likelihoods mdlm.decoding.decoders mdlm.policy mdlm.models"
    ),
    "flowgrpo.mdlm.planning": (
        "rewards schema data training.model_files training.prompts training.distributed training.weights "
        "training.planning training.reports training.scoring mdlm.decoding.tokens mdlm.decoding.network "
        "mdlm.decoding.decode mdlm.methods.likelihoods mdlm.decoding.rules mdlm.methods.objectives mdlm.methods.schedules "
        "mdlm.methods mdlm.config mdlm.models mdlm.rollouts"
    ),
    "flowgrpo.mdlm.update_batch": "mdlm.methods.likelihoods mdlm.rollouts",
    "flowgrpo.mdlm.update": (
        "training.distributed training.weights mdlm.decoding.decode "
        "mdlm.methods.likelihoods mdlm.methods.objectives mdlm.methods.schedules mdlm.methods mdlm.policy "
        "mdlm.config mdlm.rollouts mdlm.update_batch"
    ),
    "flowgrpo.mdlm.trainer": (
        "rewards errors data training.advantages training.prompts training.distributed training.weights training.reports "
        "training.scoring training.state training.fitting training.wing training.loop training.assembly "
        "mdlm.decoding.decode mdlm.methods.schedules mdlm.policy mdlm.config mdlm.rollouts mdlm.update mdlm.update_batch"
    ),
    "flowgrpo.mdlm.setup": (
        "rewards training.run training.distributed training.weights training.scoring training.loop "
        "mdlm.methods.schedules mdlm.methods mdlm.policy mdlm.config mdlm.models mdlm.planning mdlm.trainer"
    ),
    "flowgrpo.mdlm.outputs": (
        "rewards errors schema data training.model_files training.weights training.reports "
        "training.checkpoints training.lora mdlm.decoding.decode mdlm.methods.schedules mdlm.methods "
        "mdlm.policy mdlm.config mdlm.models mdlm.setup"
    ),
    "flowgrpo.mdlm.doctor": (
        "samplers rewards data training.run training.weights training.reports training.scoring "
        "mdlm.decoding.decode mdlm.methods.likelihoods mdlm.methods mdlm.policy mdlm.config mdlm.models "
        "mdlm.planning mdlm.setup mdlm.outputs"
    ),
    "flowgrpo.config": "rewards errors schema data flow.config mdlm.config",
    "flowgrpo.commands.page_parts": "rewards errors data training.run training.reports",
    "flowgrpo.commands.report": "rewards errors schema data training.run training.reports commands.page_parts",
    "flowgrpo.commands": (
        "samplers rewards errors schema data training.model_files training.prompts training.run training.distributed "
        "training.weights training.planning training.advantages training.reports training.scoring training.fitting "
        "training.checkpoints training.lora flow.methods flow.pipeline flow.planning flow.setup flow.outputs "
        "flow.diagnostics mdlm.methods mdlm.policy mdlm.models mdlm.controller mdlm.planning mdlm.setup mdlm.outputs "
        "mdlm.doctor config commands.page_parts commands.report"
    ),
    "flowgrpo.cli": "rewards errors schema data training.run training.reports config commands.page_parts commands",
    "flowgrpo": "flow.pipeline flow.pipeline.loading commands",
    "flowgrpo.__main__": "cli",
}
BELOW = {
    name: {other if other in ("rewards", "samplers") else f"flowgrpo.{other}" for other in below.split()}
    for name, below in BELOW.items()
}


def package_of(module):
    """The package in the table that a module is of: the one its name begins with."""
    return module if module in BELOW else package_of(module.rpartition(".")[0])


def met(modules):
    """Each of some modules' packages with those that it imports."""
    found = {package_of(module): set() for module in modules}
    for module in modules:
        others = {package_of(other) for other in map(module_of, imported(MODULES[module])) if other}
        found[package_of(module)] |= others - {package_of(module)}
    return found


def test_imports_point_down():
    for module in MODULES:
        ((own, others),) = met([module]).items()
        assert others <= BELOW[own], f"{module} imports {others - BELOW[own]}, which does not stand below {own}"


def test_the_table_allows_nothing_that_is_not_used():
    assert met(MODULES) == BELOW


def test_the_house_has_few_floors_and_arrows():
    """Rooms are the top folders, the folders of flowgrpo with all that is in them, and its single files."""

    def room(package):
        return ".".join(package.split(".")[: 2 if package.startswith("flowgrpo.") else 1])

    scripts = {name for path in PROGRAMS for name in map(module_of, imported(path)) if name}
    arrows = {(room(name), room(other)) for name, below in BELOW.items() for other in below}
    arrows |= {("scripts", room(package_of(module))) for module in scripts}
    arrows = {(above, below) for above, below in arrows if above != below}
    floors = {name: 1 for arrow in arrows for name in arrow}
    for _ in list(floors):  # each room a floor above the highest that it imports
        for above, below in arrows:
            floors[above] = max(floors[above], 1 + floors[below])
    assert max(floors.values()) <= 9
    assert len(arrows) <= 60


def test_the_table_itself_points_down():
    left = dict(BELOW)
    while left:
        bottom = {name for name, below in left.items() if not below & left.keys()}
        assert bottom, f"these stand on each other: {sorted(left)}"
        left = {name: below for name, below in left.items() if name not in bottom}


def test_flow_models_and_texts_never_meet():
    for name, below in BELOW.items():
        if name.startswith(("flowgrpo.flow", "flowgrpo.mdlm")):
            other = "flowgrpo.mdlm" if name.startswith("flowgrpo.flow") else "flowgrpo.flow"
            assert not [package for package in below if package.startswith(other)]


FOLDERS = sorted({path.parent for path in MODULES.values()})


@pytest.mark.parametrize("folder", [folder for folder in FOLDERS if any(folder in other.parents for other in FOLDERS)])
def test_files_and_folders_of_a_package_point_down(folder):
    package = ".".join(folder.relative_to(ROOT).parts)
    left = defaultdict(set)
    for module, path in MODULES.items():
        if folder in path.parents and path != folder / "__init__.py":
            room = module.removeprefix(f"{package}.").partition(".")[0]
            others = [other for other in map(module_of, imported(path)) if other and other.startswith(f"{package}.")]
            left[room] |= {other.removeprefix(f"{package}.").partition(".")[0] for other in others} - {room}
    while left:
        bottom = {name for name, below in left.items() if not below & left.keys()}
        assert bottom, f"in or above a circle in {package}: {sorted(left)}"
        left = {name: below for name, below in left.items() if name not in bottom}


def test_no_files_import_each_other():
    left = defaultdict(set)
    for module, path in MODULES.items():
        left[module] |= {other for other in map(module_of, imported(path)) if other and other != module}
    while left:
        bottom = {name for name, below in left.items() if not below & left.keys()}
        assert bottom, f"in or above a circle: {sorted(left)}"
        left = {name: below for name, below in left.items() if name not in bottom}


def test_samplers_need_torch_and_diffusers_only():
    libraries = {name.partition(".")[0] for path in (ROOT / "samplers").rglob("*.py") for name in imported(path)}
    assert not libraries & {"peft", "accelerate", "transformers", "pydantic", "typer", "rich", "PIL"}
