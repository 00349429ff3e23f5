"""Trajectories for human eyes: ``report`` makes one HTML file of a run."""

from __future__ import annotations
