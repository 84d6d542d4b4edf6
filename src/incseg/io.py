"""Atomic files, checksums, folder locks, and names that users type ("did you mean", import of `package.module:name`).

A file is written whole or not at all: a reader sees the old content or the new one.

A model file or a config.yaml never makes us import code by itself. A `package.module:name` in a file is imported only
if the user named it too: on the command line, in Python or in INCSEG_TRUST.

numpy and torch are imported where they are needed, so the command line starts without them.
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import importlib
import json
import os
import re
import secrets
import socket
import stat
import sys
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import platformdirs
import yaml
from filelock import FileLock, Timeout

from incseg.types import UserError

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

_CHECKSUM = "checksum"
"""Key of the checksum in our files. Files without one are read without a check."""


def cache_root() -> Path:
    """Return the folder of all caches: INCSEG_CACHE if set, else the user's cache folder."""
    chosen = os.environ.get("INCSEG_CACHE")
    return Path(chosen).expanduser() if chosen else platformdirs.user_cache_path("incseg", appauthor=False)


def cache_path(kind: str) -> Path:
    """Return the folder of one kind of cache."""
    return cache_root() / kind


_MADE_AGAIN = "delete it and start the run again, which writes it anew"
_DEVICES = Path("/dev")
_OTHER_KINDS = {stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}


class NoFileName(UserError, OSError):
    """A path that no file can be written to. Also an OSError, so that optional files are skipped as on a full disk."""


def no_folder(path: Path) -> Path | None:
    """Return what prevents `path` from being a folder: itself or a parent that is not a folder, else None."""
    existing = next((place for place in (path, *path.parents) if place.exists()), None)
    return None if existing is None or existing.is_dir() else existing


def require_file_name(path: Path) -> None:
    """Refuse an existing path that is not a regular file: a new file would replace a folder or a device.

    All of /dev is refused: its links (/dev/stdout) can lead to a regular file and would be replaced.
    """
    if obstacle := no_folder(path.parent):
        raise NoFileName(f"'{path}' cannot be written: {obstacle} is not a folder; choose another place")
    if path.is_dir():
        raise NoFileName(f"'{path}' is a folder; give the name of a file, in it or elsewhere")
    if path.parent.resolve() == _DEVICES or (path.exists() and not path.is_file()):
        kind = _OTHER_KINDS.get(stat.S_IFMT(path.stat().st_mode) if path.exists() else 0, "a device")
        raise NoFileName(f"'{path}' is {kind}, which would be replaced; give the name of a regular file")


