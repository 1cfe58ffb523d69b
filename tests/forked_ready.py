"""What the fork server in `forked` does before its first child: all imports, and what children would each make anew.

No garbage is looked for meanwhile, which takes a quarter of the time, nor ever in what there is by then: else each child's
first search would go through all imports, and copy their pages.
"""

import gc
from contextlib import suppress
from functools import cache
from importlib import import_module

MODULES = (
    "flowgrpo.commands.train",
    "flowgrpo.flow.setup",
    "flowgrpo.mdlm.setup",
    "flowgrpo.mdlm.trainer",
    "diffusers.guiders",
    "diffusers.pipelines.onnx_utils",
    "diffusers.pipelines.stable_diffusion_3.pipeline_stable_diffusion_3",
    "transformers.models.clip.modeling_clip",
    "transformers.models.llama.modeling_llama",
    "transformers.models.t5.modeling_t5",
    "peft",
    "torch.distributed",
    "torchvision.io",
    "zoo",
)


def get_ready():
    for module in MODULES:
        with suppress(ImportError):  # what a version of a library does not have, no child needs
            import_module(module)

    import typer
    from PIL import Image
    from transformers import conversion_mapping

    from flowgrpo.cli import app
    from flowgrpo.data import prompts, tasks
    from flowgrpo.flow.pipeline.call import outline

    for split in tasks.SPLITS:
        prompts.BUILT_IN[f"tasks:{split}"]()  # of all tasks, so of each
    conversion_mapping.get_checkpoint_conversion_mapping("none")  # makes those of all models
    outline("StableDiffusion3Pipeline")
    typer.main.get_command = cache(typer.main.get_command)
    typer.main.get_command(app)
    Image.init()  # imports all formats


gc.disable()
get_ready()
gc.freeze()
gc.enable()
