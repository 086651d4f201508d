"""Messages between router and worker: requests, outputs, commands, errors, hashes, layouts.

Imports nothing of Tandem and no torch, so every image can contain it. Import from the modules.
"""
