"""Importing this module reads the records of both domains: once for all worlds that are forked from there."""

from branchpoint.env.tau.domains import SPLITS, load, problems

for _domain, _splits in SPLITS.items():
    load(_domain)
    for _split in _splits:
        problems(_domain, _split)
