"""Labelled examples that every machine has or can generate: `find` writes those of an entry of GENERATED to the cache."""

from hpnlp.data.examples.generated.table import GENERATED, check_published, find, has_heldout, is_generated

__all__ = ["GENERATED", "check_published", "find", "has_heldout", "is_generated"]
