"""Operations, kernels, targets and selection: what exists, what it needs, and which kernel runs.

Standard library only: importing it touches neither torch nor a device. Names are imported on first access.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gristmill._lazy import lazy_names

if TYPE_CHECKING:
    from gristmill.kernel_registry.arguments import CONTIGUOUS as CONTIGUOUS
    from gristmill.kernel_registry.arguments import MATRIX as MATRIX
    from gristmill.kernel_registry.arguments import ROWS as ROWS
    from gristmill.kernel_registry.arguments import VECTORS as VECTORS
    from gristmill.kernel_registry.arguments import Scalar as Scalar
    from gristmill.kernel_registry.arguments import Tensor as Tensor
    from gristmill.kernel_registry.arguments import Weight as Weight
    from gristmill.kernel_registry.arguments import WorkspaceArgument as WorkspaceArgument
    from gristmill.kernel_registry.build import Build as Build
    from gristmill.kernel_registry.dtypes import DTYPES as DTYPES
    from gristmill.kernel_registry.dtypes import canonical_dtype as canonical_dtype
    from gristmill.kernel_registry.grades import proofs as proofs
    from gristmill.kernel_registry.kernel import Config as Config
    from gristmill.kernel_registry.kernel import Kernel as Kernel
    from gristmill.kernel_registry.kernel import Workspace as Workspace
    from gristmill.kernel_registry.layout import Layout as Layout
    from gristmill.kernel_registry.op import Cost as Cost
    from gristmill.kernel_registry.op import Op as Op
    from gristmill.kernel_registry.op import Tolerance as Tolerance
    from gristmill.kernel_registry.plan import BUCKETS as BUCKETS
    from gristmill.kernel_registry.plan import Plan as Plan
    from gristmill.kernel_registry.plan import PlanEntry as PlanEntry
    from gristmill.kernel_registry.policy import Policy as Policy
    from gristmill.kernel_registry.policy import PolicyError as PolicyError
    from gristmill.kernel_registry.problem import Axis as Axis
    from gristmill.kernel_registry.problem import AxisError as AxisError
    from gristmill.kernel_registry.problem import Problem as Problem
    from gristmill.kernel_registry.registry import Registry as Registry
    from gristmill.kernel_registry.registry import UnknownError as UnknownError
    from gristmill.kernel_registry.registry import default_registry as default_registry
    from gristmill.kernel_registry.requirement import Requirement as Requirement
    from gristmill.kernel_registry.scheme import ALL_WEIGHT_SCHEMES as ALL_WEIGHT_SCHEMES
    from gristmill.kernel_registry.scheme import QuantScheme as QuantScheme
    from gristmill.kernel_registry.select import Candidate as Candidate
    from gristmill.kernel_registry.select import NoKernelError as NoKernelError
    from gristmill.kernel_registry.select import Selection as Selection
    from gristmill.kernel_registry.store import Store as Store
    from gristmill.kernel_registry.store import StoreError as StoreError
    from gristmill.kernel_registry.target import Target as Target
    from gristmill.kernel_registry.targets import ArchFacts as ArchFacts
    from gristmill.kernel_registry.targets.plugged import Vendor as Vendor
else:
    __getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
