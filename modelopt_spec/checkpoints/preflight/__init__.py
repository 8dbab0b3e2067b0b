"""Preflight: does what will be served equal what was trained? One line for each fact that decides it."""

from modelopt_spec.checkpoints.preflight.check import check
from modelopt_spec.checkpoints.preflight.facts import FACTS
from modelopt_spec.checkpoints.preflight.report import Fact, Report

__all__ = ["FACTS", "Fact", "Report", "check"]
