"""Where a model comes from: its name at the hub and its licence, as its own card and index say."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from flowgrpo.data.embedded import EMBEDDED, place_of
from flowgrpo.schema.lazy import lazy
from flowgrpo.training.hub import HUB_ID

if TYPE_CHECKING:
    import huggingface_hub
else:
    huggingface_hub = lazy("huggingface_hub")

HUB = "https://huggingface.co"
KEYS = ("license", "license_name", "license_link")
SECONDS = 5  # that a question to the hub may take


def hub_name(path: str) -> str | None:
    """The name of a model at the hub: its own, or what the index of a local folder remembers; None where nobody knows."""
    if not Path(place_of(path)).is_dir():
        return path if re.fullmatch(HUB_ID, path) else None
    for file in ("model_index.json", "config.json"):
        try:
            named = json.loads((Path(place_of(path)) / file).read_text(encoding="utf-8")).get("_name_or_path")
        except (OSError, ValueError, AttributeError):
            continue
        if isinstance(named, str) and re.fullmatch(HUB_ID, named) and not Path(named).exists():
            return named
    return None


def licence(path: str) -> dict[str, str]:
    """The licence of a model in a card's words: `license`, and for one that is not among the hub's own a name and a link.

    It is what the model's own card says; of an embedded model that of this package. Where no card can be read, or it says
    nothing, it is `other`, with a link to the model's page where it has one: whoever takes an adapter must look there.
    """
    if path in EMBEDDED:
        return {"license": "apache-2.0"}
    name = hub_name(path)
    said = _front(_card(path))
    known = {key: str(said[key]) for key in KEYS if isinstance(said.get(key), str)}
    if "license" not in known:
        known = {"license": "other", "license_name": "as-the-base-model"}
    if known["license"] == "other" and name is not None and "://" not in known.get("license_link", ""):
        file = known.get("license_link", "")
        known["license_link"] = f"{HUB}/{name}/blob/main/{file}" if file else f"{HUB}/{name}"
    return known


def _card(path: str) -> str:
    """The text of a model's card: in its folder, in the cache or at the hub; empty where there is none."""
    file = Path(path) / "README.md"
    if not Path(path).is_dir():
        try:
            file = Path(huggingface_hub.hf_hub_download(path, "README.md", etag_timeout=SECONDS))
        except Exception:  # no card, no right to it, no network: all the same here
            return ""
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""


def _front(text: str) -> dict[str, Any]:
    """The map at the top of a card; empty where there is none that can be read."""
    found = re.match(r"\ufeff?---\s*\n(.*?)\n---\s*(\n|$)", text, re.DOTALL)
    try:
        said = yaml.safe_load(found[1]) if found else {}
    except yaml.YAMLError:
        return {}
    return said if isinstance(said, dict) else {}
