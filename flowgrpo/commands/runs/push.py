"""Uploads to the model hub: whether one will be taken is asked before anything expensive."""

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
    """Make a repository for a model at the hub, unless it is there, and see that this user may write to it.

    Args:
        name: OWNER/NAME, the user's own or that of an organisation.
        private: make it a private one.

    Raises:
        InputError: the name is none, nobody is logged in, this user has no right to it, the hub cannot be reached, or a
            repository that should be private is there and is public.
    """
    if not re.fullmatch(HUB_ID, name):
        raise InputError(f"{KEY} {name}: a repository is named OWNER/NAME, such as {_example(name)}")
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
    """Upload a folder as one commit and return the address of the repository.

    Raises:
        UploadFailed: the upload failed.
    """
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


def _example(name: str) -> str:
    plain = re.sub(r"[^\w.-]+", "-", name).strip("-.") or "my-lora"
    return f"your-name/{plain}"


@contextmanager
def _one_sentence(name: str) -> Iterator[None]:
    """Turn what the hub and the way to it raise into one sentence."""
    import httpx2 as httpx  # the hub's library

    said = huggingface_hub.errors
    try:
        yield
    except said.HFValidationError as error:
        raise InputError(f"{KEY} {name}: {' '.join(str(error).split())}") from error
    except said.LocalTokenNotFoundError:
        raise InputError(f"{KEY} {name}: nobody is logged in to the model hub; {LOGIN}") from None
    except said.HfHubHTTPError as error:
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
