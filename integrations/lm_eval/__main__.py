"""The harness's command line with the model ``gristmill``: the harness has no entry points for models."""

from __future__ import annotations

from gristmill.integrations.lm_eval import register

if __name__ == "__main__":
    register()

    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
