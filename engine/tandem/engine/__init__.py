"""Inference engine: *plan* (config, request, scheduler, cache, core; no torch) and *run*."""
