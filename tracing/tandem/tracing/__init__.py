"""Records of a request's times, and their OpenTelemetry spans."""
