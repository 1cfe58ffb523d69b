"""Suffixes of the pictures, films, sounds and texts that are read, with their media types."""

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
    **({".avif": "image/avif"} if find_spec("PIL._avif") else {}),  # Pillow from 11.3, if built with it
}
ANIMATIONS = {".gif": "image/gif"}
FILMS = {".mp4": "video/mp4", ".webm": "video/webm", ".mov": "video/quicktime"}
SOUNDS = {".wav": "audio/wav"}
TEXTS = {".json": "application/json"}
MEDIA = PICTURES | ANIMATIONS | FILMS | SOUNDS
MULTI_FRAME = (".png", ".webp", ".avif")  # pictures whose files may hold an animation
BROWSER_PICTURES = {suffix: kind for suffix, kind in (PICTURES | ANIMATIONS).items() if kind != "image/tiff"}


def suffix_of(name: str | PurePath) -> str:
    """Return the suffix of a file in lower case."""
    return PurePath(name).suffix.lower()


def is_apple_double(name: str) -> bool:
    """Return True for a companion file that macOS writes beside a file, with the same suffix."""
    return name.startswith("._")
