"""The tests of rankwise; `conftest.py` sees to it that each leaves nothing behind."""
