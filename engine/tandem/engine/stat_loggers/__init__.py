"""Who is told what an engine does, once a step: any number of loggers, given at its start."""
