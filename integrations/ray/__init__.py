"""gristmill inside Ray (Moritz et al., 2018, arXiv:1712.05889): batch inference in Ray Data, a deployment for Ray Serve.

    dataset.map_batches(Generate, fn_constructor_kwargs={"model": MODEL}, concurrency=1, batch_size=64, **resources({}))
    serve run gristmill.integrations.ray:build model=MODEL

Ray is imported with the first name that needs it, after its version was checked. docs/embedding/ray.md has commands and output.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gristmill.integrations.host import host_names

if TYPE_CHECKING:
    from gristmill.integrations.ray.batch import Generate as Generate
    from gristmill.integrations.ray.resources import resources as resources
    from gristmill.integrations.ray.serve import Server as Server
    from gristmill.integrations.ray.serve import build as build
    from gristmill.integrations.ray.version import HOST as HOST
else:
    __getattr__, __dir__, __all__ = host_names(__name__, __file__)
