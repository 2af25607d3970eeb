"""Programs that measure one page of the documents or one operation: run from a checkout as ``python -m lab.NAME``.

They are not part of the package: gristmill imports nothing of them, and wheels leave them out. Tests run each in its smallest form.
"""
