"""Models by name: a path, or a repository of the Hugging Face hub, whose needed files are fetched into the hub's own cache.

local_model("examples/models/docs-llama")  # what exists here always wins
local_model("org/name")                    # config, tokenizer, safetensors
local_model("org/name@v1.0")               # a branch, a tag or a commit
local_model("org/name:Q4_K_M")             # one GGUF file: its name, a pattern, or its quantization

`huggingface_hub` does the transfers, with its variables: HF_HOME (the cache), HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE. Nothing of a repository
is run.
"""

from __future__ import annotations

import difflib
import errno
import os
import re
import shutil
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gristmill import __version__
from gristmill.quant.checkpoints.files import read_json
from gristmill.quant.checkpoints.safetensors import INDEX
from gristmill.quant.errors import ConfigError
from gristmill.runtime.hub_files import ModelFiles, model_files
from gristmill.runtime.progress import bar_is_shown

_PART = r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9_])?"
_NAME = re.compile(
    rf"(?P<repo>{_PART}/{_PART})(?:@(?P<before>[^:@\s]+))?(?::(?P<file>[^:@]+))?(?:@(?P<after>[^:@\s]+))?"
)


@dataclass(frozen=True)
class HubName:
    """A model of the hub. `file` and `revision` are "" where they are not named."""

    repo: str
    file: str = ""
    revision: str = ""

    @classmethod
    def parse(cls, text: str) -> HubName | None:
        """``org/name``, with ``:file`` and ``@revision`` in either order; None for what is no such name."""
        match = _NAME.fullmatch(text)
        if match is None or (match["before"] and match["after"]):
            return None
        repo, file = match["repo"], match["file"] or ""
        if len(repo) > 96 or "--" in repo or ".." in repo:
            return None  # the hub has no such names
        if not file and repo.endswith((".gguf", ".json", ".safetensors")):
            return None  # a file that is not there
        return cls(repo, file, match["before"] or match["after"] or "")

    def __str__(self) -> str:
        return (
            self.repo
            + (f"@{self.revision}" if self.revision else "")
            + (f":{self.file}" if self.file else "")
        )


def local_model(model: str | Path) -> Path:
    """The path of a model that is named by a path or, as text, by its repository on the hub, which is fetched if it is not in the cache.

    Raises:
        ConfigError: neither a path nor a name; no such repository, revision or file; no access; not reachable and not in the cache; no room.
    """
    path = Path(model)
    if isinstance(model, Path) or os.path.exists(model):
        return path
    name = HubName.parse(model)
    if name is None:
        if path.suffix == ".gguf":
            return path  # whoever opens it says that it is not there
        raise ConfigError(
            f"no model directory {model}: expected a folder with config.json and safetensors files, a GGUF file, or a repository of the "
            f"Hugging Face hub (org/name, org/name:file.gguf, org/name@revision){_near(path)}"
        )
    return _Fetch(name).model()


def local_config(model: str) -> Path:
    """The config.json of a repository on the hub: of a model without its weights. Raises as `local_model`."""
    name = HubName.parse(model)
    if name is None or name.file:
        raise ConfigError(
            f"{model!r} is no repository of the Hugging Face hub: expected org/name or org/name@revision"
        )
    fetch = _Fetch(name)
    with fetch.errors():
        return Path(fetch.download("config.json"))


