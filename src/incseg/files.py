"""Writing so that nothing is ever half there: a file is complete under its name, or it is the old one."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import platformdirs
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from incseg.types import UserError


def cache_path(kind: str) -> Path:
    """Where a kind of cache lies: under the environment's INCSEG_CACHE, else in the user's cache folder."""
    chosen = os.environ.get("INCSEG_CACHE")
    root = Path(chosen).expanduser() if chosen else platformdirs.user_cache_path("incseg", appauthor=False)
    return root / kind


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path beside `path` that takes its place when the block ends well, and vanishes otherwise."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        with temporary.open("rb") as written:
            os.fsync(written.fileno())
        temporary.chmod(0o644)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(
            f"{path} is missing; the run did not get that far, start it again with its own command"
        ) from error
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UserError(f"{path} is damaged ({error}); delete it, and the run's own command makes it again") from error


def write_array(path: Path, array: np.ndarray) -> None:
    with replacing(path) as temporary, temporary.open("wb") as stream:
        np.save(stream, array, allow_pickle=False)


def write_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    with replacing(path) as temporary:
        # views of one storage cannot be stored twice, and safetensors wants them dense
        dense = {name: t.detach().cpu().contiguous().clone() for name, t in tensors.items()}
        try:
            # safetensors writes an unreadable file for no tensors with empty metadata
            save_file(dense, temporary, metadata or None)
        except SafetensorError as error:  # its way to say that the disk is full
            raise OSError(f"cannot write {path} ({error})") from error


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, dict(file.metadata() or {})  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise UserError(
            f"{path} cannot be read ({error}); delete it, and row.json if there is one beside it, and the run's own "
            "command makes both again"
        ) from error


def tensors_digest(tensors: Mapping[str, Tensor]) -> str:
    """Changes whenever a name or a bit of the tensors does."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()
