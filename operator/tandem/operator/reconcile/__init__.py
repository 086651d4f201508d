"""One look at one service: ``reconciler`` goes through it; the others judge, write, ask, report."""
