"""Suffixes of the files that are read as pictures, films, sounds or texts, with their media types: one table for all."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import PurePath

PICTURES = {
    ".png": "image/png",
    ".jpg": "image/jpeg",
    ".jpeg": "image/jpeg",
    ".jfif": "image/jpeg",
    ".webp": "image/webp",
    ".bmp": "image/bmp",
    ".tif": "image/tiff",
    ".tiff": "image/tiff",
    **({".avif": "image/avif"} if find_spec("PIL._avif") else {}),  # since Pillow 11.3, unless it is built without
}
ANIMATIONS = {".gif": "image/gif"}
FILMS = {".mp4": "video/mp4", ".webm": "video/webm", ".mov": "video/quicktime"}
SOUNDS = {".wav": "audio/wav"}
TEXTS = {".json": "application/json"}
MEDIA = PICTURES | ANIMATIONS | FILMS | SOUNDS
MULTI_FRAME = (".png", ".webp", ".avif")  # pictures whose files may hold an animation
BROWSER_PICTURES = {suffix: kind for suffix, kind in (PICTURES | ANIMATIONS).items() if kind != "image/tiff"}


def suffix_of(name: str | PurePath) -> str:
    """Return the suffix of a file in small letters, as the tables have it."""
    return PurePath(name).suffix.lower()


def is_apple_double(name: str) -> bool:
    """Whether a file is the companion that macOS writes beside each file on other volumes, with that file's suffix."""
    return name.startswith("._")
