"""A package, so that `from conftest import …` in the unit tests finds their conftest and not this folder's."""
