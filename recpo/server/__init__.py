"""The HTTP server of bundles: recommendations, feedback, and a log of both that ``recpo prepare`` reads."""
