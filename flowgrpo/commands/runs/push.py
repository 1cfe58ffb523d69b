"""Upload to the model hub; permissions are checked before anything expensive."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from flowgrpo.errors import InputError, UploadFailed
from flowgrpo.schema.imports.lazy import lazy
from flowgrpo.training.model_files.hub_files import HUB_ID

if TYPE_CHECKING:
    import huggingface_hub
else:
    huggingface_hub = lazy("huggingface_hub")

KEY = "--push-to-hub"
LOGIN = "log in with `hf auth login`, or set HF_TOKEN, with a token that may write"


def open_repository(name: str, *, private: bool = False) -> None:
    """Make a model repository OWNER/NAME at the hub unless it exists, and check that this user may write to it.

    Raises InputError if the name is invalid, nobody is logged in, this user may not write there, the hub cannot be
    reached, or an existing repository is public but `private` is asked for.
    """
    if not re.fullmatch(HUB_ID, name):
        plain = re.sub(r"[^\w.-]+", "-", name).strip("-.") or "my-lora"
        raise InputError(f"{KEY} {name}: a repository is named OWNER/NAME, such as your-name/{plain}")
    if huggingface_hub.constants.HF_HUB_OFFLINE:
        raise InputError(f"{KEY} {name}: HF_HUB_OFFLINE is set; unset it, or leave {KEY} out")
    api = huggingface_hub.HfApi()
    with _one_sentence(name):
        api.whoami()
        api.create_repo(name, private=private or None, exist_ok=True)
        api.auth_check(name, write=True)
        if private and not api.model_info(name).private:
            raise InputError(f"--private: {name} is there and is public; choose another name, or make it private first")


def upload(folder: Path, name: str, message: str) -> str:
    """Upload a folder as one commit and return the URL of the repository; raise UploadFailed if it fails."""
    api = huggingface_hub.HfApi()
    try:
        api.upload_folder(repo_id=name, folder_path=folder, commit_message=message)
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        raise UploadFailed(
            f"{KEY} {name}: the export is whole in {folder}, but its upload failed ({type(error).__name__}: {reason}); try "
            f"again with: hf upload {name} {folder}"
        ) from error
    return f"{api.endpoint}/{name}"


@contextmanager
def _one_sentence(name: str) -> Iterator[None]:
    """Turn errors of the hub and of the network into one sentence."""
    import httpx2 as httpx  # the hub's library

    errors = huggingface_hub.errors
    try:
        yield
    except errors.HFValidationError as error:
        raise InputError(f"{KEY} {name}: {' '.join(str(error).split())}") from error
    except errors.LocalTokenNotFoundError:
        raise InputError(f"{KEY} {name}: nobody is logged in to the model hub; {LOGIN}") from None
    except errors.HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else None
        if status == 401:
            raise InputError(f"{KEY} {name}: the model hub does not know this token; {LOGIN}") from error
        if status in (403, 404):
            raise InputError(f"{KEY} {name}: this user or token has no right to write there; {LOGIN}") from error
        raise InputError(f"{KEY} {name}: the model hub refused ({' '.join(str(error).split())[:300]})") from error
    except (ConnectionError, TimeoutError, httpx.TransportError) as error:
        raise InputError(
            f"{KEY} {name}: the model hub cannot be reached ({type(error).__name__}); export without it, and upload later "
            "with `hf upload`"
        ) from error
