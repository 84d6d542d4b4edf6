"""Models on the Hugging Face Hub, named hf://owner/name or hf://owner/name@revision. Needs the extra `hub`.

Only the model file is downloaded. It is safetensors and is checked like any other model file. The cache, the token and
the address of the hub are those of huggingface_hub: HF_HOME, HF_TOKEN, HF_ENDPOINT.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import incseg
from incseg.types import UserError

MODEL_FILE = "model.safetensors"
CARD_FILE = "README.md"
_FORM = "hf://owner/name or hf://owner/name@revision"
_SECONDS = 30.0
"""For the hub to answer a question. The transfer of a file has the timeouts of huggingface_hub."""
_LOGIN = "log in with `hf auth login`, or set HF_TOKEN"


def is_address(path: str | os.PathLike[str]) -> bool:
    """Return whether a path is the address of a model on the hub. `Path` makes one slash of two."""
    return Path(path).as_posix().startswith("hf:/")


def download(address: str | os.PathLike[str]) -> Path:
    """Return the model file of an address, in the cache of huggingface_hub. A cached file also serves offline."""
    repo, revision = parsed(address)
    hub = _package()
    with _in_one_line(repo, revision):
        return Path(hub.hf_hub_download(repo, MODEL_FILE, revision=revision, etag_timeout=_SECONDS, **_ABOUT))


def parsed(address: str | os.PathLike[str]) -> tuple[str, str | None]:
    """Return owner/name and the revision of an address."""
    text = Path(address).as_posix()
    found = re.fullmatch(r"hf:/{1,2}([\w.-]+/[\w.-]+)(?:@([\w./-]+))?", text, re.ASCII)
    if found is None:
        raise UserError(f"'{text}' is not the address of a model on the hub; write {_FORM}")
    return found[1], found[2]


def upload(folder: Path, repo: str, private: bool = False, revision: str | None = None) -> str:
    """Upload model and card in one commit, to a repository that is created if there is none. Return its address."""
    hub = _package()
    from huggingface_hub import errors

    with _in_one_line(repo, revision):
        api = hub.HfApi(**_ABOUT)
        try:
            known = api.model_info(repo, timeout=_SECONDS)
        except errors.RepositoryNotFoundError:
            api.create_repo(repo, private=private or None, exist_ok=True)
        else:
            if private and not known.private:
                raise UserError(f"'{repo}' exists and is public; choose another name, or make it private at the hub")
        if revision is not None:
            api.create_branch(repo, branch=revision, exist_ok=True)
        api.upload_folder(
            folder_path=folder,
            repo_id=repo,
            revision=revision,
            allow_patterns=[MODEL_FILE, CARD_FILE],
            commit_message=f"Upload with incseg {incseg.__version__}",
        )
    return f"hf://{repo}" + (f"@{revision}" if revision else "")


_ABOUT = {"library_name": "incseg", "library_version": incseg.__version__}


def _package() -> ModuleType:
    try:
        import huggingface_hub
    except ImportError as error:
        raise UserError("the hub needs the package huggingface_hub; pip install 'incseg[hub]'") from error
    return huggingface_hub


@contextlib.contextmanager
def _in_one_line(repo: str, revision: str | None) -> Iterator[None]:
    """Make a UserError of every error of the hub.

    huggingface_hub lets through the errors of its HTTP library, which differs between versions. Their texts are not
    shown, because one for a malformed header quotes the token.
    """
    from huggingface_hub import constants, errors

    hub = constants.ENDPOINT
    try:
        yield
    except (UserError, MemoryError):
        raise
    except errors.HFValidationError as error:
        raise UserError(f"'{repo}' cannot be the name of a model on the hub; write owner/name") from error
    except errors.RevisionNotFoundError as error:
        raise UserError(f"hf://{repo} has no revision '{revision}'; give a branch, a tag or a commit") from error
    except errors.GatedRepoError as error:
        raise UserError(f"'{repo}' wants its terms to be accepted; do so at {hub}/{repo} and {_LOGIN}") from error
    except Exception as error:
        if isinstance(error, OSError) and error.errno:  # of a disk, not of the network
            raise
        chain = list(_chain(error))
        response = next(filter(None, (getattr(one, "response", None) for one in chain)), None)
        if response is None:
            causes = [one.strerror for one in chain if isinstance(one, OSError) and one.strerror]
            cause = causes[0] if causes else type(chain[-1]).__name__
            raise UserError(
                f"the hub at {hub} cannot be reached ({cause}); check the network, HF_ENDPOINT and HF_TOKEN"
            ) from error
        is_file = isinstance(error, errors.EntryNotFoundError)
        raise UserError(_of_status(response.status_code, repo, hub, is_file)) from error


def _of_status(status: int, repo: str, hub: str, is_file: bool) -> str:
    if status == 404 and is_file:
        return f"hf://{repo} has no file {MODEL_FILE}, so it is not a model of incseg"
    if status == 404:
        return f"{hub} has no model '{repo}'; check the name; if it is private, {_LOGIN}"
    if status == 401:
        return f"{hub} wants a token for '{repo}', which is private, or does not exist; {_LOGIN}"
    if status == 403:
        return f"your token does not permit this on '{repo}' at {hub}; use one with the rights: {_LOGIN}"
    return f"{hub} answered with status {status}; try again later"


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
