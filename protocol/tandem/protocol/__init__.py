"""Messages between router and worker: requests, outputs, commands, errors, hashes, layouts."""
