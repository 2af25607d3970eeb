"""Programs that measure one page of the documentation or one operation. Run them from a checkout: ``python -m lab.NAME``.

They are not part of the package: gristmill does not import them, and wheels do not contain them. Tests run each in its smallest form.
"""
