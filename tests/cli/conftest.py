"""Scripted workers behind a real app, as the router's tests have them."""

from tests.router.conftest import decode, make_worker, prefill, serve, small_model

__all__ = ["decode", "make_worker", "prefill", "serve", "small_model"]