class _Fetch:
    """One model's way from the hub into the cache."""

    def __init__(self, name: HubName) -> None:
        try:
            import huggingface_hub
            from huggingface_hub import constants
        except ImportError as error:
            raise ConfigError(
                f"{name}: models of the Hugging Face hub need the package huggingface_hub: pip install 'gristmill[runtime]'"
                f"{_near(Path(name.repo))}"
            ) from error
        self.name, self.hub, self.constants = name, huggingface_hub, constants
        self.needed = 0

    def model(self) -> Path:
        """The directory or the GGUF file."""
        import httpx
        from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

        with self.errors():
            try:
                sizes = self._listing()
            except (httpx.TransportError, OfflineModeIsEnabled) as error:
                return self._cached(error)
            except HfHubHTTPError as error:
                if error.response.status_code < 500:
                    raise
                return self._cached(error)
            files = model_files(self.name.repo, self.name.file, sizes, self._shards)
            for name in files.names:
                if name not in sizes:
                    raise ConfigError(f"{self.name}: {INDEX} names {name}, which the repository has not")
            self._check_room(files, sizes)
            with nullcontext() if bar_is_shown() else _no_bars():
                folder = Path(self._snapshot(files.names))
        return folder / files.gguf if files.gguf else folder

    def _listing(self) -> dict[str, int | None]:
        """The repository's files and their sizes."""
        api = self.hub.HfApi(library_name="gristmill", library_version=__version__)
        info = api.model_info(self.name.repo, revision=self._revision, files_metadata=True)
        return {file.rfilename: file.size for file in info.siblings or ()}

    def _shards(self) -> list[str]:
        return shards_of(Path(self.download(INDEX)))

    def download(self, file: str) -> str:
        """One small file."""
        with _no_bars():
            path: str = self.hub.hf_hub_download(
                self.name.repo,
                file,
                revision=self._revision,
                library_name="gristmill",
                library_version=__version__,
            )
        return path

    def _snapshot(self, names: Iterable[str], **options: Any) -> str:
        patterns = [re.sub(r"([*?[])", r"[\1]", name) for name in names]
        path: str = self.hub.snapshot_download(
            self.name.repo,
            revision=self._revision,
            allow_patterns=patterns,
            library_name="gristmill",
            library_version=__version__,
            **options,
        )
        return path

    @property
    def _revision(self) -> str | None:
        return self.name.revision or None

    def _cached(self, cause: Exception) -> Path:
        """What the cache has of it, if that is all; `cause` is why the hub was not asked."""
        from huggingface_hub.errors import LocalEntryNotFoundError, OfflineModeIsEnabled

        offline = isinstance(cause, OfflineModeIsEnabled)
        why = (
            "HF_HUB_OFFLINE is set"
            if offline
            else f"{self._endpoint} cannot be reached ({_first_line(cause)})"
        )
        try:
            folder = Path(self._snapshot((), local_files_only=True))
        except LocalEntryNotFoundError:
            raise ConfigError(
                f"{self.name} is not in the cache {self._cache}, and {why}: fetch it where there is a connection, or name a path"
                f"{_near(Path(self.name.repo))}"
            ) from cause
        sizes: dict[str, int | None] = {
            path.relative_to(folder).as_posix(): path.stat().st_size
            for path in folder.rglob("*")
            if path.is_file()
        }
        files = model_files(self.name.repo, self.name.file, sizes, lambda: shards_of(folder / INDEX))
        missing = [name for name in files.names if name not in sizes]
        if missing:
            raise ConfigError(
                f"the cache has {self.name} only in part, without {', '.join(missing[:3])}{' and others' if missing[3:] else ''}, "
                f"and {why}"
            ) from cause
        if not offline:
            warnings.warn(f"{why}: taking {self.name} from the cache", stacklevel=4)
        return folder / files.gguf if files.gguf else folder

    def _check_room(self, files: ModelFiles, sizes: dict[str, int | None]) -> None:
        """Refuse what the disk has no room for before any of it is fetched."""
        self.needed = sum(
            sizes[name] or 0
            for name in files.names
            if not isinstance(
                self.hub.try_to_load_from_cache(self.name.repo, name, revision=self._revision), str
            )
        )
        if self.needed > self._free():
            raise self._no_room()

    def _free(self) -> int:
        place = self._cache
        while not place.exists() and place != place.parent:
            place = place.parent
        return shutil.disk_usage(place).free

    def _no_room(self) -> ConfigError:
        return ConfigError(
            f"{self.name}: {self.needed / 1e9:.2f} GB are to be fetched, and {self._cache} has room for {self._free() / 1e9:.2f} GB: "
            "make room, or have HF_HOME name a folder on another disk"
        )

    @property
    def _cache(self) -> Path:
        return Path(self.constants.HF_HUB_CACHE)

    @property
    def _endpoint(self) -> str:
        return str(self.constants.ENDPOINT)

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Say what the hub answered, and what to do about it."""
        import httpx
        from huggingface_hub import errors as hub_errors

        name, page = self.name, f"{self._endpoint}/{self.name.repo}"
        try:
            yield
        except ConfigError:
            raise
        except hub_errors.GatedRepoError as error:
            have = self.hub.get_token() is not None
            raise ConfigError(
                f"{name.repo} is gated: accept its terms at {page}, "
                + (
                    "with the account of the token in use, which has no access yet"
                    if have
                    else "then set HF_TOKEN to a token of your account, or run `hf auth login`"
                )
            ) from error
        except hub_errors.RepositoryNotFoundError as error:
            raise ConfigError(
                f"{name.repo} is neither a path here nor a repository at {self._endpoint} that "
                + (
                    "the token in use may read"
                    if self.hub.get_token() is not None
                    else "can be read without a token: a private one needs HF_TOKEN"
                )
                + _near(Path(name.repo))
            ) from error
        except hub_errors.RevisionNotFoundError as error:
            raise ConfigError(
                f"{name.repo} has no revision {name.revision!r}: expected a branch, a tag or a commit of {page}"
            ) from error
        except hub_errors.LocalEntryNotFoundError as error:
            raise ConfigError(
                f"{name}: a file is not in the cache {self._cache}, and {self._endpoint} cannot be reached: {_first_line(error.__cause__ or error)}"
            ) from error
        except hub_errors.EntryNotFoundError as error:
            raise ConfigError(f"{name.repo} has no such file: {_first_line(error)}") from error
        except hub_errors.HfHubHTTPError as error:
            status = error.response.status_code
            hint = {
                401: "the token in use is not valid: set HF_TOKEN anew, or unset it for what is public",
                403: "the token in use may not read it",
                429: "too many requests: wait, or set HF_TOKEN",
            }.get(status, _first_line(error))
            raise ConfigError(f"{name}: {self._endpoint} answered {status}: {hint}") from error
        except httpx.TransportError as error:
            raise ConfigError(
                f"{name}: the transfer from {self._endpoint} broke off ({_first_line(error)}): start again, and it continues where it was"
            ) from error
        except OSError as error:
            if error.errno == errno.ENOSPC:
                raise self._no_room() from error
            raise ConfigError(f"{name}: {_first_line(error)}") from error


def shards_of(index: Path) -> list[str]:
    """The files that an index of weights names; ConfigError for one that names none."""
    entries = read_json(index).get("weight_map")
    if not isinstance(entries, dict) or not all(isinstance(file, str) for file in entries.values()):
        raise ConfigError(f"{index}: weight_map must map tensor names to file names")
    return sorted({file for file in entries.values() if file.endswith(".safetensors")})


@contextmanager
def _no_bars() -> Iterator[None]:
    """Without the bars of huggingface_hub, which are of the process."""
    from huggingface_hub.utils.tqdm import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    if are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


def _near(path: Path) -> str:
    """Models of the folder whose names are like that of a path that is not there."""
    try:
        beside = [one.name for one in path.parent.iterdir() if one.is_dir() or one.suffix == ".gguf"]
    except OSError:
        return ""
    near = difflib.get_close_matches(path.name, beside, 3)
    return f"; near it: {', '.join(str(path.parent / name) for name in near)}" if near else ""


def _first_line(error: BaseException) -> str:
    """What an exception says, without the lines of advice after it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
