"""What crosses router and worker: requests, outputs, commands, errors, hashes, layouts.

Imports nothing of Tandem and no torch, so that every image can hold it. Import from the modules.
"""
