"""The suite beside this file runs in environments of its clients' own (`make clients`)."""

collect_ignore = ["suite"]
