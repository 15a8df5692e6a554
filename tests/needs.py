"""Marks of tests that need what a machine may lack."""

from __future__ import annotations

import importlib.util

import pytest

VLLM = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vLLM is not installed (make setup)"
)