class FolderLock:
    """Reserve a folder for one process: `.lock` is the lock file, `.lock-holder` names the process.

    The system frees the lock when the process ends, even by kill -9. Loader processes can outlive a killed parent;
    they do not hold the lock, because filelock closes their copy of the handle when they are forked. The name has a
    file of its own because Windows does not let others read a locked file.
    """

    def __init__(self, folder: Path) -> None:
        self._lock = FileLock(folder / ".lock", thread_local=False)
        self._holder = folder / ".lock-holder"
        self._locked: os.stat_result | None = None

    def acquire(self) -> bool:
        """Try to take the lock without waiting, and return whether it worked."""
        try:
            self._lock.acquire(blocking=False)
        except Timeout:
            return False
        self._locked = os.stat(self._lock.lock_file)
        self._holder.write_text(f"process {os.getpid()} on {socket.gethostname()}\n", encoding="utf-8")
        return True

    def release(self) -> None:
        self._lock.release()

    def is_in_place(self) -> bool:
        """Return whether the folder still has the lock that we hold: it may have been deleted, or be a new one."""
        try:
            return self._locked is not None and os.path.samestat(self._locked, os.stat(self._lock.lock_file))
        except OSError:
            return False

    def holder(self) -> str | None:
        """Return the process that took the lock last, "process N on HOST"."""
        try:
            return self._holder.read_text(encoding="utf-8").strip() or None
        except OSError:
            return None

    def is_free(self) -> bool:
        """Return whether nobody holds the lock."""
        try:
            with self._lock.acquire(blocking=False):
                return True
        except Timeout:
            return False


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path that replaces `path` if the block succeeds and is deleted otherwise.

    A symbolic link is replaced too. Its target stays unchanged: it may belong to another run.
    """
    require_file_name(path)
    prefix, temporary = f".{path.name}.", None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        made = path.parent / f"{prefix}{secrets.token_hex(4)}.tmp"
        made.touch(0o666, exist_ok=False)  # less what the umask takes away, as any new file
        temporary = made
        yield temporary
        with temporary.open("rb+") as written:  # Windows flushes only what is open for writing
            os.fsync(written.fileno())
        os.replace(temporary, path)
    except OSError as error:
        if error.filename is not None and os.path.basename(os.fsdecode(error.filename)).startswith(prefix):
            error.filename = str(path)  # the user does not know the temporary name
        raise
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)


def remove_temporary(folder: Path, *names: str) -> None:
    """Delete what a killed process was writing in a folder under these names, which may be patterns; nothing else."""
    for name in names:
        for left in folder.glob(f".{name}.*.tmp"):
            left.unlink(missing_ok=True)


def is_hidden_own(name: str, files: Iterable[str]) -> bool:
    """Return whether a name in a folder is that of its lock, or of a temporary file of one of `files`."""
    return name in (".lock", ".lock-holder") or any(re.fullmatch(rf"\.{re.escape(f)}\..*\.tmp", name) for f in files)


def write_text(path: Path, text: str) -> None:
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def write_compact_json(path: Path, value: Any) -> None:
    """Write readable JSON: a list or object that fits into 120 characters is one line."""
    write_text(path, _compact_json(value, 0) + "\n")


def _compact_json(value: Any, depth: int, name: str = "") -> str:
    """Return the text of a value that stands at this depth after its name."""
    text = json.dumps(value, ensure_ascii=False)
    if not isinstance(value, dict | list) or depth + len(name + text) < 120:
        return name + text
    named = value if isinstance(value, list) else value.values()
    names = [""] * len(value) if isinstance(value, list) else [f"{json.dumps(k, ensure_ascii=False)}: " for k in value]
    items = [_compact_json(item, depth + 1, own) for item, own in zip(named, names, strict=True)]
    inner = ",\n".join(" " * (depth + 1) + item for item in items)
    return f"{name}{text[0]}\n{inner}\n{' ' * depth}{text[-1]}"


def read_json(path: Path, remedy: str = _MADE_AGAIN) -> Any:
    """Read JSON; `remedy` tells the user what to do if the file is damaged."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(f"{path} is missing; the run did not get that far; start it again") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is damaged ({error}); {remedy}") from error


def write_record(path: Path, record: dict[str, Any]) -> None:
    """`write_json` with a checksum."""
    write_json(path, with_checksum(record))


def with_checksum(record: dict[str, Any]) -> dict[str, Any]:
    """Return the record with a checksum of its values."""
    return {**record, _CHECKSUM: _json_checksum(record)}


def read_record(path: Path, remedy: str = _MADE_AGAIN) -> dict[str, Any]:
    """Return what `write_record` wrote."""
    return without_checksum(read_json(path, remedy), str(path), remedy)


def without_checksum(record: Any, where: str, remedy: str) -> dict[str, Any]:
    """Return what `with_checksum` was given; a UserError where it is damaged."""
    if not isinstance(record, dict):
        raise UserError(f"{where} is damaged (it does not hold a record); {remedy}")
    if record.pop(_CHECKSUM, None) not in (None, _json_checksum(record)):
        raise UserError(f"{where} is damaged (its checksum is wrong); {remedy}")
    return record


def _json_checksum(record: dict[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps(record, sort_keys=True).encode()):08x}"


def read_yaml(path: Path) -> Any:
    """Read settings as plain values; raise a YAMLError if the file is not valid YAML."""
    try:
        value = parse_yaml(path.read_text(encoding="utf-8"))
    except ValueError as error:  # not text
        raise yaml.YAMLError(str(error)) from error
    require_plain(value, path)
    return value


