"""A worker of Dynamo's: ``python -m gristmill.integrations.dynamo --model MODEL``."""

from __future__ import annotations

from gristmill.integrations.dynamo import GristmillEngine

if __name__ == "__main__":
    from dynamo.common.backend.run import run

    run(GristmillEngine)
