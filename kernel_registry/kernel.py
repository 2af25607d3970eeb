"""Kernels: how an operation is computed, the provider, and the requirements. A kernel is data with lazy code.

A kernel is a file ``kernels/<family>/.../<op>_<impl>.py`` with a ``KERNEL``, or several ``KERNELS``; the spec imports neither torch nor Triton.

    >>> from gristmill.kernel_registry import Target, default_registry
    >>> registry = default_registry()
    >>> kernel, problem = registry.kernel("rms_norm", "rms_norm_cpu"), registry.op("rms_norm").problem("m=7,n=4096")
    >>> kernel.language, kernel.target
    ('cpp', 'gristmill.kernels.norm.rms_norm_cpu:launch')
    >>> dict(kernel.config(problem, Target.parse("cpu:avx2")))["level"] in ("avx2", "base")
    True

The contract of a kernel:

- The launcher is ``launch(config, call)``; `call` has the operation's arguments and outputs as attributes (`call.Call`). It runs on the caller's
  current stream, does not synchronize, and allocates nothing that outlives the call.
- ``config`` is a pure function of problem and target. It also carries the static parts of the problem that the launcher needs (scheme, code
  level), so that a launch never parses anything. It holds no size of the problem: a configuration chosen for a large problem is verified
  on a smaller one (`Op.shrink`).
- ``misfit(problem, config)`` is what the launcher checks of both together: None, or why it refuses them. A configuration is verified on
  the smallest problem that it fits, and a tuned one serves only sizes that it fits.
- ``accepts(problem)`` returns None or a sentence. ``workspace(problem, config)`` returns the size in bytes and whether the memory must start
  zeroed; a kernel with zeroed memory leaves it zeroed for its next call. The caller owns the memory.
- ``deterministic``, ``batch_invariant`` and ``waits``/``triggers`` (programmatic dependent launch) are declared, and tested. A kernel that
  ``waits`` may read its packed weights before the previous kernel has ended. ``pack`` therefore returns only when they are complete, and
  code that writes into a packed weight later must synchronize the stream before the next call.
- ``dequantizes`` is declared by kernels that write the weight to memory in floats in each call, which is slow with few rows. A model names
  the layers that run one in a warning at load, with what would be faster, and so do both ``explain``.
- ``auto=False`` kernels run only when a policy pins them.

Third parties register modules with the same attributes under the entry point group ``gristmill.kernels`` (`plugins`). A plugin is added as a
whole or not at all; one that cannot be imported, or whose specs are invalid, is a line of ``kernelbench doctor`` and a reason in
``kernelbench list``. A kernel of a plugin whose ``accepts``, ``config`` or other functions raise is refused, with a warning (`plugin_kernels`).
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from gristmill.kernel_registry.build import Build
from gristmill.kernel_registry.closure import installed_sources
from gristmill.kernel_registry.plugins import PluginKernelError
from gristmill.kernel_registry.problem import AxisValue, Problem
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernel_registry.target import Target

COMPILERS = {"cutedsl": ("nvidia-cutlass-dsl",)}
"""Languages that are compiled where they run, by packages that `Build.key` does not name."""

ConfigValue = int | float | str | bool
Config = Mapping[str, ConfigValue]


@dataclass(frozen=True)
class Workspace:
    """Scratch memory of a launch: bytes, and whether it must be zero before the first launch.

    A kernel that needs zeros restores them, under every configuration, wherever its next call expects them. Other kernels
    get other memory.
    """

    bytes: int = 0
    zeroed: bool = False


def accept_all(problem: Problem) -> str | None:
    """The `accepts` of a kernel that supports every problem of its operation."""
    return None


def accept_defaults(
    accepts: Callable[[Problem], str | None], defaults: Mapping[str, AxisValue], problem: Problem
) -> str | None:
    """The `accepts` of a kernel that does not support opt-in axes: `defaults` has their default values."""
    changed = [name for name, default in defaults.items() if problem[name] != default]
    return f"does not support {' and '.join(changed)}" if changed else accepts(problem)


def fits_every_problem(problem: Problem, config: Config) -> str | None:
    """The `misfit` of a kernel whose configurations run every problem that it accepts."""
    return None


def no_config(problem: Problem, target: Target) -> Config:
    """The `config` of a kernel without parameters."""
    return {}


def no_workspace(problem: Problem, config: Config) -> Workspace:
    """The `workspace` of a kernel that needs none."""
    return Workspace()


def no_sources(problem: Problem) -> tuple[str, ...]:
    """The `sources` of a kernel whose native code is in every build."""
    return ()


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """One implementation of one operation.

    target: ``"module:attr"`` of the launcher ``launch(config, call)``; imported at first use. call: `Op.Call`. It
        launches on the caller's current stream, allocates nothing that outlives the call, and does not synchronise.
    requires: requirements on the device and the installation.
    accepts: ``accepts(problem)`` -> None, or the reason why not. Called with any value of the dynamic axes.
    supports: the opt-in axes of the operation (`Axis.opt_in`) whose every value it supports, as far as it accepts the problem.
    reads: the derived arguments of the operation (`arguments.Tensor.derived`) that it reads where a call gives them.
    config: the default configuration, a pure function; it includes what the launcher needs of the static part of the problem
        (scheme, code level). space: the configurations that tuning tries.
    misfit: ``misfit(problem, config)`` -> None, or why the launcher refuses `config` for `problem`, which it accepts with another
        configuration: what the launcher checks of sizes and configuration together. A configuration is verified on a smaller
        problem than it was chosen for, and a tuned one may serve other sizes of the dynamic axes; both ask this first.
    estimate: microseconds of the best configuration by a cost model. estimate_config: of one configuration, by the same model; with it, a
        problem that was not measured takes of the near ones' configurations the one that is best for its own sizes.
    sources: ``sources(problem)`` -> the native sources that a launch runs, by file name without suffix, as far as they are
        marked rare: a build may leave them out (cmake/cuda.cmake).
    layouts: names of the weight layouts it reads, for operations with packed weights.
    examples: test problems besides those of the operation, for a kernel that accepts few of them.
    aot: ``"module:attr"`` of ``aot(target) -> list[AotCase]`` or ``list[CuteDslCase]``, for the compile matrix.
    capturable: False = it reads device memory on the host, so it cannot be captured in a CUDA graph.
    dequantizes: each call writes a quantized weight to memory in floats, in whole or in parts, before it multiplies. With few rows of
        x that takes several times as long as a product that decodes codes as it reads them; a model says so when it is loaded.
    priority: rank before anything was measured; higher first. auto: False = runs only when a policy pins it.
    proven: devices on which this kernel has matched the reference ("sm_90: H200"); "" = none yet. It gives no grade of proof, because it does not
        say with which code.
    """

    op: str
    name: str
    provider: str
    language: str
    target: str
    requires: Requirement
    summary: str = ""
    accepts: Callable[[Problem], str | None] = accept_all
    supports: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()
    config: Callable[[Problem, Target], Config] = no_config
    space: Callable[[Problem, Target], Iterable[Config]] | None = None
    misfit: Callable[[Problem, Config], str | None] = fits_every_problem
    workspace: Callable[[Problem, Config], Workspace] = no_workspace
    estimate: Callable[[Problem, Target], float | None] | None = None
    estimate_config: Callable[[Problem, Config, Target], float | None] | None = None
    sources: Callable[[Problem], tuple[str, ...]] = no_sources
    layouts: tuple[str, ...] = ()
    examples: tuple[str, ...] = ()
    aot: str | None = None
    priority: int = 0
    deterministic: bool = True
    batch_invariant: bool = False
    auto: bool = True
    capturable: bool = True
    dequantizes: bool = False
    waits: bool = False
    triggers: bool = False
    proven: str = ""
    module: str = field(default="", compare=False)

    def why_not(self, problem: Problem, target: Target, build: Build) -> tuple[str, ...]:
        """Why it cannot run a problem on a device with an installation, in the order of the checks; () = it can."""
        if reasons := self.requires.check_hardware(target, build) or self.requires.check_build(target, build):
            return reasons
        try:
            reason = self.accepts(problem) or build.why_not_sources(self.sources(problem))
            if reason is None and not problem.open_axes:  # a configuration is that of one size
                self.config(problem, target)
        except PluginKernelError as error:
            reason = str(error)
        return () if reason is None else (reason,)

    def takes(self, problem: Problem, config: Config) -> bool:
        """Whether the launcher runs `problem` with a configuration, which may have been chosen for another problem."""
        return self.accepts(problem) is None and self.misfit(problem, config) is None

    def load(self) -> Callable[..., None]:
        """The launcher. Does not catch ImportError and AttributeError: selection checks before it loads.

        TypeError for a function that is not ``launch(config, call)``.
        """
        launcher: Callable[..., None] = load_attribute(self.target)
        try:
            inspect.signature(launcher).bind({}, None)
        except TypeError as error:
            raise TypeError(
                f"{self.target}, the launcher of {self.name}, must be launch(config, call), where call has the arguments and "
                f"outputs of {self.op} as attributes: {error}"
            ) from None
        return launcher

    def code_hash(self, config: Config | None = None, *, built: bool = False) -> str:
        """A short hash of everything that a launch runs, as the sources are now (`closure`). Measured times are keyed by it.

        config: narrows it to the native entries of one configuration. built: hash the native sources that
        the loaded libraries were built from, as for a time measured now.
        """
        return installed_sources().code_hash(self._modules, config or {}, built)

    def verification_hash(self, config: Config | None = None) -> str:
        """A short hash of everything that a launch runs, as it was compiled: with the flags and the compiler of the loaded
        libraries, at the code level of `config`; with the installed versions of `COMPILERS`. Verifications are keyed by it."""
        code = installed_sources().verification_hash(self._modules, config or {})
        compilers = COMPILERS.get(self.language, ())
        if not compilers:
            return code
        versions = (f"{name} {Build.probe().version(name)}" for name in compilers)
        return hashlib.sha256(", ".join((code, *versions)).encode()).hexdigest()[: len(code)]

    @property
    def _modules(self) -> tuple[str, str]:
        return self.module, self.target.partition(":")[0]


def load_attribute(path: str) -> Any:
    """The object that ``"package.module:attr"`` names."""
    module, _, attribute = path.partition(":")
    return getattr(importlib.import_module(module), attribute)