def parse_yaml(text: str) -> Any:
    """Return the plain values of YAML that others wrote; raise a YAMLError if it is not valid."""
    try:
        return yaml.load(text, _PlainLoader)
    except (ValueError, RecursionError) as error:  # numbers and nesting beyond all limits
        raise yaml.YAMLError(str(error)) from error


class _PlainLoader(yaml.SafeLoader):
    """YAML without aliases: a few lines of them can expand beyond all memory."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("it has aliases, write the values out")
        return super().compose_node(parent, index)


def require_plain(value: Any, path: object, name: str = "") -> None:
    """Refuse values that no setting has: dates, sets, bytes, keys that are not text, unprintable text, huge numbers."""
    if isinstance(value, dict):
        if odd := [key for key in value if not isinstance(key, str)]:
            raise UserError(f"{path}: unknown setting '{odd[0]}'; names are text, so put it in quotes if it is one")
        for key, item in value.items():
            require_plain(item, path, f"{name}.{key}" if name else key)
    elif isinstance(value, list):
        for item in value:
            require_plain(item, path, name)
    elif isinstance(value, str):
        if "\0" in value or re.search("[\ud800-\udfff]", value):
            raise UserError(f"{path}: '{name}' holds {value!r}, with characters that no setting has; take them out")
    elif isinstance(value, int) and abs(value) >= 2**63:
        raise UserError(f"{path}: '{name}' holds a number of {value.bit_length()} bits; give a smaller one")
    elif not isinstance(value, int | float | None):
        raise UserError(f"{path}: '{name}' holds a {type(value).__name__}; write text in quotes")


def write_array(path: Path, array: np.ndarray) -> None:
    import numpy as np

    with replacing(path) as temporary, temporary.open("wb") as stream:
        np.save(stream, array, allow_pickle=False)


def write_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    with replacing(path) as temporary:
        # views of one storage cannot be stored twice, and safetensors wants them dense
        dense = {name: t.detach().cpu().contiguous().clone() for name, t in tensors.items()}
        try:
            save_file(dense, temporary, {**metadata, _CHECKSUM: _tensors_checksum(dense, metadata)})
        except SafetensorError as error:  # raised when the disk is full
            raise OSError(f"cannot write {path} ({error})") from error


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    from safetensors import SafetensorError

    try:
        return load_tensors(path)
    except (SafetensorError, OSError) as error:
        raise UserError(
            f"{path} cannot be read ({error}); delete it and row.json beside it, then start "
            "the run again, which writes both anew"
        ) from error


MOST_HEADER_BYTES = 16 << 20
"""Of a file of tensors: names, shapes and description. A network of a thousand tensors has a tenth of a megabyte."""


def tensors_header(path: Path) -> tuple[dict[str, tuple[str, tuple[int, ...]]], dict[str, str]]:
    """Return dtype and shape of each tensor, and the metadata; no tensor is read.

    Raise a SafetensorError if the file is damaged.
    """
    from safetensors import SafetensorError, safe_open

    with path.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
    if MOST_HEADER_BYTES < length <= path.stat().st_size:
        raise SafetensorError(f"its header has {length / 2**20:.0f} MB; at most {MOST_HEADER_BYTES >> 20} are read")
    with safe_open(path, framework="pt") as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        return {name: (one.get_dtype(), tuple(one.get_shape())) for name, one in slices.items()}, file.metadata() or {}


def load_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return tensors and metadata; raise a SafetensorError if the file is damaged."""
    from safetensors import SafetensorError, safe_open

    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        metadata = dict(file.metadata() or {})
    if metadata.pop(_CHECKSUM, None) not in (None, _tensors_checksum(tensors, metadata)):
        raise SafetensorError("its checksum is wrong")
    return tensors, metadata


