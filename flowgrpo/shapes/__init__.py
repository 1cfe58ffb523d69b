"""The embedded model, `model.path: shapes`: a small StableDiffusion3Pipeline of flat shapes on paper, and its world."""

from pathlib import Path

PATH = Path(__file__).parent / "model"
CALL = {"num_inference_steps": 10, "guidance_scale": 1.0, "height": 64, "width": 64, "max_sequence_length": 1}
BUILT_IN = {"shapes": (PATH, CALL)}  # flow models by name: where they are, arguments of their call
