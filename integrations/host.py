"""The programs that gristmill runs inside, and the versions of them that an integration serves."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from gristmill._lazy import lazy_names
from gristmill.kernel_registry.build import version_key

LOG = logging.getLogger("gristmill")


class HostError(RuntimeError):
    """A host that is not installed, or not in a version that its integration serves."""


@dataclass(frozen=True)
class Host:
    """One program and its versions.

    Attributes:
        name: for people.
        distributions: the names under which it is installed; the first that is here counts.
        minimum: the oldest version that is served.
        below: the first version that is not served any more.
        tested: prefixes of the versions that tests run; another version in the range is served with a warning. (): every version.
    """

    name: str
    distributions: tuple[str, ...]
    minimum: str
    below: str
    tested: tuple[str, ...] = ()

    def require(self) -> str:
        """The installed version.

        Raises:
            HostError: it is not installed, or its version is not served.
        """
        served = f"gristmill serves {self.name} >={self.minimum},<{self.below}"
        distribution = self.distributions[0]
        for name in self.distributions:
            try:
                installed = version(name)
            except PackageNotFoundError:
                continue
            if version_key(self.minimum) <= version_key(installed) < version_key(self.below):
                if self.tested and not installed.startswith(self.tested):
                    LOG.warning(
                        "%s %s is installed; gristmill was tested with %s",
                        name,
                        installed,
                        ", ".join(f"{prefix}*" for prefix in self.tested),
                    )
                return installed
            raise HostError(
                f"{served}, and {name} {installed} is installed: pip install '{name}>={self.minimum},<{self.below}'"
            )
        raise HostError(
            f"{served}, and it is not installed: pip install '{distribution}>={self.minimum},<{self.below}'"
        )


def host_names(
    package: str, file: str, unchecked: Collection[str] = ("HOST",)
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """`lazy_names` of the package of a host. Before a name is imported, `Host.require` of the package's ``HOST`` is called, except for the names
    in `unchecked`.
    """
    get, names, public = lazy_names(package, file)

    def get_checked(name: str) -> Any:
        if name in public and name not in unchecked:
            get("HOST").require()
        return get(name)

    return get_checked, names, public
