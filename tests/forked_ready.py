"""The last import of the fork server in `forked`: what its children would each make anew, and no garbage to look through."""

import gc
from functools import cache

import typer
from PIL import Image
from transformers import conversion_mapping

from flowgrpo.cli import app
from flowgrpo.data import prompts
from flowgrpo.data.generators import tasks
from flowgrpo.flow.pipeline.call_arguments import outline

for split in tasks.SPLITS:
    prompts.BUILT_IN[f"tasks:{split}"]()  # of all tasks, so of each
conversion_mapping.get_checkpoint_conversion_mapping("none")  # makes those of all models
outline("StableDiffusion3Pipeline")
typer.main.get_command = cache(typer.main.get_command)
typer.main.get_command(app)
Image.init()  # imports all formats
gc.collect()
gc.freeze()  # or each child's first search for garbage goes through all imports, and copies their pages
gc.enable()