def _tensors_checksum(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> str:
    import torch

    checksum = zlib.crc32(json.dumps(sorted(metadata.items())).encode())
    for name, tensor in sorted(tensors.items()):
        checksum = zlib.crc32(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode(), checksum)
        checksum = zlib.crc32(tensor.reshape(-1).view(torch.uint8).numpy().data, checksum)
    return f"{checksum:08x}"


def tensors_digest(tensors: Mapping[str, Tensor]) -> str:
    """Return a digest of the names and values of tensors."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: "1 image", "2 images", "3 classes"."""
    plural = noun + ("es" if noun.endswith("s") else "s")
    return f"{number} {noun if number == 1 else plural}"


def first_few(names: Iterable[object], most: int = 3) -> str:
    """Return the first names of a list for a message: "a, b, c, …"."""
    texts = [str(name) for name in names]
    return ", ".join(texts[:most]) + (", …" if len(texts) > most else "")


# A longer list would hide the nearest match.
_MOST_NAMES_IN_AN_ERROR = 24


def require_known(kind: str, name: object, allowed: Iterable[str]) -> None:
    """Raise a UserError with the nearest match unless `name` is one of `allowed`."""
    if name not in (allowed := tuple(allowed)):
        raise UserError(unknown(kind, name, allowed))


def unknown(kind: str, name: object, allowed: Iterable[str]) -> str:
    """Return the message for an unknown name: what came, the nearest match, what is allowed."""
    allowed = tuple(allowed)
    by_folded = {a.casefold(): a for a in allowed}
    nearest = difflib.get_close_matches(str(name).casefold(), by_folded, n=1)
    hint = f"did you mean '{by_folded[nearest[0]]}'? " if nearest else ""
    listed = ", ".join(allowed[:_MOST_NAMES_IN_AN_ERROR])
    left_out = len(allowed) - _MOST_NAMES_IN_AN_ERROR
    more = f" and {left_out} more" if left_out > 0 else ""
    return f"unknown {kind} '{name}'; {hint}Allowed: {listed}{more}"


def import_named(kind: str, name: str, form: str) -> Any:
    """Import and return `package.module:name`; `form` is the expected spelling, for the error.

    All code from outside is imported here, so the rule about trust holds wherever the name was read.
    """
    module, _, attribute = name.partition(":")
    if module and not is_trusted(name):
        raise UserError(
            f"{kind} '{name}' is not part of incseg and would be imported; if you trust it, name it on the command "
            f"line, import it in Python, or set {TRUSTED}={name}"
        )
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(
            f"{kind} '{name}' cannot be imported ({error}); write {form} and check that it is on PYTHONPATH"
        ) from error


def find_class(kind: str, name: str, known: Mapping[str, Any], base: type) -> Any:
    """Return what `known` has under a name, or the subclass of `base` that `package.module:Class` leads to."""
    if name in known:
        return known[name]
    if ":" not in name:
        raise UserError(unknown(kind, name, known) + ", or package.module:Class of your own")
    found = import_named(kind, name, "package.module:Class")
    if not (isinstance(found, type) and issubclass(found, base)):
        raise UserError(
            f"{kind} '{name}' is not a subclass of {base.__module__}.{base.__name__}; derive it from that class"
        )
    return found


TRUSTED = "INCSEG_TRUST"
"""Environment variable: names that the user gave, separated by commas. Child processes inherit it."""


def trust_named(tokens: Iterable[str]) -> None:
    """Remember what a command line or a caller in Python names as `package.module:name`."""
    values = [token.rpartition("=")[2] for token in tokens]
    named = [value for value in values if re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", value)]
    if named:
        os.environ[TRUSTED] = ",".join(sorted({*trusted_names(), *named}))


def trusted_names() -> set[str]:
    """Return the `package.module:name` that the user named."""
    return {*os.environ.get(TRUSTED, "").split(",")} - {""}


def is_trusted(name: str) -> bool:
    """Return whether `package.module:name` may be imported: the user named it, or it is already imported."""
    return name.partition(":")[0] in sys.modules or name in trusted_names()


def require_named_by_user(file: object, settings: Mapping[str, object]) -> None:
    """Refuse `package.module:name` in a file, as {kind: name}, unless the user named it or it is already imported."""
    for kind, name in settings.items():
        if not isinstance(name, str) or ":" not in name or name.startswith("timm:"):
            continue
        if not is_trusted(name):
            raise UserError(
                f"{file} names the {kind} '{name}', which is not part of incseg and would be imported; "
                f"if you trust it, name it on the command line too, or set {TRUSTED}={name}"
            )
