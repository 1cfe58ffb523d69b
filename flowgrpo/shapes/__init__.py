"""The files of the embedded model `shapes`: a small StableDiffusion3Pipeline of flat shapes on paper."""

from pathlib import Path

PATH = Path(__file__).parent / "model"
