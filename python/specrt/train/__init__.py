"""Fitting a drafter to a target and to data: `specrt train`. Needs the extra `train` (torch).

Importing this package needs no torch; its modules do.
"""
